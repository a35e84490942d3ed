"""What every test starts from: a store of its own, and the package's log as the library leaves it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or fills the user's cache."""
    folder = tmp_path_factory.mktemp("own") / "store"
    monkeypatch.setenv("TRT_ENGINE_STORE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """A verb sets the package's log up for its process; the next test finds it as it was."""
    logger = logging.getLogger("trt_engine")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before
