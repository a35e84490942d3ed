"""Whether an engine of TensorRT-RTX can be used here; loads the library if there is a driver."""

from __future__ import annotations

from pathlib import Path

import tensorrt_rtx as trt

from trt_engine.atomic_io import open_regular
from trt_engine.backends.tensorrt.binding import lifecycle_lock
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, SetupError
from trt_engine.plan_header import read_plan_header
from trt_engine.records.passport import Compatibility
from trt_engine.trt import compatibility as plans
from trt_engine.trt.rtx_compatibility import ValidityReport


def check_compatibility(engine: Engine, config: RuntimeConfig) -> Compatibility:
    """loads, penalty, unknown, rebuild or refuse: by the library's report if there is a driver."""
    return plans.check_compatibility(engine, config, query_validity=query_validity)


class _MessageLogger(trt.ILogger):  # type: ignore[misc]  # the bindings have no types
    """Stores the library's messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def log(self, severity: trt.ILogger.Severity, text: str) -> None:
        if severity != trt.ILogger.VERBOSE:
            self.texts.append(text.strip())


def query_validity(plan: Path) -> ValidityReport:
    """The library's report about the header of a plan, on GPU 0; without a driver it is INVALID, with no bit set.

    `SetupError` if the library does not start.
    """
    messages = _MessageLogger()
    try:
        with lifecycle_lock():
            runtime = trt.Runtime(messages)
    except TypeError as error:  # the bindings raise it for a null pointer
        why = "; ".join(messages.texts) or str(error)
        raise SetupError(f"TensorRT-RTX does not start: {why}", hint="`trt-engine doctor`") from error
    with open_regular(plan, error=EngineError) as file:
        header = read_plan_header(file)
        file.seek(header.offset if header is not None else 0)
        head = file.read(runtime.engine_header_size)
    validity, bits = runtime.get_engine_validity(head)
    return ValidityReport(validity.name, int(bits), tuple(messages.texts))
