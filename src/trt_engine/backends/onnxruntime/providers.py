"""Selects ONNX Runtime's execution providers and verifies which are active: no silent fallback."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import filelock
import onnxruntime as ort
from onnx import TensorProto, helper

from trt_engine.atomic_io import encode_json, ensure_folder
from trt_engine.backends.onnxruntime import hardware, plugin_providers
from trt_engine.backends.onnxruntime.options import provider_options
from trt_engine.backends.onnxruntime.provider_names import short_name
from trt_engine.config.build import BuildConfig
from trt_engine.device import info, parse_device
from trt_engine.errors import SetupError, UsageError
from trt_engine.format import library_reason
from trt_engine.store import Store
from trt_engine.tensors import suggest

log = logging.getLogger(__name__)

_LONG_NAMES = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
} | {name: item.provider for name, item in plugin_providers.PLUGINS.items()}
_ON_GPU = ("cuda", "tensorrt", *plugin_providers.PLUGINS)
_GRAPH_OPTIONS = {"cuda": {"enable_cuda_graph": "1"}, "tensorrt": {"trt_cuda_graph_enable": "True"}} | {
    name: dict(item.capture) for name, item in plugin_providers.PLUGINS.items()
}
_CACHE_ON = "trt_engine_cache_enable"
_CACHE_PATH = {"tensorrt": "trt_engine_cache_path"} | {
    name: item.cache_path for name, item in plugin_providers.PLUGINS.items()
}
PROVIDER_VERSION = "provider_version"
"""The passport note with the version of a plugin provider."""
COMPILES = ("tensorrt", *plugin_providers.PLUGINS)
"""Providers that compile subgraphs at session creation, which cannot be saved as a graph."""


@dataclass(frozen=True, slots=True)
class ProviderSelection:
    """The providers of a session, in order."""

    names: tuple[str, ...]
    """Short names: `cpu`, `cuda`, `tensorrt`, `tensorrt-rtx`."""
    options: tuple[dict[str, str], ...]
    device: str
    strict: bool
    """Nodes on the CPU are an error: it was not requested."""
    fallback: str | None = None
    """The requested provider that does not run, and why; only with `allow_fallback`."""
    tf32: bool = False
    """Whether FP32 matrix operators run in TF32 (10-bit mantissa)."""
    cache: Path | None = None
    """Cache folder of a compiling provider; None without one, or if set by the user."""

    def to_ort_providers(self) -> list[tuple[str, dict[str, str]]]:
        """In ONNX Runtime's format."""
        return [
            (long_name(name), _format_options(name, self._cache_options(name) | options))
            for name, options in zip(self.names, self.options, strict=True)
        ]

    def _cache_options(self, name: str) -> dict[str, str]:
        if self.cache is None or name not in COMPILES:
            return {}
        return ({_CACHE_ON: "True"} if name == "tensorrt" else {}) | {_CACHE_PATH[name]: str(self.cache)}

    @property
    def compiles(self) -> bool:
        return any(name in COMPILES for name in self.names)

    @property
    def plugin_version(self) -> str | None:
        """Version of the plugin provider: `0.5.0, TensorRT-RTX 1.7.1`; None without one."""
        return next((plugin_providers.versions(name) for name in self.names if name in plugin_providers.PLUGINS), None)

    @property
    def on_gpu(self) -> bool:
        return any(name in _ON_GPU for name in self.names)

    @property
    def prefers_nhwc(self) -> bool:
        """Whether the CUDA provider computes in its layout NHWC."""
        cuda = next((values for name, values in zip(self.names, self.options, strict=True) if name == "cuda"), {})
        return cuda.get("prefer_nhwc", "0").strip().lower() in ("1", "true")

    def with_tensor_cores(self) -> ProviderSelection:
        """A copy for a graph without matrix products in FP32, with the CUDA provider's `use_tf32` on.

        Off, it excludes tensor cores from convolutions of FP16 too, where cuDNN has any other kernel: of the 6.6 ms of
        YOLOv10m at batch 1, 5.1 ms were convolutions without them.
        """
        return self._with_options({"cuda": {"use_tf32": "1"}})

    def with_cache(self, *digests: str) -> ProviderSelection:
        """A copy that caches compiled subgraphs of the engine with these digests in the store.

        Each combination of engine, settings and machine has a separate folder, because the provider's file names ignore
        weights and static shapes (issues 6455 and 32254 of microsoft/onnxruntime). The user's path or switch wins.
        """
        compiler = next((name for name in self.names if name in COMPILES), None)
        if compiler is None:
            return self
        given = self.options[self.names.index(compiler)]
        if _CACHE_PATH[compiler] in given:
            return self._with_options({"tensorrt": {_CACHE_ON: given.get(_CACHE_ON, "True")}})
        if _normalize_switch(given.get(_CACHE_ON, "True")) == "False":
            return self
        found = hardware.gpu_info(self.device)
        version = _tensorrt_version() if compiler == "tensorrt" else plugin_providers.versions(compiler) or ""
        machine = [ort.__version__, version, *((found.name, found.compute_capability) if found else ("",))]
        settings = {
            name: value
            for name, value in _format_options(compiler, given).items()
            if name not in ("device_id", _CACHE_ON)
        }
        facts = encode_json([*digests, *machine, sorted(settings.items())])
        folder = Store().folder.absolute() / f"{compiler}-provider"
        return replace(self, cache=folder / hashlib.sha256(facts).hexdigest()[:32])

    def with_cuda_graphs(self) -> ProviderSelection:
        """A copy with CUDA graphs enabled, which is fixed at session creation."""
        return self._with_options(_GRAPH_OPTIONS)

    def with_stream(self, handle: int) -> ProviderSelection:
        """A copy that launches on that CUDA stream, which is fixed at session creation."""
        return self._with_options({"cuda": {"user_compute_stream": str(handle)}})

    def _with_options(self, more: Mapping[str, Mapping[str, str]]) -> ProviderSelection:
        """A copy with more options, by provider."""
        pairs = zip(self.names, self.options, strict=True)
        return replace(self, options=tuple(values | dict(more.get(name, {})) for name, values in pairs))


_SWITCH_VALUES = {"1": "True", "on": "True", "yes": "True", "true": "True"} | dict.fromkeys(
    ("0", "off", "no", "false"), "False"
)


def _normalize_switch(value: str) -> str:
    return _SWITCH_VALUES.get(value.strip().lower(), value)


def _format_options(provider: str, options: Mapping[str, str]) -> dict[str, str]:
    """Options in the provider's format: TensorRT's switches are `True` and `False`."""
    if provider in plugin_providers.PLUGINS:
        return plugin_providers.format_settings(provider, options)
    if provider != "tensorrt":
        return dict(options)
    return {name: _normalize_switch(value) if name.endswith("_enable") else value for name, value in options.items()}


@contextlib.contextmanager
def compile_lock(choice: ProviderSelection) -> Iterator[ProviderSelection]:
    """Lock the engine's compile cache while a session is created, so that concurrent processes reuse it.

    Without a writable store, logs a warning and disables the cache.
    """
    if choice.cache is None:
        yield choice
        return
    try:
        folder = ensure_folder(choice.cache, by="TRT_ENGINE_STORE")
    except SetupError as error:
        log.warning("compiled subgraphs are not cached: %s", error.message)
        yield replace(choice, cache=None)
        return
    with filelock.FileLock(folder / ".lock"):
        yield choice


def long_name(name: str) -> str:
    """ONNX Runtime's name: `cuda` -> `CUDAExecutionProvider`."""
    return _LONG_NAMES.get(name) or next(
        (item for item in ort.get_available_providers() if short_name(item) == name), f"{name}ExecutionProvider"
    )


def installed_providers() -> list[str]:
    """Short names of the installed providers, including plugins."""
    built_in = [short_name(item) for item in ort.get_available_providers()]
    return built_in + [
        name for name in plugin_providers.PLUGINS if name not in built_in and plugin_providers.installed(name)
    ]


def missing_cuda() -> str | None:
    """Why the CUDA provider does not run here; None where it may."""
    if "cuda" not in installed_providers():
        return _not_installed_error("cuda", installed_providers()).message
    return load_error("cuda")


def attach(choice: ProviderSelection, options: ort.SessionOptions) -> list[tuple[str, dict[str, str]]] | None:
    """The `providers` argument of a session; None if they were added to `options`, as plugins require."""
    spelled = choice.to_ort_providers()
    if not any(name in plugin_providers.PLUGINS for name in choice.names):
        return spelled
    _, number = parse_device(choice.device)
    for name, (long, values) in zip(choice.names, spelled, strict=True):
        if name in plugin_providers.PLUGINS:
            options.add_provider_for_devices([plugin_providers.ep_device(name, number)], values)
        elif name != "cpu":  # added by ONNX Runtime; adding it twice is an error
            options.add_provider(long, values)
    return None


def select_providers(
    providers: Sequence[str],
    device: str,
    *,
    allow_fallback: bool = False,
    options: Mapping[str, str] | None = None,
    precision: str | None = None,
    available: Sequence[str] | None = None,
    gpus: Sequence[info.Gpu] | None = None,
) -> ProviderSelection:
    """Select providers. `SetupError` for one that is not installed or does not load, unless fallback is allowed;
    `UsageError` for a missing GPU.

    TF32, the CUDA provider's default, is only enabled for `precision` `tf32`; provider options win. `available` are the
    providers (default: those installed, with their libraries tested), `boards` the GPUs (default: NVML's, if any).
    """
    here = installed_providers() if available is None else [short_name(name) for name in available]
    kind, number = parse_device(device)
    if kind == "fake":
        raise UsageError("the backend `onnxruntime` has no device `fake`", hint="`--device cpu` or `--device cuda:0`")
    asked = [short_name(name) for name in providers] or [kind]
    known = sorted({*_LONG_NAMES, *here})
    for name in asked:
        if name not in known:
            raise UsageError(f"unknown provider `{name}`", hint=suggest(name, known))
        if asked.count(name) > 1:
            raise UsageError(f"the provider `{name}` is named twice", hint="name each once, the preferred first")
    given: dict[str, dict[str, str]] = {}
    for name, values in provider_options(options or {}).items():  # merge aliases
        given.setdefault(short_name(name), {}).update(values)
    for name in given:
        if name not in asked:
            raise UsageError(
                f"`-O {name}.{next(iter(given[name]))}` is for a provider that was not requested",
                hint=f"`--providers {','.join([name, *asked])}`",
            )
    _check_settings(given.get("cuda", {}))
    for name in plugin_providers.PLUGINS:
        plugin_providers.check_settings(name, given.get(name, {}))
    number = (
        number if kind == "cuda" else int(next((given[n]["device_id"] for n in given if "device_id" in given[n]), 0))
    )
    refused = {name: _not_installed_error(name, here) for name in asked if name not in here}
    if available is None:
        refused |= {
            name: error for name in asked if name in here and (error := _usability_error(name, number)) is not None
        }
    running = [name for name in asked if name not in refused]
    fallback = None
    if refused:
        error = next(iter(refused.values()))
        if not allow_fallback:
            raise error
        running = running or ["cpu"]
        fallback = f"{error.message}; `{','.join(running)}` runs instead"
    on_gpu = any(name in _ON_GPU for name in running)
    if kind == "cuda" and not on_gpu and not fallback:
        raise UsageError(
            f"the device is `{device}` and the providers are `{','.join(running)}`, which do not use it",
            hint=f"`--providers cuda,{','.join(running)}`, or `--device cpu`",
        )
    board = _gpu_info(number, info.gpus() if gpus is None else gpus) if on_gpu else None
    where = {"device_id": str(number)}
    own = {"cuda": where | {"use_tf32": "1" if precision == "tf32" else "0"}, "tensorrt": where}
    made = tuple(own.get(name, {}) | given.get(name, {}) for name in running)
    return ProviderSelection(
        names=tuple(running),
        options=made,
        device=f"cuda:{number}" if on_gpu else "cpu",
        strict="cpu" not in running and not allow_fallback,
        fallback=fallback,
        tf32=_tf32(running, made, board),
    )


def build_providers(config: BuildConfig) -> ProviderSelection:
    """The providers of a build, as `select_providers`."""
    return select_providers(
        config.providers,
        config.device,
        allow_fallback=config.allow_fallback,
        options=config.options,
        precision=config.precision,
    )


_CUDA_SETTINGS = (
    "arena_extend_strategy", "cudnn_conv1d_pad_to_nc1d", "cudnn_conv_algo_search", "cudnn_conv_use_max_workspace",
    "device_id", "do_copy_in_default_stream", "enable_skip_layer_norm_strict_mode", "gpu_mem_limit",
    "prefer_nhwc", "sdpa_kernel", "tunable_op_enable", "tunable_op_max_tuning_duration_ms", "tunable_op_tuning_enable",
    "use_ep_level_unified_stream", "use_tf32",
)  # fmt: skip
"""Settings of the CUDA provider in ONNX Runtime 1.31.1, which ignores or rejects others."""
_RESERVED_SETTINGS = {
    "enable_cuda_graph": "`te.load(engine, graphs=True)` captures graphs; `trt-engine bench` does by itself",
    "user_compute_stream": "`te.load(engine, contexts=4, streams=4)`: streams are made for the contexts",
    "has_user_compute_stream": "leave it out: it follows from the stream",
    "gpu_external_alloc": "`-O cuda.gpu_mem_limit=BYTES` limits the provider's own memory",
    "gpu_external_free": "leave it out",
    "gpu_external_empty_cache": "leave it out",
}
_UNSAFE_SETTINGS = {
    "fuse_conv_bias": "a network of two convolutions gave numbers three times too large on an H200 (1.31.1)"
}
"""Unsupported settings of the CUDA provider, with the reason."""


def _check_settings(given: Mapping[str, str]) -> None:
    """`UsageError` for unknown, reserved and unsupported settings of the CUDA provider."""
    for name in given:
        if name in _RESERVED_SETTINGS:
            raise UsageError(f"`-O cuda.{name}` is set by trt-engine itself", hint=_RESERVED_SETTINGS[name])
        if name in _UNSAFE_SETTINGS:
            raise UsageError(f"`-O cuda.{name}` is not offered: {_UNSAFE_SETTINGS[name]}", hint="leave it out")
        if name not in _CUDA_SETTINGS:
            raise UsageError(f"the CUDA provider has no setting `{name}`", hint=suggest(name, _CUDA_SETTINGS))


def _gpu_info(number: int, gpus: Sequence[info.Gpu]) -> info.Gpu | None:
    """The GPU with that index; None without NVML."""
    if not gpus:
        return None
    found = info.gpu(number, gpus)
    if found is None:
        here = ", ".join(f"`cuda:{item.index}` ({item.name})" for item in gpus)
        raise UsageError(
            f"there is no device `cuda:{number}`, available: {here}", hint=f"`--device cuda:{gpus[0].index}`"
        )
    return found


TF32_FROM = (8, 0)
"""The first compute capability with TF32."""


def _tf32(names: Sequence[str], options: Sequence[Mapping[str, str]], board: info.Gpu | None) -> bool:
    """Whether FP32 matrix operators run in TF32."""
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":  # read by cuBLAS, cuDNN and TensorRT themselves
        return False
    if board is not None and tuple(map(int, board.compute_capability.split("."))) < TF32_FROM:
        return False
    if any(name in COMPILES for name in names):
        return True  # TensorRT allows it by default, and the providers have no option for it
    return any(
        name == "cuda" and values["use_tf32"].strip().lower() not in ("0", "false")
        for name, values in zip(names, options, strict=True)
    )


def _not_installed_error(name: str, here: Sequence[str]) -> SetupError:
    if name in plugin_providers.PLUGINS:
        item = plugin_providers.PLUGINS[name]
        return SetupError(
            f"the provider `{name}` was asked for, and its package is not installed (module `{item.module}`)",
            hint=f"{plugin_providers.plugin_hint(name, '')}{_FALLBACK_HINT}",
        )
    has = ", ".join(f"`{item}`" for item in here if item != "azure")
    return SetupError(
        f"the provider `{name}` was asked for, and onnxruntime {ort.__version__} as installed here has {has}",
        hint="install the GPU build in its place (`pip uninstall onnxruntime onnxruntime-gpu`, then "
        "`pip install onnxruntime-gpu`)" + _FALLBACK_HINT
        if name in _ON_GPU
        else f"install a build of ONNX Runtime that has it{_FALLBACK_HINT}",
    )


_FALLBACK_HINT = "; or `--allow-fallback` (`allow_fallback: true` in a plan of `run`) to run on what is there"


def _not_running_error(name: str, reason: str) -> SetupError:
    fix = plugin_providers.plugin_hint(name, reason) if name in plugin_providers.PLUGINS else None
    return SetupError(
        f"the provider `{name}` was asked for and does not run: {reason}",
        hint=(fix or install_hint(reason)) + _FALLBACK_HINT,
    )


def _usability_error(name: str, number: int) -> SetupError | None:
    """The error if the provider cannot run on that GPU; None if it may."""
    if (why := load_error(name)) is not None:
        return _not_running_error(name, why)
    if name in plugin_providers.PLUGINS:
        try:
            plugin_providers.ep_device(name, number)
        except SetupError as error:
            return SetupError(error.message, hint=f"{error.hint}{_FALLBACK_HINT}")
    return None


def verify_active(
    session: ort.InferenceSession, choice: ProviderSelection, *, allow_fallback: bool
) -> ProviderSelection:
    """The providers actually active in a session; `SetupError` if one is missing, unless fallback is allowed.

    ONNX Runtime only logs providers that it cannot start.
    """
    running = [short_name(name) for name in session.get_providers()]
    lost = [name for name in choice.names if name not in running]
    if not lost:
        return choice
    error = _not_running_error(lost[0], load_error(lost[0]) or _NOT_STARTED)
    if not allow_fallback:
        raise error
    kept = [(name, values) for name, values in zip(choice.names, choice.options, strict=True) if name in running]
    names = tuple(name for name, _ in kept) or ("cpu",)
    on_gpu = any(name in _ON_GPU for name in names)
    return replace(
        choice,
        names=names,
        options=tuple(values for _, values in kept) or ({},),
        device=choice.device if on_gpu else "cpu",
        fallback=f"{error.message}; `{','.join(running)}` runs instead",
        tf32=choice.tf32 and on_gpu,
    )


def start_error(choice: ProviderSelection) -> SetupError | None:
    """The error of a provider that does not start here, by loading a single operator; None if all start."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    same = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "one", [value], [same])
    raw = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8).SerializeToString()
    for name, settings in zip(choice.names, choice.options, strict=True):
        if name not in _ON_GPU:
            continue
        one = replace(choice, names=(name,), options=(settings,), cache=None)
        why = load_error(name)
        if why is None:
            quiet = ort.SessionOptions()
            quiet.log_severity_level = 4
            try:
                tried = ort.InferenceSession(raw, quiet, providers=attach(one, quiet), enable_fallback=0)
            except Exception as error:  # ONNX Runtime's exceptions have no common base
                why = library_reason(error)
            else:
                why = None if long_name(name) in tried.get_providers() else _NOT_STARTED
        if why is not None:
            return _not_running_error(name, why)
    return None


_NOT_STARTED = "ONNX Runtime could not start it (no usable device or driver)"


# ------------------------------------------------------------------------------------------------ libraries


def load_error(name: str) -> str | None:
    """The loader's error for the provider's library; None if it loads or has none."""
    if name in plugin_providers.PLUGINS:
        return plugin_providers.unusable_reason(name)
    return _library_error(name) if name in _ON_GPU else None


@cache
def _library_error(name: str) -> str | None:
    folder = Path(ort.__file__).parent / "capi"
    library = folder / f"libonnxruntime_providers_{name}.so"
    if not library.exists():
        return None
    _preload()
    try:
        with contextlib.suppress(OSError):  # needed by the provider without being linked
            ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    return None


@cache
def _tensorrt_version() -> str:
    """The version of the TensorRT linked by the provider, as `101600`; empty if it does not load."""
    if load_error("tensorrt") is None:
        with contextlib.suppress(OSError, AttributeError):  # resolved through the provider's dependencies
            library = ctypes.CDLL(str(Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_tensorrt.so"))
            return str(library.getInferLibVersion())
    return ""


def _preload() -> None:
    """Load CUDA libraries of pip packages, which are outside the loader's search path."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(Exception):  # the provider reports missing libraries
        ort.preload_dlls()
    for line in output.getvalue().splitlines():
        log.debug("%s", line)


_MISSING = re.compile(r"(?P<library>lib(?P<stem>[\w+-]+)\.so(?:\.(?P<major>\d+))?\S*): cannot open shared object file")


def install_hint(reason: str) -> str:
    """The hint for a library that does not load."""
    found = _MISSING.search(reason)
    if found is None:
        return "`trt-engine doctor` looks for its libraries"
    if found["stem"] in ("cuda", "nvidia-ml"):
        return "install the NVIDIA driver, or start the container with `--gpus all`"
    if found["stem"].startswith(("nvinfer", "nvonnxparser")):
        major = int(found["major"] or 10)
        return (
            f"install TensorRT {major} (`pip install 'tensorrt-cu13-libs>={major},<{major + 1}'`) and put its folder "
            "`tensorrt_libs` on `LD_LIBRARY_PATH`"
        )
    return "install CUDA's libraries: `pip install 'onnxruntime-gpu[cuda,cudnn]'`, or put them on `LD_LIBRARY_PATH`"
