"""Frames prepared by the GPU's kernel are equal to those that Pillow prepares: the kernel compiled for the CPU."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("av", reason="PyAV converts the reference's frames")
pytest.importorskip("PIL", reason="the reference is pillow's")

import av
from av.video.reformatter import VideoReformatter
from cpu_kernel import compile_kernel

from trt_engine.video.decoder import Frame
from trt_engine.vision.preprocess import Preprocessor
from trt_engine.vision.resampling import colour_numbers, frame_plan
from trt_engine.vision.spec import Preprocess

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="the kernel is compiled with `c++`")


def noise(size: tuple[int, int], seed: int, space: int, colour_range: int) -> Any:
    """A frame of random pixels."""
    rng = np.random.default_rng(seed)
    frame = av.VideoFrame(*size, "yuv420p")
    for plane in frame.planes:
        plane.update(rng.integers(0, 256, (plane.height, plane.line_size), np.uint8))
    frame.colorspace, frame.color_range = space, colour_range
    return frame


def nv12(frame: Any) -> np.ndarray[Any, Any]:
    """Luma, then pairs of chroma, as NVDEC gives them."""
    luma, u, v = (np.frombuffer(plane, np.uint8).reshape(plane.height, -1)[:, : plane.width] for plane in frame.planes)
    return np.concatenate([luma.ravel(), np.stack([u, v], -1).ravel()])


@pytest.mark.parametrize(
    ("declared", "dtype", "space", "colour_range"),
    [
        (Preprocess((64, 96)), "float16", 2, 0),
        (
            Preprocess((40, 40), channels="BGR", layout="NHWC", interpolation="bicubic", resize="stretch"),
            "float32",
            1,
            1,
        ),
        (Preprocess((48, 56), resize="center-crop", crop_share=0.875, interpolation="lanczos"), "float32", 1, 2),
        (
            Preprocess((70, 50), channels="L", scale=1.0, pad_placement="top-left", interpolation="nearest"),
            "uint8",
            9,
            1,
        ),
        (Preprocess((300, 300), std=(0.2, 0.3, 0.4), mean=(0.5, 0.4, 0.3)), "float64", 5, 1),
    ],
)
def test_the_gpu_s_kernel_is_equal_to_the_reference(
    declared: Preprocess, dtype: str, space: int, colour_range: int, tmp_path: Path
) -> None:
    """Every filter, placement, layout, colour space; two sizes in one batch."""
    preprocessor = Preprocessor(declared, dtype)
    frames = [noise((192, 108), 0, space, colour_range), noise((130, 98), 1, space, colour_range)]
    wanted = [preprocessor(Frame(0, 0.0, frame, VideoReformatter()).image())[0] for frame in frames]
    colours = colour_numbers(space, colour_range == 2)
    lumas = [nv12(frame) for frame in frames]
    plans = [frame_plan(preprocessor, frame.width, frame.height, colours) for frame in frames]
    table = np.array([[luma.ctypes.data, plan.ctypes.data] for luma, plan in zip(lumas, plans, strict=True)], np.int64)
    rows = np.zeros((2, *declared.shape), dtype)
    levels = np.stack(preprocessor.levels)
    compile_kernel(preprocessor, tmp_path)(*(ctypes.c_void_p(item.ctypes.data) for item in (table, levels, rows)), 2)
    np.testing.assert_array_equal(rows, np.stack(wanted))
