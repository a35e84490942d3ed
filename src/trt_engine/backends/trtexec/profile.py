"""Layer times as trtexec tells them: its profiler in a run of its own, after the measurement."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

from trt_engine.backends.trtexec.arguments import for_running
from trt_engine.backends.trtexec.build import failure
from trt_engine.backends.trtexec.program import find
from trt_engine.backends.trtexec.run import input_words, profile_of, settings_of
from trt_engine.config import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, Interrupted
from trt_engine.files import ensure_folder
from trt_engine.plans.exports import read_profile
from trt_engine.plans.layer_times import rows
from trt_engine.plans.layers import LayerInfo, read_layers
from trt_engine.plans.trtexec_log import misses
from trt_engine.plans.trtexec_log import parse as parse_log
from trt_engine.tensors import Tensors
from trt_engine.traces import LayerProfile

__all__ = ["profile"]

log = logging.getLogger(__name__)

TIMES, LAYERS = "trtexec-profile.json", "trtexec-layers.json"


def profile(
    engine: Engine, feeds: Tensors, config: RuntimeConfig, *, inferences: int, warmup: int, keep: Path | None
) -> LayerProfile:
    """The times of the engine's layers by the device's clock, of at least `inferences` runs in a process of trtexec.

    trtexec has no way to leave a number of runs out: it warms up for its own time before.
    """
    program = find()
    device = config.device or engine.passport.device
    shapes = {name: tuple(int(size) for size in value.shape) for name, value in feeds.items()}
    number = profile_of(engine, shapes)
    with tempfile.TemporaryDirectory(prefix="trt-engine-trtexec-") as place:
        folder = Path(place)
        made = for_running(
            program, settings_of(engine, config), engine.signature, shapes,
            engine=engine.path.absolute(), device=device, profile=number,
        )  # fmt: skip
        input_words(made, engine.signature.inputs, feeds, folder)
        for option, value in (("iterations", inferences), ("duration", 0), ("avgRuns", max(1, inferences))):
            made.add(option, value)
        made.add("dumpProfile")
        made.add("exportProfile", folder / TIMES)
        made.add("exportLayerInfo", folder / LAYERS)
        made.add("profilingVerbosity", "detailed")
        if program.has("separateProfileRun"):
            made.add("separateProfileRun")
        try:
            ran = program.run(made.words, folder=folder, quiet=True)
        except KeyboardInterrupt:
            raise Interrupted("interrupted: trtexec was ended and had told no layer times yet") from None
        said = parse_log(ran.lines, "trtexec")
        if lacking := misses(said, exit_code=ran.exit_code):
            raise failure(ran, said, lacking, f"profiling `{engine.path.name}`")
        count, times = read_profile(folder / TIMES)
        layers, notes = _layers(folder / LAYERS)
        raw = None
        if keep is not None:
            ensure_folder(keep)
            for name in (TIMES, LAYERS):
                if (folder / name).is_file():
                    shutil.copyfile(folder / name, keep / name)
            raw = str(keep / TIMES)
    return LayerProfile(
        rows=rows(times, layers, device=device, at_these_shapes=True),
        inferences=count or inferences,
        instrument=f"trtexec {program.text} --dumpProfile",
        raw=raw,
        notes=(*made.said, *notes),
        clock="device",
    )


def _layers(path: Path) -> tuple[tuple[LayerInfo, ...], tuple[str, ...]]:
    """What trtexec's inspector said at these shapes; times are worth having without it."""
    try:
        found = read_layers(path.read_text(errors="replace"))
    except (OSError, EngineError) as error:
        log.debug("the layers trtexec wrote cannot be read: %s", error)
        return (), ("the layers have names alone: trtexec wrote no layer information",)
    if not any(layer.detailed for layer in found):
        return found, (
            "the engine was built without `-O profiling_verbosity=detailed`: what a layer is made of is not told",
        )
    return found, ()
