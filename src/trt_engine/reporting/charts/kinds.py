"""The charts a report can have, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Bars",
    "Box",
    "Boxes",
    "Chart",
    "Forest",
    "Histogram",
    "Limit",
    "Line",
    "LineChart",
    "Point",
    "Scatter",
    "Span",
    "Stack",
    "Stacked",
]


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    label: str = ""
    mark: Literal["", "unstable", "cliff"] = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a line chart; its place among the lines gives its colour, marker and dashes."""

    name: str
    points: tuple[Point, ...]
    style: Literal["solid", "dashed", "points"] = "solid"


@dataclass(frozen=True, slots=True)
class LineChart:
    key: str
    title: str
    description: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log_x: bool = False
    from_zero: bool = True


@dataclass(frozen=True, slots=True)
class Scatter:
    """Points in two measures, each with a short label; `front` joins those that no other beats in both."""

    key: str
    title: str
    description: str
    x_label: str
    y_label: str
    groups: tuple[Line, ...]
    front: tuple[Point, ...] = ()


@dataclass(frozen=True, slots=True)
class Histogram:
    """The distribution of samples; a long tail gets a logarithmic axis."""

    key: str
    title: str
    description: str
    x_label: str
    samples: tuple[float, ...]
    marks: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Bars:
    key: str
    title: str
    description: str
    unit: str
    bars: tuple[tuple[str, float], ...]


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
class Boxes:
    key: str
    title: str
    description: str
    unit: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Stack:
    """One bar: a value for each part of the chart, in the parts' order."""

    label: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Stacked:
    """Bars of parts. `parts` are (name, number): the number stands in the segment and chooses its colour."""

    key: str
    title: str
    description: str
    unit: str
    parts: tuple[tuple[str, int], ...]
    stacks: tuple[Stack, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """An estimate and its interval."""

    label: str
    low: float
    value: float
    high: float
    clear: bool
    """The interval leaves zero out."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A gate on the axis."""

    name: str
    at: float
    spans: tuple[int, ...]
    """The spans it judges, by their places."""


@dataclass(frozen=True, slots=True)
class Forest:
    """Intervals around estimates, one below the other, against a line at zero; `limits` are gates."""

    key: str
    title: str
    description: str
    x_label: str
    unit: str
    spans: tuple[Span, ...]
    limits: tuple[Limit, ...] = ()


Chart = LineChart | Scatter | Histogram | Bars | Boxes | Stacked | Forest
