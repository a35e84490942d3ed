"""What is known of TensorRT's objects without running anything: what calls return, what variables are usually named."""

from __future__ import annotations

import re

_LAYERS = {
    "convolution": "IConvolutionLayer", "deconvolution": "IDeconvolutionLayer", "pooling": "IPoolingLayer",
    "padding": "IPaddingLayer", "resize": "IResizeLayer", "normalization": "INormalizationLayer",
}  # fmt: skip
_RETURNS = {
    "create_network": "INetworkDefinition", "create_builder_config": "IBuilderConfig",
    "create_optimization_profile": "IOptimizationProfile", "build_engine": "ICudaEngine",
    "build_engine_with_config": "ICudaEngine", "build_serialized_network": "IHostMemory",
    "deserialize_cuda_engine": "ICudaEngine", "create_execution_context": "IExecutionContext",
    "get_plugin_registry": "IPluginRegistry", "get_layer": "ILayer", "get_input": "ITensor", "get_output": "ITensor",
    "add_input": "ITensor",
}  # fmt: skip
_CPP_RETURNS = {re.sub(r"_(\w)", lambda found: found[1].upper(), name): kind for name, kind in _RETURNS.items()} | {
    "createInferBuilder": "IBuilder", "createInferRuntime": "IRuntime", "createNetworkV2": "INetworkDefinition",
    "createParser": "IParser", "createInferRefitter": "IRefitter", "serialize": "IHostMemory",
    "createExecutionContextWithoutDeviceMemory": "IExecutionContext",
}  # fmt: skip
"""Methods of C++: those of Python in its spelling, and those that it has alone."""
_NAMES = (
    (r"engine", "ICudaEngine"), (r"(?:context|exec_?ctx|ctx)", "IExecutionContext"),
    (r"builder_?config|config|cfg", "IBuilderConfig"),
    (r"builder", "Builder"), (r"network|net(?:work)?_?def(?:inition)?", "INetworkDefinition"), (r"parser", "OnnxParser"),
    (r"runtime", "Runtime"), (r"refitter", "Refitter"), (r"(?:plg|plugin)_?registry", "IPluginRegistry"),
    (r"conv(?:_?layer)?\d*", "IConvolutionLayer"), (r"pool(?:ing)?\d*", "IPoolingLayer"), (r"layer", "ILayer"),
)  # fmt: skip
_HINTS = tuple(
    (re.compile(rf"(?:.*_|m|trt|cuda|.*[a-z](?=[A-Z]))?(?:{pattern})_*", re.IGNORECASE), kind)
    for pattern, kind in _NAMES
)
_TO_CPP = {"Builder": "IBuilder", "OnnxParser": "IParser", "Runtime": "IRuntime", "Refitter": "IRefitter"}


def returned_type(method: str) -> str | None:
    """The class a Python method of TensorRT returns; methods have one meaning in all classes."""
    if method.startswith("add_"):
        return _RETURNS.get(method) or _LAYERS.get(method.removeprefix("add_").removesuffix("_nd"), "ILayer")
    return _RETURNS.get(method)


def returned_cpp_type(function: str) -> str | None:
    """The class a C++ method or function of TensorRT returns a pointer to."""
    if function.startswith("add"):
        return _CPP_RETURNS.get(function) or _LAYERS.get(function[3:].removesuffix("Nd").lower(), "ILayer")
    return _CPP_RETURNS.get(function)


def type_of_name(variable: str, *, cpp: bool = False) -> str | None:
    """The class that a variable of this name usually is: `self.trt_engine`, `mContext`."""
    kind = next((kind for pattern, kind in _HINTS if pattern.fullmatch(variable)), None)
    return _TO_CPP.get(kind, kind) if cpp and kind is not None else kind


def owner_classes(kind: str) -> tuple[str, ...]:
    """The class and the one it inherits from."""
    return (kind, "ILayer") if kind.endswith("Layer") and kind != "ILayer" else (kind,)


AMBIGUOUS = frozenset(
    "precision dtype execute execute_async free kernel_size stride padding dilation window_size pre_padding post_padding "
    "get_shape get_strides get_location max_batch_size dynamic_range set_dynamic_range get_dynamic_range build_engine "
    "set_output_type supports_model device_memory_size "
    "destroy enqueue setType setPrecision getPrecision setOutputType setStride getStride setPadding getPadding setDilation "
    "getDilation setKernelSize getKernelSize setWindowSize getWindowSize setPrePadding setPostPadding getPrePadding "
    "getPostPadding getLocation getStrides getMaxBatchSize setMaxBatchSize setDynamicRange supportsModel getShapeValues "
    "setShapeValues getDeviceMemorySize setAlgorithmSelector getBindingDimensions setBindingDimensions addConvolution "
    "addPooling addPadding setAlignCorners getAlignCorners add_convolution add_pooling add_padding".split()
)
"""Members that other libraries and people's own classes have too: a finding needs the type of the object."""
