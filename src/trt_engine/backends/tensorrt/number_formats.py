"""Checks a graph's number formats against the target GPUs before the builder starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trt_engine.errors import SetupError
from trt_engine.trt.gpu_targets import GPUS, sm_label
from trt_engine.trt.versions import ARCHITECTURES, parse_capability

_MAX_NAMES = 3


@dataclass(frozen=True, slots=True)
class GpuFormats:
    """The formats one library builds for each GPU."""

    product: str
    min_capability: Mapping[str, tuple[int, int]]
    """The lowest compute capability by format."""
    targets: tuple[str, ...] = ()
    """The compute capabilities the library builds for; empty: every known one."""

    def unsupported(self, formats: Mapping[str, str], gpus: Sequence[str]) -> dict[str, str]:
        """The GPUs (`8.0`) that do not have one of the formats, each with the first such format."""
        found: dict[str, str] = {}
        for gpu in gpus:
            here = parse_capability(gpu) or (0, 0)
            for kind in formats:
                if here < self.min_capability.get(kind, (0, 0)):
                    found.setdefault(gpu, kind)
        return found

    def check(self, model: Path, formats: Mapping[str, str], gpus: Sequence[str], name: str = "") -> None:
        """`SetupError` for a graph with a format that one of the GPUs lacks: the format, the GPU, and those that have it.

        `formats` are the graph's, each with its location (`graph.data_types`); `name` is the local GPU's.
        """
        for gpu, kind in self.unsupported(formats, gpus).items():
            others = [one for one in gpus if one not in self.unsupported(formats, gpus)]
            raise SetupError(
                f"`{model.name}` holds {kind} (first in `{formats[kind]}`), which {name or _title(gpu)} does not have: "
                f"{self.product} takes it on {self._gpus_with(kind)}",
                hint=(f"`--gpus {','.join(map(sm_label, others))}`" if others else "a GPU that has it")
                + ", or the model in another format (`trt-engine cast`, `trt-engine quantize`)",
            )

    def _gpus_with(self, kind: str) -> str:
        known = sorted({pair for row in ARCHITECTURES for pair in row.capabilities})
        targets = self.targets or [f"{major}.{minor}" for major, minor in known]
        having = [one for one in targets if (parse_capability(one) or (0, 0)) >= self.min_capability[kind]]
        return ", ".join(map(_title, having)) if self.targets else f"{_title(having[0])} and later"


def _title(gpu: str) -> str:
    """`8.0 (A100, A30)`."""
    names = GPUS.get(gpu, "").split(", ")
    shown = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
    return f"{gpu} ({shown})" if shown else gpu
