"""Whether a TensorRT plan can be used here, said without loading it: one verdict, one reason, one command.

What can be known before is the header, the passport and what is installed. TensorRT has no query for it: that a plan which
should load does load is known once it has been loaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trt_engine.config import RuntimeConfig
from trt_engine.device import info, parse_device
from trt_engine.engine import Engine, Passport, PlanHeader, Verdict, plan_header
from trt_engine.errors import UsageError
from trt_engine.plans import settings
from trt_engine.plans.installed import Installed, installed
from trt_engine.plans.settings import PlanSettings
from trt_engine.plans.versions import (
    COMPUTE_CAPABILITY,
    Version,
    branch_of,
    capability,
    driver_floor,
    newest_for,
    runs_plan_of,
    same_release,
    supports,
    wheel,
    wheel_for,
)

__all__ = ["plan_verdict", "verdict"]

_FIRST, _NEVER = 8, 20  # majors: the first with a version in its header, and one that lies far off
_SYMPTOM = "the symptom of using it all the same is 0 % GPU and a pipeline that is stuck"


def verdict(engine: Engine, config: RuntimeConfig, *, here: Installed | None = None) -> Verdict:
    """loads, penalty, rebuild or refuse for an engine whose payload is a plan; the files are taken to be whole.

    `here` is what is installed (default: this machine, looked at now).
    """
    header = None
    with contextlib.suppress(OSError):
        header = plan_header(engine.path)
    if header is None:
        again = engine.passport.build.command
        return Verdict("refuse", f"`{engine.path.name}` does not begin as a TensorRT plan", again)
    built = engine.passport.build.config.get("options") or {}
    try:
        asked = settings.parse({**built, **config.options})
    except UsageError:  # the options of a newer trt-engine, or none of ours
        asked = settings.parse(dict(config.options))
    kind, number = parse_device(config.device or engine.passport.device)
    return plan_verdict(
        header,
        engine.passport,
        here or _looked(header, engine.passport),
        path=engine.path,
        device=number if kind == "cuda" else None,
        asked=asked,
    )


def plan_verdict(
    header: PlanHeader,
    passport: Passport | None,
    here: Installed | None = None,
    *,
    path: Path = Path("MODEL.engine"),
    device: int | None = 0,
    asked: PlanSettings | None = None,
) -> Verdict:
    """The same from a plan's header, its passport where it has one, and what is installed.

    `device` is the GPU to judge for; None leaves GPUs out of it. `asked` are the settings it would be loaded with.
    """
    case = _Case(header, passport, here or _looked(header, passport), path, device, asked or PlanSettings())
    penalties: list[Verdict] = []
    for look in (_header, _platform, _loader, _version, _driver, _gpu, _plugins, _weights):
        for found in look(case):
            if found.verdict != "penalty":
                return found
            penalties.append(found)
    return penalties[0] if penalties else _loads(case)


@dataclass(frozen=True, slots=True)
class _Case:
    """One plan on one machine."""

    header: PlanHeader
    passport: Passport | None
    here: Installed
    path: Path
    device: int | None
    asked: PlanSettings

    @property
    def built(self) -> Version:
        return Version(self.header.tensorrt)

    @property
    def runs(self) -> Version | None:
        """The TensorRT that would load it: the bindings', else trtexec's."""
        return self.here.python_version or self.here.trtexec_version

    @property
    def board(self) -> info.Gpu | None:
        return next((item for item in self.here.boards if item.index == self.device), None)

    @property
    def again(self) -> str:
        """The command that builds it again here."""
        if self.passport is not None:
            return self.passport.build.command
        if self.here.bindings is None and self.here.trtexec is not None:
            return f"{self.here.trtexec} --onnx=MODEL.onnx --saveEngine={shlex.quote(str(self.path))}"
        return f"trt-engine build MODEL.onnx --backend tensorrt -o {shlex.quote(str(self.path))}"

    def with_option(self, text: str) -> str:
        return f"trt-engine bench {shlex.quote(str(self.path))} -O {text}"

    def pip(self, version: Version) -> str:
        return self.here.pip(version)


def _looked(header: PlanHeader, passport: Passport | None) -> Installed:
    """This machine; trtexec, which takes a process to ask, only where the bindings do not settle it."""
    quick = installed(ask_trtexec=False)
    compatible = passport is not None and passport.needs.version_compatible
    runs = quick.python_version
    if quick.trtexec is None or (
        runs is not None and runs_plan_of(runs, Version(header.tensorrt), version_compatible=compatible)
    ):
        return quick
    return installed()


# ------------------------------------------------------------------------------------------------ what is looked at


def _header(case: _Case) -> Iterator[Verdict]:
    """The version in the header is one that TensorRT can have written there."""
    if not _FIRST <= case.built.major < _NEVER or case.built < Version((8, 6)):
        yield Verdict(
            "refuse",
            f"its header says TensorRT {case.built}, which writes no such header: it is damaged, or of 8.5 or older",
            case.again,
        )


def _platform(case: _Case) -> Iterator[Verdict]:
    if case.passport is not None and case.asked.runtime_platform == "windows_amd64":
        yield Verdict(
            "refuse",
            "it was built for Windows (`runtime_platform=windows_amd64`) and runs nowhere else, not even where it was built",
            f"{case.again} -O runtime_platform=same",
        )


def _loader(case: _Case) -> Iterator[Verdict]:
    """TensorRT is here, and the libraries its bindings would get are of its own version."""
    here = case.here
    if case.runs is None:
        if here.bindings is None and here.trtexec is not None:
            reason = f"`{here.trtexec}` does not run: {here.trtexec_said or 'it says no version'}"
            yield Verdict("refuse", f"it needs TensorRT {case.built}, and {reason}", "trt-engine doctor")
        else:
            reason = f"it needs TensorRT {case.built}, and {_nobody(here)}"
            yield Verdict("refuse", f"{reason}{_elsewhere(case)}", case.pip(case.built))
        return
    bindings = here.bindings
    if bindings is not None and here.library(major=bindings.version.major) is None:
        wanted = f"libnvinfer.so.{bindings.version.major}"
        yield Verdict(
            "refuse",
            f"the bindings of TensorRT {bindings.version} are here and `{wanted}` is neither in pip's folders nor on the "
            "loader's path",
            case.pip(bindings.version),
        )
    twice = here.twice
    if twice and case.runs is not None and any(item.version.major == case.runs.major for item in twice):
        first, other = twice
        bundled = any(item.name == "nvinfer" and item.version.major == case.runs.major for item in here.bundled)
        fits = next((item for item in twice if same_release(item.version, case.built)), None)
        if bundled or fits is first:
            return  # the bindings load their own; or the one that wins is the plan's
        reason = (
            f"two TensorRTs are on one loader path: {first.version} in `{first.path.parent}` wins over {other.version} in "
            f"`{other.path.parent}`, and the plan is of {case.built}"
        )
        if fits is not None:
            yield Verdict(
                "refuse",
                f"{reason}; {_SYMPTOM}",
                f"export LD_LIBRARY_PATH={shlex.quote(str(fits.path.parent))}:$LD_LIBRARY_PATH",
            )
        elif not runs_plan_of(case.runs, case.built, version_compatible=_compatible(case)):
            yield Verdict("rebuild", reason, case.again)


def _nobody(here: Installed) -> str:
    """Why nothing here loads a plan: TensorRT is not here, or only parts of it that load none by themselves."""
    if here.twice:
        first, other = here.twice
        return (
            f"two TensorRTs are on one loader path ({first.version} in `{first.path.parent}` wins over {other.version} in "
            f"`{other.path.parent}`) with neither Python bindings nor trtexec"
        )
    if (library := here.library()) is not None:
        return f"of TensorRT only the library {library.version} is here (`{library.path}`), without bindings or trtexec"
    if here.lean_bindings is not None:
        return f"the lean bindings {here.lean_bindings.version} alone are here; the whole package is needed"
    return "TensorRT is not installed here"


def _version(case: _Case) -> Iterator[Verdict]:
    """All four parts, or a version-compatible plan and what that needs."""
    runs = case.runs
    if runs is None:
        return
    if same_release(runs, case.built):
        if case.passport is not None and _compatible(case) and not case.passport.needs.lean_runtime:
            yield from _host_code(case)
        return
    if runs_plan_of(runs, case.built, version_compatible=_compatible(case)):
        yield from _host_code(case)
        yield Verdict(
            "penalty",
            f"it is a version-compatible plan of TensorRT {case.built} on {runs}: it can be slower than one built here",
            case.again,
        )
        return
    tool = case.here.trtexec_version
    if tool is not None and case.here.bindings is not None and same_release(tool, case.built):
        yield Verdict(
            "penalty",
            f"trtexec here is of the plan's TensorRT ({tool}) and can run it; the Python bindings are {runs} and cannot",
            case.pip(case.built),
        )
        return
    why = (
        f"a version-compatible plan runs on later versions ({_later(case.built)}), not on {runs}"
        if _compatible(case)
        else "plans do not move between versions, all four parts count"
    )
    yield Verdict(
        "rebuild",
        f"it is a plan of TensorRT {case.built}, and {runs} is installed here: {why}{_elsewhere(case)}",
        case.again,
    )


def _host_code(case: _Case) -> Iterator[Verdict]:
    """The lean runtime inside a version-compatible plan runs only with a yes, or comes from the loader."""
    if case.passport is not None and case.passport.needs.lean_runtime:
        if (given := case.asked.lean_runtime) is not None:
            if not Path(given).is_file():
                yield Verdict("refuse", f"the lean runtime `{given}` is not there", f"pip install {_lean(case)}")
            return
        found = [item for item in case.here.lean if same_release(item.version, case.built) and item.path.is_file()]
        if not found:
            reason = (
                f"it leaves the lean runtime to its loader: `libnvinfer_lean.so` of TensorRT {case.built} is not here"
            )
            yield Verdict("refuse", reason, f"pip install {_lean(case)}")
        else:
            reason = f"it leaves the lean runtime to its loader, and `{found[0].path}` has to be named"
            yield Verdict("refuse", reason, case.with_option(f"lean_runtime={shlex.quote(str(found[0].path))}"))
    elif not case.asked.allow_host_code:
        yield Verdict(
            "refuse",
            "it is version-compatible, so it carries code for the host, which is run only when you say so",
            case.with_option("allow_host_code=on"),
        )


def _lean(case: _Case) -> str:
    return wheel(case.built, case.here.driver, case.here.cuda).replace("tensorrt-cu", "tensorrt-lean-cu")


def _driver(case: _Case) -> Iterator[Verdict]:
    cuda, driver, runs = case.here.cuda, case.here.driver, case.runs
    branch = branch_of(driver)
    if cuda is None or branch is None:
        return
    floor = driver_floor(runs, cuda)
    if floor is not None and branch < floor and runs is not None:
        yield Verdict(
            "refuse",
            f"TensorRT {runs} for CUDA {cuda} needs driver {floor} or newer, here is {driver}",
            case.pip(runs) if cuda == 13 and case.here.bindings else f"sudo apt-get install nvidia-driver-{floor}",
        )


def _gpu(case: _Case) -> Iterator[Verdict]:
    if case.device is None:
        return
    board, runs = case.board, case.runs
    if board is None:
        if case.here.boards:
            names = ", ".join(f"{item.index}: {item.name}" for item in case.here.boards)
            yield Verdict("refuse", f"there is no GPU {case.device} here ({names})", "nvidia-smi")
        elif case.here.driver is None and case.passport is not None:
            yield Verdict(
                "refuse", "a plan runs on an NVIDIA GPU, and neither driver nor GPU is here", "trt-engine doctor"
            )
        return  # a driver without NVML: nobody can tell
    here = capability(board.compute_capability)
    if runs is not None and here is not None and supports(runs, here) is False:
        yield Verdict(
            "refuse",
            f"TensorRT {runs} does not run on {board.name} (compute capability {board.compute_capability}), which needs "
            f"TensorRT {newest_for(here)}",
            case.here.pip_of(suited)
            if (suited := wheel_for(here, case.here.driver, case.here.cuda))
            else "trt-engine doctor",
        )
    if case.passport is None or here is None:
        return
    yield from _built_for(case, case.passport, board, here)


def _built_for(case: _Case, passport: Passport, board: info.Gpu, here: tuple[int, int]) -> Iterator[Verdict]:
    needs = passport.needs
    built = capability(needs.compute_capability or "")
    told = f"{needs.gpu or 'a GPU'} (compute capability {needs.compute_capability})"
    found = f"{board.name} ({board.compute_capability})"
    lacking = [name for name in passport.precision.found if COMPUTE_CAPABILITY.get(name, (0, 0)) > here]
    if built is None:
        return
    if built != here:
        level = needs.hardware_compatibility
        if level != "ampere_plus" or min(built, here) < (8, 0):
            kept = {"same_compute_capability": " on GPUs of one compute capability"}.get(level, "")
            reason = f"it was built for {told}{kept} and here is {found}: plans do not move between architectures"
            yield Verdict("rebuild", f"{reason}{_elsewhere(case)}", case.again)
        elif lacking:
            yield Verdict("rebuild", f"it computes in {lacking[0]}, which {found} does not have", case.again)
        else:
            yield Verdict(
                "penalty",
                f"it was built for {told} for all GPUs from Ampere on, and here is {found}: its tactics are not this GPU's",
                case.again,
            )
    elif needs.gpu is not None and needs.gpu != board.name and needs.hardware_compatibility == "none":
        yield Verdict(
            "penalty",
            f"it was built and measured on {told}, here is {found}: the same architecture with another number of "
            "multiprocessors or memory, so it runs with tactics timed elsewhere",
            case.again,
        )


def _plugins(case: _Case) -> Iterator[Verdict]:
    if case.passport is None:
        return
    if case.asked.serialize_plugins:
        wanted: list[str] = [name for name in case.passport.needs.plugins if ".so" not in name]
    else:
        wanted = list(case.passport.needs.plugins)
    for name in wanted:
        if not _found(name, case):
            option = "plugins" if ".so" in name else "python_plugins"
            yield Verdict(
                "refuse",
                f"it needs the plugin library `{name}`, which is neither where it was nor beside the engine",
                case.with_option(f"{option}=/path/to/{Path(name).name}"),
            )


def _found(name: str, case: _Case) -> bool:
    named = [*case.asked.plugins, *case.asked.python_plugins]
    places = [Path(name), case.path.with_name(Path(name).name)]
    places += [Path(item) for item in named if Path(item).name == Path(name).name]
    if any(place.is_file() for place in places):
        return True
    if re.fullmatch(r"[A-Za-z_][\w.]*", name) and ".so" not in name and not name.endswith(".py"):
        with contextlib.suppress(ImportError, ValueError):
            return importlib.util.find_spec(name) is not None
    return False


def _weights(case: _Case) -> Iterator[Verdict]:
    if case.passport is None or not case.passport.needs.stripped:
        return
    source = case.asked.refit_from
    places = [Path(source)] if source else _models(case, case.passport)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        yield Verdict(
            "refuse",
            f"its weights were left out, and the model that has them (`{source or case.passport.model.file}`) is not here",
            case.with_option(f"refit_from=/path/to/{Path(source or case.passport.model.file).name}"),
        )
    elif case.passport.needs.lean_runtime or case.here.bindings is None:
        reason = "its weights were left out, and only TensorRT's full Python bindings put them back"
        yield Verdict("refuse", reason, case.pip(case.built))


def _models(case: _Case, passport: Passport) -> list[Path]:
    """Where the model of a passport may lie: as it was named in the build, beside the engine, here."""
    file = Path(passport.model.file)
    named = [Path(word) for word in _words(passport.build.command) if Path(word).name == file.name]
    return [*named, file, case.path.with_name(file.name)]


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()


def _loads(case: _Case) -> Verdict:
    runs = case.here.python_version if case.here.bindings is not None else None
    who = "the Python bindings run it" if runs is not None else "trtexec runs it (there are no Python bindings)"
    command = (
        f"trt-engine bench {shlex.quote(str(case.path))}"
        if case.passport is not None
        else f"{case.here.trtexec or 'trtexec'} --loadEngine={shlex.quote(str(case.path))}"
        if runs is None
        else f"trt-engine inspect {shlex.quote(str(case.path))} --run"
    )
    unsaid = (
        ""
        if case.passport is not None
        else "; a plan without a passport does not say for which GPU it was built, nor whether it is whole"
    )
    if case.device is not None and not case.here.boards and case.here.driver is None:
        unsaid += ", and no NVIDIA GPU is here to run it"
    parts = "" if case.runs is None or len(case.runs.parts) == 4 else " (as far as its version is told here)"
    return Verdict("loads", f"TensorRT {case.runs}{parts} is the version it was built with: {who}{unsaid}", command)


# ------------------------------------------------------------------------------------------------ words


def _compatible(case: _Case) -> bool:
    return case.passport is not None and case.passport.needs.version_compatible


def _later(built: Version) -> str:
    runs = partial(runs_plan_of, built=built, version_compatible=True)
    majors = [major for major in (8, 9, 10, 11) if runs(Version((major, 99)))]
    return ", ".join(f"{major}.x" for major in majors) or "none that is known"


def _elsewhere(case: _Case) -> str:
    """What to add where the plan was made in a container and this is the host, or the reverse."""
    if case.passport is None:
        return ""
    there, here = case.passport.environment.container, case.here.container
    if (there is None) == (here is None):
        return ""
    made = f"in a container ({there})" if there else "on a host"
    now = f"a container ({here})" if here else "the host"
    return f"; it was built {made} and this is {now}: run it where it was built, or build it here ({_SYMPTOM})"
