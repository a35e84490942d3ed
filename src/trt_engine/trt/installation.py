"""Which TensorRT or TensorRT-RTX this machine has - bindings, libraries, trtexec, GPUs - without importing any of it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

from trt_engine.device import info
from trt_engine.plan_header import PlanProduct
from trt_engine.trt.versions import Version, rtx_wheel_spec, wheel_spec

TRTEXEC_VARIABLE = "TRT_ENGINE_TRTEXEC"
"""The environment variable that names the program, searched before PATH and NVIDIA's folders."""
_TRTEXEC_FOLDERS = (
    "usr/src/tensorrt/bin",
    "opt/tensorrt/bin",
    "usr/local/tensorrt/bin",
    "opt/TensorRT-*/bin",
    "usr/local/TensorRT-*/bin",
)
"""Where NVIDIA's packages, containers and tar files put trtexec, under the root."""
_DEFAULT_FOLDERS = (
    "lib/x86_64-linux-gnu",
    "usr/lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib64",
    "usr/lib64",
    "lib",
    "usr/lib",
)
TRTEXEC_HELP_S = 60.0
_CONTAINER_FILES = ((".dockerenv", "docker"), ("run/.containerenv", "podman"))
_DEBIAN = re.compile(r"libnvinfer|libnvonnxparsers|python3-libnvinfer|tensorrt")


RuntimeKind = Literal["lean", "dispatch"]
"""TensorRT's smaller runtimes, which run version-compatible plans and build none."""
RUNTIME_KINDS: tuple[RuntimeKind, ...] = ("lean", "dispatch")
Product = Literal[PlanProduct, "TensorRT lean", "TensorRT dispatch"]
"""What an `Installation` describes."""


def _wheels(stem: str, *cudas: int) -> tuple[str, ...]:
    """Names of the distributions: for any CUDA and for each, whole and in parts."""
    return tuple(
        f"{stem}{cuda}{part}"
        for cuda in ("", *(f"-cu{major}" for major in cudas))
        for part in ("", "-bindings", "-libs")
    )


@dataclass(frozen=True, slots=True)
class _ProductNames:
    """Names of the packages and libraries of a product."""

    packages: tuple[str, ...]
    library: re.Pattern[str]
    main_library: str
    """The library that runs plans, as in `Library.name`."""
    bundled: tuple[str, ...]
    """pip's folders with libraries."""
    runtimes: tuple[str, ...] = ()
    """Packages of its smaller runtimes."""
    providers: tuple[str, ...] = ()
    """Packages of an ONNX Runtime provider with bundled libraries."""
    provider_folder: str = ""


_PRODUCT_NAMES: dict[PlanProduct, _ProductNames] = {
    "TensorRT": _ProductNames(
        packages=_wheels("tensorrt", 11, 12, 13),
        runtimes=(*_wheels("tensorrt-lean", 11, 12, 13), *_wheels("tensorrt-dispatch", 11, 12, 13)),
        library=re.compile(
            r"lib(nvinfer(?:_plugin|_vc_plugin|_lean|_dispatch)?|nvonnxparser)\.so(?:\.(\d+(?:\.\d+)*))?"
        ),
        main_library="nvinfer",
        bundled=("tensorrt_libs", "tensorrt_bindings", "tensorrt_lean_libs", "tensorrt_dispatch_libs"),
    ),
    "TensorRT-RTX": _ProductNames(
        packages=_wheels("tensorrt-rtx", 12, 13),
        library=re.compile(r"lib(tensorrt_(?:onnxparser_)?rtx)\.so(?:\.(\d+(?:\.\d+)*))?"),
        main_library="tensorrt_rtx",
        bundled=("tensorrt_rtx_libs",),
        providers=tuple(f"onnxruntime-ep-nv-tensorrt-rtx-cu{cuda}" for cuda in (13, 12)),
        provider_folder="onnxruntime_ep_nv_tensorrt_rtx",
    ),
}
_MAIN_LIBRARIES: dict[Product, str] = {
    **{product: names.main_library for product, names in _PRODUCT_NAMES.items()},
    "TensorRT lean": "nvinfer_lean",
    "TensorRT dispatch": "nvinfer_dispatch",
}


@dataclass(frozen=True, slots=True)
class Package:
    """An installed package: of pip (`tensorrt-cu13-bindings`) or of Debian (`libnvinfer-bin`)."""

    name: str
    version: Version
    folder: Path | None = None
    """The folder of its modules."""
    built_for: int | None = None
    """The CUDA major in its version, as in Debian's `10.16.1.11-1+cuda13.0`."""

    @property
    def cuda_major(self) -> int | None:
        """The CUDA major in its name, as in `tensorrt-cu12-libs`, or in its version."""
        found = re.search(r"-cu(\d+)", self.name)
        return int(found[1]) if found else self.built_for


@dataclass(frozen=True, slots=True)
class Library:
    """One library file of TensorRT."""

    name: str
    """`nvinfer`, `nvinfer_plugin`, `nvinfer_lean`, `nvonnxparser`; `tensorrt_rtx`, `tensorrt_onnxparser_rtx`."""
    path: Path
    version: Version
    """From file name and package: at least the major."""
    origin: str
    """How a process finds it: `LD_LIBRARY_PATH`, `ld.so.cache`, `default`, `pip`."""


@dataclass(frozen=True, slots=True)
class Installation:
    """The TensorRT or TensorRT-RTX installation of one machine, and its GPUs."""

    packages: tuple[Package, ...] = ()
    """Its distributions, by name; those of the lean and dispatch runtimes are `runtime_packages`."""
    debian: tuple[Package, ...] = ()
    libraries: tuple[Library, ...] = ()
    """Those on the loader's path, in its order: the first of a name and major is loaded."""
    bundled: tuple[Library, ...] = ()
    """Libraries in pip's folders; the bindings load them before the loader's."""
    trtexec: Path | None = None
    trtexec_version: Version | None = None
    trtexec_message: str | None = None
    """trtexec's output in place of a version: `error while loading shared libraries: libnvinfer.so.10 ...`."""
    gpus: tuple[info.Gpu, ...] = ()
    driver: str | None = None
    """The NVIDIA driver version, from NVML or the kernel module."""
    container: str | None = None
    product: Product = "TensorRT"
    runtime_packages: tuple[Package, ...] = ()
    """Distributions of the lean and dispatch runtimes, which run version-compatible plans and build none."""
    provider: Package | None = None
    """The ONNX Runtime provider with bundled libraries."""
    provider_library: Library | None = None

    @property
    def bindings(self) -> Package | None:
        """The Python bindings."""
        found = [item for item in self.packages if not item.name.endswith("-libs")]
        return next((item for item in found if item.name.endswith("-bindings")), found[0] if found else None)

    def runtime(self, kind: RuntimeKind) -> Installation:
        """The lean or the dispatch runtime as an installation of its own."""
        return replace(
            self,
            packages=tuple(item for item in self.runtime_packages if item.name.startswith(f"tensorrt-{kind}")),
            debian=(),
            trtexec=None,
            trtexec_version=None,
            product="TensorRT lean" if kind == "lean" else "TensorRT dispatch",
        )

    def library(self, name: str | None = None, major: int | None = None) -> Library | None:
        """The file the bindings load for that name (default: the library that runs plans): pip's first,
        then the loader's first."""
        name = name or _MAIN_LIBRARIES[self.product]
        every = (*self.bundled, *self.libraries)
        return next((item for item in every if item.name == name and major in (None, item.version.major)), None)

    @property
    def python_version(self) -> Version | None:
        """The TensorRT that Python runs plans with: that of the library under the bindings."""
        if self.bindings is None:
            return None
        below = self.library(major=self.bindings.version.major)
        if below is None or len(below.version.parts) < 3:
            return self.bindings.version
        if below.version.release == self.bindings.version.release and len(below.version.parts) < 4:
            return self.bindings.version
        return below.version

    @property
    def main_libraries(self) -> tuple[Library, ...]:
        """The libraries that run plans, in the order the bindings look for them."""
        name = _MAIN_LIBRARIES[self.product]
        return tuple(item for item in (*self.bundled, *self.libraries) if item.name == name)

    @property
    def lean(self) -> tuple[Library, ...]:
        """The lean runtime libraries, by path."""
        return self.runtime("lean").main_libraries

    @property
    def package_bin(self) -> Package | None:
        """The Debian package that contains trtexec."""
        return next((item for item in self.debian if item.name == "libnvinfer-bin"), None)

    @property
    def conflicting_libraries(self) -> tuple[Library, ...]:
        """Two libraries of one major and different versions on the loader's path, the loaded one first; else empty."""
        main = _MAIN_LIBRARIES[self.product]
        plain = [item for item in self.libraries if item.name == main and len(item.version.parts) >= 3]
        for first in plain:
            for other in plain:
                if other.version.major == first.version.major and other.version.release != first.version.release:
                    return (first, other)
        return ()

    @property
    def is_present(self) -> bool:
        return bool(self.packages or self.library() or self.trtexec)

    def pip_command(self, version: Version, *options: str) -> str:
        """The pip command that installs exactly that release, for the installed CUDA if possible."""
        return self.pip_install_command(self.wheel_spec(version, self.cuda_major), *options)

    def pip_repair_command(self, version: Version) -> str:
        """The pip command that installs the parts which are missing, else all of them again."""
        complete = all(
            any(item.name.endswith(part) for item in self.packages) for part in ("-bindings", "-libs")
        ) and any(not re.search("-(bindings|libs)$", item.name) for item in self.packages)
        return self.pip_command(version, *(["--force-reinstall"] if complete else []))

    def wheel_spec(self, version: Version, cuda: int | None = None) -> str:
        """The quoted pip requirement of exactly that release, for a CUDA the driver supports."""
        if self.product == "TensorRT-RTX":
            return rtx_wheel_spec(version, self.driver, cuda)
        stem = self.product.lower().replace(" ", "-")
        return wheel_spec(version, self.driver, cuda).replace("tensorrt", stem)

    def pip_install_command(self, requirement: str, *options: str) -> str:
        """The same for any pip requirement; uninstalls wheels for another CUDA, which share folders."""
        found = re.search(r"-cu(\d+)", requirement)
        asked = int(found[1]) if found else None
        others = [item.name for item in self.packages if item.cuda_major != asked]
        line = " ".join(("pip install", *options, requirement))
        return f"pip uninstall -y {' '.join(item.name for item in self.packages)} && {line}" if others else line

    @property
    def cuda_major(self) -> int | None:
        """The CUDA major TensorRT is built for here: that of the Python packages, else of Debian's."""
        return next((item.cuda_major for item in (*self.packages, *self.debian) if item.cuda_major is not None), None)


def detect_installation(
    root: Path = Path("/"),
    *,
    packages: Sequence[str | Path] = (),
    environ: Mapping[str, str] | None = None,
    known_gpus: Sequence[info.Gpu] | None = None,
    probe_trtexec: bool = True,
    product: PlanProduct = "TensorRT",
) -> Installation:
    """The TensorRT or TensorRT-RTX installation. Reads files, imports nothing; runs trtexec unless `probe_trtexec` is false.

    `packages` are folders searched before this interpreter's; with another `root` they are the only ones. `known_gpus` are
    the GPUs (default: NVML's).
    """
    environ = os.environ if environ is None else environ
    here = root == Path("/")
    places = [Path(place) for place in (*packages, *(sys.path if here else ())) if place]
    names = _PRODUCT_NAMES[product]
    found, runtimes = _pip_packages(names.packages, places), _pip_packages(names.runtimes, places)
    providers = _pip_packages(names.providers, places)
    debian = _debian_packages(root) if product == "TensorRT" else ()
    trtexec = find_trtexec(root, environ) if product == "TensorRT" else None
    version, said = _probe_trtexec(trtexec, environ) if trtexec is not None and probe_trtexec else (None, None)
    gpus = tuple(info.gpus() if known_gpus is None else known_gpus)
    return Installation(
        packages=found,
        debian=debian,
        libraries=_refine_versions(
            tuple(_loader_libraries(root, environ.get("LD_LIBRARY_PATH", ""), names.library)), debian
        ),
        bundled=_refine_versions(
            tuple(_bundled_libraries(places, names.bundled, names.library)),
            tuple(item for item in (*found, *runtimes) if item.name.endswith("-libs")),
        ),
        trtexec=trtexec,
        trtexec_version=version,
        trtexec_message=said,
        gpus=gpus,
        driver=gpus[0].driver if gpus else _driver_version(root),
        container=info.in_container()
        if here
        else next((name for file, name in _CONTAINER_FILES if (root / file).exists()), None),
        product=product,
        runtime_packages=runtimes,
        provider=providers[0] if providers else None,
        provider_library=next(
            (
                item
                for item in _bundled_libraries(places, (names.provider_folder,) if providers else (), names.library)
                if item.name == names.main_library
            ),
            None,
        ),
    )


# ------------------------------------------------------------------------------------------------ packages


def _pip_packages(names: Sequence[str], places: Sequence[Path]) -> tuple[Package, ...]:
    """The named packages; reading all installed metadata would take a hundred times as long."""
    found = []
    for name in names:
        for item in metadata.distributions(name=name, path=[str(place) for place in places]):
            with contextlib.suppress(KeyError, TypeError, AttributeError):  # a dist-info without METADATA
                if (version := Version.parse(item.version)) is not None:
                    found.append(Package(name, version, Path(str(item.locate_file("")))))
                    break  # the first on the path is the one Python imports
    return tuple(found)


def _debian_packages(root: Path) -> tuple[Package, ...]:
    """TensorRT's packages in dpkg's status file."""
    try:
        text = (root / "var/lib/dpkg/status").read_text(errors="replace")
    except OSError:
        return ()
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line and not line.startswith(" "))
        name, version = fields.get("Package", ""), Version.parse(fields.get("Version", ""))
        if _DEBIAN.match(name) and version is not None and fields.get("Status", "").endswith(" installed"):
            cuda = re.search(r"\+cuda(\d+)", fields["Version"])
            found.append(Package(name, version, built_for=int(cuda[1]) if cuda else None))
    return tuple(found)


# ------------------------------------------------------------------------------------------------ libraries


def _folder_libraries(folder: Path, origin: str, names: re.Pattern[str]) -> list[Library]:
    """One entry for each library of the product in a folder, links followed to the file that carries the version."""
    files, found = list[str](), list[Library]()
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        files = sorted(entry.name for entry in entries if names.fullmatch(entry.name))
    for name in files:
        with contextlib.suppress(OSError):  # a folder that can be listed but not entered
            if (one := _read_library(folder / name, origin, names)) is not None:
                found.append(one)
    return _unique(found)


def _unique(libraries: Iterable[Library]) -> list[Library]:
    """The first of the libraries that are one file."""
    found: dict[tuple[str, Path], Library] = {}
    for one in libraries:
        found.setdefault((one.name, one.path.resolve()), one)
    return list(found.values())


def _read_library(file: Path, origin: str, names: re.Pattern[str]) -> Library | None:
    match = names.fullmatch(file.name)
    if match is None or not file.is_file():
        return None
    target = names.fullmatch(file.resolve().name)
    texts = [text for text in (match[2], target[2] if target else None) if text]
    if not texts:
        return None  # `libnvinfer.so` alone, a stub or a private copy of unknown version
    version = Version.parse(max(texts, key=lambda text: text.count(".")))
    return Library(match[1], file, version, origin) if version else None


def loader_folders(root: Path, library_path: str) -> list[tuple[Path, str]]:
    """The folders of LD_LIBRARY_PATH, those of ld.so.conf and the loader's own, in the order they are searched."""
    folders = [(_root_path(root, text), "LD_LIBRARY_PATH") for text in library_path.split(":") if text]
    folders += [(_root_path(root, text), "ld.so.cache") for text in _parse_ld_so_conf(root, root / "etc/ld.so.conf")]
    return folders + [(root / text, "default") for text in _DEFAULT_FOLDERS]


def _root_path(root: Path, text: str) -> Path:
    return Path(text) if root == Path("/") or text.startswith(f"{root}/") else root / text.lstrip("/")


def _parse_ld_so_conf(root: Path, file: Path, depth: int = 0) -> list[str]:
    """The folders of an ld.so.conf, its `include` lines followed."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return []
    found: list[str] = []
    for line in (line.split("#")[0].strip() for line in lines):
        if line.startswith("include ") and depth < 4:
            pattern = line.removeprefix("include ").strip()
            base = root if pattern.startswith("/") else file.parent
            with contextlib.suppress(ValueError):  # `include /` and other invalid patterns
                for inner in sorted(base.glob(pattern.lstrip("/"))):
                    found += _parse_ld_so_conf(root, inner, depth + 1)
        elif line.startswith("/"):
            found.append(line)
    return found


def cached_libraries(raw: bytes) -> list[str]:
    """The paths in an `ld.so.cache` of today's format (`glibc-ld.so.cache1.1`), in the loader's order; [] for any other."""
    start = raw.find(b"glibc-ld.so.cache1.1")
    if start < 0 or len(raw) < start + 48:
        return []
    (count,) = struct.unpack_from("=I", raw, start + 20)
    found = []
    for at in range(start + 48, start + 48 + 24 * count, 24):  # flags, name, path, osversion, hwcap
        if at + 24 > len(raw):
            break
        (where,) = struct.unpack_from("=I", raw, at + 8)
        end = raw.find(b"\0", start + where)
        if end > 0:
            found.append(raw[start + where : end].decode(errors="replace"))
    return found


def _loader_libraries(root: Path, library_path: str, names: re.Pattern[str]) -> list[Library]:
    cached: list[Library] = []
    with contextlib.suppress(OSError):
        for text in cached_libraries((root / "etc/ld.so.cache").read_bytes()):
            name = text.rpartition("/")[2]
            if names.fullmatch(name) and (one := _read_library(_root_path(root, text), "ld.so.cache", names)):
                cached.append(one)
    folders = loader_folders(root, library_path)
    named = [one for place, by in folders if by == "LD_LIBRARY_PATH" for one in _folder_libraries(place, by, names)]
    others = [one for place, by in folders if by != "LD_LIBRARY_PATH" for one in _folder_libraries(place, by, names)]
    return _unique([*named, *cached, *others])


def _bundled_libraries(places: Sequence[Path], folders: Sequence[str], names: re.Pattern[str]) -> list[Library]:
    return [one for place in places for folder in folders for one in _folder_libraries(place / folder, "pip", names)]


def _refine_versions(libraries: tuple[Library, ...], packages: Sequence[Package]) -> tuple[Library, ...]:
    """The libraries with the fuller version of their package, unless it contradicts the file."""
    found = []
    for item in libraries:
        for package in packages:
            stated, folder = item.version.parts, item.path.parent.name
            stem = re.sub(r"(-cu\d+)?-libs$", "", package.name).replace("-", "_")
            of_package = folder in (f"{stem}_libs", f"{stem}_bindings")
            ours = of_package if item.origin == "pip" else folder.endswith("-linux-gnu")
            if ours and len(package.version.parts) > len(stated) and package.version.parts[: len(stated)] == stated:
                item = Library(item.name, item.path, package.version, item.origin)
                break
        found.append(item)
    return tuple(found)


# ------------------------------------------------------------------------------------------------ trtexec and the rest


def find_trtexec(root: Path, environ: Mapping[str, str]) -> Path | None:
    """The trtexec of the variable, existing or not, else of PATH, else of NVIDIA's folders."""
    if named := environ.get(TRTEXEC_VARIABLE):
        return Path(named)
    return find_program("trtexec", root, environ.get("PATH", ""), _TRTEXEC_FOLDERS)


def find_program(name: str, root: Path, path: str, folders: Sequence[str]) -> Path | None:
    """The program of that PATH, else of these folders under the root, the latest version first; None if there is none."""
    if found := shutil.which(name, path=path):
        return Path(found)
    places = (place for folder in folders for place in sorted(root.glob(f"{folder}/{name}"), reverse=True))
    return next((place for place in places if place.is_file() and os.access(place, os.X_OK)), None)


def _probe_trtexec(program: Path, environ: Mapping[str, str]) -> tuple[Version | None, str | None]:
    """The version in trtexec's banner, or its output instead."""
    try:
        said = trtexec_help(program, environ)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{type(error).__name__}: {error}"
    if (version := banner_version(said)) is not None:
        return version, None
    return None, next((line.strip() for line in said.splitlines() if line.strip()), "nothing")


def trtexec_help(program: Path, environ: Mapping[str, str]) -> str:
    """What `trtexec --help` prints: a banner and all options; there is no `--version`."""
    done = subprocess.run(
        [str(program), "--help"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=TRTEXEC_HELP_S, env=dict(environ),
    )  # fmt: skip
    return done.stdout.decode(errors="replace")


def banner_version(text: str) -> Version | None:
    """The version in trtexec's banner; None without one."""
    banner = re.search(r"\[TensorRT v(\d+)\](?: \[b(\d+)\])?", text)
    return Version.from_number(int(banner[1]), int(banner[2]) if banner[2] else None) if banner else None


def _driver_version(root: Path) -> str | None:
    with contextlib.suppress(OSError):
        text = (root / "proc/driver/nvidia/version").read_text(errors="replace")
        if found := re.search(r"(?:Module|x86_64|aarch64)\s+(\d+(?:\.\d+)+)", text):
            return found[1]
    return None
