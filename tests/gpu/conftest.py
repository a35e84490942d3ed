"""The first GPU of the machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from trt_engine.device import open_device
from trt_engine.errors import SetupError


@pytest.fixture
def device() -> Iterator[Any]:
    try:
        made = open_device("cuda:0")
    except SetupError as error:
        pytest.skip(f"no GPU here: {error.message}")
    yield made
    made.close()
