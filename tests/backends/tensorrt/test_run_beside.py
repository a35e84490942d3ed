"""A build in a thread of its own: Ctrl-C stops it at its next step, and says what it waits for; its phases."""

from __future__ import annotations

import _thread
import itertools
import logging
import threading
from collections.abc import Iterator

import pytest

from patience import HANG_S, until
from programs import run_python
from trt_engine.backends.tensorrt import build_progress as module
from trt_engine.backends.tensorrt import build_progress as progress_module
from trt_engine.backends.tensorrt.build_progress import BuildProgress, run_in_thread


def test_a_build_that_does_not_stop_says_what_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_SILENT_S", 0.0)
    progress = BuildProgress()

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    def build() -> None:
        progress.phase_start("Building engine", None, 6)
        progress.phase_start("Computing profile costs", "Building engine", 2)
        _thread.interrupt_main()
        until(warnings, "a warning")
        assert not progress.step_complete("Computing profile costs", 0)

    with pytest.raises(KeyboardInterrupt):
        run_in_thread(build, progress)
    (warning,) = warnings()
    assert "`Building engine 0/6, Computing profile costs 0/2`" in warning and "Ctrl-C again" in warning


def test_a_second_press_does_not_wait() -> None:
    progress, released = BuildProgress(), threading.Event()

    def build() -> None:
        _thread.interrupt_main()
        until(lambda: progress.cancelled, "the first press")
        _thread.interrupt_main()
        released.wait(HANG_S)

    with pytest.raises(KeyboardInterrupt):
        run_in_thread(build, progress)
    assert not released.is_set()
    released.set()


def test_an_interpreter_that_ends_waits_for_the_builder() -> None:
    """Else the library calls back into what is gone: SIGSEGV or SIGABRT in place of an exit code."""
    script = """
import _thread, time
from trt_engine.backends.tensorrt.build_progress import BuildProgress, run_in_thread
progress = BuildProgress()
def build():
    _thread.interrupt_main()
    while not progress.cancelled:
        time.sleep(0.01)
    _thread.interrupt_main()
    time.sleep(0.5)
    print('whole', flush=True)
try:
    run_in_thread(build, progress)
except KeyboardInterrupt:
    print('left', flush=True)
"""
    done = run_python("-c", script, timeout=HANG_S, check=True)
    assert done.stdout == "left\nwhole\n", done.stderr


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    yield now


def test_a_phase_is_noted_by_the_time_outside_of_the_phases_within_it(clock: list[float]) -> None:
    progress = BuildProgress()
    names = ["Building engine", "Building engine from subgraph", "Computing profile costs", "Timing tactics"]
    for parent, name in itertools.pairwise([None, *names]):
        progress.phase_start(name, parent, 1)
        clock[0] += 1.0 if name != "Timing tactics" else 6.0
    assert progress.phase().startswith("Building engine 0/1, Building engine from subgraph 0/1, ")
    for name in reversed(names):
        assert progress.step_complete(name, 0)
        progress.phase_finish(name)
    assert progress.seconds == dict.fromkeys(names[:3], 1.0) | {"Timing tactics": 6.0}
    assert sum(progress.seconds.values()) == clock[0], "nothing is counted twice"
    assert progress.slowest_phases().startswith("Timing tactics 6.0 s, ")
    assert progress.phase() == "" and progress.error is None
