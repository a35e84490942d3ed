"""The overflow forecast: one FP32 pass that tells which tensors leave the range of FP16, BF16 and FP8, before anyone builds.

Each tensor passes by once and leaves a few numbers and a histogram of its magnitudes in quarter octaves; nothing else is
kept. What FP16 cannot hold ends in a list of nodes to leave in FP32, each with its reason.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from trt_engine.errors import FeedError, UsageError
from trt_engine.graph import walk
from trt_engine.graph.load import check_onnxruntime, legible, open_model, read_proto
from trt_engine.graph.module_paths import ModulePaths, with_modules
from trt_engine.graph.trace import Trace, attributes, trace
from trt_engine.model import Model
from trt_engine.precision.formats import FORMATS
from trt_engine.precision.observe import Probe, inputs_are_finite
from trt_engine.precision.samples import Preprocess, Samples, open_samples, random_samples
from trt_engine.records import Exclusion, Finding, RangesReport, TensorRange
from trt_engine.runtime.feeds import shapes_of
from trt_engine.tensors import Shape

__all__ = ["ranges"]

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
_FP16, _BF16, _FP8 = FORMATS["fp16"], FORMATS["bf16"], FORMATS["fp8"]
_VANISHES_FP16 = 2.0**-25
"""Half of FP16's least number: from here down a value becomes 0."""
_VANISHES_FP8 = 2.0**-10
_MANY = 0.5
"""Share of a tensor's values that must vanish before it is worth a word."""
_RANDOM_BATCHES = 4
_SAID_EVERY_S = 10.0
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)


def ranges(
    model: Model | Path | str,
    data: Any = None,
    *,
    preprocess: Preprocess | None = None,
    batch: int = 1,
    limit: int | None = None,
    shapes: Mapping[str, Shape] | None = None,
    margin: float = 2.0,
    memory_mib: int = 512,
    seed: int = 0,
) -> RangesReport:
    """The range of every floating-point tensor and constant of a model, and what of it FP16, BF16 and FP8 cannot hold.

    `data` is what `open_samples` takes. Without it a few random batches run, which says little about real values; report
    and log say so. `margin` is how many times larger than here values may become in use: a tensor that comes that close to
    FP16's largest number is reported as well, and kept out of FP16.
    """
    if not margin >= 1:
        raise UsageError(
            f"the margin is {margin:g}, expected 1 or more", hint="2 leaves room for twice the values seen"
        )
    started = time.monotonic()
    model = model if isinstance(model, Model) else open_model(model)
    proto = read_proto(model.path)
    check_onnxruntime(model, proto)
    if data is None:
        wanted = shapes_of(model.signature, None, batch=batch if model.signature.batch_axis else None, overrides=shapes)
        samples = random_samples(model, wanted, _RANDOM_BATCHES, seed)
        log.warning("no data given: the ranges are those of random inputs, and real ones may lie far from them")
    else:
        samples = open_samples(data, model.signature, batch=batch, limit=limit, preprocess=preprocess)
    wires = _Wires.of(proto)
    pass_ = _Pass(model, proto, samples, memory_mib)
    pass_.run()
    with legible(model.path):
        constants = list(_constants(proto, model.path.parent))
    judge = _Judge(wires, margin)
    for name, seen in pass_.seen.items():
        judge.tensor(seen.range_of(name, wires.maker(name)))
    for reduction in pass_.reductions:
        judge.reduction(reduction)
    for item in constants:
        judge.constant(item)
    paths = ModulePaths(proto)
    warnings = [*pass_.warnings(samples), *samples.say_what_was_left_out()]
    return RangesReport(
        model=str(model.path),
        digest=model.digest,
        data=samples.describe,
        random=samples.random,
        batches=pass_.batches,
        rows=pass_.rows,
        margin=margin,
        tensors=with_modules(
            [seen.range_of(name, wires.maker(name)) for name, seen in pass_.seen.items()], paths, "name"
        ),
        constants=with_modules([item.range_of() for item in constants], paths, "name"),
        findings=with_modules(judge.findings, paths, "where"),
        exclude=with_modules(judge.exclude.values(), paths),
        wall_s=time.monotonic() - started,
        warnings=tuple(warnings),
        skipped=dict(samples.skipped),
    )


# ------------------------------------------------------------------------------------------------ the graph


@dataclass(frozen=True, slots=True)
class _Wires:
    """Who makes a tensor and who reads it, bodies of If, Loop and Scan included."""

    makers: dict[str, NodeProto]
    readers: dict[str, list[NodeProto]]

    @classmethod
    def of(cls, proto: ModelProto) -> _Wires:
        makers: dict[str, NodeProto] = {}
        readers: dict[str, list[NodeProto]] = {}
        for place in walk.nodes(proto):
            for name in place.node.output:
                makers.setdefault(name, place.node)
            for name in dict.fromkeys(place.node.input):
                readers.setdefault(name, []).append(place.node)
        return cls(makers, readers)

    def maker(self, name: str) -> NodeProto | None:
        return self.makers.get(name)

    def around(self, name: str) -> list[NodeProto]:
        """The nodes that must agree on this tensor's type."""
        maker = self.makers.get(name)
        return ([maker] if maker is not None else []) + self.readers.get(name, [])


# ------------------------------------------------------------------------------------------------ what passes by


@dataclass(slots=True)
class _Seen:
    """What one tensor leaves behind. The histogram is by exponent and the first two digits after it: 1024 bins."""

    kind: Literal["input", "activation"]
    elements: int = 0
    least: float = math.inf
    greatest: float = -math.inf
    zeros: int = 0
    nan: int = 0
    infinite: int = 0
    beyond_fp16: int = 0
    bins: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(1024, np.int64))

    def add(self, array: Array) -> None:
        with np.errstate(over="ignore"):
            data = np.ascontiguousarray(array.reshape(-1), np.float32)
        self.elements += data.size
        if not data.size:
            return
        least, greatest = float(data.min()), float(data.max())
        if not (math.isfinite(least) and math.isfinite(greatest)):
            self.nan += int(np.isnan(data).sum())
            self.infinite += int(np.isinf(data).sum())
            data = data[np.isfinite(data)]
            if not data.size:
                return
            least, greatest = float(data.min()), float(data.max())
        self.least, self.greatest = min(self.least, least), max(self.greatest, greatest)
        if max(-least, greatest) > _FP16.largest:
            self.beyond_fp16 += int(np.count_nonzero(np.abs(data) > _FP16.largest))
        self.zeros += data.size - int(np.count_nonzero(data))
        self.bins += np.bincount((data.view(np.uint32) >> 21) & 0x3FF, minlength=1024)

    def below(self, limit: float) -> float:
        """Share of the values that are not zero and smaller than `limit`; exact for powers of two."""
        counted = self.elements - self.nan - self.infinite
        if not counted or limit <= 0:
            return 0.0
        bits = int(np.float32(limit).view(np.uint32))
        index, part = bits >> 21, (bits & 0x1FFFFF) / (1 << 21)
        return max(0.0, float(self.bins[:index].sum()) + part * float(self.bins[index]) - self.zeros) / counted

    def range_of(self, name: str, maker: NodeProto | None) -> TensorRange:
        seen = self.least <= self.greatest
        absmax = max(abs(self.least), abs(self.greatest)) if seen else 0.0
        scale = absmax / _FP8.largest
        counted = max(1, self.elements - self.nan - self.infinite)
        return TensorRange(
            name=name,
            kind=self.kind,
            node=walk.label(maker) if maker is not None else None,
            operator=maker.op_type if maker is not None else None,
            elements=self.elements,
            min=self.least if seen else 0.0,
            max=self.greatest if seen else 0.0,
            absmax=absmax,
            zero=self.zeros / counted,
            nan=self.nan,
            infinite=self.infinite,
            fp16_beyond=self.beyond_fp16 / counted,
            fp16_subnormal=self.below(_FP16.smallest_normal),
            fp16_vanishing=self.below(_VANISHES_FP16),
            bf16_subnormal=self.below(_BF16.smallest_normal),
            fp8_subnormal=self.below(scale * _FP8.smallest_normal),
            fp8_vanishing=self.below(scale * _VANISHES_FP8),
        )


@dataclass(slots=True)
class _Reduction:
    """A sum of squares somewhere inside a node, and the largest one met."""

    node: NodeProto
    tensor: str
    axes: tuple[int, ...] | None
    centred: bool = False
    """The mean is taken off first."""
    squared: bool = False
    """The tensor holds squares already."""
    groups: int | None = None
    largest: float = 0.0

    def add(self, array: Array) -> None:
        data = array.astype(np.float64)
        if self.groups and data.ndim > 1 and data.shape[1] % self.groups == 0:
            data = data.reshape(data.shape[0], self.groups, -1)
        axes = None if self.axes is None else tuple(axis for axis in self.axes if -data.ndim <= axis < data.ndim)
        if not data.size or not np.isfinite(data).all():
            return
        if self.centred:
            data = data - data.mean(axis=axes, keepdims=True)
        sums = (np.abs(data) if self.squared else np.square(data)).sum(axis=axes)
        self.largest = max(self.largest, float(np.max(sums)))


def _reductions(proto: ModelProto, traced: Trace, wires: _Wires) -> Iterator[_Reduction]:
    """The nodes of the main graph that add up squares."""
    for node in proto.graph.node:
        given = attributes(node)
        op, first = node.op_type, node.input[0] if node.input else ""
        if op in ("ReduceSumSquare", "ReduceL2"):
            yield _Reduction(node, first, _axes(node, given, traced))
        elif op in ("ReduceSum", "ReduceMean") and _is_square(wires.maker(first), traced):
            yield _Reduction(node, first, _axes(node, given, traced), squared=True)
        elif op in ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"):
            rank = len(traced.facts[first].shape or ()) if first in traced.facts else 0
            axis = int(given.get("axis", -1))
            axes = tuple(range(axis, 0)) if axis < 0 else tuple(range(axis, rank)) or (-1,)
            yield _Reduction(node, first, axes, centred=op == "LayerNormalization")
        elif op == "InstanceNormalization":
            yield _Reduction(node, first, tuple(range(2, 8)), centred=True)
        elif op == "GroupNormalization":
            yield _Reduction(node, first, (2,), centred=True, groups=int(given.get("num_groups", 1)))
        elif op == "MeanVarianceNormalization":
            yield _Reduction(node, first, tuple(given.get("axes", (0, 2, 3))), centred=True)
        elif op == "LpNormalization" and int(given.get("p", 2)) == 2:
            yield _Reduction(node, first, (int(given.get("axis", -1)),))


def _axes(node: NodeProto, given: Mapping[str, Any], traced: Trace) -> tuple[int, ...] | None:
    """The axes of a Reduce node, an attribute or an input by its opset; None is all of them."""
    if "axes" in given:
        return tuple(int(axis) for axis in given["axes"])
    fact = traced.facts.get(node.input[1]) if len(node.input) > 1 and node.input[1] else None
    if fact is not None and fact.value is not None and fact.value.size:
        return tuple(int(axis) for axis in fact.value.reshape(-1))
    return () if given.get("noop_with_empty_axes") else None


def _is_square(maker: NodeProto | None, traced: Trace) -> bool:
    if maker is None or len(maker.input) < 2:
        return False
    if maker.op_type == "Mul":
        return bool(maker.input[0] == maker.input[1])
    fact = traced.facts.get(maker.input[1])
    return maker.op_type == "Pow" and fact is not None and fact.value is not None and bool(np.all(fact.value == 2))


class _Pass:
    """The one run over the data."""

    def __init__(self, model: Model, proto: ModelProto, samples: Samples, memory_mib: int) -> None:
        self.model, self.proto, self.samples, self.memory_mib = model, proto, samples, memory_mib
        self.seen: dict[str, _Seen] = {}
        self.reductions: list[_Reduction] = []
        self.batches = self.rows = 0

    def run(self) -> None:
        probe: Probe | None = None
        wanted: dict[str, list[_Reduction]] = {}
        told = time.monotonic()
        batches = iter(self.samples)
        first = next(batches, None)
        if first is None:
            raise FeedError("the data gave not one batch", hint="an iterator is used up after one pass")
        probe = Probe(self.model.path, self.proto, None, first, memory_mib=self.memory_mib)
        shapes = {name: tuple(int(size) for size in array.shape) for name, array in first.feeds.items()}
        self.reductions = list(_reductions(self.proto, trace(self.proto, shapes), _Wires.of(self.proto)))
        for reduction in self.reductions:
            wanted.setdefault(reduction.tensor, []).append(reduction)
        for name in probe.tensors:
            self.seen[name] = _Seen("input" if name in first.feeds else "activation")
        window = [first]
        while window:
            for batch in window:
                inputs_are_finite(batch)
            for _, name, array in probe.look(window):
                self.seen[name].add(array)
                for reduction in wanted.get(name, ()):
                    reduction.add(array)
            self.batches += len(window)
            self.rows += sum(batch.rows for batch in window)
            if time.monotonic() - told >= _SAID_EVERY_S:
                told = time.monotonic()
                of = f" of {self.samples.total}" if self.samples.total is not None else ""
                log.info("ranges: %d%s batches", self.batches, of)
            window = list(itertools.islice(batches, probe.window))

    def warnings(self, samples: Samples) -> list[str]:
        said = []
        if samples.random:
            said.append("random inputs: real values may lie far from these ranges; give data before trusting them")
        inner = sum(
            1
            for place in walk.nodes(self.proto)
            if place.owner is not self.proto.graph
            for name in place.node.output
            if name
        )
        if inner:
            said.append(f"{inner} tensors inside If, Loop, Scan or local functions are not looked at")
        kinds = {item.type.tensor_type.elem_type for item in (*self.proto.graph.value_info, *self.proto.graph.input)}
        kinds |= {tensor.data_type for tensor in self.proto.graph.initializer}
        if TensorProto.FLOAT16 in kinds or TensorProto.BFLOAT16 in kinds:
            said.append("parts of this model are in 16 bits already: what overflows there shows as infinities")
        return said


# ------------------------------------------------------------------------------------------------ constants


@dataclass(slots=True)
class _Constant:
    """One stored tensor."""

    name: str
    seen: _Seen
    scalar: float | None

    def range_of(self) -> TensorRange:
        return replace(self.seen.range_of(self.name, None), kind="constant")


def _constants(proto: ModelProto, folder: Path) -> Iterator[_Constant]:
    """Every floating-point initializer and Constant, one in memory at a time."""
    for graph in walk.graphs(proto):
        for tensor in graph.initializer:
            yield from _constant(tensor.name, tensor, folder)
    for place in walk.nodes(proto):
        if place.node.op_type == "Constant" and walk.domain_of(place.node) == "" and place.node.output:
            for name, value in attributes(place.node).items():
                if name == "value" and isinstance(value, TensorProto):
                    yield from _constant(place.node.output[0], value, folder)
                elif name in ("value_float", "value_floats"):
                    yield from _stored(place.node.output[0], np.atleast_1d(np.asarray(value, np.float32)))


def _constant(name: str, tensor: TensorProto, folder: Path) -> Iterator[_Constant]:
    if tensor.data_type in _FLOATS:
        yield from _stored(name, numpy_helper.to_array(tensor, str(folder)))


def _stored(name: str, array: Array) -> Iterator[_Constant]:
    seen = _Seen("activation")
    seen.add(array)
    yield _Constant(name, seen, float(array.reshape(-1)[0]) if array.size == 1 else None)


# ------------------------------------------------------------------------------------------------ the judgement


class _Judge:
    """Turns ranges into findings, and findings into nodes to leave in FP32."""

    def __init__(self, wires: _Wires, margin: float) -> None:
        self.wires, self.margin = wires, margin
        self.findings: list[Finding] = []
        self.exclude: dict[str, Exclusion] = {}

    def _say(
        self,
        code: str,
        severity: Literal["info", "warning", "error"],
        message: str,
        where: str,
        hint: str | None = None,
    ) -> None:
        self.findings.append(Finding(code, severity, message, where, hint))

    def _keep(self, nodes: Sequence[NodeProto], code: str, reason: str, tensor: str) -> None:
        for node in nodes:
            self.exclude.setdefault(walk.label(node), Exclusion(walk.label(node), node.op_type, code, reason, tensor))

    def tensor(self, found: TensorRange) -> None:
        around, name = self.wires.around(found.name), found.name
        if found.nan:
            self._say("not-a-number", "error", f"`{name}` holds NaN in FP32 already ({found.nan} values)", name)
        if found.infinite:
            self._say(
                "infinite", "info", f"`{name}` holds infinities in FP32 already ({found.infinite} values)", name,
                "a mask of -inf stays one in FP16; anything else is worth a look",
            )  # fmt: skip
        times = found.absmax / _FP16.largest
        if times > 1:
            reason = f"`{name}` reaches {found.absmax:.4g}, {times:.3g} times FP16's largest number"
            self._say("fp16-overflow", "error", reason, name, "leave its nodes in FP32, or take BF16")
            self._keep(around, "fp16-overflow", reason, name)
        elif times * self.margin > 1:
            reason = (
                f"`{name}` reaches {found.absmax:.4g}, {times:.0%} of FP16's largest number: "
                f"within the margin of {self.margin:g}"
            )
            self._say("fp16-near-overflow", "warning", reason, name, "calibrate with more data, or `--margin 1`")
            self._keep(around, "fp16-near-overflow", reason, name)
        elif 0 < found.absmax < _FP16.smallest_normal:
            reason = f"`{name}` stays below {found.absmax:.3g}, where FP16 loses its digits"
            self._say("fp16-underflow", "warning", reason, name, "leave its nodes in FP32, or take BF16")
            self._keep(around, "fp16-underflow", reason, name)
        elif found.fp16_vanishing > _MANY:
            self._say(
                "fp16-vanishing", "info", f"{found.fp16_vanishing:.0%} of the values of `{name}` become 0 in FP16", name
            )
        if found.absmax > _BF16.largest:
            self._say("bf16-overflow", "error", f"`{name}` reaches {found.absmax:.4g}, beyond BF16", name)
        if found.bf16_subnormal > _MANY:
            share = f"{found.bf16_subnormal:.0%}"
            self._say("bf16-subnormal", "info", f"{share} of the values of `{name}` are subnormal in BF16", name)
        if found.fp8_vanishing > _MANY:
            share = f"{found.fp8_vanishing:.0%}"
            self._say(
                "fp8-vanishing", "info", f"{share} of the values of `{name}` become 0 in FP8 under one scale", name,
                "a range by mse, percentile or entropy instead of the extremes, or leave it in FP16",
            )  # fmt: skip

    def reduction(self, found: _Reduction) -> None:
        label, times = walk.label(found.node), found.largest / _FP16.largest
        if times * self.margin <= 1:
            return
        reason = f"the squares `{label}` adds up reach {found.largest:.4g}, {times:.3g} times FP16's largest number"
        severe: Literal["error", "warning"] = "error" if times > 1 else "warning"
        code = "fp16-square-sum" if times > 1 else "fp16-near-square-sum"
        self._say(code, severe, reason, label, "leave it in FP32 (normalisations usually are)")
        self._keep([found.node], code, reason, found.tensor)

    def constant(self, item: _Constant) -> None:
        name, seen = item.name, item.seen
        found = item.range_of()
        readers = [
            node for node in self.wires.readers.get(name, ()) if node.op_type != "Clip"
        ]  # an infinite bound is none
        if found.nan:
            self._say("constant-not-a-number", "error", f"the constant `{name}` holds NaN", name, "export again")
        if found.infinite:
            self._say(
                "constant-infinite", "warning", f"the constant `{name}` holds {found.infinite} infinities", name,
                "a row that is masked as a whole becomes NaN; a large finite number does not",
            )  # fmt: skip
        if seen.beyond_fp16:
            largest = seen.least if -seen.least > seen.greatest else seen.greatest
            reason = f"the constant `{name}` holds {largest:.4g}, which is infinite in FP16"
            if readers:
                self._say(
                    "constant-overflow", "error", reason, name,
                    "a mask may hold -65504 instead; else leave its readers in FP32",
                )  # fmt: skip
                self._keep(readers, "constant-overflow", reason, name)
            else:
                self._say("constant-overflow", "info", f"{reason}; as a bound of Clip that changes nothing", name)
        elif item.scalar is not None and 0 < abs(item.scalar) <= _VANISHES_FP16:
            reason = f"the constant `{name}` is {item.scalar:.3g}, which is 0 in FP16"
            self._say("constant-vanishes", "warning", reason, name, "leave its readers in FP32")
            self._keep(readers, "constant-vanishes", reason, name)
