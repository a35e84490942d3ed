"""What `doctor` says of TensorRT: which parts are here, which of them belong together, which GPUs and drivers they take."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from trt_engine.device import info
from trt_engine.diagnosis.elf import needed
from trt_engine.diagnosis.machine import Machine
from trt_engine.plans.installed import Installed, Library
from trt_engine.plans.versions import (
    COMPUTE_CAPABILITY,
    Version,
    branch_of,
    capability,
    driver_floor,
    newest_for,
    precision_since,
    same_release,
    supports,
    wheel,
    wheel_for,
)
from trt_engine.records import Diagnosis

__all__ = [
    "container_tools",
    "cuda_packages",
    "driver_and_cuda",
    "gpu_support",
    "held",
    "how_to_find",
    "how_to_install",
    "libraries_on_path",
    "onnxruntime_cuda",
    "onnxruntime_provider",
    "plugin_library",
    "two_on_one_path",
    "versions_together",
]

_PROVIDERS = "onnxruntime/capi/libonnxruntime_providers_"
_OFF_THE_PATH = (
    "usr/local/TensorRT-*/lib",
    "opt/TensorRT-*/lib",
    "opt/tensorrt/lib",
    "usr/local/tensorrt/lib",
    "usr/lib/*-linux-gnu",
)
"""Where TensorRT's libraries lie that the loader may not look in, under the root."""


_DEBIAN_NAMES = {
    "libnvinfer": "libnvinfer",
    "libnvinfer_plugin": "libnvinfer-plugin",
    "libnvonnxparser": "libnvonnxparsers",
}


def how_to_install(here: Installed) -> str | None:
    """The line that brings a TensorRT for the GPU, the driver and the library that are here; None where there is no GPU."""
    if (library := here.library()) is not None and len(library.version.parts) >= 3:
        return here.pip(library.version)
    for board in here.boards:
        if (found := capability(board.compute_capability)) and (suited := wheel_for(found, here.driver)):
            return f"pip install {suited}"
    return 'pip install "trt-engine[tensorrt]"' if here.driver is not None else None


def how_to_find(name: str, here: Installed, machine: Machine, *, packaged: bool = False) -> str:
    """The line that puts the library `name` on the loader's path, or brings it: by pip, or by `packaged` Debian."""
    places = [item.path.parent for item in here.bundled if item.path.name == name]
    for pattern in _OFF_THE_PATH:
        places += [file.parent for file in sorted(machine.root.glob(f"{pattern}/{name}"), reverse=True)]
    if places:
        return f"export LD_LIBRARY_PATH={places[0]}:$LD_LIBRARY_PATH"
    major = re.search(r"\.so\.(\d+)$", name)
    if major and packaged and (package := _DEBIAN_NAMES.get(name.partition(".")[0])):
        return f"sudo apt-get install {package}{major[1]}"
    if major and name.startswith(("libnvinfer", "libnvonnxparser")) and int(major[1]) >= 10:
        cuda = here.cuda or (13 if (branch_of(here.driver) or 580) >= 580 else 12)
        return (
            f'pip install "tensorrt-cu{max(cuda, 12)}=={major[1]}.*", or put the folder of `{name}` on LD_LIBRARY_PATH'
        )
    return f"put the folder of `{name}` on LD_LIBRARY_PATH"


def versions_together(here: Installed) -> Iterator[Diagnosis]:
    """Bindings, libraries, trtexec and its package, each with its version; a warning where they are not one release."""
    parts = _parts(here)
    if len(parts) < 2:
        return
    text = ", ".join(f"{name} {version}" for name, version in parts)
    odd = next(
        ((one, other) for one in parts for other in parts if not same_release(one[1], other[1])),
        None,
    )
    if odd is None:
        yield Diagnosis("tensorrt-versions", "ok", f"one TensorRT: {text}")
        return
    (first, mine), (second, theirs) = odd
    yield Diagnosis(
        "tensorrt-versions",
        "warning",
        f"{text}: {first} and {second} are different releases of TensorRT, and a plan of one does not load in the other",
        _together(here, mine, theirs),
    )


def _parts(here: Installed) -> list[tuple[str, Version]]:
    found: list[tuple[str, Version]] = []
    if here.bindings is not None:
        found.append((f"`{here.bindings.name}`", here.bindings.version))
        below = here.library(major=here.bindings.version.major)
        if below is not None and len(below.version.parts) >= 3:
            found.append(("the libnvinfer under them", below.version))
    elif (plain := here.library()) is not None and len(plain.version.parts) >= 3:
        found.append(("libnvinfer", plain.version))
    if here.trtexec_version is not None:
        found.append(("trtexec", here.trtexec_version))
    if here.package_bin is not None:
        found.append(("the package `libnvinfer-bin`", here.package_bin.version))
    return found


def _together(here: Installed, mine: Version, theirs: Version) -> str:
    """The wheels of what is installed for the whole machine are easily changed; that is not."""
    fixed = here.trtexec_version or (here.package_bin.version if here.package_bin else None)
    if here.bindings is not None and fixed is not None and not same_release(here.bindings.version, fixed):
        return f"{here.pip(fixed)}, or install the trtexec of {here.bindings.version.release}"
    if here.bindings is not None:
        return here.pip(here.bindings.version, "--force-reinstall")
    return f"sudo apt-get install 'libnvinfer-bin={mine.release}*' (or everything of {theirs.release})"


def cuda_packages(here: Installed) -> Iterator[Diagnosis]:
    """Wheels for CUDA 12 and for CUDA 13 own the same folders."""
    majors = sorted({item.cuda for item in here.packages if item.cuda is not None})
    if len(majors) > 1:
        names = " ".join(item.name for item in here.packages)
        keep = here.bindings.version if here.bindings is not None else here.packages[0].version
        yield Diagnosis(
            "tensorrt-cuda",
            "problem",
            f"wheels for CUDA {' and '.join(map(str, majors))} share the folder `tensorrt_bindings/`: {names}; the one "
            "installed last has overwritten the other",
            f"pip uninstall -y {names} && pip install {wheel(keep, here.driver)}",
        )


def driver_and_cuda(here: Installed) -> Iterator[Diagnosis]:
    """The driver against the floor of the CUDA this TensorRT is for."""
    library = here.library()
    version = here.python_version or here.trtexec_version or (library.version if library is not None else None)
    cuda, driver, branch = here.cuda, here.driver, branch_of(here.driver)
    if version is None or cuda is None or branch is None:
        return
    floor = driver_floor(version, cuda)
    if floor is None:
        return
    if branch >= floor:
        text = f"driver {driver} serves TensorRT {version} for CUDA {cuda} (from {floor} on)"
        yield Diagnosis("tensorrt-driver", "ok", text)
        return
    names = " ".join(item.name for item in here.packages)
    fix = f"install driver {floor} or newer"
    if names and cuda == 13 and branch >= (driver_floor(version, 12) or 0):
        fix = f"pip uninstall -y {names} && pip install {wheel(version, driver)}, or {fix}"
    elif not names:
        fix = f"sudo apt-get install nvidia-driver-{floor}, or TensorRT's packages for an older CUDA"
    else:
        fix = f"sudo apt-get install nvidia-driver-{floor} (or newer)"
    yield Diagnosis(
        "tensorrt-driver", "problem", f"TensorRT {version} for CUDA {cuda} needs driver {floor}, here is {driver}", fix
    )


def gpu_support(here: Installed) -> Iterator[Diagnosis]:
    """Each GPU against the TensorRT here, and the precisions both have."""
    version = here.python_version or here.trtexec_version
    if version is None:
        return
    for board in here.boards:
        name, found = f"tensorrt-gpu-{board.index}", capability(board.compute_capability)
        if found is None:
            continue
        told = f"{board.name} (compute capability {board.compute_capability})"
        answer = supports(version, found)
        if answer is False:
            yield Diagnosis(
                name,
                "problem",
                f"TensorRT {version} does not run on {told}",
                here.pip_of(suited)
                if (suited := wheel_for(found, here.driver, here.cuda))
                else f"install a TensorRT {newest_for(found)}; `--backend onnxruntime` meanwhile",
            )
            continue
        has = [kind for kind in COMPUTE_CAPABILITY if _computes(kind, found, version)]
        lacks = [kind for kind in COMPUTE_CAPABILITY if kind not in has]
        text = f"{told} with TensorRT {version}: {', '.join(has)}" + (f"; not {', '.join(lacks)}" if lacks else "")
        if answer is None:
            yield Diagnosis(
                name,
                "note",
                f"{text}; no source says that this TensorRT runs on it",
                "trt-engine build MODEL.onnx --backend tensorrt -o try.engine",
            )
        else:
            yield Diagnosis(name, "ok", text)


def _computes(kind: str, found: tuple[int, int], version: Version) -> bool:
    since = precision_since(kind)
    return COMPUTE_CAPABILITY[kind] <= found and (since is None or version >= since)


def plugin_library(here: Installed) -> Iterator[Diagnosis]:
    """TensorRT's own plugins come in a library of their own, which must be of the same release."""
    major = here.bindings.version.major if here.bindings is not None else None
    plain = here.library(major=major)
    if plain is None:
        return
    plugins = here.library("nvinfer_plugin", plain.version.major)
    if plugins is None:
        yield Diagnosis(
            "tensorrt-plugins",
            "warning",
            f"`libnvinfer_plugin.so.{plain.version.major}` is not beside libnvinfer: models with TensorRT's own plugins "
            "(EfficientNMS_TRT and its like) end with `getPluginCreator could not find plugin`",
            f"sudo apt-get install libnvinfer-plugin{plain.version.major}"
            if plain.origin != "pip"
            else here.pip(plain.version, "--force-reinstall"),
        )
    elif (
        len(plugins.version.parts) > 2
        and len(plain.version.parts) > 2
        and not same_release(plugins.version, plain.version)
    ):
        yield Diagnosis(
            "tensorrt-plugins",
            "warning",
            f"libnvinfer_plugin is {plugins.version} (`{plugins.path}`) and libnvinfer {plain.version} (`{plain.path}`)",
            f"export LD_LIBRARY_PATH={plain.path.parent}:$LD_LIBRARY_PATH, with both libraries of one version in it",
        )
    else:
        yield Diagnosis("tensorrt-plugins", "ok", f"`{plugins.path}`; your own: `-O plugins=/path/to/libmine.so`")


def libraries_on_path(here: Installed, machine: Machine) -> Iterator[Diagnosis]:
    """LD_LIBRARY_PATH: folders that are not there, and link-time stubs."""
    folders = [text for text in machine.library_path.split(":") if text]
    gone = [text for text in folders if not machine.under(text).is_dir()]
    stubs = [text for text in folders if _has_stub(machine.under(text))]
    if stubs:
        rest = ":".join(text for text in folders if text not in stubs)
        yield Diagnosis(
            "library-path-stubs",
            "problem",
            f"LD_LIBRARY_PATH holds link-time stubs of the driver ({', '.join(f'`{text}`' for text in stubs)}): CUDA says "
            "that it is a stub library, or finds no device",
            _export(rest),
        )
    if gone:
        yield Diagnosis(
            "library-path",
            "note",
            f"LD_LIBRARY_PATH names {', '.join(f'`{text}`' for text in gone)}, which "
            f"{'is' if len(gone) == 1 else 'are'} not there",
            _export(":".join(text for text in folders if text not in gone)),
        )
    elif folders and not stubs:
        count = f"{len(folders)} folders, all there" if len(folders) > 1 else f"`{folders[0]}`, which is there"
        yield Diagnosis("library-path", "ok", f"LD_LIBRARY_PATH: {count}")


def two_on_one_path(here: Installed) -> Iterator[Diagnosis]:
    """Two TensorRTs of one major that the loader could take, and which one it does."""
    if here.twice:
        first, other = here.twice
        yield Diagnosis(
            "tensorrt-twice",
            "warning",
            f"two TensorRTs on one loader path: {_where(first)} wins over {_where(other)}; plans of one are refused by the "
            "other, seen as 0 % GPU and a pipeline that is stuck",
            f"export LD_LIBRARY_PATH={first.path.parent} to keep that one first, {other.path.parent} for the other; or "
            "uninstall one",
        )


def _export(folders: str) -> str:
    return f"export LD_LIBRARY_PATH={folders}" if folders else "unset LD_LIBRARY_PATH"


def _has_stub(folder: Path) -> bool:
    return folder.name == "stubs" and any((folder / name).exists() for name in ("libcuda.so", "libcuda.so.1"))


def _where(library: Library) -> str:
    return f"{library.version} in `{library.path.parent}`"


def onnxruntime_provider(here: Installed, folders: Sequence[Path]) -> Iterator[Diagnosis]:
    """Which libnvinfer ONNX Runtime's TensorRT provider was linked with, against those that are here."""
    file = _provider("tensorrt", folders)
    if file is None:
        return
    wanted = next((name for name in needed(file) if name.startswith("libnvinfer.so")), None)
    major = re.search(r"\.so\.(\d+)$", wanted or "")
    if wanted is None or major is None:
        text = "ONNX Runtime's TensorRT provider does not say which libnvinfer it links"
        yield Diagnosis("onnxruntime-tensorrt", "note", text)
        return
    text = f"ONNX Runtime's TensorRT provider links `{wanted}`"
    cuda = _cuda_of(file) or _cuda_of(_provider("cuda", folders)) or 12
    brings = f'pip install "tensorrt-cu{cuda}=={major[1]}.*"'
    fits = here.library(major=int(major[1]))
    if fits is None and not here.anything:
        yield Diagnosis("onnxruntime-tensorrt", "note", f"{text}, and TensorRT is not installed here", brings)
    elif fits is None:
        other = here.python_version or here.trtexec_version or (here.library() or here.packages[0]).version
        yield Diagnosis(
            "onnxruntime-tensorrt",
            "warning",
            f"{text}, and the TensorRT here is {other}: that provider cannot be loaded beside it",
            f"{brings}, in an environment of its own for the provider; `--backend tensorrt` runs on {other} here",
        )
    elif fits.origin == "pip" and here.cuda not in (None, cuda):
        yield Diagnosis(
            "onnxruntime-tensorrt",
            "warning",
            f"{text} and CUDA {cuda}, and the wheel here is TensorRT {fits.version} for CUDA {here.cuda}",
            f"pip uninstall -y {' '.join(item.name for item in here.packages)} && pip install "
            f'"tensorrt-cu{cuda}=={fits.version.release}.*"',
        )
    elif fits.origin == "pip":
        yield Diagnosis(
            "onnxruntime-tensorrt",
            "ok",
            f"{text}: {fits.version} is in `{fits.path.parent}`",
            f"the loader finds it there with `export LD_LIBRARY_PATH={fits.path.parent}:$LD_LIBRARY_PATH`",
        )
    else:
        yield Diagnosis("onnxruntime-tensorrt", "ok", f"{text}: {fits.version} is in `{fits.path.parent}`")


def onnxruntime_cuda(here: Installed, folders: Sequence[Path]) -> Iterator[Diagnosis]:
    """The CUDA that ONNX Runtime's GPU package was built for, against the driver."""
    cuda, branch = _cuda_of(_provider("cuda", folders)), branch_of(here.driver)
    floor = driver_floor(None, cuda) if cuda is not None else None
    if cuda is None or branch is None or floor is None:
        return
    text = f"ONNX Runtime's CUDA provider is built for CUDA {cuda}"
    if branch < floor:
        yield Diagnosis(
            "onnxruntime-cuda",
            "problem",
            f"{text}, which needs driver {floor}; here is {here.driver}",
            f"sudo apt-get install nvidia-driver-{floor} (or newer), or an `onnxruntime-gpu` for an older CUDA",
        )
    else:
        yield Diagnosis("onnxruntime-cuda", "ok", f"{text}, driver {here.driver} serves it (from {floor} on)")


def _provider(name: str, folders: Sequence[Path]) -> Path | None:
    file = f"{_PROVIDERS}{name}.so"
    return next((folder / file for folder in folders if (folder / file).is_file()), None)


def _cuda_of(file: Path | None) -> int | None:
    """The CUDA major a library links: 12 for `libcudart.so.12`, and for cuBLAS, which has CUDA's number too."""
    for name in needed(file) if file is not None else ():
        if found := re.fullmatch(r"lib(?:cudart|cublas|cublasLt)\.so\.(\d+)", name):
            return int(found[1])
    return None


# ------------------------------------------------------------------------------------------------ containers


def container_tools(machine: Machine, where: str | None, boards: Sequence[info.Gpu]) -> Iterator[Diagnosis]:
    """On a host: NVIDIA's container toolkit and the permission to use docker. In a container: whether it was given a GPU."""
    if where is not None:
        asked = machine.environ("NVIDIA_VISIBLE_DEVICES")
        driver = machine.read("/proc/driver/nvidia/version") is not None
        if not boards and (asked or driver):
            state = f"NVIDIA_VISIBLE_DEVICES is `{asked}`" if asked else "the host has a driver"
            yield Diagnosis(
                "container-gpu",
                "warning",
                f"this container has no GPU though {state}: it was started without one, or the host lacks the toolkit",
                "docker run --gpus all ... (or `--runtime=nvidia`); on the host: `trt-engine doctor`",
            )
        return
    docker = machine.tool("docker") or machine.tool("podman")
    if docker is None:
        return
    toolkit = next(
        (
            found
            for name in ("nvidia-ctk", "nvidia-container-runtime", "nvidia-container-cli")
            if (found := machine.tool(name))
        ),
        None,
    )
    gpu = bool(boards) or machine.read("/proc/driver/nvidia/version") is not None
    if toolkit is None:
        if gpu:
            yield Diagnosis(
                "container-toolkit",
                "warning",
                f"`{docker}` is here and NVIDIA's container toolkit is not: containers get no GPU",
                "sudo apt-get install nvidia-container-toolkit && sudo nvidia-ctk runtime configure --runtime=docker && "
                "sudo systemctl restart docker",
            )
        return
    configured = "nvidia" in (machine.read("/etc/docker/daemon.json") or "") or any(
        file for folder in ("etc/cdi", "var/run/cdi") for file in (machine.root / folder).glob("nvidia*.y*ml")
    )
    if docker.name == "docker" and not configured:
        yield Diagnosis(
            "container-toolkit",
            "note",
            f"`{toolkit}` is here, and neither `/etc/docker/daemon.json` nor a CDI file names its runtime",
            "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker",
        )
    else:
        yield Diagnosis("container-toolkit", "ok", f"`{toolkit}` with `{docker}`")
    socket = next(
        (place for text in ("var/run/docker.sock", "run/docker.sock") if (place := machine.root / text).exists()), None
    )
    if docker.name == "docker" and socket is not None and not os.access(socket, os.R_OK | os.W_OK):
        yield Diagnosis(
            "docker-permission",
            "warning",
            f"`{socket}` cannot be used by this user: `docker run` ends with `permission denied`",
            "sudo usermod -aG docker $USER, then log in again",
        )


def held(here: Installed, machine: Machine) -> str:
    """What a container already has, in words; empty for nothing of note."""
    library = here.library()
    version = here.python_version or (library.version if library is not None else None)
    parts = [f"TensorRT {version}"] if version is not None else []
    if here.trtexec is not None:
        parts.append(f"`{here.trtexec}`")
    for name, title in (("CUDA_VERSION", "CUDA"), ("NVIDIA_PYTORCH_VERSION", "NVIDIA's PyTorch")):
        if value := machine.environ(name):
            parts.append(f"{title} {value}")
    return ", ".join(parts)
