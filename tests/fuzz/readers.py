"""Readers of the library that no verb reaches on a machine without a GPU, called as a verb would be: by a file's name."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from trt_engine.profiling.instruments import ncu


def _detect(path: Path) -> None:
    from trt_engine.conversion.sources import detect_source

    detect_source(path)


def _ncu(path: Path) -> None:

    ncu.kernel_counters(ncu.parse_output(path.read_text(errors="replace")))


def _nsys(path: Path) -> None:
    from trt_engine.profiling.instruments.nsys import read_sqlite

    read_sqlite(path)


def _kineto(path: Path) -> None:
    from trt_engine.errors import TrtEngineError
    from trt_engine.profiling.instruments.kineto import read_trace

    try:
        document = json.loads(path.read_text(errors="replace"))
    except (ValueError, RecursionError) as error:  # PyTorch's own writer made the file, torch_trace reads it
        raise _NoTrace("no JSON") from error
    if not isinstance(document, dict):
        raise _NoTrace("no object")
    try:
        read_trace(document, "fuzz")
    except TrtEngineError as error:
        raise _NoTrace(error.message) from error


class _NoTrace(Exception):
    """The trace was refused with a sentence."""

    exit_code = 3


def _dataset(path: Path) -> None:
    from trt_engine.vision.datasets import DatasetReader, open_dataset
    from trt_engine.vision.preprocess import Preprocessor
    from trt_engine.vision.spec import Preprocess

    found = open_dataset(path)
    for _ in DatasetReader(found, Preprocessor(Preprocess((8, 8)), "float32"), 2):
        pass


def _image(path: Path) -> None:
    from trt_engine.vision.preprocess import BadImage, Preprocessor, read_image
    from trt_engine.vision.spec import Preprocess

    try:
        picture = read_image(path.read_bytes())
    except BadImage as error:
        raise _BadImage(str(error)) from error
    Preprocessor(Preprocess((8, 8)), "float32")(picture)


class _BadImage(Exception):
    exit_code = 2


def _calibrate(path: Path) -> None:
    from trt_engine.precision.calibration import calibrate

    calibrate(path.parent / "m.onnx", None, "minmax", cache=path)


def _times(path: Path) -> None:
    from trt_engine.trt.trtexec_exports import read_times

    read_times(path)


def _planted(what: Path) -> None:
    """What a reader must never do, for the tests of the fuzzer itself."""
    import ctypes
    import os

    if what.name == "raise":
        raise ValueError("planted")
    if what.name == "hang":
        while True:
            pass
    acts: dict[str, Callable[[], object]] = {
        "crash": lambda: ctypes.string_at(0),
        "memory": lambda: bytearray(b"\x01") * (1200 << 20),
        "write": lambda: Path("../../absent/outside").touch(),
        "leave": lambda: Path(".left.tmp").write_bytes(b""),
        "change": lambda: Path("x").write_bytes(b"2"),
        "run": lambda: os.system("true"),
        "print": lambda: print("\x1b[31m"),
        "nothing": lambda: None,
    }
    with contextlib.suppress(OSError):
        acts[what.name]()


READERS: dict[str, Callable[[Path], None]] = {
    "@detect": _detect,
    "@ncu": _ncu,
    "@nsys": _nsys,
    "@kineto": _kineto,
    "@dataset": _dataset,
    "@image": _image,
    "@calibrate": _calibrate,
    "@times": _times,
    "@planted": _planted,
}
"""By the first word of a call. A refusal is an exception with an `exit_code`; any other exception counts as exit code 1."""
