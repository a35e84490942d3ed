"""Formats hold bit for bit what ONNX's reference evaluator and ml_dtypes say."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from trt_engine.errors import ShapeError, UsageError
from trt_engine.graph.edit_graph import pack, unpack
from trt_engine.precision import formats

E4M3, E2M1 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float4_e2m1fn)
ONNX = {"int8": TensorProto.INT8, "fp8": TensorProto.FLOAT8E4M3FN, "int4": TensorProto.INT4}


def bits(array: Any) -> Any:
    """The stored bits, so that -0 and 0 differ and NaN equals itself."""
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def reference(op: str, feeds: dict[str, Any], opset: int, out: int, **attributes: Any) -> Any:
    """One QuantizeLinear or DequantizeLinear in ONNX's reference evaluator."""
    node = helper.make_node(op, list(feeds), ["y"], **attributes)
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("y", out, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return ReferenceEvaluator(model).run(None, feeds)[0]


def weights(shape: tuple[int, ...], seed: int = 0, spread: float = 1.0) -> Any:
    return (np.random.default_rng(seed).standard_t(4, size=shape) * spread).astype(np.float32)


# ------------------------------------------------------------------------------------------------ against ONNX


@pytest.mark.parametrize("opset", range(21, 26))
@pytest.mark.parametrize(
    ("name", "axis", "block"),
    [
        ("int8", None, None),
        ("int8", 0, None),
        ("int8", 1, None),
        ("fp8", None, None),
        ("fp8", 0, None),
        ("fp8", -1, None),
        ("int4", 0, 16),
        ("int4", 1, 32),
        ("int4", -1, 8),
    ],
)
def test_values_and_their_meaning_equal_onnx_reference(
    name: str, axis: int | None, block: int | None, opset: int
) -> None:
    data = weights((32, 64), seed=opset)
    made = formats.quantize(data, name, axis=axis, block=block)
    attributes = {"axis": axis} if axis is not None else {}
    attributes |= {"block_size": block} if block else {}
    expected = reference(
        "QuantizeLinear", {"x": data, "s": made.scales}, opset, ONNX[name], output_dtype=ONNX[name], **attributes
    )
    assert expected.dtype == made.values.dtype
    np.testing.assert_array_equal(bits(made.values), bits(expected))
    back = reference("DequantizeLinear", {"x": made.values, "s": made.scales}, opset, TensorProto.FLOAT, **attributes)
    np.testing.assert_array_equal(bits(made.dequantize()), bits(back))


# ------------------------------------------------------------------------------------------------ every value


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_every_value_of_an_eight_bit_type_comes_back_as_itself(name: str) -> None:
    form = formats.FORMATS[name]
    every = np.arange(256, dtype=np.uint8).view(form.numpy)
    numbers = every.astype(np.float32)
    held = np.isfinite(numbers)
    made = formats.quantize(numbers[held], name, amax=form.largest)  # a scale of exactly 1
    assert made.scales == 1
    np.testing.assert_array_equal(bits(made.values), bits(every[held]))


@pytest.mark.parametrize(("name", "kind"), [("fp8", E4M3), ("nvfp4", E2M1)])
def test_halves_go_to_the_even_neighbour_and_all_between_to_the_nearest(name: str, kind: Any) -> None:
    codes = np.arange(127 if kind is E4M3 else 8, dtype=np.uint8)
    grid = codes.view(kind).astype(np.float32)
    middle = (grid[:-1] + grid[1:]) / 2

    def nearest(numbers: Any) -> Any:
        rows = np.zeros((len(numbers), 16), np.float32)
        rows[:, 0], rows[:, 1] = numbers, formats.FORMATS[name].largest  # so that every block's scale is 1
        return bits(formats.quantize(rows, name, amax={"fp8": 448, "nvfp4": 6 * 448}[name]).values)[:, 0]

    even = np.where(codes[:-1] % 2 == 0, codes[:-1], codes[1:])
    np.testing.assert_array_equal(nearest(middle), even)
    np.testing.assert_array_equal(nearest(np.nextafter(middle, np.float32(0))), codes[:-1])
    np.testing.assert_array_equal(nearest(np.nextafter(middle, np.float32(np.inf))), codes[1:])


@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=2, max_side=40), elements=st.floats(width=32)))
def test_casts_equal_numpy_and_ml_dtypes_on_any_floats(array: Any) -> None:
    for name in ("fp16", "bf16"):
        with np.errstate(over="ignore"):
            expected = array.astype(formats.FORMATS[name].numpy)
        np.testing.assert_array_equal(bits(formats.quantize(array, name).values), bits(expected))


# ------------------------------------------------------------------------------------------------ ends of the range


@pytest.mark.parametrize(("name", "most"), [("int8", 127), ("fp8", 448), ("nvfp4", 6)])
def test_beyond_a_given_range_values_saturate_and_infinities_too(name: str, most: float) -> None:
    data = np.zeros(16, np.float32)
    data[:4] = [np.inf, -np.inf, 3e38, -3e38]
    values = formats.quantize(data, name, amax=1.0).values.astype(np.float32)
    low = -128 if name == "int8" else -most
    assert values[:4].tolist() == [most, low, most, low]


def test_mxfp8_never_saturates_and_never_wastes_a_power_of_two() -> None:
    data = weights((64, 64), spread=1e4)
    made = formats.quantize(data, "mxfp8")
    largest = np.abs(made.values.astype(np.float32)).reshape(64, 2, 32).max(axis=-1)
    assert (largest <= 448).all() and (largest >= 224).all()
    exact = formats.quantize(np.full(32, 448.0 * 2**5, np.float32), "mxfp8")
    assert exact.scales.astype(np.float32).tolist() == [32]
    above = formats.quantize(np.full(32, np.nextafter(np.float32(448.0 * 2**5), np.float32(np.inf))), "mxfp8")
    assert above.scales.astype(np.float32).tolist() == [64]


@pytest.mark.parametrize("name", ["int8", "fp8", "int4", "nvfp4", "mxfp8"])
def test_a_group_of_zeros_has_the_scale_one_and_stays_zero(name: str) -> None:
    form = formats.FORMATS[name]
    data = weights((2, 128))
    data[0] = 0
    made = formats.quantize(data, name, axis=0 if form.granularity != "block" else 1)
    assert (made.scales.astype(np.float32)[0] == 1).all()
    assert not made.dequantize()[0].any()
    nothing = formats.quantize(np.zeros((2, 128), np.float32), name)
    assert (nothing.effective_scales() == 1).all() and not nothing.dequantize().any()


@pytest.mark.parametrize("name", [name for name, form in formats.FORMATS.items() if form.granularity != "cast"])
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-30, 1e-6, 1.0, 1e6, 1e30, 3e38])
def test_scales_are_positive_and_finite_for_the_smallest_and_the_largest_numbers(name: str, size: float) -> None:
    data = (np.linspace(-1, 1, 256) * size).astype(np.float32).reshape(2, 128)
    data[1] *= np.float32(1e-5)
    made = formats.quantize(data, name)
    scales = made.effective_scales()
    assert np.isfinite(scales).all() and (scales > 0).all()
    back = made.dequantize()
    assert np.isfinite(back).all()
    if 1e-30 <= size <= 1e30:
        assert np.abs(back[0] - data[0]).max() <= 0.2 * size


def test_a_block_far_below_the_tensors_largest_keeps_the_least_block_scale() -> None:
    data = np.zeros(32, np.float32)
    data[0], data[16:] = 1.0, 1e-7
    made = formats.quantize(data, "nvfp4")
    assert made.scales.astype(np.float32).tolist() == [448, 2.0**-9]


@pytest.mark.parametrize("name", ["int8", "int4", "nvfp4", "fp8", "mxfp8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_gives_no_range(name: str, bad: float) -> None:
    data = np.ones(128, np.float32)
    data[3] = bad
    with pytest.raises(UsageError, match=r"1 of 128 values are not finite|1 of 128 values are NaN"):
        formats.quantize(data, name)
    with pytest.raises(UsageError, match="1 of 128"):
        formats.search_clip_range(data, name)


def test_nan_stays_nan_in_fp8_and_is_refused_where_it_cannot_be_held() -> None:
    data = np.array([np.nan, 1, 2, 3] * 4, np.float32)
    assert np.isnan(formats.quantize(data, "fp8", amax=448).dequantize()).tolist() == [True, False, False, False] * 4
    for name in ("int8", "nvfp4"):
        with pytest.raises(UsageError, match="4 of 16 values are NaN"):
            formats.quantize(data, name, amax=448)


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("name", "shape", "axis", "block", "found"),
    [
        ("nvfp4", (4, 20), 1, None, "axis 1 of 4x20 has 20 elements, which blocks of 16 do not divide"),
        ("mxfp8", (48, 4), 0, None, "axis 0 of 48x4 has 48 elements, which blocks of 32 do not divide"),
        ("int4", (4, 100), -1, None, "axis 1 of 4x100 has 100 elements, which blocks of 128 do not divide"),
        ("int8", (4, 4), 2, None, "axis 2 is out of range for 4x4"),
        ("fp8", (), None, None, "a scalar cannot be quantised to `fp8`"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(
    name: str, shape: tuple[int, ...], axis: int | None, block: int | None, found: str
) -> None:
    with pytest.raises(ShapeError) as caught:
        formats.quantize(np.ones(shape, np.float32), name, axis=axis, block=block)
    assert caught.value.message == found and caught.value.hint


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("nvfp4", {"block": 32}),
        ("int4", {"block": 0}),
        ("int8", {"block": 16}),
        ("int4", {"amax": 1.0}),
        ("mxfp8", {"amax": 1.0}),
        ("fp16", {"amax": 1.0}),
        ("int8", {"amax": float("nan")}),
        ("int8", {"amax": -1.0}),
        ("int8", {"scale_dtype": "int8"}),
        ("mxfp8", {"scale_dtype": "float16"}),
        ("int9", {}),
    ],
)
def test_settings_a_format_does_not_have_are_refused(name: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        formats.quantize(np.ones((2, 128), np.float32), name, **wrong)
    assert caught.value.hint


def test_a_range_for_each_channel_must_be_one_for_each() -> None:
    data = weights((4, 8))
    made = formats.quantize(data, "int8", axis=0, amax=[1, 2, 3, 4])
    np.testing.assert_array_equal(made.scales, np.array([1, 2, 3, 4], np.float32) / np.float32(127))
    with pytest.raises(ShapeError, match="the range has the shape 3, expected 4"):
        formats.quantize(data, "int8", axis=0, amax=[1, 2, 3])


# ------------------------------------------------------------------------------------------------ bytes


@pytest.mark.parametrize("size", [1, 2, 7, 256])
@pytest.mark.parametrize("kind", ["int4", "float4_e2m1fn", "int8", "float8_e4m3fn"])
def test_packed_bytes_are_onnx_raw_data_and_come_back(kind: str, size: int) -> None:
    number = np.random.default_rng(size).integers(-8, 8, size)
    array = number.astype(np.float32).astype(getattr(ml_dtypes, kind, kind))
    packed = pack(array)
    assert packed.tobytes() == numpy_helper.from_array(array).raw_data
    np.testing.assert_array_equal(bits(unpack(packed, array.shape, kind)), bits(array))
    np.testing.assert_array_equal(bits(unpack(packed.tobytes(), array.shape, kind)), bits(array))


# ------------------------------------------------------------------------------------------------ the search


@pytest.mark.parametrize("name", ["int4", "nvfp4", "mxfp8", "int8", "fp8"])
def test_the_clip_search_is_never_worse_in_any_group_and_better_where_it_matters(name: str) -> None:
    data = weights((128, 256), seed=3)
    axis = -1 if formats.FORMATS[name].granularity == "block" else 0
    plain, searched = formats.quantize(data, name, axis=axis), formats.search_clip_range(data, name, axis=axis)
    width = {"int4": 128, "nvfp4": 16, "mxfp8": 32}.get(name, 256)

    def errors(made: Any) -> Any:
        return np.square(made.dequantize().astype(np.float64) - data).reshape(-1, width).sum(axis=-1)

    assert (errors(searched) <= errors(plain) * (1 + 1e-9)).all()
    if name in ("int4", "nvfp4"):
        assert errors(searched).sum() < 0.97 * errors(plain).sum()


def test_inputs_that_carry_more_keep_their_digits() -> None:
    data = weights((16, 128), seed=5)
    data[:, 0] *= 20  # large weights of an input that carries nothing
    importance = np.ones(128)
    importance[0] = 0
    weighed = formats.search_clip_range(data, "int4", importance=importance)
    plain = formats.search_clip_range(data, "int4")
    rest = np.s_[:, 1:]
    assert (
        np.square(weighed.dequantize()[rest] - data[rest]).sum()
        < np.square(plain.dequantize()[rest] - data[rest]).sum()
    )


@pytest.mark.parametrize("wrong", [np.ones(3), np.full(128, -1.0), np.full(128, np.nan)])
def test_an_importance_that_fits_nothing_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError):
        formats.search_clip_range(weights((16, 128)), "int4", importance=wrong)


# ------------------------------------------------------------------------------------------------ any array


def test_activations_keep_the_range_that_calibration_found() -> None:
    data = weights((4, 64))
    np.testing.assert_array_equal(
        formats.emulate(data, "int8", amax=2.0),
        np.clip(np.rint(data / np.float32(2 / 127)), -128, 127) * np.float32(2 / 127),
    )
    dynamic = formats.quantize(data, "nvfp4", amax=50.0)
    assert dynamic.tensor_scale == np.float32(50 / 2688)
    assert np.abs(dynamic.dequantize() - data).max() < 1.0


# ------------------------------------------------------------------------------------------------ casts, counted


def test_floors_of_each_format_are_what_onnx_schemas_allow() -> None:
    for name, form in formats.FORMATS.items():
        if form.granularity == "cast":
            continue
        kind = (
            "tensor("
            + {"float8_e4m3fn": "float8e4m3fn", "float4_e2m1fn": "float4e2m1"}.get(form.dtype, form.dtype)
            + ")"
        )
        scale = "tensor(" + {"float8_e8m0fnu": "float8e8m0"}.get(form.scale_dtype, "float") + ")"

        assert _takes(form.opset, kind, scale, blocks=form.granularity == "block"), name
        assert not _takes(form.opset - 1, kind, scale, blocks=form.granularity == "block"), name


def _takes(opset: int, kind: str, scale: str, *, blocks: bool) -> bool:
    """Whether DequantizeLinear of that opset takes these types, by channel or by block."""
    schema = onnx.defs.get_schema("DequantizeLinear", opset, "")
    types = {item.type_param_str: item.allowed_type_strs for item in schema.type_constraints}
    values, scales = (types.get(item.type_str, [item.type_str]) for item in schema.inputs[:2])
    return ("block_size" if blocks else "axis") in schema.attributes and kind in values and scale in scales
