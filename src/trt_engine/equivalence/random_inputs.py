"""Seeded random inputs of a model, tried in a child process first where a wrong number could end the process.

python -m trt_engine.equivalence.random_inputs PIPE     the child: runs each file once, and ends
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy.typing as npt

from trt_engine.backends.onnxruntime.host_session import reference_session
from trt_engine.errors import ModelError
from trt_engine.runtime.feeds import random_feeds
from trt_engine.tensors import Shape, Signature
from trt_engine.workers.crash import exit_name
from trt_engine.workers.process import exit_with_parent, read_first_line, spawn_worker

log = logging.getLogger(__name__)

_TIMEOUT_S = 600.0


class TrialRequest(msgspec.Struct):
    """Request to the child: models and inputs to run."""

    models: list[str]
    signature: Signature
    shapes: dict[str, Shape]
    seed: int
    values: dict[str, list[int]]


def random_inputs(
    path: Path,
    signature: Signature,
    shapes: Mapping[str, Shape],
    seed: int = 0,
    values: Mapping[str, Sequence[int]] | None = None,
    *,
    engine: Path | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """As `random_feeds`. Where inputs decide sizes, steps or divisors, plain ONNX Runtime runs them in a child first, of the
    file at `path` and of an `engine` that is a graph too: `ModelError` with the signal when that ends it."""
    if any(spec.role for spec in signature.inputs):
        files = [str(item) for item in (path, engine) if item is not None]
        given = {name: [int(value) for value in item] for name, item in (values or {}).items()}
        _run_trial(TrialRequest(files, signature, dict(shapes), seed, given))
    return random_feeds(signature, shapes, seed, values)


def _run_trial(request: TrialRequest) -> None:
    log.debug("random inputs decide sizes or steps: a child process tries them first")
    started = time.monotonic()
    child = spawn_worker("trt_engine.equivalence.random_inputs", msgspec.json.encode(request), subprocess.DEVNULL)
    try:
        code = child.wait(_TIMEOUT_S).code
    finally:
        child.close()
    if code >= 0:
        return  # what ONNX Runtime raised it will raise again
    if time.monotonic() - started >= _TIMEOUT_S:
        raise ModelError(
            f"ONNX Runtime does not end within {_TIMEOUT_S:g} s on random inputs", hint="provide real inputs"
        )
    raise ModelError(f"ONNX Runtime crashes ({exit_name(code)}) on random inputs", hint="provide real inputs")


def main() -> None:
    """The child: every error but a crash is the parent's to meet again."""
    request = msgspec.json.decode(read_first_line(), type=TrialRequest)
    exit_with_parent()
    for path in request.models:
        with contextlib.suppress(Exception):
            feeds = random_feeds(request.signature, request.shapes, request.seed, request.values)
            reference_session(Path(path), request.signature).run(feeds)
    os._exit(0)


if __name__ == "__main__":
    main()
