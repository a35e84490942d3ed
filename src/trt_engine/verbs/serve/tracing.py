"""A span for each request, sent to an OpenTelemetry collector. Needs the extra `otel`; nothing imports this without it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from trt_engine.environment import distribution_version
from trt_engine.errors import TrtEngineError
from trt_engine.verbs.serve.served_model import ServedVersion
from trt_engine.verbs.serve.statistics import Timing

_CONTEXT_FIELDS = ("traceparent", "tracestate")


class Tracing:
    """Spans of requests, exported over OTLP by a thread of the SDK. `OTEL_*` variables set the sampler and the resource."""

    def __init__(self, endpoint: str) -> None:
        named = {} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: "trt-engine"}
        self._provider = TracerProvider(resource=Resource.create(named))
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("trt-engine", distribution_version("trt-engine"))
        self._propagator = TraceContextTextMapPropagator()

    def record(
        self,
        served: ServedVersion,
        timing: Timing,
        headers: Iterable[tuple[Any, Any]],
        error: BaseException | None = None,
    ) -> None:
        """The span of a request that has ended: its time, and the parts of it in seconds."""
        now_ns = time.perf_counter_ns()
        epoch_ns = time.time_ns() - now_ns
        carrier = {name: value for name, value in map(_as_text, headers) if name in _CONTEXT_FIELDS}
        attributes: dict[str, Any] = {"trt_engine.model": served.name, "trt_engine.version": served.version}
        attributes |= {f"trt_engine.{name}": value for name, value in served.truth.as_dict().items()}
        if timing.ended_ns:
            attributes |= {
                "trt_engine.rows": timing.rows,
                "trt_engine.queue_seconds": (timing.started_ns - timing.submitted_ns) * 1e-9,
                "trt_engine.batch_wait_seconds": timing.batch_wait_ns * 1e-9,
                "trt_engine.execute_seconds": (timing.ended_ns - timing.started_ns) * 1e-9,
            }
        if error is not None:
            attributes["error.type"] = type(error).__name__
        span = self._tracer.start_span(
            f"infer {served.name}", self._propagator.extract(carrier), SpanKind.SERVER, attributes,
            start_time=timing.arrived_ns + epoch_ns,
        )  # fmt: skip
        if error is not None and not (isinstance(error, TrtEngineError) and error.http_status < 500):
            span.set_status(Status(StatusCode.ERROR, str(error)))
        span.end(now_ns + epoch_ns)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _as_text(header: tuple[Any, Any]) -> tuple[str, str]:
    name, value = (part.decode("latin-1") if isinstance(part, bytes) else part for part in header)
    return name, value
