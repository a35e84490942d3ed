"""What a report must say, and must never say, in every form."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import sample_runs

from trt_engine.format import format_or_dash
from trt_engine.records.bench import Protocol
from trt_engine.reporting.document import clean_text
from trt_engine.reporting.report import FORMATS, is_own_report, report, write_reports


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class _Text(HTMLParser):
    """The words of a page, and the tags and attributes around them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._in_style = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False

    def handle_data(self, data: str) -> None:
        if not self._in_style and data.strip():
            self.words.append(data.strip())


def words(text: str, format: str) -> str:
    """The report's words in one line, whatever they were marked up with."""
    if format == "html":
        text = re.sub(r"(?<!<pre>)<code>([^<]*)</code>", r"`\1`", text)
    plain = " ".join(_Text(text).words) if format == "html" else text
    return re.sub(r"\s+", " ", re.sub(r"^> |\*\*|\\", "", plain, flags=re.MULTILINE))


@pytest.mark.parametrize("format", FORMATS)
def test_on_a_cpu_every_form_says_that_nothing_is_a_gpu_figure(tmp_path: Path, format: str) -> None:
    said = words(report(sample_runs.cpu_run(tmp_path / "run"), format), format)  # type: ignore[arg-type]
    assert "CPU: Example Processor 9000 @ 2.10GHz, 4 cores" in said[:400]
    assert "This report contains no GPU figures." in said
    assert "GPU-only" not in said


@pytest.mark.parametrize("format", FORMATS)
def test_on_a_gpu_the_count_is_an_upper_bound_and_the_gpu_is_named_first(tmp_path: Path, format: str) -> None:
    said = words(report(sample_runs.gpu_run(tmp_path / "run"), format), format)  # type: ignore[arg-type]
    assert "GPU: NVIDIA H200 (cuda:0)" in said[:400]
    assert "GPU-only upper bound at 30 fps" in said
    assert "DeepStream typically reaches 10-40 % fewer (NVDEC, mux, GStreamer) and starts its first run from" in said
    assert "no GPU figure" not in said and "This report contains" not in said


@pytest.mark.parametrize("format", FORMATS)
def test_instability_throttling_and_cliffs_are_said(tmp_path: Path, format: str) -> None:
    said = words(report(sample_runs.gpu_run(tmp_path / "run"), format), format)  # type: ignore[arg-type]
    assert said.count("Not stable, batch 256: spread 24.1 % of the mean, at most 5 % expected") == 1
    assert "Batch 512: the GPU's clocks were held down (sw_power_cap)" in said
    assert "Avoid batch sizes 513, 514, 515" in said and "Prefer powers of two: 512." in said
    assert "21 engines built, 22 measurements taken (17 and 17 of them for the scan)." in said


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("out_of_memory", "out of memory at batch 256; the last good answer, batch 128, stands."),
        ("partial", "Incomplete: interrupted. What had been measured until then stands below."),
        ("failed", "Incomplete: cannot build `x`."),
        ("bench", "load average 3.1"),
    ],
)
def test_a_run_that_ended_early_still_makes_a_report(tmp_path: Path, format: str, run: str, expected: str) -> None:
    said = words(report(sample_runs.RUNS[run](tmp_path / "run"), format), format)  # type: ignore[arg-type]
    assert expected in said


@pytest.mark.parametrize("format", FORMATS)
def test_no_transfer_time_is_in_any_report(tmp_path: Path, format: str) -> None:
    records = [
        sample_runs.record(1, 2.0, 50, h2d_ms=(77.125,) * 50, d2h_ms=(55.375,) * 50, latency_ms=(134.5,) * 50),
        sample_runs.record(8, 9.0, 50, h2d_ms=(77.125,) * 50, d2h_ms=(55.375,) * 50, latency_ms=(134.5,) * 50),
    ]
    folder = sample_runs.write(tmp_path / "run", sample_runs.size_report(records), records)
    made = report(folder, format)  # type: ignore[arg-type]
    assert not re.search(r"77\.1|55\.3|55\.4|134|h2d|d2h", made.partition("</style>")[2] or made, re.IGNORECASE)


def test_times_that_hold_copies_are_not_called_compute_alone(tmp_path: Path) -> None:
    rules = Protocol(**{name: getattr(sample_runs.RULES, name) for name in Protocol.__slots__} | {"transfers": True})
    folder = sample_runs.write(tmp_path / "run", None, [sample_runs.record(1, 2.0, 50, protocol=rules)])
    made = report(folder)
    assert "compute alone" not in made
    assert re.search(r"transfers +inside the measured part", made)


def test_names_from_records_never_become_markup_on_the_page(tmp_path: Path) -> None:
    made = report(sample_runs.hostile_run(tmp_path / "run"), "html")
    assert "<script" not in made and "<img" not in made
    assert "&lt;script&gt;" in made
    assert "\x1b" not in made and "\u202e" not in made


def test_the_page_asks_for_nothing_from_outside(tmp_path: Path) -> None:
    for name, make in sample_runs.RUNS.items():
        page = _Text(report(make(tmp_path / name), "html"))
        assert not [tag for tag, _ in page.tags if tag in ("script", "img", "iframe", "object", "embed")]
        links = [attrs["href"] for _, attrs in page.tags if "href" in attrs]
        assert all(link and not re.match(r"[a-z]+:|/", link) for link in links if link != "data:,"), links
        assert not [attrs for _, attrs in page.tags if any(key.startswith("on") or key == "src" for key in attrs)]
        policy = next(attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv"))
        assert policy is not None and policy.startswith("default-src 'none'")


def test_links_lead_from_where_the_report_lies_and_only_to_what_is_there(tmp_path: Path) -> None:
    folder = sample_runs.cpu_run(tmp_path / "run")
    page = _Text(report(folder, "html"))
    links = {attrs["href"] for tag, attrs in page.tags if tag == "a"}
    sections = {f"#{attrs['id']}" for tag, attrs in page.tags if tag == "section"}
    assert links - sections == {"records.jsonl", "engines", "b1/trtexec_b1.log", "size.json"}
    assert len(sections) > 5 and sections <= links, "the contents line leads to every section"
    assert str(tmp_path) not in report(folder, "html")
    assert "../model/digits.onnx" in report(folder, "html")  # as it lay beside the folder when it was measured


def test_links_hold_when_the_folder_has_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample_runs.cpu_run(tmp_path / "run").rename(tmp_path / "sent")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    links = {attrs["href"] for tag, attrs in _Text(report(tmp_path / "sent", "html")).tags if tag == "a"}
    assert "b1/trtexec_b1.log" in links and "engines" in links


@pytest.mark.parametrize("format", FORMATS)
def test_absolute_paths_of_the_machine_stay_out(tmp_path: Path, format: str) -> None:
    records = [sample_runs.record(1, 2.0, 50, engine="/home/somebody/secret/place/of/engines/x_b1.engine")]
    report_ = sample_runs.size_report(records, model="/home/somebody/secret/place/x.onnx")
    made = report(sample_runs.write(tmp_path / "run", report_, records), format)  # type: ignore[arg-type]
    assert "somebody" not in made
    assert "x_b1.engine" in made and "x.onnx" in made


def test_the_same_records_make_the_same_report(tmp_path: Path) -> None:
    folder = sample_runs.gpu_run(tmp_path / "run")
    first = {name: path.read_bytes() for name, path in write_reports(folder).items()}
    assert set(first) == {"report.md", "report.html"}
    assert {name: path.read_bytes() for name, path in write_reports(folder).items()} == first


def test_reports_are_known_as_ours_and_other_files_are_not(tmp_path: Path) -> None:
    folder = sample_runs.cpu_run(tmp_path / "run")
    for path in write_reports(folder).values():
        assert is_own_report(path)
    (tmp_path / "x.txt").write_text(report(folder))
    assert is_own_report(tmp_path / "x.txt")
    (tmp_path / "notes.md").write_text("# trt-engine report\n\nmy own words about it\n")
    assert not is_own_report(tmp_path / "notes.md")
    assert not is_own_report(folder / "size.json")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0123, "0.0123"), (4.5678, "4.57"), (12345.6, "12,346"), (0, "0"), (None, "–"), (float("nan"), "–")],
)
def test_numbers_have_the_digits_that_mean_something(value: float | None, shown: str) -> None:
    assert format_or_dash(value) == shown


def test_cleaned_text_stays_on_its_line() -> None:
    assert clean_text("a\nb\tc\x1b[2Jd\u202ee\x00f\ud800") == "a b c�[2Jd�e�f?"
