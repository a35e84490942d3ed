"""Compatibility of an ONNX Runtime engine with this machine, without loading it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnxruntime as ort

from trt_engine.backends.onnxruntime import hardware, plugin_providers
from trt_engine.backends.onnxruntime.provider_names import short_name
from trt_engine.backends.onnxruntime.providers import PROVIDER_VERSION, TF32_FROM, installed_providers, load_error
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import info, parse_device
from trt_engine.engine import Engine
from trt_engine.records.passport import Compatibility, Passport

_DOCTOR = "trt-engine doctor"


def check_compatibility(
    engine: Engine,
    config: RuntimeConfig,
    *,
    available: Sequence[str] | None = None,
    gpus: Sequence[info.Gpu] | None = None,
) -> Compatibility:
    """loads, penalty, rebuild or refuse, with a reason and a command; file integrity is not checked.

    `available` are the providers (default: those installed, with their libraries tested), `boards` the GPUs (default:
    NVML's).
    """
    found = _check_cpu(engine) or _check_providers(engine, config, available) or _check_gpu(engine, config, gpus)
    last = check_version(engine.passport, str(ort.__version__))
    return last if found is None or (found.status == "penalty" and last.status == "rebuild") else found


def runtime_providers(engine: Engine, config: RuntimeConfig) -> tuple[str, ...]:
    """The requested providers, else those of the build."""
    built = engine.passport.requirements.providers
    if config.providers:
        return tuple(short_name(name) for name in config.providers)
    if config.device is not None:
        kind, _ = parse_device(config.device)
        if kind == "cpu" or not any(name != "cpu" for name in built):
            return (kind,)
    return built


def _check_cpu(engine: Engine) -> Compatibility | None:
    needs, again = engine.passport.requirements, engine.passport.build.command
    missing = [name for name in needs.cpu_features if name not in info.cpu().features]
    if missing:
        return Compatibility(
            "rebuild", f"its layouts need {', '.join(missing)}, which this processor does not have", again
        )
    built, here = engine.passport.build.notes.get("layout"), hardware.blocked_layout()
    if built is not None and built != here:
        return Compatibility("rebuild", f"its weights are laid out as {built}, this processor reads {here}", again)
    return None


def _check_providers(engine: Engine, config: RuntimeConfig, available: Sequence[str] | None) -> Compatibility | None:
    built, wanted = engine.passport.requirements.providers, runtime_providers(engine, config)
    again = engine.passport.build.command
    here = installed_providers() if available is None else [short_name(name) for name in available]
    missing = [name for name in wanted if name not in here]
    if available is None and not missing:
        for name in wanted:
            if (why := load_error(name)) is not None:
                if not config.allow_fallback:
                    return Compatibility("refuse", _missing_provider(name, built, f"does not run: {why}"), _DOCTOR)
                missing.append(name)
    if missing and not config.allow_fallback:
        why = f"onnxruntime {ort.__version__} as installed here does not have"
        if missing[0] in plugin_providers.PLUGINS:
            why = f"is in a package that is not installed here (`{plugin_providers.PLUGINS[missing[0]].packages[0]}`)"
        return Compatibility("refuse", _missing_provider(missing[0], built, why), _DOCTOR)
    if not missing and wanted != built:
        return Compatibility(
            "rebuild",
            f"its graph was optimised for {','.join(built)}, requested is {','.join(wanted)}",
            f"{again} --providers {','.join(wanted)}",
        )
    if missing:
        return Compatibility(
            "penalty", f"the provider `{missing[0]}` is not available; another one runs instead", again
        )
    before = engine.passport.build.notes.get(PROVIDER_VERSION)
    for name in wanted:
        if (
            before is not None
            and name in plugin_providers.PLUGINS
            and before != (now := plugin_providers.versions(name))
        ):
            reason = f"it was built with the provider `{name}` {before}, installed is {now}, which recompiles it"
            return Compatibility("penalty", reason, again)
    return None


def _missing_provider(name: str, built: Sequence[str], reason: str) -> str:
    """The reason for a missing provider: needed by the engine, or requested at load."""
    if name in built:
        return f"it needs the provider `{name}`, which {reason}"
    return f"requested is the provider `{name}`, which {reason}; the engine was built for {','.join(built)}"


def _check_gpu(engine: Engine, config: RuntimeConfig, gpus: Sequence[info.Gpu] | None) -> Compatibility | None:
    """None if the GPU architecture is the same or unknown.

    The graph contains no GPU code and runs on other architectures, where it has not been verified.
    """
    passport = engine.passport
    built = passport.requirements.compute_capability
    here = hardware.gpu_info(config.device or passport.device, gpus)
    if built is None or here is None or here.compute_capability == built:
        return None
    if "tf32" in passport.precision.shares and tuple(_version_tuple(here.compute_capability)) < TF32_FROM:
        reason = f"it computes in TF32, which {here.name} (compute capability {here.compute_capability}) does not have"
        return Compatibility("rebuild", reason, f"{passport.build.command} --precision fp32")
    reason = (
        f"it was built and verified on compute capability {built} ({passport.requirements.gpu}), here is "
        f"{here.compute_capability} ({here.name}): it runs, but was measured on the other GPU"
    )
    return Compatibility("penalty", reason, passport.build.command)


def check_version(passport: Passport, here: str) -> Compatibility:
    """Whether that version of ONNX Runtime runs the engine: loads, penalty or rebuild."""
    built = passport.requirements.version
    again = passport.build.command
    if _version_tuple(here) == _version_tuple(built):
        return Compatibility("loads", f"built with the installed onnxruntime ({here})")
    if _version_tuple(here) < _version_tuple(built):
        return Compatibility("rebuild", f"built with onnxruntime {built}, installed is the older {here}", again)
    if passport.build.notes.get("operators") == "standard":
        return Compatibility(
            "loads", f"built with onnxruntime {built}, installed is {here}; it has only standard operators"
        )
    # internal operators have no compatibility guarantee; errors show at load
    return Compatibility(
        "penalty", f"built with onnxruntime {built}, installed is {here}: optimisations of {here} are missing", again
    )


def _version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
