"""trt-engine: build, verify, measure, profile, size and serve inference engines.

::

    import trt_engine as te

    engine = te.build("model.onnx", batch=(1, 8, 64), out="model.engine.onnx")
    with te.load(engine) as runner:
        outputs = runner.infer({"images": x})

Names are resolved on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

_VERBS = (
    "batch bench build bundle cast compare convert deploy diff docs doctor evaluate example infer inspect "
    "lint loadtest migrate profile quantize ranges run search serve size upgrade_check validate"
)
# Module -> public names, separated by blanks. tools/settings_types.py writes `__init__.pyi` from it.
_NAMES = {
    "config.bench": "BenchConfig",
    "config.build": "BuildConfig",
    "config.profiles": "Profile ShapeRange",
    "config.runtime": "Batching RuntimeConfig",
    "engine": "Engine",
    "environment": "Environment",
    "errors": "TrtEngineError",
    "logs": "log_to",
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
    "store": "Store",
    "tensors": "Signature TensorSpec",
    "verbs.batch.config": "BatchConfig",
    "verbs.calibrate": "calibrate",
    "verbs.deploy.config": "DeepstreamConfig RayConfig TritonConfig",
    "verbs.load": "load",
    "verbs.loadtest.config": "LoadtestConfig",
    "verbs.migrate.config": "MigrateConfig",
    "verbs.serve.config": "ServeConfig",
    "verbs.size.config": "SizeConfig",
    "verbs.upgrade_check.config": "UpgradeConfig",
}
_NAMES |= {f"verbs.{verb}.run": verb for verb in _VERBS.split()}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from trt_engine.environment import distribution_version

        return distribution_version("trt-engine")
    if name not in _HOMES:
        raise AttributeError(f"module 'trt_engine' has no attribute {name!r}")
    import importlib

    from trt_engine import display, errors, logs

    display.results, errors.in_python = _results, _in_python
    logs.use_callers_language()
    value: object = getattr(importlib.import_module(f"trt_engine.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def _results() -> object:
    """What results are shown with."""
    from trt_engine.reporting import results

    return results


def _in_python(text: str) -> str:
    """A message or a hint, with keyword arguments in place of options."""
    from trt_engine.config.caller_language import in_python

    return in_python(text)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
