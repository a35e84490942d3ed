"""`cast`: convert a model to FP16 or BF16 with consistent types, keeping numerically unsafe nodes in FP32.

The schema of each operator decides whether a node is cast or kept in FP32, with a reason. A tensor has the type of its
producer; consumers of the other type share one Cast right after it. Weights are converted, and stored in both types when
both are read.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto, helper

from trt_engine.config.precision import CastConfig
from trt_engine.errors import ModelError, UsageError
from trt_engine.format import library_reason
from trt_engine.graph import edit_graph, stored_tensors, typed_graph, walk
from trt_engine.graph.constants import drop_initializer_inputs
from trt_engine.graph.edit_graph import make_names_unique
from trt_engine.graph.load import check_operators, open_model
from trt_engine.graph.module_paths import ModulePaths, carry_module_paths
from trt_engine.graph.operators import checker_error
from trt_engine.graph.opset import raise_opset
from trt_engine.graph.typed_graph import BFLOAT16, FLOAT, FLOAT16, Op, Tensor
from trt_engine.graph.typing_rules import check_strong_typing
from trt_engine.model import Model
from trt_engine.precision.cast_rewriter import CastRewriter
from trt_engine.precision.cast_rules import ELEM_TYPES, QDQ, TYPE_STRS, CastChanges, uses_fp32
from trt_engine.records.precision import CastReport, RangesReport

_CAST_OPSET = 13
"""Opset imported where the model imports no standard opset: Cast supports every type from here on."""


def cast(
    model: Path | str,
    to: str,
    *,
    out: Path | str | None = None,
    ranges: RangesReport | Mapping[str, str] | None = None,
    config: CastConfig | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    check: Callable[[Path], None] | None = None,
    **settings: Any,
) -> CastReport:
    """Cast the model to `fp16` or `bf16`, write it to `out`, and report the cast and kept nodes.

    Kept in FP32: inputs and outputs unless `keep_io` is off, nodes excluded by name, operator or pattern (as `/head/*`),
    nodes of `ranges` (a ranges report, or reasons by node name), operators without support for the type, index arithmetic,
    and readers of constants beyond `max_constant` or that underflow to zero. `settings`: fields of `CastConfig`. Without
    `out`, or with `dry_run`, nothing is written; nor if `check` raises for the finished
    file. Raises `UsageError` and `ModelError`.
    """
    started = time.monotonic()
    config = dataclasses.replace(config or CastConfig(), **settings)
    if to not in ELEM_TYPES:
        raise UsageError(f"cannot cast to `{to}`", hint="`--to fp16` or `--to bf16`; `quantize` writes the others")
    opened = open_model(model)
    target = Path(out) if out is not None else None
    if target is not None:
        check_target(target, opened, overwrite=overwrite)
    proto = opened.proto
    check_operators(opened.graph, opened.path)
    proto, changed = cast_proto(
        proto, to, folder=opened.path.parent, ranges=ranges, config=config, name=str(opened.path)
    )
    findings = check_strong_typing(proto)
    report = changed.to_report(opened, to, config.keep_io, findings, ModulePaths(proto))
    if target is not None and not dry_run:

        def validate(path: Path) -> None:
            _check_valid_onnx(path, opened, changed)
            if check is not None:
                check(path)

        written = stored_tensors.write_model(
            proto, target, changed.deferred, opened.path.parent, external=bool(opened.external),
            validate=validate,
        )  # fmt: skip
        artifacts = {name: str(path) for name, path in stored_tensors.written_files(target).items()}
        report = replace(report, out=str(target), nbytes_after=written, artifacts=artifacts, notes=tuple(changed.notes))
    return replace(report, seconds=time.monotonic() - started, dry_run=dry_run or target is None)


def check_target(target: Path, model: Model, *, overwrite: bool) -> None:
    """Raise `UsageError` if the result cannot be written to `target`."""
    if target.is_dir():
        raise UsageError(f"`{target}` is a folder, expected a file", hint=f"`-o {target / model.path.name}`")
    taken = {model.path.resolve(), *(item.path.resolve() for item in model.external)}
    if target.resolve() in taken or stored_tensors.external_data_path(target).resolve() in taken:
        raise UsageError(f"`{target}` is the model itself", hint="name another `-o`")
    if target.exists() and not overwrite:
        raise UsageError(f"`{target}` exists", hint="`--overwrite` overwrites it, or name another `-o`")


def cast_proto(
    proto: ModelProto,
    to: str,
    *,
    folder: Path,
    ranges: RangesReport | Mapping[str, str] | None = None,
    config: CastConfig | None = None,
    name: str = "the model",
) -> tuple[ModelProto, CastChanges]:
    """Return the cast graph and the changes; external weights are converted when the graph is written.

    `proto` is not modified. Raises `ModelError` if local functions cannot be inlined or the opset cannot be raised.
    """
    work = deepcopy(edit_graph.inline_functions(proto))
    if "" not in walk.opsets_of(work):  # no standard opset import: Cast needs one
        work.opset_import.add(domain="", version=_CAST_OPSET)
        work.ir_version = max(work.ir_version, helper.find_min_ir_version_for(work.opset_import, ignore_unknown=True))
    changes = CastChanges(opset=(walk.opsets_of(work).get("", 1),) * 2)
    if proto.functions:
        changes.notes.append(f"{len(proto.functions)} local functions were written out where they are called")
    if renamed := make_names_unique(work):
        changes.notes.append(f"{renamed} nodes had the name of another and got one of their own")
    work = _raise_opset(work, to, changes, name)
    constants = {item.name for item in work.graph.initializer}
    if listed := sum(item.name in constants for item in work.graph.input):
        drop_initializer_inputs(work)
        changes.notes.append(f"{listed} initializers that were listed as inputs too are plain constants now")
    config = config or CastConfig()
    caster = CastRewriter(work, to, folder, config, changes)
    caster.keep_excluded()
    caster.keep_reported(ranges)
    caster.keep_unsupported()
    caster.rewrite()
    _fold_casts(work, changes)
    carry_module_paths(work, proto)
    return work, changes


def _raise_opset(proto: ModelProto, to: str, changes: CastChanges, name: str) -> ModelProto:
    """Raise the opset to one whose operators support the type, where needed."""
    before = walk.opsets_of(proto).get("", 1)
    target = 22 if to == "bf16" else 19
    if before >= target:
        return proto
    waiting = sorted(
        {
            op.node.op_type
            for op in typed_graph.build_typed_graph(proto).all_ops()
            if not walk.domain_of(op.node)
            and (to == "bf16" or op.node.op_type in QDQ)
            and uses_fp32(op)
            and not _supports_type(op.node.op_type, before, TYPE_STRS[to])
            and _supports_type(op.node.op_type, target, TYPE_STRS[to])
        }
    )
    if not waiting:
        return proto
    shown = ", ".join(f"`{item}`" for item in waiting[:4]) + (" and others" if len(waiting) > 4 else "")
    try:
        raised = deepcopy(proto)
        raise_opset(raised, target)
        onnx.shape_inference.infer_shapes(raised, check_type=True, strict_mode=True)
    except Exception as error:  # the converter and the inference raise whatever their C++ side throws
        reason = error.message if isinstance(error, ModelError) else library_reason(error)
        raise ModelError(
            f"`{name}` is at opset {before}, where {shown} take no {to}, and it cannot be raised to opset {target}: "
            f"{reason}",
            hint=f"export it again with `opset_version={target}`"
            + (", or cast to fp16, which every opset has" if to == "bf16" else ""),
        ) from error
    changes.opset = (before, target)
    changes.notes.append(f"raised from opset {before} to {target}: {shown} take no {to} before")
    return raised


def _supports_type(op: str, opset: int, kind: str) -> bool:
    """True if an operator's first input and output accept the type wherever they accept FP32."""
    found = typed_graph.op_signature(op, "", opset)
    if found is None:
        return False
    places = [*found.inputs[:1], *found.outputs[:1]]
    floats = [formal for formal in places if found.allows(formal, FLOAT)]
    return bool(floats) and all(found.allows(formal, kind) for formal in floats)


def _fold_casts(proto: ModelProto, changes: CastChanges) -> None:
    """Remove no-op Casts and bypass lossless ones."""
    main = typed_graph.build_typed_graph(proto)
    casts = [op for op in main.all_ops() if op.node.op_type == "Cast" and not walk.domain_of(op.node)]
    changed = True
    while changed:
        changed = False
        for op in casts:
            source, made = op.inputs[0], op.outputs[0]
            if source is None or made is None:
                continue
            first = source.producer
            if (
                first is not None
                and first.node.op_type == "Cast"
                and not walk.domain_of(first.node)
                and source.type_str == FLOAT
                and first.inputs[0] is not None
                and first.inputs[0].type_str in (FLOAT16, BFLOAT16)
            ):
                _redirect_input(op, 0, first.inputs[0])
                changed = True
            elif source.type_str == made.type_str and source.type_str and not made.output_of and made.consumers:
                for user, position in list(made.consumers):
                    _redirect_input(user, position, source)
                changed = True
    dead = True
    while dead:
        dead = False
        for op in list(casts):
            made = op.outputs[0]
            if made is None or made.consumers or made.output_of:
                continue
            if op.inputs[0] is not None:
                op.inputs[0].consumers = [item for item in op.inputs[0].consumers if item[0] is not op]
            op.scope.graph.node.remove(op.node)
            casts.remove(op)
            changes.casts_removed += 1
            dead = True


def _redirect_input(op: Op, position: int, tensor: Tensor) -> None:
    before = op.inputs[position]
    if before is not None:
        before.consumers = [item for item in before.consumers if item != (op, position)]
    op.inputs[position] = tensor
    op.node.input[position] = tensor.name
    tensor.consumers.append((op, position))


def _check_valid_onnx(path: Path, model: Model, changes: CastChanges) -> None:
    """Raise `ModelError` if ONNX's full check rejects the result but accepts the source model."""
    error = checker_error(path)
    if error is None:
        return
    if checker_error(model.path) is not None:
        changes.notes.append("ONNX's own checker takes neither the model nor the result; the types were checked here")
        return
    raise ModelError(
        f"the cast of `{model.path}` is not valid ONNX: {library_reason(error, whole=True)}",
        hint="exclude the node it names with `--exclude-node`, or try `--autocast`",
    ) from error
