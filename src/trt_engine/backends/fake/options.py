"""What `-O name=value` sets on the fake backend."""

from __future__ import annotations

from dataclasses import dataclass

from trt_engine.config import opt, parse_size

__all__ = ["FakeOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeOptions:
    """Settings of the fake backend."""

    memory: int = opt(1 << 30, "memory of the fake device, as 64MiB", parse=parse_size, metavar="SIZE")
