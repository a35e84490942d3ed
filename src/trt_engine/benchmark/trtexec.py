"""An engine measured by the trtexec program: its own loop and events, our protocol, every sample kept.

The same words mean other measurements in trtexec 10 and 11, so everything is said explicitly for the version at hand and
then read back from its banner. Times come from `--exportTimes`, the enqueue time from the log: no file has it.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trt_engine.backends.trtexec.arguments import Arguments, for_running
from trt_engine.backends.trtexec.build import failure
from trt_engine.backends.trtexec.program import Program, find
from trt_engine.backends.trtexec.run import input_words, profile_of, settings_of
from trt_engine.benchmark.loop import batch_of, feeds_for
from trt_engine.benchmark.protocols import RULES, resolve
from trt_engine.benchmark.stability import instability
from trt_engine.config import BenchConfig, RuntimeConfig
from trt_engine.device import parse_device
from trt_engine.device.info import clocks
from trt_engine.engine import Engine
from trt_engine.environment import Environment
from trt_engine.errors import Interrupted, SetupError, UsageError
from trt_engine.plans.exports import read_times
from trt_engine.plans.trtexec_log import TrtexecLog, misses
from trt_engine.plans.trtexec_log import parse as parse_log
from trt_engine.records import BenchRecord, Protocol

__all__ = ["measure"]

log = logging.getLogger(__name__)

_PERF = {
    "enqueue_bound": "the host needs more than 80 % of the compute time to enqueue: the device waits for it (try `--graph`)",
    "h2d_bound": "copying inputs takes longer than computing (try `--no-transfers`)",
    "d2h_bound": "copying outputs takes longer than computing (try `--no-transfers`)",
}


def measure(engine: Engine, config: BenchConfig, runtime: RuntimeConfig) -> BenchRecord:
    """Measure an engine in a process of trtexec; the record has every sample.

    Raises `SetupError` where trtexec reads the options in another way than it was told, `Interrupted` after Ctrl-C, and what
    the cause of a failure asks for otherwise.
    """
    program = find()
    device = runtime.device or engine.passport.device
    kind, number = parse_device(device)
    gpu = number if kind == "cuda" else None
    protocol = _protocol(config, device)
    feeds, inputs = feeds_for(engine, config)
    shapes = {name: tuple(int(size) for size in value.shape) for name, value in feeds.items()}
    batch = batch_of(engine.signature, shapes)
    log.info(
        "measuring `%s` at batch %d on %s with trtexec %s: warm-up: %g s, then %g s, protocol %s",
        engine.path.name, batch, device, program.text, protocol.warmup_s, protocol.duration_s, protocol.name,
    )  # fmt: skip
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    before = clocks(gpu)
    with tempfile.TemporaryDirectory(prefix="trt-engine-trtexec-") as place:
        folder = Path(place)
        made = for_running(
            program, settings_of(engine, runtime), engine.signature, shapes,
            engine=engine.path.absolute(), device=device, profile=profile_of(engine, shapes),
        )  # fmt: skip
        input_words(made, engine.signature.inputs, feeds, folder)
        del feeds
        _say_protocol(made, protocol, config)
        made.add("exportTimes", folder / "times.json")
        try:
            ran = program.run(made.words, folder=folder)
        except KeyboardInterrupt:
            raise Interrupted(
                "interrupted: trtexec was ended and had told no times yet", hint="the same command measures again"
            ) from None
        said = parse_log(ran.lines, "trtexec")
        if lacking := misses(said, exit_code=ran.exit_code, measured=True):
            raise failure(ran, said, lacking, f"the measurement of `{engine.path.name}`")
        _read_back(said, protocol, program)
        times = read_times(folder / "times.json")
    after = clocks(gpu)
    protocol, graph_lost = _came_true(protocol, said)
    environment = Environment.here(gpu)
    if environment.gpu is None:  # NVML is not there to tell; trtexec is
        environment = dataclasses.replace(
            environment, gpu=said.report.gpu, compute_capability=said.report.compute_capability
        )
    reasons = instability(times.compute_ms, protocol, (*before.throttled, *after.throttled))
    return BenchRecord(
        engine=str(engine.path),
        backend=engine.passport.backend,
        device=device,
        batch=batch,
        shapes=shapes,
        protocol=protocol,
        environment=environment,
        compute_ms=times.compute_ms,
        wall_s=said.report.total_host_walltime_s or sum(times.compute_ms) / 1e3,
        started=started,
        queries=len(times.compute_ms),
        warmup_queries=said.report.warmup_queries or 0,
        latency_ms=times.latency_ms,
        h2d_ms=times.h2d_ms if protocol.transfers else (),
        d2h_ms=times.d2h_ms if protocol.transfers else (),
        clocks=(before, after),
        facts=_facts(engine, program, said, ran.command),
        stable=not reasons,
        instability=reasons,
        warnings=(*made.said, *graph_lost, *_about(said, protocol, len(times.compute_ms), before.throttled)),
        percentiles=config.percentiles,
        inputs=inputs,
    )


# ------------------------------------------------------------------------------------------------ the rules


def _protocol(config: BenchConfig, device: str) -> Protocol:
    """The rules in force: trtexec spins and overlaps copies, which our own loop does not."""
    base = resolve(config, device, events=True)
    if base.clock != "device events":
        raise UsageError(f"trtexec measures on a GPU, not on `{device}`", hint="`--device cuda:0`")
    return dataclasses.replace(
        base,
        spin=RULES[config.protocol].spin if config.spin is None else config.spin,
        not_applicable=(
            *(item for item in base.not_applicable if item not in ("spin", "overlapped copies")),
            *(("warm-up by queries",) if config.warmup_iterations else ()),  # trtexec counts its warm-up in ms alone
        ),
        min_warmup=0,
    )


def _say_protocol(made: Arguments, protocol: Protocol, config: BenchConfig) -> None:
    """Every switch and number, as this version has it: 11 turned four defaults around."""
    if made.program.version >= (11, 0, 0):
        switches = (
            ("noCudaGraph", not protocol.graph), ("noSpinWait", not protocol.spin),
            ("includeDataTransfers", protocol.transfers),
        )  # fmt: skip
    else:
        switches = (
            ("useCudaGraph", protocol.graph), ("useSpinWait", protocol.spin), ("noDataTransfers", not protocol.transfers),
        )  # fmt: skip
    for option, wanted in switches:
        if wanted:
            made.add(option)
    made.add("warmUp", f"{protocol.warmup_s * 1000:g}")
    made.add("duration", f"{protocol.duration_s:g}")
    made.add("iterations", protocol.min_iterations)
    made.add("percentile", ",".join(f"{percent:g}" for percent in config.percentiles))
    made.add("infStreams" if made.program.has("infStreams") else "streams", protocol.streams)
    made.add("avgRuns", 10)
    if protocol.idle_s:
        made.add("idleTime", f"{protocol.idle_s * 1000:g}")


_DURATION = re.compile(r"(?P<duration>[\d.e+-]+)s \(\+ (?P<warmup>[\d.e+-]+)ms warm up\)")


def _read_back(said: TrtexecLog, protocol: Protocol, program: Program) -> None:
    """`SetupError` where the banner shows another measurement than was asked for."""
    wrong = [
        f"{name} {_on(found)}, asked for {_on(wanted)}"
        for name, found, wanted in (
            ("CUDA graph", said.report.cuda_graph, protocol.graph),
            ("spin-wait", said.report.spin_wait, protocol.spin),
            ("data transfers", said.report.data_transfers, protocol.transfers),
        )
        if found is not None and found != wanted
    ]
    numbers: list[tuple[str, str | None, float]] = [
        ("iterations", said.banner.get("Iterations"), protocol.min_iterations),
        ("streams", said.banner.get("Inference Streams", said.banner.get("Streams")), protocol.streams),
    ]
    if match := _DURATION.fullmatch(said.banner.get("Duration", "")):
        numbers.append(("duration", match["duration"], protocol.duration_s))
        numbers.append(("warm-up", match["warmup"], protocol.warmup_s * 1000))
    wrong += [
        f"{name} {found}, asked for {wanted:g}"
        for name, found, wanted in numbers
        if found is not None and abs(float(found) - wanted) > 1e-4 * max(1.0, abs(wanted))
    ]
    if wrong:
        raise SetupError(
            f"trtexec {program.text} measured something else than it was told: {'; '.join(wrong)}",
            hint="the figures are not used; measure with `--backend tensorrt`",
        )


def _on(value: bool | None) -> str:
    return "on" if value else "off"


def _came_true(protocol: Protocol, said: TrtexecLog) -> tuple[Protocol, tuple[str, ...]]:
    """A graph that could not be captured is no graph, whatever the banner says."""
    if not (protocol.graph and said.graph_refused):
        return protocol, ()
    lacking = (*protocol.not_applicable, "graph")
    return (
        dataclasses.replace(protocol, graph=False, not_applicable=lacking),
        ("the graph could not be captured (trtexec says so); measured without one",),
    )


# ------------------------------------------------------------------------------------------------ what is said


def _facts(engine: Engine, program: Program, said: TrtexecLog, command: str) -> dict[str, str]:
    facts = {
        "measured_by": f"trtexec {program.text}",
        "trtexec": str(program.path),
        "command": command,
        "precision": engine.passport.precision.main or "unknown",
    }
    if said.report.enqueue_ms is not None:
        facts["enqueue_median_ms"] = f"{said.report.enqueue_ms.median:g}"
    return facts


def _about(said: TrtexecLog, protocol: Protocol, count: int, throttled: tuple[str, ...]) -> Iterator[str]:
    yield from (_PERF[label] for label in said.report.perf_warnings if label in _PERF)
    if throttled:
        yield f"GPU clocks were held down: {', '.join(sorted(throttled))}"
    if said.report.timed_queries is not None and said.report.timed_queries != count:
        yield f"trtexec timed {said.report.timed_queries} queries and exported {count}"
    if protocol.streams > 1:
        yield "several streams run side by side: throughput counts, the times of single queries overlap"
