"""TensorRT-RTX: builds on any x86-64 Linux, without a GPU, for RTX GPUs; runs on those."""

from trt_engine.backend import BackendSpec

spec = BackendSpec(
    name="tensorrt-rtx",
    aliases=("rtx", "trt-rtx", "tensorrt_rtx"),
    summary="TensorRT-RTX: engines for GeForce and RTX GPUs, built without a GPU",
    payload_suffix=".engine",
    preference=40,
    modules=("tensorrt_rtx", "onnx", "numpy"),
    install="pip install 'trt-engine[rtx]' (CUDA 13; on CUDA 12: `rtx-cu12`), on x86-64 Linux; to run engines `gpu` as well",
    builder="trt_engine.backends.tensorrt_rtx.build:TensorRtRtxBuilder",
    runtime="trt_engine.backends.tensorrt_rtx.run:TensorRtRtxRuntime",
    devices=("cuda",),
    compatibility="trt_engine.backends.tensorrt_rtx.compatibility:check_compatibility",
    plan_validity="trt_engine.backends.tensorrt_rtx.compatibility:query_validity",
    options="trt_engine.trt.rtx_settings:RtxSettings",
    ignored_settings=("fuse",),
    parity_options="trt_engine.backends.tensorrt_rtx.build:parity_options",
    layers="trt_engine.backends.tensorrt_rtx.run:layers",
    profile="trt_engine.backends.tensorrt_rtx.run:profile",
    resolve_gpus="trt_engine.trt.gpu_targets:rtx_targets",
    quant_target="tensorrt-rtx",
    writes_log=True,
)
