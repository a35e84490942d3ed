"""Engines that a program measures in processes of its own, compared: the processes take turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import onnx_models as models
from trtexec.conftest import Tool, Verb
from trtexec.stand_in import V10


@pytest.mark.slow
def test_engines_that_trtexec_measures_are_compared_by_processes_that_take_turns(
    tool: Tool, verb: Verb, tmp_path: Path
) -> None:
    net = models.conv_net(tmp_path / "net.onnx")
    tool(V10)
    built = verb("build", net, "--backend", "trtexec", "--batch", "1:2:4", "-o", "net.engine", "--no-parity")
    assert built.code == 0, built.err
    done = verb("compare", "net.engine", "net.engine", "--duration", "300ms", "--restarts", "6", "--json")
    assert done.code == 0, done.err
    doc = json.loads(done.out)
    assert doc["protocol"]["clock"] == "device events"
    assert (doc["protocol"]["warmup_s"], doc["protocol"]["min_warmup"]) == (1.0, 0)  # the named protocol's own
    assert "each turn a separate process" in doc["order"]
    for side in doc["sides"]:
        assert side["restart_blocks"] == [1] * 6 and len(side["blocks_ms"]) == 6
        assert side["record"]["runtime_info"]["measured_by"] == "trtexec 10.16.1.11"
    assert {item["metric"] for item in doc["comparisons"][0]["speed"]} >= {"median", "mean", "throughput"}
