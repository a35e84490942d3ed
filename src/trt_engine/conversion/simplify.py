"""Simplifies a graph: shapes inferred, constants folded, equal parts merged, dead ones removed.

The built-in pass, which changes no number, runs first; onnxslim, if installed, continues with fusions. The result is
compared with the model in ONNX Runtime; if it differs it is discarded and the model stays unchanged.
"""

from __future__ import annotations

import logging
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_engine.atomic_io import staging_folder
from trt_engine.conversion import rewrite
from trt_engine.conversion.rewrite import RewrittenModel
from trt_engine.environment import distribution_version
from trt_engine.equivalence.pair import EquivalenceChecker, NotEquivalent
from trt_engine.errors import TrtEngineError
from trt_engine.format import library_reason
from trt_engine.graph import constants, external_data, walk
from trt_engine.graph.dtype_breakdown import is_dequantize, is_quantize
from trt_engine.graph.edit_graph import make_names_unique
from trt_engine.graph.load import read_proto
from trt_engine.graph.module_paths import KEY, name_module
from trt_engine.graph.shape_inference import trace
from trt_engine.records.convert import SimplifyReport

log = logging.getLogger(__name__)

_WORKER = Path(__file__).with_name("onnxslim_worker.py")
_MIN_DETACHED_NBYTES = 1 << 16
"""Bytes from which a weight is detached, in a model whose weights exceed one message."""


def simplify(
    source: Path | str,
    out: Path | str,
    *,
    inputs: Mapping[str, Any] | None = None,
    tolerance: float = 1e-5,
    timeout_s: float = 600.0,
) -> SimplifyReport:
    """Write the model at `source` to `out`, simplified; `out` is replaced and may be `source`.

    `inputs` gives a shape or array for inputs whose dynamic sizes cannot be guessed. Both models run at two sets of
    sizes; no output may differ by more than `tolerance` of its largest value (or the precision of FP16 and Q/DQ
    graphs). A model that cannot be simplified, run, or verified is written unchanged: `by` is None, and `notes` give
    the reason.
    """
    job = _Simplification(RewrittenModel.open(source, out, inputs, tolerance, "simplified"), timeout_s)
    if (checker := job.file.checker) is not None:
        job.prepare(checker)
        for by, graph in job.candidates():
            try:
                return job.publish(by, graph)
            except NotEquivalent as error:
                job.file.warn(f"the result of {by} was discarded: {error}")
    job.file.copy_unchanged()
    return job.report(None, job.file.before)


_By = Literal["onnxslim", "trt-engine"]


class _Simplification:
    """State of one simplification."""

    def __init__(self, file: RewrittenModel, timeout_s: float) -> None:
        self.file, self.timeout_s = file, timeout_s
        self.counts = rewrite.RewriteCounts()
        self.work = ModelProto()
        self.internal_tensors: tuple[str, ...] = ()
        self.random = False

    # -------------------------------------------------------------------------------------------- the graph

    def prepare(self, checker: EquivalenceChecker) -> None:
        """Run the built-in pass, with quantised and excess weights detached."""
        folder = self.file.model.path.parent
        work = self.file.flat_copy()
        constants.constants_as_initializers(work)
        make_names_unique(work)
        shared = rewrite.share_equal_weights(work, folder)
        self.file.detach(work, constants.quantised_weights(work) | _excess_weights(work))
        if sum(external_data.nbytes_of(item) for item in walk.tensors(work)) <= external_data.MAX_INLINE_NBYTES:
            external_data.load_external(work, folder)
        self.random, self.internal_tensors = checker.random, tuple(checker.internal_tensors)
        self.counts = rewrite.rewrite(work, folder, keep=self.internal_tensors)
        self.counts.weights_shared += shared
        self.file.notes.extend(dict.fromkeys(self.counts.notes))
        self.work = work

    def candidates(self) -> list[tuple[_By, ModelProto]]:
        """Simplified graphs to try, smallest first."""
        found: list[tuple[_By, ModelProto]] = [("trt-engine", self.work)]
        if (slimmed := self.onnxslim_candidate(self.work)) is not None:
            found.append(("onnxslim", slimmed))
        # if equally small, the one that changed no number stays first
        return sorted(found, key=lambda item: sum(1 for _ in walk.nodes(item[1])))

    def onnxslim_candidate(self, work: ModelProto) -> ModelProto | None:
        """onnxslim's result; None if onnxslim is missing, not applicable, or fails."""
        if find_spec("onnxslim") is None:
            self.file.notes.append(
                "onnxslim is not installed (`pip install 'trt-engine[simplify]'`): the built-in pass runs alone"
            )
            return None
        if self.random:
            self.file.notes.append("onnxslim was skipped: it would make random numbers constant")
            return None
        if any(item.data_location == TensorProto.EXTERNAL for item in walk.tensors(work)):
            self.file.notes.append("onnxslim was skipped: weights inside If, Loop or Scan are too many for one file")
            return None
        given = ModelProto()
        given.CopyFrom(work)
        facts = trace(given, {}).tensors if self.internal_tensors else {}
        given.graph.output.extend(
            helper.make_tensor_value_info(name, facts[name].elem, None)
            for name in self.internal_tensors
            if name in facts and name not in {item.name for item in given.graph.output}
        )
        skipped = "subexpression_elimination" if _count_qdq(work) else ""
        with staging_folder(self.file.target) as folder:
            before, after = folder / "before.onnx", folder / "after.onnx"
            before.write_bytes(given.SerializeToString())
            if (said := self.run_onnxslim(before, after, skipped)) is not None:
                self.file.warn(said)
                return None
            try:
                return read_proto(after)
            except TrtEngineError as error:
                self.file.warn(f"the output of onnxslim cannot be read: {error.message}")
                return None

    def run_onnxslim(self, before: Path, after: Path, skipped: str) -> str | None:
        """Run onnxslim in a subprocess; returns an error message or None."""
        command = [sys.executable, "-P", str(_WORKER.absolute()), before.name, after.name, skipped]  # where it runs
        environment = {**os.environ, "ONNXSLIM_AUTO_MERGE": "0"}  # merges symbols that may differ
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                timeout=self.timeout_s, check=False, env=environment, cwd=before.parent,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"onnxslim was not done after {self.timeout_s:g} s"
        except OSError as error:
            return f"onnxslim could not be started: {error}"
        for line in done.stderr.splitlines():
            log.debug("onnxslim: %s", line)
        if done.returncode or not after.is_file():
            last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
            version = distribution_version("onnxslim")
            return f"onnxslim {version} failed (exit code {done.returncode}): {library_reason(last)}"
        return None

    # -------------------------------------------------------------------------------------------- the file

    def publish(self, by: _By, graph: ModelProto) -> SimplifyReport:
        """Verify and publish a candidate; returns its report. `NotEquivalent` if it differs."""
        proto = deepcopy(graph)
        self.file.complete(proto, self.internal_tensors)
        wanted, found = _count_qdq(self.work), _count_qdq(proto)
        if wanted != found:
            raise NotEquivalent(f"it has {found} Q/DQ nodes, and there are {wanted} that something reads")
        self.file.write(proto)
        return self.report(by, proto)

    def report(self, by: _By | None, after: ModelProto) -> SimplifyReport:
        counts = self.counts if by is not None else rewrite.RewriteCounts()
        one, two = _count_operators(self.file.before), _count_operators(after)
        return SimplifyReport(
            **self.file.report_fields(),
            simplifier=by,
            nodes_before=one.total(),
            nodes_after=two.total(),
            operators_removed=dict(sorted((one - two).items())),
            operators_added=dict(sorted((two - one).items())),
            constants_folded=counts.folded,
            nodes_deduplicated=counts.shared,
            weights_deduplicated=counts.weights_shared,
            functions_inlined=len(self.file.before.functions) if by is not None else 0,
        )


def _excess_weights(proto: ModelProto) -> set[str]:
    """Weights to detach so that the others fit one message; empty if all do."""
    left, chosen, smallest = external_data.total_nbytes(proto), set[str](), _MIN_DETACHED_NBYTES
    while left > external_data.MAX_INLINE_NBYTES and smallest:
        for tensor in proto.graph.initializer:
            if tensor.name not in chosen and (nbytes := external_data.nbytes_of(tensor)) >= smallest:
                chosen.add(tensor.name)
                left -= nbytes
        smallest //= 8
    return chosen


def _count_qdq(proto: ModelProto) -> int:
    return sum(is_quantize(place.node) or is_dequantize(place.node) for place in walk.nodes(proto))


def _count_operators(proto: ModelProto) -> Counter[str]:
    return Counter(
        f"{place.node.domain}::{place.node.op_type}" if walk.domain_of(place.node) else place.node.op_type
        for place in walk.nodes(proto)
    )


_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_FUNCTIONS = frozenset("Min Max floor ceil ceiling".split())
_STEP = re.compile(r"(\d+)\*([A-Za-z_]\w*)")
_PRODUCT = re.compile(r"(?:(\d+)\*)?([A-Za-z_]\w*(?:\*[A-Za-z_]\w*)*)")


def clean_export(
    path: Path,
    symbols: Mapping[str, Mapping[int, str]],
    roots: Mapping[str, tuple[str, int]] | None = None,
    *,
    modules: Collection[str] = (),
) -> None:
    """Rewrite the graph at `path`: remove `source.` from names, record the module of each node (one of `modules`), and
    write the requested symbols wherever their sizes occur.

    `roots` maps the exporter's symbols. Weights are not touched.
    """
    proto = read_proto(path)
    _strip(proto, ("source.", "/source/"))
    for place in walk.nodes(proto):
        name_module(place.node, "source", modules)
    _name_sizes(proto, symbols, roots or {})
    path.write_bytes(proto.SerializeToString())


def _strip(proto: ModelProto, prefixes: tuple[str, str]) -> None:
    """Remove the wrapper's prefixes from names, unless two names would collide."""
    taken: set[str] = set()
    for graph in walk.graphs(proto):
        taken.update(item.name for item in (*graph.input, *graph.output, *graph.initializer))
    for place in walk.nodes(proto):
        taken.update((*place.node.output, *place.node.input))

    def plain(name: str) -> str:
        for prefix in prefixes:
            if name.startswith(prefix):
                shorter = name.removeprefix(prefix) if prefix.endswith(".") else "/" + name.removeprefix(prefix)
                return name if shorter in taken or not shorter.strip("/") else shorter
        return name

    for graph in walk.graphs(proto):
        for tensor in graph.initializer:
            tensor.name = plain(tensor.name)
        for value in (*graph.value_info, *graph.input, *graph.output):
            value.name = plain(value.name)
    for place in walk.nodes(proto):
        node = place.node
        node.name = plain(node.name)
        for names in (node.input, node.output):
            for at, name in enumerate(names):
                names[at] = plain(name)


def _name_sizes(
    proto: ModelProto, symbols: Mapping[str, Mapping[int, str]], roots: Mapping[str, tuple[str, int]]
) -> None:
    renamed = {root: symbol for root, (symbol, step) in roots.items() if step == 1}
    for value in proto.graph.input:
        dims = value.type.tensor_type.shape.dim
        for at, symbol in symbols.get(value.name, {}).items():
            if at < len(dims) and not dims[at].HasField("dim_value"):
                if dims[at].dim_param:
                    renamed.setdefault(dims[at].dim_param, symbol)
                else:
                    dims[at].dim_param = symbol

    steps = {root: size for root, size in roots.items() if size[1] > 1}  # an axis with a step: `time` is `8*s86`
    for text, symbol in renamed.items():
        if (match := _STEP.fullmatch(text)) is not None:
            steps[match[2]] = (symbol, int(match[1]))

    def named(text: str) -> str:
        if text in renamed:
            return renamed[text]
        if (match := _PRODUCT.fullmatch(text)) is not None:
            return _product(int(match[1] or 1), match[2].split("*"), renamed, steps)
        return _IDENTIFIER.sub(lambda match: _size(match[0], renamed, steps), text)

    for graph in walk.graphs(proto):
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_param = named(dim.dim_param)
    _rename_foreign_sizes(proto, {symbol for axes in symbols.values() for symbol in axes.values()})


def _rename_foreign_sizes(proto: ModelProto, known: set[str]) -> None:
    """Sizes the exporter named (`s7`, `u0`): outputs get readable names, other tensors none."""
    names: dict[str, str] = {}

    def foreign(text: str) -> bool:
        return any(name not in known and name not in _FUNCTIONS for name in _IDENTIFIER.findall(text))

    for value in proto.graph.output:
        for at, dim in enumerate(value.type.tensor_type.shape.dim):
            if foreign(dim.dim_param):
                dim.dim_param = names.setdefault(dim.dim_param, f"{value.name}_{at}")
    for graph in walk.graphs(proto):
        for value in (*graph.value_info, *(graph.output if graph is not proto.graph else ())):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param and dim.dim_param in names:
                    dim.dim_param = names[dim.dim_param]
                elif foreign(dim.dim_param) and dim.dim_param not in names.values():
                    dim.Clear()


def _size(name: str, renamed: Mapping[str, str], steps: Mapping[str, tuple[str, int]]) -> str:
    if name in steps:
        symbol, step = steps[name]
        return f"({symbol}//{step})"
    return renamed.get(name, name)


def _product(
    factor: int, names: list[str], renamed: Mapping[str, str], steps: Mapping[str, tuple[str, int]]
) -> str:  # fmt: skip
    """`16*s34*s56` in the user's symbols: `height*width//64`. A divided size is a multiple of the divisor."""
    divisor = math.prod(steps[name][1] for name in names if name in steps)
    shared = math.gcd(factor, divisor)
    factor, divisor = factor // shared, divisor // shared
    symbols = [steps[name][0] if name in steps else renamed.get(name, name) for name in names]
    text = "*".join([*([str(factor)] if factor > 1 else []), *symbols])
    return f"{text}//{divisor}" if divisor > 1 else text


def name_outputs(
    proto: ModelProto, symbols: Mapping[str, Mapping[int, str | None]], sizes: Mapping[str, Mapping[int, int]]
) -> tuple[str, ...]:
    """Write the symbol of every dynamic output axis, and the size of every constant one, in place; returns corrections.

    A computed dynamic size keeps the exporter's expression, or gets a new name.
    """
    said = []
    inputs = {dim.dim_param for value in proto.graph.input for dim in value.type.tensor_type.shape.dim}
    for value in proto.graph.output:
        dims = value.type.tensor_type.shape.dim
        for at, symbol in symbols.get(value.name, {}).items():
            if at >= len(dims):
                continue
            dim = dims[at]
            if (
                _IDENTIFIER.fullmatch(dim.dim_param) is None
                and _IDENTIFIER.search(dim.dim_param) is not None
                and inputs.issuperset(set(_IDENTIFIER.findall(dim.dim_param)) - _FUNCTIONS)
            ):
                continue  # an expression: observed sizes may agree with the symbol where all of them share a divisor
            stated = str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param
            wanted = symbol or (
                dim.dim_param if dim.dim_param and not dim.HasField("dim_value") else f"{value.name}_{at}"
            )
            if stated != wanted:
                if dim.HasField("dim_value"):
                    said.append(f"axis {at} of the output `{value.name}` was declared as {stated} and is `{wanted}`")
                dim.dim_param = wanted
        for at, size in sizes.get(value.name, {}).items():
            if at < len(dims) and not dims[at].HasField("dim_value"):
                dims[at].dim_value = size
    return tuple(said)


def strip_stack_traces(proto: ModelProto) -> None:
    """Remove the exporter's debug metadata (stack traces with local paths); module paths stay."""
    for place in walk.nodes(proto):
        _clear_metadata(place.node)
    for graph in walk.graphs(proto):
        for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            del value.metadata_props[:]
        del graph.metadata_props[:]
    proto.doc_string = ""
    proto.graph.doc_string = ""


def _clear_metadata(node: NodeProto) -> None:
    name_module(node)
    kept = [item.value for item in node.metadata_props if item.key == KEY]
    del node.metadata_props[:]
    for value in kept:
        node.metadata_props.add(key=KEY, value=value)
    node.doc_string = ""
