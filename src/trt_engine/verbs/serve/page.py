"""The page at `/` for people: models, readiness, rate, latency. It has no data itself and loads nothing from elsewhere."""

from __future__ import annotations

import functools
from pathlib import Path

POLICY = (
    b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'"
)
"""What a browser may do for the page: its own script and style, and calls to this server."""


@functools.cache
def read_page() -> bytes:
    """The page's HTML."""
    return Path(__file__).with_name("page.html").read_bytes()
