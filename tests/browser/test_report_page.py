"""The HTML report in a real browser, without a network: what only a browser can show."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from patience import HANG_S
from trt_engine.reporting.report import write_reports

sys.path.insert(0, str(Path(__file__).parents[1] / "reporting"))
sys.path.insert(0, str(Path(__file__).parent))

import layout
import sample_matrix
import sample_runs

CHROMIUM = layout.CHROMIUM
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome in PATH or $CHROMIUM"),
]

# A frame may be as narrow as a phone, the browser's own window may not. `srcdoc` keeps the page, its policy included, as
# it is; the measuring stands outside of it.
MEASURE = """<!doctype html><meta charset="utf-8"><body style="margin:0"><pre id="told"></pre><script>
const luminance = colour => {
  const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const opaque = colour => colour !== "transparent" && !/, 0\\)$/.test(colour);
const told = [];
function measure(frame, width) {
  const page = frame.contentDocument, view = frame.contentWindow, root = page.documentElement;
  const behind = item => {
    for (; item; item = item.parentElement) {
      const colour = view.getComputedStyle(item).backgroundColor;
      if (opaque(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const contrasts = {};
  for (const item of page.querySelectorAll("svg .on")) {
    const style = view.getComputedStyle(item), fill = view.getComputedStyle(item.previousElementSibling).fill;
    const ink = luminance(style.fill), paper = luminance(fill), name = "on " + fill;
    contrasts[name] = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  }
  for (const choice of ["h1", ".subtitle", ".notice", ".notice.warning", ".claim", "thead th", "tbody td", "tr.marked td",
                        ".facts dt", "a", "pre", "svg text", "svg .value", ".figures .first", "footer"]) {
    const item = page.querySelector(choice);
    if (!item) continue;
    const style = view.getComputedStyle(item), ink = luminance(item.closest("svg") ? style.fill : style.color);
    const paper = luminance(behind(item));
    contrasts[choice] = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  }
  const wide = [...page.querySelectorAll("body *")]
    .filter(item => !item.closest(".scroll") || item.matches(".scroll"))
    .filter(item => !item.closest("svg") || item.matches("svg"))
    .filter(item => item.getBoundingClientRect().right > width + 0.5)
    .map(item => item.tagName + "." + item.getAttribute("class"));
  const inner = [...page.querySelectorAll("table")].filter(item => item.getBoundingClientRect().right > width + 0.5)
    .map(item => item.caption && item.caption.textContent);
  const text = [...page.querySelectorAll("figure svg text")].map(item => ({
    inside: item.getBoundingClientRect().right <= item.closest("svg").getBoundingClientRect().right + 12
      && item.getBoundingClientRect().left >= item.closest("svg").getBoundingClientRect().left - 12,
    text: item.textContent, height: item.getBoundingClientRect().height }));
  told.push({ width, scrolls: root.scrollWidth, wide, inner, contrasts, title: page.title,
    requests: view.performance.getEntriesByType("resource").map(entry => entry.name),
    charts: [...page.querySelectorAll('figure svg[role="img"]')].map(svg => svg.getBoundingClientRect().height),
    outside: text.filter(item => !item.inside).map(item => item.text),
    smallest: Math.min(...text.map(item => item.height)),
    background: view.getComputedStyle(page.body).backgroundColor, scripts: page.scripts.length });
}
const frames = [...%(widths)s].map(width => {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0;display:block`;
  frame.srcdoc = %(page)s;
  document.body.append(frame);
  return new Promise(done => frame.onload = () => { measure(frame, width); done(); });
});
Promise.all(frames).then(() => document.getElementById("told").textContent = JSON.stringify(told));
</script>"""


@dataclass(frozen=True)
class Seen:
    widths: dict[int, dict[str, Any]]
    console: list[str]


def look(page: Path, folder: Path, *flags: str, widths: tuple[int, ...] = (390, 768, 1200)) -> Seen:
    """What the browser makes of the page at these widths."""
    assert CHROMIUM is not None
    source = json.dumps(page.read_text(encoding="utf-8")).replace("<", "\\u003c")
    (folder / "measure.html").write_text(MEASURE % {"widths": json.dumps(widths), "page": source}, encoding="utf-8")
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
        *flags,
    ]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}"]
    command += [
        "--virtual-time-budget=8000",
        "--window-size=1300,900",
        "--dump-dom",
        (folder / "measure.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)
    told = re.search(r'<pre id="told">(.+?)</pre>', done.stdout, re.DOTALL)
    assert told, done.stdout[:400] + done.stderr[-400:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Seen({item["width"]: item for item in json.loads(html.unescape(told[1]))}, console)


def page_of(run: str, folder: Path) -> Path:
    return write_reports((sample_runs.RUNS | sample_matrix.MATRICES)[run](folder / run))["report.html"]


@pytest.mark.parametrize("run", ["gpu", "hostile", "bench", "failed", *sample_matrix.MATRICES])
def test_the_page_fits_every_width_and_asks_for_nothing(run: str, tmp_path: Path) -> None:
    seen = look(page_of(run, tmp_path), tmp_path, widths=(320, 360, 768, 1200))
    assert seen.console == []
    for width, told in seen.widths.items():
        assert told["scrolls"] <= width, f"{width}: {told['wide'][:5]}"
        assert told["wide"] == [] and told["requests"] == [] and told["scripts"] == 0
        assert told["outside"] == []
        assert told["title"] != "owned"


@pytest.mark.parametrize("width", [320, 360])
def test_charts_of_a_run_of_cells_can_be_read_on_the_smallest_phone(tmp_path: Path, width: int) -> None:
    told = look(page_of("gpu_matrix", tmp_path), tmp_path, widths=(width,)).widths[width]
    assert len(told["charts"]) == 7
    assert told["smallest"] >= 9 and min(told["charts"]) > 100


def test_charts_are_drawn_with_text_that_can_be_read_on_a_phone(tmp_path: Path) -> None:
    told = look(page_of("gpu", tmp_path), tmp_path, widths=(390,)).widths[390]
    assert len(told["charts"]) == 10
    assert min(told["charts"]) > 100
    assert told["smallest"] >= 9


@pytest.mark.parametrize(("scheme", "flags"), [("light", ()), ("dark", ("--blink-settings=preferredColorScheme=0",))])
@pytest.mark.parametrize("run", ["gpu", "gpu_matrix", "compared"])
def test_text_stands_out_in_light_and_in_dark(tmp_path: Path, scheme: str, flags: tuple[str, ...], run: str) -> None:
    told = look(page_of(run, tmp_path), tmp_path, *flags, widths=(1200,)).widths[1200]
    red = int(re.findall(r"\d+", told["background"])[0])
    assert (red < 60) == (scheme == "dark")
    assert len(told["contrasts"]) > (12 if run == "gpu" else 9)
    assert {choice: ratio for choice, ratio in told["contrasts"].items() if ratio < 4.5} == {}


@pytest.mark.parametrize("run", ["gpu", "matrix", "gpu_matrix", "compared", "profiled", "everything", "hostile_matrix"])
def test_nothing_is_cut_off_on_paper(tmp_path: Path, run: str) -> None:
    """The page in its print rules at the width of A4 between the margins."""
    page = page_of(run, tmp_path)
    page.write_text(page.read_text().replace("@media print", "@media all").replace("@media screen", "@media speech"))
    told = look(page, tmp_path, "--blink-settings=preferredColorScheme=0", widths=(688,)).widths[688]
    assert told["scrolls"] <= 688, told["inner"]
    assert told["wide"] == [] and told["outside"] == [] and told["inner"] == []


@pytest.mark.parametrize(("run", "sheets"), [("gpu", (3, 6)), ("gpu_matrix", (6, 14)), ("compared", (1, 4))])
def test_the_page_prints_on_paper(tmp_path: Path, run: str, sheets: tuple[int, int]) -> None:
    assert CHROMIUM is not None
    page, paper = page_of(run, tmp_path), tmp_path / "report.pdf"
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command += ["--blink-settings=preferredColorScheme=0", f"--print-to-pdf={paper}", page.as_uri()]
    subprocess.run(command, capture_output=True, timeout=HANG_S, check=True)
    raw = paper.read_bytes()
    assert raw.startswith(b"%PDF") and sheets[0] <= len(re.findall(rb"/Type\s*/Page\b", raw)) <= sheets[1]


@pytest.mark.parametrize("width", layout.WIDTHS)
@pytest.mark.parametrize("run", ["cpu", "gpu", "gpu_matrix", "compared", "profiled"])
def test_nothing_is_clipped_covered_or_out_of_sight(tmp_path: Path, run: str, width: int) -> None:
    """By the boxes of all text in the charts, the widths of tables at 1280 px, and every text's contrast in the dark too."""
    page = page_of(run, tmp_path).read_text()
    assert [text for dark in (False, True) for text in layout.measure(page, width, dark=dark)["wrong"]] == []
