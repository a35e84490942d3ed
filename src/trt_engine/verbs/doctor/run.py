"""`te.doctor()`: the checks of `machine_checks`, and which backends work here."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Sequence
from dataclasses import replace

from trt_engine.backend import BackendSpec, list_backends
from trt_engine.device import info
from trt_engine.environment import Environment
from trt_engine.errors import MemoryExhausted, SetupError, UsageError
from trt_engine.profiling.peaks.cache import device_peaks as measured
from trt_engine.public_function import public_function
from trt_engine.records.diagnosis import BackendState, Diagnosis, DoctorReport
from trt_engine.verbs.doctor import machine_checks
from trt_engine.verbs.doctor.machine import Machine
from trt_engine.verbs.doctor.machine_checks import REINSTALL, Check

log = logging.getLogger(__name__)

_PROVIDER_DEVICES = {"CPUExecutionProvider": "cpu", "CUDAExecutionProvider": "cuda:0"}


@public_function
def doctor(machine: Machine | None = None, *, peaks: Sequence[str] = (), remeasure: bool = False) -> DoctorReport:
    """Diagnose this machine: libraries, working backends, and fixes; changes nothing.

    `peaks` names devices (`cpu`, `cuda:0`) whose peaks to report: from the cache, else measured and cached; `remeasure`
    measures in any case. A missing or lost device is a finding.
    """
    machine = machine or Machine()
    looked = [item for look in machine_checks.CHECKS for item in _run_check(look, machine)]
    measured_peaks = []
    for name in (peaks,) if isinstance(peaks, str) else peaks:
        try:
            measured_peaks.append(measured(name, measure=True, remeasure=remeasure))
        except (SetupError, MemoryExhausted) as error:
            looked.append(Diagnosis(f"peaks-{name}", "problem", f"not measured: {error.message}", error.hint))
    diagnoses, specs = tuple(looked), [spec for spec in list_backends().values() if not spec.hidden]
    return DoctorReport(
        diagnoses=diagnoses,
        backends=tuple(_check_backend(spec, machine) for spec in specs),
        environment=Environment.detect(0 if _has_gpu(machine) else None),
        problems=sum(item.status == "problem" for item in diagnoses),
        warnings_found=sum(item.status == "warning" for item in diagnoses),
        peaks=tuple(item for item in measured_peaks if item is not None),
    )


def _run_check(check: Check, machine: Machine) -> list[Diagnosis]:
    """Run one check; its failure is a finding, so that the others still run."""
    diagnoses: list[Diagnosis] = []
    try:
        diagnoses.extend(check(machine))
    except Exception as error:
        log.debug("the check `%s` failed:\n%s", check.__name__, traceback.format_exc())
        name = check.__name__.replace("_", "-")
        diagnoses.append(
            Diagnosis(name, "warning", f"could not be checked: {_reason(error)}", "`-v` shows the traceback")
        )
    return diagnoses


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _check_backend(backend_spec: BackendSpec, machine: Machine) -> BackendState:
    try:
        return _backend_state(backend_spec, machine)
    except Exception as error:
        reason = f"could not be checked: {_reason(error)}"
        return BackendState(backend_spec.name, backend_spec.summary, False, reason=reason, fix=backend_spec.install)


def _has_gpu(machine: Machine) -> bool:
    try:
        return bool(machine.gpus)
    except Exception:  # reported by the check `gpu`
        return False


def _backend_state(backend_spec: BackendSpec, machine: Machine) -> BackendState:
    """Whether a backend works here: its modules import, its programs start, a device is usable."""

    def refused(reason: str, fix: str | None = None) -> BackendState:
        return BackendState(
            backend_spec.name, backend_spec.summary, False, reason=reason, fix=fix or backend_spec.install
        )

    for module in backend_spec.modules:
        probed = machine.library_info(module)
        if "error" in probed or probed.get("hollow"):
            return refused(probed.get("error") or f"`{module}` is hollow")
    for program in backend_spec.tools:
        if (place := machine.tool(program)) is None:
            return refused(f"the program `{program}` was not found")
        if place == machine.tensorrt.trtexec and machine.tensorrt.trtexec_version is None:
            return refused(f"`{place}` does not start: {machine.tensorrt.trtexec_message}", "see `trtexec` above")
    devices: tuple[str, ...] = backend_spec.devices
    if "onnxruntime" in backend_spec.modules:
        ran = [name for name, state in machine.onnxruntime["providers"].items() if state["runs"]]
        devices = tuple(_PROVIDER_DEVICES[name] for name in ran if name in _PROVIDER_DEVICES)
    elif not _usable_gpus(backend_spec, machine):
        devices = tuple(name for name in backend_spec.devices if not name.startswith("cuda"))
    if not devices:
        names = ", ".join(f"{board.name} ({board.compute_capability})" for board in machine.gpus)
        reason = f"it does not run on {names}" if names else "it needs an NVIDIA GPU"
        other = "a machine with an NVIDIA GPU and its driver; `trt-engine inspect` judges plans without one"
        if names:
            other = "another backend, as `--backend tensorrt`"
        elif machine.driver_loaded:
            other = "see `gpu` above"
        return replace(refused(reason, other), builds=backend_spec.resolve_gpus is not None)
    fix = None
    if machine.gpus and "onnxruntime" in backend_spec.modules and not any(name.startswith("cuda") for name in devices):
        fix = f"for the GPU: {REINSTALL.format(names='onnxruntime', wanted='onnxruntime-gpu')}"
    return BackendState(backend_spec.name, backend_spec.summary, True, devices, fix=fix, builds=True)


def _usable_gpus(backend_spec: BackendSpec, machine: Machine) -> list[info.Gpu]:
    """The GPUs the backend can build for."""
    if backend_spec.resolve_gpus is None:
        return list(machine.gpus)
    usable = []
    for board in machine.gpus:
        with contextlib.suppress(UsageError):
            backend_spec.load_function("resolve_gpus")((board.compute_capability,))
            usable.append(board)
    return usable
