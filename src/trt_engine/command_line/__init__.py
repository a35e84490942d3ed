"""What commands share: options from settings, output, signals."""

PROG = "trt-engine"
COMPLETE = "_TRT_ENGINE_COMPLETE"
"""Environment variable set by the shell's completion function."""
