"""`imagenet` and `yolo` by name: the arithmetic that torchvision and Ultralytics publish, fitted to the model's input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trt_engine.errors import UsageError
from trt_engine.tensors import Signature, TensorSpec
from trt_engine.vision.spec import Postprocess, Preprocess, Vision, resolve_preprocess, resolve_vision

pytest.importorskip("PIL", reason="pillow reads and draws pictures")
from PIL import Image

from trt_engine.vision.preprocess import Preprocessor


def taking(*shape: int, dtype: str = "float32", output: tuple[int, ...] = (-1, 1000)) -> Signature:
    return Signature((TensorSpec("x", dtype, shape),), (TensorSpec("y", "float32", output),))


def picture(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


@pytest.mark.parametrize(
    ("width", "height", "resized", "corner"),
    [
        # torchvision.transforms.functional: `_compute_resized_output_size` has int(256 * long / short), `center_crop`
        # int(round((side - 224) / 2.0)), rounding halves to even
        (640, 427, (383, 256), (80, 16)),  # 383.7 is cut, 79.5 goes to 80
        (500, 375, (341, 256), (58, 16)),
        (427, 640, (256, 383), (16, 80)),
        (224, 224, (256, 256), (16, 16)),
    ],
)
def test_imagenet_is_torchvisions_resize_256_crop_224_and_normalisation(
    width: int, height: int, resized: tuple[int, int], corner: tuple[int, int]
) -> None:
    pixels, _ = Preprocessor(resolve_preprocess("imagenet", taking(-1, 3, 224, 224)), "float32")(picture(width, height))
    left, top = corner
    crop = picture(width, height).resize(resized, Image.Resampling.BILINEAR).crop((left, top, left + 224, top + 224))
    scaled = np.moveaxis(np.asarray(crop, np.float64) / 255, -1, 0)
    mean, std = (np.array(three)[:, None, None] for three in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    np.testing.assert_allclose(pixels, (scaled - mean) / std, atol=1e-6)


@pytest.mark.parametrize(
    ("width", "height", "unpadded", "corner"),
    [
        # ultralytics/data/augment.py, LetterBox: r = min(640 / h, 640 / w), round(side * r), round(rest / 2 - 0.1)
        (500, 375, (640, 480), (0, 80)),
        (640, 427, (640, 427), (0, 106)),  # 106.5 - 0.1
        (333, 500, (426, 640), (107, 0)),
        (1280, 721, (640, 360), (0, 140)),  # 360.5 goes to 360
    ],
)
def test_yolo_is_ultralytics_letterbox_with_114_and_no_more_than_255(
    width: int, height: int, unpadded: tuple[int, int], corner: tuple[int, int]
) -> None:
    pixels, _ = Preprocessor(resolve_preprocess("yolo", taking(-1, 3, 640, 640)), "float32")(picture(width, height))
    square = np.full((640, 640, 3), 114, np.uint8)
    left, top = corner
    inside = np.asarray(picture(width, height).resize(unpadded, Image.Resampling.BILINEAR))
    square[top : top + unpadded[1], left : left + unpadded[0]] = inside
    np.testing.assert_allclose(pixels, np.moveaxis(square / 255, -1, 0), atol=1e-6)


@pytest.mark.parametrize(
    ("text", "shape", "size", "layout"),
    [
        ("yolo", (-1, 3, 384, 640), (384, 640), "NCHW"),
        ("imagenet", (8, 224, 192, 3), (224, 192), "NHWC"),
        ("yolo:640", (-1, 3, -1, -1), (640, 640), "NCHW"),
        ("yolo:384x640", (-1, 3, -1, -1), (384, 640), "NCHW"),
        ("imagenet:224", (1, 3, 224, 224), (224, 224), "NCHW"),
    ],
)
def test_size_and_layout_are_the_models_own_or_named(
    text: str, shape: tuple[int, ...], size: tuple[int, int], layout: str
) -> None:
    found = resolve_preprocess(text, taking(*shape))
    assert (found.size, found.layout) == (size, layout)


@pytest.mark.parametrize(
    ("text", "found", "said", "hint"),
    [
        ("yolo", taking(-1, 3, -1, -1), "needs a size", "`--preprocess yolo:640`"),
        ("imagenet", taking(-1, 3, 224, -1), "needs a size", "`--preprocess imagenet:224`"),
        ("yolo:320", taking(1, 3, 640, 640), "declared image is 3x320x320", "size"),
        ("yolo:big", taking(1, 3, 640, 640), "cannot read the size of `yolo:big`", "yolo:384x640"),
        ("yolo:0", taking(1, 3, 640, 640), "cannot read the size of `yolo:0`", "yolo:640"),
        ("imagenet", taking(1, 1, 28, 28), "makes 3 floating-point channels, input `x` is float32", "FILE.json"),
        ("imagenet", taking(1, 3, 224, 224, dtype="uint8"), "input `x` is uint8", "FILE.json"),
        ("imagenet", taking(1, 10), "makes 3 floating-point channels", "FILE.json"),
        (
            "yolo",
            Signature((TensorSpec("a", "float32", (1, 3, 8, 8)), TensorSpec("b", "float32", (1, 4))), ()),
            "the model has 2 inputs: `a`, `b`",
            "",
        ),
    ],
)
def test_a_preset_that_does_not_fit_is_refused_with_what_was_found(
    text: str, found: Signature, said: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_preprocess(text, found)
    assert said in caught.value.message and hint in (caught.value.hint or "")


def test_a_file_needs_no_postprocessing_to_calibrate_with_and_is_still_checked(tmp_path: Path) -> None:
    path = tmp_path / "pixels.json"
    path.write_text(json.dumps({"preprocess": {"size": [8, 8], "resize": "stretch"}}))
    assert resolve_preprocess(path, taking(1, 3, 8, 8)) == Preprocess(size=(8, 8), resize="stretch")
    whole = Vision(Preprocess(size=(8, 8)), Postprocess("classify"))
    path.write_bytes(whole.to_json())
    assert (
        resolve_preprocess(str(path), taking(1, 3, 8, 8))
        == resolve_preprocess(whole, taking(1, 3, 8, 8))
        == whole.preprocess
    )
    for text, said in [
        ('{"preprocess": {"size": [8, 8], "resized": "stretch"}}', "`resized`, which is not a setting"),
        ('{"preprocess": {"size": "large"}}', "is not a declaration"),
        ("[1]", "is not a declaration"),
        ("{}", "is not a declaration"),
    ]:
        path.write_text(text)
        with pytest.raises(UsageError) as caught:
            resolve_preprocess(path, taking(1, 3, 8, 8))
        assert said in caught.value.message
    with pytest.raises(UsageError) as caught:
        resolve_preprocess(tmp_path / "nowhere.json", taking(1, 3, 8, 8))
    assert "cannot read" in caught.value.message and "`imagenet`" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("preset", "output", "decode"),
    [("imagenet", (-1, 1000), "classify"), ("yolo", (-1, 84, 8400), "yolo"), ("yolo", (-1, 300, 6), "yolov10")],
)
def test_to_evaluate_by_a_preset_outputs_mean_what_is_declared_or_usual(
    preset: str, output: tuple[int, ...], decode: Any
) -> None:
    signature = taking(-1, 3, 64, 64, output=output)
    found = resolve_vision(preset, signature, None)
    found.check(signature)
    assert (found.postprocess.decode, found.source) == (decode, preset)
    declared = Vision(Preprocess(size=(64, 64), mean=(0.5,) * 3), Postprocess(decode, iou=0.5))
    kept = resolve_vision(preset, signature, declared)
    assert kept.postprocess == declared.postprocess and kept.preprocess == found.preprocess
