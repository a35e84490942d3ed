"""The backend that needs no hardware: the ONNX reference evaluator behind a fake device that keeps the rules of a real one.

It is slow and right, and it is here to test everything that is written against streams, buffers and contexts.
"""

from trt_engine.backend import Backend

__all__ = ["card"]

card = Backend(
    name="fake",
    summary="the ONNX reference evaluator on a device that does not exist, for tests",
    payload_suffix=".fake",
    modules=("onnx", "numpy"),
    install="pip install onnx",
    builder="trt_engine.backends.fake.build:FakeBuilder",
    runtime="trt_engine.backends.fake.run:FakeRuntime",
    devices=("fake",),
    options="trt_engine.backends.fake.options:FakeOptions",
    ignores=("workspace_mib",),
    verdict="trt_engine.backends.fake.run:verdict",
    profile="trt_engine.backends.fake.profile:profile",
    hidden=True,
)
