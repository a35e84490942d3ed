"""`upgrade-check`: engines of two versions, built in two environments; one page, one verdict."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from trt_engine.atomic_io import all_or_nothing, as_path, ensure_folder
from trt_engine.benchmark.speed_difference import UNPAIRED_METHOD
from trt_engine.config.settings import replace_values
from trt_engine.errors import (
    AccuracyError,
    EngineError,
    PrecisionError,
    SpeedError,
    TrtEngineError,
    UnstableError,
    UsageError,
)
from trt_engine.public_function import public_function
from trt_engine.records.base import write_document
from trt_engine.records.upgrade import UpgradeReport
from trt_engine.reporting.report import REPORT_FILES, check_overwrite, write_reports
from trt_engine.run_folder import UPGRADE
from trt_engine.verbs.compare.report import find_instability
from trt_engine.verbs.compare.request import GateRule, parse_gates
from trt_engine.verbs.upgrade_check.config import UpgradeConfig
from trt_engine.verbs.upgrade_check.judge import (
    ItemResult,
    are_alternating,
    compare_versions,
    different_versions,
    exit_code_of,
    failures,
    is_same,
    judge,
    verdict_of,
)
from trt_engine.verbs.upgrade_check.sides import VersionItem, read_version

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import UpgradeSettings

log = logging.getLogger(__name__)
_ERRORS: dict[int, type[TrtEngineError]] = {10: EngineError, 7: AccuracyError, 6: PrecisionError, 8: SpeedError}


@public_function
def upgrade_check(
    old: Path | str, new: Path | str, *, config: UpgradeConfig | None = None, **settings: Unpack[UpgradeSettings]
) -> UpgradeReport:
    """Compare the engines of two versions of a library: speed, accuracy, precision, layers, plan compatibility.

    `old` and `new` are run folders (or archives) of `te.run`, folders of `te.bench(out=...)`, or engines, each made in the
    environment of its version. Nothing is loaded or measured. `settings` are those of `UpgradeConfig`.

    Raises the error of the worst failed gate, after everything is written: `EngineError`, `AccuracyError`,
    `PrecisionError`, `SpeedError`; with `strict=True` `UnstableError` for a gate that cannot be judged; `UsageError` for
    paths without a common engine.
    """
    chosen = replace_values(config or UpgradeConfig(), settings)
    report = run(as_path(old, "`old`"), as_path(new, "`new`"), chosen)
    gate(report, strict=chosen.strict)
    return report


def run(old: Path, new: Path, config: UpgradeConfig, *, dry_run: bool = False, command: str = "") -> UpgradeReport:
    """The same without the gates' errors; a dry run writes no files."""
    rules = parse_gates(config.fail_if)
    if any(rule.metric == "error" for rule in rules):
        raise UsageError("run folders hold no outputs to compare", hint="`--max-drop` is the gate of accuracy")
    writes = _output_files(config)
    before, after = read_version(old), read_version(new)
    pairs, unmatched = match_items(before, after)
    results = [compare_versions(one, other) for one, other in pairs if one.engine.state == "done"]
    if not results:
        raise UsageError(
            f"no engine of `{old}` is in `{new}`" if not pairs else f"`{old}` has no engine that was built",
            hint="run the same plan in both environments: `trt-engine run PLAN.yaml -o DIR`",
        )
    unmatched += [f"`{one.label}`: OLD has no engine" for one, _ in pairs if one.engine.state != "done"]
    report = _make_report(old, new, results, unmatched, config, rules)
    report = dataclasses.replace(report, artifacts={name: str(path) for name, path in writes.items()})
    if config.out is not None and not dry_run:
        with all_or_nothing():
            ensure_folder(config.out, by="-o")
            write_document(writes["upgrade"], "upgrade-check", report, command=command)
            write_reports(config.out)
    for text in report.warnings:
        log.warning("%s", text)
    return report


def _output_files(config: UpgradeConfig) -> dict[str, Path]:
    """The files that are written, by what they are; `UsageError` for one that may not be overwritten."""
    if config.out is None:
        return {}
    check_overwrite(config.out, overwrite=config.overwrite)
    if (config.out / UPGRADE).exists() and not config.overwrite:
        raise UsageError(f"`{config.out / UPGRADE}` is there already", hint="`--overwrite` overwrites it")
    names = {name.replace(".", "_"): name for name in REPORT_FILES}
    return {name: config.out / file for name, file in {"upgrade": UPGRADE, **names}.items()}


def match_items(
    old: dict[str, VersionItem], new: dict[str, VersionItem]
) -> tuple[list[tuple[VersionItem, VersionItem]], list[str]]:
    """Pairs by label, else by what the engine is (model, precision, batch, device), else the only one of each side."""
    pairs = [(old[label], new[label]) for label in old if label in new]
    rest = [[item for label, item in side.items() if label not in other] for side, other in ((old, new), (new, old))]
    for item in list(rest[0]):
        same = [other for other in rest[1] if other.key == item.key]
        if len(same) == 1 and sum(other.key == item.key for other in rest[0]) == 1:
            pairs.append((item, same[0]))
            rest = [[one for one in rest[0] if one is not item], [one for one in rest[1] if one is not same[0]]]
    if len(old) == len(new) == 1 and not pairs:
        pairs, rest = list(zip(old.values(), new.values(), strict=True)), [[], []]
    sides = zip(("OLD", "NEW"), rest, strict=True)
    return pairs, [f"`{item.label}` is in {name} alone" for name, items in sides for item in items]


def _make_report(
    old: Path,
    new: Path,
    results: list[ItemResult],
    unmatched: list[str],
    config: UpgradeConfig,
    rules: list[GateRule],
) -> UpgradeReport:
    gates = judge(results, rules, max_drop=config.max_drop, keep_plans=config.keep_plans)
    failed = list(failures(gates))
    timed = [one.item.comparison for one in results if one.item.comparison.speed]
    clocks = [state for one in results for side in (one.old, one.new) for item in side.records for state in item.clocks]
    verdict, reason = verdict_of(gates, failed, [*find_instability(timed, clocks, ()), *unmatched])
    environments = (results[0].old.environment, results[0].new.environment)
    alternating = all(are_alternating(one.old, one.new) for one in results)
    versions = different_versions(*environments)
    warnings = [text for one in results for text in one.warnings] + unmatched
    if all(is_same(one.old, one.new) for one in results):
        text = "nothing differs (equal engines, versions and machine): an A/A test, in which the load of the machine differs"
        warnings.append(text)
        if verdict == "upgrade":
            verdict, reason = "undecided", text
    elif not versions:
        warnings.append("OLD and NEW were made in environments without a difference: is one of them the wrong folder?")
    return UpgradeReport(
        old=str(old),
        new=str(new),
        versions=versions,
        items=tuple(one.item for one in results),
        gates=gates,
        verdict=verdict,
        reason=reason,
        exit_code=exit_code_of(failed[0]) if failed else 0,
        environment=environments[1],
        method=UNPAIRED_METHOD + ("; interleaved" if alternating else "; measured at different times"),
        unmatched=tuple(unmatched),
        warnings=tuple(dict.fromkeys(warnings)),
        started=max((record.started for one in results for record in one.new.records), default=""),
    )


def gate(report: UpgradeReport, *, strict: bool = False) -> None:
    """Raise the error of the worst failed gate; `UnstableError` with `strict` for one that was not judged."""
    if report.exit_code:
        raise _ERRORS[report.exit_code](
            f"{report.verdict}: {report.reason}", hint="the page names the layers and versions that changed"
        )
    if strict and report.verdict == "undecided":
        raise UnstableError(
            f"undecided: {report.reason}",
            hint="measure and evaluate both versions with the same plan of `run`; `trt-engine docs upgrade-check` has the "
            "loop that measures them by turns",
        )
