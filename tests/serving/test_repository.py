"""Repositories: layout, configuration, versions, truth, reload without a lost request, and what is refused."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

import trt_engine as te
from onnx_models import FLOAT, node, save
from patience import HANG_S, until
from serving.conftest import double_model, place, start
from serving.triton import Client, fetch, ones
from trt_engine.errors import UsageError
from trt_engine.graph.load import open_model
from trt_engine.runtime.batcher import Batcher
from trt_engine.verbs.serve import served_model
from trt_engine.verbs.serve.execution import TimedRunner
from trt_engine.verbs.serve.model_config import ModelSettings, build_config, read_config, server_settings
from trt_engine.verbs.serve.server import Server

BASE = server_settings(te.ServeConfig(), te.RuntimeConfig())


def damage(version: Path) -> None:
    """Change an engine after it was sealed."""
    path = version / "model.onnx"
    path.write_bytes(path.read_bytes() + b"\0")


def index(server: Server) -> dict[str, tuple[str, str]]:
    """State and reason by `model/version`."""
    found = Client("http", server).raw.get_model_repository_index()
    return {f"{row['name']}/{row.get('version', '')}": (row.get("state", ""), row.get("reason", "")) for row in found}


# ------------------------------------------------------------------------------------------------ config.pbtxt


def config(text: str) -> ModelSettings:
    return read_config(text.encode(), "m", BASE)


def test_a_configuration_sets_batching_instances_versions_and_providers() -> None:
    found = config("""
        name: "m" backend: "onnxruntime" max_batch_size: 16 default_model_filename: "net.onnx"
        dynamic_batching {
          preferred_batch_size: [4, 8] max_queue_delay_microseconds: 500 priority_levels: 3 default_priority_level: 2
          default_queue_policy { default_timeout_microseconds: 7000 max_queue_size: 9 }
          priority_queue_policy { key: 3 value { default_timeout_microseconds: 9000 } }
        }
        instance_group [{ count: 3 kind: KIND_CPU }]
        version_policy { specific { versions: [1, 3] } }
        parameters { key: "providers" value { string_value: "cuda,cpu" } }
        parameters { key: "allow_fallback" value { string_value: "true" } }
    """)
    assert (found.max_batch, found.max_wait_ms, found.max_queue, found.max_request_rows) == (8, 0.5, 9, 16)
    assert found.priority(1) > found.priority(0) == found.priority(2) > found.priority(3) == found.priority(99)
    assert found.deadline_ms(0) == found.deadline_ms(100) == 7.0 and found.deadline_ms(0, 99) == 9.0
    assert found.policy.select([1, 2]) == [1, 3] and found.filename == "net.onnx"
    assert found.runtime.contexts == 3 and found.runtime.device == "cpu"
    assert found.runtime.providers == ("cuda", "cpu") and found.runtime.allow_fallback


@pytest.mark.parametrize(
    "text",
    [
        "input { name: 'x' dims: [3, -1, -1] format: FORMAT_NCHW allow_ragged_batch: true optional: false }",
        "input { name: 'x' dims: [3, 4] reshape { shape: [3, 4] } } output { name: 'y' label_filename: '' }",
        "optimization { priority: PRIORITY_MAX graph { level: 1 } eager_batching: true gather_kernel_buffer_threshold: 1 }",
        "optimization { input_pinned_memory { enable: true } output_pinned_memory { enable: false } }",
        "optimization { execution_accelerators { gpu_execution_accelerator: [ { name: 'tensorrt' } ] } }",
        "optimization { cuda { busy_wait_events: true graph_spec { batch_size: 4 } } }",
        "max_batch_size: 4 dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: REJECT } }",
        "instance_group { passive: false profile: ['0'] kind: KIND_CPU host_policy: '' rate_limiter { priority: 2 } }",
        "response_cache { enable: true } model_transaction_policy { decoupled: false } runtime: ''",
        "metric_tags { key: 'a' value: 'b' } cc_model_filenames { key: '8.6' value: 'a' } batch_input []",
        "parameters { key: 'execution_mode' value { string_value: '1' } }",
    ],
)
def test_keys_of_triton_that_change_no_answer_are_read(text: str) -> None:
    found = config(text)
    assert found.join == ("dynamic_batching" in text)
    assert not found.config.HasField("response_cache") and not found.config.metric_tags  # not in what is in force


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("input { name: 'x' dims: [4, -1] reshape { shape: [2, -1] } }", "`reshape` of `x` from [4, -1] to [2, -1]"),
        ("max_batch_sise: 4", "row 1: the key `max_batch_sise` is not supported"),
        ("optimization { graph { levels: 1 } }", "the key `levels` is not supported"),
        ("ensemble_scheduling {}", "not supported: `ensemble_scheduling`"),
        ("batch_output { target_name: 'y' }", "not supported: `batch_output`"),
        ("max_batch_size: 'x'", "row 1"),
        ("name: 'other'", "its folder is `m`"),
        ("max_batch_size: -1", "`max_batch_size` is -1"),
        ("max_batch_size: 4 dynamic_batching { preferred_batch_size: 5 }", "1 to 4"),
        ("max_batch_size: 4 dynamic_batching { priority_levels: 2 }", "`default_priority_level` is 0"),
        ("parameters { key: 'provider' value { string_value: 'y' } }", "parameter `provider` is not supported"),
        ("parameters { key: 'allow_fallback' value { string_value: '1' } }", "`true` or `false`"),
        ("\xff", "row 1"),
    ],
)
def test_a_key_that_is_not_supported_is_named_and_wrong_values_are_refused(text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        config(text)
    assert expected in str(caught.value) and "`config.pbtxt` of `m`" in str(caught.value)


# ------------------------------------------------------------------------------------------------ models


def test_what_cannot_be_served_is_not_ready_with_the_reason(
    engines: dict[str, Path], serve: Callable[..., Server], repository: Path, tmp_path: Path
) -> None:
    place(engines["double"], repository, "good")
    damage(place(engines["double"], repository, "changed"))
    place(engines["double"], repository, "keyed", config="ensemble_scheduling {}")
    place(engines["double"], repository, "wrong", config="backend: 'tensorrt'")
    place(engines["double"], repository, "dims", config="input { name: 'x' data_type: TYPE_FP32 dims: [-1, 5] }")
    place(engines["double"], repository, "large", config="max_batch_size: 64")
    sample = "key: 'x' value { data_type: TYPE_FP32 dims: 4 random_data: true }"
    warm = f"model_warmup {{ name: 'w' batch_size: 64 inputs {{ {sample} }} }}"
    place(engines["double"], repository, "warm", config=f"max_batch_size: 8 {warm}")
    provider = "parameters { key: 'providers' value { string_value: 'cuda' } }"
    place(engines["double"], repository, "provider", config=provider)
    for name, side in (("few", "in"), ("part", "out")):
        half = f"max_batch_size: 4 {side}put {{ name: '{side}_FP16' data_type: TYPE_FP16 dims: 3 }}"
        place(engines["halves"], repository, name, config=half)
    (repository / "bare" / "1").mkdir(parents=True)
    double_model(repository / "bare" / "1" / "model.onnx")
    (repository / "empty").mkdir()
    outside = place(engines["double"], tmp_path / "elsewhere", "outside")
    (repository / "linked").symlink_to(tmp_path / "elsewhere" / "outside")
    (repository / "file").mkdir()
    (repository / "file" / "1").symlink_to(outside)
    server = serve(model_repository=repository)
    expected = {
        "changed/1": "digest differs", "keyed/": "not supported: `ensemble_scheduling`",
        "large/1": "`max_batch_size` is 64, the engine takes", "warm/1": "`batch_size` of `model_warmup` is 64",
        "wrong/1": "the engine's is `onnxruntime`", "few/1": "`input` has ['in_FP16'], the engine ['in_FP16', 'in_BF16']",
        "dims/1": "the engine's is x:", "provider/1": "cuda", "bare/1": "`--build-models`", "empty/": "has no version",
        "linked/": "outside the repository", "file/1": "outside the repository",
    }  # fmt: skip
    found = index(server)
    assert found.pop("good/1") == found.pop("part/1") == ("READY", "")
    assert [item["name"] for item in fetch(server, "/v2/models/part")[2]["outputs"]] == ["out_FP16"]
    assert found.keys() == expected.keys()
    for key, text in expected.items():
        assert found[key][0] == "UNAVAILABLE" and text in found[key][1], (key, found[key])
    client = Client("http", server)
    assert client.raw.is_server_live() and not client.raw.is_server_ready() and client.raw.is_model_ready("good")
    assert {name for name in expected if client.raw.is_model_ready(name.partition("/")[0])} == set()
    status, _, body = fetch(server, "/v2/health/ready")
    assert status == 503 and "digest differs" in body["reasons"]["changed"]
    status, _, body = fetch(server, "/v2/models/changed/ready")
    assert status == 503 and "digest differs" in body["reason"]
    with pytest.raises(InferenceServerException, match="model `changed` is not ready"):
        client.infer("changed", {"x": ones()})
    client.raw.close()


def test_a_folder_whose_name_no_model_can_have_is_named_with_the_reason(
    engines: dict[str, Path], serve: Callable[..., Server], repository: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["my model", "-x", "größe", "a\\b", "a" * 129, "\udcff"]
    for name in ("good", *names, ".git", "lost+found"):
        place(engines["double"], repository, name)
    server = serve(model_repository=repository)
    listed = [*names[:-1], "\\xff"]  # a name that is not UTF-8
    found = index(server)
    assert found.pop("good/1") == ("READY", "") and found.keys() == {f"{name}/" for name in listed}
    assert {(state, reason.partition(";")[0]) for state, reason in found.values()} == {
        ("UNAVAILABLE", "a model cannot have this name")
    }
    for name in listed:
        assert f"`{name}` is not ready: a model cannot have this name" in caplog.text
    assert {model.name for model in server.report.models} == {"good", *listed}
    status, _, body = fetch(server, "/v2/health/ready")
    assert status == 503 and body["reasons"].keys() == {*listed}
    client = Client("grpc", server)
    assert len(client.raw.get_model_repository_index().models) == 1 + len(listed)
    assert not client.raw.is_server_ready() and not client.raw.is_model_ready("my model")
    client.raw.close()


def test_without_strict_readiness_the_server_is_ready_and_a_changed_engine_can_be_allowed(
    engines: dict[str, Path], serve: Callable[..., Server], repository: Path
) -> None:
    place(engines["double"], repository, "good")
    passport = place(engines["double"], repository, "changed") / "model.onnx.json"
    passport.write_text(passport.read_text().replace("sha256:", "sha256:0", 1))
    (repository / "bare" / "1").mkdir(parents=True)
    double_model(repository / "bare" / "1" / "model.onnx", 5.0)
    server = serve(model_repository=repository, strict_readiness=False, grpc_port=-1)
    client = Client("http", server)
    assert client.raw.is_server_ready() and not client.raw.is_model_ready("changed")
    client.raw.close()
    server = serve(model_repository=repository, allow_changed=True, build_models=True, parity=False, grpc_port=-1)
    client = Client("http", server)
    assert client.raw.is_server_ready() and client.raw.is_model_ready("changed")
    np.testing.assert_array_equal(client.infer("bare", {"x": ones()}).as_numpy("y"), ones() * 5)
    client.raw.close()


@pytest.mark.parametrize(
    ("text", "given", "profile"),
    [
        ("max_batch_size: 8 dynamic_batching { preferred_batch_size: 4 }", {}, "1x4 4x4 8x4"),
        ("max_batch_size: 8 dynamic_batching {}", {}, "1x4 8x4 8x4"),
        ("max_batch_size: 8", {}, "1x4 8x4 8x4"),
        ("max_batch_size: 8", {"batch": (1, 2, 16)}, "1x4 2x4 16x4"),
        ("max_batch_size: 1", {}, "1x4 1x4 1x4"),
        ("", {}, "1x4 1x4 1x4"),
        ("max_batch_size: 8 input { name: 'x' dims: 6 }", {}, "1x6 8x6 8x6"),
        ("input { name: 'x' dims: [2, 6] }", {}, "2x6 2x6 2x6"),
        ("max_batch_size: 8 input { name: 'x' dims: -1 }", {"shapes": {"x": (1, 4)}}, "1x4 8x4 8x4"),
    ],
)
def test_a_model_is_built_for_the_batches_and_shapes_of_its_configuration(
    text: str, given: dict[str, Any], profile: str, tmp_path: Path
) -> None:
    sizes = ["batch", "n"] if "dims" in text else ["batch", 4]
    model = save(tmp_path / "net.onnx", [node("Relu", "x", "y")], {"x": (FLOAT, sizes)}, {"y": (FLOAT, sizes)})
    made = build_config(config(text), model, te.BuildConfig(**given))
    (found,) = made.resolve(open_model(model).signature)
    assert " ".join("x".join(map(str, shape)) for shape in found.ranges["x"].shapes) == profile


def test_the_truth_is_in_every_answer(engines: dict[str, Path], serve: Callable[..., Server]) -> None:
    server = serve(f"net={engines['double']}")
    digest = te.Engine.open(engines["double"]).passport.payload[0].digest
    want = {"backend": "onnxruntime", "providers": "cpu", "device": "cpu", "precision": "fp32 100 %", "engine": digest}
    for path in ("/v2/models/net", "/v2/models/net/ready"):
        status, headers, body = fetch(server, path)
        assert status == 200 and body["properties"] == want and digest in headers["trt-engine"]
    _, _, body = fetch(server, "/v2/models/net/config")
    assert {name: item["string_value"] for name, item in body["parameters"].items()} == want
    assert server.report.models[0].properties == want
    _, _, text = fetch(server, "/metrics")
    assert f'trt_engine_backend_info{{backend="onnxruntime",device="cpu",engine_sha="{digest}"' in text
    import grpc

    from trt_engine.open_inference.messages import message

    with grpc.insecure_channel(server.grpc_address) as channel:
        request, answer = message("ModelInferRequest"), message("ModelInferResponse")
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer", request.SerializeToString, answer.FromString
        )
        made = request(model_name="net", raw_input_contents=[ones().tobytes()])
        made.inputs.add(name="x", datatype="FP32", shape=[1, 4])
        _, done = call.with_call(made)
        assert f"engine={digest}" in dict(done.trailing_metadata())["trt-engine"]


def test_a_new_version_replaces_the_old_one_under_load_and_loses_no_request(
    engines: dict[str, Path], serve: Callable[..., Server], repository: Path
) -> None:
    place(engines["double"], repository, "net")
    server = serve(
        model_repository=repository, model_control_mode="explicit", control_without_token=True, load_model=["net"]
    )
    stop, failures, seen = threading.Event(), [], set()

    def call(protocol: str) -> None:
        client = Client(protocol, server)
        while not stop.is_set():
            try:
                factor = float(client.infer("net", {"x": ones() + 1}).as_numpy("y")[0, 0])
                seen.add(factor)
            except InferenceServerException as error:
                failures.append(error)
        client.raw.close()

    callers = [threading.Thread(target=call, args=(protocol,)) for protocol in ("http", "grpc")]
    for one in callers:
        one.start()
    client = Client("grpc", server)
    try:
        until(lambda: seen == {2.0}, "an answer of version 1")
        place(engines["triple"], repository, "net", 2)
        for number in range(8):
            if number:
                shutil.rmtree(repository / "net" / "2") if number % 2 else place(
                    engines["triple"], repository, "net", 2
                )
            client.raw.load_model("net")
            factor = 2.0 if number % 2 else 3.0
            assert float(client.infer("net", {"x": ones() + 1}).as_numpy("y")[0, 0]) == factor
        until(lambda: seen == {2.0, 3.0}, "answers of both versions")
    finally:
        stop.set()
        for one in callers:
            one.join()
        client.raw.close()
    assert not failures


def test_a_version_that_cannot_be_loaded_leaves_the_old_one_serving(
    engines: dict[str, Path], serve: Callable[..., Server], repository: Path
) -> None:
    place(engines["double"], repository, "net")
    server = serve(
        model_repository=repository, model_control_mode="explicit", control_without_token=True, load_model=["net"]
    )
    damage(place(engines["triple"], repository, "net", 2))
    client = Client("http", server)
    with pytest.raises(InferenceServerException, match="digest differs"):
        client.raw.load_model("net")
    assert index(server)["net/2"][0] == "UNAVAILABLE" and index(server)["net/1"][0] == "READY"
    np.testing.assert_array_equal(client.infer("net", {"x": ones()}).as_numpy("y"), ones() * 2)
    assert client.raw.is_model_ready("net") and not client.raw.is_model_ready("net", "2")
    client.raw.close()


def test_the_index_is_right_again_once_the_files_are(
    engines: dict[str, Path], serve: Callable[..., Server], repository: Path
) -> None:
    version = place(engines["double"], repository, "net")
    server = serve(
        model_repository=repository,
        model_control_mode="explicit",
        control_without_token=True,
        load_model=["net"],
        grpc_port=-1,
    )
    client = Client("http", server)
    for file in ("model.onnx", "model.onnx.json"):
        shutil.copy2(version / file, repository / file)
    damage(version)
    place(engines["triple"], repository, "net", 2)
    damage(repository / "net" / "2")
    (repository / "net" / "3").touch()  # a file is not a version
    (repository / "net" / "config.pbtxt").write_text("version_policy { all {} }")
    with pytest.raises(InferenceServerException, match="digest differs"):
        client.raw.load_model("net")
    assert [index(server)[f"net/{number}"][0] for number in (1, 2)] == ["UNAVAILABLE"] * 2
    (repository / "net" / "config.pbtxt").write_text("odd: 1")
    with pytest.raises(InferenceServerException, match="not supported"):
        client.raw.load_model("net")
    (repository / "net" / "config.pbtxt").unlink()
    shutil.rmtree(repository / "net" / "2")
    for file in ("model.onnx", "model.onnx.json"):
        shutil.copy2(repository / file, version / file)
    client.raw.load_model("net")
    assert index(server) == {"net/1": ("READY", "")}
    status, _, _ = fetch(server, "/v2/models/net/versions/2/stats")
    assert status == 404
    (repository / "net" / "config.pbtxt").write_text("odd: 1")
    with pytest.raises(InferenceServerException, match="not supported"):
        client.raw.load_model("net")
    assert "not supported" in index(server)["net/1"][1] and client.raw.is_model_ready("net")
    client.raw.unload_model("net")
    client.raw.unload_model("net")
    assert index(server) == {"net/1": ("UNAVAILABLE", "unloaded")}
    client.raw.close()


def test_files_that_have_gone_or_lead_nowhere_are_a_reason_not_a_failure(
    engines: dict[str, Path], serve: Callable[..., Server], repository: Path
) -> None:
    place(engines["double"], repository, "gone")
    (place(engines["double"], repository, "link").parent / "config.pbtxt").symlink_to("nowhere")
    server = serve(
        model_repository=repository,
        model_control_mode="explicit",
        control_without_token=True,
        load_model=["gone", "link"],
        grpc_port=-1,
    )
    assert "no such file" in index(server)["link/"][1]
    shutil.rmtree(repository / "gone")
    status, _, body = fetch(server, "/v2/repository/models/gone/load", b'{"parameters": 3}')
    assert status == 400 and "not a JSON object" in body["error"]
    status, _, body = fetch(server, "/v2/repository/models/gone/load", b"{}")
    assert status == 422 and "no such file" in body["error"]
    assert index(server)["gone/1"][0] == "READY"


def test_polling_takes_new_changed_and_removed_models(
    engines: dict[str, Path], serve: Callable[..., Server], repository: Path
) -> None:
    place(engines["double"], repository, "first")
    server = serve(model_repository=repository, model_control_mode="poll", poll_interval_s=0.05, grpc_port=-1)
    client = Client("http", server)
    assert client.raw.is_server_ready()
    place(engines["triple"], repository, "second")
    until(lambda: index(server).get("second/1") == ("READY", ""), "the new model is ready")
    np.testing.assert_array_equal(client.infer("second", {"x": ones()}).as_numpy("y"), ones() * 3)
    place(engines["triple"], repository, "first", 2)
    until(lambda: "first/2" in index(server) and "first/1" not in index(server), "version 2 replaced version 1")
    (repository / "first" / "config.pbtxt").symlink_to("nowhere")
    until(lambda: "no such file" in index(server)["first/2"][1], "the reason is in the index")
    (repository / "first" / "config.pbtxt").unlink()
    until(lambda: index(server)["first/2"] == ("READY", ""), "the reason is gone")
    shutil.rmtree(repository / "second")
    until(lambda: "second/1" not in index(server), "the removed model is gone")
    with pytest.raises(InferenceServerException, match="unknown model"):
        client.infer("second", {"x": ones()})
    client.raw.close()


@pytest.mark.parametrize(
    "name", ["..", "../secret", "%2e%2e", "..%2Fsecret", "/etc", ".hidden", "a/b", "a\0b", "x" * 300]
)
def test_names_cannot_leave_the_repository(
    engines: dict[str, Path], serve: Callable[..., Server], tmp_path: Path, name: str
) -> None:
    global _escape_server
    if _escape_server is None:
        root = tmp_path / "models"
        place(engines["double"], tmp_path, "secret")
        place(engines["double"], tmp_path, "models/.hidden")
        root.mkdir(exist_ok=True)
        _escape_server = serve(model_repository=root, model_control_mode="explicit", control_without_token=True)
    from tritonclient.grpc import service_pb2

    client = Client("grpc", _escape_server)
    with pytest.raises(Exception, match=r"unknown model|INVALID"):
        client.raw._client_stub.RepositoryModelLoad(service_pb2.RepositoryModelLoadRequest(model_name=name))
    client.raw.close()
    path = f"/v2/repository/models/{name.replace(chr(0), '%00')}/load"
    status, _, _ = fetch(_escape_server, path, b"{}")
    assert status == 404


_escape_server: Server | None = None


def test_models_are_not_loaded_by_clients_unless_control_is_explicit(
    engines: dict[str, Path], serve: Callable[..., Server]
) -> None:
    server = serve(engines["double"])
    for protocol in ("http", "grpc"):
        client = Client(protocol, server)
        with pytest.raises(InferenceServerException, match="--model-control-mode explicit"):
            client.raw.unload_model("double")
        extensions = client.as_dict(client.raw.get_server_metadata())["extensions"]
        assert "model_repository(unload_dependents)" not in extensions
        client.raw.close()


def test_an_address_that_is_taken_is_an_error_with_the_flag(
    engines: dict[str, Path], serve: Callable[..., Server]
) -> None:
    from trt_engine.errors import SetupError

    server = serve(engines["double"])
    for name, address in (("http_port", server.http_address), ("grpc_port", server.grpc_address)):
        assert address is not None
        with pytest.raises(SetupError, match=f"cannot listen at {address}: address already in use") as caught:
            serve(engines["double"], **{name: int(address.rpartition(":")[2])})
        assert f"--{name.replace('_', '-')} 0" in str(caught.value)
    with pytest.raises(SetupError, match="not an address of this machine"):
        serve(engines["double"], host="300.1.1.1")
    with pytest.raises(SetupError, match="cannot assign") as caught:
        serve(engines["double"], host="192.0.2.1")
    assert "--host" in str(caught.value.hint)


def test_wrong_settings_are_refused_before_anything_listens(engines: dict[str, Path], tmp_path: Path) -> None:
    for settings, expected in (
        ({}, "nothing to serve"),
        ({"model_repository": tmp_path / "none"}, "is not a folder"),
        ({"engines": [tmp_path / "none.onnx"]}, "no such file"),
        ({"engines": [f"a/b={engines['double']}"]}, "cannot be the name"),
        ({"engines": [engines["double"], engines["double"]]}, "two engines are named"),
        ({"engines": engines["double"], "tls_cert": tmp_path}, "a certificate and its key"),
        ({"engines": engines["double"], "model_control_mode": "poll"}, "needs a repository"),
        ({"engines": engines["double"], "load_model": "x"}, "explicit control"),
        ({"engines": engines["double"], "http_port": 70000}, "0 to 65535"),
        ({"engines": engines["double"], "http_port": -1, "grpc_port": -1}, "neither HTTP nor gRPC has a port"),
        ({"engines": engines["double"], "host": ""}, "`--host` is empty"),
        ({"engines": engines["double"], "token_file": tmp_path / "none"}, "cannot read `.*none`: no such file"),
        ({"engines": engines["double"], "tls_cert": tmp_path / "c", "tls_key": tmp_path / "k"}, "cannot read `.*c`"),
    ):
        with pytest.raises(UsageError, match=expected):
            te.serve(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("joined", [True, False], ids=["joined", "alone"])
def test_a_higher_level_goes_first_however_long_a_lower_one_has_waited(
    engines: dict[str, Path], repository: Path, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    """In a queue whose requests are joined, and in one where each runs alone; the time of the queue is the test's."""
    now_s, free, runs = [0.0], threading.Event(), list[float]()

    class Queue(Batcher):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, clock=lambda: now_s[0], **more)

    def noted(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: TimedRunner, feeds: Any, *more: Any) -> Any:
            runs.append(float((feeds if isinstance(feeds, dict) else feeds[0])["x"][0, 0]))
            free.wait(HANG_S)
            return method(self, feeds, *more)

        return run

    monkeypatch.setattr(served_model, "Batcher", Queue)
    levels = "dynamic_batching { priority_levels: 3 default_priority_level: 3 }"
    place(engines["double"], repository, "m", config=f"max_batch_size: 2 {levels if joined else ''}")
    with start(model_repository=repository, grpc_port=-1, metrics_port=-1, contexts=1) as server:
        for name in ("run", "run_batched"):
            monkeypatch.setattr(TimedRunner, name, noted(getattr(TimedRunner, name)))
        assert server._service is not None
        served = server._service.repository.require("m", "")

        def infer(level: int) -> None:
            client = Client("http", server)
            client.infer("m", {"x": np.full((2, 4), level, np.float32)}, priority=level)
            client.raw.close()

        with ThreadPoolExecutor(5) as pool:
            sent = [pool.submit(infer, 0)]
            until(lambda: bool(runs), "the first request runs")
            for level in (3, 2, 1, 2):
                sent.append(pool.submit(infer, level))
                until(lambda: served.waiting == len(sent) - 1, "the request waits")
                now_s[0] += 36_000
            free.set()
            for one in sent:
                one.result(HANG_S)
    assert runs == [0, 1, 2, 2, 3]
