"""Options of ONNX Runtime (`-O name=value`) and its providers (`-O cuda.name=value`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trt_engine.config.parse import parse_names
from trt_engine.config.settings import from_values, opt
from trt_engine.device import info
from trt_engine.errors import UsageError

LEVELS = ("none", "basic", "extended", "all")
MAX_THREADS, _THREADS_PER_CORE = 1024, 16
"""Thread limits, in total and per core: ONNX Runtime creates and spins any number."""


def _parse_threads(value: str | int) -> int:
    try:
        count = int(value)
    except ValueError:
        count = -1
    if count < 0:
        raise UsageError(f"cannot read `{value}` as a number of threads", hint="0 is ONNX Runtime's own choice")
    cores = info.cpu().cores
    if count > (most := min(_THREADS_PER_CORE * cores, MAX_THREADS)):
        raise UsageError(
            f"{count} threads exceed the limit of {most} with {cores} available core{'s' if cores > 1 else ''}",
            hint=f"{cores} is one for each core; 0 is ONNX Runtime's own choice",
        )
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxRuntimeOptions:
    """Settings of the onnxruntime backend; None is ONNX Runtime's default."""

    graph_optimization: str | None = opt(
        None,
        "how far the graph is rewritten at build (default: all; basic for FP8, none for FP8 with FP16)",
        choices=LEVELS,
    )
    no_fusion: tuple[str, ...] | None = opt(
        None, "fusions that are not made, by name (`attention,bias_gelu`); `--no-fuse` makes none", parse=parse_names
    )
    external_weights: bool | None = opt(None, "keep the weights in a file beside the graph (default: from 1 GiB on)")
    separate_conv_bias: str | None = opt(
        None,
        "with cuda.prefer_nhwc: take the biases of convolutions out of them, most of them into ReLU; those before padded "
        "convolutions are added (`on`) or become a channel of ones (`channel`)",
        choices=("off", "on", "channel"),
    )
    intra_op_threads: int | None = opt(
        None, "threads inside one operator; 0 is one for each core", parse=_parse_threads
    )
    inter_op_threads: int | None = opt(None, "threads across operators (execution_mode=parallel)", parse=_parse_threads)
    execution_mode: str | None = opt(
        None, "operators one after another or side by side", choices=("sequential", "parallel")
    )
    spinning: bool | None = opt(None, "idle threads spin instead of sleeping")
    arena: bool | None = opt(None, "keep freed memory for the next inference")
    memory_pattern: bool | None = opt(None, "plan memory once for equal input shapes")
    denormals_as_zero: bool | None = opt(None, "treat denormal numbers as zero")
    deterministic: bool | None = opt(None, "only kernels that give the same bits each time")


BUILD_ONLY = ("graph_optimization", "no_fusion", "external_weights", "separate_conv_bias")
"""Settings fixed at build."""


def parse(options: Mapping[str, Any]) -> OnnxRuntimeOptions:
    """The settings without a dot in their name; `UsageError` with suggestions for unknown names."""
    own = {name: value for name, value in options.items() if "." not in name}
    made: OnnxRuntimeOptions = from_values(OnnxRuntimeOptions, own)
    return made


def provider_options(options: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """`cuda.gpu_mem_limit=1073741824` as `{"cuda": {"gpu_mem_limit": "1073741824"}}`."""
    found: dict[str, dict[str, str]] = {}
    for name, value in options.items():
        provider, dot, setting = name.partition(".")
        if dot:
            found.setdefault(provider, {})[setting] = str(value)
    return found
