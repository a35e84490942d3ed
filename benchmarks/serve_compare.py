"""`trt-engine serve` beside other servers: requests/s and latency with the same model, machine and load.

python benchmarks/serve_compare.py --venvs DIR [--rounds N] [--seconds S] [--only NAME ...] [--out FILE]

DIR has a virtual environment for each of `litserve`, `mlserver`, `bentoml` and `ray`, with that package and onnxruntime;
each is set up as its documentation has it (benchmarks/serve_others). Needs `wrk`. The models are one of a few microseconds
(JSON with numbers for all) and the example detector (307 KB: binary tensors for ours and for Ray Serve, base64 for the
others, which have no binary form over HTTP). With and without batching: at most 16 rows, a wait of 5 ms where it is to be
set; ours does not wait. All servers of a cell run at once and are loaded in turns, 1 and 64 connections, in an order that
turns from round to round; a figure is the median of its rounds. Each server's first answer is compared with ONNX Runtime's.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import trt_engine as te
from trt_engine.environment import Environment
from trt_engine.records.base import append_record

HERE = Path(__file__).resolve().parent
OTHERS = HERE / "serve_others"
DIGITS = HERE.parent / "examples" / "digits" / "model.onnx"
CONNECTIONS = (1, 64)
START_S = 120


@dataclass(frozen=True)
class Case:
    """A model with the input that is sent."""

    name: str
    model: Path
    engine: Path
    x: Any
    expected: Any

    @property
    def is_large(self) -> bool:
        return self.x.nbytes > 1024


@dataclass(frozen=True)
class Request:
    """What is sent to a server, and how its answer is read."""

    path: str
    body: bytes
    headers: dict[str, str]
    read: Callable[[Any], Any]


def from_json(pick: Callable[[Any], Any], *, is_base64: bool) -> Callable[[bytes], Any]:
    def read(raw: bytes) -> Any:
        found = pick(json.loads(raw))
        return np.frombuffer(base64.b64decode(found), np.float32) if is_base64 else np.array(found, np.float32)

    return read


def request_for(server: str, case: Case) -> Request:
    """The request in the form that the server's documentation has."""
    x, large = case.x, case.is_large
    row: Any = base64.b64encode(x.tobytes()).decode() if large else x[0].tolist()
    name = "images" if large else "x"
    as_json = {"Content-Type": "application/json"}
    if server == "trt-engine" and large:
        item = {"name": name, "shape": x.shape, "datatype": "FP32", "parameters": {"binary_data_size": x.nbytes}}
        head = json.dumps({"inputs": [item], "parameters": {"binary_data_output": True}}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        nbytes = case.expected.nbytes
        return Request(
            "/v2/models/m/infer", head + x.tobytes(), headers, lambda raw: np.frombuffer(raw[-nbytes:], np.float32)
        )
    if server == "trt-engine" or (server == "mlserver" and not large):
        item = {"name": name, "shape": x.shape, "datatype": "FP32", "data": x.reshape(-1).tolist()}
        body = {"inputs": [item]}
        pick = from_json(lambda found: found["outputs"][0]["data"], is_base64=False)
        return Request("/v2/models/m/infer", json.dumps(body).encode(), as_json, pick)
    if server == "mlserver":
        item = {
            "name": name, "shape": [1], "datatype": "BYTES", "parameters": {"content_type": "base64"}, "data": [row]
        }  # fmt: skip
        pick = from_json(lambda found: found["outputs"][0]["data"][0], is_base64=True)
        return Request("/v2/models/m/infer", json.dumps({"inputs": [item]}).encode(), as_json, pick)
    if server == "bentoml":
        pick = from_json(lambda found: found[0], is_base64=large)
        return Request("/predict", json.dumps({"x": [row]}).encode(), as_json, pick)
    if server == "ray" and large:
        return Request("/", x.tobytes(), {}, lambda raw: np.frombuffer(raw, np.float32))
    pick = from_json(lambda found: found["output"], is_base64=large)
    return Request("/predict" if server == "litserve" else "/", json.dumps({"input": row}).encode(), as_json, pick)


def command_for(server: str, case: Case, port: int, folder: Path, venvs: Path, *, batching: bool) -> list[str]:
    """The command that starts a server."""
    if server == "trt-engine":
        ports = ["--http-port", str(port), "--grpc-port", "-1", "--metrics-port", "-1", "--drain-delay", "0"]
        limit = [] if batching else ["--max-batch", "1"]
        return [sys.executable, "-m", "trt_engine", "serve", f"m={case.engine}", *ports, *limit]
    python = str(venvs / server / "bin" / "python")
    if server == "mlserver":
        shutil.copy(OTHERS / "mlserver_model.py", folder)
        (folder / "settings.json").write_text(
            json.dumps(
                {"http_port": port, "grpc_port": free_port(), "metrics_port": free_port(), "host": "127.0.0.1"}
                | {"debug": False}
            )
        )
        settings: dict[str, Any] = {"name": "m", "implementation": "mlserver_model.Runtime"}
        if batching:
            settings |= {"max_batch_size": 16, "max_batch_time": 0.005}
        (folder / "model-settings.json").write_text(json.dumps(settings))
        return [str(venvs / server / "bin" / "mlserver"), "start", str(folder)]
    if server == "bentoml":
        serve = ["serve", "bentoml_service:Served", "--host", "127.0.0.1", "--port", str(port)]
        return [python, "-m", "bentoml", *serve, "--working-dir", str(OTHERS)]
    return [python, str(OTHERS / f"{server}_server.py"), str(port)]


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


@contextlib.contextmanager
def running(server: str, case: Case, venvs: Path, *, batching: bool) -> Iterator[str]:
    """A server that answers rightly, by its address."""
    port, request = free_port(), request_for(server, case)
    form = {"MODEL": str(case.model), "FORM": "base64" if case.is_large else "json", "BATCHING": str(int(batching))}
    with tempfile.TemporaryDirectory() as name, (Path(name) / "log").open("wb+") as log:
        command = command_for(server, case, port, Path(name), venvs, batching=batching)
        paths = [str(OTHERS), name, *filter(None, [os.environ.get("PYTHONPATH")])]
        quiet = {"BENTOML_DO_NOT_TRACK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        process = subprocess.Popen(
            command, cwd=name, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | form | quiet | {"PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        try:
            wait_for(process, f"http://127.0.0.1:{port}", request, case, Path(name) / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):  # some leave their workers behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(process: subprocess.Popen[bytes], url: str, request: Request, case: Case, log: Path) -> None:
    """Back when the server gives the right answer."""
    give_up, reason = time.monotonic() + START_S, "no answer"
    while process.poll() is None and time.monotonic() < give_up:
        try:
            sent = urllib.request.Request(url + request.path, request.body, request.headers)
            found = request.read(urllib.request.urlopen(sent, timeout=30).read())
        except OSError as error:
            reason = repr(error)
            time.sleep(0.2)
            continue
        np.testing.assert_allclose(found.reshape(-1), case.expected.reshape(-1), rtol=1e-3, atol=1e-3)
        return
    raise SystemExit(f"{url}: {reason}\n{log.read_text()[:3000]}")


def load(url: str, request: Request, connections: int, seconds: int, folder: Path) -> dict[str, float]:
    """One run of wrk."""
    body = folder / "body"
    body.write_bytes(request.body)
    headers = ";".join(f"{name}:{value}" for name, value in request.headers.items())
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "30s", "-s", str(OTHERS / "load.lua")]
    done = subprocess.run(
        [*command, url + request.path], capture_output=True, text=True, check=True,
        env=os.environ | {"BODY": str(body), "HEADERS": headers},
    )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    found["rps"] = found["requests"] / found["seconds"]
    return found


def make_cases(folder: Path) -> list[Case]:
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "two"], ["y"])], "double",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(np.float32(2), "two")],
    )  # fmt: skip
    tiny = folder / "tiny.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tiny)
    made = []
    for name, model, shape in (("tiny", tiny, (1, 4)), ("digits", DIGITS, (1, 3, 160, 160))):
        engine = te.build(model, out=folder / f"{name}.engine.onnx", batch=(1, 8, 16), parity=False).path
        x = np.random.default_rng(0).random(shape, np.float32)
        session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        (expected,) = session.run(None, {session.get_inputs()[0].name: x})
        made.append(Case(name, model, engine, x, expected))
    return made


def measure(case: Case, servers: list[str], options: argparse.Namespace, *, batching: bool) -> Iterator[dict[str, Any]]:
    """The cells of one model, with or without batching."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = {name: stack.enter_context(running(name, case, options.venvs, batching=batching)) for name in servers}
        requests = {name: request_for(name, case) for name in servers}
        for name in servers:
            load(urls[name], requests[name], 8, 1, folder)
        for connections in CONNECTIONS:
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
            for number in range(options.rounds):
                turn = number % len(servers)
                for name in [*servers[turn:], *servers[:turn]]:
                    runs[name].append(load(urls[name], requests[name], connections, options.seconds, folder))
            for name in servers:
                cell = {
                    "model": case.name, "batching": batching, "connections": connections, "server": name,
                    **{key: statistics.median(run[key] for run in runs[name]) for key in ("rps", "p50_us", "p99_us")},
                    "errors": sum(run["errors"] for run in runs[name]), "runs": runs[name],
                    "load_average": os.getloadavg(),
                }  # fmt: skip
                print(
                    f"{case.name:>6} {'batching' if batching else 'single':>8} {connections:>2} {name:>10}: "
                    f"{cell['rps']:8.0f} requests/s, p50 {cell['p50_us'] / 1e3:8.2f} ms, p99 {cell['p99_us'] / 1e3:8.2f} ms"
                    f"{', errors ' + str(cell['errors']) if cell['errors'] else ''}",
                    flush=True,
                )
                yield cell


def version_of(server: str, venvs: Path) -> str:
    if server == "trt-engine":
        return te.__version__
    program = f"import importlib.metadata as m; print(m.version('{server}'), m.version('onnxruntime'))"
    command = [str(venvs / server / "bin" / "python"), "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venvs", type=lambda text: Path(text).absolute(), required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=["litserve", "mlserver", "bentoml", "ray"])
    parser.add_argument("--models", nargs="*", default=["tiny", "digits"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    servers = ["trt-engine", *options.only]
    versions = {name: version_of(name, options.venvs) for name in servers}
    with tempfile.TemporaryDirectory() as folder:
        for case in make_cases(Path(folder)):
            for batching in (False, True):
                for cell in measure(case, servers, options, batching=batching) if case.name in options.models else ():
                    if options.out is not None:
                        more = {"version": versions[cell["server"]], "environment": Environment.detect()}
                        append_record(options.out, cell | more)


if __name__ == "__main__":
    main()
