"""What every test starts from: a store of its own, and the package's log as the library leaves it."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import itertools
import logging
import os
import re
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

from trt_engine import errors

# the same examples every time, and no clock that judges them: a busy machine is no counterexample
settings.register_profile(
    "steady", max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
# `pytest --hypothesis-profile=search` looks for new ones
settings.register_profile("search", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

# ignored in a background job and under `nohup`: the programs that tests start would not hear them either
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


# a home folder that is not there or read-only: ONNX Runtime warns of it on stderr, and caches of tests have no place
if not os.access(Path.home(), os.W_OK):
    os.environ["HOME"] = tempfile.mkdtemp(prefix="trt-engine-home-")
    atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No garbage is collected while the tests are, and none of them is visited afterwards: a measurement begins with a
    collection, which would look at all of their objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


if importlib.util.find_spec("PIL") is None:  # without the optional parts: what stops for the lack of one is skipped

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        return _skipped_if_missing((yield), item.path)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        collector: pytest.Collector,
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        return _skipped_if_missing((yield), collector.path)


_Report = TypeVar("_Report", pytest.TestReport, pytest.CollectReport)
_MISSING = re.compile(r"^E? *(.*(?:, which is not installed|No module named '\w+).*)$", re.MULTILINE)


def _skipped_if_missing(report: _Report, path: Path) -> _Report:
    if report.failed and (found := _MISSING.search(str(report.longrepr))):
        report.outcome, report.longrepr = "skipped", (str(path), 0, f"Skipped: {found[1]}")
    return report


@pytest.fixture(scope="session")
def _stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("stores")
    return (folder / str(number) / "store" for number in itertools.count())


@pytest.fixture(autouse=True)
def own_store(_stores: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or fills the user's cache."""
    folder = next(_stores)
    monkeypatch.setenv("TRT_ENGINE_STORE", str(folder))
    return folder


@pytest.fixture(scope="module")
def _store_of_the_file(_stores: Iterator[Path]) -> Path:
    return next(_stores)


@pytest.fixture
def kept_engines(_store_of_the_file: Path, own_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of the file share a store: what one of them built is there for the next.

    Asked for by `pytestmark`; a test of what is built then asks for `empty_store` beside it.
    """
    monkeypatch.setenv("TRT_ENGINE_STORE", str(_store_of_the_file))


@pytest.fixture
def empty_store(kept_engines: None, own_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of the test's own, in a file whose tests share one."""
    monkeypatch.setenv("TRT_ENGINE_STORE", str(own_store))
    return own_store


@pytest.fixture(autouse=True, scope="session")
def _messages_as_written() -> Iterator[None]:
    """Tests compare messages as they stand in the sources, whichever of them has used `te` before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(errors, "in_shell", True)
        patch.setattr(errors, "installable", str)
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk() -> Iterator[None]:
    """What a power cut leaves of a file is not tested, and a busy disk takes long over thousands of small ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
    """What of TensorRT was shown here and what was not stands last of all: a skip among thousands of dots is not seen.

    The other skips are counted by their reasons, before the failures: a line for each would hide those.
    """
    skips = [str(report.longrepr[2]) for report in terminalreporter.getreports("skipped") if report.longrepr]
    reasons = [text.removeprefix("Skipped: ") for text in skips]
    if reasons:
        terminalreporter.section("skipped, by reason", sep="=")
        for reason, count in Counter(reasons).most_common():
            terminalreporter.line(f"{count:5d} x {reason}")
    yield
    _say_skipped(terminalreporter, "TensorRT's bindings", "of the tensorrt backend", [
        text for text in reasons if "the bindings of TensorRT cannot be had" in text
    ])  # fmt: skip
    _say_skipped(terminalreporter, "TensorRT-RTX", "with TensorRT-RTX's own parser and builder", [
        text for text in reasons if "TensorRT-RTX is not installed" in text or "import 'tensorrt_rtx'" in text
    ])  # fmt: skip
    noted = [item for report in terminalreporter.getreports("passed") for item in report.user_properties]
    built = sum(int(str(value)) for name, value in noted if name == "rtx built")
    refused = Counter(str(value) for name, value in noted if name == "rtx refused")
    if built:
        terminalreporter.section("TensorRT-RTX", sep="=", green=True)
        terminalreporter.line(
            f"{built} of {built + refused.total()} engines (network, format, GPU) were built by its own builder; refused "
            f"before it started, for a type the GPU lacks: {refused.total()}"
        )
        for reason, count in refused.most_common():
            terminalreporter.line(f"  {count} x {reason}")


def _say_skipped(terminalreporter: pytest.TerminalReporter, title: str, which: str, reasons: list[str]) -> None:
    if reasons:
        terminalreporter.section(title, sep="=", yellow=True)
        terminalreporter.line(f"{len(reasons)} tests {which} did NOT run here:")
        for reason, count in Counter(reasons).most_common():
            terminalreporter.line(f"  {count} x {reason}")


@pytest.fixture(scope="session")
def first_log() -> tuple[list[logging.Handler], int, bool]:
    logger = logging.getLogger("trt_engine")
    return logger.handlers[:], logger.level, logger.propagate


@pytest.fixture(autouse=True)
def own_log(first_log: tuple[list[logging.Handler], int, bool]) -> Iterator[None]:
    """A verb sets the package's log up for its process; each test finds it as the first did, whatever fixtures ran."""
    logger = logging.getLogger("trt_engine")
    logger.handlers[:], logger.level, logger.propagate = first_log
    yield
    logger.handlers[:], logger.level, logger.propagate = first_log
