"""One trial: quantize a set of layers, build the engine, run the dataset and read the metric."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trt_engine.atomic_io import staging_folder
from trt_engine.config.build import BuildConfig
from trt_engine.config.precision import QuantizeConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.evaluation.evaluate_runner import DatasetEvaluation, evaluate_runner
from trt_engine.model import Model
from trt_engine.precision.quantize_model import quantize
from trt_engine.records.evaluate import MAIN_METRIC
from trt_engine.records.search import TrialResult
from trt_engine.store import Store
from trt_engine.verbs.build.run import build
from trt_engine.verbs.calibration_images import CalibrationInputs
from trt_engine.verbs.evaluate.run import build_config_for
from trt_engine.verbs.load import load
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
