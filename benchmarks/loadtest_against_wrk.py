"""The closed loop of `loadtest` beside `wrk` and `hey`: requests/s from the same server with the same bytes.

    python benchmarks/loadtest_against_wrk.py [--rounds 7] [--seconds 3] [--no-record]

The server is an empty handler of the protocol v2 on uvicorn, which reads the body and answers 4 KB: no
server of inference is faster, so the client is what is measured. Each round runs `wrk -t1` (A), `loadtest`, `hey` where
it is installed, and `wrk` again (A'), in an order that turns from round to round; the server has one core and the
clients the others. The ratio of A' to A is the noise of the machine. The record goes to
benchmarks/results/loadtest-cpu.jsonl with the rate of every run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from trt_engine.environment import Environment
from trt_engine.records.base import append_record
from trt_engine.runtime.feeds import random_feeds
from trt_engine.verbs.loadtest.clients import read_model
from trt_engine.verbs.loadtest.target import http_request, parse_target

RESULTS = Path(__file__).resolve().parent / "results" / "loadtest-cpu.jsonl"
CASES = [(4096, 1), (4096, 8), (4096, 64), (602112, 8)]
"""Bytes of the input tensor and connections."""
LEAST = 0.95


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """The handler: metadata of a model with one input of `PAYLOAD` bytes, and 4 KB for every inference."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    path, size = scope["path"], int(os.environ["PAYLOAD"])
    body = b"x" * 4096
    if path == "/v2":
        body = json.dumps({"name": "empty", "version": "1", "extensions": ["binary_tensor_data"]}).encode()
    elif not path.endswith("/infer"):
        tensor = {"name": "x", "datatype": "UINT8", "shape": [size]}
        body = json.dumps({"name": "net", "versions": ["1"], "inputs": [tensor], "outputs": []}).encode()
    fields = [(b"content-type", b"application/octet-stream"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": fields})
    await send({"type": "http.response.body", "body": body})


def start_server(nbytes: int, port: int) -> subprocess.Popen[bytes]:
    """The server on the first core, once it answers."""
    cores = sorted(os.sched_getaffinity(0))
    server = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "--app-dir", str(Path(__file__).parent), "loadtest_against_wrk:app",
         "--port", str(port), "--http", "httptools", "--log-level", "error", "--no-access-log"],
        env=os.environ | {"PAYLOAD": str(nbytes)}, preexec_fn=lambda: os.sched_setaffinity(0, cores[:1]),
    )  # fmt: skip
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2", timeout=5).close()
            return server
        except OSError:
            if server.poll() is not None:
                sys.exit("the server ended: `pip install 'trt-engine[serve]'`")
            time.sleep(0.1)


def write_request(url: str, folder: Path) -> tuple[Path, dict[str, str]]:
    """The body that `loadtest` sends, as a file, and its header fields."""
    target, model = read_model(parse_target(url, None, None), None, None)
    shapes = {spec.name: spec.shape for spec in model.signature.inputs}
    raw = http_request(
        target, model.signature, random_feeds(model.signature, shapes), binary=True, timeout_us=None, token=None
    )
    head, _, body = raw.partition(b"\r\n\r\n")
    fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
    (folder / "body").write_bytes(body)
    return folder / "body", {name: value for name, value in fields.items() if name not in ("Host", "Content-Length")}


def commands(url: str, folder: Path, connections: int, seconds: float) -> dict[str, list[str]]:
    """One command for each client."""
    body, fields = write_request(url, folder)
    script = folder / "post.lua"
    lines = [f'wrk.headers["{name}"] = "{value}"' for name, value in fields.items()]
    script.write_text("\n".join(['wrk.method = "POST"', f'wrk.body = io.open("{body}", "rb"):read("*a")', *lines]))
    wrk = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "-s", str(script), f"{url}/infer"]
    found = {
        "wrk": wrk,
        "loadtest": [
            sys.executable, "-m", "trt_engine", "loadtest", url, "--concurrency", str(connections), "--duration",
            f"{seconds:g}s", "--warmup", "200ms", "--json", "-q",
        ],
        "wrk again": wrk,
    }  # fmt: skip
    if shutil.which("hey"):
        flags = [
            word for name, value in fields.items() if name != "Content-Type" for word in ("-H", f"{name}: {value}")
        ]
        found["hey"] = [
            "hey", "-m", "POST", "-z", f"{seconds:g}s", "-c", str(connections), "-T", fields["Content-Type"], *flags,
            "-D", str(body), f"{url}/infer",
        ]  # fmt: skip
    return found


def rate(name: str, command: list[str]) -> float:
    """Requests/s that a client reports; its processes run on all cores but the server's."""
    cores = sorted(os.sched_getaffinity(0))
    done = subprocess.run(
        command, capture_output=True, text=True, check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores[1:] or cores),
    )  # fmt: skip
    if name == "loadtest":
        figures = json.loads(done.stdout)["figures"]
        assert not figures["failed"], figures
        return float(figures["requests_per_s"])
    found = re.search(r"Requests/sec:\s*([\d.]+)", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


def measure(nbytes: int, connections: int, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Requests/s by client, one for each round."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = start_server(nbytes, port)
    try:
        with tempfile.TemporaryDirectory() as folder:
            programs = commands(f"http://127.0.0.1:{port}/v2/models/net", Path(folder), connections, seconds)
            found: dict[str, list[float]] = {name: [] for name in programs}
            names = list(programs)
            for turn in range(rounds):
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    found[name].append(rate(name, programs[name]))
            return found
    finally:
        server.terminate()
        server.wait()


def ratio(found: dict[str, list[float]], over: str, under: str) -> float:
    """Median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(found[over], found[under], strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("`wrk` is not installed: `apt-get install wrk`")
    print("payload  connections  loadtest/s  of wrk  wrk again/wrk  of hey")
    cases = []
    for nbytes, connections in CASES:
        found = measure(nbytes, connections, options.rounds, options.seconds)
        best, noise = ratio(found, "loadtest", "wrk"), ratio(found, "wrk again", "wrk")
        beside = ratio(found, "loadtest", "hey") if "hey" in found else None
        shown = "–" if beside is None else f"{beside:.3f}"
        middle = statistics.median(found["loadtest"])
        print(f"{nbytes:>7}  {connections:>11}  {middle:>10.0f}  {best:>6.3f}  {noise:>13.3f}  {shown:>6}", flush=True)
        cases.append(
            {"input_bytes": nbytes, "connections": connections, "requests_per_s": found, "of_wrk": best,
             "wrk_again_of_wrk": noise, "of_hey": beside}
        )  # fmt: skip
    if not options.no_record:
        record = {"benchmark": "loadtest_against_wrk", "environment": Environment.detect(), "seconds": options.seconds}
        append_record(RESULTS, record | {"rounds": options.rounds, "cases": cases, "load_average": os.getloadavg()})
    worst = min(case["of_wrk"] for case in cases)  # type: ignore[type-var]
    print(f"lowest: {worst:.3f} of wrk, at least {LEAST} is wanted")
    return int(worst < LEAST)


if __name__ == "__main__":
    sys.exit(main())
