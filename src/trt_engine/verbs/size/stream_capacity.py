"""The answer of `size --deadline-ms`: streams, interval, limit, policy and settings, from a latency curve."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from trt_engine.config.settings import settings
from trt_engine.config.streams import BatchPolicy, SourceGroup
from trt_engine.errors import UsageError
from trt_engine.format import format_percent
from trt_engine.records.streams import (
    CurvePoint,
    DecodeLimit,
    GpuCount,
    Limit,
    PolicyCapacity,
    SharePoint,
    StreamCapacity,
    Verification,
)
from trt_engine.verbs.size.arrivals import Sources, read_trace
from trt_engine.verbs.size.capacity import (
    CONFIDENCE,
    StreamModel,
    best_policy,
    bootstrap_interval,
    candidate_policies,
    gpus_for,
    resample,
)
from trt_engine.verbs.size.config import SizeConfig
from trt_engine.verbs.size.curve import (
    captured_sizes,
    queue_limit,
    read_curve,
    service_times,
    summarize_curve,
    turn_times,
)
from trt_engine.verbs.size.simulation import ChainedTimes, ServiceTimes, simulate
from trt_engine.verbs.size.stream_worker import DriveMessage, DriveRequest

_POINT_SHARES = (0.5, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1)
"""Numbers of sources of the chart, as shares of the policy's largest number."""
_COMPUTE_BOUND = 0.9
"""Share of the policy's largest throughput above which compute is the limit."""
_UPLOAD_BOUND = 1.1
"""Gain without upload from which on upload is the limit."""
_VERIFY_SEED = 41


_NEED_DEADLINE = (
    "sources", "spare_gpus", "policy", "frames", "interval", "jitter_ms", "arrivals", "codec", "crops", "then",
    "curve", "verify_s",
)  # fmt: skip


_NOT_WITH_VIDEO = (
    "fps", "sources", "spare_gpus", "frames", "interval", "jitter_ms", "arrivals", "codec", "verify_s",
)  # fmt: skip
"""What clips state themselves, or what is not part of their path."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The report, and what `verify` needs to repeat its prediction."""

    capacity: StreamCapacity
    model: StreamModel
    graphs: tuple[int, ...]
    """Batch sizes of the policy that are captured as CUDA graphs; empty without."""


def check_settings(config: SizeConfig) -> None:
    """Raises `UsageError` for settings without effect, and for unreadable files, before anything is built."""
    for name in _NOT_WITH_VIDEO if config.video else ():
        item = next(item for item in settings(config) if item.name == name)
        if getattr(config, name) != item.default:
            raise UsageError(f"`{item.flags[0]}` and `--video` are given", hint="leave one of them out")
    if config.deadline_ms is None and not config.video:  # clips have one of their own
        for item in settings(config):
            if item.name in _NEED_DEADLINE and getattr(config, item.name) != item.default:
                raise UsageError(f"`{item.flags[0]}` needs a deadline", hint="add `--deadline-ms 50`")
        return
    if config.spare_gpus and not config.sources:
        raise UsageError("`--spare-gpus` needs the sources", hint="as `--sources 500@30`")
    if config.verify_s is not None and config.frames == "device":
        raise UsageError("`--verify` submits frames from host memory", hint="leave `--frames device` out")
    if config.policy is not None and config.policy.contexts > max(config.contexts):
        raise UsageError(
            f"the policy has {config.policy.contexts} contexts, measured are {max(config.contexts)}",
            hint=f"`--contexts 1,{config.policy.contexts}`",
        )
    if config.policy is not None and config.policy.max_batch > config.max_batch:
        raise UsageError(
            f"the policy has batches of {config.policy.max_batch}, `--max-batch` is {config.max_batch}",
            hint=f"`--max-batch {config.policy.max_batch}`",
        )
    if bool(config.crops) != (config.then is not None):
        raise UsageError("`--then` and `--crops` need each other", hint="`--then classifier.onnx --crops 4`")
    if config.crops and config.verify_s is not None:
        raise UsageError("`--verify` drives one model", hint="leave `--crops` out to verify the first one")
    sources_of(config)
    for path in (config.curve, _second_curve(config)):
        if path is not None:
            read_curve(path)


def sources_of(config: SizeConfig) -> Sources:
    """The requested sources; without `sources` one at `fps`."""
    return Sources(
        config.sources or (SourceGroup(1, config.fps),),
        jitter_ms=config.jitter_ms,
        interval=config.interval,
        gaps=read_trace(config.arrivals) if config.arrivals is not None else (),
    )


def find_capacity(
    points: Sequence[CurvePoint], config: SizeConfig, images_per_s: float, gpu: str | None = None
) -> Answer:
    """Search the policy and the largest number of sources over a measured curve.

    `points` may hold both kinds of frames; `frames` of the config decides which are used. `images_per_s` is the measured
    throughput of the largest batch, for the upper bound. `streams` is 0 if no policy serves one source.
    """
    assert config.deadline_ms is not None
    chosen = [point for point in points if point.frames == config.frames] or list(points)
    crops, mix = _crop_points(config, chosen), sources_of(config)
    service = _with_crops(service_times(chosen), crops, config.crops)
    model = StreamModel(service, mix, config.deadline_ms / 1e3, config.allowed_late)
    if config.policy is not None and not service.covers(config.policy):
        raise UsageError(
            f"the policy is {config.policy}, the curve ends at batch {service.batches[-1]}, contexts {service.contexts[-1]}",
            hint="a smaller policy",
        )
    policies = [config.policy] if config.policy else [*candidate_policies(service, model.deadline_s)]
    policy, streams = best_policy(model, policies)
    low, high = bootstrap_interval(
        lambda rng: _with_crops(_draw_again(chosen, rng), crops, config.crops, rng), model, policy, streams
    )
    graphs = tuple(size for size in captured_sizes(points) if size <= policy.max_batch)
    decode = decode_limit(gpu, config.codec, mix.groups) if config.codec else None
    limit, reason = _limit([] if crops else points, model, policy, streams, decode)
    most = streams if decode is None else decode.streams
    served, summary = min(streams, most), summarize_curve(points)
    answered = mix.scaled(served)
    rates = [point.rows_per_s for point in summary]
    if crops:
        sizes = [BatchPolicy(batch, 0.0, busy) for batch in service.batches for busy in service.contexts]
        images_per_s, rates = 0.0, [service.rows_per_s(size) for size in sizes]
    capacity = StreamCapacity(
        deadline_ms=config.deadline_ms,
        late=config.allowed_late,
        frames=chosen[0].frames,
        mix=tuple(group for group in answered.groups if group.count),
        interval=config.interval,
        streams=served,
        low=min(low, served),
        high=high if decode is None else min(high, most),
        confidence=CONFIDENCE,
        policy=policy,
        late_share=model.late_share(served, policy),
        late_share_p90=model.worst_phases(served, policy),
        limit=limit,
        limit_reason=reason,
        upper_bound=math.floor(max(images_per_s, *rates) * mix.count / mix.frames_per_s),
        policies=tuple(_compare_policies(model, policy, streams)),
        curve=summary,
        deepstream=deepstream_settings(policy, config.interval),
        batching=batching_settings(policy, service, model.deadline_s, graphs),
        gpus=_count_gpus(model, policy, config.spare_gpus, decode) if config.sources else None,
        decode=decode,
        crops=config.crops,
        crop_curve=summarize_curve(crops),
    )
    return Answer(capacity, model, graphs)


def one_context(curve: Path, sized: StreamCapacity) -> tuple[BatchPolicy, int]:
    """The best policy with one context over a run's curve, and the streams it serves within the run's deadline."""
    points = [point for point in read_curve(curve) if point.frames == sized.frames]
    mix = Sources(tuple(replace(group, count=max(group.count, 1)) for group in sized.mix), interval=sized.interval)
    model = StreamModel(service_times(points), mix, sized.deadline_ms / 1e3, sized.late)
    single = [item for item in candidate_policies(model.service, model.deadline_s) if item.contexts == 1]
    return best_policy(model, single)


def _crop_points(config: SizeConfig, points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """The second model's curve: of frames on the device, where crops are cut, if measured; empty without crops."""
    path = _second_curve(config)
    if path is None:
        return []
    known, device = read_curve(path), points[0].device
    if any(point.device != device for point in known) or not known:
        raise UsageError(f"`{path}` is not measured on `{device}`", hint="size the second model on the same device")
    environments = {(point.environment.cpu, point.environment.gpu) for point in (*known, *points)}
    if len(environments) > 1:
        raise UsageError(f"`{path}` is of another machine", hint="size the second model on this machine")
    if len({point.engine_digest for point in known}) > 1:
        raise UsageError(f"`{path}` has several engines", hint="a new folder for each model: `-o DIR`")
    return [point for point in known if point.frames == "device"] or known


def _second_curve(config: SizeConfig) -> Path | None:
    """The curve of the second model; None without one, and before it is measured."""
    return config.then / "curve.jsonl" if config.then is not None and config.then.is_dir() else None


def _with_crops(
    first: ServiceTimes, crops: Sequence[CurvePoint], count: int, rng: np.random.Generator | None = None
) -> ServiceTimes:
    """The first model's times, followed by the second's on its crops; with `rng` the second's turns are drawn again."""
    if not crops:
        return first
    return ChainedTimes(first, service_times(crops) if rng is None else _draw_again(crops, rng), count)


def _draw_again(points: Sequence[CurvePoint], rng: np.random.Generator) -> ServiceTimes:
    return resample(turn_times(points), rng, padded=bool(captured_sizes(points)))


def _count_gpus(model: StreamModel, policy: BatchPolicy, spare: int, decode: DecodeLimit | None) -> GpuCount | None:
    """GPUs for the sources of the model, also for their decoding."""
    found = gpus_for(model, model.mix, policy, spare)
    if found is None or decode is None:
        return found
    needed = max(found.needed, math.ceil(model.mix.count / max(1, decode.streams)))
    return replace(
        found, needed=needed, total=needed + spare, late_share=model.late_share_of(model.mix.share_of(needed), policy)
    )


def _compare_policies(model: StreamModel, policy: BatchPolicy, streams: int) -> list[PolicyCapacity]:
    """The chosen policy, then what a person would try first."""
    batches, found = model.service.batches, [("chosen", policy, streams)]
    first = {
        "one batch for all sources, no wait": BatchPolicy(min(batches[-1], max(streams, batches[0])), 0.0),
        "batch 1": BatchPolicy(1, 0.0),
        "batch 8, wait 5 ms": BatchPolicy(8, 5.0),
    }
    for label, other in first.items():
        if batches[0] <= other.max_batch <= batches[-1]:
            found.append((label, other, model.largest(other)))
    return [PolicyCapacity(label, one, many, _share_points(model, one, many)) for label, one, many in found]


def _share_points(model: StreamModel, policy: BatchPolicy, streams: int) -> tuple[SharePoint, ...]:
    counts = sorted({max(1, round(share * max(1, streams))) for share in _POINT_SHARES})
    return tuple(SharePoint(count, model.late_share(count, policy)) for count in counts)


def _limit(
    points: Sequence[CurvePoint], model: StreamModel, policy: BatchPolicy, streams: int, decode: DecodeLimit | None
) -> tuple[Limit, str]:
    """The resource that more of would serve more sources, and why."""
    if decode is not None and decode.streams < streams:
        what = f"{decode.decoders} decoders of the {decode.architecture} generation"
        return (
            "decode",
            f"{what} decode {decode.frames_per_s:,.0f} frames/s of {decode.codec}: {decode.streams} streams",
        )
    resident = [point for point in points if point.frames == "device"]
    if resident and len(resident) < len(points):
        without = StreamModel(service_times(resident), model.mix, model.deadline_s, model.late)
        if without.service.covers(policy) and (more := without.largest(policy)) >= _UPLOAD_BOUND * streams:
            return "upload", f"with frames already on the device the same policy serves {more} streams"
    if not streams:
        first = model.service.batches[0]
        return "deadline", (
            f"batch {first} takes {1e3 * model.service.mean_s(first):.3g} ms on average; of one stream "
            f"{format_percent(model.late_share(1, policy))} of the frames would be late"
        )
    busy = model.mix.scaled(streams).frames_per_s / model.service.rows_per_s(policy)
    percent = f"{100 * busy:.0f} % of the policy's largest throughput"
    if busy >= _COMPUTE_BOUND:
        return "compute", f"the frames use {percent}"
    return "deadline", f"the frames use {percent}; one more stream would be late, not unserved"


def deepstream_settings(policy: BatchPolicy, interval: int) -> dict[str, str]:
    """Keys of nvstreammux (`batch-size`, `batched-push-timeout` in us) and nvinfer (`batch-size`, `interval`)."""
    return {
        "batch-size": str(policy.max_batch),
        "batched-push-timeout": str(round(policy.max_wait_ms * 1e3)),
        "interval": str(interval),
    }


def batching_settings(
    policy: BatchPolicy, service: ServiceTimes, deadline_s: float, graphs: tuple[int, ...] = ()
) -> str:
    """The policy as keyword arguments of `te.load`, with the batch sizes that were captured as CUDA graphs."""
    rows = queue_limit(policy, service, deadline_s)
    batching = f"te.Batching(max_batch={policy.max_batch}, max_wait_ms={policy.max_wait_ms:g}, max_rows_waiting={rows})"
    captured = f"graphs={graphs}, " if graphs else ""
    return f"te.load(engine, contexts={policy.contexts}, {captured}batching={batching})"


def drive_request(answer: Answer, duration_s: float) -> DriveRequest:
    """Arrivals of the answer's number of sources for `duration_s`, under its policy."""
    capacity, model = answer.capacity, answer.model
    rng = np.random.default_rng(_VERIFY_SEED)
    times = model.mix.scaled(capacity.streams).arrivals(duration_s, rng)
    return DriveRequest(
        capacity.policy, tuple(times.tolist()), queue_limit(capacity.policy, model.service, model.deadline_s)
    )


def verify(answer: Answer, request: DriveRequest, driven: DriveMessage, duration_s: float) -> StreamCapacity:
    """The answer with what was observed beside the prediction for the same arrivals."""
    capacity, deadline_s, latencies_s = answer.capacity, answer.model.deadline_s, driven.latencies_s
    rng = np.random.default_rng(_VERIFY_SEED + 1)
    predicted = simulate(np.array(request.times_s), capacity.policy, answer.model.service, rng)
    served = np.array([latency for latency in latencies_s if latency is not None])
    dropped = sum(latency is None for latency in latencies_s)
    late = int(np.count_nonzero(served > deadline_s))
    share = (late + dropped) / max(1, len(latencies_s))
    p50, p99 = (float(1e3 * np.quantile(served, q)) if served.size else None for q in (0.5, 0.99))
    expected = [float(1e3 * np.quantile(predicted.latencies_s, q)) for q in (0.5, 0.99)]
    rows, batch_s = zip(*driven.batches, strict=True) if driven.batches else ((), ())
    alone = bool(rows) and capacity.policy.contexts == 1  # else a batch's time depends on those beside it
    return replace(
        capacity,
        verification=Verification(
            streams=capacity.streams,
            duration_s=duration_s,
            policy=capacity.policy,
            frames=len(latencies_s),
            late=late,
            dropped=dropped,
            observed_share=share,
            predicted_share=predicted.late_share(deadline_s),
            observed_p50_ms=p50,
            predicted_p50_ms=expected[0],
            observed_p99_ms=p99,
            predicted_p99_ms=expected[1],
            observed_batch_ms=1e3 * fmean(batch_s) if alone else None,
            predicted_batch_ms=1e3 * fmean(map(answer.model.service.mean_s, rows)) if alone else None,
            passed=share <= capacity.late,
        ),
    )


SOURCE = (
    "NVDEC Application Note, Video Codec SDK 13.0 (docs.nvidia.com/video-technologies/video-codec-sdk/13.0), per NVDEC at "
    "1920x1080; number of NVDECs: Video Decode GPU Requirements (docs.nvidia.com/dynamo)"
)
_FRAMES_PER_S = {
    "Turing": {"h264": 771, "vp9": 932, "hevc": 1316},
    "Ada": {"h264": 903, "vp9": 1290, "hevc": 1641, "av1": 1018},
    "Blackwell": {"h264": 2172, "vp9": 1445, "hevc": 1872, "av1": 1119},
}
_GPUS = {
    "A100": ("Turing", 5),
    "H100": ("Turing", 7),
    "H200": ("Turing", 7),
    "B200": ("Blackwell", 7),
    "GB200": ("Blackwell", 7),
    "L4": ("Ada", 4),
    "L40": ("Ada", 3),
    "L40S": ("Ada", 3),
    "RTX 6000 Ada": ("Ada", 3),
}
"""By name in NVML's: decoder generation and number of NVDECs."""


def decode_limit(gpu: str | None, codec: str, mix: tuple[SourceGroup, ...]) -> DecodeLimit | None:
    """Sources of the mix that the GPU's decoders serve; None for a GPU or codec without published figures.

    Every frame is decoded, those that are not inferred too.
    """
    name = next((name for name in _GPUS if gpu is not None and re.search(rf"\b{name}\b", gpu)), None)
    if name is None:
        return None
    architecture, decoders = _GPUS[name]
    each = _FRAMES_PER_S[architecture].get(codec)
    if each is None:
        return None
    per_source = sum(group.count * group.fps for group in mix) / sum(group.count for group in mix)
    whole = each * decoders
    return DecodeLimit(codec, architecture, decoders, float(whole), math.floor(whole / per_source), SOURCE)
