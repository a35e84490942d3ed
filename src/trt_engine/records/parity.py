"""What was compared with an engine, and how far they differ: plain values of its passport."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from trt_engine.format import format_ms

_HUGE = sys.float_info.max / 1e6
"""In place of an infinite difference, which JSON cannot hold: no limit allows it either."""


@dataclass(frozen=True, slots=True)
class Channel:
    """An index of one axis of an output."""

    axis: int
    """Axis of the output, counted from 0."""
    index: int
    size: int
    """The number of channels of the axis."""
    max_abs: float
    """The largest difference in it."""

    def __str__(self) -> str:
        return f"channel {self.index} of {self.size} (axis {self.axis})"


@dataclass(frozen=True, slots=True)
class OutputError:
    """Difference of one output from the reference."""

    max_abs: float
    mean_abs: float
    max_rel: float
    """Largest difference over scale (largest absolute reference value), of the worst channel."""
    cosine: float
    """Cosine similarity of the whole output; 1 is equal direction."""
    rms_rel: float | None = None
    """RMS difference over scale, of the worst channel; None in old records."""
    noise: float | None = None
    """RMS difference over the reference's standard deviation, of the worst channel."""
    far_share: float = 0.0
    """Share of the values, without one, that differ by more than half of the standard deviation of the whole output."""
    std_ratio: float = 1.0
    """Standard deviation over that of the reference, of the worst channel; 0 where it became a constant."""
    channel: Channel | None = None
    """Where `max_rel` is; None where the whole output has one scale."""
    noise_channel: Channel | None = None
    std_ratio_channel: Channel | None = None
    """Where `std_ratio` is."""
    rows_moved: int = 0
    """Rows of a model that sorts that were compared at another place."""
    rows_skipped: int = 0
    """Rows of a model that sorts that were not compared: those at the cut."""

    @property
    def rms_text(self) -> str:
        """The figures over all of the worst channel, in words."""
        noise = "" if self.noise is None else f", noise {self.noise:.2g} of the signal"
        far = f", {self.far_share:.2g} of the values far off" if self.far_share else ""
        return "" if self.rms_rel is None else f"RMS {self.rms_rel:.2g}{noise}{far}"

    @property
    def summary(self) -> str:
        """In words, for a line of text."""
        at = f"{self.channel}: " if self.channel is not None else ""
        apart = self.channel.max_abs if self.channel is not None else self.max_abs
        rows = f", {self.rows_moved} rows matched by value" if self.rows_moved else ""
        rows += f", {self.rows_skipped} rows left out" if self.rows_skipped else ""
        return f"{at}difference {apart:.3g} ({self.max_rel:.2g} of the {'channel' if at else 'output'}'s scale){rows}"


def clip_infinite(errors: Mapping[str, OutputError]) -> dict[str, OutputError]:
    """The same with huge numbers for infinite ones and for what is not a number."""
    return {name: _clip_error(error) for name, error in errors.items()}


def _clip_error(error: OutputError) -> OutputError:
    values = {item.name: getattr(error, item.name) for item in fields(error)}
    odd = [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
    bounded: dict[str, Any] = {name: 0.0 if name == "cosine" else _HUGE for name in odd}
    return replace(error, **bounded)


@dataclass(frozen=True, slots=True)
class Parity:
    """The engine against plain ONNX Runtime on the same input."""

    reference: str
    """Runtime of the reference outputs."""
    inputs: str
    """How the input was made: `seeded random, seed 0, images:2x3x160x160`."""
    tolerance: float
    """Largest allowed `metric`, before it is raised for the `sensitivity`."""
    passed: bool
    outputs: dict[str, OutputError] = field(default_factory=dict)
    metric: Literal["max_rel", "rms_rel"] = "max_rel"
    """The figure that `tolerance` is for: in quantised models one step decides the largest difference."""
    source_errors: dict[str, OutputError] = field(default_factory=dict)
    """The engine against the model that was given, where a cast or quantised copy of it was built: measured, not judged."""
    sensitivity: dict[str, OutputError] = field(default_factory=dict)
    """How far the reference moves from itself when its input is changed by the format's roundoff; measured where the engine
    was beyond the tolerance, which is then raised to a few times this."""
    limits: dict[str, float] = field(default_factory=dict)
    """The limits that were raised, by output."""

    def clipped(self) -> Parity:
        """The same without infinite differences, which JSON cannot hold."""
        return replace(
            self,
            outputs=clip_infinite(self.outputs),
            source_errors=clip_infinite(self.source_errors),
            sensitivity=clip_infinite(self.sensitivity),
        )


@dataclass(frozen=True, slots=True)
class ParityLimits:
    """What a comparison allows: the fields of `equivalence.tolerance.Tolerance`, as JSON has them."""

    limit: float
    """Largest allowed `metric`, before it is raised for the `sensitivity`."""
    metric: Literal["max_rel", "rms_rel"]
    """The figure that `limit` is for."""
    noise: float | None
    """The most noise over signal; None where it is not judged."""
    max_replaced_rows: float
    """Share of rows of a model that sorts that may be others, 0 to 1."""
    allow_ties: bool
    """Rows that tie with the last one may be others too."""
    roundoff: float
    """Relative change of the input by which the sensitivity is measured."""
    explicit: bool
    """`--parity-rtol` set the limit."""
    rounding: str
    """The coarsest rounding of the graph, which the limits are for: `fp32`, `fp16`, `quantized`."""
    ranges: dict[str, float] = field(default_factory=dict)
    """Outputs of bounded functions (Sigmoid), with their ranges: differences within the rounding of these are none."""


@dataclass(frozen=True, slots=True)
class SpeedCheck:
    """A quantised engine beside an FP32 engine of the same model, run alternately for about a second: an indication, no
    benchmark."""

    baseline: str
    """What it was measured against."""
    protocol: str
    shapes: dict[str, tuple[int, ...]]
    pairs: int
    """How often each engine ran."""
    quantized_ms: float
    baseline_ms: float
    """Medians."""
    ratio: float
    """Median of time quantised / time in FP32, pair by pair; above 1 the quantised engine is slower."""
    low: float
    high: float
    """95 % interval of that median, by order statistics."""

    @property
    def summary(self) -> str:
        """`1.8 x as fast as fp32 (2.10 ms and 3.78 ms in 170 alternating runs, an indication)`."""
        pace = (
            f"{1 / self.ratio:.2g} x as fast as" if self.high < 1
            else f"{100 * (self.ratio - 1):.0f} % slower than" if self.low > 1
            else "no difference found from"
        )  # fmt: skip
        times = f"{format_ms(self.quantized_ms)} and {format_ms(self.baseline_ms)} in {self.pairs} alternating runs"
        return f"{pace} fp32 ({times}, an indication)"

    @property
    def is_faster(self) -> bool:
        """The interval excludes that it is not."""
        return self.high < 1

    @property
    def is_slower(self) -> bool:
        """By more than two loads of one engine may differ."""
        return self.low > 1.05
