"""What a load test loads: a model on a server, or an engine in this process, with the inputs that are sent."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from trt_engine.benchmark.bench_inputs import batch_of, feeds_for
from trt_engine.benchmark.measured_engine import row_warnings
from trt_engine.config.bench import BenchConfig
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import parse_device
from trt_engine.engine import Engine
from trt_engine.errors import SetupError, TrtEngineError, UsageError
from trt_engine.open_inference.wire_tensors import encode_tensor, protocol_dtype
from trt_engine.runtime.feeds import complete_shapes, describe_inputs, random_feeds, read_feeds, shapes_of
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.tensors import Signature, Tensors
from trt_engine.verbs.bench.run import open_or_build
from trt_engine.verbs.load import load
from trt_engine.verbs.loadtest.clients import (
    METADATA_TIMEOUT_S,
    engine_loop,
    infer_request,
    open_loop,
    read_model,
)
from trt_engine.verbs.loadtest.config import LoadtestConfig
from trt_engine.verbs.loadtest.generator import LoadRun, OnProgress, Timing, run_loop, run_processes
from trt_engine.verbs.loadtest.http_response import HttpMetadata
from trt_engine.verbs.loadtest.target import (
    BINARY_EXTENSION,
    InputRegion,
    ServedModel,
    Target,
    http_request,
    parse_target,
    read_token,
    tls_context,
)


class Subject(Protocol):
    """What is loaded."""

    @property
    def gpu(self) -> int | None:
        """The GPU in this process whose facts belong in the record."""

    def facts(self) -> dict[str, Any]:
        """The fields of a `LoadtestRecord` that name the target and its inputs."""

    def run(self, timing: Timing, concurrency: int, timeout_s: float, on_progress: OnProgress) -> LoadRun:
        """Send requests."""


@dataclass(frozen=True, slots=True)
class ServerSubject:
    """A model on a server, with its request as bytes."""

    target: Target
    model: ServedModel
    feeds: Tensors
    inputs: str
    request: bytes
    processes: int
    token: str | None
    ca_file: Path | None
    gpu: int | None = None

    def facts(self) -> dict[str, Any]:
        versions = self.model.versions
        version = self.target.version or (versions[-1] if len(versions) == 1 else None)
        return {
            "target": str(self.target), "interface": self.target.interface, "model": self.target.model or "",
            "version": version, "server": self.model.server, "request_bytes": len(self.request),
            "runtime_info": self.model.info, **input_facts(self.model.signature, self.feeds, self.inputs),
        }  # fmt: skip

    def run(self, timing: Timing, concurrency: int, timeout_s: float, on_progress: OnProgress) -> LoadRun:
        if self.processes == 1:
            with open_loop(
                self.target, self.request, concurrency=concurrency, timeout_s=timeout_s, token=self.token,
                ca_file=self.ca_file,
            ) as loop:  # fmt: skip
                return run_loop(loop, timing, on_progress)

        def fields(folder: Path, index: int) -> dict[str, Any]:
            if not index:
                (folder / "request").write_bytes(self.request)
            share = concurrency // self.processes + (index < concurrency % self.processes)
            return {
                "target": self.target, "request": str(folder / "request"), "concurrency": share, "token": self.token,
                "timeout_s": timeout_s, "ca_file": None if self.ca_file is None else str(self.ca_file.absolute()),
            }  # fmt: skip

        return run_processes(fields, self.processes, timing, on_progress)


@dataclass(frozen=True, slots=True)
class EngineSubject:
    """An engine in this process."""

    name: str
    engine: Engine
    runner: InferenceEngine
    feeds: Tensors
    inputs: str
    deadline_ms: float | None
    gpu: int | None

    def facts(self) -> dict[str, Any]:
        nbytes = sum(
            len(encode_tensor(array, "BYTES" if array.dtype == object else "")) for array in self.feeds.values()
        )
        inputs = input_facts(self.engine.signature, self.feeds, self.inputs)
        return inputs | {
            "target": self.name, "interface": "engine", "model": self.engine.path.name, "version": None,
            "server": self.engine.passport.backend, "request_bytes": nbytes,
            "runtime_info": {str(name): str(value) for name, value in self.runner.runtime_info.items()},
            "warnings": tuple(row_warnings(self.engine.signature, inputs["batch"])),
        }  # fmt: skip

    def run(self, timing: Timing, concurrency: int, timeout_s: float, on_progress: OnProgress) -> LoadRun:
        loop = engine_loop(
            self.runner, self.feeds, concurrency=concurrency, timeout_s=timeout_s, deadline_ms=self.deadline_ms
        )
        return run_loop(loop, timing, on_progress)


def input_facts(signature: Signature, feeds: Tensors, origin: str) -> dict[str, Any]:
    shapes = {name: tuple(int(size) for size in array.shape) for name, array in feeds.items()}
    return {"batch": batch_of(signature, shapes), "shapes": shapes, "inputs": origin}


@contextlib.contextmanager
def server_subject(url: str, config: LoadtestConfig) -> Iterator[ServerSubject]:
    """The model behind a URL, with its request encoded. Raises `SetupError`, `UsageError`, `EngineError`."""
    token = read_token(config.token_file)
    target = parse_target(url, config.model, config.model_version)
    with contextlib.ExitStack() as stack:
        if target.interface == "http":
            stack.enter_context(raise_file_limit(config))
        target, model = read_model(target, token, config.ca_file)
        signature = model.signature
        if config.inputs is not None:
            given = read_feeds(config.inputs, signature, partial=True)
            check_given_shapes(given, config)
        else:
            given = {}
        own = {name: tuple(array.shape) for name, array in given.items()}
        shapes = shapes_of(signature, None, batch=config.batch, overrides=config.shapes | own)
        shapes = complete_shapes(signature, shapes, given)
        feeds: Tensors = random_feeds(signature, shapes, config.seed, given)
        origin = describe_inputs(signature, config.inputs, given, f"seeded random, seed {config.seed}")
        timeout_us = None if config.deadline_ms is None else round(config.deadline_ms * 1e3)
        if target.interface == "grpc":
            if config.binary is False:
                raise UsageError("gRPC has no JSON", hint="leave `--no-binary` out")
            if config.shared_memory:
                raise UsageError("`--shared-memory` is for HTTP, and this is gRPC", hint="the server's HTTP address")
            request = infer_request(target.model or "", target.version, signature, feeds, timeout_us=timeout_us)
        else:
            region = None
            if config.shared_memory:
                origin += ", in shared memory"
                region = stack.enter_context(register_inputs(target, token, config.ca_file, signature, feeds))
            binary = BINARY_EXTENSION in model.extensions if config.binary is None else config.binary
            request = http_request(
                target, signature, feeds, binary=binary, timeout_us=timeout_us, token=token, region=region
            )
        yield ServerSubject(target, model, feeds, origin, request, config.processes, token, config.ca_file)


def check_given_shapes(feeds: Tensors, config: LoadtestConfig) -> None:
    """`UsageError` where `--shapes` or `--batch` stands beside a file, which has them."""
    if config.batch is not None or any(name in feeds for name in config.shapes):
        flag = "--shapes" if config.shapes else "--batch"
        raise UsageError(f"`{flag}` is given, and `{config.inputs}` has the shapes", hint=f"leave `{flag}` out")


@contextlib.contextmanager
def engine_subject(
    engine: Engine | Path | str,
    config: LoadtestConfig,
    runtime: RuntimeConfig,
    build: BuildConfig,
    named: Container[str],
) -> Iterator[EngineSubject]:
    """An engine, or a model's from the store, loaded in this process."""
    measured = BenchConfig(batch=config.batch, shapes=config.shapes, inputs=config.inputs, seed=config.seed)
    opened = open_or_build(engine, measured, runtime, build, named)
    feeds, origin = feeds_for(opened, measured)
    kind, number = parse_device(runtime.device or opened.passport.device)
    deadline_ms = config.deadline_ms if runtime.batching is not None else None
    with load(opened, config=runtime) as runner:
        yield EngineSubject(
            str(opened.path), opened, runner, feeds, origin, deadline_ms, number if kind == "cuda" else None
        )


_OTHER_FILES = 64
"""Files that a process may open beside its connections and those that are open."""


@contextlib.contextmanager
def raise_file_limit(config: LoadtestConfig) -> Iterator[None]:
    """Raise the soft limit to the hard one while it is needed, for child processes too; `UsageError` beyond that one."""
    connections = -(-config.max_in_flight // config.processes)
    others = psutil.Process().num_fds() + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or connections + others <= soft:
        yield
        return
    if hard != resource.RLIM_INFINITY and connections + others > hard:
        flag = "--concurrency" if config.is_closed else "--connections"
        raise UsageError(
            f"{connections} connections of a process need {connections + others} open files, "
            f"the limit is {hard} (hard; soft: {soft})",
            hint=f"`{flag} {max(hard - others, 1) * config.processes}`, more `--processes`, "
            "or a higher hard limit of `RLIMIT_NOFILE` (`ulimit -n`)",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


_FOLDER = Path("/dev/shm")


@contextlib.contextmanager
def register_inputs(
    target: Target, token: str | None, ca_file: Path | None, signature: Signature, feeds: Tensors
) -> Iterator[InputRegion]:
    """A region with these inputs, unregistered and removed afterwards.

    Raises `SetupError` without shared memory, `UsageError` for a server that does not take it.
    """
    client = HttpMetadata(target, tls_context(target, ca_file), token, METADATA_TIMEOUT_S)
    raw = {spec.name: encode_tensor(feeds[spec.name], protocol_dtype(spec)) for spec in signature.inputs}
    spans, end = dict[str, tuple[int, int]](), 0
    for name, data in raw.items():
        spans[name] = (end, len(data))
        end += len(data)
    name = f"trt-engine-load-{os.getpid()}-{secrets.token_hex(4)}"
    path = _FOLDER / name
    try:
        with path.open("xb") as file:
            path.chmod(0o600)
            file.write(b"".join(raw.values()))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise SetupError(
            f"cannot write shared memory `{path}`: {error.strerror}", hint="leave `--shared-memory` out"
        ) from error
    try:
        client.change_region("register", name, key=f"/{name}", byte_size=end)
        try:
            yield InputRegion(name, spans)
        finally:
            with contextlib.suppress(TrtEngineError):  # the server may have ended
                client.change_region("unregister", name)
    finally:
        path.unlink(missing_ok=True)
