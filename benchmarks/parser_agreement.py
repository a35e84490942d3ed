"""`lint` without a parser compared with TensorRT-RTX's real ONNX parser, over the tests of the onnx package.

    python benchmarks/parser_agreement.py            every case; writes the records and prints the table
    python benchmarks/parser_agreement.py --build    what parses is built for 8.9 as well (minutes)
    python benchmarks/parser_agreement.py --only attention_4d    cases by a part of their name; writes nothing
    python benchmarks/parser_agreement.py --table    the table of the records

2,024 cases with onnx 1.23, 1,996 of them of the standard's domain alone; models of which only the graph is shipped are left
out. `parser_disagreements.json` has the reason for each case in which they disagree; the exit code is 1 where one is not in
there, where one in there agrees, and where fewer than 1,900 agree.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx

import trt_engine as te
from trt_engine.backends.tensorrt.parser_check import ParserCheck, ParserProcess, installed_version
from trt_engine.errors import TrtEngineError
from trt_engine.trt.parser_messages import failed_operator, parser_error_reason

sys.path.insert(0, str(Path(__file__).resolve().parent))
from onnx_node_tests import Case, cases

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "parser-agreement.jsonl.gz"
REASONS = HERE / "parser_disagreements.json"
KINDS = ("node", "simple", "pytorch-operator", "pytorch-converted")
REFUSALS = frozenset("not-in-tensorrt tensorrt-too-old limited-in-tensorrt type-not-in-tensorrt types-differ".split())
"""Codes of `lint` for what the parser refuses; `no-tensorrt-kernel` is about the builder."""
KERNEL = "no-tensorrt-kernel"
LEAST = 1900
GPU = "8.9"


def standard(raw: bytes) -> bool:
    """Whether all nodes are of the standard's own domain."""
    return all(node.domain in ("", "ai.onnx") for node in onnx.load_from_string(raw).graph.node)


def chosen(only: Sequence[str] = ()) -> list[Case]:
    """The cases that are compared."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [case for case in cases() if case.kind in KINDS]
    return [case for case in found if not only or any(part in case.name for part in only)]


def compare(picked: Iterable[Case], *, build: bool = False) -> Iterator[dict[str, Any]]:
    """A record for each case: the verdict of the parser, and that of lists and rules."""
    with tempfile.TemporaryDirectory() as folder, ParserProcess("tensorrt-rtx") as process:
        path = Path(folder) / "model.onnx"
        for case in picked:
            path.write_bytes(case.raw)
            checked = process.check(path)
            record = {"name": case.name, "kind": case.kind, "standard": standard(case.raw)}
            record |= _parsed(checked) | _static(path)
            if build and checked.parsed:
                made = process.build(path, (GPU,))
                record["built"] = bool(made.built)
                if not made.built:
                    record["cause"] = made.exit_status or made.cause or made.message[:120]
            yield record | {"agree": record["parser"] == record["static"]}


def _parsed(checked: ParserCheck) -> dict[str, Any]:
    if checked.parsed:
        return {"parser": "yes"}
    if checked.exit_status or not checked.errors:
        return {"parser": "no", "refusal": checked.exit_status or checked.message}
    first = checked.errors[0]
    reason = f"{failed_operator(first)}: {parser_error_reason(first, 'TensorRT-RTX')}"[:200]
    return {"parser": "no", "code": first.code, "refusal": reason}


def _static(path: Path) -> dict[str, Any]:
    try:
        report = te.lint(path, target="tensorrt-rtx", support_from="static")
    except TrtEngineError as error:  # a damaged model, for the parser too
        return {"static": "no", "why": error.message.replace(str(path), "model.onnx")[:160]}
    refused = [item for item in report.findings if item.code in REFUSALS]
    kernels = {"kernel": False} if any(item.code == KERNEL for item in report.findings) else {}
    if not refused:
        return {"static": "yes", **kernels}
    return {"static": "no", "why": f"{refused[0].code}: {refused[0].message}"[:160], **kernels}


def reasons() -> dict[str, str]:
    """The reason for each known disagreement, by the name of the case."""
    found: dict[str, str] = json.loads(REASONS.read_text(encoding="utf-8"))
    return found


def objections(records: Sequence[dict[str, Any]], known: dict[str, str]) -> list[str]:
    """What is wrong with a comparison of all cases: too few agree, or one disagrees or agrees against the table."""
    own = [record for record in records if record["standard"]]
    apart = {record["name"] for record in own if not record["agree"]}
    agree = len(own) - len(apart)
    found = [f"{name} disagrees and has no reason in {REASONS.name}" for name in sorted(apart - set(known))]
    stale = {record["name"] for record in own} & set(known) - apart
    found += [f"{name} agrees and has a reason in {REASONS.name}" for name in sorted(stale)]
    if agree < LEAST:
        found.append(f"{agree} of {len(own)} agree, expected {LEAST} at least")
    return found


def show(records: Sequence[dict[str, Any]], known: dict[str, str]) -> str:
    """The four counts, and each disagreement with its reason."""
    own = [record for record in records if record["standard"]]
    counts = Counter((record["static"], record["parser"]) for record in own)
    lines = [
        f"{sum(record['agree'] for record in own)} of {len(own)} cases agree "
        f"({len(records) - len(own)} of other domains left out)",
        f"{'':16}{'parser: yes':>14}{'parser: no':>14}",
        *(f"lint: {word:10}{counts[word, 'yes']:14}{counts[word, 'no']:14}" for word in ("yes", "no")),
    ]
    for record in own:
        if not record["agree"]:
            why = known.get(record["name"], "NOT EXPLAINED")
            lines.append(f"  {record['name']}: {record.get('refusal') or record.get('why')}\n    {why}")
    built = [record for record in own if "built" in record]
    if built:
        causes = Counter(record["cause"] for record in built if not record["built"])
        lines.append(f"built for {GPU}: {sum(record['built'] for record in built)} of {len(built)} that parse")
        foreseen = [record for record in built if record.get("kernel") is False]
        wrong = sum(record["built"] for record in foreseen)
        lines.append(
            f"`{KERNEL}` predicts {len(foreseen) - wrong} of those that do not build, and is wrong about {wrong}"
        )
        lines += [f"  {count:4} {cause}" for cause, count in causes.most_common()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    known = reasons()
    if arguments.table:
        records = [json.loads(line) for line in gzip.decompress(RESULTS.read_bytes()).splitlines()[1:]]
        print(show(records, known))
        return 0
    records = []
    for record in compare(chosen(arguments.only), build=arguments.build):
        records.append(record)
        if arguments.only:
            print(json.dumps(record))
    if arguments.only:
        return 0
    head = {
        "schema": "trt-engine/parser-agreement",
        "onnx": onnx.__version__,
        "tensorrt_rtx": installed_version("tensorrt-rtx"),
        "trt_engine": te.__version__,
    }
    lines = "".join(f"{json.dumps(item)}\n" for item in (head, *records))
    RESULTS.write_bytes(gzip.compress(lines.encode(), mtime=0))
    print(show(records, known))
    wrong = objections(records, known)
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
