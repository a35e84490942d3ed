"""`deploy deepstream`: keys that nvinfer knows, both formats alike, a pipeline as sized, and pre-processing compared."""

from __future__ import annotations

import configparser
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

import trt_engine as te
from deployment.conftest import as_plan, image_model, size_run
from onnx_models import FLOAT, node, save
from trt_engine.config.streams import BatchPolicy
from trt_engine.environment import Environment
from trt_engine.errors import UsageError
from trt_engine.records.streams import CurvePoint, VideoCapacity
from trt_engine.tensors import Signature, TensorSpec
from trt_engine.verbs.deploy import nvinfer_preprocess
from trt_engine.verbs.deploy.nvinfer_preprocess import NvinferPreprocess, compare
from trt_engine.verbs.nvinfer_keys import nvinfer_config
from trt_engine.vision.spec import METADATA_KEY, Postprocess, Preprocess, Vision

pytest.importorskip("PIL", reason="pillow is not installed")

from PIL import Image

from trt_engine.vision.preprocess import Preprocessor

PROPERTY_KEYS = set(
    """gpu-id onnx-file model-engine-file batch-size network-mode network-type cluster-mode infer-dims network-input-order
    net-scale-factor offsets model-color-format maintain-aspect-ratio symmetric-padding scaling-filter scaling-compute-hw
    gie-unique-id output-tensor-meta labelfile-path num-detected-classes process-mode interval operate-on-gie-id
    classifier-threshold parse-bbox-func-name parse-bbox-instance-mask-func-name custom-lib-path output-instance-mask
    segmentation-threshold""".split()
)
"""Of ours, those in "Gst-nvinfer File Configuration Specifications" and in gstnvinfer_property_parser.h of DeepStream."""
CLASS_KEYS = {"threshold", "pre-cluster-threshold", "post-cluster-threshold", "nms-iou-threshold", "topk"}
APP_KEYS = {
    "application": {"enable-perf-measurement", "perf-measurement-interval-sec"},
    "tiled-display": {"enable"},
    "source": {"enable", "type", "uri", "num-sources", "gpu-id"},
    "streammux": {
        "gpu-id", "live-source", "batch-size", "batched-push-timeout", "width", "height", "enable-padding",
    },
    "primary-gie": {
        "enable", "gpu-id", "gie-unique-id", "batch-size", "interval", "config-file", "model-engine-file", "labelfile-path",
    },
    "secondary-gie": {
        "enable", "gpu-id", "gie-unique-id", "operate-on-gie-id", "batch-size", "config-file", "model-engine-file",
        "labelfile-path",
    },
    "osd": {"enable"},
    "sink": {"enable", "type", "sync", "gpu-id"},
    "tests": {"file-loop"},
}  # fmt: skip
"""Of "DeepStream Reference Application - deepstream-app", configuration groups."""
LETTERBOX = Preprocess((160, 160), pad_value=(0, 0, 0))
BGR = Preprocess((96, 128), resize="stretch", channels="BGR", scale=1.0, mean=(103.9, 116.8, 123.7))


def read(path: Path) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser()
    parser.read(path)
    return {name: dict(parser[name]) for name in parser.sections()}


def declared(folder: Path, vision: Vision, name: str = "net") -> Path:
    """A classifier's model that declares the pre-processing."""
    import onnx

    height, width = vision.preprocess.size
    path = save(
        folder / f"{name}.onnx", [node("GlobalAveragePool", "images", "pooled"), node("Flatten", "pooled", "scores")],
        {"images": (FLOAT, ["batch", 3, height, width])}, {"scores": (FLOAT, ["batch", 3])},
    )  # fmt: skip
    model = onnx.load(path)
    model.metadata_props.add(key=METADATA_KEY, value=vision.to_json().decode())
    onnx.save(model, path)
    return path


def keys_of(own: Preprocess) -> dict[str, str]:
    """The keys that our generator makes of the declaration."""
    signature = Signature(
        (TensorSpec("images", "float32", (-1, *own.shape)),), (TensorSpec("scores", "float32", (-1, 5)),)
    )
    vision = Vision(own, Postprocess("classify"))
    return nvinfer_config(
        signature, {}, vision, onnx_file=None, engine_file="e", batch=1, precision="fp16"
    ).keys  # fmt: skip


def difference(own: Preprocess, **changes: str) -> Any:
    keys = keys_of(own) | {name.replace("_", "-"): value for name, value in changes.items()}
    return compare(keys, own, nvinfer_preprocess.sample_image(), file="f")


# ------------------------------------------------------------------------------------------------ files


def test_every_key_is_published_and_both_formats_say_the_same(tmp_path: Path) -> None:
    vision = Vision(BGR, Postprocess("classify", classes=("cat", "a;b", "snow\nman")))
    report = te.deploy("deepstream", declared(tmp_path, vision), tmp_path / "out", streams=6)
    made, plain = (
        read(tmp_path / "out/config_infer_primary.txt"),
        (tmp_path / "out/config_infer_primary.yml").read_text(),
    )
    assert set(made["property"]) <= PROPERTY_KEYS
    same = {name: str(value) for name, value in yaml.safe_load(plain)["property"].items()}
    assert same.keys() == made["property"].keys()
    assert {name for name in same if same[name] != made["property"][name]} == set()
    pipeline = read(tmp_path / "out/deepstream_app_config.txt")
    for group, keys in pipeline.items():
        assert keys.keys() <= APP_KEYS[group.rstrip("0123456789")], group
    assert (tmp_path / "out/labels.txt").read_text() == "cat;a,b;snow man\n"
    assert pipeline["source0"]["num-sources"] == pipeline["streammux"]["batch-size"] == "6"
    assert made["property"]["model-engine-file"] == "net.onnx_b6_gpu0_fp16.engine"
    assert {*report.files} == {
        "net.onnx", "config_infer_primary.txt", "config_infer_primary.yml", "labels.txt", "deepstream_app_config.txt"
    }  # fmt: skip
    assert report.preprocessing[0].findings == ()


def test_a_detector_s_labels_are_lines_and_its_threshold_is_in_the_group_of_all_classes(tmp_path: Path) -> None:
    vision = Vision(LETTERBOX, Postprocess("yolov10", classes=("a", "b"), min_score=0.25))
    signature = Signature(
        (TensorSpec("images", "float32", (-1, 3, 160, 160)),), (TensorSpec("out", "float32", (-1, 300, 6)),)
    )
    made = nvinfer_config(
        signature, {}, vision, onnx_file=None, engine_file="e", batch=1, precision="fp16", labels_file="l.txt"
    )
    assert made.keys["num-detected-classes"] == "2" and made.keys["labelfile-path"] == "l.txt"
    assert made.class_groups == {"class-attrs-all": {"pre-cluster-threshold": "0.25", "topk": "300"}}
    assert made.keys["parse-bbox-func-name"] == "NvDsInferParseYolo" and "build" in (made.warning or "")
    assert made.class_groups["class-attrs-all"].keys() <= CLASS_KEYS and "onnx-file" not in made.keys


def detector(folder: Path, declared: Postprocess, *outputs: tuple[str, list[Any]], size: Any = (32, 32)) -> Path:
    """A model with those outputs, of constants, and the declaration."""
    import onnx

    nodes = [node("Identity", f"c{index}", name) for index, (name, _) in enumerate(outputs)]
    values = {
        f"c{index}": np.zeros([max(side, 1) for side in shape], np.float32) for index, (_, shape) in enumerate(outputs)
    }
    shapes = {name: (FLOAT, shape) for name, shape in outputs}
    path = save(folder / "detector.onnx", nodes, {"images": (FLOAT, [1, 3, *size])}, shapes, values)
    model = onnx.load(path)
    vision = Vision(Preprocess((32, 32)), declared)
    model.metadata_props.add(key=METADATA_KEY, value=vision.to_json().decode())
    onnx.save(model, path)
    return path


TWO = ("a", "b")


@pytest.mark.parametrize(
    ("declared", "outputs", "keys", "active"),
    [
        (Postprocess("yolov10", classes=TWO), [("y", [1, 9, 6])], {"network-type": "0", "cluster-mode": "4"}, True),
        (Postprocess("yolov10", classes=TWO, suppress=True), [("y", [1, 21, 6])], {"cluster-mode": "2"}, True),
        (Postprocess("yolo", classes=TWO), [("y", [1, 6, 21])], {"network-type": "0", "cluster-mode": "2"}, False),
        (Postprocess("yolov5", classes=TWO), [("y", [1, 63, 7])], {"network-type": "0", "cluster-mode": "2"}, False),
        (
            Postprocess("detr", classes=TWO, activation="sigmoid"), [("logits", [1, 9, 2]), ("pred_boxes", [1, 9, 4])],
            {"network-type": "0", "cluster-mode": "4"}, False,
        ),
        (
            Postprocess("yolo", classes=TWO, masks=True), [("y", [1, 10, 21]), ("p", [1, 4, 8, 8])],
            {"network-type": "3", "cluster-mode": "4", "output-instance-mask": "1", "segmentation-threshold": "0.5"}, False,
        ),
        (
            Postprocess("yolo", classes=TWO, keypoints=(3, 3)), [("y", [1, 15, 21])],
            {"network-type": "3", "cluster-mode": "4", "output-instance-mask": "1"}, False,
        ),
    ],
)  # fmt: skip
def test_a_detector_has_its_type_classes_thresholds_size_and_the_lines_of_a_parser(
    tmp_path: Path, declared: Postprocess, outputs: Any, keys: dict[str, str], active: bool
) -> None:
    model = detector(tmp_path, declared, *outputs, size=["height", "width"])
    report = te.deploy("deepstream", model, tmp_path / "out")
    text = (tmp_path / "out/config_infer_primary.txt").read_text()
    made = read(tmp_path / "out/config_infer_primary.txt")
    assert made["property"] | keys | {"num-detected-classes": "2", "infer-dims": "3;32;32"} == made["property"]
    assert made["property"].keys() <= PROPERTY_KEYS and made["class-attrs-all"].keys() <= CLASS_KEYS
    assert made["class-attrs-all"]["pre-cluster-threshold"] == "0.25"
    assert ("nms-iou-threshold" in made["class-attrs-all"]) == (keys["cluster-mode"] == "2")
    for name in ("func-name=NvDsInferParseYolo", "custom-lib-path=nvdsinfer_custom_impl_Yolo"):
        (line,) = [line for line in text.splitlines() if name in line]
        assert line.startswith("#") != active
    assert any("marcoslucianops/DeepStream-Yolo" in note for note in report.notes)


def test_a_second_network_gets_the_objects_of_the_first(tmp_path: Path) -> None:
    model = detector(tmp_path, Postprocess("yolov10", classes=TWO), ("y", [1, 9, 6]))
    second = declared(tmp_path, Vision(BGR, Postprocess("classify", classes=("x", "y", "z"))), "kind")
    report = te.deploy("deepstream", model, tmp_path / "out", secondary=[second])
    made = read(tmp_path / "out/config_infer_secondary2.txt")["property"]
    group = read(tmp_path / "out/deepstream_app_config.txt")["secondary-gie0"]
    wanted = {
        "process-mode": "2",
        "gie-unique-id": "2",
        "operate-on-gie-id": "1",
        "network-type": "1",
        "batch-size": "16",
    }
    assert made | wanted == made and made.keys() <= PROPERTY_KEYS and group.keys() == APP_KEYS["secondary-gie"]
    assert group["config-file"] == "config_infer_secondary2.txt" and group["labelfile-path"] == "labels2.txt"
    assert (tmp_path / "out/labels2.txt").read_text() == "x;y;z\n" and (tmp_path / "out/kind.onnx").is_file()
    assert [item.name for item in report.models] == ["detector", "kind"]
    with pytest.raises(UsageError, match="two networks are named"):
        te.deploy("deepstream", model, tmp_path / "again", secondary=[model])


def test_a_run_sized_for_more_contexts_than_nvinfer_has_is_searched_again_for_one(
    engines: dict[str, Path], tmp_path: Path
) -> None:
    plan = as_plan(engines["images"], tmp_path / "detector.engine")
    sized = size_run(tmp_path / "run", engines["images"])
    te.Engine.open(plan).copy_to(sized / "engines" / "model.engine.onnx")
    points = [
        CurvePoint("sha256:0", "cuda:0", batch, busy, "host", ((3.0 * batch,) * 20,) * 3, Environment.detect(), "")
        for batch in (1, 2, 4)
        for busy in (1, 2)
    ]
    (sized / "curve.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, points)))
    report = te.deploy("deepstream", plan, tmp_path / "out", sized=sized)
    pipeline = read(tmp_path / "out/deepstream_app_config.txt")
    streams = int(pipeline["source0"]["num-sources"])
    assert 1 <= streams < 50 and any(f"one context of nvinfer: {streams}" in note for note in report.models[0].notes)


def test_a_configuration_s_batch_classes_and_labels_are_compared(tmp_path: Path) -> None:
    model = detector(tmp_path, Postprocess("yolov10", classes=TWO), ("y", [1, 9, 6]))
    te.deploy("deepstream", model, tmp_path / "out")
    own = (tmp_path / "out/config_infer_primary.txt").read_text()
    for old, new, labels, says in (
        ("batch-size=1", "batch-size=4", "a\nb\n", "batch-size is 4, expected 1"),
        ("_b1_", "_b4_", "a\nb\n", "model-engine-file is of batch 4, batch-size is 1"),
        ("num-detected-classes=2", "num-detected-classes=80", "a\nb\n", "num-detected-classes is 80, expected 2"),
        ("network-type=0", "network-type=100", "a\nb\n", "network-type is 100, expected 0"),
        ("", "", "a\nb\nc\n", "`labels.txt` has 3 labels, the model 2 classes"),
        ("", "", "b\na\n", "label 0 is b, the model's is a, and 1 more"),
        ("labels.txt", "nowhere.txt", "", "`nowhere.txt` cannot be read"),
    ):
        (tmp_path / "mine.txt").write_text(own.replace(old, new) if old else own)
        (tmp_path / "labels.txt").write_text(labels)
        report = te.deploy("deepstream", model, tmp_path / "new", check=tmp_path / "mine.txt", dry_run=True)
        added = set(report.preprocessing[1].findings) - set(report.preprocessing[0].findings)
        assert any(says in finding for finding in added), (says, added)


def test_a_plan_is_sized_by_the_run_that_measured_it(engines: dict[str, Path], tmp_path: Path) -> None:
    plan = as_plan(engines["images"], tmp_path / "detector.engine")
    sized = size_run(tmp_path / "run", engines["images"])
    te.Engine.open(plan).copy_to(sized / "engines" / "model.engine.onnx")
    report = te.deploy("deepstream", plan, tmp_path / "out", sized=sized, preprocess="yolo")
    pipeline = read(tmp_path / "out/deepstream_app_config.txt")
    made = read(tmp_path / "out/config_infer_primary.txt")["property"]
    assert pipeline["source0"]["num-sources"] == "50"
    assert pipeline["streammux"]["batched-push-timeout"] == "3500"
    assert made["batch-size"] == pipeline["primary-gie"]["batch-size"] == pipeline["streammux"]["batch-size"] == "4"
    assert made["interval"] == pipeline["primary-gie"]["interval"] == "1"
    assert made["model-engine-file"] == "detector.engine" and (tmp_path / "out/detector.engine").is_file()
    assert all("50 streams within 40 ms" in item.reason for item in report.models[0].settings)
    assert [*report.preprocessing[0].findings] == ["nvinfer pads with 0, the model with 114"]


def test_fewer_cameras_over_the_whole_path_are_the_sources(engines: dict[str, Path], tmp_path: Path) -> None:
    plan = as_plan(engines["images"], tmp_path / "detector.engine")
    sized = size_run(tmp_path / "run", engines["images"])
    te.Engine.open(plan).copy_to(sized / "engines" / "model.engine.onnx")
    document = msgspec.json.decode((sized / "size.json").read_bytes())
    policy = BatchPolicy(4, 3.5)
    video = VideoCapacity((), 40.0, 0.01, 6, 5, 7, 0.9, policy, 2, "decoder", "", {}, ())
    (sized / "size.json").write_bytes(msgspec.json.encode(document | {"video": video}))
    report = te.deploy("deepstream", plan, tmp_path / "out", sized=sized)
    pipeline = read(tmp_path / "out/deepstream_app_config.txt")
    assert pipeline["source0"]["num-sources"] == "6" and pipeline["streammux"]["batch-size"] == "4"
    assert "6 cameras over the whole path; limit decoder" in report.models[0].settings[0].reason
    te.deploy("deepstream", plan, tmp_path / "asked", sized=sized, streams=9)
    assert read(tmp_path / "asked/deepstream_app_config.txt")["source0"]["num-sources"] == "9"


def test_sources_are_shared_by_files_and_single_for_cameras(tmp_path: Path) -> None:
    model = declared(tmp_path, Vision(BGR, Postprocess("classify")))
    te.deploy("deepstream", model, tmp_path / "files", source=["file:///a", "file:///b"], streams=5)
    groups = read(tmp_path / "files/deepstream_app_config.txt")
    assert [(groups[name]["uri"], groups[name]["num-sources"]) for name in ("source0", "source1")] == [
        ("file:///a", "3"), ("file:///b", "2")
    ]  # fmt: skip
    te.deploy("deepstream", model, tmp_path / "cameras", source=["rtsp://a/1", "rtsp://b/1"], streams=3)
    groups = read(tmp_path / "cameras/deepstream_app_config.txt")
    assert [groups[f"source{index}"]["uri"] for index in range(3)] == ["rtsp://a/1", "rtsp://a/1", "rtsp://b/1"]
    assert groups["source0"]["type"] == "4" and groups["streammux"]["live-source"] == "1"
    with pytest.raises(UsageError, match="is not a URI"):
        te.deploy("deepstream", model, tmp_path / "wrong", source=["a.mp4"])


def test_what_nvinfer_cannot_run_is_refused(engines: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nvinfer cannot load"):
        te.deploy("deepstream", engines["images"], tmp_path / "out")
    with pytest.raises(UsageError, match="no image input"):
        te.deploy("deepstream", as_plan(engines["tokens"], tmp_path / "t.engine"), tmp_path / "out")
    model = image_model(tmp_path / "plain.onnx")
    with pytest.raises(UsageError, match="2 engines are given"):
        te.deploy("deepstream", [model, engines["images"]], tmp_path / "out")
    mine = tmp_path / "mine.txt"
    mine.write_text("[property]\nnet-scale-factor=1\n")
    with pytest.raises(UsageError, match="`--check` needs"):
        te.deploy("deepstream", model, tmp_path / "out", check=mine)
    assert not (tmp_path / "out").exists()
    report = te.deploy("deepstream", model, tmp_path / "out")
    assert report.preprocessing == () and any("declares none" in note for note in report.models[0].notes)


# ------------------------------------------------------------------------------------------------ pre-processing


@pytest.mark.parametrize("own", [LETTERBOX, BGR, replace(LETTERBOX, pad_placement="top-left", layout="NHWC")])
def test_the_generated_keys_differ_by_the_filter_alone(own: Preprocess) -> None:
    found = difference(own)
    assert found.findings == () and found.scale < 1e-4 and found.offset_levels < 1e-3 and found.placement_px <= 1
    pixels = np.random.default_rng(1).integers(0, 256, (*own.size, 3), np.uint8)
    mine, _ = Preprocessor(own, "float32")(Image.fromarray(pixels))
    theirs = NvinferPreprocess.from_keys(keys_of(own), own.size).run(pixels)
    np.testing.assert_allclose(theirs, mine, rtol=1e-5, atol=1e-5)  # an image of the network's size is not resized


@pytest.mark.parametrize(
    ("own", "changes", "expected", "number"),
    [
        (BGR, {"net_scale_factor": "1.01"}, "net-scale-factor is 1.01", ("scale", 0.01)),
        (LETTERBOX, {"net_scale_factor": "1"}, "net-scale-factor is 1,", ("scale", 254)),
        (BGR, {"offsets": "104.9;116.8;123.7"}, "offsets are off by up to 1 levels", ("offset_levels", 1.0)),
        (BGR, {"offsets": "123.7;116.8;103.9"}, "offsets are off", ("offset_levels", 19.8)),
        (BGR, {"model_color_format": "0"}, "model-color-format is 0, the model declares BGR", ("colors_match", False)),
        (LETTERBOX, {"model_color_format": "1"}, "the model declares RGB", ("colors_match", False)),
        (LETTERBOX, {"symmetric_padding": "0"}, "pixels elsewhere: maintain-aspect-ratio 1", ("placement_px", 35)),
        (LETTERBOX, {"maintain_aspect_ratio": "0"}, "pixels elsewhere: maintain-aspect-ratio 0", ("placement_px", 35)),
        (BGR, {"maintain_aspect_ratio": "1"}, "the model declares stretch", ("placement_px", 24)),
        (replace(LETTERBOX, pad_value=(114, 114, 114)), {}, "pads with 0, the model with 114", ("padding_levels", 114)),
        (BGR, {"network_input_order": "1"}, "network-input-order is 1", ("scale", 0)),
        (BGR, {"infer_dims": "3;96;96"}, "the input is 3 x 96 x 96", ("mean_levels", None)),
        (BGR, {"model_color_format": "2", "offsets": "1"}, "the input is 1 x 96 x 128", ("mean_levels", None)),
    ],
)
def test_a_wrong_key_is_found_and_measured(
    own: Preprocess, changes: dict[str, str], expected: str, number: tuple[str, Any]
) -> None:
    found, right = difference(own, **changes), difference(own if not own.pad_value[0] else LETTERBOX)
    assert any(expected in text for text in found.findings), found
    name, value = number
    assert getattr(found, name) == (value if value is None else pytest.approx(value, rel=0.05, abs=1e-3))
    if value is not None and "order" not in expected:
        assert found.mean_levels > right.mean_levels * 1.01


def test_the_filter_is_a_number_too() -> None:
    nearest, bilinear = difference(LETTERBOX, scaling_filter="0"), difference(LETTERBOX)
    assert nearest.findings == bilinear.findings == () and nearest.content_levels > 1.2 * bilinear.content_levels


@pytest.mark.parametrize("kind", ["0", "1", "2", "4"])
def test_every_filter_keeps_a_constant_and_enlarges_as_pillow_does(kind: str) -> None:
    constant = np.full((10, 20, 3), 77, np.uint8)
    assert np.unique(nvinfer_preprocess._resize(constant, 33, 47, kind)).tolist() == [77]
    image = nvinfer_preprocess.sample_image()[:40, :60]
    made = nvinfer_preprocess._resize(image, 83, 151, kind)
    names = {"0": "NEAREST", "1": "BILINEAR", "2": "BICUBIC", "4": "LANCZOS"}
    want = np.asarray(Image.fromarray(image).resize((151, 83), Image.Resampling[names[kind]]))
    apart = np.abs(made.astype(int) - want)[8:-8, 8:-8]  # pillow's edges have fewer taps
    assert apart.mean() < 0.3 and (kind == "0" or apart.max() <= 4)


def test_a_configuration_of_one_s_own_is_checked_in_both_formats(tmp_path: Path) -> None:
    model = declared(tmp_path, Vision(BGR, Postprocess("classify")))
    lines = {"net-scale-factor": 1.0, "offsets": "123.7;116.8;103.9", "model-color-format": 0, "infer-dims": "3;96;128"}
    (tmp_path / "mine.yml").write_text(yaml.safe_dump({"property": lines}))
    text = "\n".join(f"{name}={value}" for name, value in lines.items())
    (tmp_path / "mine.txt").write_text(f"# a comment\n[property]\n{text}\n[class-attrs-all]\ntopk=3\n")
    Image.new("RGB", (64, 48), (200, 10, 60)).save(tmp_path / "red.png")
    found = []
    for name in ("mine.yml", "mine.txt"):
        report = te.deploy(
            "deepstream", model, tmp_path / name[-3:], check=tmp_path / name, image=tmp_path / "red.png"
        )  # fmt: skip
        assert report.preprocessing[0].findings == () and report.preprocessing[0].content_levels < 0.6
        found.append(replace(report.preprocessing[1], file=""))
    assert found[0] == found[1] and len(found[0].findings) == 3 and found[0].colors_match is False


@pytest.mark.parametrize(
    "text", ["", "[other]\na=1\n", "[property]\nnet-scale-factor=x\n", "[property]\noffsets=1;2\n", "\0", "net=1"]
)
def test_a_configuration_that_nvinfer_would_refuse_is_refused(tmp_path: Path, text: str) -> None:
    model = declared(tmp_path, Vision(BGR, Postprocess("classify")))
    (tmp_path / "mine.txt").write_text(text)
    with pytest.raises(UsageError):
        te.deploy("deepstream", model, tmp_path / "out", check=tmp_path / "mine.txt")
    assert not (tmp_path / "out").exists()
