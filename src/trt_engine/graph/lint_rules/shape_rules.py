"""Lint rules: frozen and lost batches, open sizes, shapes that contradict each other, overflowing shape arithmetic."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from trt_engine.graph import walk
from trt_engine.graph.lint_rules.model_view import ModelView, format_shapes, image_input, info, warning
from trt_engine.graph.shape_inference import TensorInfo, Trace, TracedNode, flatten, trace
from trt_engine.records.base import Finding
from trt_engine.tensors import Shape, TensorSpec, format_shape


def check_shape_conflicts(view: ModelView) -> Iterator[Finding]:
    if view.assumed_shapes or view.probes:
        return
    for where, why in list(nonconforming_nodes(view.trace).items())[:10]:
        yield warning(
            "shape-conflict",
            f"the shapes at `{where}` do not fit together: {why}",
            where,
            "export the model again; `trt-engine infer` shows whether ONNX Runtime runs it",
        )


def check_mixed_batch(view: ModelView) -> Iterator[Finding]:
    inputs = [spec for spec in view.model.signature.inputs if len(spec.shape) > 1]
    moving = [spec for spec in inputs if spec.shape[0] < 0 and not _TIME.fullmatch((*spec.symbols, None)[0] or "")]
    states = {name for node in view.nodes if node.op_type in ("RNN", "GRU", "LSTM") for name in node.input[5:7]}
    batches = {None, *(spec.symbols[0] for spec in moving if spec.symbols)}
    frozen = [
        spec
        for spec in inputs
        if spec.shape[0] == 1
        and spec.name not in states
        and not any(_is_batch(spec, axis, batches) for axis in spec.dynamic)
    ]  # the batch of a recurrent state is its second axis
    if moving and frozen:
        yield warning(
            "batch-frozen-input",
            f"`{moving[0].name}` ({moving[0].format_symbolic()}) has a dynamic batch, `{frozen[0].name}` "
            f"({frozen[0].format_symbolic()}) has one row: with more images they may not fit together",
            frozen[0].name,
            f"export again with `--dynamic {frozen[0].name}:0=batch` (`trt-engine convert`) if it has one row per image",
        )


_BATCH = re.compile(r"n|b|bs|.*batch.*", re.IGNORECASE)


def _is_batch(spec: TensorSpec, axis: int, batches: set[str | None]) -> bool:
    """Whether a dynamic axis is the batch: named like another input's first axis, or with a usual batch name."""
    symbol = spec.symbols[axis] if axis < len(spec.symbols) else None
    return symbol in batches or (axis > 0 and symbol is not None and _BATCH.fullmatch(symbol) is not None)


def check_folded_batch(view: ModelView) -> Iterator[Finding]:
    """A Reshape that flattens all images into one row: operators along that row mix images."""
    inputs = {spec.name: spec for spec in view.model.signature.inputs}
    if not inputs or not all(spec.shape and spec.shape[0] < 0 for spec in inputs.values()):
        return
    sizes = {name: (2 * view.shapes[name][0], *view.shapes[name][1:]) for name in inputs}
    after = {step.key: step for step in flatten(trace(view.model.proto, sizes).nodes)}
    for step in flatten(view.trace.nodes):
        two = after.get(step.key)
        if step.node.op_type != "Reshape" or step.folded or two is None or not step.inputs or not two.inputs:
            continue
        data, wider, made, grown = step.inputs[0], two.inputs[0], step.outputs[0], two.outputs[0]
        if data is None or wider is None or not (data.shape and wider.shape and made.shape and grown.shape):
            continue
        if wider.shape[0] == 2 * data.shape[0] and made.shape[0] == grown.shape[0] == 1 and made.shape != grown.shape:
            target = step.inputs[1] if len(step.inputs) > 1 else None
            if target is None or not target.is_constant:
                continue
            yield info(
                "batch-folded",
                f"`{walk.label(step.node)}` (Reshape) flattens the whole batch into one row ({format_shape(made.shape)} at "
                f"batch 1, {format_shape(grown.shape)} at 2): operators along that row mix images",
                walk.label(step.node),
                "compare one batch of 2 with two of 1: `trt-engine infer` on both",
            )
            return


_INT32 = 1 << 31
_EXACT: dict[str, Callable[[list[npt.NDArray[Any]]], Any]] = {
    "Mul": lambda v: v[0] * v[1],
    "Add": lambda v: v[0] + v[1],
    "Sub": lambda v: v[0] - v[1],
    "ReduceProd": lambda v: math.prod(v[0].reshape(-1).tolist()),
    "ReduceSum": lambda v: sum(v[0].reshape(-1).tolist()),
    "Cast": lambda v: v[0],
}


def check_overflow(view: ModelView) -> Iterator[Finding]:
    first = _first_overflow(view.trace)
    if first is not None:
        yield _overflow_finding(first, f"at {format_shapes(view.shapes)}")
        return
    growing = any(
        step.folded and step.outputs and step.outputs[0].elem == TensorProto.INT32 and not step.outputs[0].is_constant
        for step in flatten(view.trace.nodes)
    )
    batched = {spec.name for spec in view.model.signature.inputs if spec.shape and spec.shape[0] < 0}
    if not growing or not batched:
        return

    def at(rows: int) -> tuple[TracedNode, int] | None:
        shapes = {name: (rows, *sizes[1:]) if name in batched else sizes for name, sizes in view.shapes.items()}
        return _first_overflow(trace(view.model.proto, shapes))

    rows = 256
    if at(rows) is None:
        return
    while rows > 2 and at(rows // 2) is not None:
        rows //= 2
    last = at(rows)
    if last is not None:
        yield _overflow_finding(last, f"from batch {rows} on (it fits at {rows // 2})")


def _overflow_finding(found: tuple[TracedNode, int], when: str) -> Finding:
    step, exact = found
    label = walk.label(step.node)
    return warning(
        "shape-overflow",
        f"shape arithmetic in INT32 overflows at `{label}` ({step.node.op_type}) {when}: the value is {exact:,}, "
        f"the maximum is {_INT32 - 1:,}",
        label,
        "keep shape arithmetic in INT64 in the source (drop the cast to int32), then export again",
    )


def _first_overflow(traced: Trace) -> tuple[TracedNode, int] | None:
    """First step whose INT32 result overflows, and the exact result."""
    for step in flatten(traced.nodes):
        rule = _EXACT.get(step.node.op_type)
        if rule is None or not step.folded or not step.outputs or step.outputs[0].elem != TensorProto.INT32:
            continue
        values = [item.value for item in step.inputs if item is not None and item.value is not None]
        if len(values) < (1 if step.node.op_type in ("Cast", "ReduceProd", "ReduceSum") else 2):
            continue
        if step.node.op_type == "Cast" and (
            step.outputs[0].is_constant or not np.issubdtype(values[0].dtype, np.integer)
        ):
            continue  # a stored one is Slice's "to the end" sentinel
        if step.node.op_type.startswith("Reduce") and math.prod(step.outputs[0].shape or (0,)) != 1:
            continue  # by axis: the parts are sizes
        exact = np.asarray(rule([value.astype(object) for value in values]), dtype=object).reshape(-1)
        for number in exact.tolist():
            if not -_INT32 <= int(number) < _INT32 and abs(int(number)) < (1 << 62):
                return step, int(number)
    return None


def nonconforming_nodes(trace: Trace) -> dict[str, str]:
    """Reasons by node label why nodes do not fit at the traced sizes: shape inference errors, Reshape targets with
    another number of elements, and weights of other channels than their data."""
    found = {name: why.removeprefix("[ShapeInferenceError] ").removeprefix("[TypeInferenceError] ")
             for name, why in trace.failures.items()}  # fmt: skip
    return _nonconforming_steps(trace.nodes) | found


def _nonconforming_steps(steps: Sequence[TracedNode]) -> dict[str, str]:
    found: dict[str, str] = {}
    for step in steps:
        if step.node.op_type == "Reshape" and step.inputs and not step.folded:
            data, made = step.inputs[0], step.outputs[0]
            if data is not None and data.is_static and made.is_static and data.num_elements != made.num_elements:
                found.setdefault(
                    walk.label(step.node),
                    f"{format_shape(data.shape or ())} has {data.num_elements} elements, "
                    f"its target {format_shape(made.shape or ())} {made.num_elements}",
                )
        if (why := weight_conflict(step)) is not None:
            found.setdefault(walk.label(step.node), why)
        inside = [_nonconforming_steps(body) for body in step.bodies]
        if all(inside):  # where only one of two branches fits, that one may be the one that runs
            for part in inside:
                found |= part
    return found


_CONVOLUTIONS = {
    "Conv": (1, 2),
    "FusedConv": (1, 2),
    "ConvInteger": (1, None),
    "QLinearConv": (3, 8),
    "ConvTranspose": (1, 2),
}
"""Positions of the weights and of the bias."""
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def weight_conflict(step: TracedNode) -> str | None:
    """Why the weights of a convolution, normalisation, Gemm or recurrent layer are not for its data; None if they are, or
    if a size is unknown. ONNX's shape inference compares none of them, and every runtime refuses them."""
    node = step.node
    shapes = [info.shape if info is not None else None for info in step.inputs]

    def shape(at: int | None) -> Shape | None:
        return shapes[at] if at is not None and at < len(shapes) else None

    def differ(one: int, other: int) -> bool:
        return one != other and min(one, other) >= 0

    data, given = shape(0), walk.attributes(node)
    if data is None or walk.domain_of(node) not in ("", "com.microsoft"):
        return None
    if node.op_type in _CONVOLUTIONS:
        weight_at, bias_at = _CONVOLUTIONS[node.op_type]
        weight, bias, group = shape(weight_at), shape(bias_at), given.get("group", 1)
        if weight is None:
            return None
        is_transposed = node.op_type == "ConvTranspose"
        if len(weight) != len(data) or len(data) < 3:
            return f"data of {len(data)} axes and weights of {len(weight)}"
        wanted = weight[0] if is_transposed else weight[1] * group if weight[1] >= 0 else -1
        if differ(data[1], wanted):
            return f"the data has {data[1]} channels, the weights {format_shape(weight)} are for {wanted}"
        made = weight[1] * group if is_transposed and weight[1] >= 0 else weight[1 if is_transposed else 0]
        if bias is not None and (len(bias) != 1 or differ(bias[0], made)):
            return f"a bias of {format_shape(bias)} for {made} channels"
        kernel = given.get("kernel_shape")
        if kernel is not None and (len(kernel) != len(weight) - 2 or any(map(differ, kernel, weight[2:]))):
            return f"`kernel_shape` is {format_shape(tuple(kernel))}, the weights are {format_shape(weight)}"
    elif node.op_type in ("BatchNormalization", "InstanceNormalization") and len(data) > 1:
        for at in range(1, len(shapes)):
            if (one := shape(at)) is not None and (len(one) != 1 or differ(one[0], data[1])):
                return f"`{node.input[at]}` is {format_shape(one)}, the data has {data[1]} channels"
    elif node.op_type == "Gemm" and (weight := shape(1)) is not None and len(data) == len(weight) == 2:
        inner, wanted = data[0 if given.get("transA") else 1], weight[1 if given.get("transB") else 0]
        if differ(inner, wanted):
            return f"{format_shape(data)} and {format_shape(weight)} multiply {inner} by {wanted} elements"
    elif node.op_type in _GATES and len(data) == 3 and isinstance(hidden := given.get("hidden_size"), int):
        directions, rows = 1 + (given.get("direction") == b"bidirectional"), _GATES[node.op_type] * hidden
        for at, wanted in ((1, (directions, rows, data[2])), (2, (directions, rows, hidden))):
            one = shape(at)
            if one is not None and (len(one) != 3 or any(map(differ, one, wanted))):
                return f"`{node.input[at]}` is {format_shape(one)}, expected {format_shape(wanted)}"
    return None


def freeze_point(one: Trace, two: Trace, output: str) -> TracedNode | None:
    """First node towards `output` whose inputs follow the size and whose results do not; None if there is none.

    The traces are of one model at two sizes; the returned step is of the first.
    """
    makers = {name: step for step in one.nodes for name in step.node.output if name}
    order = {step.key: at for at, step in enumerate(one.nodes)}
    queue, met, cut = [output], set[str](), list[TracedNode]()
    while queue:
        step = makers.get(queue.pop())
        if step is None or step.key in met:
            continue
        met.add(step.key)
        read = [*walk.names_read(step.node)]
        moving = [name for name in read if _differs(one.tensors.get(name), two.tensors.get(name))]
        if moving and not step.folded:
            cut.append(step)
        elif not moving:
            queue.extend(read)
    return min(cut, key=lambda step: order[step.key], default=None)


def upstream_node(one: Trace, two: Trace, label: str) -> TracedNode | None:
    """Nearest node upstream of `label` that selects from the first axis of an input that follows the size and returns a
    fixed size; None if there is none."""
    makers = {name: step for step in one.nodes for name in step.node.output if name}
    queue = [step for step in one.nodes if walk.label(step.node) == label]
    met: set[str] = set()
    while queue:
        step = queue.pop(0)
        for name in step.node.input:
            above = makers.get(name)
            if above is None or above.key in met:
                continue
            met.add(above.key)
            if not above.folded and _takes_first_axis(above, two):
                return above
            queue.append(above)
    return None


def _takes_first_axis(step: TracedNode, two: Trace) -> bool:
    data, name = (step.inputs[0], step.node.input[0]) if step.inputs else (None, "")
    wider = two.tensors.get(name)
    made, grown = step.outputs[0], two.tensors.get(step.node.output[0])
    if data is None or wider is None or grown is None:
        return False
    if not (data.shape and wider.shape and made.shape and grown.shape):
        return False
    return data.shape[0] != wider.shape[0] and made.shape[0] == grown.shape[0] >= 0


def _differs(one: TensorInfo | None, two: TensorInfo | None) -> bool:
    if one is None or two is None:
        return False
    if one.shape != two.shape:
        return True
    if one.value is None or two.value is None:
        return False
    return not np.array_equal(one.value, two.value)


def describe_node(step: TracedNode) -> str:
    """Node label, operator, and the constant that fixes its result."""
    text = f"`{walk.label(step.node)}` ({step.node.op_type}"
    if step.node.op_type in ("Reshape", "Expand", "Tile") and len(step.inputs) > 1:
        target = step.inputs[1]
        if target is not None and target.value is not None and math.prod(target.value.shape) <= 8:
            text += f" with the constant {target.value.reshape(-1).tolist()}" if target.is_constant else ""
    return text + ")"


_TIME = re.compile(r".*(seq|time|frame|length|len|token|chunk|sample).*", re.IGNORECASE)
"""Names of sizes in time."""


def check_open_sizes(view: ModelView) -> Iterator[Finding]:
    image = image_input(view.model.signature.inputs)
    if image is not None and any(symbol and _TIME.fullmatch(symbol) for symbol in image.symbols[1:]):
        image = None  # a spectrogram: its ranks and channels are an image's, its sizes are not
    if image is not None and -1 in image.image_size and image.name not in view.given:
        yield warning(
            "dynamic-height-width",
            f"height and width of `{image.name}` ({image.format_symbolic()}) are open: an engine needs them fixed",
            image.name,
            f"`--shapes {image.name}:{format_shape(image.suggested_shape())}` with the size the model was trained for "
            "(`image_size` in its configuration)",
        )
    for spec in view.model.signature.inputs:
        others = [at for at in spec.dynamic if at > 0]
        if spec is not image and others and spec.name not in view.given:
            yield info(
                "dynamic-sizes",
                f"`{spec.name}` ({spec.format_symbolic()}) has open sizes beside the batch: an engine "
                "needs a range for them",
                spec.name,
                f"`--profile {spec.name}:MIN,OPT,MAX`",
            )


def check_batch(view: ModelView) -> Iterator[Finding]:
    inputs = [spec for spec in view.model.signature.inputs if spec.shape]
    if inputs and all(spec.shape[0] >= 0 for spec in inputs):
        size = inputs[0].shape[0]
        yield warning(
            "frozen-batch",
            f"the batch is frozen at {size} (`{inputs[0].name}` is {inputs[0].format_symbolic()}): `size` cannot scale "
            "it, and one engine serves one batch",
            inputs[0].name,
            "export again with a dynamic batch and an example of 2 rows or more "
            "(`dynamic_shapes=({0: 'batch'},)`), else measure at this batch",
        )
        return
    for spec in view.model.signature.outputs:
        if inputs and spec.shape and spec.shape[0] >= 0 and all(item.shape[0] < 0 for item in inputs):
            if spec.symbols and inputs[0].symbols and inputs[0].symbols[0] in set(spec.symbols) - {None}:
                continue  # the batch is a later axis, as in time-major results
            after = _trace_batch_2(view, inputs)
            step = freeze_point(view.trace, after, spec.name) if after is not None else None
            if step is not None and _makes_lists(step):
                continue  # reported by `data-dependent-shape`
            yield _batch_lost(spec.name, f"is {spec.format_symbolic()} whatever the batch", step)
            return
    yield from _probe_batch(view, inputs)


def _trace_batch_2(view: ModelView, inputs: list[TensorSpec]) -> Trace | None:
    """The trace at batch 2 if the first was at batch 1; None if sizes are unknown."""
    twice = {}
    for spec in inputs:
        at_one = view.shapes.get(spec.name)
        if at_one is None or len(at_one) != len(spec.shape):
            return None
        twice[spec.name] = (at_one[0] * 2, *at_one[1:])
    return trace(view.model.proto, twice)


def _probe_batch(view: ModelView, inputs: list[TensorSpec]) -> Iterator[Finding]:
    """Outputs that declare a dynamic batch and keep one size when the inputs have batch 2."""
    if not inputs or not all(spec.shape[0] < 0 for spec in inputs):
        return
    after = _trace_batch_2(view, inputs)
    if after is None:
        return
    rows = view.shapes[inputs[0].name][0]
    for spec in view.model.signature.outputs:
        one, two = view.trace.tensors.get(spec.name), after.tensors.get(spec.name)
        if one is None or two is None or one.shape is None or two.shape is None or one.is_constant:
            continue
        step = freeze_point(view.trace, after, spec.name)
        if step is not None and _makes_lists(step):
            continue
        if not one.shape:
            if step is not None:
                yield _batch_lost(spec.name, "has no axis for it", step)
                return
            continue
        moved = any((a, b) == (rows, 2 * rows) for a, b in zip(one.shape, two.shape, strict=False))
        if one.shape[0] >= 0 and one.shape[0] == two.shape[0] and not moved:
            yield _batch_lost(spec.name, f"keeps the size {one.shape[0]} when the batch doubles", step)
            return
    known = nonconforming_nodes(view.trace)
    new = {name: why for name, why in nonconforming_nodes(after).items() if name not in known}
    if new:
        name, why = next(iter(new.items()))
        yield _batch_lost(name, f"does not fit at twice the batch ({why})", upstream_node(view.trace, after, name))


_LISTING = frozenset("NonZero Unique Compress NonMaxSuppression".split())
"""Operators whose results are lists over all images."""


def _makes_lists(step: TracedNode) -> bool:
    """Whether the node or one in its bodies is such an operator."""
    return any(inner.node.op_type in _LISTING for inner in flatten([step]))


_ACROSS_BATCH = re.compile(r"Reduce\w+|Arg(Max|Min)|Einsum|MatMul|Gemm")
"""Operators that reduce a whole axis: nothing is frozen there."""


def _batch_lost(name: str, what: str, step: TracedNode | None = None) -> Finding:
    if step is not None and _ACROSS_BATCH.fullmatch(step.node.op_type):
        why = f"{describe_node(step)} reduces the whole batch to one result"
        hint = "ignore this if intended; else exclude the first axis in the source, and export again"
    else:
        why = "a constant batch is part of the graph" + (f", at {describe_node(step)}" if step is not None else "")
        hint = "export again with an example batch of 2 or more; with 1 exporters freeze it without an error"
    text = f"the inputs have a dynamic batch, but `{name}` {what}: {why}"
    return warning("batch-lost", text, walk.label(step.node) if step is not None else name, hint)


def check_output_ranks(view: ModelView) -> Iterator[Finding]:
    for value in view.model.proto.graph.output:
        if not value.type.tensor_type.HasField("shape"):
            yield info(
                "output-without-shape",
                f"the model does not declare the shape of its output `{value.name}`",
                value.name,
                "add the shapes with `onnx.shape_inference.infer_shapes`",
            )
            return
