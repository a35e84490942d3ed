"""When the requests of an open loop arrive: Poisson, constant, in bursts, or as recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from trt_engine.atomic_io import decode_json, read_bounded
from trt_engine.errors import UsageError
from trt_engine.verbs.loadtest.config import Arrivals

FloatArray = npt.NDArray[np.float64]
_MAX_REQUESTS = 50_000_000
_MAX_SPAN_S = 366 * 86400.0


def arrival_times(kind: Arrivals, rate: float, duration_s: float, *, seed: int = 0, burst: int = 16) -> FloatArray:
    """Times in s, ascending, in [0, `duration_s`), at `rate` requests/s on average; equal seeds give equal times.

    `poisson`: independent exponential gaps, as of many independent clients. `constant`: equal gaps. `bursts`: `burst`
    requests at once, the bursts Poisson.
    """
    if rate * duration_s > _MAX_REQUESTS:
        raise UsageError(
            f"{rate:g} requests/s for {duration_s:g} s are more than {_MAX_REQUESTS}", hint="a shorter `--duration`"
        )
    if kind == "constant":
        return np.arange(int(np.ceil(rate * duration_s)), dtype=np.float64) / rate
    rng = np.random.default_rng(seed)
    if kind == "bursts":
        return np.repeat(_poisson(rng, rate / burst, duration_s), burst)
    return _poisson(rng, rate, duration_s)


def _poisson(rng: np.random.Generator, rate: float, duration_s: float) -> FloatArray:
    """A Poisson process: its number of events is Poisson, their times are uniform."""
    return np.sort(rng.uniform(0.0, duration_s, int(rng.poisson(rate * duration_s))))


def read_arrivals(path: Path) -> FloatArray:
    """Recorded times in s from the first one on: a text file with one number a line, or a loadtest.jsonl (its last record).

    Raises `UsageError` for a file that is neither.
    """
    try:
        data = read_bounded(path)
        values = _recorded_times(data) if path.suffix == ".jsonl" else _text_times(data)
    except OSError as error:
        raise UsageError(f"cannot read the arrivals `{path}`: {error}", hint="seconds, one a line") from error
    except (ValueError, msgspec.DecodeError) as error:
        raise UsageError(f"`{path}` is not a recording of arrivals: {error}", hint="seconds, one a line") from error
    times: FloatArray = np.sort(np.asarray(values, np.float64))
    if not times.size or not np.isfinite(times).all():
        raise UsageError(f"`{path}` has {times.size} times, expected finite ones", hint="seconds, one a line")
    times -= times[0]
    if times[-1] > _MAX_SPAN_S:
        raise UsageError(f"`{path}` spans {times[-1]:.3g} s, expected a year at most", hint="times in seconds")
    return times


def _text_times(data: bytes) -> list[float]:
    lines = (line.partition("#")[0].strip() for line in data.decode().splitlines())
    return [float(line) for line in lines if line]


def _recorded_times(data: bytes) -> list[float]:
    lines = [line for line in data.split(b"\n") if line.strip()]
    record: Any = decode_json(lines[-1]) if lines else {}
    times = record.get("sent_s") if isinstance(record, dict) else None
    if not isinstance(times, list) or not all(isinstance(value, int | float) for value in times):
        raise ValueError("the last line has no `sent_s`")
    return times
