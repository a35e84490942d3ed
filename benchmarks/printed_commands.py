"""Every command that a verb prints, run as it is printed, in a folder whose name needs quotes.

    python benchmarks/printed_commands.py                       all verbs on 15 models, an hour; prints what is wrong
    python benchmarks/printed_commands.py --only 'cast .*--inputs'
    python benchmarks/printed_commands.py --sample 12 --seed 32

A command after `next:` has to succeed and to keep the shapes, inputs and target that were given; others must not be refused
as usage or as a model, nor end in an unexpected error. Placeholders in capitals are filled where the situation has one; what
does not end by itself (`serve`) is not run. The exit code is 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import onnx_models as models  # noqa: E402
from trt_engine.cli import main  # noqa: E402
from trt_engine.cli.verbs_table import VERBS  # noqa: E402
from trt_engine.config.settings import quote_name  # noqa: E402

_SHAPES: dict[str, dict[str, list[int | str]]] = {
    "fixed": {"images": [1, 3, 32, 32]}, "batch": {"images": ["N", 3, 32, 32]}, "open": {"images": ["N", 3, "h", "w"]},
    "odd names": {"in put:0": ["N", 3, "h", 32]}, "flat": {"x": [64]}, "rows": {"x": ["N", "frames", 64]},
    "text": {"ids": ["N", "seq"]}, "switch": {"x": ["N", "frames", 64], "rate": []},
    "state": {"x": ["N", "frames", 64], "state": [1, "N", 64]}, "two": {"x": ["N", 64], "y": ["M", 64]},
    "large": {"images": ["N", 3, "h", "w"]}, "old": {"images": ["N", 3, 32, 32]}, "half": {"images": [1, 3, 32, 32]},
    "sorted": {"x": ["N", 64]}, "apart": {"x": ["N", "frames", 64]},
}  # fmt: skip
"""Model -> its inputs. `large` overflows FP16, `apart` has its weights in another file."""
MODELS = tuple(_SHAPES)
_SIZES = {"N": 2, "M": 2, "h": 48, "w": 40, "frames": 20, "seq": 12}


def make(name: str) -> dict[str, str]:
    """The model `NAME.onnx` with data in `NAME data` and `NAME in.npz`; `{..}` of a situation -> what stands there."""
    rng, ports = np.random.default_rng(0), _SHAPES[name]
    kind = np.float16 if name == "half" else np.float32

    def feeds() -> dict[str, np.ndarray]:
        found = {}
        for port, shape in ports.items():
            sizes = [_SIZES.get(str(size), size) for size in shape]
            values = rng.integers(0, 50, sizes) if port == "ids" else rng.random(sizes).astype(kind)
            found[port] = np.array(16000) if port == "rate" else values
        return found

    sizes = {"w1": (16, 3, 3, 3), "w2": (10, 16, 3, 3), "v1": (64, 64), "v2": (64, 8), "table": (50, 64)}
    weights = {key: rng.normal(0, 0.2, shape).astype(kind) for key, shape in sizes.items()}
    weights |= {"big": np.float32(9e6), "small": np.float32(1 / 9e6), "k": np.array([3])}
    first, node = next(iter(ports)), models.node
    if len(ports[first]) == 4:
        nodes = [models.onnx.helper.make_node("Conv", [first, "w1"], ["a"], pads=[1] * 4), node("Relu", "a", "b"),
                 node("Conv", "b w2", "c"), node("GlobalAveragePool", "c", "p"), node("Flatten", "p", "out")]  # fmt: skip
        if name == "large":
            nodes[1:2] = [node("Mul", "a big", "l"), node("Relu", "l", "m"), node("Mul", "m small", "b")]
    else:
        nodes = [node("Gather", "table ids", "g")] if name == "text" else []
        nodes += [
            node("MatMul", "g v1" if nodes else "x v1", "m"),
            node("Relu", "m", "r"),
            node("MatMul", "r v2", "out"),
        ]
    if name == "switch":
        nodes += [node("Cast", "rate", "s", to=1), node("Div", "m s", "out2")]
    extra = {"switch": ["out2"], "state": ["after"], "two": ["z"], "sorted": ["v", "i"]}.get(name, [])
    nodes += {"state": [node("Tanh", "state", "after")], "two": [node("MatMul", "y v1", "z")],
              "sorted": [node("TopK", "out k", "v i")]}.get(name, [])  # fmt: skip
    used = {value for item in nodes for value in item.input}
    elem = models.HALF if name == "half" else models.FLOAT
    whole = {"ids": 7, "rate": 7, "i": 7}
    models.save(
        Path(f"{name}.onnx"), nodes, {port: (whole.get(port, elem), shape) for port, shape in ports.items()},
        {out: (whole.get(out, elem), None) for out in ["out", *extra]},
        {key: value for key, value in weights.items() if key in used}, opset=11 if name == "old" else 17,
        location=f"{name}.weights" if name == "apart" else None,
    )  # fmt: skip
    Path(f"{name} data").mkdir()
    for at in range(3):
        np.savez(f"{name} data/{at}.npz", **feeds())
    np.savez(f"{name} in.npz", **feeds())
    open_ports = [port for port, shape in ports.items() if any(isinstance(size, str) for size in shape)]
    told = {port: array.shape for port, array in feeds().items() if port in open_ports}
    shapes = ",".join(f"{quote_name(port)}:{'x'.join(map(str, shape))}" for port, shape in told.items())
    return {"MODEL": f"{name}.onnx", "DATA": f"{name} data", "ENGINE": f"{name}.engine.onnx", "SHAPES": shapes}


_VERBS = """
build -o N.engine.onnx
build --precision int8 --calib-data DATA -o N.engine.onnx
build --precision fp16 -o N.engine.onnx
build --precision bf16 -o N.engine.onnx
build -O intra_op_threads=1 --no-fuse -o N.engine.onnx
build -b tensorrt -o N.plan
cast --to fp16 -o N.h.onnx
cast --to bf16 -o N.b.onnx --calib-data DATA
cast --to fp16 --calib-data DATA --exclude-type Relu -o N.h.onnx
quantize --to int8 --target onnxruntime-cpu --calib-data DATA -o N.q.onnx
quantize --to int8 --target onnxruntime-cpu --dynamic -o N.q.onnx
quantize --to nvfp4 --calib-data DATA -o N.4.onnx
quantize --to int8 -o N.q.onnx
quantize --to int4 -o N.w.onnx --exclude-node none
ranges --calib-data DATA
lint
lint --target tensorrt
inspect
inspect --run
convert -o N.c.onnx
search --to int8
bench --duration 50ms --outdir N.bench
profile --duration 50ms -o N.profile
profile --duration 50ms -o N.profile -O intra_op_threads=1
bundle -o N.bundle
size --dry-run
infer
evaluate
validate
migrate
report
pack
upgrade-check
"""
_ENGINE = """
bench --duration 50ms
bench --duration 50ms --batch 999
bench --precision int8 --duration 50ms
infer
infer --input IN
infer --input IN -o N.out.npz
inspect
inspect --run
build -o N.x
cast --to fp16
quantize --to int8
validate
deploy triton -o N.triton
deploy ray -o N.ray
deploy
compare MODEL
diff MODEL
evaluate
convert
batch DATA -o N.batch
upgrade-check
report
size --dry-run
"""
_TAKE = frozenset("build cast quantize lint bench profile".split())
"""Verbs that take shapes and inputs of a model."""
_ENDLESS = frozenset("serve loadtest docs doctor".split())
_PLACEHOLDER = re.compile(r"[A-Z|-]{2,}|\[.*|--help|(?i:model)\.onnx")


def situations(name: str, given: dict[str, str]) -> Iterator[list[str]]:
    """The commands of all verbs on the model, with and without its sizes and inputs, then those on its engine."""
    sizes = [[], ["--shapes", given["SHAPES"]]] if given["SHAPES"] else [[]]
    options = [*sizes, ["--inputs", f"{name} in.npz"]]
    words = {"DATA": given["DATA"], "MODEL": given["MODEL"], "IN": f"{name} in.npz", "none": "no such"}
    for subject, table in ((given["MODEL"], _VERBS), (f"{name}.engine.onnx", _ENGINE)):
        for line in table.strip().splitlines():
            verb, *rest = (re.sub(r"^N\.", f"{name}.", words.get(word, word)) for word in line.split())
            target = [rest.pop(0)] if verb == "deploy" and rest else []
            overwrite = ["--overwrite"] if {"-o", "--outdir"} & set(rest) else []
            for more in options if subject == given["MODEL"] and verb in _TAKE else [[]]:
                yield [verb, *target, subject, *rest, *overwrite, *more]


def run(words: list[str]) -> tuple[int, str]:
    """Exit code and all that was printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main.run(words)
    return code, out.getvalue()


def printed(text: str) -> Iterator[tuple[str, bool]]:
    """The commands in a text, and whether each stands after `next:`."""
    verbs = "|".join(VERBS)
    for line in text.splitlines():
        yield from ((found, False) for found in re.findall(rf"`(trt-engine (?:{verbs}) [^`]+)`", line))
        if found := re.fullmatch(rf"\s*(?:(\w[\w ]*):)?\s*(trt-engine (?:{verbs}) [^`]+)", line):
            yield found[2].rstrip(), found[1] == "next"


def faults(words: list[str], given: dict[str, str]) -> list[str]:
    """What is wrong with the situation itself and with what it prints to type."""
    code, text = run(words)
    found = [f"exit {code}: {text[-300:]}"] if code == 1 or code < 0 or "Traceback" in text else []
    for command, following in printed(text):
        try:
            typed = shlex.split(command)[1:]
        except ValueError:
            found.append(f"not to be pasted: {command}")
            continue
        keeps = ("--shapes", "--inputs", "--target") if typed[0] in ("quantize", "search") else ("--shapes", "--inputs")
        lost = [word for word in keeps if word in words and word not in typed and "--profile" not in typed]
        if following and lost and typed[0] in _TAKE and typed[1].endswith(".onnx") and ".engine." not in typed[1]:
            found.append(f"loses {lost}: {command}")
        typed = [given.get(word, word) for word in typed]
        if typed[0] in _ENDLESS or any(
            re.fullmatch(r"[A-Z|-]{2,}|\[.*|--help|(?i:model)\.onnx", word) for word in typed
        ):
            continue
        code, answer = run([*typed, *(["--duration", "50ms"] if typed[0] in ("bench", "profile") else [])])
        if (code in (1, 2, 4) or code < 0 or (following and code != 3)) and code != 0 and "` exists" not in answer:
            reason = " ".join(line for line in answer.splitlines() if line.startswith(("error", "hint")))
            found.append(f"exit {code}: {command}: {reason}")
    return found


def main_() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a pattern of situations")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--sample", type=int, help="so many of each model, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    bad = tried = 0
    with tempfile.TemporaryDirectory() as folder:
        (away := Path(folder) / "it's my models").mkdir()
        os.environ |= {"TRT_ENGINE_CACHE": str(away / "cache"), "COLUMNS": "4000", "NO_COLOR": "1"}
        os.chdir(away)
        for name in args.models.split(","):
            given = make(name)
            first, *rest = situations(name, given)
            rest = [words for words in rest if re.search(args.only, shlex.join(words))]
            if args.sample is not None:
                rest = random.Random(f"{name} {args.seed}").sample(rest, min(args.sample, len(rest)))
            for words in [first, *rest]:  # the first builds the engine
                tried += 1
                for fault in faults(words, given):
                    bad += 1
                    print(f"{shlex.join(words)}\n    {fault}", flush=True)
    print(f"{tried} situations, {bad} faults")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main_())
