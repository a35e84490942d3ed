"""`trt-engine profile ENGINE|MODEL`: where the time goes, and what to try next."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from trt_engine.cli import options
from trt_engine.cli.origin import installable
from trt_engine.cli.output import Talk, document, emit, spelled_out
from trt_engine.config import BenchConfig, BuildConfig, RuntimeConfig
from trt_engine.errors import Interrupted
from trt_engine.figures import figure, percent, scaled, with_module
from trt_engine.traces import ProfilePlan, RungName

if TYPE_CHECKING:
    from trt_engine.traces import KernelRow, LayerProfile, LayerRow, ProfileReport, TimeSplit

__all__ = ["command"]

log = logging.getLogger("trt_engine.cli.profile")

_BAR = 30
_EXCESS = 0.05
"""Of the whole: a smaller difference between layers and whole is chance."""


@click.command("profile", short_help="Where the time of an engine goes.")
@click.argument("path", metavar="ENGINE|MODEL", type=options.FILE)
@click.option(
    "--rung",
    type=click.Choice(get_args(RungName)),
    help="Take this instrument or end with 3 [the best that is to be had].",
)
@click.option("--inferences", type=click.IntRange(min=1), default=50, metavar="N", help="Profile N inferences [50].")
@click.option("--warmup", type=click.IntRange(min=0), default=10, metavar="N", help="After N that do not count [10].")
@click.option(
    "--ncu",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Nsight Compute's counters of the top N kernels [0].",
)
@click.option("--ceilings", is_flag=True, help="Measure what the device can do at most where that is not kept yet.")
@click.option(
    "--top", type=click.IntRange(min=1), default=10, metavar="N", help="Rows of the table that is printed [10]."
)
@options.measuring(
    leave_out=("warmup_s", "warmup_iterations", "iterations", "idle_s", "percentiles", "streams", "strict")
)
@options.out_option("Folder for the report, the timeline and the raw files [runs/TIME_NAME_profile].")
@options.yes_option
@options.dry_run_option
@options.common
def command(
    talk: Talk,
    path: Path,
    rung: RungName | None,
    inferences: int,
    warmup: int,
    ncu: int,
    ceilings: bool,
    top: int,
    out: Path | None,
    yes: bool,
    dry_run: bool,
    **values: Any,
) -> int:
    """Where the time of an ENGINE goes (a MODEL is built into the store first).

    A measurement without a profiler first, then the best instrument there is: Nsight Systems, CUPTI, PyTorch's profiler,
    the backend's own layer times, the host's clock. Says what holds the engine back, and the next experiment.

    \b
      trt-engine profile model.engine.onnx --batch 8 -o profile
      trt-engine profile model.onnx --rung layers --json
      trt-engine profile model.engine --ncu 3 --ceilings
    """
    config: BenchConfig = options.config_from(BenchConfig, values)
    runtime, build, named = options.engine_configs(values)
    if dry_run:
        return _plan(talk, path, config, runtime, build, out, rung, yes=yes, named=set(named))

    from trt_engine.api.profiling import profile

    typed = options.spelled_command()
    try:
        report = profile(
            path, out=out, rung=rung, inferences=inferences, warmup=warmup, ncu=ncu, ceilings=ceilings, yes=yes,
            command=typed, config=config, runtime=runtime, build=build, on_stage=lambda text: log.info("%s", text),
            **named,
        )  # fmt: skip
    except Interrupted as stop:
        if stop.partial is None:
            raise
        log.error("%s; it follows", stop.message)
        _tell(talk, stop.partial, top, typed)  # type: ignore[arg-type]
        return stop.exit_code
    _tell(talk, report, top, typed)
    return 0


def _tell(talk: Talk, report: ProfileReport, top: int, typed: str) -> None:
    doc = document("profile", report, command=typed, warnings=report.warnings)
    emit(talk, doc, "\n".join(map(spelled_out, _lines(report, top))))


# ------------------------------------------------------------------------------------------------ words


def _lines(report: ProfileReport, top: int) -> Iterator[str]:
    from trt_engine.tensors import format_shape

    said = report.verdict
    yield f"verdict     {said.sentence}"
    widest = max((len(name) for name, _ in said.evidence), default=0)
    for name, told in said.evidence:
        yield f"            {name:<{widest}}  {told}"
    if said.confidence == "estimated":
        yield f"            estimated: it rests on {report.rests_on}"
    yield f"next        {said.next}"
    if said.command:
        yield f"            {said.command}"
    shapes = ", ".join(f"{name}:{format_shape(shape)}" for name, shape in report.shapes.items())
    yield ""
    yield f"engine      {report.engine} ({report.backend} on {report.device}, {report.precision})"
    yield f"batch       {report.batch}" + (f" ({shapes})" if shapes else "")
    yield from _split(report)
    yield from _categories(report)
    yield from _table(report, top)
    yield from _counters(report)
    yield from _instruments(report)
    yield from _files(report)
    yield from (f"warning     {text}" for text in report.warnings)
    if not report.complete:
        yield "incomplete  interrupted"


def _split(report: ProfileReport) -> Iterator[str]:
    split, rule, summary = report.split, report.protocol, report.compute_ms
    yield ""
    yield "one inference"
    by_events = rule.clock == "device events"  # then the measured times are the device's, and the whole is a mean
    ahead = "from one end to the next, one inference enqueued ahead, no profiler (mean)"
    yield _part("whole", split.wall_ms, ahead if by_events else "by the host's clock, no profiler" + _spread(summary))
    for name, value, meaning in (
        ("copy in", split.h2d_ms, "inputs to the device, by events, no profiler"),
        ("compute", split.compute_ms, _compute_words(split, report) + (_spread(summary) if by_events else "")),
        ("copy out", split.d2h_ms, "outputs from the device, by events, no profiler"),
        ("busy", split.busy_ms, "something runs on the device, profiled"),
        ("idle", split.idle_ms, "nothing runs on the device, profiled"),
        ("launches", split.launch_ms, "of the host's time is inside launch calls, profiled"),
        ("overlap", split.overlap_ms, "runs beside other work, profiled"),
    ):
        if value is not None:
            yield _part(name, round(value, 4) if name == "overlap" else value, meaning)  # less is the clocks' doing
    rest = None if report.kernels or not report.categories else split.wall_ms - sum(one.ms for one in report.categories)
    if rest is not None and rest > 0:
        yield _part("elsewhere", rest, "not in the layers' medians: between layers, or layers that were held up")
    elif rest is not None and rest < -_EXCESS * split.wall_ms:
        yield _part(
            "excess", -rest, "the layers' medians add up to more than the whole: their profiler's time is in them"
        )
    if split.kernels is not None:
        yield f"  {'kernels':<10}{split.kernels:>10.6g}     launched in one inference"
    layers = report.layers
    if layers is not None and layers.wall_ms is not None and layers.clock != "launch":
        cost = layers.wall_ms - split.wall_ms
        yield _part(
            "profiled",
            layers.wall_ms,
            f"whole, with the layers' profiler on: {'+' * (cost >= 0)}{figure(cost)} ms is its cost, or chance",
        )
    measured_s = rule.duration_s if report.wall_s is None else report.wall_s
    yield f"  measured {measured_s:.3g} s after {rule.warmup_s:g} s of warm-up, protocol {rule.name}"


def _compute_words(split: TimeSplit, report: ProfileReport) -> str:
    if split.gpu_ms is not None and report.protocol.clock != "device events":
        why = ", in which a graph is replayed" if report.protocol.graph else ""
        longer = f"; longer than the whole{why}" if report.outlasts_the_whole else ""
        return f"from the device's first work to its last, by events, no profiler, one query at a time{longer}"
    if split.gpu_ms is not None:
        return "of the device, by events"
    if split.busy_ms is not None:
        return "of the device, profiled"
    return "the call itself: on a CPU nothing is copied" if report.device == "cpu" else "of the call"


def _part(name: str, ms: float, meaning: str) -> str:
    return f"  {name:<10}{figure(ms):>10} ms  {meaning}"


def _spread(summary: Any) -> str:
    return "" if summary is None else f" (median {figure(summary.median)}, p99 {figure(summary.p99)} ms)"


def _categories(report: ProfileReport) -> Iterator[str]:
    if not report.categories:
        return
    what = "kernels" if report.kernels else "layers"
    whole = sum(item.ms for item in report.categories)
    how = "their times" if report.kernels else "their medians"
    yield ""
    yield f"what {what} do: the share of {figure(whole)} ms, the sum of {how} over {report.inferences} inferences"
    for item in report.categories:
        bar = "#" * round(_BAR * item.share)
        yield f"  {item.category:<14}{item.share:>7.1%}  {figure(item.ms):>9} ms  {item.count:>5} {what}  {bar}".rstrip()
    if report.precisions:
        shares = ", ".join(f"{name} {percent(share)}" for name, share in report.precisions.items())
        yield f"  computes in   {shares} (of the layers' time)"


def _table(report: ProfileReport, top: int) -> Iterator[str]:
    if report.kernels:
        yield ""
        yield f"top {min(top, len(report.kernels))} of {len(report.kernels)} kernels"
        yield f"  {'share':>6} {'ms':>9} {'times':>7} {'mean us':>9}  kernel"
        label = report.layers.label if report.layers is not None else str
        for kernel in report.kernels[:top]:
            yield _kernel(kernel, label)
    if report.layers is not None and report.layers.rows:
        yield from _layers(report.layers, top)


def _kernel(row: KernelRow, label: Callable[[str], str]) -> str:
    where = f"  <- {_few([label(name) for name in row.layers])}" if row.layers else ""
    figures = f"{row.share:>6.1%} {figure(row.ms):>9} {row.per_inference:>7.6g} {figure(row.mean_us):>9}"
    return f"  {figures}  {row.short} ({row.category}){where}"


def _layers(layers: LayerProfile, top: int) -> Iterator[str]:
    clock = {
        "device": "the device's clock",
        "host": "the host's clock",
        "launch": "the host's clock around launches: not how long the device takes",
    }[layers.clock]
    yield ""
    yield f"top {min(top, len(layers.rows))} of {len(layers.rows)} layers, medians by {clock} ({layers.instrument})"
    rows = sorted(layers.rows, key=lambda row: -row.median_ms)[:top]
    timed = layers.clock != "launch"

    def rate(row: LayerRow, work: int | None) -> float | None:
        return work / row.median_ms / 1e6 if timed and work and row.median_ms else None

    worked, work = _rates([rate(row, row.flops) for row in rows], "GFLOP/s")
    moved, bandwidth = _rates([rate(row, row.nbytes) for row in rows], "GB/s")
    yield f"  {'share':>6} {'ms':>9} {'times':>6} {work:>8} {bandwidth:>7}  layer"
    shares = [f"{row.share:.1%}" if timed else "-" for row in rows]  # launching is not where the time goes
    yield from map(_layer, rows, shares, worked, moved)


def _rates(values: Sequence[float | None], unit: str) -> tuple[list[str], str]:
    """Rates in one unit, the one that suits the largest."""
    most = max((value for value in values if value is not None), default=0.0)
    shown, unit = scaled(most, unit)
    return ["-" if value is None else figure(value * shown / most) for value in values], unit


def _layer(row: LayerRow, share: str, flops: str, rate: str) -> str:
    kind = f"{row.kind}, {row.category}" if row.kind else row.category
    others = [name for name in row.onnx_nodes if name != row.name]
    made = f"  <- {_few(others)}" if others else ""
    figures = f"{share:>6} {figure(row.median_ms):>9} {row.calls:>6.6g} {flops:>8} {rate:>7}"
    return f"  {figures}  {with_module(row.name, row.module)} ({kind}){made}"


def _few(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _counters(report: ProfileReport) -> Iterator[str]:
    if not report.counters:
        return
    yield ""
    yield "counters by Nsight Compute, which runs kernels one by one and empties caches: its durations are its own"
    for item in report.counters:
        figures = [
            f"{name} {figure(value)} %"
            for name, value in (
                ("compute", item.compute_pct), ("memory", item.memory_pct), ("dram", item.dram_pct),
                ("occupancy", item.occupancy_pct),
            )
            if value is not None
        ]  # fmt: skip
        several = f" ({item.launches} launches of it)" if item.launches > 1 else ""
        yield f"  {item.kernel}: {', '.join(figures) or 'nothing measured'}{several}"
        yield from (f"    {text}" for text in item.advice[:3])


def _instruments(report: ProfileReport) -> Iterator[str]:
    yield ""
    yield "instruments"
    for rung in report.rungs:
        yield f"  {rung.name:<8}{'used' if rung.used else 'passed over'}: {rung.reason}"
        if rung.fix:
            yield f"          fix: {installable(rung.fix)}"


def _files(report: ProfileReport) -> Iterator[str]:
    if not report.files:
        return
    yield ""
    yield "files"
    widest = max(map(len, report.files))
    for name, place in report.files.items():
        yield f"  {name:<{widest}}  {place}"
    for name, how in report.opens.items():
        yield f"  open {name} with: {how}"


def _plan(
    talk: Talk,
    path: Path,
    config: BenchConfig,
    runtime: RuntimeConfig,
    build: BuildConfig,
    out: Path | None,
    rung: RungName | None,
    *,
    yes: bool,
    named: set[str],
) -> int:
    """`--dry-run`: what would be profiled and written; refuses what is refused before anything is measured."""
    from trt_engine.api.measuring import sealed
    from trt_engine.api.profiling import device_of_model, run_folder, targets
    from trt_engine.benchmark.loop import feeds_for
    from trt_engine.engine import is_bare_model
    from trt_engine.tensors import format_shape

    bare, shapes = is_bare_model(path), dict(config.shapes)
    writes = [str(place) for place in targets(out or run_folder(path), yes=yes)]
    if bare:
        device = device_of_model(runtime, build)
    else:
        engine = sealed(path, config, runtime, build, named)
        device = runtime.device or engine.passport.device
        shapes = {name: tuple(value.shape) for name, value in feeds_for(engine, config)[0].items()}
    body = ProfilePlan(str(path), bare, device, shapes, rung, tuple(writes))
    shown = ", ".join(f"{name}:{format_shape(shape)}" for name, shape in shapes.items()) or "the profile's optimum"
    lines = [
        f"would profile {path} on {device} at {shown}, {f'by the rung {rung}' if rung else 'by the best rung there is'}",
        *(["would build its engine into the store first"] if bare else []),
        *(f"would write {place}" for place in writes),
    ]
    emit(talk, document("profile", body, command=options.spelled_command()), "\n".join(lines))
    return 0
