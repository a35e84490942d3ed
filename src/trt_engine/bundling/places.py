"""Where things stand in a JSON text: errors about a file name the key and its line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from trt_engine.errors import ModelError

__all__ = ["Places", "under"]


class Places:
    """The line of every key and item of a JSON text, by its path: `components.encoder.inputs.audio_signal[1]`."""

    _TOKENS = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\],:\n]|[^\s{}\[\],:"]+')

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.lines = {"": 1}
        self.again: dict[str, int] = {}
        """Keys that one object has twice, and the line of the second."""
        stack: list[tuple[bool, Any]] = []  # is it an object; its key or index now
        keys: list[set[str]] = []
        line, key_next = 1, False
        for match in self._TOKENS.finditer(text):
            token = match[0]
            if token == "\n":
                line += 1
            elif token == ",":
                is_object, step = stack.pop()
                key_next = is_object
                stack.append((is_object, step if is_object else step + 1))
            elif token in "}]":
                stack.pop()
                keys.pop()
            elif key_next and token[0] == '"':
                key = json.loads(token)
                stack[-1] = True, key
                key_next = False
                if key in keys[-1]:
                    self.again.setdefault(self._join(stack), line)
                keys[-1].add(key)
                self.lines.setdefault(self._join(stack), line)
            elif token != ":":  # a value begins
                if stack and not stack[-1][0]:
                    self.lines.setdefault(self._join(stack), line)
                if token in "{[":
                    key_next = token == "{"
                    stack.append((key_next, None if key_next else 0))
                    keys.append(set())

    @staticmethod
    def _join(stack: list[tuple[bool, Any]]) -> str:
        path = ""
        for is_object, step in stack:
            if step is not None:
                path = under(path, step) if is_object else f"{path}[{step}]"
        return path

    def line(self, place: str) -> int:
        """The line of a place, or of the nearest one around it that is there."""
        while place not in self.lines:
            place = place[: max(place.rfind("."), place.rfind("["), 0)]
        return self.lines[place]

    def error(self, place: str, message: str, hint: str) -> ModelError:
        where = f"`{place}` of " if place else ""
        return ModelError(f"{where}`{self.path}` (line {self.line(place)}): {message}", hint=hint)


def under(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key
