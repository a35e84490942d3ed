"""`inspect` of a bundle folder: its engines, whether they match the report, fit each other and run together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from trt_engine.atomic_io import decode_json, read_bounded
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, ModelError, SetupError, TrtEngineError
from trt_engine.records.bundle import BundleComponent, BundleConnection, BundleReport, BundleState, BundleStep
from trt_engine.records.inspect import EngineReport
from trt_engine.verbs.bundle_chain import mismatch, run_chain

_REPORT = "build_report.json"


def is_bundle(path: Path) -> bool:
    """True for a folder written by `bundle`, complete or not."""
    try:
        document = decode_json(read_bounded(path / _REPORT))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    return isinstance(document, dict) and document.get("schema") == "trt-engine/bundle"


def inspect_bundle(
    path: Path,
    inspect_engine: Callable[[Path], EngineReport],
    *,
    run: bool = False,
    device: str | None = None,
    seed: int = 0,
) -> BundleState:
    """The state of a bundle; `inspect_engine` inspects a single engine. With `run` every engine runs, then the whole chain.

    The folder may have been moved: files are looked for by name. What is wrong is in `problems`; `ModelError` for a report
    that cannot be read, and with `run` an error for engines that are not there or do not run.
    """
    report = read_report(path)
    engines: dict[str, Engine] = {}
    problems: list[str] = []
    for item in report.components:
        engine, why = open_component(path, item)
        engines |= {item.name: engine} if engine is not None else {}
        problems += why
    reports = {name: inspect_engine(engine.path) for name, engine in engines.items()}
    problems += [
        f"component `{name}` ({one.compatibility.status}): {one.compatibility.reason}"
        for name, one in reports.items()
        if one.compatibility.status != "loads"
    ]
    if report.error is not None:
        problems.append(report.error.message)
    connections = tuple(_check_connection(link, engines) for link in report.connections)
    problems += [
        f"`{link.producer}.{link.output} -> {link.consumer}.{link.input}` does not hold between the engines"
        for link in connections
        if link.matches is False
    ]
    chain: tuple[BundleStep, ...] = ()
    if run:
        reports, chain = _run_bundle(path, report, engines, reports, connections, device, seed)
    try:
        files = {str(item.relative_to(path)): item.stat().st_size for item in sorted(path.rglob("*")) if item.is_file()}
    except OSError as error:
        raise SetupError(f"cannot read `{path}`: {error.strerror or error}", hint="check its permissions") from error
    return BundleState(
        path=str(path),
        kind="bundle",
        name=report.name,
        version=report.version,
        complete=report.complete and not problems,
        engines=reports,
        problems=tuple(problems),
        connections=connections,
        chain=chain,
        files=files,
        nbytes=sum(files.values()),
    )


def open_component(path: Path, item: BundleComponent) -> tuple[Engine | None, list[str]]:
    """The component's engine in the folder, and what is wrong with it."""
    if item.engine is None:
        start = f"component `{item.name}`: "
        why = f": {item.error.message.removeprefix(start)}" if item.error else ""
        return None, [f"component `{item.name}` has no engine ({item.status}{why})"]
    place = path / Path(item.engine).name
    try:
        engine = Engine.open(place)
    except (EngineError, ModelError) as error:
        return None, [f"component `{item.name}`: {error.message}"]
    if engine.passport.payload[0].digest == item.digest:
        return engine, []
    return engine, [f"component `{item.name}`: `{place.name}` is not the engine of the report, it was built later"]


def read_report(path: Path) -> BundleReport:
    try:
        return decode_json(read_bounded(path / _REPORT), BundleReport)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, TrtEngineError) as error:
        raise ModelError(
            f"`{path / _REPORT}` cannot be read: {error}", hint="run the `trt-engine bundle` command again"
        ) from error


def _check_connection(link: BundleConnection, engines: dict[str, Engine]) -> BundleConnection:
    """The connection with whether the engines' own signatures agree; None where one of them is not there."""
    if not {link.producer, link.consumer} <= set(engines):
        return replace(link, matches=None)
    output = [spec for spec in engines[link.producer].signature.outputs if spec.name == link.output]
    taken = [spec for spec in engines[link.consumer].signature.inputs if spec.name == link.input]
    return replace(link, matches=bool(output and taken) and mismatch(output[0], taken[0], link.transpose) is None)


def _run_bundle(
    path: Path,
    report: BundleReport,
    engines: dict[str, Engine],
    reports: dict[str, EngineReport],
    connections: tuple[BundleConnection, ...],
    device: str | None,
    seed: int,
) -> tuple[dict[str, EngineReport], tuple[BundleStep, ...]]:
    missing = [item.name for item in report.components if item.name not in engines]
    refused = [
        f"`{name}`: {one.compatibility.reason}"
        for name, one in reports.items()
        if one.compatibility.status in _UNUSABLE
    ]
    if missing or refused:
        what = f"`{missing[0]}` has no engine" if missing else refused[0]
        raise EngineError(
            f"`{path}` cannot be run as a whole: {what}", hint="run the `trt-engine bundle` command again"
        )
    fills: dict[str, Any] = {item.name: item.fixed_inputs for item in report.components}
    smokes, chain = run_chain(engines, connections, fills, seed=seed, config=RuntimeConfig(device=device))
    return {name: replace(one, smoke_run=smokes[name]) for name, one in reports.items()}, chain


_UNUSABLE = ("rebuild", "refuse")
