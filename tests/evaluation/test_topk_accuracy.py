"""Top-1 and top-5, and which class a folder is."""

from __future__ import annotations

import numpy as np
import pytest

from trt_engine.errors import UsageError
from trt_engine.evaluation.evaluate_runner import TopKAccuracy, label_classes


def test_top_1_and_top_5_are_counted_over_batches() -> None:
    hits = TopKAccuracy()
    scores = np.arange(7.0)[None].repeat(4, axis=0)  # class 6 is best, then 5, 4, ...
    hits.add(scores, [6, 5, 2, 1])
    hits.add(scores[:1], [6])
    assert hits.images == 5
    assert hits.metrics() == {"top1": 2 / 5, "top5": 4 / 5}


def test_a_score_that_is_nan_is_never_right() -> None:
    hits = TopKAccuracy()
    hits.add(np.array([[np.nan, np.nan]]), [0])
    hits.add(np.array([[np.nan, 0.1]]), [1])
    assert hits.metrics() == {"top1": 1 / 2, "top5": 1 / 2}


def test_folders_are_matched_by_name_where_names_are_declared() -> None:
    assert label_classes(["cat", "Dog"], ["dog", "cow", "cat"]) == [2, 0]
    assert label_classes(["b", "a"], []) == [0, 1]
    with pytest.raises(UsageError, match=r"`hen` is not a class of the model, nor are 1 others") as refused:
        label_classes(["cat", "hen", "ox"], ["dog", "cat"])
    assert "`dog`, `cat`" in str(refused.value.hint)
