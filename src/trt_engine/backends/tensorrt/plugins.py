"""Plugins: NVIDIA's own, libraries of others, and Python ones, registered before a graph is parsed or a plan is read."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tensorrt as trt

from trt_engine.backends.tensorrt.logger import TensorRtLogger
from trt_engine.errors import ModelError, SetupError, TrtEngineError

__all__ = ["available", "load_plugins"]

_LOCK = threading.RLock()
_LOADED: dict[str, Any] = {}
"""Libraries by real path and modules by name: TensorRT's registry lives as long as the process."""


def load_plugins(
    libraries: Sequence[str], modules: Sequence[str], logger: TensorRtLogger, *, registry: Any = None
) -> tuple[Path | str, ...]:
    """Register NVIDIA's plugins, then each library and module, once in a process; where the libraries were found.

    `SetupError` naming the file where one cannot be loaded. `modules` are importable names or paths of `.py` files.
    """
    with _LOCK:
        if "nvidia" not in _LOADED:
            if not trt.init_libnvinfer_plugins(logger, ""):
                raise SetupError("TensorRT's own plugins cannot be registered", hint="`trt-engine doctor`")
            _LOADED["nvidia"] = True
        found = [_load_library(library, logger, registry) for library in libraries]
        for module in modules:
            _load_module(module)
    return tuple(found)


def available() -> tuple[str, ...]:
    """Names of the plugins that are registered now, as `name:version`."""
    registry = trt.get_plugin_registry()
    if registry is None:
        return ()
    return tuple(sorted({f"{item.name}:{item.plugin_version}" for item in _creators(registry)}))


def _creators(registry: Any) -> Iterable[Any]:
    with contextlib.suppress(AttributeError, TypeError):
        return list(registry.all_creators)
    return ()


def _load_library(name: str, logger: TensorRtLogger, registry: Any) -> Path | str:
    path = Path(name).expanduser()
    found: Path | str
    if path.exists():
        found = path.resolve()
    elif "/" in name:
        raise SetupError(f"there is no plugin library `{name}`", hint="give the path of the `.so` in `-O plugins=`")
    else:
        found = name  # the loader looks in its own folders, and says below where it does not find it
    if str(found) in _LOADED:
        return found
    known = available()
    try:
        # first by the loader: it says which symbol or library is missing, where TensorRT would only give None
        library = ctypes.CDLL(str(found), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise SetupError(
            f"the plugin library `{name}` cannot be loaded: {error}",
            hint="`ldd` shows what it misses; it must be built for this TensorRT and this CUDA",
        ) from error
    registry = registry if registry is not None else trt.get_plugin_registry()
    handle: Any = None
    # a library that registers its plugins as it is loaded has done so; TensorRT would refuse them a second time
    if registry is not None and available() == known and _has_entry_point(library):
        handle = registry.load_library(str(found))
        if handle is None:
            errors = logger.errors()
            raise SetupError(
                f"TensorRT does not take the plugin library `{name}`"
                + (f": {errors[-1]}" if errors else ": one of its plugins is registered already"),
                hint="load each plugin once; two libraries may hold the same one",
            )
    _LOADED[str(found)] = (library, handle)
    return found


def _has_entry_point(library: ctypes.CDLL) -> bool:
    """True for a library TensorRT can ask for its creators; others register theirs as they are loaded."""
    return any(hasattr(library, name) for name in ("getCreators", "getPluginCreators"))


def _load_module(name: str) -> None:
    """Import a module that registers Python plugins; by path it gets a name of its own."""
    try:
        if name.endswith(".py"):
            path = Path(name).expanduser().resolve()
            key = f"trt_engine_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
            if key in sys.modules:
                return
            spec = importlib.util.spec_from_file_location(key, path)
            if spec is None or spec.loader is None or not path.is_file():
                raise SetupError(
                    f"there is no plugin module `{name}`", hint="give the path of a `.py` in `-O python_plugins=`"
                )
            module = importlib.util.module_from_spec(spec)
            sys.modules[key] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[key]
                raise
        else:
            importlib.import_module(name)
    except TrtEngineError:
        raise
    except ModuleNotFoundError as error:
        raise SetupError(
            f"the plugin module `{name}` cannot be imported: {error}", hint="install it, or give the path of its `.py`"
        ) from error
    except Exception as error:  # somebody else's code
        raise ModelError(
            f"the plugin module `{name}` failed as it was imported: {type(error).__name__}: {error}",
            hint=f"`python -c 'import runpy; runpy.run_path(\"{name}\")'` shows where",
        ) from error
