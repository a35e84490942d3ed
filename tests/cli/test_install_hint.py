"""Commands that install an extra are for where this package came from;
a hint names an option of the verb that was meant, or none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from trt_engine.cli.main import run
from trt_engine.installed_from import installable

HINT = "`pip install 'trt-engine[eval]'`, or `pip install \"trt-engine[torch,simplify]\"`"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`installed(url, ...)`: the first distribution of this name says that it came from there."""

    def say(text: str | None) -> None:
        place = tmp_path / "site" / "trt_engine-1.dist-info"
        place.mkdir(parents=True, exist_ok=True)
        (place / "METADATA").write_text("Metadata-Version: 2.1\nName: trt-engine\nVersion: 1\n")
        (place / "direct_url.json").unlink(missing_ok=True)
        if text is not None:
            (place / "direct_url.json").write_text(text)
        monkeypatch.syspath_prepend(str(place.parent))
        assert metadata.distribution("trt-engine").version == "1"

    return say


def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "my work" / "trt-engine"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    return folder


@pytest.mark.parametrize("editable", [True, False])
def test_from_a_checkout_its_folder_is_named(
    installed: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, editable: bool
) -> None:
    folder = checkout(tmp_path)
    installed(json.dumps({"url": folder.as_uri(), "dir_info": {"editable": editable}}))
    assert installable(HINT) == f"`pip install '{folder}[eval]'`, or `pip install \"{folder}[torch,simplify]\"`"
    monkeypatch.chdir(folder)
    assert installable(HINT) == "`pip install '.[eval]'`, or `pip install \".[torch,simplify]\"`"


@pytest.mark.parametrize(
    "told",
    [
        None, "{}", "no json", '{"url": "file:///nowhere/trt_engine.whl", "archive_info": {}}',
        '{"url": "https://example.org/trt-engine.whl", "archive_info": {}}',
        '{"url": "file:///nowhere/at/all", "dir_info": {}}', '{"dir_info": {}}', "[]",
    ],
)  # fmt: skip
def test_from_elsewhere_the_name_is_left(installed: Callable[..., None], told: str | None) -> None:
    installed(told)
    assert installable(HINT) == HINT


def test_from_a_wheel_its_file_is_named_and_from_a_repository_its_address(
    installed: Callable[..., None], tmp_path: Path
) -> None:
    wheel = tmp_path / "trt_engine-1-py3-none-any.whl"
    wheel.touch()
    installed(json.dumps({"url": wheel.as_uri(), "archive_info": {}}))
    assert installable(HINT) == f"`pip install '{wheel}[eval]'`, or `pip install \"{wheel}[torch,simplify]\"`"
    installed(json.dumps({"url": "https://example.org/x.git", "vcs_info": {"vcs": "git", "requested_revision": "v1"}}))
    assert installable("`pip install 'trt-engine[eval]'`") == (
        "`pip install 'trt-engine[eval] @ git+https://example.org/x.git@v1'`"
    )


def test_other_words_and_other_packages_are_left(installed: Callable[..., None], tmp_path: Path) -> None:
    installed(json.dumps({"url": checkout(tmp_path).as_uri(), "dir_info": {}}))
    for text in ("`trt-engine run PLAN`", "my-trt-engine[eval]", "nothing"):
        assert installable(text) == text


def test_a_folder_that_was_removed_under_the_process_is_no_obstacle(
    installed: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, gone = checkout(tmp_path), tmp_path / "gone"
    installed(json.dumps({"url": folder.as_uri(), "dir_info": {}}))
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert not gone.exists()
    assert f"{folder}[eval]" in installable(HINT)


# verb, typed, what the hint must name; None: no option is like it
TYPED: list[tuple[str, str, str | None]] = [
    # of the audit
    ("build", "--best", "--precision"), ("quantize", "--int8", "--to"), ("profile", "--layers", "--profiler"),
    ("cast", "--fp16", "--to"), ("cast", "--int8", "trt-engine quantize"),
    ("quantize", "--fp16", "trt-engine cast"), ("bench", "--skipInference", "trt-engine build"),
    ("build", "--calib=c.cache", "trt-engine quantize"), ("bench", "--loadInputs=x.bin", "--inputs"),
    # slips of the fingers
    ("build", "--bach", "--batch"), ("build", "--batchs", "--batch"), ("build", "--presicion", "--precision"),
    ("build", "--precison", "--precision"), ("build", "--bakend", "--backend"), ("build", "--profil", "--profile"),
    ("build", "--shape", "--shapes"), ("build", "--work-space", "--workspace"),
    ("build", "--timing_cache", "--timing-cache"),
    ("build", "--dryrun", "--dry-run"), ("build", "--dry_run", "--dry-run"), ("build", "--verbos", "--verbose"),
    ("build", "--calibrat", "--calib-data"), ("build", "--no-partiy", "--no-parity"), ("build", "--jsn", "--json"),
    ("bench", "--warm-up", "--warmup"), ("bench", "--durtion", "--duration"), ("bench", "--iteration", "--iterations"),
    ("bench", "--percentiles", "--percentile"), ("bench", "--stream", "--streams"), ("bench", "--protocoll", "--protocol"),
    ("bench", "--memorylimit", "--memory-limit"), ("bench", "--stict", "--strict"), ("size", "--voltage", None),
    ("size", "--maxbatch", "--max-batch"), ("size", "--startbatch", "--start-batch"),
    ("size", "--min-stream", "--min-streams"),
    ("profile", "--inference", "--inferences"), ("profile", "--peak", "--peaks"), ("quantize", "--exclude", None),
    ("quantize", "--calibrators", "--calibrator"), ("quantize", "--targets", "--target"), ("cast", "--keepio", "--keep-io"),
    ("compare", "--base-line", "--baseline"), ("lint", "--fail_on", "--fail-on"), ("evaluate", "--data-set", "--dataset"),
    # words of other tools
    ("build", "--batch-size", "--batch"), ("build", "--output", "-o"), ("build", "--gpu", "--device"),
    ("bench", "--repeat", "--iterations"), ("bench", "--ep", "--providers"), ("quantize", "--data-type", None),
    ("quantize", "--precision", "--to"), ("build", "--input-shape", "--shapes"), ("size", "--imgsz", "--shapes"),
    # nothing like it
    ("build", "--frobnicate", None), ("bench", "--xyz", None), ("profile", "--zz", None), ("lint", "--rules", None),
    ("inspect", "--deep", None), ("doctor", "--fix", None), ("cast", "--layers", None), ("compare", "--plot", None),
]  # fmt: skip


@pytest.mark.parametrize(("verb", "typed", "named"), TYPED)
def test_a_hint_names_what_was_meant_or_nothing(
    verb: str, typed: str, named: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run([verb, "net.onnx", typed, *(["--dry-run"] if verb == "cast" else [])])
    err = capsys.readouterr().err
    hint = err.partition("hint: ")[2]
    if code == 4:  # understood: only the file is missing
        assert f"is translated from trtexec: `{named} " in err
    elif named is None:
        assert code == 2 and hint == f"`trt-engine {verb} --help` lists the options\n"
    else:
        assert code == 2 and re.search(rf"`{re.escape(named)}\b", hint), hint


def test_an_option_that_the_verb_lacks_is_found_in_a_hint() -> None:
    """What conftest.py looks for in the hint of every error of these tests."""
    from cli.conftest import unknown_options

    assert unknown_options("add `--shapes x:1x3`, or `--json`", "trt-engine docs x") == ["--shapes"]
    assert unknown_options("`trt-engine quantize --shapes x:1x3 --picture`", "trt-engine docs x") == ["--picture"]
    assert unknown_options("`docker run --rm`, `-vv`, `--optShapes=x:1`", "trt-engine build x") == []


def test_in_an_environment_of_pipx_or_uv_they_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    assert installable("`pip install -U onnxruntime`") == "`pip install -U onnxruntime`"
    (tmp_path / "pipx_metadata.json").touch()
    assert installable("`pip install -U onnxruntime`") == "`pipx runpip trt-engine install -U onnxruntime`"
