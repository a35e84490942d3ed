"""From a model to a fake payload: a header and the model, its external data taken in."""

from __future__ import annotations

from importlib import metadata

import onnx
from onnx.reference import ReferenceEvaluator

from trt_engine.backends.fake.options import FakeOptions
from trt_engine.config import BuildConfig, from_values
from trt_engine.device import parse_device
from trt_engine.engine import Needs, Precision
from trt_engine.errors import BuildError, ModelError, UsageError
from trt_engine.files import write_whole
from trt_engine.model import Model
from trt_engine.protocols import BuildOutcome, BuildPlaces

__all__ = ["MAGIC", "FakeBuilder", "library_version"]

MAGIC = b"trt-engine fake\x00"
"""The payload's first 16 bytes; the serialized model follows."""


def library_version() -> str:
    """The version of onnx, whose reference evaluator does the work."""
    return metadata.version("onnx")


class FakeBuilder:
    """Builds for `device/fake.py`."""

    def identity(self, config: BuildConfig) -> str:
        return f"fake onnx {library_version()}"

    def build(self, model: Model, config: BuildConfig, places: BuildPlaces) -> BuildOutcome:
        from_values(FakeOptions, config.options)
        if config.precision not in (None, "fp32"):
            raise UsageError(
                f"the backend `fake` cannot compute in {config.precision}: it computes as the graph is",
                hint="leave `--precision` out",
            )
        kind, _ = parse_device(config.device)
        if kind != "fake":
            raise UsageError(f"the backend `fake` cannot build for `{config.device}`", hint="`--device fake`")
        for spec in model.signature:
            if spec.dtype == "string":
                raise ModelError(f"`{spec.name}` holds strings, which no device memory does", hint="`-b onnxruntime`")
        try:
            proto = onnx.load(model.path)
        except Exception as error:  # OSError, and protobuf's DecodeError, which comes without types
            raise ModelError(
                f"`{model.path}` cannot be read: {error}", hint=f"trt-engine inspect {model.path}"
            ) from error
        _refuse_unknown_operators(proto)
        try:
            raw = proto.SerializeToString()
        except ValueError as error:  # protobuf's limit of 2 GiB for one message
            raise BuildError(f"`{model.path}` is too large for the backend `fake`", hint="`-b onnxruntime`") from error
        write_whole(places.payload, MAGIC + raw)
        return BuildOutcome(
            signature=model.signature,
            precision=Precision(asked=config.precision),
            needs=Needs(library="onnx", version=library_version()),
        )


def _refuse_unknown_operators(proto: onnx.ModelProto) -> None:
    """`ModelError` when the reference evaluator lacks an operator of the graph: it says so when it is made."""
    try:
        ReferenceEvaluator(proto)
    except Exception as error:  # it raises KeyError, RuntimeError, TypeError and classes of its own
        raise ModelError(
            f"the reference evaluator cannot run this model: {str(error).splitlines()[0][:200]}",
            hint="`-b onnxruntime`",
        ) from error
