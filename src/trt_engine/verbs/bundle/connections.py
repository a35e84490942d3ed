"""Connections between components, declared or inferred, and their checks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from trt_engine.errors import BuildError, ModelError
from trt_engine.tensors import Signature, TensorSpec, suggest
from trt_engine.verbs.bundle.model_meta import Link, ModelMeta
from trt_engine.verbs.bundle.named_dims import ResolvedDims
from trt_engine.verbs.bundle_chain import mismatch


def resolve_connections(meta: ModelMeta, signatures: Mapping[str, Signature]) -> tuple[Link, ...]:
    """The declared connections, or the inferred ones of an RNNT-TDT without any.

    `ModelError` for an unknown output or input, or an input with two producers.
    """
    links = meta.links or (tuple(_infer_connections(signatures)) if meta.is_rnnt else ())
    fed: dict[tuple[str, str], Link] = {}
    for link in links:
        for component, tensor, side, specs in (
            (link.producer, link.output, "output", signatures[link.producer].outputs),
            (link.consumer, link.input, "input", signatures[link.consumer].inputs),
        ):
            known = [spec.name for spec in specs]
            if tensor not in known:
                raise meta.error(link.json_path, f"no {side} `{component}.{tensor}`", suggest(tensor, known))
        if (before := fed.get((link.consumer, link.input))) is not None:
            raise meta.error(
                link.json_path, f"`{link.consumer}.{link.input}` is already connected by `{before}`", "leave one out"
            )
        fed[link.consumer, link.input] = link
    return links


def check_connections(
    meta: ModelMeta,
    links: Iterable[Link],
    signatures: Mapping[str, Signature],
    resolved: Mapping[str, ResolvedDims],
    *,
    what: str = "models",
) -> None:
    """`ModelError` for the first connection whose ends differ in dtype, rank or fixed dimensions, or whose fixed dimensions
    are outside the input's profile; `BuildError` for an engine without one of the ends."""
    for link in links:
        output = _find_spec(signatures[link.producer].outputs, link.output)
        taken = _find_spec(signatures[link.consumer].inputs, link.input)
        if output is None or taken is None:
            raise BuildError(f"`{link}`: the {what} lack one of the ends", hint="`--rebuild` rebuilds them")
        why = mismatch(output, taken, link.transpose)
        if why is None and not link.transpose and _transpose_axes(output, taken):
            why = "its axes are transposed"
        if why is not None:
            raise _mismatch_error(meta, link, output, taken, why, what)
        span = resolved[link.consumer].profile.ranges[link.input]
        turned = [output.shape[axis] for axis in link.transpose or range(len(output.shape))]
        for position, size in enumerate(turned):
            if size >= 0 and not span.min[position] <= size <= span.max[position]:
                raise ModelError(
                    f"`{link}`: the output is {output.format_symbolic()}, and the profile of the input spans "
                    f"{span.min[position]} to {span.max[position]} in dimension {position}",
                    hint=f"`--profile {link.consumer}:{link.input}:MIN,OPT,MAX` with {size} in dimension {position}",
                )


def _mismatch_error(
    meta: ModelMeta, link: Link, output: TensorSpec, input_spec: TensorSpec, reason: str, what: str
) -> ModelError:
    ends = " and ".join(f"{spec.format_symbolic()} {spec.dtype}" for spec in (output, input_spec))
    text = f"`{link}` does not match: {reason} (the {what} have {ends})"
    turned = _transpose_axes(output, input_spec) if not link.transpose else None
    if link.declared:
        hint = "export both components again together, or correct `connections`"
        if turned:
            hint = f'it matches with `"transpose": {list(turned)}`, if the application transposes; `[0, 1, 2]` if not'
        return meta.error(link.json_path, text, hint)
    return ModelError(
        text, hint=f"export both again from one checkpoint, or write `connections` into `{meta.path.name}`"
    )


def _transpose_axes(output: TensorSpec, input_spec: TensorSpec) -> tuple[int, ...] | None:
    """Axes that swap the last two, if the fixed and dynamic dimensions match only then."""
    if len(output.shape) != 3 or len(input_spec.shape) != 3:
        return None
    features = [max(size, -1) for size in output.shape[1:]]
    wanted = [max(size, -1) for size in input_spec.shape[1:]]
    return (0, 2, 1) if features != wanted and features[::-1] == wanted else None


# ------------------------------------------------------------------------------------------------ RNNT-TDT


def _infer_connections(signatures: Mapping[str, Signature]) -> Iterator[Link]:
    """Connections of an RNNT-TDT: encoder and predictor to joint, predictor states to predictor."""
    encoder, predictor, joint = (signatures[name] for name in ("encoder", "predictor", "joint"))
    sides = [spec for spec in joint.inputs if "float" in spec.dtype and len(spec.shape) > 1]
    heard = next((spec for spec in sides if "enc" in spec.name.lower()), sides[0] if sides else None)
    stated = next((spec for spec in sides if spec is not heard and re.search("pred|dec", spec.name.lower())), None)
    stated = stated or next((spec for spec in sides if spec is not heard), None)
    states = list(_state_pairs(predictor))
    for producer, outputs, taken in (
        ("encoder", encoder.outputs, heard),
        ("predictor", [spec for spec in predictor.outputs if spec.name not in {pair[0] for pair in states}], stated),
    ):
        main = next((spec for spec in outputs if "float" in spec.dtype), None)
        if main is not None and taken is not None:
            yield Link(producer, main.name, "joint", taken.name, _transpose_axes(main, taken) or (), declared=False)
    for output, taken_ in states:
        yield Link("predictor", output, "predictor", taken_, declared=False)


def _state_pairs(predictor: Signature) -> Iterator[tuple[str, str]]:
    """Pairs of output and input of the predictor's states: float inputs of `[L, B, H]`, matched by name (`h` and `h_out`),
    else in the order of the outputs after the first."""
    inputs = [spec.name for spec in predictor.inputs if "float" in spec.dtype and len(spec.shape) == 3]
    rest = [spec.name for spec in predictor.outputs if "float" in spec.dtype and len(spec.shape) == 3][1:]
    for index, name in enumerate(inputs):
        by_name = [
            item for item in rest if name in re.split(r"[_.\-/]", item.rstrip("0123456789")) or item == name + "n"
        ]
        if by_name:
            yield by_name[0], name
        elif index < len(rest) and len(rest) == len(inputs):
            yield rest[index], name


def _find_spec(specs: Iterable[TensorSpec], name: str) -> TensorSpec | None:
    return next((spec for spec in specs if spec.name == name), None)
