"""Runs ONNX Runtime engines: thread-safe `run` on host arrays, and contexts over host buffers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import onnxruntime as ort

from trt_engine.backends.onnxruntime import hardware, provider_names, providers, session
from trt_engine.backends.onnxruntime.build import node_placement
from trt_engine.backends.onnxruntime.compatibility import check_compatibility, runtime_providers
from trt_engine.backends.onnxruntime.host_session import OnnxRuntimeGpuSession, OnnxRuntimeSession
from trt_engine.backends.onnxruntime.options import BUILD_ONLY, OnnxRuntimeOptions, parse
from trt_engine.backends.onnxruntime.ort_values import is_byte_sized, is_numpy_dtype
from trt_engine.backends.onnxruntime.providers import ProviderSelection, select_providers
from trt_engine.config.runtime import Batching, RuntimeConfig
from trt_engine.device import Device, Stream, info, open_device, parse_device
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, SetupError, UsageError
from trt_engine.format import quoted
from trt_engine.records.passport import FP32_PRODUCTS

if TYPE_CHECKING:
    from trt_engine.backends.onnxruntime.stream_session import OnnxRuntimeMultiStreamSession, StreamSession


log = logging.getLogger(__name__)


class OnnxRuntime:
    """Loads optimised graphs."""

    def load(self, engine: Engine, config: RuntimeConfig) -> OnnxRuntimeSession:
        """A session; `EngineError` with reason and command if the engine is incompatible with this machine.

        The caller checks the files' digests (`Engine.verify`).
        """
        found = check_compatibility(engine, config)
        if found.status in ("refuse", "rebuild"):
            raise EngineError(
                f"`{engine.path}` cannot be loaded here: {found.reason}",
                hint=f"`{found.command}`" if found.command else f"`trt-engine inspect {quoted(engine.path)}`",
            )
        notes = engine.passport.build.notes
        found_in = engine.passport.precision
        options, level, choice = session_settings(engine, config)
        streams = _StreamSessionFactory.create_if_supported(engine, options, level, choice, graphs=bool(config.graphs))
        loaded = streams.first.loaded if streams is not None else _create_session(engine.path, options, level, choice)
        try:
            _check_signature(engine, loaded)
            choice = providers.verify_active(loaded, choice, allow_fallback=config.allow_fallback)
        except BaseException:
            if streams is not None:
                streams.close()
            raise
        if choice.fallback:
            log.warning("%s", choice.fallback)
        if streams is not None:
            _warn_of_changing_batches(engine, config)
        precision = found_in.main_dtype or "unknown"
        if precision in ("fp32", "tf32"):  # decided per session
            precision = "tf32" if choice.tf32 else "fp32"
        facts = {
            "device": choice.device,
            "providers": ",".join(map(provider_names.short_name, loaded.get_providers())),
            "nodes": node_placement(loaded),
            "threads": _threads_text(options),
            "graph_optimization": f"{notes.get('graph_optimization', 'unknown')} (at build)",
            "precision": precision,
            "onnxruntime": str(ort.__version__),
        }
        if fallback := choice.fallback or notes.get("fallback"):
            facts["fallback"] = fallback
        if not choice.on_gpu:
            if streams is not None:  # its provider did not start, and another was allowed
                streams.close()
            return OnnxRuntimeSession(loaded, engine.signature, engine.passport.profiles, facts)
        board = hardware.gpu_info(choice.device)
        facts["gpu"] = f"{board.name}, {hardware.sm_architecture(board)}" if board else "unknown without NVML"
        facts["tf32"] = "on" if choice.tf32 else "off"
        if (version := choice.plugin_version) is not None:
            facts[providers.PROVIDER_VERSION] = version
        if given := ", ".join(f"{name}={value}" for name, value in _extra_provider_options(choice)):
            facts["provider_options"] = given

        def capturing() -> ort.InferenceSession:
            return _create_session(engine.path, options, level, choice.with_cuda_graphs())

        if streams is not None:
            return streams.session(engine, facts, capturing)
        if not all(is_numpy_dtype(spec.dtype) and spec.dtype != "string" for spec in engine.signature):
            return OnnxRuntimeSession(loaded, engine.signature, engine.passport.profiles, facts)
        return OnnxRuntimeGpuSession(
            loaded, engine.signature, profiles=engine.passport.profiles, runtime_info=facts, device=choice.device,
            create_graph_session=capturing,
        )  # fmt: skip


def session_settings(engine: Engine, config: RuntimeConfig) -> tuple[OnnxRuntimeOptions, str, ProviderSelection]:
    """Options, optimization level at load, and providers of an engine's sessions."""
    options, given = _parse_options(engine, config), _merged_options(engine, config)
    shares = engine.passport.precision.shares
    choice = select_providers(
        runtime_providers(engine, config),
        config.device or engine.passport.device,
        allow_fallback=config.allow_fallback,
        options=given,
        precision="tf32" if "tf32" in shares else None,
    ).with_cache(engine.passport.payload[0].digest, engine.passport.model.digest)
    if "cuda.use_tf32" not in given and engine.passport.build.notes.get(FP32_PRODUCTS) == "0":
        choice = choice.with_tensor_cores()
    level = engine.passport.build.notes.get("load_optimization", "none")
    if level not in session.LEVELS:
        raise EngineError(
            f"the passport of `{engine.path}` has the optimisation level `{level}`, expected {', '.join(session.LEVELS)}",
            hint=f"build it again: `{engine.passport.build.command}`",
        )
    return options, level, choice


def _extra_provider_options(choice: ProviderSelection) -> list[tuple[str, str]]:
    """Provider settings other than the defaults."""
    return [
        (f"{name}.{setting}", value)
        for name, values in zip(choice.names, choice.options, strict=True)
        for setting, value in values.items()
        if setting not in ("device_id", "use_tf32")
    ]


_warned_engines: set[str] = set()
"""Digests of payloads that this process has warned of."""


def _warn_of_changing_batches(engine: Engine, config: RuntimeConfig) -> None:
    """Warn once of an engine on CUDA whose batches change their size, where `graphs` is not set."""
    batching, digest = config.batching, engine.passport.payload[0].digest
    if config.graphs is not None or batching is None or digest in _warned_engines:
        return
    if not _batch_changes(engine, batching):
        return
    _warned_engines.add(digest)
    log.warning(
        "`%s`: ONNX Runtime plans each convolution again, about 1 ms each, whenever the size of a batch changes; "
        "`te.load(engine, graphs=True, batching=...)` captures each size once, `graphs=False` accepts it",
        engine.path.name,
    )  # fmt: skip


def _batch_changes(engine: Engine, batching: Batching) -> bool:
    """Whether the engine gets batches of more than one size."""
    spans = [span for profile in engine.passport.profiles for span in profile.ranges.values()]
    sizes = {size for span in spans for size in (span.min[0], span.max[0])}
    if len(sizes) == 1 or all(spec.shape[:1] != (-1,) for spec in engine.signature.inputs):
        return False  # smaller ones are padded to it
    largest = batching.max_batch or max(sizes, default=None)
    return largest != 1 and (largest is None or not batching.buckets or min(batching.buckets) < largest)


class _StreamSessionFactory:
    """Creates sessions on user streams; creates the first one at once."""

    def __init__(
        self,
        path: Path,
        options: OnnxRuntimeOptions,
        level: str,
        choice: ProviderSelection,
        device: Device,
        *,
        graphs: bool,
    ) -> None:
        self._path, self._options, self._level, self._choice = path, options, level, choice
        self._graphs, self.device = graphs, device
        stream = device.stream()
        try:
            self.first = self.open_session(stream)
        except BaseException:
            stream.close()
            raise

    @classmethod
    def create_if_supported(
        cls, engine: Engine, options: OnnxRuntimeOptions, level: str, choice: ProviderSelection, *, graphs: bool
    ) -> _StreamSessionFactory | None:
        """None if ONNX Runtime must manage streams and memory: on a CPU, with compiling providers, for string and sub-byte
        dtypes, and (logged) if the device cannot be opened.
        """
        if not choice.on_gpu or choice.compiles or not all(is_byte_sized(spec.dtype) for spec in engine.signature):
            return None
        try:
            device = open_device(choice.device)
        except SetupError as error:
            log.warning("no contexts on `%s` (%s); using ONNX Runtime's own streams", choice.device, error)
            return None
        try:
            return cls(engine.path, options, level, choice, device, graphs=graphs)
        except BaseException:
            device.close()
            raise

    def open_session(self, stream: Stream) -> StreamSession:
        """A session that launches on that stream."""
        from trt_engine.backends.onnxruntime.stream_session import StreamSession, cpu_operators

        refused = None
        if self._graphs:
            choice = self._choice.with_stream(stream.handle).with_cuda_graphs()
            made = session.session_options(self._options, level=self._level)
            made.enable_mem_pattern = False  # allocates in the second run, which is captured
            try:
                loaded = session.create_session(self._path, made, choice)
            except session.ERRORS as error:
                if not session.is_capture_refusal(error):
                    raise session.translate_load_error(error, self._path, choice) from error
                refused = session.error_summary(error)
            else:
                return StreamSession(loaded, stream, captures=True)
        loaded = _create_session(self._path, self._options, self._level, self._choice.with_stream(stream.handle))
        if refused and (where := cpu_operators(loaded)):
            refused = f"the CPU runs {', '.join(f'`{name}`' for name in where)}, and graphs contain only GPU work"
        return StreamSession(loaded, stream, no_graph_reason=refused)

    def session(
        self, engine: Engine, facts: dict[str, str], capturing: Callable[[], ort.InferenceSession]
    ) -> OnnxRuntimeMultiStreamSession:
        from trt_engine.backends.onnxruntime.stream_session import OnnxRuntimeMultiStreamSession

        first = self.first
        del self.first  # `opened` outlives it and would keep its weights on the GPU
        return OnnxRuntimeMultiStreamSession(
            first,
            engine.signature,
            engine.passport.profiles,
            facts,
            self.device,
            self.open_session,
            lambda: _create_session(self._path, self._options, self._level, self._choice),
            capturing,
            device_spec=parse_device(self._choice.device),
        )

    def close(self) -> None:
        self.first.stream.close()
        self.device.close()


def _create_session(
    path: Path, options: OnnxRuntimeOptions, level: str, choice: ProviderSelection
) -> ort.InferenceSession:
    try:
        return session.create_session(path, session.session_options(options, level=level), choice)
    except session.ERRORS as error:
        raise session.translate_load_error(error, path, choice) from error


_ORT_TYPES = {
    "float32": "float",
    "float64": "double",
    "float8_e4m3fn": "float8e4m3fn",
    "float8_e4m3fnuz": "float8e4m3fnuz",
    "float8_e5m2": "float8e5m2",
    "float8_e5m2fnuz": "float8e5m2fnuz",
    "float4_e2m1fn": "float4e2m1",
    "float8_e8m0fnu": "float8e8m0",
}
"""ONNX Runtime's dtype names where they differ."""


def _check_signature(engine: Engine, loaded: ort.InferenceSession) -> None:
    """`EngineError` if inputs or outputs of passport and graph differ."""
    for side, specs, values in (
        ("inputs", engine.signature.inputs, loaded.get_inputs()),
        ("outputs", engine.signature.outputs, loaded.get_outputs()),
    ):
        expected = [f"{spec.name} tensor({_ORT_TYPES.get(spec.dtype, spec.dtype)})" for spec in specs]
        found = [f"{value.name} {value.type}" for value in values]
        if expected != found:
            raise EngineError(
                f"the passport of `{engine.path}` lists the {side} {', '.join(expected)}, the engine has {', '.join(found)}",
                hint=f"build it again: `{engine.passport.build.command}`",
            )


def _merged_options(engine: Engine, config: RuntimeConfig) -> dict[str, str]:
    """The build settings, overridden by those of this load."""
    built = engine.passport.build.config.get("options") or {}
    here = runtime_providers(engine, config)
    kept = {name: value for name, value in built.items() if "." not in name or name.partition(".")[0] in here}
    return kept | config.options


def _parse_options(engine: Engine, config: RuntimeConfig) -> OnnxRuntimeOptions:
    saved = engine.passport.build.config.get("options") or {}
    built, asked = parse({name: saved[name] for name in BUILD_ONLY if name in saved}), parse(config.options)
    for name in BUILD_ONLY:
        if getattr(asked, name) is not None and getattr(asked, name) != getattr(built, name):
            raise UsageError(
                f"`-O {name}` is fixed when an engine is built",
                hint=f"`{engine.passport.build.command} -O {name}={config.options[name]}`",
            )
    return parse(_merged_options(engine, config))


def _threads_text(options: OnnxRuntimeOptions) -> str:
    if options.intra_op_threads:
        return str(options.intra_op_threads)
    return f"onnxruntime's default ({info.cpu().cores} cores here)"
