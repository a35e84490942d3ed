"""ONNX Runtime backend: the engine is the saved optimised graph."""

from trt_engine.backend import BackendSpec

spec = BackendSpec(
    name="onnxruntime",
    aliases=("ort", "onnx", "cpu"),
    summary="ONNX Runtime's optimised graph: on the CPU, and on CUDA and TensorRT providers if available",
    payload_suffix=".onnx",
    preference=10,
    modules=("onnxruntime", "onnx", "numpy"),
    install="pip install onnxruntime",
    builder="trt_engine.backends.onnxruntime.build:OnnxRuntimeBuilder",
    runtime="trt_engine.backends.onnxruntime.run:OnnxRuntime",
    devices=("cpu", "cuda"),
    providers=True,
    options="trt_engine.backends.onnxruntime.options:OnnxRuntimeOptions",
    ignored_settings=("workspace_mib", "timing_cache"),
    check_model="trt_engine.graph.load:check_onnxruntime",
    unsupported_precision="trt_engine.backends.onnxruntime.cpu_kernels:unsupported_precision",
    quant_target="trt_engine.backends.onnxruntime.provider_names:quant_target",
    fast_build=True,
    tuning="trt_engine.backends.onnxruntime.tuning:tuning_candidates",
    safer_options=("graph_optimization=basic", "graph_optimization=none"),
    compatibility="trt_engine.backends.onnxruntime.compatibility:check_compatibility",
    profile="trt_engine.backends.onnxruntime.profile:profile",
    trace_nodes="trt_engine.backends.onnxruntime.profile:trace_nodes",
    gpu_precisions=("fp32", "tf32", "fp16", "bf16"),
    gpu_preference=30,
    gpu_missing="trt_engine.backends.onnxruntime.providers:missing_cuda",
)
