"""Settings by name, as keyword arguments. Made by tools/settings_types.py: not edited by hand."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from trt_engine.config.profiles import Profile
from trt_engine.config.runtime import Batching
from trt_engine.config.streams import BatchPolicy, SourceGroup
from trt_engine.engine import Engine
from trt_engine.precision.calibration import CalibrationResult
from trt_engine.precision.calibrators import Calibrator
from trt_engine.precision.samples import PreprocessFunction
from trt_engine.records.precision import RangesReport
from trt_engine.tensors import Tensors
from trt_engine.verbs.calibration_images import VisionSource
from trt_engine.verbs.loadtest.config import LatencyBound

class BatchingSettings(TypedDict, total=False):
    """Settings of `te.Batching`."""

    max_batch: int | None
    """Rows in one batch [default: what the engine takes, else 32]."""
    max_wait_ms: float
    """How long a request may wait for others, from its arrival."""
    max_rows_waiting: int | None
    """Rows that may wait; more are refused [default: 64 batches]."""
    max_bytes_waiting: str | int | None
    """Bytes of inputs that may wait; more are refused."""
    buckets: str | int | Iterable[int]
    """Sizes batches are padded to [default: what the engine needs]."""
    priority_ms: float
    """The head start one step of priority gives."""
    workers: int | None
    """Batches at work at once [default: as many as the engine has contexts]."""

class RuntimeSettings(TypedDict, total=False):
    """Settings of running an engine."""

    device: str | int | None
    """The device to run on [default: the one the engine was built for]."""
    contexts: int
    """Inferences in flight at once on backends with contexts."""
    streams: int | None
    """Device streams [default: one for each context]."""
    graphs: bool | str | Iterable[int] | None
    """Capture a graph for each shape; sizes: batches are padded to these first [default: off; `size` and `serve` on a
    GPU: sizes up to the largest batch]."""
    max_graphs: int
    """Graphs kept for each context; the least recently used one goes."""
    max_waiting: int | None
    """Callers that may wait for a context; more are refused."""
    wait_timeout_s: str | float | None
    """How long a caller may wait for a context."""
    providers: str | Sequence[str]
    """ONNX Runtime's providers in order of preference, as cuda,cpu."""
    allow_fallback: bool
    """Let a provider that cannot run be replaced by the next; it is recorded."""
    options: Mapping[str, object] | Iterable[str]
    """The backend's own settings."""

class LoadSettings(RuntimeSettings, total=False):
    """Settings of `te.load`."""

    batching: Batching | BatchingSettings | None

class EngineBuildSettings(TypedDict, total=False):
    """Settings of a build that are not those of running its engine."""

    backend: str
    """The backend that builds."""
    precision: Literal["fp32", "tf32", "fp16", "bf16", "int8", "fp8", "int4", "nvfp4", "mxfp8"] | None
    """What the engine must compute in [default: as the graph is]."""
    calib_data: Path | str | Tensors | None
    """Calibration data where `precision` requires quantising the graph: a folder, .npz."""
    workspace_mib: str | int
    """Scratch memory the builder may use, as 32GiB (not for onnxruntime)."""
    timing_cache: Path | str | None
    """The file tactics' timings are kept in [default: one in the store for each library version and GPU]."""
    gpus: str | Sequence[str]
    """GPUs the engine is for, as sm89,sm120, 8.9 or a GPU's name; one plan for all of them [default: this machine's
    GPU, else every GPU the backend builds for]."""
    precisions: str | Sequence[str]
    """Further precisions to build and measure, as fp16,bf16; the fastest that is accurate enough is chosen."""
    time_budget_s: str | float | None
    """How long candidates are built and measured; 0 measures none [default: 5min; 20s where only settings of one
    backend are]."""
    optimize_for: Literal["latency", "throughput", "deadline"]
    """What is measured: the median at the profile's optimum, queries per second at its maximum, or queries per second
    of those whose p99 is within `max_p99_ms`."""
    max_p99_ms: float | None
    """The p99 that `optimize_for="deadline"` allows."""
    accuracy_data: Path | str | None
    """Labelled dataset that every candidate is evaluated on, as for evaluate."""
    accuracy_drop: float
    """How far a candidate's AP or top-1 may be below that of the first."""
    retry: bool
    """Retry after known failures with changed settings, logged (`retry=False` to stop at the first failure)."""
    fuse: bool
    """Fuse attention, norms and activations into ONNX Runtime's operators (`fuse=False` to leave the graph as it is)."""
    parity: bool
    """Compare the engine with plain ONNX Runtime on one input (`parity=False` to leave it out)."""
    parity_rtol: float | None
    """Largest difference allowed, relative to the largest reference value [default: 0.001, and more for a graph that
    rounds more coarsely than fp32]."""

class ComponentSettings(EngineBuildSettings, total=False):
    """Settings of building one of several models."""

    device: str | int
    """The device to build for: cpu, cuda:0, ... [default: the backend's own, cpu where it has it]."""
    preprocess: Path | str | None
    """How images of `calib_data` become inputs, instead of what the model declares."""
    batch: str | int | Sequence[int] | None
    """Min:opt:max when only the batch moves."""
    shapes: str | Mapping[str, Sequence[int]] | None
    """Sizes of dynamic dimensions, as images:1x3x640x640."""
    providers: str | Sequence[str]
    """ONNX Runtime's providers in order of preference, as cuda,cpu."""
    allow_fallback: bool
    """Let a provider that cannot run be replaced by the next; it is recorded."""
    options: Mapping[str, object] | Iterable[str]
    """The backend's own settings (a wrong name lists the right ones)."""

class BuildSettings(ComponentSettings, total=False):
    """Settings of `te.build`."""

    profiles: str | Profile | Mapping[str, Any] | Sequence[str | Profile | Mapping[str, Any]]
    """Min,opt,max shapes, as images:1x3x640x640,8x3x640x640,64x3x640x640."""
    inputs: Path | str | Tensors | None
    """Values of inputs that parity and calibration use, a .npz by name or a .npy of one; the engine takes their
    shapes unless others are given [default: seeded random]."""

class BundleSettings(ComponentSettings, total=False):
    """Settings of `te.bundle`."""

    dims: Mapping[str, object] | Iterable[str]
    """Range of a dimension, in all components or in one: T=16:64:512, joint.T=8, T=::512 (repeatable)."""
    profiles: Iterable[str]
    """Range of one input, as encoder:audio_signal:1x128x16,1x128x64,1x128x512 (repeatable)."""
    onnx_dir: Path | str | None
    """Folder of the ONNX files [default: that of META]."""
    run: bool
    """Run every engine, then all of them in a chain, on seeded inputs."""
    rebuild: bool
    """Build even if the folder or the store has the engines."""
    overwrite: bool
    """Overwrite existing files."""

class SizeSettings(BuildSettings, total=False):
    """Settings of `te.size`."""

    out: Path | str | None
    """Write directly into this folder [default: next to the model, or a run folder under runs/]."""
    start_batch: int
    """The first engine's largest batch."""
    max_batch: int
    """Stop doubling here (and start here when it is lower than the start)."""
    fps: float
    """Frames per second of one stream."""
    duration_s: str | float
    """Length of each measurement."""
    warmup_s: str | float
    """Run this long before each measurement."""
    scan: bool
    """Look for batch sizes that are much slower than their neighbours (N +- `scan_width`)."""
    scan_width: int
    """How far the scan goes to each side."""
    memory_limit: str | int | None
    """Memory one measurement may take, as 8GiB [default: what is free]."""
    protocol: Literal["trt-engine", "trtexec10", "trtexec11"]
    """The named set of measuring rules."""
    min_streams: str | int | None
    """End with exit code 12 when fewer streams than this are sustained."""
    strict: bool
    """End with exit code 9 when a measurement is not stable."""
    overwrite: bool
    """Overwrite existing files."""
    deadline_ms: float | None
    """Count the streams whose frames are inferred within this time."""
    late: str | float | None
    """Share of frames that may be late or dropped [default: 0.1%; with `video` 1%]."""
    video: Sequence[Path | str]
    """Measure the whole path with clips as cameras, a file or a folder (repeatable)."""
    sources: str | Sequence[SourceGroup] | None
    """Sources by frame rate, as 200@25,50@30: how many GPUs they need."""
    spare_gpus: int
    """GPUs that may fail."""
    policy: str | BatchPolicy | None
    """Batching policy, as 8,5ms or 8,5ms,2 (rows, wait, contexts) [default: the best found]."""
    contexts: str | int | Iterable[int]
    """Batches at once to measure and to choose from."""
    frames: Literal["host", "device"]
    """Where frames arrive: `device` leaves their upload out."""
    interval: int
    """Frames of a source to skip between two inferred ones."""
    jitter_ms: float
    """Uniform jitter of the arrivals, to each side."""
    arrivals: Path | str | None
    """Measured arrival times of one source, in seconds, one per line."""
    codec: Literal["h264", "hevc", "vp9", "av1"] | None
    """Include the GPU's decoders."""
    then: Path | str | None
    """Second model of a cascade, which takes `crops` of every inferred frame: measured first, or the folder of its
    own `size` run."""
    crops: int
    """Objects of each inferred frame that the model of `then` takes."""
    curve: Path | str | None
    """Reuse this `curve.jsonl` of the same engine and machine."""
    verify_s: str | float | None
    """Drive the engine with that many paced sources for this time."""

class EngineSettings(RuntimeSettings, EngineBuildSettings, total=False):
    """Settings of running an engine, and of building it for a model."""

    profiles: str | Profile | Mapping[str, Any] | Sequence[str | Profile | Mapping[str, Any]]
    """Min,opt,max shapes, as images:1x3x640x640,8x3x640x640,64x3x640x640."""

class BenchSettings(EngineSettings, total=False):
    """Settings of a measurement; those of the build are for a model."""

    protocol: Literal["trt-engine", "trtexec10", "trtexec11"]
    """The named set of measuring rules."""
    batch: int | None
    """Rows in one query [default: the profile's optimum]."""
    shapes: str | Mapping[str, Sequence[int]] | None
    """Shapes to measure at, as images:8x3x640x640."""
    duration_s: str | float | None
    """Measure at least this long (200ms, 10s)."""
    warmup_s: str | float | None
    """Run this long before measuring."""
    iterations: int | None
    """Measure at least this many queries."""
    warmup_iterations: int
    """Leave at least this many queries out as warm-up."""
    idle_s: str | float
    """Pause after each query."""
    percentiles: str | Sequence[float]
    """Percentiles to print."""
    inputs: Path | str | Tensors | None
    """Values of inputs, a .npz by name or a .npy of one [default: seeded random]."""
    seed: int
    """Seed of the random inputs."""
    transfers: bool | None
    """Copy inputs and outputs inside the measured part."""
    graph: bool | None
    """Replay a CUDA graph where the device has them."""
    spin: bool | None
    """Wait for the device by spinning."""
    strict: bool
    """End with exit code 9 when the measurement is not stable."""
    preprocess: Path | str | None
    """How images of `calib_data` become inputs, instead of what the model declares."""

class BenchRunSettings(BenchSettings, total=False):
    """Settings of `te.bench`."""

    isolate: bool
    """Measure in a child process: a crash there is an error here."""
    memory_limit: str | int | None
    """With `isolate=True`: memory limit, as 4GiB [default: free memory]."""
    log: Path | str | None
    """File of the text log."""
    out: Path | str | None
    """Folder for records.jsonl (appended) and bench.log."""

class ProfileSettings(BenchSettings, total=False):
    """Settings of `te.profile`."""

    profiler: Literal["nsys", "cupti", "torch", "layers", "host"] | None
    """Use this profiler; exit 3 where it is unavailable [default: the best available]."""
    inferences: int
    """Profile N inferences."""
    warmup: int
    """Warm-up inferences before."""
    ncu: int
    """Nsight Compute counters of the top N kernels."""
    peaks: bool
    """Measure the device peaks unless cached."""
    out: Path | str | None
    """Folder for the report, the timeline and the raw files [default: runs/TIME_NAME_profile]."""
    overwrite: bool
    """Overwrite existing files."""

class CompareSettings(BenchSettings, total=False):
    """Settings of `te.compare`."""

    fail_if: Sequence[str]
    """Slower:3%, p99-slower:5%, maybe-slower:3% (exit code 8) or error:1e-3 (exit code 7)."""
    baseline: Path | str | None
    """Compare with a file of `save_baseline`."""
    save_baseline: Path | str | None
    """Save the first engine's times for CI."""
    restarts: int
    """Reload all engines N times."""
    out: Path | str | None
    """Folder for the report (report.html, report.md) and compare.json."""
    overwrite: bool
    """Overwrite existing files."""

class EvaluateSettings(EngineSettings, total=False):
    """Settings of `te.evaluate`; those of the build are for a model."""

    batch: int | None
    """Images per query [default: 8, within the profile]."""
    max_samples: int | None
    """At most N images [default: all]."""
    seed: int | None
    """With `max_samples`: random images [default: the first N]."""
    baseline: Engine | Path | str | None
    """Also evaluate this baseline on the same images."""
    max_drop: float | None
    """Exit code 7 when AP or top-1 drops by more than X."""
    preprocess: VisionSource | None
    """Pre- and post-processing, instead of the declared one."""
    save_predictions: Path | str | None
    """Write detections in COCO's results format."""
    out: Path | str | None
    """Write metrics.json into this folder."""
    overwrite: bool
    """Overwrite existing files."""
    shapes: str | Mapping[str, Sequence[int]] | None
    """Sizes of dynamic dimensions, as images:1x3x640x640."""
    inputs: Path | str | Tensors | None
    """Values of inputs that parity and calibration use, a .npz by name or a .npy of one; the engine takes their
    shapes unless others are given [default: seeded random]."""

class InferSettings(EngineSettings, total=False):
    """Settings of `te.infer`; those of the build are for a model."""

    image: Path | str | None
    """An image, preprocessed as declared."""
    video: Path | str | None
    """A clip or an RTSP address, frame by frame."""
    max_frames: int | None
    """With `video`: end after N frames."""
    batch: int | None
    """With `random`: rows [default: the profile's optimum]."""
    shapes: str | Mapping[str, Sequence[int]] | None
    """With `random`: shapes, as images:8x3x640x640."""
    seed: int
    """With `random`: the seed."""
    outputs: Sequence[str]
    """Select this output (repeatable) [default: all]."""
    repeat: int
    """Run N times; the outputs are those of the first."""
    draw: Path | str | None
    """With `image`, `video`: write it with boxes."""
    min_score: float | None
    """With `image`, `video`: minimum score [default: 0.25]."""
    top: int | None
    """With `image`, `video`: the N best classes [default: 5, 1]."""
    preprocess: VisionSource | None
    """With `image`, `video`: instead of the declared one."""
    out: Path | str | None
    """.npz (outputs by name) or .npy (one output) to write; with `image` .json as well; with `video` .mp4, .mkv or
    .mov (drawn), or .jsonl (a line for each frame)."""
    overwrite: bool
    """Overwrite existing files."""

class BatchSettings(EngineSettings, total=False):
    """Settings of `te.batch`; those of the build are for a model."""

    batch: int | None
    """Rows of an inference [default: 8, within the profile]."""
    part_rows: int
    """Rows of a part: what is done again after an interruption."""
    workers: int | None
    """Processes that run the engine [default: one for each GPU, on CPUs one for each node]."""
    address: str | None
    """A running Ray cluster, `auto` for that of this machine [default: one of its own]."""
    raw: bool
    """Of an image too, the outputs as arrays instead of detections or classes."""
    min_score: float
    """Of an image: minimum score of a detection."""
    top: int
    """Of an image: the N best classes."""
    preprocess: VisionSource | None
    """Of images: instead of the declared one."""
    overwrite: bool
    """Replace another job in the folder."""

class ServeSettings(EngineSettings, total=False):
    """Settings of `te.serve`; those of the build are for models."""

    model_repository: Path | str | None
    """Folder of models, as NAME/VERSION/model.onnx or model.plan."""
    model_control_mode: Literal["none", "poll", "explicit"]
    """What loads models after the start: nothing, changed files, or clients."""
    load_model: str | Sequence[str]
    """With explicit control: load this model at the start."""
    poll_interval_s: str | float
    """With poll: time between two looks at the repository."""
    build_models: bool
    """Build models that are not engines, into the store."""
    allow_changed: bool
    """Load engines whose digest is not that of their passport."""
    host: str
    """Address to listen at; the default is reached from this machine alone."""
    http_port: int
    """Port of HTTP; 0: any free one, -1: none."""
    grpc_port: int
    """Port of gRPC; 0: any free one, -1: none."""
    metrics_port: int
    """Port of the metrics alone; 0: any free one, -1: none."""
    strict_readiness: bool
    """The server is ready only while every requested model is."""
    token_file: Path | str | None
    """File with the bearer token that every request but the health checks must carry."""
    tls_cert: Path | str | None
    """Certificate chain for TLS, PEM."""
    tls_key: Path | str | None
    """Private key for TLS, PEM."""
    allowed_host: str | Sequence[str]
    """On a loopback address: another name in `Host` and `Origin` that is answered, as of a proxy."""
    control_without_token: bool
    """With explicit control: clients load and unload models without a token."""
    shared_memory: bool | None
    """Let clients register shared memory [default: on a loopback address, with a token or a prefix]."""
    shared_memory_prefix: str | None
    """Let clients register shared memory of the server's own user whose key begins so; `/` is every key."""
    otlp_endpoint: str | None
    """Send a span of each request to this OpenTelemetry collector, over OTLP/HTTP."""
    max_batch: int | None
    """Rows of joined requests [default: the engine's largest batch, else 32; 1: never joined]."""
    max_wait_ms: str | float
    """How long a request waits for others while a context is free."""
    max_queue: int | None
    """Requests (rows, where they are joined) that may wait for a model [default: 64 batches]."""
    max_request: str | int
    """Largest request [default: 256MiB]."""
    max_json: str | int
    """Largest JSON part of a request [default: 16MiB]."""
    max_header: str | int
    """Largest HTTP header [default: 64KiB]."""
    max_in_flight: int
    """Requests of inference at once; more are refused."""
    max_in_flight_size: str | int
    """Bytes of all requests at once; more are refused [default: 2GiB]."""
    max_connections: int
    """HTTP connections at once."""
    request_timeout_s: str | float
    """Time for a client to send its header, and then its body."""
    drain_delay_s: str | float
    """At the end: time between not being ready and refusing connections."""
    drain_timeout_s: str | float
    """At the end: longest wait for accepted requests."""

class LoadtestSettings(EngineSettings, total=False):
    """Settings of `te.loadtest`; those of engines are not for a URL."""

    model: str | None
    """The model of the server [default: its only one]."""
    model_version: str | None
    """The model's version [default: the server chooses]."""
    batch: int | None
    """Rows in one request [default: 1, or the profile's optimum]."""
    shapes: str | Mapping[str, Sequence[int]] | None
    """Shapes of the inputs, as images:8x3x640x640."""
    inputs: Path | str | Tensors | None
    """Values of inputs, a .npz by name or a .npy of one [default: seeded random]."""
    seed: int
    """Seed of the random inputs and arrivals."""
    binary: bool | None
    """Send tensors as bytes after the JSON [default: where the server can]."""
    shared_memory: bool
    """Put the inputs into system shared memory, registered at a server on this host (HTTP)."""
    token_file: Path | str | None
    """File with the bearer token that the server requires."""
    ca_file: Path | str | None
    """Certificates to trust for https and grpcs [default: the system's]."""
    concurrency: int
    """Closed loop: N requests in flight, each sent when one is answered."""
    rate: float | None
    """Open loop: send X requests/s, however long answers take."""
    arrivals: Literal["poisson", "constant", "bursts"]
    """When requests of an open loop are sent."""
    burst: int
    """Requests in one burst of `arrivals="bursts"`."""
    replay: Path | str | None
    """Open loop: send at the times in this file (seconds, one a line; or a loadtest.jsonl)."""
    find_rate: str | LatencyBound | None
    """Search for the highest rate within a latency bound, as p99:50ms."""
    duration_s: str | float | None
    """Send for this long [default: 10s; 5s at each rate of a search; a recording to its end]."""
    warmup_s: str | float | None
    """Send this long before measuring [default: 1s; 0s before a recording]."""
    connections: int
    """Open loop: at most N requests in flight; others wait in the client."""
    processes: int
    """Send from N processes, where one cannot send enough."""
    timeout_s: str | float
    """Give a request up after this long; it counts as an error."""
    deadline_ms: str | float | None
    """Deadline in ms: sent with each request, later answers are counted."""
    percentiles: str | Sequence[float]
    """Percentiles to print."""
    fail_if: Sequence[str]
    """P99:50ms (or median, mean, max), rate:500 (fewer answered), errors:1% or late:1% (exit code 8)."""
    out: Path | str | None
    """Folder for loadtest.jsonl (appended) and the report."""
    preprocess: Path | str | None
    """How images of `calib_data` become inputs, instead of what the model declares."""

class DeploySettings(TypedDict, total=False):
    """Settings of `te.deploy`, by target."""

    sized: Path | str | Sequence[Path | str]
    """Folder of a `size` run: the engine it measured is batched as measured (repeatable)."""
    backend: Literal["native", "python"] | str
    """What runs the engines: Triton's backend for them, or its Python backend with trt-engine; what builds MODELs on
    a node [default: tensorrt with a GPU where it is installed, else onnxruntime]."""
    instances: int | None
    """Execution instances of each model on a device [default: measured, else 1]."""
    max_wait_ms: str | float | None
    """Longest wait of a request for others of its batch [default: measured, else 0]."""
    warmup: bool
    """Have Triton run the smallest, usual and largest batch before a model is ready."""
    streams: int | None
    """Number of sources [default: measured, else the given ones]."""
    source: str | Sequence[str]
    """Address of a source, rtsp or file (repeatable) [default: DeepStream's sample video]."""
    precision: Literal["fp32", "fp16"]
    """Precision nvinfer builds a MODEL in."""
    secondary: Path | str | Sequence[Path | str]
    """Engine or model of a second network, which gets the objects of the first (repeatable)."""
    preprocess: str | None
    """The model's pre-processing, instead of what it declares."""
    image: Path | str | None
    """Image to compare pre-processing on [default: a synthetic one]."""
    check: Path | str | None
    """Your nvinfer configuration to compare: pre-processing, batch, classes, labels."""
    min_replicas: int
    """Replicas without load."""
    max_replicas: int
    """Replicas under load."""
    target_requests: float
    """Requests running and waiting for each replica that autoscaling aims at."""
    gpus: float
    """GPUs of a replica: 1, or a fraction where replicas share one."""
    port: int
    """Port of HTTP on every node."""
    host: str
    """Address to listen at; the default is reached from the node itself alone."""

class RunSettings(TypedDict, total=False):
    """Settings of `te.run`."""

    cells: str | Sequence[str]
    """Only cells with a matching label, e.g. 'digits-*-b8' (repeatable)."""
    modes: str | Sequence[str]
    """Build, bench (or benchmark), evaluate, profile, nsys, ncu, all [default: the plan's]."""
    fail_fast: bool
    """Stop at the first cell that fails [default: `fail_fast=False`]."""
    rerun: bool
    """Repeat finished work too."""
    in_container: str | None
    """Run in this image with docker or podman; `none` for no container [default: the plan's]."""
    trust_plan: bool
    """Allow plugins, and network and arguments of the container."""

class ConvertSettings(TypedDict, total=False):
    """Settings of `te.convert`."""

    out: Path | str | None
    """The .onnx file to write."""
    inputs: Any
    """An example input: images:2x3x640x640, ids:2x128:int64@0..30521, .npy, .npz (repeatable)."""
    dynamic: Any
    """Dynamic axes: images:0=batch@1..64,2=height@64..640/32 [default: 0=batch]."""
    opset: int | None
    """ONNX opset [default: 20, or the highest that `target` takes]."""
    target: Literal["all", "tensorrt", "onnxruntime"]
    """The runtime."""
    exporter: str | Sequence[str]
    """PyTorch's exporter [default: dynamo, then torchscript]."""
    options: Mapping[str, Any] | Sequence[str] | None
    """An argument of the factory or loader."""
    allow_frozen_branches: bool
    """Trace a Python `if` on values by the example, with a warning."""
    all_outputs: bool
    """Keep training-only outputs of detectors."""
    factory: str | None
    """Function that creates the module of a state dict: file.py:factory."""
    simplify: bool
    """Fold constants and deduplicate, verified [default: yes]."""
    tolerance: float | None
    """Largest difference over the largest value [default: 1e-4]."""
    offline: bool
    """Load hub names only from the cache."""
    cache: Path | str | None
    """Cache folder of hub names."""
    external_data: bool
    """Write weights to a separate file."""
    python: str | None
    """Python interpreter with TensorFlow."""
    trust_source: bool
    """Open a source with code, which runs with your permissions."""
    overwrite: bool
    """Overwrite existing files."""

class ExclusionSettings(TypedDict, total=False):
    """Settings of rewriting a graph on data."""

    preprocess: VisionSource | PreprocessFunction | None
    """Image pre-processing, instead of the declared one."""
    shapes: str | Mapping[str, Sequence[int]] | None
    """Shapes of random inputs, as input_ids:8x128."""
    inputs: Path | str | Tensors | None
    """Values of inputs that the data has not, for every sample, a .npz by name or a .npy of one."""
    exclude_nodes: str | Sequence[str]
    """Leave this node, or PyTorch module (`layer4.1`), as it is."""
    exclude_types: str | Sequence[str]
    """Leave this operator type as it is."""
    exclude_patterns: str | Sequence[str]
    """Leave nodes whose names or modules fit this pattern, as '/head/*'."""

class CastSettings(ExclusionSettings, total=False):
    """Settings of `te.cast`."""

    calib_data: Any
    """Images, a labelled dataset, .npy, .npz, .bin, .raw for `auto_exclude=True`, `autocast=True` and parity
    [default: random]."""
    ranges: RangesReport | CalibrationResult | Mapping[str, float] | None
    """A report of `ranges`, or largest values by tensor: what leaves the range stays in FP32."""
    keep_io: bool
    """Keep inputs and outputs in FP32 (`keep_io=False` to cast them)."""
    auto_exclude: bool
    """Keep nodes in FP32 whose values leave the type's range on the data."""
    max_constant: float | None
    """Keep larger constants in FP32 [default: the type's maximum]."""
    clamp_masks: bool
    """Clamp masks such as -1e9 to the type's largest value."""
    autocast: bool
    """Let NVIDIA ModelOpt's AutoCast decide (extra `quant`)."""
    parity: bool
    """Compare with the FP32 model in ONNX Runtime (`parity=False` to leave it out)."""
    seed: int
    """Seed of random inputs."""

class QuantizeSettings(ExclusionSettings, total=False):
    """Settings of `te.quantize`."""

    calib_data: Any
    """Calibration data: images, a labelled dataset, .npy, .npz, .bin, .raw; `random` for a trial."""
    preprocessing: Any
    """What a `cache` knows a function of `preprocess` by: any JSON value."""
    ranges: CalibrationResult | Mapping[str, float] | None
    """Known ranges of the activations, in place of data."""
    cache: Path | str | None
    """Calibration cache; a hit needs no data."""
    emulate: Path | str | None
    """Also write an FP32 graph that emulates the numerics on any CPU."""
    target: Literal["tensorrt", "tensorrt-rtx", "onnxruntime-cpu", "onnxruntime-cuda", "onnxruntime-tensorrt"]
    """The library that will run the model: where its kernels want Q/DQ."""
    dynamic: bool
    """Quantise activations while running, without data (INT8 of MatMul and Gemm, `target="onnxruntime-cpu"`)."""
    reduce_range: Literal["auto", "on", "off"]
    """Weights in 7 bits, so that kernels without VNNI do not overflow (`target="onnxruntime-cpu"`; auto: as this
    processor needs)."""
    calibrator: Calibrator | str | None
    """The rule for activations' ranges [default: mse for INT8, minmax for FP8 and NVFP4]."""
    max_samples: int | None
    """How many samples of the data to take [default: all]."""
    calib_batch: int
    """How many samples run at once."""
    method: Literal["rtn", "awq"]
    """How weights are rounded: to nearest, or seen through the data."""
    block_size: int | None
    """Elements under one scale in INT4 [default: the largest of 128, 64, 32, 16 that fits]."""
    weights_only: bool
    """Leave activations as they are (NVFP4 and MXFP8; INT4 always does)."""
    quantize_residuals: bool
    """Quantise the other side of residual additions too, so that they fuse (INT8, FP8)."""
    bias_correction: bool
    """Let biases take up what rounding weights takes away on average (INT8, FP8; `bias_correction=False` to leave
    it)."""
    quantize_outputs: bool
    """Quantise the last layer before each output as well."""
    high_precision: Literal["fp32", "fp16", "bf16"]
    """What is not quantised computes in this."""
    emulate_convs: bool
    """Let the emulation of INT4, NVFP4 and MXFP8 round convolutions too, which no kernel does."""
    parity: bool
    """Compare with the model as it was (`parity=False` to leave it out)."""

class RangesSettings(TypedDict, total=False):
    """Settings of `te.ranges`."""

    preprocess: VisionSource | PreprocessFunction | None
    """Image pre-processing, instead of the declared one."""
    shapes: str | Mapping[str, Sequence[int]] | None
    """Shapes of random inputs, as input_ids:8x128."""
    inputs: Path | str | Tensors | None
    """Values of inputs that the data has not, for every sample, a .npz by name or a .npy of one."""
    batch: int
    """Rows per run."""
    max_samples: int | None
    """Maximum of rows [default: all]."""
    headroom: float
    """Factor by which values may grow."""
    memory_mib: str | int
    """Memory for tensors at a time."""
    seed: int
    """Seed of random inputs."""

class CalibrateSettings(TypedDict, total=False):
    """Settings of `te.calibrate`."""

    tensors: Sequence[str] | None
    """The activations [default: all floating-point ones of the main graph]."""
    preprocess: VisionSource | PreprocessFunction | None
    """Image pre-processing, instead of the declared one."""
    preprocessing: Any
    """What a `cache` knows a function of `preprocess` by: any JSON value."""
    batch: int
    """Rows per run."""
    max_samples: int | None
    """Maximum of samples [default: all]."""
    cache: Path | str | None
    """The file of the result."""
    memory_mib: int
    """Memory for tensors at a time."""

class MigrateSettings(TypedDict, total=False):
    """Settings of `te.migrate`."""

    from_release: str
    """The release the files were written for."""
    to_release: str
    """The release to migrate to, as 10.x or 11.4."""
    rules: str | Sequence[str]
    """Only this rule."""
    exclude: str | Sequence[str]
    """Skip files and folders of this name or pattern."""
    diff: bool
    """Show the changes of `fix=True` as a diff, and write nothing."""
    fix: bool
    """Make the mechanical changes, and show them as a diff."""
    sarif: Path | str | None
    """Also write the findings to this file as SARIF 2.1.0."""

class UpgradeSettings(TypedDict, total=False):
    """Settings of `te.upgrade_check`."""

    fail_if: Sequence[str]
    """Slower:3%, p99-slower:5%, maybe-slower:3% (exit code 8) [default: slower:3%]."""
    max_drop: float
    """Exit code 7 when AP or top-1 drops by more than X."""
    keep_plans: bool
    """Exit code 10 when a plan of OLD does not load in NEW."""
    strict: bool
    """Exit code 9 when a gate cannot be judged."""
    out: Path | str | None
    """Folder for the report (report.html, report.md) and upgrade.json."""
    overwrite: bool
    """Overwrite existing files."""

class SearchSettings(TypedDict, total=False):
    """Settings of `te.search`."""

    calib_data: Path | str | None
    """Calibration data: a folder, .npy, .npz."""
    to: Literal["int8", "fp8"]
    """The format."""
    budget: float
    """Maximum drop of AP or top-1: 0.01 is one point of AP."""
    subset: int
    """Images for measuring each layer; the result is verified on all."""
    seed: int | None
    """Seed of their selection."""
    max_groups: int | None
    """Search over at most this many groups of neighbouring layers [default: every layer]."""
    batch: int | None
    """Images per query [default: 8, within the profile]."""
    target: Literal["tensorrt", "tensorrt-rtx", "onnxruntime-cpu", "onnxruntime-cuda", "onnxruntime-tensorrt"] | None
    """The library that will run the model [default: the measuring one]."""
    preprocess: VisionSource | None
    """Pre- and post-processing, instead of the declared one."""
    out: Path | str | None
    """The folder for trials.jsonl, exclude.txt and search.json."""
    overwrite: bool
    """Overwrite existing files."""
