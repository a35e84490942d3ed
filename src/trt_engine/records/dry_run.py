"""`DryRun`: the report of `--dry-run`, of every verb that has no plan of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trt_engine.display import RichDisplay


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun(RichDisplay):
    """What a verb would do, after all checks that need neither a device nor a build; nothing was built or written."""

    does: str
    """The work in words, as `measure model.onnx on cpu`."""
    builds: tuple[str, ...] = ()
    """Models whose engines come from the store, or are built into it first."""
    writes: tuple[str, ...] = ()
    """Paths of files and folders."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What it would work with, by name: device, shapes, protocol, images."""
    dry_run: bool = True
