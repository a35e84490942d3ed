"""Whether a plan built with trtexec can be used and proved here: by the bindings where they are, else by trtexec itself."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

from trt_engine.backends.trtexec.program import find
from trt_engine.config import BuildConfig, RuntimeConfig
from trt_engine.engine import Engine, Verdict
from trt_engine.errors import SetupError
from trt_engine.plans import proving as plans_proving
from trt_engine.plans import verdict as plans
from trt_engine.plans.installed import installed
from trt_engine.plans.versions import Version

__all__ = ["proving", "verdict"]


def verdict(engine: Engine, config: RuntimeConfig) -> Verdict:
    """As for every plan; where only trtexec would run it, its version is the one that counts.

    Where neither NVML nor the kernel tells of a GPU, trtexec is not refused for that: it looks itself, and says so.
    """
    if importlib.util.find_spec("tensorrt") is not None:
        return plans.verdict(engine, config)
    try:
        program = find()
    except SetupError:
        return plans.verdict(engine, config)
    parts = (*program.version, *(() if program.build is None else (program.build,)))
    here = dataclasses.replace(
        installed(ask_trtexec=False), trtexec=program.path, trtexec_version=Version(parts), trtexec_said=None
    )
    if here.boards or here.driver is not None:
        return plans.verdict(engine, config, here=here)
    found = plans.verdict(engine, config, here=dataclasses.replace(here, driver="unknown"))
    if found.verdict != "loads":
        return found
    return dataclasses.replace(
        found, reason=f"{found.reason}; no GPU can be seen from here, trtexec looks for it itself"
    )


def proving(model: Path, config: BuildConfig) -> dict[str, str] | str:
    """As for every plan; weights that were left out are put back by the bindings alone."""
    options = plans_proving.proving(model, config)
    if "refit_from" in options and importlib.util.find_spec("tensorrt") is None:
        return "the plan was built without its weights, and only TensorRT's Python bindings put them back"
    return options
