"""A hint names an option of the verb that was meant, or none; it never names an unrelated one."""

from __future__ import annotations

import re

import pytest

from trt_engine.cli.main import run

# verb, typed, what the hint must name; None: no option is like it
TYPED: list[tuple[str, str, str | None]] = [
    # of the audit
    ("build", "--best", "--precision"), ("quantize", "--int8", "--to"), ("profile", "--layers", "--profiler"),
    ("cast", "--fp16", "--to"), ("cast", "--int8", "trt-engine quantize"),
    ("quantize", "--fp16", "trt-engine cast"), ("bench", "--skipInference", "trt-engine build"),
    ("build", "--calib=c.cache", "trt-engine quantize"), ("bench", "--loadInputs=x.bin", "--inputs"),
    # slips of the fingers
    ("build", "--bach", "--batch"), ("build", "--batchs", "--batch"), ("build", "--presicion", "--precision"),
    ("build", "--precison", "--precision"), ("build", "--bakend", "--backend"), ("build", "--profil", "--profile"),
    ("build", "--shape", "--shapes"), ("build", "--work-space", "--workspace"),
    ("build", "--timing_cache", "--timing-cache"),
    ("build", "--dryrun", "--dry-run"), ("build", "--dry_run", "--dry-run"), ("build", "--verbos", "--verbose"),
    ("build", "--calibrat", "--calib-data"), ("build", "--no-partiy", "--no-parity"), ("build", "--jsn", "--json"),
    ("bench", "--warm-up", "--warmup"), ("bench", "--durtion", "--duration"), ("bench", "--iteration", "--iterations"),
    ("bench", "--percentiles", "--percentile"), ("bench", "--stream", "--streams"), ("bench", "--protocoll", "--protocol"),
    ("bench", "--memorylimit", "--memory-limit"), ("bench", "--stict", "--strict"), ("size", "--voltage", None),
    ("size", "--maxbatch", "--max-batch"), ("size", "--startbatch", "--start-batch"),
    ("size", "--min-stream", "--min-streams"),
    ("profile", "--inference", "--inferences"), ("profile", "--peak", "--peaks"), ("quantize", "--exclude", None),
    ("quantize", "--calibrators", "--calibrator"), ("quantize", "--targets", "--target"), ("cast", "--keepio", "--keep-io"),
    ("compare", "--base-line", "--baseline"), ("lint", "--fail_on", "--fail-on"), ("evaluate", "--data-set", "--dataset"),
    # words of other tools
    ("build", "--batch-size", "--batch"), ("build", "--output", "-o"), ("build", "--gpu", "--device"),
    ("bench", "--repeat", "--iterations"), ("bench", "--ep", "--providers"), ("quantize", "--data-type", None),
    ("quantize", "--precision", "--to"), ("build", "--input-shape", "--shapes"), ("size", "--imgsz", "--shapes"),
    # nothing like it
    ("build", "--frobnicate", None), ("bench", "--xyz", None), ("profile", "--zz", None), ("lint", "--rules", None),
    ("inspect", "--deep", None), ("doctor", "--fix", None), ("cast", "--layers", None), ("compare", "--plot", None),
]  # fmt: skip


@pytest.mark.parametrize(("verb", "typed", "named"), TYPED)
def test_a_hint_names_what_was_meant_or_nothing(
    verb: str, typed: str, named: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run([verb, "net.onnx", typed, *(["--dry-run"] if verb == "cast" else [])])
    err = capsys.readouterr().err
    hint = err.partition("hint: ")[2]
    if code == 4:  # understood: only the file is missing
        assert f"is translated from trtexec: `{named} " in err
    elif named is None:
        assert code == 2 and hint == f"`trt-engine {verb} --help` lists the options\n"
    else:
        assert code == 2 and re.search(rf"`{re.escape(named)}\b", hint), hint


def test_an_option_that_the_verb_lacks_is_found_in_a_hint() -> None:
    """What conftest.py looks for in the hint of every error of these tests."""
    from cli.conftest import unknown_options

    assert unknown_options("add `--shapes x:1x3`, or `--json`", "trt-engine docs x") == ["--shapes"]
    assert unknown_options("`trt-engine quantize --shapes x:1x3 --picture`", "trt-engine docs x") == ["--picture"]
    assert unknown_options("`docker run --rm`, `-vv`, `--optShapes=x:1`", "trt-engine build x") == []
