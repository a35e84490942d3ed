"""TensorRT through NVIDIA's `trtexec`, for machines without the Python bindings."""

from trt_engine.backend import BackendSpec
from trt_engine.config.precision import PRECISIONS

spec = BackendSpec(
    name="trtexec",
    summary="TensorRT through the trtexec program (8.6 to 11.x): builds, measures; bindings run its engines where they are",
    payload_suffix=".engine",
    preference=50,
    modules=("onnx", "numpy"),
    tools=("trtexec",),
    install="install TensorRT's `libnvinfer-bin` (Debian) or its tar file, and put trtexec's folder on PATH",
    builder="trt_engine.backends.trtexec.build:TrtexecBuilder",
    runtime="trt_engine.backends.trtexec.run:TrtexecRuntime",
    runtimes=("tensorrt",),
    devices=("cuda",),
    options="trt_engine.trt.settings:PlanSettings",
    ignored_settings=("fuse",),
    compatibility="trt_engine.backends.trtexec.compatibility:check_compatibility",
    parity_options="trt_engine.backends.trtexec.compatibility:parity_options",
    measure="trt_engine.benchmark.trtexec:measure",
    profile="trt_engine.backends.trtexec.profile:profile",
    quant_target="tensorrt",
    writes_log=True,
    profile_sensitive=True,
    nvinfer=True,
    gpu_precisions=PRECISIONS,
    gpu_preference=20,
    gpu_missing="trt_engine.backends.trtexec.program:missing_program",
)
