"""Tolerances between correct implementations of one model, by the coarsest dtype it computes in.

docs/compare.md ("Tolerances") derives the figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from onnx import ModelProto

from trt_engine.equivalence.output_range import output_ranges
from trt_engine.graph.dtype_breakdown import is_dequantize, is_quantize
from trt_engine.model import GraphIndex
from trt_engine.records.parity import Channel, OutputError, ParityLimits

MAX_NOISE = 0.5
"""Noise over signal of a channel from which it is lost: 0.48 is a cosine of 0.9, 1 the channel replaced by its mean."""
_MAX_FAR_SHARE = 0.03
"""Values far off from which an output is lost: of Gaussian noise 0.23 of the signal; of classes, one in 33 is another."""
DEAD_STD_RATIO = 0.1
"""Share left of a channel's variation below which it is dead, in every format."""
NO_FIGURE = 1e6
"""Sensitivity over scale that has no figure: rounding overflowed, or equal scores moved rows."""
ROUNDING = 2.0**-21
"""Difference over the range of a bounded function (Sigmoid) that its FP32 kernels have at most: 8 units of roundoff. In FP16
it is 8 steps of the smallest numbers too."""


def lost_text(error: OutputError) -> str | None:
    """What makes an output of a quantised model no longer that of the model, in words; None where it is."""
    if not (error.noise or 0.0) <= MAX_NOISE:
        return f"{error.noise_channel or 'the output'} differs by {error.noise:.2g} of its variation"
    if not error.far_share <= _MAX_FAR_SHARE:
        return f"{100 * error.far_share:.2g} % of its values differ by over half of its standard deviation"
    return None


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest difference allowed."""

    limit: float
    """Limit over the worst channel's scale: the largest difference, or the RMS difference of a quantised model."""
    use_rms: bool = False
    max_replaced_rows: float = 0.01
    """Rows of a model that sorts which may be others: those at the cut."""
    allow_ties: bool = True
    """Whether rows that tie with the last may be others as well."""
    noise: float = MAX_NOISE
    roundoff: float = 2.0**-24
    """Relative change of the input by which the sensitivity of a model is measured."""
    half: bool = False
    """It computes in FP16, whose smallest numbers are 6e-8 apart."""
    explicit: bool = False
    """The limit is explicit and not raised by the model's sensitivity."""
    ranges: Mapping[str, float] = field(default_factory=dict)
    """Outputs of bounded functions, with their ranges."""

    def for_graph(self, proto: ModelProto) -> Tolerance:
        """The same for the outputs of a graph: the rounding of the functions that made them does not count."""
        return replace(self, ranges=output_ranges(proto))

    def floor(self, name: str) -> float:
        """The difference of an output that is rounding, whatever its scale."""
        return ROUNDING * max(self.ranges.get(name, 0.0), float(self.half))

    def limit_for(self, sensitivity: OutputError | None) -> float:
        """The limit of a model that itself moves by `sensitivity`."""
        own = 0.0 if sensitivity is None or not self._raises(sensitivity) else self.metric_value(sensitivity) or 0.0
        return max(self.limit, min(_SENSITIVITY_FACTOR * own, _MAX_LIMIT))

    def _raises(self, sensitivity: OutputError) -> bool:
        """Whether a model that moves so is allowed more: not where equal scores give other rows."""
        tied = sensitivity.rows_moved and (self.metric_value(sensitivity) or 0.0) > NO_FIGURE
        return not (self.explicit or tied)

    def metric_value(self, error: OutputError) -> float | None:
        """The figure that is judged by `limit`."""
        return error.rms_rel if self.use_rms else error.max_rel

    def violation(self, error: OutputError, sensitivity: OutputError | None = None) -> str | None:
        """Why the output is not within; None where it is. A model that itself moves by `sensitivity` is allowed more."""
        value = self.metric_value(error)
        if value is None or error.noise is None:
            return "was not compared channel by channel"
        limit, noise = self.limit_for(sensitivity), self.noise
        if sensitivity is not None and self._raises(sensitivity):
            noise = max(noise, _SENSITIVITY_FACTOR * (sensitivity.noise or 0.0))
        if error.std_ratio < DEAD_STD_RATIO:
            where = _channel_text(error.std_ratio_channel)
            return f"{where}{error.std_ratio:.2g} of its variation is left: the channel is dead"
        if not value <= limit:
            what = "RMS difference" if self.use_rms else "difference"
            return f"{_channel_text(error.channel)}{what} {value:.3g} of the channel's scale, allowed is {limit:.3g}"
        if not error.noise <= noise:
            return (
                f"{_channel_text(error.noise_channel)}noise of {error.noise:.2g} of the signal, allowed is {noise:.2g}"
            )
        return None

    def can_judge(self, sensitivity: OutputError) -> bool:
        """Whether a model that itself moves by `sensitivity` on these inputs is judged there: no limit is raised so far."""
        return self.explicit or _SENSITIVITY_FACTOR * (self.metric_value(sensitivity) or 0.0) <= max(
            self.limit, _MAX_LIMIT
        )

    def is_undecided(self, error: OutputError, sensitivity: OutputError | None) -> bool:
        """Whether an output beyond the limit is at most some times as far off as the model itself moves: too far."""
        value = self.metric_value(error)
        if sensitivity is None or self.can_judge(sensitivity) or value is None or not math.isfinite(value):
            return False
        own = self.metric_value(sensitivity) or 0.0
        noise = max(self.noise, _SENSITIVITY_FACTOR * (sensitivity.noise or 0.0))
        wider = replace(self, limit=_SENSITIVITY_FACTOR * own, noise=noise)
        return own == math.inf or wider.violation(error) is None

    def accepts(self, error: OutputError) -> bool:
        return self.violation(error) is None

    def to_limits(self, rounding: str) -> ParityLimits:
        """The same for a passport; `rounding` is the result of `coarsest_dtype`."""
        noise = self.noise if math.isfinite(self.noise) else None
        judged: Literal["max_rel", "rms_rel"] = "rms_rel" if self.use_rms else "max_rel"
        return ParityLimits(
            self.limit, judged, noise, self.max_replaced_rows, self.allow_ties, self.roundoff, self.explicit, rounding,
            dict(self.ranges),
        )  # fmt: skip

    @classmethod
    def from_limits(cls, limits: ParityLimits) -> Tolerance:
        """The tolerance that a passport keeps."""
        return cls(
            limit=limits.limit,
            use_rms=limits.metric == "rms_rel",
            max_replaced_rows=limits.max_replaced_rows,
            allow_ties=limits.allow_ties,
            noise=math.inf if limits.noise is None else limits.noise,
            roundoff=limits.roundoff,
            explicit=limits.explicit,
            half=limits.rounding == "fp16",
            ranges=limits.ranges,
        )


_SENSITIVITY_FACTOR, _MAX_LIMIT = 4.0, 0.5
"""Times its own sensitivity that a model may be off, and the most that this allows."""
_ROUNDINGS = 32
"""Units of roundoff that two implementations differ by at most, relative to the channel's largest value."""
TOLERANCES = {
    "fp32": Tolerance(1e-3),
    "tf32": Tolerance(_ROUNDINGS * 2.0**-11, roundoff=2.0**-11),
    "fp16": Tolerance(_ROUNDINGS * 2.0**-11, max_replaced_rows=0.05, roundoff=2.0**-11, half=True),
    "bf16": Tolerance(_ROUNDINGS * 2.0**-8, max_replaced_rows=0.05, roundoff=2.0**-8),
    "quantized": Tolerance(0.1, use_rms=True, max_replaced_rows=0.10, roundoff=2.0**-16),
}
_FLOATS = ("fp32", "tf32", "fp16", "bf16")
_QUANTIZED = ("QLinear", "QGemm", "QAttention", "MatMulNBits", "MatMulInteger", "ConvInteger")


def select_tolerance(rounding: str, *, tf32: bool = False, explicit: float | None = None) -> Tolerance:
    """The tolerance for the result of `coarsest_dtype`; `tf32`: FP32 is computed in TF32. An `explicit` limit is final."""
    usual = TOLERANCES["tf32" if tf32 and rounding == "fp32" else rounding]
    if explicit is None:
        return usual
    return replace(usual, limit=explicit, noise=math.inf, explicit=True)


def coarsest_dtype(graph: GraphIndex, target: str | None = None) -> str:
    """The coarsest rounding of the model, or of what it is cast or quantised to before the build."""
    nodes = [place.node for place in graph.nodes]
    if target not in (None, *_FLOATS) or any(
        is_quantize(node) or is_dequantize(node) or node.op_type.startswith(_QUANTIZED) for node in nodes
    ):  # one half of a pair too: weights that are stored quantised have no QuantizeLinear
        return "quantized"
    values = (*graph.proto.graph.input, *graph.proto.graph.output)
    kinds = {tensor.data_type for tensor in graph.tensors} | {v.type.tensor_type.elem_type for v in values}
    if 16 in kinds or target == "bf16":
        return "bf16"
    return "fp16" if 10 in kinds or target == "fp16" else "fp32"


def _channel_text(channel: Channel | None) -> str:
    return f"{channel}: " if channel is not None else ""
