"""Arguments that do not fit: every public function, method and settings class refuses them in words of Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_models as models
import trt_engine as te
from trt_engine.errors import TrtEngineError, UsageError
from trt_engine.public_function import _named_kinds, check_call

CALLS = [name for name in te.__all__ if inspect.isfunction(getattr(te, name)) or name.endswith("Config")]
CALLS.remove("log_to")  # it stands below what checks the others


class Odd:
    """No argument of anything."""


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_of_a_foreign_type_is_refused_by_its_name(name: str) -> None:
    call: Callable[..., Any] = getattr(te, name)
    items = [item for item in inspect.signature(call).parameters.values() if "VAR" not in item.kind.name]
    required = {item.name: "x" for item in items if item.default is item.empty and item.kind is item.KEYWORD_ONLY}
    words = ["x" for item in items if item.default is item.empty and item.kind is not item.KEYWORD_ONLY]
    checked = [item.name for item in items[len(words) :] if _named_kinds(str(item.annotation))]
    assert checked or name in ("diff", "example", "migrate", "pack", "report", "validate")
    for wrong in checked:
        with pytest.raises(UsageError, match=f"`{wrong}` is an object of .*, expected ") as found:
            call(*words, **required | {wrong: Odd()})
        assert found.value.hint
    with pytest.raises(UsageError, match=f"`te.{name}` has no argument `zzzzzz`"):
        call(*words, **required, zzzzzz=1)


WRONG: dict[str, tuple[Callable[[te.InferenceEngine, Any], object], str]] = {
    "two arrays": (lambda runner, x: runner.infer(x, x), r"`te.InferenceEngine.infer`: too many positional arguments"),
    "infer(out=)": (lambda runner, x: runner(x, out=x), r"`te.InferenceEngine.infer` has no argument `out`"),
    "open": (lambda *_: te.Engine.open(), r"missing a required argument: 'path'\nhint: `te.Engine.open\(path\)`"),
    "no feeds": (lambda runner, _: runner.infer_async(), r"infer_async`: missing a required argument: 'feeds'"),
    "bind(name)": (lambda runner, x: runner.bind(x, {3: x}), r"unknown output `3`"),
    "feeds of a call": (lambda runner, x: runner.bind(x)(x), r"a bound call takes no feeds"),
    "shapes": (lambda runner, _: runner.warmup(shapes=7), r"`shapes` is 7, expected a mapping"),
    "seed": (lambda runner, _: runner.warmup(seed=[None]), r"`seed` is a list of 1, expected a whole number"),
    "positions": (lambda *_: te.BuildConfig(1, 2), r"`te.BuildConfig`: too many positional arguments"),
    "another config": (lambda *_: te.bench("x", config=te.BuildConfig()), r"`config` is an object of .*BuildConfig"),
    "labels": (
        lambda runner, x: te.quantize(
            runner.engine.path.with_name("net.onnx"), to="int8", calib_data=[(x, np.zeros(1))], out="q.onnx"
        ),
        r"item 0 is a tuple of 2, expected one array of numbers",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("annotation", "value"),
    [("Mapping[str, Any] | Sequence[str] | None", ["a=1"]), ("Mapping[str, object] | Iterable[str]", iter("a")),
     ("str | Mapping[str, Sequence[int]]", {"x": [1]}), ("str | Sequence[float]", np.array([50.0, 99.0]))],
)  # fmt: skip
def test_each_type_of_an_annotation_is_taken(annotation: str, value: object) -> None:
    parameter = inspect.Parameter("value", inspect.Parameter.POSITIONAL_ONLY, annotation=annotation)
    check_call("te.f", inspect.Signature([parameter]), (value,), {})
    with pytest.raises(UsageError, match="`value` is 7, expected"):
        check_call("te.f", inspect.Signature([parameter]), (7,), {})


def test_infer_shows_what_it_takes_and_an_engine_without_inputs_takes_no_array(tmp_path: Path) -> None:
    shown = "(self, feeds: 'Any', *, result: 'bool' = False, on_device: 'bool' = False)"
    assert str(inspect.signature(te.InferenceEngine.infer)).startswith(shown)
    made = models.save(
        tmp_path / "made.onnx", [models.node("Identity", "w", "y")], {}, {"y": (models.FLOAT, [2])},
        {"w": np.ones(2, np.float32)},
    )  # fmt: skip
    with te.load(te.build(made, parity=False, out=tmp_path / "made.engine.onnx")) as runner:
        assert runner.infer({})["y"].tolist() == [1, 1]
        with pytest.raises(TrtEngineError, match="the engine has 0 inputs"):
            runner.infer(np.ones(2, np.float32))


@pytest.mark.parametrize("case", WRONG)
def test_a_call_that_does_not_fit_says_how_to_call(case: str, tmp_path: Path) -> None:
    engine = te.build(models.conv_net(tmp_path / "net.onnx"), batch=(1, 2, 2), out=tmp_path / "net.engine.onnx")
    call, message = WRONG[case]
    with te.load(engine) as runner, pytest.raises(TrtEngineError, match=message) as found:
        call(runner, np.zeros([abs(size) for size in runner.inputs[0].shape], np.float32))
    assert found.value.hint
    assert not isinstance(found.value.__context__, TypeError) or found.value.__suppress_context__
