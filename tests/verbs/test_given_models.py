"""What may stand for a model in Python: each public function with each kind of object, accepted or refused in words."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_models as models
import trt_engine as te
from trt_engine.errors import EngineError, UsageError

BATCH = (1, 2, 4)
SHORT: dict[str, Any] = {"duration_s": 0.02, "iterations": 2, "warmup_s": 0}
FEEDS = {"images": np.zeros((2, 3, 8, 8), np.float32)}

# what each function does with a model `m` in memory, in the folder `out`
ACCEPT: dict[str, Callable[[Any, Path], object]] = {
    "inspect": lambda m, out: te.inspect(m),
    "lint": lambda m, out: te.lint(m),
    "build": lambda m, out: te.build(m, batch=BATCH),
    "bench": lambda m, out: te.bench(m, **SHORT),
    "convert": lambda m, out: te.convert(m, out=out / "m.onnx"),
    "cast": lambda m, out: te.cast(m, "fp16", out=out / "m.onnx"),
    "quantize": lambda m, out: te.quantize(m, "int8", calib_data=FEEDS, target="onnxruntime-cpu", out=out / "m.onnx"),
    "calibrate": lambda m, out: te.calibrate(m, FEEDS),
    "ranges": lambda m, out: te.ranges(m, FEEDS),
    "infer": lambda m, out: te.infer(m, FEEDS),
    "compare": lambda m, out: te.compare(m, m, iterations=2, duration_s=0.1),
}
REFUSE: dict[str, Callable[[Any, Path], object]] = {
    "load": lambda m, out: te.load(m),
    "serve": lambda m, out: te.serve(m),
    "deploy": lambda m, out: te.deploy("triton", m, out / "repository"),
    "validate": lambda m, out: te.validate(m),
    "diff": lambda m, out: te.diff(m, m),
    "loadtest": lambda m, out: te.loadtest(m),
    "batch": lambda m, out: te.batch(m, [], out / "parts"),
}
IN_MEMORY: dict[str, Callable[[Path], Any]] = {
    "proto": onnx.load,
    "bytes": Path.read_bytes,
    "buffer": lambda path: io.BytesIO(path.read_bytes()),
    "open file": lambda path: path.open("rb"),
    "path-like": lambda path: Named(path),
}
NO_MODEL: dict[str, Any] = {
    "None": None, "number": 3, "list of paths": [Path("a.onnx"), "b.onnx"], "array": np.zeros((2, 3)), "module": sys,
    "class": onnx.ModelProto, "text file": io.StringIO("x"), "mapping": {}, "function": print,
}  # fmt: skip


class Named:
    """Like `pathlib.Path`, of another library."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return models.conv_net(tmp_path / "net.onnx")


def pairs(seed: int) -> list[tuple[str, str]]:
    """Every function once, every kind at least twice, in an order of the seed; functions of the runs are slower."""
    kinds = [kind for _ in ACCEPT for kind in IN_MEMORY]
    random.Random(seed).shuffle(kinds)
    return [*zip(ACCEPT, kinds, strict=False), *(("inspect", kind) for kind in IN_MEMORY)]


@pytest.mark.parametrize(("function", "kind"), pairs(24))
def test_a_model_in_memory_is_taken_where_it_is_needed_for_the_call_alone(
    function: str, kind: str, model: Path, tmp_path: Path
) -> None:
    given = IN_MEMORY[kind](model)
    with given if kind == "open file" else contextlib.nullcontext():
        ACCEPT[function](given, tmp_path)


@pytest.mark.parametrize("function", ["convert", "cast", "quantize"])
def test_the_report_of_a_written_model_stands_for_it(function: str, model: Path, tmp_path: Path) -> None:
    report: Any = ACCEPT[function](model, tmp_path)
    assert te.inspect(report) == te.inspect(report.out)
    with pytest.raises(UsageError, match="wrote no model"):
        te.inspect(dataclasses.replace(report, out=None))


@pytest.mark.parametrize("function", ["load", "deploy", "validate"])
def test_a_model_in_place_of_an_engine_is_answered_with_a_build_of_its_open_sizes(
    function: str, tmp_path: Path
) -> None:
    sides = [{name: (onnx.TensorProto.FLOAT, ["n", 3, "h", "w"])} for name in "xy"]
    model = models.save(tmp_path / "net.onnx", [models.node("Relu", "x", "y")], *sides)
    with pytest.raises(EngineError, match="is a model, expected an engine") as refused:
        REFUSE[function](model, tmp_path)
    assert "--shapes x:1x3x640x640` makes one" in (refused.value.hint or "")


@pytest.mark.parametrize("kind", ["proto", "buffer"])
@pytest.mark.parametrize("function", REFUSE)
def test_a_model_in_memory_is_refused_where_its_path_is_kept(
    function: str, kind: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"is an object of .*, expected a"):
        REFUSE[function](IN_MEMORY[kind](model), tmp_path)


@pytest.mark.parametrize("kind", NO_MODEL)
@pytest.mark.parametrize("function", [*ACCEPT, *REFUSE])
def test_what_is_no_model_is_refused_with_what_it_is(function: str, kind: str, tmp_path: Path) -> None:
    if kind == "list of paths" and function in ("serve", "deploy"):
        pytest.skip("they take several")
    with pytest.raises(te.TrtEngineError) as refused:
        {**ACCEPT, **REFUSE}[function](NO_MODEL[kind], tmp_path)
    assert isinstance(refused.value, UsageError)
    assert len(refused.value.message) < 140 and refused.value.hint
    assert not [*tmp_path.iterdir()]


def test_the_graph_and_the_name_are_those_of_the_model_in_memory(model: Path) -> None:
    proto = onnx.load(model)
    built = te.build(proto, batch=BATCH)
    assert built.signature == te.build(model, batch=BATCH).signature
    assert built.passport.model.name == proto.graph.name and te.inspect(built) == te.inspect(built.path)


@pytest.mark.full
class TestTorch:
    """Modules and programs of PyTorch."""

    @pytest.fixture
    def torch(self) -> Any:
        return pytest.importorskip("torch")

    @pytest.fixture
    def net(self, torch: Any) -> Any:
        module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
        return module.train()

    @pytest.mark.parametrize(
        "given", ["array by name", "tensor", "tuple of tensors", "shape", "text", "list of arrays"]
    )
    def test_a_module_is_converted_with_its_examples(self, given: str, net: Any, torch: Any, tmp_path: Path) -> None:
        tensor = torch.zeros(2, 3, 8, 8)
        inputs = {
            "array by name": {"input": tensor.numpy()}, "tensor": tensor, "tuple of tensors": (tensor,),
            "shape": (2, 3, 8, 8), "text": "input:2x3x8x8", "list of arrays": [tensor.numpy()],
        }[given]  # fmt: skip
        report = te.convert(net, inputs=inputs, out=tmp_path / "net.onnx")
        assert report.source == "Sequential" and report.signature is not None
        assert report.signature.inputs[0].shape == (-1, 3, 8, 8)
        assert net.training, "the caller's module stays as it was"

    @pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning", "ignore:The .grad attribute:UserWarning")
    def test_programs_and_scripts_are_converted_and_built(self, net: Any, torch: Any, tmp_path: Path) -> None:
        tensor, net = torch.zeros(2, 3, 8, 8), net.eval()
        axes = {0: torch.export.Dim("batch", min=1, max=16)}
        program = torch.export.export(net, (tensor,), dynamic_shapes=(axes,))
        for index, source in enumerate((program, torch.jit.trace(net, tensor))):
            report = te.convert(source, inputs=None if index == 0 else (2, 3, 8, 8), out=tmp_path / f"{index}.onnx")
            assert report.signature is not None and report.signature.inputs[0].shape == (-1, 3, 8, 8)
        assert te.build(program, batch=BATCH).signature.inputs[0].shape == (-1, 3, 8, 8)
        assert te.build(net, inputs=tensor, batch=BATCH).signature.inputs[0].shape == (-1, 3, 8, 8)
        assert te.compare(net, net, inputs=tensor, **SHORT).comparisons and te.bench(net, inputs=tensor, **SHORT)
        assert te.ranges(net, {"input": tensor.numpy()}, inputs=tensor) and te.cast(net, "fp16", inputs=tensor)

    def test_a_module_without_examples_says_what_to_give(self, net: Any, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="no example inputs") as refused:
            te.build(net)
        assert "te.convert(module, inputs=" in (refused.value.hint or "")
        for function in REFUSE.values():
            with pytest.raises(UsageError, match=r"an object of `torch\.nn"):
                function(net, tmp_path)
