"""Linear layers on a GPU as one Triton kernel: product, scales, bias, activation, residual and quantized output.

Packages hold the compiled kernel. Which tiles are the fastest `kernel_choice` measures. Functions of Triton have no
annotations but `constexpr`: the compiler copies their source into a module of its own.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the kernel divides a product: rows, columns and depth of a tile; `tma`: persistent, by the copy engine of
    compute capability 9.0; `specialized`: its copies in warps of their own."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    tma: bool = False
    specialized: bool = False

    @property
    def numbers(self) -> list[int]:
        return [int(value) for value in astuple(self)]

    @staticmethod
    def of(numbers: Sequence[int]) -> Tiles:
        rows, columns, depth, warps, stages, tma, specialized = numbers
        return Tiles(rows, columns, depth, warps, stages, bool(tma), bool(specialized))

    def __str__(self) -> str:
        kind = " specialized" if self.specialized else " tma" if self.tma else ""
        return f"{self.rows}x{self.columns}x{self.depth} w{self.warps} s{self.stages}{kind}"


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    if ACTIVATION == 1 and EXACT:
        x = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif ACTIVATION == 1:  # `fused_rules.close_gelu`: erf takes twice as long as reading and writing the values
        x = tl.maximum(x, -4.2, propagate_nan=tl.PropagateNan.ALL)
        u = tl.minimum(x, 4.2)
        s = u * u
        p = (-9.0175001e-10 * s + 7.9413168e-08) * s - 3.0379252e-06
        p = (((p * s + 6.6890601e-05) * s - 9.5065672e-04) * s + 9.2982259e-03) * s - 6.5528195e-02
        x *= 0.5 + u * (p * s + 3.98465868e-01)
    elif ACTIVATION == 2:  # the tanh form, by its exponential
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == 3:
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def _place(tile, down, across, GROUP: tl.constexpr):
    """Row and column of a tile, in groups of rows that share their columns' weights in the cache."""
    group = tile // (GROUP * across)
    size = min(down - group * GROUP, GROUP)
    inside = tile % (GROUP * across)
    return group * GROUP + inside % size, inside // size


@triton.jit
def _finish(
    found, bias, scale, residual, inverse, row, column, M, N: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, LIMIT: tl.constexpr, ROUND: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """What is stored of a tile, in FP32. `LIMIT`: largest value of a quantized output, or 0. `ROUND`: INT8, from -128.
    `EXACT`: for an FP32 output."""
    at = column + tl.arange(0, COLUMNS)
    inside = at < N
    found = found.to(tl.float32)
    if SCALED:
        found *= tl.load(scale + at, mask=inside, other=0.0)[None, :]
    if HAS_BIAS:
        found += tl.load(bias + at, mask=inside, other=0.0)[None, :].to(tl.float32)
    found = _activate(found, ACTIVATION, EXACT)
    if HAS_RESIDUAL:
        rows = row + tl.arange(0, ROWS)
        mask = (rows < M)[:, None] & inside[None, :]
        found += tl.load(residual + rows.to(tl.int64)[:, None] * N + at[None, :], mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == 4:
        found = tl.maximum(found, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if LIMIT > 0:
        # PyTorch's compiler passes a number in FP64, which has no conversion to FP8 and another rounding
        found = tl.minimum(tl.maximum(found * tl.cast(inverse, tl.float32), -LIMIT - ROUND), LIMIT)
        if ROUND:  # to the nearest integer, halves to the even one
            found = (found + 12582912.0) - 12582912.0
    return found


@triton.jit
def _tiled(
    x, weight, bias, scale, residual, out, inverse, M, N: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    LIMIT: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """One tile of the output for each program, its inputs read by addresses."""
    kind: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    row, column = _place(tl.program_id(0), tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS), GROUP)
    rows, columns = row * ROWS + tl.arange(0, ROWS), column * COLUMNS + tl.arange(0, COLUMNS)
    deep = tl.arange(0, DEPTH)
    x_at = x + (rows % M).to(tl.int64)[:, None] * K + deep[None, :]
    weight_at = weight + (columns % N).to(tl.int64)[None, :] * K + deep[:, None]
    found = tl.zeros((ROWS, COLUMNS), kind)
    for _ in range(0, K, DEPTH):
        found = tl.dot(tl.load(x_at), tl.load(weight_at), found, out_dtype=kind)
        x_at += DEPTH
        weight_at += DEPTH
    made = _finish(found, bias, scale, residual, inverse, row * ROWS, column * COLUMNS, M, N, ROWS, COLUMNS, ACTIVATION,
                   HAS_BIAS, SCALED, HAS_RESIDUAL, LIMIT, ROUND, out.dtype.element_ty == tl.float32)  # fmt: skip
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * N + columns[None, :], made.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _persistent(
    x, weight, bias, scale, residual, out, inverse, M, N: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    LIMIT: tl.constexpr, ROUND: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """As many programs as processors, each over several tiles, by tensor descriptors."""
    kind: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    xs = tl.make_tensor_descriptor(x, [M, K], [K, 1], [ROWS, DEPTH])
    weights = tl.make_tensor_descriptor(weight, [N, K], [K, 1], [COLUMNS, DEPTH])
    outs = tl.make_tensor_descriptor(out, [M, N], [N, 1], [ROWS, COLUMNS])
    down, across = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), warp_specialize=SPECIALIZED):
        row, column = _place(tile, down, across, GROUP)
        found = tl.zeros((ROWS, COLUMNS), kind)
        for k in range(0, K, DEPTH):
            found = tl.dot(xs.load([row * ROWS, k]), weights.load([column * COLUMNS, k]).T, found, out_dtype=kind)
        made = _finish(found, bias, scale, residual, inverse, row * ROWS, column * COLUMNS, M, N, ROWS, COLUMNS,
                       ACTIVATION, HAS_BIAS, SCALED, HAS_RESIDUAL, LIMIT, ROUND,
                       out.dtype.element_ty == tl.float32)  # fmt: skip
        outs.store([row * ROWS, column * COLUMNS], made.to(out.dtype.element_ty))


_TYPES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_GROUP = 8
"""Rows of tiles whose columns are computed one after the other."""


@torch.library.triton_op("trt_engine::linear", mutates_args={})
def run_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, factors: Tensor | None, residual: Tensor | None, activation: int,
    out_scale: float, kind: torch.dtype, tiles: Sequence[int],
) -> Tensor:  # fmt: skip
    """The layer of x (rows x K) and a contiguous weight (columns x K); `tiles` as `Tiles.numbers`."""
    made = Tiles.of(tiles)
    x, residual = (
        x.contiguous(),
        None if residual is None else residual.contiguous(),
    )  # views of a Split or a Slice are not
    (rows, depth), columns = x.shape, weight.shape[0]
    out = torch.empty((rows, columns), dtype=x.dtype if out_scale else kind, device=x.device)
    count = triton.cdiv(rows, made.rows) * triton.cdiv(columns, made.columns)
    given = (
        x, weight, x if bias is None else bias, x if factors is None else factors, x if residual is None else residual,
        out, 1.0 / out_scale if out_scale else 1.0, rows, columns, depth, made.rows, made.columns, made.depth, _GROUP,
        activation, bias is not None, factors is not None, residual is not None,
        _TYPES[x.dtype] if out_scale else 0.0, x.dtype == torch.int8,
    )  # fmt: skip
    if made.tma:
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count
        torch.library.wrap_triton(_persistent)[(processors,)](
            *given, made.specialized, num_warps=made.warps, num_stages=made.stages
        )
    else:
        torch.library.wrap_triton(_tiled)[(count,)](*given, num_warps=made.warps, num_stages=made.stages)
    return out
