"""The file of reference inputs and outputs: what is read is what was written, in every type; its limits survive JSON."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import pytest

from trt_engine.equivalence.output_error import NOT_COMPARABLE, compare_output
from trt_engine.equivalence.reference_file import ReferenceData, read_reference, write_reference
from trt_engine.equivalence.tolerance import TOLERANCES, Tolerance, select_tolerance
from trt_engine.records.parity import OutputError, ParityLimits, clip_infinite
from trt_engine.tensors import Signature, TensorSpec

KINDS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "int4", "int64", "uint8", "bool", "string")


def values(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    if kind == "string":
        return np.array([f"text {index}" for index in range(int(np.prod(shape)))], object).reshape(shape)
    dtype = getattr(ml_dtypes, kind, None) or np.dtype(kind)
    return (np.arange(int(np.prod(shape))) % 3).astype(dtype).reshape(shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["x", "file", "model/layer.0/x:0", "größe"])
def test_what_is_read_is_what_was_written(kind: str, name: str, tmp_path: Path) -> None:
    specs = tuple(TensorSpec(f"{name}{at}", kind, shape) for at, shape in enumerate(((-1, 3), (), (0, 2))))
    arrays = {spec.name: values(kind, shape) for spec, shape in zip(specs, ((2, 3), (), (0, 2)), strict=True)}
    macs = {"Conv_0": 1 << 40, "a/b": 3}
    path = write_reference(tmp_path / "x.npz", ReferenceData(arrays, arrays, arrays, macs))
    read = read_reference(path, Signature(specs, specs))
    assert read.macs == macs and list(read.inputs) == list(arrays)
    for part in (read.inputs, read.outputs, read.source_outputs):
        for name, array in arrays.items():
            assert part[name].dtype == array.dtype and part[name].shape == array.shape
            assert part[name].tolist() == array.tolist()


@pytest.mark.parametrize("form", TOLERANCES)
@pytest.mark.parametrize("chosen", [None, 0.25])
def test_limits_in_a_passport_judge_as_the_tolerance_they_were_made_of(form: str, chosen: float | None) -> None:
    tolerance = select_tolerance(form, explicit=chosen)
    kept = msgspec.json.decode(msgspec.json.encode(tolerance.to_limits(form)), type=ParityLimits)
    assert Tolerance.from_limits(kept) == tolerance and kept.rounding == form


def test_differences_without_an_end_are_kept_as_huge_ones_and_judged_alike() -> None:
    odd = {"shape": NOT_COMPARABLE, "nan": compare_output(np.array([[np.nan, 1.0]]), np.array([[1.0, 1.0]]))}
    kept = msgspec.json.decode(msgspec.json.encode(clip_infinite(odd)), type=dict[str, OutputError])
    tolerance = TOLERANCES["fp32"]
    moved = OutputError(0.1, 0.1, 0.1, 1.0, 0.1, 0.4)
    for name, error in odd.items():
        assert kept[name].max_rel > 1e300 and tolerance.violation(kept[name]) is not None
        assert tolerance.violation(moved, error) == tolerance.violation(moved, kept[name]) is None
