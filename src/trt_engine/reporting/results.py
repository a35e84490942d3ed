"""What a verb prints: the blocks of each result record, made here alone for the terminal, for Python and for notebooks."""

from __future__ import annotations

import importlib
from typing import Any

from trt_engine import errors
from trt_engine.reporting import text
from trt_engine.reporting.document import Block, Section, change_texts, clean, shorten

_FUNCTIONS = {
    "BatchReport": "runs.batch_report",
    "BenchRecord": "bench.bench_record",
    "BoundCall": "engines.bound_call",
    "BuildEachReport": "builds.build_each_report",
    "BuildReport": "builds.build_report",
    "BundleReport": "builds.bundle_report",
    "BundleState": "builds.bundle_state",
    "CacheReport": "builds.cache_report",
    "CalibrationResult": "models.calibration_result",
    "CastReport": "models.cast_report",
    "CompareReport": "compare.compare_report",
    "ConvertReport": "models.convert_report",
    "DeployReport": "runs.deploy_report",
    "DoctorReport": "engines.doctor_report",
    "DryRun": "runs.dry_run",
    "Engine": "engines.engine",
    "EngineDiff": "compare.engine_diff",
    "EngineReport": "engines.engine_report",
    "EvaluateReport": "runs.evaluate_report",
    "InferReport": "runs.infer_report",
    "InferenceEngine": "engines.inference_engine",
    "InferenceResult": "engines.inference_result",
    "LintReport": "engines.lint_report",
    "LoadtestRecord": "loadtest.loadtest_record",
    "LogReport": "bench.log_report",
    "MigrateReport": "engines.migrate_report",
    "ModelReport": "engines.model_report",
    "PackReport": "runs.pack_report",
    "Passport": "engines.passport",
    "ProfileReport": "profile.profile_report",
    "QuantizeReport": "models.quantize_report",
    "RangesReport": "models.ranges_report",
    "RunPlan": "sweep.run_plan",
    "RunReport": "engines.run_report",
    "RunSummary": "sweep.run_summary",
    "SearchReport": "models.search_report",
    "ServeReport": "runs.serve_report",
    "Server": "runs.server",
    "Signature": "engines.signature",
    "SizeReport": "size.size_report",
    "Stats": "engines.stats",
    "UpgradeReport": "compare.upgrade_report",
    "ValidateReport": "builds.validate_report",
}
"""By type the module here and its function; a module is imported when it is first needed."""


def result_blocks(record: Any, **options: Any) -> list[Block | Section]:
    """The blocks of a verb's result or plan; `options` choose how much of it is shown."""
    kind = next(one.__name__ for one in type(record).__mro__ if one.__name__ in _FUNCTIONS)
    module, _, function = _FUNCTIONS[kind].partition(".")
    blocks = list(getattr(importlib.import_module(f"trt_engine.reporting.{module}"), function)(record, **options))
    return blocks if errors.in_shell else [change_texts(block, _in_python) for block in blocks]


def _in_python(text: str) -> str:
    return errors.in_callers_language(text) if "`" in text else text


def result_text(record: Any, *, width: int | None = None, **options: Any) -> str:
    """The result as the verb prints it, its tables in `width` columns if that is given."""
    return text.render_result(result_blocks(record, **options), width)


def short_text(record: Any) -> str:
    """The result as text, its long lists cut."""
    return text.render_result(shorten(result_blocks(record)))


def result_html(record: Any) -> str:
    """The result as tables for a notebook cell, its long lists cut."""
    from trt_engine.reporting.html import render_cell

    return render_cell(clean(tuple(shorten(result_blocks(record)))))
