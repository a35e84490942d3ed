"""Figures of a report: thousands set apart, a dash for what is not known, one choice of decimals for a column."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trt_engine.figures import TINY, decimals, figure

__all__ = ["column", "count", "number"]


def number(value: float | None, significant: int = 3) -> str:
    """One number with at least `significant` digits and whole thousands: `0.0123`, `4.56`, `12,345`."""
    if value is None or not math.isfinite(value):
        return "–"
    return figure(value, significant, thousands=",")


def column(values: Sequence[float | None], significant: int = 3) -> tuple[str, ...]:
    """Numbers of one column, with the same decimals where one choice suits the smallest and the largest."""
    sizes = [abs(value) for value in values if value is not None and math.isfinite(value) and value]
    fine = decimals(min(sizes), significant) if sizes else 0
    coarse = decimals(max(sizes), max(significant + 2, 5)) if sizes else 0
    if coarse < fine - significant + 1 or (sizes and min(sizes) < TINY):  # the smallest would read as nothing
        return tuple(number(value, significant) for value in values)
    return tuple(
        "–" if value is None or not math.isfinite(value) else f"{value:,.{min(fine, coarse)}f}" for value in values
    )


def count(value: int) -> str:
    return f"{value:,}"
