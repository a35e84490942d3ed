"""Converts a model to an older or newer opset without changing results; operators that cannot be converted are named.

Raising uses our own rules, else ONNX's version converter. Lowering first expands operators missing in the older opset
into their ONNX function bodies, then uses our own rules: the version converter supports few downgrades, some of them
wrong.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import onnx
from onnx import FunctionProto, ModelProto, NodeProto, helper

from trt_engine.conversion import rewrite
from trt_engine.conversion.rewrite import RewrittenModel
from trt_engine.equivalence.pair import NotEquivalent
from trt_engine.errors import AccuracyError, ModelError, UsageError
from trt_engine.format import shorten_middle
from trt_engine.graph import constants, symbolic_shapes, walk
from trt_engine.graph.edit_graph import inline_functions, retain_items
from trt_engine.graph.operators import onnxruntime_version_gap
from trt_engine.graph.opset import (
    MIN_OPSET,
    CannotLower,
    convert_with_library,
    large_weights,
    lower_opset,
    raise_opset,
    schema_changes,
)
from trt_engine.graph.shape_inference import schema_of
from trt_engine.model import Model
from trt_engine.records.convert import OpsetReport

log = logging.getLogger(__name__)

_MIN_OPSET = 7
"""Oldest opset ONNX Runtime supports."""
_EXPANDED = "trt_engine.written_out"


def change_opset(
    source: Path | str, out: Path | str, opset: int, *, inputs: Mapping[str, Any] | None = None
) -> OpsetReport:
    """Write the model at `source` to `out` at another ONNX opset, verified as in `simplify`.

    Raises `ModelError` naming an operator that cannot be converted and what changed, `AccuracyError` if results differ.
    A model that ONNX Runtime cannot run is converted unverified, with a note.
    """
    _check_opset(opset)
    file = RewrittenModel.open(source, out, inputs, 1e-5, "converted to another opset")
    model, before = file.model, file.before
    have = model.opsets.get("", 1)
    work = file.flat_copy()
    file.detach(work, large_weights(work))
    done = _convert(work, have, opset, model, file.notes)
    try:
        file.complete(done)
    except NotEquivalent as error:
        raise ModelError(f"the converter dropped something: {error}", hint="export the model at that opset") from error
    try:
        file.write(done)
    except NotEquivalent as error:
        raise AccuracyError(
            f"`{model.path}` is not the same at opset {opset}: {error}", hint="export the model at that opset"
        ) from error
    return OpsetReport(
        **file.report_fields(),
        opset=(have, opset),
        ir_version=(before.ir_version, done.ir_version),
        nodes_before=sum(1 for _ in walk.nodes(before)),
        nodes_after=sum(1 for _ in walk.nodes(done)),
        operators_changed=_changed_operators(before, have, opset),
        functions_inlined=len(before.functions),
    )


def _check_opset(opset: int) -> None:
    newest = onnx.defs.onnx_opset_version()
    if not _MIN_OPSET <= opset <= newest:
        raise UsageError(
            f"opset {opset} is not supported, expected one from {_MIN_OPSET} to {newest}",
            hint=f"{newest} is the newest of the installed onnx {onnx.__version__}",
        )
    needed = int(helper.find_min_ir_version_for([helper.make_opsetid("", opset)]))
    if beyond := onnxruntime_version_gap(opset, needed):
        raise UsageError(f"that is {beyond.describe()}", hint="a lower `--opset`, or `pip install -U onnxruntime`")


# ------------------------------------------------------------------------------------------------ converting


def _convert(work: ModelProto, have: int, opset: int, model: Model, notes: list[str]) -> ModelProto:
    if have == opset:
        return work
    if opset < have:
        flat = _expand_functions(work, have, opset, notes)
        if flat is not work:  # its function body computes axes from constants
            constants.constants_as_initializers(flat)
            rewrite.rewrite(flat, model.path.parent)
        work = flat
    refused = _missing_operator_error(work, have, opset, model)
    if refused is not None:
        raise refused
    if MIN_OPSET <= have < opset:
        own = deepcopy(work)
        try:
            notes.extend(raise_opset(own, opset)[1:])
        except ModelError as error:
            log.info("raising with our own rules: %s", error.message)
        else:
            return own
    if opset < have:
        try:
            notes.extend(lower_opset(work, opset, symbolic_shapes.infer_types(work)))
        except CannotLower as error:
            raise _no_older_form_error(error, have, opset, model) from error
        return work
    try:
        return convert_with_library(work, opset)
    except Exception as error:  # the converter raises any C++ exception
        raise _conversion_error(work, have, opset, model, error) from error


def _cannot_convert(model: Model, have: int, opset: int, reason: str, hint: str) -> ModelError:
    return ModelError(f"`{model.path}` cannot be converted from opset {have} to {opset}: {reason}", hint=hint)


def _missing_operator_error(proto: ModelProto, have: int, opset: int, model: Model) -> ModelError | None:
    """Error for an operator that the other opset lacks."""
    for place in walk.nodes(proto):
        node = place.node
        if walk.domain_of(node) or schema_of(node.op_type, "", have) is None:
            continue
        after = schema_of(node.op_type, "", opset)
        if after is None or after.deprecated:
            first = min(
                (item.since_version for item in onnx.defs.get_all_schemas_with_history()
                 if item.name == node.op_type and item.domain == ""), default=have,
            )  # fmt: skip
            what = f"came with opset {first}" if opset < first else f"is deprecated in opset {opset}"
            hint = f"stay at opset {max(first, _MIN_OPSET)} or later" if opset < first else "export it at that opset"
            return _cannot_convert(model, have, opset, f"`{node.op_type}` (node `{walk.label(node)}`) {what}", hint)
    return None


def _no_older_form_error(error: CannotLower, have: int, opset: int, model: Model) -> ModelError:
    op = error.node.op_type
    what = schema_changes(op, have, opset) or "changed in its meaning"
    hint = f"from opset {have} to {opset} `{op}` is {what}; export the model at opset {opset}"
    return _cannot_convert(model, have, opset, f"`{op}` (node `{walk.label(error.node)}`) {error}", hint)


def _conversion_error(proto: ModelProto, have: int, opset: int, model: Model, error: Exception) -> ModelError:
    """Error for a converter failure, whose message names the operator."""
    said = " ".join(str(error).split())
    operators = Counter(place.node.op_type for place in walk.nodes(proto) if not walk.domain_of(place.node))
    named = [op for op in operators if re.search(rf"\b{re.escape(op)}\b", said)]
    changes = _changed_operators(proto, have, opset)
    suspects = [op for op in named if op in changes] or named or list(changes)
    step = re.search(r"No Adapter (?:From|To) Version \D*(?P<version>\d+)", said)
    where = f" at opset {step['version']}" if step else ""
    if not suspects:
        return _cannot_convert(model, have, opset, shorten_middle(said, 400), "export it at that opset")
    op = suspects[0]
    node = next(walk.label(item.node) for item in walk.nodes(proto) if item.node.op_type == op)
    what = changes.get(op, "its definition changed")
    hint = f"export it at opset {opset}; converter message: {said[-160:]}"
    return _cannot_convert(model, have, opset, f"`{op}` (node `{node}`) changed{where}: {what}", hint)


# ------------------------------------------------------------------------------------------------ what changed


def _changed_operators(proto: ModelProto, have: int, opset: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for place in walk.nodes(proto):
        op = place.node.op_type
        if not walk.domain_of(place.node) and op not in found and (what := schema_changes(op, have, opset)):
            found[op] = what
    return dict(sorted(found.items()))


# ------------------------------------------------------------------------------------------------ writing out


def _expand_functions(proto: ModelProto, have: int, opset: int, notes: list[str]) -> ModelProto:
    """Expand operators missing in the older opset into their ONNX function bodies."""
    types = symbolic_shapes.infer_types(proto)
    functions: dict[str, FunctionProto] = {}
    counts: Counter[str] = Counter()
    for at, node in enumerate(proto.graph.node):
        older = schema_of(node.op_type, "", opset)
        if walk.domain_of(node) or (older is not None and not older.deprecated):
            continue
        schema = schema_of(node.op_type, "", have)
        stated = {item.name for item in node.attribute}
        node.attribute.extend(  # functions have no attribute defaults
            item.default_value
            for name, item in (schema.attributes if schema is not None else {}).items()
            if name not in stated and item.default_value.name
        )
        body = _function_body(schema, node, have, types) if schema is not None else None
        if body is None:
            continue
        name = f"{node.op_type}_{at}"
        body.name, body.domain = name, _EXPANDED
        functions[name] = body
        counts[node.op_type] += 1
        node.op_type, node.domain = name, _EXPANDED
    if not functions:
        return proto
    proto.functions.extend(functions.values())
    proto.opset_import.append(helper.make_opsetid(_EXPANDED, 1))
    flat = inline_functions(proto)
    retain_items(flat.opset_import, lambda item: item.domain != _EXPANDED)
    notes.extend(f"{count} {op} expanded into the operators of its definition" for op, count in counts.items())
    return _expand_functions(flat, have, opset, notes)  # its function body may be too new, too


def _function_body(schema: Any, node: NodeProto, have: int, types: Mapping[str, Any]) -> FunctionProto | None:
    """The operator as a function at the model's opset; None if ONNX has no such definition."""
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
    except Exception as error:  # C++ exceptions, and ValueError for a missing version
        log.debug("`%s` cannot be expanded: %s", node.op_type, error)
        return None
    for item in made.opset_import:
        if item.domain in walk.DEFAULT_DOMAINS:
            item.version = have
    return made
