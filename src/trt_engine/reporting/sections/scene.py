"""A run as its sections read it: measurements by name, the device, and where recorded paths lie."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote

from trt_engine.cells import CellResult
from trt_engine.figures import MIB, size
from trt_engine.reporting.contents import clean
from trt_engine.reporting.run import Run
from trt_engine.reporting.sections.parts import names_of
from trt_engine.reporting.speedup import Speedups
from trt_engine.traces import ProfileReport

__all__ = ["Scene"]

_PATHS = re.compile(r"[^\s`'\"]+/[^\s`'\"]+")
_ANYWHERE = Path("/1/2/3/4/5/6/7/8/9")
"""Some folder, to reckon with relative paths in: never the present one, which has nothing to do with the run."""


class Scene:
    """One run, and from where its report is read."""

    def __init__(self, run: Run, base: Path | None = None) -> None:
        self.run = run
        self.base = run.folder if base is None else base
        self.size = run.size
        self.records = run.benches
        self.summaries = {id(record): record.compute() for record in self.records}
        self.cell_of = {id(cell.bench): cell for cell in run.cells if cell.bench is not None}
        self.names = names_of(self.records, {which: cell.spec.label for which, cell in self.cell_of.items()})
        self.environment = run.environment
        self.profiles = self._profiles()
        self.speedups = Speedups(run.cells, run.manifest.baseline if run.manifest is not None else None)

    def _profiles(self) -> tuple[tuple[str, ProfileReport, CellResult | None], ...]:
        """Every profile by the name of what was profiled, with its cell."""
        own = [(clean(cell.spec.label), cell.profile, cell) for cell in self.run.cells if cell.profile is not None]
        alone = self.run.profile
        if alone is None:
            return tuple(own)
        return (*own, (clean(Path(alone.model or alone.engine).name), alone, None))

    # ------------------------------------------------------------------------------------------ devices

    @property
    def devices(self) -> list[str]:
        """Every device that something ran on, or was to."""
        ran = [record.device for record in self.records]
        ran += [profile.device for _, profile, _ in self.profiles]
        ran += [side.device for side in self.run.comparison.sides] if self.run.comparison else []
        ran += [self.size.device] if self.size else []
        return list(dict.fromkeys(ran or [cell.spec.device for cell in self.run.cells])) or ["cpu"]

    @property
    def device(self) -> str:
        return self.devices[0]

    @property
    def on_gpu(self) -> bool:
        return any(device.startswith("cuda") for device in self.devices)

    @property
    def backends(self) -> list[str]:
        ran = [record.backend for record in self.records]
        ran += [profile.backend for _, profile, _ in self.profiles]
        ran += [side.backend for side in self.run.comparison.sides] if self.run.comparison else []
        first = [self.size.backend] if self.size else []
        return list(dict.fromkeys([*first, *ran] or [cell.spec.backend for cell in self.run.cells]))

    def device_line(self) -> str:
        here = self.environment
        if len(self.devices) > 1 and (self.records or self.profiles or self.run.comparison):
            gpu = f" ({here.gpu})" if here.gpu else ""
            return clean(f"Devices: {', '.join(self.devices)}{gpu}")
        if not (self.records or self.profiles or self.size or self.run.comparison):
            return clean(f"Nothing was measured; planned for {', '.join(self.devices)}")
        if self.device.startswith("cuda"):
            parts = [f"GPU: {here.gpu or 'name not recorded'} ({self.device})"]
            if here.gpu_memory_mib:
                parts.append(size(here.gpu_memory_mib * MIB))
            if here.compute_capability:
                parts.append(f"compute capability {here.compute_capability}")
            return clean(", ".join(parts))
        if self.device == "cpu":
            return clean(f"CPU: {here.cpu}, {here.cpu_cores} {'core' if here.cpu_cores == 1 else 'cores'}")
        return clean(f"Device: {self.device}")

    def scope(self) -> str:
        """What lies inside the times."""
        protocols = [record.protocol for record in self.records]
        if self.size is not None and self.size.protocol is not None:
            protocols.append(self.size.protocol)
        if not any(protocol.transfers for protocol in protocols):
            return "compute alone"
        # a device that cannot be timed by its own events: what the host sees is all there is
        return (
            "from the host's clock around the call"
            if all(p.clock == "host" for p in protocols)
            else "of the compute part"
        )

    # ------------------------------------------------------------------------------------------ paths

    def path(self, text: str) -> tuple[str, str | None]:
        """A recorded path as seen from the report, and its link where something of the run is there.

        What is shown hangs on the records and on what is in the run, not on the machine the report is made on.
        """
        inside = self._inside(text)
        if inside is None:
            return clean(Path(text).name if _fixed(text) else text), None
        return self.own(inside)

    def own(self, inside: str) -> tuple[str, str | None]:
        """A path as seen from the run's folder, shown as seen from the report, and its link."""
        way = os.path.relpath(self.run.folder.absolute() / inside, self.base.absolute()).replace(os.sep, "/")
        if way.count("../") > 2:  # a path through somebody's machine tells the reader nothing
            return clean(Path(inside).name), None
        return clean(way), quote(way, safe="/.-_~", errors="replace") if self.has(inside) else None

    def relative(self, line: str) -> str:
        """A command with the paths in it that lie in the run as seen from the report."""
        return _PATHS.sub(lambda found: self.path(found[0])[0] if self._inside(found[0]) else found[0], line)

    def has(self, inside: str) -> bool:
        return self.run.files is not None and self.run.files.has(inside)

    def _inside(self, text: str) -> str | None:
        """A recorded path as seen from the run's folder; None where that is not known.

        Paths were recorded as seen from where the command ran. That place is not recorded, but the run's folder as seen
        from it may be, and the way from the one to the other still holds when the folder has moved. Else the end of the
        path that is in the run is what was meant.
        """
        then = self.size.artifacts.get("folder") if self.size is not None else None
        if then is not None and _fixed(text) == _fixed(then):
            way = os.path.relpath(_ANYWHERE / text, _ANYWHERE / then).replace(os.sep, "/")
            if not _fixed(text) or not way.startswith("../") or way.count("../") <= 2:
                return way
        parts = [part for part in text.split("/") if part not in ("", ".")]
        if ".." in parts:
            return None
        ends = ("/".join(parts[start:]) for start in range(len(parts)))
        return next((end for end in ends if self.has(end)), None)


def _fixed(text: str) -> bool:
    """True for a path that leads from the machine's root, or from somebody's home."""
    return text.startswith(("/", "~"))
