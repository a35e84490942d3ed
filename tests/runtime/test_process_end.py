"""A process that ends in the middle of the work: told to stop, or simply at its last line with an engine left open."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import trt_engine as te
from patience import HANG_S
from programs import run_python
from trt_engine.store import Store

PROGRAM = """
import sys, threading, time
import numpy as np
import trt_engine as te

x, ends = np.ones((1, 3), np.float32), []

def ask(engine):
    while True:
        try:
            assert (engine.infer(x)["y"] == 2).all()
        except te.TrtEngineError as error:
            ends.append(error.message)
            return

def crowd(engine):
    threads = [threading.Thread(target=ask, args=(engine,), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    return threads

settings = {"batching": {"max_wait_ms": 1.0}} if "batched" in sys.argv else {"contexts": 2}
"""
TOLD = """
try:
    with te.load(sys.argv[1], **settings) as engine:
        threads = crowd(engine)
        engine.infer(x)
        print("at work", flush=True)
        while True:  # a signal just before one long sleep would be heard after it
            time.sleep(0.05)
except KeyboardInterrupt:
    for thread in threads:
        thread.join(100)
    print(len(ends), "callers told:", *sorted(set(ends)))
"""


@pytest.fixture
def engine(double: Path, tmp_path: Path) -> Path:
    return te.build(
        double, backend="fake", device="fake", batch=(1, 2, 4), out=tmp_path / "d.fake", store=Store(tmp_path / "store")
    ).path


@pytest.mark.parametrize("kind", ["batched", "pool"])
def test_an_interrupted_process_tells_its_callers_and_ends(engine: Path, kind: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM + TOLD, str(engine), kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        process.send_signal(signal.SIGINT)
        told, complaints = process.communicate(timeout=HANG_S)
    assert told.startswith("4 callers told: ")
    assert "closed" in told
    assert "Traceback" not in complaints
    assert process.returncode == 0


FORKED = """
engine = te.load(sys.argv[1], **settings)
engine.infer(x)
child = os.fork()
if child == 0:
    sys.exit(7)  # its own way out: the threads, the locks and the device are the parent's
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
engine.infer(x)
engine.close()
print("closed")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this platform")
def test_a_child_that_was_forked_ends_without_touching_what_its_parent_has_loaded(engine: Path) -> None:
    held = "engine.runner._admission._lock.acquire()\n"  # a thread of the parent was inside when it forked
    forked = FORKED.replace("child = os.fork()", held + "child = os.fork()").replace(
        "print(os.wait", "engine.runner._admission._lock.release()\nprint(os.wait"
    )
    done = run_python("-c", "import os\n" + PROGRAM + forked, str(engine), "batched", timeout=HANG_S)
    assert (done.returncode, done.stdout) == (0, "7\nclosed\n"), done.stderr
