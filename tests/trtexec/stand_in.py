"""`write_trtexec`: a trtexec of a version and a behaviour, as an executable file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

V10 = (10, 16, 1, 11)
V11 = (11, 1, 0, 106)


def write_trtexec(folder: Path, version: tuple[int, int, int, int] = V10, **behaviour: Any) -> Path:
    """A program `trtexec` in `folder`, for PATH or `TRT_ENGINE_TRTEXEC`.

    `behaviour` is what goes wrong, by the names `tests/trtexec/tool.py` asks for: `fail` (`out_of_memory` with `from_batch`,
    `foreign_node` with `works_at_level`, `killed`, `empty_engine`, `passed_without_engine`, `cuda_error`),
    `needs_workspace_mib`, `silent_until_told` (a file that somebody adds to), `workspace_as_bytes`,
    `tacticsFile`, `child_file`, `builds_fp32`, `wrong_switch`, `graph_refused`, `no_throughput`, `no_gpu`, `lacks`
    (options), `gpu`, `compute_capability`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trtexec"
    settings = json.dumps({"version": list(version), **behaviour})
    path.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from trtexec.tool import Tool\n"
        f"Tool(json.loads({settings!r}), sys.argv[1:]).run()\n"
    )
    path.chmod(0o755)
    return path
