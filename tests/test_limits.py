"""Bounds: what a variable may hold, what a refusal says, and that nothing but a regular file is read."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from trt_engine.atomic_io import open_regular, read_bounded
from trt_engine.errors import ModelError, UsageError
from trt_engine.limits import LIMITS, RECORD_SIZE, Limit

SMALL = Limit("TRT_ENGINE_MAX_TEST", 4, "bytes", "a test")


def test_the_default_holds_until_the_variable_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RECORD_SIZE.variable, raising=False)
    assert RECORD_SIZE.value == RECORD_SIZE.default
    monkeypatch.setenv(RECORD_SIZE.variable, "1GiB")
    assert RECORD_SIZE.value == 1 << 30
    assert "raise `TRT_ENGINE_MAX_RECORD_SIZE` (now 1GiB)" in RECORD_SIZE.hint


@pytest.mark.parametrize("text", ["0", "-1", "much", "1e400", "nan"])
@pytest.mark.parametrize("unit", ["bytes", "s", "items"])
def test_what_is_no_bound_is_refused_by_name(text: str, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = Limit("TRT_ENGINE_MAX_TEST", 4, unit, "a test")  # type: ignore[arg-type]
    monkeypatch.setenv(limit.variable, text)
    with pytest.raises(UsageError, match="TRT_ENGINE_MAX_TEST"):
        _ = limit.value


def test_every_limit_has_a_name_of_its_own_and_a_default_that_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({item.variable for item in LIMITS}) == len(LIMITS)
    for item in LIMITS:
        monkeypatch.setenv(item.variable, item.format_value(item.default))
        assert item.value == item.default


def test_a_file_within_the_bound_is_read_and_one_beyond_is_refused_with_the_variable(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(b"1234")
    assert read_bounded(path, SMALL) == b"1234"
    path.write_bytes(b"12345")
    with pytest.raises(ModelError, match="has 5 bytes, more than the 4B") as caught:
        read_bounded(path, SMALL, error=ModelError)
    assert "TRT_ENGINE_MAX_TEST" in str(caught.value.hint)


def test_a_sparse_giant_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "giant.json"
    with path.open("wb") as file:
        file.truncate(1 << 30)  # larger ones are refused as holes
    with pytest.raises(UsageError, match="more than the 256MiB"):
        read_bounded(path)


def test_a_pipe_a_device_a_socket_and_a_folder_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    here = Path.cwd()
    os.chdir(tmp_path)  # the name of a socket may have 108 bytes
    try:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind("socket")
        with listening:
            for name in ("pipe", "device", "folder", "socket"):
                with pytest.raises(UsageError, match=f"is a {name}"):
                    open_regular(Path(name))
    finally:
        os.chdir(here)


def test_the_page_lists_every_limit_with_its_default() -> None:
    page = (Path(__file__).parent.parent / "docs" / "limits.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `TRT_ENGINE")]
    assert rows == [[f"`{item.variable}`", item.format_value(item.default), item.description] for item in LIMITS]
