"""The verbs by task, and the text of `trt-engine --help`."""

from __future__ import annotations

VERB_GROUPS = {
    "Get a model, find its problems": {
        "convert": "ONNX from PyTorch, TensorFlow or a hub, compared with it",
        "lint": "problems of a model, found before building it",
        "inspect": "describe a model, an engine, a TensorRT plan or a run folder",
        "example": "a small detector and an image to try every verb with",
    },
    "Build engines": {
        "build": "an engine and its passport from an ONNX model",
        "validate": "check an engine built for another GPU, on that GPU",
        "bundle": "all engines of a model of several components, in one folder",
        "cache": "the store of engines: list, prune",
    },
    "Change the precision": {
        "cast": "a model in FP16 or BF16, its types consistent everywhere",
        "quantize": "a model in INT8, FP8, INT4, NVFP4 or MXFP8, written as Q/DQ",
        "ranges": "tensors outside the range of FP16, BF16 or FP8",
        "search": "layers that can be INT8 or FP8 within an accuracy budget",
    },
    "Measure": {
        "bench": "latency and throughput under a named protocol",
        "profile": "time breakdown, bottleneck, and the next experiment",
        "compare": "speed difference of engines, with an interval",
        "diff": "compare engines: fusions, kernels, types, reformats",
        "evaluate": "AP or top-1 of an engine on a dataset, beside a baseline",
        "run": "models x precisions x backends x batches, from one YAML",
    },
    "Size and serve": {
        "size": "how many video streams a model sustains: the main job",
        "serve": "engines over HTTP and gRPC, as inference clients expect",
        "loadtest": "latency of a server or engine under load, and its highest rate",
        "deploy": "engines for Triton, DeepStream or Ray: their configurations",
        "infer": "one inference from .npy or .npz files, or from an image",
        "batch": "an engine over files, Parquet or WebDataset, resumable",
    },
    "Move to TensorRT 11, to another machine": {
        "migrate": "find what TensorRT 10 and 11 removed, in scripts and sources",
        "upgrade-check": "engines of two library versions: one page, one verdict",
        "doctor": "check the installation, with fixes",
    },
    "Results and help": {
        "report": "text, markdown or HTML from the records of a run",
        "pack": "one archive of a run, read back with the core package alone",
        "docs": "the pages of documentation: list them, print one",
        "completion": "shell completion for bash, zsh or fish",
    },
}
"""The verbs by task, each with its one-line help."""
VERBS = {name: line for verbs in VERB_GROUPS.values() for name, line in verbs.items()}
_HELP = """\
Usage: trt-engine [OPTIONS] VERB ...

  Build, verify, measure and size engines from ONNX files.

  The main job:   trt-engine size model.onnx
  Any verb:       trt-engine VERB --help

Options:
  --version   Versions and exit.
  -h, --help  Show this message and exit.

{verbs}

  Exit codes: 0 ok, 1 unexpected, 2 usage, 3 environment, 4 model, 5 build,
  6 precision, 7 accuracy, 8 speed, 9 unstable, 10 engine, 11 memory,
  12 capacity, 13 overloaded, 14 deadline, 130 interrupted."""


def command_module(verb: str) -> str:
    """The module whose `command` is the verb's."""
    return f"trt_engine.verbs.{verb.replace('-', '_')}.command"


def help_text() -> str:
    """The text of `trt-engine --help`."""
    widest = max(map(len, VERBS))
    groups = [
        "\n".join([f"{task}:", *(f"  {name:<{widest}}  {line}" for name, line in verbs.items())])
        for task, verbs in VERB_GROUPS.items()
    ]
    return _HELP.format(verbs="\n\n".join(groups))
