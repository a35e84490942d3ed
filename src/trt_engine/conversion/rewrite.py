"""Built-in simplification without numeric change: inlines local functions, folds shape arithmetic and constants, merges
equal nodes and weights, removes unused nodes.

Needs no extra dependency; onnxslim starts from its result.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

from trt_engine.arrayfiles import Array
from trt_engine.backends.onnxruntime import session
from trt_engine.equivalence.pair import CannotRun, EquivalenceChecker, EquivalenceResult, NotEquivalent
from trt_engine.errors import ModelError, TrtEngineError
from trt_engine.graph import constants, edit_graph, external_data, symbolic_shapes, walk
from trt_engine.graph.constants import is_random
from trt_engine.graph.dtype_breakdown import is_dequantize, is_quantize
from trt_engine.graph.load import check_operators, open_model, read_graph, read_proto
from trt_engine.graph.module_paths import carry_module_paths
from trt_engine.graph.symbolic_shapes import elem_type, fold_shapes, infer_types, symbolic_shape
from trt_engine.model import Model

log = logging.getLogger(__name__)

_MAX_ROUNDS = 10


@dataclass(slots=True)
class RewriteCounts:
    """Statistics of a rewrite."""

    folded: int = 0
    """Nodes that became constants."""
    shared: int = 0
    """Nodes merged into an equal one."""
    weights_shared: int = 0
    notes: list[str] = field(default_factory=list)


def rewrite(proto: ModelProto, folder: Path, keep: Collection[str] = ()) -> RewriteCounts:
    """Simplify the main graph in place, without changing a number. `keep` names tensors to preserve.

    Tensors of `external_data.detach_weights` count as inputs. Constant nodes must be initializers already, and local
    functions inlined.
    """
    counts = RewriteCounts()
    kept = set(keep) | {item.name for item in proto.graph.output}
    counts.weights_shared += share_equal_weights(proto, folder)
    for _ in range(_MAX_ROUNDS):
        before = proto.graph.ByteSize(), len(proto.graph.node)
        types = infer_types(proto)
        _drop_identities(proto, types, kept)
        counts.folded += fold_shapes(proto, types, kept)
        counts.folded += _fold_constants(proto, types, kept, counts.notes)
        counts.shared += _share_nodes(proto, kept)
        _drop_dead(proto, kept)
        share_equal_weights(proto, folder, small=True)  # constants created here
        if before == (proto.graph.ByteSize(), len(proto.graph.node)):
            break
    return counts


def _drop_identities(proto: ModelProto, types: Mapping[str, TypeProto], keep: Collection[str]) -> None:
    graph = proto.graph
    stored = {item.name: item for item in graph.initializer}
    reads = edit_graph.count_reads(proto)
    captured = edit_graph.outer_scope_reads(graph)
    makers = {name: node for node in graph.node for name in node.output if name}
    new: dict[str, str] = {}
    gone: set[str] = set()
    for node in graph.node:
        if not _is_identity(node, types, stored, reads):
            continue
        source, made = new.get(node.input[0], node.input[0]), node.output[0]
        if made not in keep:
            new[made] = source
            gone.add(made)
            continue
        maker = makers.get(source)  # move the output's name to its producer
        if maker is None or source in keep or source in captured or made in captured or source in new.values():
            continue
        maker.output[list(maker.output).index(source)] = made
        makers[made] = maker
        new[source] = made
        node.output[0] = f"{made}\n"  # a placeholder, removed below
        gone.add(node.output[0])
    if gone:
        edit_graph.retain_items(graph.node, lambda node: not (node.output and node.output[0] in gone))
        edit_graph.rename_reads(graph, edit_graph.resolve_renames(new))


def _is_identity(
    node: NodeProto, types: Mapping[str, TypeProto], stored: Mapping[str, TensorProto], reads: Counter[str]
) -> bool:
    """True if the first output equals the first input and no other output is read."""
    if walk.domain_of(node) or not node.input or not node.input[0] or not node.output:
        return False
    if any(reads[name] for name in node.output[1:] if name):
        return False
    op, given = node.op_type, walk.attributes(node)
    if op == "Identity":
        return True
    if op == "Dropout":
        if len(node.input) < 3 or not node.input[2]:
            return bool(given.get("is_test", 1))
        mode = stored.get(node.input[2])
        return mode is not None and mode.data_location != TensorProto.EXTERNAL and not numpy_helper.to_array(mode).any()
    if op == "Cast":
        return elem_type(types, node.input[0]) == given.get("to")
    if op == "Transpose":
        return "perm" in given and list(given["perm"]) == list(range(len(given["perm"])))
    return op in ("Concat", "Sum", "Max", "Min", "Mean") and len(node.input) == 1


def _share_nodes(proto: ModelProto, keep: Collection[str]) -> int:
    """Merge equal nodes; Q/DQ nodes stay, as a builder fuses each one."""
    graph = proto.graph
    first: dict[bytes, NodeProto] = {}
    new: dict[str, str] = {}
    gone: set[str] = set()
    for node in graph.node:
        for at, name in enumerate(node.input):
            if name in new:
                node.input[at] = new[name]
        if any(True for _ in walk.bodies(node)) or is_random(node) or is_quantize(node) or is_dequantize(node):
            continue
        if any(name in keep for name in node.output) or not any(node.output):
            continue
        key = _node_key(node)
        twin = first.setdefault(key, node)
        if twin is not node:
            new.update(zip(node.output, twin.output, strict=True))
            gone.add(next(name for name in node.output if name))
    if gone:
        edit_graph.retain_items(graph.node, lambda node: not any(name in gone for name in node.output))
        edit_graph.rename_reads(graph, edit_graph.resolve_renames({name: to for name, to in new.items() if name}))
    return len(gone)


def _node_key(node: NodeProto) -> bytes:
    plain = NodeProto()
    plain.CopyFrom(node)
    plain.ClearField("name")
    plain.ClearField("doc_string")
    del plain.metadata_props[:]
    which = [bool(name) for name in node.output]
    del plain.output[:]
    ordered = sorted(plain.attribute, key=lambda item: str(item.name))
    copies = [type(item).FromString(item.SerializeToString()) for item in ordered]
    del plain.attribute[:]
    plain.attribute.extend(copies)
    made: bytes = plain.SerializeToString(deterministic=True)
    return made + bytes(which)


def share_equal_weights(proto: ModelProto, folder: Path, *, small: bool = False) -> int:
    """Merge initializers of equal type, shape and bytes, in place; returns the number removed. `small` skips external
    ones and those above a megabyte, which were compared before."""
    graph = proto.graph
    outputs = {item.name for item in graph.output}
    sizes: dict[tuple[int, tuple[int, ...]], list[TensorProto]] = {}
    for tensor in graph.initializer:
        if small and (tensor.data_location == TensorProto.EXTERNAL or external_data.nbytes_of(tensor) > 1 << 20):
            continue
        if tensor.name not in outputs:
            sizes.setdefault((tensor.data_type, tuple(tensor.dims)), []).append(tensor)
    new: dict[str, str] = {}
    for group in sizes.values():
        if len(group) < 2:
            continue
        first: dict[str, str] = {}
        for tensor in group:
            mark = external_data.fingerprint(tensor, folder)
            if mark is not None and (twin := first.setdefault(mark, tensor.name)) != tensor.name:
                new[tensor.name] = twin
    if new:
        edit_graph.retain_items(graph.initializer, lambda tensor: tensor.name not in new)
        edit_graph.rename_reads(graph, new)
    return len(new)


def _drop_dead(proto: ModelProto, keep: Iterable[str]) -> None:
    graph = proto.graph
    read = set(keep)
    alive: list[bool] = []
    for node in reversed(graph.node):
        lives = any(name in read for name in node.output if name)
        alive.append(lives)
        if lives:
            read.update(walk.names_read(node))
    if not all(alive):
        order = iter(reversed(alive))
        edit_graph.retain_items(graph.node, lambda _: next(order))
    edit_graph.retain_items(graph.initializer, lambda tensor: tensor.name in read)
    edit_graph.retain_items(graph.sparse_initializer, lambda tensor: tensor.values.name in read)


# ------------------------------------------------------------------------------------------------ constants

_MAX_FOLDED_NBYTES = 1 << 20
"""Maximum bytes of a folded result that is larger than its inputs."""
_RUN_ERRORS: tuple[type[Exception], ...] = (*session.ERRORS, ModelError)
_NOT_IN_NUMPY = frozenset({0, TensorProto.STRING, TensorProto.BFLOAT16, *range(17, 64)})


def _fold_constants(proto: ModelProto, types: Mapping[str, TypeProto], keep: Collection[str], notes: list[str]) -> int:
    """Replace nodes with constant inputs by their values, computed by ONNX Runtime in one run."""
    graph = proto.graph
    stored = {item.name: item for item in graph.initializer if item.data_location != TensorProto.EXTERNAL}
    known = {name: external_data.nbytes_of(item) for name, item in stored.items()}
    chosen: list[NodeProto] = []
    for node in graph.node:
        inputs = [name for name in node.input if name]
        if not inputs or any(name not in known for name in inputs) or not _is_foldable(node, keep):
            continue
        sizes = [_tensor_nbytes(types, name) for name in node.output if name]
        limit = max(_MAX_FOLDED_NBYTES, sum(known[name] for name in inputs))
        if any(size is None or size > limit for size in sizes):
            continue
        chosen.append(node)
        known.update((name, size or 0) for name, size in zip([n for n in node.output if n], sizes, strict=True))
    made = _evaluate(proto, chosen, stored, types, notes)
    if not made:
        return 0
    # a chain is folded up to the last evaluated node; the rest becomes dead
    done = [node for node in chosen if all(name in made for name in node.output if name)]
    gone = {node.output[0] for node in done}
    edit_graph.retain_items(graph.node, lambda node: not (node.output and node.output[0] in gone))
    left = {name for node in graph.node for name in node.input} | edit_graph.outer_scope_reads(graph)
    graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in made.items() if name in left
    )
    return len(done)


def _is_foldable(node: NodeProto, keep: Collection[str]) -> bool:
    if walk.domain_of(node) or is_random(node) or is_quantize(node) or is_dequantize(node):
        return False
    if any(True for _ in walk.bodies(node)) or any(name in keep for name in node.output):
        return False
    return node.op_type != "Dropout"


def _tensor_nbytes(types: Mapping[str, TypeProto], name: str) -> int | None:
    """Bytes of a tensor in numpy; None if unknown."""
    sizes, elem = symbolic_shape(types, name), elem_type(types, name)
    if sizes is None or elem in _NOT_IN_NUMPY:
        return None
    total = 1
    for size in sizes:
        if not isinstance(size, int):
            return None
        total *= size
    return total * int(helper.tensor_dtype_to_np_dtype(elem).itemsize)


def _evaluate(
    proto: ModelProto,
    chosen: Sequence[NodeProto],
    stored: Mapping[str, TensorProto],
    types: Mapping[str, TypeProto],
    notes: list[str],
) -> dict[str, Array]:
    if not chosen:
        return {}
    try:
        return _run_nodes(proto, chosen, stored, types)
    except _RUN_ERRORS as error:
        log.debug("constants are folded one by one: %s", error)
    made: dict[str, Array] = {}
    failed: Counter[str] = Counter()
    for node in chosen:
        have = {name: numpy_helper.from_array(made[name], name) for name in node.input if name in made}
        have.update((name, stored[name]) for name in node.input if name in stored)
        if any(name and name not in have for name in node.input):
            continue
        try:
            made.update(_run_nodes(proto, [node], have, types))
        except _RUN_ERRORS as error:
            log.debug("`%s` is not folded: %s", walk.label(node), error)
            failed[node.op_type] += 1
    notes.extend(f"{number} constant {op} nodes stay: ONNX Runtime does not run them" for op, number in failed.items())
    return made


def _run_nodes(
    proto: ModelProto, chosen: Sequence[NodeProto], stored: Mapping[str, TensorProto], types: Mapping[str, TypeProto]
) -> dict[str, Array]:
    names = [name for node in chosen for name in node.output if name]
    read = {name for node in chosen for name in node.input}
    graph = helper.make_graph(
        list(chosen), "constants", [],
        [helper.make_tensor_value_info(name, elem_type(types, name), None) for name in names],
        [tensor for name, tensor in stored.items() if name in read],
    )  # fmt: skip
    for at, node in enumerate(graph.node):
        node.name = f"constant_{at}"
    model = helper.make_model(graph, opset_imports=list(proto.opset_import), ir_version=min(proto.ir_version, 10))
    loaded = session.create_plain(model.SerializeToString(), threads=1)
    return dict(zip(names, loaded.run(names, {}), strict=True))


_COMMON_IR_VERSION = 10
"""IR version readable by every supported ONNX Runtime and TensorRT's parser."""


@dataclass(slots=True)
class RewrittenModel:
    """The model before, and the file that gets its new form."""

    model: Model
    before: ModelProto
    target: Path
    tolerance: float
    checker: EquivalenceChecker | None
    """None for a model that ONNX Runtime does not run; `notes` has the reason."""
    notes: list[str]
    started: float
    written: tuple[int, Path | None] = (0, None)
    """Bytes, and the side file of weights."""
    proof: EquivalenceResult | None = None
    detached: dict[str, TensorProto] = field(default_factory=dict)
    """Weights that are out of the graph while it is changed."""

    @classmethod
    def open(
        cls, source: Path | str, out: Path | str, inputs: Mapping[str, Any] | None, tolerance: float, done: str
    ) -> RewrittenModel:
        """Open the model and run it. `ModelError` for a graph that ONNX Runtime optimised for one machine, which cannot be
        `done`."""
        started = time.monotonic()
        model = open_model(source)
        if model.optimised:
            raise ModelError(
                f"`{model.path}` was optimised by ONNX Runtime for one machine ({model.optimised}) and cannot be {done}",
                hint="give the model it was made from",
            )
        target = external_data.check_target(Path(out), model)
        check_operators(model.graph, model.path)
        made = cls(model, read_proto(model.path), target, tolerance, None, [], started)
        try:
            made.checker = EquivalenceChecker(model, inputs, tolerance)
            made.tolerance = made.checker.tolerance
        except CannotRun as error:
            made.warn(f"not compared: {error}")
        return made

    def warn(self, note: str) -> None:
        self.notes.append(note)
        log.warning("%s", note)

    def flat_copy(self) -> ModelProto:
        """The graph to change, without local functions."""
        work = edit_graph.inline_functions(deepcopy(self.before))
        constants.drop_initializer_inputs(work)
        return work

    def detach(self, work: ModelProto, names: Collection[str]) -> None:
        """Take these weights out of the graph until it is written."""
        self.detached = external_data.detach_weights(work, set(names))

    def complete(self, proto: ModelProto, unwanted: Collection[str] = ()) -> None:
        """Make the changed graph a complete model, in place: weights, inputs, outputs and metadata, without `unwanted`
        outputs.

        Raises `NotEquivalent` for outputs that are missing.
        """
        external_data.attach_weights(proto, self.detached)
        _restore_io(proto, self.before, unwanted)
        edit_graph.make_names_unique(proto)
        needed = int(helper.find_min_ir_version_for(list(proto.opset_import), ignore_unknown=True))
        proto.ir_version = max(needed, min(int(proto.ir_version), _COMMON_IR_VERSION), 4)
        symbolic_shapes.write_inferred_shapes(proto)

    def write(self, proto: ModelProto) -> None:
        """Write the model to its place if it is equal to the one before; `NotEquivalent` otherwise."""

        def prove(draft: Path) -> None:
            try:
                _check_same_signature(draft, self.model, self.before)
                check_operators(read_graph(draft), draft)
            except TrtEngineError as error:
                raise NotEquivalent(error.message) from error
            self.proof = self.checker.check(draft) if self.checker is not None else None

        self.written = external_data.save_model(
            proto, self.target, self.model, external=bool(self.model.external), check=prove
        )

    def copy_unchanged(self) -> None:
        self.written = external_data.copy_model(self.model, self.target)

    def report_fields(self) -> dict[str, Any]:
        """Fields of every report of a rewritten model: its files and the comparison."""
        nbytes, weights = self.written
        proof = self.proof
        return {
            "model": str(self.model.path),
            "out": str(self.target),
            "nbytes_before": self.model.nbytes,
            "nbytes_after": nbytes,
            "max_rel": proof.max_error if proof is not None else None,
            "tolerance": self.tolerance,
            "shapes": proof.shapes if proof is not None else (),
            "unchecked": proof.unchecked if proof is not None else (),
            "artifacts": {"model": str(self.target)} | ({"weights": str(weights)} if weights is not None else {}),
            "notes": tuple(self.notes),
            "seconds": time.monotonic() - self.started,
        }


def _check_same_signature(draft: Path, model: Model, before: ModelProto) -> None:
    """`NotEquivalent` unless inputs and outputs keep names, types, sizes and symbols.

    If `before` does not declare an output's rank, only name and type are compared.
    """
    made = open_model(draft).signature
    stated = {item.name for item in before.graph.output if item.type.tensor_type.HasField("shape")}
    if made.inputs != model.signature.inputs:
        raise NotEquivalent(
            f"its inputs are {', '.join(map(str, made.inputs))}, and were {', '.join(map(str, model.signature.inputs))}"
        )
    for now, then in zip(made.outputs, model.signature.outputs, strict=False):
        if (now.name, now.dtype) != (then.name, then.dtype) or (then.name in stated and now != then):
            raise NotEquivalent(f"its output `{then}` is `{now}` now")
    if len(made.outputs) != len(model.signature.outputs):
        raise NotEquivalent(f"it has {len(made.outputs)} outputs, and had {len(model.signature.outputs)}")


def _restore_io(proto: ModelProto, before: ModelProto, unwanted: Collection[str]) -> None:
    """Restore inputs, outputs, modules and metadata of the model before, in place; `unwanted` outputs were added
    temporarily.

    An output without a declared rank keeps its inferred shape.
    """
    stored = {item.name for item in before.graph.initializer}
    stated = {item.name: item for item in proto.graph.output if item.name not in unwanted}
    wanted = [item.name for item in before.graph.output]
    if set(stated) != set(wanted):
        raise NotEquivalent(f"its outputs are {', '.join(stated)}, and were {', '.join(wanted)}")
    outputs = [
        item if item.type.HasField("tensor_type") and item.type.tensor_type.HasField("shape") else stated[item.name]
        for item in before.graph.output
    ]
    outputs = [ValueInfoProto.FromString(item.SerializeToString()) for item in outputs]
    del proto.graph.output[:], proto.graph.input[:], proto.metadata_props[:]
    proto.graph.output.extend(outputs)
    proto.graph.input.extend(item for item in before.graph.input if item.name not in stored)
    proto.metadata_props.extend(before.metadata_props)
    proto.graph.name, proto.doc_string = before.graph.name, before.doc_string
    proto.producer_name, proto.producer_version = before.producer_name, before.producer_version
    proto.domain, proto.model_version = before.domain, before.model_version
    carry_module_paths(proto, before)
