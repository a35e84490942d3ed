"""Hundreds of damaged and hostile inputs for each parser and verb: none may end in a traceback, a hang or exit code 1.

`TRT_ENGINE_FUZZ_INPUTS` sets the number of inputs for each target, `TRT_ENGINE_FUZZ_SEED` another sequence of them.
Thirty minutes of it, with records: `python benchmarks/fuzz.py --minutes 30`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fuzz.campaign import Result, Watched, fuzz, made, replay
from fuzz.checks import Call, faults_of
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


def kinds(code: int, out: str = "", err: str = "", words: str = "inspect x") -> list[str]:
    return [fault.kind for fault in faults_of(Call(words.split(), code, out, err), frozenset((2, 4)))]


@pytest.mark.parametrize(
    ("code", "out", "err", "words", "kind"),
    [
        (1, "", "error: unexpected ValueError: x\n", "inspect x", "exit 1"),
        (3, "", "error: cannot read\n", "inspect x", "exit code"),
        (11, "", "error: out of memory\nhint: x\n", "inspect x", "out of memory"),
        (4, "", "Traceback (most recent call last):\n", "inspect x", "traceback"),
        (0, "name \x1b[31m\n", "", "inspect x", "control character"),
        (2, "", "error: `\u202egnp.exe`\n", "inspect x", "control character"),
        (2, "", "error: `x\nFORGED_LINE: 1`\n", "inspect x", "forged line"),
        (0, "<p><script>FUZZ</script>\n", "", "report x --format html", "markup"),
        (0, '{"a": NaN}\n', "", "inspect x --json", "no JSON document"),
        (2, "", "error: x\n", "inspect x --json", "no JSON document"),
    ],
)
def test_each_fault_of_a_call_has_a_name(code: int, out: str, err: str, words: str, kind: str) -> None:
    assert kinds(code, out, err, words) == [kind]


def test_a_right_answer_and_a_right_refusal_have_none() -> None:
    assert kinds(0, "inputs: x\n") == kinds(4, "", "error: no such file `x`\nhint: y\n") == []
    assert kinds(2, '{"error": {}}\n', "error: x\n", "inspect x --json") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ("@planted raise", "exception"),
        ("@planted crash", "process ended"),
        ("@planted memory", "memory"),
        ("@planted write", "written outside"),
        ("@planted leave", "leftover"),
        ("@planted change", "input changed"),
        ("@planted run", "code was run"),
        ("@planted print", "control character"),
    ],
)
def test_what_a_call_does_to_the_machine_is_seen(worker: Watched, call: str, kind: str) -> None:
    assert [fault.kind for fault in replay(worker, Input("planted", {"x": b"1"}, [call.split()]))] == [kind]
    assert replay(worker, Input("planted", {"x": b"1"}, [["@planted", "nothing"]])) == []


@pytest.mark.slow
def test_a_call_without_an_end_is_ended_and_its_place_is_known() -> None:
    (fault,) = replay(Watched(cpu_s=3.0), Input("planted", {}, [["@planted", "hang"]]))
    assert fault.kind == "hang" and "readers.py" in fault.place


def test_a_seed_gives_the_same_inputs_again(worker: Watched) -> None:
    for name in ("arrays", "trtexec-logs", "command-lines"):
        first, again = (made(worker, name, 1, 3) for _ in range(2))
        assert first == again
        assert Input.from_json(first.to_json()) == first
        assert made(worker, name, 2, 3) != first


def test_valid_files_pass_their_reader(worker: Watched) -> None:
    """A target whose files are refused before anything is changed would test nothing."""
    for name in ("trtexec-logs", "ncu", "kineto", "nsys-exports", "sources"):
        assert fuzz(worker, name, 1, 6).passed, name
