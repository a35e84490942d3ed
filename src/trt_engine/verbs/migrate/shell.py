"""Command lines of trtexec and polygraphy in any text: shell, Dockerfile, Makefile, CI configuration, strings of Python.

A command begins with the program's name in a place where a shell would run it, and ends at the end of its logical line.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from trt_engine.verbs.migrate.rules import Rule, RuleSet
from trt_engine.verbs.migrate.source import Edit, Hit, line_before, model_values
from trt_engine.verbs.migrate.variables import (
    Variables,
    expand,
    find_variables,
    grown_commands,
    program_names,
    wrapper_functions,
)


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command: what the program gets, and where it is in the text."""

    value: str
    start: int
    end: int

    @property
    def option(self) -> str:
        return self.value.partition("=")[0]


@dataclass(frozen=True, slots=True)
class Command:
    """A call of `trtexec` or `polygraphy`."""

    tool: str
    start: int
    name_end: int
    words: tuple[Word, ...]
    starts_command: bool
    """Whether another command can be put before it with `&&`."""
    editable: bool = True

    def word(self, *options: str) -> Word | None:
        return next((word for word in self.words if word.option in options), None)

    @property
    def model(self) -> Word | None:
        """The word that names the ONNX file."""
        if self.tool == "trtexec":
            return self.word("--onnx")
        return next((word for word in self.words if word.value.endswith(".onnx") and word.value[0] != "-"), None)


_TOOL = re.compile(
    r"(?<![\w$-])(?:[a-z]:)?(?:(?<![.~+/\\])(?:[\w.~+-]*[/\\]|\$\w+[/\\]|\$[({]\w+[)}][/\\]|%\w+%[/\\]|\{\w*\}[/\\])+)?(trtexec|polygraphy)(?:\.exe)?"
    r"(?=[\s\"'\\])|\$[({]?(?:TRTEXEC)(?:_\w+)?[)}]?(?=[\s\"'\\])|%TRTEXEC\w*%(?=[\s\"'])",
    re.IGNORECASE,
)
_ECHO = re.compile(
    r"(?:^\s*|[;&|(\"']\s*)(?:RUN\s+|-\s+|\w+:\s+)*[@-]*(?:echo|printf|print|logger?|cat|e?grep|rg|sed|awk|which|man|type|ls|[Ww]rite-\w+)\b"
)
_COMMAND_START = re.compile(
    r"(?:^|[;&({`]|\b(?:then|do|else|if|while)\b)\s*"
    r"(?:(?:RUN(?:\s+--\w+=\S+)*|CMD|ENTRYPOINT|-|[\w-]+:|-\s+[\w-]+:)\s+)?[@-]*(?:\w+=\S*\s+)*$"
)
_WRAPPED = re.compile(r"(?:-l?c|^\s*-|[\w-]+:)\s*$")
_MAX_LINE, _MAX_WORDS = 2000, 300
"""Characters of a line, read from its end, and words of a command, from its start: a file may be one line."""
_BLANK = re.compile(r"(?:[ \t\v]|[\\^`]\r?\n)+")
_WORD = re.compile(
    r"(?:\\[^\n]|'[^']*'|\"(?:\\.|[^\"\\])*\"|\$?\{\{[^}\n]*\}\}|\$\([^()\n]*\)|\$\{[^}\n]*\}|\d?>&\d|[^\s\\'\";|&()`#]|(?<!\s)#)+"
)


_USES_VARIABLES = re.compile(r"[$%!@]\W{0,3}\w|\$@|\{\{|\{\w")


def is_command(text: str) -> bool:
    """Whether the text is a command line of trtexec or polygraphy, and not prose that names one."""
    return any(_TOOL.match(part.strip(" \t\r\n\"'")) for part in re.split(r"&&|[;\n]", text))


def is_said(line: str) -> bool:
    """Whether what follows the beginning of a line is a comment or printed, and does not run."""
    line = line[-_MAX_LINE:]
    comment = (
        re.match(r"\s*(?:#|//|::|REM\s|rem\s|-?\s*(?:name|description|title|help|summary|displayName):)", line)
        or " # " in line
    )
    shown = re.search(r"\b(?:COMMENT|message\s*\(\s*\w*)\s*\"[^\"]*$", line)
    return (
        bool(comment or shown)
        or re.search(r"-D\w+=$", line) is not None
        or _ECHO.search(line, max(0, *map(line.rfind, ";&|"))) is not None
    )


def find_commands(text: str, held: Variables | None = None) -> Iterator[Command]:
    """The calls of trtexec and polygraphy in a text, in order; `held` are variables that are assigned elsewhere."""
    at = 0
    variables = held if held is not None else find_variables(text) if _USES_VARIABLES.search(text) else {}
    programs = dict(itertools.islice(program_names(variables).items(), _MAX_WORDS))
    tool = _TOOL
    wrappers = wrapper_functions(text) if "()" in text or "alias " in text else {}
    wrappers = dict(itertools.islice(wrappers.items(), _MAX_WORDS))
    if programs:
        names = "|".join(map(re.escape, programs))
        program = rf"\$[({{]?(?P<held>{names})[)}}]?(?=[\s\"'])|%(?P<percent>{names})%(?=[\s\"'])"
        tool = re.compile(f"{tool.pattern}|{program}", re.IGNORECASE)
    if wrappers:
        names = "|".join(map(re.escape, wrappers))
        called = rf"(?:^|(?<=[\n;&|({{\t ]))(?P<wrapper>{names})(?=[ \t]+[^\s(=])"
        tool = re.compile(f"{tool.pattern}|{called}", re.IGNORECASE)
    while (found := tool.search(text, at)) is not None:
        at = found.end()
        line = line_before(text, found.start(), _MAX_LINE)
        if is_said(line):
            continue
        quote = line[-1:] if line[-1:] in ("'", '"') and line.count(line[-1]) % 2 else ""
        lead = line[:-1] if quote else line
        after = text[found.end() : found.end() + 1]
        wrapped = bool(quote) and after != quote
        first = found.end() + (bool(quote) and not wrapped)
        opened = lead.rfind(after) if not quote and after in ("'", '"') and lead.count(after) % 2 else -1
        if opened >= 0:  # "C:\\Program Files\\...": the quoted path has blanks
            lead, first = lead[:opened], found.end() + 1
        inside = max((mark for mark in "\"'" if lead.count(mark) % 2 and opened < 0), key=lead.rfind, default="")
        words = tuple(itertools.islice(_words(text, first, quote if wrapped else inside), _MAX_WORDS))
        if words:
            at = words[-1].end
        plain = words
        words = tuple(itertools.islice(_expanded(words, variables), _MAX_WORDS))
        if not any(word.value.startswith("-") for word in words):
            continue
        takes_none = (
            found[1] is not None and found[1].lower() == "trtexec" and not lead.rstrip(" =").endswith("--entrypoint")
        )
        if takes_none and re.match(r"(?!trtexec)[A-Za-z][a-z]*$", plain[0].value):
            continue  # prose: trtexec has no arguments beside its options
        starts = bool((_WRAPPED if wrapped else _COMMAND_START).search(lead)) and not _continues(text, found.start())
        starts = starts and opened < 0 and not re.search(r"(?<!&)&\s*$", lead)
        start = found.start() - (bool(quote) and not wrapped)
        editable = words == plain and "\v" not in text[start : words[-1].end]
        named = found.groupdict()
        name = found[1] or {**programs, **wrappers}.get(
            named.get("held") or named.get("percent") or named.get("wrapper") or "", "trtexec"
        )
        yield Command(name.lower(), start, found.end(), words, starts and editable, editable)


def _expanded(words: Sequence[Word], variables: Variables) -> Iterator[Word]:
    """The words, with what variables and PowerShell's lists of arguments stand for."""
    for word in words:
        if (parts := expand(word.value, variables, place=(word.start, word.end))) is not None:
            yield from (Word(one, part.start, part.end) for part in parts for one in re.split(r" (?=--)", part.value))
        elif " --" in word.value:  # all arguments in one text, as PowerShell's -ArgumentList takes them
            yield from (Word(part, word.start, word.end) for part in word.value.split())
        elif len(items := [item.strip("\"'") for item in _LIST_ITEM.findall(word.value)]) > 1:
            yield from (Word(item, word.start, word.end) for item in items)
        else:
            yield word


_LIST_ITEM = re.compile(r"(?:^|(?<=,))[\"']?(--?\w[^,\"']*)[\"']?(?=,-|$)")


def _continues(text: str, start: int) -> bool:
    """Whether the line continues one before it, which may be another command."""
    before = text[max(0, start - 2 * _MAX_LINE) : text.rfind("\n", 0, start) + 1].rstrip("\n")
    return before.endswith("\\") and not re.search(r"(?:&&|;|\|)\s*\\$|RUN\s*\\$", before)


def _words(text: str, at: int, quote: str) -> Iterator[Word]:
    end = text.find(quote, at) if quote else len(text)
    while at < (end if end >= 0 else len(text)):
        if blank := _BLANK.match(text, at):
            at = blank.end()
        found = _WORD.match(text, at, end if end >= 0 else len(text))
        if found is None:
            return
        yield Word(_unquote(found[0]), at, found.end())
        at = found.end()


def _unquote(raw: str) -> str:
    if "$(" in raw or "${" in raw:
        return raw.strip("\"'")
    try:
        return "".join(shlex.split(raw)) or raw
    except ValueError:
        return raw


def command_of_words(words: Sequence[str], start: int, end: int) -> Command | None:
    """A command given as a list of strings; nothing in it is edited."""
    for at, word in enumerate(words):
        name = re.split(r"[\\/]", word)[-1].lower().removesuffix(".exe")
        if name in ("trtexec", "polygraphy"):
            found = tuple(Word(text, start, end) for text in words[at + 1 :])
            return Command(name, start, end, found, starts_command=False, editable=False)
    return None


_FOLDED = re.compile(r"(?<=[:-] )>[-+1-9]*[ \t]*\r?\n([ \t]+)[^\n]*(?:\n\1[^\n]*)+")
_NEXT_LINE = re.compile(r"(?<![\\\r])\r?\n(?=[ \t]+\S)")
_NEXT_OPTION = re.compile(r"(?<![\\\r])\r?\n(?=[ \t]+[\"']?--?\w)")
_ITEMS = re.compile(
    r"^[ \t]*-[ \t]+[\"']?(?:[\w.-]*/)*(?:trtexec|polygraphy)[\"']?[ \t]*(?:\r?\n[ \t]*-[ \t]+\S[^\n]*)+",
    re.MULTILINE | re.IGNORECASE,
)
"""A list whose first item is the program alone: its options are the items after it."""
_NEXT_ITEM = re.compile(r"\r?\n[ \t]*-[ \t]+(?=[\"']?\S)")


def join_yaml_lines(text: str) -> str:
    """YAML with spaces for the line ends within folded scalars and before options; no offset changes.

    A line that begins with an option continues a scalar of any style: as a command of its own it could not run.
    """

    def join(found: re.Match[str]) -> str:
        first = found[0].index("\n") + 1
        return found[0][:first] + _NEXT_LINE.sub(_blanks, found[0][first:])

    text = _NEXT_OPTION.sub(_blanks, _FOLDED.sub(join, text))
    return _ITEMS.sub(lambda found: _NEXT_ITEM.sub(lambda item: "\v" * len(item[0]), found[0]), text)


_FENCE = re.compile(r"^[ \t]*(?P<mark>```+|~~~+)[ \t]*\{?\.?(?P<language>[\w -]*)\}?[ \t]*\r?$", re.MULTILINE)
_COMMAND_BLOCKS = re.compile(
    r"(?:(?:ba|z)?sh|shell|console|(?:shell|bash)[ -]?session|terminal|cmd|bat(?:ch)?|powershell|docker(?:file)?|ya?ml)?",
    re.IGNORECASE,
)
_PROMPT = re.compile(r"^[ \t]*(?:[\w.@:~/()\[\] -]{0,60}[$#%]|>|PS [^>\n]{0,60}>)[ \t]+(?=\S)", re.MULTILINE)


def fenced_commands(text: str) -> str:
    """Markdown with blanks for all but the commands of its code blocks; in one with prompts, other lines are output."""
    kept = ["\n" if letter == "\n" else " " for letter in text]
    fences = iter(_FENCE.finditer(text))
    for opening in fences:
        closing = next((one for one in fences if one["mark"] == opening["mark"] and not one["language"].strip()), None)
        end = closing.start() if closing is not None else len(text)
        if _COMMAND_BLOCKS.fullmatch(opening["language"].strip()) is None:
            continue
        body, at, goes_on = text[opening.end() : end], opening.end(), False
        prompted = re.search(r"^[^\n#]{0,60}[$>][ \t]+\S", body, re.MULTILINE) and _PROMPT.search(body)
        for line in body.splitlines(keepends=True):
            prompt = _PROMPT.match(line) if prompted and not goes_on else None
            if prompt is not None or goes_on or not prompted:
                skip = prompt.end() if prompt is not None else 0
                kept[at + skip : at + len(line)] = line[skip:]
                goes_on = line.rstrip().endswith(("\\", "^", "`"))
            at += len(line)
    return "".join(kept)


def logged_commands(text: str) -> str:
    """A log of trtexec with blanks for all but the command lines that it states."""
    stated = [found.span(1) for found in re.finditer(r"^&&&& RUNNING [^\n#]*# ([^\n]*)", text, re.MULTILINE)]
    kept = re.sub(r"[^\n]", " ", text[: stated[-1][1]] if stated else "")
    at, parts = 0, list[str]()
    for start, end in stated:
        parts += (kept[at:start], text[start:end])
        at = end
    return "".join((*parts, kept[at:]))


def join_options(text: str) -> str:
    """CMake with spaces for the line ends before options; no offset changes."""
    return re.sub(r"\r?\n(?=[ \t]+(?:[\"']?--?\w|(?:convert|run)\b))", _blanks, text)


def _blanks(found: re.Match[str]) -> str:
    return " " * len(found[0])


_SPLIT_FORM = re.compile(
    r"^(?P<indent>[ \t]*)(?:-[ \t]+)?(?:command|entrypoint):(?P<program>[^\n]*(?:\n(?P=indent)[ \t]*-[ \t][^\n]*){0,100})\n"
    r"(?P=indent)[ \t]*(?:args|command):(?P<words>[^\n]*(?:\n(?P=indent)[ \t]*(?:-|[\"'\]])[^\n]*)*)",
    re.MULTILINE,
)
"""A container's program, and its arguments under another key."""
_ENTRY_POINT = re.compile(
    r"^ENTRYPOINT[ \t]+(?P<program>[^\n]*)\n(?:[^\n]*\n){0,20}?CMD[ \t]+(?P<words>\[[^\n]*)", re.MULTILINE
)
_EXEC_FORM = re.compile(
    r"^[ \t]*(?:CMD|ENTRYPOINT|RUN|command:|entrypoint:|args:)\s*(\[(?=.*(?:trtexec|polygraphy)).*\])", re.MULTILINE
)


def scan_text(text: str, rules: RuleSet) -> Iterator[Hit]:
    """What the rules find in the command lines of a text."""
    taken = list[tuple[int, int]]()
    variables = find_variables(text) if _USES_VARIABLES.search(text) else {}
    for split in itertools.chain(_SPLIT_FORM.finditer(text), _ENTRY_POINT.finditer(text)):
        tool = re.search(r"\b(trtexec|polygraphy)\b", split["program"])
        if tool is not None:
            begin = split.start("words")
            words = tuple(
                Word(one[1], begin + one.start(1), begin + one.end(1))
                for one in re.finditer(r"[\"'\s,\[](--?\w[^\s\"',\]]*)", split["words"])
            )
            start = split.start("program") + tool.start()
            yield from scan_command(Command(tool[1], start, start + len(tool[1]), words, False, editable=False), rules)
    for found in _EXEC_FORM.finditer(text):
        taken.append(found.span(1))
        try:
            texts = [str(word) for word in json.loads(found[1])]
        except ValueError:
            continue
        if (command := command_of_words(texts, *found.span(1))) is not None:
            yield from scan_command(command, rules)
        for line in (word for word in texts if re.search(r"\s", word.strip()) and is_command(word)):
            for inner in find_commands(line, variables):
                moved = tuple(Word(word.value, *found.span(1)) for word in inner.words)
                yield from scan_command(Command(inner.tool, *found.span(1), moved, False, editable=False), rules)
    for tool_name, parts in grown_commands(variables):
        words = tuple(
            itertools.islice(_expanded([Word(one.value, one.start, one.end) for one in parts], variables), 300)
        )
        grown = Command(tool_name, words[0].start, words[0].end, words[1:], starts_command=False, editable=False)
        if not is_said(line_before(text, grown.start)):
            yield from (hit for hit in scan_command(grown, rules) if hit.rule.id != "trtexec-defaults")
    for command in find_commands(text, variables):
        at = bisect.bisect_right(taken, (command.start, len(text))) - 1
        if at < 0 or command.start >= taken[at][1]:
            yield from scan_command(command, rules, text)


def scan_command(command: Command, rules: RuleSet, text: str = "") -> Iterator[Hit]:
    """What the rules find in one command."""
    if command.tool == "trtexec":
        yield from _scan_trtexec(command, rules, text)
        return
    convert = any(word.value == "convert" for word in command.words[:1])
    for word in command.words:
        if (rule := rules.polygraphy.get(word.option)) is not None:
            yield _option_hit(command, word, rule, text, rules, may_cast=convert)


_SWITCHES = {
    "--useCudaGraph": "--noCudaGraph",
    "--useSpinWait": "--noSpinWait",
    "--noDataTransfers": "--includeDataTransfers",
}
_MEASURES = (
    "--iterations --duration --warmUp --avgRuns --percentile --infStreams --streams --threads --exportTimes --idleTime "
    "--useCudaGraph --useSpinWait --noDataTransfers"
).split()
_NOT_MEASURED = (
    "--skipInference",
    "--buildOnly",
    "--getPlanVersionOnly",
    "--help",
    "-h",
    "--timeDeserialize",
    "--timeRefit",
)
_QUANTIZED = ("--int8", "--fp8", "--int4", "--best")


def _scan_trtexec(command: Command, rules: RuleSet, text: str) -> Iterator[Hit]:
    missing = _missing_switches(command, rules)
    for word in command.words:
        if (rule := rules.trtexec.get(word.option)) is not None:
            keep = word.option in _SWITCHES and not missing and command.word(*_SWITCHES.values()) is None
            yield _option_hit(command, word, rule, text, rules, keep=keep)
        yield from _scan_value(command, word, rules, text)
    if missing:
        new = " ".join(missing)
        at = max(word.end for word in command.words if word.value.startswith("-"))
        edits = (Edit(at, at, f" {new}"),) if command.editable else ()
        yield Hit(rules.by_id["trtexec-defaults"], command.start, command.name_end, edits, {"options": new})


def _missing_switches(command: Command, rules: RuleSet) -> list[str]:
    """The options that make 11.x measure what the command measured before; nothing where it is decided, or not measured."""
    if "trtexec-defaults" not in rules.by_id or command.word(*_NOT_MEASURED, *_SWITCHES.values()):
        return []
    if command.word("--saveEngine") and not command.word(*_MEASURES):
        return []
    if not command.word("--onnx", "--loadEngine", "--uff", "--model", "--deploy"):
        return []
    return [new for old, new in _SWITCHES.items() if command.word(old) is None]


def _option_hit(
    command: Command, word: Word, rule: Rule, text: str, rules: RuleSet, *, may_cast: bool = True, keep: bool = False
) -> Hit:
    model = command.model
    values = model_values(model.value.removeprefix("--onnx=") if model else None)
    edits: Sequence[Edit] = ()
    if command.editable and not keep:
        if (new := rule.rename.get(word.option)) is not None:
            value = word.value.partition("=")[2]
            value = {"default": "layer_names_only", "verbose": "detailed"}.get(value, value)
            edits = (Edit(word.start, word.end, f"{new}={value}" if value else new),)
        elif (
            rule.id == "workspace-size" and word.value.partition("=")[2].isdigit() and not command.word("--memPoolSize")
        ):
            edits = (Edit(word.start, word.end, f"--memPoolSize=workspace:{word.value.partition('=')[2]}"),)
        elif rule.drop:
            edits = (_without(command, word, text),)
        elif rule.precision is not None and may_cast and not (rule.since == "11.0" and command.word(*_QUANTIZED)):
            edits = _cast_before(command, word, rule.precision, text)
    return Hit(rule, word.start, word.end, tuple(edits), values)


def _without(command: Command, word: Word, text: str) -> Edit:
    """Removes a word with the blanks before it, or those after it where a first word would leave a broken line."""
    before = max((one.end for one in command.words if one.end <= word.start), default=command.name_end)
    gap = text[before : word.start]
    return Edit(before if not gap.strip(" \t\\\r\n") else word.start, word.end, "")


def _cast_before(command: Command, word: Word, precision: str, text: str) -> Sequence[Edit]:
    """The edits that put `trt-engine cast` before the command, and its model in place of the old one."""
    model = command.model
    if (
        model is None
        or not command.starts_command
        or sum(one.option in ("--fp16", "--bf16") for one in command.words) > 1
    ):
        return ()
    raw = text[model.start : model.end]
    prefix = "--onnx=" if command.tool == "trtexec" else ""
    if not raw.startswith(prefix) or not raw.endswith(".onnx") or re.search(r"[\"'\s\\]", raw):
        return ()  # the extension is not at the end: quoted, or held by a variable
    path = raw.removeprefix(prefix)
    new = f"{path.removesuffix('.onnx')}.{precision}.onnx"
    lead = text.rfind("\n", 0, command.start) + 1
    start = command.start - len(re.search(r"(?:(?<![^\s;&|({`\"'])\w+=\S*\s+)*$", text[lead : command.start])[0])  # type: ignore[index]
    call = f"trt-engine cast {path} --to {precision} -o {new} && "
    return (Edit(start, start, call), Edit(model.start, model.end, f"{prefix}{new}"), _without(command, word, text))


def _scan_value(command: Command, word: Word, rules: RuleSet, text: str) -> Iterator[Hit]:
    """Values of options that have another meaning, or that trtexec does not know any more."""
    option, _, value = word.value.partition("=")
    rule = rules.by_id.get("trtexec-io-formats")
    if rule is not None and option in ("--inputIOFormats", "--outputIOFormats") and ":" in value:
        plain = all(part.startswith("fp32:") for part in value.split(","))
        new = ",".join(part.partition(":")[2] for part in value.split(","))
        yield _value_hit(command, word, rule, f"{option}={new}" if plain else None, value, text)
    rule = rules.by_id.get("trtexec-value")
    gone = {"--tacticSources": _GONE_SOURCES, "--preview": _GONE_PREVIEWS}.get(option, ())
    items = value.split(",")
    if rule is not None and (left := [item for item in items if item.lstrip("+-").lower() not in gone]) != items:
        yield _value_hit(command, word, rule, f"{option}={','.join(left)}" if left else "", value, text)
    rule = rules.by_id.get("trtexec-pool-unit")
    if rule is not None and option == "--memPoolSize" and re.search(r"\d[KMG]i?B\b", value, re.IGNORECASE):
        new = re.sub(r"(?<=\d)Mi?B\b", "", value, flags=re.IGNORECASE)
        fixed = None if re.search(r"\d[KG]i?B\b", new, re.IGNORECASE) else f"{option}={new}"
        yield _value_hit(command, word, rule, fixed, value, text)


_GONE_SOURCES = ("cublas", "cublas_lt", "cudnn")
_GONE_PREVIEWS = (
    "profilesharing0806",
    "multideviceruntime",
    "fasterdynamicshapes0805",
    "disableexternaltacticsourcesforcore0805",
)


def _value_hit(command: Command, word: Word, rule: Rule, new: str | None, value: str, text: str) -> Hit:
    edits: Iterable[Edit] = ()
    if command.editable and new is not None and text[word.start : word.end] == word.value:
        edits = (Edit(word.start, word.end, new) if new else _without(command, word, text),)
    return Hit(rule, word.start, word.end, tuple(edits), {"value": f"`{value}`"})
