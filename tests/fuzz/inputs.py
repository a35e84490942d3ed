"""One input of the fuzzer: files, and the command lines that are given them. Kept as JSON in `corpus/`."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Input:
    """Files by name in an empty folder, calls that run there one after another, and variables of the environment.

    A call is a command line without `trt-engine`; one that begins with `@` is a reader of the library (`readers.py`).
    """

    target: str
    files: Mapping[str, bytes]
    calls: Sequence[Sequence[str]]
    env: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Put the files into the folder."""
        for name, raw in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)

    def to_json(self, **more: Any) -> str:
        """The input as a document: text as it is, other files packed."""
        document = {
            "target": self.target,
            **more,
            "calls": [list(call) for call in self.calls],
            "env": dict(self.env),
            "files": {name: _packed(raw) for name, raw in self.files.items()},
        }
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Input:
        document = json.loads(text)
        files = {name: _unpacked(packed) for name, packed in document["files"].items()}
        return cls(document["target"], files, document["calls"], document.get("env", {}))


def _packed(raw: bytes) -> Any:
    try:
        text = raw.decode()
        if len(text) < 600 and json.dumps(text).isascii():
            return text
    except UnicodeDecodeError:
        pass
    return {"zlib": base64.b85encode(zlib.compress(raw, 9)).decode()}


def _unpacked(packed: Any) -> bytes:
    return packed.encode() if isinstance(packed, str) else zlib.decompress(base64.b85decode(packed["zlib"]))
