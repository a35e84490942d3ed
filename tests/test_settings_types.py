"""Settings as typed keyword arguments: made from config.py, up to date, and enough for mypy to find a wrong one."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import trt_engine as te
from programs import load_program

ROOT = Path(__file__).parents[1]


def _generator() -> ModuleType:
    return load_program(ROOT / "tools" / "settings_types.py", "settings_generator")


def test_the_module_is_up_to_date() -> None:
    made = (ROOT / "src" / "trt_engine" / "verbs" / "settings_types.pyi").read_text(encoding="utf-8")
    assert made == _generator().text(), "run `python tools/settings_types.py`"


USER = """\
from pathlib import Path

import numpy as np

import trt_engine as te


def seen(at: te.Progress) -> None:
    print(at.text, at.done, at.total, at.unit)


model: Path = te.example("example")
engine: te.Engine = te.build(model, batch=(1, 8, 64), precision="fp32", options={"level": "basic"}, progress=True)
with te.load(engine, contexts=2, device=0, batching=te.Batching(max_batch=8)) as runner:
    runner.infer({"images": np.zeros((8, 3, 160, 160), np.float32)})
record: te.BenchRecord = te.bench(engine, batch=8, duration_s="200ms", shapes={"images": (8, 3, 160, 160)}, progress=seen)
sizing: te.SizeReport = te.size(model, max_batch=64, min_streams=4, memory_limit="8GiB")
print(te.profile(engine, batch=8, ncu=2).compute_ms, te.compare(engine, "b.onnx", fail_if=["slower:3%"], batch=8).stable)
print(te.evaluate(engine, "val", max_samples=8, device="cpu").metrics)
print(te.quantize(model, "int8", target="onnxruntime-cpu").model)
te.size("m", max_bach=3)  # wrong
te.size("m", max_batch="many")  # wrong
te.build("m", precision="fp61")  # wrong
te.build("m", progress="yes")  # wrong
te.load(engine, batching={"max_bach": 3})  # wrong
te.bench(engine, duration=2)  # wrong
te.build(b"\\x08", out="e")
te.size(open("m.onnx", "rb"), max_batch=8)
te.lint(42)  # wrong
te.profile(engine, on_stage=print)  # wrong
te.compare(engine, engine, fail_iff=["slower:3%"])  # wrong
te.evaluate(engine, "val", limits=8)  # wrong
te.quantize("m", "int8", targett="tensorrt")  # wrong
te.quantize("m", to="int9")  # wrong
if sizing.capacity is not None:
    print(sizing.capacity.streams)
te.bundle("meta.json", "out", batch_size=8)  # wrong
te.convert("m.pt2", simplfy=True)  # wrong
te.Batching(max_bach=3)  # wrong
nothing: str = te.size("m")  # wrong
"""


@pytest.mark.parametrize("name", [one for one in te.__all__ if inspect.isfunction(getattr(te, one))])
def test_help_lists_each_setting_with_type_default_and_meaning(name: str) -> None:
    function, shown = getattr(te, name), inspect.signature(getattr(te, name)).parameters
    own = inspect.signature(inspect.unwrap(function)).parameters
    (settings_of,) = [str(item.annotation) for item in own.values() if item.kind is item.VAR_KEYWORD] or ["Unpack[]"]
    generator = _generator()
    for kind in (one for one in generator.KINDS if f"Unpack[{one.name}]" == settings_of):
        typed = {*generator.inherited(kind), *(one for one, _, _ in generator.fields_of(kind))}
        assert typed == shown.keys() - own.keys()
    assert not any(item.kind is item.VAR_KEYWORD for item in shown.values())
    for one in shown.keys() - own.keys():
        text = re.search(rf"^{one}: {re.escape(shown[one].annotation)} = (.+)\n    \S", function.__doc__, re.MULTILINE)
        assert one == "batching" or (text is not None and text[1] == repr(shown[one].default))


def test_a_value_without_a_name_too_many_says_which_names_there_are() -> None:
    with pytest.raises(te.TrtEngineError, match=r"too many positional arguments\nhint: .*te.build\(model, out=...\)"):
        te.build("a.onnx", "b.engine")  # type: ignore[misc]


@pytest.mark.slow
def test_mypy_finds_each_wrong_argument_of_a_users_file_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent", "user.py"]
    environment = os.environ | {"MYPYPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    wrong = [number for number, line in enumerate(USER.splitlines(), 1) if line.endswith("# wrong")]
    found = sorted({int(number) for number in re.findall(r"^user\.py:(\d+): error", done.stdout, re.MULTILINE)})
    assert found == wrong, done.stdout + done.stderr
    assert 'Unexpected keyword argument "max_bach" for "size"' in done.stdout
