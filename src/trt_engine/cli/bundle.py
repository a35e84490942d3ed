"""`trt-engine bundle META.json -o DIR`: all engines of a model of several components, with logs and one report."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.cli import options
from trt_engine.cli.output import Talk, document, emit
from trt_engine.config import BuildConfig
from trt_engine.errors import UsageError
from trt_engine.figures import in_ms, size

if TYPE_CHECKING:
    from trt_engine.records import BundleComponent, BundleReport, BundleState, BundleStep

__all__ = ["command", "state_text"]

_SOURCE = tuple(  # the sizes as the trtexec-driven builder for RNNT-TDT spells them: `--encoder-max-T 512`
    (component, which, dim)
    for component, dims in (("encoder", "T"), ("predictor", "U"), ("joint", "TU"))
    for dim in dims
    for which in ("min", "opt", "max")
)


def _source_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for component, which, dim in _SOURCE:
        name = f"{component}_{which}_{dim}".lower()
        function = click.option(f"--{component}-{which}-{dim}", name, type=click.IntRange(min=0), hidden=True)(function)
    return function


@click.command("bundle", short_help="All engines of a model of several components.")
@click.argument("meta", metavar="META", required=False, type=options.FILE)
@click.option("--meta", "meta_option", type=options.FILE, hidden=True)
@click.option(
    "--dim", "dims", multiple=True, metavar="DIM=MIN:OPT:MAX",
    help="Range of a dimension, in all components or in one: T=16:64:512, joint.T=8, T=::512 (repeatable).",
)  # fmt: skip
@click.option(
    "--profile", "profiles", multiple=True, metavar="COMPONENT:INPUT:SPEC",
    help="Range of one input, as encoder:audio_signal:1x128x16,1x128x64,1x128x512 (repeatable).",
)  # fmt: skip
@click.option("--onnx-dir", type=options.FILE, metavar="DIR", help="Where the ONNX files lie [beside META].")
@options.of(
    BuildConfig,
    leave_out=("profiles", "batch", "shapes"),
    helps={"timing_cache": "the file tactics' timings are kept in (default: timing.cache in the folder)"},
)
@click.option("--run", is_flag=True, help="Run every engine, then all of them in a chain, on seeded inputs.")
@click.option("--force", is_flag=True, help="Build although the folder or the store has the engines.")
@options.out_option("The folder for engines, logs and report.", instead="name a folder, as `-o engines`")
@click.option("--workspace-mb", "workspace_mb", type=click.IntRange(min=1), hidden=True)
@click.option("--builder-opt-level", "level", type=click.IntRange(0, 5), hidden=True)
@_source_options
@options.yes_option
@options.dry_run_option
@options.common
def command(
    talk: Talk,
    meta: Path | None,
    meta_option: Path | None,
    dims: tuple[str, ...],
    profiles: tuple[str, ...],
    onnx_dir: Path | None,
    run: bool,
    force: bool,
    out: Path | None,
    workspace_mb: int | None,
    level: int | None,
    yes: bool,
    dry_run: bool,
    **values: Any,
) -> None:
    """Build every component that META (a model_meta.json) describes into one folder: engines, logs, timing cache, report.

    Without `components` in it META describes an RNNT-TDT: encoder.onnx, predictor.onnx and joint.onnx beside it. What feeds
    what is checked before anything is built. Run again, it builds only what changed.

    \b
      trt-engine bundle export/model_meta.json -o engines --backend trtexec --fp16
      trt-engine bundle export/model_meta.json -o engines --dim T=16:64:512 --run
      trt-engine inspect engines --run
    """
    if meta is not None and meta_option is not None and meta != meta_option:
        raise UsageError(f"META is `{meta}` and `--meta` is `{meta_option}`", hint="leave `--meta` out")
    source = meta or meta_option
    if source is None:
        raise UsageError("no META is given", hint="`trt-engine bundle model_meta.json -o engines`")
    if out is None:
        raise UsageError("no folder is given for the engines", hint=f"`trt-engine bundle {source} -o engines`")
    sizes = [
        (f"{component}.{dim}", which, given)
        for component, which, dim in _SOURCE
        if (given := values.pop(f"{component}_{which}_{dim}".lower())) is not None
    ]
    spelled = [
        f"{name}={':'.join(str(given) if which == part else '' for part in ('min', 'opt', 'max'))}"
        for name, which, given in sizes
    ]
    if workspace_mb is not None:
        _once(values, "workspace_mib", "--workspace-mb", f"{workspace_mb}MiB")
    if level is not None:
        values["options"] = (*(values.get("options") or ()), f"optimization_level={level}")
    config = options.config_from(BuildConfig, values)

    from trt_engine.bundling import build

    typed = options.spelled_command()
    planned = build.plan(
        source, out, config=config, dims=[*spelled, *dims], profiles=profiles, onnx_dir=onnx_dir, yes=yes, command=typed
    )
    if dry_run:
        report = build.planned_report(planned, force=force)
        emit(talk, document("bundle", report, command=typed), _text(report))
        return
    made = build.carry_out(planned, run=run, force=force)
    emit(talk, document("bundle", made.report, command=typed), _text(made.report))
    if made.error is not None:
        raise made.error


def _once(values: dict[str, Any], name: str, spelling: str, value: str) -> None:
    if values.get(name) is not None:
        raise UsageError(f"`{spelling}` and `--workspace` say the same thing twice", hint=f"leave `{spelling}` out")
    values[name] = value


# ------------------------------------------------------------------------------------------------ for a person


def _text(report: BundleReport) -> str:
    """The report: one block for each component, what feeds what, what to type next."""
    said = f" ({report.model_version})" if report.model_version else ""
    lines = [
        ("bundle", f"{report.name}{said}, version {report.version}"),
        ("folder", report.folder),
        ("backend", f"{report.backend} on {report.device}"),
    ]
    for item in report.components:
        lines += _component_lines(item, report.folder)
    for link in report.connections:
        held = {True: "holds", False: "DOES NOT HOLD", None: "agrees"}[link.held]
        turned = f", axes {list(link.transpose)}" if link.transpose else ""
        lines.append(
            ("feeds", f"{link.producer}.{link.output} -> {link.consumer}.{link.input}: {link.carries}{turned}, {held}")
        )
    lines += _chain_lines(report.chain)
    if report.error is not None:
        lines.append(("error", report.error.message))
    if report.dry_run:
        lines.append(("would", f"write them into {report.folder}"))
    else:
        lines.append(("took", f"{report.seconds:.1f} s{'' if report.complete else ', NOT COMPLETE'}"))
        lines.append(("report", report.artifacts["report"]))
        if report.complete:
            lines.append(("next", f"trt-engine inspect {shlex.quote(report.folder)} --run"))
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{f'{name}:' if name else '':<{width}}{value}" for name, value in lines)


_WORDS = {
    "planned": "would be built",
    "pending": "not begun",
    "building": "not finished",
    "built": "built",
    "stored": "from the store",
    "kept": "there already",
    "failed": "FAILED",
    "interrupted": "interrupted",
}


def _component_lines(item: BundleComponent, folder: str) -> list[tuple[str, str]]:
    state = _WORDS[item.status]
    if item.status == "planned" and item.digest is not None:
        state = "there already" if item.engine else "would be taken from the store"
    large = f", {size(item.payload_bytes)}" if item.payload_bytes is not None else ""
    took = f" in {item.build_seconds:.1f} s" if item.status == "built" and item.build_seconds is not None else ""
    lines = [(item.name, f"{state}{took}{large}{f', {folder}/{item.engine}' if item.engine else ''}")]
    lines += [("", str(profile)) for profile in item.profiles]
    if item.error is not None:
        lines.append(("", item.error.message))
        lines += [("", f"log: {folder}/{item.log}")] if item.log else []
    return lines


def _chain_lines(chain: tuple[BundleStep, ...]) -> list[tuple[str, str]]:
    lines = []
    for step in chain:
        outputs = ", ".join(f"{name} {_shape(told)}" for name, told in step.outputs.items())
        fed = f" (fed by {', '.join(step.fed.values())})" if step.fed else ""
        broken = sum(int(told.get("not_finite", 0)) for told in step.outputs.values())
        lines.append(
            (
                "run",
                f"{step.component}{fed}: {outputs}, {in_ms(step.wall_ms)}{f', {broken} not finite' if broken else ''}",
            )
        )
    return lines


def _shape(told: dict[str, Any]) -> str:
    return "x".join(map(str, told["shape"])) or "scalar"


def state_text(state: BundleState) -> str:
    """What `inspect` says of a bundle's folder."""
    lines = [
        f"bundle: {state.path}",
        f"name: {state.name}",
        f"version: {state.version}",
        f"complete: {'yes' if state.complete else 'no'}",
    ]
    for name, engine in state.engines.items():
        lines.append(f"{name}: {engine.path} ({size(engine.nbytes)})")
        lines.append(f"  verdict: {engine.verdict.verdict}, {engine.verdict.reason}")
        if engine.verdict.command:
            lines.append(f"  command: {engine.verdict.command}")
        if engine.passport is not None:
            lines += [f"  input: {spec}" for spec in engine.passport.signature.inputs]
            lines += [f"  output: {spec}" for spec in engine.passport.signature.outputs]
            lines += [f"  profile {index}: {profile}" for index, profile in enumerate(engine.passport.profiles)]
        if engine.smoke is not None:
            lines.append(
                f"  run: loaded in {in_ms(engine.smoke['load_ms'])}, first {in_ms(engine.smoke['first_ms'])}, "
                f"second {in_ms(engine.smoke['second_ms'])}"
            )
    for link in state.connections:
        held = {True: "holds", False: "does not hold", None: "not checked"}[link.held]
        lines.append(f"feeds: {link.producer}.{link.output} -> {link.consumer}.{link.input} ({held})")
    lines += [f"{name}: {value}" for name, value in _chain_lines(state.chain)]
    lines += [f"problem: {text}" for text in state.problems]
    lines.append(f"files: {len(state.files)} ({size(state.nbytes)})")
    return "\n".join(lines)
