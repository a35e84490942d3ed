"""GPUs an engine is built for: compute capabilities, and the names of GPUs that have them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches

from trt_engine.errors import UsageError
from trt_engine.trt.versions import find_architecture, parse_capability

RTX_TARGETS = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")
"""Compute capabilities TensorRT-RTX 1.7 builds for. Source: `ComputeCapability` of its bindings, which has no Hopper."""
GPUS: dict[str, str] = {
    "12.1": "GB10, DGX Spark",
    "12.0": "RTX PRO 6000, RTX PRO 5000, RTX PRO 4500, RTX PRO 4000, RTX PRO 4000 SFF, RTX PRO 2000, RTX 5090, RTX 5080, "
    "RTX 5070 Ti, RTX 5070, RTX 5060 Ti, RTX 5060, RTX 5050",
    "11.0": "Jetson T5000, Jetson T4000",
    "10.3": "GB300, B300",
    "10.0": "GB200, B200",
    "9.0": "GH200, H200, H100",
    "8.9": "L4, L40, L40S, RTX 6000 Ada, RTX 5000 Ada, RTX 4500 Ada, RTX 4000 Ada, RTX 4000 SFF Ada, RTX 2000 Ada, "
    "RTX 4090, RTX 4080, RTX 4070 Ti, RTX 4070, RTX 4060 Ti, RTX 4060, RTX 4050",
    "8.7": "Jetson AGX Orin, Jetson Orin NX, Jetson Orin Nano",
    "8.6": "A40, A10, A10G, A16, A2, RTX A6000, RTX A5000, RTX A4000, RTX A3000, RTX A2000, RTX 3090 Ti, RTX 3090, "
    "RTX 3080 Ti, RTX 3080, RTX 3070 Ti, RTX 3070, RTX 3060 Ti, RTX 3060, RTX 3050 Ti, RTX 3050",
    "8.0": "A100, A30",
    "7.5": "T4, Quadro RTX 8000, Quadro RTX 6000, Quadro RTX 5000, Quadro RTX 4000, Quadro RTX 3000, Titan RTX, "
    "RTX 2080 Ti, RTX 2080, RTX 2070, RTX 2060, GTX 1650 Ti",
    "7.0": "V100, Titan V, Quadro GV100",
}
"""GPUs by compute capability. Source: NVIDIA's page of CUDA GPUs (developer.nvidia.com/cuda-gpus); of A10G AWS's."""
_VENDOR_WORDS = re.compile(
    r"nvidia|geforce|tesla|generation|gpu|laptop|mobile|edition|workstation|server|blackwell|super|max|q|d"
    r"|sxm\d?|pcie|nvl|hbm\de?|\d+gb"
)
"""Words of a full name that make no other compute capability: `NVIDIA H100 80GB HBM3`, `RTX 4070 Ti SUPER`."""


def compute_capability(name: str) -> str:
    """`8.9` for `sm89`, `SM_89`, `89`, `8.9`, `RTX 4090` or `NVIDIA GeForce RTX 4090 Laptop GPU`; `UsageError` with the
    nearest GPUs for a name that is not known."""
    text = name.strip()
    found = parse_capability(text)
    if found is None and re.fullmatch(r"\d{2,3}", text):
        found = int(text[:-1]), int(text[-1])
    if found is not None and find_architecture(found) is not None:
        return f"{found[0]}.{found[1]}"
    if (known := _CAPABILITIES.get(_normalize_name(text))) is not None:
        return known
    nearest = [_NAMES[key] for key in get_close_matches(_normalize_name(text), _NAMES, n=3)] if found is None else []
    meant = f"did you mean {' or '.join(f'`{item}`' for item in nearest)}? " if nearest else ""
    raise UsageError(
        f"unknown GPU `{name}`",
        hint=f"{meant}expected a compute capability ({', '.join(map(sm_label, RTX_TARGETS))}) or a name, as `RTX 4090`",
    )


def sm_label(target: str) -> str:
    """`sm89` for `8.9`: the compute capability as part of a file's name."""
    return f"sm{target.replace('.', '')}"


def rtx_targets(names: Sequence[str]) -> tuple[str, ...]:
    """The compute capabilities that `names` mean, ascending, each once; `UsageError` for a GPU without TensorRT-RTX."""
    found = set()
    for name in names:
        target = compute_capability(name)
        if target not in RTX_TARGETS:
            row = find_architecture(parse_capability(target) or (0, 0))
            kind = f" ({row.name})" if row is not None else ""
            raise UsageError(
                f"`{name}` is compute capability {target}{kind}, and TensorRT-RTX builds for {', '.join(RTX_TARGETS)}",
                hint="the last TensorRT for Volta is 10.4"
                if target == "7.0"
                else "`--backend tensorrt` builds on a machine with that GPU",
            )
        found.add(target)
    return tuple(sorted(found, key=RTX_TARGETS.index))


def _normalize_name(name: str) -> str:
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "".join(word for word in words if not _VENDOR_WORDS.fullmatch(word))


_NAMES = {_normalize_name(name): name for names in GPUS.values() for name in names.split(", ")}
_CAPABILITIES = {_normalize_name(name): target for target, names in GPUS.items() for name in names.split(", ")}
