"""`deploy ray` on real nodes: one app.yaml on one node and on three, under load, with a replica and a node killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

import trt_engine as te
from onnx_models import FLOAT, node, save
from patience import HANG_S, until

pytestmark = [pytest.mark.full, pytest.mark.slow]
pytest.importorskip("ray.serve")

ROWS = np.array([[1.5, -2, 3], [0, 0.25, 7]], np.float32)
NODE = {"object_store_memory": 100 << 20, "include_dashboard": False}
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_agent_register_timeout_ms": "120000",
    "RAY_raylet_start_wait_time_s": "120", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Short: Ray's sockets have paths below it."""
    found = Path(tempfile.mkdtemp(prefix="te-test-"))
    yield found
    shutil.rmtree(found, ignore_errors=True)


@pytest.fixture(scope="module")
def app(folder: Path) -> tuple[Path, str]:
    """app.yaml of a model and an engine, `y` twice `x` [batch, 3], and its address."""
    model = save(
        folder / "m.onnx", [node("Mul", "x two", "y")], {"x": (FLOAT, ["batch", 3])}, {"y": (FLOAT, ["batch", 3])},
        {"two": np.float32(2)},
    )  # fmt: skip
    engine = folder / "m.engine.onnx"
    te.build(model, out=engine, parity=False, batch=(1, 4, 8), store=te.Store(folder / "builds"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    report = te.deploy(
        "ray", [f"model={model}", f"engine={engine}"], folder / "app", port=port, max_replicas=3, target_requests=2.0,
    )  # fmt: skip
    assert report.next_command == f"serve run {folder / 'app' / 'app.yaml'}"
    file = folder / "app" / "app.yaml"
    document = yaml.safe_load(file.read_text())
    ((deployment,),) = [item["deployments"] for item in document["applications"]]
    deployment["ray_actor_options"]["num_cpus"] = 0.5
    deployment["autoscaling_config"] |= {"upscale_delay_s": 1.0, "downscale_delay_s": 4.0}
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return file, f"http://127.0.0.1:{port}/v2"


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Any]:
    """One node of Ray, with this process connected to it."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ENVIRONMENT | {"TRT_ENGINE_STORE": str(folder / "store"), "RAY_TMPDIR": str(folder)}
        ).items():
            patch.setenv(name, value)
        (folder / "ray").mkdir()  # where `Cluster` writes its address: it makes no folder for that
        found = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **NODE})
        try:
            ray.init(address=found.address, namespace="serve", log_to_driver=False, configure_logging=False)
            yield found
        finally:
            ray.shutdown()
            found.shutdown()


@contextlib.contextmanager
def served(cluster: Any, app: tuple[Path, str]) -> Iterator[None]:
    """`serve run app.yaml`, from the first answer on."""
    words = [Path(sys.executable).with_name("serve"), "run", "--address", cluster.address, app[0]]
    with (app[0].parent.parent / "log").open("ab") as log:
        process = subprocess.Popen(words, start_new_session=True, stdout=log, stderr=log)
    try:
        until(lambda: process.poll() is not None or ready(app[1]), "an answer", pause_s=0.2)
        assert process.poll() is None, (app[0].parent.parent / "log").read_text()[-2000:]
        yield
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == 0
    finally:
        process.kill()
        process.wait()


def ready(url: str) -> bool:
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f"{url}/models/model/ready", timeout=HANG_S).status == 200
    return False


def post(url: str, model: str, rows: np.ndarray) -> tuple[int, bytes]:
    """Status and body of one request, of the application or of Ray's proxy."""
    tensor = {"name": "x", "shape": rows.shape, "datatype": "FP32", "data": rows.ravel().tolist()}
    request = urllib.request.Request(
        f"{url}/models/{model}/infer", json.dumps({"inputs": [tensor]}).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def output_of(body: bytes) -> np.ndarray:
    output = json.loads(body)["outputs"][0]
    return np.array(output["data"], np.float32).reshape(output["shape"])


def infer(url: str, model: str, rows: np.ndarray) -> np.ndarray:
    status, body = post(url, model, rows)
    assert status == 200, body
    return output_of(body)


def replicas() -> int:
    from ray import serve

    states = serve.status().applications["trt-engine"].deployments["Engines"].replica_states
    return int(states.get("RUNNING", 0))


def replicas_below(node: Any) -> list[psutil.Process]:
    """The processes of replicas on a node, of which Ray's own titles say so."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    titles = [(one, " ".join(one.cmdline()).lower().replace("_", "")) for one in raylet.children(recursive=True)]
    return [one for one, title in titles if "servereplica" in title and "engines" in title]


def to_send_again(status: int, body: bytes) -> bool:
    """As docs/deploy.md says: a fault, or the 404 of a proxy of Ray that has just started and knows no route yet."""
    return status >= 500 or (status == 404 and body.startswith(b"Path "))


class Load:
    """Clients that send one request after another, and again where no answer of the application came."""

    def __init__(self, url: str, clients: int) -> None:
        self.url, self.stop = url, threading.Event()
        self.sent, self.right = [0] * clients, [0] * clients
        self.again: Counter[str] = Counter()
        self.lost: list[str] = []
        self.threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()

    def _run(self, number: int) -> None:
        while not self.stop.is_set():
            rows = np.full((1, 3), self.sent[number] * 100 + number, np.float32)
            self.sent[number] += 1
            gives_up_s = time.monotonic() + HANG_S
            while time.monotonic() < gives_up_s:
                try:
                    status, body = post(self.url, "model", rows)
                except (OSError, http.client.HTTPException) as error:
                    why = type(error).__name__
                else:
                    if not to_send_again(status, body):
                        right = status == 200 and np.array_equal(output_of(body), rows * 2)
                        self.right[number] += right
                        self.lost += [] if right else [f"{rows.tolist()}: {status} {body[:1000]!r}"]
                        break
                    why = str(status)
                self.again[why] += 1
                time.sleep(0.1)

    def more(self, count: int) -> None:
        """Back when so many more requests are answered."""
        wanted = sum(self.right) + count
        until(lambda: sum(self.right) >= wanted, f"{count} more answers", pause_s=0.1)


def test_one_node_answers_what_a_bare_runner_gives(cluster: Any, app: tuple[Path, str], folder: Path) -> None:
    with served(cluster, app), te.load(folder / "m.engine.onnx") as plain:
        assert np.array_equal(infer(app[1], "engine", ROWS), plain.infer({"x": ROWS})["y"])
        for row in (
            ROWS[:1],
            ROWS[1:],
        ):  # what is built where the replica starts takes one row, as `build` without a profile
            assert np.array_equal(infer(app[1], "model", row), plain.infer({"x": row})["y"])
        status, body = post(app[1], "model", ROWS[:1, :2])
        assert status == 400 and "dimension" in json.loads(body)["error"]
        status, body = post(app[1], "other", ROWS[:1])
        assert status == 404 and "error" in json.loads(body)


def test_three_nodes_scale_and_lose_a_replica_and_a_node(cluster: Any, app: tuple[Path, str]) -> None:
    others = [cluster.add_node(num_cpus=1, **NODE) for _ in range(2)]
    with served(cluster, app):
        assert replicas() == 1
        with Load(app[1], 12) as load:
            until(lambda: replicas() == 3, "three replicas under load", pause_s=0.2)
            until(lambda: any(map(replicas_below, others)), "a replica on another node")
            load.more(100)
            running = [one for place in (cluster.head_node, *others) for one in replicas_below(place)]
            os.kill(running[0].pid, signal.SIGKILL)
            load.more(300)
            until(lambda: replicas() == 3, "three replicas again", pause_s=0.2)
            victim = next(place for place in others if replicas_below(place))
            raylet = psutil.Process(victim.all_processes["raylet"][0].process.pid)
            below = raylet.children(recursive=True)
            for process in (raylet, *below):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            cluster.remove_node(victim, allow_graceful=False)
            load.more(300)
        assert not load.lost
        assert load.right == load.sent  # each request has its own right answer
        until(lambda: replicas() == 1, "one replica without load", pause_s=0.2)
    print(f"{sum(load.sent)} requests, sent again: {dict(load.again)}")
