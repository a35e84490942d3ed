"""`write_tool`: an `nsys` or an `ncu` of a version and a behaviour, as an executable file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

NSYS = (2024, 6, 2, 225)
NCU = (2025, 3, 1, 0)


def write_tool(
    folder: Path, name: Literal["nsys", "ncu"], version: tuple[int, ...] | None = None, **behaviour: Any
) -> Path:
    """A program of that name in `folder`, for PATH or its variable.

    `tool.py` beside this says what goes wrong by which name. `folder/calls.jsonl` gets the arguments of each call.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    settings = {"version": list(version or (NSYS if name == "nsys" else NCU)), "calls": str(folder / "calls.jsonl")}
    path.write_text(
        f"#!{sys.executable} -S\n"
        "import json, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        f"from nsight_tools.tool import {name.capitalize()}\n"
        f"{name.capitalize()}(json.loads({json.dumps(settings | behaviour)!r}), sys.argv[1:]).run()\n"
    )
    path.chmod(0o755)
    return path
