"""A backend over ONNX Runtime that writes down what it builds, and fails, waits or dies as its settings say.

It is known to the processes that a run starts as an installed distribution is: by an entry point on their path.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import plain_backend
from trt_engine.backend import BackendSpec, list_backends
from trt_engine.backends.onnxruntime.build import OnnxRuntimeBuilder
from trt_engine.config.settings import opt
from trt_engine.errors import BuildError, MemoryExhausted, SetupError

BUILT = "MOODY_BUILT"
"""Names the file that each build adds a line to: the largest batch and the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moods:
    """What it does instead of building well."""

    memory_up_to: int = opt(0, "out of memory above this batch")
    wait_at: int = opt(0, "at this batch, wait for a file `go` beside the list of builds")
    die_at: int = opt(0, "at this batch, end the process as a crash does")
    fail_at: int = opt(0, "at this batch, fail")
    refuse: str = opt("", "say at once that the machine lacks this")


def _own(config):
    """Its moods, and the settings without them."""
    names = Moods.__dataclass_fields__
    given = {name: text for name, text in config.options.items() if name in names}
    moods = Moods(**{name: text if name == "refuse" else int(text) for name, text in given.items()})
    rest = {name: text for name, text in config.options.items() if name not in names}
    return moods, replace(config, options=rest)


class Builds(OnnxRuntimeBuilder):
    def identity(self, config):
        moods, plain = _own(config)
        if moods.refuse:
            raise SetupError(f"`{moods.refuse}` is not here", hint=f"install `{moods.refuse}`")
        return super().identity(plain)

    def build(self, model, config, places):
        moods, plain = _own(config)
        batch = max(span.max[0] for span in config.profiles[0].ranges.values())
        listed = Path(os.environ[BUILT])
        with listed.open("a") as file:
            file.write(f"{model.name} {batch} {os.getpid()}\n")
        if moods.memory_up_to and batch > moods.memory_up_to:
            raise MemoryExhausted(f"no room for a batch of {batch}", hint="a smaller batch")
        if batch == moods.fail_at:
            raise BuildError("it does not want to", hint="ask again tomorrow")
        if batch == moods.die_at:
            os.kill(os.getpid(), signal.SIGSEGV)
        while batch == moods.wait_at and not listed.with_name("go").exists():
            time.sleep(0.01)
        return super().build(model, plain, places)


backend_spec = BackendSpec(
    "moody", "builds as it feels", ".onnx", ("onnxruntime",), "", builder=f"{__name__}:Builds", runtime="plain_backend:Runs",
    options=f"{__name__}:Moods",
)  # fmt: skip


def known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make it known here and to all that is started from here; the file its builds are listed in."""
    plain_backend.installed("moody", folder, monkeypatch)
    monkeypatch.setitem(list_backends(), "moody", backend_spec)
    listed = folder / "built"
    listed.touch()
    monkeypatch.setenv(BUILT, str(listed))
    return listed


def batches(listed: Path) -> list[int]:
    """The batches that were built, in order."""
    return [int(line.split()[1]) for line in listed.read_text().splitlines()]
