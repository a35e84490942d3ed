"""trt-engine: from a network to an engine that is built, proved, measured, profiled, sized and served.

::

    import trt_engine as te

    engine = te.build("model.onnx", batch=(1, 8, 64), out="model.engine.onnx")
    with te.load(engine) as runner:
        outputs = runner.infer({"images": x})

Names are resolved on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers read it as true; `typing` takes longer to import than `--help` to answer
if TYPE_CHECKING:
    from typing import Any

    from trt_engine.api.building import build
    from trt_engine.api.calibrating import calibrate, quantize, ranges
    from trt_engine.api.casting import cast
    from trt_engine.api.comparing import compare
    from trt_engine.api.evaluating import evaluate
    from trt_engine.api.inspecting import inspect
    from trt_engine.api.linting import lint
    from trt_engine.api.loading import load
    from trt_engine.api.measuring import bench
    from trt_engine.api.profiling import profile
    from trt_engine.bundling.build import bundle
    from trt_engine.config import Batching, BenchConfig, BuildConfig, Profile, RuntimeConfig, ShapeRange, SizeConfig
    from trt_engine.conversion.convert import convert
    from trt_engine.diagnosis.checks import doctor
    from trt_engine.engine import Engine, Passport
    from trt_engine.environment import Environment
    from trt_engine.errors import TrtEngineError
    from trt_engine.logs import log_to
    from trt_engine.matrix.run import run_plan
    from trt_engine.profiling.diff import diff
    from trt_engine.records import (
        BenchRecord,
        BundleReport,
        EngineReport,
        LintReport,
        ModelReport,
        Protocol,
        SizeReport,
    )
    from trt_engine.reporting.pack import pack
    from trt_engine.reporting.write import report
    from trt_engine.runtime.instance import InferenceEngine, InferenceResult
    from trt_engine.sizing.streams import size
    from trt_engine.store import Store
    from trt_engine.tensors import Signature, TensorSpec

_HOMES = {
    "api.building": ("build",),
    "api.calibrating": ("calibrate", "quantize", "ranges"),
    "api.casting": ("cast",),
    "api.comparing": ("compare",),
    "api.evaluating": ("evaluate",),
    "api.inspecting": ("inspect",),
    "api.linting": ("lint",),
    "api.loading": ("load",),
    "api.measuring": ("bench",),
    "api.profiling": ("profile",),
    "profiling.diff": ("diff",),
    "bundling.build": ("bundle",),
    "conversion.convert": ("convert",),
    "sizing.streams": ("size",),
    "diagnosis.checks": ("doctor",),
    "reporting.pack": ("pack",),
    "reporting.write": ("report",),
    "config": ("Batching", "BenchConfig", "BuildConfig", "Profile", "RuntimeConfig", "ShapeRange", "SizeConfig"),
    "engine": ("Engine", "Passport"),
    "environment": ("Environment",),
    "errors": ("TrtEngineError",),
    "logs": ("log_to",),
    "matrix.run": ("run_plan",),
    "records": ("BenchRecord", "BundleReport", "EngineReport", "LintReport", "ModelReport", "Protocol", "SizeReport"),
    "runtime.instance": ("InferenceEngine", "InferenceResult"),
    "store": ("Store",),
    "tensors": ("Signature", "TensorSpec"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Batching",
    "BenchConfig",
    "BenchRecord",
    "BuildConfig",
    "BundleReport",
    "Engine",
    "EngineReport",
    "Environment",
    "InferenceEngine",
    "InferenceResult",
    "LintReport",
    "ModelReport",
    "Passport",
    "Profile",
    "Protocol",
    "RuntimeConfig",
    "ShapeRange",
    "Signature",
    "SizeConfig",
    "SizeReport",
    "Store",
    "TensorSpec",
    "TrtEngineError",
    "bench",
    "build",
    "bundle",
    "calibrate",
    "cast",
    "compare",
    "convert",
    "diff",
    "doctor",
    "evaluate",
    "inspect",
    "lint",
    "load",
    "log_to",
    "pack",
    "profile",
    "quantize",
    "ranges",
    "report",
    "run_plan",
    "size",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from trt_engine.environment import version_of

        return version_of("trt-engine")
    if name not in _HOME:
        raise AttributeError(f"module 'trt_engine' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"trt_engine.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
