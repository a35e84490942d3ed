"""`validate`: the check of an engine that could not be loaded on the machine that built it, on a machine that can load it.

It needs the engine, its passport and the file of reference inputs and outputs beside it, and no model.
"""

from __future__ import annotations

import logging
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from trt_engine.atomic_io import os_error, resolve_link
from trt_engine.backend import list_backends
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import info, parse_device
from trt_engine.engine import Engine, passport_path
from trt_engine.environment import Environment
from trt_engine.equivalence.parity import judge_outputs
from trt_engine.equivalence.reference_file import ReferenceData, read_reference
from trt_engine.equivalence.row_independence import profile_shapes, wrong_rows
from trt_engine.equivalence.sorted_outputs import compare_outputs
from trt_engine.equivalence.tolerance import Tolerance
from trt_engine.errors import (
    AccuracyError,
    DeviceLost,
    EngineError,
    MemoryExhausted,
    ModelError,
    PrecisionError,
    SetupError,
    TrtEngineError,
    UsageError,
)
from trt_engine.format import quoted
from trt_engine.precision.precision_check import check_layers
from trt_engine.progress import ProgressOption
from trt_engine.public_function import public_function
from trt_engine.records.build import ValidateReport
from trt_engine.records.parity import Parity
from trt_engine.records.passport import Passport, Precision, Validation
from trt_engine.runtime.feeds import random_feeds
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.tensors import Tensors, format_shape
from trt_engine.trt.gpu_targets import sm_label
from trt_engine.trt.layers import dtype_shares
from trt_engine.verbs.build.parity import require_accuracy, takes_numbers_alone
from trt_engine.verbs.load import check_loadable, load, open_engine, runtime_config

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import LoadSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """The report, and what was wrong with the engine; None of one that passed."""

    report: ValidateReport
    error: TrtEngineError | None = None


@public_function
def validate(
    engine: Engine | Path | str,
    *,
    config: RuntimeConfig | None = None,
    progress: ProgressOption = False,
    **settings: Unpack[LoadSettings],
) -> ValidateReport:
    """Compare an engine on this machine with the reference outputs that its build kept, and write the result into its
    passport.

    `settings` are those of `te.load`. Raises `PrecisionError` or `AccuracyError` for an engine that fails, after its
    passport was rewritten. With any other error the passport stays as it was: `EngineError` for an engine that cannot be
    loaded here or has no whole reference beside it, `UsageError` for one that was compared when it was built, `SetupError`
    for a folder that cannot be written.
    """
    done = run_validation(engine, runtime_config(config, {**settings}))
    if done.error is not None:
        raise done.error
    return done.report


def run_validation(engine: Engine | Path | str, config: RuntimeConfig) -> ValidationResult:
    """Load the engine, run the reference inputs, judge, and rewrite the passport."""
    started = time.monotonic()
    opened, validation, reference = _open_engine(engine)
    _check_writable(opened)
    plain = Engine(opened.path, replace(opened.passport, validation=None))  # whose load has nothing to warn of
    log.info("validating `%s`", opened.path.name)
    with _load_here(plain, config) as runner:
        got, facts = _run(opened, runner, reference.inputs), runner.runtime_info
        _run_profiles(opened, runner, reference.inputs)
    parity = _compare_outputs(got, reference, validation)
    precision, unread = _count_precision(plain, config, reference)
    errors, unproved = _judge(opened.passport, validation, parity, precision)
    warnings = (*unread, *unproved)
    device = facts.get("device") or config.device or opened.passport.device
    kind, number = parse_device(device)
    result = replace(
        validation,
        state="failed" if errors else "passed",
        failure="; ".join(error.message for error in errors) or None,
        validated_at=datetime.now(UTC).isoformat(timespec="seconds"),
        device=device,
        environment=Environment.detect(number if kind == "cuda" else None),
    )
    sealed = _seal_result(opened, result, parity, precision, warnings)
    report = replace(
        _make_report(sealed, result, time.monotonic() - started),
        parity=sealed.passport.parity,
        runtime_info=facts,
        warnings=warnings,
    )
    for text in warnings:
        log.warning("%s", text)
    return ValidationResult(report, errors[0] if errors else None)


def plan_validation(engine: Engine | Path | str, config: RuntimeConfig) -> ValidateReport:
    """The planned check: engine and reference are verified, nothing is loaded."""
    opened, validation, _ = _open_engine(engine)
    check_loadable(Engine(opened.path, replace(opened.passport, validation=None)), config)
    return replace(_make_report(opened, validation, 0.0), dry_run=True)


# ------------------------------------------------------------------------------------------------ before


def _open_engine(engine: Engine | Path | str) -> tuple[Engine, Validation, ReferenceData]:
    """The engine, its passport's validation and its reference, all verified."""
    opened = open_engine(engine)
    passport = opened.passport
    validation = passport.validation
    if validation is None:
        how = "it was compared with plain ONNX Runtime when it was built"
        if passport.parity is None:
            how = "it was built without a comparison (`--no-parity`), and no reference was kept"
        raise UsageError(
            f"`{opened.path}` has no deferred check: {how}", hint=f"`trt-engine inspect {quoted(opened.path)}`"
        )
    opened.verify()
    if validation.reference is None or validation.tolerance is None:
        raise EngineError(
            f"`{opened.path}` has no reference outputs to be compared with: {validation.deferred_reason}",
            hint=f"build it again: `{passport.build.command}`",
        )
    return opened, validation, read_reference(opened.verify_reference(), opened.signature)


def _check_writable(engine: Engine) -> None:
    """`SetupError` unless the passport can be replaced, before time is spent."""
    passport = passport_path(engine.path)
    try:
        with tempfile.TemporaryFile(dir=resolve_link(passport).parent):
            pass
    except OSError as error:
        raise _unwritable_error(engine, os_error(error, passport)) from error


def _unwritable_error(engine: Engine, error: TrtEngineError) -> SetupError:
    message = f"the passport of `{engine.path}` cannot be rewritten: {error.message}"
    return SetupError(message, hint="copy the engine with its passport and reference to a folder you may write to")


# ------------------------------------------------------------------------------------------------ the check


def _load_here(engine: Engine, config: RuntimeConfig) -> InferenceEngine:
    try:
        return load(engine, config=config, verify=False)
    except EngineError as error:
        gpus = [sm_label(name) for name in engine.passport.requirements.compute_capabilities]
        if gpus and not info.gpus():
            raise EngineError(error.message, hint=f"run it on a machine with a GPU of {' or '.join(gpus)}") from error
        raise


def _run(engine: Engine, runner: Any, feeds: Tensors, at: str = "") -> dict[str, Any]:
    try:
        return dict(runner.infer(feeds))
    except (MemoryExhausted, DeviceLost):
        raise
    except TrtEngineError as error:
        raise EngineError(
            f"`{engine.path}` was loaded and does not run{at}: {error.message}", hint=error.hint
        ) from error


def _run_profiles(engine: Engine, runner: Any, known: Tensors) -> None:
    """One run at the smallest, usual and largest shapes of each profile, as `build` does where it can load its engine; of
    engines that take any numbers. `EngineError` where it does not run, or where an output has another number of rows."""
    signature = engine.signature
    if not takes_numbers_alone(signature):
        return
    for profile in engine.passport.profiles:
        for shapes in profile_shapes(profile):
            if shapes == {name: tuple(value.shape) for name, value in known.items()}:
                continue
            at = " at " + ",".join(f"{name}:{format_shape(shape)}" for name, shape in shapes.items())
            outputs = _run(engine, runner, random_feeds(signature, shapes), at)
            if signature.row_dependence is not None or not any(map(signature.batch_axes, signature.inputs)):
                continue
            try:
                reason = wrong_rows(signature, shapes, outputs)
            except ModelError as error:  # its model kept the batch where the engine was built
                reason = error.message
            if reason is not None:
                raise EngineError(f"`{engine.path}`: {reason}", hint="build it again for this GPU")


def _compare_outputs(got: dict[str, Any], reference: ReferenceData, validation: Validation) -> Parity:
    """As the build would have compared it, had it been able to load the engine."""
    assert validation.tolerance is not None
    tolerance, ranked = Tolerance.from_limits(validation.tolerance), validation.sorted_outputs
    found = judge_outputs(got, reference.outputs, ranked, validation.inputs, tolerance, lambda: validation.sensitivity)
    given = compare_outputs(got, reference.source_outputs, ranked, tolerance)
    return replace(found, reference=validation.reference_runtime, source_errors=given)


def _count_precision(
    engine: Engine, config: RuntimeConfig, reference: ReferenceData
) -> tuple[Precision, tuple[str, ...]]:
    """What the engine computes in: by its own layers where available, else as counted at build time."""
    backend_spec, precision = list_backends()[engine.passport.backend], engine.passport.precision
    if not backend_spec.provides("layers"):
        return precision, ()
    try:
        found = dtype_shares(backend_spec.load_function("layers")(engine, config), reference.macs)
    except EngineError as error:  # it has run: only its layers cannot be read
        return precision, (f"the engine's own layers cannot be read: {error.message}",)
    return replace(precision, shares=found or precision.shares), ()


def _judge(
    passport: Passport, validation: Validation, parity: Parity, precision: Precision
) -> tuple[list[TrtEngineError], tuple[str, ...]]:
    """Errors of an engine that is not as requested, precision first, and what could not be judged."""
    errors: list[TrtEngineError] = []
    warnings: list[str] = []
    again = passport.build.command
    if precision.requested is not None and validation.graph is not None:
        proof = check_layers(precision.requested, precision.shares, validation.graph)
        if not proof.conclusive:
            warnings.append(f"the precision contract could not be proved: {proof.remark}")
        try:
            proof.require(f"leave `--precision` out to build the graph as it is: `{again}` was the command")
        except PrecisionError as error:
            errors.append(error)
    assert validation.tolerance is not None
    try:
        require_accuracy(
            parity, Tolerance.from_limits(validation.tolerance), f"`--parity-rtol` allows more: `{again}` built it"
        )
    except AccuracyError as error:
        errors.append(error)
    return errors, tuple(warnings)


def _seal_result(
    engine: Engine, validation: Validation, parity: Parity, precision: Precision, warnings: tuple[str, ...]
) -> Engine:
    """The engine with the result in its passport, in place of the warning of the deferred check."""
    passport = engine.passport
    notes = {name: text for name, text in passport.build.notes.items() if name != "parity"}
    deferral = passport.build.notes.get("parity")
    kept = [text for text in passport.build.warnings if text != deferral]
    build = replace(passport.build, notes=notes, warnings=tuple(dict.fromkeys((*kept, *warnings))))
    try:
        return Engine.seal(
            engine.path,
            replace(passport, parity=parity, precision=precision, validation=validation, build=build),
        )
    except TrtEngineError as error:
        raise _unwritable_error(engine, error) from error


def _make_report(engine: Engine, validation: Validation, seconds: float) -> ValidateReport:
    passport, environment = engine.passport, validation.environment
    assert validation.reference is not None
    return ValidateReport(
        engine=str(engine.path),
        backend=passport.backend,
        device=validation.device or passport.device,
        gpu=environment.gpu if environment is not None else None,
        state=validation.state,
        failure=validation.failure,
        checks=validation.checks,
        deferred_reason=validation.deferred_reason,
        inputs=validation.inputs,
        reference=validation.reference_runtime,
        parity=None,
        precision=passport.precision,
        environment=environment or Environment.detect(),
        accuracy_command=validation.accuracy_command,
        seconds=seconds,
        artifacts={
            "engine": str(engine.path),
            "passport": str(passport_path(engine.path)),
            "reference": str(engine.reference),
        },
    )
