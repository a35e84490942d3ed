"""Where compiled kernels of TensorRT-RTX are kept: never in place of another file."""

from __future__ import annotations

from pathlib import Path

import pytest

from trt_engine.backends.tensorrt_rtx.run import cache_path
from trt_engine.errors import UsageError


def chosen(engine: Path, text: str | None) -> Path | None:
    return cache_path(engine, text, version="1.7.1.116", gpu="NVIDIA L4")


def test_the_file_is_beside_the_engine_or_the_one_chosen(tmp_path: Path) -> None:
    engine = tmp_path / "net.engine"
    assert chosen(engine, None) == chosen(engine, "on") == tmp_path / "net.engine.1.7.1.116-nvidia-l4.runtime_cache"
    assert chosen(engine, "off") is None
    assert chosen(engine, str(tmp_path / "kernels")) == tmp_path / "kernels"


@pytest.mark.parametrize("name", ["net.engine", "net.engine.json", "model.onnx"])
def test_a_file_that_may_be_another_is_not_replaced(tmp_path: Path, name: str) -> None:
    other = tmp_path / name
    other.write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists and may be another file") as refused:
        chosen(tmp_path / "net.engine", str(other))
    assert other.read_bytes() == b"mine" and ".runtime_cache" in str(refused.value.hint)
    kept = tmp_path / "old.runtime_cache"
    kept.write_bytes(b"kernels")
    assert chosen(tmp_path / "net.engine", str(kept)) == kept
