"""What goes on to DeepStream, and the closing text."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planted import HERE, protocol, record

from onnx_models import FLOAT, node, save
from trt_engine.format import format_streams
from trt_engine.records.base import StepTime
from trt_engine.records.size import BatchResult, CliffPoint, SizeReport
from trt_engine.reporting.results import result_text as summary_text
from trt_engine.reporting.size import nvinfer_lines
from trt_engine.tensors import Signature, TensorSpec
from trt_engine.verbs.nvinfer_keys import NO_IMAGE_INPUT, NvinferConfig, nvinfer_config
from trt_engine.verbs.size.doubling import images_per_s, queries_per_s
from trt_engine.verbs.size.run import size
from trt_engine.verbs.size.size_run import benchmark_data
from trt_engine.vision.spec import Postprocess, Preprocess, Vision


def signature(*outputs: tuple[int, ...], image: tuple[int, ...] = (-1, 3, 160, 160)) -> Signature:
    return Signature(
        (TensorSpec("images", "float32", image),),
        tuple(TensorSpec(f"out{index}", "float32", shape) for index, shape in enumerate(outputs)),
    )


def made_of(
    *outputs: tuple[int, ...],
    image: tuple[int, ...] = (-1, 3, 160, 160),
    shape: tuple[int, ...] | None = None,
    vision: Vision | None = None,
    precision: str = "fp16",
) -> NvinferConfig:
    return nvinfer_config(
        signature(*outputs, image=image),
        {"images": shape} if shape else {},
        vision,
        onnx_file="../model.onnx",
        engine_file="engines/x.engine",
        batch=48,
        precision=precision,
    )


def keys(*outputs: tuple[int, ...], precision: str = "fp16") -> dict[str, str]:
    return made_of(*outputs, precision=precision).keys


def declared(image: tuple[int, ...] = (-1, 3, 160, 160), **pixels: Any) -> NvinferConfig:
    """Of a classifier that declares that pre-processing."""
    vision = Vision(Preprocess(**{"size": (160, 160)} | pixels), Postprocess("classify"))
    return made_of((-1, 10), image=image, vision=vision)


def fed(made: NvinferConfig, channel: int, pixel: float) -> float:
    """What nvinfer makes of a pixel, by those keys."""
    offset = float(made.keys.get("offsets", "0;0;0").split(";")[channel])
    return float(made.keys["net-scale-factor"]) * (pixel - offset)


@pytest.mark.parametrize(
    ("outputs", "kind", "cluster"),
    [
        (((-1, 300, 6),), "0", "4"),
        (((-1, 1000),), "1", None),
        (((-1, 84, 8400),), "100", None),
        (((-1, 300, 4), (-1, 300, 80)), "100", None),
    ],
)
def test_network_type_and_clustering_follow_from_the_outputs(
    outputs: tuple[tuple[int, ...], ...], kind: str, cluster: str | None
) -> None:
    made = keys(*outputs)
    assert (made["network-type"], made.get("cluster-mode")) == (kind, cluster)


@pytest.mark.parametrize(("precision", "mode"), [("fp32", "0"), ("int8", "1"), ("fp16", "2")])
def test_network_mode_is_the_precision(precision: str, mode: str) -> None:
    assert keys((-1, 300, 6), precision=precision)["network-mode"] == mode


def test_open_sizes_are_those_of_the_engines_profile_and_never_guessed() -> None:
    image = (-1, 3, -1, -1)
    assert made_of((-1, 300, 6), image=image, shape=(8, 3, 64, 96)).keys["infer-dims"] == "3;64;96"
    assert "infer-dims" not in made_of((-1, 300, 6), image=image).keys


@pytest.mark.parametrize("vision", [None, Vision(Preprocess((64, 96), layout="NHWC"), Postprocess("classify"))])
def test_channels_last_are_said_and_the_sizes_keep_nvinfers_order(vision: Vision | None) -> None:
    made = made_of((-1, 10), image=(-1, 64, 96, 3), vision=vision).keys
    assert (made["network-input-order"], made["infer-dims"]) == ("1", "3;64;96")
    assert "network-input-order" not in keys((-1, 10))


@pytest.mark.parametrize(
    ("pixels", "expected"),
    [
        ({}, {"model-color-format": "0", "maintain-aspect-ratio": "1", "symmetric-padding": "1"}),
        ({"channels": "BGR", "resize": "stretch"}, {"model-color-format": "1", "maintain-aspect-ratio": "0"}),
        ({"pad_placement": "top-left"}, {"maintain-aspect-ratio": "1", "symmetric-padding": "0"}),
        (
            {"scale": 1.0, "mean": (103.939, 116.779, 123.68)},
            {"net-scale-factor": "1", "offsets": "103.939;116.779;123.68"},
        ),
    ],
)
def test_the_keys_of_pre_processing_are_what_the_model_declares(pixels: Any, expected: dict[str, str]) -> None:
    made = declared(**pixels).keys
    assert {name: made.get(name) for name in expected} == expected
    if pixels.get("resize") == "stretch":
        assert "symmetric-padding" not in made


def test_nvinfer_makes_of_a_pixel_what_the_declaration_does() -> None:
    mean = (0.485, 0.456, 0.406)
    made = declared(mean=mean, std=(0.225,) * 3)
    for channel, pixel in itertools.product(range(3), (0, 17, 255)):
        assert fed(made, channel, pixel) == pytest.approx((pixel / 255 - mean[channel]) / 0.225)


@pytest.mark.parametrize(
    ("pixels", "missing", "words"),
    [
        ({"std": (-1.0,) * 3}, "net-scale-factor", "must be above 0"),
        ({"mean": (-0.5,) * 3}, "offsets", "must be 0 or more"),
        ({"resize": "center-crop"}, "maintain-aspect-ratio", "crop the frames before it"),
    ],
)
def test_what_no_key_of_nvinfer_can_say_is_said_in_words(pixels: Any, missing: str, words: str) -> None:
    made = declared(**pixels)
    assert missing not in made.keys and words in "\n".join(made.notes)


def test_of_a_model_that_declares_nothing_nothing_is_claimed() -> None:
    made = made_of((-1, 10))
    told = "\n".join(nvinfer_lines(made.keys, made.notes))
    unknown = ("net-scale-factor", "offsets", "model-color-format", "maintain-aspect-ratio", "symmetric-padding")
    assert not set(unknown) & set(made.keys)
    for name in unknown:
        assert any(line.startswith("# ") and name in line for line in told.splitlines())
    assert "declares no pre-processing" in told
    grey = made_of((-1, 10), image=(-1, 1, 28, 28)).keys
    assert grey["model-color-format"] == "2"  # of one channel there is no doubt


def test_a_declaration_that_does_not_fit_is_said_and_not_used() -> None:
    made = declared(image=(-1, 3, 64, 64), channels="BGR")
    assert "model-color-format" not in made.keys and "does not match the model" in made.notes[0]
    assert made.keys["infer-dims"] == "3;64;64"


def test_inputs_that_nvinfer_does_not_fill_and_where_the_declaration_is_from_are_said() -> None:
    two = Signature((*signature((-1, 10)).inputs, TensorSpec("sizes", "int64", (-1, 2))), signature((-1, 10)).outputs)
    vision = Vision(Preprocess((160, 160), input="images"), Postprocess("classify"), source="Ultralytics metadata")
    told = "\n".join(nvinfer_config(two, {}, vision, onnx_file="", engine_file="", batch=1, precision="fp16").notes)
    assert "only `images`; `sizes`" in told and "pre-processing from Ultralytics metadata" in told


@pytest.mark.parametrize("shape", [(), (-1,), (-1, 7), (-1, 80, 100), (-1, 64, 8, 8)])
def test_a_model_that_takes_no_pictures_has_no_keys(shape: tuple[int, ...]) -> None:
    assert made_of((-1, 10), image=shape) == NvinferConfig({})


def result(batch: int, queries: int, *, device: str = "cpu") -> BatchResult:
    one = record(batch, queries=queries, device=device)
    times = one.compute_summary()
    assert times is not None
    return BatchResult(
        batch=batch,
        qps=float(queries_per_s(one)),
        images_per_s=float(images_per_s(one)),
        per_image_ms=times.mean / batch,
        compute_ms=times,
        engine="e",
    )


def report(device: str = "cpu", **changes: object) -> SizeReport:
    made = SizeReport(
        model="models/x/model/x.onnx",
        engine="out/engines/x_dynamic_b64." + ("onnx" if device == "cpu" else "engine"),
        device=device,
        backend="onnxruntime",
        precision="fp32",
        peak_streams=42,
        images_per_s=1280.0,
        fps=30.0,
        batches=(result(1, 100), result(64, 20)),
        stop_reason="peak_within_batch",
        engines_built=1,
        measurements=2,
        steps=(
            StepTime("preflight", 0.1),
            StepTime("build b64", 1.5),
            StepTime("measure b1", 1.2),
            StepTime("measure b64", 1.2),
        ),
        protocol=protocol(),
        environment=HERE,
        artifacts={"folder": "out", "report_html": "out/report.html"},
        model_name="x",
        nvinfer=keys((-1, 300, 6)),
        notes=("precision FP32: as the graph is",),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_the_last_line_is_the_count_and_says_when_no_gpu_was_measured() -> None:
    last = summary_text(report()).splitlines()[-1]
    assert last == "PEAK_GPU_STREAMS: 42 streams @30fps (measured on the CPU, not a GPU)"
    assert (
        summary_text(report("cuda:0")).splitlines()[-1] == "PEAK_GPU_STREAMS: 42 streams @30fps (GPU-only upper bound)"
    )


def test_the_summary_tells_what_the_scan_cost_and_what_to_avoid() -> None:
    points = tuple(CliffPoint(batch, 100.0, 900.0, batch in (17, 18)) for batch in (16, 17, 18))
    told = summary_text(report(cliffs=points, engines_built=2, measurements=19, scan_engines=1, scan_measurements=17))
    assert "2 engines built, 19 measurements taken (1 and 17 of them for the scan)" in " ".join(told.split())
    assert "Avoid batch sizes 17, 18" in told


def test_out_of_memory_and_instability_are_told() -> None:
    shaky = replace(result(64, 20), stable=False, instability=("the mean drifts by 9 %",))
    told = summary_text(report(out_of_memory=(128,), stop_reason="out_of_memory", batches=(result(1, 100), shaky)))
    assert "out of memory at batch 128" in told
    assert "the last good answer, batch 64, stands" in told
    assert "not stable: batch 64: the mean drifts by 9 %" in " ".join(told.split())


def test_benchmark_data_has_the_shape_deepstream_reads_and_no_cpu_time_under_a_gpus_key() -> None:
    made = benchmark_data(report())
    assert made["max_bs"] == 64
    assert made["peak_gpu_streams"] == 42
    assert made["deepstream"] == {"run1": None, "run2": None}
    assert made["trtexec"]["bs1"] == {"qps": 100.0, "gpu_mean_ms": None, "cpu_mean_ms": 10.0}
    assert made["trtexec"]["bsmax"]["imgs_per_sec"] == 1280.0
    assert made["device"] == "cpu"
    assert "CPU" in made["note"]
    on_gpu = benchmark_data(report("cuda:0"))
    assert on_gpu["trtexec"]["bs1"] == {"qps": 100.0, "gpu_mean_ms": 10.0}
    assert set(on_gpu["trtexec"]["bsmax"]) == {"qps", "gpu_mean_ms", "p99_ms", "imgs_per_sec"}
    assert "host clock time around a synchronized run, without copies" in on_gpu["note"]


def test_the_answer_is_the_best_measurement_with_its_batch_and_the_count_of_the_last_line_is_explained() -> None:
    told = summary_text(report(batches=(result(1, 1500), result(64, 20)), images_per_s=1280.0))
    assert "serves, on the CPU: 50 streams at 30 fps, batch 1; upper bound from compute alone" in told
    assert "The stream count (42) is of the doubling's last batch, 64; batch 1 delivers more." in told
    assert told.count("PEAK_GPU_STREAMS") == 1, "the line for scripts, and no other"


@pytest.mark.parametrize(
    ("rate", "serves"),
    [
        (10.4, ("1 camera", "at 10 fps")),
        (29.9, ("1 camera", "at 29 fps")),
        (30.0, ("1 stream", "at 30 fps")),
        (0.25, ("no camera", "0.250 images/s")),
        (391.0, ("13 streams", "at 30 fps")),
    ],
)
def test_a_rate_below_one_stream_says_which_camera_it_serves(rate: float, serves: tuple[str, str]) -> None:
    assert format_streams(rate, 30.0) == serves


@pytest.mark.parametrize(
    ("backend", "engine", "as_it_is"),
    [
        ("tensorrt", "m.engine", True), ("trtexec", "m.engine", True), ("tensorrt-rtx", "m.engine", False),
        ("onnxruntime", "m.onnx", False), ("tensorrt", None, False),
    ],
)  # fmt: skip
def test_the_keys_say_that_an_engine_nvinfer_cannot_load_is_built_with_tensorrt_first(
    backend: str, engine: str | None, as_it_is: bool
) -> None:
    printed = summary_text(report("cuda:0", backend=backend, engine=engine, nvinfer={"batch-size": "1"}))
    assert ("built with TensorRT" not in printed) is as_it_is


def test_a_std_that_differs_by_channel_is_said_in_words_because_nvinfer_has_one_factor() -> None:
    std = (0.229, 0.224, 0.225)
    made = declared(mean=(0.485, 0.456, 0.406), std=std)
    assert "net-scale-factor" not in made.keys and made.keys["offsets"] == "123.675;116.28;103.53"
    (told,) = [note for note in made.notes if note.startswith("net-scale-factor")]
    factors = [1 / 255 / value for value in std]
    assert ";".join(f"{factor:.9g}" for factor in factors) in told
    nearest = float(re.search(r"nearest single factor, ([\d.]+), is off by up to ([\d.]+) %", told)[1])  # type: ignore[index]
    assert max(abs(nearest / factor - 1) for factor in factors) == pytest.approx(0.011, abs=2e-4) and "1.1 %" in told


def test_size_shows_the_keys_with_what_is_not_known_of_them_and_none_without_pictures(
    make_model: Any, tmp_path: Path
) -> None:
    save(tmp_path / "tokens.onnx", [node("Relu", "x", "y")], {"x": (FLOAT, ["n", 7])}, {"y": (FLOAT, ["n", 7])})
    short: dict[str, Any] = {"start_batch": 1, "max_batch": 1, "duration_s": 0.02, "warmup_s": 0.0}
    report, other = (
        size(make_model(), out=tmp_path / "a", **short),
        size(tmp_path / "tokens.onnx", out=tmp_path / "b", **short),
    )
    shown, told = summary_text(report), "# the model declares no pre-processing"
    assert "[property]" in shown and told in shown and told in (tmp_path / "a" / "report.md").read_text()
    assert other.nvinfer == {} and NO_IMAGE_INPUT in other.notes and NO_IMAGE_INPUT in summary_text(other)
    assert "[property]" not in summary_text(other) + (tmp_path / "b" / "report.html").read_text()
