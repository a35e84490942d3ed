"""What holds an engine back: launches, copies, bandwidth, arithmetic or the host, judged from measured facts alone.

The time of one inference is parted: copies, kernels at the limit of arithmetic, kernels at the limit of memory, kernels at
neither, kernels nobody can judge, and the time the device has nothing to do. The largest part is the verdict. What no figure
shows is not claimed: a missing fact is named, with the command that gives it. The method is in docs/verdict.md.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trt_engine.device import parse_device
from trt_engine.figures import figure, in_ms, in_us, percent, quantity, scaled
from trt_engine.traces import (
    Category,
    Ceiling,
    Ceilings,
    KernelRow,
    LayerProfile,
    TimeSplit,
    TimeVerdict,
)

__all__ = [
    "BEYOND",
    "CACHED",
    "GAP_LAUNCHES",
    "LAUNCHES_EXPLAIN",
    "NEAR_COMPUTE",
    "NEAR_MEMORY",
    "NOTABLE",
    "REACHABLE",
    "SHORT_US",
    "TOLD",
    "verdict",
]

# The thresholds; docs/verdict.md says why each is what it is.
NEAR_COMPUTE = 0.4
"""Of the matrix rate: from here on arithmetic is the limit; at most a factor of 2.5 is left to better kernels."""
NEAR_MEMORY = 0.4
"""Of the memory's rate; a layer's bytes are counted as the fewest it can move, so that it moves rather more."""
REACHABLE = 0.8
"""Of a data sheet's rate, which no work reaches: both thresholds are so much lower against one."""
LAUNCHES_EXPLAIN = 0.5
"""Of the time: launch calls that take this much of it are why the device waits."""
GAP_LAUNCHES = 10.0
"""Launches: a mean gap between kernels of up to this many is the price of launching, a longer one is other work."""
BEYOND = 1.15
"""Of the matrix rate: work that is faster than this shows that the ceiling is too low, and judges nothing."""
CACHED = 1.25
"""Of the memory's rate: bytes that move faster than this come from a cache, and memory is no limit shown."""
NOTABLE = 0.25
"""Of the time: idling from here on is said beside any other verdict."""
SHORT_US = 20.0
"""A mean kernel shorter than this may be too small to fill a device; a longer one is looked at with counters."""
TOLD = 0.5
"""Of the layers' time must be of layers whose work is known, for layers to be judged one by one."""

_Part = Literal["copy", "idle", "overhead", "compute", "memory", "neither", "untold"]
_MEMORY: tuple[Category, ...] = ("element-wise", "normalisation", "reduction", "copy", "reformat")
"""What moves bytes and calculates next to nothing with them."""


def verdict(
    *,
    split: TimeSplit,
    layers: LayerProfile | None,
    kernels: Sequence[KernelRow],
    ceilings: Ceilings | None,
    flops: int | None,
    nbytes: int | None,
    batch: int,
    device: str,
    precision: str,
    engine: str = "ENGINE",
    model: str = "MODEL.onnx",
    settings: Mapping[str, str] | None = None,
    most_batch: int | None = None,
    fixed_batch: bool = False,
) -> TimeVerdict:
    """What bounds the engine, in one sentence, with the figures it was drawn from and what to try next.

    `flops` and `nbytes` are of one inference of this batch. `engine` and the `model` it was made of are what the suggested
    commands name; those that run it again have its `settings` (`-O`), and no larger batch than it takes (`most_batch`), none
    where its model takes one alone (`fixed_batch`).
    """
    limits = _Limits(ceilings, precision, on_host=parse_device(device)[0] == "cpu")
    facts = _Facts(
        split, layers, tuple(kernels), limits, flops, nbytes, batch, device, precision, engine, model,
        dict(settings or {}), most_batch, fixed_batch,
    )  # fmt: skip
    if not _positive(split.wall_ms):
        return _unknown("no time of an inference was measured", "measure it", f"trt-engine bench {facts.named}", ())
    found = _on_host(facts) if limits.on_host else _on_device(facts)
    return replace(found, command=_under_the_same_settings(facts, found.command))


def _under_the_same_settings(facts: _Facts, command: str | None) -> str | None:
    """A command that runs this engine, with the `-O` it was profiled with: else two things change at once."""
    runs_it = (f"trt-engine bench {facts.named}", f"trt-engine profile {facts.named}")
    if command is None or not command.startswith(runs_it):
        return command
    given = [f"-O {shlex.quote(f'{name}={value}')}" for name, value in facts.settings.items()]
    return " ".join([command, *(words for words in given if words.partition("=")[0] + "=" not in command)])


# ------------------------------------------------------------------------------------------------ facts


@dataclass(frozen=True, slots=True)
class _Limits:
    """The ceilings that matter for an engine of this precision."""

    ceilings: Ceilings | None
    precision: str
    on_host: bool

    def matrix(self, precision: str = "") -> Ceiling | None:
        """The rate of matrix products in that number type, by whichever library is the fastest."""
        asked = _computes_in(precision or self.precision, on_host=self.on_host)
        if self.ceilings is None or asked is None:
            return None
        found = [item for item in self.ceilings.items if item.name.startswith(f"{asked}_matrix")]
        if not found and asked == "bf16":
            return self.matrix("fp16")
        return max(found, key=lambda item: item.value, default=None)

    @property
    def memory(self) -> Ceiling | None:
        """The most bytes a second that memory was seen to move."""
        found = [item for name in ("memory_copy", "memory_read") if (item := self.get(name)) is not None]
        measured = [item for item in found if item.source == "measured"]
        return max(measured or found, key=lambda item: item.value, default=None)

    def get(self, name: str) -> Ceiling | None:
        return self.ceilings.get(name) if self.ceilings is not None else None

    @property
    def ridge(self) -> float | None:
        """FLOP a byte above which arithmetic is the nearer limit."""
        matrix, memory = self.matrix(), self.memory
        return None if matrix is None or memory is None else matrix.value * 1e12 / (memory.value * 1e9)


_TYPES = ("nvfp4", "mxfp8", "fp8", "int8", "int4", "fp16", "bf16", "tf32", "fp32")


def _computes_in(precision: str, *, on_host: bool) -> str | None:
    """The number type of the matrix products; None where it is not known or has no ceiling."""
    found = next((name for name in _TYPES if precision.lower().startswith(name)), None)
    if on_host:  # kernels for halves are rare there: they are computed in FP32, and weights of four bits too
        return {"int8": "int8", None: None}.get(found, "fp32")
    return {"int4": "fp16", "mxfp8": "fp8", "nvfp4": None}.get(found or "", found)


@dataclass(frozen=True, slots=True)
class _Facts:
    """Everything the verdict is drawn from, with what follows from it at once."""

    split: TimeSplit
    layers: LayerProfile | None
    kernels: tuple[KernelRow, ...]
    limits: _Limits
    flops: int | None
    nbytes: int | None
    batch: int
    device: str
    precision: str
    engine: str
    model: str
    settings: Mapping[str, str]
    most_batch: int | None
    fixed_batch: bool

    @property
    def named(self) -> str:
        return _quoted(self.engine)

    @property
    def source(self) -> str:
        """The model, as a command names it."""
        return _quoted(self.model)

    @property
    def where(self) -> str:
        """`--device cuda:0`; a command without it takes the processor."""
        return "" if self.limits.on_host else f" --device {self.device}"

    @property
    def copies_ms(self) -> float | None:
        told = [value for value in (self.split.h2d_ms, self.split.d2h_ms) if value is not None]
        return sum(told) if told else None

    @property
    def window_ms(self) -> float | None:
        """From the first to the last work of an inference on the device, by events; what a capture adds up is not that."""
        if self.split.gpu_ms is not None or self.split.busy_ms is not None:
            return self.split.gpu_ms
        return self.split.compute_ms

    @property
    def kernels_ms(self) -> float | None:
        """The device at work on kernels in one inference; side by side counts once, where a capture tells it."""
        if self.split.working_ms is not None:
            return self.split.working_ms
        return sum(row.ms for row in self.kernels) if self.kernels else None

    @property
    def total_ms(self) -> float:
        """What shares are of: copies beside the computation, or outside the clock, make the parts longer than the wall."""
        working = self.kernels_ms if self.kernels_ms is not None else self.window_ms
        return max(self.split.wall_ms, (self.copies_ms or 0.0) + (working or 0.0))

    @property
    def the_time(self) -> str:
        """What shares are of, in words: a reader has the time without copies before him."""
        apart = self.copies_ms and self.total_ms > self.split.wall_ms and not self.limits.on_host
        return "the time with copies" if apart else "the time"

    @property
    def launched(self) -> float | None:
        """Kernels in one inference."""
        if self.split.kernels is not None:
            return self.split.kernels
        return sum(row.per_inference for row in self.kernels) if self.kernels else None


def _quoted(path: str) -> str:
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def _positive(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


# ------------------------------------------------------------------------------------------------ the roofline


@dataclass(frozen=True, slots=True)
class _Group:
    """Work that is judged together: a layer, or all kernels of a category."""

    name: str
    category: Category | None
    ms: float
    flops: float | None
    nbytes: float | None
    precision: str = ""

    def share_of_matrix(self, limits: _Limits) -> float | None:
        """Of what the device multiplies at most."""
        ceiling = limits.matrix(self.precision)
        if ceiling is None or self.flops is None or self.ms <= 0:
            return None
        return self.flops / (self.ms / 1e3) / (ceiling.value * 1e12)

    def share_of_memory(self, limits: _Limits) -> float | None:
        """Of what the device's memory moves at most; above 1 where part of it stays in a cache."""
        ceiling = limits.memory
        if ceiling is None or self.nbytes is None or self.ms <= 0:
            return None
        return self.nbytes / (self.ms / 1e3) / (ceiling.value * 1e9)

    def part(self, limits: _Limits) -> tuple[_Part, bool]:
        """Which limit it is at, and whether figures show that (else its kind does)."""
        compute, memory = self.share_of_matrix(limits), self.share_of_memory(limits)
        # against its own threshold, so that the nearer limit wins
        at_compute = (compute or 0.0) / (NEAR_COMPUTE * _reachable(limits.matrix(self.precision)))
        cached = (memory or 0.0) > CACHED  # then memory is no limit, and hides none
        at_memory = 0.0 if cached else (memory or 0.0) / (NEAR_MEMORY * _reachable(limits.memory))
        if at_compute >= 1 and at_compute >= at_memory:
            return "compute", True
        if at_memory >= 1:
            return "memory", True
        if memory is not None and (compute is not None or self.category in _MEMORY):
            return "neither", True
        if memory is None and self.category in _MEMORY and not limits.on_host:  # a processor calculates there, too
            return "memory", False
        return "untold", True


def _reachable(ceiling: Ceiling | None) -> float:
    return REACHABLE if ceiling is not None and ceiling.source == "datasheet" else 1.0


@dataclass(frozen=True, slots=True)
class _Roofline:
    """The device's working time by the limit it is at; shares of that time."""

    groups: tuple[_Group, ...]
    shares: Mapping[_Part, float]
    by_kind: bool
    """True where the larger part of what is called memory-bound is so by its kind alone."""
    whole: bool
    """The model as one, because nothing tells of its layers."""
    outside: float
    """The share that is in no layer's time, and so nobody's to judge; part of `untold`."""

    def of(self, part: _Part, limits: _Limits) -> list[_Group]:
        """The groups at that limit, the longest first."""
        return sorted((one for one in self.groups if one.part(limits)[0] == part), key=lambda one: -one.ms)


def _roofline(facts: _Facts, working_ms: float) -> _Roofline:
    groups, whole = _groups(facts, working_ms)
    told = sum(one.ms for one in groups)
    total = max(told, working_ms) or 1.0
    outside = max(0.0, total - told) / total
    shares: dict[_Part, float] = {"untold": outside}
    kind = 0.0
    for one in groups:
        part, shown = one.part(facts.limits)
        shares[part] = shares.get(part, 0.0) + one.ms / total
        kind += 0.0 if shown else one.ms / total
    return _Roofline(groups, shares, kind > shares.get("memory", 0.0) / 2, whole, outside)


def _groups(facts: _Facts, working_ms: float) -> tuple[tuple[_Group, ...], bool]:
    """Layers where their own times are known; else kernels by category; else the model as one (True)."""
    rows = facts.layers.rows if facts.layers is not None else ()
    timed = facts.layers is not None and facts.layers.clock != "launch"
    by_layer = tuple(
        _Group(row.name, row.category, row.median_ms, row.flops, row.nbytes, row.precision) for row in rows if timed
    )
    told = sum(one.ms for one in by_layer if one.part(facts.limits)[0] != "untold" and one.nbytes is not None)
    if by_layer and told >= TOLD * sum(one.ms for one in by_layer):
        return by_layer, False
    if facts.kernels:
        return tuple(_by_category(facts)), False
    if by_layer and facts.flops is None and facts.nbytes is None:
        return by_layer, False
    return (_Group("the model", None, working_ms, facts.flops, facts.nbytes),), True


def _by_category(facts: _Facts) -> Iterable[_Group]:
    """Kernels of each category, with the work of the layers of that category."""
    times: dict[Category, float] = {}
    for row in facts.kernels:
        times[row.category] = times.get(row.category, 0.0) + row.ms
    rows = facts.layers.rows if facts.layers is not None else ()
    for category, ms in times.items():
        own = [row for row in rows if row.category == category]
        flops = _sum(row.flops for row in own)
        if flops is None and category == "matrix" and "attention" not in times:
            flops = facts.flops  # nearly all of a model's
        yield _Group(f"{category} kernels", category, ms, flops, _sum(row.nbytes for row in own))


def _sum(values: Iterable[int | None]) -> float | None:
    """The sum where every value is known and there is one."""
    found = list(values)
    told = [value for value in found if value is not None]
    return float(sum(told)) if told and len(told) == len(found) else None


# ------------------------------------------------------------------------------------------------ devices with launches


def _on_device(facts: _Facts) -> TimeVerdict:
    wall = facts.split.wall_ms
    copies = facts.copies_ms or 0.0
    kernels, window = facts.kernels_ms, facts.window_ms
    working = kernels if kernels is not None else window
    if working is None:
        return _unknown(
            "no time of the device was measured", "a profile with the device's own clock",
            f"trt-engine bench {facts.named} --device {facts.device}", _evidence(facts, None, wall),
        )  # fmt: skip
    total = facts.total_ms
    roof = _roofline(facts, working)
    parts: dict[_Part, float] = {name: share * working / total for name, share in roof.shares.items()}
    parts["copy"] = copies / total
    parts["idle"] = max(0.0, total - copies - working) / total
    evidence = _evidence(facts, roof, total, parts)
    largest = max(_ORDER, key=lambda name: parts.get(name, 0.0))
    if largest == "copy":
        return _copy(facts, parts, evidence)
    if largest == "idle":
        return _idle(facts, parts, total, evidence)
    shown = largest == "compute" or (largest == "memory" and not roof.by_kind)
    if not shown and (fixed := _fixed_cost(facts)) is not None:
        return _tiny_kernels(facts, fixed, evidence)
    if kernels is None and largest in ("neither", "untold") and facts.limits.matrix() is not None and facts.flops:
        return _unknown(
            f"{in_ms(working)} pass between the first and the last work of the device, and how much of that kernels "
            "take is not known", "the times of its kernels",
            f"trt-engine profile {facts.named} --device {facts.device} --batch {facts.batch} --rung cupti", evidence,
        )  # fmt: skip
    return _working(facts, roof, parts, largest, evidence)


_ORDER: tuple[_Part, ...] = ("idle", "overhead", "copy", "memory", "compute", "neither", "untold")
"""What wins among equal parts: what is measured outright before what is worked out."""


def _copy(facts: _Facts, parts: Mapping[_Part, float], evidence: _Evidence) -> TimeVerdict:
    up, down = facts.split.h2d_ms or 0.0, facts.split.d2h_ms or 0.0
    longer = "to the device" if up >= down else "back"
    sentence = (
        f"copy-bound: {percent(parts['copy'])} of the time goes to copies between host and device ({in_ms(max(up, down))} "
        f"of them {longer}); side by side with the computation they cost less, smaller inputs least"
    )
    return TimeVerdict(
        "copy", sentence, evidence,
        "two queries in flight, so that one is copied while the other is computed",
        f"trt-engine bench {facts.named} --device {facts.device} --batch {facts.batch} --transfers --streams 2",
    )  # fmt: skip


def _idle(facts: _Facts, parts: Mapping[_Part, float], total: float, evidence: _Evidence) -> TimeVerdict:
    """The device waits: for launches, or for other work of the host."""
    idle = parts["idle"]
    kernels, window, launched = facts.kernels_ms, facts.window_ms, facts.launched
    waits = f"{percent(idle)} of the time the device has nothing to do"
    outside = None if window is None else max(0.0, total - (facts.copies_ms or 0.0) - window)
    inside = None if window is None or kernels is None else max(0.0, window - kernels)
    if outside is not None and outside > (inside or 0.0):
        return _host(facts, f"host-bound: {waits}, {in_ms(outside)} of it before and after its work", evidence)
    share, source = _launch_share(facts, total)
    cost = facts.limits.get("launch")
    gap_us = idle * total * 1e3 / launched if launched else None
    many = f"{launched:.0f} kernels" if launched else "its kernels"
    if share is not None and share >= LAUNCHES_EXPLAIN:
        return _launch(
            facts, f"launch-bound: {waits}, and {source} of {many} take {percent(share)} of it all", evidence
        )
    called_little = facts.split.launch_ms is not None and share is not None and share < LAUNCHES_EXPLAIN / 10
    if not called_little and gap_us is not None and cost is not None and gap_us <= GAP_LAUNCHES * cost.value:
        return _launch(
            facts,
            f"launch-bound: {waits}, {in_us(gap_us)} for each of {many}, of which the launch alone costs "
            f"{in_us(cost.value)}",
            evidence,
        )
    node = facts.limits.get("launch_graph")
    if called_little and inside and gap_us is not None and node is not None and gap_us <= GAP_LAUNCHES * node.value:
        sentence = (
            f"launch-bound: {waits}, {in_us(gap_us)} after each of {many}, although few calls launch them (a graph); fewer "
            "and larger kernels help"
        )
        return TimeVerdict("launch", sentence, evidence, *_twice(facts, "the same kernels with twice the work"))
    if share is None and cost is None:
        sentence = (
            f"host-bound: {waits}; how much of that launching {many} costs is not known without this device's ceilings"
        )
        return TimeVerdict(
            "host", sentence, evidence, "the price of a launch here, then the profile again",
            _ceilings_command(facts),
        )  # fmt: skip
    told = f", and launches take {percent(share)} of it all" if share is not None else ""
    return _host(facts, f"host-bound: {waits}{told}", evidence)


def _launch_share(facts: _Facts, total: float) -> tuple[float | None, str]:
    """The share of the time that launching takes: as captured, else the kernels times the price of a launch."""
    split = facts.split
    if split.launch_ms is not None:
        captured = (split.busy_ms or 0.0) + (split.idle_ms or 0.0)  # the capture's own time, which it slows
        return min(1.0, split.launch_ms / max(captured, total)), "launch calls"
    cost = facts.limits.get("launch")
    if cost is None or facts.launched is None:
        return None, ""
    return min(1.0, facts.launched * cost.value / 1e3 / total), f"launches at {in_us(cost.value)} each"


def _launch(facts: _Facts, sentence: str, evidence: _Evidence) -> TimeVerdict:
    return TimeVerdict(
        "launch", f"{sentence}; one graph launches them at once", evidence,
        "replay the kernels as one CUDA graph; if they are one already, a larger batch",
        f"trt-engine bench {facts.named} --device {facts.device} --batch {facts.batch} --graph",
    )  # fmt: skip


def _host(facts: _Facts, sentence: str, evidence: _Evidence) -> TimeVerdict:
    return TimeVerdict(
        "host", f"{sentence}; more queries in flight keep the device at work meanwhile", evidence,
        "two queries in flight: if the throughput rises, the host was in the way",
        f"trt-engine bench {facts.named} --device {facts.device} --batch {facts.batch} --streams 2",
    )  # fmt: skip


def _fixed_cost(facts: _Facts) -> float | None:
    """The share of the kernels' time that as many empty kernels take; None where that is not most of it."""
    cost, launched, working = facts.limits.get("launch_graph"), facts.launched, facts.kernels_ms
    if cost is None or not launched or not working:
        return None
    share = launched * cost.value / 1e3 / working
    return share if share >= LAUNCHES_EXPLAIN else None


def _tiny_kernels(facts: _Facts, fixed: float, evidence: _Evidence) -> TimeVerdict:
    launched, working, cost = facts.launched or 0.0, facts.kernels_ms or 0.0, facts.limits.get("launch_graph")
    sentence = (
        f"launch-bound: {launched:.0f} kernels of {in_us(working * 1e3 / launched)} each, and an empty one takes "
        f"{in_us(cost.value if cost else 0.0)} in a graph, {percent(min(fixed, 1.0))} of that; fewer and larger ones help"
    )
    return TimeVerdict("launch", sentence, evidence, *_twice(facts, "the same kernels with twice the work"))


# ------------------------------------------------------------------------------------------------ the processor


def _on_host(facts: _Facts) -> TimeVerdict:
    """On a CPU nothing is launched or copied: there is the nodes' work, their overhead, and what is around the call."""
    wall = facts.split.wall_ms
    call = min(facts.split.compute_ms if facts.split.compute_ms is not None else wall, wall)
    overhead = min(_node_overhead_ms(facts) or 0.0, call)
    working = call - overhead
    roof = _roofline(facts, working)
    parts: dict[_Part, float] = {name: share * working / wall for name, share in roof.shares.items()}
    parts["idle"] = (wall - call) / wall
    parts["overhead"] = overhead / wall
    evidence = _evidence(facts, roof, wall, parts)
    largest = max(_ORDER, key=lambda name: parts.get(name, 0.0))
    if largest == "idle":
        sentence = f"host-bound: {percent(parts['idle'])} of the time is spent around the call of the engine, not in it"
        return TimeVerdict(
            "host", f"{sentence}; a larger batch pays it once", evidence,
            *_twice(facts, "the time around the call stays the same"),
        )  # fmt: skip
    if largest == "overhead":
        sentence = (
            f"host-bound: {_overhead_words(facts)} before anything is calculated, {percent(parts['overhead'])} of the time; "
            "fewer nodes or a larger batch help"
        )
        return TimeVerdict("host", sentence, evidence, *_twice(facts, "as many nodes, each with more to do"))
    return _working(facts, roof, parts, largest, evidence)


def _twice(facts: _Facts, why: str) -> tuple[str, str]:
    """The experiment of twice the batch, and its command: by another engine, or model, where this one does not take it."""
    batch = 2 * facts.batch
    if facts.fixed_batch:
        return (
            f"a model with an open batch, then twice the batch: {why}",
            f"trt-engine inspect {facts.source}",
        )
    taken = facts.most_batch is None or batch <= facts.most_batch
    if taken:
        return f"twice the batch: {why}", f"trt-engine bench {facts.named}{facts.where} --batch {batch}"
    return (
        f"an engine for twice the batch (this one takes {facts.most_batch} at most): {why}",
        f"trt-engine bench {facts.source}{facts.where} --batch {batch}",
    )


def _overhead_words(facts: _Facts) -> str:
    """`the call costs 3.88 us and each of 40 nodes 0.22 us`: the larger part first."""
    node, call, nodes = facts.limits.get("node"), facts.limits.get("call"), _nodes(facts)
    each = node.value if node is not None else 0.0
    told = [(nodes * each, f"each of {nodes:.0f} nodes" if nodes > 1 else "the only node", each)]
    if call is not None:
        told.append((call.value, "the call", call.value))
    (_, first, price), *rest = sorted(told, reverse=True)
    return f"{first} costs {in_us(price)}" + "".join(f" and {name} {in_us(us)}" for _, name, us in rest)


def _nodes(facts: _Facts) -> float:
    return sum(row.calls for row in facts.layers.rows) if facts.layers is not None else 0.0


def _node_overhead_ms(facts: _Facts) -> float | None:
    """What the nodes of one inference cost if they had nothing to do, and the call."""
    node, call = facts.limits.get("node"), facts.limits.get("call")
    if node is None or facts.layers is None:
        return None
    return (_nodes(facts) * node.value + (call.value if call else 0.0)) / 1e3


# ------------------------------------------------------------------------------------------------ the device at work


def _working(
    facts: _Facts, roof: _Roofline, parts: Mapping[_Part, float], largest: _Part, evidence: _Evidence
) -> TimeVerdict:
    if largest == "compute":
        return _compute(facts, roof, parts, evidence)
    if largest == "memory":
        return _memory(facts, roof, parts, evidence)
    return _neither(facts, roof, parts, evidence) if largest == "neither" else _untold(facts, roof, parts, evidence)


def _compute(facts: _Facts, roof: _Roofline, parts: Mapping[_Part, float], evidence: _Evidence) -> TimeVerdict:
    found = roof.of("compute", facts.limits)
    ceiling = facts.limits.matrix(found[0].precision)
    assert ceiling is not None  # a group is at this limit only where it is known
    rate = _rate([one for one in found if facts.limits.matrix(one.precision) == ceiling])
    if ceiling.source == "measured" and rate > BEYOND * ceiling.value:
        return _unknown(
            f"{_what(found, roof)} calculate {rate / ceiling.value:.1f} times as fast as {_this(facts)} was seen to "
            f"multiply in {_written(ceiling)}: that was measured on a busy machine, or they take fewer operations than are "
            "counted (Winograd)", "the ceilings of this device, measured again while it is idle",
            f"trt-engine doctor --ceilings --again --device {facts.device}", evidence,
        )  # fmt: skip
    sentence = (
        f"compute-bound: {percent(parts['compute'])} of {facts.the_time} goes to {_what(found, roof)} at "
        f"{_of(rate, ceiling)} {_does(facts, ceiling, 'multiplies')} in {_written(ceiling)}"
    )
    faster = _faster(facts, ceiling)
    if faster is None:
        next_ = "nothing here multiplies faster in another type: fewer operations (a smaller model), or another device"
        return TimeVerdict(
            "compute", f"{sentence}; fewer operations are what is left{_and_idle(parts)}", evidence, next_,
            f"trt-engine inspect {facts.named}", "estimated",
        )  # fmt: skip
    name, other = faster
    times = f"{other.value / ceiling.value:.1f} times"
    promised = "datasheet" in (ceiling.source, other.source)
    gain = f"is promised at {times} the rate" if promised else f"multiplies {times} as fast here"
    return TimeVerdict(
        "compute", f"{sentence}; {name.upper()} {gain}{_and_idle(parts)}", evidence,
        f"the model in {name.upper()}, measured and its accuracy compared", _in_precision(facts, name), "estimated",
    )  # fmt: skip


def _memory(facts: _Facts, roof: _Roofline, parts: Mapping[_Part, float], evidence: _Evidence) -> TimeVerdict:
    found = roof.of("memory", facts.limits)
    what = _what(found, roof)
    share = f"memory-bound: {percent(parts['memory'])} of {facts.the_time} goes to {what}"
    shown = [one for one in found if one.nbytes is not None and facts.limits.memory is not None]
    ceiling = facts.limits.memory
    if roof.by_kind or not shown or ceiling is None:
        sentence = (
            f"{share}, which move bytes and calculate little (by their kind: their bytes or the ceiling are unknown)"
        )
    else:
        moved = sum(one.nbytes or 0.0 for one in shown) / (sum(one.ms for one in shown) / 1e3) / 1e9
        cached = ", part of it from caches (or it was busy when that was measured)" if moved > ceiling.value else ""
        sentence = f"{share} that move {_of(moved, ceiling)} {_does(facts, ceiling, 'moves')}{cached}"
    halves = (
        _computes_in(facts.precision, on_host=facts.limits.on_host) in ("fp32", "tf32") and not facts.limits.on_host
    )
    moving = sum(one.ms for one in found if one.category in ("copy", "reformat"))
    if halves:
        advice, next_, command = "FP16 halves the bytes", "the model in FP16", _in_precision(facts, "fp16")
    elif moving * 2 > sum(one.ms for one in found):
        advice, next_ = "moves and changes of layout can often be left out", "what in the model makes them"
        command = f"trt-engine lint {facts.source}"
    elif not facts.limits.on_host and facts.layers is not None and facts.layers.instrument.startswith("onnxruntime"):
        advice, next_ = "fused into their neighbours they move less", "TensorRT, which fuses more of them"
        command = f"trt-engine bench {facts.source} --backend tensorrt --device {facts.device} --batch {facts.batch}"
    else:
        advice, next_ = "fused into their neighbours they move less", "what of the model could be fused or left out"
        command = f"trt-engine lint {facts.source}"
    return TimeVerdict("bandwidth", f"{sentence}; {advice}{_and_idle(parts)}", evidence, next_, command, "estimated")


def _neither(facts: _Facts, roof: _Roofline, parts: Mapping[_Part, float], evidence: _Evidence) -> TimeVerdict:
    """Both roofs are known and far: something the figures do not show holds the device back."""
    found = roof.of("neither", facts.limits)
    sides = [
        f"{percent(_mean(found, values))} of what {_this(facts)} {verb}"
        for verb, values in (
            ("multiplies", [one.share_of_matrix(facts.limits) for one in found]),
            ("moves from memory", [one.share_of_memory(facts.limits) for one in found]),
        )
        if any(value is not None for value in values)
    ]
    moved = _mean(found, [one.share_of_memory(facts.limits) for one in found])
    why = "their bytes come from caches: " if moved > 1 else ""
    sentence = (
        f"unknown: {percent(parts['neither'])} of {facts.the_time} goes to {_what(found, roof)} that reach "
        f"{' and '.join(sides)}, "
        f"so {why}neither arithmetic nor memory is the limit shown{_and_idle(parts)}"
    )
    if facts.limits.on_host:
        next_, command = _other_threads(facts)
    elif parts.get("idle", 0.0) >= NOTABLE:
        next_ = "one graph, which takes the gaps away, before the kernels are looked at"
        command = f"trt-engine bench {facts.named} --device {facts.device} --batch {facts.batch} --graph"
    elif facts.kernels and facts.launched and (facts.kernels_ms or 0.0) * 1e3 / facts.launched >= SHORT_US:
        next_ = "hardware counters of the longest kernels: they say what the kernels wait for"
        command = f"trt-engine profile {facts.named} --device {facts.device} --batch {facts.batch} --ncu 3"
    else:
        next_, command = _twice(facts, "if an image then costs less, the kernels were too small for the device")
    return TimeVerdict("unknown", sentence, evidence, next_, command, "estimated")


def _other_threads(facts: _Facts) -> tuple[str, str]:
    """One thread where several ran; all of them where the engine was held to one."""
    command = f"trt-engine bench {facts.named} --batch {facts.batch}"
    if facts.settings.get(_THREADS) == "1":  # 0 is ONNX Runtime's word for as many as there are cores
        return "all threads: this one alone may be the limit", f"{command} -O {_THREADS}=0"
    return (
        "other numbers of threads: work that is too small or too uneven for all of them shows here",
        f"{command} -O {_THREADS}=1",
    )


_THREADS = "intra_op_threads"


def _untold(facts: _Facts, roof: _Roofline, parts: Mapping[_Part, float], evidence: _Evidence) -> TimeVerdict:
    """The device is at work, and a fact is missing to say at what limit."""
    worker = "processor" if facts.limits.on_host else "device"
    works = f"{percent(parts['untold'])} of {facts.the_time} the {worker} is at work"
    limits = facts.limits
    if roof.outside > parts["untold"] / 2:
        return _unknown(
            f"{percent(min(roof.outside, parts['untold']))} of {facts.the_time} is in no layer's time: it lies between "
            "layers, or layers were held up now and then by other work of the machine",
            "the same profile on an idle machine",
            f"trt-engine profile {facts.named} --device {facts.device} --batch {facts.batch}", evidence,
        )  # fmt: skip
    if limits.ceilings is None or (limits.matrix() is None and limits.memory is None):
        return _unknown(
            f"{works}, and what {_this(facts)} can do at most is not known",
            "the ceilings of this device, measured once, then the profile again", _ceilings_command(facts), evidence,
        )  # fmt: skip
    if _computes_in(facts.precision, on_host=limits.on_host) is None:
        told = f"of `{facts.precision}`" if facts.precision else "of the type it computes in, which is not known,"
        return _unknown(
            f"{works}, and no ceiling {told} is known", "what the engine computes in",
            f"trt-engine inspect {facts.named}", evidence,
        )  # fmt: skip
    if limits.matrix() is None:
        return _unknown(
            f"{works}, and no rate of {facts.precision.upper()} products was measured here"
            + "".join(f" ({text})" for text in limits.ceilings.skipped if text.startswith(facts.precision.lower()))[:300],
            "the ceilings with a library that multiplies in that type (PyTorch)",
            f"trt-engine doctor --ceilings --again --device {facts.device}", evidence,
        )  # fmt: skip
    if facts.flops is None or (roof.whole and facts.nbytes is None):
        missing = "operations" if facts.flops is None else "bytes"
        return _unknown(
            f"{works}, and its {missing} are not counted", "the work of the model, counted from its ONNX file",
            f"trt-engine inspect {facts.source}", evidence,
        )  # fmt: skip
    if limits.on_host or not facts.kernels:
        rung = "layers" if limits.on_host else "cupti"
        return _unknown(
            f"{works}, and what it does meanwhile is not told", "the times of its layers, with their work",
            f"trt-engine profile {facts.named} --device {facts.device} --batch {facts.batch} --rung {rung}", evidence,
        )  # fmt: skip
    return _unknown(
        f"{works}, most of it in kernels of which neither operations nor bytes are known",
        "hardware counters of the longest kernels",
        f"trt-engine profile {facts.named} --device {facts.device} --batch {facts.batch} --ncu 3", evidence,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ words

_Evidence = tuple[tuple[str, str], ...]


def _unknown(missing: str, next_: str, command: str, evidence: _Evidence) -> TimeVerdict:
    return TimeVerdict("unknown", f"unknown: {missing}", evidence, next_, command, "none")


def _evidence(
    facts: _Facts, roof: _Roofline | None, total: float, parts: Mapping[_Part, float] | None = None
) -> _Evidence:
    """The figures in the order of the argument: the time, its parts, launches, the rates against the ceilings."""
    split, limits = facts.split, facts.limits
    found: list[tuple[str, str]] = [("time of one inference", in_ms(split.wall_ms))]
    told = parts or {}
    if parts and facts.the_time != "the time":
        found.append(("with copies, one after another", f"{in_ms(total)}: what the shares are of"))
    if facts.copies_ms is not None:
        found.append(("copies", f"{in_ms(facts.copies_ms)} ({percent(told.get('copy', facts.copies_ms / total))})"))
    if not limits.on_host and facts.kernels_ms is not None:
        found.append(("kernels", f"{in_ms(facts.kernels_ms)} ({percent(facts.kernels_ms / total)})"))
    elif facts.window_ms is not None:
        found.append(("computing", f"{in_ms(facts.window_ms)} ({percent(facts.window_ms / total)})"))
    if "idle" in told:
        found.append(("nothing to do" if not limits.on_host else "around the call", percent(told["idle"])))
    if told.get("overhead"):
        found.append(("overhead of nodes", f"{_nodes(facts):.0f} nodes, {percent(told['overhead'])}"))
    if facts.launched is not None and not limits.on_host:
        found.append(("kernels of one inference", f"{facts.launched:.0f}"))
    for name, label in (("launch", "a launch"), ("launch_graph", "a kernel in a graph")):
        if (item := limits.get(name)) is not None:
            found.append((f"{label} costs", in_us(item.value)))
    if split.launch_ms is not None:
        found.append(("launch calls, as captured", in_ms(split.launch_ms)))
    if roof is not None:
        found += _of_roofline(facts, roof, told)
    if limits.ceilings is not None:
        found += [("ceilings", note) for note in limits.ceilings.notes]
    return tuple(found)


def _of_roofline(facts: _Facts, roof: _Roofline, parts: Mapping[_Part, float]) -> Iterable[tuple[str, str]]:
    limits = facts.limits
    names: dict[_Part, str] = {
        "compute": "at the limit of arithmetic", "memory": "at the limit of memory", "neither": "at neither",
        "untold": "not to be judged",
    }  # fmt: skip
    for part, label in names.items():
        if parts.get(part):
            yield label, f"{percent(parts[part])} of {facts.the_time}"
    matrix, memory = limits.matrix(), limits.memory
    for one in sorted(roof.groups, key=lambda one: -one.ms)[:3]:
        sides = []
        for ceiling, share in (
            (limits.matrix(one.precision), one.share_of_matrix(limits)),
            (memory, one.share_of_memory(limits)),
        ):
            if ceiling is not None and share:  # what copies calculates nothing
                sides.append(f"{quantity(share * ceiling.value, ceiling.unit)} ({percent(share)} of the ceiling)")
        if sides:
            yield one.name, f"{in_ms(one.ms)}: {', '.join(sides)}"
    if facts.flops and facts.nbytes:
        yield "operations a byte", f"{figure(facts.flops / facts.nbytes)} FLOP/B"
    if (ridge := limits.ridge) is not None:
        yield "arithmetic is the nearer limit from", f"{figure(ridge)} FLOP/B"
    for item in (matrix, memory):
        if item is not None:
            sheet = " (data sheet, not measured)" if item.source == "datasheet" else ""
            yield item.name, f"{quantity(item.value, item.unit)}{sheet}"


def _of(rate: float, ceiling: Ceiling) -> str:
    """`376 of the 990 TFLOP/s`: both in the unit that suits the ceiling."""
    most, unit = scaled(ceiling.value, ceiling.unit)
    return f"{figure(rate * most / ceiling.value)} of the {figure(most)} {unit}"


def _what(found: Sequence[_Group], roof: _Roofline) -> str:
    """What takes the time, in the words of its categories: `matrix and attention layers`."""
    if roof.whole:
        return "the model as a whole"
    times: dict[str, float] = {}
    for one in found:
        times[one.category or "other"] = times.get(one.category or "other", 0.0) + one.ms
    total = sum(times.values()) or 1.0
    names = [name for name, ms in sorted(times.items(), key=lambda item: -item[1]) if ms >= 0.1 * total][:3]
    kind = "kernels" if found and found[0].name.endswith(" kernels") else "layers"
    return f"{' and '.join(filter(None, [', '.join(names[:-1]), names[-1]]))} {kind}"


def _rate(found: Sequence[_Group]) -> float:
    """TFLOP/s of groups together."""
    seconds = sum(one.ms for one in found) / 1e3
    return sum(one.flops or 0.0 for one in found) / seconds / 1e12 if seconds > 0 else 0.0


def _mean(found: Sequence[_Group], values: Sequence[float | None]) -> float:
    """The mean of shares by time, of those that are known."""
    told = [(one.ms, value) for one, value in zip(found, values, strict=True) if value is not None]
    return sum(ms * value for ms, value in told) / (sum(ms for ms, _ in told) or 1.0)


_NEXT_TYPES: dict[str, tuple[str, ...]] = {
    "fp32": ("fp16", "bf16", "tf32"), "tf32": ("fp16", "bf16"), "fp16": ("fp8", "int8"), "bf16": ("fp8", "int8"),
}  # fmt: skip
_WORTH = 1.3
"""Times the rate: less is lost again in conversions."""


def _faster(facts: _Facts, now: Ceiling) -> tuple[str, Ceiling] | None:
    """The first number type this device multiplies faster in, as measured here (or promised by its maker)."""
    have = now.name.partition("_")[0]
    for name in ("int8",) if facts.limits.on_host and have == "fp32" else _NEXT_TYPES.get(have, ()):
        other = facts.limits.matrix(name)
        if other is not None and other.name.startswith(name) and other.value >= _WORTH * now.value:
            return name, other
    return None


def _in_precision(facts: _Facts, precision: str) -> str:
    """A measurement of the model in that type, by a backend that has kernels for it."""
    narrow = precision in ("int8", "fp8")
    seen = facts.layers.instrument if facts.layers is not None else ""
    by_tensorrt = not facts.limits.on_host and (narrow or seen.startswith(("tensorrt", "trtexec")))
    words = [f"trt-engine bench {facts.source}", f"--precision {precision}"]
    words += ["--calibrate DATA"] if narrow else []
    words += ["--backend tensorrt"] if by_tensorrt else []
    return " ".join([*words, f"--device {facts.device} --batch {facts.batch}"])


def _ceilings_command(facts: _Facts) -> str:
    """Measures what is missing, and judges again."""
    return f"trt-engine profile {facts.named} --device {facts.device} --batch {facts.batch} --ceilings"


def _and_idle(parts: Mapping[_Part, float]) -> str:
    idle = parts.get("idle", 0.0)
    return f" ({percent(idle)} of the time there is nothing to do)" if idle >= NOTABLE else ""


def _this(facts: _Facts) -> str:
    return "this processor" if facts.limits.on_host else "this device"


def _does(facts: _Facts, ceiling: Ceiling, verb: str) -> str:
    """`this device multiplies`, where that was seen."""
    return f"{_this(facts)} {verb}" if ceiling.source == "measured" else "its data sheet promises"


def _written(ceiling: Ceiling) -> str:
    return ceiling.name.partition("_")[0].upper()
