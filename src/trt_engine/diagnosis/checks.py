"""`te.doctor()`: every check is one function that looks at a `Machine` and says what it found and what to type."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

from trt_engine.backend import Backend, backends
from trt_engine.device import info
from trt_engine.diagnosis import tensorrt as plans
from trt_engine.diagnosis.machine import Machine, requirement_holds
from trt_engine.environment import Environment
from trt_engine.errors import MemoryExhausted, SetupError
from trt_engine.figures import MIB, size
from trt_engine.plans.installed import Installed
from trt_engine.profiling.ceilings import ceilings as measured
from trt_engine.records import BackendState, Diagnosis, DoctorReport
from trt_engine.store import Store

__all__ = ["CHECKS", "Findings", "doctor"]

log = logging.getLogger(__name__)

Status = Literal["ok", "note", "warning", "problem"]

_LEAST_PYTHON = (3, 11)
_LITTLE_DISK_MIB, _NO_DISK_MIB = 4096, 256
"""An FP32 detector with its engine, a copy in the store and the logs takes a few hundred MiB."""
_LITTLE_MEMORY_MIB = 2048
_ORT_FAMILY = ("onnxruntime", "ort-")
_SWAP = "pip uninstall -y {names} && pip install {wanted}"
"""The package that stays must be installed last, into an empty folder (docs/troubleshooting.md)."""
_PROVIDER_DEVICES = {"CPUExecutionProvider": "cpu", "CUDAExecutionProvider": "cuda:0"}


class Findings:
    """A machine with what is costly to find out asked once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._probed: dict[str, dict[str, Any]] = {}

    def probe(self, library: str) -> dict[str, Any]:
        """What a library says of itself, imported in a process of its own."""
        if library not in self._probed:
            self._probed[library] = self.machine.probe(library)
        return self._probed[library]

    @property
    def onnxruntime(self) -> dict[str, Any]:
        return self.probe("onnxruntime")

    @property
    def onnx(self) -> dict[str, Any]:
        return self.probe("onnx")

    @cached_property
    def gpus(self) -> tuple[info.Gpu, ...]:
        return self.machine.gpus

    @property
    def tensorrt(self) -> Installed:
        return self.machine.tensorrt

    @property
    def driver_loaded(self) -> str | None:
        """The kernel driver's own words, whether or not NVML can be asked."""
        text = self.machine.read("/proc/driver/nvidia/version")
        found = re.search(r"Module\s+([\d.]+)", text or "")
        return found[1] if found else None

    def ort_works(self) -> bool:
        return "error" not in self.onnxruntime and not self.onnxruntime["hollow"]


Look = Callable[[Findings], Iterator[Diagnosis]]
CHECKS: list[Look] = []


def check(look: Look) -> Look:
    """Put a check in the list `doctor` goes through, in the order of this file."""
    CHECKS.append(look)
    return look


def doctor(machine: Machine | None = None, *, ceilings: Sequence[str] = (), again: bool = False) -> DoctorReport:
    """What this machine has, which backends work here, and what to type for the rest; changes nothing.

    `ceilings` are devices (`cpu`, `cuda:0`) to say of what they can do at most: as kept, else measured now and kept; with
    `again` measured whatever is kept. One that is not there, or is lost meanwhile, is a finding.
    """
    found = Findings(machine or Machine())
    looked = [item for look in CHECKS for item in _looked(look, found)]
    limits = []
    for name in (ceilings,) if isinstance(ceilings, str) else ceilings:
        try:
            limits.append(measured(name, measure=True, again=again))
        except (SetupError, MemoryExhausted) as error:
            looked.append(Diagnosis(f"ceilings-{name}", "problem", f"not measured: {error.message}", error.hint))
    diagnoses = tuple(looked)
    return DoctorReport(
        diagnoses=diagnoses,
        backends=tuple(_judged(card, found) for card in backends().values() if not card.hidden),
        environment=Environment.here(0 if _has_gpu(found) else None),
        problems=sum(item.status == "problem" for item in diagnoses),
        warnings_found=sum(item.status == "warning" for item in diagnoses),
        ceilings=tuple(item for item in limits if item is not None),
    )


def _looked(look: Look, found: Findings) -> list[Diagnosis]:
    """What a check says; one that fails is a finding itself, and the others still look."""
    said: list[Diagnosis] = []
    try:
        said.extend(look(found))
    except Exception as error:
        log.debug("the check `%s` failed:\n%s", look.__name__, traceback.format_exc())
        name = look.__name__.replace("_", "-")
        said.append(Diagnosis(name, "warning", f"could not be checked: {_reason(error)}", "`-v` shows where"))
    return said


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _judged(card: Backend, found: Findings) -> BackendState:
    try:
        return _backend_state(card, found)
    except Exception as error:
        reason = f"could not be checked: {_reason(error)}"
        return BackendState(card.name, card.summary, False, reason=reason, fix=card.install)


def _has_gpu(found: Findings) -> bool:
    try:
        return bool(found.gpus)
    except Exception:  # told by the check `gpu`
        return False


# ------------------------------------------------------------------------------------------------ Python and packages


@check
def python(found: Findings) -> Iterator[Diagnosis]:
    version = ".".join(map(str, sys.version_info[:3]))
    bits = 64 if sys.maxsize > 2**32 else 32
    if sys.version_info[:2] < _LEAST_PYTHON:
        yield Diagnosis(
            "python", "problem", f"Python {version}, expected 3.11 or newer", "install Python 3.11 or newer"
        )
    elif bits != 64:
        yield Diagnosis("python", "problem", f"Python {version} of {bits} bits", "install a 64-bit Python")
    else:
        yield Diagnosis("python", "ok", f"{version}, {bits}-bit")


@check
def packages(found: Findings) -> Iterator[Diagnosis]:
    """Our own requirements, as installed with the package, against what is here."""
    ours = next((d for d in found.machine.distributions if d.metadata["Name"] == "trt-engine"), None)
    if ours is None:
        yield Diagnosis("packages", "warning", "trt-engine runs from its sources, not installed", "pip install -e .")
        return
    wrong, extras = [], dict[str, list[str]]()
    for line in ours.requires or ():
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*)(?:;.*extra\s*==\s*['\"]([^'\"]+)['\"])?", line)
        if match is None:
            continue
        name, wanted, extra = match[1], match[2].strip("() "), match[3]
        have = found.machine.version(name)
        if extra:
            if have is None and name != "trt-engine":
                extras.setdefault(extra, []).append(name)
        elif have is None and not (name == "onnxruntime" and found.ort_works()):  # onnxruntime-gpu stands in for it
            wrong.append((f"`{name}` is missing", f'"{name}{wanted}"'))
        elif have is not None and not requirement_holds(have, wanted):
            wrong.append((f"`{name}` is {have}, expected {wanted}", f'"{name}{wanted}"'))
    if wrong:
        yield Diagnosis(
            "packages",
            "problem",
            "; ".join(text for text, _ in wrong),
            f"pip install {' '.join(pin for _, pin in wrong)}",
        )
    else:
        names = [name for name in ("numpy", "onnx", "onnxruntime") if found.machine.version(name)]
        versions = ", ".join(f"{name} {found.machine.version(name)}" for name in names)
        yield Diagnosis("packages", "ok", f"trt-engine {ours.version}; {versions}")
    for extra, missing in extras.items():
        yield Diagnosis(
            f"extra-{extra}", "note", f"not installed: {', '.join(missing)}", f'pip install "trt-engine[{extra}]"'
        )


# ------------------------------------------------------------------------------------------------ ONNX Runtime and onnx


@check
def onnxruntime_packages(found: Findings) -> Iterator[Diagnosis]:
    """Two packages that own the folder `onnxruntime/` overwrite each other without a word."""
    owners = found.machine.owners("onnxruntime", _ORT_FAMILY)
    if len(owners) > 1:
        names = " ".join(name for name, _ in owners)
        yield Diagnosis(
            "onnxruntime-twice",
            "problem",
            f"{' and '.join(f'`{name}` {version}' for name, version in owners)} share the folder `onnxruntime/`: "
            "the one installed last has overwritten the other",
            _SWAP.format(names=names, wanted="onnxruntime-gpu" if found.gpus else "onnxruntime"),
        )


@check
def onnxruntime(found: Findings) -> Iterator[Diagnosis]:
    told = found.onnxruntime
    if "error" in told:
        missing = told["error"].startswith("ModuleNotFoundError: No module named 'onnxruntime'")
        fix = "pip install onnxruntime" if missing else "pip install --force-reinstall onnxruntime"
        yield Diagnosis("onnxruntime", "problem", told["error"], fix)
        return
    if told["hollow"]:
        yield Diagnosis(
            "onnxruntime",
            "problem",
            "the package is hollow: `module 'onnxruntime' has no attribute 'InferenceSession'`, which is what is left when "
            "one of two ONNX Runtimes in one folder was uninstalled",
            _SWAP.format(names="onnxruntime onnxruntime-gpu", wanted="onnxruntime"),
        )
        return
    runs = [name for name, state in told["providers"].items() if state["runs"]]
    yield Diagnosis("onnxruntime", "ok", f"{told['version']}, runs on {', '.join(runs) or 'no provider'}")
    for name, state in told["providers"].items():
        if not state["runs"]:
            status: Status = "warning" if found.gpus or found.driver_loaded else "note"
            yield Diagnosis(
                f"provider-{name.removesuffix('ExecutionProvider').lower()}",
                status,
                f"{name} is in the package and does not run: {state['reason']}",
                _provider_fix(state["reason"], found),
            )


def _provider_fix(reason: str, found: Findings) -> str:
    library = re.search(r"lib\w[\w.+-]*\.so[.\d]*", reason or "")
    if not (found.gpus or found.driver_loaded):
        return "nothing, on a machine without an NVIDIA GPU"
    if library and library[0].startswith(("libnvinfer", "libnvonnxparser")):
        return plans.how_to_find(library[0], found.tensorrt, found.machine)
    if library:
        return f"install the CUDA and cuDNN this package was built for, or put `{library[0]}` on LD_LIBRARY_PATH"
    return "docs/troubleshooting.md, ONNX Runtime and GPUs"


@check
def model_versions(found: Findings) -> Iterator[Diagnosis]:
    """onnx may write models newer than ONNX Runtime reads."""
    if "error" in found.onnx:
        yield Diagnosis("onnx", "problem", found.onnx["error"], "pip install --force-reinstall onnx")
        return
    if not found.ort_works() or found.onnxruntime.get("opset") is None:
        return
    writes, reads = found.onnx, found.onnxruntime
    text = (
        f"onnx {writes['version']} writes opset {writes['opset']} and IR {writes['ir_version']}, "
        f"ONNX Runtime reads up to opset {reads['opset']} and IR {reads['ir_version']}"
    )
    if writes["opset"] > reads["opset"] or writes["ir_version"] > (reads["ir_version"] or 0):
        yield Diagnosis(
            "onnx-opset",
            "note",
            text,
            f"name both when you make a model: opset {min(20, reads['opset'])}, ir_version {min(10, reads['ir_version'])}",
        )
    else:
        yield Diagnosis("onnx-opset", "ok", text)


# ------------------------------------------------------------------------------------------------ room


@check
def disk(found: Findings) -> Iterator[Diagnosis]:
    store = found.machine.store or Store().folder
    for name, folder, elsewhere in (
        (
            "disk-store",
            store,
            "`TRT_ENGINE_STORE` names another folder; `trt-engine cache prune --max-size 10GiB` makes room",
        ),
        ("disk-here", found.machine.folder, "`-o` another disk"),
    ):
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            yield Diagnosis(name, "problem", f"`{folder}` cannot be written", elsewhere)
            continue
        free = shutil.disk_usage(there).free >> 20
        status: Status = "problem" if free < _NO_DISK_MIB else "warning" if free < _LITTLE_DISK_MIB else "ok"
        yield Diagnosis(name, status, f"{size(free * MIB)} free in `{folder}`", elsewhere if status != "ok" else None)


@check
def memory(found: Findings) -> Iterator[Diagnosis]:
    total, available = found.machine.memory_mib()
    limit = found.machine.memory_limit_mib()
    room = min(available, limit) if limit else available
    text = f"{size(available * MIB)} of {size(total * MIB)} available"
    if limit:
        text += f", limited to {size(limit * MIB)} by the control group (container, job or service)"
    if room < _LITTLE_MEMORY_MIB:
        fix = "raise the container's or job's memory limit" if limit and limit < available else "end other programs"
        yield Diagnosis("memory", "warning", text, f"{fix}, or measure with `--max-batch 16`")
    else:
        yield Diagnosis("memory", "ok", text)


@check
def processor(found: Findings) -> Iterator[Diagnosis]:
    cpu = info.cpu()
    fast = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "amx_bf16", "asimddp", "i8mm", "sve")
            if name in cpu.features]  # fmt: skip
    text = f"{cpu.name}, {cpu.cores} core{'' if cpu.cores == 1 else 's'}, {' '.join(fast) or 'no vector extension of note'}"
    if "avx2" not in cpu.features and "asimd" not in cpu.features and "neon" not in cpu.features:
        yield Diagnosis(
            "processor", "warning", text, "ONNX Runtime's fast kernels need AVX2: expect a fraction of the speed"
        )
        return
    yield Diagnosis("processor", "ok", text)
    if not {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"}.intersection(cpu.features):
        yield Diagnosis(
            "processor-int8", "note", "no integer dot-product instructions: INT8 is hardly faster than FP32 here"
        )


@check
def container(found: Findings) -> Iterator[Diagnosis]:
    where = found.machine.container
    if where is not None:
        held = plans.held(found.tensorrt, found.machine)
        yield Diagnosis(
            "container",
            "note",
            f"inside a container ({where}): engines are for the versions in here, not for the host's"
            + (f"; it has {held}" if held else ""),
        )
    yield from plans.container_tools(found.machine, where, found.gpus)


# ------------------------------------------------------------------------------------------------ GPU and NVIDIA's tools


@check
def gpu(found: Findings) -> Iterator[Diagnosis]:
    for board in found.gpus:
        yield Diagnosis(
            f"gpu-{board.index}",
            "ok",
            f"{board.name}, {size(board.memory_mib * MIB)}, compute capability {board.compute_capability}, "
            f"driver {board.driver}",
        )
    if found.gpus:
        return
    if found.driver_loaded or any((found.machine.root / "dev").glob("nvidia[0-9]*")):
        fix = (
            'pip install "trt-engine[gpu]"'
            if found.machine.version("nvidia-ml-py") is None
            else "start the container with `--gpus all`, or see `nvidia-smi`"
        )
        driver = f" (driver {found.driver_loaded})" if found.driver_loaded else ""
        yield Diagnosis("gpu", "warning", f"an NVIDIA driver is loaded{driver} and NVML shows no GPU", fix)
    else:
        yield Diagnosis("gpu", "note", "no NVIDIA GPU: the CPU is measured")


@check
def tensorrt(found: Findings) -> Iterator[Diagnosis]:
    """The bindings, imported in a process of their own."""
    here = found.tensorrt
    if not here.packages:
        text = "no TensorRT bindings installed"
        if (library := here.library()) is not None:
            text += f"; the library {library.version} is in `{library.path.parent}`"
        yield Diagnosis("tensorrt", "note", text, plans.how_to_install(here))
        return
    told = found.probe("tensorrt")
    if "error" not in told:
        below = here.library(major=here.bindings.version.major if here.bindings else None)
        place = f", libnvinfer in `{below.path.parent}`" if below is not None else ""
        cuda = f", for CUDA {here.cuda}" if here.cuda is not None else ""
        yield Diagnosis("tensorrt", "ok", f"bindings {told['version']}{cuda}{place}")
        return
    if "No module named" in told["error"]:  # bindings alone have no module `tensorrt`; theirs names the library
        told = found.probe("tensorrt_bindings")
    library_name = re.search(r"lib\w[\w.+-]*\.so[.\d]*", told.get("error", ""))
    names = ", ".join(f"{item.name} {item.version}" for item in here.packages)
    yield Diagnosis(
        "tensorrt",
        "warning",
        f"installed ({names}) and cannot be imported: {told.get('error', 'there is no module `tensorrt`')}",
        _bindings_fix(found, library_name[0] if library_name else None),
    )


def _bindings_fix(found: Findings, library: str | None) -> str:
    here = found.tensorrt
    whole = here.pip((here.bindings or here.packages[0]).version, "--force-reinstall")
    if library is None:
        return whole
    fix = plans.how_to_find(library, here, found.machine)
    return fix if fix.startswith("export") else f"{whole}, or put the folder of `{library}` on LD_LIBRARY_PATH"


@check
def tensorrt_together(found: Findings) -> Iterator[Diagnosis]:
    """Which of TensorRT's parts belong together, and which GPUs and drivers they take."""
    here = found.tensorrt
    yield from plans.versions_together(here)
    yield from plans.cuda_packages(here)
    yield from plans.driver_and_cuda(here)
    yield from plans.gpu_support(here)
    yield from plans.plugin_library(here)
    yield from plans.two_on_one_path(here)
    yield from plans.libraries_on_path(here, found.machine)
    yield from plans.onnxruntime_provider(here, found.machine.package_folders())
    yield from plans.onnxruntime_cuda(here, found.machine.package_folders())
    if here.lean:
        versions = ", ".join(f"{item.version} in `{item.path.parent}`" for item in here.lean)
        yield Diagnosis("tensorrt-lean", "note", f"lean runtimes: {versions}")


@check
def tools(found: Findings) -> Iterator[Diagnosis]:
    here = found.tensorrt
    if here.trtexec is None:
        yield Diagnosis(
            "trtexec", "note", "not found on PATH or in /usr/src/tensorrt/bin", "sudo apt-get install libnvinfer-bin"
        )
    elif here.trtexec_version is None:
        yield Diagnosis(
            "trtexec",
            "warning",
            f"`{here.trtexec}`, which says no version: {here.trtexec_said}",
            _library_fix(here.trtexec_said or "", found) or f"try `{here.trtexec} --help`",
        )
    else:
        yield Diagnosis("trtexec", "ok", f"`{here.trtexec}`, TensorRT {here.trtexec_version}")
    for name, title in (("nsys", "Nsight Systems"), ("ncu", "Nsight Compute")):
        place = found.machine.tool(name)
        if place is not None:
            yield Diagnosis(name, "ok", f"{title}: `{place}`")
        else:
            fix = f"install {title}, then put its folder on PATH: `export PATH=/opt/nvidia/...:$PATH`"
            yield Diagnosis(name, "note", f"{title} not found", fix if found.gpus else None)


def _library_fix(text: str, found: Findings) -> str | None:
    library = re.search(r"lib\w[\w.+-]*\.so[.\d]*", text)
    name = library[0].rstrip(".") if library else None
    return plans.how_to_find(name, found.tensorrt, found.machine, packaged=True) if name else None


# ------------------------------------------------------------------------------------------------ backends


def _backend_state(card: Backend, found: Findings) -> BackendState:
    """Whether that backend can work here: its modules in processes of their own, its programs, a device it can use."""

    def refused(reason: str, fix: str | None = None) -> BackendState:
        return BackendState(card.name, card.summary, False, reason=reason, fix=fix or card.install)

    for module in card.modules:
        told = found.probe(module)
        if "error" in told or told.get("hollow"):
            return refused(told.get("error") or f"`{module}` is hollow")
    for program in card.tools:
        if (place := found.machine.tool(program)) is None:
            return refused(f"the program `{program}` was not found")
        if place == found.tensorrt.trtexec and found.tensorrt.trtexec_version is None:
            return refused(f"`{place}` does not start: {found.tensorrt.trtexec_said}", "see `trtexec` above")
    devices: tuple[str, ...] = card.devices
    if "onnxruntime" in card.modules:
        ran = [name for name, state in found.onnxruntime["providers"].items() if state["runs"]]
        devices = tuple(_PROVIDER_DEVICES[name] for name in ran if name in _PROVIDER_DEVICES)
    elif not found.gpus:
        devices = tuple(name for name in card.devices if not name.startswith("cuda"))
    if not devices:
        return refused("it needs an NVIDIA GPU, and none is here", _no_gpu_fix(found))
    fix = None
    if found.gpus and "onnxruntime" in card.modules and not any(name.startswith("cuda") for name in devices):
        fix = f"for the GPU: {_SWAP.format(names='onnxruntime', wanted='onnxruntime-gpu')}"
    return BackendState(card.name, card.summary, True, devices, fix=fix)


def _no_gpu_fix(found: Findings) -> str:
    if found.driver_loaded:
        return "see `gpu` above"
    return "a machine with an NVIDIA GPU and its driver; `trt-engine inspect` judges plans without one"
