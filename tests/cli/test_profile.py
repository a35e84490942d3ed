"""`trt-engine profile`: the verdict first, one document on stdout, exit codes, and the partial report after Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import onnx_models as models
import trt_engine as te
from patience import HANG_S
from trt_engine.cli.main import run
from trt_engine.command_line.output import result_text
from trt_engine.records.profile import LayerProfile, LayerRow, ProfileReport
from trt_engine.reporting.document import Section, Table
from trt_engine.reporting.results import result_blocks

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
    text = "\n".join(lines)
    assert lines[0].startswith("The slowest layer is ")
    for said in (
        "Next: ",
        "by the host's clock, no profiler",
        "Milliseconds per inference by category",
        "With the layers' profiler on",
        "Layers, the 2 longest of ",
        "GFLOP/s",
        "onnxruntime profiler",
        "no GPU to profile: `cpu` runs the engine",
        "open timeline with: ",
    ):
        assert " ".join(said.split()) in " ".join(text.split()), said
    (row,) = [line for line in lines if line.split()[:1] == ["*"] and "layers" in line]
    assert row.split()[1:3] == ["layers", "used"]


def test_median_and_p99_stand_beside_the_time_they_are_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = models.conv_net(tmp_path / "net.onnx")
    te.build(
        net, backend="fake", device="fake:0", out=tmp_path / "net.fake", parity=False, store=te.Store(tmp_path / "s")
    )
    assert profile(tmp_path / "net.fake", *QUICK, "-o", tmp_path / "out", "--json") == 0
    compute = json.loads(capsys.readouterr().out)["compute_ms"]
    assert profile(tmp_path / "net.fake", *QUICK, "-o", tmp_path / "again") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert compute["median"] and "Wall time is the mean from one end to the next, one inference enqueued ahead" in text
    assert "by the host's clock" not in text, "the events' times are not those of the host's clock"
    assert "compute: median " in text and ", p99 " in text


def test_the_text_says_how_long_it_measured_and_not_how_long_it_should_have(engine: Path, tmp_path: Path) -> None:
    report = te.profile(engine, out=tmp_path, duration_s=0, warmup_s=0, inferences=4, warmup=1)
    for wall_s, told in ((report.wall_s, f"{report.wall_s:.3g} s after"), (2.5, "2.5 s after"), (None, "20 s after")):
        cut = replace(report, protocol=replace(report.protocol, duration_s=20.0), wall_s=wall_s)
        (line,) = [line for line in result_text(cut).splitlines() if line.startswith("measured:")]
        assert line.removeprefix("measured:").lstrip().startswith(told)


def layer_table(report: ProfileReport, layers: LayerProfile) -> tuple[list[str], list[list[str]]]:
    """The heading and the rows of the layer table."""
    (section,) = [
        part
        for part in result_blocks(replace(report, layers=layers))
        if isinstance(part, Section) and part.key == "layers"
    ]
    (table,) = [block for block in section.blocks if isinstance(block, Table)]
    return list(table.columns), [list(row) for row in table.rows]


def test_times_of_launching_have_no_shares(engine: Path, tmp_path: Path) -> None:
    report = te.profile(engine, out=tmp_path, duration_s=0, warmup_s=0, inferences=4, warmup=1)
    row = LayerRow("conv", "Conv", "matrix", 2.0, 2.0, 0.5, 1.0, "cuda:0", "cuda", (), (), ("conv",))
    for clock, shared in (("device", True), ("launch", False)):
        columns, _ = layer_table(report, LayerProfile((row,), 1, "by hand", None, None, clock=clock))  # type: ignore[arg-type]
        assert ("share %" in columns) == shared


def test_a_computation_that_is_longer_than_the_whole_says_how_that_can_be(engine: Path, tmp_path: Path) -> None:
    report = te.profile(engine, out=tmp_path, duration_s=0, warmup_s=0, inferences=4, warmup=1)
    on_gpu = replace(report, device="cuda:0", protocol=replace(report.protocol, graph=True))
    split = replace(report.time_breakdown, wall_ms=1.06, compute_ms=2.0, gpu_ms=2.0, overlap_ms=1.8e-05)
    told = result_text(replace(on_gpu, time_breakdown=split))
    assert (
        "one query at a time, no profiler; such a computation can be longer than the wall time, in which"
        in " ".join(told.split())
    )
    lines = told.splitlines()
    start = lines.index("One inference, in ms:")
    assert "side by side" in lines[start + 1] and "0" in lines[start + 2].split()
    split = replace(split, compute_ms=1.0, gpu_ms=1.0)
    assert "longer than the wall time" not in result_text(replace(on_gpu, time_breakdown=split))


def test_a_rung_that_is_not_to_be_had_ends_with_3_and_the_next_is_taken_without_it(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile(engine, *QUICK, "-o", tmp_path / "out", "--profiler", "nsys") == 3
    told = capsys.readouterr().err
    assert "error: the profiler `nsys` is not available here" in told and "hint: " in told
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_at_which_shapes_and_what_would_be_written(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile(engine, "--dry-run", "-o", tmp_path / "out", "--batch", "4", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (
        said["settings"]["shapes"] == {"images": [4, 3, 8, 8]}
        and str(tmp_path / "out" / "profile.json") in said["writes"]
    )
    assert str(tmp_path / "out" / "bench.log") in said["writes"]
    assert not (tmp_path / "out").exists()


def test_a_command_to_go_on_with_does_not_need_the_file_that_it_names(tmp_path: Path) -> None:
    net = models.conv_net(tmp_path / "net.onnx")
    report = te.convert(net, out=tmp_path / "copy.onnx")
    (tmp_path / "copy.onnx").unlink()
    assert "next:" in str(report)
    engine = te.build(net, out=tmp_path / "net.engine.onnx", parity=False).path
    net.write_text("another file")
    assert profile(engine, *QUICK, "-o", tmp_path / "out") == 0


TALKATIVE = """
import sys
from trt_engine.benchmark import closed_loop
from trt_engine.cli import main
poll = closed_loop.ProgressMonitor.poll
def report(self, done_s):
    if done_s > 1:  # after the warm-up
        print("at work", file=sys.stderr, flush=True)
    return poll(self, done_s)
closed_loop.ProgressMonitor.poll = report
main.main()
"""


@pytest.mark.slow
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
