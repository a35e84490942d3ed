"""The process a profiler watches: its range, its ranges of NVTX, and an answer that is true at every moment."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nsight_tools
from patience import HANG_S, text_of, until
from trt_engine.config.bench import BenchConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.profiling.instruments.target import TargetOutcome, TargetRequest, encode, read_outcome

TOOLS = Path(nsight_tools.__file__).parent


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(engine: Path, tmp_path: Path) -> Start:
    """Starts the process on a request; `paths` come before everything Python imports."""

    def call(
        *paths: Path, environment: dict[str, str] | None = None, config: BenchConfig | None = None, **asked: Any
    ) -> subprocess.Popen[bytes]:
        request = TargetRequest(
            str(engine), config or BenchConfig(), asked.pop("runtime", RuntimeConfig()), **({"warmup": 1} | asked)
        )
        request.outcome_path = str(tmp_path / "answer.json")
        (tmp_path / "request.json").write_bytes(encode(request))
        whole = os.environ | {"STAND_IN_EVENTS": str(tmp_path / "events.jsonl")} | (environment or {})
        whole["PYTHONPATH"] = ":".join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
        words = [sys.executable, "-P", "-m", "trt_engine.profiling.instruments.target", str(tmp_path / "request.json")]
        return subprocess.Popen(words, env=whole, stderr=subprocess.PIPE)

    return call


def answer(tmp_path: Path) -> TargetOutcome:
    found = read_outcome(tmp_path / "answer.json")
    assert found is not None
    return found


def events(tmp_path: Path) -> list[dict[str, Any]]:
    """What was told; of a process that is at work the last line may not be whole."""
    whole, _, _ = text_of(tmp_path / "events.jsonl").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, said = process.communicate(timeout=HANG_S)
    return process.returncode, said.decode()


def test_the_range_holds_the_inferences_that_count_and_nothing_else(start: Start, tmp_path: Path) -> None:
    assert ended(start(TOOLS / "injected", TOOLS / "ranges", inferences=3, warmup=2)) == (0, "")
    told = events(tmp_path)
    assert [item["event"] for item in told] == ["start", *["push", "pop"] * 3, "stop"]
    assert [item["text"] for item in told if item["event"] == "push"] == [f"trt_engine inference {n}" for n in range(3)]
    found = answer(tmp_path)
    assert (found.stage, found.inferences, found.complete, found.error) == ("done", 3, True, None)
    assert (found.switch, found.ranges, found.device) == ("cuda.bindings", "nvtx", "fake:0")
    for (begin, end), push, pop in zip(found.windows, told[1::2], told[2::2], strict=False):
        assert push["at"] <= begin <= end <= pop["at"]
    assert found.facts["computes"] == "onnx.reference on the host"


def test_inputs_of_a_file_are_fed(start: Start, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", images=np.zeros((3, 3, 8, 8), np.float32))
    process = start(TOOLS / "injected", inferences=1, config=BenchConfig(inputs=tmp_path / "x.npz"))
    assert ended(process)[0] == 0 and answer(tmp_path).inferences == 1
    np.savez(tmp_path / "x.npz", images=np.zeros((3, 3, 9, 9), np.float32))
    assert ended(start(TOOLS / "injected", config=BenchConfig(inputs=tmp_path / "x.npz")))[0] == 1
    error = answer(tmp_path).error
    assert error is not None and error.kind == "FeedError"


def test_without_nvtx_the_windows_are_told_all_the_same(start: Start, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "nvtx.py").write_text("raise ImportError('not here')\n")
    code, _ = ended(start(hidden, TOOLS / "injected", inferences=2, config=BenchConfig(graph=False, batch=3)))
    found = answer(tmp_path)
    assert code == 0 and len(found.windows) == 2 and found.graph is False
    assert found.ranges in ("", "libnvToolsExt")


def test_a_stop_in_the_middle_ends_after_the_inference_at_hand(start: Start, tmp_path: Path) -> None:
    process = start(TOOLS / "injected", TOOLS / "ranges", inferences=1_000_000)
    until(lambda: sum(item["event"] == "pop" for item in events(tmp_path)) >= 3, "three inferences are done")
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 0
    found, told = answer(tmp_path), events(tmp_path)
    assert found.complete is False and found.stage == "done" and 3 <= found.inferences < 1_000_000
    assert told[-1]["event"] == "stop" and sum(item["event"] == "pop" for item in told) == found.inferences


def test_an_error_is_the_answer_with_its_own_type(start: Start, tmp_path: Path) -> None:
    code, said = ended(start(TOOLS / "injected", runtime=RuntimeConfig(options={"memory": "1KiB"})))
    found = answer(tmp_path)
    assert code == 1 and "MemoryExhausted" in said
    assert found.error is not None and found.error.kind == "MemoryExhausted" and found.stage == "loading"
    code, _ = ended(start(TOOLS / "injected", config=BenchConfig(batch=9)))
    found = answer(tmp_path)
    assert found.error is not None and found.error.kind == "ProfileError" and found.error.hint


def test_a_range_that_cannot_be_opened_is_told_as_such(start: Start, tmp_path: Path) -> None:
    assert ended(start(TOOLS / "injected", environment={"STAND_IN_START": "100"}))[0] == 1
    found = answer(tmp_path)
    assert found.error is not None and found.stage == "range"
    assert found.error.message == "cudaProfilerStart of cuda.bindings answered 100"


def test_whoever_is_killed_leaves_behind_how_far_it_came(start: Start, tmp_path: Path) -> None:
    process = start(TOOLS / "injected", TOOLS / "ranges", inferences=1_000_000)
    until(lambda: '"capturing"' in text_of(tmp_path / "answer.json"), "it captures")
    process.kill()
    ended(process)
    found = answer(tmp_path)
    assert (found.stage, found.error, found.pid) == ("capturing", None, process.pid)


# a library as the loader finds it, in place of CUDA's: each function writes its name
LIBRARY = """
#include <stdio.h>
#include <stdlib.h>
static int tell(const char *what) {
  FILE *file = fopen(getenv("STAND_IN_CALLS"), "a");
  fprintf(file, "%s\\n", what);
  fclose(file);
  return 0;
}
int cudaSetDevice(int number) { return tell("device"); }
int cudaProfilerStart(void) { return tell("start"); }
int cudaProfilerStop(void) { return tell("stop"); }
int nvtxRangePushA(const char *text) { return tell(text); }
int nvtxRangePop(void) { return tell("pop"); }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler to make a library with")
def test_libraries_the_loader_finds_serve_where_no_package_does(start: Start, tmp_path: Path) -> None:
    (tmp_path / "stub.c").write_text(LIBRARY)
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for name in ("libcudart.so.13", "libnvToolsExt.so.1"):
        made = ["cc", "-shared", "-fPIC", "-o", str(libraries / name), str(tmp_path / "stub.c")]
        subprocess.run(made, check=True)
    hidden = tmp_path / "hidden"
    (hidden / "cuda" / "bindings").mkdir(parents=True)
    (hidden / "cuda" / "bindings" / "__init__.py").write_text("raise ImportError('not here')\n")
    (hidden / "nvtx.py").write_text("raise ImportError('not here')\n")
    said = tmp_path / "calls"
    environment = {"LD_LIBRARY_PATH": str(libraries), "STAND_IN_CALLS": str(said)}
    assert ended(start(hidden, inferences=2, environment=environment)) == (0, "")
    calls = said.read_text().split("\n")
    assert calls == [
        "device", "start", "trt_engine inference 0", "pop", "trt_engine inference 1", "pop", "stop", "",
    ]  # fmt: skip
    found = answer(tmp_path)
    assert (found.switch, found.ranges) == ("libcudart.so.13", "libnvToolsExt")
