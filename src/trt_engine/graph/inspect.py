"""Everything `inspect` says of an ONNX model, in one record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from onnx import ModelProto, NodeProto

from trt_engine.config import profile_for
from trt_engine.engine import Precision
from trt_engine.errors import ShapeError
from trt_engine.graph import walk
from trt_engine.graph.census import census, is_dequantize, is_quantize, layers_of, parameters
from trt_engine.graph.findings import findings, islands, ordered
from trt_engine.graph.flops import count
from trt_engine.graph.load import legible, open_model, read_proto
from trt_engine.graph.module_paths import ModulePaths, with_modules
from trt_engine.graph.quant_placement import PlacedGraph
from trt_engine.model import Model
from trt_engine.records import ModelReport
from trt_engine.tensors import Shape, Signature

__all__ = ["inspect_model"]


def inspect_model(
    source: Model | Path | str, shapes: Mapping[str, Shape] | None = None, *, proto: ModelProto | None = None
) -> ModelReport:
    """The report of the model at a path, or of one that is open (and `proto`, its graph, read), counted at `shapes`.

    Without shapes it is counted at batch 1 and the sizes the model states; when other sizes are open, `macs` and `flops`
    are None. `UsageError` for shapes that do not fit the model, `ModelError` for a file that is no whole model.
    """
    model = source if isinstance(source, Model) else open_model(source)
    path = model.path
    proto = proto if proto is not None else read_proto(path)
    with legible(path):
        sizes = _sizes(model.signature, dict(shapes or {}))
        cost = count(proto, sizes or {})
        places = [place.node for place in walk.nodes(proto)]
        held = parameters(proto)
        q_nodes = sum(map(is_quantize, places))
        dq_nodes = sum(map(is_dequantize, places))
        shares = census(proto, cost)
        found = findings(model, proto, cost.trace, sizes or {})
        if any(kind in shares for kind in ("fp16", "bf16")):
            found = (*found, *islands(layers_of(proto, cost), shares))
        placed = PlacedGraph(proto, cost)
        return ModelReport(
            path=str(path),
            name=model.name,
            digest=model.digest,
            nbytes=model.nbytes,
            signature=model.signature,
            opsets=model.opsets,
            ir_version=model.ir_version,
            producer=" ".join(part for part in (proto.producer_name, proto.producer_version) if part),
            nodes=len(places),
            operators=dict(Counter(map(_operator, places)).most_common()),
            parameters=held.count,
            parameter_bytes=held.nbytes,
            flops=cost.flops if sizes is not None else None,
            macs=cost.macs if sizes is not None else None,
            flops_shapes=sizes or {},
            flops_exact=cost.exact and sizes is not None,
            placement=placed.report() if placed else None,
            uncounted=cost.uncounted if sizes is not None else {},
            precision=Precision(None, shares),
            quantized=dq_nodes > 0 or any(_is_quantized_operator(node.op_type) for node in places),
            q_nodes=q_nodes,
            dq_nodes=dq_nodes,
            dynamic={spec.name: spec.dynamic for spec in model.signature.inputs if spec.dynamic},
            external=tuple(item.location for item in model.external),
            domains=dict(Counter(walk.domain_of(node) or "ai.onnx" for node in places).most_common()),
            findings=with_modules(ordered(found), ModulePaths(proto), "where"),
            metadata={item.key: item.value for item in proto.metadata_props},
        )


def _sizes(signature: Signature, shapes: dict[str, Shape]) -> dict[str, Shape] | None:
    """The shape of every input: as given, else as stated with batch 1; None when open sizes were not given."""
    try:
        profile = profile_for(signature, shapes=shapes)
    except ShapeError:
        if shapes:
            raise
        return None
    return {name: span.opt for name, span in profile.ranges.items()}


def _operator(node: NodeProto) -> str:
    domain = walk.domain_of(node)
    return f"{domain}::{node.op_type}" if domain else node.op_type


def _is_quantized_operator(op: str) -> bool:
    return op.startswith(("QLinear", "QGemm", "QAttention", "MatMulNBits", "MatMulInteger", "ConvInteger"))
