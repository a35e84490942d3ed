"""A process that has the real bindings over the scripted TensorRT, and runs tests in children of itself.

Imports cost a second, so they are made once: each test gets a fork, and a crash there ends a test and nothing else.
`Worker` is the test process's side; `python -m bindings.worker` the other.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import traceback
import types
from pathlib import Path
from typing import IO, Any

from bindings.harness import SOURCE, Bindings

TIMEOUT_S = 150.0


class Failure(Exception):
    """A test failed inside: its traceback as it was there, or how its process ended."""


class Worker:
    """The running process of one release."""

    def __init__(self, bindings: Bindings, source: Path = SOURCE) -> None:
        self._process = subprocess.Popen(
            bindings.command("-m", "bindings.worker", str(bindings.library), str(bindings.site)),
            env=bindings.environment(source), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, file: Path, function: str, arguments: dict[str, Any], folder: Path) -> None:
        """Run a test function of a file; `Failure` unless it returned. `folder` is for what it writes."""
        job = {"file": str(file), "function": function, "arguments": arguments, "folder": str(folder)}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise Failure(f"the process of the bindings ended with {self._process.wait()}")
        answer = json.loads(line)
        if answer["failure"] is not None:
            raise Failure(answer["failure"] + (f"\n--- it said\n{answer['said']}" if answer["said"] else ""))

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=150)


# ------------------------------------------------------------------------------------------------ inside


def _serve(library: Path, folder: Path) -> None:
    trt = importlib.import_module(os.environ["TRT_ENGINE_TEST_MODULE"])

    from bindings.puppet import Puppet, learned
    from bindings.scripted import ScriptedTensorRT

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a test prints is no answer
    slots = learned(library, trt, folder)
    world = ScriptedTensorRT(Puppet(library), trt, slots)
    _warm()
    gc.freeze()  # what a test leaves is collected in its child, which would copy every page it looks at
    for line in sys.stdin:
        answers.write(json.dumps(_in_a_child(world, json.loads(line))) + "\n")
        answers.flush()


_EVERYBODYS = (
    "pytest", "onnxruntime", "onnx.reference.ops", "onnx_models", "bindings.on_fake", "trt_engine.verbs.build.run",
    "trt_engine.verbs.inspect.run", "trt_engine.verbs.load", "trt_engine.backends.tensorrt.build",
    "trt_engine.cli.click_app", "trt_engine.benchmark.closed_loop", "numpy.ma", "numpy.testing", "tensorrt_machines",
)  # fmt: skip


def _warm() -> None:
    """What every test imports, imported once; and the cards of both libraries with the fake device on them."""
    from trt_engine import errors

    errors.in_shell = True  # messages as they stand in the sources
    for name in _EVERYBODYS:
        importlib.import_module(name)
    from trt_engine.backend import list_backends

    backend_specs = list_backends()
    for name, runtime in (("tensorrt", "RuntimeOnFake"), ("tensorrt-rtx", "RtxRuntimeOnFake")):
        backend_specs[name] = dataclasses.replace(
            backend_specs[name], devices=("fake", "cuda"), runtime=f"bindings.on_fake:{runtime}"
        )
    # the library that its plans need is the scripted one
    backend_specs["tensorrt-rtx"] = dataclasses.replace(backend_specs["tensorrt-rtx"], compatibility=None)


def _in_a_child(world: Any, job: dict[str, Any]) -> dict[str, Any]:
    said = Path(job["folder"]) / "said.txt"
    _compiled(job["file"])  # once, and not in each child
    read, write = os.pipe()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(read)
        with said.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        failure = None
        try:
            _run(world, job)
        except BaseException:
            failure = traceback.format_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(write, json.dumps(failure).encode())
        os.close(write)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        raw = _read(pipe, child)
    _, status = os.waitpid(child, 0)
    failure = json.loads(raw) if raw else f"the test's process ended with {os.waitstatus_to_exitcode(status)}"
    return {"failure": failure, "said": said.read_text(errors="replace")[-8000:] if failure else ""}


def _read(pipe: IO[bytes], child: int) -> bytes:
    """What the child writes before it ends; one that takes too long is told to show where it is."""
    raw = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], TIMEOUT_S)
        if not ready:
            os.kill(child, signal.SIGABRT)  # faulthandler prints every thread
        piece = os.read(pipe.fileno(), 1 << 16)
        if not piece:
            return raw
        raw += piece


@functools.cache
def _compiled(file: str) -> types.CodeType:
    return compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)


def _run(world: Any, job: dict[str, Any]) -> None:
    os.environ["TRT_ENGINE_STORE"] = str(Path(job["folder"]) / "store")
    from bindings.on_fake import OPENED

    module = types.ModuleType(Path(job["file"]).stem)
    module.__file__ = job["file"]
    sys.modules[module.__name__] = module
    exec(_compiled(job["file"]), module.__dict__)
    function = getattr(module, job["function"])
    known = {"world": world, "tmp_path": Path(job["folder"]), **job["arguments"]}
    function(**{name: known[name] for name in inspect.signature(function).parameters if name in known})
    world.check()
    left = {device.name: device.allocated_bytes for device in OPENED if device.allocated_count}
    assert not left, f"device memory was not given back: {left}"


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), Path(sys.argv[2]))
