"""Specs and signatures: what fits passes, what does not is named with what to do."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from trt_engine.errors import FeedError, UsageError
from trt_engine.tensors import DTYPES, Signature, TensorSpec, dtype, format_shape, suggest

IMAGES = TensorSpec("images", "float32", (-1, 3, 8, 8), ("batch", None, None, None))
NO_DTYPE = "`numpy.asarray(value, dtype=...)`: dtypes are not inferred"
MASK = TensorSpec("mask", "bool", (-1, 4), ("batch", None))
BOTH = Signature((IMAGES, MASK), (TensorSpec("scores", "float32", (-1, 10)),))


def feeds(batch: int = 2) -> dict[str, np.ndarray]:
    return {"images": np.zeros((batch, 3, 8, 8), np.float32), "mask": np.zeros((batch, 4), bool)}


def test_what_fits_the_signature_passes_at_any_batch() -> None:
    for batch in (0, 1, 7):
        given = feeds(batch)
        BOTH.check(given)
        with pytest.raises(FeedError):  # the same feeds, less one: it is the check that lets them pass
            BOTH.check(dict(list(given.items())[1:]))


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        (
            {"images": np.zeros((2, 3, 8, 8))},
            "input `images` is float64, expected float32",
            'convert it: `.astype("float32")`',
        ),
        (
            {"images": np.zeros((3, 8, 8), np.float32)},
            "input `images` has 3 dimensions (3x8x8), expected 4 (batchx3x8x8)",
            "a single image needs a batch dimension: `x[None]`",
        ),
        ({"images": np.float32(1)}, "input `images` has 0 dimensions (scalar), expected 4 (batchx3x8x8)", None),
        (
            {"images": np.zeros((2, 3, 8, 9), np.float32)},
            "input `images` is 2x3x8x9, expected batchx3x8x8: dimension 3 is fixed at 8",
            "resize or pad dimension 3 to 8",
        ),
        ({"images": [1]}, "input `images` is a list, expected an array", NO_DTYPE),
        ({"imagse": np.zeros(1)}, "unknown input `imagse`", "did you mean `images`?"),
        (
            {"mask": np.zeros((3, 4), bool)},
            "`batch` is 2 in input `images` and 3 in input `mask`",
            "equal symbols are equal sizes: feed the same batch to every input",
        ),
    ],
)
def test_a_feed_that_does_not_fit_is_refused_with_what_was_expected(
    change: dict[str, object], message: str, hint: str | None
) -> None:
    with pytest.raises(FeedError) as caught:
        BOTH.check(feeds() | change)
    assert (caught.value.message, caught.value.hint) == (message, hint)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("kind", ["<U3", "S3", object])
def test_strings_come_in_every_numpy_form(kind: object) -> None:
    words = np.array(["a", "b"], dtype=kind)  # type: ignore[call-overload]
    TensorSpec("text", "string", (-1,)).check(words)
    with pytest.raises(FeedError):
        TensorSpec("text", "float32", (-1,)).check(words)


def test_every_element_type_is_found_by_name_and_by_onnx_number() -> None:
    import onnx

    for name, item in DTYPES.items():
        assert dtype(name) is item is dtype(item.onnx)
        wanted = {"float8_e4m3fn": "FLOAT8E4M3FN", "float32": "FLOAT", "float64": "DOUBLE"}.get(name, name.upper())
        if not name.startswith(("float8", "float4")) or name in ("float8_e4m3fn",):
            assert onnx.TensorProto.DataType.Value(wanted) == item.onnx


def test_element_types_have_the_bits_numpy_and_ml_dtypes_give_them() -> None:
    for name, item in DTYPES.items():
        kind = getattr(ml_dtypes, name, None) or (np.dtype(name) if name != "string" else None)
        if kind is None:
            continue
        packed = item.bits < 8
        assert item.nbytes((8,)) == (item.bits if packed else 8 * np.dtype(kind).itemsize)
    assert dtype("int4").nbytes((3, 3)) == 5  # two to a byte, the last half empty


@pytest.mark.parametrize("value", ["float33", 0, 99])
def test_an_unknown_element_type_lists_the_known_ones(value: str | int) -> None:
    with pytest.raises(UsageError, match=f"unknown element type `{value}`") as caught:
        dtype(value)
    assert "float32" in (caught.value.hint or "")


def test_a_spec_reads_as_a_person_writes_it() -> None:
    assert str(IMAGES) == "images:batchx3x8x8 float32"
    assert TensorSpec("x", "float32", (-1, -1)).format_symbolic() == "?x?"
    assert TensorSpec("x", "float32", ()).format_symbolic() == format_shape(()) == "scalar"
    assert IMAGES.dynamic == (0,)


def test_the_batch_can_move_only_where_every_first_dimension_is_dynamic() -> None:
    assert BOTH.batch_axis
    assert not Signature((IMAGES, TensorSpec("scale", "float32", (1,))), ()).batch_axis
    assert not Signature((TensorSpec("scale", "float32", ()),), ()).batch_axis
    assert not Signature((), ()).batch_axis


def test_the_nearest_name_is_offered_or_all_of_them() -> None:
    assert suggest("imagse", ["images", "mask"]) == "did you mean `images`?"
    assert suggest("zzz", ["images", "mask"]) == "expected one of `images`, `mask`"
    assert suggest("zzz", []) == "there are none"
