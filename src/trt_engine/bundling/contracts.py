"""What feeds what between components, declared or inferred, and whether it agrees."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from trt_engine.api.chaining import disagreement
from trt_engine.bundling.meta import Link, Meta
from trt_engine.bundling.profiles import Resolved
from trt_engine.errors import BuildError, ModelError
from trt_engine.tensors import Signature, TensorSpec, closest

__all__ = ["check", "connections"]


def connections(meta: Meta, signatures: Mapping[str, Signature]) -> tuple[Link, ...]:
    """The declared ones; for an RNNT-TDT that declares none, the inferred ones.

    `ModelError` for one that names no output or input, or an input that is fed twice.
    """
    links = meta.links or (tuple(_inferred(signatures)) if meta.rnnt else ())
    fed: dict[tuple[str, str], Link] = {}
    for link in links:
        for component, tensor, side, specs in (
            (link.producer, link.output, "output", signatures[link.producer].outputs),
            (link.consumer, link.input, "input", signatures[link.consumer].inputs),
        ):
            known = [spec.name for spec in specs]
            if tensor not in known:
                raise meta.error(link.place, f"there is no {side} `{component}.{tensor}`", closest(tensor, known))
        if (before := fed.get((link.consumer, link.input))) is not None:
            raise meta.error(
                link.place, f"`{link.consumer}.{link.input}` is fed by `{before}` already", "leave one out"
            )
        fed[link.consumer, link.input] = link
    return links


def check(
    meta: Meta,
    links: Iterable[Link],
    signatures: Mapping[str, Signature],
    resolved: Mapping[str, Resolved],
    *,
    of: str = "models",
) -> None:
    """`ModelError` for the first connection whose two ends do not agree in type, rank and fixed dimensions, or whose fixed
    sizes lie outside the profile they feed; `BuildError` for an engine without one of the ends."""
    for link in links:
        output = _named(signatures[link.producer].outputs, link.output)
        taken = _named(signatures[link.consumer].inputs, link.input)
        if output is None or taken is None:
            raise BuildError(f"`{link}`: the {of} do not have both", hint="`--force` builds them again")
        why = disagreement(output, taken, link.transpose)
        if why is None and not link.transpose and _turn(output, taken):
            why = "its axes are the other way round"
        if why is not None:
            raise _broken(meta, link, output, taken, why, of)
        span = resolved[link.consumer].profile.ranges[link.input]
        turned = [output.shape[axis] for axis in link.transpose or range(len(output.shape))]
        for position, size in enumerate(turned):
            if size >= 0 and not span.min[position] <= size <= span.max[position]:
                raise ModelError(
                    f"`{link}`: the output is {output.describe()}, and the profile of the input spans {span.min[position]} "
                    f"to {span.max[position]} in dimension {position}",
                    hint=f"`--profile {link.consumer}:{link.input}:MIN,OPT,MAX` with {size} in dimension {position}",
                )


def _broken(meta: Meta, link: Link, output: TensorSpec, taken: TensorSpec, why: str, of: str) -> ModelError:
    ends = " and ".join(f"{spec.describe()} {spec.dtype}" for spec in (output, taken))
    text = f"`{link}` does not hold: {why} (the {of} have {ends})"
    turned = _turn(output, taken) if not link.transpose else None
    if link.declared:
        hint = "export both ends again together, or correct `connections`"
        if turned:
            hint = f'it holds with `"transpose": {list(turned)}`, if the application turns them; `[0, 1, 2]` insists'
        return meta.error(link.place, text, hint)
    return ModelError(
        text, hint=f"export both again from one checkpoint, or write `connections` into `{meta.path.name}`"
    )


def _turn(output: TensorSpec, taken: TensorSpec) -> tuple[int, ...] | None:
    """The turn of the last two axes, where what is fixed and what moves match with it and do not without it."""
    if len(output.shape) != 3 or len(taken.shape) != 3:
        return None
    features = [max(size, -1) for size in output.shape[1:]]
    wanted = [max(size, -1) for size in taken.shape[1:]]
    return (0, 2, 1) if features != wanted and features[::-1] == wanted else None


# ------------------------------------------------------------------------------------------------ RNNT-TDT


def _inferred(signatures: Mapping[str, Signature]) -> Iterator[Link]:
    """Encoder and predictor into the joint, and the predictor's states into itself."""
    encoder, predictor, joint = (signatures[name] for name in ("encoder", "predictor", "joint"))
    sides = [spec for spec in joint.inputs if "float" in spec.dtype and len(spec.shape) > 1]
    heard = next((spec for spec in sides if "enc" in spec.name.lower()), sides[0] if sides else None)
    told = next((spec for spec in sides if spec is not heard and re.search("pred|dec", spec.name.lower())), None)
    told = told or next((spec for spec in sides if spec is not heard), None)
    states = list(_states(predictor))
    for producer, outputs, taken in (
        ("encoder", encoder.outputs, heard),
        ("predictor", [spec for spec in predictor.outputs if spec.name not in {pair[0] for pair in states}], told),
    ):
        main = next((spec for spec in outputs if "float" in spec.dtype), None)
        if main is not None and taken is not None:
            yield Link(producer, main.name, "joint", taken.name, _turn(main, taken) or (), declared=False)
    for output, taken_ in states:
        yield Link("predictor", output, "predictor", taken_, declared=False)


def _states(predictor: Signature) -> Iterator[tuple[str, str]]:
    """The predictor's states: float inputs of L x B x H, each with the output of its name (`h` and `h_out`), else the ones
    behind the first output in their order."""
    inputs = [spec.name for spec in predictor.inputs if "float" in spec.dtype and len(spec.shape) == 3]
    rest = [spec.name for spec in predictor.outputs if "float" in spec.dtype and len(spec.shape) == 3][1:]
    for index, name in enumerate(inputs):
        by_name = [
            item for item in rest if name in re.split(r"[_.\-/]", re.sub(r"\d+$", "", item)) or item == name + "n"
        ]
        if by_name:
            yield by_name[0], name
        elif index < len(rest) and len(rest) == len(inputs):
            yield rest[index], name


def _named(specs: Iterable[TensorSpec], name: str) -> TensorSpec | None:
    return next((spec for spec in specs if spec.name == name), None)
