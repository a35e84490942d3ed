"""Modules from Hugging Face folders and timm."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trt_engine.conversion.axes import Axes, Axis
from trt_engine.conversion.examples import Example
from trt_engine.conversion.sources import Source
from trt_engine.conversion.torch.loaded_module import LoadedModule, parameter_names
from trt_engine.conversion.torch.pickle_guard import no_pickled_code
from trt_engine.conversion.torch.user_code import environment, quiet_loggers, stdout_to_stderr
from trt_engine.errors import ModelError, SetupError, TrtEngineError, UsageError
from trt_engine.format import library_reason
from trt_engine.tensors import suggest


def load_huggingface(
    source: Source, options: dict[str, Any], offline: bool, cache: Path | None, trust_source: bool
) -> LoadedModule:
    """The architecture named in the configuration, with its weights, or random ones with `-O random=true`."""
    with _import_errors(source, "transformers"), stdout_to_stderr(), _quiet_hub(offline):
        import transformers
    name = str(source.name)
    random = bool(options.pop("random", False))
    task = options.pop("task", None)
    revision = options.pop("revision", None)
    common: dict[str, Any] = {"local_files_only": offline, "cache_dir": str(cache) if cache is not None else None}
    if revision is not None:
        common["revision"] = str(revision)
    if "trust_remote_code" in options:
        raise UsageError("`trust_remote_code` is not an option of the model", hint="use `--trust-source`")
    common["trust_remote_code"] = trust_source  # without it, transformers prompts on stdin
    with no_pickled_code(trust_source=trust_source), _quiet_hub(offline), stdout_to_stderr():
        with _hub_errors(source, offline):
            config = transformers.AutoConfig.from_pretrained(name, **common)
        for setting in list(options):
            if hasattr(config, setting):
                setattr(config, setting, options.pop(setting))
        if getattr(config, "use_cache", False):
            config.use_cache = False  # a cache is not a tensor; decoders with one are components of a bundle
        with _import_errors(source, "transformers"):
            maker = _architecture(transformers, config, task)
        attention = options.pop("attn_implementation", None)
        if attention is not None:
            options["attn_implementation"] = attention
        with _hub_errors(source, offline, options=True):
            if random:
                torch.manual_seed(0)
                module = (
                    maker._from_config(config, **options)
                    if not str(maker.__name__).startswith("AutoModel")
                    else maker.from_config(config, **options)
                )
            else:
                module = maker.from_pretrained(name, config=config, dtype=torch.float32, **common, **options)
    names, free = parameter_names(module.forward)
    examples, dynamic = _config_inputs(module, config)
    notes = [f"the architecture is `{type(module).__name__}`" + (", with random weights" if random else "")]
    return LoadedModule(
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
    """Disable progress bars, and with `offline` all network access."""
    wanted = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_TELEMETRY": "1"}
    if offline:
        wanted |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    with environment(wanted), quiet_loggers("transformers", "huggingface_hub", "timm"):
        yield


def _architecture(transformers: Any, config: Any, task: Any) -> Any:
    if task is not None:
        if hasattr(transformers, str(task)):
            return getattr(transformers, str(task))
        known = [name for name in dir(transformers) if name.startswith("AutoModel")]
        raise UsageError(f"transformers has no class `{task}`", hint=suggest(str(task), known))
    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, torch.nn.Module):
            return found
    return transformers.AutoModel


@contextlib.contextmanager
def _import_errors(source: Source, library: str) -> Iterator[None]:
    """`SetupError` for a library that does not import, as with a torchvision of another torch."""
    try:
        yield
    except TrtEngineError:
        raise
    except Exception as error:  # a broken installation may raise anything
        first: BaseException = error
        while first.__cause__ is not None:  # transformers hides it
            first = first.__cause__
        of_vision = "torchvision" in str(first)
        raise SetupError(
            f"`{source.text}` needs {library}, which does not import here: {library_reason(first)}",
            hint=f"install the torchvision of torch {torch.__version__}"
            if of_vision
            else f"install {library} again, beside torch {torch.__version__}",
        ) from error


@contextlib.contextmanager
def _hub_errors(source: Source, offline: bool, *, options: bool = False) -> Iterator[None]:
    """Convert exceptions of a hub's library to ours; with `options`, a `TypeError` refers to their names."""
    try:
        yield
    except TrtEngineError:
        raise
    except Exception as error:
        if options and isinstance(error, TypeError):
            raise UsageError(
                f"`{source.text}`: {library_reason(error)}", hint="check the names given with `-O`"
            ) from error
        raise _fetch_error(source, error, offline) from error


def _fetch_error(source: Source, error: Exception, offline: bool) -> TrtEngineError:
    line = library_reason(error)
    text = str(error).lower()
    local = source.path is not None
    if "trust_remote_code" in text:
        return ModelError(
            f"`{source.text}` contains Python code, which is not run by default",
            hint="read it, then `--trust-source`: it runs with your rights",
        )
    if "torchvision::" in str(error):
        return SetupError(
            f"`{source.text}` needs a torchvision that fits torch {torch.__version__}: {line}",
            hint="install the torchvision of this torch",
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
            f"`{source.text}` is not a local file and could not be fetched: {line}",
            hint="check the name and the connection; a folder with config.json and weights needs neither",
        )
    return ModelError(f"`{source.text}` cannot be loaded: {line}", hint="`-vv` shows the whole stack")


def _config_inputs(module: Any, config: Any) -> tuple[list[Example], Axes | None]:
    """Inputs described by the configuration; empty if it does not describe them."""
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


def load_timm(source: Source, options: dict[str, Any], offline: bool, cache: Path | None) -> LoadedModule:
    with _import_errors(source, "timm"), stdout_to_stderr(), _quiet_hub(offline):
        import timm
    name = str(source.name)
    pretrained = bool(options.pop("pretrained", True))
    if name.split(".")[0] not in timm.list_models():
        raise UsageError(f"timm has no model `{name}`", hint=suggest(name.split(".")[0], timm.list_models()))
    extra: dict[str, Any] = {"cache_dir": str(cache)} if cache is not None else {}
    with _quiet_hub(offline), stdout_to_stderr():
        if not pretrained:
            torch.manual_seed(0)
        with no_pickled_code(), _hub_errors(source, offline, options=True):
            module = timm.create_model(name, pretrained=pretrained, exportable=True, **extra, **options)
    size = getattr(module, "default_cfg", {}).get("input_size", (3, 224, 224))
    names, free = parameter_names(module.forward)
    first = names[0] if names else "x"
    notes = [] if pretrained else ["the weights are random (`-O pretrained=false`)"]
    return LoadedModule(
        module, names, [Example(first, (2, *size))], {first: {0: Axis("batch")}}, any_keyword=free, notes=notes,
        versions={"timm": timm.__version__},
    )  # fmt: skip
