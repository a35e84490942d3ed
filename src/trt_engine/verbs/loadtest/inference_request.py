"""Requests of the Open Inference Protocol v2 as bytes, and the metadata of a model.

Source: Open Inference Protocol v2 (REST and gRPC), and the binary tensor extension of Triton.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from trt_engine.errors import EngineError, UsageError
from trt_engine.open_inference.wire_tensors import encode_tensor, protocol_dtype
from trt_engine.tensors import DTYPES, Signature, Tensors, TensorSpec
from trt_engine.verbs.loadtest.target import Target

BINARY_EXTENSION = "binary_tensor_data"
_JSON_LESS = ("float16", "bfloat16")
_NAMES = {item.kserve_name: item.name for item in DTYPES.values() if item.kserve_name is not None}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The metadata of a server and of one of its models."""

    server: str
    extensions: tuple[str, ...]
    name: str
    versions: tuple[str, ...]
    signature: Signature
    info: dict[str, str] = field(default_factory=dict)
    """Platform and parameters of the metadata."""


def spec_of(name: str, datatype: str, shape: Sequence[int]) -> TensorSpec:
    """The spec of a tensor by its names in the protocol. Raises `EngineError` for an unknown type."""
    if datatype not in _NAMES:
        raise EngineError(
            f"the tensor `{name}` has the unknown type `{datatype}`", hint=f"expected {', '.join(_NAMES)}"
        )
    return TensorSpec(name, _NAMES[datatype], tuple(-1 if size < 0 else int(size) for size in shape))


@dataclass(frozen=True, slots=True)
class InputRegion:
    """A registered region of shared memory with the raw tensors of all inputs, one after another."""

    name: str
    spans: dict[str, tuple[int, int]]
    """Offset and size in bytes by input."""

    def parameters(self, name: str) -> dict[str, Any]:
        """The metadata of this input in a request."""
        offset, nbytes = self.spans[name]
        return {
            "shared_memory_region": self.name,
            "shared_memory_offset": offset,
            "shared_memory_byte_size": nbytes,
        }


def http_request(
    target: Target,
    signature: Signature,
    feeds: Tensors,
    *,
    binary: bool,
    timeout_us: int | None,
    token: str | None,
    region: InputRegion | None = None,
) -> bytes:
    """One whole POST request, head and body; without the tensors where they are in a region.

    Raises `UsageError` for types that JSON does not have.
    """
    inputs: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for spec in signature.inputs:
        array, datatype = feeds[spec.name], protocol_dtype(spec)
        item: dict[str, Any] = {"name": spec.name, "shape": list(array.shape), "datatype": datatype}
        if region is not None:
            item["parameters"] = region.parameters(spec.name)
        elif binary:
            parts.append(bytes(encode_tensor(array, datatype)))
            item["parameters"] = {"binary_data_size": len(parts[-1])}
        elif spec.dtype in _JSON_LESS:
            raise UsageError(
                f"input `{spec.name}` is {spec.dtype}, which JSON does not have", hint="`--binary` sends it as bytes"
            )
        else:
            item["data"] = [
                one.decode(errors="replace") if isinstance(one, bytes) else one for one in array.ravel().tolist()
            ]
        inputs.append(item)
    document: dict[str, Any] = {"inputs": inputs}
    parameters: dict[str, Any] = {"binary_data_output": True} if binary else {}
    if timeout_us is not None:
        parameters["timeout"] = timeout_us
    head = msgspec.json.encode(document | ({"parameters": parameters} if parameters else {}))
    body = b"".join([head, *parts])
    fields = [
        f"POST {target.model_path()}/infer HTTP/1.1", f"Host: {target.address}",
        f"Content-Type: application/{'octet-stream' if binary else 'json'}", f"Content-Length: {len(body)}",
    ]  # fmt: skip
    fields += [f"Inference-Header-Content-Length: {len(head)}"] if binary else []
    fields += [f"Authorization: Bearer {token}"] if token is not None else []
    return "\r\n".join([*fields, "", ""]).encode() + body


def tensor_specs(items: Sequence[Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
    """The tensors of a metadata document. Raises `KeyError` or `TypeError` for what is not one."""
    for item in items:
        if not isinstance(item["name"], str) or not all(isinstance(size, int) for size in item["shape"]):
            raise TypeError("expected a name and whole numbers as its shape")
    return tuple(spec_of(item["name"], item["datatype"], item["shape"]) for item in items)
