# ruff: noqa: E501
"""`migrate` as a whole: files it looks at, comments and settings that restrict it, what it prints and writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import trt_engine as te
from trt_engine.cli.main import run
from trt_engine.errors import SetupError, UsageError
from trt_engine.verbs.migrate import cpp_source
from trt_engine.verbs.migrate import run as module
from trt_engine.verbs.migrate.source import MAX_BYTES

ROOT = Path(__file__).parents[2]
OLD = "import tensorrt as trt\nconfig.set_flag(trt.BuilderFlag.FP16)\n"


def rules_of(path: Path, text: str, **settings: Any) -> list[str]:
    path.write_text(text)
    return [item.rule for item in te.migrate(path, **settings).findings]


# ------------------------------------------------------------------------------------------------ Python


@pytest.mark.parametrize(
    "text",
    [
        "import tensorrt\nf = tensorrt.BuilderFlag.FP16\n",
        "import tensorrt as t\nB = t.BuilderFlag\nf = t.BuilderFlag.FP16\n",
        "from tensorrt import BuilderFlag\nf = BuilderFlag.FP16\n",
        "from tensorrt import *\nf = BuilderFlag.FP16\n",
        "from importlib import import_module\ntrt = import_module('tensorrt')\nf = trt.BuilderFlag.FP16\n",
        "from polygraphy import mod\ntrt = mod.lazy_import('tensorrt')\nf = trt.BuilderFlag.FP16\n",
        "try:\n    import tensorrt as trt\nexcept ImportError:\n    trt = None\nf = trt.BuilderFlag.FP16\n",
        "import tensorrt as trt\nF = trt.BuilderFlag\nconfig.set_flag(F.FP16)\n",
        "import tensorrt as trt\ndef g(config):\n    t = trt\n    F = t.BuilderFlag\n    config.set_flag(F.FP16)\n",
        "import tensorrt as trt\ndef g():\n    async def h():\n        return [trt.BuilderFlag.FP16 for x in y]\n",
    ],
)
def test_a_name_is_found_by_whatever_it_was_imported_as(text: str, tmp_path: Path) -> None:
    assert rules_of(tmp_path / "a.py", text) == ["fp16-flag"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import tensorrt_rtx as trt\nf = trt.BuilderFlag.FP16\n", 0),
        ("f = trt.BuilderFlag.FP16  # whose trt?\n", 0),
        ("import tensorrt as trt\nF = trt.BuilderFlag\nF = Mine()\nf = F.FP16\n", 0),
        ("import tensorrt as trt\nF = trt.BuilderFlag\ndef g(F):\n    return F.FP16\n", 0),
        ("import tensorrt as trt\ndef g():\n    F = trt.BuilderFlag\ndef h():\n    return F.FP16\n", 0),
        ("import tensorrt as trt\nengine = self.trt.engine\nengine.num_bindings\n", 1),
        ("import tensorrt as trt\nif int(trt.__version__.split('.')[0]) >= 10:\n    a()\nelse:\n    engine.num_bindings\n", 0),
        ("import tensorrt as trt\nif trt.__version__ < '10':\n    engine.num_bindings\n    return_()\n", 0),
        ("import tensorrt as trt\nis_trt10 = int(trt.__version__.split('.')[0]) >= 10\nx = a if is_trt10 else engine.num_bindings\n", 0),
        ("import tensorrt as trt\nif hasattr(engine, 'num_io_tensors'):\n    a()\nelse:\n    engine.num_bindings\n", 0),
        ("import tensorrt as trt\nif hasattr(engine, 'num_bindings'):\n    engine.num_bindings\n", 0),
        ("import tensorrt as trt\ntry:\n    engine.num_io_tensors\nexcept AttributeError:\n    engine.num_bindings\n", 0),
        ("import tensorrt as trt\ndef f():\n    if trt.__version__ >= '10.0':\n        return 1\n    return engine.num_bindings\n", 0),
        ("import tensorrt as trt\nif torch.__version__ >= '2':\n    engine.num_bindings\n", 1),
        ("import tensorrt as trt\nif trt.__version__ >= '10.0':\n    engine.num_bindings\n", 1),
        ("import tensorrt as trt\ntry:\n    engine.num_bindings\nexcept RuntimeError:\n    pass\n", 1),
    ],
)  # fmt: skip
def test_code_that_does_not_run_with_the_target_release_is_left_alone(text: str, expected: int, tmp_path: Path) -> None:
    assert len(rules_of(tmp_path / "a.py", text)) == expected


def test_places_are_right_after_text_that_is_not_ascii_and_comments_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    text = "import tensorrt as trt\ns = 'äö€'; n = engine.num_bindings  # größe\nraw = '\udc80'\n"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    (found,) = te.migrate(path).findings
    assert (found.line, found.column, found.text) == (2, 23, "num_bindings")
    te.migrate(path, fix=True)
    assert path.read_bytes() == text.replace("num_bindings", "num_io_tensors").encode("utf-8", "surrogateescape")


# ------------------------------------------------------------------------------------------------ notebooks, C++


def test_a_notebook_is_read_cell_by_cell_and_keeps_its_lines(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["trtexec --onnx=m.onnx --fp16 is old\n"]},
        {
            "cell_type": "code",
            "source": [
                "%matplotlib inline\n",
                "import tensorrt as trt\n",
                "x\n",
                "f = trt.BuilderFlag.INT8\n",
                "y = 'ä'",
            ],
        },
        {"cell_type": "code", "source": ["help?\n", "a b c"]},
        {"cell_type": "code", "source": "!trtexec --onnx=m.onnx --best --skipInference\nx = 1"},
    ]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": cells}, indent=1))
    report = te.migrate(path, fix=True)
    lines = path.read_text().splitlines()
    assert [item.rule for item in report.findings] == ["int8-flag", "best-flag"]
    assert "trt.BuilderFlag.INT8" in lines[report.findings[0].line - 1]
    assert "--best" in lines[report.findings[1].line - 1]
    path.write_text("{tensorrt")
    (skipped,) = te.migrate(path).files_skipped
    assert skipped.reason.startswith("does not parse")


@pytest.mark.skipif(not cpp_source.is_available(), reason="the C++ parser (extra `migrate`) is not installed")
def test_what_a_deleter_gets_is_an_object_of_tensorrt(tmp_path: Path) -> None:
    """The usual deleter of `unique_ptr`; another class has a `destroy` of its own."""
    text = """#include <NvInfer.h>
struct D { template <class T> void operator()(T* p) const { p->destroy(); } };
struct W { void close(); };
void f(Window* w) { w->destroy(); }
"""
    assert [(item.rule, item.line) for item in _report(tmp_path / "a.cpp", text).findings] == [("destroy-method", 2)]


@pytest.mark.skipif(not cpp_source.is_available(), reason="the C++ parser (extra `migrate`) is not installed")
def test_branches_of_the_preprocessor_for_other_releases_are_left_out(tmp_path: Path) -> None:
    text = """#include <NvInfer.h>
#if NV_TENSORRT_MAJOR >= 10
int a = engine->getNbIOTensors();
#else
int a = engine->getNbBindings();
#endif
#if NV_TENSORRT_MAJOR < 8 || defined(MINE)
int b = engine->getNbBindings();
#elif NV_TENSORRT_VERSION < 10000
int c = engine->getNbBindings();
#endif
"""
    assert [item.line for item in _report(tmp_path / "a.cpp", text).findings] == [8]


def _report(path: Path, text: str) -> te.MigrateReport:
    path.write_text(text)
    return te.migrate(path)


def test_without_the_parser_cpp_is_named_and_fails_only_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_source, "find_spec", lambda name: None)
    (tmp_path / "a.cpp").write_text("#include <NvInfer.h>\n")
    with pytest.raises(SetupError, match="C\\+\\+") as error:
        te.migrate(tmp_path)
    assert error.value.exit_code == 3 and "trt-engine[migrate]" in str(error.value.hint)
    (tmp_path / "a.py").write_text(OLD)
    report = te.migrate(tmp_path)
    assert [item.rule for item in report.findings] == ["fp16-flag"]
    assert [Path(item.file).name for item in report.files_skipped] == ["a.cpp"]


# ------------------------------------------------------------------------------------------------ files and comments


def test_environments_version_control_binaries_links_and_huge_files_are_left_out(tmp_path: Path) -> None:
    for folder in (".git", "node_modules", "mine/pyvenv", "src"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text(OLD)
    (tmp_path / "mine/pyvenv/pyvenv.cfg").touch()
    (tmp_path / "b.py").write_bytes(b"\0" + OLD.encode())
    (tmp_path / "c.py").symlink_to(tmp_path / "src" / "a.py")
    (tmp_path / "big.py").write_text(OLD + "#" * MAX_BYTES)
    (tmp_path / "d.py").write_text(OLD + "def (:\n")
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "latin.py").write_bytes(OLD.encode() + b"# \xe9\n")
    report = te.migrate(tmp_path)
    assert [Path(item.file).relative_to(tmp_path).as_posix() for item in report.findings] == ["latin.py", "src/a.py"]
    assert {Path(item.file).name for item in report.files_skipped} == {"b.py", "big.py", "d.py", "pipe.py"}
    assert not te.migrate(tmp_path, exclude=("src", "lat*")).findings
    assert len(te.migrate(tmp_path / "node_modules" / "a.py").findings) == 1, "named itself"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("config.set_flag(trt.BuilderFlag.FP16)  # trt-engine: ignore[fp16-flag]\n", 0),
        ("config.set_flag(trt.BuilderFlag.FP16)  # trt-engine: ignore[int8-flag, fp16-flag]\n", 0),
        ("config.set_flag(trt.BuilderFlag.FP16)  # trt-engine: ignore\n", 0),
        ("# trt-engine: ignore[fp16-flag]\nconfig.set_flag(trt.BuilderFlag.FP16)\n", 0),
        ("# trt-engine: ignore-file[fp16-flag]\n\n\nconfig.set_flag(trt.BuilderFlag.FP16)\n", 0),
        ("config.set_flag(trt.BuilderFlag.FP16)  # trt-engine: ignore[int8-flag]\n", 1),
        ("x = 1  # trt-engine: ignore\nconfig.set_flag(trt.BuilderFlag.FP16)\n", 1),
    ],
)
def test_comments_turn_findings_off(text: str, left: int, tmp_path: Path) -> None:
    report = _report(tmp_path / "a.py", "import tensorrt as trt\n" + text)
    assert len(report.findings) == left and report.counts["ignored"] == 1 - left


@pytest.mark.parametrize("start", ["run: >", "- >-", "command: >+", "run: |", "command: ", "run: a &&"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_command_goes_on_over_the_lines_of_a_yaml_scalar(start: str, end: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    path.write_bytes(
        end.join((start, "  trtexec --onnx=m.onnx", "  --explicitBatch --fp16", "  --buildOnly", "")).encode()
    )
    report = te.migrate(path, fix=True)
    assert (
        report.files_fixed and b"--explicitBatch" not in path.read_bytes() and b"--buildOnly" not in path.read_bytes()
    )
    assert b"trt-engine cast m.onnx --to fp16 -o m.fp16.onnx && trtexec --onnx=m.fp16.onnx" in path.read_bytes()
    assert not [item for item in te.migrate(path).findings if item.fixable]


def test_commands_end_where_the_shell_ends_them(tmp_path: Path) -> None:
    text = """\
if trtexec --onnx=a.onnx --saveEngine=a 2>&1 | tee log; then echo --fp16; fi
x=$(trtexec --onnx="$DIR/b c.onnx" --skipInference) && other --int8
/opt/trt/bin/trtexec --loadEngine=p --skipInference # --best
cat <<EOF
EOF
"""
    assert not _report(tmp_path / "a.sh", text).findings
    report = _report(tmp_path / "b.sh", 'trtexec --onnx="$DIR/b c.onnx" --fp16 --skipInference\n')
    assert [(item.rule, item.fixable) for item in report.findings] == [("fp16-flag", False)]


_FEED_EACH_OTHER = "".join(
    f"{a} = {b}[0] if c else f'{{{b}}} --fp16 {{{a}}}' + {a}[{b}]\n{a}.append({b})\n"
    for a in "xyzuvw"
    for b in "xyzuvw"
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("a.sh", ("trtexec --onnx=m " * 500 + "\\\n") * 100, marks=pytest.mark.slow),
        ("a.sh", ("trtexec " + "ab/cd" * 3_000 + "\n") * 50),
        ("a.sh", "# trtexec\n" + "\\\n" * 200_000 + "trtexec --fp16 '" + '"' * 10_000),
        ("a.txt", "[property]\nonnx-file=a\n" + ("network-mode=" + " " * 19_000 + "x\n") * 50),
        ("requirements.txt", ("tensorrt" + ">=1," * 4_000 + "\n" + " " * 19_000 + "\n") * 25),
        pytest.param("CMakeLists.txt", ("nvinfer_10 nvparsers " * 500 + "\n") * 80, marks=pytest.mark.slow),
        ("a.py", "import tensorrt as trt\nx = " + "-" * 5_000 + "trt.BuilderFlag.FP16\n"),
        ("b.py", "# trtexec\nx = y = 'a'\n" + _FEED_EACH_OTHER + "run(['trtexec', x, *y, *z[u]])\n"),
        ("config.pbtxt", 'name : "tensorrt" ' + ('key: "precision_mode" value: ' * 500 + "\n") * 50),
        ("long.sh", "trtexec --fp16 " * 50_000),
        ("a.yml", "run: >\n" + "  trtexec --fp16\n" * 2_000),
        ("b.yml", "trtexec\n" + "a: >\n" * 20_000 + "- >\n " * 20_000 + " \n" * 100_000),
        ("c.yml", "trtexec --onnx=a\n" + ("python <<" + "A" * 300 + "\n") * 660),
        ("b.sh", "trtexec --onnx=a\n" + "".join(f"cat a.py <<E{at}\n" for at in range(20_000))),
        ("c.sh", "trtexec --onnx=a\npython -c '" + "\\a" * 2_000),
        ("d.yml", "trtexec --onnx=a\n" + "command: a\n- b\n" * 20_000),
        ("d.sh", "trtexec --onnx=a\n" + "f() {\n a $@\n}\n" * 20_000),
        ("e.sh", ('"echo ' * 1_500 + " trtexec -a;" * 60 + "\n") * 3),
        ("Dockerfile", "# trtexec\n" + "".join(f"FROM nvcr.io/nvidia/tensorrt:$A{at}\n" for at in range(4_000))),
        ("pyproject.toml", "[tool.poetry.dependencies]\n" + "tensorrt = '8'\n" * 20_000),
        ("a.log", "&&&& RUNNING T # trtexec --fp16\n" * 6_000),
        ("a.md", "trtexec\n" + "w" * 19_000 + "\n"),
        ("b.ipynb", '{"cells":[{"cell_type":"code","source":"# trtexec\\n' + "\\u0061=1\\n" * 10_000 + '"}]}'),
        ("c.py", "import tensorrt as trt\nif " + "trt_" * 50_000 + " > 8:\n    pass\n"),
        ("d.py", "none = []\nsubprocess.run([os.path.join(none, 'trtexec'), '--fp16'])\n"),
        ("a.cpp", "// NvInfer.h\n" + "IA, " * 100_000),
        ("b.cpp", "// NvInfer.h\nint x = " + "a.destroy()+" * 40_000 + "1;"),
        ("c.cpp", "// NvInfer.h\n" + "".join(f"a{at}->destroy();\n" for at in range(3_000))),
    ],
)
def test_a_hostile_file_ends_in_time(name: str, text: str, tmp_path: Path) -> None:
    """Each takes about a second or less; a quadratic pattern takes hours, which the timeout of the tests ends."""
    (tmp_path / name).write_text(text)
    te.migrate(tmp_path)


def test_a_sarif_log_replaces_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("trtexec --onnx=m.onnx --fp16\n")
    for before, fits in (("", True), (' {"version": "2.1.0"}', True), ("ONNX", False), ("trtexec --fp16", False)):
        log = tmp_path / "log"
        log.write_text(before)
        if fits:
            te.migrate(tmp_path / "a.sh", sarif=log)
            assert "2.1.0" in log.read_text()
        else:
            with pytest.raises(UsageError, match="is not a SARIF log"):
                te.migrate(tmp_path / "a.sh", sarif=log)
            assert log.read_text() == before


@pytest.mark.parametrize("before", ["test -e p ||", "if !", "!", "cat x |", "xargs", "time", "nohup", "docker run i"])
def test_a_command_whose_place_another_one_cannot_share_is_left_to_the_reader(before: str, tmp_path: Path) -> None:
    """`a || b` is not `a || c && b`."""
    report = _report(tmp_path / "a.sh", f"{before} trtexec --onnx=m.onnx --fp16 --skipInference\n")
    assert [(item.rule, item.fixable) for item in report.findings] == [("fp16-flag", False)]


# ------------------------------------------------------------------------------------------------ the verb


def test_the_verb_prints_findings_and_fails_only_when_it_is_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text(OLD)
    Path("requirements.txt").write_text("tensorrt>=8.6\n")
    assert run(["migrate", "."]) == 0
    out = capsys.readouterr().out
    assert "a.py\n  2: error: fp16-flag: `FP16`\n" in out.replace("  a.py", "a.py").replace("    2:", "  2:")
    assert "trt-engine cast MODEL.onnx --to fp16" in out and "findings: 1 error, 1 warning" in out
    assert run(["migrate", ".", "--fail-on", "error"]) == 4
    assert run(["migrate", "requirements.txt", "--fail-on", "error"]) == 0
    assert run(["migrate", "requirements.txt", "--fail-on", "warning"]) == 4
    assert run(["migrate", ".", "--to", "10.x", "--fail-on", "warning"]) == 0
    assert run(["migrate", "missing"]) == 2
    assert run(["migrate", ".", "--from", "11.0", "--to", "10.0"]) == 2
    assert run(["migrate", ".", "--fix", "--diff"]) == 2
    assert run(["migrate", ".", "--rule", "fp61-flag"]) == 2
    assert "did you mean `fp16-flag`" in capsys.readouterr().err


SARIF = {
    "type": "object",
    "required": ["version", "runs"],
    "properties": {
        "version": {"const": "2.1.0"},
        "runs": {
            "type": "array",
            "items": {
                "required": ["tool", "results"],
                "additionalProperties": False,
                "properties": {
                    "tool": {"required": ["driver"], "properties": {"driver": {"required": ["name", "rules"]}}},
                    "results": {
                        "items": {
                            "required": ["message", "ruleId", "ruleIndex", "level", "locations"],
                            "additionalProperties": False,
                            "properties": {
                                "message": {"required": ["text"]},
                                "ruleId": {"type": "string"},
                                "ruleIndex": {"type": "integer", "minimum": 0},
                                "level": {"enum": ["none", "note", "warning", "error"]},
                                "locations": {
                                    "items": {
                                        "properties": {
                                            "physicalLocation": {
                                                "required": ["artifactLocation", "region"],
                                                "properties": {
                                                    "artifactLocation": {
                                                        "properties": {"uri": {"format": "uri-reference"}}
                                                    },
                                                    "region": {
                                                        "properties": {
                                                            "startLine": {"type": "integer", "minimum": 1},
                                                            "startColumn": {"type": "integer", "minimum": 1},
                                                        }
                                                    },
                                                },
                                            }
                                        }
                                    }
                                },
                            },
                        }
                    },
                },
            },
        },
    },
}
"""What this project writes of SARIF 2.1.0, in the terms of its section 3."""


def test_sarif_names_rule_and_line_of_each_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a b.py").write_text(OLD)
    report = te.migrate("a b.py", sarif="out.sarif")
    log = json.loads(Path("out.sarif").read_text())
    jsonschema.Draft202012Validator(SARIF).validate(log)
    (result,) = log["runs"][0]["results"]
    rules = log["runs"][0]["tool"]["driver"]["rules"]
    assert rules[result["ruleIndex"]]["id"] == result["ruleId"] == "fp16-flag" == report.findings[0].rule
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "a%20b.py" and place["region"]["startLine"] == 2


def test_a_change_that_cannot_be_written_is_an_error_and_leaves_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, data: bytes | str) -> Path:
        raise PermissionError(13, "Permission denied", str(path))

    path = tmp_path / "a.py"
    path.write_text("import tensorrt as trt\nn = engine.num_bindings\n")
    monkeypatch.setattr(module, "write_atomic", refuse)
    with pytest.raises((SetupError, UsageError)):
        te.migrate(path, fix=True)
    assert "num_bindings" in path.read_text()


def test_this_project_itself_has_no_findings_of_its_own_commands() -> None:
    report = te.migrate([ROOT / "tools", ROOT / "environments", ROOT / "examples"])
    assert [f"{item.file}:{item.line} {item.rule}" for item in report.findings if item.severity == "error"] == []


def test_a_byte_order_mark_and_line_ends_of_old_systems_are_read_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    for mark, end in ((b"\xef\xbb\xbf", b"\n"), (b"", b"\r"), (b"\xef\xbb\xbf", b"\r\n")):
        path.write_bytes(mark + b"import tensorrt as trt" + end + b"n = engine.num_bindings" + end)
        assert te.migrate(path).findings[0].line == 2
        te.migrate(path, fix=True)
        assert path.read_bytes() == mark + b"import tensorrt as trt" + end + b"n = engine.num_io_tensors" + end


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_of_windows_hide_no_requirement_and_no_setting(end: str, tmp_path: Path) -> None:
    assert rules_of(tmp_path / "requirements.txt", f"tensorrt==8.6.1{end}numpy{end}") == ["requirement-release"]
    config = end.join(["[property]", "onnx-file=a.onnx", "network-mode=2", ""])
    assert rules_of(tmp_path / "config_infer.txt", config) == ["deepstream-network-mode"]


def test_a_cast_is_put_behind_the_options_of_a_build_step(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text("RUN --mount=type=cache,target=/c A=1 trtexec --onnx=m.onnx --fp16 --saveEngine=m.plan\n")
    te.migrate(path, fix=True)
    cast = "trt-engine cast m.onnx --to fp16 -o m.fp16.onnx"
    assert path.read_text() == (
        f"RUN --mount=type=cache,target=/c {cast} && A=1 trtexec --onnx=m.fp16.onnx --saveEngine=m.plan\n"
    )


def test_layers_of_another_library_are_not_those_of_tensorrt(tmp_path: Path) -> None:
    text = (
        "import tensorrt as trt\nimport torch\nfrom torch import nn\n"
        "conv = nn.Conv2d(1, 1, 1)\npool = torch.nn.MaxPool2d(2)\nprint(conv.kernel_size, pool.padding)\n"
        "def build(network):\n    conv = network.add_convolution_nd(x, 1, (1, 1), w)\n    conv.padding = (1, 1)\n"
    )
    report = _report(tmp_path / "a.py", text)
    assert [(item.line, item.rule) for item in report.findings] == [(9, "nd-layers")]


@pytest.mark.parametrize(
    ("file", "text", "line"),
    [
        ("a.cmd", '"C:\\Program Files\\TensorRT\\bin\\trtexec.exe" ^\r\n --onnx=a.onnx ^\r\n --fp16\r\n', 3),
        ("a.ps1", "& $TrtExec --onnx=$Onnx `\n  --fp16\n", 2),
        ("a.yml", "command:\n  - trtexec\n  - --onnx=a.onnx\n  - --fp16\n", 4),
        ("a.py", "cmd = [str(TRTEXEC), '--onnx=' + m]\ncmd.append('--fp16')\n", 2),
    ],
)
def test_a_command_is_found_in_the_spelling_of_each_language(file: str, text: str, line: int, tmp_path: Path) -> None:
    path = tmp_path / file
    path.write_text(text, newline="")
    assert ("fp16-flag", line) in {(item.rule, item.line) for item in te.migrate(path).findings}


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("a.sh", "uv pip install --system tensorrt==10.13.3.9\n", ["requirement-release"]),
        (
            "a.ipynb",
            '{"cells": [{"cell_type": "code", "source": "%pip install tensorrt==10.0.1"}]}',
            ["requirement-release"],
        ),
        ("a.py", "run([sys.executable, '-m', 'pip', 'install', 'tensorrt==10.3.0'])\n", ["requirement-release"]),
        ("pyproject.toml", "[tool.poetry.dependencies]\ntensorrt = '^8.6'\n", ["requirement-release"]),
        ("b.sh", "pip install 'tensorrt>=11,<12'\npip uninstall tensorrt\necho pip install tensorrt==8.6\n", []),
    ],
)
def test_an_installed_release_is_judged_wherever_it_is_asked_for(
    file: str, text: str, expected: list[str], tmp_path: Path
) -> None:
    assert rules_of(tmp_path / file, text) == expected


@pytest.mark.parametrize(
    ("name", "text", "rules"),
    [
        ("a.sh", 'TRT=/opt/bin/trtexec\n"$TRT" --onnx="$m" --fp16\n', {"fp16-flag"}),
        ("b.sh", 'opts=(--onnx=a.onnx)\nopts+=(--fp16)\ntrtexec "${opts[@]}" --saveEngine=a\n', {"fp16-flag"}),
        ("c.sh", 'if x; then F=--int8; else F="--bf16"; fi\nexec trtexec --onnx=a ${F}\n', {"int8-flag", "bf16-flag"}),
        ("d.sh", "for p in fp16 int8; do trtexec --onnx=a --$p; done\n", {"fp16-flag", "int8-flag"}),
        ("e.mk", "P := --int8 --fp16\nx:\n\t@trtexec --onnx=a $(P)\n", {"fp16-flag", "int8-flag"}),
        ("f.ps1", '$t = "C:\\trt\\trtexec.exe"\n& $t --onnx=a --fp16\n', {"fp16-flag"}),
        ("g.ps1", "$a = @('--onnx=a', '--int8')\n.\\trtexec.exe @a\n", {"int8-flag"}),
        ("h.ps1", 'Start-Process trtexec.exe -ArgumentList "--onnx=a","--int8"\n', {"int8-flag"}),
        ("i.bat", "set F=--int8\ntrtexec.exe --onnx=a %F%\n", {"int8-flag"}),
        ("j.yaml", 'x:\n  command: ["/bin/trtexec"]\n  args: ["--onnx=a", "--fp16"]\n', {"fp16-flag"}),
        ("k.yaml", "x:\n  command:\n  - trtexec\n  args:\n  - --onnx=a\n  - --int8\n", {"int8-flag"}),
        ("Dockerfile", "ARG TAG=23.05\nFROM nvcr.io/nvidia/tensorrt:${TAG}-py3\n", {"image-release"}),
        ("environment.yml", "dependencies:\n  - pip:\n    - nvidia-tensorrt==8.4.3.1\n", {"requirement-name"}),
        (
            "l.py",
            "import tensorrt as trt\nfor n in ('FP16',):\n    c.set_flag(getattr(trt.BuilderFlag, n))\n",
            {"fp16-flag"},
        ),
        ("n.sh", 'run() { "$T/trtexec" --onnx="$1" "${@:2}"; }\nrun a --fp16\n', {"fp16-flag"}),
        ("o.sh", 'case $1 in\n  h) P="--fp16" ;;\nesac\ntrtexec --onnx=a $P\n', {"fp16-flag"}),
        ("p.sh", "F=(\n  --onnx=a  # it\n  --int8  # or not\n)\ntrtexec ${F[@]}\n", {"int8-flag"}),
        ("q.sh", "V=8.6.1\npip install tensorrt==${V}\n", {"requirement-release"}),
        ("r.ps1", '$e = Join-Path $x "bin\\trtexec.exe"\n$f = "--onnx=a", "--fp16"\n& $e @f\n', {"fp16-flag"}),
        ("s.yml", "env:\n  F: --fp16\nrun: trtexec --onnx=a $F --saveEngine=b\n", {"fp16-flag"}),
        ("t.yml", "p: [fp16, int8]\nrun: trtexec --onnx=a --${{ matrix.p }}\n", {"fp16-flag", "int8-flag"}),
        ("u.yml", 'command: [sh, -c]\nargs: ["trtexec --onnx=a --fp16"]\n', {"fp16-flag"}),
        ("values.yaml", "repository: nvcr.io/nvidia/tritonserver\ntag: 23.09-py3\n", {"image-release"}),
        ("v.sh", "grep trtexec --fp16 notes\n", set()),
        ("w.sh", "alias t=/bin/trtexec\nt --onnx=a --fp16\n", {"fp16-flag"}),
        ("x.sh", "p=${1:-fp16}\ntrtexec --onnx=a --${p}\n", {"fp16-flag"}),
        ("y.bat", "FOR %%P IN (fp16 int8) DO trtexec --onnx=a --%%P\n", {"fp16-flag", "int8-flag"}),
        ("z.yml", 'command: ["trtexec", "--onnx=/a"]\nargs: ["--bf16"]\n', {"bf16-flag"}),
        ("aa.py", "cmd = ['trtexec', '--onnx=a']\ncmd += ['--fp16' if x else '--int8']\n", {"fp16-flag", "int8-flag"}),
        ("ab.py", "assert 'trtexec --fp16' not in text\n", set()),
        ("ac.sh", "cmake -DT=trtexec --build . --fp16\n", set()),
        ("ad.yml", 'v: {F: "--fp16"}\nrun: trtexec --onnx=a $F\n', {"fp16-flag"}),
        ("ae.sh", 'HELP="use trtexec with --fp16"\nls trtexec --int8\n', set()),
        ("af.yml", 'description: "run trtexec --fp16"\n', set()),
        ("ag.py", "f = ['--fp16'] if x else []\nrun(['trtexec', '--onnx=a', *f])\n", {"fp16-flag"}),
        ("ah.py", "f = '--int8' if x else ''\nrun(f'trtexec --onnx=a {f}')\n", {"int8-flag"}),
        ("ai.sh", "python -c \"print('trtexec --best')\"\n", set()),
        ("aj.sh", 'O="--fp16"\n[ $Q ] && O="$O --int8"\ntrtexec --onnx=a $O\n', {"fp16-flag", "int8-flag"}),
        ("ak.py", "F = {'h': ['--fp16']}\na = list(F[p])\nrun(['trtexec', '--onnx=a'], *a)\n", {"fp16-flag"}),
        ("al.yml", 'env:\n- name: ORT_TENSORRT_FP16_ENABLE\n  value: "1"\n', {"ort-precision-option"}),
        ("am.yml", 'e:\n- name: F\n  value: --fp16\nargs: ["trtexec --onnx=a $F"]\n', {"fp16-flag"}),
        ("an.yml", 'V: "8.5.3.1"\nrun: pip install nvidia-tensorrt==$V\n', {"requirement-release"}),
        (
            "ao.md",
            "```sh\n$ trtexec --onnx=a --fp16 \\\n  --int8\n--best trtexec --bf16\n```\n",
            {"fp16-flag", "int8-flag"},
        ),
        ("ap.md", "trtexec --onnx=a --fp16\n```python\nx\n```\n\n```text\ntrtexec --onnx=a --int8\n```\n", set()),
        (
            "aq.md",
            "```\ndocker run nvcr.io/nvidia/deepstream:6.2 trtexec --onnx=a --bf16\n```\n",
            {"image-release", "bf16-flag"},
        ),
        ("ar.sh", 'H=$([ x ] && echo "--fp16" || echo "")\ntrtexec --onnx=a $H\n', {"fp16-flag"}),
        ("as.yml", '    - echo "trtexec --onnx=a --best"\n', set()),
        ("at.py", "from polygraphy.backend.trt import Calibrator\nc = Calibrator(d)\n", {"int8-calibrator"}),
        ("au.sh", "W=--int8\ntrtexec --onnx=a ${W:---fp16}\n", {"fp16-flag", "int8-flag"}),
        ("av.py", "f = ['--fp16']\nrun('trtexec --onnx=a %s' % ' '.join(f))\n", {"fp16-flag"}),
        ("aw.py", "run('trtexec --onnx=a {}'.format('--int8'))\n", {"int8-flag"}),
        ("ax.py", "class C:\n    e: list = ['--best']\nc = ['trtexec']\nc.extend(self.e)\n", {"best-flag"}),
        ("ay.yml", 'inputs:\n  p:\n    default: "--fp16"\nrun: trtexec --onnx=a ${{ inputs.p }}\n', {"fp16-flag"}),
        ("az.yml", "vars:\n  F: --int8\ncmds:\n- trtexec --onnx=a {{.F}}\n", {"int8-flag"}),
        ("m.sh", "F=--fp16\nother --onnx=a $F\ntrtexec --onnx=a --saveEngine=b\n", set()),
    ],
)
def test_what_a_variable_a_loop_or_another_key_holds_is_part_of_the_command(
    name: str, text: str, rules: set[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    found = te.migrate(tmp_path / name).findings
    assert {item.rule for item in found} - {"trtexec-defaults"} == rules
    assert len({(item.rule, item.line, item.column) for item in found}) == len(found), "once, however often it is used"
