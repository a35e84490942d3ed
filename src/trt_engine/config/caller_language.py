"""Messages and hints in the language of the caller.

They are written once, with options of the command line in backticks: `--max-batch 8`, `trt-engine build net.onnx -o out`.
The same text has `max_batch=8` and `te.build("net.onnx", out="out")` in Python, `max_batch: 8` in a plan.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Callable, Iterator

from trt_engine.config import bench, build, convert, evaluate, precision, runtime  # noqa: F401  # their settings
from trt_engine.config.settings import Config, Setting, settings

SHELL_ONLY = frozenset(
    "--help --json --quiet -q --version --verbose --all --parse-log --container-facts --graph --scan --meta".split()
)
"""Options of the command line that no function has."""
_FUNCTION_FLAGS = frozenset(
    "--overwrite --dry-run --rebuild --run --remeasure --raw --engines --verify --no-graph --trust-plan".split()
)
"""Flags of commands whose functions take them as arguments, not as settings."""
_OTHER_NAMES = {"-o": "out", "-O": "options", "-b": "backend", "--outdir": "out", "--all-outputs": "all_outputs"}
_COMMANDS_ONLY = ("cache", "completion")
_CODE = re.compile(r"`([^`\n]+)`")
_OPTION = re.compile(r"-[a-zA-Z]|--[a-z0-9][a-z0-9-]*")


def in_python(text: str) -> str:
    """The text with options as keyword arguments and commands as calls; a text that is one command is a call."""
    if text.startswith("trt-engine ") and "`" not in text:
        return _python_code(text)
    return _CODE.sub(lambda found: f"`{_python_code(found[1])}`", text)


def in_plan(text: str) -> str:
    """The text with options as keys of a plan; commands stay, because a plan is run by one."""
    return _CODE.sub(lambda found: f"`{_plan_code(found[1])}`", text)


def _python_code(code: str) -> str:
    if code in ("-v", "-vv"):
        return 'te.log_to(level="verbose")'
    words = _words(code)
    if words[:1] == ["trt-engine"] and len(words) > 1 and not words[1].startswith("-"):
        verb, rest = words[1].replace("-", "_"), words[2:]
        if rest == ["--help"]:
            return f"help(te.{verb})"
        if verb in _COMMANDS_ONLY or SHELL_ONLY & {*rest}:
            return code
        return f"te.{verb}({', '.join(_arguments(rest, _keyword))})"
    if words and _is_options(words):
        return ", ".join(_arguments(words, _keyword))
    return code


def _plan_code(code: str) -> str:
    words = _words(code)
    return ", ".join(_arguments(words, _key)) if words and _is_options(words) else code


def _words(code: str) -> list[str]:
    try:
        return shlex.split(code)
    except ValueError:
        return []


def _is_options(words: list[str]) -> bool:
    first = words[0].partition("=")[0].split("/")[0]
    return _OPTION.fullmatch(first) is not None and not SHELL_ONLY & {word.partition("=")[0] for word in words}


def _arguments(words: list[str], spell: Callable[[str, object], str]) -> list[str]:
    """The words of a command line as arguments: paths and names first."""
    known = _options_of(tuple(_config_classes(Config)))  # option -> its setting, and the value of a flag
    positional, named = list[str](), dict[str, object]()
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        option = option.split("/")[0] if option.startswith("-") else option
        if not _OPTION.fullmatch(option):
            positional.append(json.dumps(word, ensure_ascii=False))
            continue
        name, taken = _argument_name(option, known)
        if isinstance(taken, bool):
            named[name] = taken
            continue
        following = value if equals else next(rest, None)
        if name == "options" and following is not None:
            key, given, text = following.partition("=")
            options = named.setdefault("options", {})
            assert isinstance(options, dict)
            options[key] = text if given and text else ...
        elif name in named and option in known and known[option][0].multiple:
            before = named[name]
            named[name] = [*(before if isinstance(before, list) else [before]), following]
        else:
            named[name] = following
    return [*positional, *(spell(name, value) for name, value in named.items())]


def _argument_name(option: str, known: dict[str, tuple[Setting, bool | None]]) -> tuple[str, bool | None]:
    """The argument for an option, and the value that a flag gives it; None for an option with a value."""
    if option in _OTHER_NAMES:
        return _OTHER_NAMES[option], None
    if option in known:
        item, value = known[option]
        return item.name, value
    return option[2:].replace("-", "_"), True if option in _FUNCTION_FLAGS else None


@functools.lru_cache(maxsize=1)
def _options_of(kinds: tuple[type, ...]) -> dict[str, tuple[Setting, bool | None]]:
    found: dict[str, tuple[Setting, bool | None]] = {}
    for kind in kinds:
        for item in settings(kind):
            for spelled in item.flags:
                yes, _, no = spelled.partition("/")
                found.setdefault(yes, (item, True if item.is_flag else None))
                if item.is_flag:
                    found.setdefault(no or f"--no-{yes[2:]}", (item, False))
    return found


def _config_classes(kind: type) -> Iterator[type]:
    below: list[type] = kind.__subclasses__()
    for one in below:
        yield one
        yield from _config_classes(one)


def _keyword(name: str, value: object) -> str:
    return name if value is None else f"{name}={_literal(value)}"


def _key(name: str, value: object) -> str:
    return name if value is None else f"{name}: {str(value).lower() if isinstance(value, bool) else value}"


def _literal(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {_literal(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, str) and not re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", value):
        sizes = re.fullmatch(r"(\d+):(\d+):(\d+)", value)
        return f"({', '.join(sizes.groups())})" if sizes else json.dumps(value, ensure_ascii=False)
    return "..." if value is ... else str(value)
