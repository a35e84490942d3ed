"""The charts of a report, as values; `draw` makes SVG of them.

Each has a title and a description; series differ in shape and dashes, parts in their number, so that nothing depends on
colour.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from trt_engine.format import format_column, format_difference, format_or_dash


@dataclass(frozen=True, slots=True)
class _Titled:
    key: str
    title: str


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    label: str = ""
    mark: Literal["", "unstable", "cliff"] = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a line chart; its index sets colour, marker and dashes."""

    name: str
    points: tuple[Point, ...]
    style: Literal["solid", "dashed", "points"] = "solid"


@dataclass(frozen=True, slots=True)
class LineChart(_Titled):
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log_x: bool = False

    @property
    def description(self) -> str:
        return _describe_points(self.lines, self.x_label, self.y_label)


@dataclass(frozen=True, slots=True)
class Scatter(_Titled):
    """Labelled points; `front` connects the Pareto-optimal ones."""

    x_label: str
    y_label: str
    groups: tuple[Line, ...]
    front: tuple[Point, ...] = ()

    @property
    def description(self) -> str:
        return _describe_points(self.groups, self.x_label, self.y_label)


@dataclass(frozen=True, slots=True)
class Histogram(_Titled):
    """The distribution of samples; a long tail gets a logarithmic axis."""

    x_label: str
    samples: tuple[float, ...]
    marks: tuple[tuple[str, float], ...] = ()

    @property
    def description(self) -> str:
        marks = (f"{name} {format_or_dash(value)}" for name, value in self.marks)
        ends = f"{format_or_dash(min(self.samples))} and {format_or_dash(max(self.samples))}"
        return _join((f"{len(self.samples):,} samples between {ends}, {self.x_label}", *marks))


@dataclass(frozen=True, slots=True)
class Bars(_Titled):
    unit: str
    bars: tuple[tuple[str, float], ...]
    notes: tuple[str, ...] = ()
    """Text after each bar's value, as `14.8 %`, or instead of it without a unit; empty, or one per bar."""

    @property
    def description(self) -> str:
        return _join(f"{name}: {text}" for (name, _), text in zip(self.bars, self.labels, strict=True))

    @property
    def labels(self) -> list[str]:
        """The text beside each bar: its value, and its note."""
        values = format_column([value for _, value in self.bars])
        known = (f"{value} {self.unit}" if self.unit else "" for value in values)
        return [" · ".join(filter(None, pair)) for pair in zip(known, self.notes or [""] * len(values), strict=True)]


@dataclass(frozen=True, slots=True)
class Box:
    """The distribution of one measurement: p1, p25, median, p75, p99."""

    label: str
    low: float
    q1: float
    median: float
    q3: float
    high: float


@dataclass(frozen=True, slots=True)
class Boxes(_Titled):
    unit: str
    boxes: tuple[Box, ...]

    @property
    def description(self) -> str:
        return _join(
            f"{box.label}: median {format_or_dash(box.median)} {self.unit}, p99 {format_or_dash(box.high)} {self.unit}"
            for box in self.boxes
        )


@dataclass(frozen=True, slots=True)
class Stack:
    """One bar: a value per part."""

    label: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StackedBars(_Titled):
    """Stacked bars. `parts` are (name, number): the number labels the segment and sets its colour."""

    unit: str
    parts: tuple[tuple[str, int], ...]
    stacks: tuple[Stack, ...]

    @property
    def description(self) -> str:
        names = [name for name, _ in self.parts]
        return _join(
            f"{stack.label}: "
            + ", ".join(f"{name} {format_or_dash(v)}" for name, v in zip(names, stack.values, strict=True) if v)
            + f" {self.unit}"
            for stack in self.stacks
        )


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its interval."""

    label: str
    low: float
    value: float
    high: float
    excludes_zero: bool
    """True if the interval excludes zero."""


@dataclass(frozen=True, slots=True)
class GateLimit:
    """A gate on the axis."""

    name: str
    value: float
    spans: tuple[int, ...]
    """Indices of the spans it applies to."""


@dataclass(frozen=True, slots=True)
class IntervalChart(_Titled):
    """Estimates with intervals and a line at zero; `limits` are gates."""

    x_label: str
    unit: str
    spans: tuple[Interval, ...]
    limits: tuple[GateLimit, ...] = ()

    @property
    def description(self) -> str:
        return _join(
            f"{span.label}: {format_difference(span.value, 2)} {self.unit} ({format_difference(span.low, 2)} to "
            f"{format_difference(span.high, 2)})"
            for span in self.spans
        )


Chart = LineChart | Scatter | Histogram | Bars | Boxes | StackedBars | IntervalChart


def _describe_points(lines: tuple[Line, ...], x_label: str, y_label: str) -> str:
    what = x_label.partition(" (")[0]
    return _join(
        f"{f'{line.name}, ' if len(lines) > 1 else ''}{what} {p.x:g}: {format_or_dash(p.y)} {y_label}"
        for line in lines
        for p in line.points
    )


def _join(clauses: Iterable[str]) -> str:
    return "; ".join(clauses) + "."
