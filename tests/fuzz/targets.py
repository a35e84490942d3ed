"""What is fuzzed: for each parser how an input is made from valid files, which calls read it, and how they may end."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fuzz.archives import evil_pickle, mutate_npy, mutate_npz, mutate_png, tar_of, zip_of
from fuzz.command_lines import command_line, environment
from fuzz.inputs import Input
from fuzz.mutate import hostile_text, mutate_bytes, mutate_json, mutate_text, mutate_tree
from fuzz.networks import mutate_network
from fuzz.seeds import Seeds, nsys_export
from fuzz.stated_numbers import draw

__all__ = ["TARGETS", "Target"]

Make = Callable[[random.Random, Seeds], Input]


@dataclass(frozen=True)
class Target:
    """One parser, or a group of parsers that the same calls reach."""

    name: str
    make: Make
    parsers: tuple[str, ...]
    """The modules under `trt_engine` whose lines count."""
    codes: frozenset[int]
    """How a call may end, 0 aside: the documented codes that a wrong file of this kind can cause."""
    cost: int = 1
    """An input takes this many times what one of a quick target takes: that many times fewer are run."""


TARGETS: dict[str, Target] = {}


def _target(name: str, parsers: str, *codes: int, cost: int = 1) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        def named(rng: random.Random, seeds: Seeds) -> Input:
            made = make(rng, seeds)
            return Input(name, made.files, made.calls, made.env)

        TARGETS[name] = Target(name, named, tuple(parsers.split()), frozenset(codes), cost)
        return make

    return register


def _input(files: Mapping[str, bytes], *calls: str | Sequence[str], env: Mapping[str, str] | None = None) -> Input:
    return Input("", files, [call.split() if isinstance(call, str) else call for call in calls], env or {})


def _json_or_not(rng: random.Random, call: str) -> str:
    return f"{call} --json" if rng.random() < 0.3 else call


# ------------------------------------------------------------------------------------------------ networks


@_target(
    "onnx",
    "graph.load graph.structure_check graph.walk graph.shape_inference graph.lint graph.dtype_breakdown graph.cost",
    2,
    4,
    5,
    11,
)
def _onnx(rng: random.Random, seeds: Seeds) -> Input:
    name = rng.choice(list(seeds.networks))
    files = dict(seeds.networks[name])
    files["m.onnx"] = mutate_network(rng, files["m.onnx"])
    if "weights.bin" in files and rng.random() < 0.3:
        files["weights.bin"] = mutate_bytes(rng, files["weights.bin"])
    call = rng.choice((
        "inspect m.onnx", "inspect m.onnx", "inspect m.onnx", "lint m.onnx", "lint m.onnx", "diff m.onnx m.onnx",
        "convert m.onnx --dry-run -o out.onnx", "build m.onnx --dry-run", "size m.onnx --dry-run -o out",
        "cast m.onnx --to fp16 --dry-run -o out.onnx",
    ))  # fmt: skip
    return _input(files, _json_or_not(rng, call))


_RUNNING = (
    ("cast m.onnx --to fp16 --no-parity -o out.onnx", 4), ("cast m.onnx --to bf16 -o out.onnx", 1),
    ("quantize m.onnx --to int8 --calib-data random --quantize-outputs -o out.onnx", 2),
    ("quantize m.onnx --to fp8 --calib-data random -o out.onnx", 1),
    ("build m.onnx --no-parity -o out.engine.onnx", 3), ("build m.onnx --precision fp16 -o out.engine.onnx", 1),
    ("infer m.onnx --random", 2), ("ranges m.onnx", 2), ("convert m.onnx -o out.onnx", 2), ("bench m.onnx --dry-run", 1),
)  # fmt: skip


@_target(
    "onnx-verbs",
    "precision.cast_model precision.cast_rewriter precision.cast_rules precision.quantize_model "
    "graph.stored_tensors precision.tensor_ranges graph.typing_rules",
    2,
    4,
    5,
    6,
    7,
    10,
    11,
    cost=4,
)
def _onnx_verbs(rng: random.Random, seeds: Seeds) -> Input:
    name = rng.choice([name for name in seeds.networks if name != "loop"])
    files = dict(seeds.networks[name])
    files["m.onnx"] = mutate_network(rng, files["m.onnx"])
    calls, weights = zip(*_RUNNING, strict=True)
    return _input(files, _json_or_not(rng, rng.choices(calls, weights)[0]))


# ------------------------------------------------------------------------------------------------ engines


@_target("passports", "engine tensors verbs.inspect", 2, 4, 10)
def _passports(rng: random.Random, seeds: Seeds) -> Input:
    files = dict(seeds.engine)
    files["m.engine.onnx.json"] = mutate_json(rng, seeds.passport)
    if rng.random() < 0.05:
        files["m.engine.onnx"] = mutate_bytes(rng, files["m.engine.onnx"])
    call = rng.choice((
        "inspect m.engine.onnx", "inspect m.engine.onnx", "inspect m.engine.onnx --run", "infer m.engine.onnx --random",
        "bench m.engine.onnx --dry-run", "diff m.engine.onnx m.engine.onnx", "compare m.engine.onnx m.engine.onnx --dry-run",
        "profile m.engine.onnx --dry-run", "inspect m.engine.onnx.json",
    ))  # fmt: skip
    return _input(files, _json_or_not(rng, call))


def _rtx_plan(rng: random.Random) -> bytes:
    """A plan of TensorRT-RTX that is a header and noise, of the length it states or of another."""
    nbytes = rng.choice((64, 200, 1 << 63))
    version = bytes(rng.choice(((1, 7, 1, 116), (1, 6, 0, 1), (0, 0, 0, 0))))
    words = (nbytes, int.from_bytes(version + b"vtrt", "little"), rng.getrandbits(64) & 0xFF, 0, 0, rng.getrandbits(20))
    return b"vtrt\0\0\0\0" + b"".join(word.to_bytes(8, "little") for word in (2, *words)) + rng.randbytes(136)


@_target("plan-headers", "plan_header verbs.inspect trt.compatibility trt.rtx_compatibility", 2, 3, 4, 10, cost=2)
def _plan_headers(rng: random.Random, seeds: Seeds) -> Input:
    version = rng.choice(((8, 6, 1, 6), (10, 3, 0, 26), (10, 16, 1, 11), (11, 1, 0, 0), (0, 0, 0, 0)))
    raw = b"ftrt" + (96).to_bytes(4, "little") + bytes(16) + bytes(version) + rng.randbytes(rng.choice((0, 8, 200)))
    rtx = rng.random() < 0.4
    raw = _rtx_plan(rng) if rtx else raw
    files = {"m.engine": mutate_bytes(rng, raw) if rng.random() < 0.7 else raw}
    if rng.random() < 0.4:
        passport = json.loads(json.dumps(seeds.passport).replace("m.engine.onnx", "m.engine"))
        name = "tensorrt-rtx" if rtx and rng.random() < 0.8 else "tensorrt"
        passport |= {"backend": name, "device": "cuda:0"}
        passport["requirements"] |= {
            "library": name,
            "version": "10.3.0",
            "compute_capability": "9.0",
            "compute_capabilities": ["8.9", "12.0"],
            "gpu": "NVIDIA H200",
        }
        files["m.engine.json"] = mutate_json(rng, passport)
    call = rng.choice(
        ("inspect m.engine", "inspect m.engine", "diff m.engine m.engine", "convert m.engine --dry-run -o o.onnx")
    )
    return _input(files, _json_or_not(rng, call))


@_target("store", "store", 2, 3, 4, 10, cost=2)
def _store(rng: random.Random, seeds: Seeds) -> Input:
    key = rng.choice(("0123456789abcdef" * 2, "f" * 32, "x", "thesis"))
    name = "m.onnx"
    passport = json.loads(json.dumps(seeds.passport).replace("m.engine.onnx", name)) | {"key": key}
    files = {
        f"store/engines/{key}/{name}": seeds.engine["m.engine.onnx"],
        f"store/engines/{key}/{name}.json": mutate_json(rng, passport),
        "m.onnx": seeds.engine["m.onnx"],
    }
    if rng.random() < 0.3:
        files[f"store/engines/{key}/{rng.choice(('a.json', '.x.tmp/y', 'notes.txt', f'{name}.lock'))}"] = rng.randbytes(
            9
        )
    call = rng.choice(
        (
            "cache list",
            "cache list",
            "cache prune --all --dry-run",
            "cache prune --max-size 1KiB",
            "cache prune --older-than 1d",
        )
    )
    return _input(files, _json_or_not(rng, call), env={"TRT_ENGINE_STORE": "store"})


# ------------------------------------------------------------------------------------------------ data


@_target("arrays", "runtime.feeds precision.samples vision.datasets", 2, 4)
def _arrays(rng: random.Random, seeds: Seeds) -> Input:
    files = {name: seeds.engine[name] for name in ("m.onnx", "m.engine.onnx", "m.engine.onnx.json")}
    array = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    if rng.random() < 0.5:
        files["x.npz"] = mutate_npz(rng, {"x": array})
    else:
        files["x.npy"] = mutate_npy(rng, array)
    file = "x.npz" if "x.npz" in files else "x.npy"
    call = rng.choice((
        f"infer m.engine.onnx --input {file}", f"infer m.engine.onnx --input {file}", f"ranges m.onnx --calib-data {file}",
        f"bench m.engine.onnx --inputs {file} --dry-run", f"@dataset {file}",
        f"cast m.onnx --to fp16 --calib-data {file} -o out.onnx",
    ))  # fmt: skip
    return _input(files, call if call[0] == "@" else _json_or_not(rng, call))


@_target("pictures", "vision.preprocess vision.image_inference", 2, 4)
def _pictures(rng: random.Random, seeds: Seeds) -> Input:
    name = rng.choice(list(seeds.pictures))
    raw = seeds.pictures[name]
    raw = mutate_png(rng, raw) if raw[:4] == b"\x89PNG" and rng.random() < 0.6 else mutate_bytes(rng, raw)
    if rng.random() < 0.25:
        files = dict(seeds.declared) | {name: raw}
        return _input(files, _json_or_not(rng, f"infer d.engine.onnx --image {name}"))
    return _input({name: raw}, f"@image {name}")


@_target("datasets", "vision.datasets evaluation.coco_metrics evaluation.evaluate_runner", 2, 4, cost=2)
def _datasets(rng: random.Random, seeds: Seeds) -> Input:
    document, pictures = seeds.coco
    act = rng.random()
    if act < 0.6:
        files = {f"val/{name}": raw for name, raw in pictures.items()} | {
            "val/annotations.json": mutate_json(rng, document)
        }
        if rng.random() < 0.25:
            declared = {"preprocess": {"size": [8, 8]}, "postprocess": {"decode": "yolov10", "classes": ["cat", "dog"]}}
            files |= dict(seeds.detector) | {"p.json": json.dumps(declared).encode()}
            return _input(files, _json_or_not(rng, "evaluate d.onnx --dataset val --preprocess p.json"))
    elif act < 0.8:
        names = ["red", "green", hostile_text(rng).encode("utf-8", "replace").decode().replace("\0", "")[:100] or "x"]
        files = {
            f"val/{rng.choice(names).strip('/.') or 'c'}/{index}.png": mutate_bytes(rng, seeds.pictures["x.png"])
            if rng.random() < 0.3 else seeds.pictures["x.png"]
            for index in range(rng.choice((0, 1, 3)))
        } | {"val/red/x.png": seeds.pictures["x.png"]}  # fmt: skip
        if rng.random() < 0.4:
            return _input(dict(seeds.declared) | files, _json_or_not(rng, "evaluate d.engine.onnx --dataset val"))
    else:
        images = np.zeros((3, 9, 11, 3), np.uint8)
        raw = mutate_npz(rng, {"images": images, "labels": np.array([0, 1, 2])})
        if rng.random() < 0.5:
            return _input(dict(seeds.declared) | {"val.npz": raw}, "evaluate d.engine.onnx --dataset val.npz")
        return _input({"val.npz": raw}, "@dataset val.npz")
    return _input(files, "@dataset val")


@_target("declarations", "vision.spec", 2, 4, 10, cost=2)
def _declarations(rng: random.Random, seeds: Seeds) -> Input:
    document: Any = {
        "preprocess": {"size": [8, 8], "resize": "letterbox", "interpolation": "bilinear", "pad_value": [114, 114, 114],
                       "channels": "RGB", "layout": "NCHW", "scale": 0.0039, "mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0],
                       "dtype": "float32", "input": "images"},
        "postprocess": {"decode": "classify", "classes": ["a", "b", "c"], "activation": "softmax", "min_score": 0.001,
                        "output": "scores"},
        "version": 1,
    }  # fmt: skip
    files = dict(seeds.declared) | {"x.png": seeds.pictures["x.png"]}
    if rng.random() < 0.7:
        files["p.json"] = mutate_json(rng, document)
        call = rng.choice(
            ("infer d.engine.onnx --image x.png --preprocess p.json", "build d.onnx --preprocess p.json --dry-run")
        )
        return _input(files, _json_or_not(rng, call))
    import onnx

    model = onnx.load_from_string(files["d.onnx"])
    text = mutate_json(rng, document).decode("utf-8", "replace")
    del model.metadata_props[:]
    if rng.random() < 0.5:
        model.metadata_props.add(key="trt_engine.vision", value=text)
    else:
        names = mutate_text(rng, "{0: 'a', 1: 'b', 2: 'c'}").decode("utf-8", "replace")
        size = rng.choice(("[8, 8]", "8", "[8", "(8, 8)", "-1", "[1e999, 1]", "[" * 300, hostile_text(rng)))
        for key, value in (("names", names), ("task", rng.choice(("classify", "detect", "x"))), ("imgsz", size)):
            model.metadata_props.add(key=key, value=value.encode("utf-8", "replace").decode())
    files = {"d.onnx": model.SerializeToString(), "x.png": files["x.png"]}
    return _input(files, rng.choice(("inspect d.onnx", "infer d.onnx --image x.png")))


@_target("calibration", "precision.calibration", 2, 4, 7)
def _calibration(rng: random.Random, seeds: Seeds) -> Input:
    files = dict(seeds.calibration)
    files["cache.json"] = mutate_json(rng, json.loads(files["cache.json"]))
    if rng.random() < 0.9:
        return _input({name: files[name] for name in ("m.onnx", "cache.json")}, "@calibrate cache.json")
    call = (
        "quantize m.onnx --to int8 --calib-data x.npz --calibrator minmax --cache cache.json --quantize-outputs "
        "-o out.onnx"
    )
    return _input(files, _json_or_not(rng, call))


# ------------------------------------------------------------------------------------------------ numbers


@_target("stated-numbers", "arrayfiles graph.structure_check engine plan_header", 2, 3, 4, 5, 6, 7, 10, 11, cost=2)
def _stated_numbers(rng: random.Random, seeds: Seeds) -> Input:
    return _input(*draw(rng, seeds))


# ------------------------------------------------------------------------------------------------ plans and descriptions

_YAML_PARTS = (
    "\n? [a, b]\n: c\n", "\n<<: *x\n", "\nx: &x [*x]\n", "\nx: !!python/object/apply:os.system ['touch CODE_WAS_RUN']\n",
    "\nmodels: &m [m.onnx]\nb: *m\n", "\n---\na: 1\n", "\nbatches: [1, 1, 1]\n", "\ntitle: \"\\e[31m\\nx\"\n",
    "\nx: 2001-12-14\n",
    "\nx: 0o17\n", "\nbatches: [1_000]\n", "\n\t- a\n", "\nx: !!binary aGk=\n", "\nbatches: [1, 2" * 3, "\nx: " + "[" * 5000,
)  # fmt: skip


@_target("run-plans", "sweep.yaml_schema sweep.plan_file sweep.resume sweep.sweep_folder", 2, 3, 4, cost=2)
def _run_plans(rng: random.Random, seeds: Seeds) -> Input:
    document = mutate_tree(rng, rng.choice(seeds.plans), rng.choice((1, 1, 2)))
    try:
        text = yaml.safe_dump(document, allow_unicode=rng.random() < 0.5, sort_keys=False)
    except yaml.YAMLError:
        text = json.dumps(document)
    if rng.random() < 0.3:
        text += rng.choice(_YAML_PARTS)
    raw = mutate_text(rng, text, 1) if rng.random() < 0.3 else text.encode("utf-8", "surrogatepass")
    files = {"plan.yaml": raw, "m.onnx": seeds.engine["m.onnx"], "x.npz": seeds.calibration["x.npz"]}
    if rng.random() < 0.2:
        run = seeds.runs["matrix"]
        name = rng.choice([name for name in run if name.endswith(".json")])
        files |= {f"out/{file}": raw for file, raw in run.items()}
        files[f"out/{name}"] = mutate_json(rng, json.loads(run[name]))
    return _input(files, _json_or_not(rng, "run plan.yaml -o out --dry-run"))


@_target("bundle-meta", "bundling.model_meta bundling.json_positions bundling.named_dims", 2, 4)
def _bundle_meta(rng: random.Random, seeds: Seeds) -> Input:
    documents, parts = seeds.bundle
    files = dict(parts) | {"model_meta.json": mutate_json(rng, rng.choice(documents))}
    return _input(files, _json_or_not(rng, "bundle model_meta.json -o out --dry-run"))


# ------------------------------------------------------------------------------------------------ logs and records


@_target("trtexec-logs", "trt.trtexec_log benchmark.log_parser", 2)
def _trtexec_logs(rng: random.Random, seeds: Seeds) -> Input:
    text = rng.choice(seeds.trtexec_logs)
    if rng.random() < 0.1:
        raw = mutate_text(rng, text).decode("utf-8", "replace").encode("utf-16")
    else:
        raw = mutate_text(rng, text)
    return _input({"x.log": raw}, _json_or_not(rng, "bench --parse-log x.log"))


@_target("own-logs", "benchmark.log_parser trt.trtexec_log", 2)
def _own_logs(rng: random.Random, seeds: Seeds) -> Input:
    return _input({"x.log": mutate_text(rng, seeds.bench_log)}, _json_or_not(rng, "bench --parse-log x.log"))


def _mutated_run(rng: random.Random, seeds: Seeds) -> dict[str, bytes]:
    name = rng.choice([name for name in seeds.runs if not name.startswith("hostile")])
    files = dict(seeds.runs[name])
    for file in rng.sample(sorted(files), rng.choice((1, 1, 2)) if len(files) > 1 else 1):
        if file.endswith(".jsonl"):
            lines = files[file].splitlines()
            at = rng.randrange(len(lines))
            lines[at] = mutate_json(rng, json.loads(lines[at]), nest=3000).replace(b"\n", b" ")
            files[file] = b"\n".join(lines) + b"\n" * rng.randrange(2)
        elif file.endswith(".json"):
            files[file] = mutate_json(rng, json.loads(files[file]))
    return files


@_target(
    "records",
    "reporting.run_records run_folder reporting.sections reporting.charts reporting.report records",
    2,
    cost=3,
)
def _records(rng: random.Random, seeds: Seeds) -> Input:
    files = {f"run/{name}": raw for name, raw in _mutated_run(rng, seeds).items()}
    call = rng.choice((
        "report run", "report run --format md", "report run --format html", "report run --format html", "report run --json",
        "inspect run", "pack run -o out.zip",
    ))  # fmt: skip
    return _input(files, call)


@_target("compared-records", "verbs.compare.baseline", 2, 7, 8, 9, 10, 130, cost=2)
def _compared_records(rng: random.Random, seeds: Seeds) -> Input:
    lines = seeds.runs["bench"]["records.jsonl"].splitlines()
    if rng.random() < 0.6:
        line = mutate_json(rng, json.loads(lines[0]), nest=3000).replace(b"\n", b" ")
        return _input(
            {"a.jsonl": lines[0] + b"\n", "b.jsonl": line + b"\n"}, _json_or_not(rng, "compare a.jsonl b.jsonl")
        )
    files = dict(seeds.engine) | {"b.json": mutate_json(rng, seeds.baseline)}
    return _input(files, _json_or_not(rng, "compare m.engine.onnx --baseline b.json --dry-run"))


@_target("packs", "run_folder reporting.run_records", 2, 4, cost=3)
def _packs(rng: random.Random, seeds: Seeds) -> Input:
    name = rng.choice(("cpu", "bench", "matrix", "compared", "profiled"))
    files = {f"run/{file}": raw for file, raw in seeds.runs[name].items()}
    manifest = {"schema": "trt-engine/pack", "schema_version": 1, "files": [
        {"path": file, "nbytes": len(raw), "digest": "sha256:" + "0" * 64} for file, raw in files.items()]}  # fmt: skip
    if rng.random() < 0.3:
        files["run/PACK.json"] = mutate_json(rng, manifest)
    suffix, make = rng.choice(((".zip", zip_of), (".tar.gz", tar_of), (".tgz", tar_of)))
    call = rng.choice(("report", "report", "inspect"))
    return _input({f"x{suffix}": make(rng, files)}, _json_or_not(rng, f"{call} x{suffix}"))


# ------------------------------------------------------------------------------------------------ profilers


@_target("layer-documents", "profiling.engine_structure trt.layers trt.trtexec_exports", 2, 4, 10)
def _layer_documents(rng: random.Random, seeds: Seeds) -> Input:
    before, after = (rng.choice(seeds.layer_documents) for _ in range(2))
    files = {"a.json": mutate_json(rng, before), "b.json": json.dumps(after).encode()}
    if rng.random() < 0.35:
        files["a.json"] = json.dumps(before).encode()
    if rng.random() < 0.5:
        times = seeds.layer_times[0]
        raw = mutate_json(rng, times) if rng.random() < 0.6 else mutate_text(rng, json.dumps(times, indent=1))
        if rng.random() < 0.02:
            raw = b"x" + b'{"name":"' * rng.choice((100, 5000, 60_000))
        files |= {"p.json": raw, "q.json": json.dumps(times).encode()}
        return _input(files, _json_or_not(rng, "diff a.json b.json --layer-times p.json q.json"))
    if rng.random() < 0.15:
        return _input({"t.json": mutate_json(rng, seeds.layer_times[1])}, "@times t.json")
    return _input(files, _json_or_not(rng, "diff a.json b.json"))


@_target("profile-documents", "profiling.engine_structure profiling.diff", 2, 4, 10, cost=2)
def _profile_documents(rng: random.Random, seeds: Seeds) -> Input:
    raw = seeds.runs["profiled"]["profile.json"]
    files = {"a.json": mutate_json(rng, json.loads(raw)), "b.json": raw}
    call = rng.choice(("diff a.json b.json", "diff b.json a.json", "diff a.json b.json --layer-times a.json b.json"))
    return _input(files, _json_or_not(rng, call))


@_target("ncu", "profiling.instruments.ncu_output profiling.instruments.ncu profiling.instruments.nsight_run", 2, 3)
def _ncu(rng: random.Random, seeds: Seeds) -> Input:
    name = rng.choice([name for name in seeds.profiler_texts if name.startswith("ncu")])
    return _input({"ncu.csv": mutate_text(rng, seeds.profiler_texts[name])}, "@ncu ncu.csv")


@_target("nsys-exports", "profiling.instruments.nsys_export profiling.instruments.capture", 2, 3)
def _nsys_exports(rng: random.Random, seeds: Seeds) -> Input:
    path = Path(seeds.folder / "x.sqlite")
    path.unlink(missing_ok=True)
    script = mutate_text(rng, seeds.nsys_script).decode("utf-8", "replace") if rng.random() < 0.8 else seeds.nsys_script
    nsys_export(script, path)
    raw = path.read_bytes()
    if rng.random() < 0.4:
        raw = mutate_bytes(rng, raw)
    return _input({"x.sqlite": raw}, "@nsys x.sqlite")


@_target("kineto", "profiling.instruments.kineto profiling.instruments.capture", 2, 3)
def _kineto(rng: random.Random, seeds: Seeds) -> Input:
    return _input({"trace.json": mutate_json(rng, seeds.kineto)}, "@kineto trace.json")


# ------------------------------------------------------------------------------------------------ sources


@_target("sources", "conversion.sources", 2, 3, 4)
def _sources(rng: random.Random, seeds: Seeds) -> Input:
    name = rng.choice(list(seeds.sources))
    files = dict(seeds.sources[name])
    kind = name.partition(":")[0]
    if kind == "zip":
        given, files = "x.pt", {"x.pt": zip_of(rng, files)}
    elif kind == "folder":
        given = "s"
        pick = rng.choice(list(files))
        files[pick] = mutate_bytes(rng, files[pick]) if files[pick] else evil_pickle(rng)
    else:
        given = "x"
        files = {
            "x": evil_pickle(rng) if name == "file:pickle" and rng.random() < 0.2 else mutate_bytes(rng, files["x"])
        }
    if rng.random() < 0.7:
        return _input(files, f"@detect {given}")
    return _input(files, _json_or_not(rng, f"convert {given} --dry-run --offline -o out.onnx"))


# ------------------------------------------------------------------------------------------------ the command line


@_target("command-lines", "cli.main cli.click_app cli.options cli.output", 2, 3, 4, 5, 6, 10, 12)
def _command_lines(rng: random.Random, seeds: Seeds) -> Input:
    files = {**seeds.engine, "x.npz": seeds.calibration["x.npz"], "x.png": seeds.pictures["x.png"],
             "run/records.jsonl": seeds.runs["bench"]["records.jsonl"], "plan.yaml": b"models: [m.onnx]\n",
             "model_meta.json": json.dumps(seeds.bundle[0][1]).encode()}  # fmt: skip
    return _input(files, command_line(rng))


@_target("environment", "limits units cli.stderr_log", 2, 3, 4, 10, cost=2)
def _environment(rng: random.Random, seeds: Seeds) -> Input:
    files = {**seeds.engine, "run/records.jsonl": seeds.runs["bench"]["records.jsonl"]}
    call = rng.choice(("inspect m.onnx", "inspect m.engine.onnx", "report run", "cache list", "build m.onnx --dry-run",
    "lint m.onnx",
                       "bench m.onnx -b trtexec --dry-run"))  # fmt: skip
    return _input(files, _json_or_not(rng, call), env=environment(rng))
