"""What a cell has of what is asked for: modes that were carried out before stay, and others are added to them.

The engine and each mode have a digest of their own. While the engine's is the same, the figures of a mode stand until that
mode is carried out again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trt_engine.cells import CellResult, CellSpec
from trt_engine.matrix.plan import MODES, PROFILED

__all__ = ["OWN_SETTINGS", "described", "joined", "measured", "said_left_out", "standing", "to_do"]

OWN_SETTINGS: dict[str, tuple[str, ...]] = {
    "bench": ("bench",),
    "evaluate": ("dataset", "limit", "seed", "max_drop", "preprocess"),
    **dict.fromkeys(sorted(PROFILED), ("inferences",)),
}
"""Settings of a cell that are one mode's: another value of theirs makes no other engine."""
_FIGURES = {"bench": "bench", "evaluate": "evaluated", **dict.fromkeys(PROFILED, "profile")}
"""Where a result has what a mode found."""


def said_left_out(mode: str, why: str) -> str:
    """The warning of a mode that was not carried out."""
    return f"{mode} was left out: {why}"


def measured(result: CellResult) -> frozenset[str]:
    """The modes whose figures the result has, whole."""
    found = {mode: getattr(result, _FIGURES[mode]) for mode in result.spec.parts}
    return frozenset(mode for mode, figures in found.items() if getattr(figures, "complete", figures is not None))


def to_do(before: CellResult | None, spec: CellSpec) -> tuple[str, ...]:
    """The modes of `spec` that are still to be carried out where `before` was found; none where it has them all."""
    if before is None or before.spec.digest != spec.digest or not spec.modes:
        return spec.modes
    if before.state != "done":
        return spec.modes
    missing = {mode for mode, digest in spec.parts.items() if before.spec.parts.get(mode) != digest}
    if missing & PROFILED:  # one look inside serves all three, and its record is one
        missing |= PROFILED & {*spec.modes, *measured(before)}
    return tuple(mode for mode in MODES if mode == "build" or mode in missing) if missing else ()


def standing(before: CellResult, modes: tuple[str, ...]) -> frozenset[str]:
    """The modes of `before` that go on to stand when `modes` are carried out."""
    had = frozenset(before.spec.parts) if before.state == "done" else measured(before)
    return had - {*modes, *(PROFILED if PROFILED & {*modes} else ())}


def joined(before: CellResult | None, now: CellResult) -> CellResult:
    """The result of now with what was measured before and not again.

    What this machine lacks for the added modes takes nothing away. What fails is the cell's state, beside the figures kept.
    """
    if before is None or before.spec.digest != now.spec.digest or before.spec.batch != now.spec.batch:
        return now
    kept = standing(before, now.spec.modes)
    if now.state == "skipped":
        if not measured(before):
            return now
        reason = (now.reason or "").partition("\nhint: ")[0]
        left = [said_left_out(mode, reason) for mode in now.spec.modes if mode != "build"]
        return replace(before, warnings=tuple(dict.fromkeys((*before.warnings, *left))))
    if not kept:
        return now
    fields: dict[str, Any] = {_FIGURES[mode]: getattr(before, _FIGURES[mode]) for mode in kept}
    if "evaluate" in kept:
        fields["images_digest"] = before.images_digest
        if now.state == "done" and before.evaluated is not None and before.evaluated.passed is False:
            fields |= {"state": "failed", "reason": before.reason, "exit_code": before.exit_code}
    if now.engine is None:  # it failed before there was one
        of_engine = ("engine", "engine_bytes", "build_seconds", "found", "ran_in", "not_fused", "parity")
        fields |= {name: getattr(before, name) for name in of_engine}
    steps = tuple(step for step in before.steps if step.name in ({"profile"} if PROFILED & kept else set()) | kept)
    again = {*now.spec.modes, *before.spec.left_out, *({"profile"} if PROFILED & {*now.spec.modes} else ())}
    old = [text for text in before.warnings if text.partition(" was left out: ")[0] not in again]
    return replace(
        now,
        spec=described(before, now.spec),
        asked_batch=before.asked_batch,
        steps=(*steps, *now.steps),
        seconds=round(sum(step.seconds for step in steps) + now.seconds, 3),
        files={**before.files, **now.files},
        opens={**before.opens, **now.opens},
        warnings=tuple(dict.fromkeys((*old, *now.warnings))),
        **fields,
    )


def described(before: CellResult, spec: CellSpec) -> CellSpec:
    """The spec of a result that has the modes of `spec`, and those of `before` that stand beside them."""
    kept = standing(before, spec.modes)
    own = {name for mode in kept for name in OWN_SETTINGS[mode]}
    return replace(
        spec,
        modes=tuple(mode for mode in MODES if mode in ("build", *kept, *spec.modes)),
        parts={mode: before.spec.parts[mode] for mode in kept} | spec.parts,
        settings=spec.settings | {name: value for name, value in before.spec.settings.items() if name in own},
    )
