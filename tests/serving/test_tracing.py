"""Spans of requests, as a collector receives them over OTLP; nothing of it without `--otlp-endpoint`."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from serving.conftest import start
from serving.triton import Client, ones
from trt_engine.verbs.serve.server import Server

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
"""The example of the W3C recommendation on trace context."""


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """The URL of a collector, and the spans that it received."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otel` is not installed")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            raw = gzip.decompress(raw) if self.headers["Content-Encoding"] == "gzip" else raw
            assert self.path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", spans
    server.shutdown()
    thread.join()
    server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


def test_each_request_is_a_span_with_its_parts_below_the_callers(
    engines: dict[str, Path], collector: tuple[str, list[Any]]
) -> None:
    url, spans = collector
    with start(engines["double"], otlp_endpoint=url) as server:
        for protocol in ("http", "grpc"):
            client = Client(protocol, server)
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            np.testing.assert_array_equal(
                client.infer("double", {"x": ones(2)}, headers=headers).as_numpy("y")[1, 3], 14
            )
            client.infer("double", {"x": ones()})
            with pytest.raises(InferenceServerException):
                client.infer("double", {"x": ones(9)})
            client.raw.close()
    assert [span.name for span in spans] == ["infer double"] * 6 and {span.kind for span in spans} == {2}
    for called, own, wrong in (spans[:3], spans[3:]):
        assert (called.trace_id.hex(), called.parent_span_id.hex()) == (TRACE, PARENT)
        assert own.trace_id.hex() != TRACE and not own.parent_span_id
        found = attributes(called)
        assert found["trt_engine.rows"] == 2 and found["trt_engine.backend"] == "onnxruntime"
        parts = [found[f"trt_engine.{name}_seconds"] for name in ("queue", "batch_wait", "execute")]
        whole_s = (called.end_time_unix_nano - called.start_time_unix_nano) * 1e-9
        assert min(parts) >= 0 and parts[2] > 0 and parts[0] + parts[2] <= whole_s
        assert attributes(wrong)["error.type"] == "ProfileError" and wrong.status.code == 0, "the client's fault"


def test_a_collector_that_does_not_answer_costs_no_request(
    engines: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otel` is not installed")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with start(engines["double"], otlp_endpoint="http://127.0.0.1:1") as server:
        client = Client("http", server)
        np.testing.assert_array_equal(client.infer("double", {"x": ones()}).as_numpy("y"), ones() * 2)
        client.raw.close()


@pytest.mark.slow
def test_without_an_endpoint_nothing_of_opentelemetry_is_imported(
    engines: dict[str, Path], serve: Callable[..., Server]
) -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None\nimport trt_engine as te\n"
        f"te.serve({str(engines['double'])!r}, http_port=0, grpc_port=0, metrics_port=-1, drain_delay_s=0).close()\n"
        "from trt_engine.cli.main import run\n"
        f"sys.exit(run(['serve', {str(engines['double'])!r}, '--otlp-endpoint', 'http://localhost:4318']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 3 and "[otel]'" in done.stderr
