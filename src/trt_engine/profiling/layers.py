"""A backend's own layer times, made comparable: what each layer does, and the arithmetic and bytes of it."""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from trt_engine.backend import Backend
from trt_engine.config import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import TrtEngineError
from trt_engine.graph import walk
from trt_engine.graph.flops import Cost, count
from trt_engine.graph.load import read_proto
from trt_engine.graph.module_paths import ModulePaths
from trt_engine.graph.trace import flatten
from trt_engine.profiling.categories import of_operator
from trt_engine.tensors import Shape, Tensors
from trt_engine.traces import CATEGORIES, MOVES, Category, CategoryShare, LayerProfile, LayerRow

__all__ = ["Work", "layer_profile", "layer_shares", "precision_shares", "work_of"]

log = logging.getLogger(__name__)


def layer_profile(
    card: Backend,
    engine: Engine,
    feeds: Tensors,
    runtime: RuntimeConfig,
    *,
    inferences: int,
    warmup: int,
    keep: Path | None,
) -> LayerProfile:
    """What the backend's card tells of its layers, with the category of each and the work it does where that is known.

    Raises what the backend raises; `UsageError` where its card has no layer times.
    """
    found: LayerProfile = card.call("profile")(engine, feeds, runtime, inferences=inferences, warmup=warmup, keep=keep)
    rows = tuple(_with_category(row) for row in found.rows)
    if any(row.flops is None for row in rows):
        shapes = {name: tuple(int(size) for size in value.shape) for name, value in feeds.items()}
        rows = _with_flops(rows, _by_node(_counted(engine, shapes)))
    paths = ModulePaths(_model_of(engine))
    rows = tuple(dataclasses.replace(row, module=paths.of(*row.onnx_nodes)) for row in rows)
    return dataclasses.replace(found, rows=rows)


def _model_of(engine: Engine) -> ModelProto | None:
    """The model that the engine was built from, where it is still there."""
    try:
        return read_proto(Path(engine.passport.model.file))
    except TrtEngineError:
        return None


def _with_category(row: LayerRow) -> LayerRow:
    """The row with what its operator does; a backend's own word (`reformat`, `matrix`) decides where the name does not."""
    found = of_operator(row.kind, name=row.name, moves=row.category == "reformat")
    if found == "other":
        found = row.category
    precision = "" if found in MOVES else row.precision
    return dataclasses.replace(row, category=found, precision=precision)


# ------------------------------------------------------------------------------------------------ work


@dataclass(frozen=True, slots=True)
class Work:
    """The arithmetic and the bytes of one inference; None where nothing tells."""

    flops: int | None
    nbytes: int | None
    source: str
    """What was counted: `layers`, `model`; empty where nothing was."""
    notes: tuple[str, ...] = ()


def work_of(engine: Engine, shapes: Mapping[str, Shape], layers: LayerProfile | None) -> Work:
    """The work of one inference: the sum over the layers where each tells its own, else counted in the model."""
    notes: list[str] = []
    flops = _sum([row.flops for row in layers.rows]) if layers is not None and layers.rows else None
    nbytes = _sum([row.nbytes for row in layers.rows]) if layers is not None and layers.rows else None
    source = "layers" if flops is not None else ""
    if flops is None:
        cost = _counted(engine, shapes)
        if cost is not None and cost.flops:
            flops, source = cost.flops, "model"
            if not cost.exact:
                what = ", ".join(sorted(cost.uncounted)) or "some operators"
                notes.append(f"the model's arithmetic is a lower bound: {what} could not be counted")
    if nbytes is None and layers is not None and layers.rows:
        unknown = [row.name for row in layers.rows if row.nbytes is None]
        log.debug("%d of %d layers do not tell their sizes, `%s` first", len(unknown), len(layers.rows), unknown[0])
    return Work(flops, nbytes, source, tuple(notes))


def _sum(values: Sequence[int | None]) -> int | None:
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _counted(engine: Engine, shapes: Mapping[str, Shape]) -> Cost | None:
    """The count of the model the engine was built from; None where it is not there any more."""
    path = Path(engine.passport.model.file)
    if not path.is_file():
        return None
    try:
        return count(read_proto(path), shapes)
    except (TrtEngineError, OSError, ValueError) as error:
        log.debug("the work of `%s` cannot be counted: %s", path, error)
        return None


def _by_node(cost: Cost | None) -> dict[str, int]:
    """Operations by the names backends give the model's nodes."""
    named: dict[str, int] = defaultdict(int)
    if cost is None or cost.trace is None:
        return named
    for step in flatten(cost.trace.steps):
        flops = cost.per_node.get(step.key, (0, 0))[1]
        for name in {
            walk.label(step.node),
            step.node.name or f"node_of_{step.key}",
        }:  # the latter is TensorRT's parser's
            named[name] += flops
    return named


def _with_flops(rows: Sequence[LayerRow], by_node: Mapping[str, int]) -> tuple[LayerRow, ...]:
    """The rows with the operations of the nodes they were made of; a node of several layers goes to those that multiply."""
    places: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        for node in row.onnx_nodes:
            if node in by_node:
                places[node].append(index)
    flops: dict[int, float] = defaultdict(float)
    for node, found in places.items():
        computing = [index for index in found if rows[index].category not in MOVES] or found
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
    """The time of one inference by what its layers do, most first."""
    found: dict[Category, list[LayerRow]] = {name: [] for name in CATEGORIES}
    for row in layers.rows:
        found[row.category].append(row)
    whole = sum(row.median_ms for row in layers.rows)
    shares = [
        CategoryShare(name, ms, ms / whole if whole else 0.0, max(1, round(sum(row.calls for row in rows))))
        for name, rows in found.items()
        if rows
        for ms in [sum(row.median_ms for row in rows)]
    ]
    return tuple(sorted(shares, key=lambda share: -share.ms))


def precision_shares(layers: LayerProfile) -> dict[str, float]:
    """The share of the layers' time by the type they compute in, largest first; empty where no layer tells its type."""
    if not any(row.precision for row in layers.rows):
        return {}
    times: dict[str, float] = defaultdict(float)
    for row in layers.rows:
        times[row.precision or ("moves" if row.category in MOVES else "other")] += row.median_ms
    whole = sum(times.values())
    ordered = sorted(times.items(), key=lambda item: -item[1])
    return {name: ms / whole for name, ms in ordered} if whole else {}
