"""Simplifies a graph: shapes inferred, constants folded, equal parts merged, dead ones removed.

The built-in pass, which changes no number, runs first; onnxslim, if installed, continues with fusions. The result is
compared with the model in ONNX Runtime; if it differs it is discarded and the model stays unchanged.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from trt_engine.atomic_io import staging_folder
from trt_engine.conversion import rewrite
from trt_engine.environment import distribution_version
from trt_engine.equivalence.pair import CannotRun, EquivalenceChecker, EquivalenceResult, NotEquivalent
from trt_engine.errors import ModelError, TrtEngineError
from trt_engine.format import library_reason
from trt_engine.graph import constants, external_data, symbolic_shapes, walk
from trt_engine.graph.dtype_breakdown import is_dequantize, is_quantize
from trt_engine.graph.edit_graph import inline_functions, make_names_unique
from trt_engine.graph.load import check_operators, open_model, read_graph, read_proto
from trt_engine.graph.module_paths import carry_module_paths
from trt_engine.graph.shape_inference import trace
from trt_engine.model import Model
from trt_engine.records.convert import SimplifyReport

log = logging.getLogger(__name__)

_WORKER = Path(__file__).with_name("onnxslim_worker.py")
_MIN_DETACHED_NBYTES = 1 << 16
"""Bytes from which a weight is detached, in a model whose weights exceed one message."""
_COMMON_IR_VERSION = 10
"""IR version readable by every supported ONNX Runtime and TensorRT's parser."""


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
    started = time.monotonic()
    model = open_model(source)
    reject_optimised(model, "simplified")
    target = external_data.check_target(Path(out), model)
    proto = read_proto(model.path)
    check_operators(model.graph, model.path)
    job = _Simplification(model, proto, target, timeout_s, [])
    try:
        prover = EquivalenceChecker(model, inputs, tolerance)
    except CannotRun as error:
        return job.leave_unchanged(str(error), tolerance, started)
    job.prepare(prover)
    for candidate in job.candidates():
        try:
            return job.publish(candidate, prover, started)
        except NotEquivalent as error:
            job.warn(f"the result of {candidate.by} was discarded: {error}")
    return job.leave_unchanged("", prover.tolerance, started)


def reject_optimised(model: Model, done: str) -> None:
    """`ModelError` for a graph that ONNX Runtime optimised for one machine."""
    if model.optimised:
        raise ModelError(
            f"`{model.path}` was optimised by ONNX Runtime for one machine ({model.optimised}) and cannot be {done}",
            hint="give the model it was made from",
        )


def check_same_signature(draft: Path, model: Model, before: ModelProto) -> None:
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


@dataclass(slots=True)
class _Candidate:
    """A simplified graph, not yet verified."""

    by: Literal["onnxslim", "trt-engine"]
    proto: ModelProto


@dataclass(slots=True)
class _Simplification:
    """State of one simplification."""

    model: Model
    proto: ModelProto
    target: Path
    timeout_s: float
    notes: list[str]
    counts: rewrite.RewriteCounts | None = None
    inlined: int = 0
    detached: dict[str, TensorProto] | None = None
    work: ModelProto | None = None
    internal_tensors: tuple[str, ...] = ()
    random: bool = False

    def warn(self, note: str) -> None:
        self.notes.append(note)
        log.warning("%s", note)

    # -------------------------------------------------------------------------------------------- the graph

    def prepare(self, prover: EquivalenceChecker) -> None:
        """Run the built-in pass, with quantised and excess weights detached."""
        folder = self.model.path.parent
        work = ModelProto()
        work.CopyFrom(self.proto)
        work, self.inlined = inline_functions(work), len(work.functions)
        constants.drop_initializer_inputs(work)
        constants.constants_as_initializers(work)
        make_names_unique(work)
        shared = rewrite.share_equal_weights(work, folder)
        self.detached = external_data.detach_weights(work, constants.quantised_weights(work) | _excess_weights(work))
        if sum(external_data.nbytes_of(item) for item in walk.tensors(work)) <= external_data.MAX_INLINE_NBYTES:
            external_data.load_external(work, folder)
        self.random, self.internal_tensors = prover.random, tuple(prover.internal_tensors)
        self.counts = rewrite.rewrite(work, folder, keep=self.internal_tensors)
        self.counts.weights_shared += shared
        self.notes.extend(dict.fromkeys(self.counts.notes))
        self.work = work

    def candidates(self) -> list[_Candidate]:
        """Simplified graphs to try, smallest first."""
        assert self.work is not None
        found = []
        if (slimmed := self.onnxslim_candidate(self.work)) is not None:
            found.append(_Candidate("onnxslim", slimmed))
        found.append(_Candidate("trt-engine", self.work))
        # if equally small, prefer the one that changed no number
        return sorted(found, key=lambda item: (sum(1 for _ in walk.nodes(item.proto)), item.by == "onnxslim"))

    def onnxslim_candidate(self, work: ModelProto) -> ModelProto | None:
        """onnxslim's result; None if onnxslim is missing, not applicable, or fails."""
        if find_spec("onnxslim") is None:
            self.notes.append(
                "onnxslim is not installed (`pip install 'trt-engine[simplify]'`): the built-in pass runs alone"
            )
            return None
        if self.random:
            self.notes.append("onnxslim was skipped: it would make random numbers constant")
            return None
        if any(item.data_location == TensorProto.EXTERNAL for item in walk.tensors(work)):
            self.notes.append("onnxslim was skipped: weights inside If, Loop or Scan are too many for one file")
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
        with staging_folder(self.target) as folder:
            before, after = folder / "before.onnx", folder / "after.onnx"
            before.write_bytes(given.SerializeToString())
            if (said := self.run_onnxslim(before, after, skipped)) is not None:
                self.warn(said)
                return None
            try:
                return read_proto(after)
            except TrtEngineError as error:
                self.warn(f"the output of onnxslim cannot be read: {error.message}")
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

    def restore_model(self, made: ModelProto) -> ModelProto:
        """The candidate as a complete model: weights attached; inputs, outputs and metadata restored."""
        proto = ModelProto()
        proto.CopyFrom(made)
        external_data.attach_weights(proto, self.detached or {})
        restore_io(proto, self.proto, set(self.internal_tensors))
        make_names_unique(proto)
        proto.ir_version = ir_version_for(proto)
        return proto

    def publish(self, candidate: _Candidate, prover: EquivalenceChecker, started: float) -> SimplifyReport:
        """Verify and publish a candidate; returns its report. `NotEquivalent` if it differs."""
        proto = self.restore_model(candidate.proto)
        symbolic_shapes.write_inferred_shapes(proto)
        self.check_quantisation(proto)
        proofs: list[EquivalenceResult] = []

        def prove(draft: Path) -> None:
            try:
                check_same_signature(draft, self.model, self.proto)
                check_operators(read_graph(draft), draft)
            except TrtEngineError as error:
                raise NotEquivalent(error.message) from error
            proofs.append(prover.check(draft))

        written = external_data.save_model(
            proto, self.target, self.model, external=bool(self.model.external), check=prove
        )
        return self.report(candidate.by, proto, written, proofs[0], proofs[0].tolerance, started)

    def check_quantisation(self, proto: ModelProto) -> None:
        assert self.work is not None
        wanted, found = _count_qdq(self.work), _count_qdq(proto)
        if wanted != found:
            raise NotEquivalent(f"it has {found} Q/DQ nodes, and there are {wanted} that something reads")

    def leave_unchanged(self, why: str, tolerance: float, started: float) -> SimplifyReport:
        """Report of an unchanged model, which is copied to `out`."""
        if why:
            self.warn(why)
        written = external_data.copy_model(self.model, self.target)
        return self.report(None, self.proto, written, None, tolerance, started)

    def report(
        self,
        by: Literal["onnxslim", "trt-engine"] | None,
        after: ModelProto,
        written: tuple[int, Path | None],
        proof: EquivalenceResult | None,
        tolerance: float,
        started: float,
    ) -> SimplifyReport:
        counts = self.counts if by is not None and self.counts is not None else rewrite.RewriteCounts()
        one, two = _count_operators(self.proto), _count_operators(after)
        return SimplifyReport(
            **report_fields(self.model, self.target, written, proof, tolerance),
            simplifier=by,
            nodes_before=one.total(),
            nodes_after=two.total(),
            operators_removed=dict(sorted((one - two).items())),
            operators_added=dict(sorted((two - one).items())),
            constants_folded=counts.folded,
            nodes_deduplicated=counts.shared,
            weights_deduplicated=counts.weights_shared,
            functions_inlined=self.inlined if by is not None else 0,
            notes=tuple(self.notes),
            seconds=time.monotonic() - started,
        )


def report_fields(
    model: Model, target: Path, written: tuple[int, Path | None], proof: EquivalenceResult | None, tolerance: float
) -> dict[str, Any]:
    """Fields of every report of a rewritten model: its files, written as bytes and side file, and the comparison."""
    nbytes, weights = written
    return {
        "model": str(model.path),
        "out": str(target),
        "nbytes_before": model.nbytes,
        "nbytes_after": nbytes,
        "max_rel": proof.max_error if proof is not None else None,
        "tolerance": tolerance,
        "shapes": proof.shapes if proof is not None else (),
        "unchecked": proof.unchecked if proof is not None else (),
        "artifacts": {"model": str(target)} | ({"weights": str(weights)} if weights is not None else {}),
    }


def restore_io(proto: ModelProto, before: ModelProto, unwanted: set[str]) -> None:
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


def ir_version_for(proto: ModelProto) -> int:
    """IR version required by the model's opsets, at most the one every reader supports."""
    needed = int(helper.find_min_ir_version_for(list(proto.opset_import), ignore_unknown=True))
    return max(needed, min(int(proto.ir_version), _COMMON_IR_VERSION), 4)


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
