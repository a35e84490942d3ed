"""Cameras on a GPU, decoded, prepared and inferred there: how many, what limits them, and how far frames are from the CPU's.

    python benchmarks/gpu/video.py CLIP... [--models yolo vit] [--seconds 2] [--hold 60]

Each clip is of a codec. For each network and clip `size --video` gives the number of cameras, each part's own limit and the
efficiency: the number over the smallest of these limits. `--hold` plays 0.9 of that number for so long and notes the memory.
PyTorch's profiler counts the bytes that a short run copies between GPU and host, beside the bytes of its frames.
Frames prepared on the GPU are compared with those that PyAV and Pillow prepare. `--device cpu` tries the program out.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
from common import Bench, each_model, parser
from onnx import TensorProto, helper

import trt_engine as te
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.config.streams import BatchPolicy
from trt_engine.runtime.cuda_graph_policy import graph_sizes
from trt_engine.verbs.size.stream_worker import VideoRequest, WorkerRequest, warm_up
from trt_engine.verbs.size.video_run import ClipPlayer, Decoders, OtherProcess, play_clips
from trt_engine.video.decoder import PyAvDecoder, describe_clip, read_frames
from trt_engine.video.device_frames import device_frames
from trt_engine.vision.preprocess import Preprocessor
from trt_engine.vision.spec import Postprocess, Preprocess, Vision, declare, vision_of

_BEST = 300


def main() -> int:
    made = parser(__doc__ or "", "yolo", "vit")
    made.add_argument("clips", nargs="+", type=Path)
    made.add_argument("--hold", type=float, default=0.0, help="seconds at 0.9 of the number found [0]")
    made.add_argument("--backend", default="inductor")
    made.add_argument("--policy", default="16,5ms,2", help="rows, wait and batches at once")
    args = made.parse_args()
    return each_model(args, "gpu-video", measure)


def choose_best(path: Path, out: Path, count: int) -> Path:
    """YOLOv10's end in the graph: the best boxes of `boxes` and `scores` as rows of corners, score, class."""
    model = onnx.load(path)
    graph, kind = model.graph, model.graph.output[0].type.tensor_type.elem_type
    graph.initializer.extend(
        [
            helper.make_tensor("best", TensorProto.INT64, [1], [count]),
            helper.make_tensor("one", TensorProto.INT64, [1], [1]),
            helper.make_tensor("four", TensorProto.INT64, [3], [1, 4, 1]),
            helper.make_tensor("less", kind, [1], [0.4]),  # random weights: few objects above 0.25, as in a picture
        ]
    )
    nodes = [
        ("Mul", ["scores", "less"], ["fewer"], {}),
        ("ReduceMax", ["fewer", "one"], ["highest"], {"keepdims": 0}),
        ("ArgMax", ["fewer"], ["class"], {"axis": 1, "keepdims": 0}),
        ("TopK", ["highest", "best"], ["score", "place"], {"axis": 1}),
        ("GatherElements", ["class", "place"], ["chosen"], {"axis": 1}),
        ("Unsqueeze", ["place", "one"], ["places"], {}),
        ("Tile", ["places", "four"], ["corners_at"], {}),
        ("GatherElements", ["boxes", "corners_at"], ["corners"], {"axis": 2}),
        ("Transpose", ["corners"], ["corner_rows"], {"perm": [0, 2, 1]}),
        ("Cast", ["chosen"], ["chosen_number"], {"to": kind}),
        ("Unsqueeze", ["score", "two"], ["score_rows"], {}),
        ("Unsqueeze", ["chosen_number", "two"], ["class_rows"], {}),
        ("Concat", ["corner_rows", "score_rows", "class_rows"], ["objects"], {"axis": 2}),
    ]  # fmt: skip
    graph.initializer.append(helper.make_tensor("two", TensorProto.INT64, [1], [2]))
    graph.node.extend(helper.make_node(op, given, found, **more) for op, given, found, more in nodes)
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("objects", kind, ["batch", count, 6]))
    onnx.save(model, out)
    return out


def declared(bench: Bench, name: str) -> Path:
    """The network with its pre- and post-processing."""
    path = bench.network(name, half=bench.on_gpu)
    model = onnx.load(path)
    size = model.graph.input[0].type.tensor_type.shape.dim[2].dim_value
    out = path.with_name(f"{path.stem}-declared.onnx")
    if name == "yolo":
        path = choose_best(path, path.with_name(f"{path.stem}-best.onnx"), min(_BEST, (size // 32) ** 2))
        vision = Vision(Preprocess((size, size)), Postprocess("yolov10"))
    else:
        means = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
        pixels = Preprocess((size, size), resize="center-crop", crop_share=0.875, interpolation="bicubic", **means)  # type: ignore[arg-type]
        vision = Vision(pixels, Postprocess("classify", activation="softmax"))
    return out if out.exists() else declare(path, vision, out)


def measure(bench: Bench, name: str) -> bool:
    args, model, met = bench.args, declared(bench, name), True
    rows, wait, contexts = args.policy.split(",")
    policy = BatchPolicy(int(rows), float(wait.removesuffix("ms")), int(contexts))
    for clip in args.clips:
        bench.begin()
        started_s = time.perf_counter()
        report = te.size(
            model, backend=args.backend if bench.on_gpu else None, device=args.device, start_batch=policy.max_batch,
            max_batch=policy.max_batch, policy=policy, contexts=(policy.contexts,), video=[clip], deadline_ms=40.0,
            duration_s=args.seconds, warmup_s=0.3, options=bench.options, parity=False,
            out=bench.folder / f"{name}-{clip.stem}", overwrite=True,
        )  # fmt: skip
        found = report.video
        efficiency = found.streams / min(found.part_streams.values())
        met = met and efficiency >= 0.9
        record = dataclasses.asdict(found)
        record["sources"] = [source | {"path": clip.name} for source in record["sources"]]
        bench.write(network=name, video=record, efficiency=efficiency, took_s=time.perf_counter() - started_s)
        parts = ", ".join(f"{part} {streams:.0f}" for part, streams in found.part_streams.items())
        print(f"{name}, {clip.name}: {found.streams} cameras ({found.low} to {found.high}), {found.processes} processes, "
              f"limit {found.limit}, "
              f"efficiency {efficiency:.2f}; {parts}", flush=True)  # fmt: skip
        if report.engine and bench.on_gpu:
            sizes = graph_sizes(policy.max_batch)
            with te.load(report.engine, device=args.device, contexts=policy.contexts, graphs=sizes) as runner:
                warm_up(runner, sizes)
                difference(bench, name, clip, runner)
                copies(bench, name, clip, runner, found)
                if args.hold:
                    hold(bench, name, clip, runner, found)
    return met


def difference(bench: Bench, name: str, clip: Path, runner: Any) -> None:
    """How far the frames that the GPU decodes and prepares are from those of PyAV and Pillow."""
    vision = vision_in(runner)
    spec = vision.input_spec(runner.signature)
    preprocessor, worst, means, count = Preprocessor(vision.preprocess, spec.dtype), 0.0, [], 0
    levels = np.stack(preprocessor.levels).astype(np.float64)
    step = np.abs(np.diff(levels, axis=1)).max()
    with device_frames(runner.runner, vision, [str(clip)]) as frames, PyAvDecoder(str(clip)) as reference:
        if frames is None:
            return
        decoder = frames.open(str(clip))
        for mine, other in zip(read_frames(decoder), read_frames(reference), strict=True):
            wanted = preprocessor(other.image())[0].astype(np.float64)
            with frames.batch([mine.data]) as batch:
                got = np.empty(batch.shape, spec.dtype)
                stream = frames.device.stream()
                frames.device.download(batch.buffer, got, stream)
                stream.synchronize()
                stream.close()
            far = np.abs(got[0].astype(np.float64) - wanted)
            worst, count = max(worst, float(far.max())), count + 1
            means.append(float(far.mean()))
        decoder.close()
    bench.write(
        network=name, clip=clip.name, frames=count, worst_levels=worst / step, mean_levels=np.mean(means) / step
    )
    print(f"{name}, {clip.name}: {count} frames differ by at most {worst / step:.2f} levels of 255", flush=True)


def copies(bench: Bench, name: str, clip: Path, runner: Any, found: Any) -> None:
    """Bytes copied in each direction while a tenth of the cameras play for a second: no frame leaves the GPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    described, trace = describe_clip(str(clip)), bench.folder / "trace.json"
    request = VideoRequest(found.policy, (described,), found.deadline_ms, found.late, 1.0)
    streams = max(1, found.streams // 10)
    with device_frames(runner.runner, vision_in(runner), [str(clip)]) as frames, Decoders(frames) as decoders:
        player = ClipPlayer(runner, vision_in(runner), request, decoders)
        play_clips(player, streams, 0.5, seed=1)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            run = play_clips(player, streams, 1.0, seed=2)
            torch.cuda.synchronize()
    profiled.export_chrome_trace(str(trace))
    copied: Counter[str] = Counter()
    for event in json.loads(trace.read_bytes())["traceEvents"]:
        if event.get("cat") == "gpu_memcpy":
            copied[event["name"].partition(" (")[0]] += int(event["args"]["bytes"])
    frame = described.width * described.height * 3 // 2
    bench.write(network=name, clip=clip.name, copied_bytes=copied, frames=run.frames, frame_bytes=frame)
    print(f"{name}, {clip.name}: {run.frames} frames of {frame} bytes; copied {dict(copied)}", flush=True)


def vision_in(runner: Any) -> Vision:
    found = vision_of(runner.engine)
    assert found is not None
    return found


def hold(bench: Bench, name: str, clip: Path, runner: Any, found: Any) -> None:
    """0.9 of the cameras for some time, with the memory of GPU and process every second."""
    streams, memory, ended = max(1, int(0.9 * found.streams)), [], threading.Event()
    request = VideoRequest(found.policy, (describe_clip(str(clip)),), found.deadline_ms, found.late, bench.args.hold)
    vision, policy = vision_in(runner), found.policy
    runtime = RuntimeConfig(contexts=policy.contexts, graphs=graph_sizes(policy.max_batch))
    asked = WorkerRequest(str(runner.engine.path), runtime, 30, video=request)

    def watch() -> None:
        query = [
            "nvidia-smi",
            "--query-gpu=memory.used,utilization.gpu,utilization.decoder",
            "--format=csv,noheader,nounits",
        ]
        while not ended.wait(2.0):
            state = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
            own = psutil.Process()
            processes = [own, *own.children(recursive=True)]
            memory.append((sum(one.memory_info().rss for one in processes) >> 20, state))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with device_frames(runner.runner, vision, [str(clip)]) as frames, Decoders(frames) as decoders, ExitStack() as held:
        player = ClipPlayer(runner, vision, request, decoders)
        others = [held.enter_context(closing(OtherProcess(asked))) for _ in range(found.processes - 1)]
        for other in others:
            other.answer()
        run = play_clips(player, streams, bench.args.hold, seed=1, others=others)
    ended.set()
    watcher.join()
    bench.write(
        network=name, clip=clip.name, held_s=bench.args.hold, run=dataclasses.asdict(run),
        memory_mib=memory[:: max(1, len(memory) // 40)],
    )  # fmt: skip
    print(f"{name}: {streams} cameras for {bench.args.hold:g} s, {run.frames} frames, {100 * run.late_share:.3f} % late; "
          f"memory {memory[1:2]} to {memory[-2:-1]}", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
