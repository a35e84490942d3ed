"""A file under migration: its text, what rules found in it, and edits that mend it."""

from __future__ import annotations

import bisect
import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

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
