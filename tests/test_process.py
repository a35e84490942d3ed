"""A child that does not end by itself is ended, with what it started, and what it ended by is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from patience import HANG_S, runs, until
from trt_engine.workers import process

STARTS_ANOTHER = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"


def started(text: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", text], start_new_session=True, stdout=subprocess.PIPE, text=True)


@pytest.fixture(params=["by its handle", "by asking again and again"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "by its handle":
        monkeypatch.delattr(os, "pidfd_open", raising=False)


def test_what_ends_by_itself_is_told_by_its_code() -> None:
    with started("raise SystemExit(7)") as child:
        assert process.wait_or_kill(child, HANG_S).code == 7
        assert child.returncode == 7


def test_what_does_not_end_is_killed_with_what_it_started() -> None:
    with started(STARTS_ANOTHER) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        ended = process.wait_or_kill(child, 0.1)
    assert ended.code == -signal.SIGKILL
    assert ended.peak_bytes > 1 << 20
    until(lambda: not runs(grandchild), "it lives on")
