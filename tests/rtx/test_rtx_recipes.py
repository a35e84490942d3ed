"""The networks of examples/recipes in every format this toolkit writes, built by TensorRT-RTX's own builder.

The recipes are made by PyTorch, in small; one plan holds every GPU that has the format, each other GPU is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from programs import load_program, needs
from rtx.networks import ROOT, build, check, count, has, refuse, written
from trt_engine.cli.main import run
from trt_engine.config.profiles import Profile, ShapeRange
from trt_engine.environment import distribution_version
from trt_engine.errors import ModelError
from trt_engine.graph.load import open_model
from trt_engine.trt.gpu_targets import RTX_TARGETS

Record = Callable[[str, object], None]
Made = Callable[[str], Path]

pytestmark = [
    *needs("torch", "onnxscript", "transformers"),
    pytest.mark.skipif(
        distribution_version("tensorrt-rtx") is None,
        reason="TensorRT-RTX is not installed: no recipe was built with it",
    ),
]
RECIPES = ROOT / "examples" / "recipes"
TARGETS = RTX_TARGETS[1:]
"""Without Turing, which has no FP32 matrix products."""
RNNT = ("encoder", "predictor", "joint")
FLOATS = ("fp32", "fp16", "bf16")
KINDS = {
    "yolo": ("fp16", "int8"), "rtdetr": ("fp32", "int8"), "detr": ("bf16", "fp8"), "vit": ("fp16", "nvfp4"),
    "bert": ("fp8", "int4+fp16"), "encoder": ("int8", "mxfp8"), "predictor": ("fp16", "int4"), "joint": ("fp32", "int8"),
}  # fmt: skip
"""Two formats of each network, and each format of some network; all of them on two networks: test_rtx_matrix.py."""
SIZES = {"batch": (1, 2, 4), "B": (1, 2, 4), "sequence": (1, 16, 64), "T": (64, 128, 256), "U": (1, 3, 8)}
"""Smallest, usual and largest size of each open dimension."""


def recipe(name: str) -> ModuleType:
    if str(RECIPES) not in sys.path:
        sys.path.insert(0, str(RECIPES))
    return load_program(RECIPES / f"{name}.py", f"recipe_{name}")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A recipe's network in small, converted once."""
    folder = tmp_path_factory.mktemp("recipes")

    def network(name: str) -> Path:
        path = folder / f"{name}.onnx"
        if not path.exists():
            script = RECIPES / f"{'rnnt' if name in RNNT else name}.py"
            module = recipe(script.stem)
            small = module.recipes(small=True)[name] if name in RNNT else module.SMALL
            words = sys.modules["steps"].conversion(str(script), small)
            assert run([*words, "-o", str(path), "--overwrite", "-q"]) == 0
        return path

    return network


def shapes(model: Path, which: int) -> dict[str, tuple[int, ...]]:
    """Every input's shape with its open dimensions at their smallest (0), usual (1) or largest (2) size."""
    return {
        spec.name: tuple(
            size if size > 0 else SIZES[str(symbol)][which]
            for size, symbol in zip(spec.shape, spec.symbols, strict=True)
        )
        for spec in open_model(model).signature.inputs
    }


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in KINDS.items() for kind in kinds])
def test_a_recipe_is_built_for_every_gpu_that_has_its_format(
    name: str, kind: str, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    plain = made(name)
    small, usual, large = (shapes(plain, which) for which in range(3))
    profile = {it: ShapeRange(small[it], usual[it], large[it]) for it in small}
    try:
        model = written(plain, kind, tmp_path / "m.onnx", **({} if kind in FLOATS else {"shapes": usual}))
    except ModelError as error:
        assert "nothing to quantise" in error.message or "no layer with weights" in error.message
        record_property("rtx no layer", kind)
        return
    having = [gpu for gpu in TARGETS if has(gpu, kind)]
    check(build(model, *having, profiles=[Profile(profile)], parity=False), kind, *having)
    lacking = [gpu for gpu in TARGETS if gpu not in having]
    refused = [refuse(monkeypatch, model, kind, gpu, profiles=[Profile(profile)], parity=False) for gpu in lacking]
    count(record_property, len(having), refused)
