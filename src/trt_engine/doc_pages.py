"""Documentation pages shipped with the package (`docs` in the source tree), and the pages written from its tables."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path

from trt_engine.errors import SetupError, UsageError

_PACKAGE = Path(__file__).resolve().parent
_WRITTEN = {
    "reference/inductor": "trt_engine.verbs.docs.generated_pages:inductor_page",
    "reference/settings": "trt_engine.verbs.docs.generated_pages:settings_page",
    "reference/trtexec": "trt_engine.verbs.docs.generated_pages:trtexec_page",
}
"""Pages without a file, and the functions that write them."""


@dataclass(frozen=True, slots=True)
class DocPage:
    """One page: `vision`, a schema by its file name, or a page without a file: `reference/settings`."""

    name: str
    path: Path | None = None

    @property
    def title(self) -> str:
        """The first heading, without its marks; a schema's own title."""
        if self.path is None:
            return self.name.rpartition("/")[2].capitalize()
        if self.path.suffix == ".json":
            return str(json.loads(self.text).get("title", self.path.stem))
        with self.path.open(encoding="utf-8") as file:
            first = next((line for line in file if line.startswith("# ")), self.path.stem)
        return first.removeprefix("# ").replace("`", "").strip()

    @property
    def text(self) -> str:
        """The page in Markdown, or the schema in JSON."""
        if self.path is not None:
            return self.path.read_text(encoding="utf-8")
        module, _, function = _WRITTEN[self.name].partition(":")
        return str(getattr(importlib.import_module(module), function)())


def _folder() -> Path:
    """The docs folder: in the installed package, or beside `src` in a source tree."""
    for folder in (_PACKAGE / "docs", _PACKAGE.parents[1] / "docs"):
        if folder.is_dir():
            return folder
    raise SetupError("the pages are not installed", hint="install the package again: its wheel has them")


def list_pages() -> list[DocPage]:
    """Every page, by name: the pages of text first, then the JSON schemas."""
    folder = _folder()
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.suffix in (".md", ".json"))
    found = [DocPage(str(name).removesuffix(".md"), folder / name) for name in names] + [
        DocPage(name) for name in _WRITTEN
    ]
    return sorted(found, key=lambda item: (item.name.endswith(".json"), "/" in item.name, item.name))


def find_page(name: str) -> DocPage:
    """The page of that name, also as `docs/vision.md`; `UsageError` with the nearest one."""
    wanted = name.removeprefix("docs/").removesuffix(".md")
    known = {item.name: item for item in list_pages()}
    if wanted not in known:
        from trt_engine.tensors import suggest

        nearest = suggest(wanted, list(known))
        raise UsageError(
            f"unknown page `{name}`",
            hint=nearest if nearest.startswith("did you mean") else "`trt-engine docs` lists the pages",
        )
    return known[wanted]
