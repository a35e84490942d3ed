"""Chooses what computes each linear layer on a GPU, by measurement: cuBLAS in several ways, or our Triton kernel with one of
several tiles.

Measurements are kept in a file beside the compiler's cache, so that the next build of the same shapes measures nothing.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import triton
from filelock import FileLock, Timeout
from torch import Tensor

from trt_engine.atomic_io import write_atomic
from trt_engine.backends.inductor.fused_rules import close_gelu, cudnn_conv_relu, finished, plain_linear
from trt_engine.backends.inductor.linear import ACTIVATIONS
from trt_engine.backends.inductor.onnx_module import Kernels, OnnxModule
from trt_engine.backends.inductor.triton_linear import Tiles, run_linear

log = logging.getLogger(__name__)

_REPEATS, _ROUNDS = 20, 3
_REVISION = 2
"""Version of the kernels; measurements of another version are not used."""
_CUDNN = "cudnn"
_JOINED = 2 / 3
"""Part of an addition's time that is left where its sum is written by a kernel that reads it anyway."""
_MANY_ROWS = 1024
"""Rows from which tiles are large: there are more of them than processors."""
_FEW_ROWS = 32


class Product(msgspec.Struct, frozen=True):
    """The shape of a linear layer: x is rows x depth, the output rows x columns."""

    rows: int
    columns: int
    depth: int
    factor_type: str
    out_type: str
    activation: int
    has_bias: bool
    has_residual: bool
    quantizes: bool = False
    same_factors: bool = False
    """One factor for all columns of a quantized product."""
    image: tuple[int, int, int] | None = None
    """Count, height and width, whose product the rows are, of a 1x1 convolution."""
    tf32: bool = False
    """An FP32 product that may be computed in TF32."""

    @property
    def quantized(self) -> bool:
        return self.factor_type in ("int8", "float8_e4m3fn")


class Choice(msgspec.Struct, frozen=True):
    """What was the fastest, and the microseconds of each candidate that ran."""

    way: str
    """A key of `LIBRARY`, or the name of the tiles."""
    tiles: tuple[int, ...] | None
    measured_us: dict[str, float]


@dataclass(slots=True)
class _Recorder(Kernels):
    """Notes the layers of one inference, which PyTorch's operators compute."""

    products: dict[str, Product] = field(default_factory=dict)

    def linear(self, name: str) -> Callable[..., Tensor]:
        def record(
            x: Tensor, weight: Tensor, bias: Tensor | None, factors: Tensor | None, residual: Tensor | None,
            activation: int, out_scale: float, kind: torch.dtype,
        ) -> Tensor:  # fmt: skip
            self.products[name] = Product(
                x.shape[0], weight.shape[1], weight.shape[0], _name(x.dtype), _name(kind), activation, bias is not None,
                residual is not None, bool(out_scale), factors is not None and bool((factors == factors[0]).all()),
                tf32=x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest",
            )  # fmt: skip
            return plain_linear(x, weight, bias, factors, residual, activation, out_scale, kind)

        return record

    def pointwise(
        self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: int
    ) -> None:
        count, channels, high, wide = x.shape
        self.products[name] = Product(
            count * high * wide, weight.shape[0], channels, _name(x.dtype), _name(x.dtype), activation,
            bias is not None, residual is not None, image=(count, high, wide),
        )  # fmt: skip


@dataclass(slots=True)
class ChosenKernels(Kernels):
    """The kernels of the layers whose choice is tiles."""

    choices: dict[str, Choice]

    def linear(self, name: str) -> Callable[..., Tensor]:
        choice = self.choices.get(name)
        return plain_linear if choice is None else _way(choice)

    def pointwise(
        self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: int
    ) -> Callable[..., Tensor] | None:
        choice = self.choices.get(name)
        return None if choice is None or choice.way == _CUDNN else _way(choice)

    @property
    def summary(self) -> str:
        """`cublas 12, 128x256x64 w4 s3 specialized 36`."""
        counted = Counter(choice.way for choice in self.choices.values())
        return ", ".join(f"{way} {count}" for way, count in counted.most_common())


def _way(choice: Choice) -> Callable[..., Tensor]:
    return _triton(Tiles.of(choice.tiles)) if choice.tiles is not None else LIBRARY[choice.way]


def _triton(tiles: Tiles) -> Callable[..., Tensor]:
    def run(x: Tensor, weight: Tensor, *more: Any) -> Tensor:
        return run_linear(x, weight.t(), *more, tiles.numbers)

    return run


def _epilogue(
    x: Tensor, weight: Tensor, bias: Tensor, factors: None, residual: Tensor | None, activation: int, out_scale: float,
    kind: torch.dtype,
) -> Tensor:  # fmt: skip
    """cuBLAS applies the activation as it writes the product; Gelu in its tanh form."""
    found = torch.ops.aten._addmm_activation(bias, x, weight, use_gelu=ACTIVATIONS[activation] != "relu")
    return found if residual is None else found + residual


def _scaled(
    x: Tensor, weight: Tensor, bias: Tensor | None, factors: Tensor, residual: Tensor | None, activation: int,
    out_scale: float, kind: torch.dtype,
) -> Tensor:  # fmt: skip
    """cuBLAS's FP8 product; one scale, as the product of two."""
    # of two dimensions: the compiler stores constants of one dimension in a kernel of each call
    root = factors[:1].reshape(1, 1).sqrt()
    found = torch._scaled_mm(x, weight, root, root, bias=bias, out_dtype=kind, use_fast_accum=True)
    if ACTIVATIONS[activation] == "gelu":
        found, activation = close_gelu(found), ACTIVATIONS.index("none")
        found = found if out_scale else found.to(kind)
    return finished(found, residual, activation, out_scale, x.dtype)


LIBRARY: dict[str, Callable[..., Tensor]] = {
    "cublas": plain_linear,
    "cublas epilogue": _epilogue,
    "cublas fp8": _scaled,
}
"""Ways of PyTorch's libraries."""


def _library_ways(product: Product) -> list[str]:
    if product.factor_type in ("int8", "float8_e4m3fn"):
        fp8 = product.factor_type == "float8_e4m3fn" and product.same_factors and product.out_type != "float32"
        return ["cublas fp8"] if fp8 else []
    if product.image is not None:
        relu = ACTIVATIONS[product.activation] == "relu"
        return [_CUDNN, "cublas epilogue"] if relu and product.has_bias and not product.has_residual else [_CUDNN]
    half = product.factor_type in ("float16", "bfloat16")
    ways = [] if product.quantized else ["cublas"]  # which computes a quantized layer in FP32
    if half and product.has_bias and ACTIVATIONS[product.activation] in ("gelu", "gelu_tanh", "relu"):
        ways.append("cublas epilogue")  # the tanh form differs by 5e-4 at most, half of what FP16 rounds values of 1 by
    return ways


def choose_kernels(module: OnnxModule, examples: Sequence[Tensor], kept: Path, limit_s: float) -> ChosenKernels:
    """Measure what computes the layers of the module at the shapes of the examples; within `limit_s` seconds, after which
    layers without a measurement are PyTorch's. `kept`: the file of earlier measurements."""
    recorder = _Recorder()
    module.kernels = recorder
    with torch.no_grad():
        module(*examples)
    until = time.monotonic() + limit_s
    known = _read(kept)
    named, device = recorder.products, examples[0].device
    missing = [item for item in _worth_measuring([*named.values()]) if _key(item) not in known]
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=device))
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), 16)) as threads:
        trials = {item: _Trial(item, device, threads) for item in missing}
        for item, trial in trials.items():
            if (choice := trial.choice(until)) is not None:
                known[_key(item)] = choice
        threads.shutdown(cancel_futures=True)
    if missing:
        with FileLock(f"{kept}.lock"):  # other builds add theirs
            known = _read(kept) | known
            write_atomic(kept, msgspec.json.encode(known))
    chosen = {name: known.get(_key(item)) or _unmeasured(item) for name, item in named.items()}
    return ChosenKernels({name: choice for name, choice in chosen.items() if choice is not None})


def _worth_measuring(products: Sequence[Product]) -> list[Product]:
    """Each product once, the longest first; not those with less than a hundredth of all multiply-adds."""
    work: Counter[Product] = Counter()
    for item in products:
        work[item] += item.rows * item.columns * item.depth
    return [item for item, amount in work.most_common() if amount * 100 >= work.total()]


def _unmeasured(product: Product) -> Choice | None:
    """Tiles for a quantized product, which PyTorch's operators compute in FP32; others stay with those."""
    if not product.quantized:
        return None
    tiles = Tiles(64, 64, next(deep for deep in (64, 32) if product.depth % deep == 0), 4, 3)
    if product.rows >= _MANY_ROWS and product.depth % 128 == 0:
        tiles = Tiles(128, 128, 128, 8, 3)
    return Choice(f"{tiles}, not measured", tuple(tiles.numbers), {})


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _key(product: Product) -> str:
    where = f"{torch.cuda.get_device_name()} torch {torch.__version__} triton {triton.__version__} kernels {_REVISION}"
    return f"{where} {' '.join(map(str, msgspec.structs.astuple(product)))}"


def _read(kept: Path) -> dict[str, Choice]:
    """The choices of the file, without those of another release, whose tiles or ways are not here, and those of products
    that nothing computed."""
    try:
        found = msgspec.json.decode(kept.read_bytes(), type=dict[str, Choice])
    except (OSError, msgspec.MsgspecError):
        return {}
    size = len(Tiles.__dataclass_fields__)
    return {
        key: choice
        for key, choice in found.items()
        if choice.measured_us
        and f" kernels {_REVISION} " in key
        and (choice.way in (_CUDNN, *LIBRARY) if choice.tiles is None else len(choice.tiles) == size)
    }


def candidates(product: Product, capability: tuple[int, int]) -> Iterator[Tiles]:
    """Tiles worth a measurement; depths that divide the product's, as the kernel masks none. FP32 factors are computed in
    TF32; there are none for FP64."""
    if product.factor_type == "float64" or (product.factor_type == "float32" and not product.tf32):
        return
    size = 1 if product.quantized else 2 if product.factor_type != "float32" else 4
    deep = 128 // size
    if size == 1:  # no other kernel computes a quantized layer: a depth for each
        deep = next((depth for depth in (128, 64) if product.depth % depth == 0), 32)
    hopper = capability == (9, 0)
    many = product.rows >= _MANY_ROWS
    found: list[Tiles] = []
    # the copy engine takes rows whose bytes are a multiple of 16
    wide = 1 if product.quantizes else getattr(torch, product.out_type).itemsize
    if many and hopper and product.image is None and product.columns * wide % 16 == 0:
        wide_tiles = () if product.activation and size > 1 else (256,)
        found += [Tiles(128, columns, deep, 4, 3, True, True) for columns in (128, *wide_tiles)]
    if many and (size == 1 or not found):
        found.append(Tiles(128, 128, deep, 4, 4))
    if many and size == 1:  # two programs at a time on a processor: one computes while the other finishes
        found.append(Tiles(128, 128, deep, 8, 3))
    if many and (product.image is not None or not hopper):
        found.append(Tiles(128, 64, deep, 4, 4))
    elif not many and product.rows > _FEW_ROWS:
        found += [Tiles(64, 32, 2 * deep, 4, 4), Tiles(64, 64, deep, 4, 5), Tiles(64, 128, deep, 4, 5)]
    elif not many:
        found += [Tiles(16, 64, deep, 4, 5), Tiles(16, 32, 2 * deep, 4, 4)]
    yield from (tiles for tiles in found if product.depth % tiles.depth == 0)


class _Trial:
    """The candidates of one product; they compile in threads, and are measured one after the other."""

    def __init__(self, product: Product, device: torch.device, threads: ThreadPoolExecutor) -> None:
        self.product = product
        self.given = _operands(product, device)
        capability = torch.cuda.get_device_capability(device)
        # Triton's allocator is set for a context, which a thread does not inherit
        self.compiled = {
            tiles: threads.submit(copy_context().run, self.compile, tiles) for tiles in candidates(product, capability)
        }

    def compile(self, tiles: Tiles) -> Tensor:
        return _triton(tiles)(*self.given)

    def convolved(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, _: None, residual: Tensor | None, *more: Any
    ) -> Tensor:
        """The product as cuDNN's convolution, of channels-last views of the operands."""
        sizes = self.product.image or (x.shape[0], 1, 1)

        def image(rows: Tensor) -> Tensor:
            return rows.view(*sizes, rows.shape[1]).permute(0, 3, 1, 2)

        kernel = weight.t()[:, :, None, None]
        if ACTIVATIONS[self.product.activation] == "none":
            made = torch.conv2d(image(x), kernel)
        else:
            added = None if residual is None else image(residual)
            made = cudnn_conv_relu(image(x), kernel, bias, added, [1, 1], [0, 0], [1, 1])
        return made.permute(0, 2, 3, 1).reshape(x.shape[0], -1)

    def choice(self, until: float) -> Choice | None:
        """The fastest that gives what PyTorch's operators give; None where the time is over."""
        if time.monotonic() > until:
            for waiting in self.compiled.values():
                waiting.cancel()
            return None
        with _device_lock(self.given[0].device, until):
            return self.measure(until)

    def measure(self, until: float) -> Choice | None:
        expected = plain_linear(*self.given).float()
        # a value between two of FP8, which are up to 1/14 of the largest apart, may be rounded to either
        limit = (0.1 if self.product.quantizes else 0.05) * float(expected.abs().max())
        found: dict[str, tuple[float, Tiles | None]] = {}
        runs: list[tuple[str, Tiles | None, Callable[..., Tensor]]] = [
            (way, None, self.convolved if way == _CUDNN else LIBRARY[way]) for way in _library_ways(self.product)
        ]
        runs += [(str(tiles), tiles, _triton(tiles)) for tiles in self.compiled]
        for name, tiles, run in runs:
            try:
                if tiles is not None:
                    self.compiled[tiles].result(max(until - time.monotonic(), 1.0))
                if float((run(*self.given).float() - expected).abs().max()) <= limit:
                    found[name] = self.microseconds(name, run), tiles
            except TimeoutError:
                continue
            except Exception as error:  # of the compiler: tiles that need more memory or registers than there is
                log.debug("%s by %s: %s", self.product, name, error)
        if not found:
            return None
        best = min(found, key=lambda name: found[name][0])
        measured = {name: round(value, 2) for name, (value, _) in sorted(found.items(), key=lambda item: item[1][0])}
        log.info("%s: %s", self.product, measured)
        tiles = found[best][1]
        return Choice(best, None if tiles is None else tuple(tiles.numbers), measured)

    def microseconds(self, name: str, run: Callable[..., Tensor]) -> float:
        """Microseconds of the layer; where what follows the product is computed apart, with what that costs in a kernel
        that the compiler joins: an addition of the residual, or one pass from the product to the quantized output."""
        x, weight, bias, factors, residual, _, out_scale, kind = self.given
        if name not in LIBRARY or (residual is None and not out_scale):
            return _measured(functools.partial(run, *self.given))
        if out_scale:
            product = functools.partial(run, x, weight, bias, factors, None, 0, 0.0, kind)
            return _measured(product) + _measured(functools.partial(product().to, x.dtype))
        alone = _measured(functools.partial(run, *self.given[:4], None, *self.given[5:]))
        return alone + _JOINED * _measured(functools.partial(torch.add, residual, residual))


@contextmanager
def _device_lock(device: torch.device, until: float) -> Iterator[None]:
    """Held while a device is measured, by one build at a time; not beyond the time of the build."""
    lock = FileLock(Path(tempfile.gettempdir(), f"trt-engine-measure-{os.getuid()}-{device.index or 0}.lock"))
    with suppress(Timeout):
        lock.acquire(timeout=max(until - time.monotonic(), 0.0))
    try:
        yield
    finally:
        lock.release()


def _operands(product: Product, device: torch.device) -> tuple[Tensor, ...]:
    """Random arguments of `plain_linear`."""
    kind, out_kind = getattr(torch, product.factor_type), getattr(torch, product.out_type)
    quantized = kind in (torch.int8, torch.float8_e4m3fn)

    def drawn(*shape: int) -> Tensor:
        values = torch.randn(*shape, device=device)
        return (values * 40).clamp(-127, 127).to(kind) if quantized else values.to(kind)

    x, weight = drawn(product.rows, product.depth), drawn(product.columns, product.depth).t()
    bias = torch.randn(product.columns, device=device).to(out_kind) if product.has_bias else None
    factors = torch.full((product.columns,), product.depth**-0.5 / 1600, device=device) if quantized else None
    residual = torch.randn(product.rows, product.columns, device=device).to(out_kind) if product.has_residual else None
    return x, weight, bias, factors, residual, product.activation, 0.02 if product.quantizes else 0.0, out_kind


def _measured(call: Callable[[], Tensor]) -> float:
    """Microseconds of one call, many in a CUDA graph; the best of a few rounds."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other candidates compile beside it
        for _ in range(_REPEATS):
            call()
    times: list[float] = []
    for _ in range(_ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / _REPEATS * 1e3)
    return min(times)
