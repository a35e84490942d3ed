"""The engines of a comparison: all on the same input, each looked at once, by rules that hold for all."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from trt_engine.api.comparing.records import different_fields
from trt_engine.api.loading import admit, load
from trt_engine.backend import Backend
from trt_engine.benchmark.loop import Turn, in_force, ready
from trt_engine.benchmark.paired import Opened, TakeTurn, loaded
from trt_engine.config import BenchConfig, RuntimeConfig, first_fitting
from trt_engine.device import parse_device
from trt_engine.device.host import numpy_dtype
from trt_engine.device.info import memory_used
from trt_engine.engine import Engine
from trt_engine.errors import ProfileError, TrtEngineError, UsageError
from trt_engine.protocols import Session
from trt_engine.records import BenchRecord, Protocol
from trt_engine.tensors import Tensors

__all__ = ["Contestant", "contestants", "looked_at", "way"]


@dataclass(slots=True)
class Contestant:
    """One engine, what it runs on, and what the first look at it told."""

    label: str
    engine: Engine
    card: Backend
    config: RuntimeConfig
    feeds: Tensors
    device: str = ""
    facts: dict[str, str] = dataclasses.field(default_factory=dict)
    memory_bytes: int | None = None
    outputs: dict[str, Any] | None = None
    outputs_note: str = ""

    @property
    def apart(self) -> bool:
        """It measures in a process of its own."""
        return self.card.has("measure")

    def load(self) -> Session:
        session: Session = self.card.half("runtime")().load(self.engine, self.config)
        return session


def contestants(
    engines: Sequence[Engine], labels: Sequence[str], runtime: RuntimeConfig, feeds: Tensors
) -> list[Contestant]:
    """The engines with the first one's feeds; `UsageError` or `ProfileError` for one that does not take them."""
    return [
        Contestant(label, engine, admit(engine, runtime), runtime, _fed(engine, feeds, engines[0], label))
        for label, engine in zip(labels, engines, strict=True)
    ]


def _fed(engine: Engine, feeds: Tensors, first: Engine, label: str) -> dict[str, Any]:
    """The first engine's feeds as this one takes them: same names and shapes, in its own types."""
    names, wanted = [spec.name for spec in engine.signature.inputs], [spec.name for spec in first.signature.inputs]
    if sorted(names) != sorted(wanted):
        raise UsageError(
            f"`{label}` has the inputs {', '.join(map(repr, names))}, `{first.path}` has {', '.join(map(repr, wanted))}",
            hint="engines of one model are compared",
        )
    made = {spec.name: _as_type(feeds[spec.name], spec.dtype) for spec in engine.signature.inputs}
    try:
        first_fitting(engine.passport.profiles, lambda profile, index: profile.check(made, index))
    except ProfileError as error:
        raise ProfileError(
            f"`{label}` does not take the input of `{first.path}`: {error.message}",
            hint=f"engines of one model are compared; build `{label}` for the same shapes, or set `--batch`",
        ) from error
    return made


def _as_type(value: Any, dtype: str) -> Any:
    return value if dtype == "string" else np.asarray(value).astype(numpy_dtype(dtype), copy=False)


# ------------------------------------------------------------------------------------------------ the first look


def looked_at(items: Sequence[Contestant], config: BenchConfig, warnings: list[str]) -> Protocol:
    """Each engine run once: its device, memory and outputs; the protocol that is in force for all of them.

    Where some are timed by events and others by the host's clock, all are timed by the host's clock; where one cannot
    capture a graph, none does. What differs still is refused.
    """
    events = None
    found = _protocols(items, config, warnings, events)
    here = not any(item.apart for item in items) and len({item.device for item in items}) == 1
    if here and len({protocol.clock for protocol in found}) > 1:
        events = False
        found = _protocols(items, config, warnings, events)
        warnings.append(
            "not all engines can be timed by events: all are timed by the host's clock around a synchronised run"
        )
    if here and len({protocol.graph for protocol in found}) > 1:
        found = _protocols(items, dataclasses.replace(config, graph=False), warnings, events)
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


def _protocols(
    items: Sequence[Contestant], config: BenchConfig, warnings: list[str], events: bool | None
) -> list[Protocol]:
    found = []
    with contextlib.ExitStack() as stack:
        for item in items:
            found.append(_look(item, config, warnings, events, stack))
    whole = {"duration_s": config.duration_s or 0.0, "min_iterations": config.iterations or 1}
    in_turns = whole | {"warmup_s": 0.0, "min_warmup": 1}  # a process warms up as the named protocol says
    return [
        dataclasses.replace(protocol, **(whole if item.apart else in_turns))  # type: ignore[arg-type]
        for item, protocol in zip(items, found, strict=True)
    ]


def _look(
    item: Contestant, config: BenchConfig, warnings: list[str], events: bool | None, stack: contextlib.ExitStack
) -> Protocol:
    """One engine run once; it stays loaded for as long as `stack`, so that its memory is its own."""
    if item.apart:
        record = _in_its_process(item, dataclasses.replace(config, duration_s=0.0, iterations=10, warmup_s=None))
        item.device, item.facts = record.device, record.facts
        _infer(item)
        return record.protocol
    before = psutil.Process().memory_info().rss
    session = item.load()
    stack.callback(_close, item, session)
    item.facts = session.facts()
    item.device, protocol = in_force(session, config, events=events)
    said: list[str] = []
    with ready(session, item.engine, item.feeds, protocol, said) as query:
        query.turn(0.0, 1, 0)
        protocol = query.protocol
    if parse_device(item.device)[0] == "cpu":
        item.memory_bytes = max(0, psutil.Process().memory_info().rss - before)
    warnings += [f"`{item.label}`: {text}" for text in said if f"`{item.label}`: {text}" not in warnings]
    if item.outputs is None and not item.outputs_note:
        if hasattr(session, "run"):
            item.outputs = session.run(item.feeds)
        else:
            _infer(item)
    return protocol


def _close(item: Contestant, session: Session) -> None:
    """Of a GPU's memory an engine has what it gives back: the first to be loaded brings the libraries' along."""
    kind, number = parse_device(item.device or "cpu")
    before = memory_used(number) if kind == "cuda" else None
    session.close()
    after = memory_used(number) if before is not None else None
    if before is not None and after is not None and before > after:
        item.memory_bytes = before - after


def _infer(item: Contestant) -> None:
    """The outputs, by whoever runs such engines here."""
    try:
        with load(item.engine, config=item.config, verify=False) as runner:
            item.outputs = runner.infer(item.feeds)
    except TrtEngineError as error:
        item.outputs_note = f"`{item.label}` could not be run for its outputs: {error.message}"


# ------------------------------------------------------------------------------------------------ how it takes a turn


def way(item: Contestant, config: BenchConfig, protocol: Protocol) -> Opened:
    """Loads the engine, for turns in this process or each in one of its own."""
    if not item.apart:
        return functools.partial(loaded, item.load, item.engine, item.feeds, protocol, [])

    @contextlib.contextmanager
    def opened() -> Iterator[TakeTurn]:
        def turn(duration_s: float, queries: int, warmup: int) -> Turn:
            record = _in_its_process(
                item, dataclasses.replace(config, duration_s=duration_s, iterations=queries, warmup_s=None)
            )
            return Turn(record.compute_ms, record.wall_s)

        yield turn

    return opened


def _in_its_process(item: Contestant, config: BenchConfig) -> BenchRecord:
    record: BenchRecord = item.card.call("measure")(item.engine, config, item.config)
    return record
