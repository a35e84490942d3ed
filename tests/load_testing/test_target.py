"""A URL names a server, a model and a version."""

from __future__ import annotations

from pathlib import Path

import pytest

from trt_engine.errors import UsageError
from trt_engine.verbs.loadtest.target import is_url, parse_target, read_token


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8000/v2/models/net", ("http", False, "localhost", 8000, "", "net", None)),
        ("http://localhost:8000/v2/models/net/versions/3/infer", ("http", False, "localhost", 8000, "", "net", "3")),
        ("https://host", ("http", True, "host", 443, "", None, None)),
        ("http://host/", ("http", False, "host", 80, "", None, None)),
        ("http://host/v2", ("http", False, "host", 80, "", None, None)),
        ("http://host/a/b/v2/models/x%2Fy", ("http", False, "host", 80, "/a/b", "x/y", None)),
        ("grpc://10.0.0.1:9/v2/models/net", ("grpc", False, "10.0.0.1", 9, "", "net", None)),
        ("grpcs://[::1]", ("grpc", True, "::1", 8001, "", None, None)),
    ],
)
def test_a_url_is_read(url: str, expected: tuple) -> None:
    found = parse_target(url, None, None)
    assert (
        found.interface, found.tls, found.host, found.port, found.base, found.model, found.version
    ) == expected  # fmt: skip
    assert parse_target(str(found), None, None) == found


@pytest.mark.parametrize(
    "url",
    ["ftp://host", "http://", "http://host:port", "http://host?x=1", "http://host/v2#a", "http://a b/", "file:///etc"],
)
def test_what_is_not_the_address_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        parse_target(url, None, None)


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        parse_target("http://me:secret@host", None, None)
    assert "secret" not in str(caught.value)


def test_a_token_is_one_word_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "good").write_text("abc.def\n")
    assert read_token(tmp_path / "good") == "abc.def" and read_token(None) is None
    for text in ("", "two words", "a\r\nX-Evil: 1"):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(UsageError):
            read_token(tmp_path / "bad")


@pytest.mark.parametrize("text", ["localhost:8000", "10.0.0.1:8000/v2/models/net", "[::1]:8000"])
def test_an_address_without_a_scheme_is_refused_with_the_urls_it_may_be(text: str) -> None:
    with pytest.raises(UsageError, match="has no scheme") as caught:
        is_url(text)
    assert f"`http://{text}`" in str(caught.value) and f"`grpc://{text}`" in str(caught.value)


def test_files_are_no_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net:1").write_bytes(b"")
    assert not is_url("net:1") and not is_url("net.onnx") and not is_url(tmp_path / "net:2")
    assert is_url("http://localhost:8000")
