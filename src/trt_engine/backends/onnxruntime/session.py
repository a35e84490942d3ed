"""Creates interruptible ONNX Runtime sessions, and translates ONNX Runtime's errors.

Judges the nodes that ONNX Runtime placed on the CPU beside a GPU: arithmetic of sizes, or a fallback.
"""

from __future__ import annotations

import _thread
import errno
import logging
import re
import shutil
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import onnxruntime as ort
from onnx import AttributeProto, ModelProto, NodeProto
from onnxruntime.capi import onnxruntime_pybind11_state as state

from trt_engine.atomic_io import os_error
from trt_engine.backends.onnxruntime.options import OnnxRuntimeOptions
from trt_engine.backends.onnxruntime.providers import ProviderSelection, attach, compile_lock, install_hint, start_error
from trt_engine.errors import (
    BuildError,
    DeviceLost,
    FeedError,
    MemoryExhausted,
    ModelError,
    SetupError,
    TrtEngineError,
    UsageError,
)
from trt_engine.format import library_reason, quoted, shorten_middle
from trt_engine.graph import walk
from trt_engine.graph.load import read_proto
from trt_engine.workers.process import add_stop_callback

log = logging.getLogger(__name__)

T = TypeVar("T")

# ONNX Runtime's exceptions derive from Exception one by one; there is no common base
ERRORS: tuple[type[Exception], ...] = (
    *(
        kind
        for kind in vars(state).values()
        if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == state.__name__
    ),
    RuntimeError,
    ValueError,
    MemoryError,
)
LEVELS = {
    "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
CRASHING_OPTIMIZERS = ("MatmulTransposeFusion",)
"""Passes that end the process on FP16 graphs on the CPU: ONNX Runtime 1.31, `Transpose -> MatMul` at level `all`."""
_FATAL, _WARNING = 4, 2
_EXTERNAL_FROM_BYTES = 1024


def session_options(
    options: OnnxRuntimeOptions, *, level: str, save: Path | None = None, weights: str | None = None
) -> ort.SessionOptions:
    """ONNX Runtime session options. `save` is the path of the optimised graph, `weights` the name of its weights file."""
    made = ort.SessionOptions()
    loud = log.isEnabledFor(logging.DEBUG)
    made.log_severity_level = _WARNING if loud else _FATAL  # errors are translated
    ort.set_default_logger_severity(_WARNING if loud else _FATAL)
    made.graph_optimization_level = LEVELS[level]
    made.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if options.intra_op_threads is not None:
        made.intra_op_num_threads = options.intra_op_threads
    if options.inter_op_threads is not None:
        made.inter_op_num_threads = options.inter_op_threads
    if options.execution_mode == "parallel":
        made.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    if options.arena is not None:
        made.enable_cpu_mem_arena = options.arena
    if options.memory_pattern is not None:
        made.enable_mem_pattern = options.memory_pattern
    if options.deterministic is not None:
        made.use_deterministic_compute = options.deterministic
    if options.spinning is not None:
        for kind in ("intra", "inter"):
            made.add_session_config_entry(f"session.{kind}_op.allow_spinning", str(int(options.spinning)))
    if options.denormals_as_zero is not None:
        made.add_session_config_entry("session.set_denormal_as_zero", str(int(options.denormals_as_zero)))
    if save is not None:
        made.optimized_model_filepath = str(save)
        if weights is not None:
            prefix = "session.optimized_model_external_initializers"
            made.add_session_config_entry(f"{prefix}_file_name", weights)
            made.add_session_config_entry(f"{prefix}_min_size_in_bytes", str(_EXTERNAL_FROM_BYTES))
    return made


def create_session(
    path: Path,
    made: ort.SessionOptions,
    choice: ProviderSelection,
    *,
    graph: bytes | None = None,
    disabled: Sequence[str] = (),
    judge: bool = True,
) -> ort.InferenceSession:
    """A session of the file, or of a modified `graph` with the file's external weights, without the passes `disabled`;
    raises ONNX Runtime's exceptions (see `translate_load_error`). Interruptible by Ctrl-C.

    `SetupError` where the CPU was not requested and nodes that compute on data were placed there; without `judge`, where the
    graph that was placed is not the file, this is left to the session of the file."""
    if graph is not None:
        made.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    with compile_lock(choice) as settled:
        providers = attach(settled, made)

        def make() -> ort.InferenceSession:
            return ort.InferenceSession(
                str(path) if graph is None else graph,
                made,
                providers=providers,
                enable_fallback=0,
                disabled_optimizers=list(disabled),
            )

        session = _run_in_thread(make, lambda: made.set_load_cancellation_flag(True))
    if choice.strict and judge and (found := fallback_nodes(lambda: read_proto(path), placed_nodes(session))):
        raise start_error(choice) or SetupError(
            "a part of the model does not run on the requested providers and would fall back to the CPU: "
            f"{describe_fallback(found)}",
            hint="name the CPU as well, as `--providers cuda,cpu`, or `--allow-fallback` (`allow_fallback: true` in a plan)",
        )
    return session


def placed_nodes(session: ort.InferenceSession) -> list[Placed]:
    """Name, operator and provider of each node."""
    return [
        (node.name, node.op_type, part.ep_name)
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    ]


_active_run_options: weakref.WeakSet[ort.RunOptions] = weakref.WeakSet()


def run_options() -> ort.RunOptions:
    """Run options, terminated by `workers.process.stop_inferences` before the next node, also inside a Loop."""
    made = ort.RunOptions()
    _active_run_options.add(made)
    return made


def _stop_runs() -> None:
    for options in [*_active_run_options]:
        options.terminate = True


add_stop_callback(_stop_runs)


def run_interruptibly(run: Callable[[ort.RunOptions], T]) -> T:
    """`run(options)`, terminated by Ctrl-C before the next node, also inside a Loop.

    Starts a thread (about 0.1 ms): not for measurements.
    """
    options = ort.RunOptions()

    def cancel() -> None:
        options.terminate = True

    return _run_in_thread(lambda: run(options), cancel)


def _run_in_thread(make: Callable[[], T], cancel: Callable[[], None]) -> T:
    """Run `make()` in a separate thread, so that the main thread receives signals.

    Returns or raises only after that thread has left ONNX Runtime, which would abort otherwise.
    """
    if threading.current_thread() is not threading.main_thread():  # signals go to the main thread
        return make()
    found: list[Any] = []
    entered = cancelled = through = False
    done = threading.Lock()  # not an `Event`, which is not signal-safe
    done.acquire()

    def work() -> None:
        nonlocal entered, through
        entered = True
        try:
            if not cancelled:
                found.append(make())
        except BaseException as error:  # raised in the caller's thread
            found.append(error)
        finally:
            through = True
            done.release()

    try:
        _thread.start_new_thread(work, ())
        while not done.acquire(timeout=0.5):  # a signal just before the wait does not end it: `sem_wait(3)` starts late
            pass
    except BaseException:
        cancelled = True
        cancel()
        if entered and not through:  # otherwise it sees `cancelled` and returns
            done.acquire()
        raise
    result = found.pop()
    if isinstance(result, BaseException):
        raise result
    made: T = result
    return made


def create_unoptimized(path: Path) -> ort.InferenceSession:
    """An unoptimised CPU session, as a reference."""
    made = session_options(OnnxRuntimeOptions(), level="none")
    try:
        return create_session(path, made, ProviderSelection(("cpu",), ({},), "cpu", strict=False))
    except ERRORS as error:
        raise translate_load_error(error, path) from error


def create_plain(model: Path | bytes, threads: int | None = None) -> ort.InferenceSession:
    """An unoptimised CPU session without an arena; raises ONNX Runtime's exceptions."""
    made = session_options(OnnxRuntimeOptions(arena=False, intra_op_threads=threads), level="none")
    given = model if isinstance(model, bytes) else str(model)
    return ort.InferenceSession(given, made, providers=["CPUExecutionProvider"], enable_fallback=0)


# ------------------------------------------------------------------------------------------------ errors

_OUT_OF_MEMORY = re.compile(
    r"bad_alloc|failed to allocate|out of memory|cudaErrorMemoryAllocation|CU(BLAS|DNN)_STATUS_ALLOC_FAILED"
    r"|smaller than requested bytes",
    re.IGNORECASE,
)
_REQUESTED_BYTES = re.compile(r"(?:requested bytes of|requested buffer of size) (?P<nbytes>\d+)", re.IGNORECASE)
_AVAILABLE_BYTES = re.compile(r"Available memory of (?P<nbytes>\d+)", re.IGNORECASE)
_NODE_FAILED = re.compile(
    r"returned while running (?P<op>\S+) node\. Name:'(?P<node>[^']*)' Status Message: (?P<why>.*)", re.DOTALL
)
_LOST = re.compile(
    r"illegal memory access|unspecified launch failure|misaligned address|uncorrectable ECC|device-side assert"
    r"|CUDA (?:failure|error) (?:214|700|702|710|715|716|717|718|719)\b",
    re.IGNORECASE,
)
_CUDA_ERROR = re.compile(
    r"\b(?:CUDA|CUBLAS|CUDNN|CUFFT|CUSPARSE)\w* (?:failure|error) \d+\s*:[^;]*[^; ]", re.IGNORECASE
)
_CAPTURED_BY_ANOTHER = re.compile(r"(?:failure|error) 90[0-7]\b|stream is capturing", re.IGNORECASE)
_NO_CAPTURE = re.compile(r"graph capture feature", re.IGNORECASE)
_NO_SUCH_DEVICE = re.compile(
    r"invalid device ordinal|cudaErrorInvalidDevice\b|device_id.{0,40}(invalid|out of range)", re.I
)
_NO_DEVICE = re.compile(
    r"no CUDA-capable device|driver version is insufficient|cudaErrorNoDevice|cudaErrorInsufficientDriver", re.I
)
_NO_LIBRARY = re.compile(r"Failed to load library|Please install TensorRT libraries")
_NO_SCHEMA = re.compile(r"No Op registered for (?P<op>\S+) with domain_version of (?P<version>\d+)")
_NOT_REGISTERED = re.compile(r"Fatal error: (?P<domain>[^:\s]*):(?P<op>[^\s(]+)\(-?\d+\) is not a registered")
_NO_KERNEL = re.compile(
    r"Could not find an implementation for (?P<op>\S+?)\((?P<version>\d+)\)(?: node with name '(?P<node>[^']*)')?"
)
_OPSET = re.compile(r"Opset (?P<got>\d+) is under development.*till opset (?P<limit>\d+)", re.DOTALL)
_IR = re.compile(r"Unsupported model IR version: (?P<got>\d+), max supported IR version: (?P<limit>\d+)")
_FIRST_OPSET = 7
"""The oldest opset supported by ONNX Runtime (its compatibility documentation)."""


def _opset_of(path: Path) -> int | None:
    try:
        return walk.opsets_of(read_proto(path)).get("")
    except TrtEngineError:
        return None


def error_summary(error: BaseException | str) -> str:
    """The reason of ONNX Runtime's message, without prefixes and source positions; of nested ones the innermost node's."""
    text = str(error)
    if (failed := _failed_node(text)) is not None:
        return f"{failed.node} fails: {failed.reason}"
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"/\S*onnxruntime\S*:\d+ .*?(?=\[|[A-Z][a-z]+ |$)", "", text)
    return library_reason(text.strip() or type(error).__name__).rstrip(".")


class _FailedNode(NamedTuple):
    """The node whose kernel failed, and why."""

    node: str
    reason: str


def _failed_node(text: str) -> _FailedNode | None:
    """The innermost node of a message that nests those of If, Loop and Scan; None without any."""
    found = inner = _NODE_FAILED.search(text)
    while inner is not None:
        found, inner = inner, _NODE_FAILED.search(inner["why"])
    if found is None:
        return None
    where = f" (node `{shorten_middle(found['node'], 100)}`)" if found["node"] else ""
    return _FailedNode(f"`{found['op']}`{where}", error_summary(found["why"]))


def translate_load_error(error: BaseException, path: Path, choice: ProviderSelection | None = None) -> TrtEngineError:
    """Translate an error of loading `path` on the providers of `choice`."""
    text = str(error)
    version = f"onnxruntime {ort.__version__}"
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text):
        return MemoryExhausted(f"out of memory while loading `{path}`", hint="free some memory, or a smaller model")
    if _NO_SUCH_DEVICE.search(text):
        device = f"`{choice.device}`" if choice is not None else "the requested GPU"
        return UsageError(f"there is no device {device} here", hint="`nvidia-smi -L` lists the GPUs; they count from 0")
    if _NO_DEVICE.search(text):
        return SetupError(
            f"no usable GPU is here: {error_summary(error)}",
            hint="`nvidia-smi` shows the driver and the GPUs; in a container: `--gpus all`; or `--device cpu`",
        )
    if _NO_LIBRARY.search(text):
        return SetupError(f"a provider's library does not load: {error_summary(error)}", hint=install_hint(text))
    if found := _NO_SCHEMA.search(text):
        return ModelError(
            f"{version} does not know the operator `{found['op']}` (opset {found['version']}) of `{path}`",
            hint="export the model with operators of the ONNX standard, or build it with a backend that has it",
        )
    if found := _NOT_REGISTERED.search(text):
        return ModelError(
            f"{version} does not know the operator `{found['op']}` (domain `{found['domain'] or 'ai.onnx'}`) of `{path}`",
            hint="export the model without it, or build it with the backend the operator belongs to",
        )
    if found := _NO_KERNEL.search(text):
        where = f" (node `{found['node']}`)" if found["node"] else ""
        if (opset := _opset_of(path)) is not None and opset < _FIRST_OPSET:
            return ModelError(
                f"`{path}` has opset {opset}, {version} has kernels from opset {_FIRST_OPSET} on: none for "
                f"`{found['op']}`{where}",
                hint="export with `opset_version=20`, or raise it with `onnx.version_converter`",
            )
        return ModelError(
            f"{version} has no kernel for `{found['op']}` in the types `{path}` uses{where}",
            hint="export the model in FP32 or FP16; bfloat16 and 8-bit floats have few kernels on a CPU",
            machine_specific=True,
        )
    if found := _OPSET.search(text):
        return ModelError(
            f"`{path}` has opset {found['got']}, {version} takes up to {found['limit']}",
            hint="export with `opset_version=20`, or upgrade: `pip install -U onnxruntime`",
        )
    if found := _IR.search(text):
        return ModelError(
            f"`{path}` has IR version {found['got']}, {version} takes up to {found['limit']}",
            hint="export with an older `onnx`, or upgrade: `pip install -U onnxruntime`",
        )
    if "float8" in text and "invalid" in text:
        return ModelError(
            f"ONNX Runtime rewrites `{path}` into operators that do not take FP8: {error_summary(error)}",
            hint="`-O graph_optimization=basic`, which is the default for graphs with FP8",
        )
    if isinstance(error, state.EPFail):
        return SetupError(f"a provider failed: {error_summary(error)}", hint="`trt-engine doctor`")
    if isinstance(error, state.RuntimeException):
        return BuildError(
            f"ONNX Runtime failed on `{path}`: {error_summary(error)}", hint="`-O graph_optimization=basic`"
        )
    return ModelError(
        f"ONNX Runtime cannot load `{path}`: {error_summary(error)}",
        hint=f"`trt-engine inspect {quoted(path)}` shows its contents",
    )


def is_capture_refusal(error: BaseException) -> bool:
    """Whether ONNX Runtime cannot capture graphs of this model on these providers."""
    return _NO_CAPTURE.search(str(error)) is not None


def is_write_failure(error: BaseException) -> bool:
    """Whether ONNX Runtime could not write the optimised graph or its weights."""
    text = str(error)
    return "Protobuf serialization failed" in text or "write external initializers" in text or "SystemError :" in text


def translate_write_error(payload: Path, nbytes: int) -> TrtEngineError:
    """The error of a failed write; ONNX Runtime gives no reason, so limits and disk space are checked."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < 2 * nbytes + (1 << 20):
        return os_error(OSError(errno.EFBIG, "file too large"), payload)
    if shutil.disk_usage(payload.parent).free < nbytes + (1 << 20):
        return os_error(OSError(errno.ENOSPC, "no space"), payload)
    return SetupError(
        f"ONNX Runtime could not write the engine to `{payload.parent}`",
        hint="check the space and the permissions there, or choose another with `$TRT_ENGINE_STORE`",
    )


def translate_run_error(error: BaseException, device: str | None = None, *, captured: bool = False) -> TrtEngineError:
    """Translate an error of running, or of capturing if `captured`."""
    text = str(error)
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text):
        return _memory_error(text, device)
    if _LOST.search(text):
        return DeviceLost(
            f"`{device or 'the GPU'}` is lost: {error_summary(error)}",
            hint="close the engine and start the process again",
        )
    if (failure := _CUDA_ERROR.search(text)) is not None:
        if _CAPTURED_BY_ANOTHER.search(text):
            if captured:
                return TrtEngineError(
                    f"ONNX Runtime cannot be captured on `{device or 'the GPU'}`: {failure[0]}",
                    hint="leave `graphs` out",
                )
            return TrtEngineError(
                f"ONNX Runtime could not run on `{device or 'the GPU'}`: another thread captures a CUDA graph in mode "
                "`global`, which forbids calls of all threads",
                hint="`torch.cuda.graph(..., capture_error_mode='thread_local')`, or infer before or after the capture",
            )
        return TrtEngineError(
            f"ONNX Runtime failed on `{device or 'the GPU'}`: {failure[0]}", hint="`-v` shows its own log"
        )
    if isinstance(error, state.InvalidArgument | ValueError | RuntimeError) and not isinstance(
        error, state.RuntimeException
    ):
        return FeedError(
            f"ONNX Runtime refuses the feeds: {error_summary(error)}", hint="`trt-engine inspect` shows the inputs"
        )
    if (failed := _failed_node(text)) is not None:
        return ModelError(
            f"ONNX Runtime's {failed.node} fails on these inputs: {failed.reason}",
            hint="other inputs (`--inputs FILE.npz`) or other shapes; `-v` shows its own log",
        )
    failed_running = f"ONNX Runtime failed while running: {error_summary(error)}"
    if device is None:  # on a CPU: a kernel without support for these shapes
        return ModelError(
            failed_running, hint="other inputs (`--inputs FILE.npz`) or other shapes; `-v` shows its own log"
        )
    return TrtEngineError(failed_running, hint="`-v` shows its own log")


def _memory_error(text: str, device: str | None) -> MemoryExhausted:
    """`MemoryExhausted` with the requested bytes, if reported."""
    asked, left = _REQUESTED_BYTES.search(text), _AVAILABLE_BYTES.search(text)
    where = f" of `{device}`" if device else ""
    if asked is None:
        return MemoryExhausted(f"out of memory{where} while running", hint="a smaller batch")
    failed = f"ONNX Runtime could not allocate {asked['nbytes']} bytes{where} while running"
    if left is not None:
        return MemoryExhausted(
            f"{failed}: {left['nbytes']} are left below its limit",
            hint="a smaller batch, or a higher `-O cuda.gpu_mem_limit`",
        )
    return MemoryExhausted(failed, hint="a smaller batch, or fewer `contexts`")


_SIZES = frozenset(("Shape", "Size"))
_SHOWN = 4

Placed = tuple[str, str, str]
"""A node's name, its operator and its provider, as ONNX Runtime reports it."""


def fallback_nodes(read: Callable[[], ModelProto], placed: Iterable[Placed]) -> list[tuple[str, str]]:
    """Name and operator of the nodes on the CPU that compute on data; `read` reads the graph, if there are any on the CPU.

    A node that depends on nothing but constants and the sizes of tensors (`Shape`, `Size`, and what follows from them) is
    placed on the CPU on purpose: sizes are in host memory, and the kernels that take them read them there. A node with a
    subgraph counts as one that computes on data, and so does one that is not found in the graph; of nodes with equal names,
    one that computes on data is enough.
    """
    on_cpu = [(name, kind) for name, kind, provider in placed if provider == "CPUExecutionProvider"]
    if not on_cpu:
        return []
    of_sizes = _size_nodes(read())
    return [item for item in on_cpu if not of_sizes.get(item, False)]


def _size_nodes(model: ModelProto) -> dict[tuple[str, str], bool]:
    """By name and operator, whether all such nodes depend on constants and sizes alone."""
    found: dict[tuple[str, str], bool] = {}
    for graph in walk.graphs(model):
        known = {tensor.name for tensor in graph.initializer} | {item.values.name for item in graph.sparse_initializer}
        known -= {value.name for value in graph.input}  # the caller may replace them
        for node in graph.node:  # in topological order
            drawn = node.op_type.startswith(("Random", "Bernoulli", "Multinomial"))
            sizes = not _has_subgraph(node) and (
                node.op_type in _SIZES or (not drawn and all(name in known for name in node.input if name))
            )
            if sizes:
                known.update(name for name in node.output if name)
            key = (node.name, node.op_type)
            found[key] = found.get(key, True) and sizes
    return found


def _has_subgraph(node: NodeProto) -> bool:
    return any(item.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for item in node.attribute)


def describe_fallback(nodes: list[tuple[str, str]]) -> str:
    """``3 nodes (Det 2, NonZero 1): `det_0`, `det_1`, `nz` ``, of many the first four."""
    kinds = ", ".join(f"{kind} {count}" for kind, count in Counter(kind for _, kind in nodes).most_common())
    names = ", ".join(f"`{name}`" for name, _ in nodes[:_SHOWN] if name)
    more = f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN and names else ""
    return f"{len(nodes)} node{'s' if len(nodes) > 1 else ''} ({kinds}){': ' if names else ''}{names}{more}"
