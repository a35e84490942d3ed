"""The roofline of an inference: operations and bytes of each layer against the device's peaks."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from trt_engine.config.profiles import format_shapes
from trt_engine.device import parse_device
from trt_engine.format import format_percent
from trt_engine.records.profile import Category, DevicePeak, DevicePeaks, KernelRow, LayerProfile, TimeBreakdown
from trt_engine.tensors import Shape

# The thresholds; docs/bottleneck.md explains each.
NEAR_COMPUTE = 0.4
"""Fraction of the matrix rate from which work is compute-bound; better kernels gain at most a factor of 2.5."""
NEAR_MEMORY = 0.4
"""Fraction of the memory rate from which work is memory-bound; a layer's bytes are a lower bound."""
DATASHEET_SHARE = 0.8
"""Attainable fraction of a data-sheet rate; scales both thresholds."""
LAUNCH_BOUND_SHARE = 0.5
"""Fraction of the time in launch calls from which they explain idle time."""
MAX_LAUNCH_GAPS = 10.0
"""Mean gap between kernels, in launch costs, up to which launching explains it."""
ABOVE_PEAK = 1.15
"""Fraction of the measured matrix rate above which the peak must be wrong."""
ABOVE_MEMORY_PEAK = 1.25
"""Fraction of the memory rate above which bytes come from a cache, and memory is not the limit."""
NOTABLE_IDLE = 0.25
"""Idle fraction of the time that is reported beside any other bottleneck."""
SHORT_KERNEL_US = 20.0
"""A mean kernel shorter than this, in us, may be too small to fill a device; longer ones need counters."""
MIN_LAYER_SHARE = 0.01
"""Minimum fraction of the layers' time for a layer to prove a peak wrong: clocks are coarse."""
MIN_KNOWN_SHARE = 0.5
"""Minimum fraction of the layers' time with known work, to classify layers individually."""
Part = Literal["copy", "idle", "overhead", "compute", "memory", "neither", "untold"]
_MEMORY: tuple[Category, ...] = ("element-wise", "normalisation", "reduction", "copy", "reformat")
"""Categories with few operations per byte."""


def describe_above_peak(
    layers: LayerProfile | None, kernels: Sequence[KernelRow], peaks: DevicePeaks | None, precision: str, device: str
) -> str | None:
    """The layer, or kernel category, that exceeds the measured compute peak, which is then too low; None if none does.

    The memory rate is ignored: cached bytes exceed it legitimately.
    """
    facts = ProfileFacts(
        split=TimeBreakdown(wall_ms=0.0), layers=layers, kernels=kernels, device_peaks=peaks, device=device,
        precision=precision,
    )  # fmt: skip
    found = group_above_peak(work_groups(facts, facts.split.wall_ms)[0], facts.peaks, 1.0)
    return None if found is None else above_peak_text(*found)


def group_above_peak(groups: Sequence[WorkGroup], limits: Peaks, times: float) -> tuple[WorkGroup, float] | None:
    """The longest significant group that exceeds `times` the measured peak."""
    whole = sum(one.ms for one in groups)
    found = [
        (one, share)
        for one in groups
        if one.ms >= MIN_LAYER_SHARE * whole
        and (share := one.share_of_matrix(limits)) is not None
        and share > times
        and (peak := limits.matrix(one.precision)) is not None
        and peak.source == "measured"
    ]
    return max(found, key=lambda item: item[0].ms, default=None)


def above_peak_text(group: WorkGroup, share: float) -> str:
    return f"{group.name} computes at {format_percent(share)} of the measured peak"


@dataclass(frozen=True, slots=True)
class Peaks:
    """The peaks relevant to an engine of this precision."""

    peaks: DevicePeaks | None
    precision: str
    on_host: bool

    def matrix(self, precision: str = "") -> DevicePeak | None:
        """The matrix rate in that dtype, of the fastest library."""
        asked = compute_dtype(precision or self.precision, on_host=self.on_host)
        if self.peaks is None or asked is None:
            return None
        found = [item for item in self.peaks.peaks if item.name.startswith(f"{asked}_matrix")]
        if not found and asked == "bf16":
            return self.matrix("fp16")
        return max(found, key=lambda item: item.value, default=None)

    @property
    def memory(self) -> DevicePeak | None:
        """The highest measured memory rate."""
        found = [item for name in ("memory_copy", "memory_read") if (item := self.get(name)) is not None]
        measured = [item for item in found if item.source == "measured"]
        return max(measured or found, key=lambda item: item.value, default=None)

    def get(self, name: str) -> DevicePeak | None:
        return self.peaks.get(name) if self.peaks is not None else None

    @property
    def ridge(self) -> float | None:
        """FLOP per byte above which compute is the nearer limit."""
        matrix, memory = self.matrix(), self.memory
        return None if matrix is None or memory is None else matrix.value * 1e12 / (memory.value * 1e9)


_TYPES = ("nvfp4", "mxfp8", "fp8", "int8", "int4", "fp16", "bf16", "tf32", "fp32")


def compute_dtype(precision: str, *, on_host: bool) -> str | None:
    """The dtype of the matrix products; None if unknown or without a peak."""
    found = next((name for name in _TYPES if precision.lower().startswith(name)), None)
    if on_host:  # CPUs rarely have FP16 kernels: FP16 and 4-bit weights compute in FP32
        return {"int8": "int8", None: None}.get(found, "fp32")
    return {"int4": "fp16", "mxfp8": "fp8", "nvfp4": None}.get(found or "", found)


@dataclass(frozen=True, kw_only=True)
class ProfileFacts:
    """The measurements of an engine, and values derived from them."""

    split: TimeBreakdown
    layers: LayerProfile | None
    kernels: Sequence[KernelRow]
    device_peaks: DevicePeaks | None
    flops: int | None = None
    """Operations of one inference of this batch, as `nbytes` are its bytes."""
    nbytes: int | None = None
    batch: int = 1
    device: str
    precision: str
    engine: str = "ENGINE"
    """For suggested commands, as `model`, which it was built from, its `settings` (`-O`), and the limits of their batch."""
    model: str = "MODEL.onnx"
    settings: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, Shape] = field(default_factory=dict)
    """Shapes of the model's inputs that have open sizes beside the batch."""
    max_batch: int | None = None
    fixed_batch: bool = False
    """True if it takes no other batch."""

    @cached_property
    def peaks(self) -> Peaks:
        return Peaks(self.device_peaks, self.precision, on_host=parse_device(self.device)[0] == "cpu")

    def command(self, verb: str, *flags: str) -> str:
        """The command that runs the engine again, on the same device and with the same batch."""
        where = f"--device {self.device}{self.sizes_at(self.batch, engine=True)}"
        return " ".join((f"trt-engine {verb} {self.engine_argument} {where}", *flags))

    @property
    def engine_argument(self) -> str:
        return _quote(self.engine)

    @property
    def model_argument(self) -> str:
        """The quoted model path for a command."""
        return _quote(self.model)

    def sizes_at(self, batch: int, *, engine: bool = False) -> str:
        """` --batch 8` for a command on the engine or the model; the model's shapes where other sizes are open as well."""
        if engine and self.engine != self.model:
            return f" --batch {batch}"
        moved = {name: (batch, *shape[1:]) if shape[0] == self.batch else shape for name, shape in self.sizes.items()}
        return f" --shapes {shlex.quote(format_shapes(moved))}" if moved else f" --batch {batch}"

    @property
    def device_flag(self) -> str:
        """`--device cuda:0`; empty for the CPU, the default."""
        return "" if self.peaks.on_host else f" --device {self.device}"

    @property
    def copies_ms(self) -> float | None:
        stated = [value for value in (self.split.h2d_ms, self.split.d2h_ms) if value is not None]
        return sum(stated) if stated else None

    @property
    def window_ms(self) -> float | None:
        """Device time from the first to the last work of an inference, by events; not the sum of a capture."""
        if self.split.gpu_ms is not None or self.split.busy_ms is not None:
            return self.split.gpu_ms
        return self.split.compute_ms

    @property
    def kernels_ms(self) -> float | None:
        """Kernel time of one inference; concurrent kernels count once if captured."""
        if self.split.working_ms is not None:
            return self.split.working_ms
        return sum(row.ms_per_inference for row in self.kernels) if self.kernels else None

    @property
    def total_ms(self) -> float:
        """The base of all shares; exceeds the wall time if copies overlap compute or are outside the timed region."""
        working = self.kernels_ms if self.kernels_ms is not None else self.window_ms
        return max(self.split.wall_ms, (self.copies_ms or 0.0) + (working or 0.0))

    @property
    def time_label(self) -> str:
        """The name of the base of all shares."""
        apart = self.copies_ms and self.total_ms > self.split.wall_ms and not self.peaks.on_host
        return "the time with copies" if apart else "the time"

    @property
    def kernel_count(self) -> float | None:
        """Number of kernels in one inference."""
        if self.split.kernels is not None:
            return self.split.kernels
        return sum(row.per_inference for row in self.kernels) if self.kernels else None


def _quote(path: str) -> str:
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def is_positive(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


@dataclass(frozen=True, slots=True)
class WorkGroup:
    """Work that is classified together: a layer, or all kernels of a category."""

    name: str
    category: Category | None
    ms: float
    flops: float | None
    nbytes: float | None
    precision: str = ""

    def share_of_matrix(self, limits: Peaks) -> float | None:
        """Fraction of the device's matrix rate."""
        ceiling = limits.matrix(self.precision)
        if ceiling is None or self.flops is None or self.ms <= 0:
            return None
        return self.flops / (self.ms / 1e3) / (ceiling.value * 1e12)

    def share_of_memory(self, limits: Peaks) -> float | None:
        """Fraction of the device's memory rate; above 1 if part of the bytes is cached."""
        ceiling = limits.memory
        if ceiling is None or self.nbytes is None or self.ms <= 0:
            return None
        return self.nbytes / (self.ms / 1e3) / (ceiling.value * 1e9)

    def classify(self, limits: Peaks) -> tuple[Part, bool]:
        """The limit it is at, and whether measurements show that (else its category)."""
        compute, memory = self.share_of_matrix(limits), self.share_of_memory(limits)
        # relative to each threshold, so that the nearer limit wins
        at_compute = (compute or 0.0) / (NEAR_COMPUTE * _attainable_share(limits.matrix(self.precision)))
        cached = (memory or 0.0) > ABOVE_MEMORY_PEAK  # then memory is not the limit
        at_memory = 0.0 if cached else (memory or 0.0) / (NEAR_MEMORY * _attainable_share(limits.memory))
        if at_compute >= 1 and at_compute >= at_memory:
            return "compute", True
        if at_memory >= 1:
            return "memory", True
        if memory is not None and (compute is not None or self.category in _MEMORY):
            return "neither", True
        if memory is None and self.category in _MEMORY and not limits.on_host:  # a CPU computes there, too
            return "memory", False
        return "untold", True


def _attainable_share(ceiling: DevicePeak | None) -> float:
    return DATASHEET_SHARE if ceiling is not None and ceiling.source == "datasheet" else 1.0


@dataclass(frozen=True, slots=True)
class Roofline:
    """The device's working time by limit, as shares."""

    groups: tuple[WorkGroup, ...]
    shares: Mapping[Part, float]
    inferred_by_kind: bool
    """True if most of the memory-bound part is inferred from categories alone."""
    whole_model: bool
    """True if the model is one group, for lack of layer data."""
    unattributed: float
    """The share outside all layers' times, unclassified; part of `untold`."""

    def groups_at(self, part: Part, limits: Peaks) -> list[WorkGroup]:
        """The groups at that limit, the longest first."""
        return sorted((one for one in self.groups if one.classify(limits)[0] == part), key=lambda one: -one.ms)


def build_roofline(facts: ProfileFacts, working_ms: float) -> Roofline:
    groups, whole = work_groups(facts, working_ms)
    stated = sum(one.ms for one in groups)
    total = max(stated, working_ms) or 1.0
    outside = max(0.0, total - stated) / total
    shares: dict[Part, float] = {"untold": outside}
    kind = 0.0
    for one in groups:
        part, shown = one.classify(facts.peaks)
        shares[part] = shares.get(part, 0.0) + one.ms / total
        kind += 0.0 if shown else one.ms / total
    return Roofline(groups, shares, kind > shares.get("memory", 0.0) / 2, whole, outside)


def work_groups(facts: ProfileFacts, working_ms: float) -> tuple[tuple[WorkGroup, ...], bool]:
    """Layers if their times are known; else kernels by category; else the model as one group (True)."""
    rows = facts.layers.rows if facts.layers is not None else ()
    timed = facts.layers is not None and facts.layers.clock != "launch"
    by_layer = tuple(
        WorkGroup(row.name, row.category, row.median_ms, row.flops, row.nbytes, row.precision) for row in rows if timed
    )
    stated = sum(one.ms for one in by_layer if one.classify(facts.peaks)[0] != "untold" and one.nbytes is not None)
    if by_layer and stated >= MIN_KNOWN_SHARE * sum(one.ms for one in by_layer):
        return by_layer, False
    if facts.kernels:
        return tuple(_groups_by_category(facts)), False
    if by_layer and facts.flops is None and facts.nbytes is None:
        return by_layer, False
    return (WorkGroup("the model", None, working_ms, facts.flops, facts.nbytes),), True


def _groups_by_category(facts: ProfileFacts) -> Iterable[WorkGroup]:
    """Kernels of each category, with the work of the layers of that category."""
    times: dict[Category, float] = {}
    for row in facts.kernels:
        times[row.category] = times.get(row.category, 0.0) + row.ms_per_inference
    rows = facts.layers.rows if facts.layers is not None else ()
    for category, ms in times.items():
        own = [row for row in rows if row.category == category]
        flops = sum_known(row.flops for row in own)
        if flops is None and category == "matrix" and "attention" not in times:
            flops = facts.flops  # nearly all of a model's
        yield WorkGroup(f"{category} kernels", category, ms, flops, sum_known(row.nbytes for row in own))


def sum_known(values: Iterable[int | None]) -> int | None:
    """The sum if all values are known and there is at least one."""
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if known and len(known) == len(found) else None


def rate_tflops(found: Sequence[WorkGroup]) -> float:
    """TFLOP/s of groups together."""
    seconds = sum(one.ms for one in found) / 1e3
    return sum(one.flops or 0.0 for one in found) / seconds / 1e12 if seconds > 0 else 0.0


def weighted_mean(found: Sequence[WorkGroup], values: Sequence[float | None]) -> float:
    """The time-weighted mean of the known shares."""
    stated = [(one.ms, value) for one, value in zip(found, values, strict=True) if value is not None]
    return sum(ms * value for ms, value in stated) / (sum(ms for ms, _ in stated) or 1.0)
