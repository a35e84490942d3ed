"""Options of the inductor backend (`-O name=value`)."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import TensorProto

from trt_engine.config.build import BuildConfig
from trt_engine.config.settings import opt
from trt_engine.device import parse_device
from trt_engine.errors import UsageError
from trt_engine.model import Model


def _parse_seconds(value: str | int) -> int:
    if not str(value).isdecimal() or int(value) > 86400:
        raise UsageError(f"cannot read `{value}` as seconds", hint="as `-O autotune_s=300`, at most 86400")
    return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class InductorOptions:
    """Settings of the inductor backend."""

    autotune_s: int = opt(
        0, "seconds to choose kernels by measurement; measurements are kept for the next build", parse=_parse_seconds
    )
    freezing: bool = opt(True, "compute from the weights once, at build, and choose their layout")
    conv_1x1_as_mm: bool = opt(False, "1x1 convolutions as matrix products")
    fuse_kernels: bool = opt(
        True,
        "on a GPU: linear layers with what surrounds them, and convolutions with Relu, as kernels chosen by measurement",
    )
    channels_last: bool = opt(True, "on a GPU: lay 2-D convolutions out with the channels last")
    trust_source: bool = opt(
        False, "load a package whose digest is not the passport's: its code runs with your permissions", in_key=False
    )


def tuning_candidates(model: Model, config: BuildConfig) -> tuple[dict[str, str], ...]:
    """On a GPU, on request: 1x1 convolutions as matrix products, in FP32; in half precision each is chosen at the build."""
    if config.time_budget_s is None or parse_device(config.device)[0] != "cuda" or "conv_1x1_as_mm" in config.options:
        return ()
    if config.precision in ("fp16", "bf16"):  # the graph is cast
        return ()
    weights = {tensor.name: tensor for tensor in model.proto.graph.initializer if tensor.data_type == TensorProto.FLOAT}
    convolutions = [place.node for place in model.graph.nodes if place.node.op_type == "Conv"]
    found = [weights[node.input[1]] for node in convolutions if len(node.input) > 1 and node.input[1] in weights]
    return ({"conv_1x1_as_mm": "on"},) if any(set(weight.dims[2:]) == {1} for weight in found) else ()
