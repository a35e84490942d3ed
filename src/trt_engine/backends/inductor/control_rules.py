"""If and Loop whose condition and number of rounds are known when the graph is traced."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trt_engine.backends.inductor.onnx_module import Call, Scalars, Unsupported, Value
from trt_engine.backends.inductor.scalar_rules import known

_MAX_ROUNDS = 256
"""Most rounds of a Loop, which are written out."""


def branch(call: Call) -> list[Value]:
    return call.run("then_branch" if _condition(call.values[0]) else "else_branch")


def loop(call: Call) -> list[Value]:
    """Rounds one after the other; what they give a row of is stacked."""
    count: Any = call.number(0) if call.has(0) else _MAX_ROUNDS + 1
    if not isinstance(count, int):
        raise Unsupported("its number of rounds varies")
    runs = _condition(call.values[1]) if call.has(1) else True
    carried, at = list(call.values[2:]), 0
    rows: list[list[Value]] = [[] for _ in range(len(call.node.output) - len(carried))]
    while runs and at < count:
        if at == _MAX_ROUNDS:
            raise Unsupported(f"more than {_MAX_ROUNDS} rounds")
        index = Scalars(np.array(at, object), torch.int64)
        goes_on, *found = call.run("body", index, Scalars(np.array(runs, object), torch.bool), *carried)
        carried, given = found[: len(carried)], found[len(carried) :]
        for row, value in zip(rows, given, strict=True):
            row.append(value.tensor(call.device) if isinstance(value, Scalars) else value)
        runs, at = _condition(goes_on), at + 1
    if not all(rows):
        raise Unsupported("no round, whose rows have no known shape")
    return [*carried, *(torch.stack(row) for row in rows)]


def _condition(value: Value | None) -> bool:
    if not isinstance(value, Scalars):
        raise Unsupported("its condition depends on the data")
    return known(value.values.reshape(-1)[0])
