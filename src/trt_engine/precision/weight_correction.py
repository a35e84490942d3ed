"""Weights corrected by activation statistics: AWQ scales and clip ranges, and bias correction.

Lin et al., "AWQ: Activation-aware Weight Quantization", 2023: salient input channels are scaled up before rounding and
down again in the activation, and outliers are clipped where that reduces the weighted error. Rounding W to W' shifts the
mean output by (W - W')E[x] per channel, which the bias absorbs at no cost (Finkelstein et al., "Fighting Quantization Bias
With Bias", 2019; Nagel et al., 2019). Weights computed from constants alone become stored ones first.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_engine.arrayfiles import npz_bytes, open_arrays
from trt_engine.atomic_io import write_atomic
from trt_engine.backends.onnxruntime import session
from trt_engine.errors import FeedError
from trt_engine.graph import walk
from trt_engine.graph.constants import is_random
from trt_engine.graph.dtype_breakdown import is_dequantize, is_quantize
from trt_engine.graph.edit_graph import (
    NameAllocator,
    Weights,
    count_reads,
    make_initializer,
    outer_scope_reads,
    retain_items,
)
from trt_engine.graph.load import check_onnxruntime
from trt_engine.graph.shape_inference import trace
from trt_engine.model import Model
from trt_engine.precision.activation_probe import ActivationProbe
from trt_engine.precision.formats import Format, quantize
from trt_engine.precision.layer_selection import LINEAR_OPS, QuantizableLayer
from trt_engine.precision.samples import Samples

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
_SAMPLE_ROWS = 512
"""Rows of each activation kept to evaluate scales."""
_SCALE_STEPS = 20
_MIN_GAIN = 0.98
"""Scaling costs a multiplication, so it is used only if the error falls below this fraction."""


@dataclass(slots=True)
class ChannelStats:
    """Statistics of one activation's channels (last axis)."""

    mean_square: npt.NDArray[np.float64]
    mean_magnitude: npt.NDArray[np.float64]
    rows: Floats
    """A sample of rows `[N, C]`."""
    count: int


class _StatsCollector:
    """Accumulates the statistics of one tensor; rows are kept by reservoir sampling."""

    def __init__(self) -> None:
        self.squares: Any = 0.0
        self.magnitudes: Any = 0.0
        self.samples: Floats = np.zeros((0, 0), np.float32)
        self.count = 0
        self.rng = np.random.default_rng(0)

    def add(self, array: Array) -> None:
        rows = array.reshape(-1, array.shape[-1]).astype(np.float32)
        if not len(rows):
            return
        self.squares += np.square(rows, dtype=np.float64).sum(axis=0)
        self.magnitudes += np.abs(rows).sum(axis=0, dtype=np.float64)
        room = _SAMPLE_ROWS - len(self.samples)
        self.samples = np.concatenate([self.samples.reshape(-1, rows.shape[1]), rows[:room]])
        for at in range(room, len(rows)) if room < len(rows) else ():
            place = int(self.rng.integers(0, self.count + at + 1))
            if place < _SAMPLE_ROWS:
                self.samples[place] = rows[at]
        self.count += len(rows)

    def stats(self, name: str) -> ChannelStats:
        if not self.count:
            raise FeedError(f"no values of `{name}` were seen", hint="give more data")
        return ChannelStats(self.squares / self.count, self.magnitudes / self.count, self.samples, self.count)


def collect_channel_stats(model: Model, tensors: Sequence[str], samples: Samples) -> dict[str, ChannelStats]:
    """Collect the channel statistics of these activations in one pass over the data.

    Raises `FeedError` for activations that are not finite, `ModelError` for a model that ONNX Runtime does not run.
    """
    check_onnxruntime(model)
    gathered = {name: _StatsCollector() for name in tensors}
    for batch, name, array in ActivationProbe.read_samples(model, tensors, samples):
        if not np.isfinite(array).all():
            raise FeedError(
                f"the tensor `{name}` has values that are not finite for {batch.source}",
                hint="`trt-engine ranges` shows where they begin",
            )
        gathered[name].add(array)
    found = {name: own.stats(name) for name, own in gathered.items()}
    log.info("activations of %d tensors seen over %s", len(found), samples.description)
    return found


def search_input_scale(
    matrices: Sequence[Floats], stats: ChannelStats, form: Format, blocks: Sequence[int | None]
) -> Floats | None:
    """Search the input scale `[C]` of these weights (each `[outputs, inputs]`) that minimizes the layers' output error.

    Returns None if no scale is worth its cost."""
    magnitude = np.maximum(stats.mean_magnitude, 1e-8)
    rows = stats.rows
    plain = best = _output_error(matrices, np.ones(rows.shape[1], np.float32), rows, form, blocks)
    chosen: Floats | None = None
    for step in range(1, _SCALE_STEPS):
        scale = magnitude ** (step / _SCALE_STEPS)
        scale = (scale / np.sqrt(scale.max() * scale.min())).astype(np.float32)
        error = _output_error(matrices, scale, rows, form, blocks)
        if error < best:
            best, chosen = error, scale
    return chosen if best < _MIN_GAIN * plain else None


def _output_error(
    matrices: Sequence[Floats], scale: Floats, rows: Floats, form: Format, blocks: Sequence[int | None]
) -> float:
    total = 0.0
    for matrix, block in zip(matrices, blocks, strict=True):
        rounded = quantize(matrix * scale, form, axis=1, block=block).dequantize() / scale
        total += float(np.square(rows @ (rounded - matrix).T, dtype=np.float64).sum())
    return total


ChannelMeans = dict[tuple[str, int], npt.NDArray[np.float64]]
"""Channel means `[C]` by tensor and channel axis."""


def channel_axis(site: QuantizableLayer) -> int:
    """The channel axis of a layer's activation."""
    return 1 if site.node.op_type in ("Conv", "ConvTranspose") else -1


def channel_means(model: Model, sites: Sequence[QuantizableLayer], samples: Samples) -> ChannelMeans:
    """Compute the channel means of the layers' activations in one pass over the data."""
    wanted = dict.fromkeys((site.activation, channel_axis(site)) for site in sites)
    sums: ChannelMeans = {}
    counts: Counter[tuple[str, int]] = Counter()
    names = [name for name, _ in wanted]
    for _, name, array in ActivationProbe.read_samples(model, names, samples):
        for key in ((name, 1), (name, -1)):
            if key in wanted and array.size:
                rows = np.moveaxis(array, key[1], -1).reshape(-1, array.shape[key[1]])
                sums[key] = sums.get(key, np.zeros(rows.shape[1])) + rows.sum(axis=0, dtype=np.float64)
                counts[key] += len(rows)
    return {key: total / counts[key] for key, total in sums.items()}


def output_correction(
    lost: Array, site: QuantizableLayer, mean: npt.NDArray[np.float64]
) -> npt.NDArray[np.float32] | None:
    """Correction, float32 `[outputs]`, for the bias; `lost` is the weight minus its rounded value. None if shapes do not
    match.
    """
    if site.node.op_type == "ConvTranspose":
        return None
    if site.node.op_type == "Conv":
        groups = int(walk.attributes(site.node).get("group", 1))
        summed = lost.reshape(*lost.shape[:2], -1).sum(axis=2, dtype=np.float64)
        outputs, inputs = summed.shape
        if mean.size != inputs * groups or outputs % groups:
            return None
        by_group = summed.reshape(groups, outputs // groups, inputs)
        made = np.einsum("goi,gi->go", by_group, mean.reshape(groups, inputs)).reshape(-1)
        return np.asarray(made, np.float32)
    if lost.ndim != 2:
        return None
    matrix = lost if site.reduction_axis == 1 else lost.T
    return np.asarray(matrix @ mean, np.float32) if matrix.shape[1] == mean.size else None


# ------------------------------------------------------------------------------------------------ kept beside a cache


def save_means(path: Path, means: ChannelMeans, data: str) -> None:
    """Write the means and the digest of their data."""
    names = np.array([[name, str(axis)] for name, axis in means] or np.zeros((0, 2), "U1"))
    arrays = {f"mean{at}": value for at, value in enumerate(means.values())}
    write_atomic(path, npz_bytes({"names": names, "data": np.array(data), **arrays}))


def load_means(path: Path, data: str) -> Mapping[tuple[str, int], npt.NDArray[np.float64]] | None:
    """Read the means, float64 `[channels]` by tensor and axis, if they belong to that data, else None."""
    try:
        with open_arrays(path) as file:
            if str(file.read("data")) != data:
                return None
            return {
                (str(name), int(axis)): file.read(f"mean{at}") for at, (name, axis) in enumerate(file.read("names"))
            }
    except (OSError, ValueError, KeyError, FeedError) as error:
        log.debug("no means in `%s`: %s", path, error)
        return None


_PARAMETERS = dict.fromkeys(LINEAR_OPS, (1, 2)) | {"BatchNormalization": (1, 2, 3, 4)}
_FOLDED = (TensorProto.FLOAT, TensorProto.FLOAT16)


def fold_weights(proto: ModelProto, weights: Weights, floats: Set[str] = frozenset()) -> set[str]:
    """Store the computed weights and biases of the main graph's layers, in place, and return the outputs of these layers.

    Not of the layers of `floats`, whose file would grow, and none where ONNX Runtime does not compute them.
    """
    graph = proto.graph
    makers = _constant_nodes(proto)
    reads = [
        (node, at)
        for node in graph.node
        if not walk.domain_of(node) and floats.isdisjoint(node.output)
        for at in _PARAMETERS.get(node.op_type, ())
        if at < len(node.input) and node.input[at] in makers and node.input[at] not in weights
    ]
    if not reads:
        return set()
    facts = trace(proto, {}).tensors
    types = {name: facts[name].elem for node, at in reads if (name := node.input[at]) in facts}
    types = {name: elem for name, elem in types.items() if elem in _FOLDED}
    try:
        values = _compute(proto, makers, types, weights)
    except session.ERRORS as error:
        log.debug("computed weights stay: %s", error)
        return set()
    names = NameAllocator(proto)
    stored = {name: names.fresh(f"{name}_folded") for name in values}
    graph.initializer.extend(make_initializer(values[name], new) for name, new in stored.items())
    for node, at in reads:
        node.input[at] = stored.get(node.input[at], node.input[at])
    _drop_unread(proto, makers)
    return {node.output[0] for node, at in reads if node.op_type in LINEAR_OPS and node.input[at] in stored.values()}


def _constant_nodes(proto: ModelProto) -> dict[str, NodeProto]:
    """The nodes of the main graph that compute from stored tensors alone, by the names of their outputs."""
    known = {item.name for item in proto.graph.initializer}
    found: dict[str, NodeProto] = {}
    for node in proto.graph.node:
        inputs = [name for name in node.input if name]
        fixed = known.issuperset(inputs) and (inputs or node.op_type == "Constant")
        odd = walk.domain_of(node) or is_random(node) or is_quantize(node) or is_dequantize(node)
        if fixed and not odd and not any(True for _ in walk.bodies(node)):
            known.update(node.output)
            found.update((name, node) for name in node.output if name)
    return found


def _compute(
    proto: ModelProto, makers: Mapping[str, NodeProto], types: Mapping[str, int], weights: Weights
) -> dict[str, npt.NDArray[Any]]:
    """The values of the tensors in `types`, by name; in the dtypes and shapes that their nodes give them."""
    needed: set[str] = set()
    left = list(types)
    while left:
        name = left.pop()
        if name not in needed:
            needed.add(name)
            left += [read for read in makers[name].input if read] if name in makers else []
    nodes = [node for node in proto.graph.node if not needed.isdisjoint(name for name in node.output if name in makers)]
    graph = helper.make_graph(
        nodes, "weights", [],
        [helper.make_tensor_value_info(name, elem, None) for name, elem in types.items()],
        [make_initializer(weights.read(item.name), item.name) for item in proto.graph.initializer if item.name in needed],
    )  # fmt: skip
    part = helper.make_model(graph, opset_imports=list(proto.opset_import), ir_version=min(proto.ir_version, 10))
    ran: Sequence[Any] = session.create_plain(part.SerializeToString(), threads=1).run(list(types), {})
    return dict(zip(types, ran, strict=True))


def _drop_unread(proto: ModelProto, makers: Mapping[str, NodeProto]) -> None:
    """Remove the nodes of `makers` that nothing reads any longer."""
    graph = proto.graph
    fixed = set(makers)
    while True:
        read = {*count_reads(proto), *outer_scope_reads(graph), *(item.name for item in graph.output)}
        before = len(graph.node)
        retain_items(graph.node, lambda node: not fixed.issuperset(node.output) or not read.isdisjoint(node.output))  # noqa: B023
        if len(graph.node) == before:
            return
