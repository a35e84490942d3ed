"""The rules of `migrate`: data of rules.json, selected for a step from one release to another.

The API names come from `removed_names.json`, written by tools/removed_names.py from the bindings and headers; a rule
picks its names by pattern.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

from trt_engine.errors import UsageError

Release = tuple[int, int]
NEWEST = "11.4"
OLDEST = "8.6"


@dataclass(frozen=True, slots=True)
class Rule:
    """One change of TensorRT, and where it is looked for."""

    id: str
    since: str
    kind: Literal["removed", "renamed", "meaning"]
    severity: Literal["error", "warning"]
    why: str
    replacement: str
    source: str
    names: Mapping[str, tuple[str, ...]]
    """`python` and `cpp` names of the API, `trtexec` and `polygraphy` options, `strings`, `keys` of configurations,
    arguments of Polygraphy's `create_config`, `python_writes` that only an assignment breaks."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Old name -> new one, a drop-in; `{}` stands for the old one."""
    drop: bool = False
    """Leaving it out is the whole change, where that can be done by text."""
    precision: str | None = None
    """What `trt-engine cast --to` takes in its place."""
    fix_from: str = OLDEST
    """First target release that has the new name."""

    def new_name(self, name: str) -> str | None:
        """The drop-in for an API name such as `ICudaEngine.num_bindings`: the last part of the new one."""
        for pattern, new in self.rename.items():
            if fnmatch.fnmatchcase(name, pattern):
                return new.format(name.rsplit("::" if "::" in name else ".", 1)[-1])
        return None


@dataclass(frozen=True, slots=True)
class RuleSet:
    """The rules between two releases, by what they are looked up with."""

    start: Release
    target: Release
    rules: tuple[Rule, ...]
    python: Mapping[str, Rule]
    cpp: Mapping[str, Rule]
    trtexec: Mapping[str, Rule]
    polygraphy: Mapping[str, Rule]
    strings: Mapping[str, Rule]
    keys: Mapping[str, Rule]
    create_config: Mapping[str, Rule]
    python_writes: Mapping[str, Rule]
    by_id: Mapping[str, Rule]
    owners: Mapping[str, Mapping[str, tuple[str, ...]]]
    """`python` and `cpp` -> member name -> the classes it was removed from."""

    words: Mapping[str, frozenset[str]]
    """`python` and `cpp` -> a word of each name a rule looks for: a file without any is not parsed."""

    def concern(self, language: str, text: str) -> bool:
        """Whether a rule may find something in a file of a language."""
        return not self.words[language].isdisjoint(_WORD.findall(text))

    def string(self, value: str, text: str) -> Rule | None:
        """The rule of a string in a file: `Bindings` is a key of the engine inspector where the file uses it."""
        rule = self.strings.get(value)
        inspects = rule is None or value != "Bindings" or _INSPECTS.search(text)
        return rule if inspects else None

    def can_fix(self, rule: Rule) -> bool:
        return self.target >= parse_release(rule.fix_from)


def parse_release(text: str) -> Release:
    """`(10, 16)` of `10.16` or `10.16.1`; the first known of `10`, and the newest known of `10.x`."""
    major, _, rest = str(text).strip().lower().partition(".")
    minor = rest.partition(".")[0] or ("6" if major == "8" else "0")
    if minor == "x":
        minor = {"8": "6", "9": "3", "10": "16"}.get(major, NEWEST.partition(".")[2])
    release = (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)
    if not (8, 6) <= release < (12, 0):
        raise UsageError(f"`{text}` is not a release from {OLDEST} to 11.x", hint="`--from 8.6 --to 11.4`")
    return release


_WORD = re.compile(r"[A-Za-z_]\w+")
_INSPECTS = re.compile(r"engine_?inspector|engine_?information|export_?layer_?info", re.IGNORECASE)


@functools.cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule of rules.json, its name patterns replaced by the removed names they match."""
    table, removed = _read("rules.json"), _read("removed_names.json")
    return tuple(_rule(item, table["sources"], removed) for item in table["rules"])


def _read(name: str) -> Any:
    return json.loads(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))


_PLACES = ("trtexec", "polygraphy", "strings", "keys", "create_config", "python_writes")


def _rule(item: dict[str, Any], sources: dict[str, str], removed: dict[str, dict[str, list[str]]]) -> Rule:
    names = {place: tuple(item.get(place, ())) for place in _PLACES}
    for language in ("python", "cpp"):
        known = removed[language].get(item["since"], [])
        patterns = item.get(language, ())
        names[language] = tuple(name for name in known if any(fnmatch.fnmatchcase(name, one) for one in patterns))
    return Rule(
        **{key: item[key] for key in ("id", "since", "kind", "why", "replacement")},
        severity=item.get("severity", "warning" if item["kind"] == "meaning" else "error"),
        source=sources[item["source"]],
        names=names,
        **{key: item[key] for key in ("rename", "drop", "precision", "fix_from") if key in item},
    )


@functools.cache
def rules_between(start: Release, target: Release) -> RuleSet:
    """The rules of the releases after `start` up to `target`."""
    if start > target:
        raise UsageError("`--from` is newer than `--to`", hint=f"`--from {OLDEST} --to {NEWEST}` are the defaults")
    active = [rule for rule in all_rules() if start < parse_release(rule.since) <= target]
    lookup = {
        place: {name: rule for rule in reversed(active) for name in rule.names[place]}
        for place in ("python", "cpp", *_PLACES)
    }
    owners = {language: _owners(lookup[language]) for language in ("python", "cpp")}
    by_id = {rule.id: rule for rule in active}
    also = {"python": _PYTHON_WORDS, "cpp": _CPP_WORDS}
    words = {
        language: frozenset(
            word for name in (*lookup[language], *lookup["strings"], *lookup["python_writes"], *lookup["create_config"])
            for word in _WORD.findall(name)[-1:]
        ) | also[language]
        for language in also
    }  # fmt: skip
    return RuleSet(start, target, tuple(active), by_id=by_id, owners=owners, words=words, **lookup)


_PYTHON_WORDS = frozenset(
    "trtexec polygraphy create_network add_quantize add_dequantize CreateConfig TRTEXEC TrtExec torch2trt torch_tensorrt "
    "engine tensorrt holoscan install fp16_mode int8_mode TrtGraphConverter TrtGraphConverterV2 trt_tactic_sources".split()
)
_CPP_WORDS = frozenset(
    "createNetworkV2 addQuantize addDequantize deserializeCudaEngine NvCaffeParser NvUffParser trtexec polygraphy".split()
)
"""What rules look for that are not removed names."""


def _owners(names: Mapping[str, Rule]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for owner, member in _members(names):
        if not re.match(r"I[A-Z]|Builder$|OnnxParser$|Refitter$|Runtime$", owner):
            continue  # members of enums are known by their full name alone
        found[member] = (*found.get(member, ()), owner)
    return found


def _members(names: Mapping[str, Rule]) -> Iterator[tuple[str, str]]:
    for name in names:
        owner, sign, member = name.partition("::" if "::" in name else ".")
        if sign:
            yield owner, member
