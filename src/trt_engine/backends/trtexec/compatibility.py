"""Compatibility of plans built with trtexec, run by the bindings or by trtexec itself."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

from trt_engine.backends.trtexec.program import find_program
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import SetupError
from trt_engine.records.passport import Compatibility
from trt_engine.trt import compatibility as plans
from trt_engine.trt import settings
from trt_engine.trt.installation import detect_installation
from trt_engine.trt.versions import Version


def check_compatibility(engine: Engine, config: RuntimeConfig) -> Compatibility:
    """Compatibility of a plan; without bindings, the version of trtexec counts.

    A GPU unknown to NVML and the kernel is not an error: trtexec detects it itself.
    """
    if importlib.util.find_spec("tensorrt") is not None:
        return plans.check_compatibility(engine, config)
    try:
        program = find_program()
    except SetupError:
        return plans.check_compatibility(engine, config)
    parts = (*program.version, *(() if program.build is None else (program.build,)))
    here = dataclasses.replace(
        detect_installation(probe_trtexec=False),
        trtexec=program.path,
        trtexec_version=Version(parts),
        trtexec_message=None,
    )
    if here.gpus or here.driver is not None:
        return plans.check_compatibility(engine, config, installation=here)
    found = plans.check_compatibility(engine, config, installation=dataclasses.replace(here, driver="unknown"))
    if found.status != "loads":
        return found
    return dataclasses.replace(found, reason=f"{found.reason}; no GPU was detected here, trtexec detects it itself")


def parity_options(model: Path, config: BuildConfig) -> dict[str, str] | str:
    """Options to load a plan for parity checks, or why it cannot be: stripped weights need the bindings."""
    options = settings.parity_options(model, config)
    if "refit_from" in options and importlib.util.find_spec("tensorrt") is None:
        return "the plan was built without its weights, and only TensorRT's Python bindings can refit them"
    return options
