"""Builds the record of `inspect` for an ONNX model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from trt_engine.config.profiles import profile_for
from trt_engine.errors import ShapeError
from trt_engine.graph import dtype_breakdown, walk
from trt_engine.graph.cost import model_cost
from trt_engine.graph.fusion import FusedModel, fuse_model
from trt_engine.graph.lint import apply_rules
from trt_engine.graph.lint_rules.dtype_rules import fp32_islands
from trt_engine.graph.lint_rules.model_view import analyse, sort_findings
from trt_engine.graph.load import OpenedModel, open_graph, parse_errors
from trt_engine.graph.module_paths import ModulePaths, add_modules
from trt_engine.graph.quant_placement import QuantizedGraph
from trt_engine.model import Model
from trt_engine.records.inspect import ModelReport
from trt_engine.records.passport import Precision
from trt_engine.tensors import Shape, Signature


def inspect_model(source: OpenedModel | Model | Path | str, shapes: Mapping[str, Shape] | None = None) -> ModelReport:
    """Report of a model file or an opened model, counted at `shapes`.

    Without shapes it is counted at batch 1 and the declared sizes; `macs` and `flops` are None if other sizes are
    dynamic. `UsageError` for shapes that do not fit, `ModelError` for an incomplete model file.
    """
    opened = (
        source if isinstance(source, OpenedModel) else open_graph(source.path if isinstance(source, Model) else source)
    )
    model, proto, path = opened.model, opened.model.proto, opened.model.path
    with parse_errors(path):
        sizes = _input_shapes(model.signature, dict(shapes or {}))
        cost = model_cost(proto, traced=opened.trace_at(sizes or {}))
        places = [place.node for place in model.graph.nodes]
        held = dtype_breakdown.count_parameters(model.graph)
        q_nodes = sum(map(dtype_breakdown.is_quantize, places))
        dq_nodes = sum(map(dtype_breakdown.is_dequantize, places))
        layers = list(dtype_breakdown.compute_layers(proto, cost))
        shares = dtype_breakdown.shares_by_dtype(layers, held)
        view = analyse(model, opened.trace_at(sizes or {}), sizes or {})
        found = sort_findings((*apply_rules(view), *fp32_islands(layers, shares)))
        placed = QuantizedGraph(model.graph, cost)
        fits = model.nbytes <= _MAX_FUSED_BYTES
        fused = fuse_model(proto, path.parent, on_gpu=True) if fits else FusedModel(proto, {})
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
            operators=dict(Counter(map(walk.qualified_name, places)).most_common()),
            parameters=held.count,
            parameter_bytes=held.nbytes,
            flops=cost.flops if sizes is not None else None,
            macs=cost.macs if sizes is not None else None,
            flops_shapes=sizes or {},
            flops_exact=cost.exact and sizes is not None,
            placement=placed.report() if placed else None,
            fusions=dict(fused.counts),
            unfused=fused.unfused,
            uncounted=cost.uncounted if sizes is not None else {},
            precision=Precision(None, shares),
            quantized=dq_nodes > 0 or any(node.op_type.startswith(_QUANTIZED) for node in places),
            q_nodes=q_nodes,
            dq_nodes=dq_nodes,
            dynamic={spec.name: spec.dynamic for spec in model.signature.inputs if spec.dynamic},
            external=tuple(item.location for item in model.external),
            domains=dict(Counter(walk.domain_of(node) or "ai.onnx" for node in places).most_common()),
            findings=add_modules(found, ModulePaths(proto), "location"),
            metadata={item.key: item.value for item in proto.metadata_props},
        )


def _input_shapes(signature: Signature, shapes: dict[str, Shape]) -> dict[str, Shape] | None:
    """Shape of every input: given, else declared with batch 1; None if dynamic sizes were not given."""
    try:
        profile = profile_for(signature, shapes=shapes)
    except ShapeError:
        if shapes:
            raise
        return None
    return {name: span.opt for name, span in profile.ranges.items()}


_MAX_FUSED_BYTES = 1 << 31
"""Size of a model up to which its fusions are looked for: they copy some of its weights."""
_QUANTIZED = ("QLinear", "QGemm", "QAttention", "MatMulNBits", "MatMulInteger", "ConvInteger")
"""How names of operators on quantised data begin."""
