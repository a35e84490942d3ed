"""With which settings a plan that was just built is loaded to be proved: those of its build, and its own host code."""

from __future__ import annotations

from pathlib import Path

from trt_engine.config import BuildConfig
from trt_engine.plans.settings import parse

__all__ = ["proving"]

_OF_THE_RUN = (
    "plugins", "python_plugins", "lean_runtime", "dla_core", "memory_strategy", "weight_streaming_budget",
    "persistent_cache_limit", "count_allocations",
)  # fmt: skip


def proving(model: Path, config: BuildConfig) -> dict[str, str] | str:
    """The `-O` to load with, or why the plan cannot be loaded on the machine that built it.

    `model` is the graph it was built from: the weights of a stripped plan are put back from it.
    """
    settings = parse(config.options)
    if settings.runtime_platform != "same":
        return f"the plan is for `{settings.runtime_platform}`"
    if settings.exclude_lean_runtime and settings.lean_runtime is None:
        return "the plan was built without its lean runtime, and none is given (`-O lean_runtime=PATH`)"
    options = {name: config.options[name] for name in _OF_THE_RUN if name in config.options}
    if settings.version_compatible or settings.serialize_plugins:
        options["allow_host_code"] = "on"  # our own, of a minute ago
    if settings.strip_weights:
        options["refit_from"] = str(model)
    return options
