"""Checks of a TensorRT-RTX installation: packages, libraries, and whether engines run here or only build."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trt_engine.device import info
from trt_engine.records.diagnosis import Diagnosis
from trt_engine.trt.gpu_targets import RTX_TARGETS
from trt_engine.trt.installation import Installation
from trt_engine.trt.rtx_compatibility import rtx_supports
from trt_engine.trt.versions import Version, lacking_driver_branch, parse_capability, same_release
from trt_engine.verbs.doctor.tensorrt_checks import cuda_packages, driver_and_cuda, duplicate_libraries


def tensorrt_rtx(here: Installation, probe: Callable[[str], dict[str, Any]]) -> Iterator[Diagnosis]:
    """All TensorRT-RTX checks; `probe` imports a module in a separate process."""
    if here.packages:
        probed = probe("tensorrt_rtx") if here.bindings is not None else {}
        yield _bindings(here, probed)
        yield from _version_consistency(here, probed)
        for check in (cuda_packages, driver_and_cuda, _gpus, duplicate_libraries, _licence):
            yield from check(here)
    else:
        yield _not_installed(here)
    yield from _provider(here)


def _not_installed(here: Installation) -> Diagnosis:
    found = "not installed; it builds engines for RTX GPUs, also on machines without one"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        place = f"{platform.system()} {platform.machine()}"
        return Diagnosis("tensorrt-rtx", "note", f"not installed; its packages are for Linux x86_64, this is {place}")
    return Diagnosis("tensorrt-rtx", "note", found, f'pip install "trt-engine[{_extra("rtx", here)}]"')


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
            yield Diagnosis(
                name,
                "note",
                f"{label} does not run TensorRT-RTX engines, which need {', '.join(RTX_TARGETS)} and later",
                "trt-engine build MODEL.onnx --backend tensorrt",
            )


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
            yield Diagnosis(
                "onnxruntime-rtx",
                "note",
                "ONNX Runtime's provider for TensorRT-RTX is not installed",
                f'pip install "trt-engine[{_extra("ort-rtx", here)}]"',
            )
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
