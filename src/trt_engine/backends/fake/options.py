"""Options (`-O name=value`) of the fake backend."""

from __future__ import annotations

from dataclasses import dataclass

from trt_engine.config.settings import opt
from trt_engine.units import parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeOptions:
    """Settings of the fake backend."""

    memory: int = opt(1 << 30, "memory of the fake device, as 64MiB", parse=parse_size, metavar="SIZE")
    compute_capability: str = opt(
        "", "the compute capability of the fake device, as 8.9 [default: whichever the engine is for]", in_key=False
    )
