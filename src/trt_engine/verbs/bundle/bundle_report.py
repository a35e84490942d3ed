"""Records of the components in a bundle's report, and the head and tail of their logs."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trt_engine.atomic_io import read_bounded, write_atomic
from trt_engine.engine import Engine, passport_path, reference_path
from trt_engine.records.bundle import BundleComponent, BundleConnection
from trt_engine.verbs.bundle.bundle_plan import BundlePlan, PlannedComponent


def component_record(item: PlannedComponent, status: Any) -> BundleComponent:
    """Record of a component without engine."""
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
        fixed_inputs=item.resolved.fills,
    )


def add_engine(record: BundleComponent, engine: Engine, item: PlannedComponent, folder: Path) -> BundleComponent:
    """The record with the facts of the engine's passport; `engine` is None for one that is only in the store."""
    passport = engine.passport
    return replace(
        record,
        engine=engine.path.name if engine.path.parent == folder else None,
        log=relative_name(item.log, folder),
        payload_bytes=sum(file.nbytes for file in passport.payload),
        digest=passport.payload[0].digest,
        profiles=passport.profiles,
        build_seconds=passport.build.seconds,
        library=f"{passport.requirements.library} {passport.requirements.version}".strip(),
        precision=passport.precision,
        parity=passport.parity,
        notes=passport.build.notes,
        retries=passport.build.retries,
        warnings=passport.build.warnings,
    )


def connection_records(plan: BundlePlan) -> tuple[BundleConnection, ...]:
    """Records of the connections, with dtype and shape."""
    signatures = {item.name: item.model.signature for item in plan.components}
    made = []
    for link in plan.links:
        output = next(spec for spec in signatures[link.producer].outputs if spec.name == link.output)
        carries = f"{output.dtype} {output.format_symbolic()}"
        made.append(
            BundleConnection(
                link.producer, link.output, link.consumer, link.input, link.transpose, link.declared, carries
            )
        )
    return tuple(made)


def artifact_paths(folder: Path, components: Iterable[BundleComponent], *others: str) -> dict[str, str]:
    """Existing output files by name; `others` are file names in the folder."""
    found: dict[str, str] = {}
    for item in components:
        if item.engine:
            found[f"{item.name}_engine"] = str(folder / item.engine)
            found[f"{item.name}_passport"] = str(passport_path(folder / item.engine))
            if (reference := reference_path(folder / item.engine)).is_file():
                found[f"{item.name}_reference"] = str(reference)
    found |= {f"{item.name}_log": str(folder / item.log) for item in components if item.log}
    return found | {name.partition(".")[0]: str(folder / name) for name in others}


def relative_name(path: Path, folder: Path) -> str | None:
    """Path relative to the folder; None if the file is missing."""
    return str(path.relative_to(folder)) if path.is_file() else None


# ------------------------------------------------------------------------------------------------ logs


def log_header(item: PlannedComponent, plan: BundlePlan) -> list[str]:
    """First lines of a component's log: build command and inputs."""
    return [
        item.build.command,
        f"component `{item.name}` of `{plan.meta.path}`",
        f"model {item.model.digest}, {item.model.nbytes} bytes with {len(item.model.external)} side files",
        f"builder {item.build.identity}",
        *(f"profile {index}: {profile}" for index, profile in enumerate(item.build.profiles)),
        f"started {datetime.now(UTC).isoformat(timespec='seconds')}",
    ]


def log_footer(engine: Engine) -> list[str]:
    """Last lines of a component's log: facts of the passport."""
    passport = engine.passport
    stated = [f"built in {passport.build.seconds:.1f} s by {passport.build.identity}"]
    stated += [f"tried: {step}" for step in passport.build.retries]
    stated += [f"{name}: {value}" for name, value in passport.build.notes.items()]
    stated += [f"warning: {text}" for text in passport.build.warnings]
    if passport.parity is not None:
        worst = max((item.max_rel for item in passport.parity.outputs.values()), default=0.0)
        stated.append(f"parity with {passport.parity.reference}: {worst:.2g} of the channel's scale")
    return [*stated, f"engine {engine.path.name} {passport.payload[0].digest}"]


class BuildLog:
    """The log of one component's build, written when `with` ends, also on errors.

    A backend with a raw log writes it to the same path during the build; head and tail are added afterwards, each line
    prefixed with `#`.
    """

    def __init__(self, path: Path, head: Sequence[str]) -> None:
        self.path = path
        self.head = [f"# {line}" for text in head for line in text.splitlines()]
        self.tail: list[str] = []
        self.messages: list[str] = []

    def add(self, text: str) -> None:
        """Append a line."""
        self.tail += [f"# {line}" for line in text.splitlines()]

    @contextlib.contextmanager
    def open(self) -> Iterator[BuildLog]:
        self.path.unlink(missing_ok=True)  # of an earlier build
        try:
            with _capture_messages(_MessageCollector(self.messages)):
                yield self
        finally:
            self._write()

    def _write(self) -> None:
        raw = read_bounded(self.path) if self.path.is_file() else b""
        ours = [f"# {line}" for line in self.messages] if raw else self.messages
        text = "\n".join(self.head) + "\n"
        end = "".join(f"{line}\n" for line in (*ours, *self.tail))
        if raw and not raw.endswith(b"\n"):
            raw += b"\n"
        write_atomic(self.path, text.encode(errors="replace") + raw + end.encode(errors="replace"))


@contextlib.contextmanager
def _capture_messages(listener: logging.Handler) -> Iterator[None]:
    """Send log messages from INFO on to the listener, without changing the level of other handlers."""
    logger = logging.getLogger("trt_engine")
    before, heard = logger.level, logger.getEffectiveLevel()
    others = [*logger.handlers, *(logging.getLogger().handlers if logger.propagate else ())]
    no_more = _LevelFilter(heard)
    if heard > logging.INFO:
        for handler in others:
            handler.addFilter(no_more)
        logger.setLevel(logging.INFO)
    logger.addHandler(listener)
    try:
        yield
    finally:
        logger.removeHandler(listener)
        if heard > logging.INFO:
            logger.setLevel(before)
            for handler in others:
                handler.removeFilter(no_more)


class _LevelFilter(logging.Filter):
    """Applies the package's original log level to a handler."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.level = level

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= self.level or record.name.partition(".")[0] != "trt_engine"


class _MessageCollector(logging.Handler):
    """Collects log messages of this thread, with seconds since the start."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines, self.thread, self.started = lines, threading.get_ident(), time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self.thread:
            mark = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
            self.lines += [
                f"[{time.monotonic() - self.started:7.1f} s] {mark}{line}" for line in record.getMessage().splitlines()
            ]
