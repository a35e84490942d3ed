"""Where this package was installed from: commands that install its extras are for there."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["installable"]

_EXTRA = re.compile(r"(?<![\w-])trt-engine(?=\[[\w,]+\])")


def installable(text: str) -> str:
    """The text with `trt-engine[extra]` as pip takes it here: the folder of the checkout it was installed from (PEP 610)."""
    if not _EXTRA.search(text) or (folder := _folder()) is None:
        return text
    try:
        here = Path.cwd()
    except OSError:  # it was removed
        here = None
    named = "." if folder == here else str(folder)
    return _EXTRA.sub(lambda _: named, text)


def _folder() -> Path | None:
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        told = json.loads(distribution("trt-engine").read_text("direct_url.json") or "{}")
        parts = urlsplit(told["url"]) if "dir_info" in told else None
    except (PackageNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if parts is None or parts.scheme != "file":
        return None
    folder = Path(url2pathname(parts.path))
    return folder if (folder / "pyproject.toml").is_file() else None
