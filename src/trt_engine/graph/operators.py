"""Which operators are known, and to whom: ONNX's own schemas, ONNX Runtime's, TensorRT's parser and plugins."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import onnx
from onnx import ModelProto, NodeProto, helper

from trt_engine.environment import version_of
from trt_engine.errors import ModelError
from trt_engine.graph import walk
from trt_engine.tensors import closest

__all__ = ["Beyond", "beyond_onnxruntime", "check_nodes", "is_trt_only", "trt_only", "unknown"]

# Operators that TensorRT's own libraries answer to without the suffix `_TRT` (source: the plugin folders and the ONNX
# parser's importers of the public TensorRT repositories), beside the domains and the suffix below.
_TRT_PLUGINS = frozenset(
    "BatchTilePlugin CoordConvAC CropAndResize CropAndResizeDynamic CustomEmbLayerNormPluginDynamic "
    "CustomFCPluginDynamic CustomGeluPluginDynamic CustomQKVToContextPluginDynamic CustomSkipLayerNormPluginDynamic "
    "DecodeBbox3DPlugin FMHA_cuDNN GenerateDetection GroupNormalizationPlugin LayerNormalizationPlugin "
    "MSDeformAttn ModulatedDeformConv2d MultilevelCropAndResize MultilevelProposeROI PillarScatterPlugin Proposal "
    "ProposalDynamic ProposalLayer PyramidROIAlign RoPE SingleStepLSTMPlugin VoxelGeneratorPlugin".split()
)
_TRT_DOMAIN = re.compile(r"(trt|tensorrt|nvinfer)(\W.*)?", re.IGNORECASE)


def _known_to_onnx(op: str, domain: str, version: int | None) -> bool:
    try:
        schema = onnx.defs.get_schema(op, version if version is not None else 1 << 30, domain)
    except onnx.defs.SchemaError:
        return False
    return not schema.deprecated


@cache
def _runtime_schemas() -> dict[tuple[str, str], int]:
    """First version by (domain, operator) of the installed ONNX Runtime; empty where it cannot be imported."""
    try:
        from onnxruntime.capi import onnxruntime_pybind11_state as state
    except (ImportError, AttributeError):  # hollow after an uninstall of its sibling: `doctor` says so
        return {}
    found: dict[tuple[str, str], int] = {}
    for schema in state.get_all_operator_schema():
        key = (walk.DEFAULT_DOMAINS[0] if schema.domain in walk.DEFAULT_DOMAINS else schema.domain, schema.name)
        found[key] = min(found.get(key, schema.since_version), schema.since_version)
    return found


def _functions(proto: ModelProto) -> set[tuple[str, str]]:
    return {("" if item.domain in walk.DEFAULT_DOMAINS else item.domain, item.name) for item in proto.functions}


def is_trt_only(node: NodeProto) -> bool:
    """True for an operator that only TensorRT runs: its domains, its plugins, its naming."""
    op, domain = node.op_type, walk.domain_of(node)
    if _TRT_DOMAIN.fullmatch(domain):
        return True
    if domain == "" and _known_to_onnx(op, "", None):
        return False
    if domain and (domain, op) in _runtime_schemas():  # in the default one it lists TensorRT's, for its provider
        return False
    return op.startswith("TRT_") or op.endswith("_TRT") or op in _TRT_PLUGINS


def trt_only(proto: ModelProto) -> tuple[str, ...]:
    """The operators of the model that only TensorRT runs, as `EfficientNMS_TRT` or `trt::TRT_MXFP8DequantizeLinear`."""
    local = _functions(proto)
    found: dict[str, None] = {}
    for place in walk.nodes(proto):
        node = place.node
        if (walk.domain_of(node), node.op_type) not in local and is_trt_only(node):
            found[_spelled(node)] = None
    return tuple(found)


def _spelled(node: NodeProto) -> str:
    return f"{node.domain}::{node.op_type}" if walk.domain_of(node) else node.op_type


@dataclass(frozen=True, slots=True)
class Unknown:
    """One operator that neither ONNX nor ONNX Runtime nor the model itself defines."""

    op: str
    domain: str
    opset: int | None
    node: str

    def error(self, path: object) -> ModelError:
        """The error `check` raises for it."""
        if self.domain and (self.opset is None or not any(domain == self.domain for domain, _ in _runtime_schemas())):
            return ModelError(
                f"`{path}` has the operator `{self.op}` of the domain `{self.domain}` (node `{self.node}`), which is "
                "neither in the ONNX standard nor in ONNX Runtime nor a function of the model",
                hint="export again with standard operators, or keep the operator as a local function of the model",
            )
        where = f"domain `{self.domain or 'ai.onnx'}`, opset {self.opset if self.opset is not None else 'not imported'}"
        names = sorted({name for domain, name in (*_standard_names(), *_runtime_schemas()) if domain == self.domain})
        return ModelError(
            f"`{path}` has an unknown operator `{self.op}` ({where}, node `{self.node}`)",
            hint=f"{closest(self.op, names) if _near(self.op, names) else 'the exporter wrote it'}; "
            "export again with another opset",
        )


def _near(name: str, known: list[str]) -> bool:
    return closest(name, known).startswith("did you mean")


@cache
def _standard_names() -> frozenset[tuple[str, str]]:
    """(domain, operator) of everything the ONNX standard ever had."""
    return frozenset((item.domain, item.name) for item in onnx.defs.get_all_schemas_with_history())


def unknown(proto: ModelProto) -> list[Unknown]:
    """The operators nobody defines, one entry for each operator; TensorRT-only ones are not among them."""
    local = _functions(proto)
    found: dict[tuple[str, str], Unknown] = {}
    for place in walk.nodes(proto):
        node, domain = place.node, walk.domain_of(place.node)
        key = (domain, node.op_type)
        if key in found or key in local or is_trt_only(node):
            continue
        version = place.opsets.get(domain)
        if domain == "" and version is None:
            version = 1  # an opset-free default domain is read as version 1
        known = version is not None and _known_to_onnx(node.op_type, domain, version)
        if not known and key not in _standard_names():
            # ONNX Runtime brings its own domains along, imported by the model or not
            since = _runtime_schemas().get(key)
            known = since is not None and (version or 1 << 30) >= since
        if not known:
            found[key] = Unknown(node.op_type, domain, place.opsets.get(domain), walk.label(node))
    return list(found.values())


def check_nodes(proto: ModelProto, path: object) -> None:
    """`ModelError` for a node whose attributes or number of inputs its operator's schema does not allow, or whose input
    nobody makes."""
    local = _functions(proto)
    for place in walk.nodes(proto):
        node, domain = place.node, walk.domain_of(place.node)
        if (domain, node.op_type) in local or domain not in ("", "ai.onnx.ml") or domain not in place.opsets:
            continue
        if is_trt_only(node) or not _known_to_onnx(node.op_type, domain, place.opsets[domain]):
            continue  # ONNX Runtime's own extension of the default domain
        if any(True for _ in walk.bodies(node)) or any(item.ref_attr_name for item in node.attribute):
            continue  # needs the scope around it; its parts are visited one by one
        if any(item.t.data_location == onnx.TensorProto.EXTERNAL for item in node.attribute if item.HasField("t")):
            continue
        try:
            onnx.checker.check_node(node, _context(proto, place.opsets))
        except (onnx.checker.ValidationError, ValueError, TypeError, RuntimeError) as error:
            reason = " ".join(str(error).partition("==> Context")[0].split()).rstrip(".")
            raise ModelError(
                f"`{path}` breaks the rules of the operator `{node.op_type}` (opset {place.opsets[domain]}, "
                f"node `{walk.label(node)}`): {reason}",
                hint="export the model again, or ask the exporter for another opset",
            ) from error
    _check_names(proto.graph, set(), path)
    for function in proto.functions:
        _check_names(function, set(function.input), path)


def _check_names(owner: Any, outer: set[str], path: object) -> None:
    known = set(outer)
    if isinstance(owner, onnx.GraphProto):
        known |= {item.name for item in owner.input} | {item.name for item in owner.initializer}
        known |= {item.values.name for item in owner.sparse_initializer}
    made = {name for node in owner.node for name in node.output if name}
    everything = known | made
    for node in owner.node:
        for name in node.input:
            if name and name not in everything:
                raise ModelError(
                    f"`{path}` is broken: node `{walk.label(node)}` ({node.op_type}) reads `{name}`, "
                    "which no input, initializer or node makes",
                    hint="the file was cut or edited; export the model again",
                )
        for _, body in walk.bodies(node):
            _check_names(body, everything, path)
    outputs = owner.output if not isinstance(owner, onnx.GraphProto) else [item.name for item in owner.output]
    for name in outputs:
        if name and name not in everything:
            raise ModelError(
                f"`{path}` is broken: the output `{name}` is made by no node",
                hint="the file was cut or edited; export the model again",
            )


def _context(proto: ModelProto, opsets: dict[str, int]) -> Any:
    context = onnx.checker.C.CheckerContext()
    context.ir_version = proto.ir_version
    context.opset_imports = opsets
    return context


# ------------------------------------------------------------------------------------------------ ONNX Runtime's limits


@dataclass(frozen=True, slots=True)
class Beyond:
    """How far a model lies beyond what the installed ONNX Runtime takes; None where it does not."""

    runtime: str
    opset: tuple[int, int] | None = None
    """The model's opset and the highest one taken."""
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


_TAKEN_BY_ALL = (21, 10)  # opset and IR version every ONNX Runtime we allow takes: no need to ask it


def beyond_onnxruntime(opset: int | None, ir_version: int) -> Beyond:
    """What of this opset and IR version the installed ONNX Runtime does not take.

    It is asked, not looked up: it loads a graph of one Identity stamped with them.
    """
    runtime = version_of("onnxruntime") or version_of("onnxruntime-gpu") or "unknown"
    asked = opset or 1
    high_opset = _limit("opset", asked, _TAKEN_BY_ALL[0])
    high_ir = _limit("ir", ir_version, _TAKEN_BY_ALL[1])
    return Beyond(
        runtime,
        opset=(asked, high_opset) if asked > high_opset else None,
        ir=(ir_version, high_ir) if ir_version > high_ir else None,
    )


@cache
def _limit(what: str, asked: int, floor: int) -> int:
    """The highest version up to `asked` that loads."""
    if asked > floor + 16 and not _loads(what, asked):
        asked = floor + 16  # a damaged or absurd number: no need to count down from it
    while asked > floor and not _loads(what, asked):
        asked -= 1
    return asked


@cache
def _loads(what: str, version: int) -> bool:
    try:
        import onnxruntime
    except ImportError:
        return True  # nobody to ask
    if not hasattr(onnxruntime, "InferenceSession"):
        return True
    opset, ir = (version, _TAKEN_BY_ALL[1]) if what == "opset" else (_TAKEN_BY_ALL[0], version)
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])], "probe", [value("x", 1, [1])], [value("y", 1, [1])]
    )
    probe = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        onnxruntime.InferenceSession(probe.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # its errors have no common base but Exception
        return False
    return True
