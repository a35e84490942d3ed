"""Charts of rows: a label, a value, and below them a bar, a box or an interval. They read on a phone as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trt_engine.reporting.charts.kinds import Bars, Boxes, Forest, Stacked
from trt_engine.reporting.charts.parts import (
    BOTTOM,
    RIGHT,
    WIDTH,
    fitted,
    log_ticks,
    nice,
    room,
    scale,
    svg,
    text,
    tick,
    x_axis,
)
from trt_engine.reporting.figures import number

__all__ = ["bars", "box_keys", "boxes", "forest", "forest_keys", "signed", "stacked", "stacked_keys"]

_PALE = 9
"""The part that is no category: what is left of the whole."""
_EDGE = 10
"""Left end of the axis of charts whose labels stand above their rows."""


def bars(chart: Bars) -> str:
    row = 34
    height = row * len(chart.bars) + 8
    longest = max((value for _, value in chart.bars), default=0) or 1
    parts = []
    for index, (name, value) in enumerate(chart.bars):
        y = index * row + 16
        parts.append(_named(name, f"{number(value)} {chart.unit}", y))
        parts.append(f'<rect class="track" x="2" y="{y + 5}" width="{WIDTH - 4}" height="7" rx="1.5"/>')
        width = max(1.5, (WIDTH - 4) * value / longest)
        parts.append(f'<rect class="bar" x="2" y="{y + 5}" width="{width:.1f}" height="7" rx="1.5"/>')
    return svg(chart.key, chart.title, chart.description, height, parts)


def boxes(chart: Boxes) -> str:
    row = 44
    height = row * len(chart.boxes) + BOTTOM + 4
    low, high = min(box.low for box in chart.boxes), max(box.high for box in chart.boxes)
    log = low > 0 and high / low > 8
    if log:
        low, high = low / (high / low) ** 0.02, high * (high / low) ** 0.02
        ticks = log_ticks(low, high)
    else:
        low, high, ticks = nice(0.0 if low >= 0 and low < high * 0.5 else low, high)
    x_at = scale(low, high, _EDGE, WIDTH - RIGHT, log)
    parts = [_grid(ticks, x_at, height)]
    for index, box in enumerate(chart.boxes):
        y = index * row + 16
        parts.append(_named(box.label, f"{number(box.median)} {chart.unit}", y))
        a, b, c, d, e = (x_at(value) for value in (box.low, box.q1, box.median, box.q3, box.high))
        parts.append(f'<line class="whisker" x1="{a:.1f}" x2="{e:.1f}" y1="{y + 15}" y2="{y + 15}"/>')
        for end in (a, e):
            parts.append(f'<line class="whisker" x1="{end:.1f}" x2="{end:.1f}" y1="{y + 11}" y2="{y + 19}"/>')
        parts.append(f'<rect class="box" x="{b:.1f}" y="{y + 8}" width="{max(1.5, d - b):.1f}" height="14" rx="1.5"/>')
        parts.append(f'<line class="median" x1="{c:.1f}" x2="{c:.1f}" y1="{y + 6}" y2="{y + 24}"/>')
    parts.append(text(WIDTH / 2, height - 8, chart.unit + (", log scale" if log else ""), "label middle"))
    return svg(chart.key, chart.title, chart.description, height, parts)


def box_keys() -> list[tuple[str, str]]:
    return [
        ('<line class="median" x1="12" x2="12" y1="0" y2="12"/>', "median"),
        ('<rect class="box" x="2" y="1" width="20" height="10" rx="1.5"/>', "middle half"),
        ('<path class="whisker" d="M1 6h22M1 2v8M23 2v8"/>', "p1 to p99"),
    ]


def stacked(chart: Stacked) -> str:
    row = 48
    height = row * len(chart.stacks) + 8
    longest = max((sum(stack.values) for stack in chart.stacks), default=0) or 1
    parts = []
    for index, stack in enumerate(chart.stacks):
        y = index * row + 16
        parts.append(_named(stack.label, f"{number(sum(stack.values))} {chart.unit}", y))
        x = 2.0
        for (_, which), value in zip(chart.parts, stack.values, strict=True):
            width = (WIDTH - 4) * value / longest
            if width < 0.4:
                x += width
                continue
            inner = max(0.4, width - (1.2 if width > 2.5 else 0))
            parts.append(f'<rect class="c{which}" x="{x:.1f}" y="{y + 6}" width="{inner:.1f}" height="19"/>')
            if width >= 6 + room(digits := str(which + 1), 9):
                parts.append(text(x + inner / 2, y + 20, digits, _on(which)))
            x += width
    return svg(chart.key, chart.title, chart.description, height, parts)


def stacked_keys(chart: Stacked) -> list[tuple[str, str]]:
    return [
        (
            f'<rect class="c{which}" x="4" y="-2" width="16" height="16"/>{text(12, 10.5, str(which + 1), _on(which))}',
            name,
        )
        for name, which in chart.parts
    ]


def _on(which: int) -> str:
    """The style of a number in a segment; the last kind of segment is pale."""
    return "on plain middle" if which >= _PALE else "on middle"


def forest(chart: Forest) -> str:
    row = 44
    height = row * len(chart.spans) + BOTTOM + 20
    ends = [0.0, *(end for span in chart.spans for end in (span.low, span.high)), *(limit.at for limit in chart.limits)]
    low, high, ticks = nice(min(ends), max(ends))
    x_at = scale(low, high, _EDGE, WIDTH - RIGHT, False)
    parts = [_grid(ticks, x_at, height)]
    floor = height - BOTTOM
    zero = x_at(0)
    parts.append(f'<line class="zero" x1="{zero:.1f}" x2="{zero:.1f}" y1="0" y2="{floor}"/>')
    for limit in chart.limits:
        x = x_at(limit.at)
        after = x + 5 + room(limit.name) < WIDTH
        for index in limit.spans:
            y = index * row + 16
            parts.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{y + 5}" y2="{y + 25}"/>')
        last = max(limit.spans) * row + 16
        parts.append(text(x + (5 if after else -5), last + 33, limit.name, "tick" if after else "tick end"))
    for index, span in enumerate(chart.spans):
        y = index * row + 16
        said = f"{signed(span.value)} {chart.unit} ({signed(span.low)} to {signed(span.high)})"
        parts.append(_named(span.label, said, y))
        a, b, c = (x_at(value) for value in (span.low, span.value, span.high))
        parts.append(f'<line class="span" x1="{a:.1f}" x2="{c:.1f}" y1="{y + 15}" y2="{y + 15}"/>')
        for end in (a, c):
            parts.append(f'<line class="span" x1="{end:.1f}" x2="{end:.1f}" y1="{y + 10}" y2="{y + 20}"/>')
        hollow = "" if span.clear else " hollow"
        parts.append(f'<circle class="dot s0{hollow}" cx="{b:.1f}" cy="{y + 15}" r="4.5"/>')
    parts.append(text(WIDTH / 2, height - 8, chart.x_label, "label middle"))
    return svg(chart.key, chart.title, chart.description, height, parts)


def forest_keys(chart: Forest) -> list[tuple[str, str]]:
    found = [
        ('<circle class="dot s0" cx="12" cy="6" r="4.5"/>', "a difference"),
        ('<circle class="dot s0 hollow" cx="12" cy="6" r="4.5"/>', "no difference found"),
    ]
    return found + ([('<line class="limit" x1="12" x2="12" y1="0" y2="12"/>', "gate")] if chart.limits else [])


def signed(value: float) -> str:
    """With its sign, and as many digits as a per cent needs."""
    digits = 1 if abs(value) >= 1 or not value else 2
    return f"{value:+,.{digits}f}".replace("-", "−")


def _named(name: str, value: str, y: float) -> str:
    """A row's label on the left, its value on the right, the label cut where they would meet."""
    shown = fitted(name, WIDTH - 16 - room(value))
    return text(2, y, shown, "name") + text(WIDTH - 2, y, value, "value end")


def _grid(ticks: Sequence[float], x_at: Callable[[float], float], height: float) -> str:
    floor = height - BOTTOM
    lines = (f'<line class="grid" x1="{x_at(at):.1f}" x2="{x_at(at):.1f}" y1="0" y2="{floor:g}"/>' for at in ticks)
    return "".join(lines) + x_axis([(at, tick(at)) for at in ticks], x_at, height, left=_EDGE)
