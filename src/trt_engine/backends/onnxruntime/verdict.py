"""Whether an engine of ONNX Runtime can be used here, said without loading it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnxruntime as ort

from trt_engine.backends.onnxruntime import hardware
from trt_engine.backends.onnxruntime.providers import TF32_FROM, broken, short_name
from trt_engine.config import RuntimeConfig
from trt_engine.device import info, parse_device
from trt_engine.engine import Engine, Verdict

__all__ = ["providers_for", "verdict"]

_DOCTOR = "trt-engine doctor"


def verdict(
    engine: Engine,
    config: RuntimeConfig,
    *,
    available: Sequence[str] | None = None,
    boards: Sequence[info.Gpu] | None = None,
) -> Verdict:
    """loads, penalty, rebuild or refuse, with one reason and one command; the files are taken to be whole.

    `available` are the providers that are here (default: those of the library, their own libraries tried), `boards` the
    GPUs (default: NVML's).
    """
    found = _processor(engine) or _providers(engine, config, available) or _gpu(engine, config, boards)
    last = _version(engine)
    return last if found is None or (found.verdict == "penalty" and last.verdict == "rebuild") else found


def providers_for(engine: Engine, config: RuntimeConfig) -> tuple[str, ...]:
    """The providers to load with: those asked for, else those of the build."""
    built = engine.passport.needs.providers
    if config.providers:
        return tuple(short_name(name) for name in config.providers)
    if config.device is not None:
        kind, _ = parse_device(config.device)
        if kind == "cpu" or not any(name != "cpu" for name in built):
            return (kind,)
    return built


def _processor(engine: Engine) -> Verdict | None:
    needs, again = engine.passport.needs, engine.passport.build.command
    missing = [name for name in needs.cpu_features if name not in info.cpu().features]
    if missing:
        return Verdict("rebuild", f"its layouts need {', '.join(missing)}, which this processor does not have", again)
    built, here = engine.passport.build.notes.get("layout"), hardware.blocked_layout()
    if built is not None and built != here:
        return Verdict("rebuild", f"its weights are laid out as {built}, this processor reads {here}", again)
    return None


def _providers(engine: Engine, config: RuntimeConfig, available: Sequence[str] | None) -> Verdict | None:
    built, wanted = engine.passport.needs.providers, providers_for(engine, config)
    again = engine.passport.build.command
    here = [short_name(name) for name in (ort.get_available_providers() if available is None else available)]
    missing = [name for name in wanted if name not in here]
    if available is None and not missing:
        for name in wanted:
            if (why := broken(name)) is not None:
                if not config.allow_fallback:
                    return Verdict("refuse", _lacking(name, built, f"does not run: {why}"), _DOCTOR)
                missing.append(name)
    if missing and not config.allow_fallback:
        why = f"onnxruntime {ort.__version__} as installed here does not have"
        return Verdict("refuse", _lacking(missing[0], built, why), _DOCTOR)
    if not missing and wanted != built:
        return Verdict(
            "rebuild",
            f"its graph was optimised for {','.join(built)}, asked for is {','.join(wanted)}",
            f"{again} --providers {','.join(wanted)}",
        )
    if missing:
        return Verdict("penalty", f"the provider `{missing[0]}` is not here; another runs in its place", again)
    return None


def _lacking(name: str, built: Sequence[str], why: str) -> str:
    """Who wants the provider that is not here: the engine, or the one who loads it."""
    if name in built:
        return f"it needs the provider `{name}`, which {why}"
    return f"asked for is the provider `{name}`, which {why}; the engine was built for {','.join(built)}"


def _gpu(engine: Engine, config: RuntimeConfig, boards: Sequence[info.Gpu] | None) -> Verdict | None:
    """None where the GPU is of the same architecture, or nobody can tell.

    The graph holds no code of a GPU: on another architecture it runs, and what was proved was proved elsewhere.
    """
    passport = engine.passport
    built = passport.needs.compute_capability
    here = hardware.board(config.device or passport.device, boards)
    if built is None or here is None or here.compute_capability == built:
        return None
    if "tf32" in passport.precision.found and tuple(_numbers(here.compute_capability)) < TF32_FROM:
        reason = f"it computes in TF32, which {here.name} (compute capability {here.compute_capability}) does not have"
        return Verdict("rebuild", reason, f"{passport.build.command} --precision fp32")
    reason = (
        f"it was built and proved on compute capability {built} ({passport.needs.gpu}), here is "
        f"{here.compute_capability} ({here.name}): its graph runs, its figures are of the other GPU"
    )
    return Verdict("penalty", reason, passport.build.command)


def _version(engine: Engine) -> Verdict:
    passport = engine.passport
    built, here = passport.needs.version, str(ort.__version__)
    again = passport.build.command
    if _numbers(here) == _numbers(built):
        return Verdict("loads", f"built with the onnxruntime that is here ({here})")
    if _numbers(here) < _numbers(built):
        return Verdict("rebuild", f"built with onnxruntime {built}, here is the older {here}", again)
    if passport.build.notes.get("operators") == "standard":
        return Verdict(
            "loads", f"built with onnxruntime {built}, here is {here}; its operators are all of the standard"
        )
    # inner operators have no promise across versions; they have been kept, and loading tells
    return Verdict(
        "penalty", f"built with onnxruntime {built}, here is {here}: it lacks what {here} would optimise", again
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
