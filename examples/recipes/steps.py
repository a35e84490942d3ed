"""What every recipe does with its network by printed commands: convert it, lint it, build it, size it on the CPU."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

QUICK = ("--duration", "0.2s", "--warmup", "0s", "--max-batch", "4")
USUAL = ("--duration", "2s", "--max-batch", "8")


@dataclass(frozen=True)
class Recipe:
    """One network of a recipe, and the options its commands take."""

    factory: str
    inputs: tuple[str, ...]
    dynamic: tuple[str, ...]
    options: tuple[str, ...] = ()
    profile: tuple[str, ...] = ("--batch", "1:4:16")
    """Of `build`: every size that is open."""
    shapes: tuple[str, ...] = ()
    """Of `size`: the open sizes beside the batch."""


def main(script: str, usual: Recipe, small: Recipe) -> int:
    """The four steps of a recipe of one network."""

    def steps(out: Path, quick: bool) -> None:
        recipe = small if quick else usual
        model = out / f"{Path(script).stem}.onnx"
        convert(script, recipe, model)
        run("lint", model)
        run("build", model, *recipe.profile, "-o", out / f"{model.stem}.engine.onnx")
        size(model, recipe, quick)

    return guided(script, steps)


def guided(script: str, steps: Callable[[Path, bool], None]) -> int:
    """`steps` with the arguments of every recipe; the exit code is that of the first command that failed."""
    parser = argparse.ArgumentParser(description=f"makes, converts, lints, builds and sizes {Path(script).stem}")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="where everything is written")
    parser.add_argument("--small", action="store_true", help="a network of seconds, to see the steps")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        steps(args.out, args.small)
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


def convert(script: str, recipe: Recipe, model: Path) -> None:
    """The network as `model`; what was compared stands in `MODEL.convert.json` beside it."""
    run(*conversion(script, recipe), "-o", model, "--overwrite", "--json", into=model.with_suffix(".convert.json"))


def conversion(script: str, recipe: Recipe) -> list[str]:
    """The `convert` command of a network, without where it goes."""
    words = ["convert", f"{_near(script)}:{recipe.factory}"]
    for option, values in (("-O", recipe.options), ("--input", recipe.inputs), ("--dynamic", recipe.dynamic)):
        for value in values:
            words += [option, value]
    return words


def size(model: Path, recipe: Recipe, quick: bool) -> None:
    """How many items a second the CPU sustains, in the folder `size` beside the model."""
    run("size", model, *recipe.shapes, *(QUICK if quick else USUAL), "-o", model.parent / "size", "--overwrite")


def run(*arguments: str | Path, into: Path | None = None) -> None:
    """One command of trt-engine, printed as one would type it; its stdout in the file `into`."""
    words = [str(item) for item in arguments]
    print(f"$ trt-engine {shlex.join(words)}" + (f" > {shlex.quote(str(into))}" if into else ""), flush=True)
    command: Sequence[str] = [sys.executable, "-m", "trt_engine", *words]
    if into is None:
        subprocess.run(command, check=True)
        return
    with into.open("w") as file:
        subprocess.run(command, check=True, stdout=file)


def _near(script: str) -> Path:
    whole = Path(script).resolve()
    return whole.relative_to(Path.cwd()) if whole.is_relative_to(Path.cwd()) else whole
