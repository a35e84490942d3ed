"""`cast` whole: the graph rewritten, checked, counted, and compared with its FP32 source in ONNX Runtime."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from trt_engine import files
from trt_engine.api.pictures import CalibrationInputs, Given, inputs_of
from trt_engine.backends.onnxruntime.kernels import kernels_of
from trt_engine.backends.onnxruntime.run import reference
from trt_engine.benchmark.child import memory_available
from trt_engine.engine import Precision
from trt_engine.equivalence.random_inputs import random_inputs
from trt_engine.equivalence.sorted_outputs import compare_outputs, sorted_outputs
from trt_engine.equivalence.tolerance import tolerance_of
from trt_engine.errors import MemoryExhausted, TrtEngineError
from trt_engine.graph.census import census, layers_of
from trt_engine.graph.load import open_model, read_proto
from trt_engine.model import Model
from trt_engine.precision import autocast as careful_path
from trt_engine.precision import cast as light_path
from trt_engine.precision.ranges import ranges
from trt_engine.precision.rounding import with_rounding
from trt_engine.precision.samples import open_samples
from trt_engine.records import CastParity, CastReport, Finding, RangesReport
from trt_engine.runtime.feeds import numpy_dtype, shapes_of
from trt_engine.tensors import Shape

__all__ = ["cast", "parity_of"]

log = logging.getLogger(__name__)

_EMULATED_UP_TO = 900 << 20
"""Bytes of a model whose numbers are emulated: it is twice as large in FP32, and one protobuf ends at 2 GiB."""
_EMULATED_IN = 13
"""Times its bytes that emulating a model takes of memory, at the peak: graphs in FP32 and the sessions of both."""


def cast(
    model: Path | str,
    to: str,
    *,
    out: Path | str | None = None,
    keep_io: bool = True,
    exclude_nodes: Sequence[str] = (),
    exclude_types: Sequence[str] = (),
    exclude_patterns: Sequence[str] = (),
    auto: bool | RangesReport = False,
    data: Any = None,
    preprocess: Given | None = None,
    shapes: Mapping[str, Shape] | None = None,
    init_max: float | None = None,
    clamp_masks: bool = False,
    careful: bool = False,
    parity: bool = True,
    seed: int = 0,
    yes: bool = False,
    dry_run: bool = False,
) -> CastReport:
    """The model in `fp16` or `bf16` at `out`: what was cast, kept and why, and how far its numbers lie from FP32's.

    `auto` keeps what leaves the type's range on `data` (anything `ranges` takes) in FP32, or what a ranges report names.
    `preprocess` makes inputs of pictures as in `quantize`. `careful` lets ModelOpt's AutoCast decide instead. Parity is
    measured on the first of the data, else on seeded random inputs of batch 2.
    """
    opened = open_model(model)
    inputs = CalibrationInputs(None) if data is None else inputs_of(opened, data, preprocess)
    data, warnings = inputs.data, list[str]()
    if careful:
        report = _carefully(
            opened, to, out, keep_io, exclude_nodes, exclude_types, exclude_patterns, data, init_max, yes
        )
    else:
        found: RangesReport | None = auto if isinstance(auto, RangesReport) else None
        if auto is True:
            found = ranges(opened, data, shapes=shapes, seed=seed)
            warnings += found.warnings
        report = light_path.cast(
            opened.path,
            to,
            out=out,
            keep_io=keep_io,
            exclude_nodes=exclude_nodes,
            exclude_types=exclude_types,
            exclude_patterns=exclude_patterns,
            auto=found,
            init_max=init_max,
            clamp_masks=clamp_masks,
            yes=yes,
            dry_run=dry_run,
        )
    report = replace(report, preprocess=inputs.recorded)
    for finding in report.findings:
        if finding.severity != "info":
            warnings.append(f"{finding.message} ({finding.where})")
    if report.out is None:
        return replace(report, warnings=tuple(warnings))
    written = open_model(report.out)
    found_in = Precision(asked=to, found=census(read_proto(written.path)))
    judged = parity_of(opened, written, to, data=data, shapes=shapes, seed=seed) if parity else None
    if judged is not None and judged.outputs and judged.note and not judged.emulated:
        warnings.append(f"parity is not that of {to}: {judged.note}")
        log.info("%s", warnings[-1])
    if judged is not None and (lost := [name for name, error in judged.outputs.items() if not isfinite(error.max_rel)]):
        warnings.append(f"in {to} {', '.join(f'`{name}`' for name in lost)} is infinite or no number where FP32 is not")
        log.warning("%s", warnings[-1])
    if to == "fp16" and data is not None and auto is not True and open_samples(data, opened.signature).again:
        overflows = tuple(_overflows(ranges(opened, data, shapes=shapes, seed=seed), report))
        warnings += [f"{item.message} ({item.where})" for item in overflows]
        report = replace(report, findings=(*report.findings, *overflows))
    return replace(report, precision=found_in, parity=judged, warnings=tuple(warnings))


def _overflows(found: RangesReport, report: CastReport) -> Iterator[Finding]:
    """The tensors that leave FP16's range on the data and are not between nodes that were kept in FP32."""
    kept = {item.node for item in report.kept}
    met: set[str] = set()
    for item in found.exclude:
        if item.code == "fp16-overflow" and item.node not in kept and item.tensor not in met:
            met.add(item.tensor)
            yield Finding(
                item.code, "error", f"on this data {item.reason}", item.node, "`--auto` keeps it in FP32, or take BF16"
            )


def _carefully(
    opened: Model,
    to: str,
    out: Path | str | None,
    keep_io: bool,
    nodes: Sequence[str],
    types: Sequence[str],
    patterns: Sequence[str],
    data: Any,
    init_max: float | None,
    yes: bool,
) -> CastReport:
    target = Path(out) if out is not None else opened.path.with_suffix(f".{to}.onnx")
    feeds = next(iter(open_samples(data, opened.signature))).feeds if data is not None else None
    return careful_path.autocast(
        opened.path,
        to,
        out=target,
        keep_io=keep_io,
        exclude_nodes=nodes,
        exclude_types=types,
        exclude_patterns=patterns,
        feeds=feeds,
        init_max=init_max,
        yes=yes,
    )


def parity_of(
    source: Model,
    result: Model,
    to: str,
    *,
    data: Any = None,
    shapes: Mapping[str, Shape] | None = None,
    seed: int = 0,
) -> CastParity:
    """How far the result's outputs, computed in `to`, lie from the source's, with the kernels that really ran.

    Where ONNX Runtime has no kernels for the type, or runs FP32 ones between Casts, every result is rounded to the type
    instead, and that is said.
    """
    try:
        if data is not None:
            batch = next(iter(open_samples(data, source.signature)))
            feeds, told = batch.feeds, batch.source
        else:
            batch_axis = source.signature.batch_axis
            chosen = shapes_of(source.signature, None, batch=2 if batch_axis else None, overrides=shapes)
            feeds, told = random_inputs(source.path, source.signature, chosen, seed), f"seeded random, seed {seed}"
        expected = reference(source.path, source.signature).run(feeds)
        given = {spec.name: feeds[spec.name].astype(numpy_dtype(spec.dtype)) for spec in result.signature.inputs}
        outputs, kernels, emulated, note = _run(result, to, given)
    except MemoryExhausted:
        raise
    except TrtEngineError as error:
        log.warning("parity was not judged: %s", error.message)
        return CastParity("", {}, {}, False, f"not judged: {error.message}")
    ranked = sorted_outputs(read_proto(result.path))
    return CastParity(
        inputs=told,
        outputs=compare_outputs(outputs, expected, ranked, tolerance_of(to)),
        kernels=kernels,
        emulated=emulated,
        note=note,
    )


def _run(result: Model, to: str, feeds: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int], bool, str | None]:
    """Outputs, layers by the type they ran in, whether that was emulation, and what to say of it.

    Emulated is what ONNX Runtime has no kernels for, and what it would run in FP32: those numbers are not the type's.
    """
    try:
        kernels = kernels_of(result.path)
        why = _widened(result, kernels)
        if why is None or _too_large(result):
            outputs = reference(result.path, result.signature).run(feeds)
            return outputs, kernels, False, why and f"{why}, and the model is too large to be emulated here"
    except MemoryExhausted:
        raise
    except TrtEngineError as error:
        if _too_large(result):
            raise
        why = f"ONNX Runtime has no kernels for it here ({error.message})"
    proto = with_rounding(read_proto(result.path, weights=True), result.path.parent)
    with files.staging_folder(result.path) as folder:
        path = folder / "rounded.onnx"
        path.write_bytes(proto.SerializeToString())
        outputs = reference(path, open_model(path).signature).run(feeds)
        kernels = kernels_of(path)
    return outputs, kernels, True, f"emulated: {why}, so every result was rounded to {to} instead"


def _too_large(result: Model) -> bool:
    """Whether a model is not emulated: beyond one protobuf, or what this machine has free."""
    return result.nbytes > min(_EMULATED_UP_TO, memory_available() // _EMULATED_IN)


def _widened(result: Model, kernels: Mapping[str, int]) -> str | None:
    """What to say of layers that the model has in a 16-bit type and ONNX Runtime runs in FP32; None where there are none."""
    own = sum(layer.kind == "fp32" for layer in layers_of(read_proto(result.path)))
    wide = kernels.get("fp32", 0) - own
    if wide <= 0:
        return None
    return f"{wide} of {sum(kernels.values())} layers run in FP32 between Casts that ONNX Runtime puts in"
