"""Variables of scripts: the words that an option list, a loop or the path of a program stands for in a command."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_ARRAY = r"@?\((?P<array>[^()]{0,4000})\)"
_ASSIGNED = re.compile(
    r"(?:^|(?<=[;&{(]))[ \t@]*(?:(?:export|local|readonly|override|set|ARG|ENV|then|else|do|declare(?:[ \t]+-\w+)*)[ \t]+)*"
    rf"[\"\']?\$?(?:env:|script:|global:)?(?P<name>[A-Za-z_]\w*)(?:[ \t]*[:?+]{{0,2}}=[ \t]*)"
    rf"(?:{_ARRAY}|\"(?P<double>(?:[^\"\\\n]|\\.)*)\"|'(?P<single>[^'\n]*)'|(?P<bare>[^\n;&|]*))",
    re.MULTILINE,
)
_LOOP = re.compile(r"\b(?:for|foreach)[ \t]+\(?\$?(?P<name>\w+)[ \t]+in[ \t]+(?P<bare>[^;\n)]{1,400})")
_VALUE = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|[^\s\"',]+")
_USED = re.compile(
    r"\$\{?(?:env:|script:|global:)?(\w+)(?:\[[@*]\])?(?::?[-+=][^}]*)?\}?|\$\((\w+)\)|%(\w+)%|!(\w+)!|@(\w+)"
)
_PROGRAM = re.compile(r"(?:^|[/\\])(?P<tool>trtexec|polygraphy)(?:\.exe)?$", re.IGNORECASE)
_MOST = 64


@dataclass(frozen=True, slots=True)
class Part:
    """A word of a variable's value, and where it is in the text."""

    value: str
    start: int
    end: int


Variables = Mapping[str, Sequence[Part]]


def find_variables(text: str) -> Variables:
    """The words of every value that a variable of the text has somewhere, by its name."""
    found: dict[str, list[Part]] = defaultdict(list)
    for pattern in (_ASSIGNED, _LOOP):
        for match in pattern.finditer(text):
            group = next((name for name in ("array", "double", "single", "bare") if match.groupdict().get(name)), None)
            if group is None or len(found[match["name"]]) > _MOST:
                continue
            begin, end = match.span(group)
            for word in _VALUE.finditer(text, begin, end):
                if word[0].startswith("#"):
                    break
                quoted = word[0][:1] in "\"'"
                if (quoted and group == "array") or not quoted:
                    raw = word[0].strip("\"'")
                    found[match["name"]].append(Part(raw, word.start() + quoted, word.end() - quoted))
                else:
                    inner = re.finditer(r"\S+", word[0][1:-1])
                    start = word.start() + 1
                    found[match["name"]] += (Part(one[0], start + one.start(), start + one.end()) for one in inner)
    return found


def program_names(variables: Variables) -> dict[str, str]:
    """Variables that hold the path of trtexec or polygraphy alone, and which of both."""
    return {
        name: match["tool"].lower()
        for name, parts in variables.items()
        if parts and (match := _PROGRAM.search(parts[0].value)) and not any(part.value[:1] == "-" for part in parts)
    }


def expand(word: str, variables: Variables, depth: int = 2) -> Iterator[Part] | None:
    """What a word that is a variable, or has one behind its dashes, stands for; None for any other word."""
    bare = word.strip("\"'")
    name = bare.lstrip("-")
    match = _USED.fullmatch(name)
    held = next((group for group in match.groups() if group), "") if match is not None else ""
    return _expanded(bare[: len(bare) - len(name)], variables[held], variables, depth) if held in variables else None


def _expanded(dashes: str, parts: Sequence[Part], variables: Variables, depth: int) -> Iterator[Part]:
    for part in parts[:_MOST]:
        inner = expand(part.value, variables, depth - 1) if depth and not dashes else None
        if inner is not None:
            yield from inner
        else:
            yield Part(dashes + part.value, part.start, part.end)
