"""An ONNX file as a source, with ONNX Runtime as its reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort

from trt_engine.backends.onnxruntime import session
from trt_engine.conversion.axes import Axis
from trt_engine.conversion.examples import Example, array_of
from trt_engine.conversion.exported import Array, Exported, Reference
from trt_engine.equivalence.random_inputs import runnable_signature
from trt_engine.errors import FeedError, ModelError, TrtEngineError, UsageError
from trt_engine.graph.load import check_onnxruntime, check_operators, open_model
from trt_engine.model import Model
from trt_engine.runtime.feeds import numpy_dtype
from trt_engine.tensors import Shape, Signature, format_shape, suggest


def wrap_onnx_model(path: Path, given: Sequence[Example]) -> tuple[Exported, str | None]:
    """The file as its own export, and the reason if it cannot be compared (TensorRT's operators, dynamic sizes)."""
    model = open_model(path)
    check_operators(model.graph, path)
    examples = _examples(model.signature, given)
    symbols = {
        spec.name: {at: spec.symbols[at] or f"{spec.name}_{at}" for at in spec.dynamic}
        for spec in model.signature.inputs
        if spec.dynamic
    }
    if isinstance(examples, str):
        return Exported(path, _cannot_run, "onnx", {}, symbols), examples
    switches = _switches(model, examples)
    example = {name: array_of(name, item, item.shape) for name, item in (examples | _switched(switches, 0)).items()}

    def feeds(shapes: Mapping[str, Shape], seed: int) -> dict[str, Array]:
        same = all(tuple(shapes[name]) == item.shape for name, item in examples.items())  # each branch runs at these
        items = examples | _switched(switches, seed if same else 0)
        return {name: array_of(name, item, tuple(shapes[name]), seed) for name, item in items.items()}

    limits = {symbol: Axis(symbol) for positions in symbols.values() for symbol in positions.values()}
    made = Exported(path, _cannot_run, "onnx", example, symbols, limits=limits, feeds=feeds)
    try:
        check_onnxruntime(model)
        return replace(made, reference=_reference(model)), None
    except TrtEngineError as error:
        return made, error.message


def _switches(model: Model, examples: Mapping[str, Example]) -> dict[str, list[Example]]:
    """Examples of each value that a switch runs with, for those without a given value."""
    shapes = {name: item.shape for name, item in examples.items()}
    opened = {name for name, item in examples.items() if item.array is None and item.low is None and item.high is None}
    if not any(spec.choices and spec.name in opened for spec in model.signature.inputs):
        return {}
    return {
        spec.name: [
            replace(item, array=None if value is None else np.full(item.shape, value, numpy_dtype(spec.dtype)))
            for value in spec.choices
        ]
        for spec in runnable_signature(model.path, model.signature, shapes).inputs
        if spec.choices and spec.name in opened and (item := examples[spec.name])
    }


def _switched(switches: Mapping[str, Sequence[Example]], number: int) -> dict[str, Example]:
    return {name: items[number % len(items)] for name, items in switches.items()}


def _cannot_run(feeds: Mapping[str, Array]) -> dict[str, Array]:
    raise ModelError("the model cannot be run here", hint="name the sizes of its inputs with `--input`")


def _examples(signature: Signature, given: Sequence[Example]) -> dict[str, Example] | str:
    names = [spec.name for spec in signature.inputs]
    by_name = {}
    for at, item in enumerate(given):
        name = item.name or (names[at] if at < len(names) else None)
        if name not in names:
            raise UsageError(f"no input `{name}`", hint=suggest(str(name), names))
        by_name[name] = item
    found = {}
    for spec in signature.inputs:
        if spec.name not in by_name:
            opened = [at for at in spec.dynamic if at > 0]
            if opened:
                return f"the sizes of `{spec.name}` ({spec.format_symbolic()}) are open; name them with `--input`"
            found[spec.name] = Example(spec.name, tuple(2 if size < 0 else size for size in spec.shape), spec.dtype)
        else:
            item = by_name[spec.name]
            if len(item.shape) != len(spec.shape) or any(
                mine >= 0 and mine != size for mine, size in zip(spec.shape, item.shape, strict=True)
            ):
                raise UsageError(
                    f"the example of `{spec.name}` is {format_shape(item.shape)}, and the model takes "
                    f"{spec.format_symbolic()}",
                    hint=f"`--input {spec.name}:{format_shape(tuple(2 if size < 0 else size for size in spec.shape))}`",
                )
            if item.dtype != spec.dtype and (item.array is not None or item.dtype != "float32"):
                raise FeedError(
                    f"the example of `{spec.name}` is {item.dtype}, and the model takes {spec.dtype}",
                    hint="leave the type to the model"
                    if item.array is None
                    else f"save it as {spec.dtype}: `.astype(numpy.{spec.dtype})`",
                )
            found[spec.name] = replace(
                item, name=spec.name, dtype=spec.dtype
            )  # only the shape is given: use the model's dtype
    return found


def _reference(model: Model) -> Reference:
    loaded: list[ort.InferenceSession] = []
    names = [spec.name for spec in model.signature.outputs]

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        try:
            if not loaded:
                loaded.append(session.create_plain(model.path))
            results = loaded[0].run(names, dict(feeds))
        except session.ERRORS as error:
            raise ModelError(
                f"the model itself does not run: {session.error_summary(error)}", hint="`trt-engine lint` looks into it"
            ) from error
        return {name: np.asarray(value) for name, value in zip(names, results, strict=True)}

    return run
