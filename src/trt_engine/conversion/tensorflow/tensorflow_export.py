"""Exports an opened TensorFlow source to ONNX through the worker, and cleans its graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from trt_engine.conversion.axes import Axes, symbols_of
from trt_engine.conversion.examples import Example, array_of
from trt_engine.conversion.exported import Array, Exported
from trt_engine.conversion.sources import Source
from trt_engine.conversion.tensorflow.tensorflow_source import BoundSource, TensorFlowOptions, open_source
from trt_engine.graph import walk
from trt_engine.tensors import Shape

NEWEST_OPSET = 18
"""Newest opset supported by tf2onnx 1.17."""


def export_tensorflow(
    source: Source,
    given: Sequence[Example],
    dynamic: Axes | None,
    opset: int,
    folder: Path,
    *,
    options: Mapping[str, Any] | None = None,
    python: str | None = None,
    trust_source: bool = False,
) -> Exported:
    """Write the source as a raw ONNX file in `folder`, with an opset of at most `NEWEST_OPSET`; the worker runs until
    `close`.

    `options` are those of `TensorFlowOptions`.
    """
    assert source.path is not None
    wanted = TensorFlowOptions.parse(options or {})
    wanted = replace(wanted, python=python or wanted.python)
    call = open_source(source.path, source.kind, given, dynamic, wanted, trust_source=trust_source)
    try:
        return export_opened(call, opset, folder)
    except BaseException:
        call.close()
        raise


def export_opened(call: BoundSource, opset: int, folder: Path, *, large_nbytes: int = 1 << 30) -> Exported:
    """Export an opened source; weights above `large_nbytes` go to a side file.

    `ModelError` names operators that tf2onnx cannot convert.
    """
    path = folder / "tf2onnx.onnx"
    shapes = {
        name: [None if at in call.axes.get(name, {}) else size for at, size in enumerate(item.shape)]
        for name, item in call.examples.items()
    }
    stated = call.convert(path, opset, shapes, large_nbytes)
    unused = [f"the input `{name}` is unused and missing in the ONNX file" for name in stated["unused"]]
    symbols = {name: {at: axis.symbol for at, axis in axes.items()} for name, axes in call.axes.items()}
    proto = onnx.load(path, load_external_data=False)
    _clean_graph(proto, call, symbols)
    path.write_bytes(proto.SerializeToString())
    names = [item.name for item in proto.graph.input]
    example = call.example()

    def feeds(there: Mapping[str, Shape], seed: int) -> dict[str, Array]:
        return {name: array_of(name, call.examples[name], tuple(there[name]), seed) for name in names}

    return Exported(
        path,
        call.run,
        "tf2onnx",
        {name: example[name] for name in names},
        {name: symbols[name] for name in names if name in symbols},
        (*call.notes, *unused),
        call.versions,
        call.close,
        limits=symbols_of(call.axes),
        feeds=feeds,
    )


def _clean_graph(proto: onnx.ModelProto, call: BoundSource, symbols: Mapping[str, Mapping[int, str]]) -> None:
    """Restore input order, sizes and requested symbols, and remove tf2onnx's symbols from outputs, in place.

    tf2onnx names every open size (`unk__7`), without relating outputs to inputs.
    """
    for inner in walk.graphs(proto):
        del inner.value_info[:]
        for item in (*inner.input, *inner.output):
            for dim in item.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.Clear()
    graph = proto.graph
    for values, order in ((graph.input, [port.name for port in call.inputs]), (graph.output, list(call.outputs))):
        found = sorted(values, key=lambda item: order.index(item.name))
        del values[:]
        values.extend(found)
    for item in graph.input:
        names = symbols.get(item.name, {})
        sizes = [names.get(at, size) for at, size in enumerate(call.examples[item.name].shape)]
        item.CopyFrom(onnx.helper.make_tensor_value_info(item.name, item.type.tensor_type.elem_type, sizes))
    for item in graph.output:
        for at, dim in enumerate(item.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value"):
                dim.dim_param = f"{item.name}_{at}"
