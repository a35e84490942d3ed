"""Numbers as people read them: as many digits as mean something, one unit for a column."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["column", "count", "number", "si_bytes"]


def number(value: float | None, significant: int = 3) -> str:
    """One number with at least `significant` digits and whole thousands: `0.0123`, `4.56`, `12,345`."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.{_decimals(value, significant)}f}"


def column(values: Sequence[float | None], significant: int = 3) -> tuple[str, ...]:
    """Numbers of one column, with the same decimals where one choice suits the smallest and the largest."""
    sizes = [abs(value) for value in values if value is not None and math.isfinite(value) and value]
    fine = _decimals(min(sizes), significant) if sizes else 0
    coarse = _decimals(max(sizes), max(significant + 2, 5)) if sizes else 0
    if coarse < fine - significant + 1:  # the smallest would read as nothing
        return tuple(number(value, significant) for value in values)
    return tuple(
        "–" if value is None or not math.isfinite(value) else f"{value:,.{min(fine, coarse)}f}" for value in values
    )


def count(value: int) -> str:
    return f"{value:,}"


def si_bytes(mib: int) -> str:
    """MiB as GiB where that reads better."""
    return f"{mib / 1024:,.1f} GiB" if mib >= 2048 else f"{mib:,} MiB"


def _decimals(value: float, significant: int) -> int:
    if not value:
        return 0
    return max(0, min(6, significant - 1 - math.floor(math.log10(abs(value)))))
