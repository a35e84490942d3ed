"""What makers promise of their GPUs: dense rates, for where nothing was measured."""

from __future__ import annotations

from trt_engine.records import Ceiling

__all__ = ["promised"]

_SOURCE = "{} data sheet by NVIDIA, dense (half of what it states with sparsity)"

# name as NVML has it -> name of the sheet, TFLOP/s (TOP/s of int8) by number type, memory GB/s
_SHEETS: dict[str, tuple[str, dict[str, float], float]] = {
    "NVIDIA H200": (
        "H200 Tensor Core GPU",
        {"fp32": 67, "tf32": 494.5, "fp16": 989.5, "bf16": 989.5, "int8": 1979, "fp8": 1979},
        4800,
    ),
}


def promised(name: str) -> tuple[Ceiling, ...]:
    """The ceilings in the data sheet of the GPU of that name; none for a GPU whose sheet is not here."""
    if (sheet := _SHEETS.get(name)) is None:
        return ()
    title, rates, memory = sheet
    source = _SOURCE.format(title)
    return (
        *(
            Ceiling(f"{dtype}_matrix", float(rate), "TOP/s" if dtype == "int8" else "TFLOP/s", "datasheet", source)
            for dtype, rate in rates.items()
        ),
        Ceiling("memory_copy", float(memory), "GB/s", "datasheet", f"{title} data sheet by NVIDIA, memory bandwidth"),
    )
