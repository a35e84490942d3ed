"""The command line as a person meets it: exit codes, one error and one hint, one JSON document, no stack trace."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest

from patience import HANG_S
from trt_engine.cli.click_app import cli
from trt_engine.cli.main import run
from trt_engine.cli.verbs_table import VERBS, help_text
from trt_engine.command_line import options
from trt_engine.command_line.output import OutputOptions, document, emit
from trt_engine.errors import AccuracyError, UnstableError

PYTHON = [sys.executable, "-m", "trt_engine"]

# ------------------------------------------------------------------------------------------------ a verb that fails to order


@options.verb()
@click.argument("how")
@click.option("--batch", type=int)
@click.option("--precision", type=click.Choice(["fp32", "fp16"]))
@click.option("--max-batch", type=int)
def fails(how: str, batch: int | None, precision: str | None, max_batch: int | None) -> int | None:
    """Raises what it is told to."""
    if how == "code":
        return 9
    if how == "says":
        emit(
            document("fails", {"batch": max_batch}, command=options.command_line()),
            f"batch {max_batch}",
        )
        return None
    if how == "says and fails":
        emit(document("fails", {"a": 1}, command="x"), "a 1")
        raise UnstableError("the samples vary by 30 %", hint="lock the clocks")
    raise {
        "own": AccuracyError("off by 3, expected 1", hint="type `this`"),
        "odd": RuntimeError("odd thing"),
        "nothing": RuntimeError(),
        "memory": MemoryError(),
        "interrupt": KeyboardInterrupt(),
        "end of file": EOFError("truncated"),
        "full": OSError(errno.ENOSPC, "No space left on device"),
        "locked": PermissionError(errno.EACCES, "Permission denied", "/there"),
        "gone": FileNotFoundError(errno.ENOENT, "No such file or directory", "/there"),
        "pipe": BrokenPipeError(errno.EPIPE, "Broken pipe"),
        "long": OSError(errno.ENAMETOOLONG, "File name too long", "/" + "a" * 300),
    }[how]


@pytest.fixture(autouse=True)
def failing_verb(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = ModuleType("trt_engine.verbs.fails.command")
    module.command = fails  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trt_engine.verbs.fails.command", module)
    monkeypatch.setitem(VERBS, "fails", "a verb for tests")
    yield


@pytest.mark.parametrize(
    ("how", "code", "message", "hint"),
    [
        ("own", 7, "off by 3, expected 1", "type `this`"),
        ("odd", 1, "unexpected RuntimeError: odd thing", "`-vv` shows where"),
        ("nothing", 1, "unexpected RuntimeError", "`-vv` shows where"),
        ("end of file", 1, "unexpected EOFError: truncated", "`-vv` shows where"),
        ("memory", 11, "out of memory", "a smaller `--batch` or `--max-batch`"),
        ("interrupt", 130, "interrupted", "finished work is kept; run the same command again"),
        ("full", 3, "cannot write: the disk is full", "free some space, or name another disk with `-o`"),
        ("locked", 3, "cannot use `/there`: permission denied", "choose a folder you may write to with `-o`"),
        (
            "long",
            2,
            "the name `aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...` is too long for this disk",
            "a name has at most 255 bytes on most disks, a path 4,096",
        ),
        ("gone", 1, "unexpected FileNotFoundError: [Errno 2] No such file or directory: '/there'", "`-vv` shows where"),
    ],
)
def test_whatever_is_raised_ends_in_an_error_line_a_hint_line_and_its_exit_code(
    how: str, code: int, message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fails", how]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: {message}\nhint: {hint}\n"


@pytest.mark.parametrize("how", ["own", "odd", "interrupt", "memory", "full"])
def test_with_json_the_error_is_the_one_document_on_stdout(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["fails", how, "--json"])
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["schema"] == "trt-engine/error" and told["schema_version"] == 1
    assert told["error"]["exit_code"] == code
    assert told["tool"]["name"] == "trt-engine" and told["warnings"] == []
    assert told["command"] == f"trt-engine fails {how} --json"
    assert f"error: {told['error']['message']}\nhint: {told['error']['hint']}\n" == err


def test_a_verb_that_gave_its_document_and_then_fails_gives_no_second_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fails", "says and fails", "--json"]) == 9
    out, err = capsys.readouterr()
    assert json.loads(out)["a"] == 1
    assert err.startswith("error: the samples vary by 30 %\nhint: ")
    assert run(["fails", "own", "--json"]) == 7  # and the next command of the process has its own again
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 7


def test_a_verb_chooses_its_exit_code_by_returning_it() -> None:
    assert run(["fails", "code"]) == 9


@pytest.mark.parametrize("loud", ["-v", None, "-vv", "-vvv", "--verbose"])
def test_only_vv_shows_where_an_error_came_from(loud: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    run(["fails", "odd", *([loud] if loud else [])])
    err = capsys.readouterr().err
    assert ("Traceback" in err) == (loud in ("-vv", "-vvv"))
    assert "error: unexpected RuntimeError: odd thing" in err


def test_the_reader_of_stdout_leaving_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    before = os.dup(1)
    try:
        assert run(["fails", "pipe"]) == 141
    finally:
        os.dup2(before, 1)
        os.close(before)
    assert capfd.readouterr().err == ""


# ------------------------------------------------------------------------------------------------ usage


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (["sise"], "unknown verb `sise`", "did you mean `size`?"),
        (["Bench", "x"], "unknown verb `Bench`", "did you mean `bench`?"),
        (
            ["model.onnx", "--json"],
            "unknown verb `model.onnx`",
            "the verb is missing: `trt-engine size model.onnx --json`",
        ),
        (["a b.engine"], "unknown verb `a b.engine`", "the verb is missing: `trt-engine inspect 'a b.engine'`"),
        (["--versoin"], "`trt-engine` has no option `--versoin`", "did you mean `--version`?"),
        (["fails", "x", "--bacth", "2"], "`trt-engine fails` has no option `--bacth`", "did you mean `--batch`?"),
        (
            ["fails", "x", "--maxBatches=2"],
            "`trt-engine fails` has no option `--maxBatches`",
            "did you mean `--max-batch`?",
        ),
        (
            ["fails", "x", "--zzzz"],
            "`trt-engine fails` has no option `--zzzz`",
            "`trt-engine fails --help` lists the options",
        ),
        (["fails", "x", "-Z"], "`trt-engine fails` has no option `-Z`", "`trt-engine fails --help` lists the options"),
        (["fails"], "missing argument `HOW`", "`trt-engine fails [OPTIONS] HOW`"),
        (
            ["fails", "x", "--batch", "many"],
            "invalid value for `--batch`: `many` is not a valid integer",
            "`trt-engine fails --help`",
        ),
        (["fails", "x", "--precision", "fp61"], "`--precision` cannot be `fp61`", "did you mean `fp16`?"),
        (["fails", "x", "--precision", "q"], "`--precision` cannot be `q`", "expected one of `fp32`, `fp16`"),
        (["fails", "x", "--batch"], "option `--batch` requires an argument", "`trt-engine fails --help`"),
        (["fails", "x", "y"], "got unexpected extra argument (y)", "`trt-engine fails --help`"),
        (
            ["example", "ex"],
            "got unexpected extra argument (ex)",
            "an output is named by an option, `-o ex` or `--outdir ex`: `trt-engine example --help`",
        ),
        (
            ["cache", "--dry-run"],
            "`trt-engine cache` has no option `--dry-run`",
            "options come after the action: `trt-engine cache prune --dry-run`",
        ),
        (["build", "x", "--workspace", "0"], "`--workspace` is 0, expected 1 or more", None),
        (["size", "x", "--memory-limit", "0"], "`--memory-limit` is 0, expected 1 or more", None),
        (
            ["build", "x", "-o", ""],
            "`--out` is given an empty value",
            "is a variable of the shell not set? else leave `--out` out",
        ),
        (["report", "x", "-o", "-"], "`-o -` is not a file or folder", "leave out `-o` to print to stdout"),
        (["report", "x", "-o", "/dev/stdout", "--overwrite"], "`-o /dev/stdout` is not a file or folder", None),
        (["build", "x", "-o", "a", "--outdir", "b"], "`--out` and `--outdir` are the same option", None),
        (["cache", "purne"], "`trt-engine cache` has no `purne`", "did you mean `prune`?"),
    ],
)
def test_a_wrong_call_names_the_nearest_right_one_and_exits_with_two(
    args: list[str], message: str, hint: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(args) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"error: {message}"
    assert second == f"hint: {hint}" if hint else second.startswith("hint: ")


def test_what_follows_a_double_dash_is_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fails", "--", "--maxBatch"]) == 1
    assert "KeyError: '--maxBatch'" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["--help"], ["-h"], ["--help", "size"]])
def test_the_help_fits_a_terminal_and_has_every_verb(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(args) == 0
    out, err = capsys.readouterr()
    assert out == help_text() + "\n" and err == ""
    assert all(f"\n  {name} " in out and line in out for name, line in VERBS.items() if name != "fails")
    assert max(map(len, out.splitlines())) < 80


def test_no_verb_at_all_shows_the_help_on_stderr_and_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Usage: trt-engine" in err and "error" not in err


# ------------------------------------------------------------------------------------------------ every verb


@pytest.mark.parametrize("verb", [name for name in VERBS if name != "fails"])
def test_every_verb_has_a_help_and_the_common_options(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"Usage: trt-engine {verb} ") and err == ""
    command = cli.get_command(click.Context(cli), verb)
    for one in command.commands.values() if isinstance(command, click.Group) else [command]:
        assert one is not None
        names = [name for item in one.params for name in (*item.opts, *item.secondary_opts)]
        assert {"--json", "-q", "--quiet", "-v", "--verbose"} <= set(names), one.name
        assert len(names) == len(set(names)), "an option is there twice"
        assert all(item.help for item in one.params if isinstance(item, click.Option) and not item.hidden), one.name


@pytest.mark.parametrize("verb", ["size", "inspect", "build", "bench", "infer"])
def test_every_verb_with_a_file_says_that_a_missing_one_is_missing_and_exits_with_four(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = ["--random"] if verb == "infer" else []
    assert run([verb, str(tmp_path / "none.onnx"), *extra, "--json"]) == 4
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["exit_code"] == 4
    assert "none.onnx" in err and "\nhint: " in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ talk


@pytest.mark.parametrize(
    ("args", "talk"),
    [
        (["size", "x"], OutputOptions(False, 0)),
        (["size", "--json", "-q"], OutputOptions(True, -1)),
        (["size", "-vv"], OutputOptions(False, 2)),
        (["size", "-v", "--verbose"], OutputOptions(False, 2)),
        (["size", "-qv"], OutputOptions(False, -1)),
        (["size", "--", "--json", "-vv"], OutputOptions(False, 0)),
        (["size", "-o", "v"], OutputOptions(False, 0)),
    ],
)
def test_how_to_talk_is_known_before_the_arguments_are_parsed(args: list[str], talk: OutputOptions) -> None:
    assert OutputOptions.from_args(args) == talk


def test_a_document_has_the_common_keys_first_and_loses_no_warning_of_the_verb() -> None:
    made = document("x", {"warnings": ["b"], "value": 1, "tool": "no"}, command="c", warnings=["a"])
    assert list(made) == ["schema", "schema_version", "tool", "command", "warnings", "value"]
    assert made["warnings"] == ["a", "b"] and made["tool"]["name"] == "trt-engine"


@pytest.mark.parametrize(("no_colour", "colour"), [("", True), ("1", False)])
def test_talk_is_coloured_on_a_terminal_alone_and_never_under_no_color(no_colour: str, colour: bool) -> None:
    import pty

    reader, writer = pty.openpty()
    program = (
        "import logging; from trt_engine.command_line.output import OutputOptions; OutputOptions().start_log(); "
        "logging.getLogger('trt_engine.x').warning('slow')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"NO_COLOR": no_colour}
    subprocess.run([sys.executable, "-c", program], stderr=writer, env=environment, check=True)
    os.close(writer)
    said = os.read(reader, 1000).decode()
    os.close(reader)
    assert "slow" in said and ("\x1b[" in said) == colour
    piped = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=True)
    assert "\x1b" not in piped.stderr and "warning: slow" in piped.stderr


# ------------------------------------------------------------------------------------------------ as a process


@pytest.mark.parametrize("args", [["size", "--help"], ["cache", "list"]])
def test_a_closed_pipe_says_nothing_and_leaves_no_trace(args: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*PYTHON, *args], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_what_was_still_in_the_buffer_when_the_reader_left_is_dropped_without_a_word(tmp_path: Path) -> None:
    program = tmp_path / "leaves.py"
    program.write_text(
        "import sys, types, click\n"
        "from trt_engine.cli import main, verbs_table\n"
        "from trt_engine.command_line import options, output\n"
        "@options.verb()\n"
        "def command():\n"
        "    print('not flushed yet', file=output.result_stream())\n"
        "    raise BrokenPipeError(32, 'Broken pipe')\n"
        "sys.modules['trt_engine.verbs.leaves.command'] = types.SimpleNamespace(command=command)\n"
        "verbs_table.VERBS['leaves'] = 'leaves'\n"
        "main.main()\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, str(program), "leaves"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env=buffered,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("args", "buffered"),
    [
        (["cache", "list"], True),
        (["cache", "list", "--json"], False),
        (["--help"], True),
        (["completion", "bash", "-q"], False),
    ],
)
def test_a_full_stdout_is_an_error_of_the_environment(args: list[str], buffered: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*PYTHON, *args],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | ({} if buffered else {"PYTHONUNBUFFERED": "1"}),
            check=False,
        )
    assert done.returncode == 3
    assert done.stderr == (
        "error: cannot write to stdout: the disk is full\nhint: free some space, or redirect it with `>`\n"
    )


_VERB = """
import signal, sys, time, types, click
from trt_engine.cli import main, verbs_table
from trt_engine.command_line import options, output, signals
signals.INTERRUPT_INTERVAL_S = signals.PRESS_WINDOW_S = 600.0  # however long this process or the sender is held up
@options.verb()
def command():
    try:
        print('ready', flush=True, file=output.result_stream())
        while True:  # a signal just before one long sleep would be heard after it
            time.sleep(0.05)
    finally:
        time.sleep({ending})
        print('whole', file=sys.stderr, flush=True)
sys.modules['trt_engine.verbs.waits.command'] = types.SimpleNamespace(command=command)
verbs_table.VERBS['waits'] = 'waits'
main.main()
"""


def waiting(tmp_path: Path, *args: str, sigint: signal.Handlers, ending: float = 0.0) -> subprocess.Popen[str]:
    """A verb that does nothing, and takes `ending` seconds to tidy up; it has begun."""
    (tmp_path / "waits.py").write_text(_VERB.format(ending=ending))

    def heard() -> None:
        signal.signal(signal.SIGINT, sigint)  # a shell's background job ignores it
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # so does what `nohup` starts

    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "waits.py"), "waits", *args],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=heard,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_being_told_to_stop_ends_with_130_and_no_trace(number: signal.Signals, tmp_path: Path) -> None:
    process = waiting(tmp_path, "--json", sigint=signal.SIG_DFL)
    process.send_signal(number)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert err.splitlines() == [
        "whole",
        "error: interrupted",
        "hint: finished work is kept; run the same command again",
    ]
    assert json.loads(out)["error"]["exit_code"] == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_more_signals_do_not_break_the_ending_that_the_first_began(number: signal.Signals, tmp_path: Path) -> None:
    process = waiting(tmp_path, sigint=signal.SIG_DFL, ending=0.2)
    for _ in range(6):
        process.send_signal(number)
        time.sleep(0.02)
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, err
    assert err.startswith("whole\nerror: interrupted\n") and "Traceback" not in err


def test_an_interrupt_that_the_parent_ignores_stays_ignored(tmp_path: Path) -> None:
    process = waiting(tmp_path, sigint=signal.SIG_IGN)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=HANG_S)
    assert process.returncode == 130


_LOUD = """
import ctypes, os, subprocess, sys, types, click
from trt_engine.cli import main, verbs_table
from trt_engine.command_line import options, output
@options.verb()
def command():
    library = ctypes.CDLL(None)
    library.puts(b'in the C library until the process ends')
    os.write(1, b'native\\n')
    print('python')
    subprocess.run(['echo', 'child'], check=True)
    output.emit(output.document('loud', {'value': 'caf\u00e9'}, command='loud'), 'value')
    os.write(1, b'late\\n')
sys.modules['trt_engine.verbs.loud.command'] = types.SimpleNamespace(command=command)
verbs_table.VERBS['loud'] = 'loud'
main.main()
"""


def test_what_native_code_and_children_print_on_stdout_is_not_part_of_the_result() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOUD, "loud", "--json"],
        capture_output=True, check=True, encoding="utf-8", env=os.environ | {"PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert json.loads(done.stdout)["value"] == "caf\u00e9"
    printed = ["child", "in the C library until the process ends", "late", "native", "python"]
    assert sorted(done.stderr.splitlines()) == printed


def test_a_closed_stdout_is_said_before_anything_is_done(tmp_path: Path) -> None:
    command = f'exec "{sys.executable}" -m trt_engine doctor >&-'
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 3
    assert done.stderr == "error: stdout is closed\nhint: `> /dev/null` discards the result\n"


def test_a_closed_stderr_costs_the_talk_alone() -> None:
    command = f'exec "{sys.executable}" -m trt_engine completion bash 2>&-'
    done = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0 and "_TRT_ENGINE_COMPLETE" in done.stdout


@pytest.mark.parametrize("args", [["inspect", "--json"], ["build"], pytest.param(["size"], marks=pytest.mark.slow)])
def test_a_name_that_is_not_utf_8_is_no_reason_for_a_trace(args: list[str], tmp_path: Path) -> None:
    import onnx_models

    model = onnx_models.conv_net(tmp_path / "net.onnx")
    try:
        model = model.rename(tmp_path / os.fsdecode(b"\xff.onnx"))
    except OSError as error:
        pytest.skip(f"this disk takes no such name: {error}")
    more = ["-o", "out", "--max-batch", "1", "--duration", "0.1s"] if args == ["size"] else []
    done = subprocess.run(
        [*PYTHON, args[0], model.name, *args[1:], *more],
        cwd=tmp_path, capture_output=True, check=False,
        env=os.environ | {"TRT_ENGINE_STORE": str(tmp_path / "store")},
    )  # fmt: skip
    said = done.stderr.decode()
    assert done.returncode == (0 if args[0] == "inspect" else 4), said
    assert "Traceback" not in said and "unexpected" not in said
    if "--json" in args:
        assert "\ufffd.onnx" in json.dumps(json.loads(done.stdout.decode()), ensure_ascii=False)


@pytest.mark.parametrize("args", [[], ["--json"]])
def test_a_stdout_of_another_encoding_gets_the_whole_result(args: list[str], tmp_path: Path) -> None:
    import onnx_models

    onnx_models.conv_net(tmp_path / "n\u00e4tz \u00b7 1.onnx")
    done = subprocess.run(
        [*PYTHON, "inspect", "n\u00e4tz \u00b7 1.onnx", *args],
        cwd=tmp_path, capture_output=True, check=False, env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout.decode("ascii")
    assert json.loads(said)["path"] == "n\u00e4tz \u00b7 1.onnx" if args else "model: n\\xe4tz \\xb7 1.onnx\n" in said


@pytest.mark.parametrize("verb", ["inspect", "build", "size"])
def test_a_loop_of_links_is_said_without_naming_an_output(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.onnx").symlink_to("b.onnx")
    (tmp_path / "b.onnx").symlink_to("a.onnx")
    assert run([verb, str(tmp_path / "a.onnx")]) == 4
    said = capsys.readouterr().err
    assert "`-o`" not in said and "Traceback" not in said


@pytest.mark.parametrize("verb", ["inspect", "build", "size", "bench"])
def test_a_model_that_may_not_be_read_is_a_model_error(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "m.onnx"
    model.write_bytes(b"x")
    model.chmod(0)
    if os.access(model, os.R_OK):
        pytest.skip("this user may read anything (root)")
    monkeypatch.chdir(tmp_path)
    assert run([verb, str(model)]) == 4
    assert "permission denied" in capsys.readouterr().err


def test_a_path_of_a_thousand_folders_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    deep = "/".join("d" for _ in range(1000))
    assert run(["example", "-o", deep]) in (2, 3)
    assert "unexpected" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    ["inspect X", "lint X", "build X -o out", "cast X --to fp16 -o out", "infer X --random", "bench X", "report X",
     "diff X X", "validate X", "run X",
     "pack X", "migrate X", "convert X -o out", "ranges X", "evaluate X --dataset X", "quantize X --to int8"],
)  # fmt: skip
def test_a_name_that_is_too_long_is_the_same_error_of_every_verb(
    line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(line.replace("X", "a" * 300).split()) == 2
    assert f"error: the name `{'a' * 40}...` is too long for this disk\n" in capsys.readouterr().err
