"""A measurement in a process of its own: whatever happens there is an error here, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from patience import HANG_S, runs, until
from trt_engine.benchmark import isolated
from trt_engine.benchmark.isolated import _crash_error, measure_isolated
from trt_engine.config.bench import BenchConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, Interrupted, MemoryExhausted, ProfileError
from trt_engine.workers import process as processes

from .conftest import build_engine, write_model

Made = Callable[[str], Engine]
SHORT = BenchConfig(duration_s=0.0, warmup_s=0.0, iterations=20)
LONG = BenchConfig(duration_s=600.0, warmup_s=0.0)
HERE = RuntimeConfig()


@pytest.fixture(autouse=True)
def no_child_is_left() -> Any:
    yield
    assert ours() == []


def ours() -> list[psutil.Process]:
    """The children that measure; pytest's process may have others, as multiprocessing's."""
    return [process for process in psutil.Process().children() if measures(process)]


def measures(process: psutil.Process) -> bool:
    try:
        return "trt_engine.benchmark.isolated" in process.cmdline()
    except psutil.NoSuchProcess:  # it is dead, and not waited for or gone by now
        return False


def once(number: signal.Signals) -> Callable[[float, float], None]:
    """Sends the signal to the child that measures as it tells how far it is; what it had told before is on its way still."""
    sent: list[int] = []

    def send(done_s: float, planned_s: float) -> None:
        if not sent:
            (process,) = ours()
            sent.append(process.pid)
            process.send_signal(number)

    return send


@pytest.mark.parametrize("name", ["onnxruntime", "fake"])
def test_the_record_comes_back_whole(made: Made, name: str) -> None:
    record = measure_isolated(made(name), SHORT, HERE, memory_limit=None)
    assert record.complete
    assert record.queries >= 20
    assert record.backend == name
    assert len(record.compute_ms) == record.queries


def test_progress_comes_over(made: Made) -> None:
    told: list[float] = []
    measure_isolated(
        made("onnxruntime"),
        BenchConfig(duration_s=0.5, warmup_s=0.0),
        HERE,
        on_progress=lambda done, _: told.append(done),
    )
    assert told == sorted(told)
    assert told


def test_the_childs_own_error_is_raised_here_with_its_words(made: Made) -> None:
    with pytest.raises(ProfileError, match="profile 0 spans 1x3x16x16 to 4x3x16x16") as caught:
        measure_isolated(made("onnxruntime"), BenchConfig(batch=64), HERE)
    assert caught.value.hint is not None
    assert "--profile" in caught.value.hint


@pytest.fixture(scope="module")
def hungry(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine whose largest batch takes about a gigabyte."""
    folder = tmp_path_factory.mktemp("hungry")
    return build_engine(
        write_model(folder / "m.onnx", width=64), folder / "e", "onnxruntime", device="cpu", batch=(1, 1, 12000)
    )


def test_out_of_memory_is_an_error_here_and_the_parent_lives(hungry: Engine, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MemoryExhausted, match="within 200 MiB") as caught:
        measure_isolated(hungry, BenchConfig(batch=12000, iterations=1), HERE, memory_limit=200 << 20)
    assert caught.value.exit_code == 11
    assert capfd.readouterr() == ("", "")  # ONNX Runtime's own log is not the user's


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_crash_is_named_by_its_signal(made: Made, number: signal.Signals) -> None:
    with pytest.raises(EngineError, match=number.name) as caught:
        measure_isolated(made("onnxruntime"), LONG, HERE, on_progress=once(number))
    assert caught.value.hint


def test_a_hang_ends_at_the_timeout(made: Made) -> None:
    with pytest.raises(EngineError, match="did not end within 1 s"):
        measure_isolated(made("onnxruntime"), LONG, HERE, timeout_s=1.0)


def test_ctrl_c_brings_back_what_was_measured(made: Made) -> None:
    def press(done_s: float, planned_s: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        measure_isolated(made("onnxruntime"), LONG, HERE, on_progress=press)
    partial: Any = caught.value.partial
    assert partial.queries > 0
    assert not partial.complete


def test_a_child_dies_with_its_parent(made: Made) -> None:
    script = f"""
import logging, sys
from pathlib import Path
from trt_engine.benchmark.isolated import measure_isolated
from trt_engine.config.bench import BenchConfig
from trt_engine.config.runtime import RuntimeConfig
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
config = BenchConfig(duration_s=600.0, warmup_s=0.0)
measure_isolated(Path({str(made("onnxruntime").path)!r}), config, RuntimeConfig())
"""
    with subprocess.Popen([sys.executable, "-u", "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert any("measuring" in line for line in iter(parent.stdout.readline, ""))
        (process,) = psutil.Process(parent.pid).children()
        os.kill(parent.pid, signal.SIGKILL)
    until(lambda: not runs(process.pid), "the child outlived its parent")


@pytest.mark.parametrize(
    ("code", "peak_mib", "printed", "kind"),
    [
        (-signal.SIGKILL, 900, "", MemoryExhausted),  # the kernel's way when memory runs out
        (-signal.SIGKILL, 100, "", EngineError),  # somebody else's
        (-signal.SIGABRT, 100, "terminate called after throwing an instance of 'std::bad_alloc'", MemoryExhausted),
        (-signal.SIGSEGV, 900, "", EngineError),
        (1, 100, "MemoryError: cannot allocate memory", MemoryExhausted),
        (3, 100, "", EngineError),
    ],
)
def test_a_silent_end_is_told_by_its_signs(
    made: Made, code: int, peak_mib: int, printed: str, kind: type[Exception]
) -> None:
    child: Any = SimpleNamespace(code=code, peak_bytes=peak_mib << 20)
    error = _crash_error(child, made("fake"), 1 << 30, printed)
    assert type(error) is kind
    assert error.hint


def test_a_child_that_tells_how_far_it_is_may_take_longer_than_the_silence_allowed(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]  # this clock moves with the child's messages alone, each time by most of the silence allowed
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(isolated, "_silence_limit_s", lambda config: HANG_S)

    def advance(done_s: float, planned_s: float) -> None:
        now[0] += 0.9 * HANG_S

    config = BenchConfig(duration_s=1.0, warmup_s=0.0)
    assert measure_isolated(made("onnxruntime"), config, HERE, on_progress=advance).complete
    assert now[0] > 2 * HANG_S


def test_a_child_that_somebody_else_stops_gives_a_partial_record_not_a_whole_one(made: Made) -> None:
    with pytest.raises(Interrupted, match="was stopped after") as caught:
        measure_isolated(made("onnxruntime"), LONG, HERE, on_progress=once(signal.SIGTERM))
    assert caught.value.partial is not None and not caught.value.partial.complete
