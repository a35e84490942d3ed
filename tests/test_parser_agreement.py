"""`lint` without a parser agrees with TensorRT-RTX's parser; all records: benchmarks/parser_agreement.py."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from programs import load_program
from trt_engine.backends.tensorrt.parser_check import installed_version

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    before = sys.path[:]
    module = load_program(BENCHMARKS / "parser_agreement.py", "parser_agreement")
    yield module
    sys.path[:] = before
    for name in ("parser_agreement", "onnx_node_tests"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_the_records_are_of_enough_cases_and_each_disagreement_has_its_reason(program: ModuleType) -> None:
    records = [json.loads(line) for line in gzip.decompress(program.RESULTS.read_bytes()).splitlines()[1:]]
    assert len(records) == 2024 and sum(record["standard"] for record in records) == 1996
    assert program.objections(records, program.reasons()) == []


@pytest.mark.slow
@pytest.mark.skipif(
    installed_version("tensorrt-rtx") is None, reason="TensorRT-RTX is not installed: `trt-engine[rtx]`"
)
def test_lint_without_a_parser_agrees_with_the_parser_on_onnx_own_tests(program: ModuleType) -> None:
    records = list(program.compare(program.chosen()))
    assert not program.objections(records, program.reasons())
