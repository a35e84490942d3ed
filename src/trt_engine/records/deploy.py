"""Results of `deploy`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DeployTarget = Literal["triton", "deepstream", "ray"]


@dataclass(frozen=True, slots=True)
class DeployedSetting:
    """One setting of the written configuration, and where its value comes from."""

    name: str
    """The key in the target's own spelling: `dynamic_batching.max_queue_delay_microseconds`."""
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeployedModel:
    """One model of a deployment."""

    name: str
    source: str
    """The engine, or the model that is built where it runs."""
    digest: str | None
    """SHA-256 of the engine's payload; None for a model that is built later."""
    backend: str | None
    settings: tuple[DeployedSetting, ...] = ()
    notes: tuple[str, ...] = ()
    """What the target cannot express, and what remains to be done."""


@dataclass(frozen=True, slots=True)
class DeployReport:
    """Report of `deploy`: the files written for a target, and the decisions in them."""

    target: DeployTarget
    folder: str
    models: tuple[DeployedModel, ...]
    files: dict[str, int]
    """Bytes by path in the folder; 0 in a dry run for files that are not copied yet."""
    next_command: str
    """Command that runs the result."""
    notes: tuple[str, ...] = ()
    dry_run: bool = False
