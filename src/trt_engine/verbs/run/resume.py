"""Resuming a cell: results of completed modes are retained, pending modes are added.

The engine and each mode have separate digests. While the engine digest is unchanged, the results of a mode are retained
until that mode runs again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trt_engine.records.sweep import CellResult, CellSpec
from trt_engine.verbs.run.plan_file import MODES, PROFILE_MODES

MODE_SETTINGS: dict[str, tuple[str, ...]] = {
    "bench": ("bench",),
    "evaluate": ("dataset", "max_samples", "seed", "max_drop", "preprocess"),
    **dict.fromkeys(sorted(PROFILE_MODES), ("inferences",)),
}
"""Cell settings of one mode; changing them does not change the engine."""
_RESULT_FIELDS = {"bench": "bench", "evaluate": "evaluation", **dict.fromkeys(PROFILE_MODES, "profile")}
"""Field of `CellResult` with the results of a mode."""
_ENGINE_FIELDS = "engine engine_bytes build_seconds dtype_shares compute_dtype not_fused parity validation".split()


def skip_warning(mode: str, reason: str) -> str:
    """Warning for a mode that was not run."""
    return f"{mode} was left out: {reason}"


def measured_modes(result: CellResult) -> frozenset[str]:
    """Modes with complete results."""
    found = {mode: getattr(result, _RESULT_FIELDS[mode]) for mode in result.spec.mode_digests}
    return frozenset(mode for mode, figures in found.items() if getattr(figures, "complete", figures is not None))


def pending(before: CellResult | None, spec: CellSpec) -> tuple[str, ...]:
    """Modes of `spec` still to run, given the earlier result `before`."""
    if before is None or before.spec.digest != spec.digest or not spec.modes:
        return spec.modes
    if before.state != "done":
        return spec.modes
    missing = {mode for mode, digest in spec.mode_digests.items() if before.spec.mode_digests.get(mode) != digest}
    if missing & PROFILE_MODES:  # one profiling pass and record serves all three
        missing |= PROFILE_MODES & {*spec.modes, *measured_modes(before)}
    return tuple(mode for mode in MODES if mode == "build" or mode in missing) if missing else ()


def retained(before: CellResult, modes: tuple[str, ...]) -> frozenset[str]:
    """Modes of `before` whose results are retained when `modes` run."""
    had = frozenset(before.spec.mode_digests) if before.state == "done" else measured_modes(before)
    return had - {*modes, *(PROFILE_MODES if PROFILE_MODES & {*modes} else ())}


def merge(before: CellResult | None, now: CellResult) -> CellResult:
    """`now` merged with the results of `before` that were not measured again.

    Modes skipped on this machine remove nothing. A failure becomes the cell's state; retained results stay.
    """
    if before is None or before.spec.digest != now.spec.digest or before.spec.batch != now.spec.batch:
        return now
    kept = retained(before, now.spec.modes)
    if now.state == "skipped":
        if not measured_modes(before):
            return now
        reason = (now.reason or "").partition("\nhint: ")[0]
        left = [skip_warning(mode, reason) for mode in now.spec.modes if mode != "build"]
        return replace(before, warnings=tuple(dict.fromkeys((*before.warnings, *left))))
    if not kept:
        return now
    fields: dict[str, Any] = {_RESULT_FIELDS[mode]: getattr(before, _RESULT_FIELDS[mode]) for mode in kept}
    if "evaluate" in kept:
        fields["images_digest"] = before.images_digest
        if now.state == "done" and before.evaluation is not None and before.evaluation.passed is False:
            fields |= {"state": "failed", "reason": before.reason, "exit_code": before.exit_code}
    if now.engine is None:  # failed before the build
        fields |= {name: getattr(before, name) for name in _ENGINE_FIELDS}
    steps = tuple(step for step in before.steps if step.name in ({"profile"} if PROFILE_MODES & kept else set()) | kept)
    again = {*now.spec.modes, *before.spec.skipped_modes, *({"profile"} if PROFILE_MODES & {*now.spec.modes} else ())}
    old = [text for text in before.warnings if text.partition(" was left out: ")[0] not in again]
    return replace(
        now,
        spec=effective_spec(before, now.spec),
        requested_batch=before.requested_batch,
        steps=(*steps, *now.steps),
        seconds=round(sum(step.seconds for step in steps) + now.seconds, 3),
        files={**before.files, **now.files},
        open_commands={**before.open_commands, **now.open_commands},
        warnings=tuple(dict.fromkeys((*old, *now.warnings))),
        **fields,
    )


def effective_spec(before: CellResult, spec: CellSpec) -> CellSpec:
    """Spec of a merged result: the modes of `spec` and the retained modes of `before`."""
    kept = retained(before, spec.modes)
    own = {name for mode in kept for name in MODE_SETTINGS[mode]}
    return replace(
        spec,
        modes=tuple(mode for mode in MODES if mode in ("build", *kept, *spec.modes)),
        mode_digests={mode: before.spec.mode_digests[mode] for mode in kept} | spec.mode_digests,
        settings=spec.settings | {name: value for name, value in before.spec.settings.items() if name in own},
    )
