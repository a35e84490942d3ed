"""Calibration: the range of each activation by MSE, entropy, percentile, min-max or a custom calibrator.

Keeps one histogram per tensor. With a `cache`, a second call needs no data.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trt_engine.atomic_io import decode_json, read_bounded, write_atomic
from trt_engine.config.precision import CalibrateConfig
from trt_engine.config.settings import replace_values
from trt_engine.display import RichDisplay
from trt_engine.errors import FeedError, UsageError
from trt_engine.graph.load import check_onnxruntime, open_model
from trt_engine.model import Model
from trt_engine.precision.activation_probe import ActivationProbe
from trt_engine.precision.calibrators import CALIBRATORS, Calibrator, MultiPassCalibrator
from trt_engine.precision.samples import Batch, Samples, open_samples
from trt_engine.progress import progress_counter
from trt_engine.tensors import suggest

log = logging.getLogger(__name__)

_SCHEMA = "trt-engine/calibration"


@dataclass(frozen=True, slots=True)
class CalibrationResult(RichDisplay):
    """The range of each tensor, and the settings and data it was computed from."""

    amax: dict[str, float]
    calibrator: str
    settings: dict[str, Any]
    model: str
    """Digest of the model and its weights."""
    preprocessing: str
    """Digest of the described preprocessing."""
    data: str
    """Digest of the feeds."""
    data_source: str
    batches: int
    rows: int
    passes: int
    min_max: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Smallest and largest value of each tensor, for zero points; empty in a cache of an earlier version."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Skipped files and the reason."""
    warnings: tuple[str, ...] = ()
    from_cache: bool = False


def calibrate(
    model: Model | Path | str,
    calib_data: Any = None,
    calibrator: Calibrator | str = "mse",
    *,
    config: CalibrateConfig | None = None,
    **settings: Any,
) -> CalibrationResult:
    """Compute the range of each tensor over the data; `settings` are those of `CalibrateConfig`.

    `data`: see `open_samples`. `preprocessing`: any JSON value that identifies how inputs were made. A `cache` for the same
    model, preprocessing, calibrator and tensors replaces the data (without data, a cache of unprocessed inputs is accepted
    too); any other is rejected. Raises `UsageError` and `FeedError`.
    """
    config = replace_values(config or CalibrateConfig(), settings)
    cache = config.cache
    model = model if isinstance(model, Model) else open_model(model)
    chosen = _resolve_calibrator(calibrator)
    if config.preprocess is not None and cache is not None and config.preprocessing in ("", None):
        raise UsageError(
            "a cache needs to know the preprocessing, and a function has no digest",
            hint='describe it: `preprocessing={"size": 224, "mean": [...]}`, or a version number',
        )
    identity = _CacheKey(
        model.digest, _json_digest(config.preprocessing), _calibrator_name(chosen), _calibrator_settings(chosen)
    )
    if cache is not None and cache.exists():
        return _load_cache(cache, identity, config.tensors, accept_unprocessed=calib_data is None)
    if calib_data is None:
        there = f", and no cache `{cache}`" if cache is not None else ""
        raise UsageError(f"no data to calibrate with{there}", hint="give data: a folder, a file, an iterable")
    samples = open_samples(
        calib_data, model.signature, batch=config.batch, limit=config.max_samples, preprocess=config.preprocess,
        model=model,
    )  # fmt: skip
    result = _CalibrationRun(model, samples, chosen, identity, config).run()
    if cache is not None:
        write_atomic(cache, msgspec.json.format(msgspec.json.encode(_document(result)), indent=1))
    return result


def _resolve_calibrator(calibrator: Calibrator | str) -> Calibrator:
    if not isinstance(calibrator, str):
        return calibrator
    if calibrator not in CALIBRATORS:
        raise UsageError(f"unknown calibrator `{calibrator}`", hint=suggest(calibrator, list(CALIBRATORS)))
    return CALIBRATORS[calibrator]()


def _calibrator_name(calibrator: Calibrator) -> str:
    return str(getattr(calibrator, "name", type(calibrator).__name__))


def _calibrator_settings(calibrator: Calibrator) -> dict[str, Any]:
    plain = msgspec.to_builtins(getattr(calibrator, "settings", {}))
    return dict(plain) if isinstance(plain, Mapping) else {"settings": plain}


def _json_digest(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form; `UsageError` for other values."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise UsageError(f"the preprocessing cannot be written as JSON: {error}", hint="plain values only") from error
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


@dataclass(frozen=True, slots=True)
class _CacheKey:
    """What identifies a calibration."""

    model: str
    preprocessing: str
    calibrator: str
    settings: dict[str, Any]

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """Describe how a stored identity differs."""
        said = []
        if other.get("model") != self.model:
            said.append(
                f"it is of another model ({_short_digest(other.get('model'))}, this one is {_short_digest(self.model)})"
            )
        if other.get("preprocessing") != self.preprocessing:
            said.append("its inputs were preprocessed otherwise")
        if other.get("calibrator") != self.calibrator:
            said.append(f"its calibrator is `{other.get('calibrator')}`, not `{self.calibrator}`")
        elif other.get("settings") != self.settings:
            said.append(f"its calibrator's settings are {other.get('settings')}, not {self.settings}")
        return said


def _short_digest(digest: Any) -> str:
    return str(digest).removeprefix("sha256:")[:12]


def _document(result: CalibrationResult) -> dict[str, Any]:
    own: dict[str, Any] = msgspec.to_builtins(result)
    own.pop("from_cache")
    return {"schema": _SCHEMA, "schema_version": 1} | own


def _load_cache(
    cache: Path, identity: _CacheKey, tensors: Sequence[str] | None, *, accept_unprocessed: bool
) -> CalibrationResult:
    """Read the result from a cache file; raise `UsageError` with the differences if it belongs to another calibration."""
    try:
        raw = read_bounded(cache)
        if raw.startswith(b"TRT-"):
            raise UsageError(
                f"`{cache}` is TensorRT's calibration cache, which is not read", hint="`--calib-data DATA`"
            )
        stored = decode_json(raw)
        if not isinstance(stored, dict) or stored.get("schema") != _SCHEMA:
            raise UsageError(f"`{cache}` is not a calibration cache", hint="name another file")
        own = {name: value for name, value in stored.items() if name not in ("schema", "schema_version")}
        found = msgspec.convert(own | {"from_cache": True}, CalibrationResult)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"the calibration cache `{cache}` cannot be read: {error}", hint="delete it") from error
    if accept_unprocessed and found.preprocessing == _json_digest(""):
        identity = replace(identity, preprocessing=found.preprocessing)
    said = identity.differences(own)
    if missing := [name for name in tensors or () if name not in found.amax]:
        said.append(f"it lacks {len(missing)} of the tensors, `{missing[0]}` among them")
    if said:
        raise UsageError(
            f"the calibration cache `{cache}` does not fit: {'; '.join(said)}", hint="delete it, or name another file"
        )
    log.info("calibration taken from `%s`: %d tensors, no data needed", cache, len(found.amax))
    return found


class _CalibrationRun:
    """One calibration run."""

    def __init__(
        self,
        model: Model,
        samples: Samples,
        calibrator: Calibrator,
        identity: _CacheKey,
        config: CalibrateConfig,
    ) -> None:
        self.model, self.samples, self.calibrator, self.identity = model, samples, calibrator, identity
        self.tensors: Sequence[str] | None = config.tensors
        self.memory_mib = config.memory_mib
        staged = calibrator if isinstance(calibrator, MultiPassCalibrator) else None
        self.passes = staged.passes if staged is not None and samples.repeatable else 1
        self.warnings: list[str] = []
        if staged is not None and staged.passes > self.passes:
            self.warnings.append(
                f"`{_calibrator_name(calibrator)}` needs {staged.passes} passes, and {samples.description} allows "
                f"one: one pass with "
                "histograms that widen, whose ranges may differ; a list, or a function returning an iterable, is repeatable"
            )
            log.warning("%s", self.warnings[-1])
        self.probe: ActivationProbe | None = None
        self.min_max: dict[str, tuple[float, float]] = {}
        self.batches_done = self.rows = 0
        self.digests: list[str] = []
        """Data digests of the finished passes."""
        self.hash = hashlib.sha256()
        self.progress = progress_counter(f"calibrating ({_calibrator_name(calibrator)})", "batches")

    def run(self) -> CalibrationResult:
        check_onnxruntime(self.model)
        for index in range(self.passes):
            if isinstance(self.calibrator, MultiPassCalibrator):
                self.calibrator.start_pass(index, self.passes)
            self._one_pass(index)
        return self._result()

    def _one_pass(self, index: int) -> None:
        self.hash, self.batches_done, self.rows = hashlib.sha256(), 0, 0
        windows = ActivationProbe.windows(
            self.model, self.tensors, self.samples, memory_mib=self.memory_mib, probe=self.probe
        )
        for self.probe, window in windows:
            self._observe(self.probe, window)
            self._report_progress(index)
        if not self.batches_done:
            raise FeedError("the data has no batches", hint="an iterator is exhausted after one pass")
        digest = self.hash.hexdigest()
        if self.digests and digest != self.digests[-1]:
            raise FeedError(
                "the data differs from one pass to the next",
                hint="fix its random seed, or pass an iterator, which is read once",
            )
        self.digests.append(digest)

    def _observe(self, probe: ActivationProbe, window: list[Batch]) -> None:
        for batch, name, array in probe.read(window):
            if array.size:
                least, greatest = float(array.min()), float(array.max())
                if not (math.isfinite(least) and math.isfinite(greatest)):
                    what = "NaN" if np.isnan(array).any() else "infinite values"
                    raise FeedError(
                        f"the tensor `{name}` has {what} for {batch.source}, whose inputs are finite",
                        hint="`trt-engine ranges` shows where they begin; leave that tensor or that sample out",
                    )
                before = self.min_max.get(name, (math.inf, -math.inf))
                self.min_max[name] = (min(before[0], least), max(before[1], greatest))
            self.calibrator.observe(name, array)
        for batch in window:
            batch.update_digest(self.hash)
            self.batches_done += 1
            self.rows += batch.rows

    def _report_progress(self, index: int) -> None:
        total = self.samples.total
        planned = total * self.passes if total is not None else None
        self.progress(index * (total or 0) + self.batches_done, planned)

    def _result(self) -> CalibrationResult:
        assert self.probe is not None
        amax = {}
        for name in self.probe.tensors:
            reach = float(self.calibrator.threshold(name))
            if not math.isfinite(reach) or reach < 0:
                raise UsageError(
                    f"the calibrator `{_calibrator_name(self.calibrator)}` gave {reach} for `{name}`",
                    hint="`threshold` returns a finite number, 0 or more",
                )
            amax[name] = reach
        left_out = self.samples.omission_messages()
        for said in left_out:
            log.warning("%s", said)
        log.info("calibrated %d tensors over %d samples of %s", len(amax), self.rows, self.samples.description)
        return CalibrationResult(
            amax=amax,
            calibrator=self.identity.calibrator,
            settings=self.identity.settings,
            model=self.identity.model,
            preprocessing=self.identity.preprocessing,
            data=f"sha256:{self.digests[-1]}",
            data_source=self.samples.description,
            batches=self.batches_done,
            rows=self.rows,
            passes=self.passes,
            min_max=self.min_max,
            skipped=dict(self.samples.skipped),
            warnings=(*self.warnings, *left_out),
        )
