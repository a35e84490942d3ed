"""The samples of Nsight's output in `samples/`: each begins with where it is from, and is read from below that."""

from __future__ import annotations

from pathlib import Path

SAMPLES = Path(__file__).parent / "samples"
_MARK = "a parser is fed only what is below this line ---\n"


def sample(name: str) -> str:
    """The sample's own text."""
    _, found, text = (SAMPLES / name).read_text().partition(_MARK)
    assert found, name
    return text
