"""What `trt-engine serve` adds to an empty handler of the same server library, with the same client and body.

python benchmarks/serve_overhead.py [--blocks N] [--requests N] [--out FILE]

An empty handler of uvicorn with httptools, or of grpc.aio, reads the body and answers with the bytes that our server answers
with. Both servers run at once, each in its own process; tritonclient (one connection, binary tensors) calls them in
alternating blocks of requests. Over HTTP a plain blocking socket does so too: the time that tritonclient's event loop takes
to wake grows with the wait. The engine returns the first 1,024 numbers of each row: its run takes some microseconds, which
count. The figure is the difference of the medians over all requests; its interval is that over blocks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import trt_engine as te
from trt_engine.environment import Environment
from trt_engine.records.base import append_record

SIZES = {"4 KB": 1024, "307 KB": 76800}
BUDGETS_US = {
    ("http", "4 KB"): 100,
    ("http", "307 KB"): 200,
    ("http socket", "4 KB"): 100,
    ("http socket", "307 KB"): 200,
    ("grpc", "4 KB"): 150,
    ("grpc", "307 KB"): 300,
}


def write_model(path: Path, width: int) -> Path:
    """`x` (batch x width) to its first 1,024 columns."""
    bounds = [numpy_helper.from_array(np.array([value], np.int64), name) for name, value in
              (("start", 0), ("end", 1024), ("axis", 1))]  # fmt: skip
    graph = helper.make_graph(
        [helper.make_node("Slice", ["x", "start", "end", "axis"], ["y"])], "head",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 1024])], bounds,
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def serve_ours(engines: list[Path], ends: Connection) -> None:
    with te.serve(engines, http_port=0, grpc_port=0, metrics_port=-1, drain_delay_s=0) as server:
        ends.send((server.http_address, server.grpc_address))
        ends.recv()


def serve_empty(answers: dict[str, dict[str, Any]], ends: Connection) -> None:
    """The same server libraries with the same options, and handlers that do nothing but answer."""
    import asyncio

    import grpc
    import uvicorn
    import uvloop

    from trt_engine.open_inference.messages import message
    from trt_engine.verbs.serve.http_server import listen

    http = answers["http"]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        headers, body = http[scope["path"]]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    ready = {name: message("ModelInferResponse").FromString(raw) for name, raw in answers["grpc"].items()}

    async def infer(request: Any, context: Any) -> Any:
        return ready[request.model_name]

    async def main() -> None:
        listener = listen("127.0.0.1", 0)
        config = uvicorn.Config(
            app, http="httptools", ws="none", lifespan="off", log_config=None, log_level="error", access_log=False,
            server_header=False, proxy_headers=False, timeout_keep_alive=75,
        )  # fmt: skip
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve([listener]))
        calls = grpc.aio.server(options=[("grpc.max_receive_message_length", 1 << 28)])
        handler = grpc.unary_unary_rpc_method_handler(
            infer, message("ModelInferRequest").FromString, message("ModelInferResponse").SerializeToString
        )
        methods = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelInfer": handler})
        calls.add_generic_rpc_handlers((methods,))
        port = calls.add_insecure_port("127.0.0.1:0")
        await calls.start()
        ends.send((f"127.0.0.1:{listener.getsockname()[1]}", f"127.0.0.1:{port}"))
        await asyncio.to_thread(ends.recv)
        server.should_exit = True
        await task
        await calls.stop(1)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def canned(http_address: str, grpc_address: str, bodies: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The answers of our server, for the empty one to give."""
    import urllib.request

    import grpc
    from tritonclient.grpc import service_pb2

    found: dict[str, dict[str, Any]] = {"http": {}, "grpc": {}}
    for name, x in bodies.items():
        head = describe(x)
        path = f"/v2/models/{name}/infer"
        request = urllib.request.Request(
            f"http://{http_address}{path}", head + x.tobytes(), {"Inference-Header-Content-Length": str(len(head))}
        )
        answer = urllib.request.urlopen(request)
        kept = [
            (key.lower().encode(), value.encode())
            for key, value in answer.getheaders()
            if key.lower() not in ("date", "connection")
        ]
        found["http"][path] = (kept, answer.read())
        with grpc.insecure_channel(grpc_address) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            message = service_pb2.ModelInferRequest(model_name=name, raw_input_contents=[x.tobytes()])
            message.inputs.add(name="x", datatype="FP32", shape=x.shape)
            found["grpc"][name] = call(message.SerializeToString())
    return found


def caller(protocol: str, address: str, model: str, x: Any) -> Any:
    """A function that makes one request."""
    import tritonclient.grpc
    import tritonclient.http

    if protocol == "http socket":
        return socket_caller(address, model, x)
    module = {"http": tritonclient.http, "grpc": tritonclient.grpc}[protocol]
    client = module.InferenceServerClient(address)
    given = module.InferInput("x", [*x.shape], "FP32")
    given.set_data_from_numpy(x)
    wanted = [module.InferRequestedOutput("y")]
    return lambda: client.infer(model, [given], outputs=wanted)


def socket_caller(address: str, model: str, x: Any) -> Any:
    """The same request on a blocking socket, without a client library."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = describe(x)
    text = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(head) + x.nbytes}\r\n"
    request = f"{text}Inference-Header-Content-Length: {len(head)}\r\n\r\n".encode() + head + x.tobytes()

    def call() -> None:
        connection.sendall(request)
        found = b""
        while b"\r\n\r\n" not in found:
            found += connection.recv(1 << 20)
        header, _, rest = found.partition(b"\r\n\r\n")
        length = int(re.search(rb"\r\ncontent-length: (\d+)", header)[1])  # type: ignore[index]
        while len(rest) < length:
            rest += connection.recv(1 << 20)

    return call


def describe(x: Any) -> bytes:
    """The JSON of a request with this one tensor behind it."""
    given = {"name": "x", "shape": [*x.shape], "datatype": "FP32", "parameters": {"binary_data_size": x.nbytes}}
    return json.dumps({"inputs": [given], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}).encode()


def measure(calls: dict[str, Any], blocks: int, requests: int) -> dict[str, list[list[float]]]:
    """Times of single requests in us by server, in alternating blocks."""
    samples: dict[str, list[list[float]]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(requests):
            call()
    for number in range(blocks):
        for name in sorted(calls, reverse=bool(number % 2)):
            call, block = calls[name], []
            for _ in range(requests):
                started = time.perf_counter_ns()
                call()
                block.append((time.perf_counter_ns() - started) / 1e3)
            samples[name].append(block)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        engines, bodies = [], {}
        for size, width in SIZES.items():
            name = size.replace(" ", "")
            model = write_model(Path(folder) / f"{name}.onnx", width)
            engines.append(
                te.build(model, out=Path(folder) / f"{name}.engine.onnx", batch=(1, 1, 8), parity=False).path
            )
            bodies[name] = np.random.default_rng(0).random((1, width), np.float32)
        ours, ours_ends = spawn.Pipe()
        empty, empty_ends = spawn.Pipe()
        first = spawn.Process(target=serve_ours, args=(engines, ours_ends), daemon=True)
        first.start()
        ours_at = ours.recv()
        second = spawn.Process(target=serve_empty, args=(canned(*ours_at, bodies), empty_ends), daemon=True)
        second.start()
        empty_at = empty.recv()
        records = []
        for index, protocol in ((0, "http"), (0, "http socket"), (1, "grpc")):
            for size in SIZES:
                name = size.replace(" ", "")
                calls = {
                    server: caller(protocol, at[index], name, bodies[name])
                    for server, at in (("ours", ours_at), ("empty", empty_at))
                }
                samples = measure(calls, options.blocks, options.requests)
                records.append(record(protocol, size, samples))
        for pipe, process in ((ours, first), (empty, second)):
            pipe.send("end")
            process.join()
    if options.out is not None:
        for item in records:
            append_record(options.out, item | {"environment": Environment.detect(), "load_average": os.getloadavg()})
    sys.exit(any(item["added_us"] > item["budget_us"] for item in records))


def record(protocol: str, size: str, samples: dict[str, list[list[float]]]) -> dict[str, Any]:
    medians = {name: statistics.median([one for block in blocks for one in block]) for name, blocks in samples.items()}
    added = medians["ours"] - medians["empty"]
    by_block = sorted(
        statistics.median(ours) - statistics.median(empty)
        for ours, empty in zip(samples["ours"], samples["empty"], strict=True)
    )
    budget = BUDGETS_US[protocol, size]
    print(
        f"{protocol} {size:>6}: empty handler {medians['empty']:.0f} us, ours {medians['ours']:.0f} us, "
        f"added {added:.0f} us (blocks {by_block[0]:.0f} to {by_block[-1]:.0f}; budget {budget})"
    )
    return {
        "protocol": protocol, "body": size, "empty_p50_us": medians["empty"], "ours_p50_us": medians["ours"],
        "added_us": added, "budget_us": budget, "samples_us": {
            name: [[round(one, 1) for one in block] for block in blocks] for name, blocks in samples.items()
        },
    }  # fmt: skip


if __name__ == "__main__":
    main()
