"""What `-O name=value` sets on ONNX Runtime, and what `-O cuda.name=value` hands to a provider."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trt_engine.config import from_values, opt
from trt_engine.device import info
from trt_engine.errors import UsageError

__all__ = ["AT_BUILD", "LEVELS", "MOST_THREADS", "OnnxRuntimeOptions", "parse", "provider_options"]

LEVELS = ("none", "basic", "extended", "all")
MOST_THREADS, _THREADS_A_CORE = 1024, 16
"""Threads of one kind, in any case and for each core: ONNX Runtime makes as many as it is told, and spins them."""


def _switch(value: str | bool) -> bool:
    text = str(value).strip().lower()
    if text not in ("on", "off", "true", "false", "yes", "no", "1", "0"):
        raise UsageError(f"cannot read `{value}` as on or off", hint="write it as `-O name=on` or `-O name=off`")
    return text in ("on", "true", "yes", "1")


def _threads(value: str | int) -> int:
    try:
        count = int(value)
    except ValueError:
        count = -1
    if count < 0:
        raise UsageError(f"cannot read `{value}` as a number of threads", hint="0 is ONNX Runtime's own choice")
    cores = info.cpu().cores
    if count > (most := min(_THREADS_A_CORE * cores, MOST_THREADS)):
        raise UsageError(
            f"{count} threads are more than this machine bears: {most} at most, with {cores} "
            f"core{'s' if cores > 1 else ''} to use",
            hint=f"{cores} is one for each core; 0 is ONNX Runtime's own choice",
        )
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxRuntimeOptions:
    """Settings of the onnxruntime backend. What is None is ONNX Runtime's own default."""

    graph_optimization: str | None = opt(
        None,
        "how far the graph is rewritten at build (default: all; basic for FP8, none for FP8 with FP16)",
        choices=LEVELS,
    )
    external_weights: bool | None = opt(
        None, "keep the weights in a file beside the graph (default: from 1 GiB on)", parse=_switch
    )
    intra_op_threads: int | None = opt(None, "threads inside one operator; 0 is one for each core", parse=_threads)
    inter_op_threads: int | None = opt(None, "threads across operators (execution_mode=parallel)", parse=_threads)
    execution_mode: str | None = opt(
        None, "operators one after another or side by side", choices=("sequential", "parallel")
    )
    spinning: bool | None = opt(None, "idle threads spin instead of sleeping", parse=_switch)
    arena: bool | None = opt(None, "keep freed memory for the next inference", parse=_switch)
    memory_pattern: bool | None = opt(None, "plan memory once for equal input shapes", parse=_switch)
    denormals_as_zero: bool | None = opt(None, "treat denormal numbers as zero", parse=_switch)
    deterministic: bool | None = opt(None, "only kernels that give the same bits each time", parse=_switch)


AT_BUILD = ("graph_optimization", "external_weights")
"""The settings that shape the payload: they are decided when it is built."""


def parse(options: Mapping[str, Any]) -> OnnxRuntimeOptions:
    """The settings without a dot in their name; `UsageError` naming the right ones for one that does not exist."""
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
