"""One worker process for all tests of the fuzzer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fuzz.campaign import Watched


@pytest.fixture(scope="session")
def worker() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.close()
