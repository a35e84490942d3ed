"""TorchInductor backend: the ONNX graph, imported into PyTorch and compiled ahead of time to native code (`.pt2`)."""

from trt_engine.backend import BackendSpec

spec = BackendSpec(
    name="inductor",
    aliases=("torch", "pytorch", "aoti", "aotinductor", "torchinductor"),
    summary="PyTorch's compiler, ahead of time: Triton and C++ kernels for the CPU or GPU of this machine",
    payload_suffix=".pt2",
    preference=20,
    modules=("torch", "onnx", "numpy"),
    install="pip install 'trt-engine[torch]'",
    builder="trt_engine.backends.inductor.build:InductorBuilder",
    runtime="trt_engine.backends.inductor.run:InductorRuntime",
    keeps_cache=True,
    devices=("cpu", "cuda"),
    options="trt_engine.backends.inductor.options:InductorOptions",
    safer_options=("channels_last=off", "fuse_kernels=off"),
    ignored_settings=("workspace_mib", "fuse"),
    tuning="trt_engine.backends.inductor.options:tuning_candidates",
    check_model="trt_engine.backends.inductor.operators:check_model",
    compatibility="trt_engine.backends.inductor.compatibility:check_compatibility",
    gpu_precisions=("fp32", "tf32", "fp16", "bf16"),
    gpu_preference=40,
    gpu_missing="trt_engine.backends.inductor.compatibility:missing_cuda",
)
