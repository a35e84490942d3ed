"""Operator support: TensorRT's ONNX parser and ONNX Runtime's CUDA provider by their published lists, its CPU provider
by the kernels of the installed release.

The lists are data files beside this module, each with its source and version.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnx import ModelProto, TensorProto

from trt_engine.graph import operators, walk
from trt_engine.graph.shape_inference import Trace, TracedNode, dtype_name, flatten, schema_of, type_string
from trt_engine.graph.tensorrt_operators import UnsupportedNode, tensorrt_opsets, tensorrt_unsupported_nodes
from trt_engine.model import Model
from trt_engine.records.base import Finding
from trt_engine.records.lint import OperatorSupport

# ------------------------------------------------------------------------------------------------ ONNX Runtime


@cache
def _cpu_kernel_table() -> Mapping[tuple[str, str], tuple[tuple[int, int, Mapping[str, Sequence[str]]], ...]]:
    """(first version, last version, types by constraint) of the installed release's CPU provider by (domain, operator);
    empty without ONNX Runtime.

    From a data file: ONNX Runtime's own list is private, and kills the process in builds for GPUs without CUDA's libraries.
    """
    try:
        import onnxruntime

        release = _release(onnxruntime.__version__)
    except (ImportError, AttributeError):  # not installed, or hollow
        return {}
    table = json.loads(Path(__file__).with_name("onnxruntime_cpu_kernels.json").read_text(encoding="utf-8"))
    types = [
        {name: kinds.split(",") for name, _, kinds in (item.partition("=") for item in text.split())}
        for text in table["types"]
    ]
    newest = _release(table["source"]["releases"][-1])  # a release the file does not have counts as the nearest it has
    release = min(max(release, _release(table["source"]["releases"][0])), newest)
    found: dict[tuple[str, str], tuple[tuple[int, int, Mapping[str, Sequence[str]]], ...]] = {}
    for domain, ops in table["kernels"].items():
        for op, rows in ops.items():
            kernels = tuple(
                (low, 1 << 31 if high is None else high, types[index])
                for low, high, index, *span in rows
                if not span or _release(span[0] or "0") <= release <= (_release(span[1]) if span[1] else newest)
            )
            if kernels:
                found[domain, op] = kernels
    return found


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


@cache
def _cuda_type_table() -> Mapping[str, str]:
    """Type letters by default-domain operator; the data file has a legend."""
    found = json.loads(Path(__file__).with_name("onnxruntime_cuda_operators.json").read_text(encoding="utf-8"))
    return {op: letters for letters, ops in found["types"].items() for op in ops.split()}


def _cpu_reason(step: TracedNode, opsets: Mapping[str, int]) -> Iterator[UnsupportedNode]:
    node, domain = step.node, walk.domain_of(step.node)
    known = _cpu_kernel_table()
    if not known or operators.is_trt_only(node):
        return
    elems = (
        tuple([0 if item is None or item.non_tensor_type is not None else item.elem for item in step.inputs]),
        tuple([0 if item.non_tensor_type is not None else item.elem for item in step.outputs]),
    )
    schema, fitting, bound, runs = _cpu_kernels(node.op_type, domain, opsets.get(domain, 1), *elems)
    if runs:
        return
    if (schema is None and not known.get((domain, node.op_type))) or _loads_in_onnxruntime(step, domain, opsets):
        return  # `unknown-operator` reports the first; the second is decomposed into other operators
    if not fitting:
        yield UnsupportedNode("cpu", "missing", node, "ONNX Runtime's CPU provider has no kernel for it")
        return
    shown = ", ".join(sorted({kind.removeprefix("tensor(").removesuffix(")") for kind in bound.values()}))
    yield UnsupportedNode("cpu", "type", node, f"ONNX Runtime's CPU provider has no kernel for it in {shown}")


@cache
def _cpu_kernels(
    op: str, domain: str, version: int, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> tuple[Any, list[Mapping[str, Sequence[str]]], dict[str, str], bool]:
    """The operator's schema, its kernel types at this opset, the input and output types (0: unknown) by schema name,
    and whether a kernel accepts them."""
    schema = schema_of(op, domain, version)
    since = schema.since_version if schema is not None else version
    fitting = [types for low, high, types in _cpu_kernel_table().get((domain, op), ()) if low <= since <= high]
    bound = _bind_types(schema, inputs, outputs) if schema is not None else {}
    widened = {
        name: "tensor(float)" if kind == type_string(TensorProto.FLOAT16) else kind for name, kind in bound.items()
    }  # FP16 without a kernel is computed in FP32 between two casts
    return schema, fitting, bound, any(_is_allowed(types, bound) or _is_allowed(types, widened) for types in fitting)


_load_cache: dict[tuple[Any, ...], bool] = {}


def _loads_in_onnxruntime(step: TracedNode, domain: str, opsets: Mapping[str, int]) -> bool:
    """Whether ONNX Runtime loads the node alone: some operators without a kernel are decomposed."""
    node = step.node
    facts = [(name, fact) for name, fact in zip(node.input, step.inputs, strict=False) if name and fact is not None]
    key = (node.op_type, domain, opsets.get(domain, 1), node.SerializeToString(deterministic=True),
           tuple(fact.elem for _, fact in facts))  # fmt: skip
    if key in _load_cache:
        return _load_cache[key]
    outside = any(item.t.data_location == TensorProto.EXTERNAL for item in node.attribute if item.HasField("t"))
    if step.bodies or outside or any(not fact.elem for _, fact in facts):
        return True  # no schema to check with
    value = onnx.helper.make_tensor_value_info
    stored = {name: fact.value for name, fact in facts if fact.is_constant and fact.value is not None}
    asked = onnx.helper.make_model(
        onnx.helper.make_graph(
            [node],
            "one_node",
            [value(name, fact.elem, [None if size < 0 else size for size in fact.shape] if fact.shape is not None else None)
             for name, fact in dict(facts).items() if name not in stored],
            [value(name, fact.elem, None) for name, fact in zip(node.output, step.outputs, strict=False) if name],
            [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items()],
        ),
        opset_imports=[onnx.helper.make_opsetid(name, version) for name, version in opsets.items()],
        ir_version=10,
    )  # fmt: skip
    _load_cache[key] = "NOT_IMPLEMENTED" not in str(operators.load_error(asked))  # others belong to other findings
    return _load_cache[key]


def _bind_types(schema: Any, inputs: Sequence[int], outputs: Sequence[int]) -> dict[str, str]:
    """Element types by schema type name, for inputs and outputs of known type."""
    bound: dict[str, str] = {}
    for formals, elems in ((schema.inputs, inputs), (schema.outputs, outputs)):
        for at, elem in enumerate(elems):
            formal = formals[min(at, len(formals) - 1)] if formals else None
            if formal is None or not elem:
                continue
            for name in (formal.type_str, formal.name):
                bound.setdefault(name, f"tensor({dtype_name(elem)})")
    return bound


def _is_allowed(types: Mapping[str, Sequence[str]], bound: Mapping[str, str]) -> bool:
    return all(name not in bound or bound[name] in kinds for name, kinds in types.items())


_LETTERS: dict[int, str] = {
    TensorProto.FLOAT: "f", TensorProto.FLOAT16: "h", TensorProto.BFLOAT16: "b", TensorProto.DOUBLE: "d",
}  # fmt: skip


def _cuda_reason(step: TracedNode) -> Iterator[UnsupportedNode]:
    node = step.node
    if walk.domain_of(node) or step.folded or operators.is_trt_only(node) or node.op_type == "Constant":
        return  # ONNX Runtime's own domains are written by its optimisers, and a Constant is an initializer when it loads
    letters = _cuda_type_table().get(node.op_type)
    if letters is None:
        schema = schema_of(node.op_type, "", onnx.defs.onnx_opset_version())
        if schema is None or not schema.has_function:
            yield UnsupportedNode(
                "cuda", "missing", node, "ONNX Runtime's CUDA provider has no kernel for it: it runs on the CPU"
            )
        return
    elem = next((item.elem for item in step.inputs if item is not None and item.elem in _LETTERS), 0)
    if letters and elem and _LETTERS[elem] not in letters:
        yield UnsupportedNode(
            "cuda", "type", node, f"ONNX Runtime's CUDA provider has no kernel of it for {dtype_name(elem)}"
        )


# ------------------------------------------------------------------------------------------------ the whole model


def unsupported_nodes(proto: ModelProto, traced: Trace, version: str, *, rtx: bool = False) -> list[UnsupportedNode]:
    """Every node that TensorRT's parser of this version (TensorRT-RTX's if `rtx`), ONNX Runtime's CPU or its CUDA
    provider does not run unmodified. Local functions count by their body."""
    opsets = walk.opsets_of(proto)
    local = {(item.domain, item.name) for item in proto.functions}
    steps = [step for step in flatten(traced.nodes) if (step.node.domain, step.node.op_type) not in local]
    found = tensorrt_unsupported_nodes(proto, steps, version, rtx=rtx)
    for step in steps:
        found += _cpu_reason(step, opsets)
        found += _cuda_reason(step)
    return found


def support_rows(traced: Trace, found: Sequence[UnsupportedNode]) -> tuple[OperatorSupport, ...]:
    """One row per operator of the traced graph, most frequent first."""
    counts: dict[str, int] = {}
    only: dict[str, bool] = {}
    for step in flatten(traced.nodes):
        name = walk.qualified_name(step.node)
        counts[name] = counts.get(name, 0) + 1
        only[name] = operators.is_trt_only(step.node)
    said: dict[tuple[str, str], UnsupportedNode] = {}
    rank = {"missing": 0, "newer": 1, "limited": 2, "type": 3, "kernel": 4, "plugin": 5}
    for gap in found:
        key = (walk.qualified_name(gap.node), gap.target)
        if key not in said or rank[gap.kind] < rank[said[key].kind]:
            said[key] = gap
    rows = []
    for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        gaps = {where: said.get((name, where)) for where in ("tensorrt", "cpu", "cuda")}
        verdicts = {
            where: "yes" if gap is None else "no" if gap.kind in ("missing", "newer") else "limited"
            for where, gap in gaps.items()
        }
        if only[name]:
            verdicts = {"tensorrt": "plugin", "cpu": "no", "cuda": "no"}
        elif "::" in name:
            verdicts |= {
                "tensorrt": "no" if name.startswith(("com.microsoft", "com.ms")) else "plugin",
                "cuda": "unknown",
            }
        if not only[name] and not _cpu_kernel_table():
            verdicts["cpu"] = "unknown"
        notes = dict.fromkeys(gap.reason for gap in gaps.values() if gap)
        rows.append(OperatorSupport(name, count, **verdicts, note="; ".join(notes) or None))  # type: ignore[arg-type]
    return tuple(rows)


Target = Literal["all", "tensorrt", "onnxruntime"]


@dataclass(frozen=True, slots=True)
class ParserResult:
    """Nodes that a real parser of TensorRT or TensorRT-RTX rejected."""

    rejected: tuple[UnsupportedNode, ...]
    complete: bool
    """True if it checked every other node, False if it stopped early."""
    unknown: frozenset[str] = frozenset()
    """Operators it cannot check for the target: TensorRT-RTX lacks some that TensorRT has."""

    def merge(self, gaps: Iterable[UnsupportedNode]) -> list[UnsupportedNode]:
        """The gaps with the parser's results in place of the lists', which remain for nodes it did not check."""
        seen = {walk.label(gap.node) for gap in self.rejected}
        kept = [
            gap
            for gap in gaps
            if gap.target != "tensorrt"
            or gap.node.op_type in self.unknown
            or (walk.label(gap.node) not in seen and (gap.kind == "kernel" or not self.complete))
        ]
        return [*self.rejected, *kept]


def opset_findings(model: Model, tensorrt: str) -> Iterator[Finding]:
    """An opset or IR version newer than the parser of a TensorRT release documents."""
    opset = model.opsets.get("")
    low, high = tensorrt_opsets(tensorrt)
    if opset is not None and not low <= opset <= high:
        yield Finding(
            "opset-beyond-tensorrt",
            "warning",
            f"opset {opset}: the ONNX parser of TensorRT {tensorrt} is documented for {low} to {high}; it reads others "
            "as far as it knows their operators",
            hint="export again with opset 20, or `trt-engine convert MODEL.onnx --opset 20 -o OUT.onnx`",
        )
    ir = next((row[1] for row in onnx.helper.VERSION_TABLE if len(row) > 2 and row[2] == high), None)
    if ir is not None and model.ir_version > ir:
        yield Finding(
            "ir-beyond-tensorrt",
            "warning",
            f"IR version {model.ir_version}: the ONNX release with opset {high}, the highest TensorRT "
            f"{tensorrt} takes, ends at {ir}; fields and types newer than it are not read",
            hint="export again with IR version 10, which everything takes",
        )


_CODES: dict[tuple[str, str], tuple[str, Literal["info", "warning"]]] = {
    ("tensorrt", "missing"): ("not-in-tensorrt", "warning"),
    ("tensorrt", "newer"): ("tensorrt-too-old", "warning"),
    ("tensorrt", "limited"): ("limited-in-tensorrt", "warning"),
    ("tensorrt", "type"): ("type-not-in-tensorrt", "warning"),
    ("tensorrt", "kernel"): ("no-tensorrt-kernel", "warning"),
    ("cpu", "missing"): ("no-cpu-kernel", "warning"),
    ("cpu", "type"): ("no-cpu-kernel", "warning"),
    ("cuda", "missing"): ("no-cuda-kernel", "info"),
    ("cuda", "type"): ("no-cuda-kernel", "info"),
}
"""Finding code by runtime and kind, and its severity if no single target is set."""
_HINTS = {
    "not-in-tensorrt": "write it with other operators in the source, keep it as a local function, bring a plugin "
                       "(`trt-engine build MODEL -O plugins=a.so`), or `trt-engine build MODEL --backend onnxruntime`",
    "tensorrt-too-old": "upgrade TensorRT, or export with a lower opset (`trt-engine convert --opset 20`), which writes it "
                        "with older operators",
    "limited-in-tensorrt": "change it in the source, then `trt-engine convert` again",
    "type-not-in-tensorrt": "cast it to a listed type in the source, then `trt-engine convert` again",
    "no-tensorrt-kernel": "write it with other operators in the source, or change its type (`trt-engine cast --to fp16`)",
    "no-cpu-kernel": "`trt-engine build MODEL --backend tensorrt`, or export with a type it has (FP32)",
    "no-cuda-kernel": "it still runs, with a copy each way; `trt-engine bench` shows the cost",
}  # fmt: skip
_HINTS_OF = {
    ("type-not-in-tensorrt", "Equal"): "PyTorch's `//` on integers is exported so: `torch.div(a, b, rounding_mode='trunc')` "
                                       "is the same where nothing is negative; else compare numbers, not Booleans",
}  # fmt: skip
_MIXED = "put a Cast before one of them: `trt-engine cast` does so everywhere"
_NO_PLUGINS = (
    "write it with other operators in the source, or build for TensorRT, which takes plugins (TensorRT-RTX does not)"
)


def unsupported_node_findings(
    gaps: Iterable[UnsupportedNode], target: Target, *, rtx: bool = False
) -> Iterator[Finding]:
    """One finding per unsupported operator, at its first node; parser rejections are grouped by reason."""
    grouped: dict[tuple[str, ...], list[UnsupportedNode]] = defaultdict(list)
    for gap in gaps:
        grouped[(gap.target, gap.kind, gap.node.op_type, gap.reason if gap.confirmed else "")].append(gap)
    for (where, kind, op, _), items in grouped.items():
        code, severity = _CODES[(where, kind)]
        sure = items[0].confirmed or kind in ("missing", "newer")
        refused = (sure and where == "tensorrt" and target == "tensorrt") or (
            code == "no-cpu-kernel" and target == "onnxruntime"
        )
        count = f"{len(items)} nodes" if len(items) > 1 else "1 node"
        mixed = items[0].confirmed and kind == "type" and "same" in items[0].reason
        yield Finding(
            code,
            "error" if refused and severity == "warning" else severity,
            f"{op} ({count}): {items[0].reason}",
            walk.label(items[0].node),
            _MIXED
            if mixed
            else _NO_PLUGINS
            if rtx and code == "not-in-tensorrt"
            else _HINTS_OF.get((code, op), _HINTS[code]),
        )
