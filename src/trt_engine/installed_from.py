"""Commands that install, for where this package came from (a folder, a wheel, an index) and what installed it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

_EXTRA = re.compile(r"(?<![\w-])trt-engine(?=(\[[\w,]+\]))")

_INSTALLERS = {
    "pipx_metadata.json": "pipx runpip trt-engine install",
    "uv-receipt.toml": f"uv pip install -p {sys.prefix}",
}


def installable(text: str) -> str:
    """The text with what pip can install in place of `trt-engine[extra]` (PEP 610), by pipx or uv where these made the
    environment: as it is for a package of an index."""
    for file, command in _INSTALLERS.items() if "pip install" in text else ():
        if Path(sys.prefix, file).is_file():
            text = text.replace("pip install", command)
    if not _EXTRA.search(text):
        return text
    place, from_repository = _origin()
    if from_repository:
        return re.sub(f"{_EXTRA.pattern}\\[[\\w,]+\\]", lambda found: f"trt-engine{found[1]} @ {place}", text)
    return _EXTRA.sub(lambda _: place, text)


def _origin() -> tuple[str, bool]:
    """What stands before the extra, and whether it is the address of a repository."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        origin = json.loads(distribution("trt-engine").read_text("direct_url.json") or "{}")
        parts = urlsplit(origin["url"])
        if (source := origin.get("vcs_info")) is not None:
            return "@".join(filter(None, (f"{source['vcs']}+{origin['url']}", source.get("requested_revision")))), True
    except (PackageNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return "trt-engine", False
    place = Path(url2pathname(parts.path))
    if parts.scheme != "file" or not (place / "pyproject.toml" if "dir_info" in origin else place).is_file():
        return "trt-engine", False
    try:
        return "." if place == Path.cwd() else str(place), False
    except OSError:  # the folder was removed
        return str(place), False
