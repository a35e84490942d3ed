"""Whether an engine of TensorRT-RTX can be used here; loads the library if there is a driver."""

from __future__ import annotations

from pathlib import Path

from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import SetupError
from trt_engine.records.passport import Compatibility
from trt_engine.trt import compatibility as plans
from trt_engine.trt.rtx_compatibility import ValidityReport


def check_compatibility(engine: Engine, config: RuntimeConfig) -> Compatibility:
    """loads, penalty, unknown, rebuild or refuse: by the library's report if there is a driver."""
    return plans.check_compatibility(engine, config, query_validity=_query_validity)


def _query_validity(plan: Path) -> ValidityReport:
    try:
        from trt_engine.backends.tensorrt_rtx.validity import query_validity
    except ImportError as error:
        raise SetupError(f"TensorRT-RTX cannot be loaded: {error}", hint="trt-engine doctor") from error
    return query_validity(plan)
