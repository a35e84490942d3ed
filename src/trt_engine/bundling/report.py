"""What a bundle says of its components: their part of the report, and what stands around the raw words in their logs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trt_engine.bundling.plan import BundlePlan, Planned
from trt_engine.engine import Engine, passport_path
from trt_engine.errors import TrtEngineError
from trt_engine.records import BundleComponent, BundleConnection, BundleFailure

__all__ = ["artifacts", "component", "connections", "facts", "failure", "head", "with_engine"]


def component(item: Planned, status: Any) -> BundleComponent:
    """A component without its engine."""
    return BundleComponent(
        name=item.name,
        status=status,
        model=str(item.model.path),
        model_digest=item.model.digest,
        model_bytes=item.model.nbytes,
        external=tuple(file.location for file in item.model.external),
        command=item.build.command,
        key=item.build.key,
        identity=item.build.identity,
        profiles=item.build.profiles,
        fills=item.resolved.fills,
    )


def with_engine(made: BundleComponent, engine: Engine, item: Planned, folder: Path) -> BundleComponent:
    """The same with what the engine's passport says; an engine of the store alone has no file in the folder yet."""
    passport = engine.passport
    return replace(
        made,
        engine=engine.path.name if engine.path.parent == folder else None,
        log=inside(item.log, folder),
        payload_bytes=sum(file.nbytes for file in passport.payload),
        digest=passport.payload[0].digest,
        profiles=passport.profiles,
        build_seconds=passport.build.seconds,
        library=f"{passport.needs.library} {passport.needs.version}".strip(),
        precision=passport.precision,
        parity=passport.parity,
        notes=passport.build.notes,
        ladder=passport.build.ladder,
        warnings=passport.build.warnings,
    )


def connections(plan: BundlePlan) -> tuple[BundleConnection, ...]:
    """What feeds what, with what it carries."""
    signatures = {item.name: item.model.signature for item in plan.components}
    made = []
    for link in plan.links:
        output = next(spec for spec in signatures[link.producer].outputs if spec.name == link.output)
        carries = f"{output.dtype} {output.describe()}"
        made.append(
            BundleConnection(
                link.producer, link.output, link.consumer, link.input, link.transpose, link.declared, carries
            )
        )
    return tuple(made)


def failure(error: TrtEngineError) -> BundleFailure:
    return BundleFailure(type(error).__name__, error.message, error.hint, error.exit_code)


def artifacts(folder: Path, components: Iterable[BundleComponent], *others: str) -> dict[str, str]:
    """Every file that is there, by what it is; `others` are names in the folder."""
    found: dict[str, str] = {}
    for item in components:
        if item.engine:
            found[f"{item.name}_engine"] = str(folder / item.engine)
            found[f"{item.name}_passport"] = str(passport_path(folder / item.engine))
    found |= {f"{item.name}_log": str(folder / item.log) for item in components if item.log}
    return found | {name.partition(".")[0]: str(folder / name) for name in others}


def inside(path: Path, folder: Path) -> str | None:
    """The file as it is called in the folder; None when it is not there."""
    return str(path.relative_to(folder)) if path.is_file() else None


# ------------------------------------------------------------------------------------------------ in the log


def head(item: Planned, plan: BundlePlan) -> list[str]:
    """The first lines of a component's log: what repeats this build, and of what it is."""
    return [
        item.build.command,
        f"component `{item.name}` of `{plan.meta.path}`",
        f"model {item.model.digest}, {item.model.nbytes} bytes with {len(item.model.external)} side files",
        f"builder {item.build.identity}",
        *(f"profile {index}: {profile}" for index, profile in enumerate(item.build.profiles)),
        f"started {datetime.now(UTC).isoformat(timespec='seconds')}",
    ]


def facts(engine: Engine) -> list[str]:
    """The last lines: what the passport says of the build."""
    passport = engine.passport
    told = [f"built in {passport.build.seconds:.1f} s by {passport.build.identity}"]
    told += [f"tried: {step}" for step in passport.build.ladder]
    told += [f"{name}: {value}" for name, value in passport.build.notes.items()]
    told += [f"warning: {text}" for text in passport.build.warnings]
    if passport.parity is not None:
        worst = max((item.max_rel for item in passport.parity.outputs.values()), default=0.0)
        told.append(f"parity with {passport.parity.reference}: {worst:.2g} of the channel's scale")
    return [*told, f"engine {engine.path.name} {passport.payload[0].digest}"]
