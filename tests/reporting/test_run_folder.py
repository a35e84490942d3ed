"""What may lie in a run's folder, and what is said when it cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sample_runs

from trt_engine.errors import UsageError
from trt_engine.reporting.run_records import RunRecords


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return sample_runs.cpu_run(tmp_path / "run")


def test_a_run_has_what_size_said_and_every_sample(folder: Path) -> None:
    run = RunRecords.open(folder)
    assert run.size is not None and run.size.batches[-1].batch == 64
    assert run.command == "trt-engine size models/digits/model/digits.onnx --scan"
    assert [len(record.compute_ms) for record in run.measurements] == [1200, 140]
    assert run.complete


def test_keys_of_a_later_version_of_the_same_schema_are_passed_over(folder: Path) -> None:
    said = json.loads((folder / "size.json").read_text()) | {"colour_of_the_fan": "green"}
    (folder / "size.json").write_text(json.dumps(said))
    assert RunRecords.open(folder).size is not None


@pytest.mark.parametrize("kept", ["size.json", "records.jsonl"])
def test_either_file_alone_is_a_run(folder: Path, kept: str) -> None:
    for name in {"size.json", "records.jsonl"} - {kept}:
        (folder / name).unlink()
    run = RunRecords.open(folder)
    assert (run.size is None) == (kept == "records.jsonl")


def test_a_last_line_that_was_cut_off_is_skipped_and_said(folder: Path) -> None:
    whole = (folder / "records.jsonl").read_bytes()
    (folder / "records.jsonl").write_bytes(whole[:-200])
    run = RunRecords.open(folder)
    assert [record.batch for record in run.measurements] == [1]
    assert run.skipped == ("line 2 of records.jsonl is cut off and was skipped",)


def test_a_line_cut_off_in_the_middle_by_a_process_that_died_costs_only_itself(folder: Path) -> None:
    first, second, _ = (folder / "records.jsonl").read_bytes().split(b"\n")
    (folder / "records.jsonl").write_bytes(b"\n".join([first, first[:100], second, b""]))
    run = RunRecords.open(folder)
    assert len(run.measurements) == 2
    assert run.skipped == ("line 2 of records.jsonl is cut off and was skipped",)


def _empty_size(folder: Path) -> None:
    (folder / "size.json").write_bytes(b" \n")


def _half_size(folder: Path) -> None:
    raw = (folder / "size.json").read_bytes()
    (folder / "size.json").write_bytes(raw[: len(raw) // 2])


def _random_size(folder: Path) -> None:
    (folder / "size.json").write_bytes(bytes(range(256)))


def _list_size(folder: Path) -> None:
    (folder / "size.json").write_bytes(b"[1, 2]")


def _other_schema(folder: Path) -> None:
    (folder / "size.json").write_bytes(b'{"schema": "trt-engine/error"}')


def _missing_key(folder: Path) -> None:
    (folder / "size.json").write_bytes(b'{"schema": "trt-engine/size", "model": "x"}')


def _later_version(folder: Path) -> None:
    said = json.loads((folder / "size.json").read_text()) | {"schema_version": 99}
    (folder / "size.json").write_text(json.dumps(said))


def _damaged_middle(folder: Path) -> None:
    lines = (folder / "records.jsonl").read_bytes().split(b"\n")
    (folder / "records.jsonl").write_bytes(b"\n".join([b"not json at all", *lines[1:]]))


def _foreign_line(folder: Path) -> None:
    (folder / "records.jsonl").write_bytes(b'{"hello": 1}\n')


def _nothing_but_a_cut_line(folder: Path) -> None:
    (folder / "size.json").unlink()
    (folder / "records.jsonl").write_bytes(b'{"engine": "x')


def _empty_records_alone(folder: Path) -> None:
    (folder / "size.json").unlink()
    (folder / "records.jsonl").write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_empty_size, "is empty"),
        (_half_size, "is damaged"),
        (_random_size, "is damaged"),
        (_list_size, "is `list`, expected `trt-engine/size`"),
        (_other_schema, "is `trt-engine/error`, expected `trt-engine/size`"),
        (_missing_key, "is not what `size` writes"),
        (_later_version, "has schema version 99"),
        (_damaged_middle, "line 1 of"),
        (_foreign_line, "line 1 of"),
        (_nothing_but_a_cut_line, "holds no complete record: line 1"),
        (_empty_records_alone, "holds no complete record"),
    ],
)
def test_damaged_records_are_named_with_what_to_do(folder: Path, damage, said: str) -> None:  # type: ignore[no-untyped-def]
    damage(folder)
    with pytest.raises(UsageError) as caught:
        RunRecords.open(folder)
    assert said in caught.value.message
    assert caught.value.hint


def test_a_folder_without_records_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"is not a run folder: it has none of `size.json`, `records.jsonl`, `run.json`"
    ):
        RunRecords.open(tmp_path)


def test_a_missing_folder_and_a_file_are_told_apart(folder: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        RunRecords.open(folder / "nowhere")
    with pytest.raises(UsageError, match="is a file, expected the folder of a run") as caught:
        RunRecords.open(folder / "size.json")
    assert str(folder) in (caught.value.hint or "")
