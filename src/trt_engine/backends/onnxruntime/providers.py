"""Which of ONNX Runtime's providers run, said before and read back after: nothing falls back in silence."""

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

from trt_engine.backends.onnxruntime import hardware
from trt_engine.backends.onnxruntime.options import provider_options
from trt_engine.backends.onnxruntime.target import short_name
from trt_engine.device import info, parse_device
from trt_engine.errors import SetupError, UsageError
from trt_engine.files import ensure_folder, json_bytes
from trt_engine.store import Store
from trt_engine.tensors import closest

__all__ = [
    "Choice",
    "alone",
    "broken",
    "choose",
    "fix_for",
    "long_name",
    "read_back",
    "short_name",
    "unstarted",
]

log = logging.getLogger(__name__)

_LONG = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
_ON_GPU = ("cuda", "tensorrt")
_CAPTURE = {"cuda": {"enable_cuda_graph": "1"}, "tensorrt": {"trt_cuda_graph_enable": "True"}}
_CACHE_ON, _CACHE_PATH = "trt_engine_cache_enable", "trt_engine_cache_path"
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
    tf32: bool = False
    """Matrix operators of an FP32 graph run in TF32: the mantissa of their inputs is cut to 10 bits."""
    cache: Path | None = None
    """Where the TensorRT provider keeps what it compiles; None where it compiles nothing, or the user said otherwise."""

    def spelled(self) -> list[tuple[str, dict[str, str]]]:
        """As ONNX Runtime takes them."""
        kept = {_CACHE_ON: "True", _CACHE_PATH: str(self.cache)} if self.cache is not None else {}
        return [
            (long_name(name), _with_words(kept | options) if name == "tensorrt" else options)
            for name, options in zip(self.names, self.options, strict=True)
        ]

    @property
    def compiles(self) -> bool:
        return any(name in COMPILES for name in self.names)

    @property
    def on_gpu(self) -> bool:
        return any(name in _ON_GPU for name in self.names)

    def caching(self, *made_of: str) -> Choice:
        """The same, keeping in the store what the TensorRT provider compiles of the engine with these digests.

        Each engine, with its settings and machine, has a folder of its own: the provider's names for its files tell neither
        weights nor fixed shapes apart (issues 6455 and 32254 of microsoft/onnxruntime). The user's own path or switch wins.
        """
        if "tensorrt" not in self.names:
            return self
        given = self.options[self.names.index("tensorrt")]
        if _CACHE_PATH in given:
            made = tuple(
                ({_CACHE_ON: "True"} if name == "tensorrt" else {}) | values
                for name, values in zip(self.names, self.options, strict=True)
            )
            return replace(self, options=made)
        if _word(given.get(_CACHE_ON, "True")) == "False":
            return self
        found = hardware.board(self.device)
        machine = [ort.__version__, _tensorrt_version(), *((found.name, found.compute_capability) if found else ("",))]
        settings = {name: value for name, value in _with_words(given).items() if name not in ("device_id", _CACHE_ON)}
        facts = json_bytes([*made_of, *machine, sorted(settings.items())])
        return replace(self, cache=Store().folder.absolute() / _KEPT / hashlib.sha256(facts).hexdigest()[:32])

    def capturing(self) -> Choice:
        """The same with CUDA graphs: what a session captures is decided when it is made."""
        made = tuple(values | _CAPTURE.get(name, {}) for name, values in zip(self.names, self.options, strict=True))
        return replace(self, options=made)

    def on_stream(self, handle: int) -> Choice:
        """The same, launching on that CUDA stream: it is taken when a session is made, and for good."""
        made = tuple(
            values | ({"user_compute_stream": str(handle)} if name == "cuda" else {})
            for name, values in zip(self.names, self.options, strict=True)
        )
        return replace(self, options=made)


_KEPT = "tensorrt-provider"
"""The folder of the store with what the TensorRT provider compiled."""
_WORDS = {"1": "True", "on": "True", "yes": "True", "true": "True"} | dict.fromkeys(
    ("0", "off", "no", "false"), "False"
)


def _word(value: str) -> str:
    return _WORDS.get(value.strip().lower(), value)


def _with_words(options: Mapping[str, str]) -> dict[str, str]:
    """Switches as ONNX Runtime's Python module reads them for this provider: `True` and `False`, no numbers."""
    return {name: _word(value) if name.endswith("_enable") else value for name, value in options.items()}


@contextlib.contextmanager
def alone(choice: Choice) -> Iterator[Choice]:
    """The choice to make a session with: nobody else compiles the same engine meanwhile, and who waited finds it compiled.

    Where the store cannot be written to, nothing is kept, which is said.
    """
    if choice.cache is None:
        yield choice
        return
    try:
        folder = ensure_folder(choice.cache, by="TRT_ENGINE_STORE")
    except SetupError as error:
        log.warning("what TensorRT compiles is not kept: %s", error.message)
        yield replace(choice, cache=None)
        return
    with filelock.FileLock(folder / ".lock"):
        yield choice


def long_name(name: str) -> str:
    """ONNX Runtime's name: `cuda` -> `CUDAExecutionProvider`."""
    return _LONG.get(name) or next(
        (item for item in ort.get_available_providers() if short_name(item) == name), f"{name}ExecutionProvider"
    )


def choose(
    providers: Sequence[str],
    device: str,
    *,
    allow_fallback: bool = False,
    options: Mapping[str, str] | None = None,
    precision: str | None = None,
    available: Sequence[str] | None = None,
    boards: Sequence[info.Gpu] | None = None,
) -> Choice:
    """The providers to run on. `SetupError` for one that this ONNX Runtime does not have or whose libraries do not load,
    unless fallback is allowed; `UsageError` for a GPU that is not there.

    Only `precision` `tf32` lets FP32 arithmetic run in TF32, which is the CUDA provider's own default; an option of the
    provider wins. `available` are the providers the library has (default: asked of it, and their libraries tried),
    `boards` the GPUs (default: NVML's; none where it is not there).
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
    _check_settings(given.get("cuda", {}))
    refused = {name: _not_here(name, here) for name in asked if name not in here}
    if available is None:
        refused |= {name: _dead(name, why) for name in asked if name in here and (why := broken(name)) is not None}
    running = [name for name in asked if name not in refused]
    fallback = None
    if refused:
        error = next(iter(refused.values()))
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
    board = _board(number, info.gpus() if boards is None else boards) if on_gpu else None
    own = {"cuda": {"use_tf32": "1" if precision == "tf32" else "0"}}
    made = tuple(
        ({"device_id": str(number)} | own.get(name, {}) if name in _ON_GPU else {}) | given.get(name, {})
        for name in running
    )
    return Choice(
        names=tuple(running),
        options=made,
        device=f"cuda:{number}" if on_gpu else "cpu",
        strict="cpu" not in running and not allow_fallback,
        fallback=fallback,
        tf32=_tf32(running, made, board),
    )


_CUDA = (
    "arena_extend_strategy", "cudnn_conv1d_pad_to_nc1d", "cudnn_conv_algo_search", "cudnn_conv_use_max_workspace",
    "device_id", "do_copy_in_default_stream", "enable_skip_layer_norm_strict_mode", "gpu_mem_limit",
    "prefer_nhwc", "sdpa_kernel", "tunable_op_enable", "tunable_op_max_tuning_duration_ms", "tunable_op_tuning_enable",
    "use_ep_level_unified_stream", "use_tf32",
)  # fmt: skip
"""Settings of the CUDA provider, by the names ONNX Runtime 1.31.1 reads; it ignores others, or fails in its own words."""

_OURS = {
    "enable_cuda_graph": "`te.load(engine, graphs=True)` captures graphs; `trt-engine bench` does by itself",
    "user_compute_stream": "`te.load(engine, contexts=4, streams=4)`: streams are made for the contexts",
    "has_user_compute_stream": "leave it out: it follows from the stream",
    "gpu_external_alloc": "`-O cuda.gpu_mem_limit=BYTES` limits the provider's own memory",
    "gpu_external_free": "leave it out",
    "gpu_external_empty_cache": "leave it out",
}

_WRONG = {"fuse_conv_bias": "a network of two convolutions gave numbers three times too large on an H200 (1.31.1)"}
"""Settings of the CUDA provider that are not offered, and what was seen of them."""


def _check_settings(given: Mapping[str, str]) -> None:
    """`UsageError` for a setting the CUDA provider does not have, and for one that is not the user's to set."""
    for name in given:
        if name in _OURS:
            raise UsageError(f"`-O cuda.{name}` is set by trt-engine itself", hint=_OURS[name])
        if name in _WRONG:
            raise UsageError(f"`-O cuda.{name}` is not offered: {_WRONG[name]}", hint="leave it out")
        if name not in _CUDA:
            raise UsageError(f"the CUDA provider has no setting `{name}`", hint=closest(name, _CUDA))


def _board(number: int, boards: Sequence[info.Gpu]) -> info.Gpu | None:
    """The GPU of that number; None where nobody can tell."""
    if not boards:
        return None
    found = info.gpu(number, boards)
    if found is None:
        here = ", ".join(f"`cuda:{item.index}` ({item.name})" for item in boards)
        raise UsageError(
            f"there is no device `cuda:{number}`, here is {here}", hint=f"`--device cuda:{boards[0].index}`"
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
    if "tensorrt" in names:
        return True  # TensorRT's builder allows it, and the provider has no option for it
    return any(
        name == "cuda" and values["use_tf32"].strip().lower() not in ("0", "false")
        for name, values in zip(names, options, strict=True)
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


_ALLOW = "; or `--allow-fallback` (`allow_fallback: true` in a plan of `run`) to run on what is there"


def _dead(name: str, why: str) -> SetupError:
    return SetupError(f"the provider `{name}` was asked for and does not run: {why}", hint=fix_for(why) + _ALLOW)


def read_back(session: ort.InferenceSession, choice: Choice, *, allow_fallback: bool) -> Choice:
    """The choice as it came true; `SetupError` for a provider that does not run although ONNX Runtime lists it.

    ONNX Runtime drops a provider that it cannot start, with a log line alone: the session must be asked.
    """
    running = [short_name(name) for name in session.get_providers()]
    lost = [name for name in choice.names if name not in running]
    if not lost:
        return choice
    error = _dead(lost[0], broken(lost[0]) or _UNSTARTED)
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
        fallback=f"{error.message}; `{','.join(running)}` runs in its place",
        tf32=choice.tf32 and on_gpu,
    )


def unstarted(choice: Choice) -> SetupError | None:
    """The error for a provider of the choice that does not start here, tried on a model of one operator."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    same = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "one", [value], [same])
    raw = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8).SerializeToString()
    for name, spelled in zip(choice.names, replace(choice, cache=None).spelled(), strict=True):
        if name not in _ON_GPU:
            continue
        why = broken(name)
        if why is None:
            quiet = ort.SessionOptions()
            quiet.log_severity_level = 4
            try:
                tried = ort.InferenceSession(raw, quiet, providers=[spelled], enable_fallback=0)
            except Exception as error:  # ONNX Runtime's own have no common base, and any of them says it does not start
                why = str(error).partition("\n")[0]
            else:
                why = None if spelled[0] in tried.get_providers() else _UNSTARTED
        if why is not None:
            return _dead(name, why)
    return None


_UNSTARTED = "ONNX Runtime could not start it (no usable device or driver)"


# ------------------------------------------------------------------------------------------------ libraries


@cache
def broken(name: str) -> str | None:
    """Why the provider's library does not load, in the loader's words; None when it does, or is part of another one."""
    if name not in _ON_GPU:
        return None
    folder = Path(ort.__file__).parent / "capi"
    library = folder / f"libonnxruntime_providers_{name}.so"
    if not library.exists():
        return None
    _preload()
    try:
        with contextlib.suppress(OSError):  # the provider takes symbols from it and does not name it
            ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    return None


@cache
def _tensorrt_version() -> str:
    """The version of TensorRT that the provider is linked with, as TensorRT counts (101600); nothing where none loads."""
    if broken("tensorrt") is None:
        with contextlib.suppress(
            OSError, AttributeError
        ):  # found through the provider, which names the library it wants
            library = ctypes.CDLL(str(Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_tensorrt.so"))
            return str(library.getInferLibVersion())
    return ""


def _preload() -> None:
    """Load CUDA's libraries where pip put them, which is no place the loader looks at."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(Exception):  # what is missing is told by the provider
        ort.preload_dlls()
    for line in said.getvalue().splitlines():
        log.debug("%s", line)


_MISSING = re.compile(r"(?P<library>lib(?P<stem>[\w+-]+)\.so(?:\.(?P<major>\d+))?\S*): cannot open shared object file")


def fix_for(why: str) -> str:
    """What to do about a library that does not load."""
    found = _MISSING.search(why)
    if found is None:
        return "`trt-engine doctor` looks for its libraries"
    if found["stem"] == "cuda":
        return "install the NVIDIA driver, or start the container with `--gpus all`"
    if found["stem"].startswith(("nvinfer", "nvonnxparser")):
        major = int(found["major"] or 10)
        return (
            f"install TensorRT {major} (`pip install 'tensorrt-cu13-libs>={major},<{major + 1}'`) and put its folder "
            "`tensorrt_libs` on `LD_LIBRARY_PATH`"
        )
    return "install CUDA's libraries: `pip install 'onnxruntime-gpu[cuda,cudnn]'`, or put them on `LD_LIBRARY_PATH`"
