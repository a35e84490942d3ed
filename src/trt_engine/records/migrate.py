"""Results of `migrate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trt_engine.display import RichDisplay


@dataclass(frozen=True, slots=True)
class MigrationFinding:
    """One place that TensorRT's target release does not take, or takes in another meaning."""

    rule: str
    """Stable id of the rule: `fp16-flag`."""
    severity: Literal["error", "warning"]
    kind: Literal["removed", "renamed", "meaning"]
    """`meaning`: still accepted, but does something else."""
    since: str
    """The release that changed it."""
    file: str
    line: int
    """From 1, as `column`; in a notebook, of the .ipynb file."""
    column: int
    text: str
    """What was found: the name, option or setting."""
    why: str
    replacement: str
    source: str
    """Where the change is recorded."""
    fixable: bool
    """Whether `--fix` changes it."""


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file that could not be checked."""

    file: str
    reason: str


@dataclass(frozen=True, slots=True)
class MigrateReport(RichDisplay):
    """Report of `migrate` on files and folders."""

    paths: tuple[str, ...]
    from_release: str
    """Release that the code was written for."""
    to_release: str
    """Release that it is checked for."""
    findings: tuple[MigrationFinding, ...]
    """In order of file and line; after `--fix` those that are left."""
    counts: dict[str, int]
    """Findings by severity, and `ignored`: those that comments turn off."""
    files_checked: int
    """Files of a kind that rules look at."""
    files_skipped: tuple[SkippedFile, ...]
    """Files of such a kind that were not checked: C++ without its parser, too large, damaged."""
    diff: str | None = None
    """Unified diff of the changes, with `diff` or `fix`."""
    files_fixed: tuple[str, ...] = ()
    """Files that `fix` wrote."""
