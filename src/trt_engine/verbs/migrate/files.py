"""The files of a migration: which are looked at, and by what."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from trt_engine.atomic_io import open_regular
from trt_engine.errors import UsageError

Kind = Literal["python", "notebook", "cpp", "shell", "cmake", "requirements", "pbtxt", "config", "markdown", "log"]

_SUFFIXES: dict[str, Kind] = {
    ".py": "python", ".pyi": "python", ".ipynb": "notebook", ".pbtxt": "pbtxt", ".cmake": "cmake", ".md": "markdown",
    ".log": "log",
    **dict.fromkeys((".cpp", ".cc", ".cxx", ".cu", ".cuh", ".h", ".hh", ".hpp", ".hxx", ".inl"), "cpp"),
    **dict.fromkeys((".sh", ".bash", ".zsh", ".mk", ".mak", ".bat", ".cmd", ".ps1", ".psm1", ".dockerfile"), "shell"),
    **dict.fromkeys((".toml", ".cfg", ".ini", ".txt", ".yml", ".yaml"), "config"),
}  # fmt: skip
_NAMES: tuple[tuple[re.Pattern[str], Kind], ...] = (
    (re.compile(r"(?:.*requirements.*|constraints.*)\.(?:txt|in)|requirements", re.IGNORECASE), "requirements"),
    (re.compile(r"pyproject\.toml|setup\.cfg|environment.*\.ya?ml|Pipfile"), "requirements"),
    (re.compile(r"CMakeLists\.txt"), "cmake"),
    (
        re.compile(
            r"(?:Dockerfile|Containerfile)(?:\..*)?|.*\.Dockerfile|GNUmakefile|[Mm]akefile(?:\..*)?|Jenkinsfile"
        ),
        "shell",
    ),
)
_FOLDERS = frozenset(
    ".git .hg .svn .tox .nox .venv venv env node_modules __pycache__ site-packages .mypy_cache .ruff_cache .pytest_cache "
    ".eggs .ipynb_checkpoints".split()
)
_NEVER = re.compile(
    r"\.(?:onnx|engine|plan|trt|pt|pth|bin|npy|npz|png|jpe?g|gif|mp4|so|a|o|zip|gz|tar|pdf|json|rst|csv|svg)$", re.I
)
_HEADERS = re.compile(r"Nv(?:Infer|Onnx|Caffe|Uff|Utils)\w*\.h")
"""TensorRT's own, copied into a tree."""
MAX_BYTES = 1 << 20
"""Larger files that mention TensorRT are named and left out: generated code, data."""


def find_files(paths: Sequence[Path], exclude: Sequence[str]) -> Iterator[tuple[Path, Kind]]:
    """The files under the paths that rules look at, each once, in order; `UsageError` for a path that does not exist.

    Left out are version control, virtual environments, caches and links; a file named itself is taken whatever its folder.
    """
    seen: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise UsageError(f"`{path}` does not exist", hint="name files or folders")
        found = [path] if not path.is_dir() else _walk(path, exclude)
        for item in found:
            kind = file_kind(item)
            if kind is not None and item not in seen:
                seen.add(item)
                yield item, kind


def _walk(root: Path, exclude: Sequence[str]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        base = Path(folder)
        folders[:] = sorted(
            name for name in folders
            if name not in _FOLDERS and not _excluded(base / name, root, exclude)
            and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))  # noqa: PTH110, PTH118 - for speed
        )  # fmt: skip
        for name in sorted(names):
            path = base / name
            if not _excluded(path, root, exclude) and not path.is_symlink():
                yield path


def _excluded(path: Path, root: Path, exclude: Sequence[str]) -> bool:
    if not exclude:
        return False
    relative = path.relative_to(root).as_posix()
    return any(fnmatch.fnmatch(path.name, one) or fnmatch.fnmatch(relative, one.rstrip("/")) for one in exclude)


def file_kind(path: Path) -> Kind | None:
    """What looks at a file, by its name; without a suffix, by its first bytes."""
    if _HEADERS.fullmatch(path.name):
        return None
    if path.parent.name == "requirements" and path.suffix in (".txt", ".in"):
        return "requirements"
    for pattern, kind in _NAMES:
        if pattern.fullmatch(path.name):
            return kind
    if not path.suffix:
        return "shell" if _is_script(path) else None
    return None if _NEVER.search(path.name) else _SUFFIXES.get(path.suffix.lower())


def _is_script(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return bool(re.match(rb"#!.*\b(?:ba|z|da)?sh\b", file.read(64)))
    except (OSError, UsageError):
        return False


def read_source(path: Path) -> str | None:
    """The text of a file, up to `MAX_BYTES`; None for a binary one. Undecodable bytes survive a write
    (`surrogateescape`)."""
    with open_regular(path) as file:
        raw = file.read(MAX_BYTES)
    return None if b"\0" in raw[:8192] else raw.decode("utf-8", "surrogateescape")
