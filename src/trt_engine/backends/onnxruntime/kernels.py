"""What ONNX Runtime's CPU kernels compute in: of a model, by the graph ONNX Runtime makes of it; of operators, by trying."""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from trt_engine import files
from trt_engine.backends.onnxruntime import session
from trt_engine.backends.onnxruntime.options import OnnxRuntimeOptions
from trt_engine.backends.onnxruntime.providers import Choice, choose
from trt_engine.config import BuildConfig
from trt_engine.errors import PrecisionError, SetupError
from trt_engine.graph.census import layers_of
from trt_engine.graph.load import read_proto
from trt_engine.model import Model

__all__ = ["kernels_of", "lacking", "runs_in"]

_CPU = Choice(("cpu",), ({},), "cpu", strict=False)
_ELEM = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
_NOWHERE = ("fp8", "mxfp8", "nvfp4")
"""Types that neither the CPU provider nor the CUDA provider computes Q/DQ pairs in (ONNX Runtime 1.31.1)."""
_MATRIX = {"Conv": (4, 4), "ConvTranspose": (4, 4), "Gemm": (2, 2), "MatMul": (2, 2)}
"""Operators that are tried, with the ranks of what they read: they are nearly all of a network's multiply-adds."""
_LEAST = 0.95
"""Of the multiply-adds, as the precision contract has it."""


def kernels_of(path: Path) -> dict[str, int]:
    """Layers by the type ONNX Runtime's CPU kernels run them in, from the graph it makes of the model."""
    with files.staging_folder(path) as folder:
        saved = folder / "kernels.onnx"
        made = session.session_options(OnnxRuntimeOptions(), level="none", save=saved, weights="kernels.weights")
        try:
            session.create(path, made, _CPU)
        except session.ERRORS as error:
            raise session.on_load(error, path) from error
        built = onnx.load(saved, load_external_data=False)
    return dict(Counter(layer.kind for layer in layers_of(built, literal=True)).most_common())


def lacking(model: Model, config: BuildConfig) -> PrecisionError | None:
    """The error an engine of this model would end with because its device has no kernels for `config.precision`; None
    where it may have them. Nothing is built: operators of the model are tried alone."""
    asked = config.precision
    if asked is None or asked == "fp32":
        return None
    try:
        choice = choose(
            config.providers,
            config.device,
            allow_fallback=config.allow_fallback,
            options=config.options,
            precision=asked,
        )
    except SetupError:  # a provider that is not here is said as that
        return None
    if choice.compiles:
        return None
    hint = f"build for a device that has {asked} kernels, or leave `--precision` out: the graph is built as it is"
    if asked in _NOWHERE:
        where = " and ".join({"cpu": "CPU", "cuda": "CUDA"}.get(name, name) for name in choice.names)
        return PrecisionError(f"ONNX Runtime has no {asked} kernels for {where}", hint=hint)
    if choice.on_gpu:
        return None
    if asked == "tf32":
        said = "tf32 is a way of NVIDIA's GPUs to compute, and the device is `cpu`"
        return PrecisionError(said, hint="`--device cuda:0`, or leave `--precision` out")
    if asked not in _ELEM:
        return None  # which layers INT8 kernels take in shows when the graph is built
    weights: Counter[str] = Counter()
    for layer in layers_of(read_proto(model.path)):
        weights[layer.step.node.op_type] += layer.macs
    total = sum(weights.values())
    without = [op for op in _MATRIX if weights[op] and not runs_in(op, asked)]
    if total and sum(weights[op] for op in without) > (1 - _LEAST) * total:
        names = ", ".join(f"`{op}`" for op in without)
        return PrecisionError(f"ONNX Runtime has no {asked} kernel on this processor for {names}", hint=hint)
    return None


@cache
def runs_in(op: str, kind: str) -> bool:
    """Whether ONNX Runtime has a CPU kernel for that operator on that type, here: a node of it alone is tried."""
    first, second = ([1] * rank for rank in _MATRIX[op])
    elem = _ELEM[kind]
    graph = helper.make_graph(
        [helper.make_node(op, ["a", "b"], ["y"])],
        "one",
        [helper.make_tensor_value_info(name, elem, dims) for name, dims in (("a", first), ("b", second))],
        [helper.make_tensor_value_info("y", elem, None)],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one.onnx"
        path.write_bytes(proto.SerializeToString())
        made = session.session_options(OnnxRuntimeOptions(), level="none", save=path.with_name("made.onnx"))
        try:
            session.create(path, made, _CPU)
        except session.ERRORS:
            return False
        built = onnx.load(path.with_name("made.onnx"))
    return [layer.kind for layer in layers_of(built, literal=True)] == [kind]
