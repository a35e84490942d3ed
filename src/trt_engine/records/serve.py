"""What `serve` reports when it has started."""

from __future__ import annotations

from dataclasses import dataclass

from trt_engine.display import RichDisplay


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model at the start of a server."""

    name: str
    version: str
    state: str
    """`READY`, or why not in `reason`."""
    reason: str
    properties: dict[str, str]
    """What really runs: backend, providers, device, precision, digest of the engine."""


@dataclass(frozen=True, slots=True)
class ServeReport(RichDisplay):
    """Addresses and models of a server that has started."""

    http: str | None
    """URL of the HTTP interface; None without."""
    grpc: str | None
    """`host:port` of gRPC; None without."""
    metrics: str | None
    """URL of the Prometheus metrics; None without."""
    models: tuple[ServedModel, ...]
