"""The model to build from the given one: cast or quantised first, where its graph is not what
`--precision` requires (TensorRT 11 and ONNX Runtime take the precision from the graph alone)."""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trt_engine.atomic_io import file_digest
from trt_engine.backend import BackendSpec, get_backend, gpu_hint, resolve_quant_target, with_default_device
from trt_engine.config.build import BuildConfig
from trt_engine.config.precision import QuantizeConfig, is_preset
from trt_engine.device import parse_device
from trt_engine.errors import FeedError, ModelError, PrecisionError, TrtEngineError
from trt_engine.graph import walk
from trt_engine.graph.dtype_breakdown import is_dequantize, is_quantize, main_precision
from trt_engine.graph.lint_rules.model_view import truncate
from trt_engine.graph.load import open_model, read_proto
from trt_engine.graph.quant_placement import QuantizedGraph
from trt_engine.graph.quant_target import quant_target
from trt_engine.graph.typing_rules import check_strong_typing
from trt_engine.model import Model
from trt_engine.precision.precision_check import PrecisionCheck, check_engine, check_graph
from trt_engine.protocols import BuildOutcome
from trt_engine.records.passport import NOT_FUSED, QUANT_TARGET
from trt_engine.tensors import Shape
from trt_engine.verbs.given_model import without_folder
from trt_engine.vision.spec import check_data_exists, read_json

if TYPE_CHECKING:
    from trt_engine.verbs.build.run import BuildPlan

log = logging.getLogger(__name__)

_CAST = ("fp16", "bf16")
_FLOATS = ("fp32", "tf32", *_CAST)
_DATA_FREE = ("int4",)
"""Weights alone are quantised: nothing has to be calibrated."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """The model to build, and what was done to it."""

    model: Model
    steps: tuple[str, ...] = ()
    """In words, for the passport; none for a model that is built as it was given."""
    notes: dict[str, str] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    """Nodes the preparation left as they were, on purpose."""


def require_calibration_data(model: Model, config: BuildConfig) -> None:
    """`PrecisionError` for a precision that needs missing calibration data, before anything is built."""
    asked, target = config.precision, resolve_quant_target(config)
    if asked is None or asked in _FLOATS:
        return
    proof = _check_precision(model, asked)
    if not proof.satisfied and target is not None and asked not in quant_target(target).formats:
        raise PrecisionError(
            f"{proof.describe()}; {quant_target(target).title} has no {asked} kernels to quantise it for",
            hint=f"{_where_built(config)}, or leave `--precision` out",
        )
    if not proof.satisfied and asked not in _DATA_FREE and not config.calib_data:
        path = str(model.path)
        made = str(model.path.with_suffix(f".{asked}.onnx"))
        aimed = ["--target", target] if target is not None else []
        command = shlex.join(["trt-engine", "quantize", path, "--to", asked, *aimed, "--calib-data"])
        without = target is not None and asked == "int8" and quant_target(target).dynamic
        raise PrecisionError(
            proof.describe(),
            hint=f"give calibration data with `--calib-data DATA`, or quantise first: "
            f"`{command} DATA -o {shlex.quote(made)}`"
            + (" (`--dynamic` in place of `--calib-data DATA` needs no data, for MatMul and Gemm)" if without else ""),
        )


def data_digest(data: str) -> str:
    """Digest of calibration data: a file, or all files of a folder; `FeedError` if it cannot be read."""
    if data == "random":
        return data
    path = Path(data)
    try:
        if not path.is_dir():
            return file_digest(path)
        found = sorted(item.relative_to(path).as_posix() for item in path.rglob("*") if item.is_file())
        whole = hashlib.sha256()
        for name in found:
            whole.update(f"{name}\0{file_digest(path / name)}\n".encode())
        return f"{len(found)} files {whole.hexdigest()}"
    except OSError as error:
        raise FeedError(
            f"the data `{data}` cannot be read: {error.strerror or error}",
            hint="check its rights" if path.exists() else "check its path",
        ) from error


def preprocess_digest(preprocess: str | None) -> str | None:
    """The preset's name, or what the file of pre-processing holds."""
    if preprocess is None or is_preset(preprocess):
        return preprocess
    return json.dumps(read_json(Path(preprocess)), sort_keys=True)


def calibration_warnings(model: Model, config: BuildConfig) -> str | None:
    """Warnings for calibration data that this build does not use; `FeedError` for data that is not there."""
    data, asked = config.calib_data, config.precision
    check_data_exists(config)
    if data is None:
        return f"`--preprocess {config.preprocess}` is not used without `--calib-data`" if config.preprocess else None
    unused = f"`--calib-data {data}` is not used"
    if asked is None:
        return f"{unused}: nothing is quantised without `--precision`, as `--precision int8`"
    if asked in _FLOATS:
        return f"{unused}: `--precision {asked}` quantises nothing"
    return f"{unused}: the graph is {asked} already" if _check_precision(model, asked).satisfied else None


def placement_target(config: BuildConfig, to: str) -> str | None:
    """The target that a model is quantised for where these settings build it; None where that is open, and where the
    library has no kernels of that format, so that no placement is its own."""
    target = resolve_quant_target(config)
    return target if target is not None and to in quant_target(target).formats else None


def plan_placement(model: Model, config: BuildConfig) -> tuple[str | None, str | None]:
    """The target whose kernels the quantised layers of this build are for, of a graph that has some or gets them; and a
    warning where its own are placed for another library, or `PrecisionError` where the target's kernels cannot compute in
    `--precision` then."""
    target, asked = resolve_quant_target(config), config.precision
    if target is None:
        return None, None
    placed = QuantizedGraph(model.graph)
    aimed = target if placed or (asked is not None and asked not in _FLOATS) else None
    mismatch = placed.mismatch(target) if asked != "fp32" else None
    if mismatch is None:
        return aimed, None
    hint = placed.remedy(target)
    if asked == placed.format and _check_precision(model, asked).satisfied:
        raise PrecisionError(
            f"requested {asked}: {mismatch}", hint=f"{hint}; or leave `--precision` out to build the graph as it is"
        )
    return aimed, f"{mismatch} ({hint})"


def prepare(model: Model, config: BuildConfig, folder: Path) -> PreparedModel:
    """The model in the requested precision: itself where it is that already, else a copy in `folder`."""
    target = resolve_quant_target(config)
    if target in _STRONGLY_TYPED:
        _warn_strong_typing(model)
    asked = config.precision
    if asked is None or asked in ("fp32", "tf32") or _check_precision(model, asked).satisfied:
        mismatch = QuantizedGraph(model.graph).mismatch(target) if target is not None else None
        return PreparedModel(model, notes={NOT_FUSED: mismatch} if mismatch is not None else {})
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / model.path.name
    return _cast_model(model, asked, made) if asked in _CAST else _quantize_model(model, asked, config, made, target)


_STRONGLY_TYPED = ("tensorrt", "tensorrt-rtx")


def _warn_strong_typing(model: Model) -> None:
    """Warn of what TensorRT's strong typing holds against the Q/DQ pairs of a model as it was brought."""
    if not any(is_quantize(place.node) or is_dequantize(place.node) for place in walk.nodes(model.proto)):
        return
    for finding in truncate(check_strong_typing(model.proto), 3):
        if finding.severity != "info":
            log.warning("%s: %s (%s)", finding.code, finding.message, finding.location)


def _check_precision(model: Model, requested: str) -> PrecisionCheck:
    return check_graph(requested, model.proto)


def _cast_model(model: Model, to: str, target: Path) -> PreparedModel:
    from trt_engine.precision.cast_model import cast

    report = cast(model.path, to, out=target)
    made = open_model(target)
    step = f"cast to {to}: {report.nodes_cast} of {report.nodes} nodes, {len(report.fp32_nodes)} kept in fp32"
    log.info("the graph is not %s: %s", to, step)
    notes = {"prepared": step, "prepared_digest": made.digest}
    if report.fp32_nodes:
        notes["kept_in_fp32"] = ", ".join(f"{item.node} ({item.code})" for item in report.fp32_nodes[:32])
    return PreparedModel(made, (step, *report.notes), notes)


def _calibration_shapes(model: Model, config: BuildConfig) -> dict[str, Shape]:
    """Shapes of random calibration inputs: the first profile's optimum, where more than the batch is open."""
    wanted = {spec.name for spec in model.signature.inputs if any(at > 0 for at in spec.dynamic)}
    if config.calib_data not in (None, "random") or not config.profiles:
        return {}
    return {name: span.opt for name, span in config.profiles[0].ranges.items() if name in wanted}


def _quantize_model(model: Model, to: str, config: BuildConfig, out: Path, target: str | None) -> PreparedModel:
    from trt_engine.verbs.quantize.run import quantize_untimed

    aimed = QuantizeConfig(
        target=target or QuantizeConfig().target, shapes=_calibration_shapes(model, config), calib_data=config.calib_data,
        preprocess=config.preprocess,
    )  # fmt: skip
    report = quantize_untimed(model, to, out=out, config=aimed)
    made = open_model(out)
    whom = f" for {quant_target(target).title}" if target is not None else ""
    step = f"quantised to {to}{whom}: {len(report.quantized)} nodes, {len(report.unquantized)} left as they were"
    log.info("the graph is not %s: %s", to, step)
    notes = {"prepared": step, "prepared_digest": made.digest}
    notes["calibrated_with"] = without_folder(config.calib_data or "nothing")
    if pixels := (report.calibration or {}).get("preprocess"):
        notes["preprocess"] = json.dumps(pixels)
    if target is not None:
        notes[QUANT_TARGET] = target
        if (mismatch := QuantizedGraph(made.graph).mismatch(target)) is not None:
            notes[NOT_FUSED] = mismatch
    return PreparedModel(made, (step,), notes, tuple(item.node for item in report.unquantized))


def require_precision(
    spec: BackendSpec, prepared: PreparedModel, plan: BuildPlan, payload: Path, outcome: BuildOutcome
) -> str | None:
    """`PrecisionError` unless the engine is in the requested precision; a note where the engine does not show it."""
    asked = plan.config.precision
    assert asked is not None
    readable = spec.payload_suffix == ".onnx"
    proof = check_engine(
        asked,
        prepared.model.proto,
        read_proto(payload) if readable else None,
        outcome.precision.shares,
        providers=_compute_target(plan, outcome),
        compiled=outcome.compiled,
        excluded=prepared.excluded,
        not_fused={} if plan.target is None else QuantizedGraph(prepared.model.graph).rejections(plan.target),
    )
    for miss in proof.violations if proof.satisfied else ():
        log.debug("%s: `%s` (%s) is %s", asked, miss.node, miss.op, miss.reason)
    proof.require(_mismatch_hint(plan, prepared))
    return None if proof.conclusive else f"the precision contract could not be proved: {proof.remark}"


def missing_kernels(error: ModelError, plan: BuildPlan, prepared: PreparedModel) -> TrtEngineError:
    """The error of a build that lacks kernels for the precision that the model was brought to; else the given one."""
    if not (error.machine_specific and prepared.steps and plan.config.precision in _CAST):
        return error
    text = error.message.replace(str(prepared.model.path), prepared.model.path.name)
    return PrecisionError(f"requested {plan.config.precision}: {text}", hint=_mismatch_hint(plan, prepared))


def _compute_target(plan: BuildPlan, outcome: BuildOutcome) -> tuple[str, ...]:
    """As a miss names what computes: the target of a quantised graph, else the providers."""
    if plan.target is not None:
        return (quant_target(plan.target).title,)
    return outcome.requirements.providers or plan.config.providers or (parse_device(plan.config.device)[0],)


def _mismatch_hint(plan: BuildPlan, prepared: PreparedModel) -> str:
    """Hint for an engine that is not in the requested precision."""
    asked, path = plan.config.precision, plan.source or plan.model.path
    if asked == "fp32" or (asked == "tf32" and main_precision(plan.model.graph) != "fp32"):
        return "precision is in the graph: export the model in it, or leave `--precision` out"
    kernels = "leave `--precision` out to build the graph as it is; the passport records what it runs in"
    if prepared.steps and asked in ("fp16", "bf16"):
        made = shlex.quote(str(path.with_suffix(f".{asked}.onnx")))
        cast = f"`trt-engine cast {shlex.quote(str(path))} --to {asked} -o {made}`"
        return f"{_where_built(plan.config)}, or {cast} and {kernels}"
    if plan.target is not None:  # kernels exist but do not support the graph's placement
        return kernels
    return f"{_where_built(plan.config)}, or {kernels}"


def _where_built(config: BuildConfig) -> str:
    """Where there are kernels for the requested precision, with the flags to add."""
    asked = config.precision
    assert asked is not None
    here = get_backend(config.backend)
    if parse_device(with_default_device(config).device)[0] == "cpu" or asked not in here.gpu_precisions:
        return gpu_hint(asked)
    return f"build for a GPU that has {asked} kernels"
