"""Builds plans with trtexec; success is verified by five signs in log and files."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
from onnx import ModelProto

from trt_engine.atomic_io import os_errors, staging_folder
from trt_engine.backends.trtexec.command_line import (
    BuildFiles,
    CommandLine,
    build_command,
    is_pool_size_different,
    run_command,
)
from trt_engine.backends.trtexec.program import ProcessResult, Program, find_program
from trt_engine.config.build import BuildConfig
from trt_engine.device import info, parse_device
from trt_engine.errors import BuildError, EngineError, SetupError, TrtEngineError
from trt_engine.graph import cost
from trt_engine.graph import dtype_breakdown as of_graph
from trt_engine.model import Model
from trt_engine.plan_header import PlanHeader, plan_header
from trt_engine.protocols import BuildOutcome, BuildPaths
from trt_engine.records.passport import DtypeShare, Precision, Requirements
from trt_engine.tensors import Shape
from trt_engine.trt.failure_causes import make_error
from trt_engine.trt.layers import UNKNOWN, dtype_shares, read_layers
from trt_engine.trt.settings import PlanSettings, parse
from trt_engine.trt.trtexec_log import LogLine, TrtexecLog, missing_success_signs, parse_pools
from trt_engine.trt.trtexec_log import parse as parse_log

log = logging.getLogger(__name__)


class TrtexecBuilder:
    """Builds plans with the installed trtexec."""

    def identity(self, config: BuildConfig) -> str:
        """`trtexec 10.16.1.11 sm_90 NVIDIA H200`; without NVML the requested device."""
        board, (kind, number) = _gpu_info(config), parse_device(config.device or "cuda:0")
        where = f"sm_{board.compute_capability.replace('.', '')} {board.name}" if board else f"{kind}:{number}"
        return f"trtexec {find_program().version_text} {where}"

    def build(self, model: Model, config: BuildConfig, paths: BuildPaths) -> BuildOutcome:
        program, settings, board = find_program(), parse(config.options), _gpu_info(config)
        kinds = frozenset(of_graph.dtype_shares(model.graph))
        with staging_folder(paths.payload) as folder:
            engine, layers, cache = folder / "model.engine", folder / "layers.json", folder / "timing.cache"
            detailed = settings.profiling_verbosity == "detailed"
            with_cache = _copy_timing_cache(paths.timing_cache, cache)
            files = BuildFiles(
                model.path.absolute(), engine, layers if detailed else None, cache if with_cache else None
            )
            made = build_command(
                program, config, settings, model.signature, files,
                dtypes=kinds, gpu_mib=board.memory_mib if board else None,
            )  # fmt: skip
            for text in made.warnings:
                log.warning("%s", text)
            if made.pools_mib["workspace"] < config.workspace_mib:
                log.info("the workspace is all memory of the GPU, %g MiB", made.pools_mib["workspace"])
            log.info("building with `%s`, TensorRT %s", program.path, program.version_text)
            ran, said = run_checked(
                made, folder, f"the build of `{model.path.name}`", engine=engine, raw_log=paths.log,
                on_line=_status_callback(made, paths.on_status),
            )  # fmt: skip
            _update_timing_cache(cache, paths.timing_cache)
            header = plan_header(engine)
            assert header is not None  # one of the five signs
            document = layers.read_text(errors="replace") if layers.is_file() else None
            found = _dtype_breakdown(document, model.proto, config)
            if document is not None and (not found or UNKNOWN in found):
                # a dynamic engine reports shapes and types only with a context
                again = _layers_with_shapes(program, settings, model, config, engine, folder)
                found = _dtype_breakdown(again, model.proto, config) or found
            with os_errors(paths.payload):
                engine.replace(paths.payload)
        return BuildOutcome(
            signature=model.signature,
            precision=Precision(config.precision, found),
            requirements=_requirements(header, settings, said, board),
            warnings=(*made.warnings, *_warnings(said, found, detailed=detailed)),
            notes=_notes(program, made, ran, said, settings),
        )


def run_checked(
    command: CommandLine, folder: Path, subject: str, *, engine: Path | None = None, measured: bool = False, **how: Any
) -> tuple[ProcessResult, TrtexecLog]:
    """A successful run in `folder` and its parsed log; raises its known cause, else the first error. `how`: `Program.run`.

    The success of a build includes the file `engine`, of a measurement (`measured`) its summary.
    """
    result = command.program.run(command.arguments, folder=folder, **how)
    parsed = parse_log(result.lines, "trtexec")
    if missing := missing_success_signs(parsed, exit_code=result.exit_code, engine=engine, measured=measured):
        raise _run_error(result, parsed, missing, subject)
    return result, parsed


def _run_error(result: ProcessResult, parsed: TrtexecLog, missing: Sequence[str], subject: str) -> TrtEngineError:
    if parsed.cause is not None and parsed.cause.name != "aborted":
        return make_error(parsed.cause, subject)
    if result.killed or parsed.last_error_line.startswith("Killed"):
        name = signal.Signals(-result.exit_code).name if result.exit_code < 0 else f"exit code {result.exit_code}"
        return BuildError(
            f"{subject} failed: trtexec was killed ({name}) after {result.seconds:.0f} s; its last output: "
            f"{parsed.last_error_line}",
            hint="the kernel does that when host memory is exhausted: see `dmesg`",
            cause="aborted",
        )
    if parsed.cause is not None:
        return make_error(parsed.cause, subject)
    text = parsed.report.error_text
    first = f"trtexec reported `{text}`" if text and parsed.report.error_lines else "; ".join(missing)
    return BuildError(f"{subject} failed: {first}", hint="`-v` shows the output of trtexec")


# ------------------------------------------------------------------------------------------------ the run


def _status_callback(made: CommandLine, on_status: Callable[[str], None]) -> Callable[[LogLine], None]:
    """A line callback that reports status, and stops trtexec early if it read other pool sizes than requested."""

    def on_line(line: LogLine) -> None:
        if line.severity == "I" and line.text.startswith("Memory Pools: "):
            _check_pools(made.pools_mib, parse_pools(line.text))
        if (text := line.text.strip()) and line.severity:
            on_status(f"trtexec's last output: {text[:_MAX_STATUS]}")

    return on_line


def _check_pools(requested_mib: Mapping[str, float], found_mib: Mapping[str, float]) -> None:
    for pool, mib in requested_mib.items():
        if is_pool_size_different(mib, found_mib.get(pool), pool):
            read = "its default" if pool not in found_mib else f"{found_mib[pool]:g} MiB"
            raise SetupError(
                f"trtexec read the pool `{pool}` as {read}, {mib:g} MiB was requested; it was stopped",
                hint="this trtexec parses sizes differently; `--backend tensorrt` sets the workspace directly",
            )


_LOCK_S = 60.0
_MAX_STATUS = 120


def _copy_timing_cache(shared: Path | None, here: Path) -> bool:
    """Copy the shared timing cache for one run; returns whether to use one."""
    if shared is None:
        return False
    try:
        with filelock.FileLock(f"{shared}.lock", timeout=_LOCK_S):
            if shared.is_file() and shared.stat().st_size:
                shutil.copyfile(shared, here)
    except (filelock.Timeout, OSError) as error:
        log.warning("the timing cache `%s` is not used: %s", shared, error)
        return False
    return True


def _update_timing_cache(here: Path, shared: Path | None) -> None:
    """Replace the shared timing cache atomically; of concurrent builds the last wins."""
    if shared is None or not here.is_file() or not here.stat().st_size:
        return
    aside = shared.with_name(f".{shared.name}.{here.parent.name}")
    try:
        with filelock.FileLock(f"{shared}.lock", timeout=_LOCK_S):
            shutil.copyfile(here, aside)
            aside.replace(shared)
    except (filelock.Timeout, OSError) as error:
        aside.unlink(missing_ok=True)
        log.warning("the timing cache `%s` is not kept: %s", shared, error)


def _layers_with_shapes(
    program: Program,
    settings: PlanSettings,
    model: Model,
    config: BuildConfig,
    engine: Path,
    folder: Path,
) -> str | None:
    """The layers at the opt shapes; None if the engine does not run here."""
    target = folder / "layers-with-shapes.json"
    given = _opt_shapes(config)
    carries_code = settings.version_compatible or settings.serialize_plugins
    # freshly built, so its code is trusted; layers do not depend on weights
    ours = dataclasses.replace(settings, allow_host_code=carries_code, refit_from=None)
    made = run_command(program, ours, model.signature, given, engine=engine, device=config.device)
    made.add_all(iterations=1, duration=0, warmUp=0, exportLayerInfo=target)
    made.add("profilingVerbosity", settings.profiling_verbosity)
    program.run(made.arguments, folder=folder, quiet=True)
    return target.read_text(errors="replace") if target.is_file() else None


# ------------------------------------------------------------------------------------------------ outcome


def _dtype_breakdown(document: str | None, proto: ModelProto, config: BuildConfig) -> dict[str, DtypeShare]:
    """The dtype breakdown, weighted by MACs; empty without layer information."""
    if document is None:
        return {}
    try:
        layers = read_layers(document)
    except EngineError as error:
        log.warning("the layers trtexec wrote cannot be read: %s", error.message)
        return {}
    return dtype_shares(layers, cost.model_cost(proto, _opt_shapes(config)).macs_by_node())


def _opt_shapes(config: BuildConfig) -> dict[str, Shape]:
    """The opt shapes of the first profile; empty for static inputs."""
    return {name: span.opt for profile in config.profiles[:1] for name, span in profile.ranges.items()}


def _gpu_info(config: BuildConfig) -> info.Gpu | None:
    kind, number = parse_device(config.device or "cuda:0")
    return info.gpu(number) if kind == "cuda" else None


def _requirements(header: PlanHeader, settings: PlanSettings, said: TrtexecLog, board: info.Gpu | None) -> Requirements:
    return Requirements(
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


def _warnings(said: TrtexecLog, found: Mapping[str, DtypeShare], *, detailed: bool) -> Iterator[str]:
    """Warnings for the passport."""
    if not found:
        why = (
            "trtexec wrote no layers with types" if detailed else "it was built without `profiling_verbosity=detailed`"
        )
        yield f"the engine's precision was not counted: {why}"
    if not isinstance(said.report.workspace_mib, float):
        yield "trtexec did not print the workspace size it read, so it was not checked"
    if said.report.error_lines:
        yield f"trtexec skipped tactics with {said.report.error_lines} errors"


def _notes(
    program: Program, made: CommandLine, ran: ProcessResult, said: TrtexecLog, settings: PlanSettings
) -> dict[str, str]:
    workspace = said.report.workspace_mib
    notes = {
        "trtexec": str(program.path),
        "trtexec_version": program.version_text,
        "trtexec_command": ran.command,
        "trtexec_s": f"{ran.seconds:.2f}",
        "typing": "strong" if program.version >= (11, 0, 0) or "--stronglyTyped" in made.arguments else "weak",
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
