"""`example`: a small detector and an image for it, written from the package alone, to try every verb with.

Nothing is trained. Three channels of the network carry how red, green and blue a place is, averaged from layer to layer, and
the scores are read from them; the other channels hold seeded random weights and cost the time a detector costs.
"""

from __future__ import annotations

import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trt_engine import atomic_io
from trt_engine.arrayfiles import Array
from trt_engine.errors import UsageError
from trt_engine.public_function import public_function
from trt_engine.vision.spec import METADATA_KEY, Postprocess, Preprocess, Vision

MODEL, IMAGE, CLIP = "detector.onnx", "scene.png", "clip.mp4"
CLASSES = ("red", "green", "blue")
_SIDE = 160
_STRIDE = 8
_CELLS = _SIDE // _STRIDE
_BOX_PX = 40.0
"""Side of every box: the objects it is made for."""
_WIDTHS = (16, 32, 64)
"""Channels after each of the three convolutions of stride 2."""
_BLOCKS = 3


@public_function
@atomic_io.all_or_nothing()
def example(out: Path | str = "example", *, overwrite: bool = False, video: bool = False) -> Path:
    """Write `detector.onnx` and `scene.png` into the folder `out`, with `video` also `clip.mp4`; the path of the model.

    The model finds red, green and blue objects in images [batch, 3, 160, 160] (RGB, 0 to 1, any batch) and declares its pre-
    and post-processing. Every call writes the same bytes; the clip has 100 frames, 25 a second. Raises `UsageError` where
    another file has one of the names and `overwrite` is not given, `SetupError` for a clip without PyAV.
    """
    folder = atomic_io.ensure_folder(atomic_io.as_path(out, "`out`"))
    files = {MODEL: detector().SerializeToString(deterministic=True), IMAGE: scene_png()}
    if video:
        from trt_engine.video.decoder import require_video

        require_video()
        files[CLIP] = clip_mp4()
    for name, data in files.items():
        with atomic_io.os_errors(folder / name):
            path = folder / name
            is_other = path.exists() and (path.stat().st_size != len(data) or atomic_io.read_bounded(path) != data)
        if is_other and not overwrite:
            raise UsageError(f"`{folder / name}` exists and is another file", hint="`--overwrite` overwrites it")
    for name, data in files.items():
        atomic_io.write_atomic(folder / name, data)
    return folder / MODEL


def detector() -> ModelProto:
    """The network: `images` [batch, 3, 160, 160] to `detections` [batch, 4 + 3, 400], as YOLO's exports have them."""
    random = np.random.RandomState(0)  # its numbers are the same in every NumPy
    weights: dict[str, Array] = {}
    nodes = []

    def convolution(name: str, source: str, kernel_OIHW: Array, bias_O: Array, stride: int = 1) -> str:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = kernel_OIHW.astype("f4"), bias_O.astype("f4")
        pad = kernel_OIHW.shape[2] // 2
        nodes.append(
            helper.make_node(
                "Conv", [source, f"{name}.weight", f"{name}.bias"], [name], name, strides=[stride] * 2, pads=[pad] * 4
            )
        )
        return name

    def activated(name: str, source: str, kernel_OIHW: Array, stride: int = 1) -> str:
        convolution(name, source, kernel_OIHW, np.zeros(len(kernel_OIHW)), stride)
        nodes.append(helper.make_node("Relu", [name], [f"{name}.out"], f"{name}.relu"))
        return f"{name}.out"

    def kernel(inputs: int, outputs: int, colour: Array) -> Array:
        """Random, but for the first three outputs: the average over 3 x 3 of what `colour` takes of the inputs."""
        made = random.standard_normal((outputs, inputs, 3, 3)) * np.sqrt(2 / (9 * inputs))
        made[:3] = 0
        made[:3, :3] = colour[:, :, None, None] / 9
        return np.asarray(made)

    source, width = "images", 3
    contrast = 1.5 * np.eye(3) - 0.5  # a colour above the mean of the other two
    for index, wider in enumerate(_WIDTHS):
        colour = contrast if index == 0 else np.eye(3)
        source = activated(f"down{index}", source, kernel(width, wider, colour), stride=2)
        width = wider
    for index in range(_BLOCKS):
        source = activated(f"block{index}", source, kernel(width, width, np.eye(3)))
    scores = np.zeros((3, width, 1, 1))
    scores[:, :3, 0, 0] = 60 * np.eye(3)
    convolution("scores", source, scores, np.full(3, -24.0))
    convolution("offsets", source, random.standard_normal((4, width, 1, 1)) * 0.01, np.zeros(4))
    centres = np.arange(_CELLS) * _STRIDE + 0.5  # of the pixel that each cell's kernels are centred on
    weights["boxes"] = np.stack(
        [*np.meshgrid(centres, centres), *np.full((2, _CELLS, _CELLS), _BOX_PX)]
    ).astype("f4")[None]  # fmt: skip
    weights["shape"] = np.array([0, 4 + len(CLASSES), _CELLS**2])
    nodes += [
        helper.make_node("Sigmoid", ["scores"], ["probabilities"], "probabilities"),
        helper.make_node("Add", ["offsets", "boxes"], ["placed"], "placed"),
        helper.make_node("Concat", ["placed", "probabilities"], ["both"], "both", axis=1),
        helper.make_node("Reshape", ["both", "shape"], ["detections"], "reshape"),
    ]
    return _declared_model(nodes, weights)


def _declared_model(nodes: list[NodeProto], weights: dict[str, Array]) -> ModelProto:
    """The graph of the nodes as a model that declares its pre- and post-processing."""
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "detector",
            [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, _SIDE, _SIDE])],
            [helper.make_tensor_value_info("detections", TensorProto.FLOAT, ["batch", 4 + len(CLASSES), _CELLS**2])],
            [numpy_helper.from_array(value, name) for name, value in weights.items()],
        ),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
        producer_name="trt-engine example",
    )
    declared = Vision(Preprocess((_SIDE, _SIDE)), Postprocess("yolo", classes=CLASSES, min_score=0.25, iou=0.2))
    model.metadata_props.add(key=METADATA_KEY, value=declared.to_json().decode())
    return model


def scene_image() -> Array:
    """An image [240, 320, 3] of three coloured discs before a grey wall."""
    random = np.random.RandomState(1)
    image_HWC = random.randint(90, 120, (240, 320, 1)) * np.ones((1, 1, 3), int)
    y, x = np.mgrid[:240, :320]
    for (across, down), colour in zip(((70, 80), (160, 170), (250, 90)), np.eye(3), strict=True):
        inside = (x - across) ** 2 + (y - down) ** 2 < 40**2
        image_HWC[inside] = 40 + 180 * colour
    return image_HWC.astype(np.uint8)


def scene_png() -> bytes:
    """`scene` as a PNG file."""
    pixels = scene_image()
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)  # each row unfiltered

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


FPS, FRAMES = 25, 100
_SIZE = 320, 240
_RADIUS = 40
_OBJECTS = ((2.0, (220, 40, 40), "2"), (-3.0, (40, 220, 40), "4"), (4.0, (40, 40, 220), "5"))
"""Pixels a frame, colour, digit. Each keeps to a third of the image: none covers another."""


def clip_frames() -> Iterator[Any]:
    """The frames, RGB images of pillow, 320x240."""
    from PIL import Image, ImageDraw, ImageFont

    noise = np.random.RandomState(1).randint(90, 120, (_SIZE[1], _SIZE[0], 1)).astype(np.uint8)
    wall = Image.fromarray(np.repeat(noise, 3, axis=2))
    font = ImageFont.load_default(52)
    for number in range(FRAMES):
        image = wall.copy()
        pen = ImageDraw.Draw(image)
        for index, (step, colour, digit) in enumerate(_OBJECTS):
            lane = _SIZE[0] / len(_OBJECTS)
            x, y = (
                index * lane + _bounce(lane / 2 + number * step / 8, lane),
                _bounce(_SIZE[1] / 2 + number * step, _SIZE[1]),
            )
            pen.ellipse((x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS), fill=colour)
            pen.text((x, y), digit, fill="white", font=font, anchor="mm", stroke_width=2, stroke_fill="white")
        yield image


def _bounce(place: float, side: float) -> float:
    """The place, reflected where a disc would leave a side of that many pixels."""
    room = side - 2 * _RADIUS
    return _RADIUS + room - abs((place - _RADIUS) % (2 * room) - room)


def clip_mp4() -> bytes:
    """`clip_frames` as an MP4 file. Raises `SetupError` without PyAV."""
    from trt_engine.video.writer import VideoWriter

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        with VideoWriter(path, fps=FPS) as writer:
            for number, image in enumerate(clip_frames()):
                writer.write(image, number / FPS)
        return atomic_io.read_bounded(path)
