"""The test cases of the onnx package through `build`, `load` and `infer`, beside ONNX Runtime alone on the same file.

    python benchmarks/onnx_node_tests.py                       every case; writes the records and prints the table
    python benchmarks/onnx_node_tests.py --verbs               `inspect`, `lint`, `ranges` and `cast` of each case as well
    python benchmarks/onnx_node_tests.py --again               the cases that failed in the records or are not there yet
    python benchmarks/onnx_node_tests.py --only stft --only light_   cases by a part of their name; writes nothing
    python benchmarks/onnx_node_tests.py --sample 100 --seed 3       that many, drawn; writes nothing
    python benchmarks/onnx_node_tests.py --table               the table of the records

2,033 cases with onnx 1.23: 1,884 made from onnx's own test definitions, 23 "simple", 117 exported by PyTorch, 9 "light"
models of which only the graph is shipped. Outputs are compared with the expected ones by onnx's test runner.
Cases run in a worker process; one that dies is recorded with its signal and the rest goes on in another. The exit code
is 1 when a case that ONNX Runtime computes is neither right nor refused with a reason in `REFUSED`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gzip
import json
import logging
import multiprocessing
import random
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, cast

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, TensorProto, numpy_helper
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

import trt_engine as te
from trt_engine.errors import TrtEngineError
from trt_engine.store import Store

RESULTS = Path(__file__).resolve().parent / "results" / "onnx-node-tests.jsonl.gz"
KINDS = ("node", "simple", "pytorch-operator", "pytorch-converted", "real")
VERBS = ("inspect", "lint", "ranges", "cast")
CASE_S = 300.0
"""A case that takes longer is stopped and recorded as a crash."""
REFUSED = ("of kind sequence", "of kind optional", "without elements")
"""Words of the refusals that are meant: what is at the edge of such a graph is not an array, or has no elements."""


@dataclass(frozen=True)
class Case:
    """One test: its model, its sets of inputs and expected outputs, its tolerances."""

    name: str
    kind: str
    raw: bytes
    sets: list[tuple[list[Any], list[Any]]] = field(repr=False)
    rtol: float
    atol: float


# ------------------------------------------------------------------------------------------------ the cases


def cases() -> list[Case]:
    """Every case, in the order of the names within a kind."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the definitions divide by zero on purpose
        for kind in KINDS:
            loaded = [_case(item, kind) for item in load_model_tests(kind=kind)]
            found += sorted(loaded, key=lambda case: case.name)
    return found


def _case(item: Any, kind: str) -> Case:
    if item.model is not None:
        raw, sets = item.model.SerializeToString(), item.data_sets
    elif item.model_dir is not None:
        raw = (Path(item.model_dir) / "model.onnx").read_bytes()
        sets = [_stored(folder, raw) for folder in sorted(Path(item.model_dir).glob("test_data_set_*"))]
    else:  # of a light model the graph alone is shipped, and the output that onnx's runner gets for its own dummy inputs
        path = Path(onnx.__file__).parents[1] / item.url
        raw = path.read_bytes()
        model = onnx.load_from_string(raw)
        inputs = [Runner.generate_dummy_data(value) for value in _fed(model)]
        output = TensorProto.FromString(path.with_name(f"{path.stem}_output_0.pb").read_bytes())
        sets = [(inputs, [output])]
    name = f"light_{item.model_name}" if kind == "real" else item.name
    arrays = [([_array(one) for one in inputs], [_array(one) for one in outputs]) for inputs, outputs in sets]
    return Case(name, kind, raw, arrays, item.rtol, item.atol)


def _stored(folder: Path, raw: bytes) -> tuple[list[Any], list[Any]]:
    graph = onnx.load_from_string(raw).graph
    return (
        [
            _read(folder / f"input_{at}.pb", value)
            for at, value in enumerate(graph.input)
            if _there(folder, "input", at)
        ],
        [_read(folder / f"output_{at}.pb", value) for at, value in enumerate(graph.output)],
    )


def _there(folder: Path, side: str, at: int) -> bool:
    return (folder / f"{side}_{at}.pb").exists()


def _read(path: Path, value: onnx.ValueInfoProto) -> Any:
    raw = path.read_bytes()
    if value.type.HasField("sequence_type"):
        return numpy_helper.to_list(onnx.SequenceProto.FromString(raw))
    if value.type.HasField("optional_type"):
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(raw))
    return TensorProto.FromString(raw)


def _array(value: Any) -> Any:
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.generic) else value


def _fed(model: ModelProto) -> list[onnx.ValueInfoProto]:
    stored = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in stored]


# ------------------------------------------------------------------------------------------------ one case


def examine(
    case: Case, folder: Path, verbs: Sequence[str], begin: Callable[[str, dict[str, Any]], None]
) -> dict[str, Any]:
    """The record of a case; `begin` is called with each part and the record before it, so that a crash can be placed."""
    path = folder / "model.onnx"
    path.write_bytes(case.raw)
    model = onnx.load_from_string(case.raw)
    inputs = [value.name for value in (_fed(model) if case.kind == "real" else model.graph.input)]
    feeds = [dict(zip(inputs, given, strict=False)) for given, _ in case.sets]
    expected = [outputs for _, outputs in case.sets]
    record: dict[str, Any] = {"name": case.name, "kind": case.kind}
    begin("onnxruntime", record)
    plain, record["onnxruntime"] = _judged(case, expected, lambda: _onnxruntime(model, feeds))
    begin("package", record)
    got, record["package"] = _judged(case, expected, lambda: _package(path, folder, feeds))
    if plain is not None and got is not None:
        record["apart"] = float(f"{_apart(got, plain):.3g}")
    arrays = all(isinstance(value, np.ndarray) for given in feeds for value in given.values()) and feeds
    for verb in verbs:
        if arrays or verb in ("inspect", "lint"):
            begin(verb, record)
            record[verb] = _verb(verb, path, folder, feeds)
    for part in record.values():
        if isinstance(part, dict) and "message" in part:
            part["message"] = part["message"].replace(f"{folder}/", "")
    return record


def _judged(
    case: Case, expected: list[list[Any]], run: Callable[[], list[list[Any]]]
) -> tuple[list[list[Any]] | None, dict[str, Any]]:
    """The outputs, and `right`, `wrong`, or what refused."""
    try:
        got = run()
    except TrtEngineError as error:
        return None, {"state": "refused", "exit": error.exit_code, "message": f"{error.message[:300]}; {error.hint}"}
    except Exception as error:  # of the library, or one of ours that no verb may raise
        return None, {"state": "refused", "exit": None, "message": f"{type(error).__name__}: {error}"[:300]}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for outputs, wanted in zip(got, expected, strict=True):
                Runner.assert_similar_outputs(wanted, outputs, case.rtol, case.atol)
    except Exception as error:
        return got, {"state": "wrong", "message": " ".join(str(error).split())[:200]}
    return got, {"state": "right"}


def _onnxruntime(model: ModelProto, feeds: list[dict[str, Any]]) -> list[list[Any]]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    found = []
    for given in feeds:
        whole, values = ModelProto.FromString(model.SerializeToString()), dict(given)
        for name, array in given.items():
            if _odd(array) and len((tensor := numpy_helper.from_array(array, name)).raw_data) < array.nbytes:
                whole.graph.initializer.append(tensor)  # less than a byte each: no numpy array holds them packed
                del values[name]
        session = ort.InferenceSession(whole.SerializeToString(), options, providers=["CPUExecutionProvider"])
        kinds = [value.type for value in session.get_outputs()]
        if any(_no_bytes(value) for value in values.values()) or any(
            not kind.startswith("tensor(") or "string" in kind for kind in kinds
        ):
            found.append(session.run(None, values))
        else:
            outputs = session.run_with_ort_values(None, {name: _value(array) for name, array in values.items()})
            found.append([_out(value) for value in outputs])
    return found


def _no_bytes(value: Any) -> bool:
    return not isinstance(value, np.ndarray) or value.dtype.kind in "OUS"


def _value(array: Any) -> ort.OrtValue:
    whole = np.ascontiguousarray(array).reshape(array.shape)
    if not _odd(array):
        return ort.OrtValue.ortvalue_from_numpy(whole)
    kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(whole.view(f"u{array.dtype.itemsize}"), kind)


def _odd(array: Any) -> bool:
    """True for the types numpy lacks."""
    return isinstance(array, np.ndarray) and hasattr(ml_dtypes, array.dtype.name)


def _out(value: ort.OrtValue) -> Any:
    kind = value.element_type()
    if kind == TensorProto.STRING:
        return value.numpy()
    shape = value.shape()
    bits = {TensorProto.UINT4: 4, TensorProto.INT4: 4, TensorProto.FLOAT4E2M1: 4, 25: 2, 26: 2}.get(kind)
    size = int(np.prod(shape, dtype=np.int64))
    nbytes = -(-size * bits // 8) if bits else size * np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind)).itemsize
    raw = ctypes.string_at(value.data_ptr(), nbytes) if size else b""
    return numpy_helper.to_array(TensorProto(data_type=kind, dims=shape, raw_data=raw))


def _package(path: Path, folder: Path, feeds: list[dict[str, Any]]) -> list[list[Any]]:
    engine = te.build(path, store=Store(folder / "store"))
    left = [item.name for item in (folder / "store").rglob("*.tmp")]
    if left:
        raise RuntimeError(f"left behind: {left}")
    with te.load(engine) as runner:
        return [list(runner.infer(given).values()) for given in feeds]


def _apart(got: list[list[Any]], plain: list[list[Any]]) -> float:
    """The largest difference from ONNX Runtime's outputs, of their largest value."""
    worst = 0.0
    for mine, theirs in zip(got, plain, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            a, b = np.asarray(a), np.asarray(b)
            if a.shape != b.shape:
                return float("inf")
            if b.dtype.kind in "OUS":
                worst = max(worst, 0.0 if np.array_equal(a.astype(str), b.astype(str)) else float("inf"))
                continue
            wide = np.complex128 if b.dtype.kind == "c" else np.float64
            a, b = a.astype(wide), b.astype(wide)
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            apart = np.where(same, 0.0, np.abs(np.where(same, 0, a) - np.where(same, 0, b)))
            scale = np.abs(b[np.isfinite(b)]).max(initial=0.0) or 1.0
            worst = max(worst, float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0)) / float(scale))
    return worst


def _verb(verb: str, path: Path, folder: Path, feeds: list[dict[str, Any]]) -> dict[str, Any]:
    try:
        if verb == "inspect":
            te.inspect(path)
        elif verb == "lint":
            te.lint(path)
        elif verb == "ranges":
            te.ranges(path, feeds)
        else:
            made = folder / "fp16.onnx"
            te.cast(path, "fp16", out=made)
            if _is_valid(path):
                onnx.checker.check_model(made, full_check=True)
            return {"state": "done", "loads": _loads(made)} if _loads(path) else {"state": "done"}
    except TrtEngineError as error:
        return {"state": "refused", "exit": error.exit_code, "message": error.message[:200]}
    except Exception as error:
        return {"state": "failed", "message": f"{type(error).__name__}: {error}"[:200]}
    return {"state": "done"}


def _is_valid(path: Path) -> bool:
    with contextlib.suppress(Exception):  # whatever its C++ side throws
        onnx.checker.check_model(path, full_check=True)
        return True
    return False


def _loads(path: Path) -> bool:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    with contextlib.suppress(Exception):
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return True
    return False


# ------------------------------------------------------------------------------------------------ workers


def records(chosen: Sequence[Case], verbs: Sequence[str], case_s: float = CASE_S) -> Iterator[dict[str, Any]]:
    """A record for each case, in order, whatever the case does to the process it runs in."""
    fork = multiprocessing.get_context("fork")  # the cases need not be made again
    waiting = list(chosen)
    while waiting:
        ours, theirs = fork.Pipe(duplex=False)
        worker = fork.Process(target=_work, args=(waiting, verbs, theirs), daemon=False)
        worker.start()
        theirs.close()
        part, known = "onnxruntime", {}
        try:
            while waiting:
                if not ours.poll(case_s):
                    worker.kill()
                    break
                part, known = ours.recv()
                if part is None:
                    yield known
                    del waiting[0]
        except EOFError:
            pass
        finally:
            ours.close()
            worker.join()
        if waiting:
            case = waiting.pop(0)
            code = worker.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            yield {
                "name": case.name,
                "kind": case.kind,
                **known,
                part or "package": {"state": "crashed", "message": how},
            }


def _work(chosen: Sequence[Case], verbs: Sequence[str], pipe: Connection) -> None:
    logging.getLogger("trt_engine").setLevel(logging.CRITICAL)
    for case in chosen:
        folder = Path(tempfile.mkdtemp(prefix="node-test-"))
        try:
            pipe.send((None, examine(case, folder, verbs, lambda *known: pipe.send(known))))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ the result


def verdict(record: dict[str, Any]) -> str:
    """The line of the table that a case counts in."""
    plain, ours = record["onnxruntime"], record.get("package", {"state": "crashed", "message": "before it"})
    state = {"right": "right", "wrong": "wrong"}.get(ours["state"], ours["state"])
    if state == "refused":
        meant = ours["exit"] in (2, 4) and any(word in ours["message"] for word in REFUSED)
        state = "refused (edge)" if meant else f"refused (exit {ours['exit']})"
    elif state == "wrong" and record.get("apart", 1.0) <= 1e-5:
        state = "as ONNX Runtime"
    alone = {"wrong": "another answer", "refused": "refuses"}.get(plain["state"], plain["state"])
    return f"{alone:16s} {state}"


def failed(record: dict[str, Any]) -> bool:
    """True for a case that ONNX Runtime computes and the package neither computes nor refuses for its edge."""
    plain, ours = record["onnxruntime"]["state"], record.get("package", {}).get("state", "crashed")
    if any(record.get(part, {}).get("state") in ("crashed", "failed") for part in ("package", *VERBS)):
        return True
    if any(record.get(part, {}).get("exit", 0) in (None, 1) for part in ("package", *VERBS)):
        return True
    if plain == "right":
        return not (ours == "right" or verdict(record).endswith("refused (edge)"))
    return plain == "wrong" and ours == "wrong" and record.get("apart", 1.0) > 1e-5


def table(found: Sequence[dict[str, Any]]) -> str:
    """How many cases ended how, and each failure."""
    lines = [f"{len(found)} cases", "", "    cases  ONNX Runtime     the package"]
    for what, count in sorted(Counter(map(verdict, found)).items(), key=lambda item: -item[1]):
        lines.append(f"    {count:5d}  {what}")
    computed = [record for record in found if record["onnxruntime"]["state"] == "right"]
    right = sum(record.get("package", {}).get("state") == "right" for record in computed)
    edge = sum(verdict(record).endswith("refused (edge)") for record in computed)
    lines += ["", f"ONNX Runtime computes {len(computed)}: {right} right, {edge} refused for their edge"]
    apart = [record["apart"] for record in found if "apart" in record]
    near = sum(value <= 1e-5 for value in apart)
    lines.append(f"{near} of {len(apart)} answers that could be compared are ONNX Runtime's to 1e-5")
    for verb in VERBS:
        states = Counter(
            f"{item['state']}{' ' + str(item['exit']) if 'exit' in item else ''}"
            for record in found
            if (item := record.get(verb)) is not None
        )
        if states:
            lines.append(f"{verb}: " + ", ".join(f"{count} {state}" for state, count in states.most_common()))
    lines += [f"FAILED {record['name']}: {_reason(record)}" for record in found if failed(record)]
    return "\n".join(lines)


def _reason(record: dict[str, Any]) -> str:
    return "; ".join(
        f"{part} {item['state']} {item.get('exit', '')} {item.get('message', '')}".strip()
        for part in ("package", *VERBS)
        if (item := record.get(part)) is not None and item["state"] not in ("right", "done")
    )


def _header() -> dict[str, Any]:
    return {
        "schema": "trt-engine/onnx-node-tests", "onnx": onnx.__version__, "onnxruntime": ort.__version__,
        "numpy": np.__version__, "trt_engine": te.__version__,
    }  # fmt: skip


def _open(path: Path, mode: str) -> IO[str]:
    return cast(IO[str], gzip.open(path, f"{mode}t", encoding="utf-8") if path.suffix == ".gz" else path.open(mode))


def _write(path: Path, found: Sequence[dict[str, Any]]) -> None:
    with _open(path, "w") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in (_header(), *found))


def _read_records(path: Path) -> list[dict[str, Any]]:
    with _open(path, "r") as file:
        return [json.loads(line) for line in file][1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="PART")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--verbs", action="store_true")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("-o", type=Path, default=RESULTS, metavar="FILE")
    given = parser.parse_args()
    kept = _read_records(given.o) if given.again or given.table else []
    if given.table:
        print(table(kept))
        return int(any(map(failed, kept)))
    chosen = cases()
    if given.again:
        right = {record["name"] for record in kept if not failed(record)}
        chosen = [case for case in chosen if case.name not in right]
        kept = [record for record in kept if record["name"] in right]
    if given.only:
        chosen = [case for case in chosen if any(part in case.name for part in given.only)]
    if given.sample is not None:
        chosen = random.Random(given.seed).sample(chosen, given.sample)
    stored = not given.only and given.sample is None
    if stored:
        _write(given.o, kept)
    found = []
    for record in records(chosen, VERBS if given.verbs else ()):
        found.append(record)
        if stored:  # an interrupted run is resumed by `--again`
            with _open(given.o, "a") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        if failed(record):
            print(f"{record['name']}: {_reason(record)}", flush=True)
        elif len(found) % 100 == 0:
            print(f"{len(found)} of {len(chosen)}", file=sys.stderr, flush=True)
    if stored:
        found = sorted([*kept, *found], key=lambda record: (KINDS.index(record["kind"]), record["name"]))
        _write(given.o, found)
    print(table(found))
    return int(any(map(failed, found)))


if __name__ == "__main__":
    sys.exit(main())
