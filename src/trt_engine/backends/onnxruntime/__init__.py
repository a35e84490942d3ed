"""ONNX Runtime: the backend every machine has. Its engine is the optimised graph, saved and loaded again."""

from trt_engine.backend import Backend

__all__ = ["card"]

card = Backend(
    name="onnxruntime",
    summary="ONNX Runtime's optimised graph: on the CPU everywhere, on CUDA and TensorRT providers where they are",
    payload_suffix=".onnx",
    modules=("onnxruntime", "onnx", "numpy"),
    install="pip install onnxruntime",
    builder="trt_engine.backends.onnxruntime.build:OnnxRuntimeBuilder",
    runtime="trt_engine.backends.onnxruntime.run:OnnxRuntime",
    devices=("cpu", "cuda"),
    providers=True,
    options="trt_engine.backends.onnxruntime.options:OnnxRuntimeOptions",
    ignores=("workspace_mib",),
    accepts="trt_engine.graph.load:check_onnxruntime",
    lacking="trt_engine.backends.onnxruntime.kernels:lacking",
    quant_target="trt_engine.backends.onnxruntime.target:quant_target",
    builds_in_seconds=True,
    milder=("graph_optimization=basic", "graph_optimization=none"),
    verdict="trt_engine.backends.onnxruntime.verdict:verdict",
    profile="trt_engine.backends.onnxruntime.profile:profile",
    traced="trt_engine.backends.onnxruntime.profile:traced",
)
