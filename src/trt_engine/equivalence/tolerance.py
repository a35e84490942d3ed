"""What two right implementations of one model may differ by, by the coarsest format the model computes in.

docs/compare.md ("Tolerances") derives the figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from onnx import ModelProto, NodeProto

from trt_engine.engine import Channel, OutputError
from trt_engine.graph import walk
from trt_engine.graph.census import is_dequantize, is_quantize

__all__ = ["DEAD", "LOST", "TOLERANCES", "Tolerance", "coarsest_format", "tolerance_of"]

LOST = 0.5
"""Noise over signal of a channel from which it is lost: 0.48 is a cosine of 0.9, 1 the channel replaced by its mean."""
DEAD = 0.1
"""Share left of a channel's variation below which it is dead, in every format."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest difference allowed."""

    limit: float
    """Of the worst channel, over its scale: the largest difference, or the RMS difference of a quantised model."""
    rms: bool = False
    replaced: float = 0.01
    """Rows of a model that sorts which may be others: those at the cut."""
    ties: bool = True
    """Whether rows that tie with the last may be others as well."""
    noise: float = LOST
    roundoff: float = 2.0**-24
    """Relative change of the input by which the sensitivity of a model is measured."""
    chosen: bool = False
    """The limit was given: it stands alone, whatever the model's sensitivity."""

    def judged(self, error: OutputError) -> float | None:
        """The figure that is judged by `limit`."""
        return error.rms_rel if self.rms else error.max_rel

    def objection(self, error: OutputError, sensitivity: OutputError | None = None) -> str | None:
        """Why the output is not within; None where it is. A model that itself moves by `sensitivity` is allowed more."""
        value = self.judged(error)
        if value is None or error.noise is None:
            return "was not compared channel by channel"
        limit, noise = self.limit, self.noise
        if sensitivity is not None and not self.chosen:
            limit = max(limit, min(_SENSITIVE * (self.judged(sensitivity) or 0.0), _MOST))
            noise = max(noise, _SENSITIVE * (sensitivity.noise or 0.0))
        if error.variation < DEAD:
            return f"{_place(error.dead_channel)}{error.variation:.2g} of its variation is left: the channel is dead"
        if not value <= limit:
            what = "RMS difference" if self.rms else "difference"
            return f"{_place(error.channel)}{what} {value:.3g} of the channel's scale, allowed is {limit:.3g}"
        if not error.noise <= noise:
            return f"{_place(error.noise_channel)}noise of {error.noise:.2g} of the signal, allowed is {noise:.2g}"
        return None

    def accepts(self, error: OutputError) -> bool:
        return self.objection(error) is None


_SENSITIVE, _MOST = 4.0, 0.5
"""Times its own sensitivity that a model may be off, and the most that this allows."""
_ROUNDINGS = 32
"""Units of roundoff that two implementations differ by at most, relative to the channel's largest value."""
TOLERANCES = {
    "fp32": Tolerance(1e-3),
    "tf32": Tolerance(_ROUNDINGS * 2.0**-11, roundoff=2.0**-11),
    "fp16": Tolerance(_ROUNDINGS * 2.0**-11, replaced=0.05, roundoff=2.0**-11),
    "bf16": Tolerance(_ROUNDINGS * 2.0**-8, replaced=0.05, roundoff=2.0**-8),
    "quantized": Tolerance(0.1, rms=True, replaced=0.10, roundoff=2.0**-16),
}
_FLOATS = ("fp32", "tf32", "fp16", "bf16")
_QUANTIZED = ("QLinear", "QGemm", "QAttention", "MatMulNBits", "MatMulInteger", "ConvInteger")


def tolerance_of(form: str, *, tf32: bool = False, chosen: float | None = None) -> Tolerance:
    """The tolerance of what `coarsest_format` found; `tf32` when FP32 is computed in that. A `chosen` limit stands alone."""
    usual = TOLERANCES["tf32" if tf32 and form == "fp32" else form]
    if chosen is None:
        return usual
    return replace(usual, limit=chosen, noise=math.inf, chosen=True)


def coarsest_format(proto: ModelProto, brought_to: str | None = None) -> str:
    """The coarsest rounding the model itself asks for, or what it is cast or quantised to before it is built."""
    if brought_to not in (None, *_FLOATS) or any(_is_quantized(place.node) for place in walk.nodes(proto)):
        return "quantized"
    values = (*proto.graph.input, *proto.graph.output)
    kinds = {tensor.data_type for tensor in walk.tensors(proto)} | {v.type.tensor_type.elem_type for v in values}
    if 16 in kinds or brought_to == "bf16":
        return "bf16"
    return "fp16" if 10 in kinds or brought_to == "fp16" else "fp32"


def _is_quantized(node: NodeProto) -> bool:
    """True for one half of a Q/DQ pair too: weights stored quantized have no QuantizeLinear."""
    return is_quantize(node) or is_dequantize(node) or node.op_type.startswith(_QUANTIZED)


def _place(channel: Channel | None) -> str:
    return f"{channel}: " if channel is not None else ""
