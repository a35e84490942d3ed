"""Settings of ONNX Runtime that change a graph's speed and not its precision."""

from __future__ import annotations

from trt_engine.backends.onnxruntime.options import parse, provider_options
from trt_engine.backends.onnxruntime.provider_names import short_name
from trt_engine.config.build import BuildConfig
from trt_engine.device import parse_device
from trt_engine.graph import walk
from trt_engine.graph.fusion import fuse_model
from trt_engine.model import Model

_BIAS = "separate_conv_bias"
_LAYOUTS = (
    {"cuda.prefer_nhwc": "1", _BIAS: "on"},
    {"cuda.prefer_nhwc": "1", _BIAS: "channel"},
    {"cuda.prefer_nhwc": "1"},
)
"""For convolutions, the likeliest first: a search that is short of time measures no more. Their algorithm search and
workspace make no difference since cuDNN's own heuristics choose (1.31.1)."""
_ATTENTION_KERNELS = ({"cuda.sdpa_kernel": "8"}, {"cuda.sdpa_kernel": "1"})
"""cuDNN's and flash attention, for the fused operators."""


_CPU = ({"graph_optimization": "extended"}, {"spinning": "off"})
"""Without the blocked layout of convolutions, slower for small ones; threads that do not spin, for shared cores."""


def tuning_candidates(model: Model, config: BuildConfig) -> tuple[dict[str, str], ...]:
    """Settings worth measuring for this graph, each alone; what `config` sets itself stays as it is."""
    kind, _ = parse_device(config.device)
    if kind == "cpu" and not config.providers and config.time_budget_s is not None:
        return tuple(item for item in _CPU if not item.keys() & config.options.keys())
    if kind != "cuda" or any(short_name(name) != "cuda" for name in config.providers):
        return ()
    operators = _operators(model, config)
    found = [
        *(item for item in _LAYOUTS if "Conv" in operators and (item.get(_BIAS) != "channel" or "Relu" in operators)),
        *(_ATTENTION_KERNELS if config.fuse and operators & {"Attention", "MultiHeadAttention"} else ()),
    ]
    cuda = next((values for name, values in provider_options(config.options).items() if short_name(name) == "cuda"), {})
    given = {f"cuda.{name}": value for name, value in cuda.items()}
    if (separate := parse(config.options).separate_conv_bias) is not None:
        given[_BIAS] = separate
    return tuple(
        new
        for item in found
        if all(given.get(name, value) == value for name, value in item.items())
        and (new := {name: value for name, value in item.items() if name not in given})
    )


def _operators(model: Model, config: BuildConfig) -> set[str]:
    """Operators of the graph as it is built: a patch embedding is no longer a convolution, and attention is one operator."""
    proto = fuse_model(model.proto, model.path.parent, on_gpu=True).proto if config.fuse else model.proto
    return {place.node.op_type for place in walk.nodes(proto)}
