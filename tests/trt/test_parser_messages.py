"""Refusals of the real ONNX parser and messages of the real library as plain sentences."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from trt_engine.trt.parser_messages import (
    ParserError,
    failed_operator,
    format_parser_error,
    parse_logged_error,
    plain_text,
)

REFUSALS = json.loads((Path(__file__).parent / "parser_refusals.json").read_text())["refusals"]
CPP = re.compile(
    r"::|->|&&|\|\||==|!=|![a-z]|\w\(\)|\bnullptr\b|\bAssertion\b|\bk[A-Z]|\.(?:cpp|h)\b|/_src/|Error Code|\n"
)


def refusals() -> list[ParserError]:
    return [
        ParserError(description, code, node, operator=operator, function=function)
        for operator, code, node, function, description in REFUSALS
    ]


def test_no_real_refusal_reads_as_cpp_or_false() -> None:
    sentences = [format_parser_error(refusal) for refusal in refusals()]
    assert len(sentences) == 115
    for sentence in sentences:
        assert not CPP.search(sentence), sentence
        assert not re.search(r"\bfalse\b|node -1", sentence), sentence
        assert re.search(r"[a-z]+ [a-z]+", sentence), sentence


def test_an_operator_the_parser_lacks_is_named_with_its_place() -> None:
    refusal = ParserError("false", "UNSUPPORTED_NODE", 3, "/head/Det", "Det", "checkDet")
    assert format_parser_error(refusal) == "node 3 `/head/Det` (Det): TensorRT's parser does not have this operator"
    assert format_parser_error(refusal, "TensorRT-RTX").endswith("TensorRT-RTX's parser does not have this operator")


@pytest.mark.parametrize(
    ("description", "reason"),
    [
        ('!isTraining && "This version does not support training_mode == 1."',
         "This version does not support training_mode = 1"),
        ('(mode == "a" || mode == "b") && "TensorRT only supports a and " "b modes!"',
         "TensorRT only supports a and b modes"),
        ('Assertion failed: mode == "none": ScatterND with reduction is not supported.',
         "ScatterND with reduction is not supported"),
        ("Assertion failed: (a == T::kINT32 || b::f(x: 1)): The type is HALF.", "The type is HALF"),
        ("Assertion failed: creator && f(creator) == V::kV3ONE: failed to load the plugin.", "failed to load the plugin"),
        ("Failed to import initializer: In node -1 with name:  and operator:  (importInitializers): UNSUPPORTED_NODE: "
         "Assertion failed: ctx->convert(initializer, &weights): Failed to import initializer: w",
         "Failed to import initializer: w"),
        ("Unsupported reduction type", "Unsupported reduction type"),
        ("Invalid Node - add\nITensor::getDimensions: Error Code 4: API Usage Error (add: SUM takes kHALF or kINT64. But "
         "type is UInt8. In validateTypes at /_src/a/b.cpp:72)\n[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda "
         "Runtime (In catchCudaError at /_src/c.cpp:250 (cudaError 35: CUDA driver version is insufficient))",
         "SUM takes float16 or int64. But type is UInt8"),
        ("Invalid Node - y\n[a.cpp::checkSanity::21] Error Code 2: Internal Error (Assertion !f(p.second) failed.  In "
         "checkSanity at /_src/a.cpp:21)", "an internal check of TensorRT failed (`checkSanity`), and it gives no reason"),
    ],
)  # fmt: skip
def test_a_condition_gives_its_text_alone(description: str, reason: str) -> None:
    assert format_parser_error(ParserError(description, node=0, operator="Op")) == f"node 0 (Op): {reason}"


def test_a_refusal_of_no_node_names_the_input_or_the_operator() -> None:
    text = 'Assertion failed: f(x) && "Failed to convert ONNX date type to TensorRT data type."'
    by_input = ParserError(text, "UNSUPPORTED_NODE", function="importInput", file="images")
    assert format_parser_error(by_input) == "input `images`: TensorRT does not have this ONNX data type"
    by_operator = ParserError(
        "Unsupported reduction type", function="importScatterElements", file="onnxOpImporters.cpp"
    )
    assert format_parser_error(by_operator) == "ScatterElements: Unsupported reduction type"
    assert format_parser_error(ParserError("no text", function="importInput", file="ModelImporter.cpp")) == "no text"
    assert failed_operator(ParserError("", function="importInitializers")) == ""


def test_local_functions_are_named_from_the_inside_out() -> None:
    refusal = ParserError("false", "UNSUPPORTED_NODE", 0, "deep", "Det", local_functions=("top (Outer)", "mid (Inner)"))
    assert format_parser_error(refusal).startswith("node 0 `deep` (Det) in `mid (Inner)` in `top (Outer)`: ")


def test_a_logged_refusal_is_the_refusal() -> None:
    text = "ModelImporter.cpp:151: ERROR: onnxOpCheckers.cpp:1130 In function checkDet:\n[8] false"
    assert parse_logged_error(text) == ParserError(
        "false", "UNSUPPORTED_NODE", function="checkDet", file="onnxOpCheckers.cpp"
    )
    assert plain_text(text) == "TensorRT's parser does not have the operator Det"
    assert parse_logged_error("In function checkDet:") is None


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([a.cpp:1676: run] no tactics within workspace limit.; "
         "[b.cpp:264: run] Error during tactic selection. In compile at /_src/c.cpp:2012)",
         "no tactics within workspace limit. Error during tactic selection"),
        ("IBuilderConfig::setX: Error Code 3: API Usage Error (Parameter check failed, condition: a != B::kC. It cannot be "
         "kC. In setX at /_src/a.cpp:8)", "It cannot be C"),
        ("Error[10]: IBuilder::b: Error Code 10: Internal Error (Could not find any implementation for node "
         "{ForeignNode[/a...b]}.)",
         "Could not find any implementation for node {ForeignNode[/a...b]}"),
        ("IBuilder::b: Error Code 1: Myelin ([g.h:1295: attach] MyelinCheckException: j.cpp:278: CHECK(status == "
         "CUDA_SUCCESS) failed.  In compileGraph at /_src/g.cpp:2012)",
         "a CUDA call of TensorRT failed (`compileGraph`), and it gives no reason"),
        ("IRuntime::d: Error Code 1: Serialization (Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed."
         "Version tag does not match. Note: Current Version: 240, Serialized Engine Version: 239)",
         "Version tag does not match. Note: Current Version: 240, Serialized Engine Version: 239"),
        ("a message of no frame", "a message of no frame"),
        ("Error Code 1: Cuda Runtime (In f at /_src/c.cpp:25 (cudaError 35: no driver))", "(cudaError 35: no driver)"),
    ],
)  # fmt: skip
def test_a_message_of_the_library_loses_its_frame_and_nothing_else(text: str, plain: str) -> None:
    assert plain_text(text) == plain
