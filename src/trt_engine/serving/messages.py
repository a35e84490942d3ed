"""Protobuf messages of the gRPC services, in a descriptor pool of their own.

The pool is private because clients of the same protocol (tritonclient) register files of the same names in the default one.
"""

from __future__ import annotations

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


def service(name: str) -> Any:
    """The descriptor of a service: its methods with their messages."""
    return _pool().FindServiceByName(name)
