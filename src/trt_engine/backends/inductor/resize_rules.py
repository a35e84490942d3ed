"""Resize."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as nn

from trt_engine.backends.inductor.onnx_module import Call, Unsupported


def resize(call: Call) -> Tensor:
    """PyTorch's interpolation where it computes the same, else axis by axis."""
    x, mode, where = call.tensor(0), call.attribute("mode"), call.attribute("coordinate_transformation_mode")
    axes = [axis % x.ndim for axis in call.attribute("axes", range(x.ndim))]
    have: list[Any] = [x.shape[axis] for axis in axes]
    scales: list[Any]
    if call.has(2) and call.scalars(2).size:
        scales = call.numbers(2)
        sizes = [_scaled(size, scale) for size, scale in zip(have, scales, strict=True)]
        whole = all(float(scale).is_integer() for scale in scales)
    else:
        sizes, whole = call.numbers(3), False
        scales = [_quotient(size, old) for size, old in zip(sizes, have, strict=True)]
    changed = [
        (axis, size, scale)
        for axis, size, old, scale in zip(axes, sizes, have, scales, strict=True)
        if not (isinstance(size, int) and isinstance(old, int) and size == old and scale == 1)
        and not (isinstance(scale, float) and scale == 1)
    ]
    rounding, at = call.attribute("nearest_mode"), [axis for axis, *_ in changed]
    if changed and x.ndim == 4 and set(at) <= {2, 3}:
        spatial = [dict(zip(axes, sizes, strict=True)).get(axis, x.shape[axis]) for axis in (2, 3)]
        floors = where == "asymmetric" and rounding == "floor"
        if mode == "nearest" and (floors or (where == "half_pixel" and rounding == "round_prefer_floor")) and whole:
            return nn.interpolate(x, size=spatial, mode="nearest")
        exact = mode == "linear" or (call.attribute("cubic_coeff_a") == -0.75 and not call.attribute("exclude_outside"))
        of_sizes = all(_is_exact(size, x.shape[axis], scale) for axis, size, scale in changed)
        if (
            mode in ("linear", "cubic")
            and where in ("half_pixel", "align_corners")
            and exact
            and 1 not in spatial
            and of_sizes
        ):
            kind = {"linear": "bilinear", "cubic": "bicubic"}[mode]
            return nn.interpolate(x, size=spatial, mode=kind, align_corners=where == "align_corners")
    for axis, size, scale in changed:
        x = _resize_axis(call, x, axis, size, scale)
    return x


def _scaled(size: Any, scale: float) -> Any:
    if float(scale).is_integer():
        return size * int(scale)
    if not isinstance(size, int):
        raise Unsupported("a scale that is not whole, of a size that varies")
    return math.floor(size * scale)


def _quotient(size: Any, old: Any) -> Any:
    return float(np.float32(size) / np.float32(old)) if isinstance(size, int) and isinstance(old, int) else size / old


def _is_exact(size: Any, old: Any, scale: Any) -> bool:
    """Whether a scale is the quotient of the sizes, which PyTorch computes with."""
    return not (isinstance(size, int) and isinstance(old, int)) or math.isclose(size, old * scale, rel_tol=1e-6)


def _resize_axis(call: Call, x: Tensor, axis: int, size: Any, scale: Any) -> Tensor:
    old, mode, where = x.shape[axis], call.attribute("mode"), call.attribute("coordinate_transformation_mode")
    kind = torch.float32
    at = torch.arange(size, dtype=kind, device=x.device)
    if where == "align_corners":
        if not _is_exact(size, old, scale):
            raise Unsupported(
                "corners aligned by a scale that gives no whole size, which ONNX and ONNX Runtime read apart"
            )
        at = at * (old - 1) / (size - 1) if size != 1 else at * 0
    elif where == "asymmetric":
        at = at / scale
    elif where == "pytorch_half_pixel" and size == 1:
        at = at * 0
    elif where in ("half_pixel", "pytorch_half_pixel"):
        at = (at + 0.5) / scale - 0.5
    elif where == "half_pixel_symmetric":
        at = old / 2 * (1 - size / (scale * old)) + (at + 0.5) / scale - 0.5
    else:
        raise Unsupported(f"coordinates of `{where}`")
    if mode == "nearest":
        rounded = {
            "round_prefer_floor": lambda: torch.ceil(at - 0.5), "round_prefer_ceil": lambda: torch.floor(at + 0.5),
            "floor": lambda: torch.floor(at), "ceil": lambda: torch.ceil(at),
        }[call.attribute("nearest_mode")]()  # fmt: skip
        return x.index_select(axis, rounded.clamp(min=0).to(torch.int64).clamp(max=old - 1))
    if not x.dtype.is_floating_point:
        raise Unsupported(f"mode `{mode}` of integers")
    if mode == "linear":
        at = at.clamp(min=0).clamp(max=old - 1)
        first = torch.floor(at)
        taps = [(0, 1 - (at - first)), (1, at - first)]
    else:
        first, a = torch.floor(at), call.attribute("cubic_coeff_a")
        part = at - first
        taps = [(step, _cubic((part - step).abs(), a)) for step in (-1, 0, 1, 2)]
        if call.attribute("exclude_outside"):
            taps = [(n, torch.where((first + n < 0) | (first + n > old - 1), 0.0, weight)) for n, weight in taps]
            total = sum(weight for _, weight in taps)
            taps = [(n, weight / total) for n, weight in taps]
    shape = [-1 if number == axis else 1 for number in range(x.ndim)]
    found = [
        x.index_select(axis, (first + n).clamp(min=0).to(torch.int64).clamp(max=old - 1))
        * weight.to(x.dtype).reshape(shape)
        for n, weight in taps
    ]
    return functools.reduce(torch.add, found)


def _cubic(distance: Tensor, a: float) -> Tensor:
    """Keys' kernel."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return torch.where(distance <= 1, near, far)
