"""Settings of `serve`, and who may call it."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trt_engine.config.parse import parse_bytes
from trt_engine.config.settings import Config, check_limits, opt
from trt_engine.errors import UsageError
from trt_engine.units import parse_duration, parse_milliseconds

MIB = 1 << 20


def _format_bytes(nbytes: int) -> str:
    return f"{nbytes}B"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(Config):
    """Settings of a server: its models, addresses, scheduling, limits, and who may use it."""

    def __post_init__(self) -> None:
        check_limits(self)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("TLS needs a certificate and its key", hint="`--tls-cert FILE --tls-key FILE`")
        if self.model_repository is None and self.model_control_mode != "none":
            raise UsageError(
                f"`--model-control-mode {self.model_control_mode}` needs a repository", hint="`--model-repository DIR`"
            )
        if self.load_model and self.model_control_mode != "explicit":
            raise UsageError("`--load-model` needs explicit control", hint="`--model-control-mode explicit`")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise UsageError(f"`{self.otlp_endpoint}` is not the URL of a collector", hint="`http://localhost:4318`")
        for name in ("http_port", "grpc_port", "metrics_port"):
            if getattr(self, name) > 65535:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"`{flag}` is {getattr(self, name)}, expected 0 to 65535", hint="0 is any free port")
        if self.http_port < 0 and self.grpc_port < 0:
            raise UsageError("neither HTTP nor gRPC has a port", hint="leave out `--http-port -1` or `--grpc-port -1`")
        if self.shared_memory and self.token_file is None and self.shared_memory_prefix is None:
            raise UsageError(
                "`--shared-memory` gives the memory of this user to every client",
                hint="`--token-file FILE`, or `--shared-memory-prefix /app_` for keys that begin so",
            )
        if not self.host:
            raise UsageError("`--host` is empty", hint="`--host 0.0.0.0` is every address")

    model_repository: Path | None = opt(
        None, "folder of models, as NAME/VERSION/model.onnx or model.plan", parse=Path, metavar="DIR", group="Input"
    )
    model_control_mode: str = opt(
        "none", "what loads models after the start: nothing, changed files, or clients",
        choices=("none", "poll", "explicit"), group="Input",
    )  # fmt: skip
    load_model: tuple[str, ...] = opt(
        (),
        "with explicit control: load this model at the start",
        parse=str,
        multiple=True,
        metavar="NAME",
        group="Input",
    )
    poll_interval_s: float = opt(
        15.0, "with poll: time between two looks at the repository", parse=parse_duration, metavar="TIME", gt=0,
        group="Input",
    )  # fmt: skip
    build_models: bool = opt(False, "build models that are not engines, into the store", group="Input")
    allow_changed: bool = opt(False, "load engines whose digest is not that of their passport", group="Input")

    host: str = opt("127.0.0.1", "address to listen at; the default is reached from this machine alone")
    http_port: int = opt(8000, "port of HTTP; 0: any free one, -1: none", ge=-1)
    grpc_port: int = opt(8001, "port of gRPC; 0: any free one, -1: none", ge=-1)
    metrics_port: int = opt(8002, "port of the metrics alone; 0: any free one, -1: none", ge=-1)
    strict_readiness: bool = opt(True, "the server is ready only while every requested model is")
    token_file: Path | None = opt(
        None,
        "file with the bearer token that every request but the health checks must carry",
        parse=Path,
        metavar="FILE",
    )
    tls_cert: Path | None = opt(None, "certificate chain for TLS, PEM", parse=Path, metavar="FILE")
    tls_key: Path | None = opt(None, "private key for TLS, PEM", parse=Path, metavar="FILE")
    allowed_host: tuple[str, ...] = opt(
        (), "on a loopback address: another name in `Host` and `Origin` that is answered, as of a proxy", parse=str,
        multiple=True, metavar="NAME",
    )  # fmt: skip
    control_without_token: bool = opt(
        False, "with explicit control: clients load and unload models without a token", group="Input"
    )
    shared_memory: bool | None = opt(
        None, "let clients register shared memory [default: on a loopback address, with a token or a prefix]",
        flags="--shared-memory/--no-shared-memory",
    )  # fmt: skip
    shared_memory_prefix: str | None = opt(
        None, "let clients register shared memory of the server's own user whose key begins so; `/` is every key",
        metavar="KEY",
    )  # fmt: skip

    otlp_endpoint: str | None = opt(
        None, "send a span of each request to this OpenTelemetry collector, over OTLP/HTTP", metavar="URL"
    )

    max_batch: int | None = opt(
        None, "rows of joined requests [default: the engine's largest batch, else 32; 1: never joined]", ge=1,
        group="Measure",
    )  # fmt: skip
    max_wait_ms: float = opt(
        0.0, "how long a request waits for others while a context is free", parse=parse_milliseconds, metavar="MS",
        ge=0, group="Measure",
    )  # fmt: skip
    max_queue: int | None = opt(
        None, "requests (rows, where they are joined) that may wait for a model [default: 64 batches]", ge=1,
        group="Measure",
    )  # fmt: skip

    max_request: int = opt(
        256 * MIB, "largest request [default: 256MiB]", parse=parse_bytes, metavar="SIZE", to_text=_format_bytes, ge=1,
        group="Advanced",
    )  # fmt: skip
    max_json: int = opt(
        16 * MIB, "largest JSON part of a request [default: 16MiB]", parse=parse_bytes, metavar="SIZE",
        to_text=_format_bytes, ge=1, group="Advanced",
    )  # fmt: skip
    max_header: int = opt(
        64 << 10, "largest HTTP header [default: 64KiB]", parse=parse_bytes, metavar="SIZE", to_text=_format_bytes, ge=256,
        group="Advanced",
    )  # fmt: skip
    max_in_flight: int = opt(1024, "requests of inference at once; more are refused", ge=1, group="Advanced")
    max_in_flight_size: int = opt(
        2048 * MIB, "bytes of all requests at once; more are refused [default: 2GiB]", parse=parse_bytes, metavar="SIZE",
        to_text=_format_bytes, ge=1, group="Advanced",
    )  # fmt: skip
    max_connections: int = opt(4096, "HTTP connections at once", ge=1, group="Advanced")
    request_timeout_s: float = opt(
        30.0, "time for a client to send its header, and then its body", parse=parse_duration, metavar="TIME", gt=0,
        group="Advanced",
    )  # fmt: skip
    drain_delay_s: float = opt(
        1.0, "at the end: time between not being ready and refusing connections", parse=parse_duration, metavar="TIME",
        ge=0, group="Advanced",
    )  # fmt: skip
    drain_timeout_s: float = opt(
        30.0, "at the end: longest wait for accepted requests", parse=parse_duration, metavar="TIME", gt=0,
        group="Advanced",
    )  # fmt: skip


Refusal = tuple[int, str]
"""Status of HTTP, and the text of the error."""
_MAX_KNOWN = 64
_PORTS = {b"http": "80", b"https": "443"}
"""What a browser leaves out."""


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


class Callers:
    """Checks who sent a request, by its headers."""

    def __init__(self, config: ServeConfig, token: bytes | None) -> None:
        self._token = token
        self._local = is_loopback(config.host)
        self._allowed = {name.lower().removesuffix(".") for name in config.allowed_host}
        self._known: set[bytes] = set()
        """Values of `Host` that were accepted."""

    def has_token(self, authorization: bytes) -> bool:
        """Whether the value of `Authorization` is the server's token; True where it has none."""
        if self._token is None:
            return True
        scheme, _, given = authorization.partition(b" ")
        return hmac.compare_digest(given.strip(), self._token) and scheme.lower() == b"bearer"

    def refusal(self, headers: Iterable[tuple[bytes, bytes]], *, needs_token: bool) -> Refusal | None:
        """Why a request over HTTP with these headers is refused; None where it is not."""
        host = origin = authorization = b""
        for name, value in headers:
            if name == b"host":
                host = value
                if self._local and value not in self._known and not self._is_known(value):
                    text = value[:80].decode("ascii", "replace")
                    return 421, f"`{text}` is not a name of this server; `localhost`, or `--allowed-host` of `serve`"
            elif name == b"origin":
                origin = value
            elif name == b"authorization":
                authorization = value
        if origin and self._local and not self._is_own(origin, host):
            return 403, "a page of another origin may not use this server; `--allowed-host` of `serve` names its host"
        if needs_token and not self.has_token(authorization):
            return 401, "a bearer token is needed"
        return None

    def _is_known(self, authority: bytes) -> bool:
        name, _ = _split(authority)
        if not (is_loopback(name) or name in self._allowed):
            return False
        if len(self._known) < _MAX_KNOWN:
            self._known.add(authority)
        return True

    def _is_own(self, origin: bytes, host: bytes) -> bool:
        scheme, _, authority = origin.partition(b"://")
        usual = _PORTS.get(scheme.lower(), "")
        name, port = _split(authority)
        own_name, own_port = _split(host)
        same = (name, port or usual) == (own_name, own_port or usual)
        return bool(authority) and (same or name in self._allowed)


def _split(authority: bytes) -> tuple[str, str]:
    """Host and port of `host`, `host:port` or `[address]:port`; the port is empty where none is given."""
    text = authority.strip().lower().decode("latin-1")
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    else:
        host, _, port = text.partition(":")
    return host.removesuffix("."), port
