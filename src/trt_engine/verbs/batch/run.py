"""`te.batch`: an engine over many rows, resumable, one output row for each input row."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pickle
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from trt_engine import atomic_io
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine, engine_argument, is_onnx_model
from trt_engine.errors import FeedError, SetupError, TrtEngineError, UsageError
from trt_engine.format import library_reason
from trt_engine.public_function import public_function
from trt_engine.records.base import write_document
from trt_engine.records.batch import BatchReport
from trt_engine.records.dry_run import DryRun
from trt_engine.verbs.batch.config import BatchConfig
from trt_engine.verbs.evaluate.run import resolve_spec
from trt_engine.verbs.load import merge_run_settings
from trt_engine.vision.spec import vision_of

if TYPE_CHECKING:
    from trt_engine.verbs.batch.part_runner import PartResult, Work
    from trt_engine.verbs.batch.sources import InputFile, Part, Parts
    from trt_engine.verbs.settings_types import BatchSettings

log = logging.getLogger(__name__)

JOB, JOURNAL, REPORT = "job.json", "journal.jsonl", "batch.json"
_STORE_BYTES = 128 << 20  # parts travel as paths and digests: Ray's object store holds next to nothing

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "120000",  # on a loaded machine its helpers need more than the usual 15 s
    "RAY_raylet_start_wait_time_s": "120",
}


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A validated request: its parts, and which of them an earlier run finished."""

    work: Work
    files: list[InputFile]
    parts: Parts
    done: dict[int, PartResult]

    @property
    def plan(self) -> DryRun:
        parts = f"{len(self.parts)} parts, {len(self.done)} done before"
        return DryRun(
            does=f"run {self.work.path} over {self.parts.rows} rows of {len(self.files)} files in {parts}",
            builds=(self.work.path,) if is_onnx_model(self.work.path) else (),
            writes=(self.work.out,),
        )


@public_function
def batch(
    engine: Engine | Path | str,
    inputs: Path | str | Sequence[Path | str],
    out: Path | str,
    *,
    config: BatchConfig | None = None,
    runtime: RuntimeConfig | None = None,
    build: BuildConfig | None = None,
    **values: Unpack[BatchSettings],
) -> BatchReport:
    """Run an engine over the rows of `inputs` into Parquet files in the folder `out`, through Ray Data.

    `inputs` are images, `.npy`, `.npz`, Parquet, WebDataset shards, or folders of them. Each input row is one output row: an
    id, outputs (or detections, classes of an image) and an error. The same call resumes what was interrupted; a model is
    built where the workers are. `values` are settings of `BatchConfig`, `RuntimeConfig` and (for a model) `BuildConfig`.
    Raises `UsageError` for a folder with another job, `SetupError` without Ray. Failed rows do not raise: see the report.
    """
    engine = engine_argument(engine, "engine")
    given = atomic_io.as_list(inputs, "`inputs`")
    paths = [atomic_io.as_path(item, "`inputs`") for item in given]
    return run(
        plan(
            engine,
            paths,
            atomic_io.as_path(out, "`out`"),
            *merge_run_settings(values, runtime, build, config or BatchConfig()),
        )
    )


def plan(
    engine: Engine | Path | str,
    inputs: Sequence[Path],
    out: Path,
    config: BatchConfig,
    runtime: RuntimeConfig,
    build: BuildConfig,
) -> BatchJob:
    """Validate the request, list its rows, and see what is done; writes nothing."""
    try:
        import pyarrow  # noqa: F401
        import ray.data  # noqa: F401

        from trt_engine.verbs.batch.part_runner import Work, signature_of
        from trt_engine.verbs.batch.sources import Parts, list_files
    except ImportError as error:
        raise SetupError(
            f"`batch` needs `{error.name}`, which is not installed", hint="`pip install 'trt-engine[ray]'`"
        ) from error
    path = engine.path if isinstance(engine, Engine) else Path(engine)
    signature = signature_of(path)
    if not is_onnx_model(path):
        Engine.open(path).verify()
    files = list_files(inputs, signature.inputs)
    images = any(file.kind == "image" for file in files)
    vision = resolve_spec(path, config.preprocess) if images or config.preprocess is not None else vision_of(path)
    what = {
        "engine": atomic_io.file_digest(path), "vision": vision.as_dict() if vision else None, "runtime": repr(runtime),
        "build": repr(build) if is_onnx_model(path) else "", "inputs": [[f.name, f.rows, f.digest] for f in files],
        "settings": [config.batch, config.part_rows, config.raw, config.min_score, config.top],
    }  # fmt: skip
    identity = "sha256:" + hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()
    work = Work(str(path.absolute()), str(out.absolute()), identity, config, runtime, build, vision)
    parts = Parts(files, config.part_rows)
    return BatchJob(work, files, parts, _done_parts(out, identity, parts, config.overwrite))


def _done_parts(out: Path, identity: str, parts: Sequence[Part], overwrite: bool) -> dict[int, PartResult]:
    """Parts of this job in the journal whose files are as they were written. `UsageError` for another job's folder."""
    from trt_engine.verbs.batch.part_runner import PartResult, part_name

    if not os.path.lexists(out):
        return {}
    if not out.is_dir():
        raise UsageError(f"`{out}` is not a folder", hint="name another one, as `-o results`")
    present = [item for item in out.iterdir() if not item.name.startswith(".")]
    if not (out / JOB).exists():
        if present:
            raise UsageError(f"`{out}` has other files in it", hint="name an empty or new folder")
        return {}
    if atomic_io.decode_json(atomic_io.read_bounded(out / JOB)).get("job") != identity:
        if overwrite:
            return {}
        raise UsageError(
            f"`{out}` holds another job: the engine, a setting or an input differs",
            hint="`--overwrite` starts again from nothing, or name another folder",
        )
    found: dict[int, PartResult] = {}
    lines: list[bytes] = []
    if (out / JOURNAL).exists():
        with atomic_io.open_regular(out / JOURNAL) as journal:
            lines = journal.read().splitlines()
    for line in lines:
        with contextlib.suppress(Exception):  # the last line may be half of one
            one = atomic_io.decode_json(line, PartResult)
            file = out / part_name(one.index)
            if one.index < len(parts) and file.is_file() and atomic_io.file_digest(file) == one.digest:
                found[one.index] = one
    return found


def run(job: BatchJob, *, command: str = "") -> BatchReport:
    """Run the parts that are not done, and write the report. An interruption leaves what is done."""
    out = atomic_io.ensure_folder(Path(job.work.out))
    busy = SetupError(f"another process runs a job in `{out}`", hint="wait for it, or name another folder")
    with atomic_io.file_lock(out / ".lock", busy=busy):
        _prepare(out, job)
        done, pending = dict(job.done), [part for part in job.parts if part.index not in job.done]
        workers = nodes = 0
        seconds = 0.0
        if pending:
            with _ray(job.work.config) as ray, (out / JOURNAL).open("ab") as journal:
                workers, nodes = _worker_count(ray, job), _node_count(ray)
                log.info("%d of %d parts are to be done, by %d workers", len(pending), len(job.parts), workers)
                started = time.perf_counter()
                for result in _run_parts(ray, job.work, pending, workers):
                    done[result.index] = result
                    with atomic_io.os_errors(out):
                        journal.write(atomic_io.encode_json(result) + b"\n")
                        journal.flush()
                        os.fsync(journal.fileno())
                    log.info("%d of %d parts", len(done), len(job.parts))
                seconds = time.perf_counter() - started
        report = _report(job, done, workers, nodes, seconds, sum(part.rows for part in pending))
        write_document(out / REPORT, "batch", report, command=command)
        return report


def _prepare(out: Path, job: BatchJob) -> None:
    """Write which job the folder holds; of another one, remove the results first: whenever it is killed, it is a job's."""
    path = out / JOB
    if path.exists() and atomic_io.decode_json(atomic_io.read_bounded(path)).get("job") == job.work.job:
        if (out / JOURNAL).exists():
            with (out / JOURNAL).open("ab") as journal:
                journal.write(b"\n")  # the last line may be half of one
        return
    for name in (JOURNAL, REPORT, "part-*.parquet"):
        for old in out.glob(name):
            old.unlink()
    atomic_io.write_json(path, {"job": job.work.job, "engine": job.work.path, "parts": len(job.parts)})


def _run_parts(ray: Any, work: Work, pending: Sequence[Part], workers: int) -> Iterator[PartResult]:
    """Finished parts, in the order in which they finish."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray").setLevel(logging.ERROR)  # what it reports of each step is in its own log
    items = [{"part": pickle.dumps(part)} for part in pending]
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        PartTask, fn_constructor_args=(work,), batch_size=None, zero_copy_batch=True,
        compute=ray.data.ActorPoolStrategy(size=workers), num_cpus=1, num_gpus=1 if _on_gpu(work) else None,
    )  # fmt: skip
    for row in dataset.iter_rows():
        result = pickle.loads(row["result"])  # written by our own workers
        if isinstance(result, TrtEngineError):
            raise result
        yield result


class PartTask:
    """What Ray Data calls in its actors: parts in, results out."""

    def __init__(self, work: Work) -> None:
        from trt_engine.verbs.batch.part_runner import PartRunner

        self._runner = PartRunner(work)

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        found: list[bytes] = []
        for raw in block["part"]:
            try:
                found.append(pickle.dumps(self._runner.run(pickle.loads(bytes(raw)))))
            except TrtEngineError as error:  # as it is: Ray would wrap it
                found.append(pickle.dumps(error))
        return {"result": found}


def _on_gpu(work: Work) -> bool:
    if work.runtime.device:
        return work.runtime.device != "cpu"
    return not is_onnx_model(work.path) and Engine.open(Path(work.path)).passport.device != "cpu"


def _worker_count(ray: Any, job: BatchJob) -> int:
    wanted = job.work.config.workers
    if wanted is None:
        wanted = int(ray.cluster_resources().get("GPU", 0)) if _on_gpu(job.work) else _node_count(ray)
    return max(1, min(wanted, len(job.parts) - len(job.done)))


def _node_count(ray: Any) -> int:
    return sum(1 for node in ray.nodes() if node["Alive"])


@contextlib.contextmanager
def _ray(config: BatchConfig) -> Iterator[Any]:
    """Ray: as it is where the caller has started it, connected to the address, or of this call alone and ended with it."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray
    import ray.data

    if ray.is_initialized():
        yield ray
        return
    stack = contextlib.ExitStack()
    try:
        if config.address is not None:
            ray.init(address=config.address, log_to_driver=False, configure_logging=False)
        else:
            folder = stack.enter_context(
                atomic_io.staging_folder(Path(tempfile.gettempdir(), "ray"))
            )  # those of killed runs go
            ray.init(
                num_cpus=max(os.cpu_count() or 1, (config.workers or 1) + 1), include_dashboard=False, log_to_driver=False,
                configure_logging=False, object_store_memory=_STORE_BYTES, _temp_dir=str(folder),
            )  # fmt: skip
        yield ray
    except (ConnectionError, RuntimeError) as error:
        if ray.is_initialized():
            raise
        raise SetupError(
            f"Ray cannot be reached: {library_reason(error, whole=True)}",
            hint="`ray status` shows a running cluster",
        ) from error
    finally:
        ray.shutdown()
        stack.close()


def _report(
    job: BatchJob, done: dict[int, PartResult], workers: int, nodes: int, seconds: float, rows_now: int
) -> BatchReport:
    results = [done[part.index] for part in job.parts]
    return BatchReport(
        engine=job.work.path,
        out=job.work.out,
        job=job.work.job,
        files=len(job.files),
        rows=sum(item.rows for item in results),
        failed=sum(item.failed for item in results),
        parts=len(results),
        resumed_parts=len(job.done),
        workers=workers,
        nodes=nodes,
        seconds=seconds,
        rows_per_s=rows_now / seconds if seconds else None,
        failures=tuple(failure for item in results for failure in item.failures)[:20],
    )


def gate(report: BatchReport) -> None:
    """`FeedError` when rows failed: everything else is written."""
    if report.failed:
        first = report.failures[0]
        raise FeedError(
            f"{report.failed} of {report.rows} rows failed, first `{first.id}`: {first.reason}",
            hint="the column `error` has the reason of each; the other rows are complete",
        )
