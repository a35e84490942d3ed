"""What is fuzzed: for each parser valid files, which of them are changed, and calls that read them."""

from __future__ import annotations

import fnmatch
import importlib.util
import io
import itertools
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.command_lines import command_line, environment
from fuzz.inputs import Input
from fuzz.mutate import evil_pickle, mutate
from fuzz.seeds import Files, Seeds, zipped

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import stated_numbers

if _TORCH := importlib.util.find_spec("torch"):
    import pt2_members


@dataclass(frozen=True)
class Target:
    """One parser, or a group of parsers that the same calls reach."""

    name: str
    valid: Callable[[Seeds], Sequence[Files]]
    """Sets of files, of which an input has one."""
    changed: tuple[str, ...]
    """Patterns of the files that are changed; of several that fit mostly one is."""
    calls: tuple[str, ...]
    """A call is left out where it names a file that the set lacks."""
    codes: tuple[int, ...]
    """How a call may end, 0 aside: the documented codes that a wrong file of this kind can cause."""
    cost: int = 1
    """An input takes this many times what one of a quick target takes: that many times fewer are run."""
    env: Mapping[str, str] = field(default_factory=dict)

    def make(self, rng: random.Random, seeds: Seeds) -> Input:
        files = dict(rng.choice(self.valid(seeds)))
        fitting = [name for name in files if any(fnmatch.fnmatch(name, pattern) for pattern in self.changed)]
        for name in rng.sample(fitting, min(len(fitting), rng.choice((1, 1, 1, 2)))):
            files[name] = mutate(rng, name, files[name])
        return Input(self.name, files, [self._call(rng, files)], self.env)

    def _call(self, rng: random.Random, files: Files) -> list[str]:
        words = rng.choice([call for call in map(str.split, self.calls) if _can_read(call, files)])
        document = words[0][0] != "@" and "--format" not in words and rng.random() < 0.3
        return [*words, *(["--json"] if document else [])]


def _can_read(call: Sequence[str], files: Files) -> bool:
    """True where the files that the call names are there."""
    there = {name.partition("/")[0] for name in files}
    named = [word for before, word in itertools.pairwise(call) if "." in word and before != "-o"]
    return there.issuperset(named) and (call[0] == "cache" or not there.isdisjoint(call))


@dataclass(frozen=True)
class _Drawn(Target):
    """Files and a call as a module of `benchmarks` draws them."""

    draw: Callable[[random.Random, Seeds], tuple[Files, str | list[str]]] = stated_numbers.draw

    def make(self, rng: random.Random, seeds: Seeds) -> Input:
        files, call = self.draw(rng, seeds)
        return Input(self.name, files, [call.split() if isinstance(call, str) else call], self.env)


class _Environment(Target):
    def make(self, rng: random.Random, seeds: Seeds) -> Input:
        return Input(self.name, self.valid(seeds)[0], [self._call(rng, self.valid(seeds)[0])], environment(rng))


# ------------------------------------------------------------------------------------------------ sets of files


def _json(document: Any) -> bytes:
    return json.dumps(document).encode()


def _only(files: Files, *names: str) -> Files:
    return {name: files[name] for name in names}


def _running(seeds: Seeds) -> list[Files]:
    return [files for name, files in seeds.networks.items() if name != "loop"]


def _arrays(seeds: Seeds) -> list[Files]:
    array, buffer = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4), io.BytesIO()
    np.save(buffer, array)
    engine = _only(seeds.engine, "m.onnx", "m.engine.onnx", "m.engine.onnx.json")
    return [engine | {"x.npy": buffer.getvalue()}, engine | {"x.npz": zipped({"x.npy": buffer.getvalue()})}]


def _pictures(seeds: Seeds) -> list[Files]:
    return [
        *({f"x.{name.partition('.')[2]}": raw} for name, raw in seeds.pictures.items()),
        dict(seeds.declared) | _only(seeds.pictures, "x.png"),
    ]


def _datasets(seeds: Seeds) -> list[Files]:
    document, pictures = seeds.coco
    annotated = {f"val/{name}": raw for name, raw in pictures.items()} | {"val/annotations.json": _json(document)}
    declared = {"preprocess": {"size": [8, 8]}, "postprocess": {"decode": "yolov10", "classes": ["cat", "dog"]}}
    classes = {f"val/{name}/{index}.png": seeds.pictures["x.png"] for name in ("red", "green") for index in range(2)}
    arrays = {}
    for name, array in (("images", np.zeros((3, 9, 11, 3), np.uint8)), ("labels", np.array([0, 1, 2]))):
        buffer = io.BytesIO()
        np.save(buffer, array)
        arrays[f"{name}.npy"] = buffer.getvalue()
    return [
        annotated, annotated | dict(seeds.detector) | {"p.json": _json(declared)}, classes, dict(seeds.declared) | classes,
        {"val.npz": zipped(arrays)}, dict(seeds.declared) | {"val.npz": zipped(arrays)},
    ]  # fmt: skip


_DECLARED: dict[str, Any] = {
    "preprocess": {"size": [8, 8], "resize": "letterbox", "interpolation": "bilinear", "pad_value": [114, 114, 114],
                   "channels": "RGB", "layout": "NCHW", "scale": 0.0039, "mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0],
                   "dtype": "float32", "input": "images"},
    "postprocess": {"decode": "classify", "classes": ["a", "b", "c"], "activation": "softmax", "min_score": 0.001,
                    "output": "scores"},
    "version": 1,
}  # fmt: skip


def _declarations(seeds: Seeds) -> list[Files]:
    import onnx

    picture = _only(seeds.pictures, "x.png")
    made = [dict(seeds.declared) | picture | {"p.json": _json(_DECLARED)}]
    ultralytics = {"names": "{0: 'a', 1: 'b', 2: 'c'}", "task": "classify", "imgsz": "[8, 8]"}
    for metadata in ({"trt_engine.vision": json.dumps(_DECLARED)}, ultralytics):
        model = onnx.load_from_string(seeds.declared["d.onnx"])
        del model.metadata_props[:]
        for key, value in metadata.items():
            model.metadata_props.add(key=key, value=value)
        made.append({"d.onnx": model.SerializeToString()} | picture)
    return made


def _plans(seeds: Seeds) -> list[Files]:
    beside = {"m.onnx": seeds.engine["m.onnx"], "x.npz": seeds.calibration["x.npz"]}
    made = [{"plan.yaml": _json(plan)} | beside for plan in seeds.plans]
    begun = {f"out/{name}": raw for name, raw in seeds.runs["matrix"].items()}
    return [*made, made[0] | begun]


def _runs(seeds: Seeds) -> list[Files]:
    return [
        {f"run/{file}": raw for file, raw in run.items()}
        for name, run in seeds.runs.items()
        if not name.startswith("hostile")
    ]


def _compared(seeds: Seeds) -> list[Files]:
    line = seeds.runs["bench"]["records.jsonl"].splitlines()[0] + b"\n"
    return [{"a.jsonl": line, "b.jsonl": line}, dict(seeds.engine) | {"b.json": _json(seeds.baseline)}]


def _layers(seeds: Seeds) -> list[Files]:
    beside = {"b.json": _json(seeds.layer_documents[0]), "p.json": _json(seeds.layer_times[0])}
    return [
        {"a.json": _json(one), "q.json": _json(seeds.layer_times[0]), "t.json": _json(seeds.layer_times[1])} | beside
        for one in seeds.layer_documents
    ]


def _profiles(seeds: Seeds) -> list[Files]:
    raw = seeds.runs["profiled"]["profile.json"]
    return [{"a.json": raw, "b.json": raw}]


def _sources(seeds: Seeds) -> list[Files]:
    return [*seeds.sources, {"x": evil_pickle(random.Random(0))}]


def _places(seeds: Seeds) -> list[Files]:
    return [{**seeds.engine, "x.npz": seeds.calibration["x.npz"], "x.png": seeds.pictures["x.png"],
             "run/records.jsonl": seeds.runs["bench"]["records.jsonl"], "plan.yaml": b"models: [m.onnx]\n",
             "model_meta.json": _json(seeds.bundle[0][1])}]  # fmt: skip


# ------------------------------------------------------------------------------------------------ the table

_READING = (
    "inspect m.onnx", "inspect m.onnx", "lint m.onnx", "lint m.onnx", "diff m.onnx m.onnx", "build m.onnx --dry-run",
    "convert m.onnx --dry-run -o out.onnx", "size m.onnx --dry-run -o out", "cast m.onnx --to fp16 --dry-run -o out.onnx",
)  # fmt: skip
_RUNNING = (
    "cast m.onnx --to fp16 --no-parity -o out.onnx", "cast m.onnx --to bf16 -o out.onnx",
    "quantize m.onnx --to int8 --calib-data random --quantize-outputs -o out.onnx",
    "quantize m.onnx --to fp8 --calib-data random -o out.onnx", "build m.onnx --no-parity -o out.engine.onnx",
    "build m.onnx --precision fp16 -o out.engine.onnx", "infer m.onnx --random", "ranges m.onnx",
    "convert m.onnx -o out.onnx", "bench m.onnx --dry-run",
)  # fmt: skip
_ENGINE = (
    "inspect m.engine.onnx", "inspect m.engine.onnx --run", "infer m.engine.onnx --random", "bench m.engine.onnx --dry-run",
    "diff m.engine.onnx m.engine.onnx", "compare m.engine.onnx m.engine.onnx --dry-run", "profile m.engine.onnx --dry-run",
    "inspect m.engine.onnx.json",
)  # fmt: skip
_ARRAYS = tuple(
    call.format(file)
    for file in ("x.npy", "x.npz")
    for call in ("infer m.engine.onnx --input {}", "ranges m.onnx --calib-data {}", "@dataset {}",
                 "bench m.engine.onnx --inputs {} --dry-run", "cast m.onnx --to fp16 --calib-data {} -o out.onnx")
)  # fmt: skip
_REPORTS = ("report run", "report run --format md", "report run --format html", "inspect run", "pack run -o out.zip")
_CACHED = (
    "quantize m.onnx --to int8 --calib-data x.npz --calibrator minmax --cache cache.json --quantize-outputs -o out.onnx"
)


def _table() -> list[Target]:
    def files(take: Callable[[Seeds], Files]) -> Callable[[Seeds], list[Files]]:
        return lambda seeds: [take(seeds)]

    every, none = ("*",), ()
    weights = ("m.onnx", "weights.bin")
    logs = lambda seeds: [{"x.log": text.encode()} for text in (*seeds.trtexec_logs, seeds.bench_log)]  # noqa: E731
    bundles = lambda seeds: [  # noqa: E731
        dict(seeds.bundle[1]) | {"model_meta.json": _json(document)} for document in seeds.bundle[0]
    ]
    ncu = lambda seeds: [{"ncu.csv": text.encode()} for text in seeds.profiler_texts.values()]  # noqa: E731
    images = tuple(f"@image x.{kind}" for kind in ("png", "jpeg", "bmp", "gif", "tiff", "webp", "ppm"))
    store = ("cache list", "cache list", "cache prune --all --dry-run", "cache prune --max-size 1KiB")
    converted = tuple(
        call.format(name)
        for name in ("x", "x.pt", "s")
        for call in ("@detect {}", "convert {} --dry-run --offline -o out.onnx")
    )
    started = ("inspect m.onnx", "inspect m.engine.onnx", "report run", "cache list", "build m.onnx --dry-run",
               "lint m.onnx", "bench m.onnx -b trtexec --dry-run")  # fmt: skip
    return [
        Target("onnx", lambda seeds: list(seeds.networks.values()), weights, _READING, (2, 4, 5, 11)),
        Target("onnx-verbs", _running, weights, _RUNNING, (2, 4, 5, 6, 7, 10, 11), 4),
        Target("passports", files(lambda seeds: seeds.engine), ("*.json",), _ENGINE, (2, 4, 10)),
        Target("plan-headers", lambda seeds: seeds.plan_headers, every, (
            "inspect m.engine", "inspect m.engine", "diff m.engine m.engine", "convert m.engine --dry-run -o o.onnx",
        ), (2, 3, 4, 10), 2),
        Target("store", lambda seeds: seeds.stores, ("store/*.json",), store, (2, 3, 4, 10), 2,
               {"TRT_ENGINE_STORE": "store"}),
        Target("arrays", _arrays, ("x.*",), _ARRAYS, (2, 4)),
        Target("pictures", _pictures, ("x.*",), (*images, "infer d.engine.onnx --image x.png"), (2, 4)),
        Target("datasets", _datasets, ("val*",), (
            "@dataset val", "@dataset val.npz", "evaluate d.onnx --dataset val --preprocess p.json",
            "evaluate d.engine.onnx --dataset val", "evaluate d.engine.onnx --dataset val.npz",
        ), (2, 4), 2),
        Target("declarations", _declarations, ("p.json", "d.onnx"), (
            "infer d.engine.onnx --image x.png --preprocess p.json", "build d.onnx --preprocess p.json --dry-run",
            "inspect d.onnx", "infer d.onnx --image x.png",
        ), (2, 4, 10), 2),
        Target("calibration", files(lambda seeds: seeds.calibration), ("cache.json",), ("@calibrate cache.json", _CACHED),
               (2, 4, 7)),
        Target("run-plans", _plans, ("plan.yaml", "out/*.json"), ("run plan.yaml -o out --dry-run",), (2, 3, 4), 2),
        Target("bundle-meta", bundles, ("model_meta.json",), ("bundle model_meta.json -o out --dry-run",), (2, 4)),
        Target("trtexec-logs", logs, every, ("bench --parse-log x.log",), (2,)),
        Target("records", _runs, every, _REPORTS, (2,), 3),
        Target("compared-records", _compared, ("b.*",), (
            "compare a.jsonl b.jsonl", "compare m.engine.onnx --baseline b.json --dry-run",
        ), (2, 7, 8, 9, 10, 130), 2),
        Target("packs", lambda seeds: seeds.packs, every, (
            "report x.zip", "inspect x.zip", "report x.tar.gz", "inspect x.tar.gz",
        ), (2, 4), 3),
        Target("layer-documents", _layers, ("a.json", "p.json", "t.json"), (
            "diff a.json b.json", "diff a.json b.json --layer-times p.json q.json", "@times t.json",
        ), (2, 4, 10)),
        Target("profile-documents", _profiles, ("a.json",), (
            "diff a.json b.json", "diff b.json a.json", "diff a.json b.json --layer-times a.json b.json",
        ), (2, 4, 10), 2),
        Target("ncu", ncu, every, ("@ncu ncu.csv",), (2, 3)),
        Target("nsys-exports", files(lambda seeds: seeds.nsys_export), every, ("@nsys x.sqlite",), (2, 3)),
        Target("kineto", files(lambda seeds: {"trace.json": _json(seeds.kineto)}), every, ("@kineto trace.json",), (2, 3)),
        Target("sources", _sources, every, converted, (2, 3, 4)),
        _Drawn("stated-numbers", _places, none, none, (2, 3, 4, 5, 6, 7, 10, 11), 2),
        _Drawn("command-lines", _places, none, none, (2, 3, 4, 5, 6, 10, 12),
               draw=lambda rng, seeds: (_places(seeds)[0], command_line(rng))),
        _Environment("environment", _places, none, started, (2, 3, 4, 10), 2),
        *([_Drawn("programs", _places, none, none, pt2_members.CODES, 8, draw=pt2_members.draw)] if _TORCH else []),
    ]  # fmt: skip


TARGETS = {target.name: target for target in _table()}
