"""Commands that install an extra are for where this package came from."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

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
