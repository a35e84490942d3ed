"""Seeded random inputs of a model, tried in a child process first where a wrong number could end the process or is refused.

python -m trt_engine.equivalence.random_inputs PIPE     the child: runs each file with each set of choices, and ends
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from trt_engine.backends.onnxruntime.host_session import OnnxRuntimeSession, reference_session
from trt_engine.errors import ModelError, TrtEngineError
from trt_engine.runtime.feeds import random_feeds
from trt_engine.tensors import Choice, Shape, Signature, TensorSpec
from trt_engine.workers.crash import exit_name
from trt_engine.workers.messages import MessagePipe
from trt_engine.workers.process import exit_with_parent, read_first_line, spawn_worker

log = logging.getLogger(__name__)

Values = Mapping[str, Sequence[int] | npt.NDArray[Any]]
"""Values by input name, of as many elements as its shape."""

_TIMEOUT_S = 600.0
_MAX_TRIALS, _OTHERS_S = 64, 60.0
"""Sets of choices that are tried until one runs, and seconds for the others after that."""


class TrialRequest(msgspec.Struct):
    """Request to the child: models and inputs to run."""

    models: list[str]
    signature: Signature
    shapes: dict[str, Shape]
    seed: int
    values: dict[str, list[Any]]


class TrialReply(msgspec.Struct):
    """The choices that the first model runs with, by input, the first of each in one run; empty where it runs with none."""

    choices: dict[str, tuple[Choice, ...]]
    done: bool
    """Whether all were tried."""


def random_inputs(
    path: Path,
    signature: Signature,
    shapes: Mapping[str, Shape],
    seed: int = 0,
    values: Values | None = None,
    *,
    engine: Path | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """As `random_feeds`, switches at the first choices that plain ONNX Runtime runs. Where inputs decide sizes, steps,
    divisors or branches it runs them in a child first, of the file at `path` and of an `engine` that is a graph too:
    `ModelError` with the signal when that ends it."""
    signature = runnable_signature(path, signature, shapes, seed, values, engine=engine)
    return random_feeds(signature, shapes, seed, values)


def runnable_signature(
    path: Path,
    signature: Signature,
    shapes: Mapping[str, Shape],
    seed: int = 0,
    values: Values | None = None,
    *,
    engine: Path | None = None,
) -> Signature:
    """The signature with those choices alone that plain ONNX Runtime runs at these shapes, unchanged where it runs none."""
    opened = [spec for spec in signature.inputs if spec.name not in (values or {})]
    if not any(spec.role or spec.choices for spec in opened):
        return signature
    files = [str(item) for item in (path, engine) if item is not None]
    given = {name: np.ravel(item).tolist() for name, item in (values or {}).items()}
    return with_choices(signature, _run_trial(TrialRequest(files, signature, dict(shapes), seed, given)))


def with_choices(signature: Signature, choices: Mapping[str, Sequence[Choice]]) -> Signature:
    """The signature with these choices, by input."""
    return replace(
        signature,
        inputs=tuple(replace(spec, choices=tuple(choices.get(spec.name, spec.choices))) for spec in signature.inputs),
    )


def each_branch(signature: Signature) -> Iterator[tuple[Signature, str]]:
    """The signature at its first choices, and at each other one, with text for how inputs were made."""

    def text(spec: TensorSpec, value: Choice) -> str:
        return f", `{spec.name}` is {'random' if value is None else repr(value)}"

    switches = [spec for spec in signature.inputs if spec.choices]
    yield signature, "".join(text(spec, spec.choices[0]) for spec in switches)
    for spec in switches:
        for value in spec.choices[1:]:
            yield (
                with_choices(signature, {spec.name: (value,)}),
                "".join(text(other, value if other is spec else other.choices[0]) for other in switches),
            )


def _run_trial(request: TrialRequest) -> dict[str, tuple[Choice, ...]]:
    log.debug("random inputs decide sizes, steps or branches: a child process tries them first")
    started = time.monotonic()
    child = spawn_worker("trt_engine.equivalence.random_inputs", msgspec.json.encode(request), subprocess.DEVNULL)
    found = TrialReply({}, done=False)
    try:
        with contextlib.suppress(TimeoutError):
            while (line := child.read_line(max(0.0, started + _TIMEOUT_S - time.monotonic()))) is not None:
                found = msgspec.json.decode(line, type=TrialReply)
        code = child.wait(max(0.0, started + _TIMEOUT_S - time.monotonic())).code
    finally:
        child.close()
    if code >= 0 or (found.choices and not found.done):
        return found.choices  # what ONNX Runtime raised it will raise again; another branch may crash
    if time.monotonic() - started >= _TIMEOUT_S:
        raise ModelError(
            f"ONNX Runtime does not end within {_TIMEOUT_S:g} s on random inputs",
            hint="`--inputs FILE.npz` has real ones",
        )
    raise ModelError(
        f"ONNX Runtime crashes ({exit_name(code)}) on random inputs", hint="`--inputs FILE.npz` has real ones"
    )


def main() -> None:
    """The child: every error but a crash is the parent's to meet again."""
    request, pipe = msgspec.json.decode(read_first_line(), type=TrialRequest), MessagePipe(int(sys.argv[1]))
    exit_with_parent()
    for path in request.models:
        found: dict[str, tuple[Choice, ...]] = {}
        with contextlib.suppress(Exception):
            for found in _runnable_choices(reference_session(Path(path), request.signature), request):
                if path == request.models[0]:  # an engine that does not run one is at fault
                    pipe.send(TrialReply(found, done=False))
        if path == request.models[0]:
            pipe.send(TrialReply(found, done=True))
            request.signature = with_choices(request.signature, found)
    os._exit(0)


def _runnable_choices(session: OnnxRuntimeSession, request: TrialRequest) -> Iterator[dict[str, tuple[Choice, ...]]]:
    """The first set of choices that runs, then each other one that runs in its place, added to those before."""

    def runs(choices: Mapping[str, Choice]) -> bool:
        signature = with_choices(request.signature, {name: (value,) for name, value in choices.items()})
        with contextlib.suppress(TrtEngineError):
            session.run(random_feeds(signature, request.shapes, request.seed, request.values))
            return True
        return False

    switches = {spec.name: spec.choices for spec in request.signature.inputs if spec.choices}
    sets = (dict(zip(switches, item, strict=True)) for item in itertools.product(*switches.values()))
    base = next(filter(runs, itertools.islice(sets, _MAX_TRIALS)), None)
    if base is None:
        return
    found: dict[str, tuple[Choice, ...]] = {name: (value,) for name, value in base.items()}
    yield dict(found)
    deadline = time.monotonic() + _OTHERS_S
    for name, values in switches.items():
        for value in values:
            if value != base[name] and time.monotonic() < deadline and runs(base | {name: value}):
                found[name] += (value,)
                yield dict(found)


if __name__ == "__main__":
    main()
