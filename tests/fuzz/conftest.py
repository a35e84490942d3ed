"""One worker process for all tests of the fuzzer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fuzz.campaign import Watched
from fuzz.seeds import Seeds


@pytest.fixture(scope="session")
def worker() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.close()


@pytest.fixture(scope="session")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Seeds:
    return Seeds(tmp_path_factory.mktemp("seeds"))
