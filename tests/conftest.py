"""What every test starts from: a store of its own, and the package's log as the library leaves it."""

from __future__ import annotations

import logging
import signal
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# the same examples every time, and no clock that judges them: a busy machine is no counterexample
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
# `pytest --hypothesis-profile=search` looks for new ones
settings.register_profile("search", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

# ignored in a background job and under `nohup`: the programs that tests start would not hear them either
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


@pytest.fixture(autouse=True)
def own_store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or fills the user's cache."""
    folder = tmp_path_factory.mktemp("own") / "store"
    monkeypatch.setenv("TRT_ENGINE_STORE", str(folder))
    return folder


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
    """What was not shown of TensorRT here stands last of all: a skip among thousands of dots is not seen."""
    yield
    told = [str(report.longrepr[2]) for report in terminalreporter.getreports("skipped") if report.longrepr]
    reasons = Counter(
        text.removeprefix("Skipped: ") for text in told if "the bindings of TensorRT cannot be had" in text
    )
    if reasons:
        terminalreporter.section("TensorRT's bindings", sep="=", yellow=True)
        terminalreporter.line(f"{sum(reasons.values())} tests of the tensorrt backend did NOT run here:")
        for reason, count in reasons.most_common():
            terminalreporter.line(f"  {count} x {reason}")


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """A verb sets the package's log up for its process; the next test finds it as it was."""
    logger = logging.getLogger("trt_engine")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before
