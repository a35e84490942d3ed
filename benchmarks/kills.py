"""SIGKILL at random moments, and while something is staged: what a verb leaves must be whole, and its next run ends with 0.

    python benchmarks/kills.py --kills 200 --staged 60 [--seed 1] [--merge]    prints a table and writes the record

Each case forks a process that has imported the package, runs a verb in it and kills it. After that every engine, record and
copy that is there opens, the same command again ends with 0, and nothing staged is left beside what it wrote.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime  # noqa: E402, F401 - loaded before the fork

import trt_engine as te  # noqa: E402
from onnx_models import FLOAT, node, save  # noqa: E402
from trt_engine.cli.main import run as command_line  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "kills-cpu.jsonl"
STAGED = "*.tmp"
LONGEST_S = 120.0


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--staged", type=int, default=60, help="of these while a staged path is there")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--merge", action="store_true", help="add to the record")
    options = parser.parse_args(args)
    pick, rows, lengths = random.Random(options.seed), list[dict[str, Any]](), dict[str, float]()
    while len(rows) < options.kills or sum(row["staged"] for row in rows) < options.staged:
        wants = sum(row["staged"] for row in rows) < options.staged
        verb = pick.choice([*VERBS])
        with tempfile.TemporaryDirectory() as name:
            row = {"seed": options.seed, "verb": verb} | _case(verb, Path(name), pick, lengths, wants)
        if row.pop("over") and not row["faults"]:
            continue  # it had ended
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    mode = "a" if options.merge else "w"
    with RESULTS.open(mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(table(rows))
    return int(any(row["faults"] for row in rows))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One row a verb: kills, those while something was staged, staged paths that were left and swept, faults."""
    lines = ["| verb | kills | while staged | left staged | faults |", "| --- | --- | --- | --- | --- |"]
    count = {
        key: Counter({v: sum(int(bool(r[key])) for r in rows if r["verb"] == v) for v in VERBS})
        for key in ("staged", "left", "faults")
    }
    for verb in VERBS:
        total = sum(row["verb"] == verb for row in rows)
        lines.append(
            f"| {verb} | {total} | {count['staged'][verb]} | {count['left'][verb]} | {count['faults'][verb]} |"
        )
    return "\n".join(lines)


def _case(verb: str, folder: Path, pick: random.Random, lengths: dict[str, float], wants: bool) -> dict[str, Any]:
    _write_inputs(folder)
    argv = VERBS[verb](folder)
    began = time.monotonic()
    child = _start(argv, folder)
    staged, over = False, False
    moment = pick.uniform(0.05, 1.0) * lengths.get(verb, 2.0)
    while time.monotonic() - began < LONGEST_S:
        over = os.waitpid(child, os.WNOHANG)[0] != 0
        staged = bool(_staged(folder))
        if over or (staged and wants) or (not wants and time.monotonic() - began > moment):
            break
        time.sleep(0.002)
    if over:
        lengths[verb] = time.monotonic() - began
    else:
        if staged and wants:
            time.sleep(pick.choice((0, 0, pick.uniform(0, 0.02))))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    left = _staged(folder)
    faults = [*_broken(folder)]
    again = _start(argv, folder)
    code = _wait(again)
    text = (folder / "log").read_text()[-300:]
    faults += [f"the next run ended with {code}: {text}"] if code else []
    faults += [f"left {path.name}" for path in _staged(folder)] + [*_broken(folder)]
    return {"staged": staged and not over, "over": over, "left": len(left), "faults": faults}


def _write_inputs(folder: Path) -> None:
    rng = np.random.default_rng(0)
    shape = {"x": (FLOAT, ["n", 512])}
    weights = {f"w{at}": rng.standard_normal((512, 512), np.float32) * 0.04 for at in range(3)}
    nodes = [node("MatMul", "x w0", "a"), node("MatMul", "a w1", "b"), node("MatMul", "b w2", "y")]
    save(folder / "m.onnx", nodes, shape, {"y": (FLOAT, ["n", 512])}, weights)
    save(folder / "first.onnx", [node("Add", "x x", "y")], {"x": (FLOAT, ["n", 3])}, {"y": (FLOAT, ["n", 3])})
    save(folder / "second.onnx", [node("Neg", "z", "o")], {"z": (FLOAT, ["n", 3])}, {"o": (FLOAT, ["n", 3])})
    meta = {
        "name": "pair", "components": {"first": "first.onnx", "second": "second.onnx"}, "dimensions": {"n": [1, 2, 8]},
        "connections": [{"from": "first.y", "to": "second.z"}],
    }  # fmt: skip
    (folder / "model_meta.json").write_text(json.dumps(meta))
    (folder / "plan.yaml").write_text(
        "models: [m.onnx]\nbatches: [1, 4]\nmodes: [build, bench]\nwarmup: 2\niterations: 3\nbench: {duration: 50ms}\n"
    )
    np.savez(folder / "x.npz", x=rng.standard_normal((8, 512), np.float32))


def _argv(text: str) -> Callable[[Path], list[str]]:
    return lambda folder: [str(folder / word[1:]) if word[0] == "@" else word for word in text.split()]


VERBS: dict[str, Callable[[Path], list[str]]] = {
    "build": _argv("build @m.onnx -o @out.engine.onnx --no-parity --batch 1:2:8 --overwrite"),
    "build into the store": _argv("infer @m.onnx --random"),
    "cast": _argv("cast @m.onnx --to fp16 --no-parity -o @out.onnx --overwrite"),
    "quantize": _argv("quantize @m.onnx --to int8 --calib-data @x.npz -o @out.onnx --overwrite"),
    "bundle": _argv("bundle @model_meta.json -o @engines --no-parity"),
    "run": _argv("run @plan.yaml -o @sweep"),
    "serve that loads": _argv("@serve"),
}


def _start(argv: list[str], folder: Path) -> int:
    """The process that runs the command, in a group of its own."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    code = 70
    try:
        os.environ |= {"TRT_ENGINE_STORE": str(folder / "store"), "TMPDIR": str(folder)}
        os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        os.dup2(1, 2)
        os.chdir(folder)
        code = _serve(folder) if argv[0].endswith("/serve") else command_line(argv)
    finally:
        os._exit(code)


def _serve(folder: Path) -> int:
    """A server that builds the models of a repository as they come, and reloads one of them."""
    repository = folder / "models"
    shutil.rmtree(repository, ignore_errors=True)
    settings: dict[str, Any] = {"http_port": 0, "grpc_port": -1, "metrics_port": -1, "poll_interval_s": 0.05}
    (repository / "m" / "1").mkdir(parents=True)
    shutil.copy(folder / "m.onnx", repository / "m" / "1" / "model.onnx")
    with te.serve(
        (), model_repository=repository, model_control_mode="poll", build_models=True, drain_delay_s=0.0, **settings
    ) as server:
        for number in (2, 3):
            (repository / "m" / str(number)).mkdir()
            shutil.copy(folder / "m.onnx", repository / "m" / str(number) / "model.onnx")
            time.sleep(0.5)
        assert server.http_address
    return 0


def _wait(child: int) -> int:
    end = time.monotonic() + LONGEST_S
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 124


def _staged(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [path for path in folder.rglob(STAGED) if path.name.startswith(".")]
    return []


def _broken(folder: Path) -> Iterator[str]:
    """What is there under its own name and is not whole."""
    for path in folder.rglob("*"):
        if any(part.startswith(".") for part in path.relative_to(folder).parts) or not path.is_file():
            continue
        try:
            if path.name.endswith((".engine.onnx", "out.onnx")):
                onnx.checker.check_model(onnx.load(path))
            if path.name.endswith(".engine.onnx") or (folder / "store" in path.parents and path.suffix == ".onnx"):
                te.Engine.open(path).verify()
            if path.suffix == ".json":
                json.loads(path.read_text())
            if path.suffix == ".jsonl":
                for line in path.read_text().splitlines():
                    json.loads(line)
        except Exception as error:
            yield f"{path.relative_to(folder)}: {type(error).__name__}: {str(error)[:200]}"


if __name__ == "__main__":
    sys.exit(main())
