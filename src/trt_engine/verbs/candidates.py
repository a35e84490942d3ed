"""The engines of a comparison: same input and protocol for all, each probed once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from trt_engine.backend import BackendSpec
from trt_engine.benchmark.closed_loop import QueryBurst, effective_protocol, prepare_query
from trt_engine.benchmark.interleaving import EngineOpener, MeasureBurst, open_in_process
from trt_engine.config.bench import BenchConfig
from trt_engine.config.profiles import select_profile
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import parse_device
from trt_engine.device.host import numpy_dtype
from trt_engine.device.info import memory_used
from trt_engine.engine import Engine
from trt_engine.equivalence.sorted_outputs import compare_outputs, has_sorted_rows, sorted_outputs
from trt_engine.equivalence.tolerance import TOLERANCES
from trt_engine.errors import ProfileError, TrtEngineError, UsageError
from trt_engine.graph.load import read_proto
from trt_engine.protocols import Session
from trt_engine.records.bench import BenchRecord, Protocol
from trt_engine.records.compare import EngineDiff
from trt_engine.tensors import Tensors, format_shape
from trt_engine.verbs.diff.run import diff
from trt_engine.verbs.load import check_loadable, load

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Candidate:
    """One engine, its backend and configuration, and the results of probing it."""

    label: str
    engine: Engine
    spec: BackendSpec
    config: RuntimeConfig
    feeds: Tensors
    device: str = ""
    runtime_info: dict[str, str] = dataclasses.field(default_factory=dict)
    memory_bytes: int | None = None
    outputs: dict[str, Any] | None = None
    outputs_note: str = ""
    load_s: float = 0.0
    """Seconds to load it and run it once, or to measure it in a separate process."""
    query_s: float = 0.0
    bursts: tuple[QueryBurst, ...] = ()
    """Two of the probe's load."""

    @property
    def out_of_process(self) -> bool:
        """True when it is measured in a separate process."""
        return self.spec.provides("measure")

    def load(self) -> Session:
        session: Session = self.spec.load_component("runtime")().load(self.engine, self.config)
        return session


def make_candidates(
    engines: Sequence[Engine], labels: Sequence[str], runtime: RuntimeConfig, feeds: Tensors
) -> list[Candidate]:
    """The engines with the first one's feeds; `UsageError` or `ProfileError` for one that does not take them."""
    return [
        Candidate(label, engine, check_loadable(engine, runtime), runtime, _feeds_for(engine, feeds, engines[0], label))
        for label, engine in zip(labels, engines, strict=True)
    ]


def _feeds_for(engine: Engine, feeds: Tensors, first: Engine, label: str) -> dict[str, Any]:
    """The first engine's feeds as this one takes them: same names and shapes, in its own types."""
    names, wanted = [spec.name for spec in engine.signature.inputs], [spec.name for spec in first.signature.inputs]
    if sorted(names) != sorted(wanted):
        raise UsageError(
            f"`{label}` has the inputs {', '.join(map(repr, names))}, `{first.path}` has {', '.join(map(repr, wanted))}",
            hint="engines of one model are compared",
        )
    made = {spec.name: _cast_array(feeds[spec.name], spec.dtype) for spec in engine.signature.inputs}
    try:
        select_profile(engine.passport.profiles, lambda profile, index: profile.check(made, index))
    except ProfileError as error:
        raise ProfileError(
            f"`{label}` does not take the input of `{first.path}`: {error.message}",
            hint=f"engines of one model are compared; build `{label}` for the same shapes, or set `--batch`",
        ) from error
    return made


def _cast_array(value: Any, dtype: str) -> Any:
    return value if dtype == "string" else np.asarray(value).astype(numpy_dtype(dtype), copy=False)


# ------------------------------------------------------------------------------------------------ the first look


def probe(items: Sequence[Candidate], config: BenchConfig, warnings: list[str]) -> Protocol:
    """Each engine run once: its device, memory and outputs; the protocol that is in force for all of them.

    Where some are timed by events and others by the host's clock, all are timed by the host's clock; where one cannot
    capture a graph, none does. What differs still is refused.
    """
    events = None
    found = effective_protocols(items, config, warnings, events)
    here = not any(item.out_of_process for item in items) and len({item.device for item in items}) == 1
    if here and len({protocol.clock for protocol in found}) > 1:
        events = False
        found = effective_protocols(items, config, warnings, events)
        warnings.append(
            "not all engines can be timed by events: all are timed by the host's clock around a synchronised run"
        )
    if here and len({protocol.graph for protocol in found}) > 1:
        found = effective_protocols(items, dataclasses.replace(config, graph=False), warnings, events)
        warnings.append("not all engines run as a graph here: all are measured without one")
    first = items[0]
    for item, protocol in zip(items, found, strict=True):
        differing = different_fields(found[0], protocol, "protocol.")
        if item.device != first.device:
            differing.insert(0, f"device (`{first.device}` against `{item.device}`)")
        if differing:
            raise UsageError(
                f"`{first.label}` and `{item.label}` would be measured by different rules: {'; '.join(differing)}",
                hint="`--device`, `--no-graph` or `--no-transfers` for all, or measure each with `trt-engine bench`",
            )
    return found[0]


_PROBE_BURST_S = 0.1


def effective_protocols(
    items: Sequence[Candidate], config: BenchConfig, warnings: list[str], events: bool | None
) -> list[Protocol]:
    """Each engine run once, and the protocol it is measured by; `events` off: by the host's clock."""
    found = []
    with contextlib.ExitStack() as stack:
        for item in items:
            found.append(_probe_one(item, config, warnings, events, stack))
    whole = {"duration_s": config.duration_s or 0.0, "min_iterations": config.iterations or 1}
    in_turns = whole | {"warmup_s": 0.0, "min_warmup": 1}  # a separate process warms up by the named protocol
    return [
        dataclasses.replace(protocol, **(whole if item.out_of_process else in_turns))  # type: ignore[arg-type]
        for item, protocol in zip(items, found, strict=True)
    ]


def _probe_one(
    item: Candidate, config: BenchConfig, warnings: list[str], events: bool | None, stack: contextlib.ExitStack
) -> Protocol:
    """One engine run once; it stays loaded for as long as `stack`, so that its memory is its own."""
    if item.out_of_process:
        began = time.perf_counter()
        record = _measure_out_of_process(
            item, dataclasses.replace(config, duration_s=0.0, iterations=10, warmup_s=None)
        )
        item.load_s = time.perf_counter() - began
        item.bursts = (QueryBurst(record.compute_ms, record.wall_s),) * 2
        item.device, item.runtime_info = record.device, record.runtime_info
        _infer_once(item)
        return record.protocol
    before = psutil.Process().memory_info().rss
    began = time.perf_counter()
    session = item.load()
    stack.callback(_close_measuring_memory, item, session)
    item.runtime_info = session.runtime_info()
    item.device, protocol = effective_protocol(session, config, events=events)
    said: list[str] = []
    with prepare_query(session, item.engine, item.feeds, protocol, said) as query:
        query.measure_burst(0.0, 1, 0)  # a library may choose its kernels in it: part of the load
        item.load_s = time.perf_counter() - began
        item.bursts = tuple(query.measure_burst(_PROBE_BURST_S, 1, 0) for _ in range(2))
        item.query_s = float(np.median(item.bursts[0].samples_ms)) / 1e3
        protocol = query.protocol
    if parse_device(item.device)[0] == "cpu":
        item.memory_bytes = max(0, psutil.Process().memory_info().rss - before)
    warnings += [f"`{item.label}`: {text}" for text in said if f"`{item.label}`: {text}" not in warnings]
    if item.outputs is None and not item.outputs_note:
        if session.runs_host_arrays:
            item.outputs = session.run(item.feeds)
        else:
            _infer_once(item)
    return protocol


def _close_measuring_memory(item: Candidate, session: Session) -> None:
    """Memory of an engine on a GPU is what closing it frees: loading the first includes the libraries."""
    kind, number = parse_device(item.device or "cpu")
    before = memory_used(number) if kind == "cuda" else None
    session.close()
    after = memory_used(number) if before is not None else None
    if before is not None and after is not None and before > after:
        item.memory_bytes = before - after


def _infer_once(item: Candidate) -> None:
    """The outputs, by the backend that runs such engines here."""
    try:
        with load(item.engine, config=item.config, verify=False) as runner:
            item.outputs = runner.infer(item.feeds)
    except TrtEngineError as error:
        item.outputs_note = f"`{item.label}` could not be run for its outputs: {error.message}"


def different_fields(one: Any, other: Any, prefix: str, ignored: Sequence[str] = ()) -> list[str]:
    """The fields of two values that differ, with both."""
    return [
        f"{prefix}{item.name} ({format_field(getattr(one, item.name))} against {format_field(getattr(other, item.name))})"
        for item in dataclasses.fields(one)
        if item.name not in ignored and getattr(one, item.name) != getattr(other, item.name)
    ]


def format_field(value: Any) -> str:
    """A setting as a sentence has it."""
    if isinstance(value, dict):
        return (
            ", ".join(
                f"{name} {format_shape(item) if isinstance(item, tuple) else item}" for name, item in value.items()
            )
            or "nothing"
        )
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "nothing"
    return "on" if value is True else "off" if value is False else f"`{value}`"


# ------------------------------------------------------------------------------------------------ how it takes a turn


def loader_for(item: Candidate, config: BenchConfig, protocol: Protocol) -> EngineOpener:
    """The loader of the engine: turns run in this process or each in a separate one."""
    if not item.out_of_process:
        return functools.partial(open_in_process, item.load, item.engine, item.feeds, protocol, [])

    @contextlib.contextmanager
    def opened() -> Iterator[MeasureBurst]:
        def turn(duration_s: float, queries: int, warmup: int) -> QueryBurst:
            record = _measure_out_of_process(
                item, dataclasses.replace(config, duration_s=duration_s, iterations=queries, warmup_s=None)
            )
            return QueryBurst(record.compute_ms, record.wall_s)

        yield turn

    return opened


def _measure_out_of_process(item: Candidate, config: BenchConfig) -> BenchRecord:
    record: BenchRecord = item.spec.load_function("measure")(item.engine, config, item.config)
    return record


@dataclass(slots=True)
class OutputComparison:
    """Output differences of two engines on the same input."""

    by_output: dict[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""
    differ: bool = False
    """Some output has no figure: another shape, values that are not finite."""
    top1_agreement: dict[str, float] = dataclasses.field(default_factory=dict)


def compare_engine_outputs(first: Candidate, other: Candidate) -> OutputComparison:
    """Difference of the other engine's outputs from the first one's."""
    if first.outputs is None or other.outputs is None:
        return OutputComparison(note=first.outputs_note or other.outputs_note, differ=True)
    made, said, remarks = OutputComparison(), [], []
    want = {name: np.asarray(array) for name, array in first.outputs.items()}
    got = {name: np.asarray(array) for name, array in other.outputs.items()}
    errors = compare_outputs(got, want, _sorted_output_names(first.engine, other.engine, got, want), TOLERANCES["fp16"])
    for name, reference in want.items():
        if name not in got:
            said.append(f"`{name}` is not an output of `{other.label}`")
            continue
        error = errors[name]
        if math.isfinite(error.max_rel) and math.isfinite(error.max_abs):
            made.by_output[name] = error
        elif got[name].shape != reference.shape:
            said.append(f"`{name}` is {format_shape(reference.shape)} against {format_shape(got[name].shape)}")
        else:
            said.append(f"`{name}` holds other values that are not finite, or is zero on one side alone")
        if error.rows_moved or error.rows_skipped:
            remarks.append(
                f"`{name}` comes out of a sort: {error.rows_moved} rows are compared at another place, "
                f"{error.rows_skipped} of {math.prod(reference.shape[:2])} at the cut are left out"
            )
        is_scores = reference.ndim == 2 and reference.shape[1] > 1 and reference.dtype.kind == "f"
        if got[name].shape == reference.shape and is_scores:
            made.top1_agreement[name] = float(np.mean(got[name].argmax(axis=1) == reference.argmax(axis=1)))
    said += [f"`{name}` is not an output of `{first.label}`" for name in got if name not in want]
    made.differ = bool(said)
    made.note = "; ".join([*said, *remarks])
    return made


def _sorted_output_names(first: Engine, other: Engine, got: Mapping[str, Any], want: Mapping[str, Any]) -> list[str]:
    """The outputs that a sort comes before; where neither graph can be read, those whose rows look sorted."""
    graphs = [found for engine in (first, other) if (found := _sorted_in_graph(engine)) is not None]
    if graphs:
        return [name for name in want if any(name in found for found in graphs)]
    return [name for name in want if name in got and has_sorted_rows(got[name]) and has_sorted_rows(want[name])]


def _sorted_in_graph(engine: Engine) -> tuple[str, ...] | None:
    """The outputs that a sort comes before, of a payload that is an ONNX file."""
    if engine.path.suffix.lower() != ".onnx":
        return None
    try:
        return sorted_outputs(read_proto(engine.path))
    except TrtEngineError:
        return None


def compare_structure(first: Engine, other: Engine) -> EngineDiff | None:
    """Structural differences of the engines, where available."""
    try:
        return diff(first.path, other.path)
    except TrtEngineError as error:
        log.info("the engines' structure was not compared: %s", error.message)
        return None
