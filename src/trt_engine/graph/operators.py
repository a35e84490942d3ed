"""Known operators: ONNX's schemas, ONNX Runtime's schemas, TensorRT's parser and plugins."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto, NodeProto, helper

from trt_engine.environment import distribution_version
from trt_engine.graph import walk
from trt_engine.graph.shape_inference import schema_of
from trt_engine.graph.structure_check import InvalidModel
from trt_engine.model import GraphIndex, NodeLocation
from trt_engine.tensors import suggest

# Operators of TensorRT's own libraries without the suffix `_TRT` (source: the plugin folders and the ONNX
# parser's importers of the public TensorRT repositories), beside the domains and the suffix below.
_TRT_PLUGINS = frozenset(
    "BatchTilePlugin CoordConvAC CropAndResize CropAndResizeDynamic CustomEmbLayerNormPluginDynamic "
    "CustomFCPluginDynamic CustomGeluPluginDynamic CustomQKVToContextPluginDynamic CustomSkipLayerNormPluginDynamic "
    "DecodeBbox3DPlugin FMHA_cuDNN GenerateDetection GroupNormalizationPlugin LayerNormalizationPlugin "
    "MSDeformAttn ModulatedDeformConv2d MultilevelCropAndResize MultilevelProposeROI PillarScatterPlugin Proposal "
    "ProposalDynamic ProposalLayer PyramidROIAlign RoPE SingleStepLSTMPlugin VoxelGeneratorPlugin".split()
)
_MAX_CACHED_NBYTES = 4096
"""Attribute bytes up to which equal nodes are checked once."""
_TRT_DOMAIN = re.compile(r"(trt|tensorrt|nvinfer)(\W.*)?", re.IGNORECASE)


@cache
def _known_to_onnx(op: str, domain: str, version: int | None) -> bool:
    schema = schema_of(op, domain, version if version is not None else 1 << 30)
    return schema is not None and not schema.deprecated


@cache
def _runtime_schemas() -> dict[tuple[str, str], int]:
    """First version by (domain, operator) in the installed ONNX Runtime; empty if it cannot be imported."""
    try:
        from onnxruntime.capi import onnxruntime_pybind11_state as state
    except (ImportError, AttributeError):  # broken by uninstalling its sibling package: see `doctor`
        return {}
    found: dict[tuple[str, str], int] = {}
    for schema in state.get_all_operator_schema():
        key = (walk.DEFAULT_DOMAINS[0] if schema.domain in walk.DEFAULT_DOMAINS else schema.domain, schema.name)
        found[key] = min(found.get(key, schema.since_version), schema.since_version)
    return found


def is_trt_only(node: NodeProto) -> bool:
    """True for an operator that only TensorRT runs, by domain, plugin or name."""
    return _is_trt_only(node.op_type, walk.domain_of(node))


@cache
def _is_trt_only(op: str, domain: str) -> bool:
    if _TRT_DOMAIN.fullmatch(domain):
        return True
    if domain == "" and _known_to_onnx(op, "", None):
        return False
    if domain and (domain, op) in _runtime_schemas():  # its default domain lists TensorRT's operators
        return False
    return op.startswith("TRT_") or op.endswith("_TRT") or op in _TRT_PLUGINS


def trt_only(graph: GraphIndex) -> tuple[str, ...]:
    """TensorRT-only operators of the model, as `EfficientNMS_TRT` or `trt::TRT_MXFP8DequantizeLinear`."""
    first = {(walk.domain_of(place.node), place.node.op_type): place.node for place in graph.nodes}
    return tuple(
        walk.qualified_name(node) for key, node in first.items() if key not in graph.functions and is_trt_only(node)
    )


@dataclass(frozen=True, slots=True)
class UnknownOperator:
    """An operator that ONNX, ONNX Runtime and the model do not define."""

    op: str
    domain: str
    opset: int | None
    node: str

    def error(self) -> InvalidModel:
        """The error that `check_operators` raises for it."""
        if self.domain and (self.opset is None or not any(domain == self.domain for domain, _ in _runtime_schemas())):
            return InvalidModel(
                f"has the operator `{self.op}` of the domain `{self.domain}` (node `{self.node}`), which is "
                "neither in the ONNX standard nor in ONNX Runtime nor a function of the model",
                hint="export again with standard operators, or keep the operator as a local function of the model",
            )
        where = f"domain `{self.domain or 'ai.onnx'}`, opset {self.opset if self.opset is not None else 'not imported'}"
        names = sorted({name for domain, name in (*_standard_names(), *_runtime_schemas()) if domain == self.domain})
        near = suggest(self.op, names)
        return InvalidModel(
            f"has an unknown operator `{self.op}` ({where}, node `{self.node}`)",
            hint=f"{near if near.startswith('did you mean') else 'the exporter wrote it'}; export again with another opset",
        )


@cache
def _standard_names() -> frozenset[tuple[str, str]]:
    """(domain, operator) of every operator in any version of the ONNX standard."""
    return frozenset((item.domain, item.name) for item in onnx.defs.get_all_schemas_with_history())


def unknown_operators(graph: GraphIndex) -> list[UnknownOperator]:
    """Undefined operators, one entry each; TensorRT-only operators are excluded."""
    local = graph.functions
    found: dict[tuple[str, str], UnknownOperator] = {}
    met: set[tuple[str, str, int | None]] = set()
    for place in graph.nodes:
        node, domain = place.node, walk.domain_of(place.node)
        key, version = (domain, node.op_type), place.opsets.get(domain)
        if (*key, version) in met:
            continue
        met.add((*key, version))
        if key in found or key in local or is_trt_only(node):
            continue
        if domain == "" and version is None:
            version = 1  # an opset-free default domain is read as version 1
        known = version is not None and _known_to_onnx(node.op_type, domain, version)
        if not known and key not in _standard_names():
            # ONNX Runtime brings its own domains along, imported by the model or not
            since = _runtime_schemas().get(key)
            known = since is not None and (version or 1 << 30) >= since
        if not known:
            found[key] = UnknownOperator(node.op_type, domain, place.opsets.get(domain), walk.label(node))
    return list(found.values())


def require_valid_operators(graph: GraphIndex) -> None:
    """`InvalidModel` for the first operator that is unknown, or not valid by its schema."""
    for found in unknown_operators(graph):
        raise found.error()
    check_nodes(graph)


def check_nodes(graph: GraphIndex) -> None:
    """`InvalidModel` for a node with attributes or an input count that its schema does not allow, or with an undefined
    input."""
    proto, local = graph.proto, graph.functions
    passed: set[tuple[object, ...]] = set()
    context: Any = onnx.checker.C.CheckerContext()
    for place in graph.nodes:
        node, domain = place.node, walk.domain_of(place.node)
        if (key := _node_schema(place, domain)) in passed:
            continue
        if (domain, node.op_type) in local or domain not in ("", "ai.onnx.ml") or domain not in place.opsets:
            continue
        if is_trt_only(node) or not _known_to_onnx(node.op_type, domain, place.opsets[domain]):
            continue  # ONNX Runtime's own extension of the default domain
        if any(True for _ in walk.bodies(node)) or any(item.ref_attr_name for item in node.attribute):
            continue  # needs the outer scope; its nodes are visited separately
        if any(item.t.data_location == onnx.TensorProto.EXTERNAL for item in node.attribute if item.HasField("t")):
            continue
        try:  # versions beyond 32 bits are a `TypeError`
            context.ir_version, context.opset_imports = proto.ir_version, place.opsets
            onnx.checker.check_node(node, context)
        except (onnx.checker.ValidationError, ValueError, TypeError, RuntimeError) as error:
            reason = " ".join(str(error).partition("==> Context")[0].split()).rstrip(".")
            raise InvalidModel(
                f"breaks the rules of the operator `{node.op_type}` (opset {place.opsets[domain]}, "
                f"node `{walk.label(node)}`): {reason}",
                hint="export the model again, or ask the exporter for another opset",
            ) from error
        if key is not None:
            passed.add(key)
    _check_names(proto.graph, set())
    for function in proto.functions:
        _check_names(function, set(function.input))


def checker_error(path: Path, *, full: bool = True) -> Exception | None:
    """Why ONNX's checker rejects a model file, with its shape inference if `full`; None if it does not."""
    try:
        onnx.checker.check_model(str(path), full_check=full)
    except Exception as error:  # the checker and the inference raise whatever their C++ side throws
        return error
    return None


def _node_schema(place: NodeLocation, domain: str) -> tuple[object, ...] | None:
    """Schema or function that validates a node; None for a node that is checked separately."""
    node, held = place.node, place.node.attribute
    given = tuple([item.SerializeToString() for item in held]) if held else ()
    if sum(map(len, given)) > _MAX_CACHED_NBYTES:
        return None
    version = place.opsets.get(domain)
    return domain, node.op_type, version, tuple(map(bool, node.input)), tuple(map(bool, node.output)), given


def _check_names(owner: Any, outer: set[str]) -> None:
    known = set(outer)
    if isinstance(owner, onnx.GraphProto):
        known |= {item.name for item in owner.input} | {item.name for item in owner.initializer}
        known |= {item.values.name for item in owner.sparse_initializer}
    made = {name for node in owner.node for name in node.output if name}
    everything = known | made
    for node in owner.node:
        for name in node.input:
            if name and name not in everything:
                raise InvalidModel(
                    f"is broken: node `{walk.label(node)}` ({node.op_type}) reads `{name}`, "
                    "which no input, initializer or node makes",
                    hint="the file was cut or edited; export the model again",
                )
        for _, body in walk.bodies(node):
            _check_names(body, everything)
    outputs = owner.output if not isinstance(owner, onnx.GraphProto) else [item.name for item in owner.output]
    for name in outputs:
        if name and name not in everything:
            raise InvalidModel(
                f"is broken: no node produces the output `{name}`",
                hint="the file was cut or edited; export the model again",
            )


# ------------------------------------------------------------------------------------------------ ONNX Runtime's limits


@dataclass(frozen=True, slots=True)
class VersionGap:
    """Versions of a model beyond those the installed ONNX Runtime supports; falsy if there are none."""

    runtime: str
    opset: tuple[int, int] | None = None
    """(the model's opset, highest supported)."""
    ir: tuple[int, int] | None = None

    def __bool__(self) -> bool:
        return self.opset is not None or self.ir is not None

    def describe(self) -> str:
        """`opset 28 (ONNX Runtime 1.31.1 takes up to 26) and IR version 14 (up to 13)`."""
        parts = [
            f"{what} {found[0]} (ONNX Runtime {self.runtime} takes up to {found[1]})"
            for what, found in (("opset", self.opset), ("IR version", self.ir))
            if found is not None
        ]
        return " and ".join(parts)


_MIN_VERSIONS = (21, 10)  # opset and IR version that every supported ONNX Runtime loads


def onnxruntime_version_gap(opset: int | None, ir_version: int) -> VersionGap:
    """Opset and IR version that the installed ONNX Runtime does not support.

    Found by loading a graph of one Identity stamped with these versions.
    """
    runtime = distribution_version("onnxruntime") or distribution_version("onnxruntime-gpu") or "unknown"
    asked = opset or 1
    high_opset = _highest_loadable("opset", asked, _MIN_VERSIONS[0])
    high_ir = _highest_loadable("ir", ir_version, _MIN_VERSIONS[1])
    return VersionGap(
        runtime,
        opset=(asked, high_opset) if asked > high_opset else None,
        ir=(ir_version, high_ir) if ir_version > high_ir else None,
    )


@cache
def _highest_loadable(what: str, requested: int, floor: int) -> int:
    """Highest loadable version up to the requested one."""
    if requested > floor + 16 and not _loads(what, requested):
        requested = floor + 16  # a damaged or absurd number: do not count down from it
    while requested > floor and not _loads(what, requested):
        requested -= 1
    return requested


@cache
def _loads(what: str, version: int) -> bool:
    try:
        import onnxruntime
    except ImportError:
        return True  # ONNX Runtime is not installed
    if not hasattr(onnxruntime, "InferenceSession"):
        return True
    opset, ir = (version, _MIN_VERSIONS[1]) if what == "opset" else (_MIN_VERSIONS[0], version)
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])], "probe", [value("x", 1, [1])], [value("y", 1, [1])]
    )
    return load_error(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)) is None


def load_error(proto: ModelProto) -> Exception | None:
    """Why ONNX Runtime's CPU provider does not load a model; None if it does."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC  # higher ones can crash
    try:
        onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no common base class
        return error
    return None
