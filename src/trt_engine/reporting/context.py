"""Context of report sections: measurement names, devices, and recorded paths."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from trt_engine.format import MIB, format_bytes
from trt_engine.records.profile import ProfileReport
from trt_engine.records.sweep import CellResult
from trt_engine.reporting.run_records import RunRecords
from trt_engine.reporting.speedup import Speedups
from trt_engine.reporting.tables import measurement_names, short_labels

_PATH_PATTERN = re.compile(r"(?<![^\s`'\"])[^\s`'\"]+/[^\s`'\"]+")
_PLACEHOLDER_FOLDER = Path("/1/2/3/4/5/6/7/8/9")
"""Placeholder folder for relative path arithmetic, unrelated to the working directory."""


class ReportContext:
    """One run, and the folder of its report."""

    def __init__(self, run: RunRecords, base: Path | None = None) -> None:
        self.full_labels = tuple(cell.spec.label for cell in run.cells)
        run = _with_short_labels(run)
        self.run = run
        self.base = run.folder if base is None else base
        self.size = run.size
        self.records = run.benches
        self.summaries = {id(record): record.compute_summary() for record in self.records}
        self.cell_of = {id(cell.bench): cell for cell in run.cells if cell.bench is not None}
        self.names = measurement_names(self.records, {which: cell.spec.label for which, cell in self.cell_of.items()})
        self.environment = run.environment
        self.profiles: list[tuple[str, ProfileReport, CellResult | None]] = [
            (cell.spec.label, cell.profile, cell) for cell in run.cells if cell.profile is not None
        ]
        """All profiles with name and cell."""
        if run.profile is not None:
            self.profiles.append((Path(run.profile.model or run.profile.engine).name, run.profile, None))
        self.speedups = Speedups(run.cells, run.manifest.baseline if run.manifest is not None else None)

    # ------------------------------------------------------------------------------------------ devices

    @property
    def devices(self) -> list[str]:
        """All devices used or planned."""
        return self._recorded("device") or ["cpu"]

    def _recorded(self, name: str) -> list[str]:
        """The values of an attribute in all records, else in the plan."""
        sides = self.run.comparison.sides if self.run.comparison else ()
        profiles = (profile for _, profile, _ in self.profiles)
        upgraded = (item.new for item in self.run.upgrade.items) if self.run.upgrade else ()
        records = (*self.records, *profiles, *sides, *upgraded, *([self.size] if self.size else []))
        return list(dict.fromkeys(getattr(item, name) for item in records or [cell.spec for cell in self.run.cells]))

    @property
    def device(self) -> str:
        return self.devices[0]

    @property
    def place(self) -> str:
        return "the CPU" if self.device == "cpu" else "the GPU" if self.on_gpu else self.device

    @property
    def on_gpu(self) -> bool:
        return any(device.startswith("cuda") for device in self.devices)

    @property
    def backends(self) -> list[str]:
        return self._recorded("backend")

    @property
    def only_loads(self) -> bool:
        """Whether the run has load tests alone: where the server runs is not known."""
        return bool(self.run.loads) and not (self.records or self.profiles or self.size or self.run.comparison)

    def device_line(self) -> str:
        here = self.environment
        if self.only_loads:
            return f"Requests sent from: {here.cpu}"
        if len(self.devices) > 1 and (self.records or self.profiles or self.run.comparison):
            gpu = f" ({here.gpu})" if here.gpu else ""
            return f"Devices: {', '.join(self.devices)}{gpu}"
        if not (self.records or self.profiles or self.size or self.run.comparison or self.run.upgrade):
            return f"Nothing was measured; planned for {', '.join(self.devices)}"
        if self.device.startswith("cuda"):
            parts = [f"GPU: {here.gpu or 'name not recorded'} ({self.device})"]
            if here.gpu_memory_mib:
                parts.append(format_bytes(here.gpu_memory_mib * MIB))
            if here.compute_capability:
                parts.append(f"compute capability {here.compute_capability}")
            return ", ".join(parts)
        if self.device == "cpu":
            return f"CPU: {here.cpu}, {here.cpu_cores} {'core' if here.cpu_cores == 1 else 'cores'}"
        return f"Device: {self.device}"

    def timing_scope(self) -> str:
        """What the times include."""
        protocols = [record.protocol for record in self.records]
        if self.size is not None and self.size.protocol is not None:
            protocols.append(self.size.protocol)
        if not any(protocol.transfers for protocol in protocols):
            return "compute alone"
        # the device has no events: only host times exist
        by_host = all(protocol.clock == "host" for protocol in protocols)
        return "from the host's clock around the call" if by_host else "of the compute part"

    # ------------------------------------------------------------------------------------------ paths

    def display_path(self, text: str) -> tuple[str, str | None]:
        """A recorded path relative to the report, and its link if the file is in the run.

        Depends only on the records and the run's files, not on the machine.
        """
        inside = self._path_in_run(text)
        if inside is None:
            return (Path(text).name if _is_absolute(text) else text), None
        return self.display_run_path(inside)

    def display_run_path(self, inside: str) -> tuple[str, str | None]:
        """A path in the run folder, relative to the report, and its link."""
        way = os.path.relpath(self.run.folder.absolute() / inside, self.base.absolute()).replace(os.sep, "/")
        if way.count("../") > 2:  # a path outside the run is meaningless to the reader
            return Path(inside).name, None
        return way, quote(way, safe="/.-_~", errors="replace") if self.has_file(inside) else None

    def localize_command(self, line: str) -> str:
        """A command whose paths inside the run are relative to the report."""
        return _PATH_PATTERN.sub(
            lambda found: self.display_path(found[0])[0] if self._path_in_run(found[0]) else found[0], line
        )

    def has_file(self, inside: str) -> bool:
        return self.run.files is not None and self.run.files.contains(inside)

    def _path_in_run(self, text: str) -> str | None:
        """A recorded path relative to the run folder, or None if unknown.

        Recorded paths are relative to an unrecorded working directory; the recorded run folder, if any, resolves them even
        after a move. Otherwise the longest path suffix that exists in the run is used.
        """
        then = self.size.artifacts.get("folder") if self.size is not None else None
        if then is not None and _is_absolute(text) == _is_absolute(then):
            way = os.path.relpath(_PLACEHOLDER_FOLDER / text, _PLACEHOLDER_FOLDER / then).replace(os.sep, "/")
            if not _is_absolute(text) or not way.startswith("../") or way.count("../") <= 2:
                return way
        parts = [part for part in text.split("/") if part not in ("", ".")]
        if ".." in parts:
            return None
        ends = ("/".join(parts[start:]) for start in range(len(parts)))
        return next((end for end in ends if self.has_file(end)), None)


def _with_short_labels(run: RunRecords) -> RunRecords:
    """The run with short cell labels such as `fp32, batch 8`; unchanged if they would not be unique."""
    specs = [cell.spec for cell in run.cells]
    short = dict(zip((spec.label for spec in specs), short_labels(specs), strict=True))
    cells = tuple(replace(cell, spec=replace(cell.spec, label=short[cell.spec.label])) for cell in run.cells)
    manifest = run.manifest
    if manifest is not None and manifest.baseline is not None:
        manifest = replace(manifest, baseline=short.get(manifest.baseline, manifest.baseline))
    return replace(run, cells=cells, manifest=manifest)


def _is_absolute(text: str) -> bool:
    """True for an absolute or home path."""
    return text.startswith(("/", "~"))
