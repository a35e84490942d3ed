"""An ONNX file as a source, with ONNX Runtime as its reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort

from trt_engine.arrayfiles import Array
from trt_engine.backends.onnxruntime import session
from trt_engine.conversion.axes import Axis
from trt_engine.conversion.examples import Example, array_of, fit_example, match_examples
from trt_engine.conversion.exported import Exported, Reference
from trt_engine.equivalence.random_inputs import runnable_signature
from trt_engine.errors import ModelError, TrtEngineError
from trt_engine.graph.load import check_onnxruntime, check_operators, open_model
from trt_engine.model import Model
from trt_engine.runtime.feeds import numpy_dtype
from trt_engine.tensors import Shape, Signature


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
        made = replace(made, reference=_reference(model))
    except TrtEngineError as error:
        return made, error.message
    unnamed = [spec.name for spec in model.signature.inputs if 0 in spec.dynamic and spec.symbols[0] is None]
    if len(unnamed) > 1 and _move_together(made, unnamed):
        shared = f"{unnamed[0]}_0"
        for name in unnamed:
            symbols[name][0] = shared
        limits = {symbol: Axis(symbol) for positions in symbols.values() for symbol in positions.values()}
        made = replace(made, limits=limits)
    return made, None


def _move_together(exported: Exported, names: Sequence[str]) -> bool:
    """Whether the first axes of these inputs, which have no name, are one size: the model runs where all of them have it,
    and not where one has another."""
    assert exported.feeds is not None
    shapes = {name: array.shape for name, array in exported.example.items()}
    shapes |= {name: (2, *shapes[name][1:]) for name in names}
    try:
        exported.reference(exported.feeds(shapes, 0))
    except ModelError:
        return False
    try:
        exported.reference(exported.feeds(shapes | {names[0]: (3, *shapes[names[0]][1:])}, 0))
    except ModelError:
        return True
    return False


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
    by_name = match_examples([spec.name for spec in signature.inputs], given, "the model")
    found = {}
    for spec in signature.inputs:
        stated = spec.format_symbolic()
        if spec.name in by_name:
            found[spec.name] = fit_example(by_name[spec.name], spec.name, spec.dtype, spec.shape, stated, "the model")
        elif any(at > 0 for at in spec.dynamic):
            return f"the sizes of `{spec.name}` ({stated}) are open; name them with `--input`"
        else:
            found[spec.name] = Example(spec.name, tuple(2 if size < 0 else size for size in spec.shape), spec.dtype)
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
