"""Calibration finds ONNX Runtime's thresholds, keeps within memory, goes on where it stopped, and refuses bad data."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper
from onnxruntime.quantization.calibrate import CalibrationMethod, create_calibrator
from small_nets import convnet, images, save

import trt_engine as te
from trt_engine.errors import FeedError, UsageError
from trt_engine.graph.load import open_model, read_proto
from trt_engine.precision.activation_probe import ActivationProbe, probed_tensors
from trt_engine.precision.calibration import calibrate
from trt_engine.precision.calibrators import HistogramCalibrator, MinMaxCalibrator
from trt_engine.precision.samples import Batch, open_samples


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return convnet(tmp_path / "net.onnx")


class Feeder:
    """ONNX Runtime's way of asking for data."""

    def __init__(self, arrays: list[Any]) -> None:
        self.left = iter(arrays)

    def get_next(self) -> Any:
        array = next(self.left, None)
        return None if array is None else {"x": array}


def onnxruntime(net: Path, arrays: list[Any], method: Any, tmp_path: Path, **options: Any) -> dict[str, float]:
    with contextlib.redirect_stdout(io.StringIO()):
        made = create_calibrator(
            net, ["Conv", "Mul"], str(tmp_path / "augmented.onnx"), calibrate_method=method, extra_options=options
        )
        made.collect_data(Feeder(arrays))
        found = made.compute_data()
    return {
        name: max(abs(float(np.min(data.range_value[0]))), abs(float(np.max(data.range_value[1]))))
        for name, data in found.items()
    }


# ------------------------------------------------------------------------------------------------ thresholds


@pytest.mark.parametrize(
    ("ours", "method", "options"),
    [
        (MinMaxCalibrator(), CalibrationMethod.MinMax, {}),
        (HistogramCalibrator("percentile", percentile=99.9), CalibrationMethod.Percentile, {"percentile": 99.9}),
    ],
)
def test_thresholds_equal_onnxruntimes_to_the_bin(
    net: Path, tmp_path: Path, ours: Any, method: Any, options: dict[str, Any]
) -> None:
    arrays = images()
    theirs = onnxruntime(net, arrays, method, tmp_path, **options)
    found = calibrate(net, arrays, ours, tensors=list(theirs))
    largest = calibrate(net, arrays, "minmax").amax
    assert set(found.amax) == set(theirs) and len(theirs) >= 5
    for name, threshold in theirs.items():
        assert found.amax[name] == pytest.approx(threshold, abs=largest[name] / 2048 * 1.01), name


@pytest.mark.parametrize("name", ["minmax", "mse", "entropy", "percentile"])
def test_the_smallest_and_the_largest_value_of_each_tensor_are_reported_beside_its_threshold(
    net: Path, tmp_path: Path, name: str
) -> None:
    arrays, cache = images(), tmp_path / "c.json"
    found = calibrate(net, arrays, name, cache=cache)
    seen = np.stack(arrays)
    assert found.min_max["x"] == (float(seen.min()), float(seen.max()))
    assert found.min_max["r1"][0] == 0.0 < found.min_max["r1"][1]
    assert found.min_max.keys() == found.amax.keys()
    assert calibrate(net, calibrator=name, cache=cache).min_max == found.min_max


@pytest.mark.parametrize("name", ["minmax", "mse", "entropy", "percentile"])
def test_a_little_memory_gives_the_same_ranges_as_a_lot(net: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plenty = calibrate(net, images(), name)
    monkeypatch.setattr("trt_engine.precision.activation_probe._WINDOW", 5)
    assert calibrate(net, images(), name, memory_mib=0).amax == plenty.amax
    assert list(plenty.amax) == ["x", "c1", "r1", "scaled", "back", "c2", "y"]


def test_a_little_memory_means_groups_of_few_tensors_with_only_the_nodes_they_need(net: Path) -> None:
    proto, first = read_proto(net), Batch({"x": images(1)[0]}, "one")
    probe = ActivationProbe(open_model(net), None, first, memory_mib=0)
    assert [group.names for group in probe._groups] == [["c1"], ["r1"], ["scaled"], ["back"], ["c2"], ["y"]]
    sizes = [len(group.model) for group in probe._groups]
    assert sizes == sorted(sizes)
    assert len(ActivationProbe(open_model(net), None, first)._groups) == 1
    assert probed_tensors(proto, {"x": (1, 3, 8, 8)})["c1"] == 8 * 8 * 8 * 4


@pytest.mark.parametrize("name", ["minmax", "mse", "entropy", "percentile"])
def test_an_iterator_is_gone_through_once_and_comes_close(net: Path, name: str) -> None:
    arrays = images(20)
    once, twice = calibrate(net, iter(arrays), name), calibrate(net, arrays, name)
    assert (once.passes, twice.passes) == (1, 1 if name == "minmax" else 2)
    for tensor in ("x", "c1", "r1"):  # of enough values for a distribution
        assert once.amax[tensor] == pytest.approx(twice.amax[tensor], rel=0.2)


def test_a_function_that_gives_the_data_is_called_for_each_pass(net: Path) -> None:
    calls = []

    def data() -> Iterator[Any]:
        calls.append(1)
        yield from images()

    assert calibrate(net, data, "entropy").amax == calibrate(net, images(), "entropy").amax
    assert len(calls) == 2


def test_data_that_changes_between_passes_is_refused(net: Path) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(FeedError, match="differs from one pass to the next"):
        calibrate(net, lambda: [rng.normal(size=(1, 3, 8, 8)).astype(np.float32)], "entropy")


def test_a_class_of_ones_own_needs_two_methods(net: Path) -> None:
    class Mean:
        def __init__(self) -> None:
            self.values: dict[str, list[float]] = {}

        def observe(self, name: str, array: Any) -> None:
            self.values.setdefault(name, []).append(float(np.abs(array).mean()))

        def threshold(self, name: str) -> float:
            return 3 * float(np.mean(self.values[name]))

    found = calibrate(net, images(), Mean(), tensors=["r1", "x"])
    assert list(found.amax) == ["x", "r1"] and found.calibrator == "Mean"
    assert found.amax["x"] == pytest.approx(3 * np.mean([np.abs(array).mean() for array in images()]), rel=1e-5)


def test_a_threshold_that_is_no_range_is_refused(net: Path) -> None:
    class Wrong:
        def observe(self, name: str, array: Any) -> None:
            pass

        def threshold(self, name: str) -> float:
            return float("nan")

    with pytest.raises(UsageError, match="`Wrong` gave nan for `x`"):
        calibrate(net, images(1), Wrong())


def test_tensors_that_are_not_there_are_refused_with_the_nearest_name(net: Path) -> None:
    with pytest.raises(UsageError) as caught:
        calibrate(net, images(), tensors=["scaledd"])
    assert "scaledd" in caught.value.message and caught.value.hint == "did you mean `scaled`?"
    with pytest.raises(UsageError, match="has no floating-point tensor `w1`"):
        calibrate(net, images(), tensors=["w1"])


def test_tensors_under_control_flow_reach_what_they_read_from_outside(tmp_path: Path) -> None:
    body = helper.make_graph(
        [helper.make_node("Add", ["c", "outer"], ["b"])], "then", [], [helper.make_tensor_value_info("b", 1, None)]
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["outer"], ["e"])], "else", [], [helper.make_tensor_value_info("e", 1, None)]
    )
    nodes = [
        helper.make_node("Relu", ["x"], ["outer"]),
        helper.make_node("ReduceMax", ["outer"], ["top"], keepdims=0),
        helper.make_node("Greater", ["top", "zero"], ["go"]),
        helper.make_node("If", ["go"], ["chosen"], then_branch=body, else_branch=other),
        helper.make_node("Neg", ["chosen"], ["y"]),
    ]
    path = save(tmp_path / "if.onnx", nodes, {"c": np.float32(3), "zero": np.float32(0)})
    found = calibrate(path, images(2), "minmax", memory_mib=0)
    assert found.amax["chosen"] == pytest.approx(found.amax["outer"] + 3)


# ------------------------------------------------------------------------------------------------ the cache


def test_a_cache_needs_no_data_and_says_the_same(net: Path, tmp_path: Path) -> None:
    cache = tmp_path / "c.json"
    made = calibrate(net, images(), "entropy", cache=cache, preprocessing={"size": 8})
    again = calibrate(net, None, "entropy", cache=cache, preprocessing={"size": 8})
    assert again.amax == made.amax and again.from_cache and not made.from_cache
    assert (again.batches, again.rows, again.data) == (12, 12, made.data)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "other"}, "it is of another model"),
        ({"preprocessing": {"size": 9}}, "its inputs were preprocessed otherwise"),
        ({"calibrator": "minmax"}, "its calibrator is `entropy`, not `minmax`"),
        ({"calibrator": HistogramCalibrator("entropy", bins=1024)}, "its calibrator's settings are"),
        ({"tensors": ["x", "nowhere"]}, "it lacks 1 of the tensors, `nowhere` among them"),
    ],
)
def test_a_cache_of_something_else_is_refused_with_what_differs(
    net: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    cache = tmp_path / "c.json"
    calibrate(net, images(), "entropy", cache=cache, preprocessing={"size": 8})
    wanted: dict[str, Any] = {"calibrator": "entropy", "preprocessing": {"size": 8}} | change
    model = convnet(tmp_path / "other.onnx", seed=9) if wanted.pop("model", None) else net
    with pytest.raises(UsageError) as caught:
        calibrate(model, images(), cache=cache, **wanted)
    assert said in caught.value.message and "delete it" in (caught.value.hint or "")


@pytest.mark.parametrize("name", ["mse", "entropy", "percentile"])
def test_ranges_that_an_earlier_rule_of_the_same_name_found_are_not_taken_for_this_ones(
    net: Path, tmp_path: Path, name: str
) -> None:
    cache = tmp_path / "c.json"
    calibrate(net, images(), name, cache=cache)
    stored = json.loads(cache.read_bytes())
    stored["settings"].pop("version")  # as 0.1 wrote it
    cache.write_text(json.dumps(stored))
    with pytest.raises(UsageError, match="its calibrator's settings are"):
        calibrate(net, images(), name, cache=cache)


def test_without_data_a_cache_of_inputs_that_were_not_preprocessed_fits_too(net: Path, tmp_path: Path) -> None:
    cache = tmp_path / "c.json"
    made = calibrate(net, images(), "minmax", cache=cache)
    assert calibrate(net, None, "minmax", cache=cache, preprocessing={"size": 8}).amax == made.amax
    with pytest.raises(UsageError, match="preprocessed otherwise"):
        calibrate(net, images(), "minmax", cache=cache, preprocessing={"size": 8})


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"not json", b'{"schema": "trt-engine/calibration", "amax": 3}', b"TRT-8601-MinMax\nx: 3c01"],
)
def test_a_file_that_is_no_cache_is_refused_and_kept(net: Path, tmp_path: Path, content: bytes) -> None:
    cache = tmp_path / "c.json"
    cache.write_bytes(content)
    expected = "TensorRT's calibration cache" if b"TRT" in content else "calibration cache"
    with pytest.raises(UsageError, match=expected):
        calibrate(net, images(), cache=cache)
    assert cache.read_bytes() == content


def test_a_function_that_preprocesses_needs_words_for_the_cache(net: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a cache needs to know the preprocessing"):
        calibrate(net, tmp_path, cache=tmp_path / "c.json", preprocess=lambda path: np.zeros((3, 8, 8), np.float32))


def test_progress_is_told_over_all_passes(net: Path) -> None:
    told: list[te.Progress] = []
    te.calibrate(net, images(4), "entropy", progress=told.append)
    counted = [(at.done, at.total, at.unit) for at in told if at.done is not None]
    assert counted == [(done, 8, "batches") for done in range(1, 9)]


# ------------------------------------------------------------------------------------------------ bad data


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_data_that_is_not_finite_is_named_with_its_source(net: Path, tmp_path: Path, bad: float) -> None:
    folder = folder_of(tmp_path, images(5))
    broken = images(1)[0]
    broken[0, 1, 2, 3] = bad
    np.save(folder / "0003.npy", broken)
    with pytest.raises(FeedError) as caught:
        calibrate(net, folder)
    assert "input `x` has" in caught.value.message and "`0003.npy`" in caught.value.message


def test_a_tensor_that_becomes_nan_is_named_with_the_sample(tmp_path: Path) -> None:
    nodes = [helper.make_node("Sqrt", ["x"], ["root"]), helper.make_node("Relu", ["root"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, {})
    with pytest.raises(FeedError, match="the tensor `root` has NaN for item 0, whose inputs are finite"):
        calibrate(path, images())


def folder_of(tmp_path: Path, arrays: list[Any]) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for index, array in enumerate(arrays):
        np.save(folder / f"{index:04}.npy", array)
    return folder


def test_every_kind_of_file_gives_the_same_ranges(net: Path, tmp_path: Path) -> None:
    arrays = images(6)
    expected = calibrate(net, arrays, "minmax").amax
    folder = folder_of(tmp_path, arrays)
    np.savez(tmp_path / "all.npz", x=np.concatenate(arrays))
    np.save(tmp_path / "all.npy", np.concatenate(arrays))
    raw = tmp_path / "raw"
    raw.mkdir()
    for index, array in enumerate(arrays):
        (raw / f"{index}.{'bin' if index % 2 else 'raw'}").write_bytes(array.tobytes())
    for data in (
        folder,
        tmp_path / "all.npz",
        tmp_path / "all.npy",
        raw,
        str(raw),
        iter(arrays),
        {"x": np.concatenate(arrays)},
    ):
        assert calibrate(net, data, "minmax").amax == pytest.approx(expected)
    (pictures := tmp_path / "pictures").mkdir()
    for index in range(6):
        (pictures / f"{index}.png").write_bytes(b"not looked at")
    assert calibrate(net, pictures, "minmax", preprocess=lambda path: arrays[int(path.stem)][0]).amax == expected


def test_rows_are_put_together_to_batches_and_the_rest_is_one_of_its_own(net: Path, tmp_path: Path) -> None:
    samples = open_samples(folder_of(tmp_path, images(7)), signature := open_model(net).signature, batch=3)
    assert [batch.rows for batch in samples] == [3, 3, 1]
    assert next(batch.source for batch in samples) == "`0000.npy` to `0002.npy`"
    assert [batch.rows for batch in open_samples(tmp_path / "data", signature, batch=3, limit=4)] == [3, 1]
    frozen = replace(signature, outputs=(replace(signature.outputs[0], shape=(1, 4)),))  # it does not follow the batch
    assert [batch.rows for batch in open_samples(tmp_path / "data", frozen, batch=3, limit=2)] == [1, 1]


def test_rows_that_fill_no_fixed_batch_are_left_out_and_said(tmp_path: Path) -> None:
    net = convnet(tmp_path / "fixed.onnx", batch=4)
    folder = folder_of(tmp_path, images(6))
    found = calibrate(net, folder, "minmax")
    assert found.rows == 4 and found.warnings == ("2 rows left out that fill no batch of the model's fixed size",)
    with pytest.raises(FeedError, match="there are 3 rows, and the model takes 4 at a time"):
        calibrate(net, folder, "minmax", max_samples=3)


def test_one_damaged_file_among_many_is_skipped_counted_and_said(
    net: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(tmp_path, images(10))
    (folder / "0004.npy").write_bytes((folder / "0004.npy").read_bytes()[:200])
    found = calibrate(net, folder, "minmax")
    assert found.rows == 9 and list(found.skipped) == ["0004.npy"]
    assert "1 damaged file skipped (`0004.npy`" in found.warnings[0] and "1 damaged file" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.bin", b"\0" * 100, "`a.bin` has 100 bytes, expected 768: 1x3x8x8 of float32"),
        ("a.npy", np.zeros((1, 3, 9, 8), np.float32), "`a.npy` is 1x3x9x8 for input `x`, expected Nx3x8x8"),
        ("a.npy", np.zeros((3, 8), np.float32), "`a.npy` is 3x8 for input `x`"),
        ("a.npy", np.zeros((1, 3, 8, 8), np.uint8), "`a.npy` is uint8 for input `x`, expected float32"),
        ("a.jpg", b"x", "holds images, and the model declares no preprocessing"),
        ("a.txt", b"x", "holds no samples: 1 files of other kinds"),
        ("", b"", "holds no samples: it is empty"),
    ],
)
def test_data_that_does_not_fit_is_refused_with_its_name(
    net: Path, tmp_path: Path, name: str, content: Any, said: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    if isinstance(content, bytes) and name:
        (folder / name).write_bytes(content)
    elif name:
        np.save(folder / name, content)
    with pytest.raises(UsageError) as caught:
        calibrate(net, folder, "minmax")
    assert said in caught.value.message and caught.value.hint


def test_a_calibrator_nobody_knows_is_refused(net: Path) -> None:
    with pytest.raises(UsageError) as caught:
        calibrate(net, images(), "entopy")
    assert caught.value.hint == "did you mean `entropy`?"


@pytest.mark.parametrize(
    "make", [lambda: HistogramCalibrator("entropy", bins=7), lambda: HistogramCalibrator("percentile", percentile=0)]
)
def test_settings_that_make_no_histogram_are_refused(make: Any) -> None:
    with pytest.raises(UsageError):
        make()
