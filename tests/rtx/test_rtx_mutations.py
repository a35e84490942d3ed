"""The mistakes that tests/bindings plants in a copy of the backend, before TensorRT-RTX's own parser and builder.

Each one that is on the way of a build without a GPU is found by the test named here, which passes on the backend as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bindings.harness import SOURCE
from bindings.test_bindings_mutations import BACKEND, READ, RUN
from trt_engine.environment import distribution_version

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        distribution_version("tensorrt-rtx") is None, reason="TensorRT-RTX is not installed: no mistake was looked for"
    ),
]
HERE = Path(__file__).resolve().parent
EVERY = READ | RUN

_PLAN = "test_rtx_build.py::test_one_plan_is_built_for_both_gpus_and_states_them"
_SETTING = "test_rtx_messages.py::test_a_setting_that_is_refused_comes_with_the_librarys_reason"
_BUILT = "test_rtx_messages.py::test_a_build_that_succeeds_has_no_cause_and_phases_by_their_own_time"
_FORMATS = "test_rtx_build.py::test_the_table_of_formats_is_what_the_builder_takes"
FOUND = {
    "a wrong name of a method": _PLAN,
    "a wrong name on an object two calls away": _PLAN,
    "a flag by its number": _PLAN,
    "a callback TensorRT does not know": _PLAN,
    "two parameters are swapped": _PLAN,
    "the ends of a profile are swapped": _PLAN,
    "a precision flag": _BUILT,
    "a precision flag, on 10 too": _BUILT,
    "a precision flag is set behind a name nobody reads": _BUILT,
    "the same on 10": _BUILT,
    "a setter is believed": _SETTING,
    "a callback that takes too little": "test_rtx_build.py::test_the_raw_log_and_the_phases_are_kept",
    "nothing is not looked for where the plan is made": _FORMATS,
    "a parser's no is not heard": "test_rtx_build.py::test_the_parsers_refusal_is_a_model_error",
    "the monitor never says stop": "test_rtx_build.py::test_a_build_that_is_cancelled_stops_at_the_librarys_next_step",
}
NOT_HERE = {
    "an engine that is loaded, which needs an RTX GPU": {
        "a wrong name in the hot path", "a method that 11 took out", "a name of 10.1 on 10.0",
        "an inference goes to the default stream", "a refused shape is not heard", "host code is allowed to everybody",
        "an error keeps the engine alive longer than its memory",
    },
    "a timing cache with timings, which TensorRT-RTX does not have": {
        "a parameter left out", "a parameter of another name", "a timing cache of another GPU is taken",
        "others' timings are overwritten",
    },
    "a factory that gives nothing, which the library does not do here": {
        "nothing is not looked for where an object is made"
    },
}  # fmt: skip
"""What the others need; they are found over the scripted library (tests/bindings)."""


def test_every_planted_mistake_is_found_here_or_has_its_reason() -> None:
    assert sorted([*FOUND, *(name for names in NOT_HERE.values() for name in names)]) == sorted(EVERY)


def outcome(source: Path, tests: set[str]) -> subprocess.CompletedProcess[str]:
    names = [f"{HERE}/{name}" for name in sorted(tests)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *names], cwd=HERE.parents[1],
        env=os.environ | {"PYTHONPATH": str(source)}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


def test_the_tests_pass_on_the_backend_as_it_is() -> None:
    done = outcome(SOURCE, {*FOUND.values()})
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("name", FOUND)
def test_the_real_library_finds(name: str, tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "src")
    EVERY[name].make(tmp_path / "src" / BACKEND)
    done = outcome(tmp_path / "src", {FOUND[name]})
    assert done.returncode == 1 and ("failed" in done.stdout or "error" in done.stdout), done.stdout[-3000:]
