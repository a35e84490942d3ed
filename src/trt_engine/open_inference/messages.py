"""Protobuf messages of the gRPC services, in a descriptor pool of their own.

The pool is private because clients of the same protocol (tritonclient) register files of the same names in the default one.
"""

from __future__ import annotations

import base64
import functools
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

INFERENCE_SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"


@functools.cache
def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    raw = Path(__file__).with_name("inference.binpb").read_bytes()
    for file in descriptor_pb2.FileDescriptorSet.FromString(raw).file:
        pool.Add(file)
    return pool


@functools.cache
def message(name: str) -> Any:
    """The class of a message by its full name, or by its name in the package `inference`."""
    full = name if "." in name else f"inference.{name}"
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(full))


def all_fields(given: Any) -> dict[str, Any]:
    """A message as JSON with every field, as Triton writes it: numbers as numbers, messages that are not there left out."""
    return {
        field.name: _field(field, getattr(given, field.name))
        for field in given.DESCRIPTOR.fields
        if not field.has_presence or given.HasField(field.name)
    }


def _field(field: Any, value: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {key: _field(field.message_type.fields_by_name["value"], value[key]) for key in value}
    if field.is_repeated:
        return [_plain(field, item) for item in value]
    return _plain(field, value)


def _plain(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return all_fields(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else value
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def service(name: str) -> Any:
    """The descriptor of a service: its methods with their messages."""
    return _pool().FindServiceByName(name)
