"""The `-O name=value` settings of TensorRT-RTX. It lacks TensorRT's tactic settings, as it times no tactics and compiles
kernels at load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from trt_engine.config.profiles import Profile
from trt_engine.config.settings import from_values, opt, settings
from trt_engine.trt.settings import PlanSettings, check_refit


def _as_in_tensorrt(name: str, help: str | None = None) -> Any:
    """The setting of that name of TensorRT, with another help text if given."""
    shared = next(item for item in settings(PlanSettings) if item.name == name)
    return opt(shared.default, help or shared.help, in_key=shared.in_key, parse=shared.parse, choices=shared.choices)


_NEEDS_GPU = "the build needs a GPU that the plan is for"


@dataclass(frozen=True, slots=True, kw_only=True)
class RtxSettings:
    """Settings of TensorRT-RTX. Target GPUs are not an `-O`; use `--gpus`."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Settings of TensorRT that TensorRT-RTX does not have: message and hint of the error."""

    # -------------------------------------------------------------------------------- the plan
    profiling_verbosity: str = _as_in_tensorrt(
        "profiling_verbosity",
        "layer information in the builder's log and the engine; the precision check needs `detailed`",
    )
    shape_values: Profile | None = _as_in_tensorrt("shape_values")  # noqa: RUF009  # a field, as `opt` makes
    weight_streaming: bool = _as_in_tensorrt("weight_streaming")
    require_user_allocation: bool = opt(
        False,
        "an engine whose contexts are given their scratch memory (memory_strategy=user_managed), so that a CUDA graph can "
        "be captured of dynamic shapes",
    )
    refit: str = _as_in_tensorrt(
        "refit",
        "weights that may be replaced later: none, all, those `identical` to the build's, `individual` ones; "
        + _NEEDS_GPU,
    )
    refit_weights: tuple[str, ...] = _as_in_tensorrt(
        "refit_weights", "with refit=individual: the names of the weights that may be replaced"
    )
    strip_weights: bool = _as_in_tensorrt(
        "strip_weights",
        "leave the weights out of the plan; they are put back from the ONNX before it runs; " + _NEEDS_GPU,
    )
    # -------------------------------------------------------------------------------- running
    runtime_cache: str | None = opt(
        None,
        "the file that kernels compiled on this machine are kept in [default: beside the engine]; off keeps none",
        in_key=False,
    )
    cuda_graph_strategy: str = opt(
        "disabled",
        "CUDA graphs the library captures itself; `graphs=` and `bench` capture theirs only with `disabled`",
        choices=("disabled", "whole_graph_capture"),
        in_key=False,
    )
    kernel_specialization: str = opt(
        "eager",
        "kernels for the shapes in use: compiled before the first inference at a shape, beside the first ones, or never",
        choices=("eager", "lazy", "none"),
        in_key=False,
    )
    deferred_weights: bool = opt(
        False, "compile and make the first context before the weights are on the GPU", in_key=False
    )
    weight_streaming_budget: str | None = _as_in_tensorrt("weight_streaming_budget")
    memory_strategy: str = _as_in_tensorrt("memory_strategy")
    refit_from: str | None = _as_in_tensorrt("refit_from")
    count_allocations: bool = _as_in_tensorrt(
        "count_allocations", "count TensorRT-RTX's device memory; off uses its own allocator"
    )

    def __post_init__(self) -> None:
        check_refit(self.refit, self.refit_weights, strip_weights=self.strip_weights)

    @property
    def to_plan_settings(self) -> PlanSettings:
        """The settings shared with TensorRT, as `PlanSettings`."""
        return PlanSettings(**{name: getattr(self, name) for name in _OWN & _SHARED})


_OWN = {item.name for item in dataclasses.fields(RtxSettings)}
_SHARED = {item.name for item in dataclasses.fields(PlanSettings)}
_ALTERNATIVES = {
    "hardware_compatibility": "`--gpus sm80,sm89,sm120` builds one plan for several GPUs",
    "version_compatible": "build again with the TensorRT-RTX that is to run it: it takes seconds",
    "optimization_level": "leave it out: TensorRT-RTX times no tactics as it builds",
    "runtime_platform": "build on the operating system that runs the plan",
}
_KNOWN_HINT = f"leave it out; TensorRT-RTX has {', '.join(item.name for item in dataclasses.fields(RtxSettings))}"
RtxSettings.UNSUPPORTED = {
    name: (f"`{name}` is a setting of TensorRT, TensorRT-RTX does not have it", _ALTERNATIVES.get(name, _KNOWN_HINT))
    for name in sorted(_SHARED - _OWN)
}


def parse(options: Mapping[str, str]) -> RtxSettings:
    """Parse the settings of `-O`; `UsageError` for one that TensorRT-RTX does not have."""
    made: RtxSettings = from_values(RtxSettings, options)
    return made
