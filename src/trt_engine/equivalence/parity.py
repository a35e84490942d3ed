"""An engine, or a rewritten model, against a model run in plain ONNX Runtime on the same input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, ValueInfoProto

from trt_engine.backends.onnxruntime import session
from trt_engine.backends.onnxruntime.options import OnnxRuntimeOptions
from trt_engine.backends.onnxruntime.run import reference
from trt_engine.config import Profile
from trt_engine.engine import OutputError, Parity
from trt_engine.equivalence.random_inputs import random_inputs
from trt_engine.equivalence.sorted_outputs import compare_outputs, sorted_outputs
from trt_engine.equivalence.tolerance import Tolerance
from trt_engine.graph.load import read_proto
from trt_engine.graph.names import unique_names
from trt_engine.tensors import Shape, Signature, Tensors, format_shape

__all__ = ["REFERENCE", "measure_parity", "open_exposing", "parity_feeds", "perturbed", "small_shapes"]

REFERENCE = "onnxruntime on the CPU, no graph optimisation"


def parity_feeds(
    model: Path,
    signature: Signature,
    profile: Profile,
    values: Mapping[str, Sequence[int]] | None = None,
    *,
    engine: Path | None = None,
    seed: int = 0,
) -> tuple[Tensors, str]:
    """One seeded input of a small batch, and how it was made.

    `values` are the usual ones of inputs that hold sizes: they fit the profile's usual shapes, which are taken whole then.
    Inputs that could end a process are tried in another first, with the `engine` too where it is a graph.
    """
    shapes = {name: span.opt for name, span in profile.ranges.items()} if values else small_shapes(signature, profile)
    described = ",".join(f"{name}:{format_shape(shape)}" for name, shape in shapes.items())
    described += "".join(f", `{name}` is {format_shape(tuple(given))}" for name, given in (values or {}).items())
    return random_inputs(
        model, signature, shapes, seed, values, engine=engine
    ), f"seeded random, seed {seed}, {described}"


def measure_parity(
    model: Path,
    signature: Signature,
    run: Callable[[Tensors], Mapping[str, Any]],
    feeds: Tensors,
    described: str,
    tolerance: Tolerance,
) -> Parity:
    """How far `run` is from plain ONNX Runtime on `feeds`.

    What plain ONNX Runtime raises for a model it does not run passes through; nothing is judged then.
    """
    plain = reference(model, signature)
    expected, ranked = plain.run(feeds), sorted_outputs(read_proto(model))
    errors = compare_outputs(run(feeds), expected, ranked, tolerance)
    sensitivity: dict[str, OutputError] = {}
    if not tolerance.chosen and not all(tolerance.accepts(error) for error in errors.values()):
        moved = plain.run(perturbed(feeds, tolerance.roundoff))
        sensitivity = compare_outputs(moved, expected, ranked, tolerance)
    passed = all(tolerance.objection(error, sensitivity.get(name)) is None for name, error in errors.items())
    return Parity(
        reference=REFERENCE,
        inputs=described,
        tolerance=tolerance.limit,
        passed=passed and errors.keys() == expected.keys(),
        outputs=errors,
        judged="rms_rel" if tolerance.rms else "max_rel",
        sensitivity=sensitivity,
    )


def perturbed(feeds: Tensors, roundoff: float, seed: int = 0) -> dict[str, Any]:
    """The same input with every real number changed by up to `roundoff` of itself."""
    rng = np.random.default_rng(seed)
    arrays = {name: np.asarray(array) for name, array in feeds.items()}
    return {
        name: (array * (1 + rng.uniform(-roundoff, roundoff, array.shape))).astype(array.dtype)
        if array.dtype.kind == "f"
        else array
        for name, array in arrays.items()
    }


def small_shapes(signature: Signature, profile: Profile) -> dict[str, Shape]:
    """The profile's usual shapes with the smallest batch above one that it allows, else its smallest."""
    shapes = {}
    for spec in signature.inputs:
        span = profile.ranges[spec.name]
        sizes = list(span.opt)
        if sizes and spec.shape[0] < 0:
            sizes[0] = min(max(2, span.min[0]), span.max[0])
        shapes[spec.name] = tuple(sizes)
    return shapes


def open_exposing(path: Path, names: Sequence[str], level: str = "none") -> ort.InferenceSession:
    """A session that gives these tensors, outputs or not, weights read from where they are."""
    proto: ModelProto = read_proto(path)
    unique_names(proto)
    stated = {item.name for item in proto.graph.output}
    proto.graph.output.extend(ValueInfoProto(name=name) for name in names if name not in stated)
    made = session.session_options(OnnxRuntimeOptions(arena=False), level=level)
    made.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent.resolve()))
    try:
        return ort.InferenceSession(
            proto.SerializeToString(), made, providers=["CPUExecutionProvider"], enable_fallback=0
        )
    except session.ERRORS as error:
        raise session.on_load(error, path) from error
