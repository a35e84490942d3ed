"""The fuzzer finds what it is there to find: each kind of fault, planted in an input or in a reader."""

from __future__ import annotations

import pytest

from fuzz.campaign import Watched, fuzz, made, replay
from fuzz.checks import Call, faults_of
from fuzz.inputs import Input


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
