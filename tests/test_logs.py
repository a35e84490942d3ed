"""`te.log_to`: the package's log, and nothing else's."""

from __future__ import annotations

import io
import logging
import re
import threading
from pathlib import Path

import pytest

import trt_engine as te
from trt_engine.errors import SetupError, UsageError

log = logging.getLogger("trt_engine.runtime.context_pool")


def say_all() -> None:
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        log.log(level, "said at %d", level)


@pytest.mark.parametrize(
    ("level", "letters"),
    [("internal error", "F"), ("error", "EF"), ("warning", "WEF"), ("info", "IWEF"), ("VERBOSE", "VIWEF")],
)
def test_each_of_five_severities_says_itself_and_what_is_graver(level: str, letters: str) -> None:
    stream = io.StringIO()
    with te.log_to(stream, level=level):
        say_all()
    assert re.findall(r"\[(.)\]", stream.getvalue()) == list(letters)


def test_a_line_tells_milliseconds_severity_and_speaker() -> None:
    stream = io.StringIO()
    with te.log_to(stream):
        log.warning("two\nlines")
        logging.getLogger("trt_engine.tensorrt").error("from TensorRT")
    first, second, third = stream.getvalue().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \[W\] runtime\.context_pool: two", first)
    assert second == "    lines"
    assert third.endswith("[E] tensorrt: from TensorRT")


def test_the_root_logger_is_never_touched(tmp_path: Path) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    with te.log_to(tmp_path / "a.log", level="verbose"), te.log_to(io.StringIO()):
        logging.getLogger("other").error("not ours")
        assert (root.handlers, root.level) == before
    assert "not ours" not in (tmp_path / "a.log").read_text()


def test_a_file_is_added_to_and_its_folder_made(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "run.log"
    for text in ("first", "sécond"):
        with te.log_to(str(path)):
            log.info(text)
    assert [line.rpartition(" ")[2] for line in path.read_text(encoding="utf-8").splitlines()] == ["first", "sécond"]


def test_a_file_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="cannot write"):
        te.log_to(tmp_path / "file" / "run.log")
    with pytest.raises(UsageError, match="unknown log level"):
        te.log_to(level="loud")


def test_lines_of_many_threads_do_not_mix(tmp_path: Path) -> None:
    def talk(number: int) -> None:
        for _ in range(100):
            log.info("%s", str(number) * 200)

    with te.log_to(tmp_path / "many.log"):
        crowd = [threading.Thread(target=talk, args=(number,)) for number in range(8)]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join()
    lines = (tmp_path / "many.log").read_text().splitlines()
    assert len(lines) == 800
    assert all(re.fullmatch(r".*: (\d)\1{199}", line) for line in lines)


def test_a_stream_closed_under_us_fails_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    with te.log_to(stream), te.log_to(tmp_path / "run.log"):
        stream.close()
        log.error("into the void")
    assert "into the void" in (tmp_path / "run.log").read_text()
    assert "Traceback" not in capsys.readouterr().err
