"""The description in the package's metadata: README.md without its pictures and links to files of the tree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_TREE_IMAGE = re.compile(r"!\[[^\]]+\]\((?!https?://)[^)]*\)\n*")
_TREE_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)[^)]*\)")


class LongDescription(MetadataHookInterface):
    """hatchling's hook for `dynamic = ["readme"]`."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": _TREE_LINK.sub(r"\1", _TREE_IMAGE.sub("", text))}
