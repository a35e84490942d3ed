"""Whether the rows of a batch are independent: row i of a batch equals that row in another batch.

A dependency shows when rows change their places and their neighbours: half of the rows move, and the others are replaced
by rows of another distribution. Equal distributions have nearly equal means and maxima.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_engine.arrayfiles import Array
from trt_engine.config.profiles import Profile
from trt_engine.equivalence.parity import perturb_feeds
from trt_engine.equivalence.sorted_outputs import compare_outputs
from trt_engine.equivalence.tolerance import Tolerance
from trt_engine.errors import MemoryExhausted, ModelError, TrtEngineError
from trt_engine.records.parity import OutputError
from trt_engine.runtime.feeds import random_feeds
from trt_engine.tensors import Shape, Signature, Tensors, format_shape

log = logging.getLogger(__name__)

Run = Callable[[Tensors], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class BatchAxes:
    """Where the batch is in each input and output."""

    inputs: dict[str, int]
    outputs: dict[str, int]
    """Outputs that have it; a fixed batch is the first dimension."""

    @classmethod
    def of(cls, signature: Signature) -> BatchAxes:
        """The axes by the batch's symbol; the first dimension of a model whose batch is fixed."""
        inputs, outputs = (
            {spec.name: axes[0] for spec in side if (axes := signature.batch_axes(spec))}
            for side in (signature.inputs, signature.outputs)
        )
        if not inputs and all(spec.shape for spec in signature.inputs):
            sizes = {spec.shape[0] for spec in signature.inputs}
            if len(sizes) == 1:
                size = sizes.pop()
                inputs = {spec.name: 0 for spec in signature.inputs}
                outputs = {spec.name: 0 for spec in signature.outputs if spec.shape[:1] in ((size,), (-1,))}
        return cls(inputs, outputs)

    def rows(self, shapes: Mapping[str, Shape]) -> int | None:
        """The rows of inputs of these shapes; None where none of them has a batch, or the inputs differ in it."""
        sizes = {shapes[name][axis] for name, axis in self.inputs.items()}
        return sizes.pop() if len(sizes) == 1 else None


def wrong_rows(signature: Signature, shapes: Mapping[str, Shape], outputs: Mapping[str, Any]) -> str | None:
    """Why requests cannot be joined by the sizes of the outputs; None where each has a row for each input row.

    `ModelError` for an output that is declared with the batch's symbol and has another size.
    """
    axes = BatchAxes.of(signature)
    rows = axes.rows(shapes)
    if rows is None:
        return None
    found = None
    for spec in signature.outputs:
        shape = tuple(np.shape(outputs[spec.name]))
        axis = axes.outputs.get(spec.name)
        if shape[axis : axis + 1] == (rows,) if axis is not None else rows == 1:
            continue
        reason = f"output `{spec.name}` is {format_shape(shape)} for {rows} row{'s' if rows > 1 else ''} of input"
        if axis is not None and spec.symbols and spec.symbols[axis] == signature.batch_symbol is not None:
            given = ", ".join(f"`{name}` {format_shape(shape)}" for name, shape in shapes.items())
            raise ModelError(
                f"{reason} ({given}), and is declared as {spec.format_symbolic()}: the model does not keep the batch",
                hint="export it again with sizes taken from the input (`x.shape[0]`), or build it without `--batch`; "
                "`trt-engine lint` names the step",
            )
        found = found or reason
    return found


def row_dependence(
    run: Run,
    signature: Signature,
    feeds: Tensors,
    outputs: Mapping[str, Any],
    ranked: Collection[str],
    tolerance: Tolerance,
) -> str | None:
    """Why the rows of a batch depend on each other; None where they do not, or where that cannot be judged.

    `outputs` are those of `feeds`. `run` makes one or two runs more, and two again where rows seem to differ.
    """
    axes = BatchAxes.of(signature)
    rows = axes.rows({name: tuple(np.shape(value)) for name, value in feeds.items()})
    if rows is None or rows < 2 or not axes.outputs:
        return None
    ends = np.arange(rows - rows // 2)
    moves = [(ends, ends + rows // 2)]  # the first half to the end
    if rows > 2:  # and every second row to the next place: between them no two rows stay beside each other everywhere
        moves.append((np.arange(0, rows, 2), (np.arange(0, rows, 2) + 1) % rows))
    for kept, places in moves:
        made = _run_among_others(run, signature, axes, feeds, kept, places)
        if made is None:
            continue
        for name in axes.outputs:
            one, two = (np.shape(side[name]) for side in (outputs, made))
            if one != two:
                return f"output `{name}` is {format_shape(one)} beside some rows and {format_shape(two)} beside others"
        before = _rows_of(outputs, axes, kept)
        errors = compare_outputs(_rows_of(made, axes, places), before, ranked, tolerance)
        if all(tolerance.accepts(error) for error in errors.values()):
            continue
        sensitivity = _own_sensitivity(run, signature, axes, feeds, before, kept, ranked, tolerance)
        for name, error in errors.items() if sensitivity is not None else ():
            if (objection := tolerance.violation(error, (sensitivity or {}).get(name))) is not None:
                return f"a row of output `{name}` depends on the other rows of its batch: {objection}"
    return None


def _own_sensitivity(
    run: Run,
    signature: Signature,
    axes: BatchAxes,
    feeds: Tensors,
    before: Mapping[str, Any],
    kept: Array,
    ranked: Collection[str],
    tolerance: Tolerance,
) -> dict[str, OutputError] | None:
    """How far these rows move when the input is changed by the roundoff; None where two equal runs differ, as with random
    numbers."""
    try:
        again = compare_outputs(_rows_of(run(feeds), axes, kept), before, ranked, tolerance)
        moved = _rows_of(run(perturb_feeds(feeds, signature, tolerance.roundoff)), axes, kept)
    except MemoryExhausted:
        raise
    except TrtEngineError as error:
        log.debug("whether rows are independent is not judged: %s", error.message)
        return None
    if not all(tolerance.accepts(error) for error in again.values()):
        log.debug("whether rows are independent is not judged: two runs on the same input differ")
        return None
    return compare_outputs(moved, before, ranked, tolerance)


def _run_among_others(
    run: Run, signature: Signature, axes: BatchAxes, feeds: Tensors, kept: Array, places: Array
) -> Mapping[str, Any] | None:
    """Outputs with the rows `kept` at `places` among other rows; None where the model does not run on any others."""
    for shifted in (True, False):  # numbers of another distribution may be what the model does not take
        try:
            return run(_moved_feeds(signature, axes, feeds, kept, places, shifted=shifted))
        except MemoryExhausted:
            raise
        except TrtEngineError as error:
            log.debug("the model does not run on other rows: %s", error.message)
    return None


def _rows_of(outputs: Mapping[str, Any], axes: BatchAxes, rows: Array) -> dict[str, Array]:
    return {name: np.take(np.asarray(outputs[name]), rows, axis=axis) for name, axis in axes.outputs.items()}


def _moved_feeds(
    signature: Signature, axes: BatchAxes, feeds: Tensors, kept: Array, places: Array, *, shifted: bool
) -> dict[str, Array]:
    """The rows `kept` at `places`, among other ones; inputs without the batch as they were."""
    others = random_feeds(signature, {name: tuple(np.shape(value)) for name, value in feeds.items()}, 1)
    made = {}
    for spec in signature.inputs:
        own = np.asarray(feeds[spec.name])
        if (axis := axes.inputs.get(spec.name)) is None:
            made[spec.name] = own
            continue
        other = own if spec.role or spec.choices else others[spec.name]
        if shifted and other is not own and (own.dtype.kind == "f" or spec.dtype == "bfloat16"):
            other = (other.astype(np.float32) * 4 - 1.5).astype(own.dtype)
        elif shifted and other is not own and own.dtype == np.uint8:
            other = np.uint8(255) - other
        moved = np.moveaxis(np.array(other), axis, 0)
        moved[places] = np.moveaxis(own, axis, 0)[kept]
        made[spec.name] = np.ascontiguousarray(np.moveaxis(moved, 0, axis))
    return made


def profile_shapes(profile: Profile) -> list[dict[str, Shape]]:
    """The smallest, usual and largest shapes of a profile, each once."""
    found: list[dict[str, Shape]] = []
    for which in range(3):
        shapes = {name: span.shapes[which] for name, span in profile.ranges.items()}
        if shapes not in found:
            found.append(shapes)
    return found
