"""Example networks in every format this toolkit writes, built by TensorRT-RTX's own builder for the GPUs that have it.

Each combination that a GPU's types allow is built, each other one is refused before the builder starts. The numbers stand
at the end of the output (tests/conftest.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import trt_engine as te
from rtx.networks import EXAMPLES, FORMATS, build, check, count, has, refuse, written
from trt_engine.environment import distribution_version
from trt_engine.errors import ModelError, PrecisionError
from trt_engine.trt.gpu_targets import RTX_TARGETS

pytestmark = pytest.mark.skipif(
    distribution_version("tensorrt-rtx") is None, reason="TensorRT-RTX is not installed: no network was built with it"
)
Record = Callable[[str, object], None]
OPEN = (1, 2, 4)
BLOCKS_ONLY = ("int4", "int4+fp16", "nvfp4", "mxfp8")
"""Formats of matrix products alone; the detector has none."""
CASES = [("digits", "fp16"), ("digits", "int8"), ("resnet", "fp32"), ("resnet", "bf16"), ("resnet", "int8"),
         ("resnet", "fp8"), *(("vit", kind) for kind in FORMATS)]  # fmt: skip
"""The transformer in every format, the networks of convolutions in those that differ there."""
QUICK = [pytest.param(*case, marks=() if case == ("vit", "fp8") else pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize(("name", "kind"), QUICK)
def test_a_network_is_built_for_the_gpus_that_have_its_format(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    """One plan for Ada and Blackwell, or for the one that has the format."""
    model = written(EXAMPLES[name], kind, tmp_path / "m.onnx")
    gpus = [gpu for gpu in ("8.9", "12.0") if has(gpu, kind)]
    check(build(model, *gpus, batch=OPEN), kind, *gpus)
    refused = [refuse(monkeypatch, model, kind, gpu, batch=OPEN) for gpu in ("8.9", "12.0") if gpu not in gpus]
    count(record_property, len(gpus), refused)


@pytest.mark.parametrize("kind", BLOCKS_ONLY)
def test_a_format_that_no_layer_of_a_network_can_have_is_refused_by_quantize(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has nothing to quantise"):
        written(EXAMPLES["digits"], kind, tmp_path / "m.onnx")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if case[0] == "vit" or case == ("resnet", "int8")])
def test_a_plan_for_each_gpu_alone_by_the_builds_own_precision(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    """`--precision` writes the format into the graph itself, and the builder's layers are counted by type."""
    asked = {"precision": kind} if kind not in ("fp32", "int4+fp16", "mxfp8") else {}
    model = EXAMPLES[name] if asked else written(EXAMPLES[name], kind, tmp_path / "m.onnx")
    if kind not in ("fp32", "fp16", "bf16") and asked:
        asked["calib_data"] = "random"
    built, refused = 0, []
    for gpu in RTX_TARGETS[1:]:
        if not has(gpu, kind):
            refused.append(refuse(monkeypatch, model, kind, gpu, batch=OPEN, **asked))
            continue
        check(build(model, gpu, batch=OPEN, **asked), kind, gpu)
        built += 1
    count(record_property, built, refused)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_an_mxfp8_that_this_builder_does_not_compute_in_is_no_promise(name: str) -> None:
    with pytest.raises(PrecisionError, match="mxfp8"):
        te.build(
            EXAMPLES[name], backend="tensorrt-rtx", gpus=("12.0",), batch=OPEN, precision="mxfp8", calib_data="random"
        )
