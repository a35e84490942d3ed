"""A backend's card: what it is called, what it needs, and the dotted names of its halves.

A backend is one folder under `backends/` whose `__init__` defines `card`. Cards are light: reading all of them imports no
library. A card that seems to need an `if name == ...` elsewhere lacks a field here.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from trt_engine.config import BuildConfig
from trt_engine.errors import SetupError, UsageError
from trt_engine.tensors import closest

__all__ = ["Backend", "backend", "backends", "quant_target_of", "runner_of", "settled"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backend:
    """The card. Dotted names are `module:attribute`, imported only when called for."""

    name: str
    summary: str
    payload_suffix: str
    """Of the payload file: `.onnx`, `.engine`, `.pt2`."""
    modules: tuple[str, ...]
    """What must be importable for the backend to work."""
    install: str
    """What to type when it is not."""
    builder: str | None
    runtime: str | None
    runtime_modules: tuple[str, ...] | None = None
    """What must be importable to run an engine, where that is not what building one needs."""
    run_by: tuple[str, ...] = ()
    """Other backends whose runtime runs these engines, asked first where they are installed; then its own."""
    tools: tuple[str, ...] = ()
    """Programs it needs, found on PATH or in NVIDIA's folders: `trtexec`."""
    builds_log: bool = False
    """The builder writes `BuildPlaces.log` and uses `BuildPlaces.timing_cache`."""
    devices: tuple[str, ...] = ("cpu",)
    options: str | None = None
    """A frozen dataclass of `opt` settings: what `-O name=value` may set."""
    ignores: tuple[str, ...] = ()
    """Settings of `BuildConfig` that make no difference to its engines: their keys do not hold them."""
    verdict: str | None = None
    """`(engine: Engine, config: RuntimeConfig) -> Verdict`: can this engine be loaded here? From the passport alone:
    whether the files are whole is the caller's question."""
    accepts: str | None = None
    """`(model: Model) -> None`: `ModelError` for a graph the builder cannot take, said before anything is spent."""
    lacking: str | None = None
    """`(model: Model, config: BuildConfig) -> PrecisionError | None`: the error a build would end with because the device
    has no kernels for the precision asked for, as far as that is known without building."""
    milder: tuple[str, ...] = ()
    """Values of `-O` that rewrite less, each less than the one before, where an engine differs from its model. The note of
    that name in the passport says which one a build had."""
    proving: str | None = None
    """`(model: Path, config: BuildConfig) -> dict[str, str] | str`: the `-O` an engine just built from that graph is loaded
    with to be proved; or why it cannot be loaded here."""
    measure: str | None = None
    """`(engine, BenchConfig, RuntimeConfig) -> BenchRecord`, for a backend that measures in a process of its own."""
    layers: str | None = None
    """`(engine: Engine, config: RuntimeConfig | None) -> tuple[LayerInfo, ...]`: what an engine tells of its layers."""
    profile: str | None = None
    """`(engine: Engine, feeds: Tensors, config: RuntimeConfig, *, inferences: int, warmup: int, keep: Path | None) ->
    LayerProfile`: how long each layer takes. `keep` is the folder for the raw file. The category of a row is filled in by
    who calls it (`profiling.layers`), and its work too where the row tells none."""
    traced: str | None = None
    """`(engine: Engine, feeds: Tensors, config: RuntimeConfig, *, trace: Path) -> ContextManager[Callable[[], object]]`: one
    inference for each call while the backend writes down which node the host is at, as ONNX Runtime's profiler writes it.
    For a backend whose kernels carry no layer's name."""
    providers: bool = False
    """It runs on providers with settings of their own, the `-O` with a dot: `cuda.gpu_mem_limit`."""
    quant_target: str | None = None
    """The quantisation target of its engines (`graph.quant_target`), or the dotted name of `(config: BuildConfig) -> str`
    where it depends on the device and the providers, in a module without heavy imports; None where that is open."""
    builds_in_seconds: bool = False
    """Building takes about as long as loading a model: cheap enough for a second engine that only a check needs."""
    tuned: bool = False
    """Kernels are chosen for the profile's shapes: a wide range, or an optimum far from its end, costs speed."""
    hidden: bool = False
    """Not offered to users in lists (the fake one)."""

    def missing(self, which: str = "builder") -> tuple[str, ...]:
        """The modules that half needs and that are not installed here."""
        modules = self.modules
        if which == "runtime" and self.runtime_modules is not None:
            modules = self.runtime_modules
        return tuple(name for name in modules if importlib.util.find_spec(name) is None)

    def half(self, which: str) -> Any:
        """The object behind one of the dotted names; `SetupError` with the install line where it cannot be had."""
        dotted: str | None = getattr(self, which)
        if dotted is None:
            raise UsageError(f"the backend `{self.name}` has no {which}", hint="choose another with `--backend`")
        if missing := self.missing(which):
            raise SetupError(
                f"the backend `{self.name}` needs {', '.join(f'`{name}`' for name in missing)}, not installed here",
                hint=self.install,
            )
        module, _, attribute = dotted.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ImportError as error:  # a package is there but a library under it is not (libnvinfer.so, libcuda.so)
            raise SetupError(
                f"the backend `{self.name}` cannot be loaded: {error}", hint="trt-engine doctor"
            ) from error

    def has(self, which: str) -> bool:
        """True when the card names that optional half."""
        return getattr(self, which) is not None

    def call(self, which: str) -> Callable[..., Any]:
        """The same as `half`, for halves that are functions."""
        found: Callable[..., Any] = self.half(which)
        return found


@cache
def backends() -> dict[str, Backend]:
    """The cards of all backends: those of the folder `backends/`, then those other packages bring.

    Another package brings one by an entry point of the group `trt_engine.backends` that names its card
    (docs/extending.md). It cannot take a name that is already there.
    """
    folder = Path(__file__).parent / "backends"
    names = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    cards: dict[str, Backend] = {name: importlib.import_module(f"trt_engine.backends.{name}").card for name in names}
    for point in metadata.entry_points(group="trt_engine.backends"):
        try:
            card = point.load()
        except Exception as error:  # somebody else's package must not take every verb down
            log.warning("the backend `%s` of another package cannot be loaded: %s", point.name, error)
            continue
        if not isinstance(card, Backend) or card.name in cards:
            log.warning("the entry point `%s` is not a card with a name of its own; left out", point.value)
            continue
        cards[card.name] = card
    return cards


def backend(name: str) -> Backend:
    """The card of that name; `UsageError` naming the nearest one otherwise."""
    cards = backends()
    if name not in cards:
        shown = [card.name for card in cards.values() if not card.hidden]
        raise UsageError(f"unknown backend `{name}`", hint=closest(name, shown))
    return cards[name]


def runner_of(card: Backend) -> Backend:
    """The backend whose runtime runs the engines of this one: another that is installed, where the card names some."""
    known = backends()
    return next((known[name] for name in card.run_by if name in known and not known[name].missing("runtime")), card)


def quant_target_of(config: BuildConfig) -> str | None:
    """The quantisation target of the engine these settings build: where its kernels want Q/DQ; None where that is open."""
    card, config = backend(config.backend), settled(config)
    if card.quant_target is None or ":" not in card.quant_target:
        return card.quant_target
    module, _, attribute = card.quant_target.partition(":")
    found: str = getattr(importlib.import_module(module), attribute)(config)
    return found


def settled(config: BuildConfig) -> BuildConfig:
    """The settings with the device filled in: the first one of the backend's card where nobody named one."""
    if config.device:
        return config
    first = backend(config.backend).devices[0]
    return replace(config, device=first if first == "cpu" else f"{first}:0")
