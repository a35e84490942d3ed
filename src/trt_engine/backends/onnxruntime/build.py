"""Builds ONNX Runtime's optimised graph: optimise, save, reload, count dtypes."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Container, Sequence
from pathlib import Path

import onnx
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_engine.atomic_io import file_digest, os_errors, write_atomic
from trt_engine.backends.onnxruntime import hardware, providers, session
from trt_engine.backends.onnxruntime.conv_bias import separate_conv_biases
from trt_engine.backends.onnxruntime.image_conv import rewrite_image_convs
from trt_engine.backends.onnxruntime.optimizer_trial import highest_safe_level
from trt_engine.backends.onnxruntime.options import LEVELS, OnnxRuntimeOptions, parse
from trt_engine.backends.onnxruntime.providers import ProviderSelection, build_providers
from trt_engine.config.build import BuildConfig
from trt_engine.config.precision import QUANTIZED_PRECISIONS
from trt_engine.config.profiles import fixed_shapes
from trt_engine.device import info
from trt_engine.errors import BuildError, ModelError, PrecisionError, UsageError
from trt_engine.format import format_bytes, format_percent
from trt_engine.graph import walk
from trt_engine.graph.constants import drop_initializer_inputs, initializer_names
from trt_engine.graph.dtype_breakdown import (
    Layer,
    compute_layers,
    count_parameters,
    is_dequantize,
    main_precision,
    shares_by_dtype,
)
from trt_engine.graph.edit_graph import free_name, replace_items, used_names
from trt_engine.graph.fusion import FusedModel, fuse_model
from trt_engine.graph.load import ENGINE_MAGIC, check_onnxruntime, external_files, read_graph, read_proto
from trt_engine.graph.shape_inference import TensorInfo, trace
from trt_engine.graph.static_shapes import fold_fixed_sizes
from trt_engine.model import GraphIndex, Model
from trt_engine.protocols import BuildOutcome, BuildPaths
from trt_engine.records.passport import FP32_PRODUCTS, FUSIONS, GRAPH_DTYPE, Precision, Requirements
from trt_engine.store import engine_key

log = logging.getLogger(__name__)

EXTERNAL_WEIGHTS_BYTES = 1 << 30
"""Model size in bytes from which weights go to a separate file: protobuf is limited to 2 GiB, and graphs grow."""

_MAX_FUSED_BYTES = (2 << 30) - (64 << 20)
"""Largest graph that is fused, external weights not counted: protobuf is limited to 2 GiB."""

_STANDARD = ("", "ai.onnx", "ai.onnx.ml")


class OnnxRuntimeBuilder:
    """Builds for the CPU, CUDA, TensorRT and TensorRT-RTX providers."""

    def identity(self, config: BuildConfig) -> str:
        choice = build_providers(config)
        parts = ["onnxruntime", ort.__version__, *map(providers.long_name, choice.names)]
        if (version := choice.plugin_version) is not None:
            parts.append(f"({version})")
        if choice.on_gpu:
            parts.append(hardware.sm_architecture(hardware.gpu_info(choice.device)))
        if not choice.strict:  # nodes may run on the CPU, in layouts specific to it
            parts.append(",".join(info.cpu().features))
        return " ".join(parts).strip()

    def build(self, model: Model, config: BuildConfig, paths: BuildPaths) -> BuildOutcome:
        payload = paths.payload
        options, choice = parse(config.options), build_providers(config)
        check_onnxruntime(model)
        level = _optimization_level(options, choice, model.graph)
        weights = _weights_file(self, model, config, payload)
        fused, failures = _fuse(model, config, options, choice, level)
        graph, means, sizes = _prepared(model, model.proto if fused is None else fused.proto, choice, config)
        if graph is None and fused is not None:
            graph = fused.proto.SerializeToString()
        # narrow types on the CPU, which has few kernels for them, so that passes insert casts
        risky = not choice.on_gpu and _contains_dtype(model.graph, _NARROW)
        disabled = session.CRASHING_OPTIMIZERS if risky else ()
        level, crashes = (
            highest_safe_level(model.path, graph, level, disabled, payload.parent) if risky else (level, ())
        )
        choice = _optimise(
            model, graph, options, choice, level, payload, weights, disabled, allow_fallback=config.allow_fallback
        )
        separated, images = _rewrite_nhwc(payload, options, choice, fuse=config.fuse)
        reload_level = "all" if choice.compiles else "none"  # optimised already
        _mark_as_engine(payload)
        choice, placement = _reload(model, options, choice, reload_level, payload, allow_fallback=config.allow_fallback)
        built = read_graph(payload)
        side = _side_files(built, payload, weights)
        # ONNX Runtime's own providers have fused Q/DQ pairs already; compiling providers fuse them at load
        layers = tuple(compute_layers(built.proto, tf32=choice.tf32, literal=not choice.compiles))
        precision = Precision(requested=config.precision, shares=shares_by_dtype(layers, count_parameters(built)))
        _check_precision(precision, model.graph, choice)
        written = _written_precision(model.graph, precision)
        domains = {walk.domain_of(place.node) for place in built.nodes}
        blocked = hardware.BLOCKED_DOMAIN in domains
        warnings = [*failures, *([choice.fallback] if choice.fallback else [])]
        notes = {
            "graph_optimization": level,
            "load_optimization": reload_level,
            "providers": ",".join(choice.names),
            "operators": "standard" if domains.issubset(_STANDARD) else "onnxruntime",
            "nodes": placement,
        }
        if fused is not None or images:
            counts = dict(fused.counts if fused is not None else {}) | ({"image_convolution": images} if images else {})
            notes[FUSIONS] = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        if means:
            notes["half_means"] = f"{means} not added in FP16"
        if sizes:
            notes["fixed_sizes"] = f"{sizes} nodes folded"
        if separated:
            notes["conv_biases"] = f"{separated} outside their convolutions"
        if written is not None:
            notes[GRAPH_DTYPE] = written
            log.info("the graph is %s, %s computes it in %s", written, choice.device, precision.main_dtype)
        if blocked:
            notes["layout"] = hardware.blocked_layout()
        if choice.on_gpu:
            notes["tf32"] = "on" if choice.tf32 else "off"
        if "cuda" in choice.names:
            notes[FP32_PRODUCTS] = str(sum(layer.is_fp32_product for layer in layers))
            warnings += _slow_convolutions(layers, choice)
        if (version := choice.plugin_version) is not None:
            notes[providers.PROVIDER_VERSION] = version
        if choice.fallback:
            notes["fallback"] = choice.fallback
        for warning in warnings:
            log.warning("%s", warning)
        board = hardware.gpu_info(choice.device)
        return BuildOutcome(
            signature=model.signature,
            precision=precision,
            requirements=Requirements(
                library="onnxruntime",
                version=ort.__version__,
                cpu_features=hardware.layout_features() if blocked else (),
                providers=choice.names,
                compute_capability=board.compute_capability if board else None,
                gpu=board.name if board else None,
            ),
            files=side,
            warnings=tuple(warnings),
            notes=notes,
            retries=crashes,
            compiled=choice.compiles,
            device=choice.device,
        )


def _optimization_level(options: OnnxRuntimeOptions, choice: ProviderSelection, graph: GraphIndex) -> str:
    if options.graph_optimization is not None:
        return options.graph_optimization
    float8 = _contains_dtype(graph, _FLOAT8)
    if float8 and _contains_dtype(graph, _FLOAT16):
        log.info("the graph contains FP8 and FP16: level `none`, because `basic` can change results in ONNX Runtime")
        return "none"
    if choice.compiles:
        return "basic"  # the provider compiles the graph at load
    if float8:
        log.info(
            "the graph contains FP8: optimised at level `basic`, higher levels create operators without FP8 support"
        )
        return "basic"
    return "all"


def _fuse(
    model: Model, config: BuildConfig, options: OnnxRuntimeOptions, choice: ProviderSelection, level: str
) -> tuple[FusedModel | None, tuple[str, ...]]:
    """The model with its attention, norms and activations in ONNX Runtime's operators, None where nothing is fused; and the
    fusions that failed.

    Providers that compile have fusions of their own.
    """
    if not config.fuse or choice.compiles or LEVELS.index(level) < LEVELS.index("extended"):
        return None, ()
    proto = model.proto
    if (nbytes := proto.ByteSize()) > _MAX_FUSED_BYTES:
        log.info("the graph of %s is not fused: the limit is %s", *map(format_bytes, (nbytes, _MAX_FUSED_BYTES)))
        return None, ()
    fused = fuse_model(proto, model.path.parent, on_gpu=choice.on_gpu, left_out=options.no_fusion or ())
    for item in fused.unfused:
        log.debug("`%s` is not fused (%s): %s", item.node, item.fusion, item.reason)
    if not fused.counts or fused.proto.ByteSize() > _MAX_FUSED_BYTES:
        return None, fused.warnings
    log.info("fused: %s", fused.summary)
    return fused, fused.warnings


_FLOAT8 = {
    onnx.TensorProto.FLOAT8E4M3FN,
    onnx.TensorProto.FLOAT8E4M3FNUZ,
    onnx.TensorProto.FLOAT8E5M2,
    onnx.TensorProto.FLOAT8E5M2FNUZ,
}
_FLOAT16 = {onnx.TensorProto.FLOAT16}
_NARROW = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}


def _contains_dtype(graph: GraphIndex, kinds: Container[int]) -> bool:
    values = (*graph.proto.graph.input, *graph.proto.graph.output)
    return (
        any(value.type.tensor_type.elem_type in kinds for value in values)
        or any(tensor.data_type in kinds for tensor in graph.tensors)
        or any(
            attribute.name in ("to", "output_dtype") and attribute.i in kinds
            for place in graph.nodes
            for attribute in place.node.attribute
        )
    )


def _weights_file(builder: OnnxRuntimeBuilder, model: Model, config: BuildConfig, payload: Path) -> str | None:
    """The file name for the weights; None to keep them in the graph.

    A model with external data always gets one: otherwise untouched weights would still refer to the model's files.
    """
    wanted = parse(config.options).external_weights
    if model.external and wanted is False:
        raise UsageError(
            f"`{model.path}` keeps weights outside its graph, so its engine does too",
            hint="leave out `external_weights`",
        )
    if not (model.external or wanted or (wanted is None and model.nbytes >= EXTERNAL_WEIGHTS_BYTES)):
        return None
    # unique per engine: engines may be copied into one folder
    key = engine_key(model.digest, config, builder.identity(config))
    return f"{payload.stem}.{key[:8]}.weights"


_CHANGED = ("Shape", "Size", "ReduceMean")
"""Operators of graphs that are changed for the CUDA provider."""


def _prepared(
    model: Model, proto: onnx.ModelProto, choice: ProviderSelection, config: BuildConfig
) -> tuple[bytes | None, int, int]:
    """The graph that is optimised, serialized, its means that are not added in FP16 and its nodes that follow from sizes
    which the profiles fix; None where it is the file's.

    IR version 3 lists all weights as inputs, and ONNX Runtime does not fold overridable initializers: these are taken out.
    """
    plain = _without_default_inputs(proto)
    if "cuda" not in choice.names or not any(node.op_type in _CHANGED for node in proto.graph.node):
        return None if plain is None else plain.SerializeToString(), 0, 0
    changed = onnx.ModelProto()
    changed.CopyFrom(proto if plain is None else plain)
    sizes = fold_fixed_sizes(changed, fixed_shapes(config.resolve(model.signature)))
    means = widen_half_means(changed)
    if plain is None and not sizes and not means:
        return None, 0, 0
    return changed.SerializeToString(), means, sizes


def _without_default_inputs(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """The model without inputs that have initializers; None if there are none."""
    if not initializer_names(proto).intersection(item.name for item in proto.graph.input):
        return None
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    drop_initializer_inputs(changed)
    log.info("inputs with initializers become constants of the engine")
    return changed


def _optimise(
    model: Model,
    graph: bytes | None,
    options: OnnxRuntimeOptions,
    choice: ProviderSelection,
    level: str,
    payload: Path,
    weights: str | None,
    disabled: Sequence[str],
    *,
    allow_fallback: bool,
) -> ProviderSelection:
    """Write the optimised graph; returns the providers actually active."""
    log.info("optimising `%s` at level %s for %s", model.path.name, level, ",".join(choice.names))
    # compiled subgraphs cannot be saved: optimise without the compiling provider
    target = ProviderSelection(("cpu",), ({},), "cpu", strict=False) if choice.compiles else choice
    made = session.session_options(options, level=level, save=payload, weights=weights)
    try:
        optimised = session.create_session(model.path, made, target, graph=graph, disabled=disabled, judge=False)
    except session.ERRORS as error:
        if session.is_write_failure(error):
            raise session.translate_write_error(payload, model.nbytes) from error
        raise session.translate_load_error(error, model.path, target) from error
    if not payload.exists():
        raise BuildError("ONNX Runtime wrote no graph", hint="`-O graph_optimization=basic`")
    if choice.compiles:
        return choice
    settled = providers.verify_active(optimised, choice, allow_fallback=allow_fallback)
    del optimised
    gc.collect()  # frees its weights before the engine is loaded
    return settled


def _rewrite_nhwc(
    payload: Path, options: OnnxRuntimeOptions, choice: ProviderSelection, *, fuse: bool
) -> tuple[int, int]:
    """Rewrite an optimised graph in NHWC by `separate_conv_bias`; counts of biases and convolutions rewritten."""
    separate = options.separate_conv_bias or "off"
    if not choice.prefers_nhwc:
        if separate != "off":
            raise UsageError(
                "`-O separate_conv_bias` needs the layout NHWC of the CUDA provider", hint="add `-O cuda.prefer_nhwc=1`"
            )
        return 0, 0
    if separate == "off":
        return 0, 0
    proto = read_proto(payload)
    separated = separate_conv_biases(proto, payload.parent, channels=separate == "channel")
    images = rewrite_image_convs(proto, payload.parent) if fuse and separate == "channel" else 0
    if separated or images:
        write_atomic(payload, proto.SerializeToString())
    return separated, images


def _mark_as_engine(payload: Path) -> None:
    """Mark the graph as an engine by appending metadata: protobuf merges appended messages."""
    mark = onnx.ModelProto()
    mark.metadata_props.add(key=ENGINE_MAGIC, value=f"onnxruntime {ort.__version__}")
    with os_errors(payload), payload.open("ab") as file:
        file.write(mark.SerializeToString())


def _reload(
    model: Model,
    options: OnnxRuntimeOptions,
    choice: ProviderSelection,
    level: str,
    payload: Path,
    *,
    allow_fallback: bool,
) -> tuple[ProviderSelection, str]:
    """Load the written graph; returns the active providers and the nodes by provider."""
    if choice.compiles:  # keep compiled subgraphs for later loads
        choice = choice.with_cache(file_digest(payload), model.digest)
    try:
        loaded = session.create_session(payload, session.session_options(options, level=level), choice)
    except session.ERRORS as error:
        found = session.translate_load_error(error, payload, choice)
        if not isinstance(found, ModelError | BuildError):
            raise found from error  # not caused by the graph
        raise BuildError(
            f"the optimised graph does not load: {found.message}", hint="`-O graph_optimization=basic`"
        ) from error
    names = [value.name for value in (*loaded.get_inputs(), *loaded.get_outputs())]
    if names != [spec.name for spec in model.signature]:
        raise BuildError(
            f"the optimised graph has the inputs and outputs {names}, the model {[s.name for s in model.signature]}",
            hint="`-O graph_optimization=basic`",
        )
    return providers.verify_active(loaded, choice, allow_fallback=allow_fallback), node_placement(loaded)


def node_placement(loaded: ort.InferenceSession) -> str:
    """Node count per provider, as `CPUExecutionProvider 12`."""
    counted: Counter[str] = Counter()
    for part in loaded.get_provider_graph_assignment_info():
        counted[part.ep_name] += len(part.get_nodes())
    return ", ".join(f"{name} {count}" for name, count in counted.items())


def _side_files(built: GraphIndex, payload: Path, weights: str | None) -> tuple[Path, ...]:
    """The external weights file, if any; `BuildError` if the graph refers to any other file."""
    outside = [item.location for item in external_files(built.tensors, payload)]
    if outside not in ([], [weights]):
        raise BuildError(
            f"the optimised graph points at {', '.join(outside)}, expected {weights or 'nothing outside'}",
            hint="`-O external_weights=on`",
        )
    if weights is None:
        return ()
    if not outside:  # all weights are small and stayed in the graph
        payload.with_name(weights).unlink(missing_ok=True)
        return ()
    return (payload.with_name(weights),)


def _check_precision(precision: Precision, graph: GraphIndex, choice: ProviderSelection) -> None:
    """`PrecisionError` unless the engine computes in the requested floating-point type.

    Of a quantised one the verb judges, layer by layer: it knows which were left in floating point on purpose.
    """
    if precision.requested in (None, *QUANTIZED_PRECISIONS, precision.main_dtype):
        return
    shares = (
        ", ".join(
            f"{name} {format_percent(share.layers if share.macs is None else share.macs)}"
            for name, share in precision.compute_shares.items()
        )
        or "nothing countable"
    )
    given = main_precision(graph)
    hint = "precision is in the graph: export the model in it, or leave `--precision` out"
    if precision.requested == "tf32" and given == "fp32":
        why = f"{choice.device} computes this fp32 graph without TF32"
        hint = "TF32 is how NVIDIA GPUs from compute capability 8.0 on compute FP32: `--device cuda:0`, or leave it out"
    elif precision.main_dtype == "tf32":
        why = "the providers were allowed TF32"
        hint = (
            "`NVIDIA_TF32_OVERRIDE=0` in the environment forbids it: the providers that compile have no option for it"
            if choice.compiles
            else "leave `-O cuda.use_tf32` out, or build with `--precision tf32`"
        )
    elif given == precision.requested:
        why = f"ONNX Runtime computes this {given} graph in {precision.main_dtype} on {choice.device}"
    else:
        why = f"the model itself is {given or 'without arithmetic'}"
    raise PrecisionError(f"requested {precision.requested}, found {shares}: {why}", hint=hint)


def _slow_convolutions(layers: Sequence[Layer], choice: ProviderSelection) -> list[str]:
    """A warning if FP16 convolutions run without tensor cores: the CUDA provider's `use_tf32` decides for all types."""
    halves = sum(layer.dtype == "fp16" and "Conv" in layer.step.node.op_type for layer in layers)
    singles = sum(layer.is_fp32_product for layer in layers)
    if choice.tf32 or not (halves and singles):
        return []
    return [
        f"{halves} FP16 convolutions run without tensor cores, because {singles} other matrix operators are FP32 and TF32 "
        "is off: cast those to FP16 too, or build with `-O cuda.use_tf32=1`"
    ]


def _written_precision(graph: GraphIndex, precision: Precision) -> str | None:
    """The graph's main dtype (`int8`), if the engine computes mostly in another one other than TF32; else None."""
    if precision.main_dtype not in ("fp32", "tf32") or not (
        any(is_dequantize(place.node) for place in graph.nodes) or _contains_dtype(graph, _HALF_TYPES)
    ):
        return None
    given = main_precision(graph)
    return None if given in (None, "fp32", "fp64") else given


_HALF_TYPES = _FLOAT16 | {onnx.TensorProto.BFLOAT16}


_SAFE_COUNT = 16
"""The sum of so few values overflows only for values above 4,000."""


def widen_half_means(proto: ModelProto) -> int:
    """Compute each FP16 ReduceMean by GlobalAveragePool where it is one, else in FP32, in place; returns how many."""
    facts, taken, nodes, count = trace(proto, {}).tensors, used_names(proto), list[NodeProto](), 0
    for node in proto.graph.node:
        x = facts.get(node.input[0], TensorInfo()) if node.input else TensorInfo()
        if walk.qualified_name(node) != "ReduceMean" or x.elem != TensorProto.FLOAT16 or _is_short(node, x, facts):
            nodes.append(node)
            continue
        count += 1
        if _is_average_pool(node, x, facts):
            nodes.append(helper.make_node("GlobalAveragePool", node.input[:1], node.output, name=node.name))
            continue
        wide, mean = (free_name(f"{node.output[0]}_{part}", taken) for part in ("wide", "mean"))
        made = NodeProto()
        made.CopyFrom(node)
        made.input[0], made.output[0] = wide, mean
        nodes += [
            helper.make_node("Cast", node.input[:1], [wide], to=TensorProto.FLOAT),
            made,
            helper.make_node("Cast", [mean], node.output, to=TensorProto.FLOAT16),
        ]
    if count:
        replace_items(proto.graph.node, nodes)
    return count


def _axes(node: NodeProto, x: TensorInfo, facts: dict[str, TensorInfo]) -> set[int] | None:
    """Axes that are reduced, from 0; None where they are not known."""
    if x.shape is None:
        return None
    given = walk.attributes(node).get("axes")
    if given is None and len(node.input) > 1 and node.input[1]:
        value = facts.get(node.input[1], TensorInfo()).value
        if value is None:
            return None
        given = value.reshape(-1).tolist()
    if not given:
        return set() if walk.attributes(node).get("noop_with_empty_axes", 0) else set(range(len(x.shape)))
    return {int(axis) % len(x.shape) for axis in given} if x.shape else set()


def _is_short(node: NodeProto, x: TensorInfo, facts: dict[str, TensorInfo]) -> bool:
    axes, count = _axes(node, x, facts), 1
    for axis in axes or ():
        count = count * x.shape[axis] if x.shape is not None and x.shape[axis] >= 0 else _SAFE_COUNT + 1
    return axes is not None and 0 <= count <= _SAFE_COUNT


def _is_average_pool(node: NodeProto, x: TensorInfo, facts: dict[str, TensorInfo]) -> bool:
    kept = walk.attributes(node).get("keepdims", 1)
    return bool(kept) and x.shape is not None and len(x.shape) == 4 and _axes(node, x, facts) == {2, 3}
