"""A build in a thread of its own: Ctrl-C stops it at its next step, and says what it waits for."""

from __future__ import annotations

import _thread
import logging
import threading

import pytest

from patience import HANG_S, until
from programs import run_python
from trt_engine.backends.tensorrt import build_progress as module
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
