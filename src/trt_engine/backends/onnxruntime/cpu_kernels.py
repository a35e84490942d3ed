"""Dtypes of ONNX Runtime's CPU kernels, by optimising a model or by trying single operators."""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from trt_engine import atomic_io
from trt_engine.backend import gpu_hint
from trt_engine.backends.onnxruntime import session
from trt_engine.backends.onnxruntime.options import OnnxRuntimeOptions
from trt_engine.backends.onnxruntime.providers import ProviderSelection, build_providers
from trt_engine.config.build import BuildConfig
from trt_engine.errors import PrecisionError, SetupError
from trt_engine.graph.dtype_breakdown import compute_layers
from trt_engine.graph.load import read_proto
from trt_engine.model import Model

_CPU = ProviderSelection(("cpu",), ({},), "cpu", strict=False)
_ELEM = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
_NO_KERNELS = ("fp8", "mxfp8", "nvfp4")
"""Dtypes without Q/DQ kernels in CPU and CUDA providers (ONNX Runtime 1.31.1)."""
_MATRIX_RANKS = {"Conv": (4, 4), "ConvTranspose": (4, 4), "Gemm": (2, 2), "MatMul": (2, 2)}
"""Operators to try, with the ranks of their inputs: nearly all MACs of a network."""
_MIN_MAC_FRACTION = 0.95
"""Minimum fraction of MACs, as in the precision check."""


def kernel_dtypes(path: Path) -> dict[str, int]:
    """Layer count by kernel dtype in ONNX Runtime's optimised CPU graph."""
    with atomic_io.staging_folder(path) as folder:
        saved = folder / "kernels.onnx"
        made = session.session_options(OnnxRuntimeOptions(), level="none", save=saved, weights="kernels.weights")
        try:
            session.create_session(path, made, _CPU)
        except session.ERRORS as error:
            raise session.translate_load_error(error, path) from error
        built = onnx.load(saved, load_external_data=False)
    return dict(Counter(layer.dtype for layer in compute_layers(built, literal=True)).most_common())


def unsupported_precision(model: Model, config: BuildConfig) -> PrecisionError | None:
    """The error if the device has no kernels for `config.precision`, by trying single operators; None if it may have."""
    asked = config.precision
    if asked is None or asked == "fp32":
        return None
    try:
        choice = build_providers(config)
    except SetupError:  # reported elsewhere
        return None
    if choice.compiles:
        return None
    hint = f"{gpu_hint(asked)}, or leave `--precision` out: the graph is built as it is"
    if asked in _NO_KERNELS:
        where = " and ".join({"cpu": "CPU", "cuda": "CUDA"}.get(name, name) for name in choice.names)
        return PrecisionError(f"ONNX Runtime has no {asked} kernels for {where}", hint=hint)
    if choice.on_gpu:
        return None
    if asked == "tf32":
        reason = "tf32 needs an NVIDIA GPU, and the device is `cpu`"
        return PrecisionError(reason, hint=hint)
    if asked not in _ELEM:
        return None  # INT8 fusions are known only after the build
    weights: Counter[str] = Counter()
    for layer in compute_layers(read_proto(model.path)):
        weights[layer.step.node.op_type] += layer.macs
    total = sum(weights.values())
    without = [op for op in _MATRIX_RANKS if weights[op] and not has_cpu_kernel(op, asked)]
    if total and sum(weights[op] for op in without) > (1 - _MIN_MAC_FRACTION) * total:
        names = ", ".join(f"`{op}`" for op in without)
        return PrecisionError(f"ONNX Runtime has no {asked} kernel on this processor for {names}", hint=hint)
    return None


@cache
def has_cpu_kernel(op: str, dtype: str) -> bool:
    """Whether ONNX Runtime has a CPU kernel for the operator in that dtype, by loading a single node."""
    first, second = ([1] * rank for rank in _MATRIX_RANKS[op])
    elem = _ELEM[dtype]
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
            session.create_session(path, made, _CPU)
        except session.ERRORS:
            return False
        built = onnx.load(path.with_name("made.onnx"))
    return [layer.dtype for layer in compute_layers(built, literal=True)] == [dtype]
