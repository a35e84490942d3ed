"""One part of a batch job: its rows read, run and decoded, and written as one Parquet file."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trt_engine.atomic_io import file_digest, write_atomic
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine, is_onnx_model
from trt_engine.errors import MemoryExhausted, ModelError, SetupError, TrtEngineError, UsageError
from trt_engine.graph.load import open_model
from trt_engine.records.batch import FailedRow
from trt_engine.runtime.feeds import numpy_dtype
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.tensors import Signature, TensorSpec
from trt_engine.verbs.batch.config import BatchConfig
from trt_engine.verbs.batch.sources import BAD_DATA, Part, Row, as_row, read_rows, reason_of
from trt_engine.verbs.build.run import build as build_engine
from trt_engine.verbs.load import build_for_runtime, load
from trt_engine.vision.spec import Vision

DEFAULT_BATCH = 8
_SHOWN_FAILURES = 20
_BOX = pa.struct([
    ("index", pa.int32()), ("name", pa.string()), ("score", pa.float64()), ("box_xyxy", pa.list_(pa.float64())),
])  # fmt: skip


@dataclass(frozen=True, slots=True)
class Work:
    """What every worker of a job needs."""

    path: str
    """The engine, or the model that each node builds into its store."""
    out: str
    job: str
    config: BatchConfig
    runtime: RuntimeConfig
    build: BuildConfig
    vision: Vision | None


@dataclass(frozen=True, slots=True)
class PartResult:
    """What the journal holds of a finished part."""

    index: int
    rows: int
    failed: int
    digest: str
    failures: tuple[FailedRow, ...]


def part_name(index: int) -> str:
    """File of a part; in the order of the rows when sorted."""
    return f"part-{index:06d}.parquet"


def signature_of(path: Path) -> Signature:
    """Inputs and outputs of an engine or a model; `UsageError` where the first axis of an input is not the rows."""
    found = open_model(path).signature if is_onnx_model(path) else Engine.open(path).signature
    for spec in found.inputs:
        if not spec.shape:
            raise UsageError(
                f"input `{spec.name}` has no axis of rows", hint="`batch` runs engines whose first axis is"
            )
    return found


class PartRunner:
    """An engine over parts. The engine is loaded with the first part; a model's is built here first."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._runner: InferenceEngine | None = None
        self._size = 0

    def run(self, part: Part) -> PartResult:
        """Write the part's file; each of its rows is in it once. Raises for what is not the fault of a row."""
        runner = self._open()
        rows = [row for item in part.ranges for row in read_rows(item, runner.signature.inputs)]
        assert len(rows) == part.rows
        cells: list[dict[str, Any]] = []
        for start in range(0, len(rows), self._size):
            cells += self._run_rows(runner, rows[start : start + self._size])
        data = self._encode(runner, rows, cells, part)
        target = write_atomic(Path(self._work.out) / part_name(part.index), data)
        bad = [FailedRow(row.id, row.error) for row in rows if row.error is not None]
        return PartResult(part.index, len(rows), len(bad), file_digest(target), tuple(bad[:_SHOWN_FAILURES]))

    def _open(self) -> InferenceEngine:
        if self._runner is None:
            work, wanted = self._work, self._work.config.batch
            engine: Engine | Path = Path(work.path)
            if is_onnx_model(work.path):
                config = work.build
                size = wanted or DEFAULT_BATCH
                dynamic = open_model(Path(work.path)).signature.batch_axis
                if dynamic and not config.profiles and config.batch is None and not config.shapes:
                    config = dataclasses.replace(config, batch=(1, size, size))
                engine = build_engine(work.path, config=build_for_runtime(config, work.runtime))
            runner = load(engine, config=work.runtime)
            self._size = _batch_size(runner, wanted)
            self._runner = runner
        return self._runner

    def _run_rows(self, runner: InferenceEngine, rows: list[Row]) -> list[dict[str, Any]]:
        """The output cells of up to one batch of rows; a row that fails gets its error, the others their outputs."""
        cells: list[dict[str, Any]] = [{} for _ in rows]
        placements: dict[int, Any] = {}
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, row in enumerate(rows):
            if row.error is None:
                try:
                    if row.image is not None:
                        placements[index] = self._preprocess(runner, row)
                    row.feeds = _check_row(row.feeds or {}, runner.signature.inputs)
                    groups.setdefault(tuple(value.shape for value in row.feeds.values()), []).append(index)
                except BAD_DATA as error:
                    row.error = reason_of(error)
        for members in groups.values():
            for index, outputs in self._infer(runner, rows, members):
                try:
                    cells[index] = self._decode(outputs, placements.get(index))
                except BAD_DATA as error:
                    rows[index].error = reason_of(error)
        for row in rows:
            row.feeds = row.image = None  # a part's rows are held to its end, their inputs are not
        return cells

    def _preprocess(self, runner: InferenceEngine, row: Row) -> Any:
        from trt_engine.vision.image_inference import ImageRunner
        from trt_engine.vision.preprocess import BadImage, Preprocessor, read_image

        vision = self._work.vision
        if vision is None:
            raise ValueError("an image, and the engine does not declare how images become its inputs")
        if len(runner.signature.inputs) > 1:
            raise ValueError(f"the engine has {len(runner.signature.inputs)} inputs, an image fills one")
        spec, output = vision.input_spec(runner.signature), vision.output_spec(runner.signature)
        try:
            image = read_image(row.image or b"")
        except BadImage as error:
            raise ValueError(f"not a readable image: {error}") from error
        pixels, place = Preprocessor(vision.preprocess, spec.dtype)(image)
        row.feeds = {spec.name: pixels}
        return ImageRunner(image, vision, {}, place, output.name)

    def _infer(
        self, runner: InferenceEngine, rows: list[Row], members: list[int]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Outputs by row. Rows that fail together run alone, and the failing ones get the error."""
        fixed = runner.signature.inputs[0].shape[0]
        padded = members + [members[-1]] * max(fixed - len(members), 0)
        chosen = [rows[index].feeds or {} for index in padded]
        try:
            feeds = {spec.name: np.stack([one[spec.name] for one in chosen]) for spec in runner.signature.inputs}
            outputs = {name: np.asarray(value) for name, value in runner.infer(feeds).items()}
        except (SetupError, MemoryExhausted):
            raise
        except (TrtEngineError, ValueError) as error:
            if len(members) == 1:
                rows[members[0]].error = reason_of(error)
            else:
                for index in members:
                    yield from self._infer(runner, rows, [index])
            return
        for name, value in outputs.items():
            if value.ndim == 0 or len(value) != len(padded):
                raise ModelError(
                    f"output `{name}` is {value.shape} for {len(padded)} rows: its first axis is not the rows",
                    hint="`batch` runs engines with one output row for each input row",
                )
        for position, index in enumerate(members):
            yield index, {name: value[position] for name, value in outputs.items()}

    def _decode(self, outputs: dict[str, Any], image: Any) -> dict[str, Any]:
        if image is None or self._work.config.raw:
            return outputs
        one = {name: value[None] for name, value in outputs.items()}
        fields = image.decode(one, self._work.config.min_score, self._work.config.top).fields
        found = fields.get("detections", fields.get("classes", ()))
        return {"results": [
            {"index": item.index, "name": item.name, "score": item.score,
             "box_xyxy": list(item.box) if item.box else None}
            for item in found
        ]}  # fmt: skip

    def _encode(self, runner: InferenceEngine, rows: list[Row], cells: list[dict[str, Any]], part: Part) -> bytes:
        columns: dict[str, Any] = {
            "row": pa.array(range(part.first_row, part.first_row + len(rows)), pa.int64()),
            "id": pa.array([row.id for row in rows], pa.string()),
            "error": pa.array([row.error for row in rows], pa.string()),
        }
        if self._work.vision is not None and not self._work.config.raw:
            columns["results"] = pa.array([cell.get("results") for cell in cells], pa.list_(_BOX))
        for spec in runner.signature.outputs:
            values = [cell.get(spec.name) for cell in cells]
            columns[spec.name] = _list_column(values, spec)
            columns[f"{spec.name}.shape"] = pa.array(
                [None if value is None else list(value.shape) for value in values], pa.list_(pa.int64())
            )
        table = pa.table(columns).replace_schema_metadata({"trt_engine.job": self._work.job})
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="zstd")
        return buffer.getvalue()


def _batch_size(runner: InferenceEngine, wanted: int | None) -> int:
    spec = runner.signature.inputs[0]
    spans = [profile.ranges[spec.name] for profile in runner.profiles if spec.name in profile.ranges]
    low, high = (1, wanted or DEFAULT_BATCH) if not spans else (spans[0].min[0], max(span.max[0] for span in spans))
    if spec.shape[0] >= 0:
        low = high = spec.shape[0]
    if (reason := runner.signature.row_dependence) is not None:
        if low > 1 or (wanted or 1) > 1:
            raise UsageError(
                f"`{runner.engine.path.name}` cannot run several rows at once: {reason}",
                hint="leave `--batch` out: one row at a time" if low <= 1 else "build it for a batch of 1",
            )
        high = 1
    size = wanted or (high if low == high else max(low, min(DEFAULT_BATCH, high)))
    if not low <= size <= high:
        raise UsageError(f"the batch is {size}, `{runner.engine.path.name}` takes {low} to {high}")
    return size


def _check_row(feeds: dict[str, Any], specs: Sequence[TensorSpec]) -> dict[str, Any]:
    """The row's arrays in the engine's order and dtypes; `ValueError` where one is missing or does not fit."""
    unnamed = feeds.get("")
    made = {}
    for spec in specs:
        value = feeds.get(spec.name, unnamed if len(specs) == 1 else None)
        if value is None:
            raise ValueError(f"no array for input `{spec.name}`")
        value = as_row(np.asarray(value), spec)
        spec.check(value[None] if spec.shape[0] < 0 else np.broadcast_to(value, (spec.shape[0], *value.shape)))
        made[spec.name] = value
    return made


def _list_column(values: list[Any], spec: TensorSpec) -> Any:
    """A column of flat lists, null where a row has none; types that Arrow does not have become float32."""
    kind = numpy_dtype(spec.dtype) if spec.dtype != "string" else None
    if kind is None:
        return pa.array(
            [None if value is None else [str(one) for one in np.asarray(value).ravel()] for value in values],
            pa.list_(pa.string()),
        )
    try:
        arrow = pa.from_numpy_dtype(kind)
    except (pa.ArrowException, TypeError):
        kind, arrow = np.dtype(np.float32), pa.float32()
    flat = [np.asarray(value).astype(kind, copy=False).ravel() for value in values if value is not None]
    lengths = [0 if value is None else int(np.asarray(value).size) for value in values]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
    items = pa.array(np.concatenate(flat) if flat else np.empty(0, kind), arrow)
    mask = pa.array([value is None for value in values])
    return pa.LargeListArray.from_arrays(offsets, items, mask=mask)
