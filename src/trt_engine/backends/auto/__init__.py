"""Backend `auto`: the candidates of all other backends are built and measured; the best is the engine."""

from trt_engine.backend import BackendSpec

spec = BackendSpec(
    name="auto",
    summary="the fastest of all backends that run here, chosen by measurement",
    payload_suffix=".engine",
    modules=("onnx", "numpy"),
    install="pip install onnx",
    builder=None,
    runtime=None,
    devices=("cpu", "cuda"),
    aliases=("fastest", "best"),
    selects=True,
)
