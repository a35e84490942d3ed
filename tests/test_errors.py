"""Errors: the exit code says who must act, and nothing is lost on the way between processes."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import re
from pathlib import Path

import pytest

from trt_engine import errors
from trt_engine.errors import TrtEngineError

ALL = [item for _, item in inspect.getmembers(errors, inspect.isclass) if hasattr(item, "exit_code")]


def test_every_error_is_defined_here_and_has_a_docstring() -> None:
    assert all(item.__module__ == errors.__name__ for item in ALL)
    assert all(item.__doc__ for item in ALL)


def test_exit_codes_are_unique_but_for_the_kinds_of_usage_and_setup() -> None:
    codes = {item: item.exit_code for item in ALL if "exit_code" in vars(item)}
    assert len(set(codes.values())) == len(codes)
    assert sorted(codes.values()) == [*range(1, 15), 130]
    inherit = [item for item in ALL if "exit_code" not in vars(item)]
    assert all(issubclass(item, errors.UsageError | errors.SetupError) and item.exit_code in (2, 3) for item in inherit)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    for item in ALL:
        code = str(item.exit_code) if "exit_code" in vars(item) else ""
        assert re.search(rf"\b{item.__name__}\s+{code}\b", errors.__doc__ or ""), item


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("hint", [None, "type `this`"])
def test_an_error_comes_out_of_another_process_as_it_went_in(kind: type[TrtEngineError], hint: str | None) -> None:
    error = kind("found 3, expected 4", hint=hint)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert (again.message, again.hint, again.exit_code) == ("found 3, expected 4", hint, kind.exit_code)
        assert str(again) == str(error)


def test_what_was_finished_before_an_interruption_comes_along() -> None:
    error = errors.Interrupted("interrupted", partial={"queries": 3})
    assert pickle.loads(pickle.dumps(error)).partial == {"queries": 3}


def test_the_text_of_an_error_has_the_hint_on_a_line_of_its_own() -> None:
    assert str(TrtEngineError("found")) == "found"
    assert str(TrtEngineError("found", hint="type `this`")) == "found\nhint: type `this`"


def test_the_page_on_errors_has_every_exit_code() -> None:
    page = (Path(__file__).parents[1] / "docs" / "errors.md").read_text()
    for item in ALL:
        assert f"`{item.__name__}`" in page, item
        assert re.search(rf"^\| {item.exit_code} \|", page, re.MULTILINE), item


def test_ctrl_c_passes_a_loop_that_goes_on_after_errors() -> None:
    def measure() -> None:
        raise errors.Interrupted("interrupted after 3 queries", hint="again", partial={"queries": 3})

    for swallowing in (Exception, errors.TrtEngineError):
        with pytest.raises(KeyboardInterrupt) as stopped, contextlib.suppress(swallowing):
            measure()
        assert isinstance(stopped.value, errors.Interrupted) and stopped.value.partial == {"queries": 3}
    again = pickle.loads(pickle.dumps(stopped.value))
    assert (str(again), again.partial) == ("interrupted after 3 queries\nhint: again", {"queries": 3})
