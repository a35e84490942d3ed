"""`lint --reduce`: the smallest part of a model that TensorRT's parser or builder still rejects."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from trt_engine.backends.tensorrt.parser_check import Library, ParserCheck, ParserProcess, installed_version
from trt_engine.errors import Interrupted, ModelError, SetupError, UsageError
from trt_engine.graph import external_data, walk
from trt_engine.graph.load import OpenedModel
from trt_engine.graph.reduce import Reduction, extract_subgraph
from trt_engine.graph.shape_inference import trace
from trt_engine.graph.tensorrt_operators import RTX_ABSENT
from trt_engine.records.lint import ReducedModel
from trt_engine.tensors import Shape
from trt_engine.trt.failure_causes import extract_node
from trt_engine.trt.parser_messages import ParserError, failed_operator, format_parser_error, parser_error_reason
from trt_engine.verbs.lint.parser import PartWriter, find_rejected_node
from trt_engine.workers.process import extend_shutdown

log = logging.getLogger(__name__)

_MAX_PARSED, _MAX_BUILT, _MAX_HUNG = 400, 150, 20
"""Most parts that are parsed, that are built, and that are tried where the library gives no answer in time."""
_WRITE_S = 30.0


@dataclass(frozen=True, slots=True)
class _TargetFailure:
    """The failure that parts must reproduce."""

    rejected_by: str
    reason: str
    key: tuple[str, ...]
    named_nodes: tuple[int, ...]
    """Indices of the nodes it names."""
    builds: bool
    max_candidates: int
    at_shapes: bool = False
    """It occurs at the given sizes alone."""


def check_output(out: Path, opened: OpenedModel, *, overwrite: bool) -> Path:
    """Output path of the part; `UsageError` for a folder, the model, its weights, or a file not to be overwritten."""
    try:
        target = external_data.check_target(out, opened.model)
    except UsageError as error:
        raise UsageError(error.message, hint="name a new file: `--reduce reduced.onnx`") from error
    if target.exists() and target.resolve() == opened.model.path.resolve():
        raise UsageError(f"`{out}` is the model itself", hint="name another file for `--reduce`")
    if target.exists() and not overwrite:
        raise UsageError(f"`{out}` exists", hint="`--overwrite` overwrites it, or name another file for `--reduce`")
    return target


def reduce_model(
    opened: OpenedModel,
    library: Library,
    target: Path,
    *,
    shapes: Mapping[str, Shape],
    gpus: tuple[str, ...],
    gpu_substitutes: bool,
    suspects: Collection[str] = (),
) -> ReducedModel:
    """Write the smallest part of the model that the library rejects for the same reason as the full model.

    The parser comes first; where it takes the model, the builder, for `gpus` and at the sizes of `shapes`. With
    `stands_in` what TensorRT-RTX alone lacks is not looked for; nodes labelled as `suspects` are tried first. Raises
    `UsageError` where nothing is refused, `SetupError` where the library does not work here, `Interrupted` after Ctrl-C:
    the smallest part found until then is written.
    """
    with ParserProcess(library) as process, PartWriter(opened) as parts:
        proto = parts.prepare()
        wanted = _find_failure(opened, process, parts, shapes, gpus, gpu_substitutes)

        def refused(part: ModelProto) -> bool:
            path = parts.write(part)
            if wanted.builds:
                return wanted.key in _build_keys(process.build(path, gpus, weights_beside=parts.beside))
            return wanted.key in _parse_keys(process.check(path, weights_beside=parts.beside), process)

        search = Reduction(
            proto,
            refused,
            shapes=shapes if wanted.builds or wanted.at_shapes else None,
            max_candidates=wanted.max_candidates,
        )
        try:
            nodes = proto.graph.node
            best = search.run(
                wanted.named_nodes or [at for at, node in enumerate(nodes) if walk.label(node) in suspects]
            )
        except KeyboardInterrupt:
            raise _save_interrupted(search, parts, opened, target) from None
        if best is None:
            raise ModelError(
                f"{wanted.rejected_by} refuses `{opened.model.path}`, but no part of it: {wanted.reason}",
                hint="the reason is in what surrounds the nodes: inputs, outputs, the file itself",
            )
        _save_part(best, parts, opened, target)
        return ReducedModel(
            str(target), search.nodes, search.of, tuple(dict.fromkeys(node.op_type for node in walk.all_nodes(best))),
            wanted.rejected_by, wanted.reason, search.probes, search.complete,
        )  # fmt: skip


def _save_part(best: ModelProto, parts: PartWriter, opened: OpenedModel, target: Path) -> None:
    external_data.save_model(parts.with_weights(best), target, opened.model, external=False, check=lambda _: None)


def _save_interrupted(search: Reduction, parts: PartWriter, opened: OpenedModel, target: Path) -> Interrupted:
    if search.best is None or search.nodes >= search.of:
        return Interrupted("interrupted before a smaller part was found: nothing was written")
    extend_shutdown(_WRITE_S)
    _save_part(search.best, parts, opened, target)
    return Interrupted(
        f"interrupted: `{target}` is the smallest part found until then, {search.nodes} of {search.of} nodes",
        hint=f"the same command on `{target}` goes on from there",
    )


# ------------------------------------------------------------------------------------------------ the refusal


def _find_failure(
    opened: OpenedModel,
    process: ParserProcess,
    parts: PartWriter,
    shapes: Mapping[str, Shape],
    gpus: tuple[str, ...],
    stands_in: bool,
) -> _TargetFailure:
    path, product = opened.model.path, process.binding.product
    checked = process.check(path)
    if checked.unavailable:
        raise SetupError(f"{product} cannot parse here: {checked.unavailable}", hint="`trt-engine doctor`")
    name = f"{process.library} {checked.version or installed_version(process.library)}"
    if checked.exit_status:
        most = _MAX_HUNG if checked.exit_status.startswith("no ") else _MAX_PARSED
        return _TargetFailure(
            f"{name} parser", _exit_text(checked.exit_status), ("ended", checked.exit_status), (), False, most
        )
    looked_for = [
        item for item in checked.errors if not (stands_in and failed_operator(item) in RTX_ABSENT)
    ]  # fmt: skip
    if looked_for:
        first = looked_for[0]
        named = _named_nodes(first, parts.proto)
        reason = format_parser_error(first, product)
        return _TargetFailure(f"{name} parser", reason, _failure_key(first, product), named, False, _MAX_PARSED)
    if not checked.parsed:
        raise UsageError(
            f"{product} refuses in `{path}` only operators that TensorRT has: there is nothing to reduce",
            hint="`--target tensorrt-rtx` reduces that",
        )
    return _build_failure(opened, process, parts, shapes, gpus, name)


def _build_failure(
    opened: OpenedModel,
    process: ParserProcess,
    parts: PartWriter,
    shapes: Mapping[str, Shape],
    gpus: tuple[str, ...],
    name: str,
) -> _TargetFailure:
    proto = parts.proto
    fixed = extract_subgraph(proto, range(len(proto.graph.node)), trace(proto, shapes).tensors, shapes=shapes)
    where = f" for {', '.join(gpus)}" if gpus else ""
    built = process.build(parts.write(fixed), gpus, weights_beside=parts.beside) if fixed is not None else None
    if built is not None and built.errors:
        first = built.errors[0]
        key, reason = _failure_key(first, process.binding.product), format_parser_error(first, process.binding.product)
        return _TargetFailure(f"{name} parser", reason, key, _named_nodes(first, proto), False, _MAX_PARSED, True)
    if built is None or built.built or not (built.exit_status or built.parsed):
        raise UsageError(
            f"nothing to reduce: the parser of {name} takes `{opened.model.path}`, and its builder builds it{where}",
            hint="`--gpus` names other GPUs, `--shapes` other sizes",
        )
    text = _exit_text(built.exit_status) if built.exit_status else built.message
    most = _MAX_HUNG if built.exit_status.startswith("no ") else _MAX_BUILT
    layer = extract_node(text)
    named = tuple(at for at, node in enumerate(proto.graph.node) if layer and walk.label(node) == layer)
    return _TargetFailure(f"{name} builder{where}", text, next(iter(_build_keys(built))), named, True, most)


def _named_nodes(refusal: ParserError, proto: ModelProto) -> tuple[int, ...]:
    if refusal.function == "importInput":
        return tuple(at for at, node in enumerate(proto.graph.node) if refusal.file in walk.names_read(node))[:1]
    place = find_rejected_node(refusal, proto)
    return (place,) if place is not None else ()


def _exit_text(ended: str) -> str:
    return ended if ended.startswith("no ") else f"it crashes ({ended})"


def _parse_keys(checked: ParserCheck, process: ParserProcess) -> set[tuple[str, ...]]:
    if checked.exit_status:
        return {("ended", checked.exit_status)}
    return {_failure_key(item, process.binding.product) for item in checked.errors}


def _build_keys(checked: ParserCheck) -> set[tuple[str, ...]]:
    if checked.exit_status:
        return {("ended", checked.exit_status)}
    return {("build", checked.cause, _normalize_message(checked.message))} if checked.built is False else set()


def _failure_key(refusal: ParserError, product: str) -> tuple[str, ...]:
    """The part of a rejection that is equal in the full graph and in a part: without indices and sizes."""
    reason = parser_error_reason(refusal, product).partition("; ")[0]
    edge = refusal.file if refusal.function == "importInput" else ""
    return refusal.code, refusal.function, failed_operator(refusal), edge, _normalize_message(reason)


_CHANGING: Iterable[tuple[str, str]] = (
    (r"\{ForeignNode\[[^\]]*\]\}", "a region"),
    (r"0x[0-9a-f]+|\d+", "#"),
    (r"\s+", " "),
)


def _normalize_message(text: str) -> str:
    """The first line without numbers and names of regions, which a smaller graph changes."""
    line = text.strip().partition("\n")[0]
    for pattern, word in _CHANGING:
        line = re.sub(pattern, word, line)
    return line[:200]
