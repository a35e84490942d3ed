"""Registers plugins of NVIDIA, third-party libraries and Python before a graph is parsed or a plan is loaded."""

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

from trt_engine.atomic_io import open_regular
from trt_engine.backends.tensorrt.binding import Binding
from trt_engine.backends.tensorrt.logger import TensorRtLogger
from trt_engine.errors import ModelError, SetupError, TrtEngineError

_LOCK = threading.RLock()
_LOADED: dict[tuple[Binding, str], Any] = {}
"""Libraries by real path, of each binding: its registry lives as long as the process."""
_NVIDIA = ""
"""The key of NVIDIA's plugins."""


def load_plugins(libraries: Sequence[str], modules: Sequence[str], logger: TensorRtLogger) -> tuple[Path | str, ...]:
    """Register NVIDIA's plugins, then each library and module, once per process; return the libraries' paths.

    `SetupError` naming the file where one cannot be loaded. `modules` are importable names or paths of `.py` files.
    """
    binding, trt = logger.binding, logger.binding.trt
    with _LOCK:
        if (binding, _NVIDIA) not in _LOADED:
            if not trt.init_libnvinfer_plugins(logger.native, ""):
                raise SetupError(f"{binding.product}'s own plugins cannot be registered", hint="`trt-engine doctor`")
            _LOADED[binding, _NVIDIA] = True
        found = [_load_library(library, logger, trt.get_plugin_registry()) for library in libraries]
        for module in modules:
            _load_module(module)
    return tuple(found)


def registered_plugins(binding: Binding) -> tuple[str, ...]:
    """The registered plugins, as `name:version`."""
    trt = binding.trt
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
        open_regular(path, error=SetupError).close()
        found = path.resolve()
    elif "/" in name:
        raise SetupError(
            f"the plugin library `{name}` does not exist", hint="give the path of the `.so` in `-O plugins=`"
        )
    else:
        found = name  # the loader searches its own folders and fails below if it is missing
    binding = logger.binding
    if (binding, str(found)) in _LOADED:
        return found
    known = registered_plugins(binding)
    try:
        # first by the loader: it names a missing symbol or library, TensorRT would only return None
        library = ctypes.CDLL(str(found), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise SetupError(
            f"the plugin library `{name}` cannot be loaded: {error}",
            hint="`ldd` shows what it misses; it must be built for this TensorRT and this CUDA",
        ) from error
    handle: Any = None
    # a library without TensorRT's entry point has registered its plugins at load; TensorRT rejects duplicates
    has_entry_point = any(hasattr(library, name) for name in ("getCreators", "getPluginCreators"))
    if registry is not None and registered_plugins(binding) == known and has_entry_point:
        handle = registry.load_library(str(found))
        if handle is None:
            errors = logger.errors()
            raise SetupError(
                f"TensorRT does not take the plugin library `{name}`"
                + (f": {errors[-1]}" if errors else ": one of its plugins is registered already"),
                hint="load each plugin once; two libraries may hold the same one",
            )
    _LOADED[binding, str(found)] = (library, handle)
    return found


def _load_module(name: str) -> None:
    """Import a module that registers Python plugins; by path it gets a unique name."""
    try:
        if name.endswith(".py"):
            path = Path(name).expanduser().resolve()
            key = f"trt_engine_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
            if key in sys.modules:
                return
            spec = importlib.util.spec_from_file_location(key, path)
            if spec is None or spec.loader is None or not path.is_file():
                raise SetupError(
                    f"the plugin module `{name}` does not exist",
                    hint="give the path of a `.py` in `-O python_plugins=`",
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
    except Exception as error:  # third-party code
        raise ModelError(
            f"the plugin module `{name}` failed as it was imported: {type(error).__name__}: {error}",
            hint=f"`python -c 'import runpy; runpy.run_path(\"{name}\")'` shows where",
        ) from error
