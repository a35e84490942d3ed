"""What a verb prints: the blocks of each result record, made here alone for the terminal, for Python and for notebooks."""

from __future__ import annotations

import importlib
from typing import Any

from trt_engine.reporting import text
from trt_engine.reporting.document import Block, Section, clean, shorten

_MODULES = {
    "builds": ("BuildReport", "BuildEachReport", "ValidateReport", "BundleReport", "BundleState", "CacheReport"),
    "inspection": ("ModelReport", "EngineReport", "RunReport", "LintReport", "MigrateReport", "DoctorReport"),
    "measurements": (
        "BenchRecord", "BenchPlan", "LogReport", "InferReport", "InferPlan", "EvaluateReport", "EvaluatePlan",
        "SizeReport", "SizePlan", "ProfileReport", "ProfilePlan", "CompareReport", "ComparePlan",
        "UpgradeReport", "EngineDiff", "RunSummary", "RunPlan", "PackReport", "ServeReport", "Server",
    ),
    "deployment": ("DeployReport", "BatchReport", "BatchPlan"),
    "load": ("LoadtestRecord", "LoadtestPlan"),
    "models": (
        "ConvertReport", "CastReport", "QuantizeReport", "RangesReport", "RangesPlan", "CalibrationResult",
        "SearchReport", "SearchPlan",
    ),
    "engines": ("Engine", "Passport", "Signature", "InferenceEngine", "BoundCall", "InferenceResult", "Stats"),
}  # fmt: skip
"""The types, by the module with a function for each: `cast_report` for `CastReport`."""
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def result_blocks(record: Any, **options: Any) -> list[Block | Section]:
    """The blocks of a verb's result or plan; `options` choose how much of it is shown."""
    kind = next(one.__name__ for one in type(record).__mro__ if one.__name__ in _HOMES)
    module = importlib.import_module(f"{__name__}.{_HOMES[kind]}")
    function = "".join(f"_{c.lower()}" if c.isupper() else c for c in kind).lstrip("_")
    return list(getattr(module, function)(record, **options))


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
