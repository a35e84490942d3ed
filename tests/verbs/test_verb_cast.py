"""What `cast` writes it has judged: on the shapes given, before it writes, and with a warning where it is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from onnx_models import FLOAT, save
from trt_engine.errors import MemoryExhausted, TrtEngineError
from trt_engine.verbs.cast import run as verb


def _scaled(path: Path, factor: float, shape: list[Any]) -> Path:
    """`x` times `factor` twice and back: infinite in FP16 for a large one."""
    nodes = [helper.make_node(op, [name, "k"], [made]) for op, name, made in
             (("Mul", "x", "a"), ("Mul", "a", "k2"), ("Div", "k2", "c"), ("Div", "c", "y"))]  # fmt: skip
    nodes[1].output[0], nodes[2].input[0] = "b", "b"
    return save(path, nodes, {"x": (FLOAT, shape)}, {"y": (FLOAT, shape)}, {"k": np.float32(factor)}, opset=17)


@pytest.mark.parametrize(
    "to, tried, cure", [("fp16", False, "--auto-exclude"), ("fp16", True, "bf16"), ("bf16", False, "build")]
)
def test_no_build_of_a_lost_result_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, tried: bool, cure: str
) -> None:
    monkeypatch.setattr(verb, "_lost_outputs", lambda parity: ["`y` no longer matches the model"])
    net = _scaled(tmp_path / "m.onnx", 1, ["b", 8])
    lost = verb.cast(
        net,
        to,
        out=tmp_path / "o.onnx",
        auto_exclude=tried,
        **({"calib_data": [{"x": np.ones((2, 8), np.float32)}]} if tried else {}),
    )
    typed = str(lost.next_command).split()
    assert cure in typed and str(net) in typed and typed[1] == ("build" if cure == "build" else "cast")


def test_a_destroyed_model_is_a_warning_and_the_next_command_is_the_cure(tmp_path: Path) -> None:
    lost = verb.cast(_scaled(tmp_path / "m.onnx", 3000, ["b", 8]), "fp16", out=tmp_path / "o.onnx")
    assert any("`y`" in warning and "--auto-exclude" in warning for warning in lost.warnings)
    assert lost.next_command is not None and "--auto-exclude" in lost.next_command
    good = verb.cast(_scaled(tmp_path / "m.onnx", 2, ["b", 8]), "fp16", out=tmp_path / "o.onnx", overwrite=True)
    assert good.next_command is None and not good.warnings


def test_parity_runs_at_the_shapes_given(tmp_path: Path) -> None:
    model = _scaled(tmp_path / "m.onnx", 2, ["b", 8, "w"])
    report = verb.cast(model, "fp16", out=tmp_path / "o.onnx", shapes={"x": (1, 8, 4)})
    assert report.parity is not None and set(report.parity.outputs) == {"y"}


@pytest.mark.parametrize("data", ["wrong shape", "wrong type", "none", "second file"])
def test_nothing_is_written_where_the_data_is_wrong(data: str, tmp_path: Path) -> None:
    model, folder = _scaled(tmp_path / "m.onnx", 2, ["b", 8]), tmp_path / "data"
    folder.mkdir()
    if data == "second file":
        np.save(folder / "a.npy", np.ones((1, 8), np.float32))
    if data != "none":
        np.save(
            folder / "b.npy", np.ones((1, 8), np.complex64) if data == "wrong type" else np.ones((1, 9), np.float32)
        )
    with pytest.raises(TrtEngineError):
        verb.cast(model, "fp16", out=tmp_path / "o.onnx", calib_data=folder)
    assert not list(tmp_path.glob("o.onnx*"))


def test_nothing_is_written_where_the_judgement_runs_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: Any) -> Any:
        raise MemoryExhausted("out of memory")

    monkeypatch.setattr(verb, "measure_cast_parity", exhausted)
    with pytest.raises(MemoryExhausted):
        verb.cast(_scaled(tmp_path / "m.onnx", 2, ["b", 8]), "fp16", out=tmp_path / "o.onnx")
    assert not list(tmp_path.glob("o.onnx*"))
