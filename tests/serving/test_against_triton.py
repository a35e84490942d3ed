"""A real Triton beside `serve`, over the same engines, which its Python backend runs (`deploy triton --backend python`)."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

import trt_engine as te
from deployment.conftest import image_model
from onnx_models import FLOAT, INT64, STRING, node, save
from patience import HANG_S
from serving.conftest import start
from serving.real_triton import RealTriton, real_triton
from serving.triton import Client
from trt_engine.verbs.serve.server import Server

pytestmark = pytest.mark.slow
_RESHAPED = "  dims: [16, 48]\n  reshape { shape: [3, 16, 16] }\n}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of four engines: pictures in batches of 2 to 8, integers, token ids of open length, strings."""
    made = tmp_path_factory.mktemp("triton")
    sums, words = (
        {"OUTPUT0": (TensorProto.INT32, ["batch", 16]), "OUTPUT1": (TensorProto.INT32, ["batch", 16])},
        (STRING, ["batch", 2]),
    )
    models = {
        "images": (image_model(made / "images.onnx"), {"batch": (2, 4, 8)}),
        "simple": (
            save(
                made / "simple.onnx",
                [node("Add", "INPUT0 INPUT1", "OUTPUT0"), node("Sub", "INPUT0 INPUT1", "OUTPUT1")],
                {"INPUT0": sums["OUTPUT0"], "INPUT1": sums["OUTPUT0"]}, sums,
            ), {"batch": (1, 4, 8)},
        ),
        "tokens": (
            save(
                made / "tokens.onnx", [node("Gather", "table ids", "rows")], {"ids": (INT64, ["batch", "length"])},
                {"rows": (FLOAT, ["batch", "length", 2])}, {"table": np.arange(18, dtype=np.float32).reshape(9, 2)},
            ), {"profiles": ["ids:1x1,2x4,8x16"]},
        ),
        "strings": (
            save(made / "strings.onnx", [node("Identity", "INPUT", "OUTPUT")], {"INPUT": words}, {"OUTPUT": words}),
            {"batch": (1, 4, 8)},
        ),
    }  # fmt: skip
    store = te.Store(made / "store")
    engines = [
        te.build(model, out=made / f"{name}.engine.onnx", parity=False, store=store, **options).path
        for name, (model, options) in models.items()
    ]
    te.deploy("triton", engines, made / "repository", backend="python", max_wait_ms=5)
    labelled = made / "repository/images"  # clients send pixels as rows, and may ask for names
    (labelled / "labels.txt").write_text("red\ngreen\nblue\n")
    text = (labelled / "config.pbtxt").read_text()
    text = text.replace("  dims: 3\n  dims: 16\n  dims: 16\n}", _RESHAPED, 1)
    text = text.replace("  dims: 3\n}", '  dims: 3\n  label_filename: "labels.txt"\n}', 1)
    text = text.replace("      dims: 3\n      dims: 16\n      dims: 16\n", "      dims: [16, 48]\n")
    (labelled / "config.pbtxt").write_text(text)
    return made


@pytest.fixture(scope="module")
def triton(folder: Path) -> Iterator[RealTriton]:
    with real_triton(folder / "repository", folder / "triton.log") as running:
        yield running


@pytest.fixture(scope="module")
def ours(folder: Path) -> Iterator[Server]:
    with start(model_repository=folder / "repository") as server:
        yield server


@pytest.fixture(params=["http", "grpc"])
def clients(request: pytest.FixtureRequest, triton: Any, ours: Server) -> Iterator[list[Client]]:
    made = [Client(request.param, triton), Client(request.param, ours)]
    yield made
    for client in made:
        client.raw.close()


def test_triton_answers_with_our_engines_as_serve_does(clients: list[Client]) -> None:
    pixels = np.random.default_rng(0).random((1, 16, 48), np.float32)  # one row: fewer than the engine's smallest batch
    texts = np.array([["ab", "ü"], ["", "x"]], object)
    for model, feeds, datatype, output in (
        ("images", {"images": pixels}, "FP32", "scores"),
        ("tokens", {"ids": np.array([[0, 8, 3]])}, "INT64", "rows"),
        ("strings", {"INPUT": np.char.encode(texts.astype(str), "utf-8").astype(object)}, "BYTES", "OUTPUT"),
    ):
        theirs, our = (client.infer(model, feeds, datatype).as_numpy(output) for client in clients)
        np.testing.assert_array_equal(theirs, our)
        assert theirs.shape[0] == next(iter(feeds.values())).shape[0]


def test_requests_that_triton_joins_get_their_own_rows_and_only_those_at_fault_fail(triton: RealTriton) -> None:
    client = Client("grpc", triton)

    def one(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, 9, (rng.integers(1, 4), rng.integers(1, 4)))
        ids[0, 0] = 99 if seed % 17 == 0 else ids[0, 0]
        try:
            found = client.infer("tokens", {"ids": ids}, "INT64").as_numpy("rows")
        except client.module.InferenceServerException as error:
            return seed % 17 == 0 and "INVALID_ARGUMENT" in str(error)
        return np.array_equal(found, np.stack([2 * ids, 2 * ids + 1], -1))

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(200)))
    sizes = client.raw.get_inference_statistics("tokens").model_stats[0].batch_stats
    assert max(item.batch_size for item in sizes) > 3, "nothing was joined"
    client.raw.close()


# ------------------------------------------------------------------------------------------------ the protocol, call by call

Call = tuple[str, str, Any]
"""Method, path and body: bytes, or what is sent as JSON."""
SIMPLE = "/v2/models/simple/infer"
SUM = {
    "inputs": [
        {"name": "INPUT0", "shape": [1, 16], "datatype": "INT32", "data": [*range(16)]},
        {"name": "INPUT1", "shape": [1, 16], "datatype": "INT32", "data": [1] * 16},
    ]
}


def changed(first: Mapping[str, Any] | None = None, **request: Any) -> Call:
    """The sum of two tensors, with some keys of the first input or of the request changed; None removes one."""
    body = json.loads(json.dumps(SUM)) | request
    if first is not None:
        body["inputs"][0] |= first
        body["inputs"][0] = {key: value for key, value in body["inputs"][0].items() if value is not None}
    return "POST", SIMPLE, body


def wanting(**parameters: Any) -> Call:
    return changed(outputs=[{"name": "OUTPUT1", "parameters": parameters}])


GETS = [
    "/v2/models/simple/versions/2", "/v2/models/nope", "/v2/models/nope/config", "/v2/models/nope/stats",
    "/v2/systemsharedmemory/status", "/v2/cudasharedmemory/status", "/v2/nope", "/nope", "/v2/models", SIMPLE,
    "/v2/repository/index", "/v2/models/nope/ready", "/v2/models/simple/versions/9/ready",
]  # fmt: skip
POSTS: list[tuple[str, Any]] = [
    ("/v2/repository/index", {}), ("/v2/repository/index", {"ready": True}), ("/v2/repository/index", b"xx"),
    ("/v2/repository/anything/index", {}), ("/v2/systemsharedmemory/unregister", {}),
    ("/v2/cudasharedmemory/unregister", {}), ("/v2/cudasharedmemory/region/x/unregister", {}),
    ("/v2/systemsharedmemory/region/x/register", {"key": "/nope", "byte_size": 64}),
    ("/v2/cudasharedmemory/region/x/register", {"raw_handle": {"b64": "aa"}, "device_id": 0, "byte_size": 64}),
    ("/v2/models/nope/infer", SUM), ("/v2/models/simple/versions/1/infer", SUM),
    ("/v2/models/simple/versions/7/infer", SUM), ("/v2/models/simple/versions/x/infer", SUM),
    ("/v2/repository/models/simple/load", {}), ("/v2/health/live", {}), ("/v2/models/simple/config", {}),
]  # fmt: skip
ACCEPTED: dict[str, Call] = {
    "as it is": changed(), "id": changed(id="abc"), "one output": wanting(), "an output twice": changed(
        outputs=[{"name": "OUTPUT0"}] * 2
    ), "no outputs named": changed(outputs=[]), "classes": wanting(classification=2),
    "more classes than there are": wanting(classification=99), "priority": changed(parameters={"priority": 1}),
    "timeout": changed(parameters={"timeout": 10**7}), "a parameter of one's own": changed(parameters={"own": "x"}),
    "no sequence": changed(parameters={"sequence_id": 0}), "nested": changed({"data": [[1] * 16]}),
    "a key of one's own": changed({"extra": 5}), "negative": changed({"data": [-1] * 16}),
    "strings": (
        "POST", "/v2/models/strings/infer",
        {"inputs": [{"name": "INPUT", "shape": [1, 2], "datatype": "BYTES", "data": ["", "\N{GRINNING FACE}"]}]},
    ),
    "reshaped, with labels": (
        "POST", "/v2/models/images/infer",
        {
            "inputs": [{"name": "images", "shape": [1, 16, 48], "datatype": "FP32", "data": [*range(768)]}],
            "outputs": [{"name": "scores", "parameters": {"classification": 2}}],
        },
    ),
}  # fmt: skip
REFUSED: dict[str, Call] = {
    **{f"shape {shape}": changed({"shape": shape}) for shape in (
        [16], [1, 15], [2, 8], [-1, 16], [9, 16], None, "x", [1.0, 16], ["1", "16"], [], [1, 16, 1], [2**62, 16]
    )},
    **{f"datatype {name}": changed({"datatype": name}) for name in ("FP32", "int32", None, "BYTES", "NOPE", 5)},
    **{f"data {data!r:.30}": changed({"data": data}) for data in (
        None, [1] * 15, [1] * 17, ["a"] * 16, [1.5] * 16, [True] * 16, [None] * 16, [2**70] * 16, 5, {}, [1.0] * 16
    )},
    **{f"name {name}": changed({"name": name}) for name in ("NOPE", None, 5, "INPUT1")},
    **{f"body {body!r:.30}": ("POST", SIMPLE, body) for body in (
        {"inputs": []}, {}, {"inputs": SUM["inputs"][:1]}, {"inputs": SUM["inputs"] * 2}, {"inputs": "x"}, {"inputs": [5]},
        {"inputs": {}}, [], b"", b"x", b"null", json.dumps(SUM).encode() + b"x", json.dumps(SUM).encode()[:-1],
    )},
    **{f"outputs {outputs}": changed(outputs=outputs) for outputs in ([{"name": "NOPE"}], [{}], "x")},
    **{f"parameters {given}": changed(parameters=given) for given in ("x", {"priority": "x"}, {"own": [1]})},
    "id": changed(id=5), "region": changed({"parameters": {"shared_memory_region": "x", "shared_memory_byte_size": 64}}),
    "reshaped otherwise": (
        "POST", "/v2/models/images/infer",
        {"inputs": [{"name": "images", "shape": [1, 3, 16, 16], "datatype": "FP32", "data": [0] * 768}]},
    ),
    "an id that is in no table": (
        "POST", "/v2/models/tokens/infer", {"inputs": [{"name": "ids", "shape": [1, 1], "datatype": "INT64", "data": [9]}]},
    ),
}  # fmt: skip
DIFFERENT: dict[str, tuple[Call, str]] = {
    "trace": (("GET", "/v2/trace/setting", b""), "serve sends spans by OpenTelemetry, set where it is started"),
    "logging": (("GET", "/v2/logging", b""), "what serve logs is set where it is started"),
    "trailing slash": (("GET", "/v2/", b""), "serve answers as without it"),
    "nested otherwise": (changed({"data": [[1] * 8, [1] * 8]}), "serve refuses lists that contradict the shape"),
    "out of range": (changed({"data": [2**31] * 16}), "Triton wraps integers of another range"),
    "sequence": (changed(parameters={"sequence_id": 5}), "serve has no sequences, and does not ignore their ids"),
    "reserved": (changed(parameters={"triton_x": "x"}), "serve has no parameters of its own of that name"),
}
"""Calls that one of the two answers and the other refuses, with the reason."""


def outcome(address: str, call: Call) -> Any:
    """What a server makes of a call: the JSON of its answer, or the kind of its refusal."""
    method, path, body = call
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection(address, timeout=HANG_S)
    try:
        connection.request(method, path, raw or None)
        response = connection.getresponse()
        content = response.read()
    finally:
        connection.close()
    if response.status != 200:
        assert isinstance(json.loads(content)["error"], str)
        return "refused"
    return json.loads(content) if content else {}


def test_every_call_is_answered_or_refused_as_by_triton(triton: RealTriton, ours: Server) -> None:
    assert ours.http_address is not None
    calls: dict[str, Call] = {path: ("GET", path, b"") for path in GETS}
    calls |= {f"POST {path} {body!r:.40}": ("POST", path, body) for path, body in POSTS}
    for name, call in (calls | ACCEPTED | REFUSED).items():
        assert outcome(ours.http_address, call) == outcome(triton.http_address, call), name
    assert all(outcome(ours.http_address, call) != "refused" for call in ACCEPTED.values())
    assert all(outcome(ours.http_address, call) == "refused" for call in REFUSED.values())
    for name, (call, _) in DIFFERENT.items():
        assert outcome(ours.http_address, call) != outcome(triton.http_address, call), f"no difference any more: {name}"


def test_configuration_and_statistics_have_triton_s_fields(triton: RealTriton, ours: Server) -> None:
    assert ours.http_address is not None
    for model in ("images", "simple", "tokens"):
        call = ("GET", f"/v2/models/{model}/config", b"")
        theirs, our = (outcome(address, call) for address in (triton.http_address, ours.http_address))
        for key in ("name", "version_policy", "max_batch_size", "input", "output"):
            assert our[key] == theirs[key], (model, key)
        assert (
            our["dynamic_batching"].items()
            >= {"max_queue_delay_microseconds": 5000, "preserve_ordering": False}.items()
        )
        call = ("GET", f"/v2/models/{model}/stats", b"")
        theirs, our = (outcome(address, call)["model_stats"][0] for address in (triton.http_address, ours.http_address))
        assert our.keys() <= theirs.keys() and our["inference_stats"].keys() == theirs["inference_stats"].keys()
