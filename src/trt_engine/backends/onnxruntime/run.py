"""An engine of ONNX Runtime at work: thread-safe `run` on host arrays, and contexts over the host's buffers."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from trt_engine.backends.onnxruntime import hardware, providers, session
from trt_engine.backends.onnxruntime.build import placement
from trt_engine.backends.onnxruntime.options import AT_BUILD, OnnxRuntimeOptions, parse
from trt_engine.backends.onnxruntime.providers import Choice, choose
from trt_engine.backends.onnxruntime.verdict import providers_for, verdict
from trt_engine.config import Profile, RuntimeConfig, check_shapes
from trt_engine.device import Buffer, Device, Stream, info, open_device, parse_device
from trt_engine.device.host import HostBuffer, HostStream
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, SetupError, UsageError
from trt_engine.tensors import Shape, Signature, Tensors, TensorSpec, closest, dtype

if TYPE_CHECKING:
    from trt_engine.backends.onnxruntime.gpu import OnnxRuntimeStreams, StreamSession

__all__ = [
    "OnnxRuntime",
    "OnnxRuntimeContext",
    "OnnxRuntimeGpuSession",
    "OnnxRuntimeSession",
    "as_array",
    "asked",
    "in_numpy",
    "plain_run",
    "reference",
    "run_arrays",
]

Array = npt.NDArray[Any]

log = logging.getLogger(__name__)


class OnnxRuntime:
    """Loads optimised graphs."""

    def load(self, engine: Engine, config: RuntimeConfig) -> OnnxRuntimeSession:
        """A session; `EngineError` with the reason and the command when the engine cannot be used here.

        The files' digests are the caller's to check (`Engine.verify`): reading gigabytes twice helps nobody.
        """
        found = verdict(engine, config)
        if found.verdict in ("refuse", "rebuild"):
            raise EngineError(
                f"`{engine.path}` cannot be loaded here: {found.reason}",
                hint=f"`{found.command}`" if found.command else f"`trt-engine inspect {engine.path}`",
            )
        notes = engine.passport.build.notes
        found_in = engine.passport.precision
        options, level, choice = asked(engine, config)
        streams = _Streams.where_possible(engine, options, level, choice, graphs=bool(config.graphs))
        loaded = streams.first.loaded if streams is not None else _loaded(engine.path, options, level, choice)
        try:
            _as_promised(engine, loaded)
            choice = providers.read_back(loaded, choice, allow_fallback=config.allow_fallback)
        except BaseException:
            if streams is not None:
                streams.close()
            raise
        if choice.fallback:
            log.warning("%s", choice.fallback)
        precision = found_in.main or "unknown"
        if precision in ("fp32", "tf32"):  # of one graph, and decided when a session is made
            precision = "tf32" if choice.tf32 else "fp32"
        facts = {
            "device": choice.device,
            "providers": ",".join(map(providers.short_name, loaded.get_providers())),
            "nodes": placement(loaded),
            "threads": _threads(options),
            "graph_optimization": f"{notes.get('graph_optimization', 'unknown')} (at build)",
            "precision": precision,
            "onnxruntime": str(ort.__version__),
        }
        if told := choice.fallback or notes.get("fallback"):
            facts["fallback"] = told
        if not choice.on_gpu:
            if streams is not None:  # its provider did not start, and another was allowed
                streams.close()
            return OnnxRuntimeSession(loaded, engine.signature, engine.passport.profiles, facts)
        board = hardware.board(choice.device)
        facts["gpu"] = (
            f"{board.name}, {hardware.architecture(board)}" if board else "unknown: NVML is not there to tell"
        )
        facts["tf32"] = "on" if choice.tf32 else "off"
        if given := ", ".join(f"{name}={value}" for name, value in _beyond_usual(choice)):
            facts["provider_options"] = given

        def capturing() -> ort.InferenceSession:
            return _loaded(engine.path, options, level, choice.capturing())

        if streams is not None:
            return streams.session(engine, facts, capturing)
        if not all(in_numpy(spec.dtype) and spec.dtype != "string" for spec in engine.signature):
            return OnnxRuntimeSession(loaded, engine.signature, engine.passport.profiles, facts)
        return OnnxRuntimeGpuSession(
            loaded, engine.signature, engine.passport.profiles, facts, choice.device, capturing
        )


def asked(engine: Engine, config: RuntimeConfig) -> tuple[OnnxRuntimeOptions, str, Choice]:
    """How an engine's sessions are made: the settings, how far its graph is rewritten as it loads, the providers."""
    options = _options(engine, config)
    choice = choose(
        providers_for(engine, config),
        config.device or engine.passport.device,
        allow_fallback=config.allow_fallback,
        options=_all_options(engine, config),
        precision="tf32" if "tf32" in engine.passport.precision.found else None,
    ).caching(engine.passport.payload[0].digest, engine.passport.model.digest)
    return options, engine.passport.build.notes.get("load_optimization", "none"), choice


def _beyond_usual(choice: Choice) -> list[tuple[str, str]]:
    """The provider's settings that were asked for, beyond those that always are."""
    return [
        (f"{name}.{setting}", value)
        for name, values in zip(choice.names, choice.options, strict=True)
        for setting, value in values.items()
        if setting not in ("device_id", "use_tf32")
    ]


class _Streams:
    """What sessions on streams of ours are made of, and the first of them, bound to a stream before it exists."""

    def __init__(
        self, path: Path, options: OnnxRuntimeOptions, level: str, choice: Choice, device: Device, *, graphs: bool
    ) -> None:
        self._path, self._options, self._level, self._choice = path, options, level, choice
        self._graphs, self.device = graphs, device
        stream = device.stream()
        try:
            self.first = self.opened(stream)
        except BaseException:
            stream.close()
            raise

    @classmethod
    def where_possible(
        cls, engine: Engine, options: OnnxRuntimeOptions, level: str, choice: Choice, *, graphs: bool
    ) -> _Streams | None:
        """None where ONNX Runtime keeps its own streams and memory: on a CPU, where TensorRT compiles as it loads, for
        element types that are not bytes in a row, and (said in the log) where the device cannot be opened.
        """
        if not choice.on_gpu or choice.compiles or not all(_in_bytes(spec.dtype) for spec in engine.signature):
            return None
        try:
            device = open_device(choice.device)
        except SetupError as error:
            log.warning("no contexts on `%s` (%s); ONNX Runtime's own streams run in their place", choice.device, error)
            return None
        try:
            return cls(engine.path, options, level, choice, device, graphs=graphs)
        except BaseException:
            device.close()
            raise

    def opened(self, stream: Stream) -> StreamSession:
        """A session that launches on that stream."""
        from trt_engine.backends.onnxruntime.gpu import StreamSession, on_cpu

        refused = None
        if self._graphs:
            choice = self._choice.on_stream(stream.handle).capturing()
            made = session.session_options(self._options, level=self._level)
            made.enable_mem_pattern = False  # planned memory is taken in the second run, which is the one captured
            try:
                loaded = session.create(self._path, made, choice)
            except session.ERRORS as error:
                if not session.refuses_capture(error):
                    raise session.on_load(error, self._path, choice) from error
                refused = session.first_line(error)
            else:
                return StreamSession(loaded, stream)
        loaded = _loaded(self._path, self._options, self._level, self._choice.on_stream(stream.handle))
        if refused and (where := on_cpu(loaded)):
            refused = f"the CPU runs {', '.join(f'`{name}`' for name in where)}, and a graph holds a GPU's work alone"
        return StreamSession(loaded, stream, refused=refused)

    def session(
        self, engine: Engine, facts: dict[str, str], capturing: Callable[[], ort.InferenceSession]
    ) -> OnnxRuntimeStreams:
        from trt_engine.backends.onnxruntime.gpu import OnnxRuntimeStreams

        first = self.first
        del self.first  # what makes others (`opened`) outlives it, and would keep its weights on the GPU
        return OnnxRuntimeStreams(
            first,
            engine.signature,
            engine.passport.profiles,
            facts,
            self.device,
            self.opened,
            lambda: _loaded(self._path, self._options, self._level, self._choice),
            capturing,
            place=parse_device(self._choice.device),
        )

    def close(self) -> None:
        self.first.stream.close()
        self.device.close()


def _in_bytes(name: str) -> bool:
    """Whether elements lie one beside the other, each in bytes of its own."""
    return name != "string" and dtype(name).bits >= 8


def _loaded(path: Path, options: OnnxRuntimeOptions, level: str, choice: Choice) -> ort.InferenceSession:
    try:
        return session.create(path, session.session_options(options, level=level), choice)
    except session.ERRORS as error:
        raise session.on_load(error, path, choice) from error


_TYPES = {
    "float32": "float",
    "float64": "double",
    "float8_e4m3fn": "float8e4m3fn",
    "float8_e4m3fnuz": "float8e4m3fnuz",
    "float8_e5m2": "float8e5m2",
    "float8_e5m2fnuz": "float8e5m2fnuz",
    "float4_e2m1fn": "float4e2m1",
    "float8_e8m0fnu": "float8e8m0",
}
"""ONNX Runtime's names of element types, where they are not ours."""


def _as_promised(engine: Engine, loaded: ort.InferenceSession) -> None:
    """`EngineError` when the passport tells of other inputs or outputs than the graph has: one of them was edited."""
    for side, specs, values in (
        ("inputs", engine.signature.inputs, loaded.get_inputs()),
        ("outputs", engine.signature.outputs, loaded.get_outputs()),
    ):
        said = [f"{spec.name} tensor({_TYPES.get(spec.dtype, spec.dtype)})" for spec in specs]
        found = [f"{value.name} {value.type}" for value in values]
        if said != found:
            raise EngineError(
                f"the passport of `{engine.path}` tells of the {side} {', '.join(said)}, the engine has {', '.join(found)}",
                hint=f"build it again: `{engine.passport.build.command}`",
            )


def reference(model: Path, signature: Signature) -> OnnxRuntimeSession:
    """The model itself on the CPU, nothing rewritten: what engines are compared with."""
    return OnnxRuntimeSession(session.plain(model), signature, (), {"device": "cpu", "graph_optimization": "none"})


def _all_options(engine: Engine, config: RuntimeConfig) -> dict[str, str]:
    """The settings of the build, and over them those of this load."""
    built = engine.passport.build.config.get("options") or {}
    here = providers_for(engine, config)
    kept = {name: value for name, value in built.items() if "." not in name or name.partition(".")[0] in here}
    return kept | config.options


def _options(engine: Engine, config: RuntimeConfig) -> OnnxRuntimeOptions:
    told = engine.passport.build.config.get("options") or {}
    built, asked = parse({name: told[name] for name in AT_BUILD if name in told}), parse(config.options)
    for name in AT_BUILD:
        if getattr(asked, name) is not None and getattr(asked, name) != getattr(built, name):
            raise UsageError(
                f"`-O {name}` is decided when an engine is built, and this one is built already",
                hint=f"`{engine.passport.build.command} -O {name}={config.options[name]}`",
            )
    return parse(_all_options(engine, config))


def _threads(options: OnnxRuntimeOptions) -> str:
    if options.intra_op_threads:
        return str(options.intra_op_threads)
    return f"onnxruntime's default ({info.cpu().cores} cores here)"


def plain_run(loaded: ort.InferenceSession) -> Callable[[Sequence[str], Any], Sequence[Any]]:
    """The library's own `run(names, feeds)`, beneath the Python method around it where that can be reached.

    The method checks names that were checked already: 2.7 of 10.2 microseconds on a model of one Add, ONNX Runtime 1.31.1.
    """
    inner = getattr(getattr(loaded, "_sess", None), "run", None)
    if inner is None:  # the attribute is not part of ONNX Runtime's public face
        return loaded.run  # type: ignore[no-any-return]
    count = len(loaded.get_inputs())

    def run(names: Sequence[str], feeds: Any) -> Sequence[Any]:
        if len(feeds) != count:  # the library finds an unknown name itself, but not a missing one
            raise ValueError(f"{len(feeds)} inputs are fed, the engine has {count}")
        outputs: Sequence[Any] = inner(names, feeds, None)
        return outputs

    return run


class OnnxRuntimeSession:
    """An engine in ONNX Runtime. `run` is safe from many threads; contexts are for one thread each."""

    def __init__(
        self,
        loaded: ort.InferenceSession,
        signature: Signature,
        profiles: tuple[Profile, ...],
        facts: dict[str, str],
    ) -> None:
        self.signature = signature
        self.device: Device = open_device("cpu")  # where its buffers are; a provider on a GPU moves them itself
        self._loaded: ort.InferenceSession | None = loaded
        self._profiles = profiles
        self._facts = facts
        self._names = [spec.name for spec in signature.outputs]
        self._open: set[OnnxRuntimeContext] = set()
        plain = all(in_numpy(spec.dtype) for spec in signature)
        self._run: Callable[[Sequence[str], Any], Sequence[Any]] = plain_run(loaded) if plain else self._run_values

    def run(self, feeds: Tensors) -> dict[str, Any]:
        """The outputs by name; feeds are checked by the caller."""
        try:
            given = feeds if type(feeds) is dict else dict(feeds)  # ONNX Runtime takes no other mapping
            outputs = self._run(self._names, given)  # as many as there are names
            return dict(zip(self._names, outputs))  # noqa: B905  # `strict` takes 5 microseconds here
        except session.ERRORS as error:
            raise session.on_run(error) from error

    def context(self, profile: int = 0) -> OnnxRuntimeContext:
        loaded = self._alive()
        if not 0 <= profile < max(len(self._profiles), 1):
            raise UsageError(
                f"there is no profile {profile}, the engine has {len(self._profiles)}", hint="profiles count from 0"
            )
        span = self._profiles[profile] if self._profiles else None
        made = OnnxRuntimeContext(self, loaded, span, profile)
        self._open.add(made)
        return made

    def facts(self) -> dict[str, str]:
        return dict(self._facts)

    def close(self) -> None:
        if self._open:
            raise UsageError(
                f"the session has {len(self._open)} open context(s) and cannot close", hint="close them first"
            )
        self._loaded = None
        self._run = _run_closed
        self.device.close()

    def _alive(self) -> ort.InferenceSession:
        if self._loaded is None:
            raise UsageError("the session is closed", hint="load the engine again")
        return self._loaded

    def _forget(self, context: OnnxRuntimeContext) -> None:
        self._open.discard(context)

    def _run_values(self, names: Sequence[str], feeds: Tensors) -> list[Any]:
        """`run` for the element types numpy lacks, which ONNX Runtime takes as values of its own."""
        arrays = {spec.name: _as_value(spec, feeds[spec.name]) for spec in self.signature.inputs}
        values = self._alive().run_with_ort_values(list(names), arrays)
        return [as_array(spec, value) for spec, value in zip(self.signature.outputs, values, strict=True)]


class OnnxRuntimeGpuSession(OnnxRuntimeSession):
    """An engine on a GPU: it takes host arrays like any other, and runs on feeds that lie on the GPU already."""

    def __init__(
        self,
        loaded: ort.InferenceSession,
        signature: Signature,
        profiles: tuple[Profile, ...],
        facts: dict[str, str],
        device: str,
        capturing: Callable[[], ort.InferenceSession],
    ) -> None:
        super().__init__(loaded, signature, profiles, facts)
        self._place = parse_device(device)
        self._capturing = capturing
        self._graphs: ort.InferenceSession | None = None
        self._captured = 0

    def resident(self, feeds: Tensors, *, graph: bool = False) -> Resident:
        """Inference on these feeds, copied to the GPU once. With `graph` a CUDA graph is captured now and replayed by each
        call; `TrtEngineError` when this engine's cannot be."""
        loaded = self._alive()
        try:
            inputs = {
                spec.name: ort.OrtValue.ortvalue_from_numpy(_contiguous(feeds[spec.name]), *self._place)
                if in_numpy(spec.dtype)
                else _as_value(spec, feeds[spec.name])  # on the host; it is copied as it is bound
                for spec in self.signature.inputs
            }
            outputs = self._sized(loaded, inputs)
            options = ort.RunOptions()
            if graph:
                if self._graphs is None:
                    self._graphs = self._capturing()
                loaded = self._graphs
                self._captured += 1
                options.add_run_config_entry("gpu_graph_id", str(self._captured))
            binding = loaded.io_binding()
            for name, value in inputs.items():
                binding.bind_ortvalue_input(name, value)
            for name, value in outputs.items():
                binding.bind_ortvalue_output(name, value)
            binding.synchronize_inputs()
        except session.ERRORS as error:
            raise session.on_run(error) from error
        made = Resident(loaded, binding, options, outputs)
        made()  # searches its algorithms, and captures
        return made

    def close(self) -> None:
        super().close()
        self._graphs = None

    def _sized(self, loaded: ort.InferenceSession, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Memory on the GPU for the outputs, as large as these inputs make them."""
        binding = loaded.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name in self._names:
            binding.bind_output(name, *self._place)
        loaded.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return dict(zip(self._names, binding.get_outputs(), strict=True))


class Resident:
    """One inference for each call, into outputs that stay on the GPU; returns when the GPU is done. For one thread."""

    def __init__(
        self, loaded: ort.InferenceSession, binding: Any, options: ort.RunOptions, outputs: dict[str, Any]
    ) -> None:
        self._loaded, self._binding, self._options, self._outputs = loaded, binding, options, outputs

    def __call__(self) -> None:
        try:
            self._loaded.run_with_iobinding(self._binding, self._options)
            self._binding.synchronize_outputs()
        except session.ERRORS as error:
            raise session.on_run(error) from error

    def outputs(self) -> dict[str, Any]:
        """Copies on the host of what the last call made."""
        return {name: value.numpy() for name, value in self._outputs.items()}


def _contiguous(array: Any) -> Array:
    """C-contiguous, and a scalar still one."""
    return np.ascontiguousarray(array).reshape(np.shape(array))


def _run_closed(names: Sequence[str], feeds: Any) -> Sequence[Any]:
    raise UsageError("the session is closed", hint="load the engine again")


class OnnxRuntimeContext:
    """One inference in flight over the host's buffers."""

    def __init__(
        self, owner: OnnxRuntimeSession, loaded: ort.InferenceSession | None, profile: Profile | None, index: int
    ) -> None:
        self._owner = owner
        self._loaded: Any = loaded
        self._signature = owner.signature
        self._profile = profile
        self._index = index
        self._epoch = 0
        self._inputs: dict[str, Shape] | None = None
        self._outputs: dict[str, Shape] = {}
        self._bound: tuple[Any, tuple[HostBuffer, ...]] | None = None
        self._late: dict[str, Array] | None = None
        self._closed = False

    def prepare(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape]:
        self._check_open()
        sizes = self._sizes(inputs)
        self._epoch += 1
        self._inputs = {name: tuple(shape) for name, shape in inputs.items()}
        self._outputs = {spec.name: _resolved(spec, sizes) for spec in self._signature.outputs}
        self._bound = self._late = None
        return dict(self._outputs)

    def bind(self, buffers: Mapping[str, Buffer]) -> None:
        self._check_open()
        if self._inputs is None:
            raise UsageError("buffers were bound before the shapes were prepared", hint="call `prepare` first")
        wanted = self._inputs | {name: shape for name, shape in self._outputs.items() if -1 not in shape}
        for name in buffers:
            if name not in wanted:
                raise UsageError(f"there is no tensor `{name}` to bind", hint=closest(name, list(wanted)))
        binding, held = self._loaded.io_binding(), []
        for spec in self._signature:
            if spec.name not in wanted:
                binding.bind_output(spec.name, "cpu")
                continue
            buffer = _host_buffer(spec, wanted[spec.name], buffers.get(spec.name))
            bind = binding.bind_input if spec.name in self._inputs else binding.bind_output
            kind = np.dtype(spec.dtype) if in_numpy(spec.dtype) else dtype(spec.dtype).onnx
            bind(spec.name, "cpu", 0, kind, list(wanted[spec.name]), buffer.pointer)
            held.append(buffer)
        self._bound = (binding, tuple(held))

    def enqueue(self, stream: Stream) -> None:
        self._check_open()
        if self._bound is None:
            raise UsageError("an inference was enqueued before `prepare` and `bind`", hint="call them first")
        if not isinstance(stream, HostStream):
            raise UsageError("the stream is of another device", hint="`session.device.stream()`")
        (binding, held), epoch = self._bound, self._epoch

        def compute() -> None:
            if self._closed or epoch != self._epoch:
                raise UsageError(
                    "a graph is out of date: its context was prepared again or closed", hint="capture it again"
                )
            for buffer in held:
                buffer.memory()  # refuses a closed one: ONNX Runtime holds bare addresses
            try:
                self._loaded.run_with_iobinding(binding)
            except session.ERRORS as error:
                raise session.on_run(error) from error
            self._late = {
                spec.name: as_array(spec, value)
                for spec, value in zip(self._signature.outputs, binding.get_outputs(), strict=True)
                if -1 in self._outputs[spec.name]
            }

        stream.enqueue(compute)

    def outputs(self) -> dict[str, Any]:
        self._check_open()
        if all(-1 not in shape for shape in self._outputs.values()):
            return {}
        if self._late is None:
            raise UsageError("the outputs are not there yet", hint="synchronize the stream first")
        late, self._late = self._late, None
        return late

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._bound = None
            self._owner._forget(self)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the context is closed", hint="make another with `session.context()`")

    def _sizes(self, inputs: Mapping[str, Shape]) -> dict[str, int]:
        """The sizes of the named dimensions at these input shapes, which are checked."""
        check_shapes(self._signature, inputs, self._profile, self._index)
        return {
            symbol: size
            for spec in self._signature.inputs
            for symbol, size in zip(spec.symbols, inputs[spec.name], strict=False)
            if symbol
        }


def _resolved(spec: TensorSpec, sizes: Mapping[str, int]) -> Shape:
    """An output's shape with its named sizes filled in; -1 where the data decides."""
    symbols = spec.symbols or (None,) * len(spec.shape)
    return tuple(
        size if size >= 0 else sizes.get(symbol or "", -1) for size, symbol in zip(spec.shape, symbols, strict=True)
    )


def _host_buffer(spec: TensorSpec, shape: Shape, buffer: Buffer | None) -> HostBuffer:
    if buffer is None:
        raise UsageError(f"no buffer is bound to `{spec.name}`", hint="bind every input and every sized output")
    if not isinstance(buffer, HostBuffer):
        raise UsageError(f"the buffer of `{spec.name}` is not on the host", hint="`session.device.allocate`")
    if (need := dtype(spec.dtype).nbytes(shape)) > buffer.nbytes:
        raise UsageError(f"`{spec.name}` needs {need} bytes, its buffer has {buffer.nbytes}", hint="a larger buffer")
    return buffer


# ------------------------------------------------------------------------------------------------ types numpy lacks


def in_numpy(name: str) -> bool:
    return not hasattr(ml_dtypes, name)


def _as_value(spec: TensorSpec, array: Any) -> Any:
    """ONNX Runtime's value of a feed; types numpy lacks go by their bits."""
    if in_numpy(spec.dtype):
        return ort.OrtValue.ortvalue_from_numpy(_contiguous(array))
    kind = dtype(spec.dtype)
    raw = np.ascontiguousarray(array).reshape(-1)
    if kind.bits < 8:
        raw = _packed(raw, kind.bits)
    whole = raw.view(f"u{raw.dtype.itemsize}").reshape(np.shape(array))
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(whole, kind.onnx)


def run_arrays(loaded: ort.InferenceSession, names: Sequence[str], feeds: Tensors) -> list[Any]:
    """The outputs for arrays of any element type; ONNX Runtime's own exceptions pass."""
    if all(in_numpy(array.dtype.name) for array in feeds.values()):
        return list(loaded.run(list(names), dict(feeds)))
    given = {name: _as_value(TensorSpec(name, array.dtype.name, ()), array) for name, array in feeds.items()}
    values = loaded.run_with_ort_values(list(names), given)
    return [as_array(TensorSpec("", dtype(value.element_type()).name, ()), value) for value in values]


def _packed(values: Array, bits: int) -> Array:
    """Elements of less than a byte together in bytes, the first one low, in front of an array of a byte for each element."""
    each = 8 // bits
    parts = np.zeros((-(-values.size // each), each), np.uint8)
    parts.reshape(-1)[: values.size] = values.view(np.uint8) & (1 << bits) - 1
    whole = np.zeros(values.size, np.uint8)
    whole[: len(parts)] = np.bitwise_or.reduce(parts << np.arange(0, 8, bits, dtype=np.uint8), axis=1)
    return whole


def as_array(spec: TensorSpec, value: Any) -> Array:
    """The caller's own array of one of ONNX Runtime's values."""
    if in_numpy(spec.dtype):
        return np.asarray(value.numpy())
    kind, shape = dtype(spec.dtype), tuple(value.shape())
    wanted: np.dtype[Any] = np.dtype(getattr(ml_dtypes, spec.dtype))
    raw = np.frombuffer(ctypes.string_at(value.data_ptr(), kind.nbytes(shape)), np.uint8)
    if kind.bits < 8:
        parts = raw[:, None] >> np.arange(0, 8, kind.bits, dtype=np.uint8) & (1 << kind.bits) - 1
        flat = parts.reshape(-1)[: int(np.prod(shape, dtype=np.int64))]
        if spec.dtype.startswith("int"):
            sign = 1 << kind.bits - 1
            signed: Array = ((flat.astype(np.int8) ^ sign) - sign).astype(wanted)
            return signed.reshape(shape)
        return np.ascontiguousarray(flat).view(wanted).reshape(shape)
    return raw.view(wanted).reshape(shape).copy()
