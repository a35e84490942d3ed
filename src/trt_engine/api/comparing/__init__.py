"""`compare`: engines measured in turns, their outputs on the same input, and what may be said of the difference."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from trt_engine.api.comparing.asked import LOADS, asked_for
from trt_engine.api.comparing.records import keep_baseline, of_records, read_baseline
from trt_engine.api.comparing.report import report_of
from trt_engine.api.comparing.turns import in_turns
from trt_engine.api.measuring import sealed, settled
from trt_engine.benchmark.loop import Progress
from trt_engine.comparisons import ComparePlan, CompareReport
from trt_engine.config import BenchConfig, BuildConfig, RuntimeConfig
from trt_engine.engine import Engine, is_bare_model
from trt_engine.errors import AccuracyError, Interrupted, SpeedError, UnstableError
from trt_engine.files import ensure_folder, json_bytes, write_whole
from trt_engine.graph.load import open_model
from trt_engine.records import document

__all__ = ["compare", "gate", "outlook", "run"]

log = logging.getLogger(__name__)


def compare(*engines: Engine | Path | str, **values: Any) -> CompareReport:
    """How much slower (or faster) engines are than the first one, with an interval, and how far their outputs lie apart.

    Engines (or bare models, which are built into the store first) are measured in turns, on the same input. `values` are
    `fail_if` (rules as `"slower:3%"`, `"p99-slower:5%"`, `"maybe-slower:3%"`, `"error:1e-3"`), `baseline` (a file that
    `save_baseline` wrote, in place of the first engine), `save_baseline`, `loads` (how often everything is loaded anew),
    `out`, `yes`, `on_progress`, and the settings of `BenchConfig`, `RuntimeConfig` and (for models) `BuildConfig`;
    `duration_s` is for everything together. Paths of two `records.jsonl` compare what was measured before, which is no pair.

    Raises `AccuracyError` or `SpeedError` when a rule fails and `UnstableError` with `strict=True`, after everything is
    written; `UsageError` for what was or would be measured by different rules.
    """
    report = run(*engines, **values)
    config = values.get("config") or BenchConfig()
    gate(report, strict=bool(values.get("strict", config.strict)))
    return report


def run(
    *engines: Engine | Path | str,
    fail_if: Sequence[str] = (),
    baseline: Path | str | None = None,
    save_baseline: Path | str | None = None,
    loads: int = LOADS,
    out: Path | str | None = None,
    yes: bool = False,
    command: str = "",
    config: BenchConfig | None = None,
    runtime: RuntimeConfig | None = None,
    build: BuildConfig | None = None,
    on_progress: Progress | None = None,
    **values: Any,
) -> CompareReport:
    """The same without the gates."""
    config, runtime, build, named = settled(config, runtime, build, values)
    asked = asked_for(
        engines, fail_if=fail_if, baseline=baseline, save_baseline=save_baseline, loads=loads, out=out, yes=yes,
        config=config, runtime=runtime,
    )  # fmt: skip
    for name, target in asked.writes.items():  # tried before minutes are spent
        ensure_folder(target.parent, by="--save-baseline" if name == "baseline" else "-o")
    if any(asked.recorded):
        measured = of_records(asked)
    else:
        for item in asked.engines:
            if isinstance(item, Path) and not item.exists():
                Engine.open(item)  # says so, before minutes are spent on building the others
        opened = [sealed(item, config, runtime, build, named) for item in asked.engines]
        for engine in opened:
            engine.verify()
        base = None if asked.baseline is None else read_baseline(asked.baseline)
        measured = in_turns(asked, opened, base, on_progress)
    report = report_of(asked, measured)
    if (place := asked.writes.get("baseline")) is not None and report.complete:
        keep_baseline(place, measured.sides[0])
    if (place := asked.writes.get("compare")) is not None:
        written = msgspec.json.format(json_bytes(document("compare", report, command=command)), indent=2)
        write_whole(place, written + b"\n")
    for text in report.warnings:
        log.warning("%s", text)
    if not report.complete:
        raise Interrupted(
            f"interrupted after {report.blocks} turns of each engine",
            hint="the same command compares again",
            partial=report,
        )
    return report


def outlook(
    *engines: Engine | Path | str,
    fail_if: Sequence[str] = (),
    baseline: Path | str | None = None,
    save_baseline: Path | str | None = None,
    loads: int = LOADS,
    out: Path | str | None = None,
    yes: bool = False,
    config: BenchConfig | None = None,
) -> ComparePlan:
    """What `run` would do with the same arguments, refused where it would refuse at once. Writes and measures nothing."""
    asked = asked_for(
        engines, fail_if=fail_if, baseline=baseline, save_baseline=save_baseline, loads=loads, out=out, yes=yes,
        config=config or BenchConfig(), runtime=RuntimeConfig(),
    )  # fmt: skip
    if asked.baseline is not None:
        read_baseline(asked.baseline)
    builds = []
    if any(asked.recorded):
        of_records(asked)
    else:
        builds = [str(item) for item in asked.engines if is_bare_model(item)]
        for item in asked.engines:
            if isinstance(item, Engine):
                continue
            if is_bare_model(item):
                open_model(item)
            else:
                Engine.open(item)
    return ComparePlan(
        engines=tuple(asked.names),
        builds=tuple(builds),
        baseline=None if asked.baseline is None else str(asked.baseline),
        rules=tuple(rule.text for rule in asked.rules),
        duration_s=asked.duration_s,
        loads=loads,
        writes=tuple(map(str, asked.writes.values())),
    )


def gate(report: CompareReport, *, strict: bool = False) -> None:
    """Raise what a failed rule asks for: `AccuracyError` before `SpeedError`; `UnstableError` with `strict`."""
    failed = [item for item in report.gates if item.failed]
    outputs = [item.text for item in failed if item.rule.startswith("error")]
    if outputs:
        raise AccuracyError(
            "; ".join(outputs), hint="`trt-engine evaluate` says what it costs in the task's own figure"
        )
    if failed:
        raise SpeedError(
            "; ".join(item.text for item in failed),
            hint="`trt-engine profile` of both engines says where the time goes",
        )
    if strict and not report.stable:
        raise UnstableError(
            f"the comparison is not stable: {'; '.join(report.instability)}",
            hint="compare longer (`--duration 60s`) on a quiet machine",
        )
