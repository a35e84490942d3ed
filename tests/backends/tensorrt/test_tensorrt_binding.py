"""The libraries as one object: which releases are taken."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from trt_engine.backends.tensorrt.binding import TENSORRT, TENSORRT_RTX, Binding
from trt_engine.errors import SetupError


@pytest.mark.parametrize(
    ("binding", "version", "needed"),
    [(TENSORRT, "8.6.1", "10.0"), (TENSORRT, "1.7.1", "10.0"), (TENSORRT_RTX, "1.2", "1.7")],
)
def test_a_release_that_is_too_old_is_refused_for_its_age(binding: Binding, version: str, needed: str) -> None:
    """Not for the first setting it lacks, which nobody gave."""
    old = dataclasses.replace(binding)
    old.__dict__["trt"] = SimpleNamespace(__version__=version)
    with pytest.raises(
        SetupError, match=f"{binding.product} {version} is too old: {needed} or later is needed"
    ) as caught:
        old.check_version()
    assert "pip install" in (caught.value.hint or "")
