"""A GPU build for a command that needs one and names neither a backend nor a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click

_NAMED = ("--backend", "-b", "--providers", "--gpus", "--each-gpu", "--help", "-h")
_ON_CPU = ("fp32", "int8", "int4")
"""Precisions that a CPU computes in as well."""
_PLANS = (".engine", ".plan", ".trt")
_OUT = ("-o", "--out", "--saveEngine", "--save-engine")


def add_gpu(verb: str, own: Mapping[str, click.Parameter], args: Sequence[str]) -> tuple[list[str], str | None]:
    """The arguments with the flags of a GPU build, and a note; as they are where none is requested or possible.

    Requested is a build for a GPU by an option in trtexec's spelling, by a precision that a CPU has no kernels for, and by
    the name of a TensorRT plan for the engine. A backend, providers and `--device cpu` are choices of their own.
    """
    if not {"--backend", "--device"} <= own.keys() or any(_is(arg, _NAMED) for arg in args):
        return list(args), None
    reason, precision = _request(verb, own, args)
    if reason is None or _opens_engine(verb, args):
        return list(args), None
    device = next(iter(_values(args, ("--device",))), None)
    if device is not None and (device.startswith("cpu") or reason.startswith(("--precision", "-o"))):
        return list(args), None
    from trt_engine.backend import gpu_backend, gpu_flags

    suffix = next((Path(value).suffix for value in _values(args, _OUT)), "")
    suffix = ".engine" if reason.startswith("-o") else suffix if suffix in (".onnx", ".pt2") else ""
    found = gpu_backend(precision, suffix=suffix)
    if found is None:
        return list(args), None
    flags = gpu_flags(found) if device is None else f"--backend {found.name}"
    what = "--device cpu" if device is None else "--backend"
    return [*flags.split(), *args], f"`{reason}` is for a GPU: `{flags}` is added; `{what}` chooses otherwise"


def _request(verb: str, own: Mapping[str, click.Parameter], args: Sequence[str]) -> tuple[str | None, str | None]:
    """What of the arguments requests a GPU, and the precision that is requested."""
    from trt_engine.command_line.trtexec_options import find_option

    precision = next(iter(_values(args, ("--precision",))), None)
    reason = f"--precision {precision}" if precision not in (None, *_ON_CPU) else None
    for arg in args:
        name = arg.partition("=")[0]
        option = find_option(name) if name.startswith("-") and name not in own else None
        if option is None or option.measuring_only:
            continue
        meaning = option.for_verb(verb)
        reason = reason or name
        if getattr(meaning, "flag", None) == "--precision":
            reason, precision = name, getattr(meaning, "value", None)
    if reason is None and verb == "build":
        reason = next((f"-o {value}" for value in _values(args, ("-o", "--out")) if Path(value).suffix in _PLANS), None)
    return reason, precision


def _is(arg: str, names: Sequence[str]) -> bool:
    return arg.partition("=")[0] in names or (arg.startswith("-b") and not arg.startswith("--"))


def _values(args: Sequence[str], names: Sequence[str]) -> list[str]:
    """The values of these options: `--device=0`, `--device 0`."""
    found = []
    for index, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name in names:
            found.append(value if equals else next(iter(args[index + 1 :]), ""))
    return found


def _opens_engine(verb: str, args: Sequence[str]) -> bool:
    """Whether the file of the command is an engine, which has a backend."""
    from trt_engine.command_line.trtexec_options import first_file
    from trt_engine.engine import is_onnx_model

    path = first_file(args) if verb not in ("build", "bundle") else None
    return path is not None and not is_onnx_model(path)
