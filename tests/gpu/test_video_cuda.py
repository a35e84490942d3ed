"""Frames decoded by NVDEC and prepared by the kernel are those that PyAV and Pillow give."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("av", reason="PyAV makes the clips")
pytest.importorskip("PIL", reason="the reference is pillow's")

from trt_engine.device import open_device
from trt_engine.errors import TrtEngineError
from trt_engine.protocols import RunnerBase
from trt_engine.tensors import Signature, TensorSpec
from trt_engine.video.decoder import PyAvDecoder, read_frames
from trt_engine.video.device_frames import device_frames
from trt_engine.video.nvdec import load_library
from trt_engine.vision.preprocess import Preprocessor
from trt_engine.vision.spec import Postprocess, Preprocess, Vision

sys.path.append(str(Path(__file__).resolve().parents[1] / "video"))

import clips

pytestmark = pytest.mark.gpu

VISION = Vision(Preprocess((224, 320)), Postprocess("classify"))


class Runner(RunnerBase):
    """What of an engine the preparation of its frames needs."""

    signature = Signature(
        (TensorSpec("images", "float16", (-1, 3, 224, 320), ("n", None, None, None)),),
        (TensorSpec("scores", "float16", (-1, 2), ("n", None)),),
    )


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    made = Runner()
    try:
        load_library()
        made.device = open_device("cuda:0")
    except TrtEngineError as error:
        pytest.skip(f"no NVDEC here: {error.message}")
    yield made
    made.device.close()


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_frames_on_the_gpu_are_those_of_the_cpu(codec: str, runner: Runner, tmp_path: Path) -> None:
    clip = clips.write_clip(tmp_path / "clip.mp4", codec=codec, size=(640, 368))
    with PyAvDecoder(str(clip)) as decoder:
        images = [frame.image() for frame in read_frames(decoder)]
    with device_frames(runner, VISION, [str(clip)]) as frames:
        assert frames is not None
        with closing(frames.open(str(clip))) as decoder:
            found = list(read_frames(decoder))
        with frames.batch([frame.data for frame in found]) as batch, closing(frames.device.stream()) as stream:
            made = np.empty(batch.shape, np.float16)
            frames.device.download(batch.buffer, made, stream)
            stream.synchronize()
        pictures = [np.asarray(frame.image()) for frame in found]
        del found
    preprocessor = Preprocessor(VISION.preprocess, "float16")
    np.testing.assert_array_equal(made, np.stack([preprocessor(image)[0] for image in images]))
    np.testing.assert_array_equal(pictures, [np.asarray(image) for image in images])
