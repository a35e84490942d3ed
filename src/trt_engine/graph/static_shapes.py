"""Sets every dynamic size of a model and folds what follows from it to constants.

Mask and position subgraphs that depend on sizes only become constants, for compilers that cannot handle them. One model
per set of shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import onnx

from trt_engine.atomic_io import write_atomic
from trt_engine.errors import ShapeError
from trt_engine.graph import walk
from trt_engine.graph.load import open_model, read_proto
from trt_engine.graph.module_paths import carry_module_paths
from trt_engine.model import Model
from trt_engine.tensors import Shape, format_shape

log = logging.getLogger(__name__)

_EXTERNAL_FROM = 1 << 30
"""Model size in bytes from which weights go to a side file: one protobuf ends at 2 GiB."""


def set_static_shapes(model: Model, shapes: Mapping[str, Shape], target: Path) -> Model:
    """The model with its inputs at these shapes, written to `target`; folded if ONNX Runtime can run its constant
    parts.

    `shapes` names every input with a dynamic size. Raises `ShapeError` for a shape the input cannot have.
    """
    proto = read_proto(model.path, weights=True)
    for value in proto.graph.input:
        if value.name not in shapes:
            continue
        dims, sizes = value.type.tensor_type.shape.dim, shapes[value.name]
        if len(dims) != len(sizes) or any(
            dim.HasField("dim_value") and dim.dim_value != size for dim, size in zip(dims, sizes, strict=True)
        ):
            had = "x".join(str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?" for dim in dims)
            raise ShapeError(
                f"`{value.name}` is {had} and cannot be {format_shape(sizes)}", hint="give one size for each"
            )
        for dim, size in zip(dims, sizes, strict=True):
            dim.dim_value = size
    del proto.graph.value_info[:]  # inferred symbolic shapes would contradict the new ones
    for value in proto.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            dim.ClearField("dim_param")
    plain = target.with_name(f"{target.stem}.fixed.onnx")
    if model.nbytes < _EXTERNAL_FROM:
        write_atomic(plain, proto.SerializeToString())
    else:
        onnx.save_model(proto, str(plain), save_as_external_data=True, location=f"{plain.stem}.weights")
    if _fold_with_onnxruntime(plain, target, model):
        folded = read_proto(target)
        if carry_module_paths(folded, proto):
            write_atomic(target, folded.SerializeToString())
    else:
        plain.replace(target)
        log.info("`%s` keeps its shape arithmetic: ONNX Runtime cannot fold it", model.path.name)
    return open_model(target)


def _fold_with_onnxruntime(plain: Path, target: Path, model: Model) -> bool:
    """Whether ONNX Runtime's basic optimisation (standard operators only) wrote the folded graph to `target`."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(target)
    options.add_session_config_entry("session.disable_quant_qdq", "1")  # keep Q/DQ pairs for the next builder
    if model.nbytes >= _EXTERNAL_FROM:
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", f"{target.stem}.weights"
        )
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    try:
        ort.InferenceSession(str(plain), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions for plugins, types without kernels, opsets
        log.debug("not folded: %s", error)
        target.unlink(missing_ok=True)
        return False
    made, known = ({walk.domain_of(node) for node in walk.all_nodes(read_proto(path))} for path in (target, plain))
    if made - known - {""}:
        target.unlink(missing_ok=True)  # it inserted a contrib operator
        return False
    plain.unlink()
    return True
