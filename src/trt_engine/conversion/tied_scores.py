"""Whether the scores a graph sorts tell its rows apart: untrained weights give all of them nearly the same one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from trt_engine.backends.onnxruntime import session
from trt_engine.conversion.exporting import Array
from trt_engine.graph import walk
from trt_engine.graph.trace import attributes

__all__ = ["tied_scores"]

_NEAR = 1e-4
"""Of the largest score: what the rounding of another order of sums may turn around."""
_SHARE = 0.05


def tied_scores(path: Path, feeds: Mapping[str, Array]) -> str | None:
    """What is to be said of a TopK of the main graph whose best scores are nearly equal on these inputs; None for none."""
    proto = onnx.load(path, load_external_data=False)
    sorts = [node for node in proto.graph.node if node.op_type == "TopK" and node.output[0]]
    known = {item.name for item in proto.graph.output}
    wanted = list(dict.fromkeys(name for node in sorts for name in (node.input[0], node.output[0])))
    proto.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in wanted if name not in known)
    draft = path.with_suffix(".sorts.onnx")  # beside the side files it names
    try:
        draft.write_bytes(proto.SerializeToString())
        loaded = ort.InferenceSession(str(draft), providers=["CPUExecutionProvider"])
        takes = {item.name for item in loaded.get_inputs()}
        found = dict(zip(wanted, loaded.run(wanted, {k: v for k, v in feeds.items() if k in takes}), strict=True))
    except session.ERRORS:
        return None
    finally:
        draft.unlink(missing_ok=True)
    for node in sorts:
        axis = int(attributes(node).get("axis", -1))
        scores = np.sort(np.moveaxis(np.asarray(found[node.input[0]], np.float64), axis, -1), axis=-1)
        kept = np.asarray(found[node.output[0]]).shape[axis]
        best = scores[..., ::-1] if attributes(node).get("largest", 1) else scores
        best = best[..., : kept + 1]
        largest = float(np.abs(best).max(initial=0.0))
        if best.shape[-1] < 2 or not np.isfinite(largest):
            continue
        near = np.abs(np.diff(best, axis=-1)) <= _NEAR * largest
        if near.mean() > _SHARE:
            count = int(near.reshape(-1, near.shape[-1]).sum(axis=1).max())
            name = walk.label(node)
            return f"{count} of the {kept} best scores that TopK `{name}` sorts are equal to the next but for rounding"
    return None
