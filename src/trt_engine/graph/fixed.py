"""A model at fixed shapes: every dynamic size written in, and what follows from it folded to constants.

Mask and position subgraphs that depend on sizes alone become constants this way, which is what a compiler that cannot take
them needs. One model for each set of shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import ModelProto

from trt_engine.errors import ShapeError
from trt_engine.files import write_whole
from trt_engine.graph import walk
from trt_engine.graph.load import open_model, read_proto
from trt_engine.graph.module_paths import carry
from trt_engine.model import Model
from trt_engine.tensors import Shape, format_shape

__all__ = ["fix_shapes"]

log = logging.getLogger(__name__)

_EXTERNAL_FROM = 1 << 30
"""Bytes of model from which weights lie in a side file: one protobuf ends at 2 GiB."""


def fix_shapes(model: Model, shapes: Mapping[str, Shape], target: Path) -> Model:
    """The model with its inputs at these shapes, at `target`; folded where ONNX Runtime can run its constant parts.

    `shapes` names every input with a dynamic size. Raises `ShapeError` for a shape the input cannot have.
    """
    proto = read_proto(model.path, weights=True)
    for value in proto.graph.input:
        if value.name in shapes:
            _write_shape(value, shapes[value.name])
    _forget_shapes(proto)
    plain = target.with_name(f"{target.stem}.fixed.onnx")
    _save(proto, plain, model.nbytes)
    if _folded(plain, target, model):
        folded = read_proto(target)
        if carry(folded, proto):
            write_whole(target, folded.SerializeToString())
    else:
        plain.replace(target)
        log.info("`%s` keeps its shape arithmetic: ONNX Runtime cannot fold it", model.path.name)
    return open_model(target)


def _write_shape(value: onnx.ValueInfoProto, sizes: Shape) -> None:
    dims = value.type.tensor_type.shape.dim
    if len(dims) != len(sizes) or any(
        dim.HasField("dim_value") and dim.dim_value != size for dim, size in zip(dims, sizes, strict=True)
    ):
        had = "x".join(str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?" for dim in dims)
        raise ShapeError(f"`{value.name}` is {had} and cannot be {format_shape(sizes)}", hint="give one size for each")
    for dim, size in zip(dims, sizes, strict=True):
        dim.dim_value = size


def _forget_shapes(proto: ModelProto) -> None:
    """What was inferred with symbols would stand against the sizes."""
    del proto.graph.value_info[:]
    for value in proto.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            dim.ClearField("dim_param")


def _save(proto: ModelProto, path: Path, nbytes: int) -> None:
    if nbytes < _EXTERNAL_FROM:
        write_whole(path, proto.SerializeToString())
        return
    onnx.save_model(proto, str(path), save_as_external_data=True, location=f"{path.stem}.weights")


def _folded(plain: Path, target: Path, model: Model) -> bool:
    """Whether ONNX Runtime's basic rewriting (standard operators alone) wrote the folded graph to `target`."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(target)
    options.add_session_config_entry("session.disable_quant_qdq", "1")  # Q/DQ pairs are the next builder's
    if model.nbytes >= _EXTERNAL_FROM:
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", f"{target.stem}.weights"
        )
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    try:
        ort.InferenceSession(str(plain), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its own exceptions, for plugins, types without kernels, opsets
        log.debug("not folded: %s", error)
        target.unlink(missing_ok=True)
        return False
    known = {walk.domain_of(place.node) for place in walk.nodes(read_proto(plain))} | {"", "ai.onnx"}
    if {walk.domain_of(place.node) for place in walk.nodes(read_proto(target))} - known:
        target.unlink(missing_ok=True)  # it put an operator of its own in
        return False
    plain.unlink()
    return True
