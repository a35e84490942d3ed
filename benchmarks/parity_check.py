"""Does the comparison of outputs let right implementations pass, and catch planted defects?

    .venv-full/bin/python benchmarks/parity_check.py              every network and format, twice; the records
    .venv-full/bin/python benchmarks/parity_check.py --only yolo --seeds 0 --formats int8   some, on stdout alone

Three trained networks of the examples and those of `parity_networks.py` with random weights. Each is brought to each format
and computed in two ways; both are right, so every comparison must pass:

    fp32        ONNX Runtime's optimised kernels, and its plain ones
    tf32, fp16  weights in FP16; every result rounded to FP16, and none (kernels that fuse round less often)
    bf16        the same with BF16
    int8 ... mxfp8   the quantised graph (NVFP4, MXFP8: its emulation) optimised and plain; and plain on an input that is
                     changed by a hundred-thousandth: values next to a step fall on its other side

Then defects are planted in the outputs of the first way: every one must be caught. `given` is the quantised network compared
with the original, which `quantize` refuses where a channel is lost.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from onnx import TensorProto, numpy_helper

from trt_engine.environment import Environment
from trt_engine.equivalence.parity import open_with_outputs, perturb_feeds
from trt_engine.equivalence.sorted_outputs import compare_outputs, sorted_outputs
from trt_engine.equivalence.tolerance import DEAD_STD_RATIO, TOLERANCES, Tolerance
from trt_engine.errors import TrtEngineError
from trt_engine.graph.emulate_half import emulate_half_precision
from trt_engine.graph.load import open_model, read_proto
from trt_engine.precision.cast_model import cast
from trt_engine.precision.quantize_model import quantize
from trt_engine.precision.samples import open_samples
from trt_engine.records.parity import OutputError
from trt_engine.runtime.feeds import random_feeds, shapes_of
from trt_engine.verbs.calibration_images import images_as_inputs

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "parity-cpu.jsonl"
TRAINED = {
    "digits": (ROOT / "examples" / "digits" / "model.onnx", ROOT / "examples" / "digits" / "val" / "images"),
    "vit-trained": (ROOT / "examples" / "classifiers" / "vit.onnx", ROOT / "examples" / "classifiers" / "val.npz"),
    "resnet-trained": (
        ROOT / "examples" / "classifiers" / "resnet.onnx",
        ROOT / "examples" / "classifiers" / "val.npz",
    ),
}
FORMATS = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8", "int4", "nvfp4", "mxfp8")
BATCH, CALIBRATION = 4, 8

Feeds = dict[str, Any]
Outputs = dict[str, Any]


# ------------------------------------------------------------------------------------------------ two ways


def run(path: Path, feeds: Feeds, level: str = "none") -> Outputs:
    names = [spec.name for spec in open_model(path).signature.outputs]
    return dict(zip(names, open_with_outputs(path, names, level).run(names, feeds), strict=True))


def with_rounded_weights(path: Path, form: str) -> bytes:
    """The FP32 network whose weights alone are of the format: both ways have these."""
    proto = read_proto(path, weights=True)
    kind = np.dtype(np.float16 if form == "fp16" else ml_dtypes.bfloat16)
    for tensor in proto.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(tensor).astype(kind).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return proto.SerializeToString()


def ways(
    path: Path, form: str, feeds: Feeds, data: list[Feeds], seed: int, folder: Path
) -> Iterator[tuple[str, Outputs, Outputs, Callable[[float], Outputs]]]:
    """What to call the comparison, the outputs, what they are compared with, and that again on a perturbed input."""

    def again(roundoff: float) -> Outputs:
        return run(target, perturb_feeds(feeds, signature, roundoff))

    signature = open_model(path).signature
    target = path
    if form == "fp32":
        yield "kernels", run(path, feeds, "all"), run(path, feeds), again
    elif form in ("tf32", "fp16", "bf16"):
        made, rounded = folder / f"{form}.onnx", folder / f"{form}-rounded.onnx"
        cast(path, "bf16" if form == "bf16" else "fp16", out=made, keep_io=True, overwrite=True)
        rounded.write_bytes(emulate_half_precision(read_proto(made, weights=True), folder).SerializeToString())
        target = folder / f"{form}-weights.onnx"
        target.write_bytes(with_rounded_weights(path, "bf16" if form == "bf16" else "fp16"))
        yield "rounded", run(rounded, feeds), run(target, feeds), again
    else:
        target = folder / f"{form}.onnx"
        into: Mapping[str, Any] = {"emulate": target} if form in ("nvfp4", "mxfp8") else {"out": target}
        quantize(path, form, calib_data=data, overwrite=True, config=None, parity=False, **into)
        plain = run(target, feeds)
        yield "kernels", run(target, feeds, "basic" if form == "fp8" else "all"), plain, again
        yield "jitter", run(target, perturb_feeds(feeds, signature, 1e-5, seed + 1)), plain, again
        yield "given", plain, run(path, feeds), again


# ------------------------------------------------------------------------------------------------ defects


def _detector(change: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda output: change(output[:, 4:])


def _raise(scores: Any) -> None:
    scores += 0.3


def _dead(scores: Any) -> None:
    scores[:] = 0.3


def _equal(scores: Any) -> None:
    scores[:] = scores.mean()


def _one_wrong(scores: Any) -> None:
    scores[:, 17] = scores[:, 17, ::-1].copy()


def _swapped(scores: Any) -> None:
    scores[:, [10, 11]] = scores[:, [11, 10]]


DETECTOR = {
    "+0.3 on every score": _raise, "dead class head": _dead, "all scores equal": _equal, "one wrong channel": _one_wrong,
    "swapped classes": _swapped,
}  # fmt: skip


def planted(net: str, got: Outputs, want: Outputs) -> Iterator[tuple[str, Outputs]]:
    """The outputs with one defect each."""
    for name, array in want.items():
        if array.dtype.kind != "f" or array.ndim < 2:
            continue
        if net in ("yolo", "digits"):
            for title, change in DETECTOR.items():
                if net == "digits" and title in ("one wrong channel", "swapped classes"):
                    continue  # on few of its scenes there are both classes
                wrong = got[name].copy()
                change(wrong[:, 4:])
                yield f"{name}: {title}", {**got, name: wrong}
        axis = 1 if array.ndim in (2, 4) else array.ndim - 1
        scales = np.abs(want[name]).max(axis=tuple(at for at in range(array.ndim) if at != axis))
        order = np.argsort(scales)
        one, two = ((slice(None),) * axis + (int(order[at]),) for at in (len(order) // 2, -1))
        wrong = got[name].copy()
        wrong[one] = 0
        yield f"{name}: a dead channel", {**got, name: wrong}
        alike = np.sqrt(np.mean((want[name][one] - want[name][two]) ** 2)) <= 0.2 * scales.max()
        if alike:  # an output of one channel, or boxes of a network that has learnt none: to swap them is no defect
            continue
        wrong = got[name].copy()
        wrong[one], wrong[two] = got[name][two], got[name][one]
        yield f"{name}: swapped channels", {**got, name: wrong}


# ------------------------------------------------------------------------------------------------ the check


def inputs(net: str, path: Path, seed: int) -> tuple[Feeds, list[Feeds]]:
    """What is compared on, and what is calibrated with."""
    model = open_model(path)
    if net in TRAINED:
        made = list(
            open_samples(images_as_inputs(model, TRAINED[net][1]).calib_data, model.signature, batch=BATCH, limit=64)
        )
        if len(made) < 2:
            made *= 2
        return made[seed].feeds, [batch.feeds for batch in made[2:]] or [made[-1].feeds]
    shapes = shapes_of(model.signature, None, batch=BATCH)
    drawn = [random_feeds(model.signature, shapes, 100 * seed + at) for at in range(CALIBRATION + 1)]
    return drawn[0], drawn[1:]


class Judge:
    """What is objected to in outputs, as parity judges: by the model's sensitivity where they are beyond the tolerance."""

    def __init__(
        self, want: Outputs, again: Callable[[float], Outputs], ranked: tuple[str, ...], tolerance: Tolerance
    ) -> None:
        self._want, self._again, self._ranked, self._tolerance = want, again, ranked, tolerance
        self._moved: dict[str, OutputError] = {}

    def objections(self, got: Outputs) -> dict[str, str]:
        seen = compare_outputs(got, self._want, self._ranked, self._tolerance)
        if not self._moved and not all(self._tolerance.accepts(error) for error in seen.values()):
            moved = self._again(self._tolerance.roundoff)
            self._moved = compare_outputs(moved, self._want, self._ranked, self._tolerance)
        said = {name: self._tolerance.violation(error, self._moved.get(name)) for name, error in seen.items()}
        return {name: text for name, text in said.items() if text is not None}


def found(
    net: str, seed: int, form: str, way: str, alarm: bool, errors: dict[str, OutputError], objections: Any = None
) -> dict[str, Any]:
    return {
        "net": net, "seed": seed, "format": form, "way": way, "alarm": alarm,
        "outputs": {name: asdict(error) for name, error in errors.items()}, "objections": objections or {},
    }  # fmt: skip


def check(net: str, path: Path, seed: int, forms: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    feeds, data = inputs(net, path, seed)
    ranked = sorted_outputs(read_proto(path))
    for form in forms:
        tolerance = TOLERANCES.get(form, TOLERANCES["quantized"]).for_graph(read_proto(path, weights=True))
        with tempfile.TemporaryDirectory() as folder:
            try:
                for way, got, want, again in ways(path, form, feeds, data, seed, Path(folder)):
                    errors = compare_outputs(got, want, ranked, tolerance)
                    if way == "given":
                        alarm = any(error.std_ratio < DEAD_STD_RATIO for error in errors.values())
                        yield found(net, seed, form, way, alarm, errors)
                        continue
                    judge = Judge(want, again, ranked, tolerance)
                    objections = judge.objections(got)
                    yield found(net, seed, form, way, bool(objections), errors, objections)
                    for title, wrong in planted(net, got, want) if way in ("kernels", "rounded") else ():
                        told = judge.objections(wrong)
                        yield {
                            "net": net, "seed": seed, "format": form, "planted": title, "caught": bool(told), "said": told,
                        }  # fmt: skip
            except TrtEngineError as error:
                yield {"net": net, "seed": seed, "format": form, "refused": error.message}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="these networks")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument(
        "--networks", type=Path, help="where the random networks are kept; a temporary folder if not given"
    )
    parser.add_argument("--out", type=Path, help="the records; `benchmarks/results/parity-cpu.jsonl` where all is run")
    given = parser.parse_args()
    out = given.out or (RESULTS if given.only is None and len(given.formats) == len(FORMATS) else None)
    records: list[dict[str, Any]] = []
    if out is not None:
        out.write_text(json.dumps({"environment": asdict(Environment.detect(None))}) + "\n")
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.networks or Path(temporary)
        program = [sys.executable, str(Path(__file__).with_name("parity_networks.py")), str(folder)]
        for seed in given.seeds:
            wanted = [] if given.only is None else [name for name in given.only if name not in TRAINED]
            for name in wanted:
                subprocess.run([*program, "--seed", str(seed), "--only", name], check=True, stdout=subprocess.DEVNULL)
            if given.only is None:
                subprocess.run([*program, "--seed", str(seed)], check=True, stdout=subprocess.DEVNULL)
            paths = {path.stem.rpartition("-")[0]: path for path in sorted(folder.glob(f"*-{seed}.onnx"))}
            for name, path in {**{name: item[0] for name, item in TRAINED.items()}, **paths}.items():
                if given.only is not None and name not in given.only:
                    continue
                for record in check(name, path, seed, tuple(given.formats)):
                    records.append(record)
                    if out is not None:
                        with out.open("a") as file:
                            file.write(json.dumps(record) + "\n")
                    print(line(record), flush=True)
    alarms = [item for item in records if item.get("alarm")]
    missed = [item for item in records if item.get("caught") is False]
    clean = sum("alarm" in item for item in records)
    print(f"{clean} comparisons of right outputs, {len(alarms)} false alarms; "
          f"{sum('caught' in item for item in records)} planted defects, {len(missed)} missed; "
          f"{sum('refused' in item for item in records)} not judged")  # fmt: skip
    return 1 if alarms or missed else 0


def line(record: Mapping[str, Any]) -> str:
    head = f"{record['net']:<15} {record['seed']} {record['format']:<6}"
    if "refused" in record:
        return f"{head} refused: {record['refused'][:100]}"
    if "planted" in record:
        return f"{head} {'caught' if record['caught'] else 'MISSED':<8} {record['planted']}"
    figures = "; ".join(
        f"{name} max {error['max_rel']:.2g} rms {error['rms_rel']:.2g} noise {error['noise']:.2g}"
        for name, error in record["outputs"].items()
    )
    return f"{head} {record['way']:<8} {'ALARM' if record['alarm'] else 'ok':<6} {figures}"


if __name__ == "__main__":
    raise SystemExit(main())
