"""trt-engine: build, verify, measure, profile, size and serve inference engines.

::

    import trt_engine as te

    engine = te.build("model.onnx", batch=(1, 8, 64), out="model.engine.onnx")
    with te.load(engine) as runner:
        outputs = runner.infer({"images": x})

Names are resolved on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

# Module -> public names, separated by blanks. tools/settings_types.py writes `__init__.pyi` from it.
_NAMES = {
    "bundling.bundle": "bundle",
    "config.batch": "BatchConfig",
    "config.bench": "BenchConfig",
    "config.build": "BuildConfig",
    "config.deploy": "DeepstreamConfig RayConfig TritonConfig",
    "config.loadtest": "LoadtestConfig",
    "config.migrate": "MigrateConfig",
    "config.profiles": "Profile ShapeRange",
    "config.runtime": "Batching RuntimeConfig",
    "config.serve": "ServeConfig",
    "config.size": "SizeConfig",
    "config.upgrade": "UpgradeConfig",
    "deployment.deploy": "deploy",
    "diagnosis.doctor": "doctor",
    "engine": "Engine",
    "environment": "Environment",
    "errors": "TrtEngineError",
    "batch_jobs.batch": "batch",
    "load_testing.loadtest": "loadtest",
    "logs": "log_to",
    "migration.migrate": "migrate",
    "precision_search.search": "search",
    "profiling.diff": "diff",
    "progress": "Progress",
    "records.batch": "BatchReport",
    "records.bench": "BenchRecord Protocol",
    "records.build": "ValidateReport",
    "records.bundle": "BundleReport",
    "records.deploy": "DeployReport",
    "records.inspect": "EngineReport ModelReport",
    "records.lint": "LintReport",
    "records.loadtest": "LoadtestRecord",
    "records.migrate": "MigrateReport",
    "records.passport": "Passport",
    "records.size": "SizeReport",
    "records.upgrade": "UpgradeReport",
    "reporting.pack": "pack",
    "reporting.report": "report",
    "runtime.bound_call": "BoundCall",
    "runtime.inference_engine": "InferenceEngine InferenceResult",
    "serving.serve": "serve",
    "sizing.size": "size",
    "store": "Store",
    "sweep.run": "run",
    "tensors": "Signature TensorSpec",
    "verbs.bench": "bench",
    "verbs.build": "build",
    "verbs.calibrate": "calibrate",
    "verbs.cast": "cast",
    "verbs.compare": "compare",
    "verbs.convert": "convert",
    "verbs.docs": "docs",
    "verbs.evaluate": "evaluate",
    "verbs.example": "example",
    "verbs.infer": "infer",
    "verbs.inspect": "inspect",
    "verbs.lint": "lint",
    "verbs.load": "load",
    "verbs.profile": "profile",
    "verbs.quantize": "quantize",
    "verbs.ranges": "ranges",
    "verbs.upgrade_check": "upgrade_check",
    "verbs.validate": "validate",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from trt_engine.environment import distribution_version

        return distribution_version("trt-engine")
    if name not in _HOMES:
        raise AttributeError(f"module 'trt_engine' has no attribute {name!r}")
    import importlib

    value: object = getattr(importlib.import_module(f"trt_engine.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
