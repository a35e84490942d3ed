"""Which TensorRT this machine has - bindings, libraries, trtexec, lean runtimes, GPUs - without importing any of it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from trt_engine.device import info
from trt_engine.plans.versions import Version, wheel

__all__ = [
    "TRTEXEC_VARIABLE",
    "Installed",
    "Library",
    "Package",
    "cached_libraries",
    "find_trtexec",
    "installed",
    "loader_folders",
]

TRTEXEC_VARIABLE = "TRT_ENGINE_TRTEXEC"
"""The environment variable that names the program, before PATH and NVIDIA's folders are looked at."""
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
_TOOL_TIMEOUT_S = 60
_NAMES = tuple(
    f"tensorrt{kind}{cuda}{part}"
    for kind in ("", "-lean", "-dispatch")
    for cuda in ("", "-cu11", "-cu12", "-cu13")
    for part in ("", "-bindings", "-libs")
)
_LIBRARY = re.compile(r"lib(nvinfer(?:_plugin|_vc_plugin|_lean|_dispatch)?|nvonnxparser)\.so(?:\.(\d+(?:\.\d+)*))?")
_BUNDLED = ("tensorrt_libs", "tensorrt_bindings", "tensorrt_lean_libs", "tensorrt_dispatch_libs")
_DEBIAN = re.compile(r"libnvinfer|libnvonnxparsers|python3-libnvinfer|tensorrt")


@dataclass(frozen=True, slots=True)
class Package:
    """An installed package: of pip (`tensorrt-cu13-bindings`) or of Debian (`libnvinfer-bin`)."""

    name: str
    version: Version
    folder: Path | None = None
    """Where its modules lie."""
    built_for: int | None = None
    """The CUDA major in its version, as in Debian's `10.16.1.11-1+cuda13.0`."""

    @property
    def cuda(self) -> int | None:
        """The CUDA major in its name, as in `tensorrt-cu12-libs`, or in its version."""
        found = re.search(r"-cu(\d+)", self.name)
        return int(found[1]) if found else self.built_for


@dataclass(frozen=True, slots=True)
class Library:
    """One library file of TensorRT."""

    name: str
    """`nvinfer`, `nvinfer_plugin`, `nvinfer_lean`, `nvonnxparser`."""
    path: Path
    version: Version
    """As far as file name and package tell: the major at least."""
    origin: str
    """How a process would find it: `LD_LIBRARY_PATH`, `ld.so.cache`, `default`, `pip`."""


@dataclass(frozen=True, slots=True)
class Installed:
    """The TensorRT of one machine, and the GPUs it would run on."""

    packages: tuple[Package, ...] = ()
    """TensorRT's distributions, by name."""
    debian: tuple[Package, ...] = ()
    libraries: tuple[Library, ...] = ()
    """Those on the loader's path, in its order: the first of a name and major is the one a process gets."""
    bundled: tuple[Library, ...] = ()
    """Those in pip's own folders, which the bindings load before the loader is asked."""
    trtexec: Path | None = None
    trtexec_version: Version | None = None
    trtexec_said: str | None = None
    """What trtexec said in place of a version: `error while loading shared libraries: libnvinfer.so.10 ...`."""
    boards: tuple[info.Gpu, ...] = ()
    driver: str | None = None
    """The NVIDIA driver, as NVML or the kernel module tells it."""
    container: str | None = None

    @property
    def bindings(self) -> Package | None:
        """The full Python bindings, builder included."""
        found = [item for item in self.packages if not re.search("lean|dispatch|-libs$", item.name)]
        return next((item for item in found if item.name.endswith("-bindings")), found[0] if found else None)

    @property
    def lean_bindings(self) -> Package | None:
        """The bindings that run engines and build none."""
        return next(
            (item for item in self.packages if re.fullmatch(r"tensorrt-lean(-cu\d+)?-bindings", item.name)), None
        )

    def library(self, name: str = "nvinfer", major: int | None = None) -> Library | None:
        """The file a process with the bindings gets for that name: pip's own first, then the loader's first."""
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
    def lean(self) -> tuple[Library, ...]:
        """The lean runtime libraries, by path."""
        return tuple(item for item in (*self.bundled, *self.libraries) if item.name == "nvinfer_lean")

    @property
    def package_bin(self) -> Package | None:
        """The Debian package that brings trtexec."""
        return next((item for item in self.debian if item.name == "libnvinfer-bin"), None)

    @property
    def twice(self) -> tuple[Library, ...]:
        """Two libnvinfer of one major and different versions on the loader's path, the one that wins first; else empty."""
        plain = [item for item in self.libraries if item.name == "nvinfer" and len(item.version.parts) >= 3]
        for first in plain:
            for other in plain:
                if other.version.major == first.version.major and other.version.release != first.version.release:
                    return (first, other)
        return ()

    @property
    def anything(self) -> bool:
        return bool(self.packages or self.libraries or self.trtexec)

    def pip(self, version: Version, *options: str) -> str:
        """The line that leaves exactly that release in this Python, for the CUDA of what is here where it can."""
        return self.pip_of(wheel(version, self.driver, self.cuda), *options)

    def pip_of(self, requirement: str, *options: str) -> str:
        """The same for anything pip takes; wheels for another CUDA own the same folders, so they have to go."""
        found = re.search(r"-cu(\d+)", requirement)
        asked = int(found[1]) if found else None
        plain = [item for item in self.packages if not re.search("lean|dispatch", item.name)]
        others = [item.name for item in plain if item.cuda != asked]
        line = " ".join(("pip install", *options, requirement))
        return f"pip uninstall -y {' '.join(item.name for item in plain)} && {line}" if others else line

    @property
    def cuda(self) -> int | None:
        """The CUDA major TensorRT is built for here: that of the Python packages, else of Debian's."""
        return next((item.cuda for item in (*self.packages, *self.debian) if item.cuda is not None), None)


def installed(
    root: Path = Path("/"),
    *,
    packages: Sequence[str | Path] = (),
    environ: Mapping[str, str] | None = None,
    boards: Sequence[info.Gpu] | None = None,
    ask_trtexec: bool = True,
) -> Installed:
    """What TensorRT is here. Reads files; imports nothing of TensorRT; runs one program, trtexec, unless told not to.

    `packages` are folders of Python packages that come before this interpreter's own; another `root` is for looking
    elsewhere (then only `packages` are looked at). `boards` are the GPUs (default: NVML's).
    """
    environ = os.environ if environ is None else environ
    here = root == Path("/")
    places = [Path(place) for place in (*packages, *(sys.path if here else ())) if place]
    found = _distributions(places)
    debian = _debian(root)
    trtexec = find_trtexec(root, environ)
    version, said = _ask(trtexec, environ) if trtexec is not None and ask_trtexec else (None, None)
    gpus = tuple(info.gpus() if boards is None else boards)
    return Installed(
        packages=found,
        debian=debian,
        libraries=_named_by(tuple(_on_loader_path(root, environ.get("LD_LIBRARY_PATH", ""))), debian),
        bundled=_named_by(tuple(_bundled(places)), tuple(item for item in found if item.name.endswith("-libs"))),
        trtexec=trtexec,
        trtexec_version=version,
        trtexec_said=said,
        boards=gpus,
        driver=gpus[0].driver if gpus else _driver(root),
        container=info.in_container() if here else _container(root),
    )


# ------------------------------------------------------------------------------------------------ packages


def _distributions(places: Sequence[Path]) -> tuple[Package, ...]:
    """Looked up by name: reading the metadata of everything that is installed would take a hundred times as long."""
    found = []
    for name in _NAMES:
        for item in metadata.distributions(name=name, path=[str(place) for place in places]):
            with contextlib.suppress(KeyError, TypeError, AttributeError):  # a dist-info without METADATA
                if (version := Version.parse(item.version)) is not None:
                    found.append(Package(name, version, Path(str(item.locate_file("")))))
                    break  # the first on the path is the one Python imports
    return tuple(found)


def _debian(root: Path) -> tuple[Package, ...]:
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


def _in_folder(folder: Path, origin: str) -> Iterator[Library]:
    """One entry for each TensorRT library of a folder, links followed to the file that carries the version."""
    seen: set[tuple[str, Path]] = set()
    try:
        files = sorted(folder.iterdir())
    except OSError:
        return
    for file in files:
        try:
            found = _library(file, origin)
        except OSError:  # a folder that may be listed and not entered
            continue
        if found is None:
            continue
        if (found.name, found.path.resolve()) not in seen:
            seen.add((found.name, found.path.resolve()))
            yield found


def _library(file: Path, origin: str) -> Library | None:
    match = _LIBRARY.fullmatch(file.name)
    if match is None or not file.is_file():
        return None
    target = _LIBRARY.fullmatch(file.resolve().name)
    texts = [text for text in (match[2], target[2] if target else None) if text]
    if not texts:
        return None  # `libnvinfer.so` alone, a stub or a private copy: nobody can tell its version
    version = Version.parse(max(texts, key=lambda text: text.count(".")))
    return Library(match[1], file, version, origin) if version else None


def loader_folders(root: Path, library_path: str) -> list[tuple[Path, str]]:
    """The folders of LD_LIBRARY_PATH, those of ld.so.conf and the loader's own, in the order they are searched."""
    folders = [(_under(root, text), "LD_LIBRARY_PATH") for text in library_path.split(":") if text]
    folders += [(_under(root, text), "ld.so.cache") for text in _configured(root, root / "etc/ld.so.conf")]
    return folders + [(root / text, "default") for text in _DEFAULT_FOLDERS]


def _under(root: Path, text: str) -> Path:
    return Path(text) if root == Path("/") or text.startswith(f"{root}/") else root / text.lstrip("/")


def _configured(root: Path, file: Path, depth: int = 0) -> list[str]:
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
            with contextlib.suppress(ValueError):  # `include /`, and what else is no pattern
                for inner in sorted(base.glob(pattern.lstrip("/"))):
                    found += _configured(root, inner, depth + 1)
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


def _on_loader_path(root: Path, library_path: str) -> Iterator[Library]:
    seen: set[tuple[str, Path]] = set()
    cached: list[Library] = []
    with contextlib.suppress(OSError):
        for text in cached_libraries((root / "etc/ld.so.cache").read_bytes()):
            if _LIBRARY.fullmatch(text.rpartition("/")[2]) and (one := _library(_under(root, text), "ld.so.cache")):
                cached.append(one)
    folders = loader_folders(root, library_path)
    ordered = [one for place, origin in folders if origin == "LD_LIBRARY_PATH" for one in _in_folder(place, origin)]
    ordered += cached
    ordered += [one for place, origin in folders if origin != "LD_LIBRARY_PATH" for one in _in_folder(place, origin)]
    for one in ordered:
        if (one.name, one.path.resolve()) not in seen:
            seen.add((one.name, one.path.resolve()))
            yield one


def _bundled(places: Sequence[Path]) -> Iterator[Library]:
    for place in places:
        for folder in _BUNDLED:
            yield from _in_folder(place / folder, "pip")


def _named_by(libraries: tuple[Library, ...], packages: Sequence[Package]) -> tuple[Library, ...]:
    """The same libraries, with the fuller version of the package that brought them where it does not contradict the file."""
    found = []
    for item in libraries:
        for package in packages:
            stated = item.version.parts
            ours = item.origin == "pip" or item.path.parent.name.endswith("-linux-gnu")
            if ours and len(package.version.parts) > len(stated) and package.version.parts[: len(stated)] == stated:
                item = Library(item.name, item.path, package.version, item.origin)
                break
        found.append(item)
    return tuple(found)


# ------------------------------------------------------------------------------------------------ trtexec and the rest


def find_trtexec(root: Path, environ: Mapping[str, str]) -> Path | None:
    """The trtexec that is named, whether it is there or not, else the one on PATH, else the one in NVIDIA's folders."""
    if named := environ.get(TRTEXEC_VARIABLE):
        return Path(named)
    if found := shutil.which("trtexec", path=environ.get("PATH", "")):
        return Path(found)
    for folder in _TRTEXEC_FOLDERS:
        for place in sorted(root.glob(f"{folder}/trtexec"), reverse=True):
            if place.is_file() and os.access(place, os.X_OK):
                return place
    return None


def _ask(program: Path, environ: Mapping[str, str]) -> tuple[Version | None, str | None]:
    """The version in trtexec's banner, or what it said instead."""
    try:
        done = subprocess.run(
            [str(program), "--help"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TOOL_TIMEOUT_S,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{type(error).__name__}: {error}"
    said = done.stdout + done.stderr
    if banner := re.search(r"\[TensorRT v(\d+)\](?: \[b(\d+)\])?", said):
        return Version.of_number(int(banner[1]), int(banner[2]) if banner[2] else None), None
    return None, next((line.strip() for line in said.splitlines() if line.strip()), "nothing")


def _driver(root: Path) -> str | None:
    with contextlib.suppress(OSError):
        text = (root / "proc/driver/nvidia/version").read_text(errors="replace")
        if found := re.search(r"(?:Module|x86_64|aarch64)\s+(\d+(?:\.\d+)+)", text):
            return found[1]
    return None


def _container(root: Path) -> str | None:
    marks = ((".dockerenv", "docker"), ("run/.containerenv", "podman"))
    return next((name for file, name in marks if (root / file).exists()), None)
