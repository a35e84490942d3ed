"""Operator times in the reference evaluator, by host time."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from trt_engine.atomic_io import write_atomic
from trt_engine.backends.fake.build import MAGIC, library_version
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.graph import walk
from trt_engine.records.profile import LayerProfile, LayerRow
from trt_engine.tensors import Tensors


def profile(
    engine: Engine, feeds: Tensors, config: RuntimeConfig, *, inferences: int, warmup: int, keep: Path | None
) -> LayerProfile:
    """Times of the main graph's operators; subgraph bodies count towards their operator."""
    proto = onnx.load_from_string(engine.path.read_bytes()[len(MAGIC) :])
    evaluator = ReferenceEvaluator(proto)
    for _ in range(warmup):
        _time_nodes(evaluator, feeds)
    runs, walls = [], []
    for _ in range(inferences):
        started = time.perf_counter()
        runs.append(_time_nodes(evaluator, feeds))
        walls.append((time.perf_counter() - started) * 1e3)
    samples: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        for index, (ms, _) in enumerate(run):
            samples[index].append(ms)
    medians = {index: statistics.median(times) for index, times in samples.items()}
    whole = sum(medians.values())
    raw = None
    if keep is not None:
        times = [[ms for ms, _ in run] for run in runs]
        raw = str(write_atomic(keep / "fake-layers.json", msgspec.json.encode(times)))
    return LayerProfile(
        rows=tuple(
            LayerRow(
                name=walk.label(node),
                kind=node.op_type,
                category="other",
                mean_ms=statistics.fmean(samples[index]),
                median_ms=medians[index],
                share=medians[index] / whole if whole else 0.0,
                calls=1.0,
                device=config.device or engine.passport.device,
                dtypes=tuple(str(value.dtype) for value in runs[-1][index][1]),
                shapes=tuple(value.shape for value in runs[-1][index][1]),
                onnx_nodes=(walk.label(node),),
            )
            for index, node in enumerate(proto.graph.node)
        ),
        inferences=inferences,
        instrument=f"onnx.reference {library_version()}, the host's clock around each operator",
        wall_ms=statistics.median(walls),
        raw=raw,
    )


def _time_nodes(evaluator: Any, feeds: Tensors) -> list[tuple[float, tuple[Any, ...]]]:
    """Time in ms and outputs of each operator of one inference."""
    results: dict[str, Any] = {"": None, **{name: np.asarray(value) for name, value in feeds.items()}}
    results |= evaluator.rt_inits_
    found = []
    with np.errstate(all="ignore"):
        for node in evaluator.rt_nodes_:
            given = [results[name] for name in node.input]
            linked = {"context": results} if node.need_context() else {}
            started = time.perf_counter()
            outputs = node.run(*given, **linked)
            ms = (time.perf_counter() - started) * 1e3
            results.update(zip(node.output, outputs, strict=False))
            found.append((ms, tuple(np.asarray(value) for value in outputs)))
    return found
