"""`cache`: what is in the store, and nothing goes that nobody named."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from trt_engine.cli.main import run
from trt_engine.engine import Engine, payload_files
from trt_engine.environment import Environment
from trt_engine.records.passport import BuildInfo, Passport, Precision, Requirements, Source
from trt_engine.store import Store
from trt_engine.tensors import Signature

DAY = 86400


def key_of(name: str) -> str:
    return name.encode().hex().ljust(32, "0")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store of three engines of 2 MiB, last used now, 10 and 40 days ago."""
    monkeypatch.setenv("TRT_ENGINE_STORE", str(tmp_path / "store"))
    store = Store()
    for name, days in (("new", 0), ("middle", 10), ("old", 40)):

        def build(folder: Path, name: str = name) -> Engine:
            payload = folder / f"{name}.engine"
            payload.write_bytes(bytes(2 << 20))
            return Engine.seal(
                payload,
                Passport(
                    schema="trt-engine/passport",
                    schema_version=1,
                    backend="fake",
                    payload=payload_files(payload),
                    model=Source(f"net-{name}", "sha256:0", 17, "net.onnx"),
                    signature=Signature((), ()),
                    profiles=(),
                    precision=Precision(None),
                    device="cpu",
                    build=BuildInfo("trt-engine build net.onnx", {}, 1.0, "fake"),
                    environment=Environment.detect(),
                    requirements=Requirements("fake", "1"),
                    key=key_of(name),
                ),
            )

        engine, _ = store.get_or_build(key_of(name), build)
        used = time.time() - days * DAY
        os.utime(engine.path.with_name(f"{name}.engine.json"), (used, used))
    return store


def names(store: Store) -> list[str]:
    return [entry.model for entry in store.entries()]


def cache(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["trt-engine", "cache", *args])
    return run()


def test_the_list_says_where_the_store_is_and_shows_the_last_used_first(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cache(monkeypatch, "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"store: {store.folder} (`TRT_ENGINE_STORE` names another)"
    assert [line.split()[1] for line in lines[2:5]] == ["net-new", "net-middle", "net-old"]
    assert lines[-1] == "3 engines, 6.0 MiB"


def test_the_list_is_one_json_document(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cache(monkeypatch, "list", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["action"], told["folder"]) == ("trt-engine/cache", "list", str(store.folder))
    assert [item["model"] for item in told["engines"]] == ["net-new", "net-middle", "net-old"]
    assert told["nbytes"] == 3 * (2 << 20)
    assert all(Path(item["path"]).exists() for item in told["engines"])


@pytest.mark.parametrize(
    ("args", "left"),
    [
        (["--max-size", "4MiB"], ["net-new", "net-middle"]),
        (["--max-size", "1K"], []),
        (["--max-size", "1GiB"], ["net-new", "net-middle", "net-old"]),
        (["--older-than", "30d"], ["net-new", "net-middle"]),
        (["--older-than", "12h"], ["net-new"]),
        (["--older-than", "30d", "--max-size", "2M"], ["net-new"]),
        (["--all"], []),
    ],
)
def test_pruning_removes_what_was_named_least_recently_used_first(
    store: Store, args: list[str], left: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cache(monkeypatch, "prune", *args, "--dry-run", "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert len(names(store)) == 3, "a dry run removes nothing"
    assert [item["model"] for item in planned["engines"]] == left
    assert planned["dry_run"] is True
    assert cache(monkeypatch, "prune", *args, "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert names(store) == left
    assert done["removed"] == planned["removed"] and done["removed_bytes"] == (3 - len(left)) * (2 << 20)


def test_pruning_says_what_it_removed_and_what_is_left(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache(monkeypatch, "prune", "--older-than", "30d", "--dry-run")
    assert capsys.readouterr().out.endswith("would remove 1 engine, 2.0 MiB; 2 engines, 4.0 MiB would be left\n")
    cache(monkeypatch, "prune", "--older-than", "30d")
    assert capsys.readouterr().out.endswith("removed 1 engine, 2.0 MiB; 2 engines, 4.0 MiB are left\n")
    cache(monkeypatch, "prune", "--older-than", "30d")
    assert capsys.readouterr().out.endswith("nothing to remove; 2 engines, 4.0 MiB in the store\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no engines to remove are selected"),
        (["--dry-run"], "no engines to remove are selected"),
        (["--all", "--older-than", "1d"], "`--all` leaves nothing for `--max-size` or `--older-than`"),
        (["--max-size", "much"], "cannot read the size `much`"),
        (["--older-than", "1 month"], "cannot read the duration `1 month`"),
    ],
)
def test_pruning_without_a_readable_criterion_removes_nothing_and_says_what_to_give(
    store: Store, args: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cache(monkeypatch, "prune", *args) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}\nhint: ")
    assert len(names(store)) == 3


@pytest.mark.parametrize("action", ["list", "prune"])
def test_a_store_that_cannot_be_used_is_said_with_what_names_another(
    action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("TRT_ENGINE_STORE", str(tmp_path / "file"))
    assert run(["cache", action, *(["--all"] if action == "prune" else [])]) == 3
    told = capsys.readouterr().err
    assert str(tmp_path / "file") in told and "hint: name another place with `TRT_ENGINE_STORE`" in told
