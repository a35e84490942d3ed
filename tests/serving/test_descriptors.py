"""The service description is the protocol's: every field has the number and the type that clients use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2, service_pb2

from programs import load_program
from trt_engine.open_inference.messages import INFERENCE_SERVICE, service

TOOL = Path(__file__).parents[2] / "tools" / "grpc_descriptors.py"
OURS = {"ModelMetadataResponse.properties"}
"""Fields that the client does not know, and keeps as unknown ones."""


def shape_of(field: Any) -> tuple[Any, ...]:
    kind = field.message_type.name if field.message_type else field.enum_type.name if field.enum_type else ""
    return field.number, field.type, kind, field.is_repeated


def clients_message(full_name: str) -> Any:
    """The client's message of that name."""
    first, *inner = full_name.removeprefix("inference.").split(".")
    known = {**service_pb2.DESCRIPTOR.message_types_by_name, **model_config_pb2.DESCRIPTOR.message_types_by_name}
    found = known[first]
    for part in inner:
        found = found.nested_types_by_name[part]
    return found


def test_every_message_is_one_of_the_clients() -> None:
    methods = service(INFERENCE_SERVICE).methods
    waiting = [descriptor for method in methods for descriptor in (method.input_type, method.output_type)]
    done: set[str] = set()
    fields = 0
    while waiting:
        ours = waiting.pop()
        if ours.full_name in done:
            continue
        done.add(ours.full_name)
        theirs = clients_message(ours.full_name)
        for field in ours.fields:
            if f"{ours.name}.{field.name}" in OURS:
                assert field.number not in theirs.fields_by_number
                continue
            other = theirs.fields_by_name[field.name]
            assert shape_of(field) == shape_of(other), f"{ours.full_name}.{field.name}"
            if field.enum_type is not None:
                numbers = {name: item.number for name, item in other.enum_type.values_by_name.items()}
                assert {
                    name: item.number for name, item in field.enum_type.values_by_name.items()
                }.items() <= numbers.items()
            if field.message_type is not None:
                waiting.append(field.message_type)
            fields += 1
    assert len(done) > 30 and fields > 100


def test_the_committed_descriptors_are_those_of_the_description() -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    tool = load_program(TOOL, "grpc_descriptors")
    from google.protobuf import descriptor_pb2

    kept = descriptor_pb2.FileDescriptorSet.FromString(tool.TARGET.read_bytes())
    assert kept == descriptor_pb2.FileDescriptorSet.FromString(tool.compile_descriptors())
