"""Variables of scripts: the words that an option list, a loop or the path of a program stands for in a command."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_STRING = r"(?:\"[^\"\n]*\"|'[^'\n]*')"
_ARRAY = r"@?\((?P<array>[^()]{0,4000})\)"
_ASSIGNED = re.compile(
    r"(?:^|(?<=[;&{()]))[ \t@]*(?:(?:export|local|readonly|override|set|ARG|ENV|then|else|do|declare(?:[ \t]+-\w+)*)[ \t]+)*"
    rf"[\"\']?\$?(?:env:|script:|global:)?(?P<name>[A-Za-z_]\w*)(?:[ \t]*[:?+]{{0,2}}=[ \t]*)"
    rf"(?:{_ARRAY}|(?P<list>{_STRING}(?:[ \t]*,[ \t]*{_STRING})+)"
    r"|\$\((?P<substituted>[^\n]{0,400})\)[ \t]*$"
    r"|\"(?P<double>(?:[^\"\\\n]|\\.|\n[ \t]+-)*)\"|'(?P<single>(?:[^'\n]|\n[ \t]+-)*)'|(?P<bare>[^\n;&|]*))",
    re.MULTILINE,
)
_LOOP = re.compile(
    r"\b(?:for|foreach)[ \t]+\(?[$%]{0,2}(?P<name>\w+)[ \t]+in[ \t]+\(?(?P<bare>[^;\n)]{1,400})", re.IGNORECASE
)
_SET = re.compile(r"^[ \t]*set[ \t]+--[ \t]+(?P<bare>[^\n;&|]*)", re.MULTILINE)
_ALIAS = re.compile(r"^[ \t]*alias[ \t]+(?P<name>[\w-]+)=[\"']?[^\s\"']*\b(?P<tool>trtexec|polygraphy)\b", re.MULTILINE)
_DEFAULT = re.compile(r"\$\{\w+:?[-+=](?P<default>[^{}]*)\}")
"""A value that is used where a variable has none."""
_KEY = re.compile(
    r"(?:^[ \t]*(?:-[ \t]+)?|[{,][ \t]*)(?P<name>[A-Za-z_]\w*):[ \t]+"
    r"(?:\[(?P<array>[^\]\n]{0,2000})\]|[\"']?(?P<bare>-[^\n\"'}]{0,2000}))",
    re.MULTILINE,
)
"""Environments and matrices of YAML."""
_ENV_ITEM = re.compile(
    r"^[ \t]*-[ \t]+name:[ \t]+[\"']?(?P<name>[A-Za-z_]\w*)[\"']?[ \t]*\n[ \t]*value:[ \t]+[\"']?(?P<bare>-[^\n\"']*)",
    re.MULTILINE,
)
"""Environments of containers in Kubernetes."""
_INPUT = re.compile(
    r"^(?P<indent>[ \t]+)(?P<name>[A-Za-z_][\w-]*):[ \t]*\n(?=(?P<inner>(?P=indent)[ \t]+))"
    r"(?:(?P=inner)(?!default:)[^\n]*\n){0,8}(?P=inner)default:[ \t]+[\"']?(?P<bare>[^\n\"']*)",
    re.MULTILINE,
)
"""Inputs of actions and workflows."""
_KEY_LIST = re.compile(
    r"^(?P<indent>[ \t]*)(?P<name>[A-Za-z_]\w*):[ \t]*\n(?P<array>(?:(?P=indent)[ \t]*-[ \t]+[\"']?-[^\n]*(?:\n|$)){1,40})",
    re.MULTILINE,
)
"""A list of options over several lines of YAML."""
_PLAIN = re.compile(
    r"^(?:ENV[ \t]+(?P<name>[A-Za-z_]\w*)[ \t]+(?P<bare>[^=\n]*-[^\n]*)"
    r"|[\w.%/-]+:[ \t]+(?P<of_target>[A-Za-z_]\w*)[ \t]*[:?+]?=[ \t]*(?P<list>[^\n]*))$",
    re.MULTILINE,
)
"""Docker's old form, and a variable of one target of make."""
_CMAKE = re.compile(
    r"^[ \t]*(?:set|list|find_program)[ \t]*\(\s*(?:APPEND\s+|PREPEND\s+)?"
    r"(?P<name>[A-Za-z_]\w*)\s+(?P<array>[^()]{1,2000})\)",
    re.MULTILINE | re.IGNORECASE,
)
_FUNCTION = re.compile(
    r"^[ \t]*(?:function[ \t]+)?(?P<name>[A-Za-z_][\w-]*)[ \t]*\(\)[ \t]*\{"
    r"(?P<body>[^\n]*\}|[^\n]*(?:\n(?!\})[^\n]*){0,200}\n\})",
    re.MULTILINE,
)
_VALUE = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|[^\s\"',]+")
_USED = re.compile(
    r"\$\{?(?:env:|script:|global:)?(\w+)(?:\[[^\]\s]*\])?(?::?[-+=][^}]*)?\}?|\$\((\w+)\)|%(\w+)%|!(\w+)!|@(\w+)|%%(\w)|\$([@*])"
    r"|\$?\{\{-?[ \t]*(?:(?:matrix|env|vars|inputs|parameters|Values)?\.)*(\w+)[ \t]*-?\}\}|\{(\w+)\}"
)
_PROGRAM = re.compile(r"(?:^|[/\\ ])(?P<tool>trtexec|polygraphy)(?:\.exe)?[)`]?$", re.IGNORECASE)
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
    for pattern in (_ASSIGNED, _LOOP, _KEY, _KEY_LIST, _ENV_ITEM, _INPUT, _SET, _PLAIN, _CMAKE):
        for match in pattern.finditer(text):
            groups = {"name": "@"} | {key: text for key, text in match.groupdict().items() if text}
            groups["name"] = groups.get("of_target", groups["name"])
            group = next(
                (name for name in ("array", "list", "substituted", "double", "single", "bare") if groups.get(name)),
                None,
            )
            if group is None or len(found[str(groups["name"])]) > _MOST:
                continue
            begin, end = match.span(group)
            comment = -1
            for word in _VALUE.finditer(text, begin, end):
                if word[0].startswith("#"):
                    comment = text.find("\n", word.start())
                if comment >= 0 and (word.start() < comment or group != "array"):
                    continue
                quoted = word[0][:1] in "\"'"
                if (quoted and group in ("array", "list")) or not quoted:
                    raw = word[0].strip("\"'")
                    raw = held["default"] if (held := _DEFAULT.fullmatch(raw)) is not None else raw
                    found[str(groups["name"])].append(Part(raw, word.start() + quoted, word.end() - quoted))
                else:
                    inner = re.finditer(r"\S+", word[0][1:-1])
                    start = word.start() + 1
                    found[str(groups["name"])] += (
                        Part(one[0], start + one.start(), start + one.end()) for one in inner
                    )
    return found


def program_names(variables: Variables) -> dict[str, str]:
    """Variables that hold the path of trtexec or polygraphy alone, and which of both."""
    return {
        name: match["tool"].lower()
        for name, parts in variables.items()
        if (match := next((one for part in parts if (one := _PROGRAM.search(part.value))), None))
        and not any(part.value[:1] == "-" for part in parts)
    }


def grown_commands(variables: Variables) -> Iterator[tuple[str, Sequence[Part]]]:
    """Variables that hold a whole command of trtexec or polygraphy: which of both, and all words that it ever gets."""
    for parts in variables.values():
        at = next((at for at, part in enumerate(parts[:_MOST]) if _PROGRAM.search(part.value)), None)
        if at is not None and any(part.value[:1] in "-$" for part in parts[at + 1 :]):
            yield _PROGRAM.search(parts[at].value)["tool"].lower(), parts[at:]  # type: ignore[index]


def wrapper_functions(text: str) -> dict[str, str]:
    """Aliases, and shell functions that pass their arguments on to trtexec or polygraphy, and which of both."""
    programs = program_names(find_variables(text))
    return {match["name"]: match["tool"].lower() for match in _ALIAS.finditer(text)} | {
        match["name"]: tool[1].lower()
        for match in _FUNCTION.finditer(text)
        if re.search(r"\$[@*]|\$\{[@*]", match["body"]) and (tool := _named_tool(match["body"], programs))
    }


def _named_tool(body: str, programs: Mapping[str, str]) -> re.Match[str] | None:
    """The program in the body, itself or in a variable."""
    if found := re.search(r"\b(trtexec|polygraphy)\b", body, re.IGNORECASE):
        return found
    held = next((tool for name, tool in programs.items() if re.search(rf"\$[({{]?{name}\b", body)), "")
    return re.match("(.+)", held)


def expand(word: str, variables: Variables, depth: int = 2, place: tuple[int, int] = (0, 0)) -> Iterator[Part] | None:
    """What a word that is a variable, or has one behind its dashes, stands for; None for any other word. `place` is where it
    is: what a default has there."""
    bare = word.strip("\"'")
    name = bare.lstrip("-")
    match = _USED.fullmatch(name)
    held = next((group for group in match.groups() if group), "") if match is not None else ""
    if (default := _DEFAULT.fullmatch(name)) is not None and default["default"].startswith("-"):
        start, end = place
        words = (Part(text, start, end) for text in default["default"].split())
        return iter([*words, *_expanded("", variables.get(held, ()), variables, depth)])
    return _expanded(bare[: len(bare) - len(name)], variables[held], variables, depth) if held in variables else None


def _expanded(dashes: str, parts: Sequence[Part], variables: Variables, depth: int) -> Iterator[Part]:
    for part in parts[:_MOST]:
        inner = expand(part.value, variables, depth - 1, (part.start, part.end)) if depth and not dashes else None
        if inner is not None:
            yield from inner
        else:
            yield Part(dashes + part.value, part.start, part.end)
