"""What no call may do, whatever it was given: the list of `Fault`s of one call."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from fuzz.mutate import FORGED, MARKUP


@dataclass(frozen=True)
class Fault:
    """One thing a call did that it may not do."""

    kind: str
    """`exit 1`, `traceback`, `exit code`, `control character`, ..."""
    place: str
    """Where in the package, or what in short: faults of one kind and place are one finding."""
    text: str = ""
    """The last line of the traceback, the line of output."""

    @property
    def key(self) -> str:
        return f"{self.kind} | {self.place}"


@dataclass(frozen=True)
class Call:
    """How one call ended."""

    words: Sequence[str]
    code: int | str
    out: str
    err: str
    error: str | None = None
    """The traceback of an exception that came out of the call itself."""


_FRAME = re.compile(r'File "[^"]*?/(trt_engine/[^"]+|[^"/]+/[^"/]+)", line (\d+),? in (\S+)')
_NOT_ASKED_FOR = "Traceback (most recent call last)"
_BIDI = set("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029")


def faults_of(call: Call, codes: Container[int]) -> list[Fault]:
    """What this call did that it may not do; `codes` are the documented ones, 0 aside."""
    found: list[Fault] = []
    if call.error is not None:
        found.append(Fault("exception", place_of(call.error), last_line(call.error)))
    elif call.code == 1:
        found.append(Fault("exit 1", "unknown", _error_line(call)))
    elif (
        call.code == 11 and "error: out of memory" in call.err
    ):  # what a bound did not catch; a sentence of its own is one
        found.append(Fault("out of memory", call.words[0], _error_line(call)))
    elif call.code != 0 and call.code not in codes:
        found.append(Fault("exit code", f"{call.words[0]} ended with {call.code}", _error_line(call)))
    if _NOT_ASKED_FOR in call.err and not any(word.startswith("-") and "vv" in word for word in call.words):
        found.append(Fault("traceback", place_of(call.err), last_line(call.err)))
    for name, text in (("stdout", call.out), ("stderr", call.err)):
        is_page = name == "stdout" and ("html" in call.words or "--json" in call.words)
        for line in text.split("\n"):
            if (bad := _control(line, is_page)) is not None:
                found.append(
                    Fault(
                        "control character",
                        f"{call.words[0]} {name}{' document' * (name == 'stdout' and '--json' in call.words)}",
                        f"{bad} in {line!r}"[:200],
                    )
                )
                break
        if any(line.startswith(FORGED) for line in text.split("\n")) and not is_page:
            found.append(Fault("forged line", f"{call.words[0]} {name}", FORGED))
        if name == "stdout" and "html" in call.words and MARKUP in text:
            found.append(Fault("markup", call.words[0], MARKUP))
    if "--json" in _options(call) and isinstance(call.code, int) and not _is_document(call):
        found.append(Fault("no JSON document", f"{call.words[0]} exit {call.code}", call.out[:200]))
    return found


def _control(line: str, is_page: bool) -> str | None:
    for character in line:
        if character != "\t" and (
            unicodedata.category(character) in ("Cc", "Cs") or (character in _BIDI and not is_page)
        ):
            return f"U+{ord(character):04X}"
    return None


def _options(call: Call) -> Sequence[str]:
    """The words before `--`: after it they are names."""
    words = list(call.words)
    return words[: words.index("--")] if "--" in words else words


def _is_document(call: Call) -> bool:
    if any(word in ("-h", "--help", "--version") for word in call.words) or call.words[0] in ("completion", "--json"):
        return True
    try:
        json.loads(call.out, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _error_line(call: Call) -> str:
    return next((line for line in call.err.splitlines() if line.startswith("error: ")), call.err[-200:])[:300]


def place_of(trace: str) -> str:
    """The innermost frame of ours and the innermost of all: `engine.py:240 _is_ours`."""
    frames = _FRAME.findall(trace)
    ours = [frame for frame in frames if frame[0].startswith("trt_engine/")]
    if not frames:
        return "unknown"
    path, line, function = (ours or frames)[-1]
    return f"{path.removeprefix('trt_engine/')}:{line} {function}"


def last_line(trace: str) -> str:
    """The exception in words: the last line that is no part of the stack, which a verb's log sets off with `| `."""
    lines = [line.removeprefix("| ") for line in trace.strip().splitlines()]
    own = [line for line in lines if line[:1].isalpha() and not line.startswith("Traceback")]
    return (own[-1] if own else trace.strip()[-200:])[:300]
