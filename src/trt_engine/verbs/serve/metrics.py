"""Prometheus metrics: the `nv_*` names that dashboards know, and our own histograms in seconds.

Samples are read from the statistics at each scrape; a request pays for integers alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from trt_engine.verbs.serve.inference import Service
from trt_engine.verbs.serve.served_model import ServedVersion
from trt_engine.verbs.serve.statistics import Histogram

_LABELS = ("model", "version")
_COUNTERS: dict[str, tuple[str, Callable[[ServedVersion], float]]] = {
    "nv_inference_request_success": ("Answered requests", lambda one: one.statistics.total.count),
    "nv_inference_count": ("Rows of answered requests", lambda one: one.statistics.inferences),
    "nv_inference_exec_count": (
        "Runs of the engine", lambda one: sum(count for count, _ in one.statistics.runs().values())
    ),
    "nv_inference_request_duration_us": (
        "Time of answered requests, us", lambda one: one.statistics.total.sum // 1000
    ),
    "nv_inference_queue_duration_us": ("Time requests waited, us", lambda one: one.statistics.queue.sum // 1000),
    "nv_inference_compute_input_duration_us": (
        "Time of decoding inputs, us", lambda one: one.statistics.compute_input_ns // 1000
    ),
    "nv_inference_compute_infer_duration_us": (
        "Time of the runs of requests, us", lambda one: one.statistics.execute.sum // 1000
    ),
    "nv_inference_compute_output_duration_us": (
        "Time of encoding outputs, us", lambda one: one.statistics.compute_output_ns // 1000
    ),
    "trt_engine_deadline_misses": (
        "Requests whose timeout passed before they ran", lambda one: one.statistics.deadline_misses
    ),
    "trt_engine_padding_rows": (
        "Rows that were run as padding", lambda one: one.statistics.padding_rows
    ),
}  # fmt: skip
_HISTOGRAMS: dict[str, tuple[str, Callable[[ServedVersion], Histogram]]] = {
    "trt_engine_queue_seconds": ("Time from decoded inputs to the start of the run", lambda one: one.statistics.queue),
    "trt_engine_batch_wait_seconds": (
        "Part of the queue time in which a context was free", lambda one: one.statistics.batch_wait
    ),
    "trt_engine_execute_seconds": ("Time of the run that answered a request", lambda one: one.statistics.execute),
    "trt_engine_request_seconds": ("Time from the whole request to its answer", lambda one: one.statistics.total),
}  # fmt: skip


_COUNTER_SUFFIX = re.compile(rb"^(# (?:HELP|TYPE) )?(nv_\w+?)_total(?=[ {])", re.MULTILINE)
"""Triton's counters have no `_total`, which the library adds."""


class _ServiceCollector(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> Iterable[Metric]:
        return ()  # names are fixed; nothing is registered twice

    def collect(self) -> Iterator[Metric]:
        served = [one for model in self._service.repository.models.values() for one in model.versions.values()]
        for name, (text, value) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            for one in served:
                counter.add_metric([one.name, one.version], value(one))
            yield counter
        yield from self._histograms(served)
        yield from self._states(served)
        yield from self._server()

    def _histograms(self, served: list[ServedVersion]) -> Iterator[Metric]:
        for name, (text, read) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(name, text, labels=_LABELS)
            for one in served:
                histogram = read(one)
                family.add_metric([one.name, one.version], histogram.buckets(), histogram.total)
            yield family
        rows = HistogramMetricFamily("trt_engine_batch_rows", "Rows of a run, with padding", labels=_LABELS)
        for one in served:
            rows.add_metric([one.name, one.version], *one.statistics.batch_rows())
        yield rows

    def _states(self, served: list[ServedVersion]) -> Iterator[Metric]:
        failures = CounterMetricFamily(
            "nv_inference_request_failure", "Requests that were not answered", labels=(*_LABELS, "reason")
        )
        pending = GaugeMetricFamily(
            "nv_inference_pending_request_count", "Requests that wait for a run", labels=_LABELS
        )
        loading = GaugeMetricFamily("nv_model_load_duration_secs", "Time that loading took", labels=_LABELS)
        info = GaugeMetricFamily(
            "trt_engine_backend_info", "What really runs; always 1",
            labels=(*_LABELS, "backend", "provider", "device", "precision", "engine_sha", "fallback"),
        )  # fmt: skip
        for one in served:
            for reason, count in one.statistics.failures.items():
                failures.add_metric([one.name, one.version, reason], count)
            pending.add_metric([one.name, one.version], one.waiting)
            loading.add_metric([one.name, one.version], one.loaded_s)
            truth = one.truth
            labels = [truth.backend, truth.providers, truth.device, truth.precision, truth.engine, truth.fallback]
            info.add_metric([one.name, one.version, *labels], 1)
        yield from (failures, pending, loading, info)

    def _server(self) -> Iterator[Metric]:
        service = self._service
        ready = GaugeMetricFamily("trt_engine_model_ready", "Whether the model is ready", labels=("model",))
        for model in service.repository.models.values():
            ready.add_metric([model.name], 0 if [*model.reasons()] else 1)
        yield ready
        yield GaugeMetricFamily(
            "trt_engine_server_ready", "Whether the server is ready", 0 if service.not_ready() else 1
        )
        yield GaugeMetricFamily("trt_engine_requests_in_flight", "Requests now", service.admission.requests)
        yield GaugeMetricFamily("trt_engine_request_bytes_in_flight", "Their bytes", service.admission.nbytes)
        yield CounterMetricFamily(
            "trt_engine_refused_requests", "Requests refused because the server was full", service.admission.refused
        )


def make_exposition(service: Service) -> Callable[[], tuple[bytes, bytes]]:
    """A function that returns the content type and the metrics now; for the event loop."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ServiceCollector(service))
    return lambda: (CONTENT_TYPE_LATEST.encode(), _COUNTER_SUFFIX.sub(rb"\1\2", generate_latest(registry)))
