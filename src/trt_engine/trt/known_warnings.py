"""Known warnings of TensorRT: their meaning, and whether to show them.

Texts are those of TensorRT 8.6 to 11.4 and TensorRT-RTX 1.7.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownWarning:
    """A warning whose meaning is known."""

    pattern: re.Pattern[str]
    name: str
    hint: str
    """Its meaning and what to do, as a hint."""
    silent: bool = False
    """True for the raw log alone: not caused by the user, or reported elsewhere."""


_KNOWN_WARNINGS = tuple(
    KnownWarning(re.compile(pattern), name, hint, silent)
    for name, silent, pattern, hint in (
        (
            "int64_binding", True, r" has Int64 binding\.?$",
            "nothing to do: 64-bit integers are given to the engine as they are",
        ),
        (
            "other_logger", True,
            r"differs from one already (?:provided|registered) for an existing builder, runtime, or refitter",
            "nothing to do: all loggers of this process write to one log",
        ),
        (
            "global_log", True, r"Thread context has not been set! Using global log stream",
            "nothing to do: the message is about the log itself",
        ),
        (
            "scales_in_fp32", True, r"Converting conv activation scales to fp32",
            "nothing to do: the scales of an INT8 convolution between BF16 tensors are computed in FP32",
        ),
        (
            "timing_cache_refused", True, r"The timing cache will not be used|Failed to deserialize timing cache",
            "the timing cache is damaged, or of another version or GPU: every tactic is timed again and the file replaced",
        ),
        (
            "setting_unsupported", False, r"\w\(\) is unsupported in TensorRT-RTX",
            "TensorRT-RTX does not have this setting and ignores it: leave the option out",
        ),
        (
            "constant_rounded", False, r"payload type requires precision-lose casting",
            "a constant of the graph does not fit its 16-bit type and is rounded: where accuracy suffers, keep that node in "
            "FP32 (`trt-engine cast --exclude-node`) or cast to bf16",
        ),
    )
)  # fmt: skip


def find_known_warning(text: str) -> KnownWarning | None:
    """The known meaning of a warning, or None."""
    return next((known for known in _KNOWN_WARNINGS if known.pattern.search(text)), None)
