"""Hostile ONNX files of a few bytes to a few MB, and honest giants, through every verb, with time and memory of each.

    python benchmarks/hostile_models.py                      every bomb through every verb; writes the record
    python benchmarks/hostile_models.py --honest             the honest giants as well: 100,000 nodes, 3 GB of external data
    python benchmarks/hostile_models.py --only range --verb inspect      by a part of the name; writes nothing
    python benchmarks/hostile_models.py --examples 5         user + system CPU time of the examples, least of so many runs

Each verb runs in a process of its own with 6 GiB of address space and 60 s. The exit code is 1 when a bomb takes more
than 10 s or 1 GiB, or ends with a code other than 0 and 4; or when an honest model is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results" / "hostile-models.jsonl"
SECONDS, MEMORY = 10.0, 1 << 30
CAP_SECONDS, CAP_MEMORY = 60, 6 << 30
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
ACCEPTED = (0, 4)

VERBS: dict[str, Callable[[str, str], list[str]]] = {
    "inspect": lambda source, out: ["inspect", source],
    "lint": lambda source, out: ["lint", source],
    "cast": lambda source, out: ["cast", source, "--to", "fp16", "-o", f"{out}/half.onnx"],
    "quantize": lambda source, out: ["quantize", source, "--to", "int4", "-o", f"{out}/four.onnx"],
    "build": lambda source, out: ["build", source, "--backend", "onnxruntime", "-o", f"{out}/engine.onnx"],
    "convert": lambda source, out: ["convert", source, "-o", f"{out}/converted.onnx"],
    "diff": lambda source, out: ["diff", source, source],
    "ranges": lambda source, out: ["ranges", source],
    "infer": lambda source, out: ["infer", source, "--random", "-o", f"{out}/y.npz"],
    "size": lambda source, out: ["size", source, "--duration", "0.2s", "-o", f"{out}/size"],
}


# ------------------------------------------------------------------------------------------------ bombs


def ints(name: str, *numbers: int) -> TensorProto:
    return numpy_helper.from_array(np.array(numbers, np.int64), name)


def scalar(name: str, number: int) -> TensorProto:
    return numpy_helper.from_array(np.array(number, np.int64), name)


def node(op: str, inputs: str, outputs: str, **given: object) -> NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), **given)


def value(name: str, shape: list[int | str] | None, elem: int = FLOAT) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, elem, shape)


def model(
    nodes: list[NodeProto],
    stored: list[TensorProto],
    output: ValueInfoProto,
    inputs: list[ValueInfoProto] | None = None,
    functions: list[FunctionProto] | None = None,
) -> ModelProto:
    inputs = inputs if inputs is not None else [value("x", [1, 4])]
    graph = helper.make_graph(nodes, "g", inputs, [output], stored)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9, functions=functions or [])


def summed(
    nodes: list[NodeProto], giant: str, stored: list[TensorProto], *, elem: int = FLOAT, stated: bool = False
) -> ModelProto:
    """The giant tensor summed and added to the input, so that every verb has something to run."""
    nodes = [*nodes, node("Cast", giant, "as_float", to=FLOAT)] if elem != FLOAT else nodes
    last = giant if elem == FLOAT else "as_float"
    nodes = [*nodes, node("ReduceSum", last, "total", keepdims=0), node("Add", "x total", "y")]
    return model(nodes, stored, value("y", [1, 4] if stated else None))


def range_giant(stop: int = 1 << 40) -> ModelProto:
    stored = [scalar("a", 0), scalar("b", stop), scalar("c", 1)]
    return summed([node("Range", "a b c", "r")], "r", stored, elem=INT64)


def concat_doubling(times: int = 46) -> ModelProto:
    nodes = [node("Concat", f"t{at} t{at}", f"t{at + 1}", axis=0) for at in range(times)]
    return summed(nodes, f"t{times}", [numpy_helper.from_array(np.ones(4, np.float32), "t0")])


def concat_doubling_of_ints(times: int = 46) -> ModelProto:
    nodes = [node("Concat", f"t{at} t{at}", f"t{at + 1}", axis=0) for at in range(times)]
    return summed(nodes, f"t{times}", [ints("t0", 1, 1)], elem=INT64)


def shape_concat_expand(times: int = 29) -> ModelProto:
    nodes = [node("Shape", "x", "t0")]
    nodes += [node("Concat", f"t{at} t{at}", f"t{at + 1}", axis=0) for at in range(times)]
    nodes += [node("Gather", f"t{times} at", "length"), node("Expand", "x length", "giant")]
    return summed(nodes, "giant", [ints("at", 1)])


def constant_of_shape(elements: int = 800_000_000, *, stated: bool = False) -> ModelProto:
    return summed([node("ConstantOfShape", "n", "giant")], "giant", [ints("n", elements)], stated=stated)


def tile() -> ModelProto:
    stored = [numpy_helper.from_array(np.ones((1, 1), np.float32), "one"), ints("n", 1 << 16, 1 << 15)]
    return summed([node("Tile", "one n", "giant")], "giant", stored)


def expand() -> ModelProto:
    stored = [numpy_helper.from_array(np.ones((1,), np.float32), "one"), ints("n", 1 << 16, 1 << 15)]
    return summed([node("Expand", "one n", "giant")], "giant", stored)


def pad() -> ModelProto:
    stored = [numpy_helper.from_array(np.ones((1,), np.float32), "one"), ints("n", 0, 1 << 31)]
    return summed([node("Pad", "one n", "giant")], "giant", stored)


def resize() -> ModelProto:
    stored = [numpy_helper.from_array(np.ones((1, 1, 1, 1), np.float32), "one"), ints("n", 1, 1, 1 << 16, 1 << 15)]
    made = helper.make_node("Resize", ["one", "", "", "n"], ["giant"], mode="nearest")
    return summed([made], "giant", stored)


def one_hot() -> ModelProto:
    stored = [
        ints("at", *range(64)),
        scalar("depth", 1 << 25),
        numpy_helper.from_array(np.eye(1, 2, dtype="f4")[0], "v"),
    ]
    return summed([node("OneHot", "at depth v", "giant")], "giant", stored)


def einsum(*, of_inputs: bool = False) -> ModelProto:
    letters = "abcdefghijklmnopqrst"
    inputs = [f"i{letter}" for letter in letters]
    made = helper.make_node("Einsum", inputs, ["giant"], equation=",".join(letters) + "->" + letters)
    if of_inputs:
        fed = [value(name, [3]) for name in inputs]
        return model([made, node("ReduceSum", "giant", "y", keepdims=0)], [], value("y", None), fed)
    stored = [numpy_helper.from_array(np.ones(3, np.float32), name) for name in inputs]
    return summed([made], "giant", stored)


def outer_products() -> ModelProto:
    """Broadcasts of rows against columns, each squaring what there was."""
    stored = [
        numpy_helper.from_array(np.ones(8, np.float32), "t0"),
        ints("row", 1, -1),
        ints("column", -1, 1),
        ints("flat", -1),
    ]
    nodes = []
    for at in range(4):
        nodes += [node("Reshape", f"t{at} row", f"r{at}"), node("Reshape", f"t{at} column", f"c{at}")]
        nodes += [node("Mul", f"r{at} c{at}", f"m{at}"), node("Reshape", f"m{at} flat", f"t{at + 1}")]
    return summed(nodes, "t4", stored)


def hidden_size(elements: int = 100_000) -> ModelProto:
    """The size of the giant is known only by computing: NonZero of more elements than are followed."""
    nodes = [
        node("ConstantOfShape", "n", "ones", value=ints("", 1)), node("NonZero", "ones", "found"),
        node("Shape", "found", "sizes"), node("Concat", "sizes sizes", "four", axis=0),
        node("Slice", "four from to", "both"), node("Mul", "both times", "more"), node("Expand", "one more", "giant"),
    ]  # fmt: skip
    stored = [ints("n", elements), ints("from", 0), ints("to", 2), ints("times", 10_000, 1)]
    return summed(nodes, "giant", [*stored, numpy_helper.from_array(np.ones((1, 1), np.float32), "one")])


def matmul_of_constants(times: int = 20) -> ModelProto:
    """Little memory, much work: what a compiler folds."""
    nodes = [node("ConstantOfShape", "n", "t0")]
    nodes += [node("MatMul", f"t{at} t{at}", f"t{at + 1}") for at in range(times)]
    return summed(nodes, f"t{times}", [ints("n", 4000, 4000)])


def many_small_values(count: int = 100_000) -> ModelProto:
    """A chain over a constant of 8,000 numbers: each result is small, all of them together are not."""
    nodes = [node("ConstantOfShape", "n", "t0")]
    nodes += [node("Neg", f"t{at}", f"t{at + 1}") for at in range(count)]
    return summed(nodes, f"t{count}", [ints("n", 8000)])


def functions(levels: int) -> ModelProto:
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]
    made = [helper.make_function("f", "F0", ["a"], ["b"], [node("Neg", "a", "b")], imports)]
    for at in range(1, levels):
        inner = [node(f"F{at - 1}", "a", "h", domain="f"), node(f"F{at - 1}", "h", "b", domain="f")]
        made.append(helper.make_function("f", f"F{at}", ["a"], ["b"], inner, imports))
    return model([node(f"F{levels - 1}", "x", "y", domain="f")], [], value("y", None), functions=made)


def nested_ifs(depth: int = 28) -> ModelProto:
    body = helper.make_graph([node("Neg", "x", "leaf")], "b", [], [value("leaf", [1, 4])])
    for at in range(depth):
        other = helper.make_graph([node("Abs", "x", f"e{at}")], "e", [], [value(f"e{at}", [1, 4])])
        inner = helper.make_node("If", ["c"], [f"o{at}"], then_branch=body, else_branch=other)
        body = helper.make_graph([inner], "b", [], [value(f"o{at}", [1, 4])])
    nodes = [*body.node, node("Identity", f"o{depth - 1}", "y")]
    return model(nodes, [], value("y", None), [value("x", [1, 4]), value("c", [], BOOL)])


def ifs_in_a_row(count: int = 2000) -> ModelProto:
    """Bodies that see everything before them."""
    nodes = []
    for at in range(count):
        one = helper.make_graph([node("Neg", f"t{at}", f"a{at}")], "a", [], [value(f"a{at}", None)])
        two = helper.make_graph([node("Abs", f"t{at}", f"b{at}")], "b", [], [value(f"b{at}", None)])
        nodes.append(helper.make_node("If", ["c"], [f"t{at + 1}"], then_branch=one, else_branch=two))
    return model(nodes, [], value(f"t{count}", None), [value("t0", [1, 4]), value("c", [], BOOL)])


def chain(count: int, op: str = "Relu") -> ModelProto:
    nodes = [node(op, f"t{at}", f"t{at + 1}") for at in range(count)]
    return model(nodes, [], value(f"t{count}", [1, 4]), [value("t0", [1, 4])])


def many_inputs(count: int = 50_000) -> ModelProto:
    inputs = [value(f"i{at}", [1]) for at in range(count)]
    return model([node("Add", "i0 i1", "y")], [], value("y", [1]), inputs)


def many_initializers(count: int = 200_000) -> ModelProto:
    stored = [numpy_helper.from_array(np.ones(1, np.float32), f"w{at}") for at in range(count)]
    return model([node("Add", "x w0", "y")], stored, value("y", [1, 4]))


def giant_input(sizes: list[int]) -> ModelProto:
    return model([node("Relu", "x", "y")], [], value("y", None), [value("x", sizes)])  # type: ignore[arg-type]


def input_of_rank(rank: int = 100_000) -> ModelProto:
    return model([node("Relu", "x", "y")], [], value("y", None), [value("x", [1] * rank)])


def shape_of_a_giant() -> ModelProto:
    nodes = [
        node("Shape", "x", "s"),
        node("ConstantOfShape", "s", "giant"),
        node("ReduceSum", "giant", "y", keepdims=0),
    ]
    return model(nodes, [], value("y", None), [value("x", [50_000, 50_000])])


def random_giant() -> ModelProto:
    return summed([helper.make_node("RandomNormal", [], ["giant"], shape=[1 << 16, 1 << 15])], "giant", [])


def endless_loop() -> ModelProto:
    inside = [node("Identity", "going", "on"), node("Neg", "state", "next")]
    body = helper.make_graph(
        inside, "b", [value("i", [], INT64), value("going", [], BOOL), value("state", [1, 4])],
        [value("on", [], BOOL), value("next", [1, 4])],
    )  # fmt: skip
    loop = helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)
    return model([loop], [scalar("n", 1 << 62)], value("y", [1, 4]))


BOMBS: dict[str, Callable[[], ModelProto]] = {
    "range 2^40": range_giant,
    "range 2^28": lambda: range_giant(1 << 28),
    "concat doubling 46": concat_doubling,
    "concat doubling of ints 46": concat_doubling_of_ints,
    "shape, concat 29, expand": shape_concat_expand,
    "constant of shape 8e8": constant_of_shape,
    "constant of shape 8e8, output stated": lambda: constant_of_shape(stated=True),
    "tile": tile,
    "expand": expand,
    "pad": pad,
    "resize": resize,
    "one hot": one_hot,
    "einsum of constants": einsum,
    "einsum of inputs": lambda: einsum(of_inputs=True),
    "outer products": outer_products,
    "size known by computing": hidden_size,
    "matmul of constants": matmul_of_constants,
    "100,000 small values": many_small_values,
    "functions 14": lambda: functions(14),
    "functions 16": lambda: functions(16),
    "functions 19": lambda: functions(19),
    "nested ifs": nested_ifs,
    "ifs in a row": ifs_in_a_row,
    "a million nodes": lambda: chain(1_000_000),
    "50,000 inputs": many_inputs,
    "200,000 initializers": many_initializers,
    "input 2^62 x 2^62": lambda: giant_input([1 << 62, 1 << 62]),
    "input 50,000 x 50,000": lambda: giant_input([50_000, 50_000]),
    "input of rank 100,000": input_of_rank,
    "shape of a giant": shape_of_a_giant,
    "random giant": random_giant,
}


# ------------------------------------------------------------------------------------------------ honest giants


def initialisers(count: int = 5000) -> ModelProto:
    stored = [numpy_helper.from_array(np.full((1, 4), 1e-3, np.float32), f"w{at}") for at in range(count)]
    nodes = [node("Add", f"t{at} w{at}", f"t{at + 1}") for at in range(count)]
    return model(nodes, stored, value(f"t{count}", [1, 4]), [value("t0", [1, 4])])


def decoder(layers: int = 40, width: int = 64, heads: int = 4) -> ModelProto:
    """A decoder as exporters write it: shapes computed from the ids, a causal mask, attention, two MatMul."""
    random = np.random.default_rng(0)
    stored = [ints("minus", -1), scalar("zero", 0), scalar("one", 1), ints("heads", 0, 0, heads, width // heads)]
    stored += [
        ints("joined", 0, 0, width),
        numpy_helper.from_array(np.array(-1e4, np.float32), "far"),
        ints("first", 1),
    ]

    def weight(name: str, *shape: int) -> str:
        stored.append(numpy_helper.from_array((random.standard_normal(shape) / 8).astype(np.float32), name))
        return name

    nodes = [node("Gather", f"{weight('table', 100, width)} ids", "h0"), node("Shape", "ids", "ids_shape")]
    nodes += [node("Gather", "ids_shape one", "length"), node("Unsqueeze", "length zero_axis", "length1")]
    stored.append(ints("zero_axis", 0))
    nodes += [node("Concat", "length1 length1", "square", axis=0), node("Expand", "far square", "full")]
    nodes.append(node("Trilu", "full one", "mask", upper=1))
    for at in range(layers):
        last = f"h{at}"
        for part in "qkv":
            nodes.append(node("MatMul", f"{last} {weight(f'{part}w{at}', width, width)}", f"{part}{at}"))
            nodes.append(node("Reshape", f"{part}{at} heads", f"{part}r{at}"))
            perm = [0, 2, 3, 1] if part == "k" else [0, 2, 1, 3]
            nodes.append(node("Transpose", f"{part}r{at}", f"{part}t{at}", perm=perm))
        nodes += [node("MatMul", f"qt{at} kt{at}", f"s{at}"), node("Add", f"s{at} mask", f"sm{at}")]
        nodes += [node("Softmax", f"sm{at}", f"p{at}", axis=-1), node("MatMul", f"p{at} vt{at}", f"o{at}")]
        nodes += [
            node("Transpose", f"o{at}", f"ot{at}", perm=[0, 2, 1, 3]),
            node("Reshape", f"ot{at} joined", f"oj{at}"),
        ]
        nodes += [
            node("Add", f"{last} oj{at}", f"r{at}"),
            node("MatMul", f"r{at} {weight(f'uw{at}', width, 4 * width)}", f"u{at}"),
        ]
        nodes += [
            node("Relu", f"u{at}", f"a{at}"),
            node("MatMul", f"a{at} {weight(f'dw{at}', 4 * width, width)}", f"d{at}"),
        ]
        nodes += [node("Tanh", f"d{at}", f"dt{at}"), node("Add", f"r{at} dt{at}", f"h{at + 1}")]
    return model(
        nodes, stored, value(f"h{layers}", ["batch", "length", width]), [value("ids", ["batch", "length"], INT64)]
    )


def save_external(folder: Path, nbytes: int = 3 << 30) -> Path:
    """Weights of that many bytes in a side file, written sparse."""
    each, path = 1 << 28, folder / "external.onnx"
    side = 4096
    stored, nodes = [], []
    with (folder / "external.bin").open("wb") as file:
        file.truncate(nbytes)
    for at in range(nbytes // each):
        tensor = TensorProto(name=f"w{at}", data_type=FLOAT, dims=[side, each // 4 // side])
        tensor.data_location = TensorProto.EXTERNAL
        for key, text in (("location", "external.bin"), ("offset", at * each), ("length", each)):
            tensor.external_data.add(key=key, value=str(text))
        stored.append(tensor)
        nodes += [node("MatMul", f"x w{at}", f"m{at}"), node("ReduceMax", f"m{at}", f"r{at}", keepdims=1)]
    nodes.append(helper.make_node("Sum", [f"r{at}" for at in range(nbytes // each)], ["y"]))
    path.write_bytes(model(nodes, stored, value("y", [1, 1]), [value("x", [1, side])]).SerializeToString())
    return path


def save(proto: ModelProto, path: Path) -> Path:
    path.write_bytes(proto.SerializeToString())
    return path


HONEST: dict[str, Callable[[Path], Path]] = {
    "100,000 nodes": lambda folder: save(chain(100_000), folder / "nodes.onnx"),
    "5,000 initialisers": lambda folder: save(initialisers(), folder / "initialisers.onnx"),
    "decoder of 40 layers": lambda folder: save(decoder(), folder / "decoder.onnx"),
    "3 GB of external data": save_external,
}


# ------------------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True)
class Run:
    """One verb on one file."""

    model: str
    verb: str
    file_bytes: int
    code: int
    wall_s: float
    cpu_s: float
    peak_mib: float
    message: str


def measure(name: str, verb: str, path: Path, *, cap_s: float = CAP_SECONDS, memory: int | None = CAP_MEMORY) -> Run:
    """The verb in a process of its own; code -9 for one that was ended at the limit."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as out:
        command = [sys.executable, "-m", "trt_engine", *VERBS[verb](str(path), out)]
        environment = {**os.environ, "TRT_ENGINE_STORE": f"{out}/store", "PYTHONPATH": str(ROOT / "src")}
        limit = None if memory is None else lambda: resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        start = time.monotonic()
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                command, cwd=out, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
                preexec_fn=limit, start_new_session=True,
            )  # fmt: skip
            usage = None
            while usage is None:
                pid, status, found = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    usage = found
                elif time.monotonic() - start > cap_s:
                    os.killpg(process.pid, signal.SIGKILL)
                    _, status, usage = os.wait4(process.pid, 0)
                else:
                    time.sleep(0.01)
            wall = time.monotonic() - start
            process.returncode = code = os.waitstatus_to_exitcode(status)
            said.seek(0)
            lines = said.read().decode(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith(("error", "hint"))] or lines[-1:]
    return Run(name, verb, path.stat().st_size, code, round(wall, 2), round(usage.ru_utime + usage.ru_stime, 2),
               round(usage.ru_maxrss / 1024, 1), " | ".join(errors)[:300])  # fmt: skip


def bad(run: Run) -> bool:
    return run.code not in ACCEPTED or run.wall_s > SECONDS or run.peak_mib * (1 << 20) > MEMORY


def show(run: Run, mark: str) -> None:
    print(
        f"{mark:4s} {run.model:38s} {run.verb:9s} {run.file_bytes:>10} B  code {run.code:>4}  {run.wall_s:7.2f} s  "
        f"{run.cpu_s:7.2f} CPU s  {run.peak_mib:8.1f} MiB  {run.message[:110]}",
        flush=True,
    )


def runs(asked: argparse.Namespace) -> Iterator[tuple[Run, bool]]:
    verbs = asked.verb or list(VERBS)
    with tempfile.TemporaryDirectory(prefix="hostile-models-") as name:
        folder = Path(name)
        if not asked.honest_only:
            for title, made in BOMBS.items():
                if asked.only and not any(part in title for part in asked.only):
                    continue
                path = save(made(), folder / "bomb.onnx")
                for verb in verbs:
                    found = measure(title, verb, path, cap_s=asked.cap)
                    yield found, bad(found)
        if asked.honest or asked.honest_only:
            for title, written in HONEST.items():
                if asked.only and not any(part in title for part in asked.only):
                    continue
                path = written(folder)
                for verb in verbs:
                    found = measure(title, verb, path, cap_s=600, memory=None)
                    yield found, found.code != 0


def examples(rounds: int) -> None:
    """CPU seconds (user + system) of three verbs on the examples, the least of the rounds, one after the other."""
    files = [
        ROOT / "examples" / name for name in ("digits/model.onnx", "classifiers/resnet.onnx", "classifiers/vit.onnx")
    ]
    least: dict[tuple[str, str], float] = {}
    for _ in range(rounds):
        for path in files:
            for verb in ("inspect", "lint", "build"):
                key = (f"{path.parent.name}/{path.name}", verb)
                least[key] = min(least.get(key, 1e9), measure(key[0], verb, path, memory=None).cpu_s)
    for (name, verb), seconds in least.items():
        print(f"{name:28s} {verb:8s} {seconds:6.2f} CPU s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="models by a part of their name; writes nothing")
    parser.add_argument("--verb", action="append", choices=list(VERBS))
    parser.add_argument("--honest", action="store_true", help="the honest giants as well")
    parser.add_argument("--honest-only", action="store_true")
    parser.add_argument("--cap", type=float, default=CAP_SECONDS, help="seconds a bomb may take before it is ended")
    parser.add_argument("--examples", type=int, metavar="ROUNDS", help="CPU time of the examples, and nothing else")
    asked = parser.parse_args()
    if asked.examples:
        examples(asked.examples)
        return 0
    found, failed = [], 0
    for run, wrong in runs(asked):
        show(run, "BAD" if wrong else "")
        found.append(run)
        failed += wrong
    if not (asked.only or asked.verb or asked.honest_only):
        RESULTS.write_text("".join(json.dumps(asdict(run)) + "\n" for run in found))
    print(f"{len(found)} runs, {failed} beyond the bounds")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
