"""Results of `doctor`, and measured peaks of devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trt_engine.display import RichDisplay
from trt_engine.environment import Environment
from trt_engine.records.profile import DevicePeaks

Status = Literal["ok", "note", "absent", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One check of `doctor`: subject, status, result, fix."""

    name: str
    """Stable and greppable: `onnxruntime-twice`, `disk-store`."""
    status: Status
    """`problem`: something does not work; `warning`: may fail or be slow; `note`: worth knowing; `absent`: an optional
    component that is not installed."""
    message: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class BackendState:
    """Availability of a backend: devices, or the reason and the fix."""

    name: str
    summary: str
    runs: bool
    """Engines are run here."""
    devices: tuple[str, ...] = ()
    """Devices that it uses here: `cpu`, `cuda:0`."""
    reason: str | None = None
    fix: str | None = None
    builds: bool = False
    """Engines are built here, whether or not they run here."""


@dataclass(frozen=True, slots=True)
class DoctorReport(RichDisplay):
    """Report of `doctor`: the state of this machine."""

    diagnoses: tuple[Diagnosis, ...]
    backends: tuple[BackendState, ...]
    environment: Environment
    problems: int
    """Number of diagnoses with the status `problem`."""
    warnings_found: int
    """Number of diagnoses with the status `warning`."""
    peaks: tuple[DevicePeaks, ...] = ()
    """Peaks of each requested device; with `--peaks`."""
