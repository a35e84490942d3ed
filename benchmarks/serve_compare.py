"""`trt-engine serve` beside other servers: requests/s and latency with the same model, machine and load.

python benchmarks/serve_compare.py --venvs DIR [--rounds N] [--seconds S] [--only NAME ...] [--out FILE]

DIR has a virtual environment for each of `litserve`, `mlserver`, `bentoml` and `ray`, with that package and onnxruntime,
one for `triton` (tools/triton-venv.sh), whose Python backend runs the model by ONNX Runtime, and one for `before`, with
an earlier version of this package; each is set up as its documentation has it (benchmarks/serve_others). Needs `wrk`. The
models are one of a few microseconds and the example detector (307 KB). Over HTTP tensors are numbers in JSON, or binary:
the protocol's extension for ours and Triton, a plain body for Ray Serve, base64 for the others. gRPC, by our `loadtest`, for
ours and Triton. With and without batching: at most 16 rows, a wait of 5 ms where it is to be set; ours does not wait.

All servers of a cell run at once and are loaded in turns, 1, 16 and 64 connections, in an order that turns from round to
round; a figure is the median of its rounds. `cpu_us` is the processor time of a server's processes for a request, which
other programs on the machine disturb less. `ratio` is ours over the server's in the same round, of requests/s and of
processor time, with the 95 % interval of the median. Each server's first answer is compared with ONNX Runtime's.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import itertools
import json
import os
import random
import shlex
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
import psutil
from onnx import TensorProto, helper, numpy_helper

import trt_engine as te
from trt_engine.environment import Environment
from trt_engine.records.base import append_record

HERE = Path(__file__).resolve().parent
OTHERS = HERE / "serve_others"
DIGITS = HERE.parent / "examples" / "digits" / "model.onnx"
CONNECTIONS = (1, 16, 64)
FORMS = ("json", "binary", "grpc")
OURS = ("trt-engine", "before")
START_S = 120


@dataclass(frozen=True)
class Case:
    """A model with the input that is sent."""

    name: str
    model: Path
    engine: Path
    x: Any
    expected: Any


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


def request_for(server: str, case: Case, form: str) -> Request:
    """The request in the form that the server's documentation has."""
    x, binary = case.x, form != "json"
    row: Any = base64.b64encode(x.tobytes()).decode() if binary else x[0].tolist()
    name = "images" if case.name == "digits" else "x"
    as_json = {"Content-Type": "application/json"}
    if server in (*OURS, "triton") and binary:
        item = {"name": name, "shape": x.shape, "datatype": "FP32", "parameters": {"binary_data_size": x.nbytes}}
        head = json.dumps({"inputs": [item], "parameters": {"binary_data_output": True}}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        nbytes = case.expected.nbytes
        return Request(
            "/v2/models/m/infer", head + x.tobytes(), headers, lambda raw: np.frombuffer(raw[-nbytes:], np.float32)
        )
    if server in (*OURS, "triton") or (server == "mlserver" and not binary):
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
        pick = from_json(lambda found: found[0], is_base64=binary)
        return Request("/predict", json.dumps({"x": [row]}).encode(), as_json, pick)
    if server == "ray" and binary:
        return Request("/", x.tobytes(), {}, lambda raw: np.frombuffer(raw, np.float32))
    pick = from_json(lambda found: found["output"], is_base64=binary)
    return Request("/predict" if server == "litserve" else "/", json.dumps({"input": row}).encode(), as_json, pick)


def command_for(server: str, case: Case, port: int, folder: Path, venvs: Path, *, batching: bool) -> list[str]:
    """The command that starts a server; gRPC is at the next port."""
    python = str(venvs / server / "bin" / "python")
    if server in OURS:
        ports = ["--http-port", str(port), "--grpc-port", str(port + 1), "--metrics-port", "-1", "--drain-delay", "0"]
        limit = [] if batching else ["--max-batch", "1"]
        python = sys.executable if server == "trt-engine" else python
        return [python, "-m", "trt_engine", "serve", f"m={case.engine}", *ports, *limit]
    if server == "triton":
        return triton_command(case, port, folder, venvs / server, batching=batching)
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


def triton_command(case: Case, port: int, folder: Path, venv: Path, *, batching: bool) -> list[str]:
    """Triton with a model in its Python backend."""
    version = folder / "models/m/1"
    version.mkdir(parents=True)
    shutil.copy(OTHERS / "triton_model.py", version / "model.py")
    session = onnxruntime.InferenceSession(str(case.model), providers=["CPUExecutionProvider"])
    sides = {"input": session.get_inputs(), "output": session.get_outputs()}
    tensors = [
        f'{side} {{ name: "{item.name}" data_type: TYPE_FP32 dims: {[*item.shape[1:]]} }}'
        for side, items in sides.items()
        for item in items
    ]
    more = ["dynamic_batching { max_queue_delay_microseconds: 5000 }"] if batching else []
    text = ['backend: "python" max_batch_size: 16', *tensors, *more]
    (folder / "models/m/config.pbtxt").write_text("\n".join(text).replace("None", "-1"))
    (packages,) = venv.glob("lib/python*/site-packages")
    server = packages / "pytriton/tritonserver"
    environment = {
        "LD_LIBRARY_PATH": str(packages / "nvidia_pytriton.libs"),
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
    }
    return [
        "env", *(f"{key}={value}" for key, value in environment.items()), str(server / "bin/tritonserver"),
        f"--model-repository={folder / 'models'}", f"--backend-directory={server / 'backends'}", f"--http-port={port}",
        f"--grpc-port={port + 1}", "--allow-metrics=false", "--http-address=127.0.0.1", "--grpc-address=127.0.0.1",
    ]  # fmt: skip


def free_port() -> int:
    """A port that is free, as the next one is."""
    while True:
        with socket.socket() as one, socket.socket() as other, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", one.getsockname()[1] + 1))
            return int(one.getsockname()[1])


@contextlib.contextmanager
def running(server: str, case: Case, form: str, venvs: Path, *, batching: bool) -> Iterator[tuple[int, int]]:
    """A server that answers rightly, by its port and process."""
    port, request = free_port(), request_for(server, case, form)
    own = {"MODEL": str(case.model), "FORM": "json" if form == "json" else "base64", "BATCHING": str(int(batching))}
    with tempfile.TemporaryDirectory() as name, (Path(name) / "log").open("wb+") as log:
        command = command_for(server, case, port, Path(name), venvs, batching=batching)
        above = [] if server == "before" else [os.environ.get("PYTHONPATH")]
        paths = [str(OTHERS), name, *filter(None, above)]
        quiet = {"BENTOML_DO_NOT_TRACK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        process = subprocess.Popen(
            command, cwd=name, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | own | quiet | {"PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        try:
            wait_for(process, f"http://127.0.0.1:{port}", request, case, Path(name) / "log")
            yield port, process.pid
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


def processor_s(pid: int) -> float:
    """Processor time of a process and of all below it, s."""
    found = psutil.Process(pid)
    return sum(sum(one.cpu_times()[:2]) for one in (found, *found.children(recursive=True)))


def load(
    server: tuple[int, int], form: str, request: Request, connections: int, seconds: float, folder: Path
) -> dict[str, float]:
    """One run of wrk, or of our load generator for gRPC."""
    port, pid = server
    before_s = processor_s(pid)
    if form == "grpc":
        record = te.loadtest(
            f"grpc://127.0.0.1:{port + 1}", model="m", concurrency=connections, duration_s=seconds, warmup_s=0.1
        )
        percentiles = {f"p{part}_us": (record.latency_percentile(part) or 0.0) * 1e3 for part in (50, 99)}
        found = {"requests": len(record.latency_ms), "seconds": record.wall_s, **percentiles}
        found |= {"errors": sum(record.errors.values()), "rps": record.requests_per_s}
        sent = found["requests"] + record.warmup_requests
    else:
        found = load_http(f"http://127.0.0.1:{port}", request, connections, seconds, folder)
        sent = found["requests"]
    found["cpu_us"] = (processor_s(pid) - before_s) / max(sent, 1) * 1e6
    return found


def load_http(url: str, request: Request, connections: int, seconds: float, folder: Path) -> dict[str, float]:
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


def ratio(ours: list[float], theirs: list[float]) -> list[float]:
    """The median of the rounds' ratios, and its 95 % interval."""
    found = [one / other for one, other in zip(ours, theirs, strict=True)]
    draw = random.Random(0)
    drawn = sorted(statistics.median(draw.choices(found, k=len(found))) for _ in range(1000))
    return [round(value, 4) for value in (statistics.median(found), drawn[25], drawn[974])]


def measure(
    case: Case, form: str, servers: list[str], options: argparse.Namespace, *, batching: bool
) -> Iterator[dict[str, Any]]:
    """The cells of one model in one form, with or without batching."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started = {
            name: stack.enter_context(running(name, case, form, options.venvs, batching=batching)) for name in servers
        }
        requests = {name: request_for(name, case, form) for name in servers}
        for name in servers:
            load(started[name], form, requests[name], 8, 1, folder)
        for connections in options.connections:
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
            for number in range(options.rounds):
                turn = number % len(servers)
                for name in [*servers[turn:], *servers[:turn]]:
                    runs[name].append(load(started[name], form, requests[name], connections, options.seconds, folder))
            for name in servers:
                keys = ("rps", "p50_us", "p99_us", "cpu_us")
                cell = {
                    "model": case.name, "form": form, "batching": batching, "connections": connections, "server": name,
                    **{key: statistics.median(run[key] for run in runs[name]) for key in keys},
                    "errors": sum(run["errors"] for run in runs[name]), "runs": runs[name],
                    "ratio": {
                        key: ratio(*([max(run[key], 1e-9) for run in runs[one]] for one in order))
                        for key, order in (("rps", (OURS[0], name)), ("cpu_us", (name, OURS[0])))
                    },
                    "load_average": os.getloadavg(),
                }  # fmt: skip
                print(
                    f"{case.name:>6} {form:>6} {'batching' if batching else 'single':>8} {connections:>2} {name:>10}: "
                    f"{cell['rps']:8.0f} requests/s, p50 {cell['p50_us'] / 1e3:8.2f}, p99 {cell['p99_us'] / 1e3:8.2f} ms, "
                    f"{cell['cpu_us']:6.0f} us; ours over it {cell['ratio']['rps']}, processor {cell['ratio']['cpu_us']}"
                    f"{', errors ' + str(cell['errors']) if cell['errors'] else ''}",
                    flush=True,
                )
                yield cell


def version_of(server: str, venvs: Path) -> str:
    if server == "trt-engine":
        return te.__version__
    package = {"before": "trt-engine", "triton": "nvidia-pytriton"}.get(server, server)
    program = f"import importlib.metadata as m; print(m.version('{package}'), m.version('onnxruntime'))"
    command = [str(venvs / server / "bin" / "python"), "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def command() -> str:
    """What was typed, without the places of this machine."""
    rest = iter(sys.argv[1:])
    kept = [item for item in rest if item not in ("--venvs", "--out") or next(rest, None) is None]
    return shlex.join(["python", "benchmarks/serve_compare.py", *kept])


def commit() -> str:
    """The commit of these sources."""
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venvs", type=lambda text: Path(text).absolute(), required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=["triton", "litserve", "mlserver", "bentoml", "ray"])
    parser.add_argument("--forms", nargs="*", default=FORMS)
    parser.add_argument("--connections", nargs="*", type=int, default=CONNECTIONS)
    parser.add_argument("--batching", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--models", nargs="*", default=["tiny", "digits"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    servers = ["trt-engine", *options.only]
    versions = {name: version_of(name, options.venvs) for name in servers}
    with tempfile.TemporaryDirectory() as folder:
        cases = [case for case in make_cases(Path(folder)) if case.name in options.models]
        for case, form, batching in itertools.product(cases, options.forms, options.batching):
            chosen = [name for name in servers if form != "grpc" or name in (*OURS, "triton")]
            for cell in measure(case, form, chosen, options, batching=bool(batching)):
                if options.out is not None:
                    more = {"version": versions[cell["server"]], "environment": Environment.detect()}
                    more |= {"command": command(), "commit": commit()}
                    append_record(options.out, cell | more)


if __name__ == "__main__":
    main()
