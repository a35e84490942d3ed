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
from trt_engine.errors import FeedError, TrtEngineError, UsageError
from trt_engine.public_function import _named_kinds, check_call
from trt_engine.runtime.feeds import write_outputs

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
    "result=array": (lambda runner, x: runner.infer(x, result=x), r"`result` is an array `ndarray` of .*, expected `True`"),
    "on_device=name": (lambda runner, x: runner.infer(x, on_device="cuda:0"), r"`on_device` is 'cuda:0', expected `True`"),
    "a century": (lambda *_: te.BenchConfig(idle_s=4e9), r"`--idle` is 4000000000.0, expected 1e\+09 s or less"),
    "device": (lambda *_: te.BuildConfig(device=0), r"`device` is 0, expected text\nhint: as `device=\"cuda:0\"`"),
    "no such tensor": (
        lambda runner, _: te.cast(runner.engine.path.with_name("net.onnx"), "fp16", ranges={"xx": 1.0}),
        r"the model has no tensor `xx`",
    ),
    "positions": (lambda *_: te.BuildConfig(1, 2), r"`te.BuildConfig`: too many positional arguments"),
    "another config": (lambda *_: te.bench("x", config=te.BuildConfig()), r"`config` is an object of .*BuildConfig"),
    "labels": (
        lambda runner, x: te.quantize(
            runner.engine.path.with_name("net.onnx"), to="int8", calib_data=[(x, np.zeros(1))], out="q.onnx"
        ),
        r"item 0 is a tuple of 2, expected one array of numbers",
    ),
}  # fmt: skip


TAKEN: tuple[Callable[[Any], Any], ...] = (lambda x: {"images": x}, lambda x: x)
REFUSED: tuple[Callable[[Any], Any], ...] = (lambda x: {"images": x.tolist()}, lambda x: [x], iter, lambda _: 3)
TAKERS: dict[str, Callable[[Path, Path, Any], object]] = {
    "infer an engine": lambda engine, _, x: te.infer(engine, x),
    "infer a model": lambda _, model, x: te.infer(model, x),
    "bench": lambda engine, _, x: te.bench(engine, inputs=x, duration_s=0.01, warmup_s=0),
    "build": lambda engine, model, x: te.build(model, inputs=x, out=engine.with_name("b.engine.onnx"), overwrite=True),
    "cast": lambda _, model, x: te.cast(model, "fp16", inputs=x, dry_run=True),
    "loadtest": lambda engine, _, x: te.loadtest(engine, inputs=x, duration_s=0.05, concurrency=1),
    "calibration": lambda _, model, x: te.build(model, calib_data=x, precision="int8"),
}


@pytest.mark.parametrize("taker", TAKERS)
def test_every_function_takes_the_same_forms_of_inputs_and_no_others(taker: str, tmp_path: Path) -> None:
    model = models.conv_net(tmp_path / "net.onnx")
    engine = te.build(model, batch=(1, 2, 2), out=tmp_path / "net.engine.onnx")
    x = np.zeros([abs(size) for size in engine.signature.inputs[0].shape], np.float32)
    for form in TAKEN:
        TAKERS[taker](engine.path, model, form(x))
    for form in REFUSED:
        with pytest.raises(FeedError, match=r"expected an array\nhint: `numpy.asarray"):
            TAKERS[taker](engine.path, model, form(x))


def test_a_path_is_taken_where_text_names_data(tmp_path: Path) -> None:
    model = models.conv_net(tmp_path / "net.onnx")
    x = np.zeros((2, *map(abs, te.inspect(model).signature.inputs[0].shape[1:])), np.float32)
    data = write_outputs(tmp_path / "data.npy", {"images": x})
    engine = te.build(model, batch=(1, 2, 2), precision="int8", calib_data=data, out=tmp_path / "net.engine.onnx")
    assert engine.passport.build.notes["calibrated_with"] == str(data)
    with pytest.raises(UsageError, match=r"PosixPath`, expected text\nhint: `str\(calib_data\)`"):
        te.BuildConfig(calib_data=data)  # type: ignore[arg-type]


def test_the_command_of_a_build_names_no_folder_that_ended_with_the_call(tmp_path: Path) -> None:
    model, x = models.conv_net(tmp_path / "net.onnx"), np.ones((2, 3, 8, 8), np.float32)
    engine = te.build(model.read_bytes(), batch=(1, 2, 2), precision="int8", calib_data=x, inputs={"images": x})
    made = engine.passport.build
    assert "--calib-data calib_data.npy" in made.command and "--inputs inputs.npz" in made.command
    assert made.command.startswith("trt-engine build model.onnx ") and made.notes["calibrated_with"] == "calib_data.npy"


def test_known_ranges_keep_nodes_of_a_cast(tmp_path: Path) -> None:
    model = models.conv_net(tmp_path / "net.onnx")
    x = np.zeros((2, 3, 8, 8), np.float32)
    *none, kept = [te.cast(model, to, inputs=x, ranges={"images": top}, out=tmp_path / f"{to}{top:g}.onnx") for to, top in
                   (("fp16", 1.0), ("bf16", 7e4), ("fp16", 7e4))]  # fmt: skip
    assert not any(one.fp32_nodes or "--inputs" in str(one.next_command) for one in none)  # a file that is gone
    assert "`images` reaches 7e+04" in kept.fp32_nodes[0].reason


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
