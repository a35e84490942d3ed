"""`convert`: any source as a verified ONNX file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from trt_engine.config.convert import ConvertConfig
from trt_engine.config.settings import replace_values
from trt_engine.conversion import convert as conversion
from trt_engine.progress import ProgressOption
from trt_engine.public_function import public_function
from trt_engine.records.convert import ConvertReport
from trt_engine.verbs.given_model import AnyModel, on_disk, takes_model

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import ConvertSettings


@public_function
@takes_model("source")
def convert(
    source: AnyModel,
    *,
    config: ConvertConfig | None = None,
    dry_run: bool = False,
    progress: ProgressOption = False,
    **settings: Unpack[ConvertSettings],
) -> ConvertReport:
    """Convert any source to ONNX at `out`, verified against the source at several shapes.

    `inputs` are examples: `{"images": (2, 3, 640, 640)}`, arrays, `"images:2x3x640x640"`, or .npy and .npz files.
    `dynamic` names the dynamic axes: `{"images": {0: "batch@1..64", 2: "height"}}`, or the syntax of `--dynamic`; None
    makes the first axis of every input `batch`, `{}` makes all static. Factories run in this process. With
    `allow_frozen_branches` a Python `if` on tensor values keeps the branch of the example, with a warning;
    `all_outputs` keeps training-only outputs. `trust_source` opens files whose pickles, graph or Python code do more
    than compute: that code runs with your rights and is reported.

    Raises `AccuracyError` for a graph that differs from its source, with what froze and where; `ModelError` for a failing
    source; `SetupError` naming the extra for a missing library. Output is written atomically. `UsageError` for an `opset` or
    a `tolerance` out of range.
    """
    return conversion.convert(on_disk(source), replace_values(config or ConvertConfig(), settings), dry_run=dry_run)
