"""A backend's layer times with the category, FLOPs and bytes of each layer."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from trt_engine.backend import BackendSpec
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import TrtEngineError
from trt_engine.graph import walk
from trt_engine.graph.cost import Cost, model_cost
from trt_engine.graph.load import read_proto
from trt_engine.graph.module_paths import ModulePaths
from trt_engine.graph.shape_inference import flatten
from trt_engine.profiling.kernel_categories import operator_category
from trt_engine.profiling.kernels import share_by_category
from trt_engine.profiling.roofline import sum_known
from trt_engine.records.profile import NON_COMPUTE, CategoryShare, LayerProfile, LayerRow
from trt_engine.tensors import Shape, Tensors

log = logging.getLogger(__name__)


def profile_layers(
    backend: BackendSpec,
    engine: Engine,
    feeds: Tensors,
    runtime: RuntimeConfig,
    *,
    inferences: int,
    warmup: int,
    keep: Path | None,
) -> LayerProfile:
    """The backend's layer profile, with the category of each layer and its FLOPs and bytes if known.

    Raises what the backend raises; `UsageError` if the backend has no layer times.
    """
    found: LayerProfile = backend.load_function("profile")(
        engine, feeds, runtime, inferences=inferences, warmup=warmup, keep=keep
    )
    rows = tuple(_with_category(row) for row in found.rows)
    if any(row.flops is None for row in rows):
        shapes = {name: tuple(int(size) for size in value.shape) for name, value in feeds.items()}
        rows = _with_flops(rows, _flops_by_node(_count_model(engine, shapes)))
    model: ModelProto | None = None  # the one the engine was built from, if it still exists
    with contextlib.suppress(TrtEngineError):
        model = None if engine.model_path is None else read_proto(engine.model_path)
    paths = ModulePaths(model)
    rows = tuple(dataclasses.replace(row, module=paths.path_of(*row.onnx_nodes)) for row in rows)
    return dataclasses.replace(found, rows=rows)


def _with_category(row: LayerRow) -> LayerRow:
    """The row with its category, by name, else by the backend's kind (`reformat`, `matrix`)."""
    found = operator_category(row.kind, name=row.name, is_data_movement=row.category == "reformat")
    if found == "other":
        found = row.category
    precision = "" if found in NON_COMPUTE else row.precision
    return dataclasses.replace(row, category=found, precision=precision)


# ------------------------------------------------------------------------------------------------ work


@dataclass(frozen=True, slots=True)
class ModelWork:
    """FLOPs and bytes of one inference; None if unknown."""

    flops: int | None
    nbytes: int | None
    source: str
    """Counted in: `layers`, `model`; empty if unknown."""
    notes: tuple[str, ...] = ()


def count_work(engine: Engine, shapes: Mapping[str, Shape], layers: LayerProfile | None) -> ModelWork:
    """The work of one inference: the sum over layers if all are known, else counted in the model."""
    notes: list[str] = []
    rows = layers.rows if layers is not None else ()
    flops, nbytes = sum_known(row.flops for row in rows), sum_known(row.nbytes for row in rows)
    source = "layers" if flops is not None else ""
    if flops is None:
        cost = _count_model(engine, shapes)
        if cost is not None and cost.flops:
            flops, source = cost.flops, "model"
            if not cost.exact:
                what = ", ".join(sorted(cost.uncounted)) or "some operators"
                notes.append(f"the model's arithmetic is a lower bound: {what} could not be counted")
    if nbytes is None and rows:
        unknown = [row.name for row in rows if row.nbytes is None]
        log.debug("%d of %d layers have unknown shapes, `%s` first", len(unknown), len(rows), unknown[0])
    return ModelWork(flops, nbytes, source, tuple(notes))


def _count_model(engine: Engine, shapes: Mapping[str, Shape]) -> Cost | None:
    """The cost of the model the engine was built from; None if it no longer exists."""
    path = engine.model_path
    if path is None:
        return None
    try:
        return model_cost(read_proto(path), shapes)
    except (TrtEngineError, OSError, ValueError) as error:
        log.debug("the work of `%s` cannot be counted: %s", path, error)
        return None


def _flops_by_node(cost: Cost | None) -> dict[str, int]:
    """FLOPs by the backends' names of the model's nodes."""
    named: dict[str, int] = defaultdict(int)
    if cost is None or cost.trace is None:
        return named
    for step in flatten(cost.trace.nodes):
        flops = cost.per_node.get(step.key, (0, 0))[1]
        for name in {walk.label(step.node), step.node.name or f"node_of_{step.key}"}:  # the latter by TensorRT's parser
            named[name] += flops
    return named


def _with_flops(rows: Sequence[LayerRow], by_node: Mapping[str, int]) -> tuple[LayerRow, ...]:
    """The rows with the FLOPs of their nodes; a node of several layers counts for those that multiply."""
    places: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        for node in row.onnx_nodes:
            if node in by_node:
                places[node].append(index)
    flops: dict[int, float] = defaultdict(float)
    for node, found in places.items():
        computing = [index for index in found if rows[index].category not in NON_COMPUTE] or found
        multiplying = [index for index in computing if rows[index].category in ("matrix", "attention")] or computing
        for index in multiplying:
            flops[index] += by_node[node] / len(multiplying)
    known = {index for found in places.values() for index in found}
    return tuple(
        dataclasses.replace(row, flops=round(flops[index]))
        if row.flops is None and index in known
        else dataclasses.replace(row, flops=0)
        if row.flops is None and row.category in ("copy", "reformat")
        else row
        for index, row in enumerate(rows)
    )


# ------------------------------------------------------------------------------------------------ shares


def layer_shares(layers: LayerProfile) -> tuple[CategoryShare, ...]:
    """The time of one inference by layer category, longest first."""
    return share_by_category(((row.category, row.median_ms, row.calls) for row in layers.rows), 1)


def precision_shares(layers: LayerProfile) -> dict[str, float]:
    """Share of the layers' time by compute dtype, largest first; empty if no dtype is known."""
    if not any(row.precision for row in layers.rows):
        return {}
    times: dict[str, float] = defaultdict(float)
    for row in layers.rows:
        times[row.precision or ("moves" if row.category in NON_COMPUTE else "other")] += row.median_ms
    whole = sum(times.values())
    ordered = sorted(times.items(), key=lambda item: -item[1])
    return {name: ms / whole for name, ms in ordered} if whole else {}
