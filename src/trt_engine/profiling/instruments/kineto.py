"""Reads the trace-event JSON of PyTorch's profiler as activities and launches."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from trt_engine.errors import EngineError
from trt_engine.profiling.instruments.capture import Capture, HostSpan, Launch, assemble
from trt_engine.records.profile import COPY_KIND_BY_SHORT_NAME, Activity

INFERENCE_MARK = "trt_engine inference"
"""The name of the range around each measured inference."""


def read_trace(trace: Mapping[str, Any], instrument: str, warnings: Sequence[str] = ()) -> Capture:
    """The capture in a trace with `INFERENCE` ranges, on the clock of its base."""
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        raise EngineError("the trace of PyTorch's profiler has no `traceEvents`", hint="it may have been cut")
    base = _as_number(trace.get("baseTimeNanoseconds")) or 0
    complete = [
        _Event(event, base)
        for event in events
        if isinstance(event, Mapping) and event.get("ph") == "X" and isinstance(event.get("name", "?"), str)
    ]
    by_kind: defaultdict[str, list[_Event]] = defaultdict(list)
    for event in complete:
        by_kind[event.kind].append(event)
    windows = [(event.start_ns, event.end_ns) for event in by_kind["user_annotation"] if event.name == INFERENCE_MARK]
    launches = (
        Launch(event.name, event.start_ns, event.end_ns, event.number("correlation"), event.thread)
        for event in (*by_kind["cuda_runtime"], *by_kind["cuda_driver"])
    )
    spans = (
        HostSpan(event.name, event.start_ns, event.end_ns, event.thread)
        for event in (*by_kind["cpu_op"], *by_kind["user_annotation"])
        if event.name != INFERENCE_MARK
    )
    activities = [
        *(event.kernel() for event in by_kind["kernel"]),
        *(event.copy() for event in by_kind["gpu_memcpy"]),
        *(event.transfer("memset", "memset") for event in by_kind["gpu_memset"]),
    ]
    return assemble(activities, launches, windows, instrument, spans=spans, warnings=warnings)


class _Event:
    """One complete event. Trace times are in us with three decimals."""

    def __init__(self, event: Mapping[str, Any], base: int) -> None:
        self.kind, self.name = str(event.get("cat", "")).lower(), str(event.get("name", "?"))
        self.start_ns = base + _to_ns(event.get("ts", 0))
        self.end_ns = self.start_ns + _to_ns(event.get("dur", 0))
        self.thread = _as_number(event.get("tid")) or 0
        args = event.get("args")
        self._args: Mapping[str, Any] = args if isinstance(args, Mapping) else {}

    def number(self, key: str) -> int:
        return _as_number(self._args.get(key)) or 0

    def kernel(self) -> Activity:
        return Activity(
            "kernel", self.name, self.start_ns, self.end_ns, self.number("device"), self.number("stream"),
            correlation=self.number("correlation"), graph_node=self.number("graph node id"),
            grid=_dimensions(self._args.get("grid")), block=_dimensions(self._args.get("block")),
            registers=_as_number(self._args.get("registers per thread")),
            shared_bytes=_as_number(self._args.get("shared memory")),
        )  # fmt: skip

    def copy(self) -> Activity:
        """The direction is in the name: `Memcpy DtoH (Device -> Pageable)`."""
        words = self.name.split()
        way = next((COPY_KIND_BY_SHORT_NAME[word] for word in words if word in COPY_KIND_BY_SHORT_NAME), self.name)
        return self.transfer("copy", way)

    def transfer(self, kind: Literal["copy", "memset"], name: str) -> Activity:
        return Activity(
            kind, name, self.start_ns, self.end_ns, self.number("device"), self.number("stream"),
            self.number("bytes"), self.number("correlation"), self.number("graph node id"),
        )  # fmt: skip


_LATEST_US = 1e16
"""Three centuries: an upper bound for timestamps."""


def _to_ns(value: Any) -> int:
    """Nanoseconds of a number of microseconds, or of its text."""
    try:
        us = float(value)
    except (TypeError, ValueError, OverflowError):
        us = math.nan
    if not abs(us) < _LATEST_US:
        raise EngineError(
            f"the trace of PyTorch's profiler has the time `{str(value)[:40]}`, expected microseconds",
            hint="it may have been cut or edited: profile again",
        )
    return round(us * 1000)


def _as_number(value: Any) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63
    return value if whole else None


def _dimensions(value: Any) -> tuple[int, int, int] | None:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 3:
        return _as_number(value[0]) or 0, _as_number(value[1]) or 0, _as_number(value[2]) or 0
    return None
