"""Which GPUs a process sees, and in which order: CUDA's rules, without a GPU."""

from __future__ import annotations

import pytest

from trt_engine.device.info import visible_indices

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
