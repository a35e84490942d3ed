"""Mutations of bytes, text, JSON and YAML: each takes a `random.Random`, so that a seed gives the same input again."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from typing import Any

__all__ = ["FORGED", "MARKUP", "hostile_text", "mutate_bytes", "mutate_json", "mutate_text", "mutate_tree", "number"]

FORGED = "FORGED_LINE"
"""Follows a newline inside a name: a line of the output that begins with it was forged by the name."""
MARKUP = "<script>FUZZ</script>"
"""Must never stand unescaped in a page."""

_TEXTS = (
    "", " ", "a", "images", "0", "-1", "None", "nan", "x" * 5000, f"x\n{FORGED}: 1", f"x\r\n{FORGED}: 2",
    "\x1b]0;t\x07\x1b[31m",
    "\x00", "\x9b31m", "\u202egnp.exe", "\ud800", "\udcff", "é\u0301", "模型", "../../outside/secret.bin", "/etc/hostname",
    "a/b", "..", ".", "-o", "--help", "%s%n", "{0}", "$(touch x)", "`x`", MARKUP, "](javascript:alert(1))", "|*_`", "'\"",
    "float32", "int64", "cpu", "cuda:0", "1x3x8x8", "1e999", "1" * 400, "2026-13-45T99:99:99", "sha256:" + "0" * 64,
    "\ufeff",
    "a" * 300 + ".json", "\t", "\x7f", "\u2028x", "\u0085", "::", "@x", "#", "\\", "NaN", "Infinity", "true", "[]", "{}",
)  # fmt: skip
_WHOLE = (
    0, 1, -1, 2, 3, 7, 8, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63,
    -(2**63), 2**64, 10**18, 10**30, 10**400, -(10**400),
)  # fmt: skip
_REAL = (0.0, -0.0, 0.5, -1.5, 1e-320, 1e-9, 1e18, 1e300, 1.7e308, float("inf"), float("-inf"), float("nan"))
_DEEP = "@deep@"
"""Stands for brackets nested far deeper than any reader recurses; put in when the tree is written."""


def number(rng: random.Random) -> int | float:
    """A number that readers may not have expected."""
    return rng.choice(_WHOLE) if rng.random() < 0.7 else rng.choice(_REAL)


def hostile_text(rng: random.Random) -> str:
    """A text that readers and terminals may not have expected."""
    return rng.choice(_TEXTS)


# ------------------------------------------------------------------------------------------------ bytes


def mutate_bytes(rng: random.Random, raw: bytes, changes: int | None = None) -> bytes:
    """A few bytes flipped, inserted, deleted, repeated or cut off."""
    made = bytearray(raw)
    for _ in range(changes or rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(made) + 1)
        length = min(rng.choice((1, 1, 2, 4, 8, 32, 256)), len(made) - at)
        act = rng.randrange(7)
        if act == 0 and at < len(made):
            made[at] ^= 1 << rng.randrange(8)
        elif act == 1 and at < len(made):
            made[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x1B, 0x0A, 0x22, 0x7B, 0x5B, rng.randrange(256)))
        elif act == 2:
            made[at:at] = rng.randbytes(max(1, length))
        elif act == 3:
            del made[at : at + length]
        elif act == 4:
            made[at:at] = made[at : at + length] * rng.choice((1, 2, 50))
        elif act == 5:
            source = rng.randrange(len(made) + 1)
            made[at : at + length] = made[source : source + length]
        elif rng.random() < 0.3:
            del made[at:]
        else:
            made[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff\xff\xff\x7f", b"\0\0\0\x80"))
    return bytes(made)


# ------------------------------------------------------------------------------------------------ text

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def mutate_text(rng: random.Random, text: str, changes: int | None = None) -> bytes:
    """Lines and numbers changed, moved, repeated or left out; sometimes bytes on top of that."""
    lines = text.split("\n")
    for _ in range(changes or rng.choice((1, 1, 2, 3, 6))):
        at = rng.randrange(len(lines))
        act = rng.randrange(10)
        if act == 0:
            del lines[at]
        elif act == 1:
            lines[at:at] = [lines[at]] * rng.choice((1, 2, 40))
        elif act == 2:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        elif act == 3:
            lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
        elif act in (4, 5, 6):
            found = list(_NUMBER.finditer(lines[at]))
            if found:
                hit = rng.choice(found)
                lines[at] = lines[at][: hit.start()] + _spelled(number(rng)) + lines[at][hit.end() :]
        elif act == 7:
            where = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:where] + hostile_text(rng) + lines[at][where:]
        elif act == 8:
            lines[at] = lines[at].replace(
                rng.choice(",:=;\"'. []()%"), rng.choice(("", ",", ";", "\t", "\r", '"', "::"))
            )
        else:
            lines = lines[:at]
        lines = lines or [""]
    raw = "\n".join(lines).encode("utf-8", "surrogatepass")
    return mutate_bytes(rng, raw) if rng.random() < 0.15 else raw


def _spelled(value: int | float) -> str:
    return str(value) if isinstance(value, float) or abs(value) < 10**300 else f"{'-' * (value < 0)}1{'0' * 400}"


# ------------------------------------------------------------------------------------------------ trees of JSON or YAML

_Place = tuple[Any, Any]
"""A container and the key or index in it."""


def mutate_tree(rng: random.Random, tree: Any, changes: int | None = None) -> Any:
    """A copy of the tree with values, keys and branches changed; a leaf may be the mark of a nest (`mutate_json`)."""
    made = copy.deepcopy(tree)
    for _ in range(changes or rng.choice((1, 1, 1, 2, 2, 4))):
        places = _places(made)
        if not places:
            return _value(rng)
        holder, key = rng.choice(places)
        _change(rng, holder, key, places)
    return made


def _change(rng: random.Random, holder: Any, key: Any, places: list[_Place]) -> None:
    old = holder[key]
    act = rng.randrange(12)
    if act <= 2:
        holder[key] = _value(rng)
    elif act <= 4:
        holder[key] = _alike(rng, old)
    elif act == 5:
        del holder[key]
    elif act == 6 and isinstance(holder, dict):
        holder[hostile_text(rng)] = holder.pop(key) if rng.random() < 0.5 else _value(rng)
    elif act == 6:
        holder.insert(key, copy.deepcopy(old))
    elif act == 7:
        other, name = rng.choice(places)
        holder[key] = copy.deepcopy(other[name])
    elif act == 8:
        holder[key] = [old] if rng.random() < 0.5 else {"a": old}
    elif act == 9 and isinstance(old, list):
        holder[key] = old[: rng.randrange(len(old) + 1)] if rng.random() < 0.5 else old * rng.choice((0, 2, 30))
    elif act == 10 and isinstance(old, dict):
        holder[key] = list(old.values()) if rng.random() < 0.5 else {}
    elif rng.random() < 0.08:
        holder[key] = _DEEP
    else:
        holder[key] = hostile_text(rng)


def _alike(rng: random.Random, old: Any) -> Any:
    """Another value of the same kind: this is what passes a reader and meets the code behind it."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return number(rng) if rng.random() < 0.6 else old + rng.choice((-1, 1, 2))
    if isinstance(old, float):
        return rng.choice((*_REAL, -old, old * 1e9))
    if isinstance(old, str):
        return old[: rng.randrange(len(old) + 1)] + hostile_text(rng)
    if isinstance(old, list):
        return [*reversed(old)] if rng.random() < 0.5 else [*old, _value(rng)]
    return _value(rng)


def _value(rng: random.Random) -> Any:
    makers: tuple[Callable[[], Any], ...] = (
        lambda: None, lambda: True, lambda: number(rng), lambda: number(rng), lambda: hostile_text(rng),
        lambda: hostile_text(rng), list, dict, lambda: [number(rng), hostile_text(rng)],
        lambda: {hostile_text(rng): number(rng)}, lambda: [[number(rng)]],
    )  # fmt: skip
    return rng.choice(makers)()


def _places(tree: Any) -> list[_Place]:
    """Every value of the tree by where it stands, without the tree itself."""
    found: list[_Place] = []
    todo = [tree]
    while todo:
        holder = todo.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            found.append((holder, key))
            todo.append(holder[key])
    return found


def mutate_json(rng: random.Random, document: Any, changes: int | None = None, *, nest: int = 100_000) -> bytes:
    """The document mutated and written as JSON, sometimes with bytes changed on top of that."""
    text = json.dumps(
        mutate_tree(rng, document, changes), ensure_ascii=rng.random() < 0.7, indent=rng.choice((None, 1))
    )
    if _DEEP in text:
        one = rng.choice(("[", '{"a":'))
        deep = one * nest + "1" + ("]" if one == "[" else "}") * nest * (rng.random() < 0.5)
        text = text.replace(f'"{_DEEP}"', deep)
    raw = text.encode("utf-8", "surrogatepass")
    return mutate_bytes(rng, raw) if rng.random() < 0.12 else raw
