"""A loaded engine in other processes: refused at once after `fork`, loaded again after `spawn`; a process that ends
in the middle of the work.
"""

from __future__ import annotations

import ast
import concurrent.futures
import copy
import inspect
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trt_engine as te
from patience import HANG_S
from programs import run_python
from trt_engine.errors import UsageError
from trt_engine.protocols import RunnerBase
from trt_engine.runtime.process_bound import ProcessBound
from trt_engine.store import Store

SOURCES = Path(te.__file__).parent
X = {"x": np.ones((1, 3), np.float32)}
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this platform")

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "contexts": {"contexts": 2},
    "streams": {"contexts": 2, "streams": 1, "max_waiting": 4},
    "graphs": {"graphs": True},
    "batching": {"batching": te.Batching(max_batch=4)},
    "batched contexts": {"contexts": 2, "batching": te.Batching(max_batch=4, max_wait_ms=1)},
    "replicas": {"devices": ["fake:0", "fake:1"]},
    "replicas by use": {"devices": ["fake:0", "fake:1"], "balance": "by use"},
    "batched replicas": {"devices": ["fake:0", "fake:1"], "batching": te.Batching(max_batch=4)},
}


def said_in_child(*calls: Callable[..., object]) -> list[str]:
    """What a forked child says of each call, bound before the fork: its error, or `nothing`. A hang is killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(HANG_S))
        said = [said_of(call) for call in calls]
        os.write(write, json.dumps(said).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read, encoding="utf-8") as file:
        found: list[str] = json.loads(file.read())
        return found


def said_of(call: Callable[..., object]) -> str:
    try:
        call(*arguments_for(call))
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def arguments_for(call: Callable[..., object]) -> list[Any]:
    taken = inspect.signature(call).parameters.values()
    needed = [one.name for one in taken if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    return [[X] if name == "parts" else X for name in needed]


def objects_of(runner: te.InferenceEngine) -> list[ProcessBound]:
    """What a user can reach from a loaded engine, and its threads or contexts with it."""
    found: list[ProcessBound] = [runner]
    for item in found:
        inside = [getattr(item, "runner", None), *getattr(item, "runners", ())]
        found += [one for one in inside if isinstance(one, ProcessBound) and one not in found]
    return found


def methods_of(item: object) -> set[str]:
    """The public methods of its own class; `RunnerBase` has defaults that use nothing."""
    names = {name for kind in type(item).__mro__ if kind is not RunnerBase for name in vars(kind)}
    return {name for name in names if not name.startswith("_") and name != "close" and callable(getattr(item, name))}


@forks
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_every_method_is_refused_in_a_forked_child_and_close_does_nothing(
    kind: str, seal: Callable[..., te.Engine], double: Path
) -> None:
    with te.load(seal(double, batch=(1, 2, 4)), **KINDS[kind]) as runner:
        runner.infer(X)
        runner.infer_async(X).result(HANG_S)
        reached = objects_of(runner)
        if not ("batch" in kind or "replicas" in kind):
            reached.append(runner.bind(X))
        calls = [getattr(item, name) for item in reached for name in methods_of(item)]
        calls += [item for item in reached if callable(item)]
        said = said_in_child(*calls)
        for call, text in zip(calls, said, strict=True):
            assert text.startswith("UsageError: ") and f"was loaded in process {os.getpid()}, used in" in text, (
                call,
                text,
            )
        assert said_in_child(*(item.close for item in reached)) == ["nothing"] * len(reached)
        assert (runner.infer(X)["y"] == 2).all()  # the parent's goes on


@forks
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_server_is_refused_in_a_forked_child(engine_of_cpu: te.Engine) -> None:
    pytest.importorskip("httptools")
    with te.serve(engine_of_cpu, http_port=0, grpc_port=-1, metrics_port=-1) as server:
        said = said_in_child(server.wait, server.drain, server.close)
        assert ["was loaded in process" in text for text in said] == [True, True, False] and said[2] == "nothing"


def test_whatever_keeps_threads_refuses_them_in_a_forked_child() -> None:
    """Found by reading the sources: a class that keeps a thread or a pool of threads is bound to its process."""
    parts = {"UtilizationMonitor", "CopyThreads", "GrpcServer"}  # of Replicas, ContextPool and Server, which are
    parts |= {"CropStage", "FramePipeline", "VideoStream"}  # of one call that plays clips
    keeps: set[str] = set()
    bound = {"InferenceEngine"}
    sources = (path.read_text("utf-8") for path in SOURCES.rglob("*.py"))
    for source in (text for text in sources if "ProcessBound" in text or "Thread" in text):
        for kind in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
            if any(ast.unparse(base) == "ProcessBound" for base in kind.bases):
                bound.add(kind.name)
            for node in ast.walk(kind):
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                    target = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
                    made = {ast.unparse(call.func) for call in ast.walk(node.value) if isinstance(call, ast.Call)}
                    if target.startswith("self.") and made & {"threading.Thread", "Thread", "ThreadPoolExecutor"}:
                        keeps.add(kind.name)
    assert {"Batcher", "InferenceEngine", "Server"} <= keeps
    assert keeps <= bound | parts


@pytest.fixture
def engine_of_cpu(double: Path, tmp_path: Path) -> te.Engine:
    return te.build(double, batch=(1, 2, 4), out=tmp_path / "double.engine.onnx")


def ask(runner: te.InferenceEngine) -> tuple[int, float, str]:
    with runner:
        return os.getpid(), float(runner.infer(X)["y"][0, 0]), runner.runtime_info.get("batching", "")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"contexts": 2}, {"batching": te.Batching(max_batch=4)}], ids=str)
def test_a_spawned_process_loads_the_engine_again(engine_of_cpu: te.Engine, settings: dict[str, Any]) -> None:
    spawn = multiprocessing.get_context("spawn")
    with te.load(engine_of_cpu, **settings) as runner:
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
            pid, value, batching = pool.submit(ask, runner).result(HANG_S)
        assert pid != os.getpid() and value == 2.0 and bool(batching) == ("batching" in settings)
        assert not runner.closed


@pytest.mark.parametrize("given", ["path", "bytes", "relative path"])
def test_a_pickled_engine_is_how_it_was_loaded(
    given: str, engine_of_cpu: te.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(engine_of_cpu.path.parent)
    source: Any = {"path": engine_of_cpu.path, "relative path": engine_of_cpu.path.name}.get(given)
    first = (
        te.load(engine_of_cpu.path.read_bytes(), passport=engine_of_cpu.passport) if source is None else te.load(source)
    )
    raw = pickle.dumps(first)
    first.close()
    monkeypatch.chdir("/")
    with pickle.loads(raw) as again, copy.deepcopy(again) as third:
        assert again.engine.passport == engine_of_cpu.passport
        assert (third.infer(X)["y"] == 2).all()
    with pytest.raises(UsageError, match="is closed"):
        pickle.dumps(again)


def test_what_belongs_to_one_process_says_so_when_it_is_pickled(engine_of_cpu: te.Engine) -> None:
    with te.load(engine_of_cpu, batching=te.Batching()) as runner, pytest.raises(UsageError, match="cannot be pickled"):
        pickle.dumps(runner.runner)


@pytest.mark.full
@forks
def test_forked_workers_of_a_torch_data_loader_are_refused_the_engine(engine_of_cpu: te.Engine) -> None:
    torch = pytest.importorskip("torch")
    with te.load(engine_of_cpu) as runner:
        loader = torch.utils.data.DataLoader(
            Rows(runner), batch_size=None, num_workers=1, multiprocessing_context="fork"
        )
        with pytest.raises(Exception, match="was loaded in process"):
            list(loader)


class Rows:
    """A dataset that asks a loaded engine."""

    def __init__(self, runner: te.InferenceEngine) -> None:
        self.runner = runner

    def __len__(self) -> int:
        return 2

    def __getitem__(self, at: int) -> float:
        return float(self.runner.infer(X)["y"][0, 0])


PROGRAM = """
import sys, threading, time
import numpy as np
import trt_engine as te

x, ends = np.ones((1, 3), np.float32), []

def ask(engine):
    while True:
        try:
            assert (engine.infer(x)["y"] == 2).all()
        except te.TrtEngineError as error:
            ends.append(error.message)
            return

def crowd(engine):
    threads = [threading.Thread(target=ask, args=(engine,), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    return threads

settings = {"batching": {"max_wait_ms": 1.0}} if "batched" in sys.argv else {"contexts": 2}
"""
TOLD = """
try:
    with te.load(sys.argv[1], **settings) as engine:
        threads = crowd(engine)
        engine.infer(x)
        print("at work", flush=True)
        while True:  # a signal just before one long sleep would be heard after it
            time.sleep(0.05)
except KeyboardInterrupt:
    for thread in threads:
        thread.join(100)
    print(len(ends), "callers told:", *sorted(set(ends)))
"""


@pytest.fixture
def engine(double: Path, tmp_path: Path) -> Path:
    return te.build(
        double, backend="fake", device="fake", batch=(1, 2, 4), out=tmp_path / "d.fake", store=Store(tmp_path / "store")
    ).path


@pytest.mark.parametrize("kind", ["batched", "pool"])
def test_an_interrupted_process_tells_its_callers_and_ends(engine: Path, kind: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM + TOLD, str(engine), kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        process.send_signal(signal.SIGINT)
        told, complaints = process.communicate(timeout=HANG_S)
    assert told.startswith("4 callers told: ")
    assert "closed" in told
    assert "Traceback" not in complaints
    assert process.returncode == 0


FORKED = """
engine = te.load(sys.argv[1], **settings)
engine.infer(x)
child = os.fork()
if child == 0:
    sys.exit(7)  # its own way out: the threads, the locks and the device are the parent's
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
engine.infer(x)
engine.close()
print("closed")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this platform")
def test_a_child_that_was_forked_ends_without_touching_what_its_parent_has_loaded(engine: Path) -> None:
    held = "engine.runner._admission._lock.acquire()\n"  # a thread of the parent was inside when it forked
    forked = FORKED.replace("child = os.fork()", held + "child = os.fork()").replace(
        "print(os.wait", "engine.runner._admission._lock.release()\nprint(os.wait"
    )
    done = run_python("-c", "import os\n" + PROGRAM + forked, str(engine), "batched", timeout=HANG_S)
    assert (done.returncode, done.stdout) == (0, "7\nclosed\n"), done.stderr
