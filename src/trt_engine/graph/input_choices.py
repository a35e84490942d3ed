"""Values of switches: inputs that a graph compares with constants (a sample rate, a mode, a flag).

A random number takes such an input where no caller does: into a branch whose layers do not fit the other inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from onnx import AttributeProto, NodeProto, TensorProto

from trt_engine.graph import walk
from trt_engine.graph.shape_inference import Trace, TracedNode
from trt_engine.tensors import Choice, Role, TensorSpec, dtype

_COMPARISONS = {"Equal": "=", "Less": "<", "LessOrEqual": "<=", "Greater": ">", "GreaterOrEqual": ">="}
_MIRRORED = {"=": "=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_OF_THE_FIRST = frozenset(
    "Identity Cast CastLike Squeeze Unsqueeze Reshape Flatten Gather GatherND GatherElements Slice Transpose Expand Tile "
    "Dropout Split Abs Floor Ceil Round Clip ReduceMax ReduceMin ReduceMean ReduceSum ReduceProd StringNormalizer".split()
)
_OF_ALL = frozenset("Add Sub Mul Div Mod Neg Min Max Sum Concat Where".split())
_LOGIC = frozenset("And Or Xor Not".split())
_AFFINE = {
    "Add": (lambda flow, c, first: flow.scaled(1, c)),
    "Sub": (lambda flow, c, first: flow.scaled(1, -c) if first else flow.scaled(-1, c)),
    "Mul": (lambda flow, c, first: flow.scaled(c, 0)),
    "Div": (lambda flow, c, first: flow.scaled(1 / c, 0) if first else flow),
}
_READS_CONDITION = {"If": 0, "Where": 0, "Loop": 1}
_DEFAULTS: dict[Role | None, int] = {"one": 1, "size": 4, "first": 0, "positive": 1}
_MAX_CONSTANTS, _MAX_CHOICES = 16, 8


class _Flow(NamedTuple):
    """A tensor that is `scale * input + offset`."""

    source: str
    scale: float = 1
    offset: float = 0

    def scaled(self, scale: float, offset: float) -> _Flow:
        return _Flow(self.source, self.scale * scale, self.offset * scale + offset) if scale else self

    def solve(self, value: Any) -> Any:
        """The input where the tensor is `value`."""
        if (self.scale, self.offset) == (1, 0) or isinstance(value, str):
            return value
        return (value - self.offset) / self.scale


def input_choices(inputs: Sequence[TensorSpec], traced: Trace) -> dict[str, tuple[Choice, ...]]:
    """The values to try by input, those first that make a comparison true: of inputs of one element that are compared with
    constants, and of larger ones where that decides which branch runs. None is a random value."""
    specs = {spec.name: spec for spec in inputs if spec.role not in ("axes", "reshape") and _may_switch(spec)}
    if not specs:
        return {}
    search = _Search(traced, {name: spec.dtype == "bool" for name, spec in specs.items()})
    found: dict[str, tuple[Choice, ...]] = {}
    for name, values in search.values.items():
        single = _has_one_element(specs[name])
        if single or name in search.controlling:
            made = _ordered_values(specs[name], values, search.equal.get(name, []))
            found[name] = tuple(made if single else [None, *made])[:_MAX_CHOICES]
    return {name: values for name, values in found.items() if any(value is not None for value in values)}


def _has_one_element(spec: TensorSpec) -> bool:
    return all(size == 1 for size in spec.shape)


def _may_switch(spec: TensorSpec) -> bool:
    """Whether random numbers of an input may be wrong ones: all but floats of several elements."""
    return spec.dtype in ("bool", "string") or "int" in spec.dtype or _has_one_element(spec)


class _Search:
    """Follows inputs through a graph and its bodies to where they are compared."""

    def __init__(self, traced: Trace, inputs: Mapping[str, bool]) -> None:
        self.inputs = inputs
        self.values: dict[str, list[Any]] = {}
        """Values on both sides of each comparison, by input."""
        self.equal: dict[str, list[Any]] = {}
        """Constants that an input is tested to be equal to."""
        self.controlling: set[str] = set()
        """Inputs that decide which branch runs."""
        self._texts: dict[str, list[str]] = {}
        flows: dict[str, tuple[_Flow, ...]] = {name: (_Flow(name),) for name in inputs}
        self._walk(traced.nodes, flows, {name: frozenset((name,)) for name in inputs})

    def _walk(
        self,
        steps: Sequence[TracedNode],
        flows: MutableMapping[str, tuple[_Flow, ...]],
        depends: MutableMapping[str, frozenset[str]],
    ) -> None:
        for step in steps:
            node, op = step.node, step.node.op_type
            if walk.domain_of(node):
                continue
            texts = (
                _constant_texts(node) if op == "Constant" else self._texts.get(node.input[0]) if node.input else None
            )
            if texts is not None and (op == "Constant" or op in _OF_THE_FIRST):
                self._texts[node.output[0]] = texts
            behind = frozenset().union(*(depends.get(name, ()) for name in node.input))
            if behind:
                self._compare(step, flows)
                if depends.get(_condition(node)):
                    self.controlling |= depends[_condition(node)] if op != "Where" else set()
                self._forward(step, behind, flows, depends)
            if step.bodies:
                self._enter(step, flows, depends)

    def _enter(
        self,
        step: TracedNode,
        flows: MutableMapping[str, tuple[_Flow, ...]],
        depends: MutableMapping[str, frozenset[str]],
    ) -> None:
        bodies = [body for _, body in walk.bodies(step.node)]
        skipped = 2 if step.node.op_type == "Loop" else 0
        for body, steps in zip(bodies, step.bodies, strict=False):
            for name, inner in zip(step.node.input[skipped:], body.input[skipped:], strict=False):
                if name in flows:
                    flows[inner.name], depends[inner.name] = flows[name], depends[name]
            self._walk(steps, flows, depends)

    def _compare(self, step: TracedNode, flows: Mapping[str, tuple[_Flow, ...]]) -> None:
        node = step.node
        if node.op_type in _COMPARISONS and len(node.input) == 2:
            sign = _COMPARISONS[node.op_type]
            for at, name in enumerate(node.input):
                constants = self._constants(step, 1 - at)
                for flow in flows.get(name, ()):
                    self._add(flow, _MIRRORED[sign] if at else sign, constants)
            return
        goes_boolean = node.op_type == "Cast" and any(
            item.name == "to" and item.i == TensorProto.BOOL for item in node.attribute
        )
        for name in node.input if node.op_type in _LOGIC else (_condition(node), *node.input[: int(goes_boolean)]):
            for flow in flows.get(name, ()):
                if self.inputs[flow.source]:
                    self.values.setdefault(flow.source, []).extend((True, False))
                elif goes_boolean:
                    self.values.setdefault(flow.source, []).extend((flow.solve(1), flow.solve(0)))

    def _add(self, flow: _Flow, sign: str, constants: Sequence[Any]) -> None:
        for constant in constants:
            value = flow.solve(constant)
            if sign == "=":
                self.equal.setdefault(flow.source, []).append(value)
            self.values.setdefault(flow.source, []).extend(
                (value,)
                if isinstance(value, str) or sign == "="
                else _sides(sign if flow.scale > 0 else _MIRRORED[sign], value)
            )

    def _constants(self, step: TracedNode, at: int) -> list[Any]:
        """The values of a constant operand."""
        name, info = step.node.input[at], step.inputs[at]
        if name in self._texts:
            return self._texts[name]
        if info is None or not info.is_constant or info.value is None or info.value.size > _MAX_CONSTANTS:
            return []
        return [
            value
            for value in np.asarray(info.value).reshape(-1).tolist()
            if isinstance(value, str) or math.isfinite(value)
        ]

    def _forward(
        self,
        step: TracedNode,
        behind: frozenset[str],
        flows: MutableMapping[str, tuple[_Flow, ...]],
        depends: MutableMapping[str, frozenset[str]],
    ) -> None:
        """What of the inputs the node's outputs have."""
        node, op = step.node, step.node.op_type
        if not (op in _OF_THE_FIRST or op in _OF_ALL or op in _LOGIC or op in _COMPARISONS or op == "Loop"):
            return
        passed: list[_Flow] = []
        for at, name in enumerate(node.input[:1] if op in _OF_THE_FIRST else node.input if op in _OF_ALL else ()):
            passed += [self._moved(step, at, flow) for flow in flows.get(name, ())]
        for output in filter(None, node.output):
            depends[output] = behind
            if passed:
                flows[output] = tuple(dict.fromkeys(passed))[:_MAX_CHOICES]

    def _moved(self, step: TracedNode, at: int, flow: _Flow) -> _Flow:
        op = step.node.op_type
        if op == "Neg":
            return flow.scaled(-1, 0)
        if op in _AFFINE and len(step.inputs) == 2 and len(other := self._constants(step, 1 - at)) == 1:
            moved: _Flow = flow if op == "Div" and not other[0] else _AFFINE[op](flow, other[0], at == 0)
            return moved
        return flow


def _condition(node: NodeProto) -> str:
    """The tensor that decides what the node does; empty without one."""
    at = _READS_CONDITION.get(node.op_type, len(node.input))
    return node.input[at] if at < len(node.input) else ""


def _constant_texts(node: NodeProto) -> list[str] | None:
    """The strings of a Constant node; None for other values."""
    for item in node.attribute:
        if item.name == "value_string" and item.type == AttributeProto.STRING:
            return [item.s.decode(errors="replace")]
        if item.name == "value_strings" and item.type == AttributeProto.STRINGS:
            return [text.decode(errors="replace") for text in item.strings][:_MAX_CONSTANTS]
        if item.name == "value" and item.t.data_type == TensorProto.STRING:
            return [text.decode(errors="replace") for text in item.t.string_data][:_MAX_CONSTANTS]
    return None


def _sides(sign: str, value: Any) -> tuple[Any, Any]:
    """A value for which the comparison is true, and one for which it is not."""
    step = 1 if isinstance(value, int) or value <= 0 else value / 2
    return {
        "<": (value - step, value), "<=": (value, value + step), ">": (value + step, value), ">=": (value, value - step),
    }[sign]  # fmt: skip


def _ordered_values(spec: TensorSpec, values: Sequence[Any], equal: Sequence[Any]) -> Iterator[Choice]:
    """The values in the input's type, each once: the usual one of its role, then constants it is equal to, negative ones
    last, and another value for the case that it is equal to none."""
    kind, role = spec.dtype, spec.role
    made: list[Any] = [value for item in values if (value := dtype(kind).to_scalar(item)) is not None]
    same = {dtype(kind).to_scalar(item) for item in equal} - {None}
    if kind == "string":
        yield from dict.fromkeys((*made, *([] if "" in same else [""])))
        return
    if kind == "bool":
        yield from (made[0], not made[0])
        return
    if same:
        others = (0, 1, *range(2, 2 * _MAX_CONSTANTS)) if "int" in kind else (0.5, 0.25, 0.75, 0.125)
        made.append(next(value for value in others if value not in same))
    least = {"one": 1, "size": 1, "positive": 1, "first": 0}.get(role or "", -math.inf)
    first = [_DEFAULTS[role]] if role in _DEFAULTS else []
    ranked = sorted((value for value in made if value >= least), key=lambda value: (value < 0, value not in same))
    random = [] if "int" not in kind or first or {0, 1} & {*ranked} else [None]
    yield from dict.fromkeys((*first, *ranked, *random))
