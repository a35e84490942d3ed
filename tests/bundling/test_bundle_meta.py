"""`model_meta.json`: what is read, and how a wrong one is told."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from trt_engine.errors import ModelError
from trt_engine.verbs.bundle.model_meta import ModelMeta, read_meta

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "model_meta.schema.json").read_text())


def read(folder: Path, document: Any) -> ModelMeta:
    path = folder / "model_meta.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document, indent=1))
    return read_meta(path)


def test_a_file_without_components_is_an_rnnt_tdt_and_the_exporters_keys_are_its_own(tmp_path: Path) -> None:
    found = read(tmp_path, {"model_name": "parakeet", "blank_id": 8192, "labels": ["a"], "features": {"n_mels": 128}})
    assert [(item.name, item.file) for item in found.components] == [
        ("encoder", "encoder.onnx"), ("predictor", "predictor.onnx"), ("joint", "joint.onnx"),
    ]  # fmt: skip
    assert (found.name, found.n_mels, found.is_rnnt, found.folder) == ("parakeet", 128, True, tmp_path)


FULL = {
    "name": "two",
    "version": 3,
    "components": {
        "a": {
            "file": "nets/a.onnx",
            "inputs": {"x": ["N", 4, None], "n": {"dims": ["N"], "fill": "L"}},
            "outputs": {"y": ["N", 8]},
            "dimensions": {"L": {"min": 1, "opt": 2, "max": 3}},
            "build": {"precision": "fp32", "options": {"intra_op_threads": 2}, "parity": False},
        },
        "b.v2": "b.onnx",
    },
    "dimensions": {"N": "1:2:4", "L": 7, "M": [5]},
    "connections": ["a.y -> b.v2.x", {"from": "a.n.out", "to": "b.v2.n", "transpose": [1, 0]}],
}


def test_everything_the_schema_names_is_read(tmp_path: Path) -> None:
    jsonschema.validate(FULL, SCHEMA)
    found = read(tmp_path, FULL)
    first, second = found.components
    assert (found.version, second.name, second.file, first.file) == ("3", "b.v2", "b.onnx", "nets/a.onnx")
    assert first.inputs == {"x": ("N", 4, None), "n": ("N",)} and first.fills == {"n": "L"}
    assert found.dimensions == {"N": (1, 2, 4), "L": (7, 7, 7), "M": (5, 5, 5)} and first.dimensions == {"L": (1, 2, 3)}
    assert first.build == {"precision": "fp32", "options": {"intra_op_threads": "2"}, "parity": False}
    assert [(str(link), link.transpose) for link in found.links] == [
        ("a.y -> b.v2.x", ()), ("a.n.out -> b.v2.n", (1, 0)),
    ]  # fmt: skip
    assert not found.is_rnnt


WRONG = [
    ({"components": 3}, "components", "expected an object"),
    ({"components": {}}, "components", "empty"),
    ({"components": {"a/b": "x.onnx"}}, "components.a/b", "is not valid as a component"),
    ({"components": {"a": {"file": 3}}}, "components.a.file", "expected a file name"),
    ({"components": {"a": {"inputs": {"x": "N"}}}}, "components.a.inputs.x", "expected its dimensions"),
    ({"components": {"a": {"inputs": {"x": ["N", 2.5]}}}}, "components.a.inputs.x[1]", "expected a size or a name"),
    ({"components": {"a": {"inputs": {"x": ["N", True]}}}}, "components.a.inputs.x[1]", "true or false"),
    ({"components": {"a": {"inputs": {"x": [-2]}}}}, "components.a.inputs.x[0]", "negative"),
    ({"components": {"a": {"inputs": {"x": {"fill": [1]}}}}}, "components.a.inputs.x.fill", "a whole number or a dimension"),
    ({"components": ["a", {"file": "b.onnx"}]}, "components[1]", "no name"),
    ({"dimensions": {"T": [1, 2]}}, "dimensions.T", "is not a range"),
    ({"dimensions": {"T": "1:x:3"}}, "dimensions.T", "is not a range"),
    ({"dimensions": []}, "dimensions", "a list, expected an object"),
    ({"connections": {"a": "b"}}, "connections", "expected a list"),
    ({"connections": ["encoder.y"]}, "connections[0]", "is not a connection"),
    ({"connections": [{"from": "encoder.y", "to": 3}]}, "connections[0]", "is not a connection"),
    ({"name": 3}, "name", "expected a string"),
    ({"dimensions": {"T": 1 << 31}}, "dimensions.T", "is too large"),
    ({"dimensions": {"T": "9" * 5000}}, "dimensions.T", "is not a range"),
    ({"dimensions": {"T": 1.5}}, "dimensions.T", "is not a range"),
    ({"components": {"a": {"inputs": {"x": [10**30]}}}}, "components.a.inputs.x[0]", "is too large"),
    ({"components": {"a": {"inputs": {"x": {"fill": 0.5}}}}}, "components.a.inputs.x.fill", "it is 0.5"),
    ({"connections": [{"from": "encoder.y", "to": "joint.x", "transpose": 3}]}, "connections[0].transpose", "not axes"),
    ({"connections": [{"from": "encoder.y", "to": "joint.x", "transpose": None}]}, "connections[0].transpose", "not axes"),
    ({"connections": [{"from": "encoder.y", "to": "joint.x", "transpose": [False, True]}]},
     "connections[0].transpose", "not axes"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("document", "key", "said"), WRONG, ids=[f"{key}-{index}" for index, (_, key, _) in enumerate(WRONG)]
)
def test_what_the_schema_refuses_is_refused_with_its_key_and_line(
    tmp_path: Path, document: Any, key: str, said: str
) -> None:
    assert not jsonschema.Draft202012Validator(SCHEMA).is_valid(document)
    with pytest.raises(ModelError) as told:
        read(tmp_path, document)
    assert f"`{key}`" in told.value.message and said in told.value.message and told.value.hint
    leaf = key.rpartition(".")[2].partition("[")[0]
    index = int(key.rpartition("[")[2][:-1]) if key.endswith("]") else -1
    lines = (tmp_path / "model_meta.json").read_text().splitlines()
    line = next(at for at, text in enumerate(lines, 1) if f'"{leaf}"' in text) + index + 1
    assert f"(line {line})" in told.value.message


BEYOND = [  # what JSON Schema cannot say
    ({"dimensions": {"T": [3, 2, 4]}}, "dimensions.T", "min <= opt <= max"),
    ({"components": {"a": "../a.onnx"}}, "components.a.file", "is outside the folder"),
    ({"components": {"a": {"file": "/a.onnx"}}}, "components.a.file", "is outside the folder"),
    ({"components": {"a": {"file": "C:\\a.onnx"}}}, "components.a.file", "is outside the folder"),
    ({"components": {"a": {"file": "\ud800.onnx"}}}, "components.a.file", "is not a file name"),
    ({"components": {"a": "a.onnx", "A": "b.onnx"}}, "components.A", "duplicate"),
    ({"components": {"a": {"build": {"backend": "fake"}}}}, "components.a.build.backend", "cannot set this"),
    ({"components": {"a": {"build": {"precision": "fp17"}}}}, "components.a.build.precision", "fp17"),
    ({"components": {"a": {"build": {"workspace_mib": "many"}}}}, "components.a.build.workspace_mib", "many"),
    ({"components": {"a": {"build": {"parity": "no"}}}}, "components.a.build.parity", "true or false"),
    ({"components": {"a": {"build": {"parity": 0}}}}, "components.a.build.parity", "true or false"),
    ({"components": {"a": {"build": {"parity_rtol": [1]}}}}, "components.a.build.parity_rtol", "expected a number"),
    ({"components": {"a": {"build": {"calib_data": 3}}}}, "components.a.build.calib_data", "expected a string"),
    ({"components": {"a": {"build": {"providers": "cpu"}}}}, "components.a.build.providers", "a list of names"),
    ({"components": {"a": {"build": {"providers": [{}]}}}}, "components.a.build.providers", "a list of names"),
    ({"components": {"a": {"build": {"options": None}}}}, "components.a.build.options", "it is null"),
    ({"components": {"a": {"build": {"options": {"x": [1]}}}}}, "components.a.build.options", "names and values"),
    ({"components": {"a": {"build": {"options": {"plugins": "p.so"}}}}}, "components.a.build.options.plugins", "loads code"),
    ({"components": {"a": {"build": {"options": {"own": "/x"}}}}}, "components.a.build.options.own", "names a file"),
    ({"components": {"a": {"build": {"workspace_mib": 10**40}}}}, "components.a.build.workspace_mib", "a size"),
    ({"connections": ["decoder.y -> joint.x"]}, "connections[0]", "does not begin with a component"),
    ({"connections": [{"from": "encoder.y", "to": "joint.x", "transpose": [0, 2]}]}, "connections[0].transpose", "axes"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("document", "key", "said"), BEYOND, ids=[f"{key}-{index}" for index, (_, key, _) in enumerate(BEYOND)]
)
def test_what_contradicts_itself_is_refused_with_its_key(tmp_path: Path, document: Any, key: str, said: str) -> None:
    with pytest.raises(ModelError) as told:
        read(tmp_path, document)
    assert f"`{key}`" in told.value.message and said in told.value.message and told.value.hint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"name": "a",\n "dimensions": {,}}', "line 2, column 17"),
        ("", "not JSON"),
        ("[]", "it is a list, expected an object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"blank_id": ' + "9" * 5000 + "}", "thousands of digits"),
        ('{"dimensions": {"T": NaN}}', "`nan` is not a range"),
        ('{"dimensions": {"T": [1, 2, Infinity]}}', "is not a range"),
    ],
)
def test_a_file_that_is_no_description_says_where_it_breaks(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ModelError, match="hint") as told:
        read(tmp_path, text)
    assert said in told.value.message


def test_a_key_that_stands_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    text = '{"components": {\n "a": {"file": "x.onnx"},\n "b": "b.onnx",\n "a": {"file": "y.onnx"}}}'
    with pytest.raises(ModelError) as told:
        read(tmp_path, text)
    assert "`components.a`" in told.value.message and "(line 2): duplicate key in line 4" in told.value.message
    with pytest.raises(ModelError, match=r"dimensions\.T"):
        read(tmp_path, '{"dimensions": {"T": 8, "U": 2, "T": 16}}')
    found = read(
        tmp_path, '{"labels": {"a": 1, "a": 2}, "dimensions": {"a.b": 3, "a": 2}, "a": 1, "x": {"a": {"b": 1}}}'
    )
    assert found.dimensions == {"a.b": (3, 3, 3), "a": (2, 2, 2)}, "what the exporter keeps for itself is its own"


def test_a_missing_file_a_folder_and_other_bytes_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no such file[\s\S]*other\.json"):
        read_meta(tmp_path / "model_meta.json")
    with pytest.raises(ModelError, match="is a folder"):
        read_meta(tmp_path)
    (tmp_path / "bytes.json").write_bytes(b'{"name": "\xff"}')
    with pytest.raises(ModelError, match="not UTF-8"):
        read_meta(tmp_path / "bytes.json")


def test_a_key_that_is_nearly_one_of_ours_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trt_engine"):
        read(tmp_path, {"components": {"a": {"file": "a.onnx", "inptus": {"x": [1]}, "author": "me"}}})
    assert [record.getMessage().partition(" of ")[0] for record in caplog.records] == ["`components.a.inptus`"]
