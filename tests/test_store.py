"""Engines by key: whole or not there, built once."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from patience import HANG_S
from trt_engine.atomic_io import os_error
from trt_engine.config.build import BuildConfig
from trt_engine.config.profiles import Profile, ShapeRange
from trt_engine.engine import Engine, passport_path, payload_files
from trt_engine.environment import Environment, source_digest
from trt_engine.errors import BuildError, SetupError, UsageError
from trt_engine.records.passport import BuildInfo, Passport, Precision, Requirements, Source
from trt_engine.store import Store, engine_key
from trt_engine.tensors import Signature

KEY = "0123456789abcdef" * 2


def write(folder: Path, content: bytes = b"payload") -> Engine:
    """An engine of one file in the folder."""
    payload = folder / "net.engine.onnx"
    payload.write_bytes(content)
    passport = Passport(
        schema="trt-engine/passport",
        schema_version=1,
        backend="onnxruntime",
        payload=payload_files(payload),
        model=Source("net", "sha256:0", 20, "net.onnx"),
        signature=Signature((), ()),
        profiles=(),
        precision=Precision(None),
        device="cpu",
        build=BuildInfo(command="trt-engine build net.onnx", config={}, seconds=0.0, identity="test"),
        environment=Environment.detect(),
        requirements=Requirements("onnxruntime", "1.0"),
        key=parts[1] if len(parts := folder.name.split(".")) > 2 else KEY,
    )
    return Engine.seal(payload, passport)


def refuse(folder: Path) -> Engine:
    raise AssertionError("nothing was to be built")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_an_engine_is_built_once_and_found_again(store: Store):
    engine, built = store.get_or_build(KEY, write)
    assert built and engine.path.read_bytes() == b"payload"
    again, built = store.get_or_build(KEY, refuse)
    assert not built and again == engine
    assert store.get(KEY) == engine


def test_ctrl_c_in_a_build_leaves_nothing_and_gives_the_lock_back(store: Store):
    def interrupted(folder: Path) -> Engine:
        write(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.get_or_build(KEY, interrupted)
    assert list((store.folder / "engines").iterdir()) == []
    assert store.get_or_build(KEY, write)[1]


def test_building_again_replaces_and_failing_to_keeps_what_was_there(store: Store):
    store.get_or_build(KEY, write)

    def fail(folder: Path) -> Engine:
        raise BuildError("no")

    with pytest.raises(BuildError):
        store.get_or_build(KEY, fail, rebuild=True)
    assert store.get(KEY) is not None
    engine, built = store.get_or_build(KEY, lambda folder: write(folder, b"newer"), rebuild=True)
    assert built and engine.path.read_bytes() == b"newer"
    assert [item.name for item in (store.folder / "engines").iterdir()] == [KEY]


@pytest.mark.parametrize("damage", ["payload changed", "payload gone", "passport garbled", "passport gone"])
def test_a_damaged_engine_is_built_again(damage: str, store: Store):
    engine, _ = store.get_or_build(KEY, write)
    if damage == "payload changed":
        engine.path.write_bytes(b"paYload")
    elif damage == "payload gone":
        engine.path.unlink()
    elif damage == "passport garbled":
        passport_path(engine.path).write_text("{")
    else:
        passport_path(engine.path).unlink()
    assert store.get(KEY) is None
    again, built = store.get_or_build(KEY, write)
    assert built
    again.verify()


def test_looking_changes_nothing_even_where_something_is_damaged(store: Store):
    engine, _ = store.get_or_build(KEY, write)
    engine.path.write_bytes(b"paYload")
    assert store.get(KEY) is None
    assert engine.path.exists()


def test_what_a_dead_build_left_is_swept_by_the_next_one(store: Store):
    killed = f"""
import os, signal, sys
from pathlib import Path
from trt_engine.store import Store

def build(folder):
    (folder / "half.onnx").write_bytes(b"ha")
    os.kill(os.getpid(), signal.SIGKILL)

Store(sys.argv[1]).get_or_build({KEY!r}, build)
"""
    done = subprocess.run([sys.executable, "-c", killed, str(store.folder)], check=False, timeout=HANG_S)
    assert done.returncode == -signal.SIGKILL and list((store.folder / "engines").iterdir())
    store.get_or_build(KEY, write)
    assert [item.name for item in (store.folder / "engines").iterdir()] == [KEY]


@pytest.mark.parametrize("what", ["", "engines", f"engines/{KEY}"])
def test_a_store_that_others_may_write_to_gives_no_engine_unless_that_is_allowed(
    what: str, store: Store, monkeypatch: pytest.MonkeyPatch
):
    store.get_or_build(KEY, write)
    (store.folder / what).chmod(0o777)
    if what == f"engines/{KEY}":
        assert store.get(KEY) is None and store.entries() == []
    else:
        for use in (lambda: store.get(KEY), store.entries, store.prune, lambda: store.get_or_build(KEY, write)):
            with pytest.raises(SetupError, match="others may write") as caught:
                use()
            assert "TRT_ENGINE_STORE_SHARED" in (caught.value.hint or "")
    monkeypatch.setenv("TRT_ENGINE_STORE_SHARED", "1")
    assert store.get(KEY) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_a_store_of_another_user_gives_no_engine(store: Store):
    store.get_or_build(KEY, write)
    os.chown(store.folder, 12345, 12345)
    with pytest.raises(SetupError, match="belongs to another user"):
        store.get(KEY)


@pytest.mark.parametrize("which", ["net.engine.onnx", "net.engine.onnx.json"])
@pytest.mark.parametrize("how", ["mode", "owner"])
def test_an_engine_with_a_file_that_others_may_have_written_is_built_again(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, which: str, how: str
):
    engine, _ = store.get_or_build(KEY, write)
    file = engine.path.parent / which
    if how == "mode":
        file.chmod(0o666)
    elif os.geteuid() != 0:
        pytest.skip("only root gives files away")
    else:
        os.chown(file, 65534, -1)
    assert store.get(KEY) is None
    assert ("mode 666" if how == "mode" else "uid 65534") in caplog.text
    assert store.get_or_build(KEY, write)[1]
    assert store.get(KEY) is not None
    file.chmod(0o666)
    monkeypatch.setenv("TRT_ENGINE_STORE_SHARED", "1")
    assert store.get(KEY) is not None


def test_a_new_store_is_writable_by_its_owner_alone_whatever_the_umask(store: Store):
    before = os.umask(0)
    try:
        store.get_or_build(KEY, write)
        engine = store.get(KEY)
        assert engine is not None
        Engine.seal(engine.path, engine.passport)  # as `validate` writes it again
    finally:
        os.umask(before)
    assert [path for path in store.folder.rglob("*") if path.stat().st_mode & 0o022] == []
    assert list(store.folder.rglob(".*")) == []


def test_no_link_in_a_store_is_followed(store: Store, tmp_path: Path):
    engine, _ = store.get_or_build(KEY, write)
    outside = tmp_path / "outside.onnx"
    engine.path.rename(outside)
    engine.path.symlink_to(outside)
    assert store.get(KEY) is None
    folder = store.folder / "engines" / KEY
    folder.rename(tmp_path / KEY)
    folder.symlink_to(tmp_path / KEY)
    assert store.get(KEY) is None and store.entries() == []
    assert store.prune(older_than_s=-1) == [] and (tmp_path / KEY).is_dir()
    (store.folder / "engines").rename(tmp_path / "victim")
    (store.folder / "engines").symlink_to(tmp_path / "victim")
    for use in (store.entries, store.prune, lambda: store.get(KEY)):
        with pytest.raises(SetupError, match="a link"):
            use()
    (store.folder / "engines").unlink()
    (store.folder / "locks").rename(tmp_path / "elsewhere")
    (store.folder / "locks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SetupError, match="a link"):
        store.get_or_build(KEY, write)


def test_prune_removes_nothing_that_is_not_an_engine_of_the_store(store: Store):
    store.get_or_build(KEY, write)
    engines = store.folder / "engines"
    (engines / "mine").mkdir()
    (engines / "mine" / "thesis.txt").write_text("years")
    (engines / ".x.tmp").mkdir()
    assert [entry.key for entry in store.prune(older_than_s=-1)] == [KEY]
    assert sorted(path.name for path in engines.iterdir()) == [".x.tmp", "mine"]


def race(count: int, work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Queue(logging.Handler):
    """Hears who waits for a build of somebody else."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Semaphore(0)

    def emit(self, record: logging.LogRecord) -> None:
        if "waiting for it" in record.getMessage():
            self.waiting.release()


@pytest.fixture
def queue() -> Iterator[Queue]:
    logger, heard = logging.getLogger("trt_engine.atomic_io"), Queue()
    level = logger.level
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    yield heard
    logger.removeHandler(heard)
    logger.setLevel(level)


@pytest.mark.parametrize("again", [False, True])
def test_builds_of_one_key_at_once_are_one_build(again: bool, store: Store, queue: Queue):
    if again:
        store.get_or_build(KEY, write)
    builds: list[int] = []
    answers: list[tuple[Engine, bool]] = []

    def build(folder: Path) -> Engine:
        builds.append(1)
        for _ in range(3):  # the others have found the lock taken
            assert queue.waiting.acquire(timeout=HANG_S)
        return write(folder, b"newest")

    race(4, lambda: answers.append(store.get_or_build(KEY, build, rebuild=again)))
    assert len(builds) == 1
    assert sorted(built for _, built in answers) == [False, False, False, True]
    assert all(engine.path.read_bytes() == b"newest" for engine, _ in answers)


def test_a_store_that_cannot_be_written_still_serves_what_it_has(store: Store):
    store.get_or_build(KEY, write)
    (store.folder / "locks" / f"{KEY}.lock").unlink(missing_ok=True)
    (store.folder / "locks").rmdir()
    (store.folder / "locks").write_text("in the way")
    assert not store.get_or_build(KEY, refuse)[1]
    with pytest.raises(SetupError):
        store.get_or_build("ffff", write)


# ------------------------------------------------------------------------------------------------ pruning


def test_pruning_goes_by_last_use_until_the_rest_fits(store: Store):
    for index in range(3):
        engine, _ = store.get_or_build(f"{index:032x}", lambda folder: write(folder, bytes(100)))
        os.utime(passport_path(engine.path), (1000 + index, 1000 + index))
    store.get(f"{0:032x}")  # used just now
    assert [entry.key for entry in store.entries()] == [f"{index:032x}" for index in (0, 2, 1)]
    assert [entry.key for entry in store.prune(max_bytes=250, dry_run=True)] == [f"{1:032x}"]
    assert len(store.entries()) == 3
    store.prune(max_bytes=250)
    assert [entry.key for entry in store.entries()] == [f"{index:032x}" for index in (0, 2)]
    assert [entry.key for entry in store.prune(older_than_s=3600)] == [f"{2:032x}"]


def test_pruning_leaves_a_build_that_lives_alone(store: Store):
    started, go_on = threading.Event(), threading.Event()

    def slow(folder: Path) -> Engine:
        started.set()
        assert go_on.wait(HANG_S)
        return write(folder)

    builder = threading.Thread(target=store.get_or_build, args=(KEY, slow))
    builder.start()
    assert started.wait(HANG_S)
    store.prune()
    go_on.set()
    builder.join()
    assert store.get(KEY) is not None


# ------------------------------------------------------------------------------------------------ keys


def test_everything_that_makes_engines_different_is_in_the_key():
    base = BuildConfig()
    span = ShapeRange((1, 3), (1, 3), (4, 3))
    others = [
        replace(base, precision="fp16"), replace(base, device="cuda:0"), replace(base, options={"arena": "off"}),
        replace(base, profiles=(Profile({"x": span}),)), replace(base, workspace_mib=1), replace(base, providers=("cpu",)),
    ]  # fmt: skip
    keys = {engine_key("sha256:1", config, "onnxruntime 1") for config in (base, *others)}
    keys |= {engine_key("sha256:2", base, "onnxruntime 1"), engine_key("sha256:1", base, "onnxruntime 2")}
    assert len(keys) == len(others) + 3


def test_the_sources_that_write_graphs_are_in_the_key_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "trt_engine"
    for name in ("backends/a/build.py", "graph/fusion/gelu.py", "precision/cast_rewriter.py", "verbs/bench/run.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("1")
    monkeypatch.setattr("trt_engine.environment.__file__", str(package / "environment.py"))

    def key() -> str:
        source_digest.cache_clear()
        return engine_key("m", BuildConfig(), "i")

    seen = {key()}
    for name in ("backends/a/build.py", "graph/fusion/gelu.py", "precision/cast_rewriter.py"):
        (package / name).write_text("2")
        seen.add(key())
    assert len(seen) == 4
    (package / "verbs" / "bench" / "run.py").write_text("2")
    assert key() in seen
    monkeypatch.undo()
    source_digest.cache_clear()


def test_a_value_that_prints_differently_each_time_is_refused():
    with pytest.raises(UsageError, match="cannot be part of an engine's key"):
        engine_key("m", BuildConfig(options={"a": {1, 2}}), "i")  # type: ignore[dict-item]


def test_who_waited_for_an_engine_that_does_not_fit_builds_its_own(store: Store):
    began, go_on = threading.Event(), threading.Event()

    def unproved(folder: Path) -> Engine:
        began.set()
        assert go_on.wait(HANG_S)
        return write(folder, b"unproved")

    first = threading.Thread(target=lambda: store.get_or_build(KEY, unproved))
    first.start()
    assert began.wait(HANG_S)
    found: list[bytes] = []

    def wanting_proof() -> None:
        engine, _ = store.get_or_build(
            KEY, lambda folder: write(folder, b"proved"), accept=lambda e: e.path.read_bytes() == b"proved"
        )
        found.append(engine.path.read_bytes())

    second = threading.Thread(target=wanting_proof)
    second.start()
    go_on.set()
    first.join(HANG_S)
    second.join(HANG_S)
    assert found == [b"proved"]


def test_an_engine_of_a_shared_store_can_be_read_by_others(store: Store):
    mask = os.umask(0o022)
    try:
        engine, _ = store.get_or_build(KEY, write)
    finally:
        os.umask(mask)
    assert engine.path.parent.stat().st_mode & 0o777 == 0o755


def test_a_store_in_a_bad_place_names_what_chooses_the_place(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    store = Store(tmp_path / "file")
    for use in (store.entries, lambda: store.get_or_build(KEY, refuse), lambda: store.prune(max_bytes=0)):
        with pytest.raises(SetupError) as caught:
            use()
        assert "`TRT_ENGINE_STORE`" in (caught.value.hint or "")
    assert Store(tmp_path / "none").entries() == []


def test_a_disk_that_fills_up_in_a_build_is_the_stores_disk(store: Store):
    def full(folder: Path) -> Engine:
        raise os_error(error, folder / "net.engine.onnx.json") from error

    error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(SetupError, match="the disk is full") as caught:
        store.get_or_build(KEY, full)
    assert str(store.folder) in caught.value.message
    assert caught.value.hint == "free some space, or name another disk with `TRT_ENGINE_STORE`"


def test_the_engine_of_another_key_or_model_is_built_again(store: Store, caplog: pytest.LogCaptureFixture):
    engine, _ = store.get_or_build(KEY, write, model_digest="sha256:0")
    assert store.get(KEY, "sha256:0") is not None
    assert store.get(KEY, "sha256:1") is None and "another model" in caplog.text
    Engine.seal(engine.path, replace(engine.passport, key="f" * 32))
    assert store.get(KEY) is None and "ffff" in caplog.text
    assert [entry.backend for entry in store.entries()] == ["damaged"]
