"""Loads PyTorch sources: a factory's module, an archive, an exported program, a state dict, a name on a hub.

Factories, Hugging Face folders with Python code, and TorchScript run in this process as user code.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trt_engine.conversion.sources import Source
from trt_engine.conversion.torch import loaded_module
from trt_engine.conversion.torch.pickle_guard import no_pickled_code
from trt_engine.conversion.torch.torch_hub import load_huggingface, load_timm
from trt_engine.conversion.torch.user_code import (
    describe_error,
    quiet_loggers,
    stdout_to_stderr,
    user_code_errors,
    user_location,
)
from trt_engine.errors import ModelError, SetupError, TrtEngineError, UsageError
from trt_engine.format import library_reason
from trt_engine.tensors import suggest


def load_torch(
    source: Source,
    *,
    factory: str | None = None,
    options: Mapping[str, Any] | None = None,
    offline: bool = False,
    cache: Path | None = None,
    trust_source: bool = False,
) -> loaded_module.LoadedModule:
    """Load the source in evaluation mode on the CPU; `ModelError` with the user's line for code that raises.

    Without `trust_source`, no code of a file runs except its operators: see `pickle_guard`.
    """
    given = {name: parse_option(value) for name, value in (options or {}).items()}
    if source.kind in ("torchscript", "exported-program"):
        reject_unused_options(given, source)
    match source.kind:
        case "torch-module":
            if source.value is not None:
                reject_unused_options(given, source)
            made = call_factory(source, given) if source.value is None else _copy(source.value)
            loaded = loaded_module.as_loaded_module(made, source.text)
        case "torchscript":
            loaded = _load_script(source, trust_source)
        case "exported-program":
            loaded = _load_program(source, trust_source)
        case "state-dict":
            loaded = _load_state_dict(source, factory, given, trust_source)
        case "huggingface":
            loaded = load_huggingface(source, given, offline, cache, trust_source)
        case _:
            loaded = load_timm(source, given, offline, cache)
    loaded.versions = {"torch": str(torch.__version__), **loaded.versions}
    if loaded.program is None:
        loaded.module.eval()
        with contextlib.suppress(RuntimeError, AttributeError):
            loaded.module.to("cpu")
    return loaded


# ------------------------------------------------------------------------------------------------ files


def _copy(module: Any) -> Any:
    """A copy of the caller's module: it is moved to the CPU and to evaluation mode."""
    with user_code_errors("copying the module", hint="save it and convert the file: `torch.export.save`"):
        return copy.deepcopy(module)


def _load_script(source: Source, trust_source: bool) -> loaded_module.LoadedModule:
    if source.value is not None:
        module = _copy(source.value)
        return loaded_module.LoadedModule(module, loaded_module.script_parameter_names(module), scripted=True)
    with (
        user_code_errors(f"opening `{source.text}` as TorchScript", hint="save it again with `torch.jit.save`"),
        no_pickled_code(trust_source=trust_source),
    ):
        module = torch.jit.load(str(source.path), map_location="cpu")
    return loaded_module.LoadedModule(module, loaded_module.script_parameter_names(module), scripted=True)


def _load_program(source: Source, trust_source: bool) -> loaded_module.LoadedModule:
    with (
        user_code_errors(
            f"opening `{source.text}` as an exported program",
            hint=f"this is torch {torch.__version__}; save it again with this release's `torch.export.save`",
        ),
        no_pickled_code(trust_source=trust_source),
        quiet_loggers("torch.export", "torch._export", "torch.export.pt2_archive._package"),
    ):
        program = source.value if source.value is not None else torch.export.load(str(source.path))
        if not (trust_source or source.value is not None) and getattr(program, "_guards_code", None):
            program._guards_code = []  # Python text, which `module()` compiles; sizes are compared anyway
        module = program.module()
        args, kwargs = program.example_inputs if program.example_inputs is not None else ((), {})
    names = tuple(str(name) for name in program.graph_signature.user_inputs)
    flat = [*args, *kwargs.values()]
    keywords = (*(None for _ in args), *(str(name) for name in kwargs))
    fixed = [at for at, item in enumerate(flat) if item is None or isinstance(item, int | float | str)]
    if fixed:  # what is not a tensor is a constant of the program
        module = loaded_module.FixedArguments(
            module,
            {at: (None, flat[at]) for at in fixed if at < len(args)},
            {name: kwargs[name] for at, name in enumerate(kwargs, len(args)) if at in fixed},
        )
        notes = [f"argument {at + 1} of the program is {flat[at]!r}" for at in fixed]
        names = tuple(item for at, item in enumerate(names) if at not in fixed)
        keywords = tuple(item for at, item in enumerate(keywords) if at not in fixed)
        flat = [item for at, item in enumerate(flat) if at not in fixed]
    else:
        notes = []
    examples = loaded_module.module_examples(dict(zip(names, flat, strict=False)), source.text)
    return loaded_module.LoadedModule(module, names, examples, program=program, keywords=keywords, notes=notes)


def _load_state_dict(
    source: Source, factory: str | None, options: dict[str, Any], trust_source: bool
) -> loaded_module.LoadedModule:
    if source.code and factory is None:
        reject_unused_options(options, source)
        return _load_pickled_module(source)
    if factory is None:
        raise UsageError(
            f"`{source.text}` contains only weights, without the module they belong to",
            hint="name the function that makes the module: `--factory file.py:factory`",
        )
    place, _, function = factory.rpartition(":")
    if not place or not function:
        raise UsageError(
            f"cannot read the factory `{factory}`", hint="`--factory package.module:factory` or `file.py:factory`"
        )
    maker = Source(factory, "torch-module", "", Path(place) if place.endswith(".py") else None, place, function)
    loaded = loaded_module.as_loaded_module(call_factory(maker, options), factory)
    weights = _load_weights(source, trust_source)
    wanted = loaded.module.state_dict()
    state, note = _match_prefix(weights, wanted)
    if note:
        loaded.notes.append(note)
    missing = [name for name in wanted if name not in state]
    foreign = [name for name in state if name not in wanted]
    if missing or foreign:
        raise ModelError(
            f"the weights of `{source.text}` are not those of `{factory}`: "
            + "; ".join(
                f"{len(names)} {what} (`{names[0]}`)"
                for names, what in ((missing, "are missing"), (foreign, "are unknown to it"))
                if names
            ),
            hint="check the factory's arguments (`-O name=value`)",
        )
    for name, tensor in state.items():
        if tuple(tensor.shape) != tuple(wanted[name].shape):
            raise ModelError(
                f"`{name}` is {_format_shape(tensor)} in `{source.text}` and {_format_shape(wanted[name])} in `{factory}`",
                hint="check the factory's arguments (`-O name=value`)",
            )
    with user_code_errors(f"loading the weights of `{source.text}`"):
        loaded.module.load_state_dict(state)
    return loaded


def _format_shape(tensor: Any) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def _load_pickled_module(source: Source) -> loaded_module.LoadedModule:
    """A fully pickled module: opening it runs its code, allowed by `trust_source`."""
    with user_code_errors(f"opening `{source.text}`", hint="run it where the module's own code can be imported"):
        made = torch.load(str(source.path), map_location="cpu", weights_only=False)
        if isinstance(made, Mapping):  # a checkpoint with the module in it
            made = next((made[key] for key in ("ema", "model", "module", "net") if made.get(key) is not None), made)
    if not isinstance(made, torch.nn.Module):
        raise ModelError(
            f"`{source.text}` holds a {type(made).__name__}, expected a `torch.nn.Module`",
            hint="name the function that makes the module: `--factory file.py:factory`",
        )
    return loaded_module.as_loaded_module(made.float(), source.text)


def _load_weights(source: Source, trust_source: bool) -> dict[str, Any]:
    assert source.path is not None
    if source.evidence.endswith("safetensors file"):
        try:
            from safetensors.torch import load_file
        except ImportError as error:
            raise SetupError(
                f"`{source.text}` is a safetensors file, and safetensors is not installed",
                hint="`pip install safetensors`",
            ) from error
        with user_code_errors(f"reading `{source.text}`", hint="copy or download the file again"):
            return dict(load_file(str(source.path)))
    try:
        with no_pickled_code(trust_source=trust_source):
            raw = torch.load(str(source.path), map_location="cpu", weights_only=not trust_source)
    except Exception as error:
        raise ModelError(
            f"`{source.text}` holds more than weights: {library_reason(error)}",
            hint="save the weights alone: `torch.save(module.state_dict(), 'weights.pt')`",
        ) from error
    if isinstance(raw, torch.nn.Module):
        return dict(raw.state_dict())
    for _ in range(3):
        if isinstance(raw, Mapping) and raw and all(isinstance(value, torch.Tensor) for value in raw.values()):
            return dict(raw)
        inner = next(
            (raw[key] for key in _WEIGHT_KEYS if isinstance(raw, Mapping) and isinstance(raw.get(key), Mapping)), None
        )
        if inner is None:
            break
        raw = inner
    if isinstance(raw, Mapping):
        found = {name: value for name, value in raw.items() if isinstance(value, torch.Tensor)}
        if found:
            return found
    raise ModelError(
        f"`{source.text}` holds no weights by name", hint="save them: `torch.save(module.state_dict(), 'weights.pt')`"
    )


_WEIGHT_KEYS = ("state_dict", "model_state_dict", "model", "ema", "module", "net", "weights")
_PREFIXES = ("module.", "_orig_mod.", "model.")
"""Prefixes added to names by DataParallel, torch.compile and Lightning."""


def _match_prefix(weights: dict[str, Any], wanted: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    best, note = weights, None
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in best) and not all(name in wanted for name in best):
            best = {name.removeprefix(prefix): value for name, value in best.items()}
            note = f"`{prefix}` was taken off the names of the weights"
    return best, note


def parse_option(text: Any) -> Any:
    """`3`, `0.5`, `True`, `(1, 2)` as Python literals; anything else is text."""
    if not isinstance(text, str):
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def reject_unused_options(options: Mapping[str, Any], source: Source) -> None:
    if options:
        raise UsageError(
            f"`-O {next(iter(options))}=...` is for what a factory or a name makes, and `{source.text}` is a {source.kind}",
            hint="leave it out",
        )


def call_factory(source: Source, options: dict[str, Any]) -> Any:
    """Call the factory: returns a module, or a module and its example inputs."""
    assert source.factory is not None
    made = _find_function(source.path, source.name, source.factory, source.text)
    if isinstance(made, torch.nn.Module):
        reject_unused_options(options, source)
        return made
    if not callable(made):
        raise UsageError(
            f"`{source.text}` is a {type(made).__name__}, expected a function or a module", hint="name its factory"
        )
    _check_options(made, options, source.text)
    with user_code_errors(f"`{source.text}`"):
        return made(**options)


def _find_function(path: Path | None, name: str | None, factory: str, text: str) -> Any:
    module = _import_file(path) if path is not None else _import_module(str(name), text)
    value: Any = module
    for part in factory.split("."):
        if not hasattr(value, part):
            known = [item for item in vars(value) if not item.startswith("_")] if hasattr(value, "__dict__") else []
            raise UsageError(f"`{text}`: no attribute `{part}`", hint=suggest(part, known))
        value = getattr(value, part)
    return value


def _import_module(name: str, text: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    with _import_errors(name, text):
        return importlib.import_module(name)


def _import_file(path: Path) -> Any:
    whole = path.resolve()
    name = whole.stem if whole.stem.isidentifier() else f"source_{abs(hash(str(whole)))}"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(whole):
        name = f"trt_engine_source_{name}"
    if str(whole.parent) not in sys.path:
        sys.path.insert(0, str(whole.parent))
    spec = importlib.util.spec_from_file_location(name, whole)
    if spec is None or spec.loader is None:
        raise UsageError(f"`{path}` cannot be read as Python", hint="name a `.py` file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look it up there
    try:
        with _import_errors(str(path), str(path)):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


@contextlib.contextmanager
def _import_errors(name: str, text: str) -> Iterator[None]:
    """Errors of importing `name`, a module or a file, with what is missing or the user's line."""
    try:
        with stdout_to_stderr():
            yield
    except (KeyboardInterrupt, TrtEngineError):
        raise
    except ModuleNotFoundError as error:
        named = not name.endswith(".py") and error.name
        if named and (name == named or name.startswith(f"{named}.")):
            raise UsageError(
                f"`{text}`: no Python module `{error.name}`",
                hint=f"run it in the folder that holds `{name.split('.')[0]}`, or write `path/to/file.py:factory`",
            ) from error
        raise _missing_module_error(text, error) from error
    except BaseException as error:
        raise ModelError(
            f"importing `{name}` failed: {describe_error(error)}", hint="`-vv` shows the whole stack"
        ) from error


def _missing_module_error(text: str, error: ModuleNotFoundError) -> SetupError:
    where = user_location(error)
    if error.name is None:  # lazy imports of libraries raise their own message
        return SetupError(f"`{text}` cannot be imported: {describe_error(error)}", hint="install what it names")
    return SetupError(
        f"`{text}` needs the package `{error.name}`, which is not installed" + (f" ({where})" if where else ""),
        hint=f"`pip install {str(error.name).split('.')[0].replace('_', '-')}`, or the package that provides it",
    )


def _check_options(function: Callable[..., Any], options: Mapping[str, Any], text: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    items = signature.parameters.values()
    known = [item.name for item in items if item.kind in (item.KEYWORD_ONLY, item.POSITIONAL_OR_KEYWORD)]
    free = any(item.kind is item.VAR_KEYWORD for item in items)
    for name in options:
        if name not in known and not free:
            raise UsageError(f"`{text}` takes no argument `{name}`", hint=suggest(name, known))
    given = {*options, *(item.name for item in items if item.default is not item.empty)}
    lacking = [name for name in known if name not in given]
    if lacking:
        raise UsageError(
            f"`{text}` needs the argument{'s' if len(lacking) > 1 else ''} {', '.join(f'`{name}`' for name in lacking)}",
            hint=" ".join(f"-O {name}=..." for name in lacking),
        )
