"""The package's public face."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import trt_engine as te
from trt_engine import public_function
from trt_engine.cli import verbs_table
from trt_engine.errors import UsageError

COMMANDS = sorted(verbs_table.VERBS.keys() - {"cache", "completion"})
"""The verbs of the command line that are functions as well: the others are for a terminal alone."""
VERBS = [name for name in te.__all__ if inspect.isfunction(getattr(te, name)) and name != "log_to"]


def test_every_public_name_resolves_and_has_a_docstring() -> None:
    assert sorted(te.__all__) == sorted(te._HOMES)
    for name in te.__all__:
        value = getattr(te, name)
        assert value.__doc__, name
        assert value.__name__ == name


def test_every_public_name_resolves_without_the_optional_parts() -> None:
    absent = (
        "PIL faster_coco_eval sklearn tree_sitter httptools grpc prometheus_client opentelemetry ray torch tensorflow"
    )
    code = f"import sys; sys.modules.update(dict.fromkeys({absent.split()})); from trt_engine import *"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_verb_stays_a_function_after_its_folder_was_imported() -> None:
    import trt_engine.benchmark
    import trt_engine.reporting
    import trt_engine.verbs.doctor
    import trt_engine.verbs.size

    assert trt_engine.benchmark.__name__ == "trt_engine.benchmark"
    assert all(
        callable(getattr(te, verb)) for verb in ("bench", "build", "doctor", "inspect", "load", "report", "size")
    )


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_verb_of_the_command_line_is_a_function_in_the_folder_of_its_name(verb: str) -> None:
    name = verb.replace("-", "_")
    function = getattr(te, name)
    assert inspect.isfunction(function) and name in VERBS
    assert name in ("pack", "report") or function.__module__.split(".")[:3] == ["trt_engine", "verbs", name]


def test_no_module_of_the_package_root_has_the_name_of_a_verb() -> None:
    root = Path(te.__file__).parent
    assert not {path.name.removesuffix(".py") for path in root.iterdir()} & {*VERBS, *verbs_table.VERBS}


def test_importing_the_package_loads_no_module_of_it_and_no_library() -> None:
    code = "import sys; before = set(sys.modules); import trt_engine; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["__future__", "trt_engine"]


def test_the_version_is_the_distributions() -> None:
    from importlib.metadata import version

    assert te.__version__ == version("trt-engine")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'bild'"):
        te.bild  # noqa: B018


def test_dir_shows_the_public_names_alone() -> None:
    assert sorted(dir(te)) == sorted([*te.__all__, "__version__"])


def test_an_application_without_the_file_of_types_takes_settings_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_function, "_typed_settings", dict)
    with pytest.raises(UsageError, match="fp64"):
        public_function.public_function(te.build.__wrapped__)("a.onnx", precision="fp64")


@pytest.mark.parametrize("verb", VERBS)
def test_every_function_refuses_a_keyword_argument_it_does_not_have(verb: str) -> None:
    with pytest.raises(UsageError, match=f"`te.{verb}` has no argument `zzzzzz`") as caught:
        getattr(te, verb)(zzzzzz=1)
    assert caught.value.hint == f"`help(te.{verb})` lists the arguments"


@pytest.mark.parametrize(
    ("verb", "wrong", "right"),
    [
        ("size", "max_bach", "max_batch"),
        ("build", "ouut", "out"),
        ("load", "context", "contexts"),
        ("bench", "duration", "duration_s"),
        ("profile", "inference", "inferences"),
        ("compare", "fail_iff", "fail_if"),
        ("evaluate", "max_sample", "max_samples"),
        ("quantize", "exclude_node", "exclude_nodes"),
        ("bundle", "dim", "dims"),
        ("convert", "simplfy", "simplify"),
        ("cast", "exclude_type", "exclude_types"),
    ],
)
def test_a_mistyped_argument_is_answered_with_the_nearest(verb: str, wrong: str, right: str) -> None:
    with pytest.raises(UsageError) as caught:
        getattr(te, verb)("m.onnx", **{wrong: 1})
    assert caught.value.hint == f"did you mean `{right}`?"


@pytest.mark.parametrize(
    "verb",
    ["build", "bundle", "size", "bench", "profile", "compare", "evaluate", "convert", "cast", "quantize", "ranges",
     "calibrate", "run"],
)  # fmt: skip
def test_every_long_call_takes_progress_and_is_silent_without(verb: str) -> None:
    assert inspect.signature(getattr(te, verb)).parameters["progress"].default is False
