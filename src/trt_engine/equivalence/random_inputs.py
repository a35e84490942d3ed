"""Seeded random inputs of a model, tried in a child process first where a wrong number could end the process.

python -m trt_engine.equivalence.random_inputs PIPE     the child: runs each file once, and ends
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy.typing as npt

from trt_engine.backends.onnxruntime.run import reference
from trt_engine.errors import ModelError
from trt_engine.processes import die_with_parent, read_line, reap, spawned
from trt_engine.runtime.feeds import random_feeds
from trt_engine.tensors import Shape, Signature

__all__ = ["Request", "random_inputs"]

log = logging.getLogger(__name__)

_PATIENCE_S = 600.0


class Request(msgspec.Struct):
    """What the child runs, and on which inputs."""

    models: list[str]
    signature: Signature
    shapes: dict[str, Shape]
    seed: int
    values: dict[str, list[int]]


def random_inputs(
    model: Path,
    signature: Signature,
    shapes: Mapping[str, Shape],
    seed: int = 0,
    values: Mapping[str, Sequence[int]] | None = None,
    *,
    engine: Path | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """As `random_feeds`. Where inputs decide sizes, steps or divisors, plain ONNX Runtime runs them in a child first, of the
    `model` and of an `engine` that is a graph too: `ModelError` with the signal when that ends it."""
    if any(spec.role for spec in signature.inputs):
        files = [str(path) for path in (model, engine) if path is not None]
        given = {name: [int(value) for value in item] for name, item in (values or {}).items()}
        _try(Request(files, signature, dict(shapes), seed, given))
    return random_feeds(signature, shapes, seed, values)


def _try(request: Request) -> None:
    log.debug("random inputs decide sizes or steps: a child process tries them first")
    started = time.monotonic()
    process, pipe = spawned("trt_engine.equivalence.random_inputs", msgspec.json.encode(request), subprocess.DEVNULL)
    try:
        code = reap(process, _PATIENCE_S).code
    finally:
        os.close(pipe)
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()  # the child ends when this does
    if code >= 0:
        return  # what ONNX Runtime raised it will raise again
    if time.monotonic() - started >= _PATIENCE_S:
        raise ModelError(
            f"ONNX Runtime does not end within {_PATIENCE_S:g} s on random inputs", hint="give inputs of your own"
        )
    raise ModelError(
        f"ONNX Runtime crashes ({signal.Signals(-code).name}) on random inputs", hint="give inputs of your own"
    )


def main() -> None:
    """The child: every error but a crash is the parent's to meet again."""
    request = msgspec.json.decode(read_line(), type=Request)
    die_with_parent()
    for path in request.models:
        with contextlib.suppress(Exception):
            feeds = random_feeds(request.signature, request.shapes, request.seed, request.values)
            reference(Path(path), request.signature).run(feeds)
    os._exit(0)


if __name__ == "__main__":
    main()
