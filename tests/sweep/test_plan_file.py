"""A plan is read with the place of every mistake in it, and nothing a file can hold does more than be refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from trt_engine.errors import UsageError
from trt_engine.verbs.run.cells import expand
from trt_engine.verbs.run.config import RunConfig
from trt_engine.verbs.run.plan_file import ParsedPlan, check_trust, read_plan
from trt_engine.verbs.run.run import prepare, preview
from trt_engine.verbs.run.run import run as run_sweep

ROOT = Path(__file__).parents[2]
Written = Callable[[str | bytes], ParsedPlan]


@pytest.fixture
def plan(tmp_path: Path) -> Written:
    def write(text: str | bytes) -> ParsedPlan:
        path = tmp_path / "plan.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return read_plan(path)

    return write


def refused(plan: Written, text: str | bytes) -> tuple[str, str]:
    with pytest.raises(UsageError) as caught:
        plan(text)
    assert caught.value.exit_code == 2
    return caught.value.message, caught.value.hint or ""


@pytest.mark.parametrize(
    ("text", "where", "key", "found", "hint"),
    [
        ("models:\n  - path: a.onnx\n    precisions: [fp32, fp61]\n", "3:24", "models[0].precisions[1]", "`fp61`", "`fp16`"),
        ("models: a.onnx\nbathces: [1]\n", "2:1", "bathces", "not a key of a plan", "`batches`"),
        ("models:\n- pathh: a.onnx\n", "2:3", "models[0].pathh", "not a key here", "`path`"),
        ("models: a.onnx\nbatches: [1, 0]\n", "2:14", "batches[1]", "is 0, expected 1 or more", ""),
        ("models: a.onnx\nbatches: 1.5\n", "2:10", "batches", "`1.5`, expected a whole number", "trt-engine docs run"),
        ("models: a.onnx\niterations: many\n", "2:13", "iterations", "`many`, expected a whole number", ""),
        ("models: a.onnx\niterations: '100'\n", "2:13", "iterations", "`100`, expected a whole number", ""),
        ("models: a.onnx\nmodels: b.onnx\n", "2:1", "models", "set twice, first in line 1", "leave one"),
        ("models: a.onnx\nbatch: 1\nbatches: 2\n", "3:1", "batches", "duplicates `batch`", "leave one"),
        ("models: a.onnx\nbackends: [tensort]\n", "2:12", "backends[0]", "`tensort`", "`tensorrt`"),
        ("models: a.onnx\nbackends:\n- {name: cuda}\n", "3:10", "backends[0].backend", "`cuda`", "expected one of"),
        ("models: a.onnx\nmodes: [bench, evalute]\n", "2:16", "modes[1]", "`evalute`", "`evaluate`"),
        ("models: a.onnx\nbuild:\n  workspace: 9ZiB\n", "3:3", "build.workspace", "cannot read the size `9ZiB`", "32GiB"),
        ("models: a.onnx\nbuild: {paritty: no}\n", "2:9", "build.paritty", "not a setting", "`parity`"),
        ("models: a.onnx\nbench: {iterations: 5}\n", "2:9", "bench.iterations", "not a setting", ""),
        ("models: a.onnx\nquantize: {calibrator: best}\n", "2:12", "quantize.calibrator", "cannot be `best`", ""),
        ("models: a.onnx\nwarmup: 50 q\n", "2:9", "warmup", "cannot read the duration `50 q`", "200ms"),
        ("models: a.onnx\ntimeout: 0\n", "2:10", "timeout", "expected more than 0", "leave it out"),
        ("models: a.onnx\ntimeout: soon\n", "2:10", "timeout", "cannot read the duration", ""),
        ("models: a.onnx\ndevice: gpu7\n", "2:9", "device", "gpu7", ""),
        ("models: [{path: a.onnx, shapes: 'x:1xtwo'}]\n", "1:33", "models[0].shapes", "cannot read the shape", ""),
        ("models: [{name: a}]\n", "1:10", "models[0]", "lacks the key `path`", "add `path:`"),
        ("name: a\n", "1:1", "", "lacks the key `models`", "add `models:`"),
        ("models: []\n", "1:9", "models", "an empty list", ""),
        ("models: {path: a.onnx}\n", "1:9", "models", "a mapping, expected a list", ""),
        ("models: null\n", "1:9", "models", "is nothing, expected a list", ""),
        ("models: ['']\n", "1:10", "models[0]", "empty string", ""),
        ("models: a.onnx\naccuracy: {max_drop: 2}\n", "2:22", "accuracy.max_drop", "expected at most 1", ""),
        ("models: a.onnx\ndataset: a\naccuracy: {dataset: b}\n", "2:10", "dataset", "duplicates", ""),
        (
            "models: a.onnx\nbackends: [{backend: onnxruntime, options: {graph_optimisation: all}}]\n",
            "2:65", "backends[0].options.graph_optimisation", "unknown setting", "`graph_optimization`",
        ),
        ("models: a.onnx\nbackends: [{backend: tensorrt, providers: [cuda]}]\n", "2:43", "backends[0].providers", "", ""),
        ("models: a.onnx\nbackends: [{backend: tensorrt, device: cpu}]\n", "2:40", "backends[0].device", "`cpu`", ""),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_file_line_column_key_and_what_was_expected(
    plan: Written, text: str, where: str, key: str, found: str, hint: str
) -> None:
    message, said = refused(plan, text)
    assert message.startswith(f"plan.yaml:{where}: {f'`{key}` ' if key else ''}"), message
    assert found in message
    assert hint in said


def _deep(levels: int) -> str:
    return "models: " + "[" * levels + "a" + "]" * levels


def _bomb() -> str:
    lines = ["x-a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"x-{name}: &{name} [{', '.join([f'*{before}'] * 9)}]")
    return "\n".join([*lines, "models: a", "build: {profiles: *i}"])


HOSTILE: dict[str, str | bytes] = {
    "empty": "",
    "only a comment": "# nothing\n",
    "not YAML": "models: [\n",
    "tabs": "models:\n\t- a.onnx\n",
    "two documents": "models: a\n---\nmodels: b\n",
    "an object to make": "models: !!python/object/apply:os.system ['touch /tmp/pwned']\n",
    "another tag": "models: !thing a.onnx\n",
    "binary": "models: !!binary aGVsbG8=\nprecisions: !!set {a, b}\n",
    "a list that holds itself": "models: &a [*a]\n",
    "a mapping that holds itself": "models: &a\n- path: x\n  build: &b {options: *b}\n",
    "merged with itself": "models: a\nbuild: &b\n  <<: *b\n",
    "merges a list of texts": "models: a\n<<: [b]\n",
    "an alias bomb": _bomb(),
    "brackets by the thousand": _deep(5000),
    "forty levels": _deep(40),
    "an unknown alias": "models: *nobody\n",
    "not UTF-8": b"models: \xff\xfe\n",
    "UTF-16": "models: a.onnx\n".encode("utf-16"),
    "a NUL": b"models: a\x00b\n",
    "an escaped NUL": 'models: "a\\0b"\n',
    "an escape beyond Unicode": 'models: "\\UFFFFFFFF"\n',
    "a lone surrogate": 'models: "\\uD800"\nname: 5\nmodes: x\n',
    "a key that is a list": "models: a\n? [1, 2]\n: b\n",
    "a number of a million digits": "models: a\niterations: " + "9" * 100_000 + "\n",
    "more than any plan": "models: a\n#" + "x" * (1 << 19),
    "a PNG": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "an infinity": "models: a\nprofile: {inferences: .inf}\n",
    "a sexagesimal number": "models: a\nbatches: 1:8:64\n",
    "an octal number": "models: a\nbatches: 010\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_refused_in_one_sentence(plan: Written, text: str | bytes) -> None:
    message, _ = refused(plan, text)
    assert "plan.yaml" in message
    assert len(message) < 600
    assert message.encode()  # no surrogate is left in it


def test_anchors_merges_and_a_place_for_them_are_understood(plan: Written) -> None:
    made = plan(
        "x-usual: &usual {precisions: [fp32, int8], batches: [1, 8]}\n"
        "models:\n- {path: a.onnx, <<: *usual}\n- {<<: *usual, path: b.onnx, batches: 4}\n"
    )
    first, second = made.file.models
    assert (first.precisions, first.batches) == (("fp32", "int8"), (1, 8))
    assert (second.precisions, second.batches) == (("fp32", "int8"), (4,))


def test_texts_stay_texts_whatever_yaml_would_make_of_them(plan: Written) -> None:
    made = plan(
        "models: [{path: 1e3, name: yes}]\nbackends: [{backend: onnxruntime, options: {intra_op_threads: 2}}]\n"
    )
    entry, route = made.file.models[0], made.file.backends[0]
    assert (entry.path, entry.name, route.options) == ("1e3", "yes", {"intra_op_threads": "2"})


def test_settings_are_taken_by_name_or_by_flag(plan: Written) -> None:
    by_flag = plan("models: a\nbuild: {workspace: 2GiB}\nbench: {duration: 2s}\n").file
    by_name = plan("models: a\nbuild: {workspace_mib: 2GiB}\nbench: {duration_s: 2s}\n").file
    assert (
        (by_flag.build, by_flag.bench)
        == (by_name.build, by_name.bench)
        == ({"workspace_mib": "2GiB"}, {"duration_s": "2s"})
    )


# ------------------------------------------------------------------------------------------------ the schema


SCHEMA = json.loads((ROOT / "docs" / "run.schema.json").read_text())


@pytest.mark.parametrize("path", ["examples/digits/plan.yaml", "examples/three-way.yaml"])
def test_the_examples_fit_the_schema_and_are_read(path: str) -> None:
    jsonschema.validate(yaml.safe_load((ROOT / path).read_text()), SCHEMA)
    assert read_plan(ROOT / path).file.models


def test_the_plan_on_the_page_is_read_and_has_the_cells_it_names(plan: Written, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "run.md").read_text()
    text = page.partition("```yaml\n")[2].partition("```")[0]
    jsonschema.validate(yaml.safe_load(text), SCHEMA)
    labels = [spec.label for spec in expand(plan(text))]
    assert "digits-fp32-ort-cuda-b8" in labels and "digits-nvfp4-modelopt-tensorrt-b1" in labels
    assert len(labels) == 30


@pytest.mark.parametrize(
    "text",
    [
        "models: [{path: a.onnx, precisions: [fp61]}]",
        "models: a.onnx\nbathces: [1]",
        "models: []",
        "models: a.onnx\nbatches: 0",
        "models: a.onnx\nbuild: {paritty: no}",
        "batches: 1",
        "models: [{name: a}]",
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(plan: Written, text: str) -> None:
    refused(plan, text)
    told: Any = yaml.safe_load(text)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(told, SCHEMA)


@pytest.mark.parametrize(
    "text",
    [
        "models: a.onnx",
        "models: [a.onnx, 'b.onnx:fp16', {onnx: c.onnx, precision: int8, quantized: [{file: d.onnx, label: x}]}]",
        "models: a.onnx\nmode: benchmark\nwarmup_iterations: 5\ncontainer_image: some/image:1",
        "models: a.onnx\nbackends: [{name: onnxruntime, providers: cpu}]\nbatch: [1, 2]",
    ],
)
def test_other_spellings_fit_the_schema_and_are_read(plan: Written, text: str) -> None:
    assert plan(text)
    jsonschema.validate(yaml.safe_load(text), SCHEMA)


def test_what_run_plan_takes_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("models: [gone.onnx]\nmodes: bench\n")
    go = functools.partial(run_sweep, tmp_path / "plan.yaml")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"out": 5}, "`out` is 5"),
        ({"cells": 5}, "`cells` is 5, expected text or a list"),
        ({"cells": [3]}, "3 is not a label"),
        ({"modes": 7}, "`modes` is 7, expected text or a list"),
        ({"cells": "zz*"}, r"`--cells zz\*` matches no cell"),
        ({"modes": "benhc"}, "unknown mode `benhc`"),
    ]
    for values, message in wrong:
        with pytest.raises(UsageError, match=message):
            go(**({"out": tmp_path / "out"} | values))
    with pytest.raises(UsageError, match="cannot read"):
        run_sweep("\0")
    assert not (tmp_path / "out").exists()
    job = prepare(tmp_path / "plan.yaml", tmp_path / "out", RunConfig(modes=("build,profile",)))
    assert [cell.spec.modes for cell in preview(job).cells] == [("build", "profile")]


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("container: {image: i, arguments: [--privileged]}", "container.arguments"),
        ("container: {image: i, args: --privileged}", "container.arguments"),
        ("container: {image: i, network: host}", "container.network"),
        ("backends: [{backend: tensorrt, options: {plugins: ./evil.so}}]", "backends[0].options.plugins"),
        ("backends: [{backend: tensorrt, options: {python-plugins: evil.py}}]", "backends[0].options.python-plugins"),
        ("backends: [{backend: trtexec, options: {lean_runtime: e.so}}]", "backends[0].options.lean_runtime"),
        (
            "backends: [{backend: onnxruntime, options: {tensorrt.trt_extra_plugin_lib_paths: e.so}}]",
            "backends[0].options.tensorrt.trt_extra_plugin_lib_paths",
        ),
        ("build: {timing_cache: ../../.bashrc}", "build.timing_cache"),
    ],
)
def test_a_plan_that_runs_code_or_reaches_outside_needs_the_trust_of_the_command_line(
    more: str, key: str, plan: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRT_ENGINE_TRUST_PLAN", "1")
    written = plan(f"models: [a.onnx]\n{more}\n")
    with pytest.raises(UsageError) as caught:
        check_trust(written, trust_plan=False)
    assert f"`{key}` (line 2)" in caught.value.message and "--trust-plan" in (caught.value.hint or "")
    assert check_trust(written, trust_plan=True) == (f"`{key}` (line 2)",)


def test_a_plan_cannot_trust_itself_and_a_plain_one_needs_no_trust(plan: Written) -> None:
    with pytest.raises(UsageError, match="is not a key of a plan"):
        plan("models: [a.onnx]\ntrust_plan: yes\n")
    plain = "models: [a.onnx]\ncontainer: image\nbackends: [{backend: tensorrt, options: {optimization_level: 4}}]\n"
    assert check_trust(plan(plain), trust_plan=False) == ()
