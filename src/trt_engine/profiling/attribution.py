"""The layer of each kernel: by NVTX range, by the operator that launched it, by the order of layers; else unknown;
and a backend's layer times with the category, FLOPs and bytes of each layer.

A kernel without evidence gets no layer; the attributed share of the time is reported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from onnx import ModelProto

from trt_engine.atomic_io import decode_json, read_bounded
from trt_engine.backend import BackendSpec
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, TrtEngineError
from trt_engine.graph import walk
from trt_engine.graph.cost import Cost, model_cost
from trt_engine.graph.load import read_proto
from trt_engine.graph.module_paths import ModulePaths
from trt_engine.graph.shape_inference import flatten
from trt_engine.profiling import kernel_categories
from trt_engine.profiling.instruments.capture import Capture, HostSpan, IntervalSet, Launch, SpanIndex
from trt_engine.profiling.roofline import sum_known
from trt_engine.records.profile import NON_COMPUTE, Activity, CategoryShare, LayerProfile, LayerRow
from trt_engine.tensors import Shape, Tensors


@dataclass(frozen=True, slots=True)
class Attribution:
    """The known layers of activities, and the method used."""

    layers: dict[int, str]
    """By index into the capture's activities."""
    method: str
    """`ranges`, `host spans`, `order`; empty if none applies."""
    share: float
    """Fraction of the kernels' time that has a layer."""
    note: str
    """Why some have none; empty if all have one."""


def attribute(capture: Capture, *, layers: LayerProfile | None = None, spans: Iterable[HostSpan] = ()) -> Attribution:
    """The layers of the capture's kernels.

    Evidence in this order: `spans` of host operators around launches; recorded NVTX ranges; the order of `layers`, if each
    runs one kernel and Myelin's names do not contradict it.
    """
    known = {row.name for row in layers.rows} if layers else set()
    rows = layers.rows if layers else ()
    if found := _match_spans(capture, spans):
        return _attribution(capture, found, "host spans")
    if found := _match_ranges(capture.activities, known):
        return _attribution(capture, found, "ranges")
    if found := _match_order(capture, rows):
        return _attribution(capture, found, "order")
    return Attribution({}, "", 0.0, _no_attribution(capture, layers))


def _attribution(capture: Capture, found: dict[int, str], how: str) -> Attribution:
    spent = {
        index: item.end_ns - item.start_ns for index, item in enumerate(capture.activities) if item.kind == "kernel"
    }
    whole = sum(spent.values())
    share = sum(ns for index, ns in spent.items() if index in found) / whole if whole else 0.0
    rest = sum(index not in found for index in spent)
    note = f"{rest} of {len(spent)} kernels were launched where no {how.removesuffix('s')} was" if rest else ""
    return Attribution(found, how, share, note)


def _no_attribution(capture: Capture, layers: LayerProfile | None) -> str:
    if not any(item.kind == "kernel" for item in capture.activities):
        return "the capture has no kernels"
    if layers is None or not layers.rows:
        return "neither the capture nor the backend reports layers"
    return "kernels carry no layer's name, and layers and kernels do not pair one to one"


def _match_spans(capture: Capture, spans: Iterable[HostSpan]) -> dict[int, str]:
    innermost = SpanIndex(spans)
    calls = {launch.correlation: launch for launch in capture.launches}
    found = {}
    for index, item in enumerate(capture.activities):
        call = calls.get(item.correlation)
        if call and (name := innermost.innermost(call.start_ns, call.thread)):
            found[index] = name
    return found


def _match_ranges(activities: Sequence[Activity], known: set[str]) -> dict[int, str]:
    """With known layers, only ranges with their names count: others mark calls, not layers."""
    return {
        index: item.range
        for index, item in enumerate(activities)
        if item.range is not None and (not known or item.range in known)
    }


_MYELIN = re.compile(r"^_*(?:myl|mye)_?([A-Za-z]+)(?=_|$)")


def _match_order(capture: Capture, rows: Sequence[LayerRow]) -> dict[int, str]:
    """If each layer launches one kernel per inference, the n-th kernel belongs to the n-th layer."""
    rows = [row for row in rows if row.calls == 1 and row.category != "control" and row.mean_ms > 0]
    if not rows:
        return {}
    places = {id(item): index for index, item in enumerate(capture.activities)}
    found: dict[int, str] = {}
    for items in kernel_categories.split_by_inference(capture):
        kernels = [item for item in items if item.kind == "kernel"]
        if len(kernels) != len(rows) or not all(map(_is_plausible, kernels, rows)):
            return {}
        found.update((places[id(item)], row.name) for item, row in zip(kernels, rows, strict=True))
    return found


def _is_plausible(item: Activity, row: LayerRow) -> bool:
    """Whether the names do not contradict it."""
    mine, theirs = _MYELIN.match(item.name), _MYELIN.match(row.name)
    if mine or theirs:
        return bool(mine and theirs and mine[1] == theirs[1])
    kind = kernel_categories.kernel_category(item.name)
    return kind == row.category or "other" in (kind, row.category) or {kind, row.category} <= {"copy", "reformat"}


# ------------------------------------------------------------------------------------------------ ONNX Runtime


_KERNEL_TIME = "_kernel_time"
_SPREAD_NS = 200_000
"""Maximum clock drift between inferences, in ns."""
_SEARCH_NS, _STEP_NS = 60_000, 1_000
"""Search range and step of a run's offset from the middle of its window."""


def onnxruntime_node_spans(
    profile: Path | Sequence[Any], windows: Sequence[tuple[int, int]], launches: Sequence[Launch] = ()
) -> tuple[HostSpan, ...]:
    """The nodes of an ONNX Runtime profile on the clock of a capture that ran at the same time.

    The profile has its own time origin, so its runs (`model_run`) are aligned with the inference windows, then shifted to
    maximize the launches inside nodes; empty if runs and windows do not pair one to one. `EngineError` for another file.
    """
    events = _read_events(profile) if isinstance(profile, Path) else profile
    events = [event for event in events if isinstance(event, Mapping) and "ts" in event]
    runs = sorted(_to_interval(event) for event in events if event.get("name") == "model_run")
    offset = _clock_offset(runs, sorted(windows))
    if offset is None:
        return ()
    nodes = [
        HostSpan(name.removesuffix(_KERNEL_TIME), *_to_interval(event))
        for event in events
        if event.get("cat") == "Node" and (name := str(event.get("name", ""))).endswith(_KERNEL_TIME)
    ]
    offset += _refine_offset(nodes, [call.start_ns - offset for call in launches])
    found = (HostSpan(span.name, span.start_ns + offset, span.end_ns + offset) for span in nodes)
    return tuple(sorted(found, key=lambda span: (span.start_ns, -span.end_ns)))


def _read_events(path: Path) -> Sequence[Any]:
    try:
        found = decode_json(read_bounded(path))
    except (msgspec.DecodeError, OSError) as error:
        raise EngineError(
            f"`{path}` is not an ONNX Runtime profile: {error}", hint="it is complete once its session ended profiling"
        ) from error
    if not isinstance(found, list):
        raise EngineError(f"`{path}` is not an ONNX Runtime profile", hint="expected a list of events")
    return found


def _to_interval(event: Mapping[str, Any]) -> tuple[int, int]:
    """Interval in ns; the profile truncates to microseconds, so the end is rounded up."""
    start = int(event["ts"]) * 1000
    return start, start + int(event.get("dur", 0)) * 1000 + 1000


def _clock_offset(runs: Sequence[tuple[int, int]], windows: Sequence[tuple[int, int]]) -> int | None:
    """Offset to add to the profile's times. The captured runs are its last: warm-up came before."""
    if not windows or len(runs) < len(windows):
        return None
    runs = runs[-len(windows) :]
    # every run is within its window; a delayed run widens its own window only
    pairs = list(zip(runs, windows, strict=True))
    least = max(window[0] - run[0] for run, window in pairs)
    most = min(window[1] - run[1] for run, window in pairs)
    return None if least - most > _SPREAD_NS else (least + most) // 2


def _refine_offset(nodes: Sequence[HostSpan], launches: Sequence[int]) -> int:
    """The middle of the shifts that leave the fewest launches outside of every node."""
    if not launches:
        return 0
    covered = IntervalSet((span.start_ns, span.end_ns) for span in nodes)
    counts = {
        shift: sum(covered.contains(moment - shift) for moment in launches)
        for shift in range(-_SEARCH_NS, _SEARCH_NS + 1, _STEP_NS)
    }
    best = max(counts.values())
    shifts = [shift for shift, count in counts.items() if count == best]
    near = min(shifts, key=abs)  # of equally good stretches, the nearest
    last = first = near
    while first - _STEP_NS in counts and counts[first - _STEP_NS] == best:
        first -= _STEP_NS
    while last + _STEP_NS in counts and counts[last + _STEP_NS] == best:
        last += _STEP_NS
    return (first + last) // 2


# ------------------------------------------------------------------------------------------------ from run to run


def transfer_attribution(source: Capture, attribution: Attribution, target: Capture) -> Attribution:
    """Layers found in one capture, applied to another of the same engine if both run the same kernels in the same order.

    ONNX Runtime's profiler slows inference, so kernels are timed without it and named with it. Short names are compared:
    instruments write types differently.
    """
    pattern = _inference_pattern(source, attribution)
    if not pattern:
        return Attribution({}, "", 0.0, attribution.note or "the layers of the first capture are unknown")
    places = {id(item): index for index, item in enumerate(target.activities)}
    layers: dict[int, str] = {}
    for items in kernel_categories.split_by_inference(target):
        kernels = _launch_order(target, items)
        if [kernel_categories.short_name(item.name) for item in kernels] != [name for name, _ in pattern]:
            return Attribution({}, "", 0.0, "the two captures do not run the same kernels in the same order")
        layers.update(
            (places[id(item)], layer) for item, (_, layer) in zip(kernels, pattern, strict=True) if layer is not None
        )
    return _attribution(target, layers, attribution.method)


def _inference_pattern(capture: Capture, found: Attribution) -> list[tuple[str, str | None]]:
    """Kernel and layer, in the order of one inference; empty if inferences run different kernels.

    A kernel with one known layer in any inference gets it; with two different ones it gets none.
    """
    places = {id(item): index for index, item in enumerate(capture.activities)}
    orders = [_launch_order(capture, items) for items in kernel_categories.split_by_inference(capture)]
    if not found.layers or not orders or any([i.name for i in one] != [i.name for i in orders[0]] for one in orders):
        return []
    pattern: list[tuple[str, str | None]] = []
    for items in zip(*orders, strict=True):
        layers = {found.layers[places[id(item)]] for item in items if places[id(item)] in found.layers}
        pattern.append((kernel_categories.short_name(items[0].name), layers.pop() if len(layers) == 1 else None))
    return pattern


def _launch_order(capture: Capture, items: Iterable[Activity]) -> list[Activity]:
    """Kernels in launch order, which concurrent streams do not change; by start within one graph launch."""
    launched = {launch.correlation: launch.start_ns for launch in capture.launches}
    return sorted(
        (item for item in items if item.kind == "kernel"),
        key=lambda item: (launched.get(item.correlation, item.start_ns), item.start_ns),
    )


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
    found = kernel_categories.operator_category(row.kind, name=row.name, is_data_movement=row.category == "reformat")
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
    return kernel_categories.share_by_category(((row.category, row.median_ms, row.calls) for row in layers.rows), 1)


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
