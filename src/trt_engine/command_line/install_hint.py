"""Adapt install hints to an editable install."""

from __future__ import annotations

import re
from pathlib import Path

_EXTRA = re.compile(r"(?<![\w-])trt-engine(?=\[[\w,]+\])")


def editable_hint(text: str) -> str:
    """Replace `trt-engine[extra]` by the checkout folder it was installed from (PEP 610)."""
    if not _EXTRA.search(text) or (folder := _checkout_folder()) is None:
        return text
    try:
        here = Path.cwd()
    except OSError:  # it was removed
        here = None
    named = "." if folder == here else str(folder)
    return _EXTRA.sub(lambda _: named, text)


def _checkout_folder() -> Path | None:
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        origin = json.loads(distribution("trt-engine").read_text("direct_url.json") or "{}")
        parts = urlsplit(origin["url"]) if "dir_info" in origin else None
    except (PackageNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if parts is None or parts.scheme != "file":
        return None
    folder = Path(url2pathname(parts.path))
    return folder if (folder / "pyproject.toml").is_file() else None
