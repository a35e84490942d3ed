"""Number formats: rounding, scales, blocks and packing, bit-exact with the ONNX definitions.

Always symmetric, as TensorRT requires: no zero points, scales strictly positive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trt_engine.arrayfiles import Array
from trt_engine.errors import ShapeError, UsageError
from trt_engine.graph.edit_graph import numpy_dtype_of, pack
from trt_engine.tensors import Shape, dtype, format_shape, suggest

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Format:
    """A number format and its requirements for graph, library and GPU."""

    name: str
    dtype: str
    """Dtype name of a value."""
    largest: float
    """Largest magnitude of a value."""
    smallest_normal: float
    """Smallest normal magnitude; 0 for integers."""
    scale_dtype: str | None
    """Dtype of the scales; None for formats without scales."""
    granularity: Literal["cast", "tensor or channel", "block"]
    opset: int
    """First ONNX opset that supports it."""
    compute_capability: str
    """Lowest compute capability TensorRT uses it on."""
    tensorrt: str
    """First TensorRT version that supports it in a strongly typed graph."""
    block: int | None = None
    """Elements per scale: default, or the only size."""
    block_fixed: bool = False
    two_level: bool = False
    """True if a per-tensor scale multiplies the block scales."""
    weights_only: bool = False

    @property
    def bits(self) -> int:
        """Bits per value, without scales."""
        return dtype(self.dtype).bits

    @property
    def numpy(self) -> np.dtype[Any]:
        """NumPy dtype of the values."""
        return numpy_dtype_of(self.dtype)

    @property
    def integer(self) -> bool:
        """True for integer formats."""
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
"""Formats by name. INT8 and INT4 can also represent `-largest - 1`, which scales made here never use."""
_E4M3_LARGEST, _E4M3_LEAST = np.float32(448.0), np.float32(2.0**-9)
_TINY = np.finfo(np.float32).tiny


def get_format(name: str | Format) -> Format:
    """Look up a format; raise `UsageError` with the closest name if unknown."""
    if isinstance(name, Format):
        return name
    if name not in FORMATS:
        raise UsageError(f"unknown format `{name}`", hint=suggest(name, list(FORMATS)))
    return FORMATS[name]


@dataclass(frozen=True, slots=True)
class QuantizedArray:
    """A quantized array: values, scales, and the axis and block size of the scales."""

    format: Format
    values: Array
    """Values in the format's dtype and the array's shape."""
    scales: Array | None = None
    """Scalar, `[channels]`, or the array's shape with blocks in place of elements along `axis`."""
    axis: int | None = None
    """Axis of the channels or blocks, counted from 0; None for a per-tensor scale."""
    block: int | None = None
    tensor_scale: np.float32 | None = None
    """Scale of the block scales in two-level formats."""

    def dequantize(self) -> Floats:
        """Return the dequantized values in FP32."""
        return dequantize(self)

    def effective_scales(self) -> Floats:
        """Return the scales in FP32, both levels multiplied."""
        return np.ones((), np.float32) if self.scales is None else _effective_scales(self.scales, self.tensor_scale)

    def packed(self) -> npt.NDArray[np.uint8]:
        """Return the stored bytes, uint8 `[bytes]`, two 4-bit values per byte, the first in the low nibble."""
        return pack(self.values)

    @property
    def nbytes(self) -> int:
        """Stored size in bytes, with scales."""
        own = dtype(self.format.dtype).nbytes(self.values.shape)
        scales = self.scales.nbytes if self.scales is not None else 0
        return own + scales + (4 if self.tensor_scale is not None else 0)


def quantize(
    array: Any,
    form: str | Format,
    *,
    axis: int | None = None,
    block: int | None = None,
    amax: Any = None,
    scale_dtype: str | None = None,
) -> QuantizedArray:
    """Quantize an array to a format.

    `axis`: the channel axis for INT8 and FP8 (None: per tensor), the block axis for block formats. `amax`: a calibrated
    range (scalar, `[channels]`, or for NVFP4 per tensor with dynamic block scales); larger values saturate. Without it the
    range is the array's, which must be finite. A range of zero has the scale 1. `scale_dtype`: float32, float16 or
    bfloat16, for INT8, FP8 and INT4. Raises `UsageError` and `ShapeError`.
    """
    form = get_format(form)
    data = _floats(array)
    if form.granularity == "cast":
        _reject_setting("amax", amax, form)
        with np.errstate(over="ignore", invalid="ignore"):  # overflow becomes infinite, as in ONNX's Cast
            return QuantizedArray(form, data.astype(form.numpy))
    _check_finite(data, form, ranged=amax is not None)
    layout = _ScaleGroups.create(data.shape, form, axis, block)
    groups = layout.groups(data)
    largest = _check_amax(amax, layout, form) if amax is not None else None
    if form.two_level:
        tensor = np.float32(largest) if largest is not None else _absmax(groups, None)
        second = _tensor_scale(np.float32(tensor))
        # infinities count as the largest FP32 value
        scales = _block_scales(np.minimum(_absmax(groups, -1), np.finfo(np.float32).max), second)
    else:
        second = None
        scales = _scales(largest if largest is not None else _absmax(groups, -1), form, scale_dtype)
    return layout.quantized(form, groups, scales, second)


def dequantize(quantized: QuantizedArray) -> Floats:
    """Dequantize to FP32, in the shape of the values, as ONNX's DequantizeLinear does; products beyond FP32's range become
    infinite.
    """
    values: Floats = quantized.values.astype(np.float32)
    if quantized.scales is None:
        return values
    layout = _ScaleGroups(values.shape, quantized.axis, quantized.block)
    scales = layout.scales_in(quantized.effective_scales())
    with np.errstate(over="ignore"):
        return layout.ungroup(layout.groups(values) * (scales if layout.axis is None else scales[..., None]))


def emulate(
    array: Any, form: str | Format, *, axis: int | None = None, block: int | None = None, amax: Any = None
) -> Floats:
    """Quantize the array and dequantize it to FP32."""
    return quantize(array, form, axis=axis, block=block, amax=amax).dequantize()


# candidate ranges over a group's own; 1.5 puts the largest FP4 value on 4 instead of 6, where the grid is finer
# (source: "Four Over Six", adaptive block scaling for NVFP4, 2025)
_CLIP_RATIOS = tuple(np.float32(1 - 0.025 * step) for step in range(21))
_FOUR_OVER_SIX_RATIO = np.float32(1.5)


def search_clip_range(
    array: Any,
    form: str | Format,
    *,
    axis: int | None = None,
    block: int | None = None,
    importance: Any = None,
    scale_dtype: str | None = None,
) -> QuantizedArray:
    """`quantize` with the range of each group (tensor, channel, block) that minimizes the squared error.

    AWQ's weight clipping: outliers are clipped to reduce the rounding error of the rest. `importance` weights the errors,
    broadcast to the array: for a weight, the mean square of each input. Never worse than `quantize` by that measure. The
    array is of any shape in a floating-point dtype. Raises `UsageError` for an unknown format, one without ranges or values
    that are not finite, `ShapeError` for an `importance` that does not broadcast.
    """
    form = get_format(form)
    if form.granularity == "cast":
        raise UsageError(f"`{form.name}` has no range to search for", hint="`quantize` rounds to it")
    data = _floats(array)
    _check_finite(data, form, ranged=False)
    layout = _ScaleGroups.create(data.shape, form, axis, block)
    groups = layout.groups(data)
    weights = layout.groups(np.broadcast_to(_importance(importance, data.shape), data.shape))
    largest = _absmax(groups, -1)
    second = _tensor_scale(_absmax(groups, None)) if form.two_level else None
    ratios = (*_CLIP_RATIOS, _FOUR_OVER_SIX_RATIO) if form.two_level else _CLIP_RATIOS
    best: Array | None = None
    least = np.full(largest.shape, np.inf)
    for ratio in ratios:
        wanted = largest * ratio
        scales = _block_scales(wanted, second) if second is not None else _scales(wanted, form, scale_dtype)
        factor = _effective_scales(scales, second)[..., None]
        values = _round_to_values(_divide(groups, factor), form).astype(np.float32)
        error = np.sum(weights * np.square(values * factor - groups, dtype=np.float64), axis=-1)
        if best is None:
            best, least = scales, error
            continue
        better = error < least
        best = np.where(better, scales, best)
        least = np.where(better, error, least)
    assert best is not None  # the first ratio sets it
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
            f"the importance is {format_shape(weights.shape)}, which does not broadcast to {format_shape(shape)}",
            hint="one number for each input of the weight, shaped to broadcast: `m[None, :]` or `m[:, None]`",
        ) from error
    return weights


def _floats(array: Any) -> Floats:
    with np.errstate(over="ignore"):
        return np.asarray(array).astype(np.float32, copy=False)


def _divide(groups: Floats, scales: Floats) -> Floats:
    """Divide the groups by their scales; overflow becomes infinite and saturates later."""
    with np.errstate(over="ignore"):
        return np.asarray(groups / scales, np.float32)


def _round_to_values(scaled: Floats, form: Format) -> Array:
    """Round scaled values to nearest, ties to even, saturating."""
    if form.integer:
        return np.clip(np.rint(scaled), -form.largest - 1, form.largest).astype(form.numpy)
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        return np.clip(scaled, -form.largest, form.largest).astype(form.numpy)


def _check_finite(data: Floats, form: Format, *, ranged: bool) -> None:
    """Raise `UsageError` for NaN in integers and FP4, and for infinities without a given range."""
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


def _reject_setting(what: str, value: Any, form: Format) -> None:
    if value is not None:
        raise UsageError(f"`{form.name}` takes no `{what}`", hint=f"leave `{what}` out")


def _absmax(groups: Floats, axis: int | None) -> Floats:
    if not groups.size:
        shape = () if axis is None else groups.shape[:-1]
        return np.zeros(shape, np.float32)
    return np.asarray(np.maximum(groups.max(axis=axis), -groups.min(axis=axis)), np.float32)


def _check_amax(amax: Any, layout: _ScaleGroups, form: Format) -> Floats:
    """Validate the caller's range and expand it to the groups."""
    if form.granularity == "block" and not form.two_level:
        _reject_setting("amax", amax, form)
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
    """Scale of each range: range / largest value, in the scale dtype, never zero."""
    if form.scale_dtype == "float8_e8m0fnu":
        _reject_setting("scale_dtype", scale_dtype, form)
        return _power_of_two_scales(largest, form.largest)
    name = scale_dtype or "float32"
    if name not in ("float32", "float16", "bfloat16"):
        raise UsageError(f"scales cannot be `{name}`", hint="float32, float16 or bfloat16")
    kind = numpy_dtype_of(name)
    limits = ml_dtypes.finfo(kind)  # type: ignore[no-untyped-call]
    least, most = np.float32(limits.smallest_normal), np.float32(limits.max)
    exact = np.where(largest > 0, largest / np.float32(form.largest), np.float32(1))
    return np.clip(exact, least, most).astype(kind)


def _power_of_two_scales(largest: Floats, of: float) -> Array:
    """E8M0 scales: the smallest power of two without saturation (rounded up, as in cuDNN and Model Optimizer)."""
    mantissa, exponent = np.frexp(largest.astype(np.float64) / of)
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    biased = np.clip(exponent + 127, 0, 254).astype(np.uint8)
    return np.where(largest > 0, biased, np.uint8(127)).view(numpy_dtype_of("float8_e8m0fnu"))


def _tensor_scale(tensor: Floats | np.float32) -> np.float32:
    """Per-tensor scale that maps the largest block scale to E4M3's maximum."""
    if tensor == 0:
        return np.float32(1)
    return np.float32(max(np.float32(tensor) / np.float32(6.0 * 448.0), _TINY))


def _block_scales(largest: Floats, second: np.float32) -> Array:
    """E4M3 block scales: to nearest, saturating, never zero."""
    with np.errstate(over="ignore"):
        exact = largest / (np.float32(6.0) * second)
    kept = np.where(largest > 0, np.clip(exact, _E4M3_LEAST, _E4M3_LARGEST), np.float32(1))
    return kept.astype(numpy_dtype_of("float8_e4m3fn"))


def _effective_scales(scales: Array, second: np.float32 | None) -> Floats:
    first = scales.astype(np.float32)
    return first if second is None else first * second


@dataclass(frozen=True, slots=True)
class _ScaleGroups:
    """Groups of elements with one scale: the tensor, its channels, or blocks along an axis."""

    shape: Shape
    axis: int | None
    block: int | None

    @classmethod
    def create(cls, shape: Shape, form: Format, axis: int | None, block: int | None) -> _ScaleGroups:
        if not shape:
            raise ShapeError(f"a scalar cannot be quantised to `{form.name}`", hint="leave it in FP32")
        if axis is not None and not -len(shape) <= axis < len(shape):
            raise ShapeError(
                f"axis {axis} is out of range for {format_shape(shape)}", hint=f"axes are 0 to {len(shape) - 1}"
            )
        where = None if axis is None else axis % len(shape)
        if form.granularity != "block":
            _reject_setting("block", block, form)
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
        """Reshape the array to have the elements of a group along its last axis."""
        if self.axis is None:
            return array.reshape(1, -1)
        if self.block is None:
            return np.moveaxis(array, self.axis, 0).reshape(self.shape[self.axis], -1)
        moved = np.moveaxis(array, self.axis, -1)
        return moved.reshape(*moved.shape[:-1], moved.shape[-1] // self.block, self.block)

    def ungroup(self, groups: Array) -> Array:
        """Inverse of `groups`."""
        if self.axis is None:
            return groups.reshape(self.shape)
        if self.block is None:
            rest = tuple(size for at, size in enumerate(self.shape) if at != self.axis)
            back = np.moveaxis(groups.reshape(self.shape[self.axis], *rest), 0, self.axis)
        else:
            back = np.moveaxis(groups.reshape(*groups.shape[:-2], -1), -1, self.axis)
        return np.ascontiguousarray(back).reshape(self.shape)

    def scales_out(self, scales: Array) -> Array:
        """Scales of the groups in the layout of ONNX's operators."""
        if self.axis is None:
            return scales.reshape(())
        return scales if self.block is None else np.ascontiguousarray(np.moveaxis(scales, -1, self.axis))

    def scales_in(self, scales: Array) -> Array:
        """Inverse of `scales_out`, for an array with an axis."""
        return scales if self.block is None or self.axis is None else np.moveaxis(scales, self.axis, -1)

    def quantized(self, form: Format, groups: Floats, scales: Array, second: np.float32 | None) -> QuantizedArray:
        values = self.ungroup(_round_to_values(_divide(groups, _effective_scales(scales, second)[..., None]), form))
        return QuantizedArray(form, values, self.scales_out(scales), self.axis, self.block, second)
