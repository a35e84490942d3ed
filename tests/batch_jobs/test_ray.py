"""`batch` through Ray: killed and resumed, with a worker lost, every row comes out once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from batch_jobs.conftest import ROWS
from patience import until

pytestmark = [pytest.mark.full, pytest.mark.slow]
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("ray.data")

COUNT = 6000


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    np.save(tmp_path / "rows.npy", np.resize(ROWS, (COUNT, 3)))
    return tmp_path / "rows.npy"


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Where temporary folders go, with a short path: Ray's sockets are below it."""
    with tempfile.TemporaryDirectory(prefix="te-", ignore_cleanup_errors=True) as found:
        yield Path(found)


def start(engine: Path, rows: Path, out: Path, scratch: Path, *more: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "trt_engine", "batch", engine, rows, "-o", out, "--part-rows", "20", *more]
    with (out.parent / "log").open("ab") as log:
        environment = os.environ | {"TMPDIR": str(scratch)}
        return subprocess.Popen(words, start_new_session=True, stdout=log, stderr=log, env=environment)


def journal_lines(out: Path) -> int:
    path = out / "journal.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def advanced(process: subprocess.Popen[bytes], out: Path, lines: int) -> bool:
    return journal_lines(out) > lines or process.poll() is not None


def has_worker(raylet: psutil.Process) -> bool:
    """Whether the node of this process runs a worker of `batch`."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any("MapWorker" in " ".join(one.cmdline()) for one in raylet.children(recursive=True))
    return False


def check(out: Path) -> None:
    parts = sorted(out.glob("part-*.parquet"))
    tables = [pq.read_table(part).to_pydict() for part in parts]
    assert [row for table in tables for row in table["row"]] == list(range(COUNT))
    assert [one for table in tables for one in table["error"]] == [None] * COUNT
    found = np.array([one for table in tables for one in table["y"]], np.float32)
    assert np.array_equal(found, np.resize(ROWS, (COUNT, 3)) * 2)


def test_killed_at_random_moments_and_resumed_every_row_comes_out_once(
    engine: Path, rows: Path, tmp_path: Path, scratch: Path
) -> None:
    out, random = tmp_path / "out", np.random.default_rng(11)
    for _ in range(2):
        process = start(engine, rows, out, scratch)
        try:
            until(partial(advanced, process, out, journal_lines(out)), "a line of the journal")
            time.sleep(random.uniform(0, 0.3))  # anywhere in what follows
        finally:
            process.kill()
            process.wait()
    process = start(engine, rows, out, scratch)
    assert process.wait() == 0, (tmp_path / "log").read_text()[-2000:]
    check(out)
    assert not [*scratch.glob(".ray.*.tmp")]  # what the killed runs left is gone


def test_a_worker_killed_under_way_loses_no_row(engine: Path, rows: Path, tmp_path: Path, scratch: Path) -> None:
    out = tmp_path / "out"
    process = start(engine, rows, out, scratch)
    try:
        until(partial(advanced, process, out, 0), "a line of the journal")
        below = psutil.Process(process.pid).children(recursive=True)
        workers = [one for one in below if "MapWorker" in " ".join(one.cmdline())]
        assert workers and process.poll() is None, [one.cmdline()[:1] for one in below]
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
        assert process.wait() == 0, (tmp_path / "log").read_text()[-2000:]
    finally:
        process.kill()
        process.wait()
    check(out)


def test_a_node_lost_under_way_loses_no_row(
    engine: Path, rows: Path, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head without workers and two nodes with one each, all of them processes here; another node takes over."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_TMPDIR", str(scratch))
    (scratch / "ray").mkdir()
    out, size = tmp_path / "out", {"object_store_memory": 100 << 20}
    head = {"num_cpus": 0, "include_dashboard": False, **size}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=1, **size)
        lost = cluster.add_node(num_cpus=1, **size)
        cluster.wait_for_nodes()
        process = start(engine, rows, out, scratch, "--address", cluster.address, "--workers", "2")
        try:
            raylet = psutil.Process(lost.all_processes["raylet"][0].process.pid)
            until(lambda: has_worker(raylet) and advanced(process, out, 0), "a worker there and a line of the journal")
            cluster.remove_node(lost, allow_graceful=False)
            assert 0 < journal_lines(out) < COUNT // 20
            cluster.add_node(num_cpus=1, **size)
            assert process.wait() == 0, (tmp_path / "log").read_text()[-2000:]
        finally:
            process.kill()
            process.wait()
    finally:
        cluster.shutdown()
    check(out)
