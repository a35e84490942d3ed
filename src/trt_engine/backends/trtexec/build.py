"""From a model to a plan, by the trtexec program: one command, its log kept, its success proved by five signs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import filelock
from onnx import ModelProto

from trt_engine.backends.trtexec.arguments import Arguments, for_build, for_running, pool_differs
from trt_engine.backends.trtexec.program import Program, Ran, find
from trt_engine.config import BuildConfig
from trt_engine.device import info, parse_device
from trt_engine.engine import Needs, PlanHeader, Precision, Share, plan_header
from trt_engine.errors import BuildError, EngineError, SetupError, TrtEngineError
from trt_engine.files import explain
from trt_engine.graph import census as of_graph
from trt_engine.graph import flops
from trt_engine.graph.load import read_proto
from trt_engine.model import Model
from trt_engine.plans.causes import error_of
from trt_engine.plans.layers import UNKNOWN, census, read_layers
from trt_engine.plans.settings import PlanSettings, parse
from trt_engine.plans.trtexec_log import Line, TrtexecLog, misses, pools_of
from trt_engine.plans.trtexec_log import parse as parse_log
from trt_engine.protocols import BuildOutcome, BuildPlaces
from trt_engine.tensors import Shape

__all__ = ["TrtexecBuilder", "failure"]

log = logging.getLogger(__name__)


class TrtexecBuilder:
    """Builds plans with the trtexec of this machine."""

    def identity(self, config: BuildConfig) -> str:
        """`trtexec 10.16.1.11 sm_90 NVIDIA H200`; without NVML the device as it was asked for."""
        board, (kind, number) = _board(config), parse_device(config.device or "cuda:0")
        where = f"sm_{board.compute_capability.replace('.', '')} {board.name}" if board else f"{kind}:{number}"
        return f"trtexec {find().text} {where}"

    def build(self, model: Model, config: BuildConfig, places: BuildPlaces) -> BuildOutcome:
        program, settings, board = find(), parse(config.options), _board(config)
        proto = read_proto(model.path)
        kinds = frozenset(of_graph.census(proto))
        with _folder(places.payload.parent) as folder:
            engine, layers, cache = folder / "model.engine", folder / "layers.json", folder / "timing.cache"
            detailed = settings.profiling_verbosity == "detailed"
            with_cache = _taken(places.timing_cache, cache)
            made = for_build(
                program, config, settings, model.signature,
                model=model.path.absolute(), engine=engine, layers=layers if detailed else None,
                timing_cache=cache if with_cache else None, kinds=kinds, gpu_mib=board.memory_mib if board else None,
            )  # fmt: skip
            for text in made.said:
                log.warning("%s", text)
            if made.pools_mib["workspace"] < config.workspace_mib:
                log.info("the workspace is all memory of the GPU, %g MiB", made.pools_mib["workspace"])
            log.info("building with `%s`, TensorRT %s", program.path, program.text)
            ran = program.run(made.words, folder=folder, raw_log=places.log, heard=_followed(made, places.doing))
            said = parse_log(ran.lines, "trtexec")
            if lacking := misses(said, exit_code=ran.exit_code, engine=engine):
                raise failure(ran, said, lacking, f"the build of `{model.path.name}`")
            _given_back(cache, places.timing_cache)
            header = plan_header(engine)
            assert header is not None  # one of the five signs
            document = layers.read_text(errors="replace") if layers.is_file() else None
            found = _census(document, proto, config)
            if document is not None and (not found or UNKNOWN in found):
                # without a context shapes and types of a dynamic engine are not told: once more, with shapes
                again = _layers_with_shapes(program, settings, model, config, engine, folder)
                found = _census(again, proto, config) or found
            try:
                engine.replace(places.payload)
            except OSError as error:
                raise explain(error, places.payload) from error
        return BuildOutcome(
            signature=model.signature,
            precision=Precision(config.precision, found),
            needs=_needs(header, settings, said, board),
            warnings=(*made.said, *_about(said, found, detailed=detailed)),
            notes=_notes(program, made, ran, said, settings),
        )


def failure(ran: Ran, said: TrtexecLog, lacking: Sequence[str], subject: str) -> TrtEngineError:
    """The error of a run that did not succeed: its known cause, else the first thing that went wrong.

    Where its log lies is said by who kept it.
    """
    if said.cause is not None and said.cause.name != "aborted":
        return error_of(said.cause, subject)
    if ran.killed or said.last_words.startswith("Killed"):
        name = signal.Signals(-ran.exit_code).name if ran.exit_code < 0 else f"exit code {ran.exit_code}"
        return BuildError(
            f"{subject} failed: trtexec was killed ({name}) after {ran.seconds:.0f} s; its last words: {said.last_words}",
            hint="the kernel does that when the host's memory is full: `dmesg` tells",
            cause="aborted",
        )
    if said.cause is not None:
        return error_of(said.cause, subject)
    text = said.report.error_text
    first = f"trtexec said `{text}`" if text and said.report.error_lines else "; ".join(lacking)
    return BuildError(f"{subject} failed: {first}", hint="`-v` shows what trtexec said")


# ------------------------------------------------------------------------------------------------ the run


@contextlib.contextmanager
def _folder(beside: Path) -> Iterator[Path]:
    """Where trtexec writes: the payload is moved out of it when it is proved whole."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=".trtexec-", dir=beside.absolute()))
    except OSError as error:
        raise explain(error, beside) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _followed(made: Arguments, doing: Callable[[str], None]) -> Callable[[Line], None]:
    """Tells what trtexec says it is at, and checks what it must have read right."""
    check = _pools_checked(made)

    def heard(line: Line) -> None:
        check(line)
        if (text := line.text.strip()) and line.severity:
            doing(f"trtexec's last words: {text[:_WORDS]}")

    return heard


def _pools_checked(made: Arguments) -> Callable[[Line], None]:
    """Compares what trtexec read of the pools with what it was given, and stops it before a tactic runs."""

    def heard(line: Line) -> None:
        if line.severity != "I" or not line.text.startswith("Memory Pools: "):
            return
        found = pools_of(line.text)
        for pool, mib in made.pools_mib.items():
            if pool_differs(mib, found.get(pool), pool):
                read = "its default" if pool not in found else f"{found[pool]:g} MiB"
                raise SetupError(
                    f"trtexec read the pool `{pool}` as {read}, {mib:g} MiB was asked for; it was stopped",
                    hint="this trtexec reads sizes in another way than its version says; `--backend tensorrt` sets the "
                    "workspace directly",
                )

    return heard


_LOCK_S = 60.0
_WORDS = 120


def _taken(kept: Path | None, here: Path) -> bool:
    """A copy of the timing cache for one run, because several builds share the file; True when one is to be used."""
    if kept is None:
        return False
    try:
        with filelock.FileLock(f"{kept}.lock", timeout=_LOCK_S):
            if kept.is_file() and kept.stat().st_size:
                shutil.copyfile(kept, here)
    except (filelock.Timeout, OSError) as error:
        log.warning("the timing cache `%s` is not used: %s", kept, error)
        return False
    return True


def _given_back(here: Path, kept: Path | None) -> None:
    """The cache trtexec wrote takes the place of the kept one, whole. Of two builds at once the later one's stays."""
    if kept is None or not here.is_file() or not here.stat().st_size:
        return
    aside = kept.with_name(f".{kept.name}.{here.parent.name}")
    try:
        with filelock.FileLock(f"{kept}.lock", timeout=_LOCK_S):
            shutil.copyfile(here, aside)
            aside.replace(kept)
    except (filelock.Timeout, OSError) as error:
        aside.unlink(missing_ok=True)
        log.warning("the timing cache `%s` is not kept: %s", kept, error)


def _layers_with_shapes(
    program: Program,
    settings: PlanSettings,
    model: Model,
    config: BuildConfig,
    engine: Path,
    folder: Path,
) -> str | None:
    """The layers as a context with the optimum's shapes tells them; None where the engine does not run here."""
    target = folder / "layers-with-shapes.json"
    given = _optimum(config)
    carries_code = settings.version_compatible or settings.serialize_plugins
    # what it carries is of a minute ago, and its layers are the same with other weights
    ours = dataclasses.replace(settings, allow_host_code=carries_code, refit_from=None)
    made = for_running(program, ours, model.signature, given, engine=engine, device=config.device)
    for option, value in (("iterations", 1), ("duration", 0), ("warmUp", 0), ("exportLayerInfo", target)):
        made.add(option, value)
    made.add("profilingVerbosity", settings.profiling_verbosity)
    program.run(made.words, folder=folder, quiet=True)
    return target.read_text(errors="replace") if target.is_file() else None


# ------------------------------------------------------------------------------------------------ what came of it


def _census(document: str | None, proto: ModelProto, config: BuildConfig) -> dict[str, Share]:
    """The shares by data type, weighed by multiply-adds where the layers tell their nodes; empty where they do not."""
    if document is None:
        return {}
    try:
        layers = read_layers(document)
    except EngineError as error:
        log.warning("the layers trtexec wrote cannot be read: %s", error.message)
        return {}
    return census(layers, flops.count(proto, _optimum(config)).macs_by_node())


def _optimum(config: BuildConfig) -> dict[str, Shape]:
    """The shapes the first profile is tuned for; a network whose inputs are fixed needs none."""
    return {name: span.opt for profile in config.profiles[:1] for name, span in profile.ranges.items()}


def _board(config: BuildConfig) -> info.Gpu | None:
    kind, number = parse_device(config.device or "cuda:0")
    return info.gpu(number) if kind == "cuda" else None


def _needs(header: PlanHeader, settings: PlanSettings, said: TrtexecLog, board: info.Gpu | None) -> Needs:
    return Needs(
        library="tensorrt",
        version=header.version,
        compute_capability=said.report.compute_capability or (board.compute_capability if board else None),
        gpu=said.report.gpu or (board.name if board else None),
        plugins=() if settings.serialize_plugins else tuple(Path(library).name for library in settings.plugins),
        hardware_compatibility=settings.hardware_compatibility,
        version_compatible=settings.version_compatible,
        lean_runtime=settings.version_compatible and settings.exclude_lean_runtime,
        stripped=settings.strip_weights,
    )


def _about(said: TrtexecLog, found: Mapping[str, Share], *, detailed: bool) -> Iterator[str]:
    """What a reader of the passport must know."""
    if not found:
        why = (
            "trtexec wrote no layers that tell it"
            if detailed
            else "it was built without `profiling_verbosity=detailed`"
        )
        yield f"the engine's precision was not counted: {why}"
    if not isinstance(said.report.workspace_mib, float):
        yield "trtexec did not say which workspace it read, so it was not compared with the one asked for"
    if said.report.error_lines:
        yield f"trtexec skipped tactics with {said.report.error_lines} errors on the way"


def _notes(program: Program, made: Arguments, ran: Ran, said: TrtexecLog, settings: PlanSettings) -> dict[str, str]:
    workspace = said.report.workspace_mib
    notes = {
        "trtexec": str(program.path),
        "trtexec_version": program.text,
        "trtexec_command": ran.command,
        "trtexec_s": f"{ran.seconds:.2f}",
        "typing": "strong" if program.version >= (11, 0, 0) or "--stronglyTyped" in made.words else "weak",
        "optimization_level": str(
            settings.optimization_level if settings.optimization_level is not None else "default"
        ),
        "profiling_verbosity": settings.profiling_verbosity,
    }
    if isinstance(workspace, float):
        notes["workspace_mib"] = f"{workspace:g}"
    if said.report.engine_built_s is not None:
        notes["engine_built_s"] = f"{said.report.engine_built_s:g}"
    return notes
