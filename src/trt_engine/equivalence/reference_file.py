"""Reference inputs and outputs beside an engine that cannot run where it is built: what `validate` needs on its GPU.

One `.npz`: `input/NAME` and `output/NAME` as plain ONNX Runtime takes and gives them, `given/NAME` of the model before it
was cast or quantised, and `macs/nodes` with `macs/counts`, the multiply-adds of each ONNX node.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from trt_engine.arrayfiles import Array, ArrayFileError, open_arrays
from trt_engine.errors import EngineError
from trt_engine.runtime.feeds import as_spec, write_outputs
from trt_engine.tensors import Signature, TensorSpec

MAX_REFERENCE_BYTES = 256 << 20
"""Bytes of inputs and outputs: what is larger is not kept."""


@dataclass(frozen=True, slots=True)
class ReferenceData:
    """Reference tensors by name."""

    inputs: dict[str, Array]
    outputs: dict[str, Array]
    source_outputs: dict[str, Array] = field(default_factory=dict)
    """Outputs of the given model, where a cast or quantised copy of it was built."""
    macs: dict[str, int] = field(default_factory=dict)
    """Multiply-adds by ONNX node."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for part in (self.inputs, self.outputs, self.source_outputs) for array in part.values())


def write_reference(path: Path, reference: ReferenceData) -> Path:
    """The file, whole."""
    arrays: dict[str, Any] = {f"input/{name}": array for name, array in reference.inputs.items()}
    arrays |= {f"output/{name}": array for name, array in reference.outputs.items()}
    arrays |= {f"given/{name}": array for name, array in reference.source_outputs.items()}
    if reference.macs:
        arrays["macs/nodes"] = np.array(list(reference.macs), dtype=np.str_)
        arrays["macs/counts"] = np.array(list(reference.macs.values()), dtype=np.int64)
    return write_outputs(path, arrays)


def read_reference(path: Path, signature: Signature) -> ReferenceData:
    """Contents of a reference file; `EngineError` for a damaged one, or for tensors that do not match the signature."""
    parts: dict[str, dict[str, Array]] = {"input": {}, "output": {}, "given": {}, "macs": {}}
    try:
        with open_arrays(path) as file:
            for name, array in file.read_all().items():
                part, _, tensor = name.partition("/")
                if part not in parts:
                    raise ArrayFileError(f"it holds `{name}`", "build the engine again")
                parts[part][tensor] = array
    except ArrayFileError as error:
        raise EngineError(f"`{path}` cannot be read: {error}", hint="build the engine again") from error
    inputs = {spec.name: spec for spec in signature.inputs}
    outputs = {spec.name: spec for spec in signature.outputs}
    if parts["input"].keys() != inputs.keys() or parts["output"].keys() != outputs.keys():
        raise EngineError(f"`{path}` holds other inputs or outputs than the engine has", hint="build the engine again")
    made = ReferenceData(
        {name: as_spec(array, inputs[name]) for name, array in parts["input"].items()},
        {name: as_spec(array, outputs[name]) for name, array in parts["output"].items()},
        {name: as_spec(array, outputs[name]) for name, array in parts["given"].items() if name in outputs},
    )
    nodes, counts = (parts["macs"].get(name, np.array([], dtype)) for name, dtype in (("nodes", "U"), ("counts", "i8")))
    expected = ((made.inputs, inputs), (made.outputs, outputs), (made.source_outputs, outputs))
    odd = [name for arrays, specs in expected for name, array in arrays.items() if not _accepts(array, specs[name])]
    if odd or nodes.shape != counts.shape or counts.dtype.kind not in "iu" or counts.ndim != 1:
        raise EngineError(
            f"`{path}` cannot be read: `{odd[0] if odd else 'macs'}` is not what the engine's passport records",
            hint="build the engine again",
        )
    return replace(made, macs=dict(zip(map(str, nodes), map(int, counts), strict=True)))


def _accepts(array: Array, spec: TensorSpec) -> bool:
    """Whether the array can be a value of the tensor. Its width may differ: a library may narrow a type."""
    alike = len(array.shape) == len(spec.shape) and all(
        size in (-1, got) for size, got in zip(spec.shape, array.shape, strict=True)
    )
    return alike and (array.dtype.kind in "OUS") == (spec.dtype == "string")
