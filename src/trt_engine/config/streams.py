"""Sources, batching policies and shares: values of the settings of streams within a deadline, and their parsers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trt_engine.errors import UsageError
from trt_engine.units import parse_duration

LEAST_FPS = 0.001
"""Frames per second that a source has at least: whole periods are simulated."""


@dataclass(frozen=True, slots=True)
class SourceGroup:
    """`count` sources at `fps` frames/s each."""

    count: int
    fps: float

    def __str__(self) -> str:
        return f"{self.count}@{self.fps:g}"


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """The batcher's settings that decide latency: rows of a batch, wait of its oldest frame, batches at once."""

    max_batch: int
    """Rows of a full batch."""
    max_wait_ms: float
    """Longest wait of the oldest frame for a batch to fill."""
    contexts: int = 1

    def __str__(self) -> str:
        many = f", {self.contexts} contexts" if self.contexts > 1 else ""
        return f"batch {self.max_batch}, wait {self.max_wait_ms:g} ms{many}"


def parse_share(text: str | float) -> float:
    """A share from 0 to 1: `0.1%` or `0.001`."""
    try:
        value = float(text.strip().removesuffix("%")) / 100 if isinstance(text, str) and "%" in text else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UsageError(f"cannot read the share `{text}`", hint="write it as `0.1%` or `0.001`, below 100 %")
    return value


def parse_sources(text: str | Sequence[SourceGroup]) -> tuple[SourceGroup, ...]:
    """Groups of sources: `200@25,50@30` is 200 at 25 frames/s and 50 at 30."""
    if not isinstance(text, str):
        return tuple(text)
    found = []
    for part in text.split(","):
        count, at, fps = part.partition("@")
        try:
            group = SourceGroup(int(count), float(fps))
        except ValueError:
            group = SourceGroup(0, 0.0)
        if not at or group.count < 1 or not LEAST_FPS <= group.fps < 1e6:
            raise UsageError(f"cannot read the sources `{part.strip()}`", hint="write them as `200@25,50@30`")
        found.append(group)
    return tuple(found)


def format_sources(groups: Sequence[SourceGroup]) -> str:
    """The text that `parse_sources` reads."""
    return ",".join(map(str, groups))


def parse_policy(text: str | BatchPolicy) -> BatchPolicy:
    """A batching policy: `8,5ms` is batches of up to 8 with a wait of 5 ms, `8,5ms,2` with 2 contexts."""
    if isinstance(text, BatchPolicy):
        return text
    batch, _, rest = text.partition(",")
    wait, _, contexts = rest.partition(",")
    try:
        policy = BatchPolicy(int(batch), round(1e3 * parse_duration(wait), 6), int(contexts or 1))
    except (ValueError, UsageError):
        policy = BatchPolicy(0, 0.0)
    if policy.max_batch < 1 or policy.contexts < 1:
        raise UsageError(f"cannot read the policy `{text}`", hint="write it as `8,5ms` or `8,5ms,2`")
    return policy


def format_policy(policy: BatchPolicy) -> str:
    """The text that `parse_policy` reads."""
    return f"{policy.max_batch},{policy.max_wait_ms:g}ms,{policy.contexts}"
