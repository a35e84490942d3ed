"""Decoder limits of NVIDIA GPUs, from NVIDIA's published figures.

Frames/s of one NVDEC at 1920x1080, 4:2:0, at the highest video clock of the tested GPU (Turing 1860, Ampere 1665, Ada 2160,
Blackwell 2362 MHz): "NVDEC Application Note", Video Codec SDK 13.0, table "NVDEC Decoding Performance". By its text Hopper
and GA100 decode as Turing does, scaled by the clock. Numbers of NVDECs: "Video Decode GPU Requirements" of the NVIDIA
Dynamo documentation. GPUs that are in neither are not guessed.
"""

from __future__ import annotations

import math
import re

from trt_engine.config.streams import SourceGroup
from trt_engine.records.streams import DecodeLimit

SOURCE = (
    "NVDEC Application Note, Video Codec SDK 13.0 (docs.nvidia.com/video-technologies/video-codec-sdk/13.0), per NVDEC at "
    "1920x1080; number of NVDECs: Video Decode GPU Requirements (docs.nvidia.com/dynamo)"
)
_FRAMES_PER_S = {
    "Turing": {"h264": 771, "vp9": 932, "hevc": 1316},
    "Ada": {"h264": 903, "vp9": 1290, "hevc": 1641, "av1": 1018},
    "Blackwell": {"h264": 2172, "vp9": 1445, "hevc": 1872, "av1": 1119},
}
_GPUS = {
    "A100": ("Turing", 5),
    "H100": ("Turing", 7),
    "H200": ("Turing", 7),
    "B200": ("Blackwell", 7),
    "GB200": ("Blackwell", 7),
    "L4": ("Ada", 4),
    "L40": ("Ada", 3),
    "L40S": ("Ada", 3),
    "RTX 6000 Ada": ("Ada", 3),
}
"""By name in NVML's: decoder generation and number of NVDECs."""


def decode_limit(gpu: str | None, codec: str, mix: tuple[SourceGroup, ...]) -> DecodeLimit | None:
    """Sources of the mix that the GPU's decoders serve; None for a GPU or codec without published figures.

    Every frame is decoded, those that are not inferred too.
    """
    name = next((name for name in _GPUS if gpu is not None and re.search(rf"\b{name}\b", gpu)), None)
    if name is None:
        return None
    architecture, decoders = _GPUS[name]
    each = _FRAMES_PER_S[architecture].get(codec)
    if each is None:
        return None
    per_source = sum(group.count * group.fps for group in mix) / sum(group.count for group in mix)
    whole = each * decoders
    return DecodeLimit(codec, architecture, decoders, float(whole), math.floor(whole / per_source), SOURCE)
