"""The verbs with their one-line help, and the text of `trt-engine --help`."""

from __future__ import annotations

PROG = "trt-engine"


# verb -> (module under trt_engine.cli, one line of help); `--help` is made from this table alone
VERBS: dict[str, tuple[str, str]] = {
    "size": ("size", "how many video streams a model sustains: the main job"),
    "lint": ("lint", "problems of a model, found before building it"),
    "inspect": ("inspect", "describe a model, an engine, a TensorRT plan or a run folder"),
    "convert": ("convert", "ONNX from PyTorch, TensorFlow or a hub, compared with it"),
    "build": ("build", "an engine and its passport from an ONNX model"),
    "validate": ("validate", "check an engine built for another GPU, on that GPU"),
    "bundle": ("bundle", "all engines of a model of several components, in one folder"),
    "bench": ("bench", "latency and throughput under a named protocol"),
    "loadtest": ("loadtest", "latency of a server or engine under load, and its highest rate"),
    "profile": ("profile", "time breakdown, bottleneck, and the next experiment"),
    "compare": ("compare", "speed difference of engines, with an interval"),
    "diff": ("diff", "compare engines: fusions, kernels, types, reformats"),
    "upgrade-check": ("upgrade_check", "engines of two library versions: one page, one verdict"),
    "infer": ("infer", "one inference from .npy or .npz files, or from an image"),
    "evaluate": ("evaluate", "AP or top-1 of an engine on a dataset, beside a baseline"),
    "batch": ("batch", "an engine over files, Parquet or WebDataset, resumable"),
    "serve": ("serve", "engines over HTTP and gRPC, as inference clients expect"),
    "deploy": ("deploy", "engines for Triton, DeepStream or Ray: their configurations"),
    "run": ("run", "models x precisions x backends x batches, from one YAML"),
    "cast": ("cast", "a model in FP16 or BF16, its types consistent everywhere"),
    "quantize": ("quantize", "a model in INT8, FP8, INT4, NVFP4 or MXFP8, written as Q/DQ"),
    "search": ("search", "layers that can be INT8 or FP8 within an accuracy budget"),
    "ranges": ("ranges", "tensors outside the range of FP16, BF16 or FP8"),
    "migrate": ("migrate", "find what TensorRT 10 and 11 removed, in scripts and sources"),
    "report": ("report", "text, markdown or HTML from the records of a run"),
    "pack": ("pack", "one archive of a run, read back with the core package alone"),
    "doctor": ("doctor", "check the installation, with fixes"),
    "cache": ("cache", "the store of engines: list, prune"),
    "example": ("example", "a small detector and an image to try every verb with"),
    "docs": ("docs", "the pages of documentation: list them, print one"),
    "completion": ("completion", "shell completion for bash, zsh or fish"),
}
_HELP = """\
Usage: trt-engine [OPTIONS] VERB ...

  Build, verify, measure and size engines from ONNX files.

  The main job:   trt-engine size model.onnx
  Any verb:       trt-engine VERB --help

Options:
  --version   Versions and exit.
  -h, --help  Show this message and exit.

Verbs:
{verbs}

  Exit codes: 0 ok, 1 unexpected, 2 usage, 3 environment, 4 model, 5 build,
  6 precision, 7 accuracy, 8 speed, 9 unstable, 10 engine, 11 memory,
  12 capacity, 13 overloaded, 14 deadline, 130 interrupted."""


def help_text() -> str:
    """The text of `trt-engine --help`."""
    widest = max(map(len, VERBS))
    return _HELP.format(verbs="\n".join(f"  {name:<{widest}}  {line}" for name, (_, line) in VERBS.items()))
