"""Estimates the memory and work a model needs, before anything computes it.

Shapes come from `trace`, which allocates no tensor of more than a few thousand elements. Two sums are limited: what
depends only on constants (a compiler or shape inference computes it while the file is opened), and peak memory when the
model runs at its declared shapes. Shapes chosen by the caller are not checked here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import onnx
from onnx import GraphProto, ModelProto, TensorProto

from trt_engine.errors import UsageError
from trt_engine.graph import walk
from trt_engine.graph.constants import RANDOM_OPS
from trt_engine.graph.shape_inference import TensorInfo, Trace, TracedNode, flatten, trace
from trt_engine.graph.structure_check import InvalidModel
from trt_engine.limits import CONSTANT_SIZE, CONSTANT_WORK, RUN_SIZE
from trt_engine.model import GraphIndex
from trt_engine.tensors import Shape, dtype
from trt_engine.units import count_elements

_PER_STORED, _PER_FED, _WORK_PER_STORED = 64, 64, 100
"""Extra bytes allowed per stored byte and per input byte: an INT8 embedding is dequantised to FP32, an image grows to a
hundred channels, a low-rank pair of weights is multiplied out."""
_MAX_FOLLOWED_ELEMENTS = 100_000
"""Total vector elements up to which ONNX's shape inference propagates values."""
_INTEGERS = (TensorProto.INT32, TensorProto.INT64)
_NOT_LARGER = frozenset(
    "Compress Unique Slice Reshape Squeeze Unsqueeze Transpose Identity Cast Flatten Trilu TopK Dropout ReduceSum ReduceMax "
    "ReduceMin ReduceMean ReduceProd ArgMax ArgMin Split CumSum Neg Abs Not QuantizeLinear DequantizeLinear".split()
)
"""Operators of ONNX and ONNX Runtime whose result never has more elements than all inputs together; any other whose result
has no known shape, of any domain, is of unknown size."""
_PRODUCTS = frozenset("MatMul Gemm Einsum MatMulInteger QLinearMatMul Conv ConvTranspose".split())


@dataclass(slots=True)
class _Totals:
    """Totals of the estimate, and the node that contributes most."""

    constant: int = 0
    work: int = 0
    largest: tuple[int, str] = (0, "")
    heaviest: tuple[int, str] = (0, "")
    unknown: str = ""
    """First constant or random node whose result size is unknown."""
    known: dict[str, int] = field(default_factory=dict)
    """Upper bound in bytes of each tensor that depends only on constants and random numbers."""
    random: set[str] = field(default_factory=set)
    """Those that random numbers are part of: nothing computes them before the model runs."""


def check_resource_limits(graph: GraphIndex, traced: Trace, nbytes: int) -> None:
    """`InvalidModel` naming the limit if a model of `nbytes` (with weights) exceeds it at its declared shapes, those of the
    trace."""
    main = graph.graphs[0]
    for step in flatten(traced.nodes):  # ONNX Runtime 1.31 aborts (SIGABRT) on a recurrent layer over an empty tensor
        given = step.inputs[0] if step.node.op_type in ("LSTM", "GRU", "RNN") and step.inputs else None
        if given is not None and given.is_static and given.num_elements == 0:
            raise InvalidModel(
                f"runs the {step.node.op_type} `{step.key}` over a tensor with no elements",
                hint="export the model again with sizes of at least 1",
            )
    sums = _Totals()
    for item in main.initializer:
        sums.known[item.name] = _nbytes(traced.tensors.get(item.name))
    for sparse in main.sparse_initializer:
        sums.known[sparse.values.name] = _nbytes(traced.tensors.get(sparse.values.name))
    _add_constants(traced.nodes, sums)
    allowed = CONSTANT_SIZE.value + _PER_STORED * nbytes
    if sums.constant > allowed:
        _, where = sums.largest
        raise InvalidModel(
            f"computes {sums.constant:,} bytes from constants alone, most of them in node `{where}`, more than the "
            f"{allowed:,} that {nbytes:,} bytes of model may",
            hint=CONSTANT_SIZE.hint,
        )
    if sums.unknown and CONSTANT_SIZE.value == CONSTANT_SIZE.default:
        raise InvalidModel(
            f"computes a constant tensor of unknown size in node `{sums.unknown}`",
            hint=f"export it with that part folded; {CONSTANT_SIZE.hint}",
        )
    most_work = CONSTANT_WORK.value + _WORK_PER_STORED * nbytes
    if sums.work > most_work:
        raise InvalidModel(
            f"multiplies constants with each other {sums.work:,} times, most of them in node "
            f"`{sums.heaviest[1]}`, more than the {most_work:,} that {nbytes:,} bytes of model may",
            hint=f"export it with that part folded; {CONSTANT_WORK.hint}",
        )
    _check_inference_memory(main, traced, nbytes, sums)


def infer_shapes(proto: ModelProto, traced: Trace | None = None) -> ModelProto:
    """Run ONNX's shape inference, with its own errors. Values are propagated unless `traced` has large vectors.

    ONNX allocates about 150 bytes per element of a propagated vector, weights included.
    """
    traced = traced if traced is not None else trace(proto, {})
    made = [fact for step in flatten(traced.nodes) for fact in step.outputs]
    stored = [traced.tensors[item.name] for item in proto.graph.initializer if item.data_type in _INTEGERS]
    followed = sum(fact.num_elements for fact in (*made, *stored) if fact.shape is not None and len(fact.shape) < 2)
    found: ModelProto = onnx.shape_inference.infer_shapes(proto, data_prop=followed <= _MAX_FOLLOWED_ELEMENTS)
    return found


# ------------------------------------------------------------------------------------------------ constants


def _add_constants(steps: Sequence[TracedNode], sums: _Totals) -> None:
    """Add the constant results of the steps to the totals."""
    known = sums.known
    for step in steps:
        for body in step.bodies:
            _add_constants(body, sums)
        node = step.node
        if step.folded:  # a few thousand elements at most, including Shape of a static tensor
            sizes = [_nbytes(fact) for fact in step.outputs]
        elif any(name not in known for name in node.input if name) or step.bodies:
            continue
        else:
            sizes = [_max_constant_nbytes(step, fact, sums) for fact in step.outputs]
        for name, size in zip(node.output, sizes, strict=False):
            known[name] = size
        if node.op_type in RANDOM_OPS or not sums.random.isdisjoint(node.input):
            sums.random.update(node.output)
            continue
        total = sum(sizes)
        sums.constant += total
        if total > sums.largest[0]:
            sums.largest = (total, walk.label(node))
        if node.op_type in _PRODUCTS:
            work = _multiplications(step)
            sums.work += work
            sums.heaviest = max(sums.heaviest, (work, walk.label(node)))


def _max_constant_nbytes(step: TracedNode, fact: TensorInfo, sums: _Totals) -> int:
    """Upper bound in bytes of a constant result."""
    if fact.non_tensor_type is not None:
        return 0
    if fact.is_static:
        if step.node.op_type == "Einsum":
            return max(_nbytes(fact), 4 * _multiplications(step))  # intermediate results
        return _nbytes(fact)
    inputs = [sums.known[name] for name in step.node.input if name]
    if step.node.op_type == "NonZero":
        rank = len(step.inputs[0].shape or ()) if step.inputs and step.inputs[0] is not None else 1
        return 8 * max(rank, 1) * max(inputs, default=0)
    if step.node.op_type == "Where":
        widths = [_packed_nbytes(item.elem, (1,)) if item is not None and item.elem else 1 for item in step.inputs]
        return 8 * count_elements([-(-size // width) for size, width in zip(inputs, widths, strict=False)])
    if step.node.op_type not in _NOT_LARGER or walk.domain_of(step.node) not in ("", "com.microsoft"):
        sums.unknown = sums.unknown or walk.label(step.node)
    return sum(inputs) * 8


def _multiplications(step: TracedNode) -> int:
    """Upper bound on the multiplications of a product: result elements times the elements of one reduced input."""
    if step.node.op_type == "Einsum":
        return _einsum_multiplications(step)
    made = sum(fact.num_elements for fact in step.outputs if fact.is_static)
    shapes = [item.shape for item in step.inputs if item is not None and item.is_static and item.shape]
    if step.node.op_type in ("Conv", "ConvTranspose"):
        kernel = shapes[1] if len(shapes) > 1 else (1,)
        return made * count_elements(kernel[1:])
    return made * (shapes[0][-1] if shapes else 1)


def _einsum_multiplications(step: TracedNode) -> int:
    """Product of the sizes of all equation letters."""
    equation = next((item.s.decode(errors="replace") for item in step.node.attribute if item.name == "equation"), "")
    sizes: dict[str, int] = {}
    for term, item in zip(equation.replace(" ", "").partition("->")[0].split(","), step.inputs, strict=False):
        shape = item.shape if item is not None and item.shape is not None else ()
        for letter, size in zip(term, shape, strict=False):
            sizes[letter] = max(sizes.get(letter, 1), size)
    return count_elements([*sizes.values()])


# ------------------------------------------------------------------------------------------------ one run


def _check_inference_memory(main: GraphProto, traced: Trace, nbytes: int, sums: _Totals) -> None:
    fed = sum(_nbytes(traced.tensors.get(item.name)) for item in main.input if item.name not in sums.known)
    if fed > RUN_SIZE.value:
        raise InvalidModel(
            f"takes {fed:,} bytes of inputs at its declared sizes, more than {RUN_SIZE.format_value(RUN_SIZE.value)}",
            hint=RUN_SIZE.hint,
        )
    peak, where = _peak(traced.nodes, {item.name for item in main.output})
    allowed = RUN_SIZE.value + _PER_STORED * nbytes + _PER_FED * fed
    if peak > allowed:
        raise InvalidModel(
            f"needs {peak:,} bytes at once in node `{where}` at its declared sizes, more than the "
            f"{allowed:,} that {nbytes:,} bytes of model and {fed:,} of inputs may",
            hint=RUN_SIZE.hint,
        )


def _peak(steps: Sequence[TracedNode], kept: set[str]) -> tuple[int, str]:
    """Peak bytes of live results (each lives until its last reader has run), and the node at the peak."""
    last: dict[str, int] = {}
    for at, step in enumerate(steps):
        for name in _input_names(step) if step.bodies else step.node.input:
            last[name] = at
    ends: dict[int, int] = {}
    held, most = 0, (0, "")
    for at, step in enumerate(steps):
        inside = max((_peak(body, set())[0] for body in step.bodies), default=0) if step.bodies else 0
        sizes = [_nbytes(fact) for fact in step.outputs]
        for name, size in zip(step.node.output, sizes, strict=False) if any(sizes) else ():
            if name and size:
                held += size
                if name not in kept:
                    end = last.get(name, at)
                    ends[end] = ends.get(end, 0) + size
        if held + inside > most[0]:
            most = (held + inside, walk.label(step.node))
        held -= ends.pop(at, 0)
    return most


def _input_names(step: TracedNode) -> Iterator[str]:
    yield from step.node.input
    for body in step.bodies:
        for inner in body:
            yield from _input_names(inner)


def _nbytes(fact: TensorInfo | None) -> int:
    """Size of a tensor in bytes; 0 if its shape is unknown."""
    return 0 if fact is None or fact.shape is None else _packed_nbytes(fact.elem, fact.shape)


@lru_cache(maxsize=1024)
def _packed_nbytes(elem: int, shape: Shape) -> int:
    if any(size < 0 for size in shape):
        return 0
    try:
        return int(dtype(elem).nbytes(shape))
    except UsageError:  # unknown type: rejected elsewhere
        return 4 * count_elements(shape)
