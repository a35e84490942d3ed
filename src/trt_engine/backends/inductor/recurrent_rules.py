"""LSTM, GRU and RNN: PyTorch's own where it has the form, else step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nn

from trt_engine.backends.inductor.onnx_module import Call, Unsupported

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "relu": torch.relu, "softsign": nn.softsign, "softplus": nn.softplus,
}  # fmt: skip
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


@dataclass(frozen=True, slots=True)
class _Cell:
    """One direction: weights (gates x hidden rows), the two biases, activations, what the inputs of its gates are clipped to
    (not of the last of LSTM, as in ONNX Runtime)."""

    w: Tensor
    r: Tensor
    w_bias: Tensor
    r_bias: Tensor
    activations: list[str]
    clip: float | None

    def apply(self, at: int, x: Tensor) -> Tensor:
        return _ACTIVATIONS[self.activations[at]](x if self.clip is None else x.clamp(-self.clip, self.clip))


State = list[Tensor]
Step = Callable[[Call, _Cell, Tensor, State], State]


def _lstm_step(call: Call, cell: _Cell, x: Tensor, state: State) -> State:
    h, c = state
    i, o, f, g = (x + nn.linear(h, cell.r, cell.r_bias)).chunk(4, -1)
    i, g = cell.apply(0, i), cell.apply(1, g)
    f = 1 - i if call.attribute("input_forget") else cell.apply(0, f)
    c = f * c + i * g
    return [cell.apply(0, o) * _ACTIVATIONS[cell.activations[2]](c), c]


def _gru_step(call: Call, cell: _Cell, x: Tensor, state: State) -> State:
    (h,), size = state, state[0].shape[-1]
    (z, r, g), (r_z, r_r, r_h) = x.chunk(3, -1), cell.r.split(size)
    b_z, b_r, b_h = cell.r_bias.split(size)
    z, r = cell.apply(0, z + nn.linear(h, r_z, b_z)), cell.apply(0, r + nn.linear(h, r_r, b_r))
    late = call.attribute("linear_before_reset")
    g = cell.apply(1, g + (r * nn.linear(h, r_h, b_h) if late else nn.linear(r * h, r_h, b_h)))
    return [(1 - z) * g + z * h]


def _rnn_step(call: Call, cell: _Cell, x: Tensor, state: State) -> State:
    return [cell.apply(0, x + nn.linear(state[0], cell.r, cell.r_bias))]


def lstm(call: Call) -> list[Tensor]:
    if call.has(7):
        raise Unsupported("its peepholes")
    return _recurrent(call, 4, _lstm_step, ["sigmoid", "tanh", "tanh"], _library_lstm, cell_state=True)


def gru(call: Call) -> list[Tensor]:
    library = _library_gru if call.attribute("linear_before_reset") else None
    return _recurrent(call, 3, _gru_step, ["sigmoid", "tanh"], library)


def rnn(call: Call) -> list[Tensor]:
    return _recurrent(call, 1, _rnn_step, ["tanh"], _library_rnn)


_Library = Callable[[Tensor, State, list[Tensor]], Any]


def _library_lstm(x: Tensor, state: State, flat: list[Tensor]) -> Any:
    return torch.lstm(x, state, flat, True, 1, 0.0, False, len(flat) > 4, False)


def _library_gru(x: Tensor, state: State, flat: list[Tensor]) -> Any:
    return torch.gru(x, state[0], flat, True, 1, 0.0, False, len(flat) > 4, False)


def _library_rnn(x: Tensor, state: State, flat: list[Tensor]) -> Any:
    return torch.rnn_tanh(x, state[0], flat, True, 1, 0.0, False, len(flat) > 4, False)


_ORDER = {4: [0, 2, 3, 1], 3: [1, 0, 2], 1: [0]}
"""Gates in PyTorch's order by their places in ONNX's: i, f, c, o of i, o, f, c; r, z, n of z, r, h."""


def _recurrent(
    call: Call, gates: int, step: Step, usual: list[str], library: _Library | None, *, cell_state: bool = False
) -> list[Tensor]:
    x, w, r, bias, lengths = call.tensor(0), call.tensor(1), call.tensor(2), call.optional(3), call.optional(4)
    ways, hidden = _DIRECTIONS[call.attribute("direction")], r.shape[-1]
    clip, batch_first = call.attribute("clip"), bool(call.attribute("layout"))
    given = call.attributes.get("activations")
    names = [item.decode().lower() for item in given] if given is not None else usual * len(ways)
    if unknown := next((name for name in names if name not in _ACTIVATIONS), None):
        raise Unsupported(f"its activation `{unknown}`")
    x = x.transpose(0, 1) if batch_first else x
    zero = x.new_zeros(len(ways), x.shape[1], hidden)
    state = [call.tensor(at) if call.has(at) else None for at in ((5, 6) if cell_state else (5,))]
    start = [zero if item is None else item.transpose(0, 1) if batch_first else item for item in state]
    start = [item.contiguous() for item in start]  # cuDNN takes no expanded ones
    cells = []
    for at in range(len(ways)):
        w_bias, r_bias = bias[at].chunk(2) if bias is not None else 2 * [x.new_zeros(gates * hidden)]
        cells.append(_Cell(w[at], r[at], w_bias, r_bias, names[at * len(usual) : (at + 1) * len(usual)], clip))
    plain = names == usual * len(ways) and clip is None and lengths is None and not call.attributes.get("input_forget")
    if plain and library is not None and ways != (True,):
        y, *last = library(x, start, [item for cell in cells for item in _reordered(cell, gates, hidden)])
        y = y.reshape(y.shape[0], y.shape[1], len(ways), hidden).transpose(1, 2)
    elif plain and library is not None:
        y, *last = library(x.flip(0), start, _reordered(cells[0], gates, hidden))
        y = y.flip(0).unsqueeze(1)
    else:
        y, last = _unrolled(call, step, x, cells, ways, start, lengths)
    if batch_first:
        return [y.permute(2, 0, 1, 3), *(item.transpose(0, 1) for item in last)]
    return [y, *last]


def _reordered(cell: _Cell, gates: int, hidden: int) -> list[Tensor]:
    order = torch.tensor(_ORDER[gates], device=cell.w.device)
    return [
        item.reshape(gates, hidden, -1).index_select(0, order).reshape(gates * hidden, *item.shape[1:])
        for item in (cell.w, cell.r, cell.w_bias, cell.r_bias)
    ]


def _unrolled(
    call: Call, step: Step, x: Tensor, cells: list[_Cell], ways: tuple[bool, ...], start: State, lengths: Tensor | None
) -> tuple[Tensor, State]:
    """Y (steps x directions x batch x hidden) and the last states, each step written out; a sequence that has ended keeps
    its state."""
    steps: Any = x.shape[0]
    if not isinstance(steps, int):
        raise Unsupported("its number of steps varies, in a form that PyTorch has no operator for")
    rows, last = [], []
    for at, (cell, backwards) in enumerate(zip(cells, ways, strict=True)):
        state, found = [item[at] for item in start], [x.new_zeros(())] * steps
        projected = nn.linear(x, cell.w, cell.w_bias)
        for number in reversed(range(steps)) if backwards else range(steps):
            made = step(call, cell, projected[number], state)
            if lengths is None:
                state, found[number] = made, made[0]
                continue
            runs = (lengths > number).reshape(-1, 1)
            state = [torch.where(runs, new, old) for new, old in zip(made, state, strict=True)]
            found[number] = torch.where(runs, made[0], torch.zeros_like(made[0]))
        rows.append(torch.stack(found))
        last.append(state)
    return torch.stack(rows, 1), [torch.stack(items) for items in zip(*last, strict=True)]
