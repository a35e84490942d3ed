"""`trt-engine bench`: latency and throughput of an engine under a named protocol, or the figures of a log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trt_engine import figures
from trt_engine.cli import options, output
from trt_engine.config import BenchConfig, BuildConfig, RuntimeConfig, parse_size
from trt_engine.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from trt_engine.records import BenchRecord, BenchReport, LogReport

__all__ = ["command", "said_now_and_then"]

F = TypeVar("F", bound=Callable[..., Any])
log = logging.getLogger("trt_engine.cli.bench")

# trtexec's flags that are of no use here, and why; its other spellings come with the settings (cli/options.py)
_USELESS: dict[str, str] = {
    "best": "changes nothing at load: an engine keeps the precision it was built with",
    "exposeDMA": "serialises copies and computation (45 % less throughput where it was tried); left out",
    "threads": "has no effect here: one thread enqueues for all streams",
    "separateProfileRun": "has no effect here: nothing is profiled while measuring",
}


def _as_trtexec(function: F) -> F:
    """trtexec's flags that no setting has."""
    for name in reversed(_USELESS):
        function = click.option(f"--{name}", f"trtexec_{name}", is_flag=True, hidden=True)(function)
    function = click.option("--avgRuns", "trtexec_avg_runs", type=int, hidden=True)(function)
    return click.option("--loadEngine", "trtexec_engine", type=options.FILE, hidden=True)(function)


@click.command()
@click.argument("path", metavar="ENGINE|MODEL", required=False, type=options.FILE)
@options.measuring()
@_as_trtexec
@click.option("--isolate", is_flag=True, help="Measure in a process of its own: a crash there is an error here.")
@click.option("--memory-limit", metavar="SIZE", help="With --isolate: memory it may take [what is free].")
@click.option("--log", "log_file", type=options.FILE, metavar="FILE", help="Read a log of trtexec or of bench.")
@options.out_option("Folder for records.jsonl (appended) and bench.log.")
@options.dry_run_option
@options.common
def command(
    talk: output.Talk,
    path: Path | None,
    out: Path | None,
    log_file: Path | None,
    isolate: bool,
    memory_limit: str | None,
    dry_run: bool,
    **values: Any,
) -> int:
    """Measure an ENGINE, or a MODEL that is built into the store first.

    \b
    One query after another, every time kept. A few examples:
      trt-engine bench model.engine.onnx --batch 8 --duration 5s -o results
      trt-engine bench model.onnx --protocol trtexec11 --json
      trt-engine bench --log trtexec.log --json
    """
    if log_file is not None:
        return _read(talk, log_file, path)
    engine = values.pop("trtexec_engine")
    if path is not None and engine is not None:
        raise UsageError("an engine is named twice", hint="leave `--loadEngine` out")
    path = path or engine
    if path is None:
        raise UsageError("no engine, model or log is named", hint="`trt-engine bench model.onnx`")
    limit = None if memory_limit is None else parse_size(memory_limit)
    if limit == 0:
        raise UsageError(
            "`--memory-limit` is 0, nothing runs in no memory", hint="`--memory-limit 4GiB`, or leave it out"
        )
    config: BenchConfig = options.config_from(BenchConfig, values)
    _advise(values, config)
    runtime, build, named = options.engine_configs(values)
    if dry_run:
        return _plan(talk, path, config, runtime, build, set(named), out)

    from trt_engine.api.measuring import bench

    try:
        record = bench(
            path, config=config, runtime=runtime, build=build, isolate=isolate, memory_limit=limit, out=out,
            on_progress=said_now_and_then("measuring"), **named,
        )  # fmt: skip
    except Interrupted as stop:
        if stop.partial is None:
            raise
        log.error("%s; what was measured until then follows", stop.message)
        _tell(talk, stop.partial, out)  # type: ignore[arg-type]
        return stop.exit_code
    _tell(talk, record, out)
    return 0


def _advise(values: dict[str, Any], config: BenchConfig) -> None:
    """A word on flags that do not help. Takes them out of `values`."""
    for flag, why in _USELESS.items():
        if values.pop(f"trtexec_{flag}"):
            log.warning("--%s %s", flag, why)
    if values.pop("trtexec_avg_runs") is not None:
        log.warning("--avgRuns has no effect here: every sample is kept")
    if config.streams > 1:
        log.warning(
            "--infStreams=%d seldom helps (2 %% more throughput where 4 were tried): one stream fills the device",
            config.streams,
        )


def said_now_and_then(doing: str, every_s: float = 10.0) -> Callable[[float, float], None]:
    """Progress as a log line each ten seconds."""
    told_s = 0.0

    def progress(done_s: float, planned_s: float) -> None:
        nonlocal told_s
        if done_s - told_s >= every_s:
            told_s = done_s
            log.info("%s: %.0f of %.0f s", doing, done_s, max(planned_s, done_s))

    return progress


# ------------------------------------------------------------------------------------------------ what is said


def _tell(talk: output.Talk, record: BenchRecord, out: Path | None) -> None:
    from trt_engine.api.measuring import LOG
    from trt_engine.records import BenchReport
    from trt_engine.runfiles import RECORDS

    artifacts = {} if out is None else {"records": str(out / RECORDS), "log": str(out / LOG)}
    report = BenchReport.of(record, artifacts)
    doc = output.document("bench", report, command=options.spelled_command(), warnings=record.warnings)
    output.emit(talk, doc, _text(record, report))


def _warmup(seconds: float, queries: int) -> str:
    """`1 s`, `50 queries` or both."""
    from trt_engine.benchmark.log import plain

    parts = [f"{plain(seconds)} s"] if seconds or not queries else []
    return " and ".join([*parts, f"{queries} queries"] if queries else parts)


def _text(record: BenchRecord, report: BenchReport) -> str:
    from trt_engine.benchmark.log import first_line, plain
    from trt_engine.records import summarize

    rule = record.protocol
    lines = [
        first_line(record),
        f"engine      {record.engine} ({record.backend})",
        f"protocol    {rule.name}: {plain(rule.duration_s)} s after {_warmup(rule.warmup_s, rule.min_warmup)} of warm-up, "
        f"transfers {'on' if rule.transfers else 'off'}, graph {'on' if rule.graph else 'off'}",
        f"batch       {record.batch}",
        f"throughput  {plain(report.qps)} queries/s, {plain(report.images_per_s)} images/s",
    ]
    if report.per_image_ms is not None:
        lines.append(f"per image   {plain(report.per_image_ms)} ms")
    for name, samples in (
        ("compute", record.compute_ms),
        ("latency", record.latency_ms),
        ("enqueue", record.enqueue_ms),
        ("h2d", record.h2d_ms),
        ("d2h", record.d2h_ms),
    ):
        if (summary := summarize(samples, rule.percentile_rule)) is None:
            continue
        parts = [f"mean {plain(summary.mean)}", f"median {plain(summary.median)}"]
        parts += [f"{'p' + text} {plain(value)}" for text, value in report.percentiles_ms.items() if name == "compute"]
        lines.append(f"{name:<11} {', '.join(parts)} ms (min {plain(summary.min)}, max {plain(summary.max)})")
    lines.append(
        f"queries     {record.queries} in {plain(record.wall_s)} s, {record.warmup_queries} of warm-up left out"
    )
    lines.append("stable      " + ("yes" if record.stable else "no: " + "; ".join(record.instability)))
    if not record.complete:
        lines.append("incomplete  interrupted")
    lines += [f"{name:<11} {place}" for name, place in report.artifacts.items()]
    return "\n".join(lines)


def _read(talk: output.Talk, log_file: Path, path: Path | None) -> int:
    """`--log FILE`: 0 when it can answer, whatever the answer is."""
    if path is not None:
        raise UsageError("`--log` reads a log and measures nothing", hint=f"leave `{path}` out")
    from trt_engine.benchmark.reading import read_log

    report, typed = read_log(log_file), options.spelled_command()
    doc = output.document("bench-log", report, command=typed) | {"invocation": typed}
    if report.written_by == "trtexec":
        doc["command"] = report.command  # by that name all readers of trtexec's logs expect the banner's
    output.emit(talk, doc, _log_text(report))
    return 0


def _log_text(report: LogReport) -> str:
    from trt_engine.benchmark.log import plain

    what = f"TensorRT {report.trt_version}" if report.trt_version else report.protocol or "unknown version"
    lines = [f"log         {report.log} ({report.written_by}, {what})", f"status      {report.status}"]
    if report.error_text is not None:
        lines.append(f"cause       {report.error_class or 'unknown'}: {report.error_text}")
    lines += [
        f"{name:<11} {text}" for name, text in (("plugin", report.error_plugin), ("node", report.error_node)) if text
    ]
    if report.requested_bytes:
        lines.append(f"asked for   {figures.size(report.requested_bytes)} ({report.requested_bytes} bytes)")
    if report.gpu or report.device:
        lines.append(f"device      {report.gpu or report.device}")
    if report.throughput_qps is not None:
        lines.append(f"throughput  {plain(report.throughput_qps)} queries/s")
    for name in ("latency_ms", "enqueue_ms", "h2d_ms", "gpu_compute_ms", "compute_ms", "d2h_ms"):
        if (times := getattr(report, name)) is not None:
            parts = [f"mean {plain(times.mean)}", f"median {plain(times.median)}"]
            parts += [f"p{percent} {plain(value)}" for percent, value in times.by_percent().items()]
            lines.append(f"{name.removesuffix('_ms').replace('_', ' '):<11} {', '.join(parts)} ms")
    if report.throughput_qps is None:
        lines.append("no performance summary in this log")
    lines += [f"warning     {text}" for text in report.perf_warnings]
    return "\n".join(lines)


def _plan(
    talk: output.Talk,
    path: Path,
    config: BenchConfig,
    runtime: RuntimeConfig,
    build: BuildConfig,
    named: set[str],
    out: Path | None,
) -> int:
    """`--dry-run`: what would be measured and written; refuses what is refused before anything is measured."""
    from trt_engine.api.building import plan
    from trt_engine.api.measuring import LOG, build_config, sealed
    from trt_engine.benchmark.loop import feeds_for
    from trt_engine.benchmark.protocols import resolve
    from trt_engine.engine import is_bare_model
    from trt_engine.records import BenchPlan
    from trt_engine.runfiles import RECORDS
    from trt_engine.tensors import format_shape

    shapes: Mapping[str, tuple[int, ...]] = config.shapes
    bare = is_bare_model(path)
    device = runtime.device or "cpu"
    if bare:
        for text in plan(path, config=build_config(path, config, runtime, build)).warnings:
            log.warning("%s", text)
    else:
        engine = sealed(path, config, runtime, build, named)
        device = runtime.device or engine.passport.device
        shapes = {name: tuple(value.shape) for name, value in feeds_for(engine, config)[0].items()}
    protocol = resolve(config, device)
    writes = [] if out is None else [str(out / RECORDS), str(out / LOG)]
    body = BenchPlan(str(path), bare, device, dict(shapes), protocol, tuple(writes))
    shown = ", ".join(f"{name}:{format_shape(shape)}" for name, shape in shapes.items()) or "the profile's optimum"
    lines = [
        f"would measure {path} on {device} at {shown}, protocol {protocol.name}",
        *(["would build its engine into the store first"] if bare else []),
        *(f"would write {place}" for place in writes),
    ]
    output.emit(talk, output.document("bench", body, command=options.spelled_command()), "\n".join(lines))
    return 0
