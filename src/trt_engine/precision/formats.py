"""Number formats and what they do to values: rounding, scales, blocks, packing, bit for bit as ONNX defines them.

Symmetric throughout, as TensorRT demands: no zero points, scales strictly positive. What is emulated here on a CPU is what
the packed weights and Q/DQ pairs of a graph mean wherever they run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trt_engine.errors import ShapeError, UsageError
from trt_engine.tensors import Shape, closest, dtype, format_shape

__all__ = [
    "FORMATS",
    "Format",
    "Quantized",
    "Rounding",
    "clip_search",
    "dequantize",
    "emulate",
    "format_named",
    "pack",
    "quantize",
    "rounding",
    "unpack",
]

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Format:
    """One way to store numbers, with what it asks of graph, library and GPU."""

    name: str
    dtype: str
    """Of one value, by our name."""
    largest: float
    """Largest magnitude of a value."""
    smallest_normal: float
    """Below this a value loses digits; 0 for integers, whose steps are equal."""
    scale_dtype: str | None
    """Of the scales; None for formats that need none."""
    granularity: Literal["cast", "tensor or channel", "block"]
    opset: int
    """First ONNX opset whose operators take it."""
    compute_capability: str
    """First GPU generation TensorRT uses it on."""
    tensorrt: str
    """First TensorRT that takes it in a strongly typed graph."""
    block: int | None = None
    """Elements under one scale: the usual number, or the only one."""
    block_fixed: bool = False
    two_level: bool = False
    """True when the block scales have a scale of their own, one for the tensor."""
    weights_only: bool = False

    @property
    def bits(self) -> int:
        """Of one value, scales not counted."""
        return dtype(self.dtype).bits

    @property
    def numpy(self) -> np.dtype[Any]:
        """The values' numpy type."""
        return _numpy(self.dtype)

    @property
    def integer(self) -> bool:
        """True when the values are whole numbers."""
        return self.dtype.startswith("int")


# Opsets: the type constraints of Cast, QuantizeLinear and DequantizeLinear in ONNX 1.23. E8M0 scales are in ONNX since 24;
# with TensorRT's own operators (domain `trt`) an MXFP8 graph needs 21 only.
# GPUs: TensorRT's support matrix names Turing (7.5) as the oldest; BF16, FP8, MXFP8 and NVFP4 from Transformer Engine's
# "Datatype and hardware support matrix"; INT4 weights from Model Optimizer's "Support Matrix" (Ampere and later).
# Libraries: BuilderFlag.FP4 came with TensorRT 10.8, DataType.E8M0 with 10.12.
FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        item.name: item
        for item in (
            Format("fp16", "float16", 65504.0, 2.0**-14, None, "cast", 1, "7.5", "10.0"),
            Format("bf16", "bfloat16", 2.0**127 * (2 - 2.0**-7), 2.0**-126, None, "cast", 13, "8.0", "10.0"),
            Format("int8", "int8", 127.0, 0.0, "float32", "tensor or channel", 13, "7.5", "10.0"),
            Format("fp8", "float8_e4m3fn", 448.0, 2.0**-6, "float32", "tensor or channel", 19, "8.9", "10.0"),
            Format("int4", "int4", 7.0, 0.0, "float32", "block", 21, "8.0", "10.0", block=128, weights_only=True),
            Format(
                "nvfp4", "float4_e2m1fn", 6.0, 1.0, "float8_e4m3fn", "block", 23, "10.0", "10.8",
                block=16, block_fixed=True, two_level=True,
            ),
            Format(
                "mxfp8", "float8_e4m3fn", 448.0, 2.0**-6, "float8_e8m0fnu", "block", 24, "10.0", "10.12",
                block=32, block_fixed=True,
            ),
        )
    }
)  # fmt: skip
"""Every format by name. INT8 and INT4 also hold one step below `-largest`; scales made here never need it."""

_E4M3_LARGEST, _E4M3_LEAST = np.float32(448.0), np.float32(2.0**-9)
_TINY = np.finfo(np.float32).tiny


def _numpy(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)


def format_named(name: str | Format) -> Format:
    """The format of that name; `UsageError` naming the nearest one otherwise."""
    if isinstance(name, Format):
        return name
    if name not in FORMATS:
        raise UsageError(f"there is no format `{name}`", hint=closest(name, list(FORMATS)))
    return FORMATS[name]


@dataclass(frozen=True, slots=True)
class Quantized:
    """An array in a format: values, scales, and how the scales lie over the values."""

    format: Format
    values: Array
    """In the format's type and the array's shape."""
    scales: Array | None = None
    """A scalar, one for each channel, or of the array's rank with blocks in place of elements along `axis`."""
    axis: int | None = None
    """Of the channels or the blocks, counted from 0; None when one scale holds for all."""
    block: int | None = None
    second: np.float32 | None = None
    """The scale of the scales, in formats of two levels."""

    def dequantize(self) -> Floats:
        """What the values stand for, in FP32."""
        return dequantize(self)

    def effective_scales(self) -> Floats:
        """The scales in FP32, both levels multiplied."""
        if self.scales is None:
            return np.ones((), np.float32)
        first = self.scales.astype(np.float32)
        return first if self.second is None else first * self.second

    def packed(self) -> npt.NDArray[np.uint8]:
        """The values as they are stored: bytes, two 4-bit values to each, the first one low."""
        return pack(self.values)

    @property
    def nbytes(self) -> int:
        """Stored size, scales included."""
        own = dtype(self.format.dtype).nbytes(self.values.shape)
        scales = self.scales.nbytes if self.scales is not None else 0
        return own + scales + (4 if self.second is not None else 0)


# ------------------------------------------------------------------------------------------------ there and back


def quantize(
    array: Any,
    form: str | Format,
    *,
    axis: int | None = None,
    block: int | None = None,
    amax: Any = None,
    scale_dtype: str | None = None,
) -> Quantized:
    """The array in a format.

    `axis` is that of the channels for INT8 and FP8 (None: one scale for all), that of the blocks for block formats.
    `amax` is a range known beforehand, from calibration: a scalar, one for each channel, or for NVFP4 the tensor's, over
    which the block scales stay the array's own (dynamic quantisation). Beyond it values saturate. Without it the array gives
    the range and must be finite. A range of zero has the scale 1. `scale_dtype` is float32, float16 or bfloat16, for INT8,
    FP8 and INT4.
    """
    form = format_named(form)
    data = _floats(array)
    if form.granularity == "cast":
        _takes_no("amax", amax, form)
        return Quantized(form, _cast(data, form))
    _must_be_numbers(data, form, ranged=amax is not None)
    layout = _Layout.of(data.shape, form, axis, block)
    groups = layout.groups(data)
    largest = _given(amax, layout, form) if amax is not None else None
    if form.two_level:
        tensor = np.float32(largest) if largest is not None else _absmax(groups, None)
        second = _second(np.float32(tensor))
        scales = _block_scales(_finite_absmax(groups), second)
    else:
        second = None
        scales = _scales(largest if largest is not None else _absmax(groups, -1), form, scale_dtype)
    return layout.quantized(form, groups, scales, second)


def dequantize(quantized: Quantized) -> Floats:
    """What the values stand for, in FP32; products as ONNX's DequantizeLinear takes them.

    A value rounded up within the last step below FP32's largest number is infinite here, as it is there.
    """
    values: Floats = quantized.values.astype(np.float32)
    if quantized.scales is None:
        return values
    layout = _Layout(values.shape, quantized.axis, quantized.block)
    scales = layout.scales_in(quantized.effective_scales())
    with np.errstate(over="ignore"):
        return layout.ungroup(layout.groups(values) * (scales if layout.axis is None else scales[..., None]))


def emulate(
    array: Any, form: str | Format, *, axis: int | None = None, block: int | None = None, amax: Any = None
) -> Floats:
    """The array as the format leaves it: quantised and taken back to FP32."""
    return quantize(array, form, axis=axis, block=block, amax=amax).dequantize()


# candidate ranges over a group's own; 1.5 puts the largest FP4 value on 4 instead of 6, where the grid is finer
# (source: "Four Over Six", adaptive block scaling for NVFP4, 2025)
_SHRINK = tuple(np.float32(1 - 0.025 * step) for step in range(21))
_FOUR_OVER_SIX = np.float32(1.5)


def clip_search(
    array: Any,
    form: str | Format,
    *,
    axis: int | None = None,
    block: int | None = None,
    importance: Any = None,
    scale_dtype: str | None = None,
) -> Quantized:
    """`quantize` with the range of each group (tensor, channel, block) chosen for the least squared error.

    The idea is AWQ's weight clipping: a few large values are cut so that the many small ones keep their digits. `importance`
    weighs the errors, broadcast to the array: for a weight the mean square of what each of its inputs carries. Never worse
    than `quantize` by that measure, group by group.
    """
    form = format_named(form)
    if form.granularity == "cast":
        raise UsageError(f"`{form.name}` has no range to search for", hint="`quantize` rounds to it")
    data = _floats(array)
    _must_be_numbers(data, form, ranged=False)
    layout = _Layout.of(data.shape, form, axis, block)
    groups = layout.groups(data)
    weights = layout.groups(np.broadcast_to(_importance(importance, data.shape), data.shape))
    largest = _absmax(groups, -1)
    second = _second(_absmax(groups, None)) if form.two_level else None
    ratios = (*_SHRINK, _FOUR_OVER_SIX) if form.two_level else _SHRINK
    best: Array | None = None
    least = np.full(largest.shape, np.inf)
    for ratio in ratios:
        wanted = largest * ratio
        scales = _block_scales(wanted, second) if second is not None else _scales(wanted, form, scale_dtype)
        factor = _effective(scales, second)[..., None]
        values = _to_values(_over(groups, factor), form).astype(np.float32)
        error = np.sum(weights * np.square(values * factor - groups, dtype=np.float64), axis=-1)
        if best is None:
            best, least = scales, error
            continue
        better = error < least
        best = np.where(better, scales, best)
        least = np.where(better, error, least)
    assert best is not None  # the first ratio always stands
    return layout.quantized(form, groups, best, second)


def _importance(importance: Any, shape: Shape) -> npt.NDArray[np.float64]:
    if importance is None:
        return np.ones((), np.float64)
    weights = np.asarray(importance, np.float64)
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise UsageError("the importance of inputs must be finite and not negative", hint="give mean squares")
    try:
        np.broadcast_to(weights, shape)
    except ValueError as error:
        raise ShapeError(
            f"the importance is {format_shape(weights.shape)}, which does not lie over {format_shape(shape)}",
            hint="one number for each input of the weight, shaped to broadcast: `m[None, :]` or `m[:, None]`",
        ) from error
    return weights


# ------------------------------------------------------------------------------------------------ values


def _floats(array: Any) -> Floats:
    with np.errstate(over="ignore"):
        return np.asarray(array).astype(np.float32, copy=False)


def _over(groups: Floats, scales: Floats) -> Floats:
    """The groups over their scales; what is too large becomes infinite and then saturates."""
    with np.errstate(over="ignore"):
        return np.asarray(groups / scales, np.float32)


def _cast(data: Floats, form: Format) -> Array:
    """Rounded to nearest, ties to even; beyond the largest number infinite, as a Cast node does."""
    with np.errstate(over="ignore", invalid="ignore"):
        return data.astype(form.numpy)


def _to_values(scaled: Floats, form: Format) -> Array:
    """Scaled numbers to the nearest values, ties to even, saturating."""
    if form.integer:
        return np.clip(np.rint(scaled), -form.largest - 1, form.largest).astype(form.numpy)
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        return np.clip(scaled, -form.largest, form.largest).astype(form.numpy)


def _must_be_numbers(data: Floats, form: Format, *, ranged: bool) -> None:
    """NaN has no place in integers and FP4; without a range given, infinity has none anywhere."""
    if not data.size:
        return
    low, high = float(data.min()), float(data.max())  # NaN passes through both
    if np.isnan(low) and not (ranged and form.dtype == "float8_e4m3fn"):
        count = int(np.isnan(data).sum())
        raise UsageError(
            f"{count} of {data.size} values are NaN, which `{form.name}` cannot hold", hint="find where they come from"
        )
    if not ranged and not (np.isfinite(low) and np.isfinite(high)):
        count = int((~np.isfinite(data)).sum())
        raise UsageError(
            f"{count} of {data.size} values are not finite, so they give no range for `{form.name}`",
            hint="replace them, or give the range: `amax=`",
        )


def _takes_no(what: str, value: Any, form: Format) -> None:
    if value is not None:
        raise UsageError(f"`{form.name}` takes no `{what}`", hint=f"leave `{what}` out")


# ------------------------------------------------------------------------------------------------ scales


def _absmax(groups: Floats, axis: int | None) -> Floats:
    if not groups.size:
        shape = () if axis is None else groups.shape[:-1]
        return np.zeros(shape, np.float32)
    return np.asarray(np.maximum(groups.max(axis=axis), -groups.min(axis=axis)), np.float32)


def _finite_absmax(groups: Floats) -> Floats:
    """Of each group; infinite values count as the largest number and saturate."""
    return np.minimum(_absmax(groups, -1), np.finfo(np.float32).max)


def _given(amax: Any, layout: _Layout, form: Format) -> Floats:
    """A range given by the caller, over the groups."""
    if form.granularity == "block" and not form.two_level:
        _takes_no("amax", amax, form)
    known = np.asarray(amax, np.float32)
    if not np.isfinite(known).all() or (known < 0).any():
        raise UsageError(f"a range must be finite and not negative, got {known}", hint="calibrate again")
    wanted: Shape = () if form.two_level or layout.axis is None else (layout.shape[layout.axis],)
    if known.shape not in ((), wanted):
        raise ShapeError(
            f"the range has the shape {format_shape(known.shape)}, expected {format_shape(wanted)}",
            hint="one range for the tensor, or one for each channel",
        )
    if form.two_level:
        return known
    groups = (1,) if layout.axis is None else (layout.shape[layout.axis],)
    return np.asarray(np.broadcast_to(known, groups))


def _scales(largest: Floats, form: Format, scale_dtype: str | None) -> Array:
    """One scale for each range: range over largest value, in the scales' type, never zero."""
    if form.scale_dtype == "float8_e8m0fnu":
        _takes_no("scale_dtype", scale_dtype, form)
        return _powers(largest, form.largest)
    name = scale_dtype or "float32"
    if name not in ("float32", "float16", "bfloat16"):
        raise UsageError(f"scales cannot be `{name}`", hint="float32, float16 or bfloat16")
    kind = _numpy(name)
    limits = ml_dtypes.finfo(kind)  # type: ignore[no-untyped-call]
    least, most = np.float32(limits.smallest_normal), np.float32(limits.max)
    exact = np.where(largest > 0, largest / np.float32(form.largest), np.float32(1))
    return np.clip(exact, least, most).astype(kind)


def _powers(largest: Floats, of: float) -> Array:
    """E8M0: the least power of two under which nothing saturates (as cuDNN and Model Optimizer round it: up)."""
    mantissa, exponent = np.frexp(largest.astype(np.float64) / of)
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    biased = np.clip(exponent + 127, 0, 254).astype(np.uint8)
    return np.where(largest > 0, biased, np.uint8(127)).view(_numpy("float8_e8m0fnu"))


def _second(tensor: Floats | np.float32) -> np.float32:
    """The scale of the scales: the largest block's scale becomes E4M3's largest number."""
    if tensor == 0:
        return np.float32(1)
    return np.float32(max(np.float32(tensor) / np.float32(6.0 * 448.0), _TINY))


def _block_scales(largest: Floats, second: np.float32) -> Array:
    """E4M3 block scales: to nearest, saturating, never zero (a block far below the tensor's largest keeps the least)."""
    with np.errstate(over="ignore"):
        exact = largest / (np.float32(6.0) * second)
    kept = np.where(largest > 0, np.clip(exact, _E4M3_LEAST, _E4M3_LARGEST), np.float32(1))
    return kept.astype(_numpy("float8_e4m3fn"))


def _effective(scales: Array, second: np.float32 | None) -> Floats:
    first = scales.astype(np.float32)
    return first if second is None else first * second


# ------------------------------------------------------------------------------------------------ groups


@dataclass(frozen=True, slots=True)
class _Layout:
    """How an array falls into groups of one scale each: all of it, its channels, or blocks along an axis."""

    shape: Shape
    axis: int | None
    block: int | None

    @classmethod
    def of(cls, shape: Shape, form: Format, axis: int | None, block: int | None) -> _Layout:
        if not shape:
            raise ShapeError(f"a scalar cannot be quantised to `{form.name}`", hint="leave it in FP32")
        if axis is not None and not -len(shape) <= axis < len(shape):
            raise ShapeError(
                f"there is no axis {axis} in {format_shape(shape)}", hint=f"axes are 0 to {len(shape) - 1}"
            )
        where = None if axis is None else axis % len(shape)
        if form.granularity != "block":
            _takes_no("block", block, form)
            return cls(shape, where, None)
        size = form.block if block is None else block
        if size is None or size < 1 or (form.block_fixed and size != form.block):
            raise UsageError(
                f"`{form.name}` has blocks of {form.block}, not of {size}", hint=f"leave `block` out, or {form.block}"
            )
        where = len(shape) - 1 if where is None else where
        if shape[where] % size:
            raise ShapeError(
                f"axis {where} of {format_shape(shape)} has {shape[where]} elements, which blocks of {size} do not divide",
                hint=f"leave this layer in a wider format{'' if form.block_fixed else ', or give another `block`'}",
            )
        return cls(shape, where, size)

    def groups(self, array: Array) -> Array:
        """The array with the elements of one group along its last axis."""
        if self.axis is None:
            return array.reshape(1, -1)
        if self.block is None:
            return np.moveaxis(array, self.axis, 0).reshape(self.shape[self.axis], -1)
        moved = np.moveaxis(array, self.axis, -1)
        return moved.reshape(*moved.shape[:-1], moved.shape[-1] // self.block, self.block)

    def ungroup(self, groups: Array) -> Array:
        """`groups` undone."""
        if self.axis is None:
            return groups.reshape(self.shape)
        if self.block is None:
            rest = tuple(size for at, size in enumerate(self.shape) if at != self.axis)
            back = np.moveaxis(groups.reshape(self.shape[self.axis], *rest), 0, self.axis)
        else:
            back = np.moveaxis(groups.reshape(*groups.shape[:-2], -1), -1, self.axis)
        return np.ascontiguousarray(back).reshape(self.shape)

    def scales_out(self, scales: Array) -> Array:
        """One scale for each group, as ONNX's operators want them."""
        if self.axis is None:
            return scales.reshape(())
        return scales if self.block is None else np.ascontiguousarray(np.moveaxis(scales, -1, self.axis))

    def scales_in(self, scales: Array) -> Array:
        """`scales_out` undone, for an array that has an axis."""
        return scales if self.block is None or self.axis is None else np.moveaxis(scales, self.axis, -1)

    def quantized(self, form: Format, groups: Floats, scales: Array, second: np.float32 | None) -> Quantized:
        values = self.ungroup(_to_values(_over(groups, _effective(scales, second)[..., None]), form))
        return Quantized(form, values, self.scales_out(scales), self.axis, self.block, second)


# ------------------------------------------------------------------------------------------------ bytes


def pack(values: Array) -> npt.NDArray[np.uint8]:
    """The bytes of an array in row order; 4-bit values two to a byte, the first one low, as ONNX's raw_data holds them."""
    if dtype(values.dtype.name).bits != 4:
        return np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
    nibbles = np.zeros(values.size + values.size % 2, np.uint8)
    nibbles[: values.size] = np.ascontiguousarray(values).reshape(-1).view(np.uint8) & 0xF
    return np.asarray(nibbles[0::2] | nibbles[1::2] << 4, np.uint8)


def unpack(raw: Any, shape: Shape, name: str) -> Array:
    """The array of that type and shape in bytes written by `pack`."""
    kind = dtype(name)
    data = np.frombuffer(raw, np.uint8) if isinstance(raw, bytes) else np.asarray(raw, np.uint8).reshape(-1)
    if data.size != kind.nbytes(shape):
        raise ShapeError(
            f"{data.size} bytes are no {format_shape(shape)} of {name}, which has {kind.nbytes(shape)}",
            hint="check the shape",
        )
    if kind.bits != 4:
        return data.view(_numpy(name)).reshape(shape).copy()
    both = np.stack([data & 0xF, data >> 4], axis=-1).reshape(-1)[: int(np.prod(shape, dtype=np.int64))]
    if name == "int4":
        made: Array = (((both + np.uint8(8)) & np.uint8(0xF)).astype(np.int8) - np.int8(8)).astype(_numpy(name))
    else:
        made = np.ascontiguousarray(both).view(_numpy(name))
    return made.reshape(shape)


# ------------------------------------------------------------------------------------------------ casts, counted


@dataclass(frozen=True, slots=True)
class Rounding:
    """What a cast does to finite numbers, counted."""

    elements: int
    overflowed: int
    """Finite before, infinite after."""
    subnormal: int
    """Not zero and below the smallest normal number after: fewer digits."""
    vanished: int
    """Not zero before, zero after."""
    max_rel: float
    """Largest relative error of what stayed finite and normal."""


def rounding(array: Any, form: str | Format) -> Rounding:
    """What a cast to FP16 or BF16 does to an array."""
    form = format_named(form)
    if form.granularity != "cast":
        raise UsageError(f"`{form.name}` is no cast: it needs a scale", hint="`emulate` shows what it leaves")
    data = _floats(array)
    after = _cast(data, form).astype(np.float32)
    finite, zero = np.isfinite(data), data == 0
    overflowed, vanished = finite & ~np.isfinite(after), (after == 0) & ~zero
    subnormal = (np.abs(after) < form.smallest_normal) & (after != 0)
    normal = finite & np.isfinite(after) & (np.abs(after) >= form.smallest_normal) & ~zero
    relative = np.abs(after[normal] - data[normal]) / np.abs(data[normal])
    return Rounding(
        elements=int(data.size),
        overflowed=int(overflowed.sum()),
        subnormal=int(subnormal.sum()),
        vanished=int(vanished.sum()),
        max_rel=float(relative.max()) if relative.size else 0.0,
    )
