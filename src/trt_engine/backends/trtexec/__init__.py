"""TensorRT through NVIDIA's command-line tool: the same engines where trtexec is there and the bindings are not."""

from trt_engine.backend import Backend

__all__ = ["card"]

card = Backend(
    name="trtexec",
    summary="TensorRT through the trtexec program (8.6 to 11.x): builds, measures; bindings run its engines where they are",
    payload_suffix=".engine",
    modules=("onnx", "numpy"),
    tools=("trtexec",),
    install="install TensorRT's `libnvinfer-bin` (Debian) or its tar file, and put trtexec's folder on PATH",
    builder="trt_engine.backends.trtexec.build:TrtexecBuilder",
    runtime="trt_engine.backends.trtexec.run:TrtexecRuntime",
    run_by=("tensorrt",),
    devices=("cuda",),
    options="trt_engine.plans.settings:PlanSettings",
    verdict="trt_engine.backends.trtexec.verdict:verdict",
    proving="trt_engine.backends.trtexec.verdict:proving",
    measure="trt_engine.benchmark.trtexec:measure",
    profile="trt_engine.backends.trtexec.profile:profile",
    quant_target="tensorrt",
    builds_log=True,
    tuned=True,
)
