"""Whether a plan can be used here, without loading it: one verdict, one reason, one command.

The evidence is header, passport and installation. TensorRT has no query, so only loading proves that a plan loads.
TensorRT-RTX has one: see `rtx_compatibility`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import info, parse_device
from trt_engine.engine import Engine
from trt_engine.errors import UsageError
from trt_engine.plan_header import PLAN_BACKENDS, PlanHeader, plan_header
from trt_engine.records.passport import Compatibility, Passport
from trt_engine.trt import settings
from trt_engine.trt.compatibility_case import CompatibilityCase, check_weights
from trt_engine.trt.installation import RUNTIME_KINDS, Installation, detect_installation
from trt_engine.trt.rtx_compatibility import ValidityQuery, check_rtx_plan
from trt_engine.trt.settings import PlanSettings
from trt_engine.trt.versions import (
    COMPUTE_CAPABILITY,
    Version,
    can_load_plan,
    lacking_driver_branch,
    parse_capability,
    same_release,
    supported_versions_text,
    supports,
    wheel_for_gpu,
)

_FIRST_MAJOR, _IMPOSSIBLE_MAJOR = 8, 20  # majors: the first with a version in its header, and an impossible one
_SYMPTOM = "the symptom of using it all the same is 0 % GPU and a pipeline that is stuck"


def check_compatibility(
    engine: Engine,
    config: RuntimeConfig,
    *,
    installation: Installation | None = None,
    query_validity: ValidityQuery | None = None,
) -> Compatibility:
    """loads, penalty, unknown, rebuild or refuse for an engine whose payload is a plan; assumes intact files.

    `here` is the installation (default: detected on this machine), `ask` queries TensorRT-RTX about its plans.
    """
    header = None
    with contextlib.suppress(OSError):
        header = plan_header(engine.path)
    if header is None:
        again = engine.passport.build.command
        return Compatibility("refuse", f"`{engine.path.name}` does not begin as a plan", again)
    library = engine.passport.requirements.library
    if library in PLAN_BACKENDS.values() and library != PLAN_BACKENDS[header.product]:
        reason = f"its passport is that of a plan for `{library}`, and the file is a {header.title}"
        return Compatibility("refuse", reason, engine.passport.build.command)
    built = engine.passport.build.config.get("options") or {}
    try:
        asked = settings.parse({**built, **config.options})
    except UsageError:  # the options of a newer trt-engine, of another backend, or unknown
        own = header.product == "TensorRT"
        asked = (
            settings.parse(dict(config.options)) if own else PlanSettings(refit_from=config.options.get("refit_from"))
        )
    kind, number = parse_device(config.device or engine.passport.device)
    return check_plan(
        header,
        engine.passport,
        installation or _inspect_machine(header, engine.passport),
        path=engine.path,
        device=number if kind == "cuda" else None,
        settings=asked,
        query_validity=query_validity,
    )


def check_plan(
    header: PlanHeader,
    passport: Passport | None,
    installation: Installation | None = None,
    *,
    path: Path = Path("MODEL.engine"),
    device: int | None = 0,
    settings: PlanSettings | None = None,
    query_validity: ValidityQuery | None = None,
) -> Compatibility:
    """The same from a plan's header, its passport if any, and the installation.

    `device` is the GPU to check for; None skips GPU checks. `settings` are the load settings.
    """
    case = CompatibilityCase(
        header, passport, installation or _inspect_machine(header, passport), path, device, settings or PlanSettings()
    )
    found = _check_case(case, query_validity)
    if header.container is None or found.status in ("rebuild", "refuse"):
        return found
    reason = f"{found.reason}; the {header.offset} bytes of {header.container.tool} before the plan go first"
    return Compatibility(found.status, reason, header.strip_command(path) or found.command)


def _check_case(case: CompatibilityCase, query_validity: ValidityQuery | None) -> Compatibility:
    if case.header.product == "TensorRT-RTX":
        return check_rtx_plan(case, query_validity)
    penalties: list[Compatibility] = []
    for look in (
        _check_header,
        _check_loader,
        _check_version,
        _check_driver,
        _check_gpu,
        _check_plugins,
        check_weights,
    ):
        for found in look(case):
            if found.status != "penalty":
                return found
            penalties.append(found)
    return penalties[0] if penalties else _loadable(case)


def _inspect_machine(header: PlanHeader, passport: Passport | None) -> Installation:
    """The installation of this machine; trtexec, which needs a process, only if the bindings are not enough."""
    quick = detect_installation(probe_trtexec=False, product=header.product)
    compatible = passport is not None and passport.requirements.version_compatible
    runs = quick.python_version
    if quick.trtexec is None or (
        runs is not None and can_load_plan(runs, Version(header.tensorrt), version_compatible=compatible)
    ):
        return quick
    return detect_installation()


# ------------------------------------------------------------------------------------------------ what is looked at


def _check_header(case: CompatibilityCase) -> Iterator[Compatibility]:
    """Checks that TensorRT can have written the header's version, and that the plan is not for another platform."""
    if case.header.is_old:
        yield case.result("rebuild", f"it is a {case.header.title}, and no release from 8.2 on loads such a plan")
    if not _FIRST_MAJOR <= case.built_version.major < _IMPOSSIBLE_MAJOR or case.built_version < Version((8, 6)):
        stated = (
            f"TensorRT {case.built_version}, which writes no such header" if any(case.header.tensorrt) else "no version"
        )
        yield case.result("refuse", f"its header states {stated}: it is damaged, or of TensorRT 8.5 or older")
    if case.passport is not None and case.settings.runtime_platform == "windows_amd64":
        yield Compatibility(
            "refuse",
            "it was built for Windows (`runtime_platform=windows_amd64`) and runs nowhere else, not even where it was built",
            f"{case.rebuild_command} -O runtime_platform=same",
        )


def _check_loader(case: CompatibilityCase) -> Iterator[Compatibility]:
    """TensorRT is installed, and its bindings would load libraries of the same version."""
    here = case.installation
    if case.loader_version is None:
        if here.bindings is None and here.trtexec is not None:
            reason = f"`{here.trtexec}` does not run: {here.trtexec_message or 'it prints no version'}"
            yield Compatibility("refuse", f"it needs TensorRT {case.built_version}, and {reason}", "trt-engine doctor")
        else:
            reason = f"it needs TensorRT {case.built_version}, and {_no_loader_reason(here)}"
            yield Compatibility("refuse", f"{reason}{_container_hint(case)}", case.pip_command(case.built_version))
        return
    bindings = here.bindings
    if bindings is not None and here.library(major=bindings.version.major) is None:
        wanted = f"libnvinfer.so.{bindings.version.major}"
        yield Compatibility(
            "refuse",
            f"the bindings of TensorRT {bindings.version} are here and `{wanted}` is neither in pip's folders nor on the "
            "loader's path",
            case.pip_command(bindings.version),
        )
    twice = here.conflicting_libraries
    if (
        twice
        and case.loader_version is not None
        and any(item.version.major == case.loader_version.major for item in twice)
    ):
        first, other = twice
        bundled = any(
            item.name == "nvinfer" and item.version.major == case.loader_version.major for item in here.bundled
        )
        fits = next((item for item in twice if same_release(item.version, case.built_version)), None)
        if bundled or fits is first:
            return  # the bindings load theirs; or the loaded one is the plan's
        reason = (
            f"two TensorRTs are on one loader path: {first.version} in `{first.path.parent}` wins over {other.version} in "
            f"`{other.path.parent}`, and the plan is of {case.built_version}"
        )
        if fits is not None:
            yield Compatibility(
                "refuse",
                f"{reason}; {_SYMPTOM}",
                f"export LD_LIBRARY_PATH={shlex.quote(str(fits.path.parent))}:$LD_LIBRARY_PATH",
            )
        elif not can_load_plan(
            case.loader_version, case.built_version, version_compatible=_is_version_compatible(case)
        ):
            yield case.result("rebuild", reason)


def _no_loader_reason(installation: Installation) -> str:
    """Why nothing here loads a plan: TensorRT is missing, or lacks the parts that load plans."""
    if installation.conflicting_libraries:
        first, other = installation.conflicting_libraries
        return (
            f"two TensorRTs are on one loader path ({first.version} in `{first.path.parent}` wins over {other.version} in "
            f"`{other.path.parent}`) with neither Python bindings nor trtexec"
        )
    if (library := installation.library()) is not None:
        return f"of TensorRT only the library {library.version} is here (`{library.path}`), without bindings or trtexec"
    for kind in RUNTIME_KINDS:
        if (bindings := installation.runtime(kind).bindings) is not None:
            return f"the {kind} bindings {bindings.version} alone are here; the whole package is needed"
    return "TensorRT is not installed here"


def _check_version(case: CompatibilityCase) -> Iterator[Compatibility]:
    """Checks all four version parts, or the requirements of a version-compatible plan."""
    runs = case.loader_version
    if runs is None:
        return
    if same_release(runs, case.built_version):
        if case.passport is not None and _is_version_compatible(case) and not case.passport.requirements.lean_runtime:
            yield from _check_host_code(case)
        return
    if can_load_plan(runs, case.built_version, version_compatible=_is_version_compatible(case)):
        yield from _check_host_code(case)
        yield case.result(
            "penalty",
            f"it is a version-compatible plan of TensorRT {case.built_version} on {runs}: it can be slower than "
            f"one built here",
        )
        return
    tool = case.installation.trtexec_version
    if tool is not None and case.installation.bindings is not None and same_release(tool, case.built_version):
        yield Compatibility(
            "penalty",
            f"trtexec here is of the plan's TensorRT ({tool}) and can run it; the Python bindings are {runs} and cannot",
            case.pip_command(case.built_version),
        )
        return
    why = (
        f"a version-compatible plan runs on later versions ({_later_versions(case.built_version)}), not on {runs}"
        if _is_version_compatible(case)
        else "plans do not move between versions, all four parts count"
    )
    yield case.result(
        "rebuild",
        f"it is a plan of TensorRT {case.built_version}, and {runs} is installed here: {why}{_container_hint(case)}",
    )


def _check_host_code(case: CompatibilityCase) -> Iterator[Compatibility]:
    """Checks that a version-compatible plan may run its lean runtime, or is given one."""
    if case.passport is not None and case.passport.requirements.lean_runtime:
        if (given := case.settings.lean_runtime) is not None:
            if not Path(given).is_file():
                yield Compatibility(
                    "refuse", f"the lean runtime `{given}` is not there", f"pip install {_check_lean_runtime(case)}"
                )
            return
        found = [
            item
            for item in case.installation.lean
            if same_release(item.version, case.built_version) and item.path.is_file()
        ]
        if not found:
            reason = (
                f"it leaves the lean runtime to its loader: `libnvinfer_lean.so` of TensorRT "
                f"{case.built_version} is not here"
            )
            yield Compatibility("refuse", reason, f"pip install {_check_lean_runtime(case)}")
        else:
            reason = f"it leaves the lean runtime to its loader, and `{found[0].path}` has to be named"
            yield Compatibility(
                "refuse", reason, case.command_with_option(f"lean_runtime={shlex.quote(str(found[0].path))}")
            )
    elif not case.settings.allow_host_code:
        yield Compatibility(
            "refuse",
            "it is version-compatible, so it carries host code, which runs only with your permission",
            case.command_with_option("allow_host_code=on"),
        )


def _check_lean_runtime(case: CompatibilityCase) -> str:
    return case.installation.runtime("lean").wheel_spec(case.built_version, case.installation.cuda_major)


def _check_driver(case: CompatibilityCase) -> Iterator[Compatibility]:
    cuda, driver, runs = case.installation.cuda_major, case.installation.driver, case.loader_version
    if cuda is not None and runs is not None and (floor := lacking_driver_branch(driver, runs, cuda)) is not None:
        yield Compatibility(
            "refuse",
            f"TensorRT {runs} for CUDA {cuda} needs driver {floor} or newer, here is {driver}",
            case.pip_command(runs)
            if cuda == 13 and case.installation.bindings
            else f"sudo apt-get install nvidia-driver-{floor}",
        )


def _check_gpu(case: CompatibilityCase) -> Iterator[Compatibility]:
    if case.device is None:
        return
    board, runs = case.gpu, case.loader_version
    if board is None:
        if case.installation.gpus:
            names = ", ".join(f"{item.index}: {item.name}" for item in case.installation.gpus)
            yield Compatibility("refuse", f"GPU {case.device} does not exist here ({names})", "nvidia-smi")
        elif case.installation.driver is None and case.passport is not None:
            yield Compatibility(
                "refuse", "a plan runs on an NVIDIA GPU, and neither driver nor GPU is here", "trt-engine doctor"
            )
        return  # a driver without NVML: unknown
    here = parse_capability(board.compute_capability)
    if runs is not None and here is not None and supports(runs, here) is False:
        yield Compatibility(
            "refuse",
            f"TensorRT {runs} does not run on {board.name} (compute capability {board.compute_capability}), which needs "
            f"TensorRT {supported_versions_text(here)}",
            case.installation.pip_install_command(suited)
            if (suited := wheel_for_gpu(here, case.installation.driver, case.installation.cuda_major))
            else "trt-engine doctor",
        )
    if case.passport is None or here is None:
        return
    yield from _check_built_gpu(case, case.passport, board, here)


def _check_built_gpu(
    case: CompatibilityCase, passport: Passport, gpu: info.Gpu, installation: tuple[int, int]
) -> Iterator[Compatibility]:
    needs = passport.requirements
    built = parse_capability(needs.compute_capability or "")
    stated = f"{needs.gpu or 'a GPU'} (compute capability {needs.compute_capability})"
    found = f"{gpu.name} ({gpu.compute_capability})"
    lacking = [name for name in passport.precision.shares if COMPUTE_CAPABILITY.get(name, (0, 0)) > installation]
    if built is None:
        return
    if built != installation:
        level = needs.hardware_compatibility
        if level != "ampere_plus" or min(built, installation) < (8, 0):
            kept = {"same_compute_capability": " on GPUs of one compute capability"}.get(level, "")
            reason = f"it was built for {stated}{kept} and here is {found}: plans do not move between architectures"
            yield case.result("rebuild", f"{reason}{_container_hint(case)}")
        elif lacking:
            yield case.result("rebuild", f"it computes in {lacking[0]}, which {found} does not have")
        else:
            yield case.result(
                "penalty",
                f"it was built for {stated} for all GPUs from Ampere on, and here is {found}: "
                "its tactics are not this GPU's",
            )
    elif needs.gpu is not None and needs.gpu != gpu.name and needs.hardware_compatibility == "none":
        yield case.result(
            "penalty",
            f"it was built and measured on {stated}, here is {found}: the same architecture with another number of "
            "multiprocessors or memory, so it runs with tactics timed elsewhere",
        )


def _check_plugins(case: CompatibilityCase) -> Iterator[Compatibility]:
    if case.passport is None:
        return
    if case.settings.serialize_plugins:
        wanted: list[str] = [name for name in case.passport.requirements.plugins if ".so" not in name]
    else:
        wanted = list(case.passport.requirements.plugins)
    for name in wanted:
        if not _find_plugin(name, case):
            option = "plugins" if ".so" in name else "python_plugins"
            yield Compatibility(
                "refuse",
                f"it needs the plugin library `{name}`, which is neither where it was nor beside the engine",
                case.command_with_option(f"{option}=/path/to/{Path(name).name}"),
            )


def _find_plugin(name: str, case: CompatibilityCase) -> bool:
    named = [*case.settings.plugins, *case.settings.python_plugins]
    places = [Path(name), case.path.with_name(Path(name).name)]
    places += [Path(item) for item in named if Path(item).name == Path(name).name]
    if any(place.is_file() for place in places):
        return True
    if re.fullmatch(r"[A-Za-z_][\w.]*", name) and ".so" not in name and not name.endswith(".py"):
        with contextlib.suppress(ImportError, ValueError):
            return importlib.util.find_spec(name) is not None
    return False


def _loadable(case: CompatibilityCase) -> Compatibility:
    runs = case.installation.python_version if case.installation.bindings is not None else None
    who = "the Python bindings run it" if runs is not None else "trtexec runs it (there are no Python bindings)"
    command = (
        f"trt-engine bench {shlex.quote(str(case.path))}"
        if case.passport is not None
        else f"{case.installation.trtexec or 'trtexec'} --loadEngine={shlex.quote(str(case.path))}"
        if runs is None
        else f"trt-engine inspect {shlex.quote(str(case.path))} --run"
    )
    unsaid = (
        ""
        if case.passport is not None
        else "; a plan without a passport does not state its GPU, nor whether it is complete"
    )
    if case.device is not None and not case.installation.gpus and case.installation.driver is None:
        unsaid += ", and no NVIDIA GPU is here to run it"
    parts = (
        ""
        if case.loader_version is None or len(case.loader_version.parts) == 4
        else " (as far as its version is known)"
    )
    return Compatibility(
        "loads", f"TensorRT {case.loader_version}{parts} is the version it was built with: {who}{unsaid}", command
    )


# ------------------------------------------------------------------------------------------------ words


def _is_version_compatible(case: CompatibilityCase) -> bool:
    return case.passport is not None and case.passport.requirements.version_compatible


def _later_versions(built: Version) -> str:
    runs = partial(can_load_plan, built=built, version_compatible=True)
    majors = [major for major in (8, 9, 10, 11) if runs(Version((major, 99)))]
    return ", ".join(f"{major}.x" for major in majors) or "none that is known"


def _container_hint(case: CompatibilityCase) -> str:
    """A hint if the plan was built in a container and this is the host, or the reverse."""
    if case.passport is None:
        return ""
    there, here = case.passport.environment.container, case.installation.container
    if (there is None) == (here is None):
        return ""
    made = f"in a container ({there})" if there else "on a host"
    now = f"a container ({here})" if here else "the host"
    return f"; it was built {made} and this is {now}: run it where it was built, or build it here ({_SYMPTOM})"
