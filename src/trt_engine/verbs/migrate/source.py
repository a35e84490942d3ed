"""A file under migration: its text, what rules found in it, and edits that mend it; which files are looked at."""

from __future__ import annotations

import bisect
import fnmatch
import functools
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Literal

from trt_engine.atomic_io import open_regular
from trt_engine.errors import UsageError
from trt_engine.verbs.migrate.rules import Rule


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the characters from `start` to `end` by `text`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Hit:
    """One place that a rule applies to; the edits mend it where that is mechanical."""

    rule: Rule
    start: int
    end: int
    edits: tuple[Edit, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    """What `why` and `replacement` of the rule name in braces."""

    @property
    def why(self) -> str:
        return _fill(self.rule.why, self.values)

    @property
    def replacement(self) -> str:
        return _fill(self.rule.replacement, self.values)


_FIELD = re.compile(r"\{(\w+)\}")
_UNKNOWN = {"model": "MODEL.onnx", "stem": "MODEL"}


def _fill(text: str, values: Mapping[str, str]) -> str:
    return _FIELD.sub(lambda found: values.get(found[1], _UNKNOWN.get(found[1], found[0])), text)


def model_values(model: str | None) -> dict[str, str]:
    """`model` and `stem` of an ONNX file, for a rule's replacement; nothing of an unknown one."""
    if not model or not model.endswith(".onnx"):
        return {}
    return {"model": model, "stem": model.removesuffix(".onnx")}


class Source:
    """The text of a file, with its line numbers and ignore comments."""

    def __init__(self, path: PurePath, text: str) -> None:
        self.path = path
        self.mark = "\ufeff" if text.startswith("\ufeff") else ""
        """The byte order mark, which is not part of the text."""
        self.text = text.removeprefix(self.mark)

    @functools.cached_property
    def line_starts(self) -> list[int]:
        return [0, *(found.end() for found in re.finditer(r"\r\n?|\n", self.text))]

    @functools.cached_property
    def _has_comments(self) -> bool:
        return "trt-engine:" in self.text

    @functools.cached_property
    def _file_comments(self) -> list[re.Match[str]]:
        return list(itertools.islice(_IGNORE_FILE.finditer(self.text), 100))

    def place(self, offset: int) -> tuple[int, int]:
        """Line and column, both from 1."""
        line = bisect.bisect_right(self.line_starts, offset)
        return line, offset - self.line_starts[line - 1] + 1

    def line(self, number: int) -> str:
        """The text of a line, from 1."""
        starts = self.line_starts
        end = starts[number] - 1 if number < len(starts) else len(self.text)
        return self.text[starts[number - 1] : end]

    def offset(self, line: int, column_bytes: int) -> int:
        """The offset of a place as `ast` gives it: a line from 1, a column in bytes of UTF-8."""
        text = self.line(line)
        if not text.isascii():
            column_bytes = len(
                text.encode("utf-8", "surrogateescape")[:column_bytes].decode("utf-8", "surrogateescape")
            )
        return self.line_starts[line - 1] + column_bytes

    def is_ignored(self, rule: str, offset: int) -> bool:
        """Whether a comment on the line, alone on the one before, or for the file names the rule."""
        if not self._has_comments:
            return False
        if any(_names_rule(found, rule) for found in self._file_comments):
            return True
        number = self.place(offset)[0]
        lines = [self.line(number)]
        while number > 1 and len(lines) < 200 and self.line(number - 1).rstrip().endswith("\\"):
            number -= 1  # the first line of a command that goes on
            lines.append(self.line(number))
        before = self.line(number - 1).strip() if number > 1 else ""
        if before.startswith(("#", "//", ";")):
            lines.append(before)
        return any(_names_rule(found, rule) for text in lines for found in _IGNORE.finditer(text))


_IGNORE = re.compile(r"(?:#|//|;)\s*trt-engine:\s*ignore(?!-file)(?:\[([\w\s,-]*)\])?")
_IGNORE_FILE = re.compile(r"(?:#|//|;)\s*trt-engine:\s*ignore-file(?:\[([\w\s,-]*)\])?")


def _names_rule(found: re.Match[str], rule: str) -> bool:
    return found[1] is None or rule in re.split(r"[\s,]+", found[1].strip())


def line_before(text: str, at: int, most: int = 4000) -> str:
    """The line up to a place, at most that many characters of its end."""
    return text[text.rfind("\n", max(0, at - most), at) + 1 : at]


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """The text with the edits made; of two that overlap the first is made, and equal ones once."""
    parts, at = [], 0
    for edit in sorted(set(edits), key=lambda edit: (edit.start, edit.end)):
        if edit.start >= at:
            parts += [text[at : edit.start], edit.text]
            at = edit.end
    return "".join((*parts, text[at:]))


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
