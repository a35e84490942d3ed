"""What PyTorch's profiler wrote down: its trace-event JSON as activities and launches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from trt_engine.errors import TrtEngineError
from trt_engine.profiling.capture import Capture, HostSpan, Launch, assemble
from trt_engine.traces import COPY_WORDS, Activity

__all__ = ["INFERENCE", "read_trace"]

INFERENCE = "trt_engine inference"
"""The name of the range around each inference that counts."""


def read_trace(trace: Mapping[str, Any], instrument: str, warnings: Sequence[str] = ()) -> Capture:
    """The capture in a trace whose inferences are marked with `INFERENCE`, on the clock its base is of."""
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        raise TrtEngineError("the trace of PyTorch's profiler has no `traceEvents`", hint="it may have been cut")
    base = _number(trace.get("baseTimeNanoseconds")) or 0
    complete = [_Event(event, base) for event in events if isinstance(event, Mapping) and event.get("ph") == "X"]
    by_kind: defaultdict[str, list[_Event]] = defaultdict(list)
    for event in complete:
        by_kind[event.kind].append(event)
    windows = [(event.start_ns, event.end_ns) for event in by_kind["user_annotation"] if event.name == INFERENCE]
    launches = (
        Launch(event.name, event.start_ns, event.end_ns, event.number("correlation"), event.thread)
        for event in (*by_kind["cuda_runtime"], *by_kind["cuda_driver"])
    )
    spans = (
        HostSpan(event.name, event.start_ns, event.end_ns, event.thread)
        for event in (*by_kind["cpu_op"], *by_kind["user_annotation"])
        if event.name != INFERENCE
    )
    activities = [
        *(event.kernel() for event in by_kind["kernel"]),
        *(event.copy() for event in by_kind["gpu_memcpy"]),
        *(event.fill() for event in by_kind["gpu_memset"]),
    ]
    return assemble(activities, launches, windows, instrument, spans=spans, warnings=warnings)


class _Event:
    """One complete event. The trace counts in microseconds, with three digits behind the point."""

    def __init__(self, event: Mapping[str, Any], base: int) -> None:
        self.kind, self.name = str(event.get("cat", "")).lower(), str(event.get("name", "?"))
        self.start_ns = base + round(float(event.get("ts", 0)) * 1000)
        self.end_ns = self.start_ns + round(float(event.get("dur", 0)) * 1000)
        self.thread = _number(event.get("tid")) or 0
        args = event.get("args")
        self._args: Mapping[str, Any] = args if isinstance(args, Mapping) else {}

    def number(self, key: str) -> int:
        return _number(self._args.get(key)) or 0

    def kernel(self) -> Activity:
        return Activity(
            "kernel", self.name, self.start_ns, self.end_ns, self.number("device"), self.number("stream"),
            correlation=self.number("correlation"), graph_node=self.number("graph node id"),
            grid=_three(self._args.get("grid")), block=_three(self._args.get("block")),
            registers=_number(self._args.get("registers per thread")),
            shared_bytes=_number(self._args.get("shared memory")),
        )  # fmt: skip

    def copy(self) -> Activity:
        """The direction stands in the name: `Memcpy DtoH (Device -> Pageable)`."""
        words = self.name.split()
        way = next((COPY_WORDS[word] for word in words if word in COPY_WORDS), self.name)
        return self._moved("copy", way)

    def fill(self) -> Activity:
        return self._moved("memset", "memset")

    def _moved(self, kind: Literal["copy", "memset"], name: str) -> Activity:
        return Activity(
            kind, name, self.start_ns, self.end_ns, self.number("device"), self.number("stream"),
            self.number("bytes"), self.number("correlation"), self.number("graph node id"),
        )  # fmt: skip


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _three(value: Any) -> tuple[int, int, int] | None:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 3:
        return _number(value[0]) or 0, _number(value[1]) or 0, _number(value[2]) or 0
    return None
