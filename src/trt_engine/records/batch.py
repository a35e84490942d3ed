"""Results of `batch`."""

from __future__ import annotations

from dataclasses import dataclass

from trt_engine.display import RichDisplay


@dataclass(frozen=True, slots=True)
class FailedRow:
    """One input row without outputs, and why."""

    id: str
    """Id of the row, as in the output files."""
    reason: str


@dataclass(frozen=True, slots=True)
class BatchReport(RichDisplay):
    """Report of `batch`: rows in, rows out, and the first failures."""

    engine: str
    out: str
    job: str
    """Digest of the engine, settings and inputs: a run with the same one resumes."""
    files: int
    """Number of input files."""
    rows: int
    """Rows in, and rows out."""
    failed: int
    """Rows with an error instead of outputs."""
    parts: int
    """Number of parts, each one output file."""
    resumed_parts: int
    """Parts that an earlier run had finished."""
    workers: int
    """Processes that ran the engine; 0 where nothing was left to do."""
    nodes: int
    """Nodes of the Ray cluster; 0 where nothing was left to do."""
    seconds: float
    """Duration of this run, the start of Ray's processes left out."""
    rows_per_s: float | None
    """Rows of this run; None where everything was done before."""
    failures: tuple[FailedRow, ...]
    """The first failed rows, at most 20."""
