"""docs/devices.md, run as it stands: on the host and the fake device, and on a GPU where there is one;
which GPUs a process sees.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from trt_engine.device import MemoryStats, open_device
from trt_engine.device.info import visible_indices
from trt_engine.errors import SetupError

PAGE = Path(__file__).resolve().parents[2] / "docs/devices.md"


@pytest.mark.parametrize("name", ["cpu", "fake", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_the_examples_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "cuda:0":
        try:
            open_device(name).close()
        except SetupError as error:
            pytest.skip(f"no GPU here: {error.message}")
        pytest.importorskip("torch")
    blocks = re.findall(r"^```python( gpu)?\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert len(blocks) == 8 and sum(bool(gpu) for gpu, _ in blocks) == 1
    names: dict[str, Any] = {}
    for gpu, code in blocks:
        if not gpu or name == "cuda:0":
            exec(compile(code.replace('"cuda:0"', f'"{name}"'), str(PAGE), "exec"), names)
    said = capsys.readouterr().out
    assert re.search(r"cannot allocate 31457280 bytes: 25165776 of \d+ are free \(its limit is 67108864\)", said), said
    left = names["device"].memory()
    assert (left.allocated_bytes, left.pinned_bytes) == (0, 0)


def test_every_statistic_is_explained() -> None:
    text = PAGE.read_text()
    assert [item.name for item in fields(MemoryStats) if f"`{item.name}`" not in text] == []


GPUS = ("GPU-aa11", "GPU-ab22", "GPU-cc33")


@pytest.mark.parametrize(
    ("asked", "seen"),
    [
        (None, [0, 1, 2]),
        ("0,2", [0, 2]),
        ("2, 0", [2, 0]),
        ("", []),
        ("-1", []),
        ("1,-1,0", [1]),
        ("7,0", []),
        ("GPU-cc33,0", [2, 0]),
        ("GPU-c", [2]),
        ("GPU-a,0", []),
        ("1,1", []),
    ],
)
def test_cuda_visible_devices_hides_and_orders(asked: str | None, seen: list[int]) -> None:
    assert visible_indices(GPUS, asked) == seen
