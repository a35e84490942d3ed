"""Rewrites a graph to FP16 or BF16: casts at the borders, converted weights."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_engine.config.precision import CastConfig
from trt_engine.graph import stored_tensors, typed_graph, walk
from trt_engine.graph.edit_graph import free_name, read_tensor, replace_items, set_attribute, used_names
from trt_engine.graph.typed_graph import FLOAT, Op, Scope, Tensor
from trt_engine.precision import cast_rules
from trt_engine.precision.layer_selection import Exclusions
from trt_engine.records.precision import Fp32Node, Fp32ReasonCode, RangesReport

_NORM_REASON = "part of a normalisation: squares and their root leave FP16's range and lose BF16's digits"
_SUMS = ("Add", "Sub")
_GUARDED = frozenset("Sqrt Pow Log Reciprocal Div".split())
_BEHIND_ROOT = cast_rules.LAYOUT_OPS | frozenset("Add Sub Mul Div Max Min Clip Reciprocal".split())


class CastRewriter:
    """Selects the nodes to keep in FP32, with reasons, then rewrites the graph."""

    def __init__(
        self, proto: ModelProto, to: str, folder: Path, config: CastConfig, changes: cast_rules.CastChanges
    ) -> None:
        self.proto, self.to, self.folder, self.config, self.changes = proto, to, folder, config, changes
        self.limit = min(config.max_constant or math.inf, cast_rules.MAX_FINITE[to])
        self.kind = cast_rules.TYPE_STRS[to]
        self.main = typed_graph.build_typed_graph(proto)
        self.ops = list(self.main.all_ops())
        self.kept: dict[Op, tuple[Fp32ReasonCode, str]] = {}
        """Reason code and text by node kept in FP32."""
        self.saturated: set[Tensor] = set()
        """Constants whose low-precision variant saturates instead of becoming infinite."""
        self.clamped: set[Tensor] = set()
        self.losses: dict[Tensor, stored_tensors.CastLoss] = {}
        self.variant_names: dict[tuple[Tensor, cast_rules.Variant], str] = {}
        self.required_variants: defaultdict[Tensor, set[cast_rules.Variant]] = defaultdict(set)
        self.used_names = used_names(proto)

    def keep_node(self, op: Op, code: Fp32ReasonCode, reason: str) -> bool:
        """Keep a node in FP32; return False if it was kept already."""
        if op in self.kept:
            return False
        self.kept[op] = (code, reason)
        return True

    def keep_with_bodies(self, op: Op, code: Fp32ReasonCode, reason: str) -> None:
        """Keep a node and all nodes of its bodies."""
        self.keep_node(op, code, reason)
        for body in op.bodies.values():
            for inner in body.all_ops():
                self.keep_node(inner, code, reason)

    def keep_excluded(self) -> None:
        """Keep excluded nodes; raise `UsageError` for a name, operator or pattern without a match."""
        exclude = Exclusions.of(self.config)
        exclude.check(self.proto)
        for op in self.ops:
            if (reason := exclude.reason(op.node)) is not None:
                self.keep_with_bodies(op, "excluded", reason)

    def keep_reported(self, ranges: RangesReport | Mapping[str, str] | None) -> None:
        """Keep the nodes of a ranges report, with its reasons."""
        if ranges is None:
            return
        reasons = ranges if isinstance(ranges, Mapping) else {item.node: item.reason for item in ranges.exclude}
        for op in self.ops:
            found = next((reasons[name] for name in (op.label, *op.node.output) if name in reasons), None)
            if found is not None:
                self.keep_with_bodies(op, "range", found)

    def keep_unsupported(self) -> None:
        """Keep the nodes that the low type does not support or would break."""
        for op in self.ops:
            if (reason := self.unsupported_reason(op)) is not None:
                if op.bodies and op.node.op_type not in cast_rules.CONTROL_FLOW:
                    self.keep_with_bodies(op, "type", reason)
                else:
                    self.keep_node(op, "type", reason)
        self.keep_constants()
        self.keep_normalizations()
        self.keep_index_arithmetic()
        self.merge_islands()

    def unsupported_reason(self, op: Op) -> str | None:
        """Why the operator cannot compute in the low type, or None."""
        present = [tensor for tensor in (*op.inputs, *op.outputs) if tensor is not None]
        if not any("(float)" in tensor.type_str or not tensor.type_str for tensor in present):
            return None
        if op.qualified_name in cast_rules.FP32_ONLY:
            return f"`{op.qualified_name}`: {cast_rules.FP32_ONLY[op.qualified_name]}"
        if op.node.op_type.startswith("Scatter") and walk.attributes(op.node).get("reduction", b"none") != b"none":
            return "it adds up what meets in one place, for which ONNX Runtime's CPU provider has no 16-bit kernel"
        if op.signature is None:
            return f"the types `{op.qualified_name}` takes are not known"
        for item in op.node.attribute:
            if item.t.data_type == TensorProto.FLOAT and op.qualified_name not in cast_rules.FREE_OUTPUT_TYPE:
                return f"its attribute `{item.name}` is FP32, and so is what it reads"
        if any("(float)" in tensor.type_str and tensor.type_str != FLOAT for tensor in present):
            return "sequences and optionals keep their type"
        unknown = next((tensor for tensor in present if not tensor.type_str), None)
        if unknown is not None:
            return f"the type of `{unknown.name}` is not known"
        if op.bodies and op.node.op_type not in cast_rules.CONTROL_FLOW:
            return "operators of sequences keep their type"
        if op.node.op_type in ("Constant", *cast_rules.ANY_TYPE_INPUT) and op.node.op_type not in ("Cast", "CastLike"):
            return None
        bound = {op.signature.input(at) for at, _ in cast_rules.fp32_tensors(op.inputs) if self.accepts_half(op, at)}
        outputs = cast_rules.fp32_tensors(op.outputs)
        refused = f"takes no {self.to} at opset {self.changes.opset[1]}"
        for position, _ in outputs:
            if self.is_fp32_output(op, position):
                continue
            formal = op.signature.output(position)
            if not op.signature.allows(formal, self.kind):
                return f"`{op.node.op_type}` {refused}"
            if formal not in bound and op.node.op_type not in cast_rules.FREE_OUTPUT_TYPE:
                return f"`{op.node.op_type}` {refused}" if bound else "its output does not follow its inputs"
        if outputs or op.node.op_type in cast_rules.FREE_OUTPUT_TYPE:
            return None
        return None if bound else f"`{op.node.op_type}` {refused}"

    def accepts_half(self, op: Op, position: int) -> bool:
        """True if that input may have the low type."""
        if op.signature is None or position >= cast_rules.FP32_INPUTS_FROM.get(op.node.op_type, 1 << 30):
            return False
        return op.signature.allows(op.signature.input(position), self.kind)

    def is_fp32_output(self, op: Op, position: int) -> bool:
        """True for LayerNormalization's statistics, whose type an attribute sets."""
        return op.node.op_type == "LayerNormalization" and position > 0

    # -------------------------------------------------------------------------------------------- constants

    def keep_constants(self) -> None:
        """Keep the readers of constants that the type cannot represent."""
        shrunk = 0
        tensors = (item for scope in self.main.all_scopes() for item in scope.tensors.values())
        for _, tensor in cast_rules.fp32_tensors(tensors):
            if tensor.value is None:
                continue
            facts = self.losses[tensor] = stored_tensors.cast_loss(
                tensor.value, self.folder, cast_rules.NUMPY_DTYPES[self.to], self.limit
            )
            if facts.overflowed:
                self.keep_overflowing(tensor, facts)
            if facts.underflowed and facts.underflowed == facts.nonzero:
                self.keep_underflowing(tensor, facts)
            elif facts.underflowed:
                shrunk += facts.underflowed
            for op, position in tensor.consumers:
                is_scale = op.node.op_type in cast_rules.QDQ and position == 1
                if is_scale and facts.max_rel_error > cast_rules.MAX_SCALE_ERROR:
                    self.keep_node(op, "scale", f"its scale {facts.smallest:.3g} is too small for {self.to}")
        if shrunk:
            self.changes.notes.append(f"{shrunk} single weights are too small for {self.to} and became 0")

    def keep_overflowing(self, tensor: Tensor, facts: stored_tensors.CastLoss) -> None:
        clips = {op for op, position in tensor.consumers if op.node.op_type == "Clip" and position > 0}
        others = [op for op, _ in tensor.consumers if op not in clips]
        if clips:
            self.saturated.add(tensor)  # a bound beyond the range binds nothing: exact for every finite number
        is_mask = facts.one_sided and all(op.node.op_type in cast_rules.MASK_OPS for op in others)
        if is_mask and self.config.clamp_masks:
            self.clamped.add(tensor)
            self.saturated.add(tensor)
            self.changes.clamped.append(tensor.name)
            return
        value = f"{facts.largest:.3g}"
        for op in dict.fromkeys(others):
            hint = "; `--clamp-masks` would move it" if is_mask else ""
            self.keep_overflow_path(op, f"its constant `{tensor.name}` ({value}) is beyond {self.to}{hint}")
        for scope in tensor.output_of:
            if scope.owner is not None:
                self.keep_node(
                    scope.owner, "constant", f"a body of it gives `{tensor.name}` ({value}), beyond {self.to}"
                )

    def keep_overflow_path(self, first: Op, reason: str) -> None:
        """Keep a node and the nodes that its out-of-range values reach."""
        queue = deque([first])
        met = {first}
        origin = first.label
        while queue:
            op = queue.popleft()
            self.keep_node(
                op, "constant", reason if op is first else f"reads numbers beyond {self.to} made by `{origin}`"
            )
            if op.node.op_type not in cast_rules.PROPAGATING_OPS:
                continue
            for _, made in cast_rules.fp32_tensors(op.outputs):
                for user, position in made.consumers:
                    if user in met or (user.node.op_type in cast_rules.ANY_TYPE_INPUT and user.node.op_type != "Cast"):
                        continue
                    met.add(user)
                    divides = user.node.op_type == "Div" and position == 1
                    if divides:
                        self.keep_node(user, "constant", f"reads numbers beyond {self.to} made by `{origin}`")
                    elif cast_rules.fp32_tensors(user.outputs) or user.inputs:
                        queue.append(user)

    def keep_underflowing(self, tensor: Tensor, facts: stored_tensors.CastLoss) -> None:
        """Keep readers of a constant that underflows; an epsilon guards the roots and divisions downstream."""
        for op, _ in tensor.consumers:
            self.keep_node(
                op, "constant", f"its constant `{tensor.name}` ({facts.largest:.3g}) would be 0 in {self.to}"
            )
            if op.node.op_type not in ("Add", "Sub", "Max", "Clip", "Where", "Sum"):
                continue
            queue, met = deque([op]), {op}
            while queue:
                for made in queue.popleft().outputs:
                    for user, _ in made.consumers if made is not None else ():
                        kind = user.node.op_type
                        if user in met or kind not in cast_rules.LAYOUT_OPS | _GUARDED:
                            continue
                        met.add(user)
                        self.keep_node(user, "constant", f"reads what `{op.label}` guards with {facts.largest:.3g}")
                        if kind in ("Sqrt", "Pow") or kind in cast_rules.LAYOUT_OPS:
                            queue.append(user)

    # -------------------------------------------------------------------------------------------- normalisations

    def keep_normalizations(self) -> None:
        """Keep normalisations that are written out (LayerNorm, RMSNorm, GroupNorm, L2): from the mean that is subtracted and
        the squares to what is divided by their root. The operators for them keep these numbers in FP32 too."""
        reached: dict[Tensor, bool] = {}
        for op in self.ops:
            if op.qualified_name in cast_rules.SQUARE_SUMS and cast_rules.uses_fp32(op):
                self.keep_squares(op)
                self.keep_divided(op)
            elif self.is_root(op) and self.leads_to_square(op.input(0), reached):
                self.keep_node(op, "norm", _NORM_REASON)
                self.keep_under_root(op, reached)
                self.keep_divided(op)

    def is_root(self, op: Op) -> bool:
        kind = op.qualified_name
        return kind == "Sqrt" or (kind == "Pow" and self.constant_number(op.input(1)) in (0.5, -0.5))

    def is_square(self, op: Op) -> bool:
        kind = op.qualified_name
        if kind in cast_rules.SQUARE_SUMS:
            return True
        same = kind == "Mul" and op.inputs[0] is op.inputs[1] and op.inputs[0] is not None
        return same or (kind == "Pow" and self.constant_number(op.input(1)) == 2)

    def constant_number(self, tensor: Tensor | None) -> float | None:
        """The number of a constant that holds one; None for others. `ModelError` for a damaged constant."""
        if tensor is None or tensor.type_str == "":
            return None
        if tensor.value is None:
            maker = tensor.producer
            if maker is None or maker.qualified_name not in ("Constant", "Cast", "Identity"):
                return None
            if maker.qualified_name != "Constant":
                return self.constant_number(maker.input(0))
            given = walk.attributes(maker.node)
            return float(given["value_float"]) if "value_float" in given else None
        if math.prod(tensor.value.dims) != 1:
            return None
        return float(read_tensor(tensor.value, self.folder).reshape(-1)[0])

    def leads_to_square(self, tensor: Tensor | None, reached: dict[Tensor, bool]) -> bool:
        """Whether a number under a root comes from squares."""
        waiting = [tensor] if tensor is not None else []
        met: list[Tensor] = []
        found = False
        while waiting and not found:
            item = waiting.pop()
            if item in reached:
                found = reached[item]
                continue
            maker = item.producer
            if maker is None or item.type_str != FLOAT:
                continue
            met.append(item)
            if self.is_square(maker):
                reached[item] = found = True
            elif maker.qualified_name in cast_rules.UNDER_ROOT_OPS and not self.is_root(maker):
                waiting += [made for _, made in cast_rules.fp32_tensors(maker.inputs) if made not in met]
        if not found:
            reached.update(dict.fromkeys(met, False))
        return found

    def keep_under_root(self, root: Op, reached: dict[Tensor, bool]) -> None:
        """Keep what is between a root and the squares under it."""
        waiting, met = [root], {root}
        while waiting:
            for _, tensor in cast_rules.fp32_tensors(waiting.pop().inputs):
                maker = tensor.producer
                if maker is None or maker in met or not self.leads_to_square(tensor, reached):
                    continue
                met.add(maker)
                self.keep_node(maker, "norm", _NORM_REASON)
                if self.is_square(maker):
                    self.keep_squares(maker)
                else:
                    waiting.append(maker)

    def keep_squares(self, op: Op) -> None:
        """Keep a square, and the mean or the difference from it that it is of."""
        self.keep_node(op, "norm", _NORM_REASON)
        for _, tensor in cast_rules.fp32_tensors(op.inputs):
            self.keep_centring(tensor)
            if (mean := self.mean_of(tensor)) is not None:
                self.keep_node(mean, "norm", _NORM_REASON)

    def keep_centring(self, tensor: Tensor) -> None:
        """Keep the subtraction of a mean, and the mean."""
        op = tensor.producer
        if op is None or op.qualified_name != "Sub":
            return
        means = [mean for _, side in cast_rules.fp32_tensors(op.inputs) if (mean := self.mean_of(side)) is not None]
        if means:
            for item in (op, *means):
                self.keep_node(item, "norm", _NORM_REASON)

    def mean_of(self, tensor: Tensor) -> Op | None:
        op: Op | None = tensor.producer
        while op is not None and op.node.op_type in cast_rules.LAYOUT_OPS and not walk.domain_of(op.node):
            first = op.input(0)
            op = first.producer if first is not None else None
        return op if op is not None and op.qualified_name in ("ReduceMean", "GlobalAveragePool") else None

    def keep_divided(self, root: Op) -> None:
        """Keep what a root goes through, the division by it, and what is added to the quotient of the mean."""
        waiting, met, divided = [root], {root}, set[Op]()
        while waiting:
            op = waiting.pop()
            for user in (user for _, made in cast_rules.fp32_tensors(op.outputs) for user, _ in made.consumers):
                kind = user.qualified_name
                if user in met or kind not in (_SUMS if op in divided else _BEHIND_ROOT):
                    continue
                sides = [item for _, item in cast_rules.fp32_tensors(user.inputs) if not cast_rules.is_constant(item)]
                others = [item for item in sides if item.producer not in met]
                if others and kind not in ("Mul", "Div"):
                    continue
                met.add(user)
                waiting.append(user)
                self.keep_node(user, "norm", _NORM_REASON)
                if others or op in divided:
                    divided.add(user)
                for item in others:
                    self.keep_centring(item)

    # -------------------------------------------------------------------------------------------- indices

    def keep_index_arithmetic(self) -> None:
        """Keep index and position arithmetic: FP32 is exact up to 2^24, FP16 up to 2048."""
        exact = 2048 if self.to == "fp16" else 256
        reason = f"arithmetic of indices or positions, which {self.to} holds exactly up to {exact}"
        index: set[Tensor] = set()
        for op in self.ops:
            if walk.domain_of(op.node):
                continue
            kind = op.node.op_type
            first = op.inputs[0] if op.inputs else None
            starts = kind == "Range" or (
                kind == "Cast" and first is not None and first.type_str in cast_rules.INDEX_TYPES
            )
            reads = [tensor for _, tensor in cast_rules.fp32_tensors(op.inputs) if not cast_rules.is_constant(tensor)]
            follows = (
                bool(reads)
                and all(tensor in index for tensor in reads)
                and (
                    kind in cast_rules.ARITHMETIC_OPS
                    or kind in cast_rules.LAYOUT_OPS
                    or (kind == "MatMul" and cast_rules.is_read_by(op, ("Sin", "Cos")))
                )
            )
            if starts or follows:
                made = [tensor for _, tensor in cast_rules.fp32_tensors(op.outputs)]
                if made or (follows and kind != "Cast"):
                    self.keep_node(op, "index", reason)
                index.update(made)
            elif kind == "Concat" and any(tensor in index for tensor in reads):
                self.keep_node(op, "index", "joins indices with other values")
        for op in self.ops:
            if op.node.op_type == "Cast" and op.outputs and op.outputs[0] is not None:
                if op.outputs[0].type_str in cast_rules.INDEX_TYPES:
                    self.keep_upstream(op.inputs[0], reason)
            elif op.node.op_type in ("Range", *cast_rules.FP32_INPUTS_FROM):
                for position, tensor in enumerate(op.inputs):
                    if position >= cast_rules.FP32_INPUTS_FROM.get(op.node.op_type, 0):
                        self.keep_upstream(tensor, reason)

    def keep_upstream(self, tensor: Tensor | None, reason: str) -> None:
        """Keep the arithmetic upstream of a tensor used as indices or sizes."""
        queue = deque([tensor])
        met: set[Tensor] = set()
        while queue:
            item = queue.popleft()
            if item is None or item in met or item.type_str != FLOAT or item.producer is None:
                continue
            met.add(item)
            op = item.producer
            if walk.domain_of(op.node) or op.node.op_type not in cast_rules.ARITHMETIC_OPS | cast_rules.LAYOUT_OPS:
                continue
            self.keep_node(op, "index", reason)
            queue.extend(op.inputs)

    def merge_islands(self) -> None:
        """Keep layout ops between kept nodes, which avoids a pair of Casts."""
        changed = True
        while changed:
            changed = False
            for op in self.ops:
                if op in self.kept or op.node.op_type not in cast_rules.LAYOUT_OPS or walk.domain_of(op.node):
                    continue
                reads = cast_rules.fp32_tensors(op.inputs)
                users = [user for made in op.outputs if made is not None for user, _ in made.consumers]
                leaves = any(made is not None and made.output_of for made in op.outputs)
                if not reads or not users or leaves:
                    continue
                if all(self.produced_variant(item) == "float" or item.value is not None for _, item in reads) and all(
                    user in self.kept for user in users
                ):
                    changed |= self.keep_node(op, "between", "moves data between nodes that are kept")

    # -------------------------------------------------------------------------------------------- homes and demands

    def produced_variant(self, tensor: Tensor) -> cast_rules.Variant:
        """The type a tensor is produced in; constants are converted instead."""
        if tensor.producer is not None:
            op = tensor.producer
            position = next(at for at, made in enumerate(op.outputs) if made is tensor)
            return "float" if op in self.kept or self.is_fp32_output(op, position) else "low"
        owner = tensor.scope.owner
        if tensor not in tensor.scope.inputs:
            return "float"  # a sparse initializer
        if owner is None:
            return "float" if self.config.keep_io else "low"
        return "float" if owner in self.kept else "low"

    def required_variant(self, op: Op, position: int, tensor: Tensor) -> cast_rules.Variant:
        """The type a node reads an input in."""
        kind = op.node.op_type
        if kind in cast_rules.ANY_TYPE_INPUT and position == 0 and not walk.domain_of(op.node):
            return "float" if tensor.value is not None else self.produced_variant(tensor)
        if op in self.kept:
            return "float"
        if kind in cast_rules.CONTROL_FLOW:
            return "low"
        return "low" if self.accepts_half(op, position) else "float"

    def output_variant(self, scope: Scope) -> cast_rules.Variant:
        """The type of a scope's outputs."""
        if scope.owner is None:
            return "float" if self.config.keep_io else "low"
        return "float" if scope.owner in self.kept else "low"

    def elem_type(self, variant: cast_rules.Variant) -> int:
        return cast_rules.ELEM_TYPES[self.to] if variant == "low" else TensorProto.FLOAT

    # -------------------------------------------------------------------------------------------- the rewrite

    def rewrite(self) -> None:
        """Apply the selection to the graph."""
        self.count_nodes()
        for op in self.ops:
            for position, tensor in cast_rules.fp32_tensors(op.inputs):
                self.required_variants[tensor].add(self.required_variant(op, position, tensor))
        for scope in self.main.all_scopes():
            for _, tensor in cast_rules.fp32_tensors(scope.outputs):
                self.required_variants[tensor].add(self.output_variant(scope))
        for scope in self.main.all_scopes():
            for _, tensor in cast_rules.fp32_tensors(scope.tensors.values()):
                self.assign_names(tensor)
        self.rewrite_scope(self.main)

    def count_nodes(self) -> None:
        for op in self.ops:
            if op.node.op_type == "Constant" or not cast_rules.uses_fp32(op):
                continue
            if op.node.op_type in cast_rules.ANY_TYPE_INPUT and not cast_rules.fp32_tensors(op.outputs):
                continue  # accepts any type
            self.changes.nodes += 1
            if op in self.kept:
                code, reason = self.kept[op]
                self.changes.kept.append(Fp32Node(op.label, op.qualified_name, code, reason))
            else:
                self.changes.nodes_cast += 1
                self.changes.operators[op.qualified_name] += 1

    def assign_names(self, tensor: Tensor) -> None:
        """Name both variants; the original name goes to the externally visible one."""
        wanted = self.required_variants[tensor]
        outside = next((self.output_variant(scope) for scope in tensor.output_of if scope.owner is None), None)
        if tensor.value is not None:
            first: cast_rules.Variant = "float" if "float" in wanted or not wanted else "low"
        else:
            first = self.produced_variant(tensor)
            wanted = {*wanted, first}
        owner = outside or first
        other: cast_rules.Variant = "low" if owner == "float" else "float"
        self.variant_names[tensor, owner] = tensor.name
        if other in wanted:
            short = self.to if other == "low" else "fp32"
            self.variant_names[tensor, other] = free_name(f"{tensor.name}_{short}", self.used_names)

    def rewrite_scope(self, scope: Scope) -> None:
        graph = scope.graph
        made: list[NodeProto] = []
        if scope.owner is not None or not self.config.keep_io:
            for tensor, value in zip(scope.inputs, cast_rules.runtime_inputs(graph), strict=True):
                if tensor.type_str == FLOAT and self.produced_variant(tensor) == "low":
                    value.type.tensor_type.elem_type = cast_rules.ELEM_TYPES[self.to]
        for tensor in scope.tensors.values():
            if tensor.type_str == FLOAT and tensor.producer is None and tensor.value is None:
                made.extend(self.make_casts(tensor))
        self.rewrite_initializers(scope)
        for op in scope.ops:
            for body in op.bodies.values():
                self.rewrite_scope(body)
            if op.node.op_type == "Constant" and op.outputs and op.outputs[0] and op.outputs[0].type_str == FLOAT:
                made.extend(self.rewrite_constant_node(op, op.outputs[0]))
                continue
            self.rewrite_node(op)
            made.append(op.node)
            for _, output in cast_rules.fp32_tensors(op.outputs):
                made.extend(self.make_casts(output))
        replace_items(graph.node, made)
        self.rewrite_value_info(scope)

    def rewrite_node(self, op: Op) -> None:
        """Update a node's tensor names and type attributes. Raises `ModelError` for a constant that cannot be read."""
        node = op.node
        for position, tensor in cast_rules.fp32_tensors(op.inputs):
            node.input[position] = self.variant_names[tensor, self.required_variant(op, position, tensor)]
        outputs = cast_rules.fp32_tensors(op.outputs)
        for position, output in outputs:
            node.output[position] = self.variant_names[output, self.produced_variant(output)]
        if op in self.kept or not outputs:
            return
        if node.op_type == "ConstantOfShape":
            value = next((item.t for item in node.attribute if item.name == "value"), None)
            zero = np.zeros(1, np.float32) if value is None else read_tensor(value, self.folder)
            tensor = helper.make_tensor(
                "value", cast_rules.ELEM_TYPES[self.to], [1], cast_rules.to_half(zero, self.to).tobytes(), raw=True
            )
            set_attribute(node, "value", tensor)
        name = cast_rules.DTYPE_ATTRIBUTES.get(node.op_type)
        if name is not None and not walk.domain_of(node):
            given = walk.attributes(node).get(name)
            if given or node.op_type in ("RandomNormal", "RandomUniform") or name == "output_datatype":
                set_attribute(node, name, cast_rules.ELEM_TYPES[self.to])

    def make_casts(self, tensor: Tensor) -> Iterator[NodeProto]:
        """Yield the Cast to the other type if a consumer needs it."""
        home = self.produced_variant(tensor)
        other: cast_rules.Variant = "low" if home == "float" else "float"
        if (tensor, other) not in self.variant_names or (
            other not in self.required_variants.get(tensor, ()) and self.variant_names[tensor, other] != tensor.name
        ):
            return
        target = self.variant_names[tensor, other]
        name = free_name(
            f"Cast_{self.variant_names[tensor, home]}_to_{self.to if other == 'low' else 'fp32'}", self.used_names
        )
        self.changes.casts_added += 1
        yield helper.make_node(
            "Cast", [self.variant_names[tensor, home]], [target], name=name, to=self.elem_type(other)
        )

    def named_variants(self, tensor: Tensor) -> Iterator[tuple[cast_rules.Variant, str]]:
        """Yield the variants of a constant and their names."""
        for wanted in ("float", "low"):
            if (tensor, wanted) in self.variant_names:
                yield wanted, self.variant_names[tensor, wanted]

    def rewrite_initializers(self, scope: Scope) -> None:
        graph = scope.graph
        kept: list[TensorProto] = []
        for item in graph.initializer:
            tensor = scope.tensors[item.name]
            if tensor.type_str != FLOAT or (tensor.value is not item and tensor.value is None):
                kept.append(item)
                continue
            kept.extend(self.convert_constant(tensor, item))
        replace_items(graph.initializer, kept)

    def convert_constant(self, tensor: Tensor, item: TensorProto) -> Iterator[TensorProto]:
        names = list(self.named_variants(tensor))
        if len(names) == 2:
            self.changes.duplicated.append(tensor.name)
        for wanted, name in names:
            if wanted == "float" and tensor not in self.clamped:
                copy = deepcopy(item)
                copy.name = name
                yield copy
                continue
            limit = cast_rules.MAX_FINITE[self.to] if tensor in self.saturated else None
            self.changes.converted += wanted == "low"
            yield stored_tensors.convert(item, name, self.elem_type(wanted), limit, self.folder, self.changes.deferred)

    def rewrite_constant_node(self, op: Op, tensor: Tensor) -> Iterator[NodeProto]:
        """Yield a Constant node for each variant that is read."""
        value = tensor.value
        if value is None:
            given = walk.attributes(op.node)
            if "sparse_value" in given:
                yield deepcopy(op.node)
                yield from self.make_casts(tensor)
                return
            numbers = np.float32(given["value_float"] if "value_float" in given else given["value_floats"])
            value = helper.make_tensor("value", TensorProto.FLOAT, numbers.shape, numbers.tobytes(), raw=True)
        for made, (_, name) in zip(self.convert_constant(tensor, value), self.named_variants(tensor), strict=True):
            made.name = value.name
            node = helper.make_node("Constant", [], [name], value=made)
            node.name = op.node.name if name == tensor.name else free_name(f"{op.label}_{self.to}", self.used_names)
            yield node

    def rewrite_value_info(self, scope: Scope) -> None:
        """Update the declared types of outputs and intermediate tensors."""
        graph = scope.graph
        handed = self.output_variant(scope)
        for value, tensor in zip(graph.output, scope.outputs, strict=True):
            if tensor is not None and tensor.type_str == FLOAT:
                value.name = self.variant_names[tensor, handed]
                if value.type.HasField("tensor_type"):
                    value.type.tensor_type.elem_type = self.elem_type(handed)
        stated = []
        for value in graph.value_info:
            tensor = scope.tensors.get(value.name)
            if tensor is None or tensor.type_str != FLOAT or not value.type.HasField("tensor_type"):
                stated.append(value)
                continue
            for wanted, name in self.named_variants(tensor):
                copy = deepcopy(value)
                copy.name = name
                copy.type.tensor_type.elem_type = self.elem_type(wanted)
                stated.append(copy)
        made = {item.name for item in graph.input} | {item.name for item in graph.output}
        replace_items(graph.value_info, [value for value in stated if value.name not in made])
