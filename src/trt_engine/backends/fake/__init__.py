"""Test backend without hardware: the ONNX reference evaluator on a fake device that enforces the rules of a real one."""

from trt_engine.backend import BackendSpec

spec = BackendSpec(
    name="fake",
    summary="the ONNX reference evaluator on a simulated device, for tests",
    payload_suffix=".fake",
    modules=("onnx", "numpy"),
    install="pip install onnx",
    builder="trt_engine.backends.fake.build:FakeBuilder",
    runtime="trt_engine.backends.fake.run:FakeRuntime",
    devices=("fake",),
    options="trt_engine.backends.fake.options:FakeOptions",
    ignored_settings=("workspace_mib", "fuse"),
    resolve_gpus="trt_engine.trt.gpu_targets:rtx_targets",
    parity_options="trt_engine.backends.fake.build:parity_options",
    compatibility="trt_engine.backends.fake.run:check_compatibility",
    profile="trt_engine.backends.fake.run:profile",
    hidden=True,
)
