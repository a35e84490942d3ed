"""One trial: quantize a set of layers, build the engine, run the dataset and read the metric.

Each measurement is appended to trials.jsonl at once and never repeated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from trt_engine.atomic_io import decode_json, encode_json, read_bounded, staging_folder, write_atomic
from trt_engine.config.build import BuildConfig
from trt_engine.config.precision import QuantizeConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.evaluation.evaluate_runner import DatasetEvaluation, evaluate_runner
from trt_engine.model import Model
from trt_engine.precision.quantize_model import quantize
from trt_engine.records.base import append_record
from trt_engine.records.evaluate import MAIN_METRIC
from trt_engine.records.search import SearchTrial, TrialResult
from trt_engine.store import Store
from trt_engine.verbs.build.run import build
from trt_engine.verbs.calibration_images import CalibrationInputs
from trt_engine.verbs.evaluate.run import build_config_for
from trt_engine.verbs.load import load
from trt_engine.verbs.search.selection import DataPart, LayerGroup, Stage
from trt_engine.vision.datasets import Dataset
from trt_engine.vision.spec import Vision

_KERNEL_FORMATS = ("int8",)
"""Formats with kernels; others are measured by their FP32 emulation."""
_QUIET_LOGGERS = ("trt_engine.verbs", "trt_engine.precision", "trt_engine.backends", "trt_engine.store")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Calibration data; the ranges are computed once and cached in `cache`."""

    data: Path | str
    """As given to `quantize`."""
    inputs: CalibrationInputs
    cache: Path


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """A `Judge` that measures a model with some layers quantized."""

    model: Model
    to: str
    layers: tuple[str, ...]
    """All quantizable layers, output layers included."""
    config: QuantizeConfig
    calibration: Calibration
    dataset: Dataset
    vision: Vision
    folder: Path
    """Folder of a trial's temporary files."""
    batch: int | None = None
    seed: int | None = None
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __call__(self, nodes: Collection[str], images: int | None) -> TrialResult:
        dataset = self.dataset.subset(images, self.seed)
        with staging_folder(self.folder / "trial") as stage, _quiet():
            path, nbytes = self.model.path, self.model.nbytes
            if nodes:
                path, nbytes = self._quantize(nodes, stage)
            engine = self._build(path, stage)
            with load(engine, config=self.runtime) as runner:
                found = evaluate_runner(runner, dataset, self.vision, batch=self.batch)
        return self._make_result(found, bool(nodes), nbytes)

    def quantize_config(self, nodes: Collection[str]) -> QuantizeConfig:
        """The settings that quantize only these nodes."""
        # output layers are excluded by name: which layer is last depends on the other exclusions
        return dataclasses.replace(
            self.config,
            quantize_outputs=True,
            exclude_nodes=self.excluded_nodes(nodes),
            exclude_types=(),
            exclude_patterns=(),
            parity=False,
        )

    def excluded_nodes(self, nodes: Collection[str]) -> tuple[str, ...]:
        """The excluded layers."""
        return tuple(name for name in self.layers if name not in nodes)

    def _quantize(self, nodes: Collection[str], stage: Path) -> tuple[Path, int]:
        out, emulation = stage / "quantised.onnx", stage / "emulation.onnx"
        kernels = self.to in _KERNEL_FORMATS
        calibration = self.calibration
        report = quantize(
            self.model, self.to, out=out, emulate=None if kernels else emulation, calib_data=calibration.inputs.calib_data,
            cache=calibration.cache, preprocessing=calibration.inputs.preprocessing, config=self.quantize_config(nodes),
        )  # fmt: skip
        assert report.nbytes is not None
        return out if kernels else emulation, report.nbytes

    def _build(self, path: Path, stage: Path) -> Engine:
        """Build an engine for batches up to the measured one, in a temporary store."""
        runtime = self.runtime
        made = BuildConfig(device="cpu", allow_fallback=runtime.allow_fallback, options=runtime.options, parity=False)
        made = build_config_for(path, runtime, made, self.vision, self.batch)
        return build(path, config=made, store=Store(stage / "store"))

    def _make_result(self, found: DatasetEvaluation, quantised: bool, nbytes: int) -> TrialResult:
        side = found.engine
        kernels = not quantised or self.to in side.precision.compute_shares
        return TrialResult(
            metric=side.metrics[MAIN_METRIC[self.vision.postprocess.task]],
            images=found.images,
            nbytes=nbytes,
            batch=side.batch,
            samples_ms=side.samples_ms if kernels else (),
            measured_on="model" if not quantised else "kernels" if kernels else "emulation",
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Log messages about temporary files only with `-v`."""
    if logging.getLogger("trt_engine").isEnabledFor(logging.DEBUG):
        yield
        return
    loggers = [logging.getLogger(name) for name in _QUIET_LOGGERS]
    before = [item.level for item in loggers]
    for item in loggers:
        item.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for item, level in zip(loggers, before, strict=True):
            item.setLevel(level)


log = logging.getLogger(__name__)


class RunTrial(Protocol):
    """Quantizes only these nodes and measures on that many images (None: all)."""

    def __call__(self, nodes: Collection[str], images: int | None) -> TrialResult: ...


class TrialLog:
    """A `Measure` that reuses the measurements logged under this search's digest."""

    def __init__(
        self, path: Path, search: str, run_trial: RunTrial, *, subset: int, images: int, expected: int
    ) -> None:
        self.path = path
        self.trials: list[SearchTrial] = []
        """The measurements requested by this search, in order, each once."""
        self.measured = 0
        """Number of new measurements."""
        self._search = search
        self._run_trial = run_trial
        self._image_counts: dict[DataPart, int | None] = {"subset": subset if subset < images else None, "whole": None}
        self._expected = expected
        self._known = {trial.key: trial for trial in _read_trials(path)}
        self._by_key: dict[str, SearchTrial] = {}
        self._durations: list[float] = []
        self._base: dict[int | None, float] = {}

    def __call__(self, groups: Sequence[LayerGroup], part: DataPart, stage: Stage) -> float:
        return self.trial(groups, part, stage).metric

    def trial(self, groups: Sequence[LayerGroup], part: DataPart, stage: Stage) -> SearchTrial:
        """Return the measurement, from the log or newly measured."""
        nodes = sorted({name for group in groups for name in group.nodes})
        images = self._image_counts[part]
        key = json_digest([self._search, images, nodes])
        if key in self._by_key:
            return self._by_key[key]
        found = self._known.get(key)
        if found is None:
            began = time.monotonic()
            outcome = self._run_trial(nodes, images)
            found = SearchTrial(
                key=key,
                search=self._search,
                stage=stage,
                nodes=tuple(nodes),
                macs=sum(group.macs for group in groups),
                seconds=time.monotonic() - began,
                **dataclasses.asdict(outcome),
            )
            append_record(self.path, found)
            self.measured += 1
        self._by_key[key] = found
        self.trials.append(found)
        self._durations.append(found.seconds)
        if not nodes:
            self._base[images] = found.metric
        self._log_trial(found, groups, images)
        return found

    def _log_trial(self, trial: SearchTrial, groups: Sequence[LayerGroup], images: int | None) -> None:
        what = groups[0].nodes[0] if trial.stage == "alone" else f"{len(trial.nodes)} layers"
        base = self._base.get(images)
        drop = f" (drop {base - trial.metric:+.4f})" if base is not None and trial.nodes else ""
        left = max(self._expected - len(self.trials), 0)
        # the last few predict better than the first, which ran the whole dataset
        recent = self._durations[-5:]
        left_s = left * sum(recent) / len(recent)
        remaining = f"{left_s:.0f} s" if left_s < 120 else f"{left_s / 60:.0f} min"
        wait = f"; at most about {remaining} left" if left else ""
        log.info(
            "[%d of at most about %d] %s, %s on %d images: %.4f%s, %.1f s%s",
            len(self.trials), max(self._expected, len(self.trials)), trial.stage, what, trial.images, trial.metric, drop,
            trial.seconds, wait,
        )  # fmt: skip


def _read_trials(path: Path) -> list[SearchTrial]:
    """Read the complete lines of the log; an incomplete line is removed and measured again."""
    if not path.exists():
        return []
    found, lines = [], read_bounded(path).splitlines()
    kept = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(decode_json(line, SearchTrial))
            kept.append(line + b"\n")
        except (msgspec.MsgspecError, UnicodeDecodeError):
            if line.strip():
                log.warning("line %d of `%s` is not a trial and is removed", number, path)
    if len(kept) < len(lines):
        write_atomic(path, b"".join(kept))
    return found


def json_digest(value: Any) -> str:
    """A short digest of a JSON value."""
    return hashlib.sha256(encode_json(value)).hexdigest()[:16]
