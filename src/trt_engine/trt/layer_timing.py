"""Layer times of TensorRT: profiler times joined with inspector details by layer name."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

from trt_engine.records.profile import LayerRow
from trt_engine.tensors import DTYPES
from trt_engine.trt.layers import LayerInfo, LayerTensor, compute_dtypes, read_layers
from trt_engine.trt.trtexec_log import LayerTime


def merge_runs(runs: Sequence[Sequence[tuple[str, float]]]) -> tuple[LayerTime, ...]:
    """One row per layer of the runs, in the order of the first; layers that share a name are separated by order."""
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


def layer_rows(
    times: Sequence[LayerTime], layers: Sequence[LayerInfo], *, device: str, same_shapes: bool
) -> tuple[LayerRow, ...]:
    """One row per layer; `same_shapes` is true when the inspector used the shapes of the timed inferences.

    A layer unknown to the inspector has its name and time alone.
    """
    by_name: dict[str, list[int]] = defaultdict(list)
    for place, layer in enumerate(layers):
        by_name[layer.name].append(place)
    kinds = compute_dtypes(layers)
    whole = sum(time.median_ms for time in times)
    found = []
    for time in times:
        waiting = by_name.get(time.name)
        index: int | None = None
        if waiting:
            index = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        layer = layers[index] if index is not None else read_layers({"Layers": [time.name]})[0]
        outputs = layer.outputs
        sized = same_shapes and all(_is_static(tensor) for tensor in outputs)
        found.append(
            LayerRow(
                name=time.name,
                kind=layer.kind,
                # what only the inspector knows; other categories follow from kind and name
                category="reformat" if layer.is_data_movement else "matrix" if layer.is_matmul else "other",
                mean_ms=time.average_ms,
                median_ms=time.median_ms,
                share=time.median_ms / whole if whole else 0.0,
                calls=1.0,
                device=device,
                dtypes=tuple(tensor.dtype for tensor in outputs if tensor.dtype is not None),
                shapes=tuple(tensor.dims or () for tensor in outputs) if sized else (),
                onnx_nodes=layer.onnx_nodes,
                nbytes=_layer_bytes(layer) if same_shapes else None,
                precision=kinds.get(index, "") if index is not None else "",
            )
        )
    return tuple(found)


def _is_static(tensor: LayerTensor) -> bool:
    return tensor.dims is not None and all(size >= 0 for size in tensor.dims)


def _layer_bytes(layer: LayerInfo) -> int | None:
    """Bytes of inputs, weights and outputs; None if one of them is unknown."""
    if not layer.is_detailed or not layer.outputs:
        return None
    tensors = (*layer.inputs, *layer.outputs, *layer.constants)
    if any(not _is_static(tensor) or tensor.dtype not in DTYPES for tensor in tensors):
        return None
    total = sum(DTYPES[tensor.dtype or ""].nbytes(tensor.dims or ()) for tensor in tensors)
    held = DTYPES.get(layer.weights or "")
    return total + (math.ceil(layer.weight_count * held.bits / 8) if held is not None else 0)
