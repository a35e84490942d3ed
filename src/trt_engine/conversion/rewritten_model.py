"""A model that is written again in another form, compared with what it was before it takes its place."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from trt_engine.equivalence.pair import CannotRun, EquivalenceChecker, EquivalenceResult, NotEquivalent
from trt_engine.errors import ModelError, TrtEngineError
from trt_engine.graph import constants, external_data, symbolic_shapes
from trt_engine.graph.edit_graph import inline_functions, make_names_unique
from trt_engine.graph.load import check_operators, open_model, read_graph, read_proto
from trt_engine.graph.module_paths import carry_module_paths
from trt_engine.model import Model

log = logging.getLogger(__name__)

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
        work = inline_functions(deepcopy(self.before))
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
        make_names_unique(proto)
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
