"""From a model to ONNX Runtime's optimised graph: rewritten once, saved, loaded again, counted."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Container
from pathlib import Path

import onnx
import onnxruntime as ort

from trt_engine.backends.onnxruntime import hardware, providers, session
from trt_engine.backends.onnxruntime.options import OnnxRuntimeOptions, parse
from trt_engine.backends.onnxruntime.providers import Choice, choose
from trt_engine.config import BuildConfig
from trt_engine.device import info
from trt_engine.engine import WRITTEN, Needs, Precision, Share
from trt_engine.errors import BuildError, ModelError, PrecisionError, UsageError
from trt_engine.figures import percent
from trt_engine.files import digest, explain
from trt_engine.graph import walk
from trt_engine.graph.census import census, is_dequantize, precision_of
from trt_engine.graph.load import ENGINE_MARK, check_onnxruntime, external_files, read_proto
from trt_engine.model import Model
from trt_engine.protocols import BuildOutcome, BuildPlaces
from trt_engine.store import engine_key

__all__ = ["OnnxRuntimeBuilder"]

log = logging.getLogger(__name__)

EXTERNAL_FROM = 1 << 30
"""Bytes of model from which the engine's weights lie beside its graph: one protobuf ends at 2 GiB, and graphs grow."""

_STANDARD = ("", "ai.onnx", "ai.onnx.ml")


class OnnxRuntimeBuilder:
    """Builds for the CPU, CUDA and TensorRT providers."""

    def identity(self, config: BuildConfig) -> str:
        choice = _choice(config)
        parts = ["onnxruntime", ort.__version__, *map(providers.long_name, choice.names)]
        if choice.on_gpu:
            parts.append(hardware.architecture(hardware.board(choice.device)))
        if not choice.strict:  # nodes may run on the processor, in layouts made for it
            parts.append(",".join(info.cpu().features))
        return " ".join(parts).strip()

    def build(self, model: Model, config: BuildConfig, places: BuildPlaces) -> BuildOutcome:
        payload = places.payload
        options, choice = parse(config.options), _choice(config)
        proto = read_proto(model.path)
        check_onnxruntime(model, proto)
        level = _level(options, choice, proto)
        weights = _weights_file(self, model, config, payload)
        graph = _without_defaults(proto)
        choice = _optimise(model, graph, options, choice, level, payload, weights, allow_fallback=config.allow_fallback)
        reload_level = "all" if choice.compiles else "none"  # rewritten already; twice is slower to load and no faster
        _mark(payload)
        choice, placement = _reload(model, options, choice, reload_level, payload, allow_fallback=config.allow_fallback)
        built = read_proto(payload)
        side = _side_files(built, payload, weights)
        # ONNX Runtime's own providers have fused what they could; a compiler fuses the pairs when the engine is loaded
        found = census(built, tf32=choice.tf32, literal=not choice.compiles)
        precision = Precision(asked=config.precision, found=found)
        _keep_the_contract(precision, proto, choice)
        written = _written_otherwise(proto, precision)
        domains = {walk.domain_of(place.node) for place in walk.nodes(built)}
        blocked = hardware.BLOCKED_DOMAIN in domains
        if choice.fallback:
            log.warning("%s", choice.fallback)
        notes = {
            "graph_optimization": level,
            "load_optimization": reload_level,
            "providers": ",".join(choice.names),
            "operators": "standard" if domains.issubset(_STANDARD) else "onnxruntime",
            "nodes": placement,
        }
        if written is not None:
            notes[WRITTEN] = written
            log.info("the graph is %s, %s computes it in %s", written, choice.device, precision.main)
        if blocked:
            notes["layout"] = hardware.blocked_layout()
        if choice.on_gpu:
            notes["tf32"] = "on" if choice.tf32 else "off"
        if choice.fallback:
            notes["fallback"] = choice.fallback
        board = hardware.board(choice.device)
        return BuildOutcome(
            signature=model.signature,
            precision=precision,
            needs=Needs(
                library="onnxruntime",
                version=ort.__version__,
                cpu_features=hardware.layout_features() if blocked else (),
                providers=choice.names,
                compute_capability=board.compute_capability if board else None,
                gpu=board.name if board else None,
            ),
            files=side,
            warnings=(choice.fallback,) if choice.fallback else (),
            notes=notes,
            compiled=choice.compiles,
            device=choice.device,
        )


def _choice(config: BuildConfig) -> Choice:
    return choose(
        config.providers,
        config.device,
        allow_fallback=config.allow_fallback,
        options=config.options,
        precision=config.precision,
    )


def _level(options: OnnxRuntimeOptions, choice: Choice, proto: onnx.ModelProto) -> str:
    if options.graph_optimization is not None:
        return options.graph_optimization
    float8 = _holds(proto, _FLOAT8)
    if float8 and _holds(proto, _FLOAT16):
        log.info(
            "the graph holds FP8 and FP16: level `none`, at `basic` already ONNX Runtime can compute other numbers"
        )
        return "none"
    if choice.compiles:
        return "basic"  # the provider's own compiler does the rest when the engine is loaded
    if float8:
        log.info("the graph holds FP8: optimised at level `basic`, higher ones make operators that do not take FP8")
        return "basic"
    return "all"


_FLOAT8 = {
    onnx.TensorProto.FLOAT8E4M3FN,
    onnx.TensorProto.FLOAT8E4M3FNUZ,
    onnx.TensorProto.FLOAT8E5M2,
    onnx.TensorProto.FLOAT8E5M2FNUZ,
}


_FLOAT16 = {onnx.TensorProto.FLOAT16}


def _holds(proto: onnx.ModelProto, kinds: Container[int]) -> bool:
    values = (*proto.graph.input, *proto.graph.output)
    return (
        any(value.type.tensor_type.elem_type in kinds for value in values)
        or any(tensor.data_type in kinds for tensor in walk.tensors(proto))
        or any(
            attribute.name in ("to", "output_dtype") and attribute.i in kinds
            for place in walk.nodes(proto)
            for attribute in place.node.attribute
        )
    )


def _weights_file(builder: OnnxRuntimeBuilder, model: Model, config: BuildConfig, payload: Path) -> str | None:
    """The name of the file for the weights, or None to keep them in the graph.

    A model with external data gets one at any size: what no rewrite touched would go on pointing at the model's files.
    """
    wanted = parse(config.options).external_weights
    if model.external and wanted is False:
        raise UsageError(
            f"`{model.path}` keeps weights outside its graph, so its engine does too",
            hint="leave out `external_weights`",
        )
    if not (model.external or wanted or (wanted is None and model.nbytes >= EXTERNAL_FROM)):
        return None
    # two engines of one model may be copied into one folder, and the graph holds this name
    key = engine_key(model.digest, config, builder.identity(config))
    return f"{payload.stem}.{key[:8]}.weights"


def _without_defaults(proto: onnx.ModelProto) -> bytes | None:
    """The graph without the inputs that initializers give values to, in place; None where it has none.

    IR version 3 has every weight among the inputs, and ONNX Runtime folds none that a caller may replace: for an engine
    they are constants.
    """
    values = proto.graph.initializer
    stored = {item.name for item in values} | {item.values.name for item in proto.graph.sparse_initializer}
    inputs = [item for item in proto.graph.input if item.name not in stored]
    if len(inputs) == len(proto.graph.input):
        return None
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    proto.ir_version = max(proto.ir_version, 4)
    log.info("initializers that are inputs too are constants of the engine")
    graph: bytes = proto.SerializeToString()
    return graph


def _optimise(
    model: Model,
    graph: bytes | None,
    options: OnnxRuntimeOptions,
    choice: Choice,
    level: str,
    payload: Path,
    weights: str | None,
    *,
    allow_fallback: bool,
) -> Choice:
    """Write the optimised graph; the choice as it came true."""
    log.info("optimising `%s` at level %s for %s", model.path.name, level, ",".join(choice.names))
    # a compiling provider's work cannot be saved: the graph it will get is made without it
    target = Choice(("cpu",), ({},), "cpu", strict=False) if choice.compiles else choice
    made = session.session_options(options, level=level, save=payload, weights=weights)
    try:
        optimised = session.create(model.path, made, target, graph=graph)
    except session.ERRORS as error:
        if session.is_write_failure(error):
            raise session.on_write(payload, model.nbytes) from error
        raise session.on_load(error, model.path, target) from error
    if not payload.exists():
        raise BuildError("ONNX Runtime wrote no graph", hint="`-O graph_optimization=basic`")
    if choice.compiles:
        return choice
    settled = providers.read_back(optimised, choice, allow_fallback=allow_fallback)
    del optimised
    gc.collect()  # its weights go before the engine's own are loaded
    return settled


def _mark(payload: Path) -> None:
    """Say in the graph that it is an engine. Protobuf joins what follows a message to it: nothing is read or rewritten."""
    mark = onnx.ModelProto()
    mark.metadata_props.add(key=ENGINE_MARK, value=f"onnxruntime {ort.__version__}")
    try:
        with payload.open("ab") as file:
            file.write(mark.SerializeToString())
    except OSError as error:
        raise explain(error, payload) from error


def _reload(
    model: Model, options: OnnxRuntimeOptions, choice: Choice, level: str, payload: Path, *, allow_fallback: bool
) -> tuple[Choice, str]:
    """Load what was written, as a user will; the choice as it came true, and the nodes by provider."""
    if choice.compiles:  # what is compiled here is kept for those who load the engine
        choice = choice.caching(digest(payload), model.digest)
    try:
        loaded = session.create(payload, session.session_options(options, level=level), choice)
    except session.ERRORS as error:
        found = session.on_load(error, payload, choice)
        if not isinstance(found, ModelError | BuildError):
            raise found from error  # the machine's fault or the user's wish, not the graph's
        raise BuildError(
            f"the optimised graph does not load again: {found.message}", hint="`-O graph_optimization=basic`"
        ) from error
    names = [value.name for value in (*loaded.get_inputs(), *loaded.get_outputs())]
    if names != [spec.name for spec in model.signature]:
        raise BuildError(
            f"the optimised graph has the inputs and outputs {names}, the model {[s.name for s in model.signature]}",
            hint="`-O graph_optimization=basic`",
        )
    return providers.read_back(loaded, choice, allow_fallback=allow_fallback), placement(loaded)


def placement(loaded: ort.InferenceSession) -> str:
    """`CPUExecutionProvider 12`: the nodes each provider runs, as ONNX Runtime says."""
    counted: Counter[str] = Counter()
    for part in loaded.get_provider_graph_assignment_info():
        counted[part.ep_name] += len(part.get_nodes())
    return ", ".join(f"{name} {count}" for name, count in counted.items())


def _side_files(built: onnx.ModelProto, payload: Path, weights: str | None) -> tuple[Path, ...]:
    """The weights beside the graph; `BuildError` when it points at anything else."""
    outside = [item.location for item in external_files(built, payload)]
    if outside not in ([], [weights]):
        raise BuildError(
            f"the optimised graph points at {', '.join(outside)}, expected {weights or 'nothing outside'}",
            hint="`-O external_weights=on`",
        )
    if weights is None:
        return ()
    if not outside:  # every weight was small enough to stay in the graph
        payload.with_name(weights).unlink(missing_ok=True)
        return ()
    return (payload.with_name(weights),)


def _keep_the_contract(precision: Precision, proto: onnx.ModelProto, choice: Choice) -> None:
    """`PrecisionError` when the engine does not compute in what was asked for."""
    if precision.asked is None or precision.main == precision.asked:
        return
    shares = ", ".join(f"{name} {_percent(share)}" for name, share in precision.running.items()) or "nothing countable"
    given = precision_of(proto)
    hint = "precision is in the graph: export the model in it, or leave `--precision` out"
    if precision.asked == "tf32" and given == "fp32":
        why = f"{choice.device} computes this fp32 graph without TF32"
        hint = "TF32 is how NVIDIA GPUs from compute capability 8.0 on compute FP32: `--device cuda:0`, or leave it out"
    elif precision.main == "tf32":
        why = "the providers were allowed TF32"
        hint = (
            "`NVIDIA_TF32_OVERRIDE=0` in the environment forbids it: the TensorRT provider has no option for it"
            if choice.compiles
            else "leave `-O cuda.use_tf32` out, or ask for `--precision tf32`"
        )
    elif given == precision.asked:
        why = f"ONNX Runtime computes this {given} graph in {precision.main} on {choice.device}"
    else:
        why = f"the model itself is {given or 'without arithmetic'}"
    raise PrecisionError(
        f"asked for {precision.asked}, found {shares}: {why}",
        hint=hint,
    )


def _written_otherwise(proto: onnx.ModelProto, precision: Precision) -> str | None:
    """`int8`: what most of the graph is written in, where the engine computes most of it in another type; None where it
    does not, which TF32 is no case of."""
    if precision.main not in ("fp32", "tf32") or not (
        any(is_dequantize(place.node) for place in walk.nodes(proto)) or _holds(proto, _NARROW)
    ):
        return None
    given = precision_of(proto)
    return None if given in (None, "fp32", "fp64") else given


_NARROW = _FLOAT16 | {onnx.TensorProto.BFLOAT16}


def _percent(share: Share) -> str:
    return percent(share.layers if share.macs is None else share.macs)
