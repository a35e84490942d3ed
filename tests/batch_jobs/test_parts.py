"""Parts without Ray: each input row is one output row, in order, and a bad one has its reason."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

import trt_engine as te
from batch_jobs.conftest import ROWS, npy, shard
from trt_engine.atomic_io import encode_json
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.errors import UsageError
from trt_engine.verbs.batch.config import BatchConfig

pytestmark = pytest.mark.full
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("ray.data")

from trt_engine.verbs.batch import run as batch  # noqa: E402
from trt_engine.verbs.batch.part_runner import PartRunner, part_name  # noqa: E402

BAD = {
    "c.npy": "no header of an array", "d.parquet#6": "`x` is null", "d.parquet#7": "dimension 1 is fixed at 3",
    "e.tar#s2": "neither .npy nor .npz", "f.tar#1": "cut off",
}  # fmt: skip


def planned(engine: Path, inputs: Path, out: Path, **values: object) -> batch.BatchJob:
    return batch.plan(engine, [inputs], out, BatchConfig(**values), RuntimeConfig(), BuildConfig())  # type: ignore[arg-type]


@pytest.mark.parametrize("part_rows", [1, 7, 1000])
def test_every_row_of_every_kind_comes_out_once_and_in_order(
    engine: Path, inputs: Path, tmp_path: Path, part_rows: int
) -> None:
    out = tmp_path / "out"
    job = planned(engine, inputs, out, part_rows=part_rows)
    out.mkdir()
    runner = PartRunner(job.work)
    for part in job.parts:
        runner.run(part)
    rows = [row for part in job.parts for row in pq.read_table(out / part_name(part.index)).to_pylist()]
    assert [row["row"] for row in rows] == list(range(40))
    assert len({row["id"] for row in rows}) == 40
    assert {row["id"] for row in rows if row["error"]} == {*BAD}
    for row in rows:
        if row["id"] in BAD:
            assert BAD[row["id"]] in row["error"] and row["y"] is None
    got = {row["id"]: row["y"] for row in rows if not row["error"]}
    with te.load(engine) as plain:  # the loop that anybody would write
        for index in range(20):
            assert got[f"a.npy#{index}"] == plain.infer({"x": ROWS[index : index + 1]})["y"][0].tolist()
    schemas = {pq.read_schema(out / part_name(part.index)).to_string(show_schema_metadata=False) for part in job.parts}
    assert len(schemas) == 1  # also of a part whose rows all failed


def test_arrays_of_a_shard_have_the_limits_of_array_files(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = io.BytesIO()
    np.savez_compressed(packed, x=np.zeros((1000, 3), np.float32))
    pickled = io.BytesIO()
    np.save(pickled, np.array([{}], object), allow_pickle=True)
    samples = {"a.x.npy": npy(ROWS[0]), "b.npz": packed.getvalue(), "c.x.npy": pickled.getvalue()}
    shard(tmp_path / "s.tar", samples)
    monkeypatch.setenv("TRT_ENGINE_MAX_ARRAY_SIZE", "1KiB")
    job = planned(engine, tmp_path / "s.tar", tmp_path / "out")
    (tmp_path / "out").mkdir()
    PartRunner(job.work).run(job.parts[0])
    found = pq.read_table(tmp_path / "out" / part_name(0)).to_pydict()
    assert found["y"] == [(ROWS[0] * 2).tolist(), None, None]
    assert "has 12000 bytes in a file of" in found["error"][1] and "pickled objects" in found["error"][2]


def test_another_job_in_the_folder_is_refused_with_a_hint(engine: Path, inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = planned(engine, inputs, out)
    out.mkdir()
    batch._prepare(out, job)
    assert planned(engine, inputs, out).work.job == job.work.job
    assert planned(engine, inputs, out, workers=3).work.job == job.work.job  # who does it is not what is done
    with pytest.raises(UsageError, match="another job") as caught:
        planned(engine, inputs, out, batch=2)
    assert "--overwrite" in (caught.value.hint or "")
    np.save(inputs / "a.npy", ROWS + 1)
    with pytest.raises(UsageError, match="another job"):
        planned(engine, inputs, out)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file.txt").write_text("kept")
    with pytest.raises(UsageError, match="other files"):
        planned(engine, inputs, tmp_path / "mine")


def test_a_torn_journal_and_a_changed_part_are_done_again(engine: Path, inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = planned(engine, inputs, out, part_rows=10)
    out.mkdir()
    batch._prepare(out, job)
    runner = PartRunner(job.work)
    lines = [encode_json(runner.run(part)) for part in job.parts]
    (out / batch.JOURNAL).write_bytes(b"\n".join(lines[:3]) + b"\n" + lines[3][:20])
    (out / part_name(1)).write_bytes(b"changed")
    assert sorted(planned(engine, inputs, out, part_rows=10).done) == [0, 2]


@pytest.mark.parametrize("wrong", ["nowhere", "file.txt", "empty"])
def test_inputs_that_are_none_are_refused(engine: Path, tmp_path: Path, wrong: str) -> None:
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError):
        planned(engine, tmp_path / wrong, tmp_path / "out")
    assert not (tmp_path / "out").exists()
