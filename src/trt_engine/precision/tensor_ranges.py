"""Overflow forecast: find the tensors outside the range of FP16, BF16 and FP8 in one FP32 pass, before a build.

Keeps a few statistics and a histogram of magnitudes in quarter octaves per tensor. The result lists the nodes to keep in
FP32, each with its reason.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import numbers
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from trt_engine.atomic_io import found_instead
from trt_engine.config.precision import RangesConfig
from trt_engine.errors import FeedError, UsageError
from trt_engine.graph import walk
from trt_engine.graph.edit_graph import consumers_of
from trt_engine.graph.load import check_onnxruntime, open_model, parse_errors
from trt_engine.graph.module_paths import ModulePaths, add_modules
from trt_engine.graph.shape_inference import Trace, trace
from trt_engine.model import Model
from trt_engine.precision.activation_probe import ActivationProbe
from trt_engine.precision.formats import FORMATS
from trt_engine.precision.quantize_checks import random_shapes
from trt_engine.precision.samples import Batch, PreprocessFunction, Samples, open_samples, random_samples
from trt_engine.progress import progress_counter
from trt_engine.records.base import Finding
from trt_engine.records.precision import Exclusion, RangesReport, TensorRange
from trt_engine.runtime.feeds import read_values
from trt_engine.tensors import suggest

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
_FP16, _BF16, _FP8 = FORMATS["fp16"], FORMATS["bf16"], FORMATS["fp8"]
_UNDERFLOW_FP16 = 2.0**-25
"""Half of FP16's smallest subnormal: values up to this round to 0."""
_UNDERFLOW_FP8 = 2.0**-10
_MIN_REPORTED_SHARE = 0.5
"""Fraction of a tensor's values that must underflow to be reported."""
_RANDOM_BATCHES = 4
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)


def ranges(
    model: Model | Path | str,
    calib_data: Any = None,
    *,
    preprocess: PreprocessFunction | None = None,
    config: RangesConfig | None = None,
    **settings: Any,
) -> RangesReport:
    """Measure the range of every floating-point tensor and constant, and find what FP16, BF16 and FP8 cannot represent.

    `calib_data`: see `open_samples`. Without it a few random batches run, with a warning. `settings`: fields of
    `RangesConfig`. A tensor within `headroom` of FP16's largest value is reported and kept out of FP16. Raises `UsageError`
    and `FeedError` for data that does not fit, `ModelError` for a model that ONNX Runtime does not run.
    """
    config = dataclasses.replace(config or RangesConfig(), **settings)
    started = time.monotonic()
    model = model if isinstance(model, Model) else open_model(model)
    proto = model.proto
    check_onnxruntime(model)
    given = read_values(config.inputs, model.signature)
    if calib_data is None:
        wanted = random_shapes(model.signature, config.batch, config.shapes, given)
        samples = random_samples(model, wanted, _RANDOM_BATCHES, config.seed, given)
        if samples.random:
            log.warning("no data given: the ranges are those of random inputs, and real ones may differ widely")
    else:
        samples = open_samples(
            calib_data,
            model.signature,
            batch=config.batch,
            limit=config.max_samples,
            preprocess=preprocess,
            given=given,
            model=model,
        )
    wires = _Connections.from_proto(proto)
    pass_ = _RangesRun(model, samples, config.memory_mib)
    pass_.run()
    with parse_errors(model.path):
        constants = list(_constant_stats(proto, model.path.parent))
    judge = _RangeChecker(wires, config.headroom)
    records = [seen.to_record(name, wires.producers.get(name)) for name, seen in pass_.stats.items()]
    for record in records:
        judge.check_tensor(record)
    for reduction in pass_.reductions:
        judge.check_reduction(reduction)
    for item in constants:
        judge.check_constant(item)
    paths = ModulePaths(proto)
    warnings = [*pass_.warnings(samples), *samples.omission_messages()]
    return RangesReport(
        model=str(model.path),
        digest=model.digest,
        calib_data=samples.description,
        random=samples.random,
        batches=pass_.batches,
        rows=pass_.rows,
        headroom=config.headroom,
        tensors=add_modules(records, paths, "name"),
        constants=add_modules([item.to_record() for item in constants], paths, "name"),
        findings=add_modules(judge.findings, paths, "location"),
        exclude=add_modules(judge.exclude.values(), paths),
        wall_s=time.monotonic() - started,
        warnings=tuple(warnings),
        skipped=dict(samples.skipped),
    )


def out_of_fp16(model: Model, largest: Mapping[str, Any]) -> dict[str, str]:
    """The nodes next to tensors that FP16 cannot represent, with the reasons of `ranges`; `largest` are absolute values.

    Raises `UsageError` for a tensor that the model does not have, and for what is not a number of 0 or more.
    """
    judge = _RangeChecker(_Connections.from_proto(model.proto), RangesConfig().headroom)
    for name, value in largest.items():
        if not judge.connections.adjacent_nodes(name):
            known = [*judge.connections.producers, *(spec.name for spec in model.signature.inputs)]
            raise UsageError(f"the model has no tensor `{name}`", hint=suggest(name, known))
        if not isinstance(value, numbers.Real) or not float(value) >= 0:
            raise UsageError(
                f"the range of `{name}` is {found_instead(value)}, expected its largest absolute value",
                hint='as `ranges={"scores": 7e4}`',
            )
        stats = _TensorStats("activation", minimum=-float(value), maximum=float(value))
        judge.check_tensor(stats.to_record(name, None))
    return {node: item.reason for node, item in judge.exclude.items()}


# ------------------------------------------------------------------------------------------------ the graph


@dataclass(frozen=True, slots=True)
class _Connections:
    """Producers and consumers of tensors, including bodies of If, Loop and Scan."""

    producers: dict[str, NodeProto]
    consumers: dict[str, list[NodeProto]]

    @classmethod
    def from_proto(cls, proto: ModelProto) -> _Connections:
        nodes = walk.all_nodes(proto)
        return cls({name: node for node in reversed(nodes) for name in node.output}, consumers_of(nodes))

    def adjacent_nodes(self, name: str) -> list[NodeProto]:
        """The producer and the consumers of a tensor."""
        maker = self.producers.get(name)
        return ([maker] if maker is not None else []) + self.consumers.get(name, [])


# ------------------------------------------------------------------------------------------------ what passes by


@dataclass(slots=True)
class _TensorStats:
    """Statistics of one tensor. 1024 histogram bins: exponent and two mantissa bits."""

    kind: Literal["input", "activation"]
    elements: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf
    zeros: int = 0
    nan: int = 0
    infinite: int = 0
    fp16_overflows: int = 0
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
        self.minimum, self.maximum = min(self.minimum, least), max(self.maximum, greatest)
        if max(-least, greatest) > _FP16.largest:
            self.fp16_overflows += int(np.count_nonzero(np.abs(data) > _FP16.largest))
        self.zeros += data.size - int(np.count_nonzero(data))
        self.bins += np.bincount((data.view(np.uint32) >> 21) & 0x3FF, minlength=1024)

    def fraction_below(self, limit: float) -> float:
        """Fraction of finite values that are nonzero and smaller than `limit`; exact for powers of two."""
        counted = self.elements - self.nan - self.infinite
        if not counted or limit <= 0:
            return 0.0
        bits = int(np.float32(limit).view(np.uint32))
        index, part = bits >> 21, (bits & 0x1FFFFF) / (1 << 21)
        return max(0.0, float(self.bins[:index].sum()) + part * float(self.bins[index]) - self.zeros) / counted

    def to_record(self, name: str, maker: NodeProto | None) -> TensorRange:
        seen = self.minimum <= self.maximum
        absmax = max(abs(self.minimum), abs(self.maximum)) if seen else 0.0
        scale = absmax / _FP8.largest
        counted = max(1, self.elements - self.nan - self.infinite)
        return TensorRange(
            name=name,
            kind=self.kind,
            node=walk.label(maker) if maker is not None else None,
            operator=maker.op_type if maker is not None else None,
            elements=self.elements,
            min=self.minimum if seen else 0.0,
            max=self.maximum if seen else 0.0,
            absmax=absmax,
            zero_share=self.zeros / counted,
            nan=self.nan,
            infinite=self.infinite,
            fp16_overflow=self.fp16_overflows / counted,
            fp16_subnormal=self.fraction_below(_FP16.smallest_normal),
            fp16_underflow=self.fraction_below(_UNDERFLOW_FP16),
            bf16_subnormal=self.fraction_below(_BF16.smallest_normal),
            fp8_subnormal=self.fraction_below(scale * _FP8.smallest_normal),
            fp8_underflow=self.fraction_below(scale * _UNDERFLOW_FP8),
        )


@dataclass(slots=True)
class _Reduction:
    """A sum of squares inside a node, and its largest value."""

    node: NodeProto
    tensor: str
    axes: tuple[int, ...] | None
    centred: bool = False
    """The mean is subtracted first."""
    squared: bool = False
    """The tensor contains squares."""
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


def _reductions(proto: ModelProto, traced: Trace, connections: _Connections) -> Iterator[_Reduction]:
    """Find the nodes of the main graph that sum squares."""
    for node in proto.graph.node:
        given = walk.attributes(node)
        op, first = node.op_type, node.input[0] if node.input else ""
        if op in ("ReduceSumSquare", "ReduceL2"):
            yield _Reduction(node, first, _axes(node, given, traced))
        elif op in ("ReduceSum", "ReduceMean") and _is_square(connections.producers.get(first), traced):
            yield _Reduction(node, first, _axes(node, given, traced), squared=True)
        elif op in ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"):
            rank = len(traced.tensors[first].shape or ()) if first in traced.tensors else 0
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


def _axes(node: NodeProto, attrs: Mapping[str, Any], traced: Trace) -> tuple[int, ...] | None:
    """The axes of a Reduce node, from its attribute or input; None is all axes."""
    if "axes" in attrs:
        return tuple(int(axis) for axis in attrs["axes"])
    fact = traced.tensors.get(node.input[1]) if len(node.input) > 1 and node.input[1] else None
    if fact is not None and fact.value is not None and fact.value.size:
        return tuple(int(axis) for axis in fact.value.reshape(-1))
    return () if attrs.get("noop_with_empty_axes") else None


def _is_square(maker: NodeProto | None, traced: Trace) -> bool:
    if maker is None or len(maker.input) < 2:
        return False
    fact = traced.tensors.get(maker.input[1])
    squared = maker.op_type == "Pow" and fact is not None and fact.value is not None and bool(np.all(fact.value == 2))
    return squared or (maker.op_type == "Mul" and maker.input[0] == maker.input[1])


class _RangesRun:
    """The pass over the data."""

    def __init__(self, model: Model, samples: Samples, memory_mib: int) -> None:
        self.model, self.samples, self.memory_mib = model, samples, memory_mib
        self.stats: dict[str, _TensorStats] = {}
        self.reductions: list[_Reduction] = []
        self.batches = self.rows = 0

    def run(self) -> None:
        wanted: dict[str, list[_Reduction]] = {}
        count = progress_counter("ranges", "batches")
        for probe, window in ActivationProbe.windows(self.model, None, self.samples, memory_mib=self.memory_mib):
            if not self.batches:
                wanted = self._prepare(probe, window[0])
            for _, name, array in probe.read(window):
                self.stats[name].add(array)
                for reduction in wanted.get(name, ()):
                    reduction.add(array)
            self.batches += len(window)
            self.rows += sum(batch.rows for batch in window)
            count(self.batches, self.samples.total)
        if not self.batches:
            raise FeedError("the data has no batches", hint="an iterator is exhausted after one pass")

    def _prepare(self, probe: ActivationProbe, first: Batch) -> dict[str, list[_Reduction]]:
        """Empty statistics of each tensor; the reductions by the tensor they read."""
        shapes = {name: tuple(int(size) for size in array.shape) for name, array in first.feeds.items()}
        proto = self.model.proto
        self.stats = {name: _TensorStats("input" if name in first.feeds else "activation") for name in probe.tensors}
        self.reductions = list(_reductions(proto, trace(proto, shapes), _Connections.from_proto(proto)))
        wanted: dict[str, list[_Reduction]] = {}
        for reduction in self.reductions:
            wanted.setdefault(reduction.tensor, []).append(reduction)
        return wanted

    def warnings(self, samples: Samples) -> list[str]:
        said = []
        if samples.random:
            said.append(
                "random inputs: real values may differ widely from these ranges; give data before trusting them"
            )
        main = self.model.proto.graph
        places = (place for place in self.model.graph.nodes if place.owner is not main)
        if inner := sum(bool(name) for place in places for name in place.node.output):
            said.append(f"{inner} tensors inside If, Loop, Scan or local functions are not checked")
        kinds = {item.type.tensor_type.elem_type for item in (*main.value_info, *main.input)}
        kinds |= {tensor.data_type for tensor in main.initializer}
        if TensorProto.FLOAT16 in kinds or TensorProto.BFLOAT16 in kinds:
            said.append("parts of this model are in 16 bits: overflows there appear as infinities")
        return said


# ------------------------------------------------------------------------------------------------ constants


@dataclass(slots=True)
class _ConstantStats:
    """Statistics of one constant."""

    name: str
    stats: _TensorStats
    scalar: float | None

    def to_record(self) -> TensorRange:
        return replace(self.stats.to_record(self.name, None), kind="constant")


def _constant_stats(proto: ModelProto, folder: Path) -> Iterator[_ConstantStats]:
    """Yield every floating-point initializer and Constant, one at a time."""
    for graph in walk.graphs(proto):
        for tensor in graph.initializer:
            yield from _tensor_stats(tensor.name, tensor, folder)
    for place in walk.nodes(proto):
        if place.node.op_type == "Constant" and walk.domain_of(place.node) == "" and place.node.output:
            for name, value in walk.attributes(place.node).items():
                if name == "value" and isinstance(value, TensorProto):
                    yield from _tensor_stats(place.node.output[0], value, folder)
                elif name in ("value_float", "value_floats"):
                    yield from _array_stats(place.node.output[0], np.atleast_1d(np.asarray(value, np.float32)))


def _tensor_stats(name: str, tensor: TensorProto, folder: Path) -> Iterator[_ConstantStats]:
    if tensor.data_type in _FLOATS:
        yield from _array_stats(name, numpy_helper.to_array(tensor, str(folder)))


def _array_stats(name: str, array: Array) -> Iterator[_ConstantStats]:
    seen = _TensorStats("activation")
    seen.add(array)
    yield _ConstantStats(name, seen, float(array.reshape(-1)[0]) if array.size == 1 else None)


# ------------------------------------------------------------------------------------------------ the judgement


class _RangeChecker:
    """Derives findings and the nodes to keep in FP32 from ranges."""

    def __init__(self, connections: _Connections, headroom: float) -> None:
        self.connections, self.headroom = connections, headroom
        self.findings: list[Finding] = []
        self.exclude: dict[str, Exclusion] = {}

    def _report(
        self,
        code: str,
        severity: Literal["info", "warning", "error"],
        message: str,
        where: str,
        hint: str | None = None,
        *,
        keep: Sequence[NodeProto] = (),
        tensor: str = "",
    ) -> None:
        """Add a finding, and for its reason the nodes to keep in FP32; `tensor` is the one at fault, if not `where`."""
        self.findings.append(Finding(code, severity, message, where, hint))
        for node in keep:
            label = walk.label(node)
            self.exclude.setdefault(label, Exclusion(label, node.op_type, code, message, tensor or where))

    def check_tensor(self, found: TensorRange) -> None:
        around, name = self.connections.adjacent_nodes(found.name), found.name
        if found.nan:
            self._report("not-a-number", "error", f"`{name}` holds NaN in FP32 already ({found.nan} values)", name)
        if found.infinite:
            reason = f"`{name}` holds infinities in FP32 already ({found.infinite} values)"
            self._report("infinite", "info", reason, name, "a mask of -inf stays one in FP16; check any other")
        times = found.absmax / _FP16.largest
        if times > 1:
            reason = f"`{name}` reaches {found.absmax:.4g}, {times:.3g} times FP16's largest number"
            self._report("fp16-overflow", "error", reason, name, "leave its nodes in FP32, or take BF16", keep=around)
        elif times * self.headroom > 1:
            reason = (
                f"`{name}` reaches {found.absmax:.4g}, {times:.0%} of FP16's largest number: "
                f"within the margin of {self.headroom:g}"
            )
            hint = "calibrate with more data, or `--headroom 1`"
            self._report("fp16-near-overflow", "warning", reason, name, hint, keep=around)
        elif 0 < found.absmax < _FP16.smallest_normal:
            reason = f"`{name}` stays below {found.absmax:.3g}, where FP16 loses its digits"
            self._report(
                "fp16-underflow", "warning", reason, name, "leave its nodes in FP32, or take BF16", keep=around
            )
        elif found.fp16_underflow > _MIN_REPORTED_SHARE:
            reason = f"{found.fp16_underflow:.0%} of the values of `{name}` become 0 in FP16"
            self._report("fp16-vanishing", "info", reason, name)
        if found.absmax > _BF16.largest:
            self._report("bf16-overflow", "error", f"`{name}` reaches {found.absmax:.4g}, beyond BF16", name)
        if found.bf16_subnormal > _MIN_REPORTED_SHARE:
            reason = f"{found.bf16_subnormal:.0%} of the values of `{name}` are subnormal in BF16"
            self._report("bf16-subnormal", "info", reason, name)
        if found.fp8_underflow > _MIN_REPORTED_SHARE:
            reason = f"{found.fp8_underflow:.0%} of the values of `{name}` become 0 in FP8 under one scale"
            hint = "a range by mse, percentile or entropy instead of the extremes, or leave it in FP16"
            self._report("fp8-vanishing", "info", reason, name, hint)

    def check_reduction(self, found: _Reduction) -> None:
        label, times = walk.label(found.node), found.largest / _FP16.largest
        if times * self.headroom <= 1:
            return
        reason = f"the squares `{label}` adds up reach {found.largest:.4g}, {times:.3g} times FP16's largest number"
        severe: Literal["error", "warning"] = "error" if times > 1 else "warning"
        code = "fp16-square-sum" if times > 1 else "fp16-near-square-sum"
        hint = "leave it in FP32 (normalisations usually are)"
        self._report(code, severe, reason, label, hint, keep=[found.node], tensor=found.tensor)

    def check_constant(self, item: _ConstantStats) -> None:
        name, seen = item.name, item.stats
        readers = [node for node in self.connections.consumers.get(name, ()) if node.op_type != "Clip"]
        # an infinite bound of Clip is none
        if seen.nan:
            self._report("constant-not-a-number", "error", f"the constant `{name}` holds NaN", name, "export again")
        if seen.infinite:
            reason = f"the constant `{name}` holds {seen.infinite} infinities"
            hint = "a row that is masked as a whole becomes NaN; a large finite number does not"
            self._report("constant-infinite", "warning", reason, name, hint)
        if seen.fp16_overflows:
            largest = seen.minimum if -seen.minimum > seen.maximum else seen.maximum
            reason = f"the constant `{name}` holds {largest:.4g}, which is infinite in FP16"
            if readers:
                hint = "a mask may hold -65504 instead; else leave its readers in FP32"
                self._report("constant-overflow", "error", reason, name, hint, keep=readers)
            else:
                reason += "; as a bound of Clip that changes nothing"
                self._report("constant-overflow", "info", reason, name)
        elif item.scalar is not None and 0 < abs(item.scalar) <= _UNDERFLOW_FP16:
            reason = f"the constant `{name}` is {item.scalar:.3g}, which is 0 in FP16"
            self._report("constant-vanishes", "warning", reason, name, "leave its readers in FP32", keep=readers)
