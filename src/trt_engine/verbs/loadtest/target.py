"""Where requests go: a server's address with a model, read from a URL."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote, urlsplit

from trt_engine.atomic_io import read_bounded
from trt_engine.errors import UsageError
from trt_engine.format import format_address

_PORTS = {"http": 80, "https": 443, "grpc": 8001, "grpcs": 8001}
_PATH = re.compile(
    r"(?P<base>(?:/[^/]+)*?)(?:/v2(?:/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?(?:/infer|/ready)?)?)?/?"
)
_ADDRESS = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}(/.*)?")
_EXAMPLE = "as `http://localhost:8000/v2/models/NAME` or `grpc://localhost:8001/v2/models/NAME`"


@dataclass(frozen=True, slots=True)
class Target:
    """A server that speaks the Open Inference Protocol v2, and the model on it."""

    interface: Literal["http", "grpc"]
    tls: bool
    host: str
    port: int
    base: str
    """Path before `/v2`: empty, or with its slash in front."""
    model: str | None
    version: str | None

    @property
    def address(self) -> str:
        return format_address(self.host, self.port)

    def __str__(self) -> str:
        scheme = self.interface + "s" * self.tls
        path = f"/v2/models/{quote(self.model, safe='')}" if self.model else ""
        version = f"/versions/{quote(self.version, safe='')}" if self.version else ""
        return f"{scheme}://{self.address}{self.base}{path}{version}"

    def model_path(self) -> str:
        """Path of the model's metadata over HTTP."""
        version = "" if self.version is None else f"/versions/{quote(self.version, safe='')}"
        return f"{self.base}/v2/models/{quote(self.model or '', safe='')}{version}"


def is_url(text: object) -> bool:
    """Whether this names a server; `UsageError` for `HOST:PORT` alone, which no file has as its name."""
    if not isinstance(text, str):
        return False
    if _ADDRESS.fullmatch(text) and not Path(text).exists():
        raise UsageError(
            f"`{text}` has no scheme, so it is neither a URL nor a file that is there",
            hint=f"`http://{text}`, or `grpc://{text}`",
        )
    return "://" in text


def parse_target(url: str, model: str | None, version: str | None) -> Target:
    """The server and model of a URL; `model` and `version` complete it. Raises `UsageError`."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"cannot read the URL `{url}`: {error}", hint=_EXAMPLE) from error
    if parts.scheme not in _PORTS:
        raise UsageError(f"`{url}` is {parts.scheme}, expected http, https, grpc or grpcs", hint=_EXAMPLE)
    if not parts.hostname or parts.query or parts.fragment or re.search(r"[\s\x00-\x1f]", url):
        raise UsageError(f"`{url}` is not the address of a server", hint=_EXAMPLE)
    if parts.username is not None:
        raise UsageError(
            "the URL has a user name or password", hint="`--token-file FILE` keeps a token out of the record"
        )
    found = _PATH.fullmatch(parts.path)
    if found is None:
        raise UsageError(f"cannot read the path `{parts.path}`", hint=_EXAMPLE)
    for name, given, own in (("model", model, found["model"]), ("version", version, found["version"])):
        if given is not None and own is not None and given != unquote(own):
            raise UsageError(
                f"the URL names the {name} `{unquote(own)}`, the option `{given}`", hint="leave one of them out"
            )
    own_model, own_version = (None if part is None else unquote(part) for part in (found["model"], found["version"]))
    return Target(
        "grpc" if parts.scheme.startswith("grpc") else "http", parts.scheme.endswith("s"), parts.hostname,
        port or _PORTS[parts.scheme], found["base"], model or own_model, version or own_version,
    )  # fmt: skip


def read_token(path: Path | None) -> str | None:
    """The bearer token in a file. Raises `UsageError`."""
    if path is None:
        return None
    try:
        token = read_bounded(path).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read a token from `{path}`: {error}", hint="one line of printable ASCII") from error
    if not token.isprintable() or not token or " " in token:
        raise UsageError(f"`{path}` does not hold a token", hint="one line of printable ASCII without blanks")
    return token


def tls_context(target: Target, ca_file: Path | None) -> ssl.SSLContext | None:
    """TLS settings of an https target; None for plain http. Raises `UsageError` for certificates that cannot be read."""
    if not target.tls:
        if ca_file is not None:
            raise UsageError("`--ca-file` is for https and grpcs", hint=f"leave it out for `{target}`")
        return None
    try:
        context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except OSError as error:
        raise UsageError(f"cannot read certificates from `{ca_file}`: {error}", hint="a PEM file") from error
    context.set_alpn_protocols(["http/1.1"])
    return context
