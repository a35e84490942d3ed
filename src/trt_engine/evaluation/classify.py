"""Top-1 and top-5 of a classifier, and which class each label of a dataset is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_engine.errors import UsageError

__all__ = ["Hits", "class_of_labels", "ranks"]

Array = npt.NDArray[Any]


@dataclass(slots=True)
class Hits:
    """A running count of right answers."""

    images: int = 0
    top1: int = 0
    top5: int = 0

    def add(self, scores: Array, labels: Sequence[int]) -> None:
        """[N, C] scores of N pictures with their right classes."""
        places = ranks(scores, labels)
        self.images += len(places)
        self.top1 += int((places < 1).sum())
        self.top5 += int((places < 5).sum())

    def metrics(self) -> dict[str, float]:
        count = max(self.images, 1)
        return {"top1": self.top1 / count, "top5": self.top5 / count}


def ranks(scores: Array, labels: Sequence[int]) -> npt.NDArray[np.int64]:
    """How many classes stand before the right one: higher scores, and equal ones of a lower index; a NaN is last."""
    values = np.nan_to_num(np.asarray(scores, np.float64), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    wanted = np.asarray(labels, np.int64)
    own = values[np.arange(len(values)), wanted][:, None]
    before = np.arange(values.shape[1])[None, :] < wanted[:, None]
    places: npt.NDArray[np.int64] = ((values > own) | ((values == own) & before)).sum(axis=1, dtype=np.int64)
    lost = np.isnan(np.asarray(scores, np.float64)[np.arange(len(values)), wanted])
    places[lost] = values.shape[1] + 5
    return places


def class_of_labels(labels: Sequence[str], classes: Sequence[str]) -> list[int]:
    """The class of each folder: by name where the model declares names, else in the order of the names."""
    if not classes:
        return list(range(len(labels)))
    index = {name.casefold(): number for number, name in enumerate(classes)}
    missing = [name for name in labels if name.casefold() not in index]
    if missing:
        raise UsageError(
            f"the folder `{missing[0]}` is no class of the model"
            + (f", nor are {len(missing) - 1} others" if len(missing) > 1 else ""),
            hint=f"name folders as the model's classes: {', '.join(f'`{name}`' for name in list(classes)[:5])}, ...",
        )
    return [index[name.casefold()] for name in labels]
