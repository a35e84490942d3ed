"""The JSON documents that verbs print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

SCHEMAS = Path(__file__).parents[1] / "docs" / "schemas"


def document(text: str) -> Any:
    """The one JSON document of stdout, found to fit the schema it names."""
    told = json.loads(text)
    schema = json.loads((SCHEMAS / f"{told['schema'].removeprefix('trt-engine/')}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(told)
    return told
