"""Tries ONNX Runtime's optimisation in a child process, where a crash of the optimiser can be seen.

python -m trt_engine.backends.onnxruntime.optimizer_trial PIPE     the child: creates one session, and ends
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from trt_engine.backends.onnxruntime import session
from trt_engine.backends.onnxruntime.options import LEVELS, OnnxRuntimeOptions
from trt_engine.backends.onnxruntime.providers import ProviderSelection
from trt_engine.errors import BuildError
from trt_engine.workers.crash import exit_name
from trt_engine.workers.process import exit_with_parent, read_first_line, spawn_worker

log = logging.getLogger(__name__)

_TIMEOUT_S = 600.0


class OptimizerTrial(msgspec.Struct):
    """Request to the child: what to optimise. `graph` replaces the graph of the file at `path`, not its weights."""

    path: str
    level: str
    graph: str | None = None
    disabled: tuple[str, ...] = ()


def highest_safe_level(
    path: Path, graph: bytes | None, level: str, disabled: Sequence[str], folder: Path
) -> tuple[str, tuple[str, ...]]:
    """The highest optimisation level up to `level` that ends no process, and a step for each that does.

    Runs children of about 1 s each on the CPU, with a temporary file in `folder`. Raises `BuildError` if all levels crash.
    """
    steps: list[str] = []
    with tempfile.TemporaryDirectory(dir=folder, prefix=".trial-") as place:
        changed = None
        if graph is not None:
            changed = str(Path(place) / "graph.onnx")
            Path(changed).write_bytes(graph)
        for at in range(LEVELS.index(level), -1, -1):
            code = _exit_code(OptimizerTrial(str(path), LEVELS[at], changed, tuple(disabled)))
            if code >= 0:  # an exception is raised again by the build itself
                return LEVELS[at], tuple(steps)
            steps.append(f"graph_optimization={LEVELS[at]}: ONNX Runtime crashed ({exit_name(code)})")
            log.warning("%s; trying the next lower level", steps[-1])
    raise BuildError(
        f"ONNX Runtime crashes on `{path}` at every optimisation level", hint="`-b inductor`, or export it in FP32"
    )


def _exit_code(request: OptimizerTrial) -> int:
    """Exit code of a child that makes the session: negative for a signal, 0 where it does not end in time."""
    child = spawn_worker(
        "trt_engine.backends.onnxruntime.optimizer_trial", msgspec.json.encode(request), subprocess.DEVNULL
    )
    try:
        return child.wait(_TIMEOUT_S).code
    finally:
        child.close()


def main() -> None:
    """The child: every error but a crash is the parent's to meet again."""
    request = msgspec.json.decode(read_first_line(), type=OptimizerTrial)
    exit_with_parent()
    with contextlib.suppress(Exception):
        made = session.session_options(OnnxRuntimeOptions(), level=request.level)
        graph = Path(request.graph).read_bytes() if request.graph is not None else None
        cpu = ProviderSelection(("cpu",), ({},), "cpu", strict=False)
        session.create_session(Path(request.path), made, cpu, graph=graph, disabled=request.disabled)
    os._exit(0)


if __name__ == "__main__":
    main()
