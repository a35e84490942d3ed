"""Biases corrected for what rounding the weights takes away: on average over data the layer gives again what it gave.

A rounded weight W' gives W'x where Wx was meant; over data that is off by (W - W')E[x], channel by channel, which a bias
takes up for nothing (Finkelstein et al., "Fighting Quantization Bias With Bias", 2019; Nagel et al., 2019).
"""

from __future__ import annotations

import io
import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_engine.files import write_whole
from trt_engine.graph.load import read_proto
from trt_engine.graph.trace import attributes
from trt_engine.model import Model
from trt_engine.precision.observe import Probe
from trt_engine.precision.placement import Site
from trt_engine.precision.samples import Samples

__all__ = ["Means", "axis_of", "channel_means", "correction", "load_means", "save_means"]

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Means = dict[tuple[str, int], npt.NDArray[np.float64]]
"""The mean of each channel, by tensor and by the axis its channels lie along."""


def axis_of(site: Site) -> int:
    """Where the channels of a site's activation lie."""
    return 1 if site.node.op_type in ("Conv", "ConvTranspose") else -1


def channel_means(model: Model, sites: Sequence[Site], samples: Samples) -> Means:
    """The mean of each channel of the sites' activations over the data, in one pass."""
    wanted = list(dict.fromkeys((site.activation, axis_of(site)) for site in sites))
    proto = read_proto(model.path)
    sums: Means = {}
    counts: dict[tuple[str, int], int] = {}
    probe: Probe | None = None
    batches = iter(samples)
    while window := list(itertools.islice(batches, probe.window if probe else 1)):
        if probe is None:
            probe = Probe(model.path, proto, [name for name, _ in wanted], window[0])
        for _, name, array in probe.look(window):
            for axis in (1, -1):
                key = (name, axis)
                if key not in wanted or not array.size:
                    continue
                rows = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])
                sums[key] = sums.get(key, np.zeros(rows.shape[1])) + rows.sum(axis=0, dtype=np.float64)
                counts[key] = counts.get(key, 0) + len(rows)
    return {key: total / counts[key] for key, total in sums.items()}


def correction(lost: Array, site: Site, mean: npt.NDArray[np.float64]) -> npt.NDArray[np.float32] | None:
    """What to add to each output channel; `lost` is the weight less its rounded self. None where shapes do not fit."""
    if site.node.op_type == "ConvTranspose":
        return None
    if site.node.op_type == "Conv":
        groups = int(attributes(site.node).get("group", 1))
        summed = lost.reshape(*lost.shape[:2], -1).sum(axis=2, dtype=np.float64)
        outputs, inputs = summed.shape
        if mean.size != inputs * groups or outputs % groups:
            return None
        by_group = summed.reshape(groups, outputs // groups, inputs)
        made = np.einsum("goi,gi->go", by_group, mean.reshape(groups, inputs)).reshape(-1)
        return np.asarray(made, np.float32)
    if lost.ndim != 2:
        return None
    matrix = lost if site.reduced == 1 else lost.T
    return np.asarray(matrix @ mean, np.float32) if matrix.shape[1] == mean.size else None


# ------------------------------------------------------------------------------------------------ kept beside a cache


def save_means(path: Path, means: Means, data: str) -> None:
    """Keep the means, and the digest of the data they are of."""
    buffer = io.BytesIO()
    names = np.array([[name, str(axis)] for name, axis in means] or np.zeros((0, 2), "U1"))
    arrays = {f"mean{at}": value for at, value in enumerate(means.values())}
    np.savez(buffer, allow_pickle=False, names=names, data=np.array(data), **arrays)
    write_whole(path, buffer.getvalue())


def load_means(path: Path, data: str) -> Mapping[tuple[str, int], npt.NDArray[np.float64]] | None:
    """The means kept there, if they are of that data."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            if str(stored["data"]) != data:
                return None
            return {(str(name), int(axis)): stored[f"mean{at}"] for at, (name, axis) in enumerate(stored["names"])}
    except (OSError, ValueError, KeyError, EOFError) as error:
        log.debug("no means in `%s`: %s", path, error)
        return None
