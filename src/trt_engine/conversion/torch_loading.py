"""PyTorch sources opened: a factory's module, an archive, an exported program, a state dict, a name on a hub.

A factory, a Hugging Face folder with code of its own, and TorchScript run in this process: they are the user's programs.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trt_engine.conversion.axes import Axes, Axis
from trt_engine.conversion.examples import Example
from trt_engine.conversion.sources import Source
from trt_engine.errors import MemoryExhausted, ModelError, SetupError, TrtEngineError, UsageError
from trt_engine.tensors import closest

__all__ = ["Loaded", "load", "own_code"]

log = logging.getLogger(__name__)


@dataclass
class Loaded:
    """A source that can be run: `module` is called with the inputs, in evaluation mode."""

    module: Any
    parameters: tuple[str, ...]
    """Names its forward takes, in order; empty where they cannot be known."""
    examples: list[Example] = field(default_factory=list)
    """What the source itself says its inputs look like."""
    dynamic: Axes | None = None
    """What of them is usually dynamic."""
    program: Any = None
    """The exported program, where the source is one."""
    keywords: tuple[str | None, ...] = ()
    """Of an exported program: the argument each input goes to, None by position; it is called as it was exported."""
    scripted: bool = False
    any_keyword: bool = False
    """Its forward takes `**kwargs`."""
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


def load(
    source: Source,
    *,
    factory: str | None = None,
    options: Mapping[str, Any] | None = None,
    offline: bool = False,
    cache: Path | None = None,
) -> Loaded:
    """The source in evaluation mode on the CPU; `ModelError` with the place in the user's file for code that raises."""
    given = {name: _value(value) for name, value in (options or {}).items()}
    if source.kind == "torch-module":
        loaded = _module(_called(source, given), source.text)
    elif source.kind == "torchscript":
        _none_left(given, source)
        loaded = _script(source)
    elif source.kind == "exported-program":
        _none_left(given, source)
        loaded = _program(source)
    elif source.kind == "state-dict":
        loaded = _state(source, factory, given)
    elif source.kind == "huggingface":
        loaded = _huggingface(source, given, offline, cache)
    else:
        loaded = _timm(source, given, offline, cache)
    loaded.versions = {"torch": str(torch.__version__), **loaded.versions}
    if loaded.program is None:
        loaded.module.eval()
        with contextlib.suppress(RuntimeError, AttributeError):
            loaded.module.to("cpu")
    return loaded


def _value(text: Any) -> Any:
    """`3`, `0.5`, `True`, `(1, 2)` as Python reads them; anything else is text."""
    if not isinstance(text, str):
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _none_left(options: Mapping[str, Any], source: Source) -> None:
    if options:
        raise UsageError(
            f"`-O {next(iter(options))}=...` is for what a factory or a name makes, and `{source.text}` is a {source.kind}",
            hint="leave it out",
        )


# ------------------------------------------------------------------------------------------------ other people's code


@contextlib.contextmanager
def _talking() -> Iterator[None]:
    """What other people's code prints goes to stderr: stdout is for the result."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def own_code(what: str, *, hint: str | Callable[[BaseException], str] | None = None) -> Iterator[None]:
    """Turns what the user's code raises into a `ModelError` with the place in their file."""
    try:
        with _talking():
            yield
    except (TrtEngineError, KeyboardInterrupt):
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise MemoryExhausted(
            f"{what} needs more memory than there is", hint="give a smaller example `--input`"
        ) from error
    except BaseException as error:  # their SystemExit is no wish to end this program
        shown = hint(error) if callable(hint) else hint
        raise ModelError(f"{what} failed: {_told(error)}", hint=shown or "`-vv` shows the whole stack") from error


def _told(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [""])[0][:300]
    place = place_of(error)
    return f"{type(error).__name__}: {line}" + (f" ({place})" if place else "")


def place_of(error: BaseException) -> str | None:
    """The last line of the stack that is neither ours nor a library's: `detector.py:41 in forward`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    found = None
    libraries = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith((*libraries, "<")) and f"{os.sep}lib{os.sep}python" not in frame.filename:
            found = f"{frame.filename}:{frame.lineno} in `{frame.name}`"
    return found


# ------------------------------------------------------------------------------------------------ factories


def _called(source: Source, options: dict[str, Any]) -> Any:
    """What the factory gives: a module, or a module and its example inputs."""
    assert source.factory is not None
    made = _function(source.path, source.name, source.factory, source.text)
    if isinstance(made, torch.nn.Module):
        _none_left(options, source)
        return made
    if not callable(made):
        raise UsageError(
            f"`{source.text}` is a {type(made).__name__}, expected a function or a module", hint="name its factory"
        )
    _must_fit(made, options, source.text)
    with own_code(f"`{source.text}`"):
        return made(**options)


def _function(path: Path | None, name: str | None, factory: str, text: str) -> Any:
    module = _imported_file(path) if path is not None else _imported(str(name), text)
    value: Any = module
    for part in factory.split("."):
        if not hasattr(value, part):
            known = [item for item in vars(value) if not item.startswith("_")] if hasattr(value, "__dict__") else []
            raise UsageError(f"`{text}`: there is no `{part}`", hint=closest(part, known))
        value = getattr(value, part)
    return value


def _imported(name: str, text: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with _talking():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        top = name.split(".")[0]
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(
                f"`{text}`: there is no Python module `{error.name}`",
                hint=f"run it in the folder that holds `{top}`, or write `path/to/file.py:factory`",
            ) from error
        raise _lacks(text, error) from error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | TrtEngineError):
            raise
        raise ModelError(f"importing `{name}` failed: {_told(error)}", hint="`-vv` shows the whole stack") from error


def _imported_file(path: Path) -> Any:
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
        with _talking():
            spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if isinstance(error, KeyboardInterrupt | TrtEngineError):
            raise
        if isinstance(error, ModuleNotFoundError):
            raise _lacks(str(path), error) from error
        raise ModelError(f"importing `{path}` failed: {_told(error)}", hint="`-vv` shows the whole stack") from error
    return module


def _lacks(text: str, error: ModuleNotFoundError) -> SetupError:
    where = place_of(error)
    if error.name is None:  # a library that imports its parts late says what it lacks in a sentence of its own
        return SetupError(f"`{text}` cannot be imported: {_told(error)}", hint="install what it names")
    return SetupError(
        f"`{text}` needs the package `{error.name}`, which is not installed" + (f" ({where})" if where else ""),
        hint=f"`pip install {str(error.name).split('.')[0].replace('_', '-')}`, or whatever brings it",
    )


def _must_fit(function: Callable[..., Any], options: Mapping[str, Any], text: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    known = [
        item.name
        for item in signature.parameters.values()
        if item.kind in (item.KEYWORD_ONLY, item.POSITIONAL_OR_KEYWORD)
    ]
    free = any(item.kind is item.VAR_KEYWORD for item in signature.parameters.values())
    for name in options:
        if name not in known and not free:
            raise UsageError(f"`{text}` takes no argument `{name}`", hint=closest(name, known))
    lacking = [
        item.name
        for item in signature.parameters.values()
        if item.default is item.empty and item.name in known and item.name not in options
    ]
    if lacking:
        raise UsageError(
            f"`{text}` needs the argument{'s' if len(lacking) > 1 else ''} {', '.join(f'`{name}`' for name in lacking)}",
            hint=" ".join(f"-O {name}=..." for name in lacking),
        )


def _module(made: Any, text: str) -> Loaded:
    examples: list[Example] = []
    notes: list[str] = []
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module):
        made, given = made
        examples = _examples_of(given, text)
    if not isinstance(made, torch.nn.Module):
        raise ModelError(
            f"`{text}` gives a {type(made).__name__}, expected a `torch.nn.Module`",
            hint="let the factory return the module, or the module and its example inputs",
        )
    if isinstance(made, torch.jit.ScriptModule):
        return Loaded(made, _script_parameters(made), examples, scripted=True, notes=notes)
    names, free = _parameters(made.forward)
    return Loaded(made, names, examples, any_keyword=free, notes=notes)


def _parameters(forward: Any) -> tuple[tuple[str, ...], bool]:
    try:
        items = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return (), True
    named = tuple(item.name for item in items if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY))
    return named, any(item.kind is item.VAR_KEYWORD for item in items)


def _examples_of(given: Any, text: str) -> list[Example]:
    if isinstance(given, torch.Tensor):
        given = (given,)
    pairs = list(given.items()) if isinstance(given, Mapping) else [(None, item) for item in given]
    found = []
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise ModelError(f"an example input of `{text}` is a {type(tensor).__name__}", hint="give tensors")
        array = tensor.detach().cpu()
        if array.dtype is torch.bfloat16:
            array = array.float()
        numbers = array.numpy()
        found.append(Example(name, tuple(numbers.shape), numbers.dtype.name, array=numbers))
    return found


# ------------------------------------------------------------------------------------------------ files


def _script(source: Source) -> Loaded:
    with own_code(f"opening `{source.text}` as TorchScript", hint="save it again with `torch.jit.save`"):
        module = torch.jit.load(str(source.path), map_location="cpu")
    return Loaded(module, _script_parameters(module), scripted=True)


def _script_parameters(module: Any) -> tuple[str, ...]:
    try:
        return tuple(item.name for item in module.forward.schema.arguments[1:])
    except (AttributeError, RuntimeError):
        return ()


def _program(source: Source) -> Loaded:
    with own_code(
        f"opening `{source.text}` as an exported program",
        hint=f"this is torch {torch.__version__}; save it again with this release's `torch.export.save`",
    ):
        program = torch.export.load(str(source.path))
        module = program.module()
        args, kwargs = program.example_inputs if program.example_inputs is not None else ((), {})
    names = tuple(str(name) for name in program.graph_signature.user_inputs)
    flat = [*args, *kwargs.values()]
    examples = _examples_of(dict(zip(names, flat, strict=False)), source.text)
    keywords = (*(None for _ in args), *(str(name) for name in kwargs))
    return Loaded(module, names, examples, program=program, keywords=keywords)


def _state(source: Source, factory: str | None, options: dict[str, Any]) -> Loaded:
    if factory is None:
        raise UsageError(
            f"`{source.text}` holds weights alone, and nothing says what they are the weights of",
            hint="name the function that makes the module: `--factory file.py:factory`",
        )
    place, _, function = factory.rpartition(":")
    if not place or not function:
        raise UsageError(
            f"cannot read the factory `{factory}`", hint="`--factory package.module:factory` or `file.py:factory`"
        )
    maker = Source(factory, "torch-module", "", Path(place) if place.endswith(".py") else None, place, function)
    loaded = _module(_called(maker, options), factory)
    weights = _weights(source)
    wanted = loaded.module.state_dict()
    state, note = _matching(weights, wanted)
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
                f"`{name}` is {_x(tensor)} in `{source.text}` and {_x(wanted[name])} in `{factory}`",
                hint="check the factory's arguments (`-O name=value`)",
            )
    with own_code(f"loading the weights of `{source.text}`"):
        loaded.module.load_state_dict(state)
    return loaded


def _x(tensor: Any) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def _weights(source: Source) -> dict[str, Any]:
    assert source.path is not None
    if source.seen.endswith("safetensors file"):
        try:
            from safetensors.torch import load_file
        except ImportError as error:
            raise SetupError(
                f"`{source.text}` is a safetensors file, and safetensors is not installed",
                hint="`pip install safetensors`",
            ) from error
        with own_code(f"reading `{source.text}`", hint="copy or download the file again"):
            return dict(load_file(str(source.path)))
    try:
        raw = torch.load(str(source.path), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ModelError(
            f"`{source.text}` holds more than weights: {(str(error).strip().splitlines() or [''])[0][:200]}",
            hint="save the weights alone: `torch.save(module.state_dict(), 'weights.pt')`",
        ) from error
    for _ in range(3):
        if isinstance(raw, Mapping) and raw and all(isinstance(value, torch.Tensor) for value in raw.values()):
            return dict(raw)
        inner = next(
            (raw[key] for key in _NESTS if isinstance(raw, Mapping) and isinstance(raw.get(key), Mapping)), None
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


_NESTS = ("state_dict", "model_state_dict", "model", "ema", "module", "net", "weights")
_PREFIXES = ("module.", "_orig_mod.", "model.")
"""What DataParallel, torch.compile and Lightning put before every name."""


def _matching(weights: dict[str, Any], wanted: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    best, note = weights, None
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in best) and not all(name in wanted for name in best):
            best = {name.removeprefix(prefix): value for name, value in best.items()}
            note = f"`{prefix}` was taken off the names of the weights"
    return best, note


# ------------------------------------------------------------------------------------------------ hubs


def _huggingface(source: Source, options: dict[str, Any], offline: bool, cache: Path | None) -> Loaded:
    """The architecture its configuration names, with its weights, or random ones where `-O random=true` asks."""
    with _talking(), _quiet_hub(offline):
        import transformers
    name = str(source.name)
    random = bool(options.pop("random", False))
    task = options.pop("task", None)
    revision = options.pop("revision", None)
    common: dict[str, Any] = {"local_files_only": offline, "cache_dir": str(cache) if cache is not None else None}
    if revision is not None:
        common["revision"] = str(revision)
    common["trust_remote_code"] = (
        options.pop("trust_remote_code", False) is True
    )  # left out, transformers asks on stdin
    with _quiet_hub(offline), _talking():
        with _fetching(source, offline):
            config = transformers.AutoConfig.from_pretrained(name, **common)
        for setting in list(options):
            if hasattr(config, setting):
                setattr(config, setting, options.pop(setting))
        if getattr(config, "use_cache", False):
            config.use_cache = False  # a cache is no tensor; decoders with one are components of a bundle
        maker = _architecture(transformers, config, task)
        attention = options.pop("attn_implementation", None)
        if attention is not None:
            options["attn_implementation"] = attention
        with _fetching(source, offline, options=True):
            if random:
                torch.manual_seed(0)
                module = (
                    maker._from_config(config, **options)
                    if not _is_auto(maker)
                    else maker.from_config(config, **options)
                )
            else:
                module = maker.from_pretrained(name, config=config, dtype=torch.float32, **common, **options)
    names, free = _parameters(module.forward)
    examples, dynamic = _inputs_of(module, config)
    notes = [f"the architecture is `{type(module).__name__}`" + (", with random weights" if random else "")]
    return Loaded(
        module,
        names,
        examples,
        dynamic,
        any_keyword=free,
        notes=notes,
        versions={"transformers": transformers.__version__},
    )


@contextlib.contextmanager
def _quiet_hub(offline: bool) -> Iterator[None]:
    """No progress bars; with `offline` no network, whatever a library would like to look up."""
    wanted = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_TELEMETRY": "1"}
    if offline:
        wanted |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub", "timm")]
    levels = [item.level for item in loggers]
    for item in loggers:
        item.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for item, level in zip(loggers, levels, strict=True):
            item.setLevel(level)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _is_auto(maker: Any) -> bool:
    return str(maker.__name__).startswith("AutoModel")


def _architecture(transformers: Any, config: Any, task: Any) -> Any:
    if task is not None:
        if hasattr(transformers, str(task)):
            return getattr(transformers, str(task))
        known = [name for name in dir(transformers) if name.startswith("AutoModel")]
        raise UsageError(f"transformers has no class `{task}`", hint=closest(str(task), known))
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return transformers.AutoModel


@contextlib.contextmanager
def _fetching(source: Source, offline: bool, *, options: bool = False) -> Iterator[None]:
    """What a hub's library raises becomes an error of ours; with `options`, a `TypeError` is of the names given to it."""
    try:
        yield
    except TrtEngineError:
        raise
    except Exception as error:
        if options and isinstance(error, TypeError):
            raise UsageError(
                f"`{source.text}`: {(str(error).splitlines() or [''])[0]}", hint="check the names given with `-O`"
            ) from error
        raise _not_fetched(source, error, offline) from error


def _not_fetched(source: Source, error: Exception, offline: bool) -> TrtEngineError:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0][:240]
    text = str(error).lower()
    local = source.path is not None
    if "trust_remote_code" in text:
        return ModelError(
            f"`{source.text}` brings Python code of its own, which is not run unasked",
            hint="read it, then `-O trust_remote_code=true`: it runs with your rights",
        )
    if isinstance(error, ImportError):
        return SetupError(
            f"`{source.text}` needs a package that is not installed: {line}", hint="install what it names"
        )
    if local:
        lacks_weights = "no file named" in text or "safetensors" in text
        return ModelError(
            f"`{source.text}` cannot be loaded: {line}",
            hint="`-O random=true` makes it from its configuration, with random weights"
            if lacks_weights
            else "check the folder: `config.json` and the weights beside it",
        )
    if offline:
        return SetupError(
            f"`{source.text}` is not in the cache, and `--offline` allows no other place: {line}",
            hint="run it once without `--offline`, or copy the folder here and name that",
        )
    if isinstance(error, OSError) or "connect" in text or "offline" in text:
        return SetupError(
            f"`{source.text}` is no file here and could not be fetched: {line}",
            hint="check the name and the connection; a folder with config.json and weights needs neither",
        )
    return ModelError(f"`{source.text}` cannot be loaded: {line}", hint="`-vv` shows the whole stack")


def _inputs_of(module: Any, config: Any) -> tuple[list[Example], Axes | None]:
    """Inputs as the configuration describes them; none where it does not."""
    takes = set(inspect.signature(module.forward).parameters)
    main = getattr(module, "main_input_name", None)
    if main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", 3)
        if size is None:
            return [], None
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        return [Example("pixel_values", (2, channels, height, width))], {"pixel_values": {0: Axis("batch")}}
    vocabulary = getattr(config, "vocab_size", None)
    if main != "input_ids" or vocabulary is None:
        return [], None
    longest = getattr(config, "max_position_embeddings", None)
    top = Axis("sequence", 1, int(longest) if isinstance(longest, int) and longest > 16 else None)
    shape = (2, 16)
    examples = [Example("input_ids", shape, "int64", 0, float(vocabulary - 1))]
    if "attention_mask" in takes:
        examples.append(Example("attention_mask", shape, "int64"))
    if "token_type_ids" in takes and getattr(config, "type_vocab_size", 0) > 0:
        examples.append(Example("token_type_ids", shape, "int64", 0, float(config.type_vocab_size - 1)))
    return examples, {str(item.name): {0: Axis("batch"), 1: top} for item in examples}


def _timm(source: Source, options: dict[str, Any], offline: bool, cache: Path | None) -> Loaded:
    with _talking(), _quiet_hub(offline):
        import timm
    name = str(source.name)
    pretrained = bool(options.pop("pretrained", True))
    if name.split(".")[0] not in timm.list_models():
        raise UsageError(f"timm has no model `{name}`", hint=closest(name.split(".")[0], timm.list_models()))
    extra: dict[str, Any] = {"cache_dir": str(cache)} if cache is not None else {}
    with _quiet_hub(offline), _talking():
        if not pretrained:
            torch.manual_seed(0)
        with _fetching(source, offline, options=True):
            module = timm.create_model(name, pretrained=pretrained, exportable=True, **extra, **options)
    size = getattr(module, "default_cfg", {}).get("input_size", (3, 224, 224))
    names, free = _parameters(module.forward)
    first = names[0] if names else "x"
    notes = [] if pretrained else ["the weights are random (`-O pretrained=false`)"]
    return Loaded(
        module, names, [Example(first, (2, *size))], {first: {0: Axis("batch")}}, any_keyword=free, notes=notes,
        versions={"timm": timm.__version__},
    )  # fmt: skip
