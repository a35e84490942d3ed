"""Ctrl-C, SIGTERM and SIGHUP end a command: in order where Python runs, by force while a library computes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto as T
from onnx import helper as h

from patience import HANG_S, PATIENT_COMMAND, until
from trt_engine.atomic_io import sweep_staged
from trt_engine.command_line import signals
from trt_engine.vision.spec import Postprocess, Preprocess, Vision, declare

_VERB = """
import contextlib, os, subprocess, sys, tempfile, time, types, click
from pathlib import Path
from trt_engine.cli import main, verbs_table
from trt_engine.command_line import options, output, signals
from trt_engine.atomic_io import staging_folder, write_atomic
{settings}
def tell(text):
    print(text, flush=True, file=output.result_stream())
@options.verb()
def command():
{work}
sys.modules['trt_engine.verbs.works.command'] = types.SimpleNamespace(command=command)
verbs_table.VERBS['works'] = 'works'
main.main()
"""
_NATIVE = """
    import numpy as np, onnxruntime
    child = subprocess.Popen(['sleep', '600'], start_new_session=True)
    temporary = tempfile.TemporaryDirectory(dir='.')
    with staging_folder(Path('engine')) as folder:
        (folder / 'half').write_text('half')
        session = onnxruntime.InferenceSession('endless.onnx')
        tell(child.pid)
        session.run(None, {'x': np.zeros((1, 4), np.float32)})
"""


def endless(path: Path, *, sometimes: bool = False) -> Path:
    """A model whose `Loop` runs 2^62 times, or does so in one inference of some hundred."""
    x, y = (h.make_tensor_value_info(name, T.FLOAT, ["batch", 4]) for name in ("v", "v1"))
    body = h.make_graph(
        [h.make_node("Identity", ["c"], ["c1"]), h.make_node("Add", ["v", "one"], ["v1"])], "body",
        [h.make_tensor_value_info("i", T.INT64, []), h.make_tensor_value_info("c", T.BOOL, []), x],
        [h.make_tensor_value_info("c1", T.BOOL, []), y], [h.make_tensor("one", T.FLOAT, [1], [1.0])],
    )  # fmt: skip
    graph = h.make_graph(
        [h.make_node("MatMul", ["x", "w"], ["m"]), h.make_node("Loop", ["trips", "true", "m"], ["y"], body=body)], "endless",
        *([h.make_tensor_value_info(name, T.FLOAT, ["batch", 4])] for name in "xy"),
        [h.make_tensor("trips", T.INT64, [], [2**62]), h.make_tensor("true", T.BOOL, [], [True]),
         h.make_tensor("w", T.FLOAT, [4, 4], [0.5] * 16)],
    )  # fmt: skip
    if sometimes:
        loop = graph.node.pop()
        loop.input[0] = "count"
        graph.initializer.extend([h.make_tensor("rare", T.FLOAT, [], [0.995]), h.make_tensor("none", T.INT64, [], [0])])
        graph.node.extend([
            h.make_node("RandomUniformLike", ["trips"], ["r"], dtype=T.FLOAT, seed=1.0),  # the same numbers in each session
            h.make_node("Greater", ["r", "rare"], ["now"]), h.make_node("Where", ["now", "trips", "none"], ["count"]), loop,
        ])  # fmt: skip
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9), path)
    return path


def pictures(folder: Path) -> None:
    """A classifier of pictures that computes for ever, and data for it."""
    model = onnx.load(endless(folder / "pictures.onnx"))
    before = [
        h.make_node("GlobalAveragePool", ["images"], ["mean"]), h.make_node("Flatten", ["mean"], ["flat"]),
        h.make_node("MatMul", ["flat", "v"], ["first"], name="first"), h.make_node("Relu", ["first"], ["x"]),
    ]  # fmt: skip
    after = [*model.graph.node]
    del model.graph.node[:], model.graph.input[:]
    model.graph.node.extend([*before, *after])
    model.graph.input.append(h.make_tensor_value_info("images", T.FLOAT, ["batch", 3, 4, 4]))
    model.graph.initializer.append(h.make_tensor("v", T.FLOAT, [3, 4], [0.5] * 12))
    onnx.save(model, folder / "pictures.onnx")
    classes = Postprocess("classify", classes=("a", "b", "c", "d"), activation="softmax")
    declare(folder / "pictures.onnx", Vision(Preprocess((4, 4)), classes), folder / "pictures.onnx")
    images = np.zeros((8, 4, 4, 3), np.uint8)
    np.savez(folder / "pictures.npz", images=images, labels=np.zeros(8, np.int64))
    np.savez(folder / "calibration.npz", images=np.zeros((4, 3, 4, 4), np.float32))


def large(path: Path) -> Path:
    """A chain of 90,000 nodes: a while's work for the verbs that only read."""
    count = 90_000
    nodes = [h.make_node("Relu", [f"t{at}"], [f"t{at + 1}"]) for at in range(count)]
    ends = ([h.make_tensor_value_info(f"t{at}", T.FLOAT, ["batch", 4])] for at in (0, count))
    onnx.save(
        h.make_model(h.make_graph(nodes, "large", *ends), opset_imports=[h.make_opsetid("", 17)], ir_version=9), path
    )
    return path


def started(command: list[str], folder: Path) -> subprocess.Popen[str]:
    """The command, hearing SIGINT as one in a terminal does."""
    (folder / "temporary").mkdir(exist_ok=True)
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        env=os.environ | {"TRT_ENGINE_STORE": str(folder / "store"), "TMPDIR": str(folder / "temporary")},
    )  # fmt: skip


def working(folder: Path, work: str, settings: str = "", *args: str) -> subprocess.Popen[str]:
    (folder / "works.py").write_text(_VERB.format(work=work, settings=settings))
    return started([sys.executable, str(folder / "works.py"), "works", *args], folder)


def ready(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_library_that_computes_for_ever_is_ended_and_leaves_nothing(tmp_path: Path) -> None:
    endless(tmp_path / "endless.onnx")
    process = working(tmp_path, _NATIVE, "signals.NATIVE_CALL_S = 1.5", "--json")
    child = int(ready(process))
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert [line for line in err.splitlines() if line.startswith("error")] == ["error: interrupted"]
    assert json.loads(out)["error"]["exit_code"] == 130
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["endless.onnx", "temporary", "works.py"]


@pytest.mark.slow
def test_a_key_that_is_held_down_ends_a_command_whose_end_takes_long(tmp_path: Path) -> None:
    ending = """
    try:
        tell('ready')
        time.sleep(600)
    finally:
        time.sleep(600)
    """
    process = working(tmp_path, ending, "signals.INTERRUPT_INTERVAL_S = 0.2")
    ready(process)
    until = time.monotonic() + HANG_S
    while process.poll() is None and time.monotonic() < until:
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130 and err.startswith("error: interrupted\n"), err


@pytest.mark.slow
def test_a_second_press_in_haste_breaks_nothing_and_is_not_ignored(tmp_path: Path) -> None:
    ending = """
    try:
        tell('ready')
        time.sleep(600)
    finally:
        tell('ending')
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(600)
        tell('broken')
    """
    settings = "signals.SHUTDOWN_S = signals.INTERRUPT_INTERVAL_S = 600.0; signals.PRESS_WINDOW_S = 0.0"
    process = working(tmp_path, ending, settings)
    ready(process)
    process.send_signal(signal.SIGINT)
    assert ready(process) == "ending"
    gives_up = time.monotonic() + HANG_S
    while process.poll() is None and time.monotonic() < gives_up:  # the first two may be read together, as one press
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130 and out == "" and err.startswith("error: interrupted\n"), err


@pytest.mark.slow
def test_an_end_that_never_ends_is_forced_and_says_so_once(tmp_path: Path) -> None:
    ending = """
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            tell('ready')
            time.sleep(600)
    """
    process = working(tmp_path, ending, "signals.SHUTDOWN_S = 0.2")
    ready(process)
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130 and err.count("error: interrupted") == 1


@pytest.mark.slow
def test_a_step_that_may_take_longer_is_waited_for(tmp_path: Path) -> None:
    ending = """
    from trt_engine.workers.process import extend_shutdown
    try:
        tell('ready')
        time.sleep(600)
    except KeyboardInterrupt:
        extend_shutdown(600)
        time.sleep(1)
        tell('whole')
    """
    process = working(tmp_path, ending, "signals.SHUTDOWN_S = 0.2")
    ready(process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, out) == (0, "whole\n"), err


_HOLDS_THE_LOCK = """
    import itertools
    child = subprocess.Popen(['sleep', '600'], start_new_session=True)
    tell(child.pid)
    sum(itertools.repeat(0))
"""


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children()


def ended(one: psutil.Process) -> bool:
    return not one.is_running() or one.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_library_that_lets_no_thread_of_python_run_is_killed_with_its_children(
    number: signal.Signals, tmp_path: Path
) -> None:
    settings = "from trt_engine.command_line import signals; signals.NO_ANSWER_S = 0.5"
    process = working(tmp_path, _HOLDS_THE_LOCK, settings)
    ready(process)
    family, busy = children(process), psutil.Process(process.pid).cpu_times().user + 0.2
    until(lambda: psutil.Process(process.pid).cpu_times().user > busy, "it computes")
    process.send_signal(number)
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == -signal.SIGKILL and err.startswith("error: interrupted\nhint:"), err
    assert len(family) == 2 and all(ended(one) for one in psutil.wait_procs(family, timeout=HANG_S)[1])


@pytest.mark.parametrize("how", [pytest.param("by itself", marks=pytest.mark.slow), "by a signal", "killed"])
def test_the_sentinel_ends_with_its_command(how: str, tmp_path: Path) -> None:
    process = working(tmp_path, "    tell('ready')\n    sys.stdin.read()")
    ready(process)
    (sentinel,) = children(process)
    if how != "by itself":
        process.send_signal(signal.SIGTERM if how == "by a signal" else signal.SIGKILL)
    process.communicate(timeout=HANG_S)  # ends its stdin
    assert process.returncode == {"by itself": 0, "by a signal": 130, "killed": -signal.SIGKILL}[how]
    psutil.wait_procs([sentinel], timeout=HANG_S)
    assert ended(sentinel)


def test_a_library_that_crashes_the_command_is_an_error_with_the_name_of_the_signal(tmp_path: Path) -> None:
    process = working(tmp_path, "    os.kill(os.getpid(), signal.SIGFPE)", "import signal")
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == -signal.SIGFPE
    assert err.startswith("error: a library crashed the command: floating") and err.count("\n") == 2, err


@pytest.mark.slow
def test_a_crash_while_a_session_is_made_names_the_option_that_avoids_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed: list[str] = []
    monkeypatch.setattr(signals, "_print", printed.append)
    made = b'  File "x/onnxruntime_inference_collection.py", line 789 in _create_inference_session'
    signals._report_crash(b"Fatal Python error: Segmentation fault\n\n" + made)
    assert "hint: " in printed[0] and "-O graph_optimization=extended" in printed[0]


def test_an_interruption_that_a_library_turns_into_an_error_of_its_own_is_one(tmp_path: Path) -> None:
    """As compiled modules do while they are imported."""
    work = """
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    except KeyboardInterrupt:
        raise ImportError('multiarray failed to import') from None
    """
    process = working(tmp_path, work, "import signal")
    _, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, err.splitlines()[0]) == (130, "error: interrupted")


@pytest.mark.slow
def test_a_command_whose_sentinel_was_killed_ends_in_order(tmp_path: Path) -> None:
    process = working(tmp_path, "    tell('ready')\n    time.sleep(600)")
    ready(process)
    (sentinel,) = children(process)
    sentinel.kill()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, err.splitlines()[0]) == (130, "error: interrupted")


VERBS = [
    "build endless.onnx -o e.engine",
    "infer endless.onnx --random",
    "bench endless.onnx",
    "bench endless.onnx --isolate",
    "size endless.onnx -o size",
    "profile endless.onnx -o profile",
    "compare endless.onnx endless.onnx",
    "quantize endless.onnx -o q.onnx --to int8 --calib-data data.npz",
    "ranges endless.onnx --calib-data data.npz",
    "run plan.yaml -o run",
    "evaluate pictures.onnx --dataset pictures.npz",
    "search pictures.onnx --dataset pictures.npz --calib-data calibration.npz -o found",
    "bundle model_meta.json -o engines",
    "convert endless.onnx -o c.onnx",
    "cast endless.onnx --to fp16 -o c.onnx",
    "convert large.onnx -o c.onnx",
    "inspect large.onnx",
    "lint large.onnx",
]


def test_the_limits_of_an_interruption_add_up_to_less_than_five_seconds() -> None:
    """What the documentation promises; the tests of whole commands have no clock."""
    own = max(signals.NATIVE_CALL_S, signals.SHUTDOWN_S)
    assert own + signals._POLL_S + signals._CLEANUP_S + signals._REPORT_S < 5
    assert own + signals._POLL_S + signals.FORCED_S < 5 and signals.NO_ANSWER_S < 5
    assert signals.STOP_RUNS_S < own < signals.NO_ANSWER_S


def cpu_s(process: subprocess.Popen[str]) -> float:
    """CPU seconds of the command and its descendants; infinite once it has ended."""
    total = 0.0
    if process.poll() is not None:
        return float("inf")
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(one.cpu_times()[:2])
    return total


@functools.cache
def start_cpu_s() -> float:
    """CPU seconds a small command takes on this machine, about one: nearly all of it imports."""
    code = "import resource, onnxruntime, onnx, trt_engine.cli.click_app, trt_engine.verbs.bench.run as verb; "
    used = "print(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))"
    return float(subprocess.run([sys.executable, "-c", code + used], capture_output=True, text=True, check=True).stdout)


def interrupted(
    words: str, number: signal.Signals, folder: Path, after: float = 4.0
) -> tuple[subprocess.Popen[str], str, str]:
    """The command, which gets the signal after work of `after` starts, never ends without it, and ends by one."""
    process, begun_s = started([*PATIENT_COMMAND, *words.split()], folder), after * start_cpu_s()
    try:
        until(lambda: cpu_s(process) >= begun_s, "it works")
        assert process.poll() is None, f"it ended by itself: {process.communicate()[1]}"
        process.send_signal(number)
        out, err = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    assert "Traceback" not in out + err
    assert len([line for line in err.splitlines() if "error: " in line]) == 1, err
    for place in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        sweep_staged(place)  # what a killed child staged is the next command's to remove
    assert not list(folder.rglob("*.tmp"))
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(one.info["cmdline"] or ())]
    return process, out, err


SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@pytest.mark.slow
@SIGNALS
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_ends_while_a_model_computes_for_ever(verb: str, number: signal.Signals, tmp_path: Path) -> None:
    endless(tmp_path / "endless.onnx")
    pictures(tmp_path)
    large(tmp_path / "large.onnx")
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 4), np.float32))
    (tmp_path / "plan.yaml").write_text("models: [endless.onnx]\n")
    (tmp_path / "model_meta.json").write_text('{"components": {"a": "endless.onnx"}}')
    # a verb that only reads the large model ends by itself, after the work of eight starts; the others compute for ever
    process, _, _ = interrupted(verb, number, tmp_path, 1.5 if "large.onnx" in verb else 4.0)
    assert process.returncode == 130
    left = {path.name for path in (tmp_path / "temporary").iterdir()}
    assert left <= {".ses"}  # ONNX Runtime's own, written by every process that has imported it


SCRIPT = """
import sys, torch
class Forward(torch.nn.Module):
    def forward(self, x):
        n = 0
        while n < 2 ** 62:
            n += 1
        return x + n
class State(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.n = 1
    def forward(self, x):
        return x + self.n
    @torch.jit.export
    def __getstate__(self):
        return (self.n, self.training)
    @torch.jit.export
    def __setstate__(self, state: tuple[int, bool]):
        n = 0
        while n < 2 ** 62:
            n += 1
        self.n = n
        self.training = state[1]
torch.jit.script(globals()[sys.argv[1]]()).save("net.pt")
"""


@pytest.mark.full
@pytest.mark.slow
@SIGNALS
@pytest.mark.parametrize(("kind", "code"), [("Forward", 130), ("State", -signal.SIGKILL)])
def test_an_endless_torchscript_ends(kind: str, code: int, number: signal.Signals, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "make.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "-W", "ignore", "make.py", kind], cwd=tmp_path, check=True)
    process, _, err = interrupted("convert net.pt -o net.onnx --input 1x4", number, tmp_path, 12)
    assert process.returncode == code and "error: interrupted" in err
    assert not (tmp_path / "net.onnx").exists()
