"""`upgrade-check`: engines of two versions, built in two environments; one page, one verdict."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from trt_engine.atomic_io import all_or_nothing, as_path, ensure_folder
from trt_engine.backends.onnxruntime.compatibility import check_version
from trt_engine.benchmark.speed_difference import UNPAIRED_METHOD
from trt_engine.config.settings import replace_values
from trt_engine.engine import Engine
from trt_engine.environment import Environment
from trt_engine.errors import (
    AccuracyError,
    EngineError,
    PrecisionError,
    SpeedError,
    TrtEngineError,
    UnstableError,
    UsageError,
)
from trt_engine.format import format_percent
from trt_engine.profiling.engine_structure import Structure, profile_structure, read_structure
from trt_engine.public_function import public_function
from trt_engine.records.base import write_document
from trt_engine.records.compare import Comparison, EngineDiff, GateResult
from trt_engine.records.evaluate import MAIN_METRIC
from trt_engine.records.passport import Compatibility
from trt_engine.records.upgrade import UpgradeItem, UpgradeReport, Verdict
from trt_engine.reporting.report import REPORT_FILES, check_overwrite, write_reports
from trt_engine.run_folder import UPGRADE
from trt_engine.trt.versions import Version, can_load_plan
from trt_engine.verbs.compare.baseline import compare_with_base, require_same_conditions, unpaired_warnings
from trt_engine.verbs.compare.report import PairResult, evaluate_gates, find_instability
from trt_engine.verbs.compare.request import GateRule, parse_gates
from trt_engine.verbs.diff.run import diff_structures
from trt_engine.verbs.upgrade_check.config import UpgradeConfig
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


SAME_MACHINE = ("platform", "cpu", "cpu_cores", "gpu", "compute_capability", "gpu_memory_mib")
"""Fields of the environment that must agree for speeds to be compared."""
EXIT_CODES = {"plan": 10, "accuracy": 7, "precision": 6, "speed": 8}
"""By gate, worst first."""
_FLOATS = ("float32", "float16", "bfloat16", "float64", "tf32", "fp32", "fp16", "bf16")
"""Prefixes of the dtypes that a graph computes in without being quantised."""
_MAX_SHARE_DROP = 0.05
"""Loss of the main dtype's share of the multiply-adds that is not accepted."""


@dataclass(frozen=True, slots=True)
class ItemResult:
    """One engine in both versions, with what the gates need."""

    item: UpgradeItem
    old: VersionItem
    new: VersionItem
    speed: PairResult
    warnings: tuple[str, ...]


def compare_versions(old: VersionItem, new: VersionItem) -> ItemResult:
    """Speed, structure and compatibility of one engine in both versions."""
    speed, warnings = _compare_speed(old, new)
    structure, note = _compare_structure(old, new)
    if note:
        warnings.append(f"`{old.label}`: layers were not compared: {note}")
    ratio = (
        new.engine.engine_bytes / old.engine.engine_bytes
        if new.engine.engine_bytes and old.engine.engine_bytes
        else None
    )
    comparison = Comparison(
        label=old.label,
        speed=speed.comparison.speed,
        outputs=(),
        outputs_note="the versions run in different processes: each is compared with plain ONNX Runtime of its own",
        structure=structure,
        size_ratio=ratio,
    )
    item = UpgradeItem(old.label, old.engine, new.engine, comparison, _plan_compatibility(old, new))
    return ItemResult(item, old, new, replace(speed, comparison=comparison), tuple(warnings))


# ------------------------------------------------------------------------------------------------ speed


def _compare_speed(old: VersionItem, new: VersionItem) -> tuple[PairResult, list[str]]:
    """The difference in speed; without figures, and why, where it cannot be compared."""
    missing = [name for name, side in (("OLD", old), ("NEW", new)) if not side.records]
    if missing:
        return _not_timed(old.label, f"{' and '.join(missing)} holds no measurement of it")
    ignored = [item.name for item in fields(Environment) if item.name not in SAME_MACHINE]
    try:
        require_same_conditions("OLD", old.records[0], "NEW", new.records[0], ignored)
    except UsageError as error:
        return _not_timed(old.label, error.message)
    sides = (replace(old.compare_side(), label="OLD"), replace(new.compare_side(), label="NEW"))
    by_turns = are_alternating(old, new)
    result = compare_with_base(*sides, by_turns=by_turns)
    result = replace(result, comparison=replace(result.comparison, label=old.label))
    warnings = list(unpaired_warnings(*sides))
    if by_turns:
        warnings = warnings[1:]
    if not result.differences:
        warnings += (f"`{old.label}`: {text}" for text in result.messages)
    if is_same(old, new):
        doubt = "the engine, the libraries and the machine are the same, so the machine's load differs"
        result = replace(result, doubt=doubt, nothing_differs=True)
    elif _models_differ(old, new):
        result = replace(result, doubt="OLD and NEW are of different models", nothing_differs=True)
        warnings.append(f"`{old.label}` was made of another model in NEW: the difference is not of the versions alone")
    unstable = [name for name, side in (("OLD", old), ("NEW", new)) if not all(one.stable for one in side.records)]
    if unstable:
        warnings.append(f"`{old.label}` was not stable in {' and '.join(unstable)}")
    return result, warnings


def is_same(old: VersionItem, new: VersionItem) -> bool:
    """Whether both are one engine, byte for byte, in equal environments: an A/A test."""
    if old.passport is None or new.passport is None:
        return False
    digests = [[(item.nbytes, item.digest) for item in side.passport.payload] for side in (old, new) if side.passport]
    return digests[0] == digests[1] and not different_versions(old.environment, new.environment)


def _models_differ(old: VersionItem, new: VersionItem) -> bool:
    """Whether the engines are of different model files; unknown of quantised ones, which each version quantises itself."""
    passports = [side.passport for side in (old, new) if side.passport is not None]
    quantised = any(not name.startswith(_FLOATS) for one in passports for name in one.precision.compute_shares)
    return not quantised and len({one.model.digest for one in passports}) > 1


def different_versions(old: Environment, new: Environment) -> dict[str, tuple[str | None, str | None]]:
    """Libraries and machine facts that differ, with both."""
    found: dict[str, tuple[str | None, str | None]] = {
        name: (old.libraries.get(name), new.libraries.get(name)) for name in {**old.libraries, **new.libraries}
    }
    for item in fields(Environment):
        if item.name not in ("libraries", "cpu_features"):
            values = (getattr(old, item.name), getattr(new, item.name))
            name = "trt-engine" if item.name == "tool" else item.name
            found[name] = (values[0] and str(values[0]), values[1] and str(values[1]))
    return {name: both for name, both in found.items() if both[0] != both[1]}


def _not_timed(label: str, reason: str) -> tuple[PairResult, list[str]]:
    comparison = Comparison(label=label, speed=(), outputs=())
    return PairResult(comparison, (), (reason,)), [f"`{label}` was not timed: {reason}"]


def are_alternating(old: VersionItem, new: VersionItem) -> bool:
    """Whether the versions were interleaved, several times each."""
    starts = [(record.started, side) for side, item in enumerate((old, new)) for record in item.records]
    switches = sum(one != other for (_, one), (_, other) in pairwise(sorted(starts)))
    return len(starts) > 2 and switches >= len(starts) // 2


# ------------------------------------------------------------------------------------------------ structure, plans


def _compare_structure(old: VersionItem, new: VersionItem) -> tuple[EngineDiff | None, str]:
    """Layers and fusions, by the engines if both can be read here, else by their profiles; else why not."""
    try:
        return diff_structures(_structure(old), _structure(new)), ""
    except TrtEngineError as error:
        if old.layers is None or new.layers is None:
            return None, error.message
        return diff_structures(profile_structure(old.layers, old.label), profile_structure(new.layers, new.label)), ""


def _structure(side: VersionItem) -> Structure:
    if side.path is None:
        raise EngineError(f"the engine of `{side.label}` is not in the folder", hint="keep the engines with the run")
    return read_structure(side.path)


def _plan_compatibility(old: VersionItem, new: VersionItem) -> Compatibility:
    """Whether the new library loads the old plan, by the versions of both."""
    name, version = old.engine.library.partition(" ")[0], new.library_version
    again = old.passport.build.command if old.passport is not None else None
    if old.passport is None:
        return Compatibility("unknown", "the passport of the old engine is not there")
    if version is None or new.engine.library.partition(" ")[0] != name:
        return Compatibility(
            "unknown", f"{old.engine.library} and {new.engine.library} are not versions of one library"
        )
    if name == "onnxruntime":
        return check_version(old.passport, version)
    built, here = Version.parse(old.library_version or ""), Version.parse(version)
    if not name.startswith("tensorrt") or built is None or here is None:
        return Compatibility("unknown", f"plans of {name} have no rule")
    portable = old.passport.requirements.version_compatible and name == "tensorrt"
    if can_load_plan(here, built, version_compatible=portable):
        return Compatibility("loads", f"built with {name} {built}, loads in {here}")
    return Compatibility("rebuild", f"built with {name} {built}, which {here} does not load", again)


# ------------------------------------------------------------------------------------------------ gates


def judge(
    results: Sequence[ItemResult], rules: Sequence[GateRule], *, max_drop: float, keep_plans: bool
) -> tuple[GateResult, ...]:
    """All gates, worst first: `plan`, `accuracy`, `precision`, then the rules of speed."""
    built = [one for one in results if one.new.engine.state == "done"]
    speed = evaluate_gates(rules, [one.speed for one in built]) if built else ()
    return (
        _gate("plan", results, lambda one: _judge_plan(one, keep_plans)),
        _gate("accuracy", results, lambda one: _judge_accuracy(one, max_drop)),
        _gate("precision", results, _judge_precision),
        *speed,
    )


_State = tuple[bool | None, str]
"""Passed, failed, or None: not judged; and the finding."""


def _gate(name: str, results: Sequence[ItemResult], judge_item: Callable[[ItemResult], _State]) -> GateResult:
    """One gate over all engines; the text names those that did not pass."""
    states = [(one.item.label, *judge_item(one)) for one in results]
    failed = any(passed is False for _, passed, _ in states)
    open_ = any(passed is None for _, passed, _ in states)
    shown = [(label, text) for label, passed, text in states if passed is not True] or [
        (label, text) for label, _, text in states
    ]
    texts: dict[str, list[str]] = {}
    for label, text in shown:
        texts.setdefault(text, []).append(f"`{label}`")
    parts = (f"{', '.join(labels)}: {text}" for text, labels in texts.items())
    return GateResult(name, failed, "; ".join(parts), evaluated=not open_)


def _missing(one: ItemResult, codes: Sequence[int], *, other: bool = False) -> _State | None:
    """The state of a gate that the new version's build decided; None where there is an engine."""
    engine = one.new.engine
    if engine.state == "done":
        return None
    reason = f"NEW has no engine, {engine.state}{f': {engine.reason}' if engine.reason else ''}"
    if engine.state == "waiting":
        return None, "NEW has no engine: the cell was not reached"
    if engine.state in ("interrupted", "skipped"):
        return None, reason
    return (False, reason) if (engine.exit_code in codes) != other else (None, reason)


def _judge_plan(one: ItemResult, keep_plans: bool) -> _State:
    if (state := _missing(one, (6, 7), other=True)) is not None:
        return state
    engine = one.new
    if engine.path is not None and engine.passport is not None:
        try:
            Engine(engine.path, engine.passport).verify()
        except EngineError as error:
            return False, error.message
    found = one.item.compatibility
    if keep_plans and found.status in ("rebuild", "refuse", "unknown"):
        return (None if found.status == "unknown" else False), f"old plan: {found.reason}"
    return True, f"old plan: {found.status}, {found.reason}"


def _judge_accuracy(one: ItemResult, max_drop: float) -> _State:
    """By the metric on the same images; without it, each against plain ONNX Runtime."""
    if (state := _missing(one, (7,))) is not None:
        return state
    old, new = one.old.evaluation, one.new.evaluation
    if old is not None and new is not None:
        if (old.task, old.dataset_digest, old.images) != (new.task, new.dataset_digest, new.images):
            return None, "evaluated on different images"
        name = MAIN_METRIC[old.task]
        before, after = old.metrics[name], new.metrics[name]
        text = f"{name} {before:.4f} -> {after:.4f} over {old.images} images, a drop of {max_drop:g} is allowed"
        return before - after <= max_drop, text
    if old is not None:
        return None, "NEW was not evaluated"
    first, second = one.item.old.parity, one.item.new.parity
    if second is None:
        return None, "neither a dataset nor a comparison with plain ONNX Runtime in NEW"
    worst = max((error.max_rel for error in second.outputs.values()), default=0.0)
    before_text = "" if first is None else f"{max((e.max_rel for e in first.outputs.values()), default=0.0):.2g} -> "
    text = (
        f"against plain ONNX Runtime {before_text}{worst:.2g} of the channel's scale, {second.tolerance:g} is allowed"
    )
    return second.passed, text


def _judge_precision(one: ItemResult) -> _State:
    if (state := _missing(one, (6,))) is not None:
        return state
    old, new = one.item.old, one.item.new
    if old.main_dtype is None or new.main_dtype is None:
        return None, "the dtypes of the layers are not known"
    before, after = old.dtype_shares[old.main_dtype], new.dtype_shares.get(old.main_dtype, 0.0)
    text = f"{old.main_dtype} {format_percent(before)} -> {format_percent(after)}"
    if new.main_dtype != old.main_dtype:
        return False, f"{text}, now mainly {new.main_dtype}{f': {new.not_fused}' if new.not_fused else ''}"
    return before - after <= _MAX_SHARE_DROP, text


def exit_code_of(gate: GateResult) -> int:
    """The exit code of a gate that fails."""
    return EXIT_CODES.get(gate.rule, EXIT_CODES["speed"])


def failures(gates: Sequence[GateResult]) -> Iterator[GateResult]:
    """The failed gates, worst first."""
    order = list(EXIT_CODES.values())
    yield from sorted((gate for gate in gates if gate.failed), key=lambda gate: order.index(exit_code_of(gate)))


def verdict_of(gates: Sequence[GateResult], failed: Sequence[GateResult], doubts: Sequence[str]) -> tuple[Verdict, str]:
    """The verdict and its reason: `undecided` where a gate was not judged, or for `doubts` about the speed."""
    if failed:
        return "do not upgrade", "; ".join(f"{gate.rule}: {gate.text}" for gate in failed)
    unknown = [f"{gate.rule}: {gate.text}" for gate in gates if not gate.evaluated]
    unknown += [text for text in doubts if not text.endswith("NEW alone")]
    return ("undecided", "; ".join(unknown)) if unknown else ("upgrade", "every gate passed")
