"""What is in a bundle's folder: every engine, whether they are those of the report, whether they fit and run together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from trt_engine.api.chaining import disagreement, try_out
from trt_engine.config import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, ModelError, SetupError, TrtEngineError
from trt_engine.records import BundleConnection, BundleReport, BundleState, BundleStep, EngineReport

__all__ = ["inspect_bundle", "is_bundle"]

_REPORT = "build_report.json"


def is_bundle(path: Path) -> bool:
    """True for a folder that `bundle` filled, whole or not."""
    try:
        document = msgspec.json.decode((path / _REPORT).read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    return isinstance(document, dict) and document.get("schema") == "trt-engine/bundle"


def inspect_bundle(
    path: Path, one: Callable[[Path], EngineReport], *, run: bool = False, device: str | None = None, seed: int = 0
) -> BundleState:
    """The state of a bundle; `one` inspects a single engine. With `run` every engine runs, then the whole chain.

    The folder may have been moved: files are looked for by name. What is wrong is in `problems`; `ModelError` for a report
    that cannot be read, and with `run` an error for engines that are not there or do not run.
    """
    report = _report(path)
    engines: dict[str, Engine] = {}
    told: dict[str, EngineReport] = {}
    problems: list[str] = []
    for item in report.components:
        if item.engine is None:
            start = f"component `{item.name}`: "
            why = f": {item.error.message.removeprefix(start)}" if item.error else ""
            problems.append(f"component `{item.name}` has no engine ({item.status}{why})")
            continue
        place = path / Path(item.engine).name
        try:
            engines[item.name] = engine = Engine.open(place)
        except (EngineError, ModelError) as error:
            problems.append(f"component `{item.name}`: {error.message}")
            continue
        if engine.passport.payload[0].digest != item.digest:
            problems.append(
                f"component `{item.name}`: `{place.name}` is not the engine of the report, it was built later"
            )
        told[item.name] = one(place)
        verdict = told[item.name].verdict
        if verdict.verdict != "loads":
            problems.append(f"component `{item.name}` ({verdict.verdict}): {verdict.reason}")
    if report.error is not None:
        problems.append(report.error.message)
    connections = tuple(_held(link, engines) for link in report.connections)
    problems += [
        f"`{link.producer}.{link.output} -> {link.consumer}.{link.input}` does not hold between the engines"
        for link in connections
        if link.held is False
    ]
    chain: tuple[BundleStep, ...] = ()
    if run:
        told, chain = _run(path, report, engines, told, connections, device, seed)
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
        engines=told,
        problems=tuple(problems),
        connections=connections,
        chain=chain,
        files=files,
        nbytes=sum(files.values()),
    )


def _report(path: Path) -> BundleReport:
    try:
        return msgspec.json.decode((path / _REPORT).read_bytes(), type=BundleReport)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, TrtEngineError) as error:
        raise ModelError(
            f"`{path / _REPORT}` cannot be read: {error}", hint="run the `trt-engine bundle` command again"
        ) from error


def _held(link: BundleConnection, engines: dict[str, Engine]) -> BundleConnection:
    """The connection with whether the engines' own signatures agree; None where one of them is not there."""
    if not {link.producer, link.consumer} <= set(engines):
        return replace(link, held=None)
    output = [spec for spec in engines[link.producer].signature.outputs if spec.name == link.output]
    taken = [spec for spec in engines[link.consumer].signature.inputs if spec.name == link.input]
    return replace(link, held=bool(output and taken) and disagreement(output[0], taken[0], link.transpose) is None)


def _run(
    path: Path,
    report: BundleReport,
    engines: dict[str, Engine],
    told: dict[str, EngineReport],
    connections: tuple[BundleConnection, ...],
    device: str | None,
    seed: int,
) -> tuple[dict[str, EngineReport], tuple[BundleStep, ...]]:
    missing = [item.name for item in report.components if item.name not in engines]
    refused = [f"`{name}`: {one.verdict.reason}" for name, one in told.items() if one.verdict.verdict in _REFUSED]
    if missing or refused:
        what = f"`{missing[0]}` has no engine" if missing else refused[0]
        raise EngineError(
            f"`{path}` cannot be run as a whole: {what}", hint="run the `trt-engine bundle` command again"
        )
    fills: dict[str, Any] = {item.name: item.fills for item in report.components}
    smokes, chain = try_out(engines, connections, fills, seed=seed, config=RuntimeConfig(device=device))
    return {name: replace(one, smoke=smokes[name]) for name, one in told.items()}, chain


_REFUSED = ("rebuild", "refuse")
