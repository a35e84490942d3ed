"""Who may send a request: a token, and on a loopback address the `Host` and `Origin` of this machine.

A loopback address is reached by every user of the machine, and by every page that one of them opens in a browser.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable

from trt_engine.verbs.serve.config import ServeConfig

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
