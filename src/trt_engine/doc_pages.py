"""Documentation pages shipped with the package (`docs` in the source tree)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from trt_engine.errors import SetupError, UsageError

_PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class DocPage:
    """One page: `vision`, or a schema by its file name."""

    name: str
    path: Path

    @property
    def title(self) -> str:
        """The first heading, without its marks; a schema's own title."""
        if self.path.suffix == ".json":
            return str(json.loads(self.text).get("title", self.path.stem))
        with self.path.open(encoding="utf-8") as file:
            first = next((line for line in file if line.startswith("# ")), self.path.stem)
        return first.removeprefix("# ").replace("`", "").strip()

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")


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
    found = [DocPage(str(name).removesuffix(".md"), folder / name) for name in names]
    return sorted(found, key=lambda item: (item.path.suffix == ".json", "/" in item.name, item.name))


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
