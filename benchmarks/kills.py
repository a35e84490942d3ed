"""SIGKILL at random moments, and while something is staged: what a verb leaves must be whole, and its next run ends with 0.

    python benchmarks/kills.py --kills 200 --staged 60 [--seed 1] [--merge] [--verb batch]    writes the record

Each case forks a process that has imported the package, runs a verb in it and kills it. After that every engine, record and
copy that is there opens, the same command again ends with 0, and nothing staged is left beside what it wrote. `batch` (from
Parquet to Parquet, each row once) is tried where Ray is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime  # noqa: E402 - loaded before the fork
from onnx import numpy_helper  # noqa: E402

import trt_engine as te  # noqa: E402
from onnx_models import FLOAT, node, save  # noqa: E402
from trt_engine.cli.main import run as command_line  # noqa: E402

try:
    import pyarrow
    import pyarrow.parquet
except ImportError:
    pyarrow = None

RESULTS = ROOT / "benchmarks" / "results" / "kills-cpu.jsonl"
STAGED = "*.tmp"
LONGEST_S = 120.0
ROWS = 400


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--staged", type=int, default=60, help="of these while a staged path is there")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--merge", action="store_true", help="add to the record")
    parser.add_argument("--verb", action="append", choices=[*VERBS], help="these alone")
    options = parser.parse_args(args)
    verbs = options.verb or [verb for verb in VERBS if verb != "batch" or importlib.util.find_spec("ray")]
    head = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    commit = head.stdout.strip()
    pick, rows, lengths = random.Random(options.seed), list[dict[str, Any]](), dict[str, float]()
    while len(rows) < options.kills or sum(row["staged"] for row in rows) < options.staged:
        wants = sum(row["staged"] for row in rows) < options.staged
        verb = pick.choice(verbs)
        with tempfile.TemporaryDirectory() as name:
            row = (
                {"seed": options.seed, "verb": verb}
                | _case(verb, Path(name), pick, lengths, wants)
                | {"commit": commit}
            )
        if row.pop("over") and not row["faults"]:
            continue  # it had ended
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    with RESULTS.open("a" if options.merge else "w") as file:
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
        if argv[0].endswith("/reload") and not (folder / "serves").exists() and not over:
            began = time.monotonic()  # it still starts
            time.sleep(0.002)
            continue
        staged = any(not path.name.startswith(".ray.") for path in _staged(folder))  # Ray's is there all the time
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
    (folder / "serves").unlink(missing_ok=True)
    again = _start(argv, folder)
    code = _wait(again)
    text = (folder / "log").read_text()[-300:]
    faults += [f"the next run ended with {code}: {text}"] if code else []
    faults += [f"left {path.name}" for path in _staged(folder)] + [*_broken(folder)]
    if verb == "batch" and not code:
        parts = [
            pyarrow.parquet.ParquetFile(path).read() for path in sorted((folder / "results").glob("part-*.parquet"))
        ]
        found = [row for part in parts for row in part["row"].to_pylist()]
        if found != [*range(ROWS)]:
            faults.append(f"rows {len(found)}, {len({*found})} distinct")
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
    if pyarrow is not None:
        column = pyarrow.array([[float(row)] * 512 for row in range(ROWS)], pyarrow.list_(pyarrow.float32()))
        pyarrow.parquet.write_table(pyarrow.table({"x": column}), folder / "rows.parquet", row_group_size=64)


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
    "serve that reloads": _argv("@reload"),
    "batch": _argv("batch @m.onnx @rows.parquet -o @results --part-rows 20"),
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
        own = {"serve": _serve, "reload": _reload}.get(Path(argv[0]).name)
        code = own(folder) if own else command_line(argv)
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


def _reload(folder: Path) -> int:
    """A server whose model is replaced by others, each built while the one before serves; the last one answers."""
    repository = folder / "models"
    shutil.rmtree(repository, ignore_errors=True)
    place = repository / "m" / "1" / "model.onnx"
    place.parent.mkdir(parents=True)
    shutil.copy(folder / "m.onnx", place)
    proto = onnx.load(folder / "m.onnx")
    settings: dict[str, Any] = {"http_port": 0, "grpc_port": -1, "metrics_port": -1, "poll_interval_s": 0.05}
    with te.serve(
        (), model_repository=repository, model_control_mode="poll", build_models=True, drain_delay_s=0.0, **settings
    ) as server:
        url = f"http://{server.http_address}/v2/models/m/infer"
        (folder / "serves").touch()
        for number in range(2, 5):
            tensor = proto.graph.initializer[2]
            scaled = numpy_helper.to_array(tensor) * np.float32(number)
            tensor.CopyFrom(numpy_helper.from_array(scaled, tensor.name))
            wanted = onnxruntime.InferenceSession(proto.SerializeToString()).run(
                None, {"x": np.ones((1, 512), np.float32)}
            )
            (folder / "next").write_bytes(proto.SerializeToString())
            (folder / "next").replace(place)
            end = time.monotonic() + 30
            while not np.allclose(_ask(url), wanted[0], rtol=1e-3, atol=1e-3 * float(np.abs(wanted[0]).max())):
                if time.monotonic() > end:
                    raise TimeoutError("the model that replaced another one does not answer")
                time.sleep(0.05)
    return 0


def _ask(url: str) -> np.ndarray:
    item = {"name": "x", "shape": [1, 512], "datatype": "FP32", "data": [1.0] * 512}
    request = urllib.request.Request(url, json.dumps({"inputs": [item]}).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return np.array(json.load(answer)["outputs"][0]["data"], np.float32)[None]


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
            if path.match("results/part-*.parquet"):
                pyarrow.parquet.ParquetFile(path).read()
            if path.suffix == ".json" and "ray" not in path.parts:
                json.loads(path.read_text())
            if path.suffix == ".jsonl" and path.name != "journal.jsonl":  # whose last line may be half of one
                for line in path.read_text().splitlines():
                    json.loads(line)
        except Exception as error:
            yield f"{path.relative_to(folder)}: {type(error).__name__}: {str(error)[:200]}"


if __name__ == "__main__":
    sys.exit(main())
