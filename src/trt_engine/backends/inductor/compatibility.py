"""Whether a package loads here, without loading it or PyTorch: its PyTorch release, instruction set, GPU."""

from __future__ import annotations

import re
from importlib import metadata

from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import info, parse_device
from trt_engine.engine import Engine
from trt_engine.records.passport import Compatibility

ISA_FEATURES = {
    "AVX2": ("avx2", "fma"),
    "AVX512": ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "AVX512_VNNI": ("avx512_vnni",),
    "AMX_TILE": ("amx_tile", "amx_int8", "amx_bf16"),
    "ASIMD": ("asimd",),
}
"""CPU features by the names a package states in `AOTI_CPU_ISA`."""


def required_features(isa: str) -> tuple[str, ...]:
    """The CPU features of `AVX512 AVX512_VNNI`, in one order."""
    words = re.findall(r"[A-Za-z0-9_]+", isa.upper())
    return tuple(sorted({feature for word in words for feature in ISA_FEATURES.get(word, ())}))


def torch_version() -> str:
    """The installed version of PyTorch, as `2.13.0+cpu`; empty without it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def missing_cuda() -> str | None:
    """Why PyTorch cannot use a GPU, by its version: a build for the CPU; None for one with CUDA."""
    version = torch_version()
    return f"PyTorch {version} is built for the CPU" if version.endswith("+cpu") else None


def check_compatibility(engine: Engine, config: RuntimeConfig) -> Compatibility:
    """loads, rebuild or refuse, with a reason and a command; file integrity is not checked."""
    passport, needs = engine.passport, engine.passport.requirements
    again = passport.build.command
    built, here = needs.version, torch_version()
    if built.partition("+")[0] != here.partition("+")[0]:
        return Compatibility("rebuild", f"it was built with PyTorch {built}, installed is {here or 'none'}", again)
    kind, number = parse_device(config.device or passport.device)
    made_for = parse_device(passport.device)[0]
    if kind != made_for:
        reason = f"its code is for `{made_for}`, requested is `{config.device}`"
        return Compatibility("rebuild", reason, f"{again} --device {config.device}")
    if missing := [name for name in needs.cpu_features if name not in info.cpu().features]:
        return Compatibility(
            "rebuild", f"its code needs {', '.join(missing)}, which this processor does not have", again
        )
    if kind == "cuda":
        board = next((gpu for gpu in info.gpus() if gpu.index == number), None)
        if board is None:
            reason = f"it needs a GPU of compute capability {needs.compute_capability}, and `cuda:{number}` is not here"
            return Compatibility("refuse", reason, "trt-engine doctor")
        if board.compute_capability != needs.compute_capability:
            reason = (
                f"its kernels are for compute capability {needs.compute_capability} ({needs.gpu}), "
                f"`cuda:{number}` has {board.compute_capability} ({board.name})"
            )
            return Compatibility("rebuild", reason, again)
    return Compatibility("loads", f"built with the installed PyTorch release ({here}) for this {kind}")
