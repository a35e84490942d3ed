"""Networks in every format that this toolkit writes, built by TensorRT-RTX's real builder or refused before it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import trt_engine as te
from trt_engine.backends.tensorrt_rtx import build as building
from trt_engine.engine import Engine
from trt_engine.errors import TrtEngineError
from trt_engine.plan_header import plan_header

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "digits": ROOT / "examples" / "digits" / "model.onnx",
    "resnet": ROOT / "examples" / "classifiers" / "resnet.onnx",
    "vit": ROOT / "examples" / "classifiers" / "vit.onnx",
}
FORMATS = ("fp32", "fp16", "bf16", "int8", "fp8", "int4", "int4+fp16", "nvfp4", "mxfp8")
"""`fp32` is the network as it is; `int4+fp16` has weights of four bits, and the rest computes in FP16."""
NEEDED = {"fp8": (8, 9), "mxfp8": (8, 9), "nvfp4": (12, 0)}
"""The compute capability a format needs: what builds of each for each GPU gave (TensorRT-RTX 1.7.1)."""
QUICK: dict[str, Any] = {
    "calib_data": "random",
    "max_samples": 2,
    "calibrator": "minmax",
    "bias_correction": False,
    "parity": False,
}


def has(gpu: str, kind: str) -> bool:
    """Whether a GPU (`8.9`) has a format."""
    major, minor = map(int, gpu.split("."))
    return (major, minor) >= NEEDED.get(kind, (0, 0))


def written(model: Path, kind: str, out: Path, **given: Any) -> Path:
    """The network in a format, quantised with a little random data: what is shown is that it builds."""
    if kind == "fp32":
        return model
    if kind in ("fp16", "bf16"):
        te.cast(model, kind, out=out, parity=False)
        return out
    to, _, rest = kind.partition("+")
    te.quantize(model, to, out=out, **QUICK, **({"high_precision": rest} if rest else {}), **given)
    return out


def build(model: Path, *gpus: str, **settings: Any) -> Engine:
    return te.build(model, backend="tensorrt-rtx", gpus=gpus, **settings)


def check(engine: Engine, kind: str, *gpus: str) -> None:
    """The plan is one of TensorRT-RTX for these GPUs, its passport states them, and its layers compute in the format."""
    header, passport = plan_header(engine.path), engine.passport
    assert header is not None and header.product == "TensorRT-RTX"
    assert header.compute_capabilities == gpus == passport.requirements.compute_capabilities
    assert header.file_nbytes == engine.path.stat().st_size
    assert passport.requirements.library == "tensorrt-rtx" and passport.requirements.version == header.version
    found, to = passport.precision.shares, kind.partition("+")[0]
    if to == "mxfp8":  # unpacked by this builder, and not what it multiplies in
        assert any("unpacks MXFP8" in text for text in passport.build.warnings)
    else:
        assert found[to].layers > 0, found


def refuse(monkeypatch: pytest.MonkeyPatch, model: Path, kind: str, gpu: str, **settings: Any) -> str:
    """See a network refused for a GPU that lacks its format, before the builder starts; gives both in words."""

    def started(*_: object) -> None:
        raise AssertionError("the builder was started")

    with monkeypatch.context() as patch:
        patch.setattr(building, "run_in_thread", started)
        with pytest.raises(TrtEngineError) as caught:
            build(model, gpu, **settings)
    named = "fp8" if kind == "mxfp8" else kind  # what it is made of
    assert named in caught.value.message and gpu in caught.value.message and caught.value.hint
    return f"{kind} for {gpu}"


def count(record: Callable[[str, object], None], built: int, refused: Sequence[str]) -> None:
    """For the summary at the end of a run: plans that were built, and what was refused for which GPU."""
    record("rtx built", built)
    for one in refused:
        record("rtx refused", one)
