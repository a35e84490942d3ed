"""The exposition: names that dashboards use, histograms in seconds, and the queries of the dashboard that is shipped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from serving.conftest import place
from serving.triton import Client, fetch, ones
from trt_engine.verbs.serve.server import Server
from trt_engine.verbs.serve.statistics import LATENCY_BOUNDS_S

DASHBOARD = Path(__file__).parents[2] / "docs" / "serve-dashboard.json"
TRITONS = {
    "nv_inference_request_success", "nv_inference_request_failure", "nv_inference_count", "nv_inference_exec_count",
    "nv_inference_pending_request_count", "nv_inference_request_duration_us", "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us", "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us", "nv_model_load_duration_secs",
}  # fmt: skip
_WORDS = {"rate", "sum", "by", "histogram_quantile", "le", "model", "version", "reason", "label_values"}


@pytest.fixture(scope="module")
def samples(engines: dict[str, Path], serve: Callable[..., Server]) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name after five answers of 12 rows and one refusal."""
    server = serve(engines["double"])
    client = Client("http", server)
    for rows in (1, 2, 2, 3, 4):
        client.infer("double", {"x": ones(rows)})
    with pytest.raises(InferenceServerException):
        client.infer("double", {"z": ones()})
    client.raw.close()
    text = fetch(server, f"http://{server.metrics_address}/metrics")[2]
    assert text == fetch(server, "/metrics")[2]
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for row in text.splitlines():
        if not row.startswith("#"):  # read here: the library's parser adds `_total` to counters
            name, labels, number = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", row).groups()  # type: ignore[union-attr]
            found.setdefault(name, []).append((dict(re.findall(r'(\w+)="([^"]*)"', labels or "")), float(number)))
    types = dict(re.findall(r"# TYPE (\w+) (\w+)", text))
    assert types["nv_inference_count"] == "counter" and types["trt_engine_queue_seconds"] == "histogram"
    return found


def value(samples: dict[str, list[tuple[dict[str, str], float]]], name: str, **labels: str) -> float:
    (one,) = [number for found, number in samples[name] if labels.items() <= found.items()]
    return one


def test_names_that_dashboards_know_with_their_labels(samples: dict[str, list[tuple[dict[str, str], float]]]) -> None:
    assert samples.keys() >= TRITONS
    for name in TRITONS:
        assert all(labels["model"] == "double" and labels["version"] == "1" for labels, _ in samples[name])
    assert value(samples, "nv_inference_request_success") == 5 and value(samples, "nv_inference_count") == 12
    assert value(samples, "nv_inference_request_failure", reason="OTHER") == 1
    assert value(samples, "nv_inference_exec_count") == 5 and value(samples, "nv_inference_pending_request_count") == 0
    assert (
        value(samples, "nv_inference_request_duration_us")
        > value(samples, "nv_inference_compute_infer_duration_us")
        > 0
    )


def test_histograms_in_seconds_and_rows(samples: dict[str, list[tuple[dict[str, str], float]]]) -> None:
    for name in ("queue", "batch_wait", "execute", "request"):
        assert value(samples, f"trt_engine_{name}_seconds_count") == 5
        buckets = [number for _, number in samples[f"trt_engine_{name}_seconds_bucket"]]
        assert buckets == sorted(buckets) and buckets[-1] == 5 and len(buckets) == len(LATENCY_BOUNDS_S) + 1
    parts = [value(samples, f"trt_engine_{name}_seconds_sum") for name in ("queue", "execute", "request")]
    assert 0 < parts[0] + parts[1] <= parts[2]
    assert value(samples, "trt_engine_batch_rows_count") == 5 and value(samples, "trt_engine_batch_rows_sum") == 12
    assert value(samples, "trt_engine_deadline_misses_total") == value(samples, "trt_engine_padding_rows_total") == 0
    assert value(samples, "trt_engine_server_ready") == value(samples, "trt_engine_model_ready", model="double") == 1


def test_every_query_of_the_dashboard_finds_its_metrics_and_labels(
    samples: dict[str, list[tuple[dict[str, str], float]]],
) -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 15
    for target in queries:
        names = set(re.findall(r"\b[a-z][a-z_]+\b(?!\s*\()", re.sub(r"\{[^}]*\}|\[[^]]*\]", "", target["expr"])))
        metrics = {name for name in names - _WORDS if name in samples}
        assert metrics and names - _WORDS == metrics, target["expr"]
        grouped = {word for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for word in re.split(r",\s*", group)}
        selected = set(re.findall(r"\{(\w+)=", target["expr"]))
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        for name in metrics:
            labels = samples[name][0][0].keys()
            assert grouped | selected <= labels, (target["expr"], name)
            assert shown <= (grouped or labels), (target["legendFormat"], name)
    assert any("label_values(trt_engine_model_ready, model)" in str(item) for item in dashboard["templating"]["list"])


def test_scraping_while_models_change_fails_nothing(engines: dict[str, Path], serve: Callable[..., Server]) -> None:
    server = serve(f"a={engines['double']}", f"b={engines['slow']}")
    client = Client("grpc", server)
    assert client.infer("b", {"count": np.array([1])}, "INT64").as_numpy("y") == 1
    client.raw.close()
    text = fetch(server, "/metrics")[2]
    assert (
        'nv_inference_count{model="b",version="1"} 1.0' in text
        and 'nv_inference_count{model="a",version="1"} 0.0' in text
    )


def test_a_version_that_is_loaded_again_goes_on_counting(
    engines: dict[str, Path], repository: Path, serve: Callable[..., Server]
) -> None:
    place(engines["double"], repository, "net", config="max_batch_size: 8")
    control = {"model_control_mode": "explicit", "load_model": ["net"], "control_without_token": True}
    server = serve(model_repository=repository, grpc_port=-1, **control)
    item = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1] * 4}
    for answered, step in enumerate(("", "max_batch_size: 4", "unload"), 1):
        if step == "unload":
            assert fetch(server, "/v2/repository/models/net/unload", b"{}")[0] == 200
        elif step:
            (repository / "net/config.pbtxt").write_text(step)
        assert fetch(server, "/v2/repository/models/net/load", b"{}")[0] == 200
        assert fetch(server, "/v2/models/net/infer", json.dumps({"inputs": [item]}).encode())[0] == 200
        (stats,) = fetch(server, "/v2/models/net/stats")[2]["model_stats"]
        assert stats["inference_stats"]["success"]["count"] == stats["execution_count"] == answered
        assert f'nv_inference_request_success{{model="net",version="1"}} {answered}.0' in fetch(server, "/metrics")[2]
