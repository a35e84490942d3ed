"""`trt-engine profile`: the verdict first, one document on stdout, exit codes, and the partial report after Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import onnx
import pytest

import onnx_models as models
import trt_engine as te
from patience import HANG_S
from trt_engine.cli.main import run
from trt_engine.cli.profile import _layers, _split
from trt_engine.traces import LayerProfile, LayerRow

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "profile.json"
QUICK = ["--duration", "0", "--inferences", "4", "--warmup", "1"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    net = models.conv_net(folder / "net.onnx")
    return te.build(net, batch=(1, 2, 4), out=folder / "net.engine.onnx", store=te.Store(folder / "store")).path


def profile(*args: str | Path) -> int:
    return run(["profile", *map(str, args)])


def test_the_text_begins_with_the_verdict_and_says_what_each_number_is(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile(engine, *QUICK, "-o", tmp_path / "out", "--top", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("verdict     ")
    text = "\n".join(lines)
    for said in (
        "next        ", "by the host's clock, no profiler", "the sum of their medians over 4 inferences", "top 2 of ",
        "GFLOP/s", "layers  used: onnxruntime profiler", "nsys    passed over: there is no GPU", "open timeline with: ",
    ):  # fmt: skip
        assert said in text, said


def test_median_and_p99_stand_beside_the_time_they_are_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = models.conv_net(tmp_path / "net.onnx")
    te.build(
        net, backend="fake", device="fake:0", out=tmp_path / "net.fake", parity=False, store=te.Store(tmp_path / "s")
    )
    assert profile(tmp_path / "net.fake", *QUICK, "-o", tmp_path / "out", "--json") == 0
    compute = json.loads(capsys.readouterr().out)["compute_ms"]
    assert profile(tmp_path / "net.fake", *QUICK, "-o", tmp_path / "again") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert compute["median"] and lines["whole"].endswith("(mean)"), (
        "the events' times are not those of the host's clock"
    )
    assert "one inference enqueued ahead" in lines["whole"] and "host's clock" not in lines["whole"]
    assert "(median " in lines["compute"]


def test_the_text_says_how_long_it_measured_and_not_how_long_it_should_have(engine: Path, tmp_path: Path) -> None:
    report = te.profile(engine, out=tmp_path, duration_s=0, warmup_s=0, inferences=4, warmup=1)
    for wall_s, told in ((report.wall_s, f"{report.wall_s:.3g} s after"), (2.5, "2.5 s after"), (None, "20 s after")):
        cut = replace(report, protocol=replace(report.protocol, duration_s=20.0), wall_s=wall_s)
        assert list(_split(cut))[-1].startswith(f"  measured {told}")


def test_rates_of_layers_are_in_the_unit_that_suits_the_largest_and_never_in_powers_of_ten() -> None:
    rows = tuple(
        LayerRow(name, "Conv", "matrix", ms, ms, 0.5, calls, flops=flops, nbytes=nbytes)
        for name, ms, calls, flops, nbytes in (
            ("large", 2.0, 1, 752_000_000_000, 8_000_000),
            ("small", 0.5, 12345, 10**9, None),
        )
    )
    _, heading, *table = _layers(LayerProfile(rows, 10, "IProfiler"), 5)
    assert heading.startswith("top 2 of 2 layers")
    assert [line.split()[:5] for line in table] == [
        ["share", "ms", "times", "TFLOP/s", "GB/s"],
        ["50.0%", "2.00", "1", "376", "4.00"],
        ["50.0%", "0.500", "12345", "2.00", "-"],
    ]


def test_times_of_launching_have_no_shares() -> None:
    row = LayerRow("conv", "Conv", "matrix", 2.0, 2.0, 0.5, 1.0, "cuda:0", "cuda", (), (), ("conv",))
    for clock, share in (("device", "50.0%"), ("launch", "-")):
        *_, line = _layers(LayerProfile((row,), 1, "by hand", None, None, clock=clock), top=1)  # type: ignore[arg-type]
        assert line.split()[0] == share


def test_a_computation_that_is_longer_than_the_whole_says_how_that_can_be(engine: Path, tmp_path: Path) -> None:
    report = te.profile(engine, out=tmp_path, duration_s=0, warmup_s=0, inferences=4, warmup=1)
    on_gpu = replace(report, device="cuda:0", protocol=replace(report.protocol, graph=True))
    split = replace(report.split, wall_ms=1.06, compute_ms=2.0, gpu_ms=2.0, overlap_ms=1.8e-05)
    told = {line.split()[0]: line for line in _split(replace(on_gpu, split=split)) if line}
    assert told["compute"].endswith("one query at a time; longer than the whole, in which a graph is replayed")
    assert told["overlap"].split()[1] == "0"
    split = replace(split, compute_ms=1.0, gpu_ms=1.0)
    told = {line.split()[0]: line for line in _split(replace(on_gpu, split=split)) if line}
    assert told["compute"].endswith("one query at a time")


def test_names_a_file_has_cannot_drive_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = onnx.load(models.conv_net(tmp_path / "net.onnx"))
    for index, node in enumerate(model.graph.node):
        node.name = f"no\n\x1b[31mde\u202e{index}"
    onnx.save(model, tmp_path / "net.onnx")
    assert profile(tmp_path / "net.onnx", *QUICK, "-o", tmp_path / "out", "--top", "100") == 0
    said = capsys.readouterr().out
    assert not {"\x1b", "\u202e"} & set(said) and "\\x1b[31mde" in said


def test_the_document_fits_its_schema_and_is_the_file(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile(engine, *QUICK, "-o", tmp_path / "out", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    jsonschema.validate(said, json.loads(SCHEMA.read_text()))
    assert json.loads((tmp_path / "out" / "profile.json").read_text()) == said
    assert any(row["onnx_nodes"] for row in said["layers"]["rows"]) and said["verdict"]["sentence"]


def test_a_rung_that_is_not_to_be_had_ends_with_3_and_the_next_is_taken_without_it(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile(engine, *QUICK, "-o", tmp_path / "out", "--rung", "nsys") == 3
    told = capsys.readouterr().err
    assert "error: the rung `nsys` is not to be had here" in told and "hint: " in told
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_what_would_be_written_and_writes_nothing(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile(engine, "--dry-run", "-o", tmp_path / "out", "--batch", "4", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["shapes"] == {"images": [4, 3, 8, 8]} and str(tmp_path / "out" / "profile.json") in said["writes"]
    assert str(tmp_path / "out" / "bench.log") in said["writes"]
    assert not (tmp_path / "out").exists()


def test_a_dry_run_names_the_device_the_backend_builds_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = models.conv_net(tmp_path / "net.onnx")
    for asked, device in (
        (["--backend", "tensorrt"], "cuda:0"), (["--backend", "fake"], "fake:0"), ([], "cpu"),
        (["--device", "cuda:1"], "cuda:1"),
    ):  # fmt: skip
        assert profile(net, "--dry-run", "-o", tmp_path / "out", "--json", *asked) == 0
        assert json.loads(capsys.readouterr().out)["device"] == device


def test_a_dry_run_refuses_what_the_profile_refuses(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile.json").write_text("{}")
    for asked in (["-o", str(tmp_path)], ["--backend", "fake"]):
        assert profile(engine, "--dry-run", *asked) == profile(engine, *QUICK, *asked) == 2
        first, _, second, _ = capsys.readouterr().err.splitlines()
        assert first == second
    assert profile(engine, "--dry-run", "-o", tmp_path, "--yes") == 0


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["missing.engine"], 4), (["--batch", "9"], 2), (["--shapes", "other:1"], 2), (["--device", "cuda:0"], 10),
        (["--rung", "gprof"], 2), (["--inferences", "0"], 2), (["--backend", "fake"], 2),
    ],
    ids=str,
)  # fmt: skip
def test_bad_input_ends_with_its_code_a_hint_and_nothing_written(
    args: list[str], code: int, engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = args if args[0] == "missing.engine" else [str(engine), *args]
    found = profile(*target, *(QUICK if "--inferences" not in args else QUICK[:2]), "-o", tmp_path / "out")
    told = capsys.readouterr().err
    assert found == code, told
    assert "hint: " in told and "Traceback" not in told
    assert not (tmp_path / "out").exists()


TALKATIVE = """
import sys
from trt_engine.benchmark import loop
from trt_engine.cli import main
look = loop._Watch.look
def told(self, done_s):
    if done_s > 1:  # after the warm-up
        print("at work", file=sys.stderr, flush=True)
    return look(self, done_s)
loop._Watch.look = told
main.main()
"""


def test_ctrl_c_leaves_a_partial_report_and_exit_code_130(engine: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", TALKATIVE, "profile", str(engine), "--json", "--duration", "600"]
    with subprocess.Popen(
        [*command, "-o", str(tmp_path / "out")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    ) as process:  # fmt: skip
        assert process.stderr is not None
        while process.stderr.readline() != "at work\n":
            assert process.poll() is None
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, err
    said = json.loads(out)
    assert said["complete"] is False and said["compute_ms"]["median"] > 0
    (record,) = map(json.loads, (tmp_path / "out" / "records.jsonl").read_text().splitlines())
    assert 0 < said["wall_s"] == record["wall_s"] < 600
    assert json.loads((tmp_path / "out" / "profile.json").read_text())["complete"] is False
