"""A model at another opset, older or newer, that computes the same: what changed is rewritten, or refused by name.

Raising uses our own rules where they apply, and ONNX's version converter otherwise. Lowering first writes out operators that
the older opset lacks, where ONNX says what they are made of, and then goes by our own rules: the converter knows few ways
down, and some of them compute something else.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, helper, version_converter

from trt_engine.conversion import outside, rewriting
from trt_engine.conversion.lowering import CannotLower, lower_opset
from trt_engine.conversion.proving import Apart, Proof, Prover, Unprovable
from trt_engine.conversion.simplify import ir_version_for, refuse_optimised, restore, same_signature
from trt_engine.errors import AccuracyError, ModelError, UsageError
from trt_engine.graph import walk
from trt_engine.graph.load import check, open_model, read_proto
from trt_engine.graph.names import unique_names
from trt_engine.graph.operators import beyond_onnxruntime
from trt_engine.model import Model
from trt_engine.precision.opsets import LEAST, raise_opset
from trt_engine.records import OpsetReport

__all__ = ["changed", "to_opset"]

log = logging.getLogger(__name__)

_FIRST = 7
"""The oldest opset ONNX Runtime promises to run."""
_HIDDEN_FROM = 1 << 16
_WRITTEN_OUT = "trt_engine.written_out"


def to_opset(
    source: Path | str,
    out: Path | str,
    opset: int,
    *,
    inputs: Mapping[str, Any] | None = None,
    tolerance: float = 1e-5,
) -> OpsetReport:
    """Write the model at `source` to `out` at that opset of the ONNX standard, checked as `simplify` checks.

    Raises `ModelError` naming the operator that cannot be converted and what changed, `AccuracyError` when the result
    computes something else. A model that ONNX Runtime cannot run is converted unchecked; `notes` say so.
    """
    started = time.monotonic()
    model = open_model(source)
    refuse_optimised(model, "brought to another opset")
    _within(opset)
    target = outside.writable(Path(out), model)
    before = read_proto(model.path)
    check(model, before)
    have = model.opsets.get("", 1)
    notes: list[str] = []
    prover: Prover | None = None
    try:
        prover = Prover(model, inputs, tolerance)
    except Unprovable as error:
        notes.append(f"not compared: {error}")
        log.warning("%s", notes[-1])
    work = ModelProto()
    work.CopyFrom(before)
    work, inlined = rewriting.inline(work)
    rewriting.inputs_without_initializers(work)
    hidden = outside.hide(work, _large(work))
    done = _converted(work, have, opset, model, notes)
    outside.show(done, hidden)
    try:
        restore(done, before, set())
    except Apart as error:
        raise ModelError(f"the converter lost something: {error}", hint="export the model at that opset") from error
    unique_names(done)
    done.ir_version = ir_version_for(done)
    rewriting.with_shapes(done)
    proofs: list[Proof] = []

    def prove(draft: Path) -> None:
        try:
            same_signature(draft, model, before)
            check(draft)
            if prover is not None:
                proofs.append(prover.measure(draft))
        except Apart as error:
            raise AccuracyError(
                f"`{model.path}` is not the same at opset {opset}: {error}", hint="export the model at that opset"
            ) from error

    nbytes, weights = outside.save(done, target, model, outside=bool(model.external), prove=prove)
    proof = proofs[0] if proofs else None
    return OpsetReport(
        model=str(model.path),
        out=str(target),
        opset=(have, opset),
        ir_version=(before.ir_version, done.ir_version),
        nodes_before=sum(1 for _ in walk.nodes(before)),
        nodes_after=sum(1 for _ in walk.nodes(done)),
        operators_changed=_changes(before, have, opset),
        functions_inlined=inlined,
        nbytes_before=model.nbytes,
        nbytes_after=nbytes,
        largest=proof.largest if proof is not None else None,
        tolerance=prover.tolerance if prover is not None else tolerance,
        shapes=proof.shapes if proof is not None else (),
        unchecked=proof.unchecked if proof is not None else (),
        notes=tuple(notes),
        artifacts={"model": str(target)} | ({"weights": str(weights)} if weights is not None else {}),
        seconds=time.monotonic() - started,
    )


def _within(opset: int) -> None:
    newest = onnx.defs.onnx_opset_version()
    if not _FIRST <= opset <= newest:
        raise UsageError(
            f"opset {opset} cannot be had, expected one from {_FIRST} to {newest}",
            hint=f"{newest} is the newest of the installed onnx {onnx.__version__}",
        )
    needed = int(helper.find_min_ir_version_for([helper.make_opsetid("", opset)]))
    if beyond := beyond_onnxruntime(opset, needed):
        raise UsageError(f"that is {beyond.describe()}", hint="a lower `--opset`, or `pip install -U onnxruntime`")


def _large(proto: ModelProto) -> set[str]:
    """Weights the converter need not see: it copies the whole message several times."""
    return {
        tensor.name
        for tensor in proto.graph.initializer
        if tensor.data_location == TensorProto.EXTERNAL or outside.nbytes_of(tensor) >= _HIDDEN_FROM
    }


# ------------------------------------------------------------------------------------------------ converting


def _converted(work: ModelProto, have: int, opset: int, model: Model, notes: list[str]) -> ModelProto:
    if have == opset:
        return work
    if opset < have:
        flat = _written_out(work, have, opset, notes)
        if flat is not work:  # what it is made of computes its axes from constants
            rewriting.constants_as_initializers(flat)
            rewriting.rewrite(flat, model.path.parent)
        work = flat
    refused = _missing(work, have, opset, model)
    if refused is not None:
        raise refused
    if LEAST <= have < opset:
        own = ModelProto()
        own.CopyFrom(work)
        try:
            notes.extend(raise_opset(own, opset)[1:])
        except ModelError as error:
            log.info("raising with our own rules: %s", error.message)
        else:
            return own
    if opset < have:
        try:
            notes.extend(lower_opset(work, opset, _types(work)))
        except CannotLower as error:
            raise _no_older_form(error, have, opset, model) from error
        return work
    try:
        done: ModelProto = version_converter.convert_version(work, opset)
    except Exception as error:  # the converter raises what its C++ side throws
        raise _refused(work, have, opset, model, error) from error
    for item in work.opset_import:
        if item.domain not in walk.DEFAULT_DOMAINS and all(other.domain != item.domain for other in done.opset_import):
            done.opset_import.append(item)
    return _names_back(done, work)


def _names_back(done: ModelProto, before: ModelProto) -> ModelProto:
    """Node names that the converter dropped, found by their outputs."""
    names = {name: node.name for node in before.graph.node for name in node.output if name}
    for node in done.graph.node:
        if not node.name:
            node.name = next((names[name] for name in node.output if name in names), "")
    return done


def _missing(proto: ModelProto, have: int, opset: int, model: Model) -> ModelError | None:
    """The refusal for an operator that the other opset does not have."""
    for place in walk.nodes(proto):
        node = place.node
        if walk.domain_of(node) or _schema(node.op_type, have) is None:
            continue
        after = _schema(node.op_type, opset)
        if after is None or after.deprecated:
            first = min(
                (item.since_version for item in onnx.defs.get_all_schemas_with_history()
                 if item.name == node.op_type and item.domain == ""), default=have,
            )  # fmt: skip
            what = f"came with opset {first}" if opset < first else f"is deprecated in opset {opset}"
            return ModelError(
                f"`{model.path}` cannot be brought from opset {have} to {opset}: `{node.op_type}` "
                f"(node `{walk.label(node)}`) {what}",
                hint=f"stay at opset {max(first, _FIRST)} or later" if opset < first else "export it at that opset",
            )
    return None


def _no_older_form(error: CannotLower, have: int, opset: int, model: Model) -> ModelError:
    op = error.node.op_type
    what = changed(op, have, opset) or "changed in its meaning"
    return ModelError(
        f"`{model.path}` cannot be brought from opset {have} to {opset}: `{op}` (node `{walk.label(error.node)}`) {error}",
        hint=f"from opset {have} to {opset} `{op}` is {what}; export the model at opset {opset}",
    )


def _refused(proto: ModelProto, have: int, opset: int, model: Model, error: Exception) -> ModelError:
    """The refusal behind what the converter says: it names the operator in a sentence of its own."""
    said = " ".join(str(error).split())
    operators = Counter(place.node.op_type for place in walk.nodes(proto) if not walk.domain_of(place.node))
    named = [op for op in operators if re.search(rf"\b{re.escape(op)}\b", said)]
    changes = _changes(proto, have, opset)
    suspects = [op for op in named if op in changes] or named or list(changes)
    step = re.search(r"No Adapter (?:From|To) Version \D*(?P<version>\d+)", said)
    where = f" at opset {step['version']}" if step else ""
    if not suspects:
        return ModelError(
            f"`{model.path}` cannot be brought from opset {have} to {opset}: {said[:200]}",
            hint="export it at that opset",
        )
    op = suspects[0]
    node = next(walk.label(item.node) for item in walk.nodes(proto) if item.node.op_type == op)
    what = changes.get(op, "its definition changed")
    return ModelError(
        f"`{model.path}` cannot be brought from opset {have} to {opset}: `{op}` (node `{node}`) changed{where}: {what}",
        hint=f"export it at opset {opset}; the converter says: {said[-160:]}",
    )


# ------------------------------------------------------------------------------------------------ what changed


def _schema(op: str, version: int) -> Any:
    try:
        return onnx.defs.get_schema(op, version, "")
    except onnx.defs.SchemaError:
        return None


def _changes(proto: ModelProto, have: int, opset: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for place in walk.nodes(proto):
        op = place.node.op_type
        if not walk.domain_of(place.node) and op not in found and (what := changed(op, have, opset)):
            found[op] = what
    return dict(sorted(found.items()))


def changed(op: str, have: int, opset: int) -> str | None:
    """What the definition of an operator gained and lost between two opsets, in words; None when it is the same."""
    before, after = _schema(op, have), _schema(op, opset)
    if before is None or (after is not None and after.since_version == before.since_version):
        return None
    if after is None:
        return f"not in opset {opset}"
    parts = []
    gone, new = set(before.attributes) - set(after.attributes), set(after.attributes) - set(before.attributes)
    parts += [f"without the attribute `{name}`" for name in sorted(gone)]
    parts += [f"with the attribute `{name}`" for name in sorted(new)]
    for side, one, two in (("input", before.inputs, after.inputs), ("output", before.outputs, after.outputs)):
        names, others = [item.name for item in one], [item.name for item in two]
        if len(names) != len(others):
            more = others[len(names) :] or names[len(others) :]
            word = "with" if len(others) > len(names) else "without"
            parts += [f"{word} the {side} `{name}`" for name in more]
    types = [
        {kind for item in schema.type_constraints for kind in item.allowed_type_strs} for schema in (before, after)
    ]
    if fewer := sorted(types[0] - types[1]):
        parts.append(f"not of {_short(fewer)}")
    if more_types := sorted(types[1] - types[0]):
        parts.append(f"of {_short(more_types)} too")
    return ", ".join(parts) or f"another meaning or default (versions {before.since_version} and {after.since_version})"


def _short(kinds: list[str]) -> str:
    shown = [kind.removeprefix("tensor(").removesuffix(")") for kind in kinds]
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} types more" if len(shown) > 4 else "")


# ------------------------------------------------------------------------------------------------ writing out


def _written_out(proto: ModelProto, have: int, opset: int, notes: list[str]) -> ModelProto:
    """Operators that the older opset lacks, as the operators ONNX defines them by."""
    types = _types(proto)
    functions: dict[str, FunctionProto] = {}
    counts: Counter[str] = Counter()
    for at, node in enumerate(proto.graph.node):
        older = _schema(node.op_type, opset)
        if walk.domain_of(node) or (older is not None and not older.deprecated):
            continue
        schema = _schema(node.op_type, have)
        stated = {item.name for item in node.attribute}
        node.attribute.extend(  # a function knows no defaults
            item.default_value
            for name, item in (schema.attributes if schema is not None else {}).items()
            if name not in stated and item.default_value.name
        )
        body = _body(schema, node, have, types) if schema is not None else None
        if body is None:
            continue
        name = f"{node.op_type}_{at}"
        body.name, body.domain = name, _WRITTEN_OUT
        functions[name] = body
        counts[node.op_type] += 1
        node.op_type, node.domain = name, _WRITTEN_OUT
    if not functions:
        return proto
    proto.functions.extend(functions.values())
    proto.opset_import.append(helper.make_opsetid(_WRITTEN_OUT, 1))
    flat, _ = rewriting.inline(proto)
    kept = [item for item in flat.opset_import if item.domain != _WRITTEN_OUT]
    copies = [type(item).FromString(item.SerializeToString()) for item in kept]
    del flat.opset_import[:]
    flat.opset_import.extend(copies)
    notes.extend(f"{count} {op} written out in the operators it is made of" for op, count in counts.items())
    return _written_out(flat, have, opset, notes)  # what it is made of may be too new, too


def _types(proto: ModelProto) -> dict[str, Any]:
    plain = onnx.shape_inference.infer_shapes(proto)
    graph = plain.graph
    found = {item.name: item.type for item in (*graph.value_info, *graph.output, *graph.input)}
    for tensor in graph.initializer:
        found[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
    return found


def _body(schema: Any, node: NodeProto, have: int, types: Mapping[str, Any]) -> FunctionProto | None:
    """The operator as a function of the opset the model has; None when ONNX does not define it so."""
    made = FunctionProto()
    try:
        if schema.has_function:
            versions = [item for item in schema.function_opset_versions if item <= have]
            made.ParseFromString(schema.get_function_with_opset_version(max(versions)))
        elif schema.has_context_dependent_function:
            versions = [item for item in schema.context_dependent_function_opset_versions if item <= have]
            kinds = [types[name].SerializeToString() if name else b"" for name in node.input]
            raw = schema.get_context_dependent_function_with_opset_version(
                max(versions), node.SerializeToString(), kinds
            )
            made.ParseFromString(raw)
        else:
            return None
    except Exception as error:  # what the C++ side throws, and ValueError for no version
        log.debug("`%s` cannot be written out: %s", node.op_type, error)
        return None
    for item in made.opset_import:
        if item.domain in walk.DEFAULT_DOMAINS:
            item.version = have
    return made
