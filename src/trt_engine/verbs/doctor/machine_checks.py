"""The checks of `doctor`, in the order in which they run: each inspects a `Machine` and yields findings with fixes.

Those of TensorRT are called here and written in `tensorrt_checks`.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trt_engine.device import info
from trt_engine.errors import UsageError
from trt_engine.format import MIB, format_bytes
from trt_engine.limits import LIMITS
from trt_engine.records.diagnosis import Diagnosis, Status
from trt_engine.store import Store
from trt_engine.trt.gpu_targets import RTX_TARGETS
from trt_engine.trt.installation import RUNTIME_KINDS, Installation
from trt_engine.trt.rtx_compatibility import rtx_supports
from trt_engine.trt.versions import Version, lacking_driver_branch, parse_capability, same_release
from trt_engine.verbs.doctor import tensorrt_checks as plans
from trt_engine.verbs.doctor.machine import Machine, requirement_holds
from trt_engine.verbs.doctor.tensorrt_checks import cuda_packages, driver_and_cuda, duplicate_libraries

log = logging.getLogger(__name__)

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
    yield Diagnosis("python", "ok", ".".join(map(str, sys.version_info[:3])))


@register_check
def packages(machine: Machine) -> Iterator[Diagnosis]:
    """Compare the requirements of the installed package with the installed versions."""
    if (ours := machine.distributions.get("trt-engine")) is None:
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
        fix = f"pip install {' '.join(pin for _, pin in wrong)}"
        yield Diagnosis("packages", "problem", "; ".join(text for text, _ in wrong), fix)
    else:
        names = [name for name in ("numpy", "onnx", "onnxruntime") if machine.version(name)]
        versions = ", ".join(f"{name} {machine.version(name)}" for name in names)
        yield Diagnosis("packages", "ok", f"trt-engine {ours.version}; {versions}")
    absent = [name for name in extras if name not in _OTHER_CUDA.values() and _OTHER_CUDA.get(name) not in here]
    for extra in absent:
        log.debug("the extra `%s` lacks %s", extra, ", ".join(extras[extra]))
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
        status: Status = "absent" if library is None and not runtimes else "note"
        yield Diagnosis("tensorrt", status, text, plans.how_to_install(here))
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
    here = machine.tensorrt_rtx
    if here.packages:
        probed = machine.library_info("tensorrt_rtx") if here.bindings is not None else {}
        yield _bindings(here, probed)
        yield from _version_consistency(here, probed)
        for check in (cuda_packages, driver_and_cuda, _gpus, duplicate_libraries, _licence):
            yield from check(here)
    else:
        yield _not_installed(here)
    yield from _provider(here)


@register_check
def tools(machine: Machine) -> Iterator[Diagnosis]:
    here = machine.tensorrt
    if here.trtexec is None:
        yield Diagnosis(
            "trtexec", "absent", "not found on PATH or in /usr/src/tensorrt/bin", "sudo apt-get install libnvinfer-bin"
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
            yield Diagnosis(name, "absent", f"{title} not found", fix if machine.gpus else None)


def _not_installed(here: Installation) -> Diagnosis:
    found = "not installed; it builds engines for RTX GPUs, also on machines without one"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        place = f"{platform.system()} {platform.machine()}"
        return Diagnosis("tensorrt-rtx", "absent", f"not installed; its packages are for Linux x86_64, this is {place}")
    return Diagnosis("tensorrt-rtx", "absent", found, f'pip install "trt-engine[{_extra("rtx", here)}]"')


def _extra(name: str, here: Installation) -> str:
    """The pip extra for the installed CUDA and driver."""
    return f"{name}-cu12" if here.cuda_major == 12 or lacking_driver_branch(here.driver, None, 13) else name


def _bindings(here: Installation, library_info: dict[str, Any]) -> Diagnosis:
    names = ", ".join(f"{item.name} {item.version}" for item in here.packages)
    if here.bindings is None:
        repair = here.pip_repair_command(here.packages[0].version)
        return Diagnosis("tensorrt-rtx", "note", f"libraries installed ({names}), without bindings", repair)
    if "error" in library_info or library_info.get("hollow"):
        why = library_info.get("error") or "the package is hollow: it has no `Builder`"
        repair = here.pip_repair_command(here.bindings.version)
        return Diagnosis("tensorrt-rtx", "warning", f"installed ({names}) and cannot be imported: {why}", repair)
    below = here.library()
    place = f", libtensorrt_rtx in `{below.path.parent}`" if below is not None else ""
    cuda = f" for CUDA {here.cuda_major}" if here.cuda_major is not None else ""
    gpus = f"; builds for {', '.join(library_info['gpus'])}" if library_info.get("gpus") else ""
    return Diagnosis("tensorrt-rtx", "ok", f"{library_info['version']}{cuda}{place}{gpus}; {_runnable_text(here)}")


def _runnable_text(here: Installation) -> str:
    """Text: GPUs that run engines here."""
    if not here.gpus:
        why = "no NVIDIA GPU" if here.driver is None else "NVML shows no GPU"
        return f"engines are built here and run elsewhere ({why})"
    runs = [board.name for board in here.gpus if _gpu_runs(board)]
    return f"runs engines on {', '.join(runs)}" if runs else "engines are built here and run elsewhere (no RTX GPU)"


def _gpu_runs(board: info.Gpu) -> bool:
    found = parse_capability(board.compute_capability)
    return found is not None and rtx_supports(found)


def _version_consistency(here: Installation, library_info: dict[str, Any]) -> Iterator[Diagnosis]:
    """Versions of bindings, library package and loaded library; a problem when they differ."""
    if here.bindings is None:
        return
    parts = [(f"`{here.bindings.name}`", here.bindings.version)]
    parts += [(f"`{item.name}`", item.version) for item in here.packages if item.name.endswith("-libs")]
    loaded = Version.parse(library_info.get("library") or "")
    if loaded is not None:
        parts.append(("the library they load", loaded))
    text = ", ".join(f"{name} {version}" for name, version in parts)
    if all(same_release(one[1], other[1]) for one in parts for other in parts):
        if len(parts) > 1:
            yield Diagnosis("tensorrt-rtx-versions", "ok", f"one TensorRT-RTX: {text}")
        return
    yield Diagnosis(
        "tensorrt-rtx-versions",
        "problem",
        f"{text}: bindings and library are different releases with incompatible function tables",
        here.pip_command(here.bindings.version, "--force-reinstall"),
    )


def _gpus(here: Installation) -> Iterator[Diagnosis]:
    for board in here.gpus:
        name, label = f"tensorrt-rtx-gpu-{board.index}", f"{board.name} (compute capability {board.compute_capability})"
        if _gpu_runs(board):
            yield Diagnosis(name, "ok", f"{label} runs TensorRT-RTX engines")
        else:
            text = f"{label} does not run TensorRT-RTX engines, which need {', '.join(RTX_TARGETS)} and later"
            yield Diagnosis(name, "note", text, "trt-engine build MODEL.onnx --backend tensorrt")


def _licence(here: Installation) -> Iterator[Diagnosis]:
    """The licence of the packages and its location."""
    first = here.packages[0]
    stem = f"{first.name.replace('-', '_')}-{first.version}.dist-info"
    places = [Path(stem, "licenses", "LICENSE.txt"), Path(stem, "LICENSE.txt")]
    file = next((path for place in places if (path := (first.folder or Path()) / place).is_file()), None)
    where = f"`{file}`" if file is not None else "the LICENSE.txt of its packages"
    yield Diagnosis(
        "tensorrt-rtx-licence",
        "note",
        f"NVIDIA's licence, not trt-engine's, applies to TensorRT-RTX and to redistributing its packages and the "
        f"engines built with them: {where}",
    )


def _provider(here: Installation) -> Iterator[Diagnosis]:
    """ONNX Runtime's provider, which bundles its own TensorRT-RTX."""
    if here.provider is None:
        if any(_gpu_runs(board) for board in here.gpus):
            text = "ONNX Runtime's provider for TensorRT-RTX is not installed"
            fix = f'pip install "trt-engine[{_extra("ort-rtx", here)}]"'
            yield Diagnosis("onnxruntime-rtx", "absent", text, fix)
        return
    own, below = here.provider_library, here.library()
    text = f"`{here.provider.name}` {here.provider.version}"
    text += f" with bundled TensorRT-RTX {own.version}" if own is not None else ""
    if own is not None and below is not None and not same_release(own.version, below.version):
        yield Diagnosis(
            "onnxruntime-rtx",
            "warning",
            f"{text}, and the bindings load {below.version}: in one process both use the one loaded first",
            here.pip_command(own.version),
        )
    elif not here.gpus and here.driver is None:
        yield Diagnosis("onnxruntime-rtx", "note", f"{text}; loading it needs the libraries of NVIDIA's driver")
    else:
        yield Diagnosis("onnxruntime-rtx", "ok", text)
