"""`trt-engine build`: an engine and its passport from an ONNX model."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.cli import options, output
from trt_engine.config import BuildConfig
from trt_engine.engine import WRITTEN, OutputError
from trt_engine.errors import UsageError
from trt_engine.figures import percent, size

if TYPE_CHECKING:
    from trt_engine.api.building import BuildPlan
    from trt_engine.records import BuildReport

__all__ = ["command"]

log = logging.getLogger(__name__)


@click.command()
@click.argument("model", metavar="MODEL", required=False, type=options.FILE)
@options.of(BuildConfig)
@options.out_option("Where the engine goes, a file or a folder [the store alone].")
@click.option("--onnx", "trtexec_onnx", type=options.FILE, hidden=True)
@click.option("--saveEngine", "trtexec_save", type=options.FILE, hidden=True)
@click.option("--force", is_flag=True, help="Build although the store has this engine.")
@options.yes_option
@options.dry_run_option
@options.common
def command(
    talk: output.Talk,
    model: Path | None,
    out: Path | None,
    trtexec_onnx: Path | None,
    trtexec_save: Path | None,
    force: bool,
    yes: bool,
    dry_run: bool,
    **values: Any,
) -> None:
    """Build an engine from an ONNX MODEL, prove it against plain ONNX Runtime, and seal it with its passport.

    \b
      trt-engine build model.onnx --batch 1:8:64 -o model.engine.onnx
      trt-engine build model.onnx --profile images:1x3x640x640,8x3x640x640,64x3x640x640
      trt-engine build model.onnx -O graph_optimization=basic -O intra_op_threads=2
    """
    source = _one(model, trtexec_onnx, "MODEL", "--onnx")
    if source is None:
        raise UsageError("no model is given", hint="`trt-engine build MODEL.onnx`")
    config = options.config_from(BuildConfig, values)

    from trt_engine.api.building import carry_out, plan

    target = _one(out, trtexec_save, "-o", "--saveEngine")
    told = f"{target}/" if target is not None and options.out_is_folder() else target
    planned = plan(source, out=told, config=config, yes=yes)
    planned = replace(planned, warnings=(*_open_batch(planned, config), *planned.warnings))
    report = _planned(planned, force=force) if dry_run else _reported(planned, carry_out(planned, force=force))
    output.emit(
        talk, output.document("build", report, command=options.spelled_command()), _text(report, planned)
    )  # fmt: skip


def _open_batch(planned: BuildPlan, config: BuildConfig) -> Iterator[str]:
    """The warning for a model of any batch that is built for one alone because no batch was given."""
    inputs = [
        spec.name for spec in planned.model.signature.inputs if 0 in spec.dynamic and spec.name not in config.shapes
    ]
    if config.batch is None and not config.profiles and inputs:
        yield (
            f"the batch of `{inputs[0]}` is open and none was given: the engine takes batch 1 alone; "
            "`--batch 1:8:64` builds it for 1 to 64, tuned for 8"
        )


def _one(ours: Path | None, theirs: Path | None, name: str, spelling: str) -> Path | None:
    if ours is not None and theirs is not None and ours != theirs:
        raise UsageError(f"`{name}` is `{ours}` and `{spelling}` is `{theirs}`", hint=f"leave `{spelling}` out")
    return ours if ours is not None else theirs


def _reported(planned: BuildPlan, built: Any) -> BuildReport:
    from trt_engine.engine import passport_path
    from trt_engine.records import BuildReport

    engine = built.engine
    passport = engine.passport
    names = ("engine", *(f"side_file_{index}" for index in range(1, len(engine.files))))
    return BuildReport(
        model=str(planned.model.path),
        engine=str(engine.path),
        payload_bytes=sum(item.nbytes for item in passport.payload),
        digest=passport.payload[0].digest,
        backend=passport.backend,
        device=passport.device,
        identity=planned.identity,
        key=built.key,
        cached=built.cached,
        seconds=built.seconds,
        precision=passport.precision,
        profiles=passport.profiles,
        parity=passport.parity,
        environment=passport.environment,
        notes=passport.build.notes,
        quant_target=planned.target,
        speed=passport.speed,
        artifacts={name: str(path) for name, path in zip(names, engine.files, strict=True)}
        | {"passport": str(passport_path(engine.path))},
        warnings=built.warnings,
    )


def _planned(planned: BuildPlan, *, force: bool) -> BuildReport:
    """The report of what would be done."""
    from trt_engine.engine import Precision
    from trt_engine.environment import Environment
    from trt_engine.records import BuildReport

    for warning in planned.warnings:
        log.warning("%s", warning)
    there = None if force else planned.in_store()
    return BuildReport(
        model=str(planned.model.path),
        engine=str(there.path) if there else None,
        payload_bytes=sum(item.nbytes for item in there.passport.payload) if there else None,
        digest=there.passport.payload[0].digest if there else None,
        backend=planned.config.backend,
        device=there.passport.device if there else planned.config.device,
        identity=planned.identity,
        key=planned.key,
        cached=there is not None,
        seconds=0.0,
        precision=there.passport.precision if there else Precision(asked=planned.config.precision),
        profiles=planned.profiles,
        parity=there.passport.parity if there else None,
        environment=there.passport.environment if there else Environment.here(),
        notes=there.passport.build.notes if there else {},
        quant_target=planned.target,
        speed=there.passport.speed if there else None,
        artifacts={"engine": str(planned.out)} if planned.out else {},
        dry_run=True,
        warnings=planned.warnings,
    )


def _text(report: BuildReport, planned: BuildPlan) -> str:
    """The report for a person, with what to type next."""
    from trt_engine.api.speed_check import speed_text
    from trt_engine.graph.quant_target import quant_target

    large = "" if report.payload_bytes is None else f" ({size(report.payload_bytes)})"
    lines = [("engine", f"{report.engine}{large}")] if report.engine else []
    lines += [("backend", f"{report.backend} on {report.device}"), ("key", report.key)]
    lines += [("profile" if not index else "", str(profile)) for index, profile in enumerate(report.profiles)]
    if report.precision.found:
        shares = ", ".join(f"{name} {_percent(share)}" for name, share in report.precision.running.items())
        written = report.notes.get(WRITTEN)
        told = [
            *([f"asked: {report.precision.asked}"] if report.precision.asked else []),
            *([f"the graph is {written}, {report.device} runs it in {report.precision.main}"] if written else []),
        ]
        aside = f" ({'; '.join(told)})" if told else ""
        lines.append(("precision", f"{shares}{aside}"))
    if report.parity:
        allowed = f"allowed {report.parity.tolerance:g}{' RMS' if report.parity.judged == 'rms_rel' else ''}"
        lines.append(("parity", f"{_worst(report.parity.outputs)}, {allowed}"))
        if report.parity.given:
            lines.append(("", f"from the model as it was given: {_worst(report.parity.given)} (not judged)"))
    if report.quant_target is not None:
        lines.append(("target", f"{quant_target(report.quant_target).title} ({report.quant_target})"))
    if report.speed is not None:
        lines.append(("speed", speed_text(report.speed)))
    if report.dry_run:
        lines.append(("would", "take it from the store" if report.cached else "build it"))
        lines += [("and write", str(planned.out))] if planned.out else []
    else:
        lines.append(("took", f"{report.seconds:.1f} s{', from the store' if report.cached else ''}"))
        lines.append(("next", f"trt-engine bench {shlex.quote(str(report.engine))}"))
    return "\n".join(f"{f'{name}:' if name else '':<11}{value}" for name, value in lines)


def _percent(share: Any) -> str:
    return percent(share.layers if share.macs is None else share.macs)


def _worst(outputs: Mapping[str, OutputError]) -> str:
    """The output that differs most, and where."""
    if not outputs:
        return "no output was compared"
    name, error = max(outputs.items(), key=lambda item: item[1].max_rel)
    return ", ".join(filter(None, (f"{name}: {error.summary}", error.spread)))
