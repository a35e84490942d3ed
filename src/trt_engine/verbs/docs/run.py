"""`docs`: the documentation pages in the package."""

from __future__ import annotations

from trt_engine.doc_pages import DocPage, find_page, list_pages
from trt_engine.public_function import public_function


@public_function
def docs(name: str | None = None) -> tuple[DocPage, ...]:
    """The page of that name (`vision`, `schemas/size.json`), or all pages; `UsageError` for an unknown name."""
    return tuple(list_pages()) if name is None else (find_page(name),)
