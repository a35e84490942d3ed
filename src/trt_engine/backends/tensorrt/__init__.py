"""TensorRT through its Python bindings, 10.0 to 11.x: builds, proves, runs."""

from trt_engine.backend import Backend

__all__ = ["card"]

card = Backend(
    name="tensorrt",
    summary="TensorRT's own builder and runtime through its Python bindings (10.0 to 11.x)",
    payload_suffix=".engine",
    modules=("tensorrt", "onnx", "numpy"),
    install="pip install 'trt-engine[tensorrt]' (CUDA 13; on CUDA 12: `pip install tensorrt-cu12`)",
    builder="trt_engine.backends.tensorrt.build:TensorRtBuilder",
    runtime="trt_engine.backends.tensorrt.run:TensorRtRuntime",
    devices=("cuda",),
    options="trt_engine.plans.settings:PlanSettings",
    verdict="trt_engine.plans.verdict:verdict",
    proving="trt_engine.plans.proving:proving",
    layers="trt_engine.backends.tensorrt.run:layers",
    profile="trt_engine.backends.tensorrt.profile:profile",
    quant_target="tensorrt",
    builds_log=True,
    tuned=True,
)
