"""Unmodified tritonclient, over HTTP and gRPC: a test for each feature."""

from __future__ import annotations

import contextlib
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from patience import HANG_S
from serving.conftest import ECHO, place, start
from serving.triton import Client, ones
from trt_engine.verbs.serve.server import Server


@pytest.fixture(scope="module")
def server(engines: dict[str, Path], serve: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    root = tmp_path_factory.mktemp("models")
    for name, engine in engines.items():
        place(engine, root, name)
    place(engines["triple"], root, "double", 2)
    place(engines["double"], root, "spare")
    both = (
        "version_policy { all {} } max_batch_size: 8 dynamic_batching { priority_levels: 2 default_priority_level: 2 "
    )
    both += "default_queue_policy { max_queue_size: 256 allow_timeout_override: true } }"
    (root / "double" / "config.pbtxt").write_text(both)
    return serve(
        model_repository=root,
        model_control_mode="explicit",
        load_model=["double", "slow", *ECHO],
        max_queue=2,
        control_without_token=True,
        shared_memory_prefix="/trt_engine_",
    )


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[Client]:
    made = Client(request.param, server)
    yield made
    made.raw.close()


def test_metadata_of_the_server_lists_what_works(client: Client) -> None:
    found = client.as_dict(client.raw.get_server_metadata())
    assert found["name"] == "trt-engine"
    assert set(found["extensions"]) == {
        "binary_tensor_data", "model_configuration", "model_repository", "model_repository(unload_dependents)",
        "schedule_policy", "statistics", "system_shared_memory",
    }  # fmt: skip


def test_config_of_a_model(client: Client) -> None:
    found = client.as_dict(client.raw.get_model_config("double"))
    found = found.get("config", found)
    assert found["max_batch_size"] == 8 and found["backend"] == "onnxruntime"
    (x,) = found["input"]
    assert (x["name"], x["data_type"], x["dims"]) == ("x", "TYPE_FP32", [4])
    assert client.protocol == "grpc" or x["format"] == "FORMAT_NONE"  # JSON has every field: clients read them unasked
    assert int(found["dynamic_batching"]["priority_levels"]) == 2
    assert found["parameters"]["engine"]["string_value"].startswith("sha256:")


@pytest.mark.parametrize("version", ["1", "2", ""])
def test_an_inference_with_each_version_the_newest_where_none_is_named(client: Client, version: str) -> None:
    x = ones(3)
    answer = client.infer("double", {"x": x}, model_version=version, request_id="7")
    np.testing.assert_array_equal(answer.as_numpy("y"), x * (2 if version == "1" else 3))
    found = client.as_dict(answer.get_response())
    assert str(found["id"]) == "7" and str(found["model_version"]) == (version or "2")


def values_of(datatype: str, rows: int = 2) -> Any:
    if datatype == "BYTES":
        return np.array([[b"a", "å".encode(), b""]] * rows, object)
    if datatype == "BOOL":
        return np.array([[True, False, True]] * rows)
    kinds = {
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "FP16": np.dtype("f2"),
        "FP32": np.dtype("f4"),
        "FP64": np.dtype("f8"),
    }
    dtype = kinds.get(datatype) or np.dtype(datatype.lower())
    low, high = (0, 100) if dtype.kind in "fV" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return np.array([[low, 1, high]] * rows, dtype)


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_every_datatype_comes_back_as_it_was_sent(client: Client, binary: bool) -> None:
    if not binary and client.protocol == "grpc":
        pytest.skip("gRPC has no JSON")
    for model, datatypes in ECHO.items():
        inputs, outputs, sent = [], [], {}
        for datatype in datatypes:
            sent[datatype] = values_of(datatype)
            half = datatype in ("FP16", "BF16")
            options = {} if client.protocol == "grpc" else {"binary_data": binary or half}
            inputs.append(client.input(f"in_{datatype}", sent[datatype], datatype, **options))
            outputs.append(client.output(f"out_{datatype}", **options))
        answer = client.raw.infer(model, inputs, outputs=outputs)
        for datatype, want in sent.items():
            got = answer.as_numpy(f"out_{datatype}")
            if datatype == "BYTES" and not binary:
                got = np.array(
                    [[text.encode() if isinstance(text, str) else text for text in row] for row in got], object
                )
            np.testing.assert_array_equal(got, want, err_msg=datatype)


def test_asynchronous_requests_are_all_answered_with_their_own_rows(client: Client) -> None:
    answers: Queue[tuple[int, Any, Any]] = Queue()
    handles = []
    for number in range(20):
        inputs = [client.input("x", ones(1) + number)]
        if client.protocol == "http":
            handles.append(client.raw.async_infer("double", inputs, model_version="1"))
        else:
            client.raw.async_infer(
                "double",
                inputs,
                lambda result, error, number=number: answers.put((number, result, error)),
                model_version="1",
            )
    for number, handle in enumerate(handles):
        answers.put((number, handle.get_result(), None))
    for _ in range(20):
        number, answer, error = answers.get(timeout=HANG_S)
        assert error is None, error
        np.testing.assert_array_equal(answer.as_numpy("y"), (ones(1) + number) * 2)


def test_a_stream_has_one_answer_for_each_request_and_an_error_ends_nothing(server: Server) -> None:
    client = Client("grpc", server)
    answers: Queue[tuple[Any, Any]] = Queue()
    client.raw.start_stream(lambda result, error: answers.put((result, error)))
    for number in range(5):
        client.raw.async_stream_infer("double", [client.input("x", ones() + number)], model_version="1")
    client.raw.async_stream_infer("nothing", [client.input("x", ones())])
    client.raw.async_stream_infer("double", [client.input("x", ones())], model_version="1")
    found = [answers.get(timeout=HANG_S) for _ in range(7)]
    client.raw.stop_stream()
    client.raw.close()
    for number, (answer, error) in enumerate(found[:5]):
        assert error is None, error
        np.testing.assert_array_equal(answer.as_numpy("y"), (ones() + number) * 2)
    assert "unknown model: `nothing`" in str(found[5][1]) and found[6][1] is None


def test_requests_of_a_stream_are_joined(engines: dict[str, Path]) -> None:
    with start(engines["double"], max_batch=4, max_wait_ms=HANG_S * 1e3) as server:
        client = Client("grpc", server)
        answers: Queue[tuple[Any, Any]] = Queue()
        client.raw.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(4):
            client.raw.async_stream_infer("double", [client.input("x", ones() + number)])
        found = [answers.get(timeout=HANG_S) for _ in range(4)]
        client.raw.stop_stream()
        for number, (answer, error) in enumerate(found):
            assert error is None, error
            np.testing.assert_array_equal(answer.as_numpy("y"), (ones() + number) * 2)
        (stats,) = client.as_dict(client.raw.get_inference_statistics("double"))["model_stats"]
        assert int(stats["execution_count"]) == 1
        client.raw.close()


def test_statistics_count_requests_rows_and_runs(client: Client) -> None:
    def now() -> dict[str, Any]:
        (found,) = client.as_dict(client.raw.get_inference_statistics("double", "1"))["model_stats"]
        return found

    before = int(now().get("inference_count", 0))
    client.infer("double", {"x": ones(3)}, model_version="1")
    after = now()
    assert int(after["inference_count"]) == before + 3
    stats = after["inference_stats"]
    parts = [int(stats[name]["ns"]) for name in ("queue", "compute_input", "compute_infer", "compute_output")]
    assert min(parts) > 0 and int(stats["success"]["ns"]) >= sum(parts) * 0.99
    assert {"batch_size", "compute_infer"} <= after["batch_stats"][0].keys()
    assert len(client.as_dict(client.raw.get_inference_statistics())["model_stats"]) >= 4


def test_clients_load_and_unload_models(client: Client) -> None:
    def states() -> dict[str, str]:
        found = client.as_dict(client.raw.get_model_repository_index())
        found = found if isinstance(found, list) else found["models"]
        return {item["name"]: item.get("state", "") for item in found}

    assert states()["spare"] in ("", "UNAVAILABLE")
    client.raw.load_model("spare")
    assert states()["spare"] == "READY" and client.raw.is_model_ready("spare")
    np.testing.assert_array_equal(client.infer("spare", {"x": ones()}).as_numpy("y"), ones() * 2)
    client.raw.unload_model("spare")
    assert states()["spare"] == "UNAVAILABLE" and not client.raw.is_model_ready("spare")
    with pytest.raises(InferenceServerException, match="unknown model: `nothing`"):
        client.raw.load_model("nothing")
    client.raw.load_model("spare", config='{"max_batch_size": "4"}')
    found = client.as_dict(client.raw.get_model_config("spare"))
    assert found.get("config", found)["max_batch_size"] == 4
    client.raw.load_model("spare")
    found = client.as_dict(client.raw.get_model_config("spare"))
    assert found.get("config", found)["max_batch_size"] == 8
    for wrong in ('{"max_batch_size": "99"}', '{"nothing": 1}', "no JSON"):
        with pytest.raises(InferenceServerException, match="failed to load `spare`"):
            client.raw.load_model("spare", config=wrong)
    assert client.raw.is_model_ready("spare")


def test_tensors_in_system_shared_memory(client: Client) -> None:
    x, key = ones(2), f"/trt_engine_{uuid.uuid4().hex}"
    region = shm.create_shared_memory_region("both", key, 2 * x.nbytes)
    try:
        shm.set_shared_memory_region(region, [x])
        client.raw.register_system_shared_memory("both", key, 2 * x.nbytes)
        status = client.as_dict(client.raw.get_system_shared_memory_status())
        assert "both" in str(status) and key in str(status)
        given = client.module.InferInput("x", [2, 4], "FP32")
        given.set_shared_memory("both", x.nbytes)
        wanted = client.output("y")
        wanted.set_shared_memory("both", x.nbytes, offset=x.nbytes)
        answer = client.raw.infer("double", [given], outputs=[wanted], model_version="1")
        assert answer.get_response() is not None
        np.testing.assert_array_equal(shm.get_contents_as_numpy(region, np.float32, [2, 4], offset=x.nbytes), x * 2)
        with pytest.raises(InferenceServerException, match="outside the region"):
            given.set_shared_memory("both", x.nbytes, offset=2 * x.nbytes)
            client.raw.infer("double", [given])
        client.raw.unregister_system_shared_memory("both")
        with pytest.raises(InferenceServerException, match="unknown region `both`"):
            client.raw.infer("double", [given])
    finally:
        client.raw.unregister_system_shared_memory()
        shm.destroy_shared_memory_region(region)


def busy(server: Server, stop: threading.Event, threads: int) -> list[threading.Thread]:
    """Callers that keep the model `slow` at work until `stop`."""

    def work() -> None:
        client = Client("grpc", server)
        while not stop.is_set():
            with contextlib.suppress(InferenceServerException):
                client.infer("slow", {"count": np.array([3000])}, "INT64")
        client.raw.close()

    made = [threading.Thread(target=work) for _ in range(threads)]
    for one in made:
        one.start()
    return made


@pytest.mark.slow
def test_a_request_whose_timeout_passes_in_the_queue_is_not_run_and_a_full_queue_refuses(
    client: Client, server: Server
) -> None:
    stop = threading.Event()
    callers = busy(server, stop, 6)
    seen = set()
    try:
        while len(seen) < 2:
            try:
                client.infer("slow", {"count": np.array([1])}, "INT64", timeout=1)
            except InferenceServerException as error:
                seen |= {name for name in ("deadline passed", "requests wait already") if name in str(error)}
                assert error.status() in ("503", "504", "StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED")
    finally:
        stop.set()
        for one in callers:
            one.join()
    (found,) = client.as_dict(client.raw.get_inference_statistics("slow"))["model_stats"]
    assert int(found["inference_stats"]["fail"]["count"]) >= 2


def test_wrong_requests_are_refused_with_what_was_expected(client: Client) -> None:
    cases: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
        ("unknown model: `nothing`", {"x": ones()}, "FP32", {"model_name": "nothing"}),
        ("no version `7`", {"x": ones()}, "FP32", {"model_version": "7"}),
        ("unknown input `z`", {"z": ones()}, "FP32", {}),
        ("is INT32, expected FP32", {"x": ones().astype(np.int32)}, "INT32", {}),
        ("is 1x5, expected", {"x": np.zeros((1, 5), np.float32)}, "FP32", {}),
        ("9 rows", {"x": ones(9)}, "FP32", {}),
        ("unknown output `z`", {"x": ones()}, "FP32", {"outputs": [client.output("z")]}),
        ("sequences of requests", {"x": ones()}, "FP32", {"sequence_id": 3}),
    ]
    for expected, feeds, datatype, options in cases:
        model = options.pop("model_name", "double")
        with pytest.raises(InferenceServerException) as caught:
            client.infer(model, feeds, datatype, **options)
        if expected == "9 rows":
            assert "9x4" in str(caught.value) or "9 rows" in str(caught.value)
        else:
            assert expected in str(caught.value)
        assert caught.value.status() in ("400", "404", "StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND")


def test_typed_contents_over_grpc(server: Server) -> None:
    from tritonclient.grpc import service_pb2

    client = Client("grpc", server)
    fields = {
        "BOOL": ("bool_contents", [True, False, True]), "INT8": ("int_contents", [-128, 0, 127]),
        "INT16": ("int_contents", [-(2**15), 0, 1]), "INT32": ("int_contents", [-(2**31), 0, 1]),
        "INT64": ("int64_contents", [-(2**63), 0, 5]), "UINT8": ("uint_contents", [0, 1, 255]),
        "UINT16": ("uint_contents", [0, 1, 65535]), "UINT32": ("uint_contents", [0, 1, 2**32 - 1]),
        "UINT64": ("uint64_contents", [0, 1, 2**64 - 1]), "FP32": ("fp32_contents", [0.5, 1.0, 2.0]),
        "FP64": ("fp64_contents", [0.1, 1.0, 2.0]),
    }  # fmt: skip

    def infer(model: str, contents: dict[str, tuple[str, list[Any]]]) -> Any:
        request = service_pb2.ModelInferRequest(model_name=model)
        for name, (field, values) in contents.items():
            item = request.inputs.add(name=f"in_{name}", datatype=name, shape=[1, 3])
            getattr(item.contents, field).extend(values)
        return client.raw._client_stub.ModelInfer(request)

    answer = infer("types", fields)
    for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
        name, values = output.datatype, fields[output.datatype][1]
        np.testing.assert_array_equal(np.frombuffer(raw, name.lower().replace("fp", "float")), values, err_msg=name)
    assert infer("words", {"BYTES": ("bytes_contents", [b"a", b"", b"c"])}).raw_output_contents[0].endswith(b"c")
    for model, changed, expected in (
        ("types", {"INT8": ("int_contents", [1, 2, 300])}, "a value outside INT8"),
        ("types", {"INT8": ("int_contents", [1, 2])}, "has 2 values, expected 3"),
        ("types", {"INT8": ("fp32_contents", [1, 2, 3])}, "has fp32_contents, expected int_contents"),
        ("halves", {"FP16": ("fp32_contents", [1, 2, 3])}, "FP16, which has no typed contents"),
    ):
        with pytest.raises(grpc.RpcError, match=expected):
            infer(model, changed)
    client.raw.close()


def test_the_health_service_of_grpc(server: Server) -> None:
    from trt_engine.open_inference.messages import message

    request, answer = message("grpc.health.v1.HealthCheckRequest"), message("grpc.health.v1.HealthCheckResponse")
    with grpc.insecure_channel(server.grpc_address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", request.SerializeToString, answer.FromString)
        assert [check(request(service=name)).status for name in ("", "double")] == [1, 1]
        with pytest.raises(grpc.RpcError) as caught:
            check(request(service="nothing"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch", request.SerializeToString, answer.FromString)
        calls = watch(request(service="nothing"))
        assert next(iter(calls)).status == 3
        calls.cancel()


def test_metadata_of_a_model(client: Client) -> None:
    found = client.as_dict(client.raw.get_model_metadata("double"))
    assert found["versions"] in (["1", "2"], [1, 2]) and found["platform"] == "onnxruntime_onnx"
    assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert found["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}]


def test_live_ready_and_the_readiness_of_models(client: Client) -> None:
    assert client.raw.is_server_live() and client.raw.is_server_ready()
    assert client.raw.is_model_ready("double") and client.raw.is_model_ready("double", "1")
    assert not client.raw.is_model_ready("double", "9")


@pytest.mark.slow
def test_no_counter_falls_however_threads_are_switched(engines: dict[str, Path]) -> None:
    before, parts = sys.getswitchinterval(), ("queue", "compute_input", "compute_infer", "compute_output")
    with start(engines["double"]) as server:
        clients = [Client(protocol, server) for protocol in ("http", "grpc")]
        seen = [dict.fromkeys(parts, 0)]

        def call(number: int) -> None:
            clients[1].infer("double", {"x": ones()})
            if number % 50 == 0:
                (row,) = clients[1].as_dict(clients[1].raw.get_inference_statistics("double"))["model_stats"]
                seen.append({name: int(row["inference_stats"][name]["ns"]) for name in parts})

        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(16) as pool:
                assert len([*pool.map(call, range(1000))]) == 1000
        finally:
            sys.setswitchinterval(before)
        (row,) = clients[0].as_dict(clients[0].raw.get_inference_statistics("double"))["model_stats"]
        assert row["inference_stats"]["success"]["count"] == row["inference_count"] == 1000
        assert all(row["inference_stats"][name]["ns"] >= seen[-1][name] >= 0 for name in parts)
        assert min(value for one in seen for value in one.values()) >= 0
        for client in clients:
            client.raw.close()
