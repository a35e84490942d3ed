"""`config.pbtxt` of a model: what it sets, and its check against the engine."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import json_format, text_format

from trt_engine.config.build import BuildConfig
from trt_engine.config.parse import parse_names
from trt_engine.config.profiles import Profile, ShapeRange
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.errors import EngineError, FeedError, TrtEngineError, UsageError
from trt_engine.graph.load import open_model
from trt_engine.open_inference.messages import message
from trt_engine.open_inference.wire_tensors import decode_tensor, protocol_dtype
from trt_engine.tensors import DTYPES, Shape, Signature, suggest
from trt_engine.verbs.serve.config import ServeConfig

log = logging.getLogger(__name__)

CONFIG_FILE = "config.pbtxt"
PLATFORMS = {"onnxruntime": "onnxruntime_onnx", "tensorrt": "tensorrt_plan", "trtexec": "tensorrt_plan"}
"""Platform names that clients know, by backend of the engine."""
_CONFIG_BACKENDS = {"onnxruntime": "onnxruntime", "tensorrt": "tensorrt", "trtexec": "tensorrt"}
_OPEN_SIZES = (1, 128, 512)
"""Smallest, usual and largest size of a dimension that `dims` leave open, of a model that `serve` builds."""
_DEFAULT_LEVELS, _MAX_CONTEXTS = 10, 1024
"""Priority levels of a model whose configuration has none; contexts that a configuration may request in one group."""
_MAX_UNKNOWN = 64
_ENTRY = re.compile(r"""\w+\b\s*(:?\s*(\{[^{}]*\}|\[[^\[\]]*\])|:\s*("[^"]*"|'[^']*'|[^\s{}\[\];,]+))""")
"""A key of the text format with a value that holds no other message."""
_PARAMETERS = ("providers", "allow_fallback", "device", "engine")
"""Keys of `parameters` that are read; `engine` is the file of `deploy triton --backend python`."""
CONFIG_DTYPES = {
    item.name: "TYPE_STRING" if item.name == "string" else f"TYPE_{item.kserve_name}"
    for item in DTYPES.values()
    if item.kserve_name is not None
}


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Which versions of a model are served: the newest ones, all, or those named."""

    newest: int | None = 1
    named: tuple[int, ...] = ()

    def select(self, versions: list[int]) -> list[int]:
        """The versions to serve of those that are there, ascending."""
        if self.named:
            return sorted(self.named)
        return sorted(versions)[-self.newest :] if self.newest is not None else sorted(versions)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How one model is loaded and scheduled: the server's settings, then those of its `config.pbtxt`."""

    runtime: RuntimeConfig
    max_batch: int | None
    """Rows of joined requests; None: what the engine takes. 1 without joining."""
    max_wait_ms: float
    max_queue: int | None
    join: bool = True
    """Whether requests are joined where the engine allows it."""
    max_request_rows: int | None = None
    """Rows of one request, where the configuration limits them."""
    has_batch: bool | None = None
    """Whether the configuration leaves the batch dimension out of `dims`; None without a configuration."""
    priority_levels: int = _DEFAULT_LEVELS
    default_priority: int = _DEFAULT_LEVELS // 2
    timeouts: Mapping[int, tuple[int, bool]] = field(default_factory=dict)
    """By level, 0 for others: microseconds after which a request is refused, and whether it may have its own."""
    policy: VersionPolicy = field(default_factory=VersionPolicy)
    filename: str = ""
    reshapes: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    """Sizes of clients and of the engine, without the batch, of inputs and outputs with a `reshape`."""
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of classes by output, those of its `label_filename`."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Those of `input_data_file` in `model_warmup`."""
    config: Any = None
    """The `inference.ModelConfig` that was read."""

    def engine_shape(self, name: str, shape: Shape) -> Shape:
        """A client's shape as the engine takes it; `FeedError` unless it is one of `dims` where there is a `reshape`."""
        if name not in self.reshapes:
            return shape
        dims, sizes = self.reshapes[name]
        given = shape[len(shape) - len(dims) :]
        whole = len(shape) == len(dims) + bool(self.has_batch)
        if not whole or any(dim >= 0 and size != dim for size, dim in zip(given, dims, strict=True)):
            raise FeedError(f"input `{name}` has the shape {[*shape]!s:.200}", hint=f"`dims` are {[*dims]}")
        return reshaped(shape, dims, sizes)

    def level(self, given: int) -> int:
        """The level of a request with this `priority`: 1 is the first, 0 the default, beyond the last is the last."""
        return min(given, self.priority_levels) if given > 0 else self.default_priority

    def priority(self, level: int) -> int:
        """The batcher's priority, higher is earlier, of the protocol's."""
        return self.priority_levels - self.level(level)

    def deadline_ms(self, timeout_us: int, level: int = 0) -> float | None:
        """The deadline of a request of this level with this `timeout`, which is 0 for none."""
        usual, may_choose = self.timeouts.get(self.level(level)) or self.timeouts.get(0) or (0, True)
        wanted = timeout_us if may_choose and timeout_us > 0 else usual
        return wanted / 1e3 if wanted else None


def reshaped(shape: Shape, sizes: Shape, wanted: Shape) -> Shape:
    """A shape that ends with `sizes` as one that ends with `wanted`; sizes of -1 are taken over in their order."""
    split = len(shape) - len(sizes)
    free = iter([size for size, known in zip(shape[split:], sizes, strict=True) if known < 0])
    return (*shape[:split], *(next(free) if size < 0 else size for size in wanted))


def server_settings(config: ServeConfig, runtime: RuntimeConfig) -> ModelSettings:
    """The settings of a model without `config.pbtxt`."""
    return ModelSettings(
        runtime=runtime,
        max_batch=config.max_batch,
        max_wait_ms=config.max_wait_ms,
        max_queue=config.max_queue,
        join=config.max_batch != 1,
    )


class Problems:
    """Every reason for which a configuration is refused."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: list[tuple[str, str]] = []

    def add(self, wrong: object, text: str, hint: str) -> bool:
        """Note the reason where something is `wrong`; whether it is."""
        if wrong:
            self._found.append((text, hint))
        return bool(wrong)

    def check(self, error: type[TrtEngineError] = UsageError) -> None:
        """An error with all reasons."""
        if not self._found:
            return
        text, hint = self._found[0]
        if len(self._found) > 1:
            text, hint = "; ".join(f"{text} ({hint})" for text, hint in self._found), f"{len(self._found)} changes"
        raise error(f"`{CONFIG_FILE}` of `{self._name}`: {text}", hint=hint)


def read_config(raw: bytes, name: str, base: ModelSettings, *, is_json: bool = False) -> ModelSettings:
    """The settings of the model `name` with this `config.pbtxt`, or with the JSON that a client sends in its place.

    `UsageError` with every key and value that is not supported.
    """
    problems = Problems(name)
    config = _parse(raw, name, problems, is_json=is_json)
    wrong = config.name not in ("", name)
    problems.add(wrong, f"`name` is `{config.name}`, its folder is `{name}`", "leave `name` out")
    _check_keys(config, name, problems)
    _check_dims(config, problems)
    reshapes = {
        item.name: (tuple(item.dims), tuple(item.reshape.shape))
        for item in (*config.input, *config.output)
        if item.HasField("reshape")
    }
    settings = replace(base, config=config, reshapes=reshapes, filename=_file_name(config, problems))
    settings = _with_versions(_with_batching(settings, config, problems), config, problems)
    settings = replace(settings, runtime=_runtime(settings.runtime, config, name, problems))
    problems.check()
    return settings


def _check_dims(config: Any, problems: Problems) -> None:
    """The rules for tensors that hold whatever the engine is."""
    for item in (*config.input, *config.output):
        dims = [*item.dims]
        wrong = any(size < 1 and size != -1 for size in dims)
        problems.add(wrong, f"`dims` of `{item.name}` are {dims}", "1 or more, or -1")
        image = getattr(item, "format", 0) and len(dims) != 3
        problems.add(image, f"`format` of `{item.name}` with `dims` {dims}", "three `dims`, or no `format`")
        shape = [*item.reshape.shape]
        problems.add(
            item.HasField("reshape") and not _same_size(dims, shape), f"`reshape` of `{item.name}` from {dims} to {shape}",
            "the same number of elements, and of -1",
        )  # fmt: skip


def _same_size(dims: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether the sizes that are open are as many, and the others have the same product."""
    one, other = ([size for size in sizes if size >= 0] for sizes in (dims, shape))
    return len(dims) - len(one) == len(shape) - len(other) and math.prod(one) == math.prod(other)


REFUSED = {
    "is_shape_tensor": "the engine's shapes are those of its profile",
    "is_non_linear_format_io": "tensors of requests are linear",
    "optional": "a request has every input",
    "sequence_batching": "state is an input and an output of the request",
    "ensemble_scheduling": "a bundle: `trt-engine bundle`",
    "batch_input": "an input that the client sends",
    "batch_output": "an output of the engine",
    "model_operations": "no library is loaded from a configuration",
    "runtime": "no library is loaded from a configuration",
    "decoupled": "one response for each request",
    "agents": "a repository without agents",
}
"""Keys of Triton that would change an answer, or what a client sends, with what there is in their place.
A value that is Triton's default is accepted."""
NO_EFFECT = frozenset(
    "allow_ragged_batch priority graph busy_wait_events graph_spec output_copy_stream "
    "execution_accelerators input_pinned_memory output_pinned_memory gather_kernel_buffer_threshold eager_batching "
    "cc_model_filenames metric_tags response_cache rate_limiter secondary_devices host_policy".split()
)
"""Keys of Triton that change no answer; they are read and logged."""


def _check_keys(config: Any, name: str, problems: Problems) -> None:
    """Note every key whose value is not supported; those without effect are logged and removed."""
    refused: list[str] = []
    ignored: dict[str, None] = {}
    waiting = [("", config)]
    while waiting:
        where, part = waiting.pop()
        for item, value in part.ListFields():
            remedy = REFUSED.get(item.name)
            if remedy is not None:
                empty = item.message_type is not None and not item.is_repeated and not value.ListFields()
                if not empty or item.name in ("sequence_batching", "ensemble_scheduling"):
                    refused.append(f"`{where}{item.name}` ({remedy})")
            elif item.name in NO_EFFECT:
                ignored[f"{where}{item.name}"] = None
                part.ClearField(item.name)  # the configuration in force does not have it
            elif item.message_type is not None and not item.message_type.GetOptions().map_entry:
                inner = f"{where}{item.name}."
                waiting += [(inner, one) for one in value] if item.is_repeated else [(inner, value)]
    listed = ", ".join(sorted(set(refused)))
    problems.add(refused, f"not supported: {listed}", "remove these keys, or change the model")
    if ignored:
        log.info("`%s` of `%s`: without effect here: %s", CONFIG_FILE, name, ", ".join(f"`{key}`" for key in ignored))


def _parse(raw: bytes, name: str, problems: Problems, *, is_json: bool) -> Any:
    """The `ModelConfig`; unknown keys of the text format are noted and left out, up to 64 as each is a pass over the text;
    another mistake is a `UsageError`."""
    text, form = raw.decode("utf-8", "replace"), "a `ModelConfig` as JSON" if is_json else "protobuf text format"
    count = 0
    while True:
        config = message("ModelConfig")()
        try:
            return (json_format if is_json else text_format).Parse(text, config)
        except (text_format.ParseError, json_format.ParseError, RecursionError) as error:
            found = str(error)
        place = re.match(r"(\d+):(\d+) : ", found)
        unknown = re.search(r'[Mm]essage type "inference\.(\S+)" has no field named "([^"]+)"', found)
        where, text_found, hint = f"row {place[1]}: " if place else "", found[place.end() if place else 0 :], form
        if unknown is not None:
            known = [] if "." in unknown[1] else [item.name for item in message(unknown[1]).DESCRIPTOR.fields]
            text_found, hint = f"the key `{unknown[2]}` is not supported", suggest(unknown[2], known)
        count += problems.add(True, where + text_found, hint)
        start = sum(len(row) + 1 for row in text.split("\n")[: int(place[1]) - 1]) + int(place[2]) - 1 if place else 0
        entry = _ENTRY.match(text, start) if unknown is not None and place and count < _MAX_UNKNOWN else None
        if entry is None:
            problems.check()
        else:
            text = text[:start] + "\n" * entry[0].count("\n") + text[entry.end() :]  # rows of later errors stay


def _file_name(config: Any, problems: Problems) -> str:
    given, key = config.default_model_filename, "default_model_filename"
    if _is_python_engine(config):
        given, key = config.parameters["engine"].string_value, "engine"
    wrong = given and (given != Path(given).name or given.startswith("."))
    problems.add(wrong, f"`{key}` is `{given}`, expected a file name", "`model.onnx`")
    return str(given)


def _is_python_engine(config: Any) -> bool:
    """Whether `deploy triton --backend python` wrote it: an engine that Triton runs through its Python backend."""
    return config.backend == "python" and "engine" in config.parameters


def _with_batching(settings: ModelSettings, config: Any, problems: Problems) -> ModelSettings:
    largest = config.max_batch_size
    problems.add(largest < 0, f"`max_batch_size` is {largest}", "0 for a model without a batch dimension")
    settings = replace(settings, has_batch=largest > 0, max_request_rows=largest or None)
    batching = config.dynamic_batching
    preferred, levels = [*batching.preferred_batch_size], batching.priority_levels
    if not config.HasField("dynamic_batching") or not (largest or preferred):
        return replace(settings, join=False)
    default = batching.default_priority_level
    wrong = any(not 1 <= size <= largest for size in preferred)
    problems.add(wrong, f"`preferred_batch_size` is {preferred}", f"1 to {largest}" if largest else "`max_batch_size`")
    wrong = levels and not 1 <= default <= levels
    problems.add(wrong, f"`default_priority_level` is {default}", f"1 to {levels}")
    wrong = levels > 1 and batching.preserve_ordering
    problems.add(wrong, "`preserve_ordering` with `priority_levels`", "one of them")
    policies = {0: batching.default_queue_policy}
    for level, policy in batching.priority_queue_policy.items() if levels else ():
        wrong = not 1 <= level <= levels
        problems.add(wrong, f"`priority_queue_policy` of level {level}", f"1 to {levels}")
        problems.add(policy.max_queue_size, f"`max_queue_size` of level {level}", "that of `default_queue_policy`")
        policies[level] = policy
    late = [one for one in policies.values() if one.default_timeout_microseconds or one.allow_timeout_override]
    problems.add(
        any(policy.timeout_action for policy in late), "`timeout_action` DELAY with a timeout",
        "`REJECT`: a request whose time is over is an error",
    )  # fmt: skip
    return replace(
        settings,
        join=True,
        max_batch=max(preferred, default=largest),
        max_wait_ms=batching.max_queue_delay_microseconds / 1e3,
        max_queue=policies[0].max_queue_size or settings.max_queue,
        priority_levels=levels or settings.priority_levels,
        default_priority=default or settings.default_priority,
        timeouts={
            level: (policy.default_timeout_microseconds, policy.allow_timeout_override)
            for level, policy in policies.items()
            if level or batching.HasField("default_queue_policy")
        },
    )


def _with_versions(settings: ModelSettings, config: Any, problems: Problems) -> ModelSettings:
    chosen = config.version_policy.WhichOneof("policy_choice")
    if chosen == "all":
        return replace(settings, policy=VersionPolicy(newest=None))
    if chosen == "specific":
        named = tuple(config.version_policy.specific.versions)
        problems.add(not named or min(named) < 1, f"`version_policy` names the versions {[*named]}", "1 or more")
        return replace(settings, policy=VersionPolicy(named=named))
    newest = config.version_policy.latest.num_versions if chosen else 1
    problems.add(newest < 1, f"`num_versions` is {newest}", "1 or more")
    return replace(settings, policy=VersionPolicy(newest=newest))


def _runtime(runtime: RuntimeConfig, config: Any, name: str, problems: Problems) -> RuntimeConfig:
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    for unknown in sorted(parameters.keys() - {*_PARAMETERS}):
        nearest = suggest(unknown, _PARAMETERS)
        wrong = nearest.startswith("did you mean")
        if not problems.add(wrong, f"the parameter `{unknown}` is not supported", nearest):
            log.info("`%s` of `%s`: the parameter `%s` is without effect here", CONFIG_FILE, name, unknown)
    changed = _instances(config, problems)
    if config.optimization.HasField("cuda"):
        changed["graphs"] = config.optimization.cuda.graphs
    if "device" in parameters:
        changed["device"] = parameters["device"]
    if "providers" in parameters:
        changed["providers"] = parse_names(parameters["providers"])
    if "allow_fallback" in parameters:
        given = parameters["allow_fallback"]
        problems.add(given not in ("true", "false"), f"`allow_fallback` is `{given}`", "`true` or `false`")
        changed["allow_fallback"] = given == "true"
    return replace(runtime, **changed)


def _instances(config: Any, problems: Problems) -> dict[str, Any]:
    """Contexts and devices of the instance groups: a device has as many contexts as its groups have instances."""
    groups = [group for group in config.instance_group if not group.passive]
    problems.add(config.instance_group and not groups, "every instance group is `passive`", "one that is not")
    counts: dict[str, int] = {}
    for group in groups:
        kind = enum_name(group, "kind")
        problems.add(kind.isdigit(), f"an instance group of kind {kind}", "`KIND_CPU` or `KIND_GPU`")
        problems.add(group.gpus and kind not in ("KIND_GPU", "KIND_AUTO"), f"`gpus` in a group of {kind}", "KIND_GPU")
        problems.add(
            group.count > _MAX_CONTEXTS, f"`count` is {group.count}", f"up to {_MAX_CONTEXTS}: each is a thread"
        )
        problems.add(any(number < 0 for number in group.gpus), f"`gpus` are {[*group.gpus]}", "0 or more")
        on_gpu = group.gpus or kind == "KIND_GPU"
        devices = [f"cuda:{number}" for number in group.gpus or [0]] if on_gpu else ["cpu" * (kind == "KIND_CPU")]
        for device in devices:
            counts[device] = counts.get(device, 0) + max(group.count, 1)
    if len(counts) == 2 and "" in counts:  # an engine is for one device, which is that of KIND_AUTO
        counts = {max(counts): sum(counts.values())}
    if len(counts) > 1:
        several = not counts.keys().isdisjoint(("cpu", ""))
        problems.add(several, "instance groups of different kinds", "one kind: an engine is for one device")
        uneven = not several and len({*counts.values()}) > 1
        problems.add(uneven, "the GPUs have different numbers of instances", "the same `count` for each")
    changed: dict[str, Any] = {"device": ",".join(counts)} if any(counts) else {}
    several = len(groups) > 1 or any(group.count > 0 for group in groups)
    return changed | {"contexts": max(counts.values())} if several else changed


def build_config(settings: ModelSettings, path: Path, build: BuildConfig) -> BuildConfig:
    """`build` for the batches and shapes of a model's configuration, where it names none itself.

    The smallest batch is 1, the largest `max_batch_size` (`serve --max-batch`), the usual one the largest that is joined.
    """
    largest = settings.max_batch if settings.config is None else settings.max_request_rows
    if build.profiles or (settings.config is None and not largest):
        return build
    signature = open_model(path).signature
    shapes, ranges = dict(build.shapes), dict[str, ShapeRange]()
    usual = min((settings.max_batch if settings.join else None) or largest or 1, largest or 1)
    dims = {item.name: _engine_dims(item) for item in (settings.config.input if settings.config is not None else ())}
    is_open = False
    for spec in signature.inputs:
        if spec.name not in dims or spec.name in shapes or not spec.dynamic:
            continue
        sizes = (*((largest or 1,) if settings.has_batch else ()), *dims[spec.name])
        free = {*spec.dynamic} - {*signature.batch_axes(spec)}
        if free and min(sizes, default=0) > 0:
            shapes[spec.name] = sizes
            continue
        spans = [_OPEN_SIZES if size < 0 else (size,) * 3 for size in sizes]
        if settings.has_batch:
            spans[0] = (1, usual, largest or 1)
        ranges[spec.name] = ShapeRange(*zip(*spans, strict=True))
        is_open |= bool(free)
    if is_open and not shapes and ranges.keys() == {spec.name for spec in signature.inputs if spec.dynamic}:
        log.warning("`%s` is built for %s: `dims` are open; `--profile` sets other sizes", path.name, Profile(ranges))
        return replace(build, profiles=(Profile(ranges),))
    batch = build.batch
    if batch is None and largest and any(signature.batch_axes(spec) for spec in signature.inputs):
        batch = (1, usual, largest)
    return replace(build, shapes=shapes, batch=batch)


def _engine_dims(item: Any) -> Sequence[int]:
    """Sizes of the engine's tensor without its batch, by the configuration of an input or output."""
    return [*(item.reshape.shape if item.HasField("reshape") else item.dims)]


def check_engine(
    settings: ModelSettings, backend: str, signature: Signature, name: str, profiles: Sequence[Profile] = ()
) -> None:
    """`EngineError` unless the engine is what the configuration declares: its backend, inputs and outputs, and a batch that
    it takes."""
    config = settings.config
    if config is None:
        return
    problems = Problems(name)
    backends = {"backend": _CONFIG_BACKENDS.get(backend, backend), "platform": PLATFORMS.get(backend, backend)}
    if _is_python_engine(config):
        del backends["backend"]
    for key, own in backends.items():
        declared = getattr(config, key)
        problems.add(declared not in ("", own), f"`{key}` is `{declared}`, the engine's is `{own}`", "leave it out")
    wrong = backends["platform"] != "tensorrt_plan" and any(group.profile for group in config.instance_group)
    problems.add(wrong, "`profile` of an instance group", "leave it out: TensorRT alone has profiles")
    inputs, outputs = ({spec.name: spec for spec in side} for side in (signature.inputs, signature.outputs))
    names = [item.name for item in config.input]
    differ = names and (len({*names}) < len(names) or inputs.keys() - names)
    problems.add(differ, f"`input` has {names}, the engine {[*inputs]}", "each input once, or none at all")
    for specs, tensors in ((inputs, config.input), (outputs, config.output)):
        for item in tensors:
            found = specs.get(item.name)
            if found is None:
                problems.add(True, f"the engine has no tensor `{item.name}` there", suggest(item.name, [*specs]))
                continue
            dtype, dims = enum_name(item, "data_type"), _engine_dims(item)
            shape = found.shape[1:] if settings.has_batch else found.shape
            agree = len(dims) == len(shape) and all(min(a, b) < 0 or a == b for a, b in zip(dims, shape, strict=True))
            problems.add(
                not agree or dtype != CONFIG_DTYPES.get(found.dtype),
                f"`{item.name}` is {dtype} {[*dims]}, the engine's is {found}",
                "`dims` without the batch dimension where `max_batch_size` is not 0",
            )
    for sample in config.model_warmup:
        differing = inputs.keys() ^ sample.inputs.keys()
        differing |= {
            name
            for name, spec in inputs.items()
            if name in sample.inputs and enum_name(sample.inputs[name], "data_type") != CONFIG_DTYPES.get(spec.dtype)
        }
        listed = ", ".join(f"`{name}`" for name in sorted(differing))
        problems.add(listed, f"`model_warmup` differs from the engine's inputs in {listed}", "each input with its type")
        open_data = [name for name, item in sample.inputs.items() if not item.WhichOneof("input_data_type")]
        large = settings.has_batch and sample.batch_size > config.max_batch_size
        problems.add(large, f"`batch_size` of `model_warmup` is {sample.batch_size}", f"up to {config.max_batch_size}")
        problems.add(open_data, f"`model_warmup` without data for {open_data}", "`random_data: true`")
    if settings.has_batch:
        _check_batch(config.max_batch_size, signature, profiles, problems)
    problems.check(EngineError)


def enum_name(item: Any, field: str) -> str:
    """The name of a value in the configuration; a number that Triton does not have as it is."""
    known = item.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number.get(getattr(item, field))
    return known.name if known is not None else str(getattr(item, field))


def _check_batch(largest: int, signature: Signature, profiles: Sequence[Profile], problems: Problems) -> None:
    """A `max_batch_size` that the engine does not take is refused, as in Triton."""
    what = f"`max_batch_size` is {largest}"
    alone = [spec for spec in signature.inputs if len(spec.shape) == 1 and not signature.batch_axes(spec)]
    other = alone or [spec for spec in signature.inputs if signature.batch_axes(spec) not in ((), (0,))]
    if other:
        problems.add(
            True, f"{what}, and the batch of input `{other[0].name}` is not its first dimension "
            f"({other[0].format_symbolic()})", "`max_batch_size: 0` and whole shapes in `dims`",
        )  # fmt: skip
    limits = [spec.shape[0] for spec in signature.inputs if spec.shape and spec.shape[0] >= 0]
    spans = [[span.max[0] for span in profile.ranges.values() if span.max] for profile in profiles]
    limits += [max(min(sizes) for sizes in spans)] if spans and all(spans) else []
    if limits and largest > min(limits):
        fixed = f", or `--batch 1:{largest}:{largest}` where it is built" if signature.batch_axis else ""
        rows = f"{min(limits)} row{'s' if min(limits) > 1 else ''}"
        problems.add(True, f"{what}, the engine takes {rows} at once", f"`max_batch_size: {min(limits)}`{fixed}")


def data_files(settings: ModelSettings) -> list[str]:
    """Files of the folder `warmup` that `model_warmup` names."""
    samples = settings.config.model_warmup if settings.config is not None else ()
    return sorted({item.input_data_file for sample in samples for item in sample.inputs.values()} - {""})


def warmup_samples(
    settings: ModelSettings, signature: Signature
) -> Iterator[tuple[int, dict[str, Shape], dict[str, Any]]]:
    """Runs, input shapes and given values of each sample of `model_warmup`; other values are random ones."""
    for sample in settings.config.model_warmup if settings.config is not None else ():
        if settings.has_batch and not sample.batch_size:  # no run, as in Triton
            continue
        rows = [sample.batch_size] if settings.has_batch else []
        shapes = {name: settings.engine_shape(name, (*rows, *item.dims)) for name, item in sample.inputs.items()}
        given = {}
        for spec in signature.inputs:
            file = sample.inputs[spec.name].input_data_file
            if file:  # the data of one row, for all rows
                row = decode_tensor(
                    spec.name, protocol_dtype(spec), tuple(sample.inputs[spec.name].dims), settings.files[file]
                )
                given[spec.name] = np.stack([row] * rows[0]).reshape(shapes[spec.name]) if rows else row
        yield max(sample.count, 1), shapes, given


def describe_config(name: str, settings: ModelSettings, signature: Signature, backend: str, max_batch: int) -> Any:
    """The `inference.ModelConfig` in force: what was read, completed by the engine's tensors and scheduling."""
    config = message("ModelConfig")()
    if settings.config is not None:
        config.CopyFrom(settings.config)
    config.name, config.max_batch_size = name, max_batch
    config.backend, config.platform = _CONFIG_BACKENDS.get(backend, backend), PLATFORMS.get(backend, backend)
    types = message("ModelInput").DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_name
    for kind, declared, specs in (
        ("ModelInput", config.input, signature.inputs),
        ("ModelOutput", config.output, signature.outputs),
    ):
        given = {item.name: item for item in declared}
        tensors = [given.get(spec.name) or message(kind)(name=spec.name) for spec in specs]
        for item, spec in zip(tensors, specs, strict=True):
            item.data_type = types[CONFIG_DTYPES[spec.dtype]].number
            if not item.HasField("reshape"):
                item.dims[:] = spec.shape[1:] if max_batch else spec.shape
        del declared[:]
        declared.extend(tensors)
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1
    if settings.join and max_batch and not config.HasField("dynamic_batching"):
        config.dynamic_batching.max_queue_delay_microseconds = int(settings.max_wait_ms * 1e3)
    return config
