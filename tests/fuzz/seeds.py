"""Valid files that mutations start from, made once for each process by the package itself, small and with fixed figures."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sqlite3
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).resolve().parents[1]
for _folder in ("", "reporting", "profiling", "bundling", "trt", "benchmark"):
    if str(TESTS / _folder) not in sys.path:
        sys.path.append(str(TESTS / _folder))

from fuzz.networks import NETWORKS  # noqa: E402
from onnx_models import FLOAT, node, save  # noqa: E402

Files = dict[str, bytes]


def files_in(folder: Path) -> Files:
    """Every file of the folder by its path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class Seeds:
    """The valid files, in `folder`; each is made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    # -------------------------------------------------------------------------------------------- networks

    @cached_property
    def networks(self) -> dict[str, Files]:
        """ONNX models by name; the model itself is `m.onnx`."""
        made = {}
        for name, make in NETWORKS.items():
            place = self._place(name)
            make(place / "m.onnx")
            made[name] = files_in(place)
        return made

    @cached_property
    def declared(self) -> Files:
        """A classifier of pictures that declares how they become its input: `d.onnx`, and its engine."""
        from trt_engine.vision.spec import Postprocess, Preprocess, Vision, declare

        place = self._place("declared")
        path = place / "d.onnx"
        save(path, [node("GlobalAveragePool", "images", "m"), node("Flatten", "m", "scores")],
             {"images": (FLOAT, ["batch", 3, 8, 8])}, {"scores": (FLOAT, ["batch", 3])})  # fmt: skip
        declare(path, Vision(Preprocess((8, 8)), Postprocess("classify", classes=("red", "green", "blue"))), path)
        self._verb(place, "build", "d.onnx", "--no-parity", "-o", "d.engine.onnx")
        return self._with_fixed_figures(files_in(place))

    @cached_property
    def detector(self) -> Files:
        """A detector in one shape of output that `yolov10` decodes: `d.onnx`."""
        place = self._place("detector")
        save(place / "d.onnx", [node("ReduceMean", "images", "m", keepdims=0), node("Mul", "rows m", "boxes")],
             {"images": (FLOAT, [1, 3, 8, 8])}, {"boxes": (FLOAT, [1, 4, 6])},
             {"rows": np.linspace(0.5, 6, 24, dtype=np.float32).reshape(1, 4, 6)})  # fmt: skip
        return files_in(place)

    @cached_property
    def engine(self) -> Files:
        """`m.onnx`, its engine for the CPU and the passport beside it."""
        place = self._place("engine")
        NETWORKS["gemm"](place / "m.onnx")
        self._verb(place, "build", "m.onnx", "--batch", "1:2:4", "-o", "m.engine.onnx")
        return self._with_fixed_figures(files_in(place))

    @cached_property
    def passport(self) -> Any:
        return json.loads(self.engine["m.engine.onnx.json"])

    @cached_property
    def calibration(self) -> Files:
        """`m.onnx`, arrays for it and the cache of ranges that calibration kept."""
        place = self._place("calibration")
        NETWORKS["gemm"](place / "m.onnx")
        np.savez(place / "x.npz", x=np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4))
        self._verb(place, "quantize", "m.onnx", "--to", "int8", "--calib-data", "x.npz", "--calibrator", "minmax",
                   "--cache", "cache.json", "--quantize-outputs", "-o", "q.onnx")  # fmt: skip
        return {name: raw for name, raw in files_in(place).items() if name in ("m.onnx", "x.npz", "cache.json")}

    # -------------------------------------------------------------------------------------------- records

    @cached_property
    def runs(self) -> dict[str, Files]:
        """Run folders as the verbs leave them, with a few samples in each measurement."""
        import sample_matrix
        import sample_runs

        made = {}
        for name, make in (sample_runs.RUNS | sample_matrix.MATRICES).items():
            place = self._place(f"run_{name}")
            make(place / "run")
            made[name] = {
                file.removeprefix("run/"): _short(file, raw)
                for file, raw in files_in(place).items()
                if file.endswith((".json", ".jsonl", ".yaml"))
            }
        return made

    @cached_property
    def bench_log(self) -> str:
        """A log of our own `bench`."""
        import sample_runs

        from trt_engine.benchmark.trtexec_style_log import render_log

        return render_log(sample_runs.record(8, 9.6, 40))

    @cached_property
    def baseline(self) -> Any:
        """What `compare --save-baseline` writes."""
        import sample_matrix

        from trt_engine.verbs.compare.baseline import write_baseline

        place = self._place("baseline")
        report = sample_matrix.compare_report()
        write_baseline(place / "b.json", report.sides[0], report)
        return json.loads(_short("b.json", (place / "b.json").read_bytes()))

    @cached_property
    def trtexec_logs(self) -> list[str]:
        paths = sorted((TESTS / "trtexec" / "logs").rglob("*.log"))
        return [path.read_text(errors="replace") for path in paths]

    # -------------------------------------------------------------------------------------------- profilers

    @cached_property
    def layer_documents(self) -> list[Any]:
        """What TensorRT's inspector writes of an engine, of versions 10 and 11."""
        import test_plan_layers as known

        layers = [known.CONV, known.REFORMAT, known.GEMM, known.SOFTMAX, known.MOVE]
        return [
            known.document(*layers),
            known.document(*layers[:3]),
            known.document(*map(known.to_eleven, layers)),
            ["[ONNX Layer: a]", "[ONNX Layer: b] + relu"],
        ]

    @cached_property
    def layer_times(self) -> list[Any]:
        """What `trtexec --exportProfile` and `--exportTimes` write."""
        rows = [
            {"name": name, "timeMs": 4.5, "averageMs": 0.09, "medianMs": 0.08, "percentage": 31.25}
            for name in ("/model.0/conv/Conv + PWN(/model.0/act/Sigmoid, /model.0/act/Mul)", "__myl_FcAdd_myl0_4")
        ]
        query = {"startEnqMs": 1, "h2dMs": 0.2, "computeMs": 0.8, "d2hMs": 0.1, "latencyMs": 1.1}
        return [[{"count": 50}, *rows], [query, query]]

    @cached_property
    def profiler_texts(self) -> dict[str, str]:
        """Output of ncu, by file name."""
        from nsight_samples import SAMPLES, sample

        return {path.name: sample(path.name) for path in sorted(SAMPLES.glob("*.csv"))}

    @cached_property
    def kineto(self) -> Any:
        document = json.loads((TESTS / "profiling" / "kineto-2.11.json").read_text())
        document["traceEvents"] = document["traceEvents"][:60]
        return document

    @cached_property
    def nsys_export(self) -> Files:
        """A database as `nsys export` makes it, with two inferences of three activities: `x.sqlite`."""
        schema = (TESTS / "profiling" / "samples" / "nsys-sqlite-schema-2024.6.2.sql").read_text()
        tid, rows = 77 * 0x1000000 + 5, []
        for index, name in enumerate(("void f<1>(int)", "gemm", "cudaLaunchKernel_v7000"), 1):
            rows.append(f"INSERT INTO StringIds VALUES ({index}, '{name}')")
        for turn in range(2):
            at = 10_000 * turn
            rows.append("INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, domainId) VALUES "
                        f"({at + 10}, {at + 9000}, 59, 'trt_engine inference {turn}', {tid}, 0)")  # fmt: skip
            rows.append("INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, domainId) VALUES "
                        f"({at + 20}, {at + 5000}, 59, 'block', {tid}, 0)")  # fmt: skip
            for step in range(3):
                start, number = at + 100 + 900 * step, 10 * turn + step + 1
                rows.append(
                    f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES ({start}, {start + 30}, 0, {tid}, {number}, 3, 0, NULL)"
                )
            start, number = at + 300, 10 * turn + 1
            rows.append(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, contextId, streamId, correlationId,"
                " globalPid, demangledName, shortName, registersPerThread, gridX, gridY, gridZ, blockX, blockY, blockZ,"
                " staticSharedMemory, dynamicSharedMemory, localMemoryPerThread, localMemoryTotal, gridId, graphNodeId)"
                f" VALUES ({start}, {start + 200}, 0, 1, 7, {number}, {77 * 0x1000000}, 1, 2, 32, 2, 1, 1, 64, 1, 1,"
                " 0, 512, 0, 0, 1, 9)"
            )
            rows.append("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY (start, end, deviceId, contextId, streamId, correlationId,"
                        f" globalPid, bytes, copyKind) VALUES ({start + 900}, {start + 950}, 0, 1, 7, {number + 1},"
                        f" {77 * 0x1000000}, 64, 2)")  # fmt: skip
            rows.append("INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET (start, end, deviceId, contextId, streamId, correlationId,"
                        f" globalPid, value, bytes) VALUES ({start + 1800}, {start + 1810}, 0, 1, 7, {number + 2},"
                        f" {77 * 0x1000000}, 0, 32)")  # fmt: skip
        with contextlib.closing(sqlite3.connect(":memory:")) as database:
            database.executescript(schema + ";\n".join(["", *rows, ""]))
            for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                if not database.execute(f'SELECT COUNT(*) FROM "{table}"').fetchone()[0]:
                    database.execute(f'DROP TABLE "{table}"')
            database.commit()
            return {"x.sqlite": database.serialize()}

    # -------------------------------------------------------------------------------------------- pictures and data

    @cached_property
    def pictures(self) -> Files:
        from PIL import Image

        values = np.random.default_rng(4).integers(0, 256, (9, 11, 3), dtype=np.uint8)
        made = {}
        for kind in ("png", "jpeg", "bmp", "gif", "tiff", "webp", "ppm"):
            buffer = io.BytesIO()
            try:
                Image.fromarray(values).save(buffer, kind)
            except (OSError, KeyError):  # a build of pillow without this format
                continue
            made[f"x.{kind}"] = buffer.getvalue()
        for mode in ("L", "LA", "P", "RGBA", "1", "I;16", "CMYK"):
            buffer = io.BytesIO()
            image = Image.fromarray(values)
            image = Image.fromarray(values[..., 0].astype(np.uint16)) if mode == "I;16" else image.convert(mode)
            image.save(buffer, "tiff" if mode == "CMYK" else "png")
            made[f"{mode.replace(';', '')}.{'tiff' if mode == 'CMYK' else 'png'}"] = buffer.getvalue()
        return made

    @cached_property
    def coco(self) -> tuple[Any, Files]:
        """COCO annotations of two pictures, and the pictures."""
        pictures = {f"images/{index}.png": self.pictures["x.png"] for index in (1, 2)}
        document = {
            "images": [{"id": index, "file_name": f"{index}.png", "width": 11, "height": 9} for index in (1, 2)],
            "annotations": [
                {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 4, 4], "area": 16, "iscrowd": 0},
                {"id": 2, "image_id": 1, "category_id": 3, "bbox": [0, 0, 9.5, 8], "area": 76, "iscrowd": 1},
                {"id": 3, "image_id": 2, "category_id": 1, "bbox": [2, 2, 3, 3]},
            ],
            "categories": [{"id": 1, "name": "cat"}, {"id": 3, "name": "dog"}],
        }
        return document, pictures

    @cached_property
    def bundle(self) -> tuple[list[Any], Files]:
        """Descriptions of a model of two components, and the components."""
        place = self._place("bundle")
        NETWORKS["gemm"](place / "a.onnx")
        NETWORKS["gemm"](place / "b.onnx")
        full = {
            "name": "two", "version": 3,
            "components": {
                "a": {"file": "a.onnx", "inputs": {"x": ["N", 4]}, "outputs": {"y": ["N", 4]},
                      "dimensions": {"N": {"min": 1, "opt": 2, "max": 3}},
                      "build": {"precision": "fp32", "options": {"intra_op_threads": 2}, "parity": False}},
                "b": "b.onnx",
            },
            "dimensions": {"batch": "1:2:4"},
            "connections": ["a.y -> b.x"],
        }  # fmt: skip
        short = {"components": ["a", {"name": "b", "inputs": [{"name": "x", "shape": ["N", 4]}]}],
                 "connections": [{"from": "a.y", "to": "b.x", "transpose": [0, 1]}]}  # fmt: skip
        return [full, short], files_in(place)

    @cached_property
    def plans(self) -> list[Any]:
        """Run plans as values; the model is `m.onnx`."""
        full = {
            "title": "Three", "models": [{"name": "digits", "path": "m.onnx", "precisions": ["fp32", "fp16", "int8"]}],
            "backends": ["onnxruntime", {"backend": "onnxruntime", "providers": ["cpu"], "label": "own",
                                         "options": {"intra_op_threads": 1}}],
            "batches": [1, 8], "modes": ["build", "bench"], "warmup": 5, "iterations": 10, "calib_data": "x.npz",
            "bench": {"duration": "1s"}, "profile": {"inferences": 3},
        }  # fmt: skip
        whole = {
            "models": {"m": {"path": "m.onnx", "batches": [2]}}, "batches": [1], "modes": "all", "device": "cpu",
            "dataset": "val", "accuracy": {"max_drop": 0.1}, "container": {"image": "a/b:c", "arguments": ["--privileged"]},
        }  # fmt: skip
        return [full, whole, {"models": ["m.onnx"]}]

    # ----------------------------------------------------------------- plans, packs, sources of other libraries

    @cached_property
    def plan_headers(self) -> list[Files]:
        """Plans that are a header and nothing behind it, of both libraries, bare and with a passport."""
        versions = ((8, 6, 1, 6), (10, 3, 0, 26), (11, 1, 0, 0), (0, 0, 0, 0))
        plans = [b"ftrt" + (96).to_bytes(4, "little") + bytes(16) + bytes(version) + bytes(200) for version in versions]
        for nbytes in (64, 1 << 63):
            words = (2, nbytes, int.from_bytes(bytes((1, 7, 1, 116)) + b"vtrt", "little"), 1, 0, 0, 7)
            plans.append(b"vtrt\0\0\0\0" + b"".join(word.to_bytes(8, "little") for word in words) + bytes(136))
        passport = json.loads(json.dumps(self.passport).replace("m.engine.onnx", "m.engine"))
        made = [{"m.engine": plan} for plan in plans]
        for plan in plans:
            library = "tensorrt" if plan[:1] == b"f" else "tensorrt-rtx"
            passport |= {"backend": library, "device": "cuda:0"}
            passport["requirements"] |= {"library": library, "version": "10.3.0", "compute_capability": "9.0",
                                         "compute_capabilities": ["8.9", "12.0"], "gpu": "NVIDIA H200"}  # fmt: skip
            made.append({"m.engine": plan, "m.engine.json": json.dumps(passport).encode()})
        return made

    @cached_property
    def stores(self) -> list[Files]:
        """A store of one engine by keys that are right, odd and words, and the model."""
        made = []
        for key in ("0123456789abcdef" * 2, "f" * 32, "x", "thesis"):
            passport = json.loads(json.dumps(self.passport).replace("m.engine.onnx", "m.onnx")) | {"key": key}
            place = f"store/engines/{key}/m.onnx"
            made.append({place: self.engine["m.engine.onnx"], f"{place}.json": json.dumps(passport).encode(),
                         f"store/engines/{key}/notes.txt": b"x", "m.onnx": self.engine["m.onnx"]})  # fmt: skip
        return made

    @cached_property
    def packs(self) -> list[Files]:
        """Archives of run folders with their lists of files."""
        made: list[Files] = []
        for name in ("cpu", "bench", "matrix", "compared", "profiled"):
            files = {f"run/{file}": raw for file, raw in self.runs[name].items()}
            listed = [{"path": file, "nbytes": len(raw), "digest": "sha256:" + "0" * 64} for file, raw in files.items()]
            manifest = {"schema": "trt-engine/pack", "schema_version": 1, "files": listed}
            files["run/PACK.json"] = json.dumps(manifest).encode()
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
                for file, raw in files.items():
                    info = tarfile.TarInfo(file)
                    info.size = len(raw)
                    archive.addfile(info, io.BytesIO(raw))
            made += [{"x.zip": zipped(files)}, {"x.tar.gz": buffer.getvalue()}]
        return made

    @cached_property
    def sources(self) -> list[Files]:
        """What `convert` tells apart, each as its first bytes: `x`, `x.pt` or the folder `s`."""
        ordered = b"\x80\x02ccollections\nOrderedDict\nq\x00)Rq\x01."
        tensor = (
            b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01ctorch._utils\n_rebuild_tensor_v2\nq\x02((X\x07\x00\x00\x00storageq\x03"
            b"ctorch\nFloatStorage\nq\x04X\x01\x00\x00\x000q\x05X\x03\x00\x00\x00cpuq\x06K\x04tq\x07QK\x00K\x04\x85q\x08K\x01"
            b"\x85q\x09\x89ccollections\nOrderedDict\nq\x0a)Rq\x0btq\x0cRq\x0ds."
        )
        stacked = (
            b"\x80\x04\x95\x20\x00\x00\x00\x00\x00\x00\x00\x8c\x0bcollections\x94\x8c\x0bOrderedDict\x94\x93\x94)R\x94."
        )
        weights = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        archives = (
            {"m/data.pkl": tensor, "m/version": b"3\n", "m/data/0": b"\0" * 16, "m/byteorder": b"little"},
            {"m/data.pkl": ordered, "m/constants.pkl": b"\x80\x02).", "m/code/__torch__.py": b"class A(Module): pass",
             "m/version": b"3\n"},
            {"ep/archive_format": b"pt2", "ep/version": b"0", "ep/models/model.json": b"{}",
             "ep/data/weights/model.pt": tensor, "ep/data/sample_inputs/model.pt": ordered},
            {"config.json": b'{"class_name": "Sequential", "config": {"layers": []}}', "metadata.json": b"{}",
             "model.weights.h5": b"\x89HDF\r\n\x1a\n"},
        )  # fmt: skip
        return [
            *({"x.pt": zipped(members)} for members in archives),
            {"x": ordered}, {"x": stacked}, {
                "x": b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}q\x00." + tensor},
            {"x": b"\x1c\0\0\0TFL3" + bytes(range(60))},
            {"x": b"\x89HDF\r\n\x1a\n" + b"\0" * 90},
            {"x": len(weights).to_bytes(8, "little") + weights + b"\0" * 4},
            {"x": b"\x0a\x0c\x0a\x01a\x12\x07Const\x12\x00\x22\x03\x08\x87\x01"},
            {"x": b"ftrt" + bytes(40)}, {"x": self.networks["gemm"]["m.onnx"]},
            {"s/saved_model.pb": b"\x08\x01\x12\x04\x0a\x02\x0a\x00", "s/variables/v.index": b""},
            {"s/config.json": b'{"model_type": "bert", "architectures": ["BertModel"]}',
                           "s/model.safetensors": len(weights).to_bytes(8, "little") + weights + b"\0" * 4},
        ]  # fmt: skip

    # -------------------------------------------------------------------------------------------- making

    def _place(self, name: str) -> Path:
        place = self.folder / name
        place.mkdir()
        return place

    def _verb(self, place: Path, *args: str) -> None:
        from trt_engine.cli.main import run

        with _inside(place):
            code = run(list(args))
        if code:
            raise RuntimeError(f"the seed `{' '.join(args)}` ended with {code}")

    def _with_fixed_figures(self, files: Mapping[str, bytes]) -> Files:
        """The same bytes every time on one machine: what a passport says of time is fixed."""
        made = dict(files)
        for name in [name for name in files if name.endswith(".engine.onnx.json")]:
            document = json.loads(files[name])
            document["build"]["seconds"] = 0.125
            made[name] = json.dumps(document, indent=1).encode()
        return made


def zipped(members: Mapping[str, bytes]) -> bytes:
    """An archive of these members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in members.items():
            archive.writestr(zipfile.ZipInfo(name), raw)
    return buffer.getvalue()


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _short(name: str, raw: bytes) -> bytes:
    """The records with at most eight samples in a list, on one line each."""

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cut(item) for key, item in value.items()}
        if isinstance(value, list):
            numbers = len(value) > 8 and all(isinstance(item, float) for item in value)
            return [cut(item) for item in (value[:8] if numbers else value)]
        return value

    if name.endswith(".jsonl"):
        return b"".join(json.dumps(cut(json.loads(line))).encode() + b"\n" for line in raw.splitlines())
    return json.dumps(cut(json.loads(raw))).encode() if name.endswith(".json") else raw
