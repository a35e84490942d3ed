"""TensorRT's layers with their times: what a profiler says by name, joined with what the inspector says by name."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

from trt_engine.plans.layers import LayerInfo, LayerTensor, kinds_of, read_layers
from trt_engine.plans.trtexec_log import LayerTime
from trt_engine.tensors import DTYPES
from trt_engine.traces import Category, LayerRow

__all__ = ["over", "rows"]


def over(runs: Sequence[Sequence[tuple[str, float]]]) -> tuple[LayerTime, ...]:
    """One row for each layer of the runs, in the order of the first; layers that share a name stay apart by their order."""
    samples: dict[tuple[str, int], list[float]] = defaultdict(list)
    for run in runs:
        met: dict[str, int] = defaultdict(int)
        for name, ms in run:
            samples[name, met[name]].append(ms)
            met[name] += 1
    total = sum(sum(times) for times in samples.values())
    return tuple(
        LayerTime(
            name,
            sum(times),
            sum(times) / len(runs),
            statistics.median(times),
            100 * sum(times) / total if total else 0.0,
        )
        for (name, _), times in samples.items()
    )


def rows(
    times: Sequence[LayerTime], layers: Sequence[LayerInfo], *, device: str, at_these_shapes: bool
) -> tuple[LayerRow, ...]:
    """The layers' rows; `at_these_shapes` says that the inspector's sizes are those of the inferences that were timed.

    A layer the inspector does not know has its name and time alone.
    """
    by_name: dict[str, list[int]] = defaultdict(list)
    for place, layer in enumerate(layers):
        by_name[layer.name].append(place)
    kinds = kinds_of(layers)
    whole = sum(time.median_ms for time in times)
    found = []
    for time in times:
        waiting = by_name.get(time.name)
        index: int | None = None
        if waiting:
            index = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        layer = layers[index] if index is not None else read_layers({"Layers": [time.name]})[0]
        outputs = layer.outputs
        sized = at_these_shapes and all(_fixed(tensor) for tensor in outputs)
        found.append(
            LayerRow(
                name=time.name,
                kind=layer.kind,
                category=_hint(layer),
                mean_ms=time.average_ms,
                median_ms=time.median_ms,
                share=time.median_ms / whole if whole else 0.0,
                calls=1.0,
                device=device,
                dtypes=tuple(tensor.dtype for tensor in outputs if tensor.dtype is not None),
                shapes=tuple(tensor.dims or () for tensor in outputs) if sized else (),
                onnx_nodes=layer.onnx_nodes,
                nbytes=_nbytes(layer) if at_these_shapes else None,
                precision=kinds.get(index, "") if index is not None else "",
            )
        )
    return tuple(found)


def _hint(layer: LayerInfo) -> Category:
    """What the inspector alone knows; the rest is told by kind and name."""
    return "reformat" if layer.moves else "matrix" if layer.matrix else "other"


def _fixed(tensor: LayerTensor) -> bool:
    return tensor.dims is not None and all(size >= 0 for size in tensor.dims)


def _nbytes(layer: LayerInfo) -> int | None:
    """Inputs, weights and outputs; None where one of them is not told."""
    if not layer.detailed or not layer.outputs:
        return None
    tensors = (*layer.inputs, *layer.outputs, *layer.constants)
    if any(not _fixed(tensor) or tensor.dtype not in DTYPES for tensor in tensors):
        return None
    total = sum(DTYPES[tensor.dtype or ""].nbytes(tensor.dims or ()) for tensor in tensors)
    held = DTYPES.get(layer.weights or "")
    return total + (math.ceil(layer.weight_count * held.bits / 8) if held is not None else 0)
