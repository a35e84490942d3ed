"""Which of ONNX Runtime's providers run, said before and read back after: nothing falls back in silence (F5)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort

from trt_engine.backends.onnxruntime.options import provider_options
from trt_engine.device import parse_device
from trt_engine.errors import SetupError, UsageError
from trt_engine.tensors import closest

__all__ = ["Choice", "choose", "long_name", "read_back", "short_name"]

_LONG = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
_ALIASES = {"trt": "tensorrt", "gpu": "cuda"}
_ON_GPU = ("cuda", "tensorrt")
COMPILES = ("tensorrt",)
"""Providers that compile subgraphs when a session is made: ONNX Runtime cannot save what they made as a graph."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The providers of a session, in order."""

    names: tuple[str, ...]
    """Ours: `cpu`, `cuda`, `tensorrt`."""
    options: tuple[dict[str, str], ...]
    device: str
    strict: bool
    """The CPU was not asked for: a node that lands there is an error."""
    fallback: str | None = None
    """What was asked for and does not run, and why; only with `allow_fallback`."""

    def spelled(self) -> list[tuple[str, dict[str, str]]]:
        """As ONNX Runtime takes them."""
        return [(long_name(name), options) for name, options in zip(self.names, self.options, strict=True)]

    @property
    def compiles(self) -> bool:
        return any(name in COMPILES for name in self.names)


def long_name(name: str) -> str:
    """ONNX Runtime's name: `cuda` -> `CUDAExecutionProvider`."""
    return _LONG.get(name) or next(
        (item for item in ort.get_available_providers() if short_name(item) == name), f"{name}ExecutionProvider"
    )


def short_name(name: str) -> str:
    """Our name: `CUDAExecutionProvider` -> `cuda`."""
    low = name.strip().lower().removesuffix("executionprovider")
    return _ALIASES.get(low, low)


def choose(
    providers: Sequence[str],
    device: str,
    *,
    allow_fallback: bool = False,
    options: Mapping[str, str] | None = None,
    available: Sequence[str] | None = None,
) -> Choice:
    """The providers to run on. `SetupError` for one that this ONNX Runtime does not have, unless fallback is allowed.

    `available` are those it has (default: asked of the library).
    """
    here = [short_name(name) for name in (ort.get_available_providers() if available is None else available)]
    kind, number = parse_device(device)
    if kind == "fake":
        raise UsageError("the backend `onnxruntime` has no device `fake`", hint="`--device cpu` or `--device cuda:0`")
    asked = [short_name(name) for name in providers] or [kind]
    known = sorted({*_LONG, *here})
    for name in asked:
        if name not in known:
            raise UsageError(f"unknown provider `{name}`", hint=closest(name, known))
        if asked.count(name) > 1:
            raise UsageError(f"the provider `{name}` is named twice", hint="name each once, the preferred first")
    given = {short_name(name): values for name, values in provider_options(options or {}).items()}
    for name in given:
        if name not in asked:
            raise UsageError(
                f"`-O {name}.{next(iter(given[name]))}` is for a provider that was not asked for",
                hint=f"`--providers {','.join([name, *asked])}`",
            )
    running, missing = [name for name in asked if name in here], [name for name in asked if name not in here]
    fallback = None
    if missing:
        error = _not_here(missing[0], here)
        if not allow_fallback:
            raise error
        running = running or ["cpu"]
        fallback = f"{error.message}; `{','.join(running)}` runs in its place"
    on_gpu = any(name in _ON_GPU for name in running)
    if kind == "cuda" and not on_gpu and not fallback:
        raise UsageError(
            f"the device is `{device}` and the providers are `{','.join(running)}`, which do not use it",
            hint=f"`--providers cuda,{','.join(running)}`, or `--device cpu`",
        )
    number = (
        number if kind == "cuda" else int(next((given[n]["device_id"] for n in given if "device_id" in given[n]), 0))
    )
    made = tuple(
        ({"device_id": str(number)} if name in _ON_GPU else {}) | given.get(name, {}) for name in running
    )  # fmt: skip
    return Choice(
        names=tuple(running),
        options=made,
        device=f"cuda:{number}" if on_gpu else "cpu",
        strict="cpu" not in running and not allow_fallback,
        fallback=fallback,
    )


def _not_here(name: str, here: Sequence[str]) -> SetupError:
    has = ", ".join(f"`{item}`" for item in here if item != "azure")
    return SetupError(
        f"the provider `{name}` was asked for, and onnxruntime {ort.__version__} as installed here has {has}",
        hint="install the GPU build in its place (`pip uninstall onnxruntime onnxruntime-gpu`, then "
        "`pip install onnxruntime-gpu`)" + _ALLOW
        if name in _ON_GPU
        else f"install a build of ONNX Runtime that has it{_ALLOW}",
    )


_ALLOW = "; or `--allow-fallback` to run on what is there"


def read_back(session: ort.InferenceSession, choice: Choice, *, allow_fallback: bool) -> str | None:
    """Why an asked provider does not run although ONNX Runtime lists it; None when all run.

    ONNX Runtime drops a provider whose libraries do not load, with a log line alone: the session must be asked.
    """
    running = [short_name(name) for name in session.get_providers()]
    for name in choice.names:
        if name in running:
            continue
        reason = f"the provider `{name}` was asked for and does not run: {_library_error(name)}"
        if not allow_fallback:
            raise SetupError(reason, hint=f"`trt-engine doctor` looks for its libraries{_ALLOW}")
        return f"{reason}; `{','.join(running)}` runs in its place"
    return None


def _library_error(name: str) -> str:
    """What the loader says of the provider's library: the missing file's name is in it."""
    library = Path(ort.__file__).parent / "capi" / f"libonnxruntime_providers_{name}.so"
    if not library.exists():
        return f"`{library.name}` is not installed"
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    return "ONNX Runtime could not start it (no usable device or driver)"
