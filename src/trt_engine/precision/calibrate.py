"""Calibration: the range of each activation, by squared error, entropy, percentiles, extremes or a class of your own.

Activations pass by and are forgotten; what is kept is a histogram for each tensor. With a `cache`, a second call needs no
data, and a call that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from trt_engine.errors import FeedError, Interrupted, UsageError
from trt_engine.files import write_whole
from trt_engine.graph.load import check_onnxruntime, open_model, read_proto
from trt_engine.model import Model
from trt_engine.precision.histogram import Extremes, Histogram, entropy_threshold, mse_threshold, percentile_threshold
from trt_engine.precision.observe import Probe, inputs_are_finite
from trt_engine.precision.samples import Batch, Preprocess, Samples, open_samples
from trt_engine.tensors import closest

__all__ = [
    "CALIBRATORS",
    "RULES",
    "CalibrationResult",
    "Calibrator",
    "EntropyCalibrator",
    "HistogramCalibrator",
    "MinMaxCalibrator",
    "MseCalibrator",
    "PercentileCalibrator",
    "ResumableCalibrator",
    "StagedCalibrator",
    "calibrate",
]

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
State = dict[str, Array]
_SAID_EVERY_S = 10.0
_SCHEMA = "trt-engine/calibration"
RULES = 2
"""Version of the histograms, of the rules that read them and of which is the default: what an earlier one kept, ranges or
engines made with them, is not taken for this one's."""


# ------------------------------------------------------------------------------------------------ calibrators


class Calibrator(Protocol):
    """Sees every activation once and says how far each tensor's range reaches. Any class with these two works.

    It may have a `name` and `settings` (what the cache compares); without them it is known by its class.
    """

    def observe(self, name: str, array: Array) -> None:
        """Take in one batch of a tensor; the array is finite, and not the calibrator's to keep."""

    def threshold(self, name: str) -> float:
        """The largest magnitude to represent; what is beyond saturates."""


@runtime_checkable
class StagedCalibrator(Protocol):
    """A calibrator that wants to see the data more than once, where the data can be gone through again."""

    passes: int

    def start_pass(self, index: int, of: int) -> None:
        """Called before each pass; `of` is 1 when the data cannot be repeated. Pass 0 forgets everything."""


@runtime_checkable
class ResumableCalibrator(Protocol):
    """A calibrator whose work survives a stop."""

    def state(self) -> State:
        """Everything learned, as arrays."""

    def restore(self, state: State) -> None:
        """Forget everything and take up that state."""


class MinMaxCalibrator:
    """The largest magnitude seen: nothing saturates."""

    name = "minmax"

    def __init__(self) -> None:
        self._seen: dict[str, Extremes] = {}

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    @property
    def passes(self) -> int:
        return 1

    def start_pass(self, index: int, of: int) -> None:
        self._seen = {}

    def observe(self, name: str, array: Array) -> None:
        self._seen.setdefault(name, Extremes()).add(array)

    def threshold(self, name: str) -> float:
        return self._seen[name].absmax if name in self._seen else 0.0

    def state(self) -> State:
        return _flat(self._seen)

    def restore(self, state: State) -> None:
        self._seen = _restored(state, Extremes)


class HistogramCalibrator:
    """A range read from each tensor's histogram: the largest magnitudes first, then what is counted up to them.

    Data that can be gone through once is counted in histograms that widen.
    """

    name: str

    def __init__(self, *, bins: int = 2048) -> None:
        if bins < 2:
            raise UsageError(f"{bins} bins make no histogram", hint="2048 are usual")
        self.bins = bins
        self._seen: dict[str, Extremes] = {}
        self._counted: dict[str, Histogram] = {}
        self._ranges_first = False

    @property
    def settings(self) -> dict[str, Any]:
        return {"bins": self.bins, "version": RULES}

    @property
    def passes(self) -> int:
        return 2

    def start_pass(self, index: int, of: int) -> None:
        self._ranges_first = of > 1 and index == 0
        if index == 0:
            self._seen, self._counted = {}, {}
        else:
            self._counted = {name: Histogram(self.bins, seen.absmax) for name, seen in self._seen.items()}

    def observe(self, name: str, array: Array) -> None:
        if self._ranges_first:
            self._seen.setdefault(name, Extremes()).add(array)
        else:
            self._counted.setdefault(name, Histogram(self.bins)).add(array)

    def threshold(self, name: str) -> float:
        return self.threshold_of(self._counted[name]) if name in self._counted else 0.0

    def threshold_of(self, histogram: Histogram) -> float:
        """The largest magnitude to represent of what was counted."""
        raise NotImplementedError

    def state(self) -> State:
        return _flat(self._seen, "seen") | _flat(self._counted, "counted")

    def restore(self, state: State) -> None:
        self._seen = _restored(state, Extremes, "seen")
        self._counted = _restored(state, lambda: Histogram(self.bins), "counted")


class MseCalibrator(HistogramCalibrator):
    """The range of the least squared error in 8 bits, where what is cut off counts twice; `asymmetric` for types with a zero
    point."""

    name = "mse"

    def __init__(self, *, bins: int = 2048, asymmetric: bool = False) -> None:
        super().__init__(bins=bins)
        self.asymmetric = asymmetric

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | ({"asymmetric": True} if self.asymmetric else {})

    def threshold_of(self, histogram: Histogram) -> float:
        return mse_threshold(histogram, asymmetric=self.asymmetric)


class EntropyCalibrator(HistogramCalibrator):
    """The range that differs least from the distribution (Kullback-Leibler divergence), by TensorRT's rule."""

    name = "entropy"

    def __init__(self, *, bins: int = 2048, quantized_bins: int = 128) -> None:
        super().__init__(bins=bins)
        if not 2 <= quantized_bins <= bins:
            raise UsageError(f"{bins} bins make no {quantized_bins} levels", hint="2048 bins for 128 levels are usual")
        self.quantized_bins = quantized_bins

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"quantized_bins": self.quantized_bins}

    def threshold_of(self, histogram: Histogram) -> float:
        return entropy_threshold(histogram, self.quantized_bins)


class PercentileCalibrator(HistogramCalibrator):
    """The magnitude below which a share of all values is."""

    name = "percentile"

    def __init__(self, *, percentile: float = 99.999, bins: int = 2048) -> None:
        super().__init__(bins=bins)
        if not 0 < percentile <= 100:
            raise UsageError(f"there is no percentile {percentile:g}", hint="above 0 and up to 100, as 99.999")
        self.percentile = percentile

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"percentile": self.percentile}

    def threshold_of(self, histogram: Histogram) -> float:
        return percentile_threshold(histogram, self.percentile)


CALIBRATORS: dict[str, Callable[[], Calibrator]] = {
    "entropy": EntropyCalibrator,
    "minmax": MinMaxCalibrator,
    "mse": MseCalibrator,
    "percentile": PercentileCalibrator,
}


def _flat(parts: Mapping[str, Any], prefix: str = "") -> State:
    """The states of many parts in one: `prefix`, the tensor's name and the field, a line each."""
    return {f"{prefix}\n{name}\n{key}": value for name, part in parts.items() for key, value in part.state().items()}


def _restored(state: State, make: Callable[[], Any], prefix: str = "") -> dict[str, Any]:
    fields: dict[str, State] = {}
    for line, value in state.items():
        which, name, key = line.split("\n")
        if which == prefix:
            fields.setdefault(name, {})[key] = value
    made = {}
    for name, own in fields.items():
        made[name] = make()
        made[name].restore(own)
    return made


# ------------------------------------------------------------------------------------------------ the result


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """How far each tensor's range reaches, and what that was found with."""

    amax: dict[str, float]
    calibrator: str
    settings: dict[str, Any]
    model: str
    """Digest of the model and its weights."""
    preprocessing: str
    """Digest of what was said about the preprocessing."""
    data: str
    """Digest of the feeds."""
    described: str
    batches: int
    rows: int
    passes: int
    extremes: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Smallest and largest value of each tensor, for zero points; empty in a cache of an earlier version."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Files left out, and why."""
    warnings: tuple[str, ...] = ()
    from_cache: bool = False


def calibrate(
    model: Model | Path | str,
    data: Any = None,
    calibrator: Calibrator | str = "mse",
    *,
    tensors: Sequence[str] | None = None,
    preprocess: Preprocess | None = None,
    preprocessing: Any = "",
    batch: int = 1,
    limit: int | None = None,
    cache: Path | None = None,
    every: int = 16,
    memory_mib: int = 512,
    progress: Callable[[int, int | None], None] | None = None,
) -> CalibrationResult:
    """The range of each tensor over the data.

    `data` is what `open_samples` takes; `tensors` the activations wanted (None: all floating-point ones of the main graph).
    `preprocessing` says how inputs were made (any JSON value); with `cache` a later call for the same model, preprocessing,
    calibrator and tensors needs no data (and takes a cache of inputs that were not preprocessed too), and one for others is
    refused. While it works, the state stands beside the cache,
    written every `every` batches, and a call that finds it goes on from there. `progress` is told batches done and planned.
    """
    model = model if isinstance(model, Model) else open_model(model)
    chosen = _calibrator(calibrator)
    if preprocess is not None and cache is not None and preprocessing in ("", None):
        raise UsageError(
            "a cache needs to know the preprocessing, and a function has no digest",
            hint='say what it does: `preprocessing={"size": 224, "mean": [...]}`, or a version number',
        )
    identity = _Identity(model.digest, _digest_of(preprocessing), _name(chosen), _settings(chosen))
    if cache is not None and cache.exists():
        return _cached(cache, identity, tensors, plain_too=data is None)
    if data is None:
        there = f", and there is no cache `{cache}`" if cache is not None else ""
        raise UsageError(f"there is no data to calibrate with{there}", hint="give data: a folder, a file, an iterable")
    samples = open_samples(data, model.signature, batch=batch, limit=limit, preprocess=preprocess)
    work = _Work(model, samples, chosen, identity, tensors, cache, max(1, every), memory_mib, progress)
    result = work.run()
    if cache is not None:
        write_whole(cache, msgspec.json.format(msgspec.json.encode(_document(result)), indent=1))
        work.forget()
    return result


def _calibrator(given: Calibrator | str) -> Calibrator:
    if not isinstance(given, str):
        return given
    if given not in CALIBRATORS:
        raise UsageError(f"there is no calibrator `{given}`", hint=closest(given, list(CALIBRATORS)))
    return CALIBRATORS[given]()


def _name(calibrator: Calibrator) -> str:
    return str(getattr(calibrator, "name", type(calibrator).__name__))


def _settings(calibrator: Calibrator) -> dict[str, Any]:
    plain = msgspec.to_builtins(getattr(calibrator, "settings", {}))
    return dict(plain) if isinstance(plain, Mapping) else {"settings": plain}


def _digest_of(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise UsageError(f"the preprocessing cannot be written as JSON: {error}", hint="plain values only") from error
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


# ------------------------------------------------------------------------------------------------ the cache


@dataclass(frozen=True, slots=True)
class _Identity:
    """What makes one calibration another one."""

    model: str
    preprocessing: str
    calibrator: str
    settings: dict[str, Any]

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """In words, what of a stored identity is not this one's."""
        said = []
        if other.get("model") != self.model:
            said.append(f"it is of another model ({_short(other.get('model'))}, this one is {_short(self.model)})")
        if other.get("preprocessing") != self.preprocessing:
            said.append("its inputs were preprocessed otherwise")
        if other.get("calibrator") != self.calibrator:
            said.append(f"its calibrator is `{other.get('calibrator')}`, not `{self.calibrator}`")
        elif other.get("settings") != self.settings:
            said.append(f"its calibrator's settings are {other.get('settings')}, not {self.settings}")
        return said


def _short(digest: Any) -> str:
    return str(digest).removeprefix("sha256:")[:12]


def _document(result: CalibrationResult) -> dict[str, Any]:
    own: dict[str, Any] = msgspec.to_builtins(result)
    own.pop("from_cache")
    return {"schema": _SCHEMA, "schema_version": 1} | own


def _cached(cache: Path, identity: _Identity, tensors: Sequence[str] | None, *, plain_too: bool) -> CalibrationResult:
    """The result in a cache file; `UsageError` saying what differs when it is another's."""
    try:
        stored = msgspec.json.decode(cache.read_bytes())
        if not isinstance(stored, dict) or stored.get("schema") != _SCHEMA:
            raise UsageError(f"`{cache}` is no calibration cache", hint="name another file")
        own = {name: value for name, value in stored.items() if name not in ("schema", "schema_version")}
        found = msgspec.convert(own | {"from_cache": True}, CalibrationResult)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"the calibration cache `{cache}` cannot be read: {error}", hint="delete it") from error
    if plain_too and found.preprocessing == _digest_of(""):
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


# ------------------------------------------------------------------------------------------------ the work


class _Changed(Exception):
    """The data is not the one an unfinished state was made of."""


class _Work:
    """One calibration on its way."""

    def __init__(
        self,
        model: Model,
        samples: Samples,
        calibrator: Calibrator,
        identity: _Identity,
        tensors: Sequence[str] | None,
        cache: Path | None,
        every: int,
        memory_mib: int,
        progress: Callable[[int, int | None], None] | None,
    ) -> None:
        self.model, self.samples, self.calibrator, self.identity = model, samples, calibrator, identity
        self.tensors, self.every, self.memory_mib, self.progress = tensors, every, memory_mib, progress
        self.unfinished = cache.with_name(f"{cache.name}.partial") if cache is not None else None
        if not isinstance(calibrator, ResumableCalibrator):
            self.unfinished = None
        staged = calibrator if isinstance(calibrator, StagedCalibrator) else None
        self.passes = staged.passes if staged is not None and samples.again else 1
        self.warnings: list[str] = []
        if staged is not None and staged.passes > self.passes:
            self.warnings.append(
                f"`{_name(calibrator)}` wants {staged.passes} passes, and {samples.describe} can be gone through once: one "
                "pass with histograms that widen, whose ranges may differ; a list, or a function that returns an iterable, "
                "can be repeated"
            )
            log.warning("%s", self.warnings[-1])
        self.probe: Probe | None = None
        self.extremes: dict[str, tuple[float, float]] = {}
        self.done = self.rows = 0
        self.digests: list[str] = []
        """Of the passes that are finished."""
        self.hash = hashlib.sha256()
        self.told = time.monotonic()

    def run(self) -> CalibrationResult:
        fresh = self.calibrator.state() if isinstance(self.calibrator, ResumableCalibrator) else None
        start = self._resume()
        try:
            self._all_passes(*start)
        except _Changed:
            log.warning("the data is not the one of the unfinished calibration `%s`: started anew", self.unfinished)
            if isinstance(self.calibrator, ResumableCalibrator) and fresh is not None:
                self.calibrator.restore(fresh)
            self.digests, self.extremes = [], {}
            self._all_passes(0, 0, "")
        return self._result()

    def _all_passes(self, first: int, skip: int, skipped_digest: str) -> None:
        for index in range(first, self.passes):
            if index > first or not skip:
                if isinstance(self.calibrator, StagedCalibrator):
                    self.calibrator.start_pass(index, self.passes)
                skip = 0
            self._one_pass(index, skip, skipped_digest)

    def _one_pass(self, index: int, skip: int, skipped_digest: str) -> None:
        self.hash, self.done, self.rows = hashlib.sha256(), 0, 0
        batches = iter(self.samples)
        for batch in itertools.islice(batches, skip):
            self._prepare(batch)
            self._count(batch)
        if skip and (self.done < skip or self.hash.hexdigest() != skipped_digest):
            raise _Changed
        try:
            for window in self._windows(batches):
                self._observe(window)
                self._tell(index)
                if self.unfinished is not None and self.done // self.every > (self.done - len(window)) // self.every:
                    self._save(index)
        except KeyboardInterrupt:
            raise self._stopped(index) from None
        if not self.done:
            raise FeedError("the data gave not one batch", hint="an iterator is used up after one pass")
        digest = self.hash.hexdigest()
        if self.digests and digest != self.digests[-1]:
            raise FeedError(
                "the data differs from one pass to the next",
                hint="fix the seed of what draws it, or hand over an iterator, which is gone through once",
            )
        self.digests.append(digest)

    def _windows(self, batches: Iterator[Batch]) -> Iterator[list[Batch]]:
        while window := list(itertools.islice(batches, self.probe.window if self.probe else 1)):
            self._prepare(window[0])
            for batch in window:
                inputs_are_finite(batch)
            yield window

    def _prepare(self, first: Batch) -> None:
        if self.probe is None:
            proto = read_proto(self.model.path)
            check_onnxruntime(self.model, proto)
            self.probe = Probe(self.model.path, proto, self.tensors, first, memory_mib=self.memory_mib)

    def _observe(self, window: list[Batch]) -> None:
        assert self.probe is not None
        for batch, name, array in self.probe.look(window):
            if array.size:
                least, greatest = float(array.min()), float(array.max())
                if not (math.isfinite(least) and math.isfinite(greatest)):
                    what = "NaN" if np.isnan(array).any() else "infinite values"
                    raise FeedError(
                        f"the tensor `{name}` has {what} for {batch.source}, whose inputs are finite",
                        hint="`trt-engine ranges` shows where they begin; leave that tensor or that sample out",
                    )
                before = self.extremes.get(name, (math.inf, -math.inf))
                self.extremes[name] = (min(before[0], least), max(before[1], greatest))
            self.calibrator.observe(name, array)
        for batch in window:
            self._count(batch)

    def _count(self, batch: Batch) -> None:
        batch.digest(self.hash)
        self.done += 1
        self.rows += batch.rows

    def _tell(self, index: int) -> None:
        total = self.samples.total
        if self.progress is not None:
            planned = total * self.passes if total is not None else None
            self.progress(index * (total or 0) + self.done if total else self.done, planned)
        if time.monotonic() - self.told >= _SAID_EVERY_S:
            self.told = time.monotonic()
            of = f" of {total}" if total is not None else ""
            pass_told = f", pass {index + 1} of {self.passes}" if self.passes > 1 else ""
            log.info("calibrating (%s%s): %d%s batches", _name(self.calibrator), pass_told, self.done, of)

    # -------------------------------------------------------------------------------------------- stop and go on

    def _save(self, index: int) -> None:
        if self.unfinished is None or not isinstance(self.calibrator, ResumableCalibrator):
            return
        state = self.calibrator.state()
        meta = {
            "identity": msgspec.to_builtins(self.identity), "tensors": self.tensors, "passes": self.passes,
            "pass": index, "done": self.done, "digest": self.hash.hexdigest(), "digests": self.digests,
            "names": list(state), "extremes": self.extremes,
        }  # fmt: skip
        arrays = {f"array{at}": value for at, value in enumerate(state.values())}
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays)
        write_whole(self.unfinished, buffer.getvalue())

    def _stopped(self, index: int) -> Interrupted:
        where = f"stopped after {self.done} batches"
        if self.unfinished is None:
            return Interrupted(f"calibration {where}", hint="with a `cache` it would go on from there")
        self._save(index)
        return Interrupted(f"calibration {where}", hint="the same call goes on from there")

    def _resume(self) -> tuple[int, int, str]:
        """Which pass to go on with, how many of its batches are done, and their digest."""
        if self.unfinished is None or not self.unfinished.exists():
            return 0, 0, ""
        try:
            with np.load(self.unfinished, allow_pickle=False) as stored:
                meta = json.loads(bytes(stored["meta"]))
                state = {name: stored[f"array{at}"] for at, name in enumerate(meta["names"])}
        except (OSError, ValueError, KeyError, EOFError) as error:
            log.warning("the unfinished calibration `%s` cannot be read (%s): started anew", self.unfinished, error)
            return 0, 0, ""
        wanted = list(self.tensors) if self.tensors is not None else None
        same = not self.identity.differences(meta["identity"]) and meta["tensors"] == wanted
        if not same or meta["passes"] != self.passes or not isinstance(self.calibrator, ResumableCalibrator):
            log.info("the unfinished calibration `%s` is of another kind: started anew", self.unfinished)
            return 0, 0, ""
        if isinstance(self.calibrator, StagedCalibrator):
            self.calibrator.start_pass(meta["pass"], self.passes)
        self.calibrator.restore(state)
        self.digests = list(meta["digests"])
        self.extremes = {name: (low, high) for name, (low, high) in meta.get("extremes", {}).items()}
        log.info("calibration goes on after %d batches of pass %d", meta["done"], meta["pass"] + 1)
        return int(meta["pass"]), int(meta["done"]), str(meta["digest"])

    def forget(self) -> None:
        """The calibration is done and written: the unfinished one goes."""
        if self.unfinished is not None:
            self.unfinished.unlink(missing_ok=True)

    def _result(self) -> CalibrationResult:
        assert self.probe is not None
        amax = {}
        for name in self.probe.tensors:
            reach = float(self.calibrator.threshold(name))
            if not math.isfinite(reach) or reach < 0:
                raise UsageError(
                    f"the calibrator `{_name(self.calibrator)}` gave {reach} for `{name}`",
                    hint="`threshold` returns a finite number, 0 or more",
                )
            amax[name] = reach
        left_out = self.samples.say_what_was_left_out()
        for said in left_out:
            log.warning("%s", said)
        log.info("calibrated %d tensors over %d samples of %s", len(amax), self.rows, self.samples.describe)
        return CalibrationResult(
            amax=amax,
            calibrator=self.identity.calibrator,
            settings=self.identity.settings,
            model=self.identity.model,
            preprocessing=self.identity.preprocessing,
            data=f"sha256:{self.digests[-1]}",
            described=self.samples.describe,
            batches=self.done,
            rows=self.rows,
            passes=self.passes,
            extremes=self.extremes,
            skipped=dict(self.samples.skipped),
            warnings=(*self.warnings, *left_out),
        )
