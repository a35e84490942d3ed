"""Whether a plan of TensorRT-RTX can be used here: by the library's report about its header, else by header and passport.

Only TensorRT-RTX has a query (`Runtime.get_engine_validity`; it needs 64 bytes and a driver). Its INVALID is final; its
VALID covers the header alone. Without that report nothing is confirmed to load.
Source: Engine Compatibility and CPU-Only AOT, TensorRT-RTX documentation.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from trt_engine.device import info
from trt_engine.escapes import escape_control
from trt_engine.format import MIB, format_bytes, quoted
from trt_engine.records.passport import Compatibility
from trt_engine.trt.compatibility_case import CompatibilityCase, check_weights
from trt_engine.trt.gpu_targets import RTX_TARGETS, sm_label
from trt_engine.trt.versions import lacking_driver_branch, parse_capability, same_release

DIAGNOSTICS = {
    1: "VERSION_MISMATCH",
    2: "UNSUPPORTED_CC",
    4: "OLD_CUDA_DRIVER",
    8: "OLD_CUDA_RUNTIME",
    16: "INSUFFICIENT_GPU_MEMORY",
    32: "MALFORMED_ENGINE",
    64: "CUDA_ERROR",
}
"""The bits of `EngineInvalidityDiagnostics`."""
_FIRST_MAJOR, _IMPOSSIBLE_MAJOR = 1, 20  # majors: the first, and an impossible one
_MAX_MESSAGE_CHARS = 200


@dataclass(frozen=True, slots=True)
class ValidityReport:
    """TensorRT-RTX's report on a plan's header, for the GPU it would use."""

    validity: Literal["VALID", "SUBOPTIMAL", "INVALID"]
    diagnostics: int = 0
    messages: tuple[str, ...] = ()
    """Messages logged meanwhile."""


ValidityQuery = Callable[[Path], ValidityReport]
"""Queries the library about the plan at a path; `SetupError` if the library does not load."""


def rtx_supports(capability: tuple[int, int]) -> bool:
    """Whether TensorRT-RTX runs on GPUs of that compute capability: those it builds for, and later ones."""
    return f"{capability[0]}.{capability[1]}" in RTX_TARGETS or capability > (12, 0)


def check_rtx_plan(case: CompatibilityCase, query_validity: ValidityQuery | None = None) -> Compatibility:
    """loads, penalty, unknown, rebuild or refuse for a plan of TensorRT-RTX.

    `ask` is called if there is a driver and the library would use that GPU; its report overrides header and passport.
    """
    found = next(chain(_check_header(case), _check_library(case)), None)
    if found is not None:
        return found
    why_not = _query_blocker(case) if query_validity is not None else "no query is available"
    if query_validity is None or why_not is not None:
        found = next(_check_header_fields(case), None) or _unknown(f"TensorRT-RTX itself was not queried: {why_not}")
    else:
        report = query_validity(case.path)
        found = interpret_report(report, case)
        if found.status == "unknown":
            found = next(_check_header_fields(case), found)
    return next(check_weights(case), found) if found.status not in ("rebuild", "refuse") else found


def format_diagnostics(bits: int) -> str:
    """`VERSION_MISMATCH, UNSUPPORTED_CC`; bits without a name as a number."""
    names = [name for bit, name in DIAGNOSTICS.items() if bits & bit]
    unknown = bits & ~sum(DIAGNOSTICS)
    return ", ".join([*names, *([f"unknown bits {unknown:#x}"] if unknown else [])])


# ------------------------------------------------------------------------------------------------ the library's report


def interpret_report(report: ValidityReport, case: CompatibilityCase) -> Compatibility:
    """The verdict for a report of the library.

    Of several bits the first to fix decides: without CUDA or a valid header the others mean nothing. INVALID without a bit
    means that the library cannot access the GPU, so the verdict is unknown.
    """
    where = f" on {_gpu_name(case.gpu)}" if case.gpu is not None else ""
    says = f"TensorRT-RTX {case.loader_version} reports {report.validity}"
    if report.validity == "VALID":
        whole = "" if case.passport is not None else "; whether the rest of the file is whole shows when it is loaded"
        return Compatibility("loads", f"{says} for its header{where}{whole}", _next_command(case))
    if report.validity == "SUBOPTIMAL":
        reason = f"{says}{where}: it runs, slower than a plan of a TensorRT-RTX that knows this GPU"
        return case.result("penalty", reason)
    message = next((escape_control(text)[:_MAX_MESSAGE_CHARS] for text in reversed(report.messages)), "")
    if not report.diagnostics:
        reason = f"{says} without a reason, as it does when it cannot access the GPU"
        return _unknown(f"{reason} ({message})" if message else reason)
    says += f" ({format_diagnostics(report.diagnostics)})"
    for bit, judge in _MEANINGS.items():
        if report.diagnostics & bit:
            found = judge(case)
            detail = f"; {message}" if bit == 64 and message else ""
            return Compatibility(found.status, f"{says}: {found.reason}{detail}", found.command)
    return case.result("refuse", f"{says}: it does not load")


def _old_driver(case: CompatibilityCase) -> Compatibility:
    floor = lacking_driver_branch(case.installation.driver, case.loader_version, case.installation.cuda_major or 13)
    driver = f"the driver {case.installation.driver}" if case.installation.driver is not None else "the driver"
    return Compatibility("refuse", f"{driver} is too old", _newer_driver(floor) if floor else "trt-engine doctor")


def _little_memory(case: CompatibilityCase) -> Compatibility:
    weights = f" ({format_bytes(case.header.weight_nbytes)})" if case.header.weight_nbytes else ""
    memory = f" ({format_bytes(case.gpu.memory_mib * MIB)})" if case.gpu is not None else ""
    reason = f"its weights{weights} do not fit the GPU's memory{memory}; with weight streaming they need not"
    return Compatibility("rebuild", reason, f"{case.rebuild_command} -O weight_streaming=on")


def _other_version(case: CompatibilityCase) -> Compatibility:
    return case.result(
        "rebuild",
        f"it is a {case.header.title} and {case.loader_version} is installed here: plans do not move between releases",
    )


def _other_gpu(case: CompatibilityCase) -> Compatibility:
    here = parse_capability(case.gpu.compute_capability) if case.gpu is not None else None
    if case.gpu is not None and here is not None and not rtx_supports(here):
        known = ", ".join(RTX_TARGETS)
        reason = f"TensorRT-RTX runs on GPUs of compute capability {known} and later, not on {_gpu_name(case.gpu)}"
        model = shlex.quote(case.passport.model.file) if case.passport is not None else "MODEL.onnx"
        elsewhere = f"trt-engine build {model} --backend tensorrt -o {quoted(case.path)}"
        return Compatibility("refuse", reason, elsewhere)
    board = f"here is {_gpu_name(case.gpu)}" if case.gpu is not None else "the GPU here is another"
    return Compatibility(
        "rebuild", f"it was built for {case.header.gpus or 'other GPUs'}, and {board}", _rebuild_command_for(case, here)
    )


_MEANINGS: dict[int, Callable[[CompatibilityCase], Compatibility]] = {
    64: lambda case: Compatibility("refuse", "CUDA does not work here, the plan is not to blame", "nvidia-smi"),
    32: lambda case: case.result("refuse", "the file is damaged, or of another library"),
    1: _other_version,
    2: _other_gpu,
    4: _old_driver,
    8: lambda case: case.result("rebuild", "it was built with a newer CUDA than the TensorRT-RTX here brings"),
    16: _little_memory,
}
"""By bit, in the order in which to fix them."""


# ------------------------------------------------------------------------------------------------ header and machine


def _check_header(case: CompatibilityCase) -> Iterator[Compatibility]:
    """Checks that TensorRT-RTX wrote the header, and that the file has its declared length."""
    if case.path.is_file() and (damage := case.header.find_damage(case.path.stat().st_size)):
        yield case.result("refuse", f"it is damaged: {damage}")
    if not _FIRST_MAJOR <= case.built_version.major < _IMPOSSIBLE_MAJOR:
        yield case.result("refuse", f"it is damaged: its header states TensorRT-RTX {case.built_version}")


def _check_library(case: CompatibilityCase) -> Iterator[Compatibility]:
    """Checks that the bindings and their library are installed."""
    here = case.installation
    if here.bindings is None:
        reason = f"it needs TensorRT-RTX {case.built_version}, which is not installed here"
        yield Compatibility("refuse", reason, case.pip_command(case.built_version))
    elif here.library(major=here.bindings.version.major) is None:
        soname = f"libtensorrt_rtx.so.{here.bindings.version.major}"
        reason = f"the bindings of TensorRT-RTX {here.bindings.version} are here and `{soname}` is not"
        yield Compatibility("refuse", reason, case.pip_command(here.bindings.version))


def _query_blocker(case: CompatibilityCase) -> str | None:
    """Why the library cannot be queried here; None if it can."""
    here = case.installation
    if not here.gpus and here.driver is None:
        return "that needs a driver"
    if case.device is None:
        return "the device is not a GPU"
    first = next((item for item in here.gpus if item.index == 0), None)
    if here.gpus and (case.gpu is None or first is None):
        return f"GPU {case.device} is not here"
    if case.gpu is not None and first is not None and case.gpu.compute_capability != first.compute_capability:
        return f"it looks at GPU 0, a {_gpu_name(first)}"
    return None


def _check_header_fields(case: CompatibilityCase) -> Iterator[Compatibility]:
    """Verdicts from header, passport and machine."""
    alone = f"judged from its header{' and passport' if case.passport is not None else ''} alone"
    here, runs = case.installation, case.loader_version
    if runs is not None and not same_release(runs, case.built_version.release):
        yield _other_version(case)
    if here.cuda_major is not None and (floor := lacking_driver_branch(here.driver, runs, here.cuda_major)):
        reason = f"TensorRT-RTX {runs} for CUDA {here.cuda_major} needs driver {floor} or newer, here is {here.driver}"
        yield Compatibility("refuse", reason, _newer_driver(floor))
    if case.device is None:
        return
    if not here.gpus and here.driver is None:
        reason = f"it is a {case.header.title}, and neither an NVIDIA GPU nor its driver is here ({alone})"
        yield Compatibility("refuse", reason, _next_command(case) if _is_deferred(case) else "trt-engine doctor")
    elif here.gpus and case.gpu is None:
        names = ", ".join(f"{item.index}: {item.name}" for item in here.gpus)
        yield Compatibility("refuse", f"GPU {case.device} does not exist here ({names})", "nvidia-smi")
    elif case.gpu is not None and (found := parse_capability(case.gpu.compute_capability)) is not None:
        stated = case.header.compute_capabilities
        listed = f"{found[0]}.{found[1]}" in stated or (case.header.has_ptx and found > (12, 0))
        if not rtx_supports(found) or (stated and not listed):
            yield _other_gpu(case)


# ------------------------------------------------------------------------------------------------ words


def _unknown(reason: str) -> Compatibility:
    return Compatibility("unknown", f"nothing in its header rules it out, and {reason}", "trt-engine doctor")


def _gpu_name(board: info.Gpu) -> str:
    return f"{board.name} ({board.compute_capability})"


def _next_command(case: CompatibilityCase) -> str:
    """The next command for an engine that loads: its deferred parity check, else a benchmark."""
    path = quoted(case.path)
    if case.passport is None:
        return f"trt-engine inspect {path} --run"
    return f"trt-engine {'validate' if _is_deferred(case) else 'bench'} {path}"


def _is_deferred(case: CompatibilityCase) -> bool:
    validation = case.passport.validation if case.passport is not None else None
    return validation is not None and validation.state == "deferred"


def _newer_driver(floor: int) -> str:
    return f"sudo apt-get install nvidia-driver-{floor}"


def _rebuild_command_for(case: CompatibilityCase, here: tuple[int, int] | None) -> str:
    """The command that rebuilds it, for the local GPU as well."""
    if here is None:
        return case.rebuild_command
    wanted = {*case.header.compute_capabilities, f"{here[0]}.{here[1]}"}
    names = ",".join(sm_label(name) for name in RTX_TARGETS if name in wanted)
    words, kept = shlex.split(case.rebuild_command), list[str]()
    for index, word in enumerate(words):
        if word not in ("--gpus", "--each-gpu") and not word.startswith(("--gpus=", "--each-gpu=")):
            kept += [word] if index == 0 or words[index - 1] not in ("--gpus", "--each-gpu") else []
    return shlex.join([*kept, "--gpus", names])
