"""`progress=`: silence unless it is asked for, lines on stderr, or a function with what is done."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

import trt_engine as te
from onnx_models import conv_net
from trt_engine.progress import report_progress

log = logging.getLogger("trt_engine.tests")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return conv_net(tmp_path / "m.onnx")


def test_a_call_is_silent_unless_progress_is_asked_for(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    te.build(model)
    assert capfd.readouterr() == ("", "")
    te.build(model, rebuild=True, progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "building `m.onnx`" in err and "built in" in err
    assert all(line.startswith("[") and " s] " in line for line in err.splitlines())
    te.build(model, rebuild=True)
    assert capfd.readouterr() == ("", "")


def test_a_function_gets_each_step_and_what_is_counted(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[te.Progress] = []
    te.bench(model, duration_s=0.5, warmup_s=0.0, progress=seen.append)
    assert any("building" in at.text and at.done is None for at in seen)
    counted = [at for at in seen if at.done is not None]
    assert counted and all(at.unit == "s" and at.total is not None and at.done <= at.total for at in counted)  # type: ignore[operator]
    assert counted[0].text.startswith("measuring: 0 of ")
    times = [at.elapsed_s for at in seen]
    assert times == sorted(times)
    assert capfd.readouterr().err == ""


def test_what_goes_wrong_is_reported_as_a_warning() -> None:
    seen: list[te.Progress] = []
    with report_progress(seen.append):
        log.warning("odd")
        log.info("fine")
        log.debug("details")
    log.info("later")
    assert [(at.level, at.text) for at in seen] == [("warning", "odd"), ("info", "fine")]


def test_an_error_of_the_function_ends_the_call_and_the_log_is_as_it_was(model: Path) -> None:
    logger = logging.getLogger("trt_engine")
    before = logger.handlers[:], logger.level

    def stop(at: te.Progress) -> None:
        raise RuntimeError(at.text)

    with pytest.raises(RuntimeError, match="building"):
        te.build(model, progress=stop)
    assert (logger.handlers, logger.level) == before


def test_calls_in_two_threads_get_their_own_lines_alone() -> None:
    seen: dict[str, list[str]] = {"a": [], "b": []}
    both = threading.Barrier(2)

    def work(name: str) -> None:
        with report_progress(lambda at: seen[name].append(at.text)):
            both.wait()
            log.info("from %s", name)
            both.wait()

    threads = [threading.Thread(target=work, args=(name,)) for name in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"a": ["from a"], "b": ["from b"]}
