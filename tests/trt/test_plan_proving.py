"""What a plan is loaded with to be proved: what its build was given, its own weights and code; or why it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trt_engine.config.build import BuildConfig
from trt_engine.trt.settings import parity_options

MODEL = Path("net.onnx")


def asked(**options: str) -> Any:
    return parity_options(MODEL, BuildConfig(backend="tensorrt", options=options))


def test_settings_of_the_build_alone_are_no_settings_of_the_run() -> None:
    assert asked(optimization_level="4", refit="all") == {}


def test_what_the_plan_needs_beside_it_is_what_the_build_was_given() -> None:
    given = {"plugins": "a.so,b.so", "python_plugins": "mine.py", "dla_core": "1", "memory_strategy": "user_managed"}
    assert asked(**given, sparsity="on") == given


def test_host_code_of_ones_own_and_stripped_weights_are_taken_along() -> None:
    assert asked(version_compatible="on") == {"allow_host_code": "on"}
    assert asked(plugins="a.so", serialize_plugins="on") == {"plugins": "a.so", "allow_host_code": "on"}
    assert asked(strip_weights="on") == {"refit_from": "net.onnx"}
