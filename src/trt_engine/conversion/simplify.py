"""A smaller graph that computes the same: shapes inferred, constants folded, equals made one, what is dead removed.

Our own pass comes first and changes no number; onnxslim, where it is installed, goes on from there and fuses. What comes out
is run against the model in ONNX Runtime; what is not the same is thrown away, and the model stays as it was.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from trt_engine.conversion import outside, rewriting
from trt_engine.conversion.proving import Apart, Proof, Prover, Unprovable
from trt_engine.environment import version_of
from trt_engine.errors import ModelError, TrtEngineError
from trt_engine.files import staging_folder
from trt_engine.graph import walk
from trt_engine.graph.census import is_dequantize, is_quantize
from trt_engine.graph.load import check, open_model, read_proto
from trt_engine.graph.module_paths import carry
from trt_engine.graph.names import unique_names
from trt_engine.graph.trace import trace
from trt_engine.model import Model
from trt_engine.records import SimplifyReport

__all__ = ["refuse_optimised", "same_signature", "simplify"]

log = logging.getLogger(__name__)

_CHILD = Path(__file__).with_name("slim_child.py")
_HIDDEN_FROM = 1 << 16
"""Bytes of a weight from which it is hidden, in a model whose weights are too many for one message."""
_READ_BY_ALL = 10
"""IR version that every ONNX Runtime we allow and TensorRT's parser read."""


def simplify(
    source: Path | str,
    out: Path | str,
    *,
    inputs: Mapping[str, Any] | None = None,
    tolerance: float = 1e-5,
    timeout_s: float = 600.0,
) -> SimplifyReport:
    """Write the model at `source` to `out`, simplified; `out` may be `source`. What was there is replaced.

    `inputs` gives a shape or an array for inputs whose open sizes cannot be guessed. Both models are run at two sets of
    sizes, and no output may be off by more than `tolerance` of its largest value (or what FP16 and Q/DQ graphs can keep).
    A model that cannot be simplified, run, or proved the same is written as it was: `by` is None then, and `notes` say why.
    """
    started = time.monotonic()
    model = open_model(source)
    refuse_optimised(model, "simplified")
    target = outside.writable(Path(out), model)
    proto = read_proto(model.path)
    check(model, proto)
    job = _Job(model, proto, target, timeout_s, [])
    try:
        prover = Prover(model, inputs, tolerance)
    except Unprovable as error:
        return job.left_alone(str(error), tolerance, started)
    job.prepare(prover)
    for candidate in job.candidates():
        try:
            return job.kept(candidate, prover, started)
        except Apart as error:
            job.say(f"what {candidate.by} made was thrown away: {error}")
    return job.left_alone("", prover.tolerance, started)


def refuse_optimised(model: Model, done: str) -> None:
    """`ModelError` for a graph that ONNX Runtime wrote for one machine."""
    if model.optimised:
        raise ModelError(
            f"`{model.path}` was optimised by ONNX Runtime for one machine ({model.optimised}) and cannot be {done}",
            hint="give the model it was made from",
        )


def same_signature(draft: Path, model: Model, before: ModelProto) -> None:
    """`Apart` unless inputs and outputs have the names, types, sizes and symbols they had.

    Of an output whose rank `before` does not state, name and type are enough.
    """
    made = open_model(draft).signature
    stated = {item.name for item in before.graph.output if item.type.tensor_type.HasField("shape")}
    if made.inputs != model.signature.inputs:
        raise Apart(
            f"its inputs are {', '.join(map(str, made.inputs))}, and were {', '.join(map(str, model.signature.inputs))}"
        )
    for now, then in zip(made.outputs, model.signature.outputs, strict=False):
        if (now.name, now.dtype) != (then.name, then.dtype) or (then.name in stated and now != then):
            raise Apart(f"its output `{then}` is `{now}` now")
    if len(made.outputs) != len(model.signature.outputs):
        raise Apart(f"it has {len(made.outputs)} outputs, and had {len(model.signature.outputs)}")


@dataclass(slots=True)
class _Candidate:
    """One simplified graph, not proved yet."""

    by: Literal["onnxslim", "trt-engine"]
    proto: ModelProto


@dataclass(slots=True)
class _Job:
    """One model on its way."""

    model: Model
    proto: ModelProto
    target: Path
    timeout_s: float
    notes: list[str]
    counts: rewriting.Counts | None = None
    inlined: int = 0
    hidden: dict[str, TensorProto] | None = None
    work: ModelProto | None = None
    watched: tuple[str, ...] = ()
    random: bool = False

    def say(self, note: str) -> None:
        self.notes.append(note)
        log.warning("%s", note)

    # -------------------------------------------------------------------------------------------- the graph

    def prepare(self, prover: Prover) -> None:
        """The graph as our own pass leaves it, its quantised and its many weights hidden."""
        folder = self.model.path.parent
        work = ModelProto()
        work.CopyFrom(self.proto)
        work, self.inlined = rewriting.inline(work)
        rewriting.inputs_without_initializers(work)
        rewriting.constants_as_initializers(work)
        unique_names(work)
        shared = rewriting.share_equal_weights(work, folder)
        self.hidden = outside.hide(work, rewriting.quantised_weights(work) | _too_many(work))
        if sum(outside.nbytes_of(item) for item in walk.tensors(work)) <= outside.INLINE_UP_TO:
            outside.load(work, folder)
        self.random, self.watched = prover.random, tuple(prover.watched)
        self.counts = rewriting.rewrite(work, folder, keep=self.watched)
        self.counts.weights_shared += shared
        self.notes.extend(dict.fromkeys(self.counts.notes))
        self.work = work

    def candidates(self) -> list[_Candidate]:
        """What may take the model's place, the smallest first."""
        assert self.work is not None
        found = []
        if (slimmed := self.slimmed(self.work)) is not None:
            found.append(_Candidate("onnxslim", slimmed))
        found.append(_Candidate("trt-engine", self.work))
        # of two as small, the one that changed no number
        return sorted(found, key=lambda item: (sum(1 for _ in walk.nodes(item.proto)), item.by == "onnxslim"))

    def slimmed(self, work: ModelProto) -> ModelProto | None:
        """What onnxslim makes of it; None where it is missing, must not, or fails."""
        if find_spec("onnxslim") is None:
            self.notes.append("onnxslim is not installed (`pip install 'trt-engine[simplify]'`): our own pass alone")
            return None
        if self.random:
            self.notes.append("onnxslim was left out: it would make random numbers constant")
            return None
        if any(item.data_location == TensorProto.EXTERNAL for item in walk.tensors(work)):
            self.notes.append("onnxslim was left out: weights inside If, Loop or Scan are too many for one file")
            return None
        given = ModelProto()
        given.CopyFrom(work)
        facts = trace(given, {}).facts if self.watched else {}
        given.graph.output.extend(
            helper.make_tensor_value_info(name, facts[name].elem, None)
            for name in self.watched
            if name in facts and name not in {item.name for item in given.graph.output}
        )
        skipped = "subexpression_elimination" if _quantised(work) else ""
        with staging_folder(self.target) as folder:
            before, after = folder / "before.onnx", folder / "after.onnx"
            before.write_bytes(given.SerializeToString())
            if (said := self.run_onnxslim(before, after, skipped)) is not None:
                self.say(said)
                return None
            try:
                return read_proto(after)
            except TrtEngineError as error:
                self.say(f"what onnxslim wrote cannot be read: {error.message}")
                return None

    def run_onnxslim(self, before: Path, after: Path, skipped: str) -> str | None:
        """Run it in its own process; what went wrong, or None."""
        command = [sys.executable, "-P", str(_CHILD.absolute()), before.name, after.name, skipped]  # where it runs
        environment = {**os.environ, "ONNXSLIM_AUTO_MERGE": "0"}  # with it, symbols that only might be equal become one
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
            last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no word")
            return f"onnxslim {version_of('onnxslim')} failed (exit code {done.returncode}): {last[:200]}"
        return None

    # -------------------------------------------------------------------------------------------- the file

    def finished(self, made: ModelProto) -> ModelProto:
        """The candidate as a model of its own: weights shown, inputs, outputs and what the exporter wrote as they were."""
        proto = ModelProto()
        proto.CopyFrom(made)
        outside.show(proto, self.hidden or {})
        restore(proto, self.proto, set(self.watched))
        unique_names(proto)
        proto.ir_version = ir_version_for(proto)
        return proto

    def kept(self, candidate: _Candidate, prover: Prover, started: float) -> SimplifyReport:
        """The report of this candidate, in its place; `Apart` when it is not the same model."""
        proto = self.finished(candidate.proto)
        rewriting.with_shapes(proto)
        self.keeps_quantisation(proto)
        proofs: list[Proof] = []
        nbytes, weights = outside.save(
            proto, self.target, self.model, outside=bool(self.model.external),
            prove=self.proving(candidate, prover, proofs),
        )  # fmt: skip
        return self.report(candidate.by, proto, nbytes, weights, proofs[0], proofs[0].tolerance, started)

    def proving(self, candidate: _Candidate, prover: Prover, proofs: list[Proof]) -> Callable[[Path], None]:
        def prove(draft: Path) -> None:
            try:
                same_signature(draft, self.model, self.proto)
                check(draft)
            except TrtEngineError as error:
                raise Apart(error.message) from error
            proofs.append(prover.measure(draft))

        return prove

    def keeps_quantisation(self, proto: ModelProto) -> None:
        assert self.work is not None
        wanted, found = _quantised(self.work), _quantised(proto)
        if wanted != found:
            raise Apart(f"it has {found} Q/DQ nodes, and there are {wanted} that something reads")

    def left_alone(self, why: str, tolerance: float, started: float) -> SimplifyReport:
        """The report of a model that stays as it was, at `out` too."""
        if why:
            self.say(why)
        nbytes, weights = outside.copy(self.model, self.target)
        return self.report(None, self.proto, nbytes, weights, None, tolerance, started)

    def report(
        self,
        by: Literal["onnxslim", "trt-engine"] | None,
        after: ModelProto,
        nbytes: int,
        weights: Path | None,
        proof: Proof | None,
        tolerance: float,
        started: float,
    ) -> SimplifyReport:
        counts = self.counts if by is not None and self.counts is not None else rewriting.Counts()
        one, two = _operators(self.proto), _operators(after)
        artifacts = {"model": str(self.target)} | ({"weights": str(weights)} if weights is not None else {})
        return SimplifyReport(
            model=str(self.model.path),
            out=str(self.target),
            by=by,
            nodes_before=one.total(),
            nodes_after=two.total(),
            operators_gone=dict(sorted((one - two).items())),
            operators_new=dict(sorted((two - one).items())),
            constants_folded=counts.folded,
            nodes_shared=counts.shared,
            weights_shared=counts.weights_shared,
            functions_inlined=self.inlined if by is not None else 0,
            nbytes_before=self.model.nbytes,
            nbytes_after=nbytes,
            largest=proof.largest if proof is not None else None,
            tolerance=tolerance,
            shapes=proof.shapes if proof is not None else (),
            unchecked=proof.unchecked if proof is not None else (),
            notes=tuple(self.notes),
            artifacts=artifacts,
            seconds=time.monotonic() - started,
        )


def restore(proto: ModelProto, before: ModelProto, unwanted: set[str]) -> None:
    """Inputs, outputs, modules and the exporter's words of the model before, in place; `unwanted` outputs were ours alone.

    An output whose rank the model before did not state keeps what is known of it now.
    """
    stored = {item.name for item in before.graph.initializer}
    stated = {item.name: item for item in proto.graph.output if item.name not in unwanted}
    wanted = [item.name for item in before.graph.output]
    if set(stated) != set(wanted):
        raise Apart(f"its outputs are {', '.join(stated)}, and were {', '.join(wanted)}")
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
    carry(proto, before)


def ir_version_for(proto: ModelProto) -> int:
    """The IR version that the model's operator sets need, and no later one than every reader takes."""
    needed = int(helper.find_min_ir_version_for(list(proto.opset_import), ignore_unknown=True))
    return max(needed, min(int(proto.ir_version), _READ_BY_ALL), 4)


def _too_many(proto: ModelProto) -> set[str]:
    """Weights to be hidden so that the others fit one message; none where all do."""
    left, chosen, smallest = outside.total_nbytes(proto), set[str](), _HIDDEN_FROM
    while left > outside.INLINE_UP_TO and smallest:
        for tensor in proto.graph.initializer:
            if tensor.name not in chosen and (nbytes := outside.nbytes_of(tensor)) >= smallest:
                chosen.add(tensor.name)
                left -= nbytes
        smallest //= 8
    return chosen


def _quantised(proto: ModelProto) -> int:
    return sum(is_quantize(place.node) or is_dequantize(place.node) for place in walk.nodes(proto))


def _operators(proto: ModelProto) -> Counter[str]:
    return Counter(
        f"{place.node.domain}::{place.node.op_type}" if walk.domain_of(place.node) else place.node.op_type
        for place in walk.nodes(proto)
    )
