"""Escapes for characters that control a terminal, reorder text or are drawn as nothing, in text and in JSON."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

_NOT_PLAIN, _NOT_ASCII = re.compile("[^ -~]"), re.compile("[^\x00-~]")
_HIDING = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]")
"""Letters and selectors that are drawn as nothing."""


def is_hidden(sign: str) -> bool:
    """Whether a character acts on a terminal, reorders or hides text, or is none: by its Unicode category (controls, format
    characters, surrogates, private, unassigned, separators of lines) or as one that is drawn as nothing."""
    return unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") or bool(_HIDING.match(sign))


def escape_control(text: str, keep: str = "") -> str:
    """The text with what acts on a terminal or hides as escapes, but for the characters of `keep`.

    A name in a file may hold anything: a newline would begin a line, an escape sequence act on the terminal.
    """

    def escape(found: re.Match[str]) -> str:
        sign = found[0]
        return sign.encode("unicode_escape").decode() if sign not in keep and is_hidden(sign) else sign

    return _NOT_PLAIN.sub(escape, text)


def escape_json(text: str) -> str:
    """A JSON document in which what acts on a terminal or hides is `\\u....`; its values stay the same."""

    def escape(found: re.Match[str]) -> str:
        units = found[0].encode("utf-16-be", "surrogatepass").hex() if is_hidden(found[0]) else ""
        return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)) or found[0]

    return _NOT_ASCII.sub(escape, text)


def join_lines(lines: Iterable[str]) -> str:
    """The lines as one text; a newline inside of one is an escape."""
    return "\n".join(map(escape_control, lines))


def escape_lines(text: str, indent: str) -> str:
    """The text with every line after the first behind `indent`, so that it reads as a continuation."""
    return escape_control(text, keep="\n\t").replace("\n", f"\n{indent}")
