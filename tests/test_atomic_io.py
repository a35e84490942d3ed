"""Files are whole or not there, and what stands in the way is said with what to do."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trt_engine import atomic_io
from trt_engine.atomic_io import (
    copy_atomic,
    encode_json,
    ensure_folder,
    file_digest,
    os_error,
    staging_folder,
    write_atomic,
)
from trt_engine.errors import SetupError, UsageError


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_what_was_written_is_there_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "file.json"
    assert write_atomic(target, "first") == target
    write_atomic(target, b"second")
    assert target.read_bytes() == b"second"
    assert left_in(target.parent) == ["file.json"]


def test_a_copy_is_the_same_bytes_and_replaces_what_was_there(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(os.urandom(3_000_000))
    target.write_bytes(b"old")
    copy_atomic(source, target)
    assert target.read_bytes() == source.read_bytes()
    assert left_in(tmp_path) == ["a", "b"]


def test_a_digest_is_sha256_over_the_files_in_order(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    one.write_bytes(b"one")
    two.write_bytes(b"two")
    assert file_digest(one, two) == "sha256:" + hashlib.sha256(b"onetwo").hexdigest() != file_digest(two, one)


def test_many_threads_writing_one_file_leave_one_whole_file(tmp_path: Path) -> None:
    target = tmp_path / "file"
    texts = [str(number) * 100_000 for number in range(8)]
    threads = [threading.Thread(target=write_atomic, args=(target, text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_text() in texts
    assert left_in(tmp_path) == ["file"]


def test_a_staging_folder_is_beside_its_target_and_gone_afterwards_whatever_happens(tmp_path: Path) -> None:
    target = tmp_path / "engines" / "key"
    with staging_folder(target) as folder:
        assert folder.parent == target.parent and folder.name.startswith(".key.") and folder.name.endswith(".tmp")
        (folder / "file").write_text("x")
    assert left_in(target.parent) == []
    with pytest.raises(KeyboardInterrupt), staging_folder(target) as folder:
        (folder / "file").write_text("x")
        raise KeyboardInterrupt
    assert left_in(target.parent) == []


def _staged(path: Path) -> None:
    with staging_folder(path / "engine"):
        pass


WRITERS: list[Callable[[Path], object]] = [
    lambda folder: write_atomic(folder / "file", "x"),
    lambda folder: copy_atomic(Path(__file__), folder / "file"),
    lambda folder: ensure_folder(folder),
    _staged,
]


@pytest.mark.parametrize("write", WRITERS)
def test_a_file_in_the_way_of_a_folder_is_said(tmp_path: Path, write: Callable[[Path], object]) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(SetupError, match="a file is in the way of a folder") as caught:
        write(tmp_path / "taken" / "below")
    assert caught.value.exit_code == 3 and "`-o`" in (caught.value.hint or "")
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("write", WRITERS)
def test_a_place_where_no_folder_can_be_made_is_a_setup_error(write: Callable[[Path], object]) -> None:
    with pytest.raises(SetupError, match="cannot write"):
        write(Path("/proc/no-such-place/below"))


def test_a_folder_where_a_file_was_expected_is_said(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(SetupError, match="it is a folder, expected a file"):
        write_atomic(tmp_path / "folder", "x")
    assert left_in(tmp_path) == ["folder"]


@pytest.mark.parametrize("write", WRITERS)
def test_a_folder_that_is_read_only_is_said(tmp_path: Path, write: Callable[[Path], object]) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write anywhere (root)")
    with pytest.raises(SetupError, match="permission denied") as caught:
        write(folder)
    assert caught.value.hint == "choose a folder you may write to with `-o`"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_the_old_file_and_no_half_one(small_disk: Path, tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(bytes(200_000))
    target = small_disk / "file"
    write_atomic(target, "old")
    for write in (lambda: write_atomic(target, bytes(200_000)), lambda: copy_atomic(big, target)):
        with pytest.raises(SetupError, match="the disk is full") as caught:
            write()
        assert caught.value.hint == "free some space, or name another disk with `-o`"
        assert target.read_text() == "old"
        assert left_in(small_disk) == ["file"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EFBIG, "larger than this shell allows"),
        (errno.EACCES, "permission denied"),
        (errno.EROFS, "read-only file system"),
        (errno.ENOTDIR, "a file is in the way"),
        (errno.EISDIR, "it is a folder"),
        (errno.ELOOP, "links lead to each other"),
        (errno.EIO, "input/output error"),
        (None, "odd"),
    ],
)
def test_every_reason_has_its_words_and_a_hint(number: int | None, words: str) -> None:
    error = OSError(number, "odd") if number else OSError("odd")
    told = os_error(error, Path("there"), "seal")
    assert told.message.startswith("cannot seal `there`: ") and words in told.message
    assert told.hint


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.ENOTDIR, errno.ELOOP, errno.EIO])
def test_the_hint_names_what_chooses_the_place_and_none_for_what_is_read(number: int) -> None:
    error = OSError(number, "odd")
    assert "`TRT_ENGINE_STORE`" in (os_error(error, Path("there"), by="TRT_ENGINE_STORE").hint or "")
    told = os_error(error, Path("there"), "read")
    assert told.exit_code == 4 and told.hint and "`-o`" not in told.hint


def _socket(path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize("make", [os.mkfifo, _socket], ids=["pipe", "socket"])
@pytest.mark.parametrize("linked", [False, True])
def test_what_is_no_file_is_never_replaced(tmp_path: Path, make: Callable[[Path], None], linked: bool) -> None:
    special, source = tmp_path / "special", tmp_path / "source"
    make(special)
    source.write_text("x")
    target = special
    if linked:
        target = tmp_path / "link"
        target.symlink_to(special)
    before = special.stat()

    def staged() -> None:
        with staging_folder(target):
            pass

    for write in (lambda: write_atomic(target, "x"), lambda: copy_atomic(source, target), staged):
        with pytest.raises(UsageError, match="expected a file") as caught:
            write()
        assert caught.value.hint
    after = special.stat()
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)
    assert left_in(tmp_path) == sorted(["source", "special", *(["link"] if linked else [])])


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_our_own_streams_are_no_files_whatever_they_lead_to(name: str) -> None:
    from trt_engine.atomic_io import resolve_link

    with pytest.raises(UsageError, match="is a stream"):
        resolve_link(Path(name))


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_what_it_names_is_written(tmp_path: Path, there: bool) -> None:
    (tmp_path / "real").mkdir()
    real, link, source = tmp_path / "real" / "file", tmp_path / "link", tmp_path / "source"
    source.write_text("copied")
    if there:
        real.write_text("old")
    link.symlink_to(real)
    write_atomic(link, "new")
    assert link.is_symlink() and real.read_text() == "new"
    copy_atomic(source, link)
    assert link.is_symlink() and real.read_text() == "copied"
    assert left_in(tmp_path) == ["file", "link", "real", "source"]


def test_json_of_names_in_any_bytes_can_be_read_by_anybody() -> None:
    made = encode_json({"files": [os.fsdecode(b"\xff.onnx"), "\u00e4"], os.fsdecode(b"\xfe"): (1, None)})
    assert made.decode() == '{"files":["\ufffd.onnx","\u00e4"],"\ufffd":[1,null]}'


def test_a_wait_for_a_lock_names_the_process_and_is_reported_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(atomic_io, "_FIRST_WAIT_S", 0.2)
    script = """if True:
        import sys
        from trt_engine.atomic_io import Path, file_lock
        with file_lock(Path(sys.argv[1]), busy=""):
            print(1, flush=True)
            sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "x.lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None and holder.stdout.readline()
        threading.Timer(0.5, holder.stdin.close).start()
        with atomic_io.file_lock(tmp_path / "x.lock", busy="another process builds it; waiting"):
            pass
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) >= 2 and all(text.startswith("another process builds it; waiting (") for text in texts)
    assert f"process {holder.pid}" in texts[0] or not Path("/proc/locks").exists()
