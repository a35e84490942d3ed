"""TensorFlow sources to ONNX: each is written by TensorFlow in a process of its own, which also tells what it answers."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import trt_engine as te
from trt_engine.conversion.axes import parse_dynamic
from trt_engine.conversion.examples import parse_inputs
from trt_engine.conversion.exported import Exported
from trt_engine.conversion.sources import detect_source
from trt_engine.conversion.tensorflow.tensorflow_source import (
    PYTHON,
    TensorFlowOptions,
    export_opened,
    export_tensorflow,
    open_source,
)
from trt_engine.errors import FeedError, ModelError, SetupError, UsageError
from trt_engine.graph import walk

_HERE = importlib.util.find_spec("tensorflow") is not None and importlib.util.find_spec("tf2onnx") is not None
_PYTHON = os.environ.get(PYTHON) or sys.executable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.skipif(
        not _HERE and PYTHON not in os.environ,
        reason=f"TensorFlow and tf2onnx are not installed here, and `{PYTHON}` names no interpreter that has them",
    ),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sources and their answers."""
    folder = tmp_path_factory.mktemp("tensorflow")
    maker = Path(__file__).with_name("tensorflow_sources.py")
    done = subprocess.run([_PYTHON, str(maker), str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def converted(
    path: Path, folder: Path, *, inputs: Any = None, dynamic: Any = None, opset: int = 18, **options: Any
) -> Exported:
    return export_tensorflow(
        detect_source(path),
        parse_inputs(inputs),
        None if dynamic is None else parse_dynamic(dynamic),
        opset,
        folder,
        options=options,
        python=_PYTHON,
    )


def truths(made: Path, name: str) -> Iterator[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    for at in range(3):
        with np.load(made / f"{name}-{at}.npz") as found:
            yield (
                {key[3:]: found[key] for key in found if key.startswith("in:")},
                {key[4:]: found[key] for key in found if key.startswith("out:")},
            )


def run(exported: Exported, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def apart(got: np.ndarray, want: np.ndarray) -> float:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    return float(np.max(np.abs(got.astype(np.float64) - want), initial=0) / max(np.max(np.abs(want), initial=0), 1e-9))


def shapes(path: Path) -> dict[str, list[int | str]]:
    graph = onnx.load(path, load_external_data=False).graph
    return {
        item.name: [dim.dim_param or dim.dim_value for dim in item.type.tensor_type.shape.dim]
        for item in (*graph.input, *graph.output)
    }


def child_of(exported: Exported) -> int:
    call: Any = exported.reference
    return int(call.__self__._child._child.process.pid)


SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "cnn": ("cnn", {"inputs": "images:2x32x32x3", "dynamic": "images:0=batch,1=height,2=width"}),
    "sequential": ("sequential.keras", {}),
    "two_inputs": ("two_inputs.keras", {"inputs": "ids:2x6 weight:2x6x8", "dynamic": "0=batch,1=length"}),
    "recurrent": ("recurrent", {"inputs": "steps:2x7x6", "dynamic": "steps:0=batch,1=time"}),
    "frozen": ("frozen.pb", {}),
    "lite": ("lite.tflite", {}),
    "double": ("signatures", {"signature": "double"}),
    "called": ("called", {}),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_graph_and_the_reference_agree_with_the_source_at_three_shapes(
    name: str, made: Path, tmp_path: Path
) -> None:
    file, asked = SOURCES[name]
    exported = converted(made / file, tmp_path, **asked)
    try:
        for feeds, wanted in truths(made, name):
            got, reference = run(exported, feeds), exported.reference(feeds)
            assert list(got) == list(reference) and set(got) == set(wanted)
            for key, want in wanted.items():
                assert apart(got[key], want) <= 1e-4
                assert apart(reference[key], want) <= 1e-5
        first = next(truths(made, name))[0]
        assert any(
            np.ptp(value) > 1e-3 for value in run(exported, first).values()
        )  # a constant would agree with itself
        assert "unk__" not in str(onnx.load(exported.path))
        assert (exported.exporter, exported.versions["tf2onnx"][:2]) == ("tf2onnx", "1.")
        assert walk.opsets_of(onnx.load(exported.path)) == {"": 18} | (
            {"ai.onnx.ml": 2} if "ai.onnx.ml" in walk.opsets_of(onnx.load(exported.path)) else {}
        )
    finally:
        exported.close()


def test_names_and_symbols_are_those_of_the_source_and_of_the_user(made: Path, tmp_path: Path) -> None:
    exported = converted(
        made / "two_inputs.keras", tmp_path, inputs="ids:2x6 weight:2x6x8", dynamic="0=n@1..8,1=length"
    )
    exported.close()
    found = shapes(exported.path)
    assert list(found) == ["ids", "weight", "pooled", "tokens"]
    assert (found["ids"], found["weight"]) == (["n", "length"], ["n", "length", 8])
    assert exported.symbols == {"ids": {0: "n", 1: "length"}, "weight": {0: "n", 1: "length"}}
    assert exported.limits["n"].high == 8
    assert exported.example["ids"].dtype == np.int32  # the type is the source's own


def test_inputs_as_nchw_are_transposed_in_the_graph_and_in_the_reference(made: Path, tmp_path: Path) -> None:
    exported = converted(
        made / "cnn", tmp_path, inputs="images:2x3x32x48", dynamic="0=batch,2=h,3=w", inputs_as_nchw="images"
    )
    try:
        assert shapes(exported.path)["images"] == ["batch", 3, "h", "w"]
        for feeds, wanted in truths(made, "cnn"):
            turned = {"images": np.ascontiguousarray(feeds["images"].transpose(0, 3, 1, 2))}
            assert apart(run(exported, turned)["output_0"], wanted["output_0"]) <= 1e-4
            assert apart(exported.reference(turned)["output_0"], wanted["output_0"]) <= 1e-5
    finally:
        exported.close()


def test_large_weights_lie_beside_the_graph_and_it_still_agrees(made: Path, tmp_path: Path) -> None:
    with open_source(made / "sequential.keras", "keras", [], None, TensorFlowOptions(python=_PYTHON)) as call:
        exported = export_opened(call, 17, tmp_path, large_nbytes=100)
        beside = tmp_path / "tf2onnx.onnx.data"
        assert beside.stat().st_size == 4 * 16 * 96
        for feeds, wanted in truths(made, "sequential"):
            assert apart(run(exported, feeds)["logits"], wanted["logits"]) <= 1e-4
        assert walk.opsets_of(onnx.load(exported.path))[""] == 17


def test_hdf5_and_files_without_their_suffix_are_read_by_content(made: Path, tmp_path: Path) -> None:
    for file in ("sequential.h5", "sequential.download"):
        exported = converted(made / file, tmp_path)
        try:
            for feeds, wanted in truths(made, "sequential"):
                assert apart(run(exported, feeds)["logits"], wanted["logits"]) <= 1e-4
        finally:
            exported.close()


def test_a_frozen_graph_is_cut_where_it_is_named(made: Path, tmp_path: Path) -> None:
    exported = converted(made / "frozen.pb", tmp_path, outputs="halves:1")
    try:
        assert set(shapes(exported.path)) == {"net/image", "scale", "halves_1"}
        for feeds, wanted in truths(made, "frozen"):
            assert apart(run(exported, feeds)["halves_1"], wanted["halves_1"]) <= 1e-4
        assert any("`keep` keeps its default" in note for note in exported.notes)
    finally:
        exported.close()


def test_an_input_of_unknown_rank_takes_the_example_s(made: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="declare the rank of `b`"):
        converted(made / "signatures", tmp_path, signature="ranks", inputs="a:2x5")
    exported = converted(
        made / "signatures", tmp_path, signature="ranks", inputs="a:2x5 b:2x3x4", dynamic="a:0=n,1=m b:0=n"
    )
    try:
        assert shapes(exported.path)["b"] == ["n", 3, 4]
        feeds = {"a": np.ones((4, 2), np.float32), "b": np.arange(48, dtype=np.float32).reshape(4, 3, 4)}
        for answer in (run(exported, feeds), exported.reference(feeds)):
            assert answer["sum"].tolist() == [2.0] * 4
            assert np.array_equal(answer["kept"], feeds["b"])
    finally:
        exported.close()


def refusals() -> dict[str, tuple[str, dict[str, Any], type[Exception], str]]:
    return {
        "no variables": ("no-variables", {}, ModelError, "cannot load the SavedModel"),
        "a damaged SavedModel": ("no-saved-model", {}, ModelError, "is not a SavedModel"),
        "a signature that is not there": (
            "signatures", {"signature": "doubel"}, UsageError, "no signature `doubel`; it has: `beyond`, `double`"),
        "several signatures": ("signatures", {}, UsageError, "several signatures"),
        "a tag that is not there": ("cnn", {"tags": "serve,gpu"}, UsageError, "no graph tagged `serve,gpu`, only `serve`"),
        "text": ("signatures", {"signature": "words"}, ModelError, "`text` is text"),
        "operators without ONNX": ("signatures", {"signature": "beyond"}, ModelError, "`Igamma`.*`Zeta`"),
        "an unknown NCHW input": ("cnn", {"inputs_as_nchw": "image"}, UsageError, "no input is called `image`"),
        "NCHW of a matrix": ("sequential.keras", {"inputs_as_nchw": "features"}, UsageError, "2 dimensions"),
        "a graph with variables": ("not_frozen.pb", {}, ModelError, "not frozen"),
        "an output that is not there": ("frozen.pb", {"outputs": "net/score"}, UsageError, "no output `net/score`"),
        "Python code": ("with_code.keras", {}, ModelError, "Lambda"),
        "the converter's own limit": ("signatures", {"signature": "spectrum"}, ModelError, "tf2onnx .* at node `.*`"),
        "variables of TFLite": ("counter.tflite", {}, ModelError, "keeps state between calls"),
        "an operation of Keras in HDF5": ("masked.h5", {}, ModelError, "lacks its own operation `NotEqual`"),
        "weights alone": ("only.weights.h5", {}, ModelError, "only.weights.h5"),
    }  # fmt: skip


@pytest.mark.parametrize("what", refusals())
def test_what_cannot_be_converted_is_refused_in_words(what: str, made: Path, tmp_path: Path) -> None:
    file, asked, kind, text = refusals()[what]
    with pytest.raises(kind, match=text) as caught:
        converted(made / file, tmp_path, **asked).close()
    assert "Traceback" not in str(caught.value)
    assert caught.value.hint  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("file", "kind"), [("torn.tflite", "tflite"), ("noise.tflite", "tflite"), ("noise.pb", "frozen-graph")]
)
def test_damaged_files_end_the_child_at_most(file: str, kind: str, made: Path, tmp_path: Path) -> None:
    """TFLite's parser may crash on such a file: then the child is gone, and we are not."""
    source = replace(detect_source(made / "lite.tflite"), text=file, kind=kind, path=made / file)  # type: ignore[arg-type]
    with pytest.raises(ModelError) as caught:
        export_tensorflow(source, [], None, 18, tmp_path, python=_PYTHON).close()
    assert file in str(caught.value)


def test_a_random_operator_of_tensorflow_is_refused_before_anything_is_compared(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the graph has a random operator"):
        te.convert(made / "dice", out=tmp_path / "o.onnx", python=_PYTHON)
    assert list(tmp_path.iterdir()) == []


def test_the_child_is_gone_after_close_and_a_closed_source_says_so(made: Path, tmp_path: Path) -> None:
    exported = converted(made / "sequential.keras", tmp_path)
    pid = child_of(exported)
    assert Path(f"/proc/{pid}").exists()
    exported.close()
    exported.close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(ModelError, match="was closed"):
        exported.reference(exported.example)


def test_a_source_that_refuses_a_size_lives_on_and_one_that_is_killed_is_an_error(made: Path, tmp_path: Path) -> None:
    exported = converted(made / "frozen.pb", tmp_path)
    try:
        wrong = {"net/image": np.zeros((2, 15, 16, 3), np.float32), "scale": np.float32(1)}
        with pytest.raises(ModelError, match="does not run on net/image"):
            exported.reference(wrong)
        with pytest.raises(FeedError, match="float64"):
            exported.reference({**exported.example, "scale": np.float64(1)})
        assert set(exported.reference(exported.example)) == {"net/scores", "halves", "halves_1"}
        os.kill(child_of(exported), signal.SIGKILL)
        with pytest.raises(SetupError, match=r"ended by SIGKILL while running .*frozen\.pb"):
            exported.reference(exported.example)
    finally:
        exported.close()
