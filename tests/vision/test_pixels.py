"""Pictures in, boxes back: what preprocessing does to pixels and to places, and what decoding undoes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_engine.errors import ModelError, UsageError
from trt_engine.vision.decode import Detections, decode_outputs, nms
from trt_engine.vision.spec import Postprocess, Preprocess, Vision

pytest.importorskip("PIL", reason="pillow reads and draws pictures")
from PIL import Image

from trt_engine.vision.decode import probabilities
from trt_engine.vision.image_inference import class_colour, draw_detections, save_image
from trt_engine.vision.preprocess import BadImage, Placement, Preprocessor, open_image, read_image

Array = np.ndarray[Any, Any]


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


sizes = st.integers(1, 400)


@given(
    width=sizes, height=sizes, into=st.tuples(st.integers(8, 200), st.integers(8, 200)),
    resize=st.sampled_from(["letterbox", "stretch", "center-crop"]), place=st.sampled_from(["center", "top-left"]),
    corner=st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)),
)  # fmt: skip
def test_a_box_comes_back_from_the_input_where_it_was(
    width: int, height: int, into: tuple[int, int], resize: Any, place: Any, corner: tuple[float, ...]
) -> None:
    declared = Preprocess(size=into, resize=resize, pad_placement=place, interpolation="nearest")
    pixels, placement = Preprocessor(declared, "float32")(Image.new("RGB", (width, height)))
    assert pixels.shape == declared.shape
    box = np.array(corner) * [width, height, width, height]
    np.testing.assert_allclose(placement.to_image(placement.to_input(box)), box, atol=1e-9 * max(width, height))
    whole = placement.to_input(np.array([0, 0, width, height]))
    if resize == "letterbox":  # inside the input, and touching both ends of one side
        assert whole.min() >= 0
        assert (whole[2:] <= np.array(into[::-1]) + 1e-9).all()
        assert np.isclose((whole[2:] - whole[:2]), into[::-1]).any()
    elif resize == "stretch":
        np.testing.assert_allclose(whole, [0, 0, into[1], into[0]])
    else:  # the input is inside the picture
        assert whole[0] <= 0 and whole[1] <= 0
        assert (whole[2:] >= np.array(into[::-1]) - 1e-9).all()


def test_a_letterbox_is_grey_around_the_picture_and_centred() -> None:
    pixels, place = Preprocessor(Preprocess(size=(100, 100)), "float32")(Image.new("RGB", (50, 20), (10, 20, 30)))
    assert (place.left, place.top, place.scale_x, place.scale_y) == (0, 30, 2, 2)
    np.testing.assert_array_equal(pixels[:, 0, 0], np.float32(114) / np.float32(255))
    np.testing.assert_allclose(pixels[:, 50, 50], np.array([10, 20, 30]) / 255, rtol=1e-6)
    corner, _ = Preprocessor(Preprocess(size=(100, 100), pad_placement="top-left"), "float32")(
        Image.new("RGB", (50, 20), (10, 20, 30))
    )
    np.testing.assert_allclose(corner[:, 0, 0], np.array([10, 20, 30]) / 255, rtol=1e-6)


def test_mean_and_std_are_taken_by_channel_in_the_order_of_the_channels() -> None:
    one = Image.new("RGB", (4, 4), (255, 128, 0))
    rgb = Preprocess(size=(4, 4), mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 0.125))
    expected = (np.array([255, 128, 0]) / 255 - [0.1, 0.2, 0.3]) / [0.5, 0.25, 0.125]
    np.testing.assert_allclose(Preprocessor(rgb, "float32")(one)[0][:, 0, 0], expected, rtol=1e-6)
    bgr = Preprocess(size=(4, 4), channels="BGR", mean=(0.3, 0.2, 0.1), std=(0.125, 0.25, 0.5))
    np.testing.assert_allclose(Preprocessor(bgr, "float32")(one)[0][:, 0, 0], expected[::-1], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "uint8", "float32"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_layout_and_type_are_those_of_the_network(dtype: str, layout: Any) -> None:
    declared = Preprocess(size=(6, 5), layout=layout, scale=1.0)
    pixels, _ = Preprocessor(declared, dtype)(picture(5, 6))
    assert pixels.dtype.name == dtype
    assert pixels.shape == ((3, 6, 5) if layout == "NCHW" else (6, 5, 3))
    shown = pixels if layout == "NHWC" else np.moveaxis(pixels, 0, -1)
    np.testing.assert_allclose(shown.astype(np.float32), np.asarray(picture(5, 6)), rtol=0.01)


# ------------------------------------------------------------------------------------------------ reading


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_a_picture_lies_as_its_exif_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert read_image(encoded(picture(40, 20), exif=exif)).size == (20, 40)


def test_sixteen_bits_a_pixel_become_eight_not_white() -> None:
    deep = Image.fromarray(np.full((4, 4), 0x4080, np.uint16))
    found = read_image(encoded(deep, "PNG"))
    assert np.asarray(found.convert("L"))[0, 0] == 0x40


@pytest.mark.parametrize("mode", ["RGBA", "P", "LA", "CMYK", "1"])
def test_any_kind_of_picture_is_read_as_colour(mode: str) -> None:
    kind = "TIFF" if mode == "CMYK" else "PNG"
    assert read_image(encoded(picture(5, 5).convert(mode), kind)).mode == "RGB"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"no picture",
        encoded(picture(64, 64))[:900],
        b"\xff\xd8\xff\xe0" + bytes(50),
        b"\x89PNG\r\n\x1a\n" + bytes(40),
    ],
    ids=["empty", "text", "cut short", "a JPEG's first bytes", "a PNG's first bytes"],
)
def test_a_damaged_picture_is_one_kind_of_error(raw: bytes, tmp_path: Path) -> None:
    with pytest.raises(BadImage) as bad:
        read_image(raw)
    assert "BytesIO" not in str(bad.value)
    (tmp_path / "x.jpg").write_bytes(raw)
    with pytest.raises(UsageError, match="not a readable image"):
        open_image(tmp_path / "x.jpg")


# ------------------------------------------------------------------------------------------------ decoding

PLACE = Placement(100, 50, 2.0, 2.0, 0.0, 10.0)


def decode(output: Array, declared: Postprocess, places: list[Placement]) -> list[Detections]:
    return decode_outputs({"output": output}, Vision(Preprocess(size=(640, 640)), declared), places)


def test_end_to_end_rows_come_back_best_first_and_inside_the_picture() -> None:
    rows = np.zeros((1, 5, 6), np.float32)
    rows[0] = [
        [20, 30, 60, 70, 0.5, 3], [0, 0, 400, 400, 0.9, 1], [0, 0, 1, 1, 0.0009, 2], [5, 5, 9, 9, np.nan, 0],
        [1, np.inf, 2, 3, 0.8, 0],
    ]  # fmt: skip
    (found,) = decode(rows, Postprocess("yolov10"), [PLACE])
    assert found.scores.tolist() == pytest.approx([0.9, 0.5])
    assert found.classes.tolist() == [1, 3]
    assert found.boxes_xyxy.tolist() == [[0, 0, 100, 50], [10, 10, 30, 30]]
    assert found.not_finite == 2


def test_classic_rows_are_suppressed_by_class_and_turned_into_corners() -> None:
    anchors = np.array(
        [  # cx, cy, w, h, scores of three classes
            [50, 60, 20, 20, 0.9, 0.0, 0.0],
            [51, 60, 20, 20, 0.8, 0.0, 0.3],  # class 0 is suppressed by the first, class 2 is not
            [150, 60, 20, 20, 0.0, 0.7, 0.0],
        ],
        np.float32,
    )
    (found,) = decode(anchors.T[None], Postprocess("yolo", classes=("a", "b", "c")), [PLACE])
    assert found.classes.tolist() == [0, 1, 2]
    assert found.scores.tolist() == pytest.approx([0.9, 0.7, 0.3])
    assert found.boxes_xyxy[0].tolist() == [20, 20, 30, 30]


def test_a_sigmoid_that_was_left_out_of_the_graph_is_put_in() -> None:
    logits = np.array([[[5], [5], [2], [2], [0.0], [-1000.0]]], np.float32)
    (found,) = decode(logits, Postprocess("yolo", activation="sigmoid"), [Placement(10, 10)])
    assert found.scores.tolist() == [0.5]


@pytest.mark.parametrize(
    ("output", "declared"),
    [
        (np.zeros((1, 300, 5)), Postprocess("yolov10")),
        (np.zeros((300, 6)), Postprocess("yolov10")),
        (np.zeros((0, 300, 6)), Postprocess("yolov10")),
        (np.zeros((1, 4, 10)), Postprocess("yolo")),
        (np.zeros((1, 7, 10)), Postprocess("yolo", classes=("a", "b"))),
    ],
)
def test_an_output_of_another_form_is_refused_with_what_was_expected(output: Array, declared: Postprocess) -> None:
    with pytest.raises(ModelError, match="expects") as refused:
        decode(output, declared, [PLACE])
    assert refused.value.hint


def plain_nms(boxes: Array, scores: Array, classes: Array, iou: float) -> list[int]:
    """The textbook: one after the other, by the definition of intersection over union."""
    kept: list[int] = []
    for index in sorted(range(len(boxes)), key=lambda row: (-scores[row], row)):
        x0, y0, x1, y1 = boxes[index]
        for other in kept:
            a0, b0, a1, b1 = boxes[other]
            shared = max(0.0, min(x1, a1) - max(x0, a0)) * max(0.0, min(y1, b1) - max(y0, b0))
            union = (x1 - x0) * (y1 - y0) + (a1 - a0) * (b1 - b0) - shared
            if classes[index] == classes[other] and shared > iou * union:
                break
        else:
            kept.append(index)
    return kept


@given(seed=st.integers(0, 2**32), count=st.integers(0, 40), iou=st.sampled_from([0.0, 0.3, 0.5, 0.7, 1.0]))
def test_suppression_is_the_textbooks(seed: int, count: int, iou: float) -> None:
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 12, (count, 2)).astype(np.float64)
    boxes = np.concatenate([corners, corners + rng.integers(0, 8, (count, 2))], axis=1)
    scores, classes = rng.integers(0, 5, count) / 5, rng.integers(0, 3, count)
    expected = plain_nms(boxes, scores, classes, iou)
    assert nms(boxes, scores, classes, iou, 1000).tolist() == expected
    assert nms(boxes, scores, classes, iou, 3).tolist() == expected[:3]


# ------------------------------------------------------------------------------------------------ classes


# ------------------------------------------------------------------------------------------------ drawing


def test_a_box_is_drawn_in_the_colour_of_its_class_and_the_picture_is_left_alone(tmp_path: Path) -> None:
    blank = Image.new("RGB", (120, 90))
    found = Detections(np.array([[30.0, 40.0, 80.0, 70.0]]), np.array([0.5]), np.array([3]))
    drawn = draw_detections(blank, found, ["three"])
    assert drawn.getpixel((55, 70)) == class_colour(3)
    assert drawn.getpixel((55, 55)) == (0, 0, 0)
    assert blank.getpixel((55, 70)) == (0, 0, 0)
    assert read_image(save_image(drawn, tmp_path / "x.png").read_bytes()).size == (120, 90)
    with pytest.raises(UsageError, match="cannot be written"):
        save_image(drawn, tmp_path / "x.gif")
    assert len({class_colour(index) for index in range(80)}) == 80


def test_probabilities_follow_the_declared_activation() -> None:
    logits = np.array([[1000.0, 1000.0, 0.0]], np.float32)
    assert probabilities(logits, Postprocess("classify", activation="softmax")).tolist() == [[0.5, 0.5, 0.0]]
    assert probabilities(logits, Postprocess("classify")).tolist() == logits.tolist()
    with pytest.raises(ModelError, match="batch x 2"):
        probabilities(logits, Postprocess("classify", classes=("a", "b")))
