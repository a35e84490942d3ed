"""`cast`: the same network in FP16 or BF16, its types consistent everywhere, what must not be cast left in FP32.

Decided node by node, from the types each operator's schema allows: a node computes in the low type, or it is kept and says
why. Every tensor then has one home type, that of the node that makes it; a reader that wants the other one gets a Cast, one
for all readers, right behind the maker. Weights are converted, not cast, and stored in both types when both are read.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, version_converter

from trt_engine.errors import ModelError, UsageError
from trt_engine.graph import walk
from trt_engine.graph.load import check, open_model, read_proto
from trt_engine.graph.module_paths import ModulePaths, carry, names_of, with_modules
from trt_engine.graph.names import free_name, unique_names
from trt_engine.graph.trace import attributes
from trt_engine.model import Model
from trt_engine.precision import elements, stored
from trt_engine.precision.elements import BRAIN, FLOAT, HALF, Op, Scope, Tensor
from trt_engine.precision.opsets import LEAST, raise_opset
from trt_engine.precision.rules import check_strong_typing
from trt_engine.records import CastReport, Finding, KeptCode, KeptNode
from trt_engine.tensors import closest

__all__ = ["LARGEST", "cast", "cast_proto"]

log = logging.getLogger(__name__)

Low = Literal["fp16", "bf16"]
Wanted = Literal["float", "low"]

_ELEM = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
_KIND = {"fp16": HALF, "bf16": BRAIN}
_NUMPY: dict[str, Any] = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
LARGEST = {"fp16": 65504.0, "bf16": float(np.float32(3.3895314e38))}
"""The largest finite number of each type."""

_FIXED = {"Resize": 1, "Upsample": 1}
"""From this input on the operator wants FP32 whatever the first one is: region of interest and scales."""
_ANY_INPUT = frozenset("Cast CastLike Shape Size".split())
"""Their first input may have any type: no Cast is put before them."""
_BODIED = frozenset("If Loop Scan".split())
_LAYOUT = frozenset(
    "Reshape Transpose Squeeze Unsqueeze Flatten Expand Tile Slice Gather GatherElements GatherND Concat Split Identity "
    "Pad Compress ReverseSequence".split()
)
_ARITHMETIC = frozenset(
    "Add Sub Mul Div Mod Floor Ceil Round Neg Abs Sqrt Pow Min Max Clip Exp Log Sin Cos Reciprocal Sign Where Sum CumSum "
    "Equal Less Greater LessOrEqual GreaterOrEqual ReduceMax ReduceMin ReduceSum ReduceProd Range Cast".split()
)
_CARRIES = _LAYOUT | frozenset("Add Sub Mul Where Neg Abs Sum".split())
"""What hands a number beyond the range on."""
_INDEX_KINDS = frozenset(f"tensor({kind})" for kind in ("int16", "int32", "int64", "uint16", "uint32", "uint64"))
_MASKS = frozenset("Where Add Sub Mul Sum Min Max Expand Unsqueeze Reshape Concat Slice Identity Gather Tile".split())
_DTYPE = {
    "Cast": "to", "RandomNormal": "dtype", "RandomUniform": "dtype", "RandomNormalLike": "dtype",
    "RandomUniformLike": "dtype", "EyeLike": "dtype", "Bernoulli": "dtype", "HannWindow": "output_datatype",
    "HammingWindow": "output_datatype", "BlackmanWindow": "output_datatype", "MelWeightMatrix": "output_datatype",
    "DequantizeLinear": "output_dtype",
}  # fmt: skip
"""The attribute that says what an operator makes."""
_FREE = frozenset((*_DTYPE, "Constant", "ConstantOfShape", "CastLike", *_BODIED))
"""Operators whose output type does not follow from their inputs alone."""
_CAST_OPSET = 13
"""Stated where a model states no version of the standard's operators: Cast has every type from here on."""
_FP32_ALONE = {
    "BitCast": "it reads the bits of its input",
    "MeanVarianceNormalization": "its definition holds constants of FP32",
}
"""Operators that the schema lets take the low type, and that cannot."""
_QDQ = ("QuantizeLinear", "DequantizeLinear")
_SCALE_ERROR = 0.01
"""A scale that the low type holds with a larger relative error stays in FP32."""


def cast(
    model: Path | str,
    to: str,
    *,
    out: Path | str | None = None,
    keep_io: bool = True,
    exclude_nodes: Sequence[str] = (),
    exclude_types: Sequence[str] = (),
    exclude_patterns: Sequence[str] = (),
    auto: Mapping[str, str] | Any | None = None,
    init_max: float | None = None,
    clamp_masks: bool = False,
    yes: bool = False,
    dry_run: bool = False,
) -> CastReport:
    """The model in `fp16` or `bf16` at `out`, and what was cast, kept and why.

    Kept in FP32: inputs and outputs unless `keep_io` is off, nodes excluded by name, operator or pattern (as `/head/*`),
    nodes of `auto` (a ranges report, or reasons by node name), operators that do not take the type, arithmetic of indices,
    and what reads a constant beyond `init_max` (default: the type's largest number) or one that would become
    zero. `clamp_masks` moves attention masks such as -1e9 to the type's largest number instead. Without `out`, or with
    `dry_run`, nothing is written.
    """
    started = time.monotonic()
    if to not in _ELEM:
        raise UsageError(f"cannot cast to `{to}`", hint="`--to fp16` or `--to bf16`; `quantize` writes the others")
    opened = open_model(model)
    target = Path(out) if out is not None else None
    if target is not None:
        refuse_target(target, opened, yes=yes)
    proto = read_proto(opened.path)
    check(opened, proto)
    proto, changed = cast_proto(
        proto,
        to,
        folder=opened.path.parent,
        keep_io=keep_io,
        exclude_nodes=exclude_nodes,
        exclude_types=exclude_types,
        exclude_patterns=exclude_patterns,
        auto=auto,
        init_max=init_max,
        clamp_masks=clamp_masks,
        name=str(opened.path),
    )
    findings = check_strong_typing(proto)
    report = changed.report(opened, to, keep_io, findings, ModulePaths(proto))
    if target is not None and not dry_run:
        written = _write(proto, changed.sources, opened, target, changed)
        artifacts = {"model": str(target)}
        if (beside := stored.side_file(target)).exists():
            artifacts["weights"] = str(beside)
        report = replace(report, out=str(target), nbytes_after=written, artifacts=artifacts, notes=tuple(changed.notes))
    return replace(report, seconds=time.monotonic() - started, dry_run=dry_run or target is None)


def refuse_target(target: Path, model: Model, *, yes: bool) -> None:
    """`UsageError` for a place the result cannot take."""
    taken = {model.path.resolve(), *(item.path.resolve() for item in model.external)}
    if target.resolve() in taken or stored.side_file(target).resolve() in taken:
        raise UsageError(f"`{target}` is the model itself", hint="name another `-o`")
    if target.is_dir():
        raise UsageError(f"`{target}` is a folder, expected a file", hint=f"`-o {target / model.path.name}`")
    if target.exists() and not yes:
        raise UsageError(f"`{target}` exists", hint="`--yes` overwrites it, or name another `-o`")


def cast_proto(
    proto: ModelProto,
    to: str,
    *,
    folder: Path,
    keep_io: bool = True,
    exclude_nodes: Sequence[str] = (),
    exclude_types: Sequence[str] = (),
    exclude_patterns: Sequence[str] = (),
    auto: Mapping[str, str] | Any | None = None,
    init_max: float | None = None,
    clamp_masks: bool = False,
    name: str = "the model",
) -> tuple[ModelProto, Changes]:
    """The cast graph and what was changed; external weights stay where they are until the graph is written.

    The graph given is not touched.
    """
    work = ModelProto()
    work.CopyFrom(elements.inlined(proto))
    if "" not in walk.opsets_of(work):  # a model of other domains alone: Casts are of the standard's
        work.opset_import.add(domain="", version=_CAST_OPSET)
        work.ir_version = max(work.ir_version, helper.find_min_ir_version_for(work.opset_import, ignore_unknown=True))
    changes = Changes(opset=(walk.opsets_of(work).get("", 1),) * 2)
    if proto.functions:
        changes.notes.append(f"{len(proto.functions)} local functions were written out where they are called")
    if renamed := unique_names(work):
        changes.notes.append(f"{renamed} nodes had the name of another and got one of their own")
    work = _raise_opset(work, to, changes, name)
    _drop_constant_inputs(work, changes)
    caster = _Caster(work, to, folder, keep_io, init_max or LARGEST[to], clamp_masks, changes)
    caster.keep_asked(exclude_nodes, exclude_types, exclude_patterns)
    caster.keep_auto(auto)
    caster.keep_what_must()
    caster.rewrite()
    _fold_casts(work, changes)
    carry(work, proto)
    return work, changes


@dataclass(slots=True)
class Changes:
    """What a cast did."""

    opset: tuple[int, ...]
    """Before and after."""
    nodes: int = 0
    cast: int = 0
    operators: Counter[str] = field(default_factory=Counter)
    kept: list[KeptNode] = field(default_factory=list)
    casts_added: int = 0
    casts_removed: int = 0
    converted: int = 0
    duplicated: list[str] = field(default_factory=list)
    clamped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: list[stored.Source] = field(default_factory=list)
    """Weights in external files that are converted when the result is written."""

    def report(
        self, model: Model, to: str, keep_io: bool, findings: tuple[Finding, ...], paths: ModulePaths
    ) -> CastReport:
        return CastReport(
            model=str(model.path),
            out=None,
            to=to,
            path="light",
            keep_io=keep_io,
            opset=(self.opset[0], self.opset[1]),
            nodes=self.nodes,
            nodes_cast=self.cast,
            operators_cast=dict(self.operators.most_common()),
            kept=with_modules(self.kept, paths),
            casts_added=self.casts_added,
            casts_removed=self.casts_removed,
            constants_converted=self.converted,
            constants_in_both_types=tuple(self.duplicated),
            constants_clamped=tuple(self.clamped),
            nbytes_before=model.nbytes,
            nbytes_after=None,
            findings=with_modules(findings, paths, "where"),
            notes=tuple(self.notes),
        )


# ------------------------------------------------------------------------------------------------ before


def _raise_opset(proto: ModelProto, to: str, changes: Changes, name: str) -> ModelProto:
    """The model at an opset where its operators take the type; as it is where they do already."""
    before = walk.opsets_of(proto).get("", 1)
    target = 22 if to == "bf16" else 19
    if before >= target:
        return proto
    waiting = sorted(
        {
            op.node.op_type
            for op in elements.read(proto).all_ops()
            if not walk.domain_of(op.node)
            and (to == "bf16" or op.node.op_type in _QDQ)
            and _touches_float(op)
            and not _takes(op.node.op_type, before, _KIND[to])
            and _takes(op.node.op_type, target, _KIND[to])
        }
    )
    if not waiting:
        return proto
    shown = ", ".join(f"`{item}`" for item in waiting[:4]) + (" and others" if len(waiting) > 4 else "")
    try:
        raised = ModelProto()
        raised.CopyFrom(proto)
        if before < LEAST:
            raised = version_converter.convert_version(proto, LEAST)
            raised.ir_version = max(raised.ir_version, proto.ir_version)
        raise_opset(raised, target)
        onnx.shape_inference.infer_shapes(raised, check_type=True, strict_mode=True)
    except Exception as error:  # the converter and the inference raise whatever their C++ side throws
        reason = error.message if isinstance(error, ModelError) else (str(error).splitlines() or [""])[0]
        raise ModelError(
            f"`{name}` is at opset {before}, where {shown} take no {to}, and it cannot be raised to opset {target}: "
            f"{reason}",
            hint=f"export it again with `opset_version={target}`"
            + (", or cast to fp16, which every opset has" if to == "bf16" else ""),
        ) from error
    if not raised.metadata_props:
        raised.metadata_props.extend(proto.metadata_props)
    changes.opset = (before, target)
    changes.notes.append(f"raised from opset {before} to {target}: {shown} take no {to} before")
    return raised


def _touches_float(op: Op) -> bool:
    return any(tensor is not None and tensor.kind == FLOAT for tensor in (*op.inputs, *op.outputs))


def _takes(op: str, opset: int, kind: str) -> bool:
    """True when an operator takes the type wherever it takes FP32 for its first input and output."""
    found = elements.signature_of(op, "", opset)
    if found is None:
        return False
    places = [*found.inputs[:1], *found.outputs[:1]]
    floats = [formal for formal in places if found.allows(formal, FLOAT)]
    return bool(floats) and all(found.allows(formal, kind) for formal in floats)


def _drop_constant_inputs(proto: ModelProto, changes: Changes) -> None:
    """Initializers that are also listed as inputs are constants from here on."""
    constants = {item.name for item in proto.graph.initializer}
    listed = [item for item in proto.graph.input if item.name in constants]
    for item in listed:
        proto.graph.input.remove(item)
    if listed:
        proto.ir_version = max(proto.ir_version, 4)
        changes.notes.append(f"{len(listed)} initializers that were listed as inputs too are plain constants now")


# ------------------------------------------------------------------------------------------------ the decision


class _Caster:
    """One cast: the nodes that are kept, with reasons, then the rewrite."""

    def __init__(
        self, proto: ModelProto, to: str, folder: Path, keep_io: bool, limit: float, clamp_masks: bool, changes: Changes
    ) -> None:
        self.proto, self.to, self.folder, self.keep_io, self.changes = proto, to, folder, keep_io, changes
        self.limit = min(limit, LARGEST[to])
        self.clamp_masks = clamp_masks
        self.kind = _KIND[to]
        self.main = elements.read(proto)
        self.ops = list(self.main.all_ops())
        self.keep: dict[Op, tuple[KeptCode, str]] = {}
        """Why a node stays in FP32: a code and the reason in words."""
        self.saturated: set[Tensor] = set()
        """Constants whose low variant ends at the largest number instead of infinity."""
        self.clamped: set[Tensor] = set()
        self.facts: dict[Tensor, stored.Facts] = {}
        self.names: dict[tuple[Tensor, Wanted], str] = {}
        self.wanted: dict[Tensor, set[Wanted]] = {}
        self.taken = _all_names(proto)

    def mark(self, op: Op, code: KeptCode, reason: str) -> bool:
        """Keep a node; False when it was kept already."""
        if op in self.keep:
            return False
        self.keep[op] = (code, reason)
        return True

    def mark_inside(self, op: Op, code: KeptCode, reason: str) -> None:
        """Keep a node and everything in its bodies."""
        self.mark(op, code, reason)
        for body in op.bodies.values():
            for inner in body.all_ops():
                self.mark(inner, code, reason)

    def keep_asked(self, nodes: Sequence[str], types: Sequence[str], patterns: Sequence[str]) -> None:
        """The nodes somebody excluded; `UsageError` for a name, operator or pattern that is nowhere in the model."""
        called = {op: {*names_of(op.node), *op.node.output} - {""} for op in self.ops}
        labels = {name for names in called.values() for name in names}
        for name in nodes:
            if name not in labels:
                raise UsageError(f"there is no node `{name}` to exclude", hint=closest(name, sorted(labels)))
        kinds = {op.type for op in self.ops}
        for kind in types:
            if kind not in kinds:
                raise UsageError(f"there is no operator `{kind}` in the model", hint=closest(kind, sorted(kinds)))
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for op in self.ops for name in names_of(op.node)):
                raise UsageError(
                    f"the pattern `{pattern}` fits no node's name", hint="`*` stands for anything, as in `/head/*`"
                )
        chosen = set(nodes)
        for op in self.ops:
            if not chosen.isdisjoint(called[op]):
                self.mark_inside(op, "excluded", "excluded by name")
            elif op.type in types:
                self.mark_inside(op, "excluded", f"excluded by operator `{op.type}`")
            else:
                names = names_of(op.node)
                fitting = next((item for item in patterns if any(fnmatchcase(name, item) for name in names)), None)
                if fitting is not None:
                    self.mark_inside(op, "excluded", f"excluded by pattern `{fitting}`")

    def keep_auto(self, auto: Mapping[str, str] | Any | None) -> None:
        """The nodes a ranges report names, with its reasons."""
        if auto is None:
            return
        reasons: dict[str, str] = dict(auto) if isinstance(auto, Mapping) else _reasons_of(auto)
        for op in self.ops:
            found = next((reasons[name] for name in (op.label, *op.node.output) if name in reasons), None)
            if found is not None:
                self.mark_inside(op, "range", found)

    def keep_what_must(self) -> None:
        """What does not survive the type, whoever asked."""
        for op in self.ops:
            if (reason := self.untyped(op)) is not None:
                if op.bodies and op.node.op_type not in _BODIED:
                    self.mark_inside(op, "type", reason)
                else:
                    self.mark(op, "type", reason)
        self.keep_constants()
        self.keep_indices()
        self.join_islands()

    def untyped(self, op: Op) -> str | None:
        """Why the operator cannot compute in the low type; None when it can."""
        present = [tensor for tensor in (*op.inputs, *op.outputs) if tensor is not None]
        if not any("(float)" in tensor.kind or not tensor.kind for tensor in present):
            return None
        if op.type in _FP32_ALONE:
            return f"`{op.type}`: {_FP32_ALONE[op.type]}"
        if op.signature is None:
            return f"the types `{op.type}` takes are not known"
        for item in op.node.attribute:
            if item.t.data_type == TensorProto.FLOAT and op.type not in _FREE:
                return f"its attribute `{item.name}` is FP32, and so is what it reads"
        if any("(float)" in tensor.kind and tensor.kind != FLOAT for tensor in present):
            return "sequences and optionals keep their type"
        unknown = next((tensor for tensor in present if not tensor.kind), None)
        if unknown is not None:
            return f"the type of `{unknown.name}` is not known"
        if op.bodies and op.node.op_type not in _BODIED:
            return "operators of sequences keep their type"
        if op.node.op_type in ("Constant", *_ANY_INPUT) and op.node.op_type not in ("Cast", "CastLike"):
            return None
        bound = set()
        for position, tensor in enumerate(op.inputs):
            if tensor is not None and tensor.kind == FLOAT and self.takes(op, position):
                bound.add(op.signature.input(position))
        outputs = [(at, item) for at, item in enumerate(op.outputs) if item is not None and item.kind == FLOAT]
        refused = f"takes no {self.to} at opset {self.changes.opset[1]}"
        for position, _ in outputs:
            if self.fixed_output(op, position):
                continue
            formal = op.signature.output(position)
            if not op.signature.allows(formal, self.kind):
                return f"`{op.node.op_type}` {refused}"
            if formal not in bound and op.node.op_type not in _FREE:
                return f"`{op.node.op_type}` {refused}" if bound else "its output does not follow its inputs"
        if outputs or op.node.op_type in _FREE:
            return None
        return None if bound else f"`{op.node.op_type}` {refused}"

    def takes(self, op: Op, position: int) -> bool:
        """True when that input may be of the low type."""
        if op.signature is None or position >= _FIXED.get(op.node.op_type, 1 << 30):
            return False
        return op.signature.allows(op.signature.input(position), self.kind)

    def fixed_output(self, op: Op, position: int) -> bool:
        """Statistics that an attribute types, not the data."""
        return op.node.op_type == "LayerNormalization" and position > 0

    # -------------------------------------------------------------------------------------------- constants

    def constants(self) -> Iterator[Tensor]:
        for scope in self.main.all_scopes():
            for tensor in scope.tensors.values():
                if tensor.stored is not None and tensor.kind == FLOAT:
                    yield tensor

    def keep_constants(self) -> None:
        """Constants the type cannot hold, and the nodes that read them."""
        shrunk = 0
        for tensor in self.constants():
            assert tensor.stored is not None
            facts = self.facts[tensor] = stored.facts(tensor.stored, self.folder, _NUMPY[self.to], self.limit)
            if facts.beyond:
                self.keep_beyond(tensor, facts)
            if facts.vanish and facts.vanish == facts.nonzero:
                self.keep_vanishing(tensor, facts)
            elif facts.vanish:
                shrunk += facts.vanish
            for op, position in tensor.users:
                if op.node.op_type in _QDQ and position == 1 and facts.error > _SCALE_ERROR:
                    self.mark(op, "scale", f"its scale {facts.smallest:.3g} is too small for {self.to}")
        if shrunk:
            self.changes.notes.append(f"{shrunk} single weights are too small for {self.to} and became 0")

    def keep_beyond(self, tensor: Tensor, facts: stored.Facts) -> None:
        clips = {op for op, position in tensor.users if op.node.op_type == "Clip" and position > 0}
        others = [op for op, _ in tensor.users if op not in clips]
        if clips:
            self.saturated.add(tensor)  # a bound beyond the range binds nothing: exact for every finite number
        is_mask = facts.one_sided and all(op.node.op_type in _MASKS for op in others)
        if is_mask and self.clamp_masks:
            self.clamped.add(tensor)
            self.saturated.add(tensor)
            self.changes.clamped.append(tensor.name)
            return
        value = f"{facts.largest:.3g}"
        for op in dict.fromkeys(others):
            hint = "; `--clamp-masks` would move it" if is_mask else ""
            self.carry(op, f"its constant `{tensor.name}` ({value}) is beyond {self.to}{hint}")
        for scope in tensor.leaves:
            if scope.owner is not None:
                self.mark(scope.owner, "constant", f"a body of it gives `{tensor.name}` ({value}), beyond {self.to}")

    def carry(self, first: Op, reason: str) -> None:
        """Keep a node, and those its numbers beyond the range go on to."""
        queue = deque([first])
        met = {first}
        origin = first.label
        while queue:
            op = queue.popleft()
            self.mark(op, "constant", reason if op is first else f"reads numbers beyond {self.to} made by `{origin}`")
            if op.node.op_type not in _CARRIES:
                continue
            for made in op.outputs:
                if made is None or made.kind != FLOAT:
                    continue
                for user, position in made.users:
                    if user in met or (user.node.op_type in _ANY_INPUT and user.node.op_type != "Cast"):
                        continue
                    met.add(user)
                    divides = user.node.op_type == "Div" and position == 1
                    if divides:
                        self.mark(user, "constant", f"reads numbers beyond {self.to} made by `{origin}`")
                    elif any(item is not None and item.kind == FLOAT for item in user.outputs) or user.inputs:
                        queue.append(user)

    def keep_vanishing(self, tensor: Tensor, facts: stored.Facts) -> None:
        """A small number added before a root or a division guards it: as zero it guards nothing."""
        for op, _ in tensor.users:
            self.mark(op, "constant", f"its constant `{tensor.name}` ({facts.largest:.3g}) would be 0 in {self.to}")
            if op.node.op_type not in ("Add", "Sub", "Max", "Clip", "Where", "Sum"):
                continue
            queue, met = deque([op]), {op}
            while queue:
                for made in queue.popleft().outputs:
                    for user, _ in made.users if made is not None else ():
                        kind = user.node.op_type
                        if user in met or (
                            kind not in _LAYOUT and kind not in ("Sqrt", "Pow", "Log", "Reciprocal", "Div")
                        ):
                            continue
                        met.add(user)
                        self.mark(user, "constant", f"reads what `{op.label}` guards with {facts.largest:.3g}")
                        if kind in ("Sqrt", "Pow") or kind in _LAYOUT:
                            queue.append(user)

    # -------------------------------------------------------------------------------------------- indices

    def keep_indices(self) -> None:
        """Arithmetic of indices and positions: exact in FP32 up to 16 million, in FP16 up to 2048."""
        exact = 2048 if self.to == "fp16" else 256
        reason = f"arithmetic of indices or positions, which {self.to} holds exactly up to {exact}"
        index: set[Tensor] = set()
        for op in self.ops:
            if walk.domain_of(op.node):
                continue
            kind = op.node.op_type
            first = op.inputs[0] if op.inputs else None
            starts = kind == "Range" or (kind == "Cast" and first is not None and first.kind in _INDEX_KINDS)
            reads = [
                tensor
                for tensor in op.inputs
                if tensor is not None and tensor.kind == FLOAT and not _is_constant(tensor)
            ]
            follows = (
                bool(reads)
                and all(tensor in index for tensor in reads)
                and (kind in _ARITHMETIC or kind in _LAYOUT or (kind == "MatMul" and _feeds(op, ("Sin", "Cos"))))
            )
            if starts or follows:
                made = [tensor for tensor in op.outputs if tensor is not None and tensor.kind == FLOAT]
                if made or (follows and kind != "Cast"):
                    self.mark(op, "index", reason)
                index.update(made)
            elif kind == "Concat" and any(tensor in index for tensor in reads):
                self.mark(op, "index", "joins indices with other values")
        for op in self.ops:
            if op.node.op_type == "Cast" and op.outputs and op.outputs[0] is not None:
                if op.outputs[0].kind in _INDEX_KINDS:
                    self.back(op.inputs[0], reason)
            elif op.node.op_type in ("Range", *_FIXED):
                for position, tensor in enumerate(op.inputs):
                    if position >= _FIXED.get(op.node.op_type, 0):
                        self.back(tensor, reason)

    def back(self, tensor: Tensor | None, reason: str) -> None:
        """Keep the arithmetic behind a tensor that becomes indices or sizes."""
        queue = deque([tensor])
        met: set[Tensor] = set()
        while queue:
            item = queue.popleft()
            if item is None or item in met or item.kind != FLOAT or item.maker is None:
                continue
            met.add(item)
            op = item.maker
            if walk.domain_of(op.node) or op.node.op_type not in _ARITHMETIC | _LAYOUT:
                continue
            self.mark(op, "index", reason)
            queue.extend(op.inputs)

    def join_islands(self) -> None:
        """What only moves data between two kept nodes is kept with them: no Cast there and back."""
        changed = True
        while changed:
            changed = False
            for op in self.ops:
                if op in self.keep or op.node.op_type not in _LAYOUT or walk.domain_of(op.node):
                    continue
                reads = [item for item in op.inputs if item is not None and item.kind == FLOAT]
                users = [user for made in op.outputs if made is not None for user, _ in made.users]
                leaves = any(made is not None and made.leaves for made in op.outputs)
                if not reads or not users or leaves:
                    continue
                if all(self.home(item) == "float" or item.stored is not None for item in reads) and all(
                    user in self.keep for user in users
                ):
                    changed |= self.mark(op, "between", "moves data between nodes that are kept")

    # -------------------------------------------------------------------------------------------- homes and demands

    def lowered(self, op: Op) -> bool:
        return op not in self.keep

    def home(self, tensor: Tensor) -> Wanted:
        """The type a tensor is made in. Constants have none: they are converted."""
        if tensor.maker is not None:
            op = tensor.maker
            position = next(at for at, made in enumerate(op.outputs) if made is tensor)
            return "low" if self.lowered(op) and not self.fixed_output(op, position) else "float"
        owner = tensor.scope.owner
        if tensor not in tensor.scope.inputs:
            return "float"  # a sparse initializer
        if owner is None:
            return "float" if self.keep_io else "low"
        return "low" if self.lowered(owner) else "float"

    def demand(self, op: Op, position: int) -> Wanted | None:
        """The type a node reads an input in; None when any will do."""
        kind = op.node.op_type
        if kind in _ANY_INPUT and position == 0 and not walk.domain_of(op.node):
            return None
        if op in self.keep:
            return "float"
        if kind in _BODIED:
            return "low"
        return "low" if self.takes(op, position) else "float"

    def handed_out(self, scope: Scope) -> Wanted:
        """The type a scope's outputs have."""
        if scope.owner is None:
            return "float" if self.keep_io else "low"
        return "low" if self.lowered(scope.owner) else "float"

    # -------------------------------------------------------------------------------------------- the rewrite

    def rewrite(self) -> None:
        """Write the decision into the graph."""
        self.count()
        for op in self.ops:
            for position, tensor in enumerate(op.inputs):
                if tensor is not None and tensor.kind == FLOAT:
                    self.want(tensor, self.demand(op, position))
        for scope in self.main.all_scopes():
            for tensor in scope.outputs:
                if tensor is not None and tensor.kind == FLOAT:
                    self.want(tensor, self.handed_out(scope))
        for scope in self.main.all_scopes():
            for tensor in scope.tensors.values():
                if tensor.kind == FLOAT:
                    self.name(tensor)
        self.scope(self.main)

    def count(self) -> None:
        for op in self.ops:
            if op.node.op_type == "Constant" or not _touches_float(op):
                continue
            if op.node.op_type in _ANY_INPUT and not any(item and item.kind == FLOAT for item in op.outputs):
                continue  # takes what comes
            self.changes.nodes += 1
            if op in self.keep:
                code, reason = self.keep[op]
                self.changes.kept.append(KeptNode(op.label, op.type, code, reason))
            else:
                self.changes.cast += 1
                self.changes.operators[op.type] += 1

    def want(self, tensor: Tensor, wanted: Wanted | None) -> None:
        if wanted is None:
            wanted = "float" if tensor.stored is not None else self.home(tensor)
        self.wanted.setdefault(tensor, set()).add(wanted)

    def name(self, tensor: Tensor) -> None:
        """The tensor's names in both types; the one it had goes to the type it is known by outside."""
        wanted = self.wanted.get(tensor, set())
        outside = next((self.handed_out(scope) for scope in tensor.leaves if scope.owner is None), None)
        if tensor.stored is not None:
            first: Wanted = "float" if "float" in wanted or not wanted else "low"
        else:
            first = self.home(tensor)
            wanted = {*wanted, first}
        owner = outside or first
        other: Wanted = "low" if owner == "float" else "float"
        self.names[tensor, owner] = tensor.name
        if other in wanted:
            short = self.to if other == "low" else "fp32"
            self.names[tensor, other] = free_name(f"{tensor.name}_{short}", self.taken)

    def scope(self, scope: Scope) -> None:
        graph = scope.graph
        made: list[NodeProto] = []
        if scope.owner is not None or not self.keep_io:
            for tensor, value in zip(scope.inputs, _open_inputs(graph), strict=True):
                if tensor.kind == FLOAT and self.home(tensor) == "low":
                    value.type.tensor_type.elem_type = _ELEM[self.to]
        for tensor in scope.tensors.values():
            if tensor.kind == FLOAT and tensor.maker is None and tensor.stored is None:
                made.extend(self.casts(tensor))
        self.initializers(scope)
        for op in scope.ops:
            for body in op.bodies.values():
                self.scope(body)
            if op.node.op_type == "Constant" and op.outputs and op.outputs[0] and op.outputs[0].kind == FLOAT:
                made.extend(self.constant_nodes(op, op.outputs[0]))
                continue
            self.node(op)
            made.append(op.node)
            for output in op.outputs:
                if output is not None and output.kind == FLOAT:
                    made.extend(self.casts(output))
        copies = []
        for node in made:
            copy = NodeProto()
            copy.CopyFrom(node)
            copies.append(copy)
        graph.ClearField("node")
        graph.node.extend(copies)
        self.values(scope)

    def node(self, op: Op) -> None:
        """A node's names and the attributes that type it."""
        node = op.node
        for position, tensor in enumerate(op.inputs):
            if tensor is not None and tensor.kind == FLOAT:
                wanted = self.demand(op, position)
                if wanted is None:
                    wanted = "float" if tensor.stored is not None else self.home(tensor)
                node.input[position] = self.names[tensor, wanted]
        for position, output in enumerate(op.outputs):
            if output is not None and output.kind == FLOAT:
                node.output[position] = self.names[output, self.home(output)]
        if op in self.keep or not any(item is not None and item.kind == FLOAT for item in op.outputs):
            return
        if node.op_type == "ConstantOfShape":
            value = next((item.t for item in node.attribute if item.name == "value"), None)
            zero = np.zeros(1, np.float32) if value is None else stored.array(value, self.folder)
            tensor = helper.make_tensor("value", _ELEM[self.to], [1], _low(zero, self.to).tobytes(), raw=True)
            _set_attribute(node, helper.make_attribute("value", tensor))
        name = _DTYPE.get(node.op_type)
        if name is not None and not walk.domain_of(node):
            given = attributes(node).get(name)
            if given or node.op_type in ("RandomNormal", "RandomUniform") or name == "output_datatype":
                _set_attribute(node, helper.make_attribute(name, _ELEM[self.to]))

    def casts(self, tensor: Tensor) -> Iterator[NodeProto]:
        """The Cast to the type a tensor is not made in, if somebody reads it."""
        home = self.home(tensor)
        other: Wanted = "low" if home == "float" else "float"
        if (tensor, other) not in self.names or (
            other not in self.wanted.get(tensor, ()) and self.names[tensor, other] != tensor.name
        ):
            return
        target = self.names[tensor, other]
        elem = _ELEM[self.to] if other == "low" else TensorProto.FLOAT
        name = free_name(f"Cast_{self.names[tensor, home]}_to_{self.to if other == 'low' else 'fp32'}", self.taken)
        self.changes.casts_added += 1
        yield helper.make_node("Cast", [self.names[tensor, home]], [target], name=name, to=elem)

    def variants(self, tensor: Tensor) -> Iterator[tuple[Wanted, str]]:
        """The types a constant is stored in, and its names there."""
        for wanted in ("float", "low"):
            if (tensor, wanted) in self.names:
                yield wanted, self.names[tensor, wanted]

    def initializers(self, scope: Scope) -> None:
        graph = scope.graph
        kept: list[TensorProto] = []
        for item in graph.initializer:
            tensor = scope.tensors[item.name]
            if tensor.kind != FLOAT or (tensor.stored is not item and tensor.stored is None):
                kept.append(item)
                continue
            kept.extend(self.stored_as(tensor, item))
        copies = []
        for item in kept:
            copy = TensorProto()
            copy.CopyFrom(item)
            copies.append(copy)
        graph.ClearField("initializer")
        graph.initializer.extend(copies)

    def stored_as(self, tensor: Tensor, item: TensorProto) -> Iterator[TensorProto]:
        names = list(self.variants(tensor))
        if len(names) == 2:
            self.changes.duplicated.append(tensor.name)
        for wanted, name in names:
            if wanted == "float" and tensor not in self.clamped:
                copy = TensorProto()
                copy.CopyFrom(item)
                copy.name = name
                yield copy
                continue
            limit = LARGEST[self.to] if tensor in self.saturated else None
            elem = _ELEM[self.to] if wanted == "low" else TensorProto.FLOAT
            self.changes.converted += wanted == "low"
            yield stored.converted(item, name, elem, limit, self.folder, self.changes.sources)

    def constant_nodes(self, op: Op, tensor: Tensor) -> Iterator[NodeProto]:
        """A Constant node in the types it is read in."""
        value = tensor.stored
        if value is None:
            given = attributes(op.node)
            if "sparse_value" in given:
                node = NodeProto()
                node.CopyFrom(op.node)
                yield node
                yield from self.casts(tensor)
                return
            numbers = np.float32(given["value_float"] if "value_float" in given else given["value_floats"])
            value = helper.make_tensor("value", TensorProto.FLOAT, numbers.shape, numbers.tobytes(), raw=True)
        for made, (_, name) in zip(self.stored_as(tensor, value), self.variants(tensor), strict=True):
            made.name = value.name
            node = helper.make_node("Constant", [], [name], value=made)
            node.name = op.node.name if name == tensor.name else free_name(f"{op.label}_{self.to}", self.taken)
            yield node

    def values(self, scope: Scope) -> None:
        """The stated types of outputs and inner tensors."""
        graph = scope.graph
        handed = self.handed_out(scope)
        for value, tensor in zip(graph.output, scope.outputs, strict=True):
            if tensor is not None and tensor.kind == FLOAT:
                value.name = self.names[tensor, handed]
                if value.type.HasField("tensor_type"):
                    value.type.tensor_type.elem_type = _ELEM[self.to] if handed == "low" else TensorProto.FLOAT
        stated = []
        for value in graph.value_info:
            tensor = scope.tensors.get(value.name)
            if tensor is None or tensor.kind != FLOAT or not value.type.HasField("tensor_type"):
                stated.append(value)
                continue
            for wanted, name in self.variants(tensor):
                copy = onnx.ValueInfoProto()
                copy.CopyFrom(value)
                copy.name = name
                copy.type.tensor_type.elem_type = _ELEM[self.to] if wanted == "low" else TensorProto.FLOAT
                stated.append(copy)
        made = {item.name for item in graph.input} | {item.name for item in graph.output}
        copies = [value for value in stated if value.name not in made]
        fresh = GraphProto()
        fresh.value_info.extend(copies)
        graph.ClearField("value_info")
        graph.value_info.extend(fresh.value_info)


def _open_inputs(graph: GraphProto) -> list[onnx.ValueInfoProto]:
    constants = {item.name for item in graph.initializer} | {item.values.name for item in graph.sparse_initializer}
    return [value for value in graph.input if value.name not in constants]


def _is_constant(tensor: Tensor) -> bool:
    return tensor.stored is not None or (
        tensor.maker is not None and tensor.maker.node.op_type in ("Constant", "ConstantOfShape")
    )


def _feeds(op: Op, kinds: Iterable[str], depth: int = 4) -> bool:
    """True when one of these operators reads the result, past what only lays it out anew."""
    users = [user for made in op.outputs if made is not None for user, _ in made.users]
    return any(
        user.node.op_type in kinds or (depth > 0 and user.node.op_type in _LAYOUT and _feeds(user, kinds, depth - 1))
        for user in users
    )


def _reasons_of(report: Any) -> dict[str, str]:
    """Reasons by node name of a ranges report."""
    return {item.node: item.reason for item in report.exclude}


def _low(values: npt.NDArray[Any], to: str) -> npt.NDArray[Any]:
    with np.errstate(over="ignore"):
        return values.astype(_NUMPY[to])


def _set_attribute(node: NodeProto, attribute: onnx.AttributeProto) -> None:
    for item in node.attribute:
        if item.name == attribute.name:
            item.CopyFrom(attribute)
            return
    node.attribute.append(attribute)


def _all_names(proto: ModelProto) -> set[str]:
    """Every name of a tensor or node, so that none is given twice."""
    names: set[str] = set()
    for graph in walk.graphs(proto):
        names.update(item.name for item in (*graph.input, *graph.output, *graph.value_info, *graph.initializer))
        names.update(item.values.name for item in graph.sparse_initializer)
    for place in walk.nodes(proto):
        names.update((place.node.name, *place.node.input, *place.node.output))
    return names


# ------------------------------------------------------------------------------------------------ after


def _fold_casts(proto: ModelProto, changes: Changes) -> None:
    """Take out Casts that change nothing, and let the second of two read past a first that loses nothing."""
    main = elements.read(proto)
    casts = [op for op in main.all_ops() if op.node.op_type == "Cast" and not walk.domain_of(op.node)]
    changed = True
    while changed:
        changed = False
        for op in casts:
            source, made = op.inputs[0], op.outputs[0]
            if source is None or made is None:
                continue
            first = source.maker
            if (
                first is not None
                and first.node.op_type == "Cast"
                and not walk.domain_of(first.node)
                and source.kind == FLOAT
                and first.inputs[0] is not None
                and first.inputs[0].kind in (HALF, BRAIN)
            ):
                _read_instead(op, 0, first.inputs[0])
                changed = True
            elif source.kind == made.kind and source.kind and not made.leaves and made.users:
                for user, position in list(made.users):
                    _read_instead(user, position, source)
                changed = True
    dead = True
    while dead:
        dead = False
        for op in list(casts):
            made = op.outputs[0]
            if made is None or made.users or made.leaves:
                continue
            if op.inputs[0] is not None:
                op.inputs[0].users = [item for item in op.inputs[0].users if item[0] is not op]
            op.scope.graph.node.remove(op.node)
            casts.remove(op)
            changes.casts_removed += 1
            dead = True


def _read_instead(op: Op, position: int, tensor: Tensor) -> None:
    before = op.inputs[position]
    if before is not None:
        before.users = [item for item in before.users if item != (op, position)]
    op.inputs[position] = tensor
    op.node.input[position] = tensor.name
    tensor.users.append((op, position))


def _write(proto: ModelProto, sources: Sequence[stored.Source], model: Model, target: Path, changes: Changes) -> int:
    """The result at its place, whole and checked, or nothing; its bytes."""

    def prove(path: Path) -> None:
        _must_be_valid(path, model, changes)

    return stored.write(proto, target, sources, model.path.parent, external=bool(model.external), prove=prove)


def _must_be_valid(path: Path, model: Model, changes: Changes) -> None:
    """`ModelError` unless ONNX's full check with strict inference takes the result, where it took the model."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # the checker and the inference raise whatever their C++ side throws
        reason = " ".join(str(error).split())[:300]
        if not _takes_source(model):
            changes.notes.append(
                "ONNX's own checker takes neither the model nor the result; the types were checked here"
            )
            return
        raise ModelError(
            f"the cast of `{model.path}` is not valid ONNX: {reason}",
            hint="exclude the node it names with `--exclude-node`, or try `--careful`",
        ) from error


def _takes_source(model: Model) -> bool:
    try:
        onnx.checker.check_model(str(model.path), full_check=True)
    except Exception:  # as above
        return False
    return True
