"""The checks of `doctor`, in the order in which they run: each inspects a `Machine` and yields findings with fixes.

Those of TensorRT and TensorRT-RTX are called here and written in `tensorrt_checks` and `tensorrt_rtx_checks`.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator

from trt_engine.device import info
from trt_engine.errors import UsageError
from trt_engine.format import MIB, format_bytes
from trt_engine.limits import LIMITS
from trt_engine.records.diagnosis import Diagnosis, Status
from trt_engine.store import Store
from trt_engine.trt.installation import RUNTIME_KINDS
from trt_engine.verbs.doctor import tensorrt_checks as plans
from trt_engine.verbs.doctor import tensorrt_rtx_checks as rtx
from trt_engine.verbs.doctor.machine import Machine, requirement_holds

log = logging.getLogger(__name__)

_MIN_PYTHON = (3, 11)
_LOW_DISK_MIB, _MIN_DISK_MIB = 4096, 256
"""An FP32 detector with engine, stored copy and logs needs a few hundred MiB."""
_LOW_MEMORY_MIB = 2048
_ORT_FAMILY = ("onnxruntime", "ort-")
_OTHER_CUDA = {"rtx": "rtx-cu12", "ort-rtx": "ort-rtx-cu12"}
"""Extras for CUDA 13 and their CUDA 12 counterparts: either is enough, and both share a folder."""
REINSTALL = "pip uninstall -y {names} && pip install {wanted}"
"""The package to keep must be installed last, into an empty folder (docs/troubleshooting.md)."""
Check = Callable[[Machine], Iterator[Diagnosis]]
CHECKS: list[Check] = []


def register_check(look: Check) -> Check:
    """Register a check; `doctor` runs them in the order of this file."""
    CHECKS.append(look)
    return look


# ------------------------------------------------------------------------------------------------ Python and packages


@register_check
def python(machine: Machine) -> Iterator[Diagnosis]:
    version = ".".join(map(str, sys.version_info[:3]))
    bits = 64 if sys.maxsize > 2**32 else 32
    if sys.version_info[:2] < _MIN_PYTHON:
        yield Diagnosis(
            "python", "problem", f"Python {version}, expected 3.11 or newer", "install Python 3.11 or newer"
        )
    elif bits != 64:
        yield Diagnosis("python", "problem", f"{bits}-bit Python {version}", "install a 64-bit Python")
    else:
        yield Diagnosis("python", "ok", f"{version}, {bits}-bit")


@register_check
def packages(machine: Machine) -> Iterator[Diagnosis]:
    """Compare the requirements of the installed package with the installed versions."""
    ours = next((d for d in machine.distributions if d.metadata["Name"] == "trt-engine"), None)
    if ours is None:
        yield Diagnosis("packages", "warning", "trt-engine runs from its sources, not installed", "pip install -e .")
        return
    wrong, extras, here = [], dict[str, list[str]](), set[str]()
    for line in ours.requires or ():
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*)(?:;.*extra\s*==\s*['\"]([^'\"]+)['\"])?", line)
        if match is None:
            continue
        name, wanted, extra = match[1], match[2].strip("() "), match[3]
        have = machine.version(name)
        if have is None and name == "onnxruntime":  # another package of the family replaces it
            have = next((version for _, version in machine.owners("onnxruntime", _ORT_FAMILY)), None)
        if extra:
            if have is None and name != "trt-engine":
                extras.setdefault(extra, []).append(name)
            elif name not in ("trt-engine", "onnxruntime"):
                here.add(extra)
        elif have is None and not (name == "onnxruntime" and machine.ort_usable()):
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
        names = [name for name in ("numpy", "onnx", "onnxruntime") if machine.version(name)]
        versions = ", ".join(f"{name} {machine.version(name)}" for name in names)
        yield Diagnosis("packages", "ok", f"trt-engine {ours.version}; {versions}")
    absent = [name for name in extras if name not in _OTHER_CUDA.values() and _OTHER_CUDA.get(name) not in here]
    for extra in absent:
        log.info("the extra `%s` lacks %s", extra, ", ".join(extras[extra]))
    if absent:
        text = f"not installed, or in part: {', '.join(absent)} (`-v`: their packages)"
        yield Diagnosis("extras", "note", text, 'pip install "trt-engine[EXTRA]"')


@register_check
def limits(machine: Machine) -> Iterator[Diagnosis]:
    """Limits for untrusted files: those changed from the default, and invalid variables."""
    raised = []
    for limit in LIMITS:
        try:
            value = limit.value
        except UsageError as error:
            yield Diagnosis(f"limit-{limit.variable}", "problem", error.message, error.hint)
            continue
        if value != limit.default:
            raised.append(f"{limit.variable}={limit.format_value(value)} (default {limit.format_value(limit.default)})")
    shown = ", ".join(raised) or f"all {len(LIMITS)} at their defaults: `trt-engine docs limits`"
    yield Diagnosis("limits", "note" if raised else "ok", shown)


# ------------------------------------------------------------------------------------------------ ONNX Runtime and onnx


@register_check
def onnxruntime_packages(machine: Machine) -> Iterator[Diagnosis]:
    """Two packages that own the folder `onnxruntime/` overwrite each other silently."""
    owners = machine.owners("onnxruntime", _ORT_FAMILY)
    if len(owners) > 1:
        names = " ".join(name for name, _ in owners)
        yield Diagnosis(
            "onnxruntime-twice",
            "problem",
            f"{' and '.join(f'`{name}` {version}' for name, version in owners)} share the folder `onnxruntime/`: "
            "the one installed last has overwritten the other",
            REINSTALL.format(names=names, wanted="onnxruntime-gpu" if machine.gpus else "onnxruntime"),
        )


@register_check
def onnxruntime(machine: Machine) -> Iterator[Diagnosis]:
    probed = machine.onnxruntime
    if "error" in probed:
        missing = probed["error"].startswith("ModuleNotFoundError: No module named 'onnxruntime'")
        owner = next((name for name, _ in machine.owners("onnxruntime", _ORT_FAMILY)), "onnxruntime")
        fix = f"pip install {'' if missing else '--force-reinstall '}{owner}"
        yield Diagnosis("onnxruntime", "problem", probed["error"], fix)
        return
    if probed["hollow"]:
        yield Diagnosis(
            "onnxruntime",
            "problem",
            "the package is hollow: `module 'onnxruntime' has no attribute 'InferenceSession'`, left over when "
            "one of two ONNX Runtimes in one folder is uninstalled",
            REINSTALL.format(names="onnxruntime onnxruntime-gpu", wanted="onnxruntime"),
        )
        return
    runs = [name for name, state in probed["providers"].items() if state["runs"]]
    yield Diagnosis("onnxruntime", "ok", f"{probed['version']}, runs on {', '.join(runs) or 'no provider'}")
    for name, state in probed["providers"].items():
        if not state["runs"]:
            status: Status = "warning" if machine.gpus or machine.driver_loaded else "note"
            yield Diagnosis(
                f"provider-{name.removesuffix('ExecutionProvider').lower()}",
                status,
                f"{name} is installed but does not run: {state['reason']}",
                _provider_fix(state["reason"], machine),
            )


def _provider_fix(reason: str, machine: Machine) -> str:
    library = plans.library_in(reason)
    if not (machine.gpus or machine.driver_loaded):
        return "none needed on a machine without an NVIDIA GPU"
    if library and library.startswith(("libnvinfer", "libnvonnxparser")):
        return plans.how_to_find(library, machine.tensorrt, machine)
    if library:
        return f"install the CUDA and cuDNN this package was built for, or put `{library}` on LD_LIBRARY_PATH"
    return "`trt-engine docs troubleshooting`, ONNX Runtime and GPUs"


@register_check
def model_versions(machine: Machine) -> Iterator[Diagnosis]:
    """onnx may write models newer than ONNX Runtime reads."""
    writes = machine.library_info("onnx")
    if "error" in writes:
        yield Diagnosis("onnx", "problem", writes["error"], "pip install --force-reinstall onnx")
        return
    if not machine.ort_usable() or machine.onnxruntime.get("opset") is None:
        return
    reads = machine.onnxruntime
    text = (
        f"onnx {writes['version']} writes opset {writes['opset']} and IR {writes['ir_version']}, "
        f"ONNX Runtime reads up to opset {reads['opset']} and IR {reads['ir_version']}"
    )
    if writes["opset"] > reads["opset"] or writes["ir_version"] > (reads["ir_version"] or 0):
        yield Diagnosis(
            "onnx-opset",
            "note",
            text,
            f"set both when exporting a model: opset {min(20, reads['opset'])}, ir_version {min(10, reads['ir_version'])}",
        )
    else:
        yield Diagnosis("onnx-opset", "ok", text)


# ------------------------------------------------------------------------------------------------ disk and memory


@register_check
def disk(machine: Machine) -> Iterator[Diagnosis]:
    store = machine.store or Store().folder
    for name, folder, elsewhere in (
        (
            "disk-store",
            store,
            "set `TRT_ENGINE_STORE` to another folder, or free space: `trt-engine cache prune --max-size 10GiB`",
        ),
        ("disk-here", machine.working_folder, "use another disk with `-o`"),
    ):
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            yield Diagnosis(name, "problem", f"`{folder}` cannot be written", elsewhere)
            continue
        free = shutil.disk_usage(there).free >> 20
        status: Status = "problem" if free < _MIN_DISK_MIB else "warning" if free < _LOW_DISK_MIB else "ok"
        yield Diagnosis(
            name, status, f"{format_bytes(free * MIB)} free in `{folder}`", elsewhere if status != "ok" else None
        )


@register_check
def memory(machine: Machine) -> Iterator[Diagnosis]:
    total, available = machine.memory_mib()
    limit = machine.memory_limit_mib()
    room = min(available, limit) if limit else available
    text = f"{format_bytes(available * MIB)} of {format_bytes(total * MIB)} available"
    if limit:
        text += f", limited to {format_bytes(limit * MIB)} by the control group (container, job or service)"
    if room < _LOW_MEMORY_MIB:
        fix = "raise the container's or job's memory limit" if limit and limit < available else "stop other programs"
        yield Diagnosis("memory", "warning", text, f"{fix}, or measure with `--max-batch 16`")
    else:
        yield Diagnosis("memory", "ok", text)


@register_check
def processor(machine: Machine) -> Iterator[Diagnosis]:
    cpu = info.cpu()
    fast = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "amx_bf16", "asimddp", "i8mm", "sve")
            if name in cpu.features]  # fmt: skip
    text = f"{cpu.name}, {cpu.cores} core{'' if cpu.cores == 1 else 's'}, {' '.join(fast) or 'no vector extension of note'}"
    if "avx2" not in cpu.features and "asimd" not in cpu.features and "neon" not in cpu.features:
        yield Diagnosis("processor", "warning", text, "ONNX Runtime's fast kernels need AVX2: expect much lower speed")
        return
    yield Diagnosis("processor", "ok", text)
    if not {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"}.intersection(cpu.features):
        yield Diagnosis(
            "processor-int8", "note", "no integer dot-product instructions: INT8 is barely faster than FP32 here"
        )


@register_check
def container(machine: Machine) -> Iterator[Diagnosis]:
    where = machine.tensorrt.container
    if where is not None:
        held = plans.container_contents(machine.tensorrt, machine)
        yield Diagnosis(
            "container",
            "note",
            f"inside a container ({where}): engines are built for the versions in it, not the host's"
            + (f"; it has {held}" if held else ""),
        )
    yield from plans.container_tools(machine, where, machine.gpus)


# ------------------------------------------------------------------------------------------------ GPU and NVIDIA's tools


@register_check
def gpu(machine: Machine) -> Iterator[Diagnosis]:
    for board in machine.gpus:
        yield Diagnosis(
            f"gpu-{board.index}",
            "ok",
            f"{board.name}, {format_bytes(board.memory_mib * MIB)}, compute capability {board.compute_capability}, "
            f"driver {board.driver}",
        )
    if machine.gpus:
        return
    if machine.driver_loaded or any((machine.root / "dev").glob("nvidia[0-9]*")):
        fix = (
            'pip install "trt-engine[gpu]"'
            if machine.version("nvidia-ml-py") is None
            else "start the container with `--gpus all`, or see `nvidia-smi`"
        )
        driver = f" (driver {machine.driver_loaded})" if machine.driver_loaded else ""
        yield Diagnosis("gpu", "warning", f"an NVIDIA driver is loaded{driver} and NVML shows no GPU", fix)
    else:
        yield Diagnosis("gpu", "note", "no NVIDIA GPU: only the CPU can be measured")


@register_check
def tensorrt(machine: Machine) -> Iterator[Diagnosis]:
    """The bindings, imported in a separate process."""
    here = machine.tensorrt
    if not here.packages:
        text = "no TensorRT bindings installed"
        if (library := here.library()) is not None:
            text += f"; the library {library.version} is in `{library.path.parent}`"
        runtimes = [kind for kind in RUNTIME_KINDS if here.runtime(kind).bindings is not None]
        if runtimes:
            text += f"; the {' and '.join(runtimes)} bindings build no engines"
        yield Diagnosis("tensorrt", "note", text, plans.how_to_install(here))
        return
    probed = machine.library_info("tensorrt") if here.bindings is not None else {"error": None}
    if "error" not in probed:
        below = here.library(major=here.bindings.version.major if here.bindings else None)
        place = f", libnvinfer in `{below.path.parent}`" if below is not None else ""
        cuda = f", for CUDA {here.cuda_major}" if here.cuda_major is not None else ""
        yield Diagnosis("tensorrt", "ok", f"bindings {probed['version']}{cuda}{place}")
        return
    error = probed["error"]
    if error is not None and "No module named" in error:  # bindings alone; their own error names the library
        error = machine.library_info("tensorrt_bindings").get("error", "there is no module `tensorrt`")
    yield plans.unusable_bindings(here, error, machine)


@register_check
def tensorrt_together(machine: Machine) -> Iterator[Diagnosis]:
    """Consistency of TensorRT's parts, and the GPUs and drivers they support."""
    here = machine.tensorrt
    for check in plans.PART_CHECKS:
        yield from check(here)
    yield from plans.libraries_on_path(here, machine)
    for check_provider in (plans.onnxruntime_provider, plans.onnxruntime_cuda):
        yield from check_provider(here, machine.package_folders())
    for kind in RUNTIME_KINDS:
        yield from plans.smaller_runtime(here.runtime(kind), machine)


@register_check
def tensorrt_rtx(machine: Machine) -> Iterator[Diagnosis]:
    yield from rtx.tensorrt_rtx(machine.tensorrt_rtx, machine.library_info)


@register_check
def tools(machine: Machine) -> Iterator[Diagnosis]:
    here = machine.tensorrt
    if here.trtexec is None:
        yield Diagnosis(
            "trtexec", "note", "not found on PATH or in /usr/src/tensorrt/bin", "sudo apt-get install libnvinfer-bin"
        )
    elif here.trtexec_version is None:
        library = plans.library_in(here.trtexec_message)
        yield Diagnosis(
            "trtexec",
            "warning",
            f"`{here.trtexec}` reports no version: {here.trtexec_message}",
            plans.how_to_find(library, here, machine, packaged=True) if library else f"try `{here.trtexec} --help`",
        )
    else:
        yield Diagnosis("trtexec", "ok", f"`{here.trtexec}`, TensorRT {here.trtexec_version}")
    for name, title in (("nsys", "Nsight Systems"), ("ncu", "Nsight Compute")):
        place = machine.tool(name)
        if place is not None:
            yield Diagnosis(name, "ok", f"{title}: `{place}`")
        else:
            fix = f"install {title}, then put its folder on PATH: `export PATH=/opt/nvidia/...:$PATH`"
            yield Diagnosis(name, "note", f"{title} not found", fix if machine.gpus else None)
