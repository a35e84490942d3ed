"""The files trtexec exports: what it writes is read, what it writes badly too, and nothing else is taken for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trt_engine.trt.trtexec_exports import read_profile, read_times

QUERY = (
    '{{ "startEnqMs" : 1, "endEnqMs" : 1.1, "startH2dMs" : 1, "endH2dMs" : 1.2, "startComputeMs" : 1.2, "endComputeMs" : 2, '
    '"startD2hMs" : 2, "endD2hMs" : 2.1, "h2dMs" : 0.2, "computeMs" : {compute}, "d2hMs" : 0.1, "latencyMs" : 1.1 }}'
)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "export.json"
    path.write_text(text)
    return path


def test_the_durations_of_every_query_are_read(tmp_path: Path) -> None:
    text = f"[\n  {QUERY.format(compute=0.8)},\n  {QUERY.format(compute='1e-05')}\n]\n"
    found = read_times(written(tmp_path, text))
    assert (found.compute_ms, found.latency_ms) == ((0.8, 1e-05), (1.1, 1.1))
    assert (found.h2d_ms, found.d2h_ms) == ((0.2, 0.2), (0.1, 0.1))


def test_an_infinite_time_is_read_although_it_is_no_json(tmp_path: Path) -> None:
    assert read_times(written(tmp_path, f"[{QUERY.format(compute='inf')}]")).compute_ms == (float("inf"),)


LAYER = '{{ "name" : "{name}", "timeMs" : 4.5, "averageMs" : 0.09, {median}"percentage" : 62.5 }}'


@pytest.mark.parametrize("name", ["conv + relu", 'a "quoted" one', "back\\slash", "line\nbreak, } and {"])
def test_layers_are_read_whatever_stands_in_their_names(name: str, tmp_path: Path) -> None:
    rows = LAYER.format(name=name, median='"medianMs" : 0.08, ') + ",\n" + LAYER.format(name="last", median="")
    count, layers = read_profile(written(tmp_path, f'[\n  {{ "count" : 50 }},\n  {rows}\n]\n'))
    assert count == 50
    assert [layer.name for layer in layers] == [name, "last"]
    assert (layers[0].time_ms, layers[0].average_ms, layers[0].median_ms, layers[0].share_pct) == (
        4.5,
        0.09,
        0.08,
        62.5,
    )
    assert layers[1].median_ms == 0.09  # without medians, as old versions wrote it
