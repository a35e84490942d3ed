"""The counters of `serve` against those of its clients: equal at the end, and none falls, through reloads and cancellations.

python benchmarks/serve_counters.py [--minutes N] [--clients N] [--out FILE]

Clients over HTTP and gRPC send requests to a model that is loaded again all the time; some are not valid, some are
cancelled or their connection is closed, and the queue is short, so that many are refused. Every second all counters of
`/metrics` are read. At the end, for the model: answered and failed and refused requests are as many as were sent, and no
more were answered than sent without a failure, and no fewer than the clients have answers of. The exit code is 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

import trt_engine as te
from trt_engine.environment import Environment
from trt_engine.open_inference.messages import INFERENCE_SERVICE, message
from trt_engine.records.base import append_record

STATUS = {200: "answered", 503: "refused", 400: "not valid"}


def make_repository(folder: Path) -> Path:
    """A model of about a millisecond, whose `config.pbtxt` is written anew at each reload."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 512]) for name in ("x", "y"))
    weight = numpy_helper.from_array(np.eye(512, dtype=np.float32), "w")
    names = ["x", *(f"t{number}" for number in range(1, 8)), "y"]
    nodes = [helper.make_node("MatMul", [names[n], "w"], [names[n + 1]]) for n in range(8)]
    graph = helper.make_graph(nodes, "chain", [x], [y], [weight])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), folder / "m.onnx")
    target = folder / "models/m/1/model.onnx"
    target.parent.mkdir(parents=True)
    te.build(folder / "m.onnx", out=target, batch=(1, 4, 8), parity=False)
    write_config(folder / "models", 0)
    return folder / "models"


def write_config(models: Path, delay_us: int) -> None:
    policy = "default_queue_policy { max_queue_size: 24 }"
    batching = f"dynamic_batching {{ max_queue_delay_microseconds: {delay_us} {policy} }}"
    text = f"max_batch_size: 8 instance_group {{ count: 1 kind: KIND_CPU }} {batching}"
    (models / "m/config.pbtxt").write_text(text)


def read_counters(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        rows = answer.read().decode().splitlines()
    found = {row.rpartition(" ")[0]: float(row.rpartition(" ")[2]) for row in rows if not row.startswith("#")}
    gauges = ("pending", "_load_duration", "backend_info", "_ready", "in_flight", "_created")
    return {name: value for name, value in found.items() if not any(gauge in name for gauge in gauges)}


async def call_http(address: str, body: bytes, rng: random.Random, found: Counter[str], end_s: float) -> None:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    wrong = body.replace(b'"x"', b'"z"')
    while time.monotonic() < end_s:
        kind = rng.random()
        sent = wrong if kind < 0.05 else body
        head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}\r\n\r\n"
        writer.write(head.encode() + sent)
        await writer.drain()
        found["sent"] += 1
        if kind > 0.95:
            await asyncio.sleep(rng.random() * 0.01)
            writer.close()
            found["left"] += 1
            reader, writer = await asyncio.open_connection(host, int(port))
            continue
        answer = await reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        await reader.readexactly(length)
        found[STATUS.get(int(answer[9:12]), answer[9:12].decode())] += 1
    writer.close()


async def call_grpc(address: str, rng: random.Random, found: Counter[str], end_s: float) -> None:
    good, wrong = (message("ModelInferRequest")(model_name="m") for _ in range(2))
    for made, name in ((good, "x"), (wrong, "z")):
        made.inputs.add(name=name, datatype="FP32", shape=[1, 512]).contents.fp32_contents.extend([1.0] * 512)
    codes = {grpc.StatusCode.UNAVAILABLE: "refused", grpc.StatusCode.INVALID_ARGUMENT: "not valid"}
    async with grpc.aio.insecure_channel(address) as channel:
        infer = channel.unary_unary(
            f"/{INFERENCE_SERVICE}/ModelInfer", request_serializer=lambda each: each.SerializeToString()
        )
        while time.monotonic() < end_s:
            kind = rng.random()
            call = infer(wrong if kind < 0.05 else good)
            found["sent"] += 1
            try:
                if kind > 0.95:
                    await asyncio.wait([asyncio.ensure_future(call.code())], timeout=0.005 + rng.random() * 0.01)
                    if call.cancel():
                        found["left"] += 1
                        continue
                await call
                found["answered"] += 1
            except grpc.aio.AioRpcError as error:
                found[codes.get(error.code(), error.code().name)] += 1


async def reload(server: Any, models: Path, end_s: float, found: Counter[str]) -> None:
    while time.monotonic() < end_s:
        await asyncio.sleep(2)
        write_config(models, found["reloads"] % 2 * 500)
        load = urllib.request.Request(f"http://{server.http_address}/v2/repository/models/m/load", b"{}")
        await asyncio.to_thread(urllib.request.urlopen, load, timeout=60)
        found["reloads"] += 1


async def watch(address: str, end_s: float, falls: list[str]) -> None:
    before: dict[str, float] = {}
    while time.monotonic() < end_s:
        now = await asyncio.to_thread(read_counters, address)
        falls += [f"{name}: {before[name]} -> {now.get(name)}" for name in before if now.get(name, -1.0) < before[name]]
        before = now
        await asyncio.sleep(1)


async def run(server: Any, models: Path, options: argparse.Namespace) -> tuple[Counter[str], list[str]]:
    item = {"name": "x", "shape": [1, 512], "datatype": "FP32", "data": [1.0] * 512}
    body, found, falls = json.dumps({"inputs": [item]}).encode(), Counter[str](), list[str]()
    end_s = time.monotonic() + options.minutes * 60
    clients = [
        call_http(server.http_address, body, random.Random(number), found, end_s) if number % 2
        else call_grpc(server.grpc_address, random.Random(number), found, end_s)
        for number in range(options.clients)
    ]  # fmt: skip
    await asyncio.gather(*clients, reload(server, models, end_s, found), watch(server.metrics_address, end_s, falls))
    await asyncio.sleep(2)
    return found, falls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        models = make_repository(Path(name))
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "drain_delay_s": 0}
        control = {"model_repository": models, "model_control_mode": "explicit", "load_model": ("m",)}
        with te.serve(**ports, **control, control_without_token=True, max_in_flight=48) as server:
            found, falls = asyncio.run(run(server, models, options))
            url = f"http://{server.http_address}/v2/models/m/stats"
            with urllib.request.urlopen(url) as answer:
                (stats,) = json.load(answer)["model_stats"]
            counters = read_counters(server.metrics_address)
    success, fail = (stats["inference_stats"][part]["count"] for part in ("success", "fail"))
    refused = counters["trt_engine_refused_requests_total"]
    record = {
        "kind": "serve-counters", "minutes": options.minutes, "clients": dict(found), "falls": falls,
        "server": {"success": success, "fail": fail, "refused": int(refused)},
        "failures": {key: value for key, value in counters.items() if "request_failure" in key},
        "environment": Environment.detect(), "load_average": os.getloadavg(),
    }  # fmt: skip
    print(json.dumps({key: value for key, value in record.items() if key != "environment"}, indent=1))
    if options.out is not None:
        append_record(options.out, record)
    # a request whose client leaves may have been answered, or not have been read before the end of its connection
    lost = found["sent"] - success - fail - refused
    right = found["answered"] <= success <= found["answered"] + found["left"] and 0 <= lost <= found["left"]
    sys.exit(0 if right and not falls else 1)


if __name__ == "__main__":
    main()
