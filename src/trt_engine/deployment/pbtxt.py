"""Protobuf text format of plain values, as Triton's `config.pbtxt` is written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


class Name(str):
    """A name of an enumeration, which is written without quotes."""

    __slots__ = ()


def format_message(fields: Mapping[str, Any], indent: str = "") -> str:
    """The fields of a message: a mapping is a message, a list repeats its field."""
    return "".join(f"{indent}{line}\n" for line in _lines(fields))


def _lines(fields: Mapping[str, Any]) -> Iterator[str]:
    for name, value in fields.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Mapping):
                inner = [f"  {line}" for line in _lines(one)]
                yield from ([f"{name} {{", *inner, "}"] if inner else [f"{name} {{}}"])
            else:
                yield f"{name}: {_scalar(one)}"


def _scalar(value: Any) -> str:
    if isinstance(value, Name):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=True) if isinstance(value, str) else repr(value)
