"""`cast`: rewrite the graph, check it, count its dtypes, and compare it with its FP32 source in ONNX Runtime."""

from __future__ import annotations

import functools
import itertools
import logging
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from trt_engine import atomic_io
from trt_engine.backends.onnxruntime.cpu_kernels import kernel_dtypes
from trt_engine.backends.onnxruntime.host_session import reference_session
from trt_engine.config.precision import CastConfig, RangesConfig
from trt_engine.config.profiles import check_known_shape
from trt_engine.config.settings import followed, replace_values
from trt_engine.config.settings import settings as settings_of
from trt_engine.equivalence.random_inputs import random_inputs
from trt_engine.equivalence.sorted_outputs import compare_outputs, sorted_outputs
from trt_engine.equivalence.tolerance import select_tolerance
from trt_engine.errors import MemoryExhausted, SetupError, TrtEngineError
from trt_engine.format import quoted
from trt_engine.graph.dtype_breakdown import compute_layers, dtype_shares
from trt_engine.graph.emulate_half import emulate_half_precision, exceeds_emulation
from trt_engine.graph.load import open_model, read_proto
from trt_engine.model import Model
from trt_engine.precision import autocast, cast_model, tensor_ranges
from trt_engine.precision.quantize_checks import random_shapes
from trt_engine.precision.samples import Batch, open_samples
from trt_engine.progress import ProgressOption
from trt_engine.public_function import public_function
from trt_engine.records.base import Finding
from trt_engine.records.passport import Precision
from trt_engine.records.precision import CastParity, CastReport, RangesReport
from trt_engine.reporting.tables import batch_option
from trt_engine.runtime.feeds import complete_shapes, describe_inputs, numpy_dtype, read_values, set_values
from trt_engine.verbs.calibration_images import CalibrationInputs, images_as_inputs
from trt_engine.verbs.given_model import AnyModel, on_disk, takes_model

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import CastSettings

log = logging.getLogger(__name__)


@public_function
@takes_model("model")
@atomic_io.all_or_nothing()
def cast(
    model: AnyModel,
    to: Literal["fp16", "bf16"],
    *,
    out: Path | str | None = None,
    config: CastConfig | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: ProgressOption = False,
    **settings: Unpack[CastSettings],
) -> CastReport:
    """The model in `fp16` or `bf16` at `out`: what was cast, kept and why, and its difference from FP32.

    `auto` keeps in FP32 what leaves the type's range on `calib_data` (as of `ranges`), or what a ranges report names.
    `preprocess` turns images into inputs as in `quantize`. `autocast` lets ModelOpt's AutoCast decide instead. Parity is
    measured on the first of the data, else on seeded random inputs of batch 2. Raises `UsageError` for another type than
    these two or images without `preprocess`, `ModelError` for a model that cannot be cast.
    """
    config = replace_values(config or CastConfig(), settings)
    opened, data = open_model(on_disk(model)), config.calib_data
    read_values(config.inputs, opened.signature)  # before anything is written
    if isinstance(largest := getattr(config.ranges, "amax", config.ranges), Mapping):
        beyond = tensor_ranges.out_of_fp16(opened, largest)
        config = replace(config, ranges=beyond if to == "fp16" else {})  # BF16 has the range of FP32
    for name, shape in config.shapes.items():
        check_known_shape(opened.signature.input(name), shape, "--shapes")
    inputs, first = CalibrationInputs(None), None
    if config.calib_data is not None:
        inputs = images_as_inputs(opened, config.calib_data, config.preprocess)
        config = replace(config, calib_data=inputs.calib_data)
        if not dry_run:  # before anything is written: the data may be wrong
            first = _take_first(opened, config)
            config = replace(config, calib_data=first.samples)
    measure = functools.partial(
        tensor_ranges.ranges,
        opened,
        config.calib_data,
        config=RangesConfig(shapes=config.shapes, seed=config.seed, inputs=config.inputs),
    )
    warnings: list[str] = []
    overflows = measure() if not dry_run and _may_overflow(to, config, opened) else None
    judged: list[tuple[Model, CastParity | None]] = []

    settled, batch = config, first.batch if first is not None else None

    def judge(path: Path) -> None:
        made = open_model(path)
        parity = measure_cast_parity(opened, made, to, settled, batch) if settled.parity else None
        judged.append((made, parity))

    if config.autocast:
        target = Path(out) if out is not None else opened.path.with_suffix(f".{to}.onnx")
        feeds = first.batch.feeds if first is not None else None
        report = autocast.autocast(
            opened.path, to, out=target, config=config, feeds=feeds, overwrite=overwrite, check=judge
        )
    else:
        if config.auto_exclude:
            config = replace(config, ranges=measure())
            warnings += config.ranges.warnings
        report = cast_model.cast(
            opened.path, to, out=out, ranges=config.ranges, config=config, overwrite=overwrite, dry_run=dry_run,
            check=judge,
        )  # fmt: skip
    report = replace(report, preprocess=inputs.provenance)
    warnings += [f"{item.message} ({item.location})" for item in report.findings if item.severity != "info"]
    if not judged:
        return replace(report, warnings=tuple(warnings))
    written, parity = judged[-1]
    if parity is not None and parity.outputs and parity.note and not parity.emulated:
        log.info("parity is not that of %s: %s", to, parity.note)
        warnings.append(f"parity is not that of {to}: {parity.note}")
    lost = _lost_outputs(parity)
    if lost:
        cure = _CURES[to][config.auto_exclude]
        log.warning("in %s %s (%s)", to, "; ".join(lost), cure)
        warnings.append(f"in {to} {'; '.join(lost)} ({cure})")
    if overflows is not None:
        found = tuple(_check_overflows(overflows, report))
        warnings += [f"{item.message} ({item.location})" for item in found]
        report = replace(report, findings=(*report.findings, *found))
    shares = Precision(requested=to, shares=dtype_shares(written.graph))
    return replace(
        report,
        precision=shares,
        parity=parity,
        warnings=tuple(warnings),
        next_command=_next_command(report, to, replace(config, calib_data=data), parity, bool(lost)),
    )


@dataclass(frozen=True, slots=True)
class _FirstBatch:
    """The first batch of the data, and data that still begins with it."""

    batch: Batch
    samples: Any


def _take_first(model: Model, config: CastConfig) -> _FirstBatch:
    """Read the first batch; an iterator is given it back."""
    samples = open_samples(
        config.calib_data, model.signature, given=read_values(config.inputs, model.signature), model=model
    )
    batches = iter(samples)
    batch = next(batches, None) or samples.first()
    if samples.repeatable:
        return _FirstBatch(batch, config.calib_data)
    return _FirstBatch(batch, replace(samples, iterate=lambda _: itertools.chain([batch], batches)))


_LOST = 0.5
"""Share of its scale that a channel differs by from where it is lost: the most that a model's own sensitivity allows."""
_CURES = {
    "fp16": (
        "`--auto-exclude` keeps in FP32 what leaves FP16's range on your data",
        "`--to bf16` has FP32's range; `--exclude-node` keeps more nodes in FP32",
    ),
    "bf16": ("`--to fp16` has more digits; `--exclude-node` keeps more nodes in FP32",) * 2,
}
"""What helps against a lost output, without `--auto-exclude` and with it."""


def _lost_outputs(parity: CastParity | None) -> list[str]:
    """What happened to each output that no longer is the model's."""
    lost = []
    for name, error in (parity.outputs if parity is not None else {}).items():
        if not isfinite(error.max_rel):
            lost.append(f"`{name}` is infinite or no number where FP32 is not")
        elif error.noise is not None and (why := replace(select_tolerance("fp16"), limit=_LOST).violation(error)):
            lost.append(f"`{name}` no longer matches the model: {why}")
    return lost


def _next_command(report: CastReport, to: str, config: CastConfig, parity: CastParity | None, lost: bool) -> str | None:
    """The build with what was given here, or the cast to try instead; None where nothing but the file is needed."""
    given = followed(config, "shapes", "inputs")
    if not given and config.calib_data is not None:
        given = batch_option(report.model, data=config.calib_data)
    if not lost or report.out is None:
        if to == "bf16" and parity is not None and parity.emulated:
            given = f" --backend tensorrt{given or batch_option(report.model, batch=False)}"
        return f"trt-engine build {shlex.quote(report.out)}{given}" if given and report.out else None
    if to != "fp16":
        return f"trt-engine build {shlex.quote(report.model)}{given or batch_option(report.model, batch=False)}"
    kept = followed(
        config, *(item.name for item in settings_of(config) if item.name not in ("auto_exclude", "autocast"))
    )
    out = Path(report.out)
    how = f"fp16 --auto-exclude{kept} -o {shlex.quote(report.out)} --overwrite"
    if config.auto_exclude:
        how = f"bf16{kept} -o {quoted(out.with_name(f'{Path(report.model).stem}.bf16.onnx'))}"
    return f"trt-engine cast {shlex.quote(report.model)} --to {how}"


def _may_overflow(to: str, config: CastConfig, model: Model) -> bool:
    """Whether the data shows overflows of FP16 that were not looked for before the cast."""
    if to != "fp16" or config.calib_data is None or config.auto_exclude:
        return False
    given = read_values(config.inputs, model.signature)
    return open_samples(config.calib_data, model.signature, given=given).repeatable


def _check_overflows(found: RangesReport, report: CastReport) -> Iterator[Finding]:
    """The tensors that leave FP16's range on the data and are not between nodes that were kept in FP32."""
    kept = {item.node for item in report.fp32_nodes}
    met: set[str] = set()
    for item in found.exclude:
        if item.code == "fp16-overflow" and item.node not in kept and item.tensor not in met:
            met.add(item.tensor)
            yield Finding(
                item.code,
                "error",
                f"on this data {item.reason}",
                item.node,
                "`--auto-exclude` keeps it in FP32, or take BF16",
            )


def measure_cast_parity(
    source: Model, result: Model, to: str, config: CastConfig, batch: Batch | None = None
) -> CastParity:
    """Difference of the result's outputs, computed in `to`, from the source's, with the kernels that ran.

    `batch` is the input to compare on; without it, seeded random of batch 2 or of the shapes of `config`.
    Where ONNX Runtime has no kernels for the type, or runs FP32 ones between Casts, every result is rounded to the type
    instead, as the note states.
    """
    try:
        if batch is not None:
            feeds, origin = batch.feeds, batch.source
        else:
            given = read_values(config.inputs, source.signature)
            chosen = complete_shapes(source.signature, random_shapes(source.signature, 2, config.shapes, given), given)
            known = set_values(source.signature, given)
            feeds = random_inputs(source.path, known, chosen, config.seed, given)
            origin = describe_inputs(known, config.inputs, given, f"seeded random, seed {config.seed}")
        expected = reference_session(source.path, source.signature).run(feeds)
        given = {spec.name: feeds[spec.name].astype(numpy_dtype(spec.dtype)) for spec in result.signature.inputs}
        outputs, kernels, emulated, note = _run_cast_model(result, to, given)
    except (MemoryExhausted, SetupError):
        raise
    except TrtEngineError as error:
        why = f"{error.message} ({error.hint})" if error.hint else error.message
        log.warning("parity was not judged: %s", why)
        return CastParity("", {}, {}, False, f"not judged: {why}")
    ranked = sorted_outputs(result.proto)
    return CastParity(
        inputs=origin,
        outputs=compare_outputs(outputs, expected, ranked, select_tolerance(to).for_graph(result.proto)),
        kernels=kernels,
        emulated=emulated,
        note=note,
    )


def _run_cast_model(
    result: Model, to: str, feeds: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, int], bool, str | None]:
    """Outputs, layers by compute dtype, whether that was emulation, and a note.

    Emulated is what ONNX Runtime has no kernels for, and what it would run in FP32: those numbers are not the type's.
    """
    try:
        kernels = kernel_dtypes(result.path)
        why = _fp32_fallback_note(result, kernels)
        if why is None or exceeds_emulation(result):
            outputs = reference_session(result.path, result.signature).run(feeds)
            return outputs, kernels, False, why and f"{why}, and the model is too large to be emulated here"
    except MemoryExhausted:
        raise
    except TrtEngineError as error:
        if exceeds_emulation(result):
            raise
        why = f"ONNX Runtime has no kernels for it here ({error.message.replace(str(result.path), result.path.name)})"
    proto = emulate_half_precision(read_proto(result.path, weights=True), result.path.parent)
    with atomic_io.staging_folder(result.path) as folder:
        path = folder / "rounded.onnx"
        path.write_bytes(proto.SerializeToString())
        outputs = reference_session(path, open_model(path).signature).run(feeds)
        kernels = kernel_dtypes(path)
    return outputs, kernels, True, f"emulated: {why}, so every result was rounded to {to} instead"


def _fp32_fallback_note(result: Model, kernels: Mapping[str, int]) -> str | None:
    """Note on 16-bit layers that ONNX Runtime runs in FP32; None without any."""
    own = sum(layer.dtype == "fp32" for layer in compute_layers(result.proto))
    wide = kernels.get("fp32", 0) - own
    if wide <= 0:
        return None
    return f"{wide} of {sum(kernels.values())} layers run in FP32 between Casts that ONNX Runtime puts in"
