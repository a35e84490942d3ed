"""A loaded PyTorch module with its origin."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from trt_engine.conversion.axes import Axes
from trt_engine.conversion.examples import Example
from trt_engine.errors import ModelError, UsageError
from trt_engine.tensors import suggest


@dataclass
class LoadedModule:
    """A runnable source in evaluation mode."""

    module: Any
    parameters: tuple[str, ...]
    """Names of `forward` arguments in order; empty if unknown."""
    examples: list[Example] = field(default_factory=list)
    """Example inputs declared by the source."""
    dynamic: Axes | None = None
    """Its usual dynamic axes."""
    program: Any = None
    """The exported program, if the source is one."""
    keywords: tuple[str | None, ...] = ()
    """For an exported program: the argument of each input, None if positional."""
    scripted: bool = False
    any_keyword: bool = False
    """`forward` takes `**kwargs`."""
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


class FixedArguments(torch.nn.Module):  # type: ignore[misc]  # Any where PyTorch is not installed
    """A module with the arguments that are not tensors in place."""

    def __init__(self, module: Any, places: Mapping[int, tuple[str | None, Any]], names: Mapping[str, Any]) -> None:
        super().__init__()
        self.source, self._places, self._names = module, dict(sorted(places.items())), dict(names)

    def forward(self, *tensors: Any, **named: Any) -> Any:
        args, by_name = list(tensors), bool(named)
        for place, (name, value) in self._places.items():
            if name is not None and (by_name or place > len(args)):  # those before it are named, or have defaults
                named[name] = value
            else:
                args.insert(place, value)
        return self.source(*args, **named, **self._names)


def fix_arguments(loaded: LoadedModule, fixed: Mapping[str, Any]) -> LoadedModule:
    """The module with arguments that are not tensors, by name; `UsageError` for names that its forward does not take."""
    for name in fixed:
        if name not in loaded.parameters:
            raise UsageError(f"its forward takes no `{name}`", hint=suggest(name, loaded.parameters))
    rest = tuple(name for name in loaded.parameters if name not in fixed)
    if loaded.scripted:
        holder = torch.nn.Module()
        holder.source = loaded.module
        module = torch.jit.script(holder)
        given = ", ".join(f"{name}={fixed.get(name, name)}" for name in loaded.parameters)
        module.define(f"def forward(self, {', '.join(rest)}):\n    return self.source({given})\n")
    else:
        places = {at: (name, fixed[name]) for at, name in enumerate(loaded.parameters) if name in fixed}
        module = FixedArguments(loaded.module, places, {})
    notes = [*loaded.notes, *(f"the argument `{name}` is {value!r}" for name, value in fixed.items())]
    return replace(loaded, module=module.eval(), parameters=rest, notes=notes)


def as_loaded_module(result: Any, text: str) -> LoadedModule:
    examples: list[Example] = []
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.nn.Module):
        result, given = result
        examples = module_examples(given, text)
    if not isinstance(result, torch.nn.Module):
        raise ModelError(
            f"`{text}` gives a {type(result).__name__}, expected a `torch.nn.Module`",
            hint="let the factory return the module, or the module and its example inputs",
        )
    if isinstance(result, torch.jit.ScriptModule):
        return LoadedModule(result, script_parameter_names(result), examples, scripted=True)
    names, free = parameter_names(result.forward)
    return LoadedModule(result, names, examples, any_keyword=free)


def parameter_names(forward: Any) -> tuple[tuple[str, ...], bool]:
    try:
        items = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return (), True
    named = tuple(item.name for item in items if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY))
    return named, any(item.kind is item.VAR_KEYWORD for item in items)


def module_examples(given: Any, text: str) -> list[Example]:
    if isinstance(given, torch.Tensor):
        given = (given,)
    pairs = list(given.items()) if isinstance(given, Mapping) else [(None, item) for item in given]
    found = []
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise ModelError(
                f"an example input of `{text}` is a {type(tensor).__name__}",
                hint="give tensors; `--input NAME=VALUE` is an argument that is none",
            )
        array = tensor.detach().cpu()
        if array.dtype is torch.bfloat16:
            array = array.float()
        numbers = array.numpy()
        found.append(Example(name, tuple(numbers.shape), numbers.dtype.name, array=numbers))
    return found


def script_parameter_names(module: Any) -> tuple[str, ...]:
    try:
        return tuple(item.name for item in module.forward.schema.arguments[1:])
    except (AttributeError, RuntimeError):
        return ()
