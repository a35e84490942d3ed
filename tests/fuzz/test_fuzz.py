"""Hundreds of damaged and hostile inputs for each parser and verb: none may end in a traceback, a hang or exit code 1.

`TRT_ENGINE_FUZZ_INPUTS` sets the number of inputs for each target, `TRT_ENGINE_FUZZ_SEED` another sequence of them.
Thirty minutes of it, with records: `python benchmarks/fuzz.py --minutes 30`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fuzz.campaign import Result, Watched, fuzz, replay
from fuzz.inputs import Input
from fuzz.targets import TARGETS
from programs import needs

CORPUS = Path(__file__).parent / "corpus"
SEED = int(os.environ.get("TRT_ENGINE_FUZZ_SEED", "14"))
FEW, MANY = 4, int(os.environ.get("TRT_ENGINE_FUZZ_INPUTS", "300"))


def refuse_faults(result: Result) -> None:
    """Fail with every distinct fault, and the input that shows it."""
    if not result.faults:
        return
    lines = []
    for key, found in result.faults.items():
        calls = "; ".join(" ".join(call) for call in found.input.calls)
        lines += [
            f"{found.count} x {key}: {found.fault.text}",
            f"    trt-engine {calls}",
            f"    {found.input.to_json()[:2000]}",
        ]
    pytest.fail("\n".join(lines), pytrace=False)


@pytest.mark.parametrize("target", list(TARGETS))
def test_damaged_files_and_wrong_commands_end_in_a_sentence(worker: Watched, target: str) -> None:
    refuse_faults(fuzz(worker, target, SEED, max(2, FEW // TARGETS[target].cost)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", [pytest.param(name, marks=needs("torch") if name == "programs" else ()) for name in TARGETS]
)
def test_thousands_of_them_do_and_enough_of_them_pass_the_parser(worker: Watched, target: str) -> None:
    result = fuzz(worker, target, SEED, max(20, MANY // TARGETS[target].cost))
    refuse_faults(result)
    assert result.share >= 0.05, f"{result.passed} of {result.inputs} inputs passed: the mutations destroy too much"


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.json")), ids=lambda path: path.stem)
def test_what_once_failed_is_refused_in_a_sentence(worker: Watched, path: Path) -> None:
    if path.stem.startswith("pictures"):
        pytest.importorskip("PIL", reason="pillow reads the pictures")
    found = replay(worker, Input.from_json(path.read_text()))
    assert not found, f"{json.loads(path.read_text())['found']} again: {found}"


def test_the_corpus_stays_small() -> None:
    assert sum(path.stat().st_size for path in CORPUS.iterdir()) < 300_000
