"""Cases of the onnx package's own tests, beside ONNX Runtime; all of them: benchmarks/onnx_node_tests.py."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from programs import load_program

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).resolve().parents[1] / "benchmarks" / "onnx_node_tests.py"
SAMPLE, SEED = 100, 13
ONCE_WRONG = (
    "light_squeezenet",
    "test_ai_onnx_ml_tree_ensemble_set_membership",
    "test_bitcast_float32_to_int32",
    "test_castlike_FLOAT_to_FLOAT8E4M3FNUZ",
    "test_castlike_FLOAT_to_FLOAT8E5M2FNUZ_expanded",
    "test_castlike_FLOAT_to_INT2",
    "test_castlike_INT2_to_FLOAT",
    "test_castlike_UINT2_to_UINT8",
    "test_clip",
    "test_mvn",
    "test_reduce_max_empty_set_bool",
    "test_stft",
)
AT_THE_EDGE = {
    "test_identity_sequence": "of kind sequence",
    "test_identity_opt": "of kind optional",
    "test_if_seq": "of kind sequence",
    "test_sequence_model8": "without elements",
}


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    module = load_program(PROGRAM, "onnx_node_tests")
    yield module
    del sys.modules["onnx_node_tests"]


@pytest.fixture(scope="module")
def cases(program: ModuleType) -> dict[str, Any]:
    return {case.name: case for case in program.cases()}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_sample_of_the_cases_that_onnx_runtime_computes_is_right(program: ModuleType, cases: dict[str, Any]) -> None:
    assert len(cases) > 1900
    chosen = random.Random(SEED).sample(sorted(cases), SAMPLE)
    found = list(program.records([cases[name] for name in chosen], ()))
    assert len(found) == SAMPLE
    assert not [record for record in found if program.failed(record)], program.table(found)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_cases_that_were_wrong_once_are_right_in_every_verb(program: ModuleType, cases: dict[str, Any]) -> None:
    found = list(program.records([cases[name] for name in ONCE_WRONG], program.VERBS))
    assert not [record for record in found if program.failed(record)], program.table(found)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_what_is_no_array_at_the_edge_of_a_graph_is_refused_with_that_reason(
    program: ModuleType, cases: dict[str, Any]
) -> None:
    for record in program.records([cases[name] for name in AT_THE_EDGE], ()):
        assert AT_THE_EDGE[record["name"]] in record["package"]["message"]
        assert record["package"]["exit"] in (2, 4)
