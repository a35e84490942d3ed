"""Layer times by trtexec's profiler, in a separate run."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

from trt_engine.atomic_io import ensure_folder
from trt_engine.backends.trtexec.build import run_checked
from trt_engine.backends.trtexec.program import find_program
from trt_engine.backends.trtexec.run import engine_command
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, Interrupted
from trt_engine.records.profile import LayerProfile
from trt_engine.tensors import Tensors
from trt_engine.trt.layer_timing import layer_rows
from trt_engine.trt.layers import LayerInfo, read_layers
from trt_engine.trt.trtexec_exports import read_profile

log = logging.getLogger(__name__)

TIMES, LAYERS = "trtexec-profile.json", "trtexec-layers.json"


def profile(
    engine: Engine, feeds: Tensors, config: RuntimeConfig, *, inferences: int, warmup: int, keep: Path | None
) -> LayerProfile:
    """Layer times by device clock over at least `inferences` runs of trtexec, after its own warm-up."""
    program = find_program()
    device = config.device or engine.passport.device
    with tempfile.TemporaryDirectory(prefix="trt-engine-trtexec-") as place:
        folder = Path(place)
        made = engine_command(program, engine, config, feeds, folder)
        made.add_all(iterations=inferences, duration=0, avgRuns=max(1, inferences))
        made.add("dumpProfile")
        made.add_all(exportProfile=folder / TIMES, exportLayerInfo=folder / LAYERS, profilingVerbosity="detailed")
        if program.has("separateProfileRun"):
            made.add("separateProfileRun")
        try:
            run_checked(made, folder, f"profiling `{engine.path.name}`", quiet=True)
        except KeyboardInterrupt:
            raise Interrupted("interrupted: trtexec was stopped before it wrote layer times") from None
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
        rows=layer_rows(times, layers, device=device, same_shapes=True),
        inferences=count or inferences,
        instrument=f"trtexec {program.version_text} --dumpProfile",
        raw=raw,
        notes=(*made.warnings, *notes),
        clock="device",
    )


def _layers(path: Path) -> tuple[tuple[LayerInfo, ...], tuple[str, ...]]:
    """Layer information at these shapes; empty if missing."""
    try:
        found = read_layers(path.read_text(errors="replace"))
    except (OSError, EngineError) as error:
        log.debug("the layers trtexec wrote cannot be read: %s", error)
        return (), ("the layers have names alone: trtexec wrote no layer information",)
    if not any(layer.is_detailed for layer in found):
        return found, (
            "the engine was built without `-O profiling_verbosity=detailed`: the composition of layers is unknown",
        )
    return found, ()
