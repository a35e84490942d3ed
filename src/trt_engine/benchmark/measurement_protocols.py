"""Named measurement protocols, and the effective protocol on a device.

Defaults of trtexec are read from `samples/common/sampleOptions.h` of the public TensorRT repository, 10.0 to 11.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from trt_engine.config.bench import BenchConfig
from trt_engine.device import parse_device
from trt_engine.errors import UsageError
from trt_engine.records.bench import Protocol
from trt_engine.tensors import suggest


@dataclass(frozen=True, slots=True)
class ProtocolRules:
    """Settings of a named protocol."""

    summary: str
    transfers: bool
    graph: bool
    spin: bool
    warmup_s: float
    duration_s: float
    min_iterations: int = 10


PROTOCOL_RULES: dict[str, ProtocolRules] = {
    "trt-engine": ProtocolRules(
        "compute only, graph where the device has them, blocking wait",
        transfers=False, graph=True, spin=False, warmup_s=1.0, duration_s=10.0,
    ),
    "trtexec10": ProtocolRules(
        "the defaults of trtexec 10.x: copies inside, no graph, blocking wait",
        transfers=True, graph=False, spin=False, warmup_s=0.2, duration_s=3.0,
    ),
    "trtexec11": ProtocolRules(
        "the defaults of trtexec 11.x: compute only, graph, spinning wait",
        transfers=False, graph=True, spin=True, warmup_s=0.2, duration_s=3.0,
    ),
}  # fmt: skip


def resolve_protocol(
    config: BenchConfig, device: str, *, events: bool | None = None, resident: bool = False
) -> Protocol:
    """The effective protocol on a device: the named rules, overridden by the config, without unsupported settings.

    `events`: whether device events can time the session (default: except on CPU). A session called with host arrays on a
    GPU has none, and its times include copies: `transfers` is always True. With `resident` feeds it is timed by the host
    clock around a synchronized run without copies; `transfers` then means host arrays in and out, without graph.
    """
    if config.protocol not in PROTOCOL_RULES:
        raise UsageError(f"unknown protocol `{config.protocol}`", hint=suggest(config.protocol, list(PROTOCOL_RULES)))
    rules = PROTOCOL_RULES[config.protocol]
    on_cpu = parse_device(device)[0] == "cpu"
    by_events = not on_cpu if events is None else events and not on_cpu
    transfers = _or_default(config.transfers, rules.transfers)
    graph = _or_default(config.graph, rules.graph)
    lacking: list[str] = []
    if on_cpu:
        lacking += ["transfers", "graph", "spin"]
    elif not by_events and resident:
        lacking += ["spin"]
        if transfers:
            lacking += ["graph"] if graph else []
            lacking += ["overlapped copies"]
    elif not by_events:
        lacking += ["compute only", "graph", "spin"]
    else:
        lacking += ["spin"]  # `Event` waits by blocking
        if transfers:
            lacking += ["overlapped copies"]  # trtexec copies on separate streams; here one stream orders everything
    if not by_events and config.streams > 1:
        lacking += ["streams"]
    return Protocol(
        name=config.protocol,
        loop="closed",
        clock="device events" if by_events else "host",
        transfers=not on_cpu and (transfers or not (by_events or resident)),
        graph=graph and (by_events or (resident and not on_cpu and not transfers)),
        spin=_or_default(config.spin, rules.spin) and "spin" not in lacking,
        streams=config.streams if by_events else 1,
        warmup_s=rules.warmup_s if config.warmup_s is None else config.warmup_s,
        duration_s=rules.duration_s if config.duration_s is None else config.duration_s,
        min_iterations=rules.min_iterations if config.iterations is None else config.iterations,
        idle_s=config.idle_s,
        percentile_rule="trtexec",
        not_applicable=tuple(lacking),
        min_warmup=config.warmup_iterations,
    )


def _or_default(requested: bool | None, rule: bool) -> bool:
    return rule if requested is None else requested
