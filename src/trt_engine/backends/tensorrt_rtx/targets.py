"""The target GPUs of a plan, and whether one is in this machine."""

from __future__ import annotations

from pathlib import Path

from trt_engine.backends.tensorrt import cuda_driver
from trt_engine.backends.tensorrt.cuda_driver import TargetGpu
from trt_engine.config.build import BuildConfig
from trt_engine.errors import SetupError
from trt_engine.trt.gpu_targets import RTX_TARGETS, rtx_targets
from trt_engine.trt.rtx_settings import parse

DEFAULT_TARGETS = RTX_TARGETS[1:]
"""The builder's default targets. Source: the header of such a plan of 1.7.1, which has no 7.5."""
_RUN_OPTIONS = ("memory_strategy", "weight_streaming_budget", "count_allocations", "kernel_specialization")


def local_gpu(device: str) -> TargetGpu | SetupError:
    """The GPU of `cuda:0`, or why it is missing."""
    try:
        return cuda_driver.find_gpu(device)
    except SetupError as error:
        return error


def build_targets(config: BuildConfig, gpu: TargetGpu | SetupError) -> tuple[str, ...]:
    """The compute capabilities to build for: the requested, else the local GPU's; empty for all."""
    if config.gpus:
        return rtx_targets(config.gpus)
    own = gpu.compute_capability if isinstance(gpu, TargetGpu) else ""
    return (own,) if own in RTX_TARGETS else ()


def load_blocker(targets: tuple[str, ...], gpu: TargetGpu | SetupError) -> str | None:
    """Why a plan for these GPUs cannot be loaded on this machine; None where it can. No target stands for all of them."""
    if isinstance(gpu, SetupError):
        return f"no GPU can be used here: {gpu.message}"
    own = gpu.compute_capability
    if not own or own in (targets or DEFAULT_TARGETS):  # the fake device accepts any target
        return None
    return f"the plan is for {', '.join(targets or DEFAULT_TARGETS)}, and this machine has {gpu.name} ({own})"


def parity_options(model: Path, config: BuildConfig) -> dict[str, str] | str:
    """The `-O` to load an engine just built from `model`, or why it cannot be loaded here."""
    here = local_gpu(config.device)
    if (reason := load_blocker(build_targets(config, here), here)) is not None:
        return reason
    settings = parse(config.options)
    options = {name: config.options[name] for name in _RUN_OPTIONS if name in config.options}
    if settings.strip_weights:
        options["refit_from"] = str(model)
    return options
