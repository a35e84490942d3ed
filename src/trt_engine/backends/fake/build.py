"""Builds fake payloads: a header and the model with its external data."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import onnx
from onnx.reference import ReferenceEvaluator

from trt_engine.atomic_io import write_atomic
from trt_engine.backends.fake.options import FakeOptions
from trt_engine.config.build import BuildConfig
from trt_engine.config.settings import from_values
from trt_engine.device import parse_device
from trt_engine.errors import BuildError, ModelError, UsageError
from trt_engine.format import library_reason, quoted
from trt_engine.model import Model
from trt_engine.protocols import BuildOutcome, BuildPaths
from trt_engine.records.passport import Precision, Requirements

MAGIC = b"trt-engine fake\x00"
"""The payload's first 16 bytes; the serialized model follows."""


def library_version() -> str:
    """The version of onnx, which provides the reference evaluator."""
    return metadata.version("onnx")


class FakeBuilder:
    """Builds for `device/fake.py`."""

    def identity(self, config: BuildConfig) -> str:
        return f"fake onnx {library_version()}"

    def build(self, model: Model, config: BuildConfig, paths: BuildPaths) -> BuildOutcome:
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
                raise ModelError(
                    f"`{spec.name}` is a string tensor, which device memory cannot hold", hint="`-b onnxruntime`"
                )
        try:
            proto = onnx.load(model.path)
        except Exception as error:  # OSError, and protobuf's DecodeError, which comes without types
            raise ModelError(
                f"`{model.path}` cannot be read: {error}", hint=f"`trt-engine inspect {quoted(model.path)}`"
            ) from error
        _check_operators(proto)
        try:
            raw = proto.SerializeToString()
        except ValueError as error:  # protobuf's limit of 2 GiB for one message
            raise BuildError(f"`{model.path}` is too large for the backend `fake`", hint="`-b onnxruntime`") from error
        write_atomic(paths.payload, MAGIC + raw)
        return BuildOutcome(
            signature=model.signature,
            precision=Precision(requested=config.precision),
            requirements=Requirements(library="onnx", version=library_version(), compute_capabilities=config.gpus),
        )


def parity_options(model: Path, config: BuildConfig) -> dict[str, str] | str:
    """Options to load an engine for parity checks, or why it cannot be: an engine for certain GPUs needs a matching
    `compute_capability`."""
    own = from_values(FakeOptions, config.options).compute_capability
    if config.gpus and own not in config.gpus:
        return f"it is for compute capability {', '.join(config.gpus)}, and no such GPU is here"
    return {}


def _check_operators(proto: onnx.ModelProto) -> None:
    """`ModelError` if the reference evaluator lacks an operator of the graph."""
    try:
        ReferenceEvaluator(proto)
    except Exception as error:  # it raises KeyError, RuntimeError, TypeError and classes of its own
        raise ModelError(
            f"the reference evaluator cannot run this model: {library_reason(error)}",
            hint="`-b onnxruntime`",
        ) from error
