"""The TensorFlow child seen from outside: interpreters without TensorFlow, crashes, silence, Ctrl-C. Needs no TensorFlow.

Where a child must behave in a way TensorFlow cannot be made to, the interpreter named is a scripted program that speaks the
same protocol.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from patience import HANG_S, text_of, until
from trt_engine.conversion.axes import parse_dynamic
from trt_engine.conversion.examples import parse_inputs
from trt_engine.conversion.sources import Source
from trt_engine.conversion.tensorflow.tensorflow_source import PYTHON, TensorFlowOptions, export_tensorflow, open_source
from trt_engine.errors import FeedError, MemoryExhausted, ModelError, SetupError, UsageError

SPEC = importlib.util.find_spec("trt_engine.conversion.tensorflow.tensorflow_worker")
assert SPEC is not None and SPEC.origin is not None
CHILD = Path(SPEC.origin)

_SCRIPT = """\
#!{python}
import json, os, signal, sys, time
pipe = os.fdopen(int(sys.argv[2]), "w", buffering=1)
def say(**message):
    pipe.write(json.dumps(message) + "\\n")
def asked():
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    return json.loads(line)
PORT = {{"name": "x", "dtype": "float32", "shape": [None, 4]}}
OPENED = {{"inputs": [PORT], "outputs": [{{"name": "y", "dtype": "float32"}}], "notes": []}}
{body}
"""


@pytest.fixture
def program(tmp_path: Path):
    """Makes an interpreter that does what its text says."""

    def made(body: str) -> TensorFlowOptions:
        path = tmp_path / "python-with-tensorflow"
        path.write_text(_SCRIPT.format(python=sys.executable, body=textwrap.dedent(body)))
        path.chmod(0o755)
        return TensorFlowOptions(python=str(path), timeout_s=HANG_S)

    return made


def read(options: TensorFlowOptions, path: Path = Path("net.pb")):
    return open_source(path, "frozen-graph", [], None, options)


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is not None, reason="this interpreter has TensorFlow")
def test_an_interpreter_without_tensorflow_is_told_the_extra_and_the_variable(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv(PYTHON, raising=False)
    source = Source("net.pb", "frozen-graph", "", tmp_path / "net.pb")
    with pytest.raises(SetupError, match="has no `tensorflow`") as caught:
        export_tensorflow(source, [], None, 18, tmp_path)
    assert "trt-engine[tf]" in str(caught.value.hint) and PYTHON in str(caught.value.hint)


def test_the_variable_names_the_interpreter_and_the_option_goes_before_it(program, monkeypatch) -> None:
    said = program('say(missing="tf2onnx", text="No module named tf2onnx", python="3.9.1")')
    monkeypatch.setenv(PYTHON, str(said.python))
    with pytest.raises(SetupError, match=r"\(Python 3\.9\.1\) has no `tf2onnx`"):
        read(TensorFlowOptions())
    with pytest.raises(SetupError, match="`python` names `/nowhere/python`"):
        read(TensorFlowOptions(python="/nowhere/python"))
    monkeypatch.setenv(PYTHON, "/nowhere/else")
    with pytest.raises(SetupError, match="`TRT_ENGINE_TF_PYTHON` names `/nowhere/else`"):
        read(TensorFlowOptions())


@pytest.mark.parametrize(
    ("end", "kind", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", ModelError, "SIGSEGV while reading `net.pb`; last lines: .*third"),
        ("os.kill(os.getpid(), signal.SIGKILL)", SetupError, r"SIGKILL while reading .*\(it had \d+ MiB\)"),
        ("sys.stderr.write('std::bad_alloc\\n'); os.abort()", MemoryExhausted, "SIGABRT"),
        ("sys.exit(7)", SetupError, "exit code 7"),
    ],
)
def test_the_end_of_the_child_is_an_error_with_its_last_lines(program, end, kind, text) -> None:
    body = f"""
    say(versions={{}})
    asked()
    for line in ("first", "second", "third"):
        print(line, file=sys.stderr)
    sys.stderr.flush()
    {end}
    """
    with pytest.raises(kind, match=text) as caught:
        read(program(body))
    assert caught.value.hint


@pytest.mark.slow  # the limit is long enough for a busy machine to start the child in
def test_silence_ends_in_an_error_and_without_the_child(program, tmp_path) -> None:
    note = tmp_path / "pid"
    body = f"""
    open({str(note)!r}, "w").write(str(os.getpid()))
    print("still folding constants", flush=True)
    say(versions={{}})
    time.sleep(1000)
    """
    options = TensorFlowOptions(python=program(body).python, timeout_s=10.5)
    with pytest.raises(ModelError, match=r"did not end within 10\.5 s and was stopped; .*still folding constants"):
        read(options)
    assert not Path(f"/proc/{note.read_text()}").exists()


def test_a_refusal_of_the_child_is_our_error_and_ends_it(program, tmp_path) -> None:
    note = tmp_path / "pid"
    body = f"""
    open({str(note)!r}, "w").write(str(os.getpid()))
    say(versions={{}})
    asked()
    say(error=["ModelError", "tf2onnx cannot convert this operator: `Zeta`", "another one"])
    asked()
    """
    with pytest.raises(ModelError, match="cannot convert this operator: `Zeta`"):
        read(program(body))
    assert not Path(f"/proc/{note.read_text()}").exists()


@pytest.mark.parametrize(
    ("shape", "inputs", "dynamic", "kind", "text"),
    [
        ([None, None, 3], None, None, UsageError, "leaves axis 1 of `x` open"),
        ([None, 16], "x:2x15", None, UsageError, "`x` is 2x15, and the source takes"),
        ([None, 16], "x:2x4x4", None, UsageError, "`x` is 2x4x4, and the source takes"),
        ([None, 16], "x:2x16:int64", None, FeedError, "is int64, and the source takes float32"),
        ([None, 16], "z:2x16", None, UsageError, "no input `z`"),
        ([None, 16], "x:2x16 y:2x2", None, UsageError, "2 inputs are given, and the source has 1"),
        ([None, 16], None, "z:0=batch", UsageError, "names `z`, which is not an input"),
        (
            [None, 16],
            None,
            "x:1=width",
            ModelError,
            "in the source axis 1 of `x` is 16",
        ),
        (
            [1, 16],
            None,
            "0=batch",
            ModelError,
            "`batch` was to be dynamic, .* axis 0 of `x` is 1",
        ),
        (None, None, None, UsageError, "does not declare the rank of `x`"),
    ],
)
def test_sizes_the_source_cannot_have_are_refused(program, shape, inputs, dynamic, kind, text) -> None:
    body = f"""
    say(versions={{}})
    asked()
    PORT["shape"] = {shape!r}
    say(answer=OPENED)
    asked()
    """
    asked = None if dynamic is None else parse_dynamic(dynamic)
    with pytest.raises(kind, match=text) as caught:
        open_source(Path("net.pb"), "frozen-graph", parse_inputs(inputs), asked, program(body))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("shape", "inputs", "dynamic", "example", "axes"),
    [
        ([None, 4], None, None, (2, 4), {0: "batch"}),
        ([None, None], "x:1x6", None, (2, 6), {0: "batch", 1: "x_1"}),
        ([None, None], None, "0=n,1=length@4..64/4", (2, 4), {0: "n", 1: "length"}),
        ([None, None], "x:3x6", "x:1=length", (3, 6), {1: "length"}),
        ([8, 4], None, None, (8, 4), {}),
        (None, "x:1x5", None, (2, 5), {0: "batch"}),
        ([], None, None, (), {}),
    ],
)
def test_sizes_and_symbols_follow_the_source_and_what_is_asked(program, shape, inputs, dynamic, example, axes) -> None:
    body = f"""
    say(versions={{}})
    asked()
    PORT["shape"] = {shape!r}
    say(answer=OPENED)
    asked()
    """
    asked = None if dynamic is None else parse_dynamic(dynamic)
    with open_source(Path("net.pb"), "frozen-graph", parse_inputs(inputs), asked, program(body)) as call:
        assert call.examples["x"].shape == example
        assert {at: axis.symbol for at, axis in call.axes.get("x", {}).items()} == axes


def test_ctrl_c_ends_the_child(program, tmp_path) -> None:
    note = tmp_path / "pid"
    body = f"""
    say(versions={{}})
    asked()  # who asks has everything in hand
    open({str(note)!r}, "w").write(str(os.getpid()))
    time.sleep(1000)
    """
    code = (
        "from pathlib import Path\n"
        "from trt_engine.conversion.tensorflow.tensorflow_source import open_source, TensorFlowOptions\n"
        f"open_source(Path('net.pb'), 'frozen-graph', [], None, TensorFlowOptions(python={program(body).python!r}))\n"
    )
    ours = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, start_new_session=True)
    try:
        until(lambda: text_of(note) or ours.poll() is not None, "the child is asked")
        ours.send_signal(signal.SIGINT)
        _, told = ours.communicate(timeout=HANG_S)
    finally:
        ours.kill()
    assert b"KeyboardInterrupt" in told
    assert not Path(f"/proc/{note.read_text()}").exists()


def test_the_child_does_not_outlive_a_parent_that_is_killed(tmp_path) -> None:
    """The child's own program, its libraries aside: it ends with its stdin."""
    script = CHILD.read_text().replace("import tensorflow as tf", "tf = type('tf', (), {'__version__': '0'})")
    assert "    import tf2onnx\n" in script
    script = script.replace("    import tf2onnx\n", "    tf2onnx = tf\n")
    script = re.sub(r"    (from tf2onnx|import tensorflow_readers).*\n", "", script)
    path = tmp_path / "child.py"
    path.write_text(script)
    ours, theirs = os.pipe()
    child = subprocess.Popen([sys.executable, str(path), str(theirs)], stdin=subprocess.PIPE, pass_fds=(theirs,))
    os.close(theirs)
    try:
        assert "versions" in json.loads(os.read(ours, 4096))
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(HANG_S) == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)


def test_options_are_read_as_they_are_typed_and_refused_by_name() -> None:
    made = TensorFlowOptions.parse({"outputs": "a:0, b:1", "inputs-as-nchw": "x", "signature": "s", "timeout_s": "60"})
    assert made == TensorFlowOptions(outputs=("a:0", "b:1"), inputs_as_nchw=("x",), signature="s", timeout_s=60.0)
    with pytest.raises(UsageError, match="no option `signatur`") as caught:
        TensorFlowOptions.parse({"signatur": "s"})
    assert "`signature`" in str(caught.value.hint)
    for value in ("soon", "-1", "nan"):
        with pytest.raises(UsageError, match="timeout_s"):
            TensorFlowOptions.parse({"timeout_s": value})


def test_the_child_is_plain_files_for_python_3_9() -> None:
    names = set()
    siblings = {"tensorflow_readers", "tensorflow_checks"}
    for path in (CHILD, *(CHILD.with_name(f"{name}.py") for name in siblings)):
        for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 9))):
            if isinstance(node, ast.Import):
                names.update(item.name.partition(".")[0] for item in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert not node.level
                names.add(str(node.module).partition(".")[0])
            assert not isinstance(node, ast.Match)
    assert names - set(sys.stdlib_module_names) - siblings == {"h5py", "numpy", "onnx", "tensorflow", "tf2onnx"}


def test_a_program_that_is_no_interpreter_is_a_setup_error(tmp_path) -> None:
    path = tmp_path / "python"
    path.write_text("#!/nowhere/sh\n")
    path.chmod(0o755)
    with pytest.raises(SetupError, match="does not start"):
        read(TensorFlowOptions(python=str(path)))
    with pytest.raises(SetupError, match="ended by exit code 0 while starting TensorFlow"):
        read(TensorFlowOptions(python="/bin/true"))
