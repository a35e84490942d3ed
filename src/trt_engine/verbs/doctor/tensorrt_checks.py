"""Checks of a TensorRT installation: versions, CUDA, drivers, GPUs, library paths, containers."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Sequence
from itertools import combinations, takewhile
from pathlib import Path
from typing import BinaryIO

from trt_engine.device import info
from trt_engine.records.diagnosis import Diagnosis, Status
from trt_engine.trt import versions
from trt_engine.trt.installation import Installation, Library
from trt_engine.verbs.doctor.machine import Machine

_PROVIDERS = "onnxruntime/capi/libonnxruntime_providers_"
_LIBRARY_FOLDERS = (
    "usr/local/TensorRT-*/lib",
    "opt/TensorRT-*/lib",
    "opt/tensorrt/lib",
    "usr/local/tensorrt/lib",
    "usr/lib/*-linux-gnu",
)
"""Folders of TensorRT libraries outside the loader's default path, under the root."""
_DEBIAN_NAMES = {
    "libnvinfer": "libnvinfer",
    "libnvinfer_plugin": "libnvinfer-plugin",
    "libnvonnxparser": "libnvonnxparsers",
}


def how_to_install(here: Installation) -> str | None:
    """The install command for the GPU, driver and library here; None without GPU."""
    if (library := here.library()) is not None and len(library.version.parts) >= 3:
        return here.pip_command(library.version)
    for board in here.gpus:
        if (found := versions.parse_capability(board.compute_capability)) and (
            suited := versions.wheel_for_gpu(found, here.driver)
        ):
            return f"pip install {suited}"
    return 'pip install "trt-engine[tensorrt]"' if here.driver is not None else None


def how_to_find(name: str, here: Installation, machine: Machine, *, packaged: bool = False) -> str:
    """The command that puts the library `name` on the loader path or installs it, by pip or (`packaged`) apt."""
    places = [item.path.parent for item in here.bundled if item.path.name == name]
    for pattern in _LIBRARY_FOLDERS:
        places += [file.parent for file in sorted(machine.root.glob(f"{pattern}/{name}"), reverse=True)]
    if places:
        return f"export LD_LIBRARY_PATH={places[0]}:$LD_LIBRARY_PATH"
    major = re.search(r"\.so\.(\d+)$", name)
    if major and packaged and (package := _DEBIAN_NAMES.get(name.partition(".")[0])):
        return f"sudo apt-get install {package}{major[1]}"
    if major and name.startswith(("libnvinfer", "libnvonnxparser")) and int(major[1]) >= 10:
        cuda = here.cuda_major or (13 if (versions.driver_branch(here.driver) or 580) >= 580 else 12)
        runtime = re.match(r"libnvinfer_(lean|dispatch)\.", name)
        stem = f"tensorrt-{runtime[1]}" if runtime else "tensorrt"
        return f'pip install "{stem}-cu{max(cuda, 12)}=={major[1]}.*", or put the folder of `{name}` on LD_LIBRARY_PATH'
    return f"put the folder of `{name}` on LD_LIBRARY_PATH"


def unusable_bindings(here: Installation, error: str | None, machine: Machine) -> Diagnosis:
    """The finding about packages whose module fails to import with `error`; None: the libraries alone are installed."""
    names = ", ".join(f"{item.name} {item.version}" for item in here.packages)
    if here.bindings is None:
        repair = here.pip_repair_command(here.packages[0].version)
        return Diagnosis(_prefix(here), "note", f"libraries installed ({names}), without bindings", repair)
    repair = here.pip_repair_command(here.bindings.version)
    library = library_in(error)
    fix = how_to_find(library, here, machine) if library is not None else ""
    if not fix.startswith("export"):
        fix = f"{repair}, or put the folder of `{library}` on LD_LIBRARY_PATH" if library is not None else repair
    return Diagnosis(_prefix(here), "warning", f"installed ({names}) and cannot be imported: {error}", fix)


def smaller_runtime(here: Installation, machine: Machine) -> Iterator[Diagnosis]:
    """The lean or the dispatch runtime: bindings and library are all of it."""
    places = ", ".join(f"{item.version} in `{item.path.parent}`" for item in here.main_libraries)
    if here.bindings is None and places:
        repair = here.pip_repair_command(here.packages[0].version) if here.packages else None
        yield Diagnosis(_prefix(here), "note", f"libraries of the runtime, without bindings: {places}", repair)
    elif here.packages:
        yield _runtime_bindings(here, machine, places)
    if here.packages:
        for check in (cuda_packages, driver_and_cuda, version_consistency):
            yield from check(here)


def _runtime_bindings(here: Installation, machine: Machine, places: str) -> Diagnosis:
    module = _prefix(here).replace("-", "_")
    probed = machine.library_info(module)
    if "No module named" in probed.get("error", ""):  # without the package that adds the plain name
        module = f"{module}_bindings"
        probed = machine.library_info(module)
    if "error" in probed:
        return unusable_bindings(here, probed["error"], machine)
    cuda = f" for CUDA {here.cuda_major}" if here.cuda_major is not None else ""
    text = f"`{module}` {probed['version']}{cuda} runs version-compatible plans and builds none"
    text += f"; library {places}" if places else ""
    return Diagnosis(_prefix(here), "ok", text)


def library_in(text: str | None) -> str | None:
    """The first shared library that a message names."""
    found = re.search(r"lib\w[\w.+-]*\.so[.\d]*", text or "")
    return found[0].rstrip(".") if found else None


def version_consistency(here: Installation) -> Iterator[Diagnosis]:
    """Versions of bindings, libraries, trtexec and its package; a warning when they differ."""
    parts = _parts(here)
    if len(parts) < 2:
        return
    text = ", ".join(f"{name} {version}" for name, version in parts)
    odd = next((pair for pair in combinations(parts, 2) if not versions.same_release(pair[0][1], pair[1][1])), None)
    if odd is None:
        yield Diagnosis(f"{_prefix(here)}-versions", "ok", f"one {here.product}: {text}")
        return
    (first, mine), (second, theirs) = odd
    yield Diagnosis(
        f"{_prefix(here)}-versions",
        "warning",
        f"{text}: {first} and {second} are different releases of TensorRT, and a plan of one does not load in the other",
        _version_fix(here, mine, theirs),
    )


def _parts(here: Installation) -> list[tuple[str, versions.Version]]:
    found: list[tuple[str, versions.Version]] = []
    if here.bindings is not None:
        found.append((f"`{here.bindings.name}`", here.bindings.version))
        below = here.library(major=here.bindings.version.major)
        if below is not None and len(below.version.parts) >= 3:
            found.append((f"the lib{below.name} under them", below.version))
    elif (plain := here.library()) is not None and len(plain.version.parts) >= 3:
        found.append(("libnvinfer", plain.version))
    if here.trtexec_version is not None:
        found.append(("trtexec", here.trtexec_version))
    if here.package_bin is not None:
        found.append(("the package `libnvinfer-bin`", here.package_bin.version))
    return found


def _version_fix(here: Installation, mine: versions.Version, theirs: versions.Version) -> str:
    """Prefer to replace wheels: system-wide packages are harder to change."""
    fixed = here.trtexec_version or (here.package_bin.version if here.package_bin else None)
    if here.bindings is not None and fixed is not None and not versions.same_release(here.bindings.version, fixed):
        return f"{here.pip_command(fixed)}, or install the trtexec of {here.bindings.version.release}"
    if here.bindings is not None:
        return here.pip_command(here.bindings.version, "--force-reinstall")
    return f"sudo apt-get install 'libnvinfer-bin={mine.release}*' (or everything of {theirs.release})"


def _prefix(here: Installation) -> str:
    """Name prefix of findings about the product."""
    return here.product.lower().replace(" ", "-")


def cuda_packages(here: Installation) -> Iterator[Diagnosis]:
    """Wheels for CUDA 12 and for CUDA 13 own the same folders."""
    majors = sorted({item.cuda_major for item in here.packages if item.cuda_major is not None})
    if len(majors) > 1:
        names = " ".join(item.name for item in here.packages)
        keep = here.bindings.version if here.bindings is not None else here.packages[0].version
        part = "bindings" if here.bindings is not None else "libs"
        yield Diagnosis(
            f"{_prefix(here)}-cuda",
            "problem",
            f"wheels for CUDA {' and '.join(map(str, majors))} share the folder "
            f"`{_prefix(here).replace('-', '_')}_{part}/`: {names}; the one installed last has overwritten the other",
            f"pip uninstall -y {names} && pip install {here.wheel_spec(keep)}",
        )


def driver_and_cuda(here: Installation) -> Iterator[Diagnosis]:
    """Compare the driver with the minimum for this TensorRT's CUDA."""
    library = here.library()
    version = here.python_version or here.trtexec_version or (library.version if library is not None else None)
    cuda, driver, branch = here.cuda_major, here.driver, versions.driver_branch(here.driver)
    if version is None or cuda is None or branch is None:
        return
    floor = versions.min_driver_branch(version, cuda)
    if floor is None:
        return
    if branch >= floor:
        text = f"driver {driver} supports {here.product} {version} for CUDA {cuda} (minimum {floor})"
        yield Diagnosis(f"{_prefix(here)}-driver", "ok", text)
        return
    names = " ".join(item.name for item in here.packages)
    fix = f"install driver {floor} or newer"
    if names and cuda == 13 and branch >= (versions.min_driver_branch(version, 12) or 0):
        fix = f"pip uninstall -y {names} && pip install {here.wheel_spec(version)}, or {fix}"
    elif not names:
        fix = f"sudo apt-get install nvidia-driver-{floor}, or TensorRT's packages for an older CUDA"
    else:
        fix = f"sudo apt-get install nvidia-driver-{floor} (or newer)"
    yield Diagnosis(
        f"{_prefix(here)}-driver",
        "problem",
        f"{here.product} {version} for CUDA {cuda} needs driver {floor}, here is {driver}",
        fix,
    )


def gpu_support(here: Installation) -> Iterator[Diagnosis]:
    """Whether each GPU is supported, and the common precisions."""
    version = here.python_version or here.trtexec_version
    if version is None:
        return
    for board in here.gpus:
        name, found = f"tensorrt-gpu-{board.index}", versions.parse_capability(board.compute_capability)
        if found is None:
            continue
        label = f"{board.name} (compute capability {board.compute_capability})"
        answer = versions.supports(version, found)
        if answer is False:
            yield Diagnosis(
                name,
                "problem",
                f"TensorRT {version} does not run on {label}",
                here.pip_install_command(suited)
                if (suited := versions.wheel_for_gpu(found, here.driver, here.cuda_major))
                else f"install a TensorRT {versions.supported_versions_text(found)}; `--backend onnxruntime` meanwhile",
            )
            continue
        has = [
            kind
            for kind, least in versions.COMPUTE_CAPABILITY.items()
            if least <= found and ((since := versions.precision_since(kind)) is None or version >= since)
        ]
        lacks = [kind for kind in versions.COMPUTE_CAPABILITY if kind not in has]
        text = f"{label} with TensorRT {version}: {', '.join(has)}" + (f"; not {', '.join(lacks)}" if lacks else "")
        if answer is None:
            fix = "trt-engine build MODEL.onnx --backend tensorrt -o try.engine"
            yield Diagnosis(name, "note", f"{text}; NVIDIA does not list this GPU for this TensorRT", fix)
        else:
            yield Diagnosis(name, "ok", text)


def plugin_library(here: Installation) -> Iterator[Diagnosis]:
    """TensorRT's plugin library must be of the same release."""
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
            "(such as EfficientNMS_TRT) fail with `getPluginCreator could not find plugin`",
            f"sudo apt-get install libnvinfer-plugin{plain.version.major}"
            if plain.origin != "pip"
            else here.pip_command(plain.version, "--force-reinstall"),
        )
    elif (
        len(plugins.version.parts) > 2
        and len(plain.version.parts) > 2
        and not versions.same_release(plugins.version, plain.version)
    ):
        yield Diagnosis(
            "tensorrt-plugins",
            "warning",
            f"libnvinfer_plugin is {plugins.version} (`{plugins.path}`) and libnvinfer {plain.version} (`{plain.path}`)",
            f"export LD_LIBRARY_PATH={plain.path.parent}:$LD_LIBRARY_PATH, with both libraries of one version in it",
        )
    else:
        yield Diagnosis("tensorrt-plugins", "ok", f"`{plugins.path}`; your own: `-O plugins=/path/to/libmine.so`")


def libraries_on_path(here: Installation, machine: Machine) -> Iterator[Diagnosis]:
    """LD_LIBRARY_PATH: missing folders, and link-time stubs."""
    folders = [text for text in machine.library_path.split(":") if text]
    gone = [text for text in folders if not machine.under(text).is_dir()]
    stubs = [text for text in folders if _has_stub(machine.under(text))]
    if stubs:
        rest = ":".join(text for text in folders if text not in stubs)
        yield Diagnosis(
            "library-path-stubs",
            "problem",
            f"LD_LIBRARY_PATH holds link-time stubs of the driver ({', '.join(f'`{text}`' for text in stubs)}): CUDA "
            "reports a stub library, or finds no device",
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


def duplicate_libraries(here: Installation) -> Iterator[Diagnosis]:
    """Two TensorRTs of one major version on the loader path."""
    if here.conflicting_libraries:
        first, other = here.conflicting_libraries
        yield Diagnosis(
            f"{_prefix(here)}-twice",
            "warning",
            f"two {here.product}s on one loader path: {_location(first)} wins over {_location(other)}; plans of one are "
            "rejected by the other; symptom: 0 % GPU and a stuck pipeline",
            f"export LD_LIBRARY_PATH={first.path.parent} to keep that one first, {other.path.parent} for the other; or "
            "uninstall one",
        )


PART_CHECKS = (
    version_consistency, cuda_packages, driver_and_cuda, gpu_support, plugin_library, duplicate_libraries
)  # fmt: skip


def _export(folders: str) -> str:
    return f"export LD_LIBRARY_PATH={folders}" if folders else "unset LD_LIBRARY_PATH"


def _has_stub(folder: Path) -> bool:
    return folder.name == "stubs" and any((folder / name).exists() for name in ("libcuda.so", "libcuda.so.1"))


def _location(library: Library) -> str:
    return f"{library.version} in `{library.path.parent}`"


def onnxruntime_provider(here: Installation, folders: Sequence[Path]) -> Iterator[Diagnosis]:
    """Compare the libnvinfer that ONNX Runtime's TensorRT provider links with the installed ones."""
    file = _provider("tensorrt", folders)
    if file is None:
        return
    wanted = next((name for name in needed_libraries(file) if name.startswith("libnvinfer.so")), None)
    major = re.search(r"\.so\.(\d+)$", wanted or "")
    if wanted is None or major is None:
        text = "ONNX Runtime's TensorRT provider has no libnvinfer dependency"
        yield Diagnosis("onnxruntime-tensorrt", "note", text)
        return
    text = f"ONNX Runtime's TensorRT provider links `{wanted}`"
    cuda = _cuda_of(file) or _cuda_of(_provider("cuda", folders)) or 12
    brings = f'pip install "tensorrt-cu{cuda}=={major[1]}.*"'
    fits = here.library(major=int(major[1]))
    status: Status = "warning"
    fix: str | None = None
    if fits is None and not here.is_present:
        status, text, fix = "absent", f"{text}, and TensorRT is not installed here", brings
    elif fits is None:
        other = here.python_version or here.trtexec_version or (here.library() or here.packages[0]).version
        text += f", and the TensorRT here is {other}: that provider cannot be loaded beside it"
        fix = f"{brings}, in a separate environment for the provider; `--backend tensorrt` runs on {other} here"
    elif fits.origin == "pip" and here.cuda_major not in (None, cuda):
        text += f" and CUDA {cuda}, and the wheel here is TensorRT {fits.version} for CUDA {here.cuda_major}"
        fix = (
            f"pip uninstall -y {' '.join(item.name for item in here.packages)} && pip install "
            f'"tensorrt-cu{cuda}=={fits.version.release}.*"'
        )
    else:
        status, text = "ok", f"{text}: {fits.version} is in `{fits.path.parent}`"
        if fits.origin == "pip":
            fix = f"the loader finds it there with `export LD_LIBRARY_PATH={fits.path.parent}:$LD_LIBRARY_PATH`"
    yield Diagnosis("onnxruntime-tensorrt", status, text, fix)


def onnxruntime_cuda(here: Installation, folders: Sequence[Path]) -> Iterator[Diagnosis]:
    """Compare the CUDA of ONNX Runtime's GPU package with the driver."""
    cuda, branch = _cuda_of(_provider("cuda", folders)), versions.driver_branch(here.driver)
    floor = versions.min_driver_branch(None, cuda) if cuda is not None else None
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
        yield Diagnosis("onnxruntime-cuda", "ok", f"{text}, driver {here.driver} supports it (minimum {floor})")


def _provider(name: str, folders: Sequence[Path]) -> Path | None:
    file = f"{_PROVIDERS}{name}.so"
    return next((folder / file for folder in folders if (folder / file).is_file()), None)


def _cuda_of(file: Path | None) -> int | None:
    """CUDA major version a library links, by `libcudart.so.12` or cuBLAS."""
    for name in needed_libraries(file) if file is not None else ():
        if found := re.fullmatch(r"lib(?:cudart|cublas|cublasLt)\.so\.(\d+)", name):
            return int(found[1])
    return None


# ------------------------------------------------------------------------------------------------ containers


def container_tools(machine: Machine, where: str | None, boards: Sequence[info.Gpu]) -> Iterator[Diagnosis]:
    """On a host: NVIDIA's container toolkit and docker permission. In a container: whether it has a GPU."""
    if where is not None:
        requested = machine.environ("NVIDIA_VISIBLE_DEVICES")
        driver = machine.read("/proc/driver/nvidia/version") is not None
        if not boards and (requested or driver):
            state = f"NVIDIA_VISIBLE_DEVICES is `{requested}`" if requested else "the host has a driver"
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
    tools = ("nvidia-ctk", "nvidia-container-runtime", "nvidia-container-cli")
    toolkit = next(filter(None, map(machine.tool, tools)), None)
    gpu = bool(boards) or machine.read("/proc/driver/nvidia/version") is not None
    if toolkit is None:
        if gpu:
            yield Diagnosis(
                "container-toolkit",
                "warning",
                f"`{docker}` is installed without NVIDIA's container toolkit: containers get no GPU",
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
            f"`{toolkit}` is installed, but neither `/etc/docker/daemon.json` nor a CDI file configures its runtime",
            "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker",
        )
    else:
        yield Diagnosis("container-toolkit", "ok", f"`{toolkit}` with `{docker}`")
    sockets = [machine.root / text for text in ("var/run/docker.sock", "run/docker.sock")]
    socket = next(filter(Path.exists, sockets), None)
    if docker.name == "docker" and socket is not None and not os.access(socket, os.R_OK | os.W_OK):
        yield Diagnosis(
            "docker-permission",
            "warning",
            f"`{socket}` cannot be used by this user: `docker run` fails with `permission denied`",
            "sudo usermod -aG docker $USER, then log in again",
        )


def container_contents(here: Installation, machine: Machine) -> str:
    """TensorRT, trtexec, CUDA and PyTorch of a container, as text; empty when none."""
    library = here.library()
    version = here.python_version or (library.version if library is not None else None)
    parts = [f"TensorRT {version}"] if version is not None else []
    if here.trtexec is not None:
        parts.append(f"`{here.trtexec}`")
    for name, title in (("CUDA_VERSION", "CUDA"), ("NVIDIA_PYTORCH_VERSION", "NVIDIA's PyTorch")):
        if value := machine.environ(name):
            parts.append(f"{title} {value}")
    return ", ".join(parts)


_LOAD, _DYNAMIC = 1, 2  # program header types, elf.h
_NULL, _NEEDED, _STRTAB, _STRSZ = 0, 1, 5, 10  # entries of the dynamic section
_MAX_READ_BYTES = 1 << 20
"""Limit for one table, so that a damaged header cannot cause a huge read."""


def needed_libraries(path: Path) -> tuple[str, ...]:
    """DT_NEEDED entries of a 64-bit ELF file (`libnvinfer.so.10`), in order; empty for any other file."""
    try:
        with path.open("rb") as file:
            return _read_needed(file)
    except (OSError, struct.error, ValueError, UnicodeDecodeError):
        return ()


def _read_needed(file: BinaryIO) -> tuple[str, ...]:
    head = file.read(64)
    if head[:5] != b"\x7fELF\x02" or head[5:6] not in (b"\x01", b"\x02"):
        return ()
    order = "<" if head[5:6] == b"\x01" else ">"
    (table,) = struct.unpack_from(f"{order}Q", head, 32)
    size, count = struct.unpack_from(f"{order}HH", head, 54)
    headers = [_read_at(file, table + index * size, 56) for index in range(count)]
    segments = [struct.unpack_from(f"{order}IIQQQQ", header) for header in headers]
    dynamic = next(((offset, nbytes) for kind, _, offset, _, _, nbytes in segments if kind == _DYNAMIC), None)
    if dynamic is None:
        return ()
    raw = _read_at(file, *dynamic)
    pairs = struct.iter_unpack(f"{order}QQ", raw[: len(raw) // 16 * 16])
    entries = list(takewhile(lambda pair: pair[0] != _NULL, pairs))
    strings = next((value for tag, value in entries if tag == _STRTAB), None)
    nbytes = next((value for tag, value in entries if tag == _STRSZ), 0)
    where = next(
        (
            offset + strings - address
            for kind, _, offset, address, _, length in segments
            if kind == _LOAD and strings is not None and address <= strings < address + length
        ),
        None,
    )
    if where is None:
        return ()
    text = _read_at(file, where, nbytes)
    return tuple(text[at : text.index(b"\0", at)].decode() for tag, at in entries if tag == _NEEDED)


def _read_at(file: BinaryIO, offset: int, nbytes: int) -> bytes:
    if nbytes > _MAX_READ_BYTES or offset > 1 << 62:
        raise ValueError("the table is too large: damaged file")
    file.seek(offset)
    return file.read(nbytes)
