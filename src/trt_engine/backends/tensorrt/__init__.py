"""TensorRT through its Python bindings, 10.0 to 11.x: builds, checks and runs engines."""

from trt_engine.backend import BackendSpec
from trt_engine.config.precision import PRECISIONS

spec = BackendSpec(
    name="tensorrt",
    aliases=("trt",),
    summary="TensorRT's own builder and runtime through its Python bindings (10.0 to 11.x)",
    payload_suffix=".engine",
    preference=30,
    modules=("tensorrt", "onnx", "numpy"),
    install="pip install 'trt-engine[tensorrt]' (CUDA 13; on CUDA 12: `pip install tensorrt-cu12`)",
    builder="trt_engine.backends.tensorrt.build:TensorRtBuilder",
    runtime="trt_engine.backends.tensorrt.run:TensorRtRuntime",
    devices=("cuda",),
    options="trt_engine.trt.settings:PlanSettings",
    ignored_settings=("fuse",),
    compatibility="trt_engine.trt.compatibility:check_compatibility",
    parity_options="trt_engine.trt.settings:parity_options",
    layers="trt_engine.backends.tensorrt.run:layers",
    profile="trt_engine.backends.tensorrt.profile:profile",
    quant_target="tensorrt",
    writes_log=True,
    profile_sensitive=True,
    nvinfer=True,
    gpu_precisions=PRECISIONS,
    gpu_preference=10,
)
