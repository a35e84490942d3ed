"""Where a size was frozen: one model traced at two sizes, and the node at which the second stops to matter."""

from __future__ import annotations

import math

import numpy as np

from trt_engine.graph import walk
from trt_engine.graph.trace import Fact, Step, Trace
from trt_engine.tensors import format_shape

__all__ = ["before", "describe", "entered", "misfits"]


def misfits(trace: Trace) -> dict[str, str]:
    """Why nodes do not fit at the sizes of the trace, by node label: what shape inference refuses, and a Reshape whose
    target holds another number of elements."""
    found = {name: why.removeprefix("[ShapeInferenceError] ").removeprefix("[TypeInferenceError] ")
             for name, why in trace.failures.items()}  # fmt: skip
    for step in trace.steps:
        if step.node.op_type == "Reshape" and step.inputs and not step.folded:
            data, made = step.inputs[0], step.outputs[0]
            if data is not None and data.sized and made.sized and data.elements != made.elements:
                found.setdefault(
                    walk.label(step.node),
                    f"{format_shape(data.shape or ())} has {data.elements} elements, "
                    f"its target {format_shape(made.shape or ())} {made.elements}",
                )
    return found


def entered(one: Trace, two: Trace, output: str) -> Step | None:
    """The node whose inputs follow the size and whose results do not, on the way to `output`; None when there is none.

    The traces are of one model at two sizes; the step is of the first.
    """
    makers = {name: step for step in one.steps for name in step.node.output if name}
    order = {step.key: at for at, step in enumerate(one.steps)}
    queue, met, cut = [output], set[str](), list[Step]()
    while queue:
        step = makers.get(queue.pop())
        if step is None or step.key in met:
            continue
        met.add(step.key)
        moving = [name for name in step.node.input if name and _differs(one.facts.get(name), two.facts.get(name))]
        if moving and not step.folded:
            cut.append(step)
        elif not moving:
            queue.extend(name for name in step.node.input if name)
    return min(cut, key=lambda step: order[step.key], default=None)


def before(one: Trace, two: Trace, label: str) -> Step | None:
    """The nearest node before the one of this label that takes the first axis of what it reads, which follows the size, and
    gives a fixed one; None when there is none."""
    makers = {name: step for step in one.steps for name in step.node.output if name}
    queue = [step for step in one.steps if walk.label(step.node) == label]
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


def _takes_first_axis(step: Step, two: Trace) -> bool:
    data, name = (step.inputs[0], step.node.input[0]) if step.inputs else (None, "")
    wider = two.facts.get(name)
    made, grown = step.outputs[0], two.facts.get(step.node.output[0])
    if data is None or wider is None or grown is None:
        return False
    if not (data.shape and wider.shape and made.shape and grown.shape):
        return False
    return data.shape[0] != wider.shape[0] and made.shape[0] == grown.shape[0] >= 0


def _differs(one: Fact | None, two: Fact | None) -> bool:
    if one is None or two is None:
        return False
    if one.shape != two.shape:
        return True
    if one.value is None or two.value is None:
        return False
    return not np.array_equal(one.value, two.value)


def describe(step: Step) -> str:
    """The node as a person looks for it: its label, its operator, and the constant that fixes its result."""
    text = f"`{walk.label(step.node)}` ({step.node.op_type}"
    if step.node.op_type in ("Reshape", "Expand", "Tile") and len(step.inputs) > 1:
        target = step.inputs[1]
        if target is not None and target.value is not None and math.prod(target.value.shape) <= 8:
            text += f" with the constant {target.value.reshape(-1).tolist()}" if target.stored else ""
    return text + ")"
