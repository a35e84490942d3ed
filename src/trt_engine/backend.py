"""A backend's spec: its name, requirements, and the dotted names of its components.

A backend is one folder under `backends/` whose `__init__` defines `spec`. Specs are light: reading all of them imports no
library. A backend that seems to need an `if name == ...` elsewhere lacks a field here.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from trt_engine.config.build import BuildConfig
from trt_engine.device import info
from trt_engine.errors import SetupError, UsageError
from trt_engine.tensors import suggest

log = logging.getLogger(__name__)

_CODE_OPTIONS = frozenset(
    {
        "plugins",
        "python_plugins",
        "serialize_plugins",
        "lean_runtime",
        "allow_host_code",
        "refit_from",
        "build_route",
        "trust_source",
    }
)
_FILE_OPTION = re.compile(r"path|plugin|lib|dir|file|folder|cache|prefix|dump|profil")


def code_options(options: Mapping[str, object]) -> list[str]:
    """The options of a backend that load code, or name a file to read or write: not for a file to set unasked."""
    found = []
    for name, value in options.items():
        own = name.replace("-", "_").lower()
        of_provider = "." in own and _FILE_OPTION.search(own.partition(".")[2])
        if own in _CODE_OPTIONS or of_provider or "/" in str(value) or "\\" in str(value):
            found.append(name)
    return found


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """Description of a backend. Dotted names are `module:attribute`, imported on demand."""

    name: str
    summary: str
    payload_suffix: str
    """Suffix of the payload file: `.onnx`, `.engine`, `.pt2`."""
    modules: tuple[str, ...]
    """Modules the backend needs."""
    install: str
    """Install command."""
    builder: str | None
    runtime: str | None
    runtime_modules: tuple[str, ...] | None = None
    """Modules needed to run an engine, where they differ from those for building."""
    runtimes: tuple[str, ...] = ()
    """Other backends whose runtime runs these engines, tried first if installed."""
    tools: tuple[str, ...] = ()
    """Programs it needs, found on PATH or in NVIDIA's folders: `trtexec`."""
    writes_log: bool = False
    """The builder writes `BuildPaths.log` and uses `BuildPaths.timing_cache`."""
    keeps_cache: bool = False
    """The builder's compiler keeps files between builds, in `BuildPaths.cache`."""
    devices: tuple[str, ...] = ("cpu",)
    options: str | None = None
    """A frozen dataclass of `opt` settings: what `-O name=value` may set."""
    ignored_settings: tuple[str, ...] = ()
    """Settings of `BuildConfig` that make no difference to its engines: their keys do not hold them."""
    compatibility: str | None = None
    """`(engine: Engine, config: RuntimeConfig) -> Verdict`: can this engine be loaded here? From the passport alone:
    file integrity is the caller's check."""
    check_model: str | None = None
    """`(model: Model) -> None`: `ModelError` for an unsupported graph, before the build starts."""
    unsupported_precision: str | None = None
    """`(model: Model, config: BuildConfig) -> PrecisionError | None`: the error a build would end with because the device
    has no kernels for the requested precision, as far as known without building."""
    safer_options: tuple[str, ...] = ()
    """Values of `-O` that rewrite less, each less than the one before, where an engine differs from its model. The note of
    that name in the passport records the value used."""
    parity_options: str | None = None
    """`(model: Path, config: BuildConfig) -> dict[str, str] | str`: the `-O` an engine just built from that graph is loaded
    with to be proved; or why it cannot be loaded here."""
    measure: str | None = None
    """`(engine, BenchConfig, RuntimeConfig) -> BenchRecord`, for a backend that measures in a separate process."""
    layers: str | None = None
    """`(engine: Engine, config: RuntimeConfig | None) -> tuple[LayerInfo, ...]`: the engine's layers."""
    profile: str | None = None
    """`(engine: Engine, feeds: Tensors, config: RuntimeConfig, *, inferences: int, warmup: int, keep: Path | None) ->
    LayerProfile`: how long each layer takes. `keep` is the folder for the raw file. The category of a row is filled in by
    the caller (`profiling.layers`), and so is missing work."""
    trace_nodes: str | None = None
    """`(engine: Engine, feeds: Tensors, config: RuntimeConfig, *, trace: Path) -> ContextManager[Callable[[], object]]`: one
    inference for each call while the backend writes down which node the host is at, as ONNX Runtime's profiler writes it.
    For a backend whose kernels carry no layer's name."""
    tuning: str | None = None
    """`(model: Model, config: BuildConfig) -> tuple[dict[str, str], ...]`: `-O` settings that are built and measured beside
    the requested ones; empty where none can help this graph. Without `config.time_budget_s` only those that nearly always
    pay."""
    selects: bool = False
    """Has no builder: its engines are the best candidates of the other backends."""
    preference: int = 100
    """Order of equally fast candidates: the lower is simpler to deploy."""
    providers: bool = False
    """Uses ONNX Runtime execution providers; provider options are `-O provider.name=value`."""
    quant_target: str | None = None
    """The quantisation target of its engines (`graph.quant_target`), or the dotted name of `(config: BuildConfig) -> str`
    where it depends on the device and the providers, in a module without heavy imports; None where that is open."""
    fast_build: bool = False
    """Building takes about as long as loading a model: cheap enough for a second engine that only a check needs."""
    resolve_gpus: str | None = None
    """`(names: Sequence[str]) -> tuple[str, ...]`: the compute capabilities (`8.9`) those names mean, in order; `UsageError`
    listing the known ones. For a backend that builds for GPUs that are not in this machine; in a light module."""
    plan_validity: str | None = None
    """`(plan: Path) -> ValidityReport` (`trt.rtx_compatibility`): what the library reports about a plan by its first
    bytes, where the library has such a query."""
    profile_sensitive: bool = False
    """Kernels are chosen for the profile's shapes: a wide range, or an optimum far from its end, costs speed."""
    nvinfer: bool = False
    """DeepStream's `nvinfer` loads its engines."""
    gpu_precisions: tuple[str, ...] = ()
    """Precisions that it builds for a GPU in, where the command names no backend; none for one that has to be named."""
    gpu_preference: int = 100
    """Order in which those backends are taken."""
    gpu_missing: str | None = None
    """`() -> str | None`: what it lacks here to build for a GPU, besides its modules."""
    aliases: tuple[str, ...] = ()
    """Common wrong names for it, for error hints."""
    hidden: bool = False
    """Not listed for users (the fake one)."""

    def missing_modules(self, component: str = "builder") -> tuple[str, ...]:
        """The modules that this component needs and that are not installed."""
        modules = self.modules
        if component == "runtime" and self.runtime_modules is not None:
            modules = self.runtime_modules
        return tuple(name for name in modules if importlib.util.find_spec(name) is None)

    def load_component(self, component: str) -> Any:
        """The object behind one of the dotted names; `SetupError` with the install line where it is not available."""
        dotted: str | None = getattr(self, component)
        if dotted is None:
            raise UsageError(f"the backend `{self.name}` has no {component}", hint="choose another with `--backend`")
        if missing := self.missing_modules(component):
            raise SetupError(
                f"the backend `{self.name}` needs {', '.join(f'`{name}`' for name in missing)}, not installed here",
                hint=self.install,
            )
        module, _, attribute = dotted.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ImportError as error:  # a package is there but a library under it is not (libnvinfer.so, libcuda.so)
            raise SetupError(
                f"the backend `{self.name}` cannot be loaded: {error}", hint="`trt-engine doctor`"
            ) from error

    def provides(self, component: str) -> bool:
        """True when the backend has that optional component."""
        return getattr(self, component) is not None

    def load_function(self, component: str) -> Callable[..., Any]:
        """`load_component` for components that are functions."""
        found: Callable[..., Any] = self.load_component(component)
        return found


@cache
def list_backends() -> dict[str, BackendSpec]:
    """Specs of all backends: those of the folder `backends/`, then those of other packages.

    Another package brings one by an entry point of the group `trt_engine.backends` that names its spec
    (docs/extending.md). It cannot take a name that is already there.
    """
    folder = Path(__file__).parent / "backends"
    names = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    own: list[BackendSpec] = [importlib.import_module(f"trt_engine.backends.{name}").spec for name in names]
    backend_specs = {backend_spec.name: backend_spec for backend_spec in own}
    for point in metadata.entry_points(group="trt_engine.backends"):
        try:
            backend_spec = point.load()
        except Exception as error:  # a broken third-party package must not break every verb
            log.warning("the backend `%s` of another package cannot be loaded: %s", point.name, error)
            continue
        if not isinstance(backend_spec, BackendSpec) or backend_spec.name in backend_specs:
            log.warning("the entry point `%s` is not a backend spec with a unique name; ignored", point.value)
            continue
        backend_specs[backend_spec.name] = backend_spec
    return backend_specs


def get_backend(name: str) -> BackendSpec:
    """The backend of that name; `UsageError` naming the nearest one otherwise."""
    backend_specs = list_backends()
    if name not in backend_specs:
        meant = next(
            (backend_spec.name for backend_spec in backend_specs.values() if name.lower() in backend_spec.aliases), None
        )
        hint = f"did you mean `{meant}`?" if meant else suggest(name, backend_names())
        raise UsageError(f"unknown backend `{name}`", hint=hint)
    return backend_specs[name]


def backend_names() -> list[str]:
    """The backends that are offered to users."""
    return [backend_spec.name for backend_spec in list_backends().values() if not backend_spec.hidden]


def runtime_backend(spec: BackendSpec) -> BackendSpec:
    """The backend whose runtime runs the engines of this one."""
    known = list_backends()
    return next(
        (known[name] for name in spec.runtimes if name in known and not known[name].missing_modules("runtime")), spec
    )


def gpu_backend(precision: str | None = None, *, suffix: str = "") -> BackendSpec | None:
    """The backend that builds for a GPU of this machine where none is named, in that precision (of any, by default) and as
    a file of that suffix; None without a GPU, and where no library for it is installed."""
    if not info.has_gpu():
        return None
    return next(
        (one for one in _gpu_backends(precision) if suffix in ("", one.payload_suffix) and _uses_gpu(one)), None
    )


def gpu_hint(precision: str) -> str:
    """The flags that build in that precision for a GPU, for an error's hint."""
    if (found := gpu_backend(precision)) is not None:
        return f"`{gpu_flags(found)}` builds for the GPU of this machine"
    known = _gpu_backends(precision)
    if info.has_gpu():
        return f"`{gpu_flags(known[0])}` builds for the GPU of this machine, after `{known[0].install.split(' (')[0]}`"
    flags = [gpu_flags(one) for one in known if not one.tools]
    return f"`{'` or `'.join(flags[:2])}` builds for an NVIDIA GPU, on a machine that has one"


def gpu_flags(spec: BackendSpec) -> str:
    """The flags that build with this backend for the first GPU: `--backend inductor --device cuda:0`."""
    named = [] if spec.name == BuildConfig().backend else [f"--backend {spec.name}"]
    return " ".join([*named, *(["--device cuda:0"] if spec.devices[0] == "cpu" else [])])


def _gpu_backends(precision: str | None) -> list[BackendSpec]:
    found = [one for one in list_backends().values() if one.gpu_precisions and not one.hidden]
    fitting = [one for one in found if precision is None or precision in one.gpu_precisions]
    return sorted(fitting, key=lambda one: one.gpu_preference)


def _uses_gpu(spec: BackendSpec) -> bool:
    try:
        spec.load_component("builder")
        return not spec.provides("gpu_missing") or spec.load_function("gpu_missing")() is None
    except SetupError:
        return False


def resolve_quant_target(config: BuildConfig) -> str | None:
    """The quantisation target of the engine these settings build: where its kernels want Q/DQ; None where that is open."""
    backend_spec, config = get_backend(config.backend), with_default_device(config)
    if backend_spec.quant_target is None or ":" not in backend_spec.quant_target:
        return backend_spec.quant_target
    module, _, attribute = backend_spec.quant_target.partition(":")
    found: str = getattr(importlib.import_module(module), attribute)(config)
    return found


def resolve_gpu_targets(spec: BackendSpec, names: Sequence[str], *, flag: str = "--gpus") -> tuple[str, ...]:
    """The compute capabilities that `flag` names, in one order and spelling; `UsageError` for an unknown one, and for a
    backend that builds for the device it runs on."""
    if not names:
        return ()
    if spec.resolve_gpus is None:
        others = [
            f"`--backend {other.name}`"
            for other in list_backends().values()
            if other.provides("resolve_gpus") and not other.hidden
        ]
        raise UsageError(
            f"the backend `{spec.name}` builds for the device it runs on: `{flag} {','.join(names)}` is not for it",
            hint=f"{' or '.join(others)} builds for GPUs that are not here; else leave `{flag}` out",
        )
    module, _, attribute = spec.resolve_gpus.partition(":")
    found: tuple[str, ...] = getattr(importlib.import_module(module), attribute)(names)
    return found


def with_default_device(config: BuildConfig) -> BuildConfig:
    """The settings with the device filled in: the backend's first by default."""
    if config.device:
        return config
    first = get_backend(config.backend).devices[0]
    return replace(config, device=first if first == "cpu" else f"{first}:0")
