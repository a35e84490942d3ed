"""One trial for real: quantise these layers, build the engine, run the dataset, read the metric."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trt_engine.api.building import build
from trt_engine.api.loading import load
from trt_engine.api.pictures import CalibrationInputs
from trt_engine.config import BuildConfig, QuantizeConfig, RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.evaluation.evaluate import Evaluation, evaluate_runner
from trt_engine.files import staging_folder
from trt_engine.graph.load import open_model
from trt_engine.model import Model
from trt_engine.precision.quantize import quantize
from trt_engine.records import MAIN_FIGURE
from trt_engine.search.trials import Outcome
from trt_engine.store import Store
from trt_engine.vision.datasets import Dataset
from trt_engine.vision.declaration import Vision

__all__ = ["Calibration", "Mixture"]

_KERNELS = ("int8",)
"""What engines compute in that format from Q/DQ alone; the others are measured by their FP32 emulation."""
_USUAL_BATCH = 8
_TALKERS = ("trt_engine.api", "trt_engine.precision", "trt_engine.backends", "trt_engine.store")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Where the ranges of activations come from; a pass over the data is made once and kept in `cache`."""

    data: Path | str
    """As it was given: `quantize` takes the same."""
    inputs: CalibrationInputs
    cache: Path


@dataclass(frozen=True, slots=True)
class Mixture:
    """A `Judge` over one model: some of its layers quantised, the others left."""

    model: Model
    to: str
    layers: tuple[str, ...]
    """All that the format could take, heads too."""
    config: QuantizeConfig
    calibration: Calibration
    dataset: Dataset
    vision: Vision
    folder: Path
    """Where a trial's files are for as long as it lasts."""
    batch: int | None = None
    seed: int | None = None
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __call__(self, nodes: Collection[str], images: int | None) -> Outcome:
        dataset = self.dataset.subset(images, self.seed)
        with staging_folder(self.folder / "trial") as stage, _quiet():
            path, nbytes = self.model.path, self.model.nbytes
            if nodes:
                path, nbytes = self._quantised(nodes, stage)
            engine = self._built(path, stage)
            with load(engine, config=self.runtime) as runner:
                found = evaluate_runner(runner, dataset, self.vision, batch=self.batch)
        return self._outcome(found, bool(nodes), nbytes)

    def settings(self, nodes: Collection[str]) -> QuantizeConfig:
        """The settings that quantise these nodes and no other."""
        # heads go by name: which layer is the last depends on what else is excluded
        return dataclasses.replace(
            self.config, heads=True, exclude_nodes=self.excluded(nodes), exclude_types=(), exclude_patterns=(),
            parity=False,
        )  # fmt: skip

    def excluded(self, nodes: Collection[str]) -> tuple[str, ...]:
        """The layers that stay in float."""
        return tuple(name for name in self.layers if name not in nodes)

    def _quantised(self, nodes: Collection[str], stage: Path) -> tuple[Path, int]:
        out, emulation = stage / "quantised.onnx", stage / "emulation.onnx"
        kernels = self.to in _KERNELS
        calibration = self.calibration
        report = quantize(
            self.model, self.to, out=out, emulate=None if kernels else emulation, data=calibration.inputs.data,
            cache=calibration.cache, preprocessing=calibration.inputs.preprocessing, config=self.settings(nodes),
        )  # fmt: skip
        assert report.nbytes is not None
        return out if kernels else emulation, report.nbytes

    def _built(self, path: Path, stage: Path) -> Engine:
        """An engine for batches up to the one measured with, in a store that goes with the trial."""
        runtime, spec = self.runtime, self.vision.input_of(open_model(path).signature)
        size = self.batch or _USUAL_BATCH
        made = BuildConfig(
            batch=(1, size, size) if spec.shape[0] < 0 else None,
            shapes={spec.name: (max(spec.shape[0], size), *self.vision.preprocess.shape)}
            if any(side < 0 for side in spec.shape[1:])
            else {},
            device=runtime.device or "cpu",
            providers=runtime.providers,
            allow_fallback=runtime.allow_fallback,
            options=runtime.options,
            parity=False,
        )
        return build(path, config=made, store=Store(stage / "store"))

    def _outcome(self, found: Evaluation, quantised: bool, nbytes: int) -> Outcome:
        side = found.engine
        kernels = not quantised or self.to in side.precision.running
        return Outcome(
            metric=side.metrics[MAIN_FIGURE[self.vision.postprocess.task]],
            images=found.images,
            nbytes=nbytes,
            batch=side.batch,
            samples_ms=side.samples_ms if kernels else (),
            measured_on="model" if not quantised else "kernels" if kernels else "emulation",
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What a single build or quantisation says of files that are gone a moment later is for `-v`."""
    if logging.getLogger("trt_engine").isEnabledFor(logging.DEBUG):
        yield
        return
    loggers = [logging.getLogger(name) for name in _TALKERS]
    before = [item.level for item in loggers]
    for item in loggers:
        item.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for item, level in zip(loggers, before, strict=True):
            item.setLevel(level)
