"""The package's public face."""

from __future__ import annotations

import pytest

import trt_engine as te


def test_every_public_name_resolves_and_has_a_docstring() -> None:
    assert sorted(te.__all__) == sorted(te._HOME)
    for name in te.__all__:
        value = getattr(te, name)
        assert value.__doc__, name
        assert value.__name__ == name


def test_a_verb_stays_a_function_after_its_folder_was_imported() -> None:
    import trt_engine.benchmark
    import trt_engine.diagnosis
    import trt_engine.reporting
    import trt_engine.sizing

    assert trt_engine.benchmark.__name__ == "trt_engine.benchmark"
    assert all(
        callable(getattr(te, verb)) for verb in ("bench", "build", "doctor", "inspect", "load", "report", "size")
    )


def test_the_version_is_the_distributions() -> None:
    from importlib.metadata import version

    assert te.__version__ == version("trt-engine")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'bild'"):
        te.bild  # noqa: B018
