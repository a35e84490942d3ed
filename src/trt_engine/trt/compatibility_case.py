"""One plan on one machine: the input of every compatibility check."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trt_engine.device import info
from trt_engine.plan_header import PLAN_BACKENDS, PlanHeader
from trt_engine.records.passport import Compatibility, Passport
from trt_engine.trt.installation import Installation
from trt_engine.trt.settings import PlanSettings
from trt_engine.trt.versions import Version


@dataclass(frozen=True, slots=True)
class CompatibilityCase:
    """One plan on one machine."""

    header: PlanHeader
    passport: Passport | None
    installation: Installation
    path: Path
    device: int | None
    settings: PlanSettings

    @property
    def built_version(self) -> Version:
        return Version(self.header.tensorrt)

    @property
    def loader_version(self) -> Version | None:
        """The TensorRT version that would load it: the bindings', else trtexec's."""
        return self.installation.python_version or self.installation.trtexec_version

    @property
    def gpu(self) -> info.Gpu | None:
        return next((item for item in self.installation.gpus if item.index == self.device), None)

    @property
    def rebuild_command(self) -> str:
        """The command that rebuilds it here."""
        if self.passport is not None:
            return self.passport.build.command
        if self.installation.bindings is None and self.installation.trtexec is not None:
            return f"{self.installation.trtexec} --onnx=MODEL.onnx --saveEngine={shlex.quote(str(self.path))}"
        backend = PLAN_BACKENDS[self.header.product]
        return f"trt-engine build MODEL.onnx --backend {backend} -o {shlex.quote(str(self.path))}"

    def result(self, status: Literal["penalty", "rebuild", "refuse"], reason: str) -> Compatibility:
        """A result whose remedy is to build the plan again."""
        return Compatibility(status, reason, self.rebuild_command)

    def command_with_option(self, text: str) -> str:
        return f"trt-engine bench {shlex.quote(str(self.path))} -O {text}"

    def pip_command(self, version: Version) -> str:
        return self.installation.pip_command(version)


def check_weights(case: CompatibilityCase) -> Iterator[Compatibility]:
    """Checks that the weights of a stripped plan, and a refitter, are available."""
    if case.passport is None or not case.passport.requirements.stripped:
        return
    source = case.settings.refit_from
    places = [Path(source)] if source else _model_candidates(case, case.passport)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        yield Compatibility(
            "refuse",
            f"its weights were left out, and the model that has them (`{source or case.passport.model.file}`) is not here",
            case.command_with_option(f"refit_from=/path/to/{Path(source or case.passport.model.file).name}"),
        )
    elif case.passport.requirements.lean_runtime or case.installation.bindings is None:
        reason = f"its weights were left out, and only the full Python bindings of {case.header.product} put them back"
        yield Compatibility("refuse", reason, case.pip_command(case.built_version))


def _model_candidates(case: CompatibilityCase, passport: Passport) -> list[Path]:
    """Candidate paths of a passport's model: as named in the build, beside the engine, in the working folder."""
    file = Path(passport.model.file)
    words = passport.build.command.split()
    with contextlib.suppress(ValueError):
        words = shlex.split(passport.build.command)
    named = [Path(word) for word in words if Path(word).name == file.name]
    return [*named, file, case.path.with_name(file.name)]
