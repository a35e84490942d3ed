"""What `lint` finds beyond `inspect`: sizes frozen in constants, shape arithmetic that overflows, names that clash, layouts
that move data for nothing, what is read by nobody, and who cannot run which operator.

The rules of `graph/findings.py` are shared, not repeated: `lint` gives theirs and its own, errors first.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from trt_engine.errors import ModelError
from trt_engine.graph import operators, walk
from trt_engine.graph.coverage import Gap, element_name, gaps, given_of, support, tensorrt_opsets, tensorrt_version
from trt_engine.graph.findings import Seen, image_input, look, ordered
from trt_engine.graph.frozen import misfits
from trt_engine.graph.inspect import inspect_model
from trt_engine.graph.module_paths import ModulePaths, with_modules
from trt_engine.graph.trace import Fact, Step, Trace, flatten, schema_of, trace
from trt_engine.model import Model
from trt_engine.records import Finding, OperatorSupport
from trt_engine.tensors import Shape, Signature, TensorSpec, format_shape

__all__ = ["Linted", "Target", "lint"]

Target = Literal["all", "tensorrt", "onnxruntime"]

_IMAGE_SIZES = (320, 352, 640, 224, 416, 512, 608, 384, 480, 256, 800, 1024, 1280, 192, 160, 128, 96, 64, 32, 28, 16)
_OTHER_SIZES = (16, 24, 32, 64, 77, 100, 128, 197, 256, 300, 384, 512, 1024, 8, 4)


@dataclass(frozen=True, slots=True)
class Linted:
    """What was found, and at which sizes it was looked for."""

    findings: tuple[Finding, ...]
    operators: tuple[OperatorSupport, ...]
    shapes: dict[str, Shape]
    assumed: bool
    """True when some sizes are ours: the model leaves them open and nobody gave them."""
    tensorrt: str


@dataclass(frozen=True, slots=True)
class _Deep:
    """The model as the deeper rules read it."""

    seen: Seen
    target: Target
    tensorrt: str
    asked: bool
    """True when the TensorRT release was somebody's choice."""
    assumed: bool
    probes: tuple[Finding, ...]
    """What was found while sizes were looked for."""
    gaps: Sequence[Gap]

    @property
    def graph(self) -> GraphProto:
        return self.seen.proto.graph


_Rule = Callable[[_Deep], Iterable[Finding]]


def lint(
    model: Model,
    proto: ModelProto,
    *,
    shapes: Mapping[str, Shape] | None = None,
    target: Target = "all",
    tensorrt: str | None = None,
) -> Linted:
    """The findings of `inspect` and the deeper ones, errors first, and who runs which operator.

    Traced at `shapes`; sizes nobody gave are taken as stated, the batch as 1, open ones as sizes at which the graph
    fits. `tensorrt` is the release to judge for (default: the installed one, else the newest known).
    """
    version = tensorrt_version(tensorrt)
    given = {name: tuple(sizes) for name, sizes in (shapes or {}).items()}
    sizes, assumed, probes = _sizes(model.signature, proto, given)
    seen = look(model, proto, None, sizes)
    found_gaps = gaps(proto, seen.trace, version)
    deep = _Deep(seen, target, version, tensorrt is not None, assumed, tuple(probes), found_gaps)
    shared = inspect_model(model, sizes, proto=proto).findings
    broken = list(_broken(model, proto))
    own = broken or [finding for rule in _RULES for finding in rule(deep)]
    found = [item for item in _once((*shared, *own)) if item.code not in _NOT_FOR[target]]
    if target == "onnxruntime":
        found = [replace(item, severity="error") if item.code in _REFUSED else item for item in found]
    found = list(with_modules(ordered(found), ModulePaths(proto), "where"))
    return Linted(tuple(found), support(seen.trace, found_gaps), dict(sizes), assumed, version)


def _broken(model: Model, proto: ModelProto) -> Iterator[Finding]:
    """A node against its operator's rules: what else a graph says is not worth reading before that is mended."""
    try:
        operators.check_nodes(proto, model.path.name)
    except ModelError as error:
        yield Finding("broken-node", "error", error.message, hint=error.hint)


_SAID_BY = {"batch-folded": "batch-lost", "shape-conflict": "index-type"}
"""A code that says again, at the same place, what another one says better."""


def _once(found: Iterable[Finding]) -> Iterator[Finding]:
    found = list(found)
    said = {(item.code, item.where) for item in found}
    for item in found:
        if (_SAID_BY.get(item.code), item.where) not in said:
            yield item


# ------------------------------------------------------------------------------------------------ sizes to look at


def _sizes(
    signature: Signature, proto: ModelProto, given: Mapping[str, Shape]
) -> tuple[dict[str, Shape], bool, list[Finding]]:
    """A shape for every input, whether some of its sizes are ours, and the open sizes at which one constant alone fits."""
    groups = _groups(signature, given)
    picked = {key: candidates[0] for key, (_, candidates) in groups.items()}

    def at(sizes: Mapping[str, int]) -> dict[str, Shape]:
        return {
            spec.name: given.get(spec.name)
            or tuple(
                size if size >= 0 else sizes.get(_group(signature, spec.name, axis), 1)
                for axis, size in enumerate(spec.shape)
            )
            for spec in signature.inputs
        }

    found = []
    for key, (axes, candidates) in groups.items():
        bad = misfits(trace(proto, at(picked)))
        beside = misfits(trace(proto, at(picked | {key: candidates[1]})))
        if not bad and not beside:
            continue
        fitting = [candidates[at_] for at_, miss in ((0, bad), (1, beside)) if not miss]
        if not fitting:
            fitting = [size for size in candidates[2:] if not misfits(trace(proto, at(picked | {key: size})))]
            fitting = [size for size in fitting if 4 * size > max(fitting)]  # one cell fits anything: it broadcasts
        if len(fitting) == 1:
            picked[key] = fitting[0]
            where, why = next(iter((bad or beside).items()))
            found.append(
                Finding(
                    "baked-size",
                    "warning",
                    f"{axes} may move by what the inputs say, but of {len(candidates)} sizes tried the graph fits "
                    f"{fitting[0]} alone: at another one `{where}` does not ({why}): anchors, a grid or positions of one "
                    "size are baked in as constants",
                    where,
                    f"fix it where the model is exported, or fix the size: `--shapes {_fixed(signature, at(picked))}`",
                )
            )
        elif fitting:
            picked[key] = fitting[0]
    return at(picked), bool(groups), found


def _fixed(signature: Signature, shapes: Mapping[str, Shape]) -> str:
    return ",".join(f"{spec.name}:{format_shape(shapes[spec.name])}" for spec in signature.inputs)


def _group(signature: Signature, name: str, axis: int) -> str:
    """The name of the open size: its symbol, `height and width` for both of an image, else its place."""
    image = image_input(signature.inputs)
    spec = signature.input(name)
    if image is not None and name == image.name and axis > 0:
        return "the height and width"
    symbol = spec.symbols[axis] if axis < len(spec.symbols) else None
    return f"`{symbol}`" if symbol else f"axis {axis} of `{name}`"


def _groups(signature: Signature, given: Mapping[str, Shape]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Open sizes that move together, batches left out: what to call them and the sizes to try."""
    batches = {_group(signature, spec.name, 0) for spec in signature.inputs if spec.shape and spec.shape[0] < 0}
    groups: dict[str, tuple[str, tuple[int, ...]]] = {}
    for spec in signature.inputs:
        if spec.name in given:
            continue
        for axis in spec.dynamic:
            key = _group(signature, spec.name, axis)
            if axis > 0 and key not in batches:
                candidates = _IMAGE_SIZES if key == "the height and width" else _OTHER_SIZES
                groups[key] = (key if key.startswith("the ") else f"{key} of `{spec.name}`", candidates)
    return groups


def _probed(deep: _Deep) -> Iterable[Finding]:
    return deep.probes


def _conflicts(deep: _Deep) -> Iterator[Finding]:
    if deep.assumed or deep.probes:
        return
    for where, why in list(misfits(deep.seen.trace).items())[:10]:
        yield Finding(
            "shape-conflict",
            "warning",
            f"the shapes at `{where}` do not fit together: {why}",
            where,
            "export the model again; `trt-engine infer` shows whether ONNX Runtime runs it",
        )


def _mixed_batch(deep: _Deep) -> Iterator[Finding]:
    inputs = [spec for spec in deep.seen.model.signature.inputs if len(spec.shape) > 1]
    moving = [spec for spec in inputs if spec.shape[0] < 0]
    batches = {None, *(spec.symbols[0] for spec in moving if spec.symbols)}
    frozen = [
        spec
        for spec in inputs
        if spec.shape[0] == 1 and not any(_is_batch(spec, axis, batches) for axis in spec.dynamic)
    ]  # a recurrent state has its batch on the second axis
    if moving and frozen:
        yield Finding(
            "batch-frozen-input",
            "warning",
            f"`{moving[0].name}` ({moving[0].describe()}) has a dynamic batch, `{frozen[0].name}` "
            f"({frozen[0].describe()}) has one row: with more images they may not fit together",
            frozen[0].name,
            f"export again with `--dynamic {frozen[0].name}:0=batch` (`trt-engine convert`) if it has one row an image",
        )


_BATCH = re.compile(r"n|b|bs|.*batch.*", re.IGNORECASE)


def _is_batch(spec: TensorSpec, axis: int, batches: set[str | None]) -> bool:
    """Whether an open axis is the batch: called as another input's first axis, or as one calls a batch."""
    symbol = spec.symbols[axis] if axis < len(spec.symbols) else None
    return symbol in batches or (axis > 0 and symbol is not None and _BATCH.fullmatch(symbol) is not None)


def _folded_batch(deep: _Deep) -> Iterator[Finding]:
    """A Reshape that lays all images in one row: what mixes along that row mixes images."""
    inputs = {spec.name: spec for spec in deep.seen.model.signature.inputs}
    if not inputs or not all(spec.shape and spec.shape[0] < 0 for spec in inputs.values()):
        return
    sizes = {name: (2 * deep.seen.shapes[name][0], *deep.seen.shapes[name][1:]) for name in inputs}
    after = {step.key: step for step in trace(deep.seen.proto, sizes).steps}
    for step in deep.seen.trace.steps:
        two = after.get(step.key)
        if step.node.op_type != "Reshape" or step.folded or two is None or not step.inputs or not two.inputs:
            continue
        data, wider, made, grown = step.inputs[0], two.inputs[0], step.outputs[0], two.outputs[0]
        if data is None or wider is None or not (data.shape and wider.shape and made.shape and grown.shape):
            continue
        if wider.shape[0] == 2 * data.shape[0] and made.shape[0] == grown.shape[0] == 1 and made.shape != grown.shape:
            target = step.inputs[1] if len(step.inputs) > 1 else None
            if target is None or not target.stored:
                continue
            yield Finding(
                "batch-folded",
                "info",
                f"`{walk.label(step.node)}` (Reshape) lays the whole batch in one row ({format_shape(made.shape)} at "
                f"batch 1, {format_shape(grown.shape)} at 2): what mixes along it mixes images",
                walk.label(step.node),
                "compare one batch of 2 with two of 1: `trt-engine infer` on both",
            )
            return


# ------------------------------------------------------------------------------------------------ arithmetic of shapes

_INT32 = 1 << 31
_EXACT: dict[str, Callable[[list[npt.NDArray[Any]]], Any]] = {
    "Mul": lambda v: v[0] * v[1],
    "Add": lambda v: v[0] + v[1],
    "Sub": lambda v: v[0] - v[1],
    "ReduceProd": lambda v: math.prod(v[0].reshape(-1).tolist()),
    "ReduceSum": lambda v: sum(v[0].reshape(-1).tolist()),
    "Cast": lambda v: v[0],
}


def _overflow(deep: _Deep) -> Iterator[Finding]:
    seen = deep.seen
    first = _overflows(seen.trace)
    if first is not None:
        yield _overflowing(first, f"at {_at(seen.shapes)}")
        return
    growing = any(
        step.folded and step.outputs and step.outputs[0].elem == TensorProto.INT32 and not step.outputs[0].stored
        for step in flatten(seen.trace.steps)
    )
    batched = {spec.name for spec in seen.model.signature.inputs if spec.shape and spec.shape[0] < 0}
    if not growing or not batched:
        return

    def at(rows: int) -> tuple[Step, int] | None:
        shapes = {name: (rows, *sizes[1:]) if name in batched else sizes for name, sizes in seen.shapes.items()}
        return _overflows(trace(seen.proto, shapes))

    rows = 256
    if at(rows) is None:
        return
    while rows > 2 and at(rows // 2) is not None:
        rows //= 2
    last = at(rows)
    if last is not None:
        yield _overflowing(last, f"from batch {rows} on (it fits at {rows // 2})")


def _overflowing(found: tuple[Step, int], when: str) -> Finding:
    step, exact = found
    label = walk.label(step.node)
    return Finding(
        "shape-overflow",
        "warning",
        f"shape arithmetic in INT32 overflows at `{label}` ({step.node.op_type}) {when}: the number is {exact:,}, "
        f"INT32 ends at {_INT32 - 1:,}",
        label,
        "keep shape arithmetic in INT64 in the source (drop the cast to int32), then export again",
    )


def _at(shapes: Mapping[str, Shape]) -> str:
    return ", ".join(f"{name}:{format_shape(shape)}" for name, shape in shapes.items()) or "the stated sizes"


def _overflows(traced: Trace) -> tuple[Step, int] | None:
    """The first step whose INT32 result is not the number it should be, and that number."""
    for step in flatten(traced.steps):
        rule = _EXACT.get(step.node.op_type)
        if rule is None or not step.folded or not step.outputs or step.outputs[0].elem != TensorProto.INT32:
            continue
        values = [item.value for item in step.inputs if item is not None and item.value is not None]
        if len(values) < (1 if step.node.op_type in ("Cast", "ReduceProd", "ReduceSum") else 2):
            continue
        if step.node.op_type == "Cast" and (step.outputs[0].stored or not np.issubdtype(values[0].dtype, np.integer)):
            continue  # a stored one is a sentinel of Slice: as far as it goes
        if step.node.op_type.startswith("Reduce") and math.prod(step.outputs[0].shape or (0,)) != 1:
            continue  # by axis: its parts are sizes again
        exact = np.asarray(rule([value.astype(object) for value in values]), dtype=object).reshape(-1)
        for number in exact.tolist():
            if not -_INT32 <= int(number) < _INT32 and abs(int(number)) < (1 << 62):
                return step, int(number)
    return None


# ------------------------------------------------------------------------------------------------ types and indices

_INDEX = {
    "Gather": 1,
    "GatherElements": 1,
    "GatherND": 1,
    "Scatter": 1,
    "ScatterElements": 1,
    "ScatterND": 1,
    "OneHot": 0,
}


def _types(deep: _Deep) -> Iterator[Finding]:
    """Inputs of a type their operator's schema does not have."""
    opsets = walk.opsets_of(deep.seen.proto)
    trusted = {value.name for value in deep.graph.input} | {item.name for item in deep.graph.initializer}
    reported = 0
    for step in deep.seen.trace.steps:
        node = step.node
        schema = schema_of(node.op_type, "", opsets.get("", 1)) if not walk.domain_of(node) else None
        if schema is None:
            continue
        wrong = next(iter(_wrong_types(step, schema, trusted)), None)
        if wrong is None:
            if walk.label(node) not in deep.seen.trace.failures:
                trusted.update(node.output)
            continue
        name, got, allowed, index = wrong
        if (reported := reported + 1) > 10:
            return
        yield Finding(
            "index-type" if index else "wrong-type",
            "error",
            f"{node.op_type} takes {'indices' if index else 'this input'} in {' or '.join(allowed)}, `{name}` at "
            f"`{walk.label(node)}` is {got}: ONNX Runtime refuses the model",
            walk.label(node),
            "cast it in the source (`indices.long()`), then export again" if index else "export the model again",
        )


def _wrong_types(step: Step, schema: Any, trusted: set[str]) -> Iterator[tuple[str, str, list[str], bool]]:
    formals = schema.inputs
    for at, (name, fact) in enumerate(zip(step.node.input, step.inputs, strict=False)):
        if fact is None or not fact.elem or name not in trusted or fact.other is not None or not formals:
            continue
        formal = formals[min(at, len(formals) - 1)]
        got = element_name(fact.elem)
        if f"tensor({got})" not in formal.types:
            allowed = sorted(kind.removeprefix("tensor(").removesuffix(")") for kind in formal.types)
            yield name, got, allowed[:4], _INDEX.get(step.node.op_type) == at


def _coarse_indices(deep: _Deep) -> Iterator[Finding]:
    """Indices that were a 16-bit floating-point number on the way."""
    halves: dict[int, tuple[str, int]] = {
        TensorProto.FLOAT16: ("float16", 2048),
        TensorProto.BFLOAT16: ("bfloat16", 256),
    }
    for step in deep.seen.trace.steps:
        at = _INDEX.get(step.node.op_type)
        if at is None or at >= len(step.node.input):
            continue
        cast = deep.seen.back(step.node.input[at])
        if cast is None or cast.op_type != "Cast" or not cast.input:
            continue
        kind = halves.get(deep.seen.elem(cast.input[0]))
        if kind is not None and not deep.seen.trace.facts[cast.input[0]].stored:
            yield Finding(
                "index-through-half",
                "warning",
                f"the indices of `{walk.label(step.node)}` ({step.node.op_type}) are computed in {kind[0]}, which counts "
                f"without gaps to {kind[1]} alone: rows beyond that are mixed up",
                walk.label(cast),
                f"keep that part in FP32: `trt-engine cast MODEL --to fp16 --exclude-node {walk.label(cast)}`",
            )
            return


def _out_of_range(deep: _Deep) -> Iterator[Finding]:
    for step in deep.seen.trace.steps:
        if step.node.op_type not in ("Gather", "GatherElements") or step.folded or len(step.inputs) < 2:
            continue
        data, indices = step.inputs[0], step.inputs[1]
        if data is None or indices is None or not data.shape or indices.value is None or not indices.stored:
            continue
        axis = int(given_of(step.node).get("axis", 0))
        if (
            not -len(data.shape) <= axis < len(data.shape)
            or (deep.assumed and not data.stored)
            or not indices.value.size
        ):
            continue
        size = data.shape[axis]
        low, high = int(indices.value.min()), int(indices.value.max())
        if size >= 0 and not -size <= low <= high < size and (data.stored or not _batch_axis(deep, data, axis)):
            yield Finding(
                "index-out-of-range",
                "error",
                f"`{walk.label(step.node)}` ({step.node.op_type}) takes rows {low} to {high} of an axis of {size}",
                walk.label(step.node),
                "export the model again with the table it was trained with",
            )
            return


def _batch_axis(deep: _Deep, data: Fact, axis: int) -> bool:
    """True for the first axis of a model whose batch is open: its size is ours."""
    return axis % len(data.shape or (1,)) == 0 and any(
        spec.shape and spec.shape[0] < 0 for spec in deep.seen.model.signature.inputs
    )


# ------------------------------------------------------------------------------------------------ what nobody needs


def _captured(node: NodeProto) -> Iterator[str]:
    for _, body in walk.bodies(node):
        for inner in body.node:
            yield from inner.input
            yield from _captured(inner)
        yield from (item.name for item in body.output)


def _alive(graph: GraphProto) -> tuple[set[str], list[NodeProto]]:
    """The names some output depends on, and the nodes none does."""
    makers = {name: node for node in graph.node for name in node.output if name}
    live, queue, needed = set[str](), [item.name for item in graph.output], set[int]()
    while queue:
        name = queue.pop()
        if name in live:
            continue
        live.add(name)
        node = makers.get(name)
        if node is not None and id(node) not in needed:
            needed.add(id(node))
            queue += [item for item in (*node.input, *_captured(node)) if item]
    return live, [node for node in graph.node if id(node) not in needed]


def _unused(deep: _Deep) -> Iterator[Finding]:
    graph = deep.graph
    live, dead = _alive(graph)
    for spec in deep.seen.model.signature.inputs:
        if spec.name not in live:
            yield Finding(
                "unused-input",
                "warning",
                f"no output depends on the input `{spec.name}`: it was folded away at export, or never needed",
                spec.name,
                "check that the example inputs of the export were not constants (`trt-engine convert` compares with the "
                "source), or leave it out",
            )
    if dead:
        counts = ", ".join(f"{count} {op}" for op, count in Counter(node.op_type for node in dead).most_common(4))
        yield Finding(
            "dead-nodes",
            "info",
            f"{len(dead)} nodes lead to no output ({counts})",
            walk.label(dead[0]),
            "`trt-engine convert MODEL.onnx -o SMALLER.onnx` takes them out",
        )
    unread = [item for item in graph.initializer if item.name not in live]
    nbytes = sum(_nbytes(item) for item in unread)
    if unread:
        yield Finding(
            "unused-initializer",
            "warning" if nbytes >= 1 << 20 else "info",
            f"{len(unread)} stored tensors ({nbytes:,} bytes) are read by nobody that leads to an output",
            unread[0].name,
            "`trt-engine convert MODEL.onnx -o SMALLER.onnx` takes them out",
        )


def _outputs(deep: _Deep) -> Iterator[Finding]:
    graph = deep.graph
    inputs = {spec.name for spec in deep.seen.model.signature.inputs}
    fed = set(inputs)
    for _ in range(2):  # twice: nodes may stand out of order
        for node in graph.node:
            random = node.op_type.startswith("Random")
            if random or any(name in fed for name in (*node.input, *_captured(node)) if name):
                fed.update(name for name in node.output if name)
    for item in graph.output:
        if inputs and item.name not in fed:
            yield Finding(
                "constant-output",
                "warning",
                f"the output `{item.name}` does not depend on any input: it is the same for every image",
                item.name,
                "leave it out of the export, or find what froze it: `trt-engine convert` compares with the source",
            )
            continue
        name, node = item.name, deep.seen.makers.get(item.name)
        while node is not None and node.op_type == "Identity" and node.input:
            name, node = node.input[0], deep.seen.makers.get(node.input[0])
        if name in inputs:
            yield Finding(
                "passthrough-output",
                "info",
                f"the output `{item.name}` is the input `{name}`, unchanged",
                item.name,
                "leave it out of the export: it costs a copy",
            )


def _nbytes(tensor: TensorProto) -> int:
    if tensor.raw_data:
        return len(tensor.raw_data)
    width: dict[int, int] = {TensorProto.DOUBLE: 8, TensorProto.INT64: 8, TensorProto.FLOAT: 4, TensorProto.INT32: 4}
    return int(math.prod(tensor.dims)) * width.get(tensor.data_type, 2)


def _duplicates(deep: _Deep) -> Iterator[Finding]:
    """Constants of 64 KiB or more that are stored more than once; outside the file they are told apart by place."""
    same: dict[tuple[Any, ...], list[TensorProto]] = defaultdict(list)
    for tensor in walk.tensors(deep.seen.proto):
        if _nbytes(tensor) < 1 << 16:
            continue
        shape = (tensor.data_type, tuple(tensor.dims))
        if tensor.data_location == TensorProto.EXTERNAL:
            continue  # reading gigabytes to compare them is not worth it; shared places cost nothing
        raw = tensor.raw_data or tensor.SerializeToString(deterministic=True)
        same[(*shape, hashlib.sha256(raw).digest())].append(tensor)
    again = [items for items in same.values() if len(items) > 1]
    wasted = sum(_nbytes(items[0]) * (len(items) - 1) for items in again)
    if again:
        largest = max(again, key=lambda items: _nbytes(items[0]) * (len(items) - 1))
        names = ", ".join(f"`{item.name or 'a Constant node'}`" for item in largest[:3])
        yield Finding(
            "duplicate-constant",
            "warning" if wasted >= 1 << 24 else "info",
            f"{wasted:,} bytes of constants are stored more than once ({names}{' and more' if len(largest) > 3 else ''})",
            largest[1].name or None,
            "`trt-engine convert MODEL.onnx -o SMALLER.onnx` keeps one of each",
        )


# ------------------------------------------------------------------------------------------------ layout

_TO_FIRST = ((0, 3, 1, 2), (0, 4, 1, 2, 3))
_TO_LAST = ((0, 2, 3, 1), (0, 2, 3, 4, 1))
_CONVOLUTIONS = frozenset(
    "Conv ConvTranspose FusedConv QLinearConv MaxPool AveragePool GlobalAveragePool DepthToSpace Resize".split()
)


def _layout(deep: _Deep) -> Iterator[Finding]:
    first: list[Step] = []
    last: list[Step] = []
    inputs = {spec.name for spec in deep.seen.model.signature.inputs}
    for step in flatten(deep.seen.trace.steps):
        if (
            step.node.op_type == "Transpose"
            and not step.folded
            and not all(item and item.stored for item in step.inputs)
        ):
            perm = tuple(given_of(step.node).get("perm", ()))
            if perm in _TO_FIRST and any(n.op_type in _CONVOLUTIONS for n in deep.seen.ahead(step.node, 8)):
                first.append(step)
            elif perm in _TO_LAST:
                last.append(step)
    if not first:
        return
    moved = sum(step.outputs[0].elements for step in (*first, *last))
    where = walk.label(first[0].node)
    if len(first) + len(last) == 1 and first[0].node.input[0] in inputs:
        yield Finding(
            "nhwc-input",
            "info",
            f"the input `{first[0].node.input[0]}` has its channels last, one Transpose turns it "
            f"({moved:,} elements an image)",
            where,
            "feed NCHW: `--inputs-as-nchw` of tf2onnx, or keep the one copy",
        )
        return
    yield Finding(
        "nhwc-layout",
        "warning",
        f"{len(first) + len(last)} Transposes stand around convolutions (channels-last leftovers) and move {moved:,} "
        f"elements an inference at {_at(deep.seen.shapes)}, computing nothing",
        where,
        "`trt-engine convert MODEL.onnx -o NCHW.onnx` cancels pairs that meet, `--inputs-as-nchw` of tf2onnx turns inputs; "
        "what stands between two (a LayerNorm over channels) can be written channels-first in the source",
    )


# ------------------------------------------------------------------------------------------------ names

_AWKWARD = frozenset('/\\:*?"<>|,')


def _names(deep: _Deep) -> Iterator[Finding]:
    signature = deep.seen.model.signature
    ends = [spec.name for spec in (*signature.inputs, *signature.outputs)]
    for name in dict.fromkeys(ends):
        signs = sorted(set(name) & _AWKWARD)
        reason = (
            f"has {' '.join(signs)} in it" if signs
            else "is empty" if not name
            else "has blanks or signs that cannot be printed" if not name.isprintable() or name != "".join(name.split())
            else "begins with a dash" if name.startswith("-")
            else "is a way up in the file system" if name in (".", "..")
            else f"has {len(name)} characters" if len(name) > 120
            else ""
        )  # fmt: skip
        if reason:
            yield Finding(
                "awkward-name",
                "warning",
                f"the name {name[:80]!r} of an input or output {reason}: command lines (`--shapes NAME:1x3`), log and file "
                "names made of it break",
                name[:200],
                "rename it at export (`input_names=`, `output_names=`)",
            )
    yield from _case(ends)
    repeated = Counter(node.name for node in deep.graph.node if node.name)
    again = [name for name, count in repeated.items() if count > 1]
    if again:
        yield Finding(
            "duplicate-node-name",
            "warning",
            f"{len(again)} node names are used more than once, `{again[0]}` {repeated[again[0]]} times: settings by layer "
            "name (`--exclude-node`, layer precisions) and profiles cannot tell them apart",
            again[0],
            "export again; `trt-engine convert MODEL.onnx -o OUT.onnx` names nodes anew",
        )
    odd = next(
        (node.name for node in deep.graph.node if not node.name.isprintable() or ".." in node.name.split("/")), None
    )
    if odd is not None:
        yield Finding(
            "unprintable-name",
            "warning",
            f"the node name {odd[:80]!r} has signs that cannot be printed or a `..` in it: logs and files made of it break",
            odd[:200],
            "export again with plain names",
        )


def _case(names: Iterable[str]) -> Iterator[Finding]:
    folded: dict[str, str] = {}
    for name in dict.fromkeys(names):
        other = folded.setdefault(name.casefold(), name)
        if other != name:
            yield Finding(
                "names-differ-by-case",
                "warning",
                f"`{other}` and `{name}` differ in capitals alone: files named after them are one on some systems",
                name,
                "rename one of them at export",
            )


def _order(deep: _Deep) -> Iterator[Finding]:
    made_later = {name for node in deep.graph.node for name in node.output if name}
    for node in deep.graph.node:
        early = next((name for name in node.input if name in made_later), None)
        if early is not None:
            yield Finding(
                "not-sorted",
                "warning",
                f"`{walk.label(node)}` ({node.op_type}) reads `{early}` before it is made: the standard wants nodes in "
                "order, and some readers refuse it",
                walk.label(node),
                "`trt-engine convert MODEL.onnx -o OUT.onnx` sorts them",
            )
            return
        made_later.difference_update(node.output)


# ------------------------------------------------------------------------------------------------ who runs it


def _opset(deep: _Deep) -> Iterator[Finding]:
    opset = deep.seen.model.opsets.get("")
    low, high = tensorrt_opsets(deep.tensorrt)
    if opset is not None and not low <= opset <= high:
        yield Finding(
            "opset-beyond-tensorrt",
            "error" if deep.target == "tensorrt" else "warning",
            f"opset {opset}: the ONNX parser of TensorRT {deep.tensorrt} takes {low} to {high}",
            hint="export again with opset 20, or `trt-engine convert MODEL.onnx --opset 20 -o OUT.onnx`",
        )
    ir = next((row[1] for row in onnx.helper.VERSION_TABLE if len(row) > 2 and row[2] == high), None)
    if ir is not None and deep.seen.model.ir_version > ir:
        yield Finding(
            "ir-beyond-tensorrt",
            "warning",
            f"IR version {deep.seen.model.ir_version}: the ONNX release with opset {high}, the highest TensorRT "
            f"{deep.tensorrt} takes, ends at {ir}; fields and types newer than it are not read",
            hint="export again with IR version 10, which everything takes",
        )


_CODES: dict[tuple[str, str], tuple[str, str]] = {  # (where, kind) -> code, and the severity when everybody is asked
    ("tensorrt", "missing"): ("not-in-tensorrt", "warning"),
    ("tensorrt", "newer"): ("tensorrt-too-old", "warning"),
    ("tensorrt", "limited"): ("limited-in-tensorrt", "warning"),
    ("tensorrt", "type"): ("type-not-in-tensorrt", "warning"),
    ("cpu", "missing"): ("no-cpu-kernel", "warning"),
    ("cpu", "type"): ("no-cpu-kernel", "warning"),
    ("cuda", "missing"): ("no-cuda-kernel", "info"),
    ("cuda", "type"): ("no-cuda-kernel", "info"),
}
_HINTS = {
    "not-in-tensorrt": "write it with other operators in the source, keep it as a local function, bring a plugin "
                       "(`-O plugins=a.so`), or build with `--backend onnxruntime`",
    "tensorrt-too-old": "upgrade TensorRT, or export with a lower opset (`trt-engine convert --opset 20`), which writes it "
                        "with older operators",
    "limited-in-tensorrt": "change it in the source, then `trt-engine convert` again",
    "type-not-in-tensorrt": "cast it to a listed type in the source, then `trt-engine convert` again",
    "no-cpu-kernel": "`trt-engine build MODEL --backend tensorrt`, or export with a type it has (FP32)",
    "no-cuda-kernel": "nothing breaks: it costs a copy each way; `trt-engine bench` shows how much",
}  # fmt: skip
_HINTS_OF = {
    ("type-not-in-tensorrt", "Equal"): "PyTorch's `//` on integers is exported so: `torch.div(a, b, rounding_mode='trunc')` "
                                       "is the same where nothing is negative; else compare numbers, not Booleans",
}  # fmt: skip


def _coverage(deep: _Deep) -> Iterator[Finding]:
    grouped: dict[tuple[str, str, str], list[Gap]] = defaultdict(list)
    for gap in deep.gaps:
        grouped[(gap.where, gap.kind, gap.node.op_type)].append(gap)
    for (where, kind, op), items in grouped.items():
        code, severity = _CODES[(where, kind)]
        if severity == "warning" and kind in ("missing", "newer") and where == "tensorrt" and deep.target == "tensorrt":
            severity = "error"
        if code == "no-cpu-kernel" and deep.target == "onnxruntime":
            severity = "error"
        count = f"{len(items)} nodes" if len(items) > 1 else "1 node"
        hint = _HINTS_OF.get((code, op), _HINTS[code])
        yield Finding(code, severity, f"{op} ({count}): {items[0].why}", walk.label(items[0].node), hint)  # type: ignore[arg-type]


_TRT_ALONE = frozenset(
    "not-in-tensorrt tensorrt-too-old limited-in-tensorrt type-not-in-tensorrt opset-beyond-tensorrt ir-beyond-tensorrt "
    "int64 detr-mask-path deformable-attention".split()
)
_ORT_ALONE = frozenset(
    "opset-beyond-onnxruntime ir-beyond-onnxruntime no-cpu-kernel no-cuda-kernel tensorrt-only-operator".split()
)
_NOT_FOR: dict[Target, frozenset[str]] = {"all": frozenset(), "tensorrt": _ORT_ALONE, "onnxruntime": _TRT_ALONE}
_REFUSED = frozenset("opset-beyond-onnxruntime ir-beyond-onnxruntime tensorrt-only-operator".split())
"""Warnings that are errors when ONNX Runtime alone is asked."""

_RULES: tuple[_Rule, ...] = (
    _types,
    _out_of_range,
    _opset,
    _coverage,
    _probed,
    _conflicts,
    _mixed_batch,
    _folded_batch,
    _overflow,
    _coarse_indices,
    _unused,
    _outputs,
    _layout,
    _duplicates,
    _names,
    _order,
)
