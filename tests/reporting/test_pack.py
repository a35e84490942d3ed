"""An archive of a run: the same bytes for the same run, the same report from it, and no trust in anybody else's."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import sample_matrix
import sample_runs

import trt_engine as te
from trt_engine.errors import SetupError, UsageError
from trt_engine.reporting.pack import is_own_archive, pack, pack_run
from trt_engine.reporting.report import FORMATS, report
from trt_engine.run_folder import RunFiles, redact_home

RUNS = sample_runs.RUNS | sample_matrix.MATRICES


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    made = sample_matrix.everything(tmp_path / "run")
    (made / "nsight-systems").mkdir()
    (made / "nsight-systems" / "profile.nsys-rep").write_bytes(os.urandom(3000))
    return made


def names(archive: Path) -> list[str]:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as file:
            return file.namelist()
    with tarfile.open(archive) as file:
        return file.getnames()


# ------------------------------------------------------------------------------------------------ the same report


@pytest.mark.parametrize(
    ("name", "suffix"),
    [(name, (".tar.gz", ".zip", ".tgz")[at % 3]) for at, name in enumerate(RUNS)],
)
def test_the_report_of_an_archive_is_that_of_the_folder_byte_for_byte(tmp_path: Path, name: str, suffix: str) -> None:
    run = RUNS[name](tmp_path / "run")
    archive = pack(run, tmp_path / f"x{suffix}")
    for format in FORMATS:
        assert report(archive, format) == report(run, format)


def test_the_archive_is_enough_where_the_folder_is_gone_and_elsewhere(folder: Path, tmp_path: Path) -> None:
    before = {format: report(folder, format) for format in FORMATS}
    archive = pack(folder)
    folder.rename(tmp_path / "gone")
    (tmp_path / "far" / "away").mkdir(parents=True)
    moved = archive.rename(tmp_path / "far" / "away" / "x.tar.gz")
    assert {format: report(moved, format) for format in FORMATS} == before


def test_inspect_reads_an_archive_as_it_reads_the_folder(folder: Path) -> None:
    of_folder, of_archive = te.inspect(folder), te.inspect(pack(folder, engines=True))
    for name in ("kind", "verb", "complete", "summary", "measurements", "damaged"):
        assert getattr(of_archive, name) == getattr(of_folder, name)  # type: ignore[union-attr]
    assert "run.json" in of_archive.files and "run.json" in of_folder.files  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------ what is in it


@pytest.mark.parametrize("suffix", [".tar.gz", ".zip"])
def test_the_same_run_makes_the_same_bytes_whatever_the_clock_says(folder: Path, tmp_path: Path, suffix: str) -> None:
    first = pack(folder, tmp_path / f"a{suffix}").read_bytes()
    assert suffix == ".zip" or first[3:8] == bytes(5)  # gzip's own: no name, no time
    for path in folder.rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
        if path.is_file():
            path.chmod(0o600)
    assert pack(folder, tmp_path / f"b{suffix}").read_bytes() == first


def test_the_manifest_has_every_file_with_its_digest_and_says_how_to_read_it(folder: Path) -> None:
    archive = pack(folder)
    with tarfile.open(archive) as file:
        first, *members = file.getmembers()
        assert first.name == "run/pack.json"
        manifest = json.load(file.extractfile(first))  # type: ignore[arg-type]
        assert [member.name for member in members] == [f"run/{item['path']}" for item in manifest["files"]]
        for member, item in zip(members, manifest["files"], strict=True):
            raw = file.extractfile(member).read()  # type: ignore[union-attr]
            assert item["digest"] == f"sha256:{hashlib.sha256(raw).hexdigest()}" and item["nbytes"] == len(raw)
    assert manifest["holds"] == ["size", "run", "bench", "profile", "compare"]
    assert manifest["how_to_read"][0] == "trt-engine report ARCHIVE"
    assert manifest["versions"]["onnxruntime"] == "1.30.0"


def test_engines_come_when_asked_and_raw_profiles_stay_out_when_asked(folder: Path, tmp_path: Path) -> None:
    usual, lean = names(pack(folder)), names(pack(folder, tmp_path / "lean.tar.gz", raw=False))
    whole = names(pack(folder, tmp_path / "whole.tar.gz", engines=True))
    engine = "run/engines/digits-fp32-onnxruntime-b8.engine.onnx"
    raw = {"run/nsight-systems/profile.nsys-rep", "run/profile/timeline.json"}
    assert engine not in usual and engine in whole
    assert raw <= set(usual) and not raw & set(lean)
    left = pack_run(folder, tmp_path / "x.tar.gz", raw=False, dry_run=True).left_out
    assert {item.path: item.reason for item in left}["profile/timeline.json"].startswith("a raw profile")


def test_reports_in_the_archive_are_made_from_its_records(folder: Path) -> None:
    (folder / "report.html").write_text("an old one")
    with tarfile.open(pack(folder)) as file:
        page = file.extractfile("run/report.html").read().decode()  # type: ignore[union-attr]
    assert page == report(folder, "html")


def test_links_hidden_files_and_archives_stay_out_with_a_reason(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "linked").symlink_to(tmp_path)
    (folder / ".token").write_text("secret")
    (folder / "old.tar.gz").write_bytes(b"x")
    os.mkfifo(folder / "pipe")
    made = pack_run(folder)
    reasons = {item.path: item.reason for item in made.left_out}
    assert reasons["link.txt"] == reasons["linked"] == "a link"
    assert reasons[".token"] == "hidden" and reasons["old.tar.gz"] == "an archive itself"
    assert reasons["pipe"] == "not a plain file"
    with tarfile.open(made.archive) as file:
        assert all(member.isreg() for member in file.getmembers())
        assert b"secret" not in b"".join(file.extractfile(m).read() for m in file.getmembers()[1:])  # type: ignore[union-attr]


HOME, ROOTS = "/".join(("", "home", "alice")), "/" + "root"


def test_names_of_home_folders_and_environment_variables_are_not_in_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_never_in_an_archive")
    (folder / "logs" / "x.log").write_text(f"read {HOME}/model.onnx\nand {ROOTS}/.cache/x\n")
    made = pack_run(folder)
    assert "logs/x.log" in made.redacted
    with tarfile.open(made.archive) as file:
        everything = b"".join(file.extractfile(member).read() for member in file.getmembers())  # type: ignore[union-attr]
    assert b"alice" not in everything and b"hf_never" not in everything and str(tmp_path).encode() not in everything
    assert b"read ~/model.onnx\nand ~/.cache/x\n" in everything


@pytest.mark.parametrize(
    ("text", "clear"),
    [
        (b'"/home/alice/x"', b'"~/x"'),
        (b"/Users/bob", b"~"),
        (b"cd /root && ls", b"cd ~ && ls"),
        (b"data/home/alice/x", b"data/home/alice/x"),
        (b"https://host/home/alice", b"https://host/home/alice"),
        (b"/rooted/x /roots", b"/rooted/x /roots"),
        (b"~/x", b"~/x"),
    ],
)
def test_home_folders_become_a_tilde_and_nothing_else_does(text: bytes, clear: bytes) -> None:
    assert redact_home(text) == clear
    assert redact_home(clear) == clear


def test_a_file_that_changes_while_it_is_packed_leaves_no_archive(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trt_engine.reporting.pack as module

    raw, real = folder / "nsight-systems" / "profile.nsys-rep", module._write_archive

    def late(*args: object) -> None:
        raw.write_bytes(os.urandom(3000))
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_write_archive", late)
    with pytest.raises(SetupError, match="changed while it was packed"):
        pack(folder, tmp_path / "x.tar.gz")
    assert not list(tmp_path.glob("*x.tar.gz*"))


# ------------------------------------------------------------------------------------------------ foreign archives


def tarred(path: Path, *members: tuple[str, bytes | tarfile.TarInfo]) -> Path:
    with tarfile.open(path, "w:gz") as file:
        for name, data in members:
            info = data if isinstance(data, tarfile.TarInfo) else tarfile.TarInfo(name)
            raw = b"" if isinstance(data, tarfile.TarInfo) else data
            if not isinstance(data, tarfile.TarInfo):
                info.size = len(raw)
            file.addfile(info, io.BytesIO(raw))
    return path


def _link(kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo("run/size.json")
    info.type, info.linkname = kind, "/etc/passwd"
    return info


def _zip_link(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        info = zipfile.ZipInfo("run/size.json")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        file.writestr(info, "/etc/passwd")
    return path


def _bomb(path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file, file.open("run/zeros.bin", "w") as into:
        for _ in range(100):
            into.write(bytes(1 << 20))
    return path


def _tar_bomb(path: Path) -> Path:
    info = tarfile.TarInfo("run/zeros.bin")
    info.size = 1 << 40
    with gzip.open(path, "wb") as file:
        file.write(info.tobuf())
        file.write(bytes(1 << 20))
    return path


def _header_bomb(path: Path) -> Path:
    info = tarfile.TarInfo("long")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 36
    with gzip.open(path, "wb") as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.write(bytes(1 << 20))
    return path


def _filled(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


FOREIGN: dict[str, tuple[Callable[[Path], Path], str]] = {
    "up.tar.gz": (lambda p: tarred(p, ("run/../../evil", b"x")), "leads out"),
    "root.tar.gz": (lambda p: tarred(p, ("/etc/evil", b"x")), "leads out"),
    "symbolic.tar.gz": (lambda p: tarred(p, ("", _link(tarfile.SYMTYPE))), "a link or a device"),
    "hard.tar.gz": (lambda p: tarred(p, ("", _link(tarfile.LNKTYPE))), "a link or a device"),
    "device.tar.gz": (lambda p: tarred(p, ("", _link(tarfile.CHRTYPE))), "a link or a device"),
    "twice.tar.gz": (lambda p: tarred(p, ("run/size.json", b"{}"), ("run/size.json", b"[]")), "in it twice"),
    "nothing.tar.gz": (lambda p: tarred(p, ("a.txt", b"x"), ("b/c.txt", b"y")), "holds no run"),
    "link.zip": (_zip_link, "a link or a device"),
    "bomb.zip": (_bomb, "300 times its size"),
    "bomb.tar.gz": (_tar_bomb, "300 times its size"),
    "header.tar.gz": (_header_bomb, "is damaged"),
    "empty.tar.gz": (lambda p: _filled(p, b""), "is damaged"),
    "text.zip": (lambda p: _filled(p, b"hello"), "is damaged"),
}


@pytest.mark.parametrize("name", list(FOREIGN))
def test_an_archive_that_is_not_to_be_trusted_is_refused_and_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    make, told = FOREIGN[name]
    path = make(tmp_path / name)
    for read in (report, te.inspect):
        with pytest.raises(UsageError) as caught:
            read(path)
        assert told in caught.value.message and caught.value.hint
    assert [item.name for item in tmp_path.iterdir()] == [name]


def test_a_record_that_was_changed_in_the_archive_is_told_by_its_digest(folder: Path, tmp_path: Path) -> None:
    archive = pack(folder)
    with tarfile.open(archive) as file:
        members = [(m.name, file.extractfile(m).read()) for m in file.getmembers()]  # type: ignore[union-attr]
    changed = [(name, raw.replace(b'"batch":8', b'"batch":9') if "compare" in name else raw) for name, raw in members]
    with pytest.raises(UsageError, match=r"`compare.json` in .* is not what was packed"):
        report(tarred(tmp_path / "changed.tar.gz", *changed))


def test_an_archive_made_by_hand_of_a_run_folder_is_read_too(folder: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "hand.tar.gz", "w:gz") as file:
        file.add(folder, arcname="run")
    assert report(tmp_path / "hand.tar.gz", "html") == report(folder, "html")
    with zipfile.ZipFile(tmp_path / "flat.zip", "w") as flat:
        for path in folder.rglob("*.json*"):
            flat.write(path, path.relative_to(folder).as_posix())
    assert "29" in report(tmp_path / "flat.zip")


def test_archives_are_known_as_ours_and_others_are_not(folder: Path, tmp_path: Path) -> None:
    assert is_own_archive(pack(folder))
    assert not is_own_archive(tarred(tmp_path / "x.tar.gz", ("run/records.jsonl", b"")))
    assert RunFiles.open(pack(folder)).packed


def test_kernels_compiled_for_one_gpu_are_left_out_as_engines_are() -> None:
    from trt_engine.reporting import pack

    assert pack._file_kind("engines/m.engine.reference.npz") == "engine"
    assert (
        pack._file_kind("engines/m.engine.1.7.1.116-rtx-4090.runtime_cache")
        == pack._file_kind("engines/m.engine")
        == "engine"
    )
