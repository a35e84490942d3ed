"""What a report page looks like in Chromium: screenshots, and what in its layout is wrong.

    python tests/browser/layout.py RUN... -o DIR

Each RUN is a run folder or a page. Four screenshots of each go to DIR (1280 and 400 px, light and dark); what is clipped,
overlaps, scrolls sideways at 1280 px or has too little contrast is printed, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trt_engine.reporting.report import report

CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
WIDTHS = (1280, 400)
DARK = "--blink-settings=preferredColorScheme=0"
HANG_S = 120

# The page stands in a frame as wide as asked for, as it is (`srcdoc` keeps its policy); the measuring stands outside of it.
_MEASURE = """<!doctype html><meta charset="utf-8"><body style="margin:0"><pre id="found"></pre><script>
const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const luminance = (...colours) => {
  for (const colour of colours) { pixel.fillStyle = colour; pixel.fillRect(0, 0, 1, 1); }
  const [r, g, b] = [...pixel.getImageData(0, 0, 1, 1).data].slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const opaque = colour => colour !== "transparent" && !/, 0\\)$/.test(colour);
function look(frame, width) {
  const page = frame.contentDocument, view = frame.contentWindow, root = page.documentElement, wrong = [];
  const say = (what, where) => wrong.push(what + ": " + where.trim().replace(/\\s+/g, " ").slice(0, 90));
  if (root.scrollWidth > width) say("the page scrolls sideways", root.scrollWidth + " px");
  for (const box of page.querySelectorAll(".scroll"))
    if (width >= 1000 && box.scrollWidth > box.clientWidth) say("a table scrolls sideways", box.getAttribute("aria-label"));
  for (const item of page.querySelectorAll("main *")) {
    if (item.closest("svg") || item.closest(".scroll") || !item.clientWidth) continue;
    if (item.scrollWidth > item.clientWidth + 1) say("text is wider than its box", item.textContent);
  }
  for (const svg of page.querySelectorAll('figure svg[role="img"]')) {
    const frameOf = svg.getBoundingClientRect(), title = svg.querySelector("title").textContent;
    const texts = [...svg.querySelectorAll("text")].map(item => [item.textContent, item.getBoundingClientRect()]);
    for (const [words, box] of texts) {
      const across = box.left >= frameOf.left - 1 && box.right <= frameOf.right + 1;
      if (!across || box.top < frameOf.top - 2 || box.bottom > frameOf.bottom + 2)
        say("text outside its chart", `${title}: ${words}`);
    }
    texts.forEach(([words, a], index) => texts.slice(index + 1).forEach(([others, b]) => {
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 1 && down > 3) say("text over text", `${title}: ${words} / ${others}`);
    }));
    for (const line of svg.querySelectorAll("line.zero, line.limit, line.median, line.mark")) {
      const drawn = line.getBoundingClientRect();
      for (const [words, box] of texts) {
        const across = Math.min(drawn.right, box.right - 1) - Math.max(drawn.left, box.left + 1);
        const down = Math.min(drawn.bottom, box.bottom - 3) - Math.max(drawn.top, box.top + 3);
        if (across >= 0 && down > 0) say("text on a line", `${title}: ${words}`);
      }
    }
  }
  const behind = item => {
    for (; item; item = item.parentElement) {
      const colour = view.getComputedStyle(item).backgroundColor;
      if (opaque(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const seen = new Set();
  for (const item of page.querySelectorAll("main *")) {
    const words = [...item.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!words || item.matches("title, desc, svg .on")) continue;
    const style = view.getComputedStyle(item), back = behind(item), paper = luminance(back);
    const ink = luminance(back, item.closest("svg") ? style.fill : style.color);
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    const name = item.tagName + "." + (item.getAttribute("class") || "") + " " + ratio.toFixed(2);
    if (ratio < 4.5 && !seen.has(name)) { seen.add(name); say("too little contrast", name); }
  }
  for (const text of page.querySelectorAll("main p, main li, main dd, main td, main th, main dt")) {
    if (/`[^`]+`/.test([...text.childNodes].filter(node => node.nodeType === 3).map(node => node.data).join("")))
      say("backticks in the text", text.textContent);
  }
  const boxes = [...page.querySelectorAll(".notice.warning, figure")];
  const chart = boxes.findIndex(item => item.matches("figure"));
  if (chart > 1) say("warnings before the first chart", String(chart));
  return { wrong, height: root.scrollHeight };
}
const frame = document.createElement("iframe");
frame.style = "width:%(width)dpx;height:900px;border:0;display:block";
frame.srcdoc = new TextDecoder().decode(Uint8Array.from(atob("%(page)s"), c => c.charCodeAt(0)));
document.body.append(frame);
frame.onload = () => document.getElementById("found").textContent = JSON.stringify(look(frame, %(width)d));
</script>"""


def chromium(folder: Path, *more: str) -> str:
    """What a headless Chromium without a network prints; its profile is in `folder`."""
    assert CHROMIUM is not None, "no chromium, chromium-browser or google-chrome in PATH or $CHROMIUM"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True).stdout


def measure(page: str, width: int, *, dark: bool = False) -> dict[str, Any]:
    """What is `wrong` in the page at that width, and its `height`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = base64.b64encode(page.encode()).decode()
        (folder / "measure.html").write_text(_MEASURE % {"width": width, "page": source}, encoding="utf-8")
        flags = [DARK] if dark else []
        flags += ["--virtual-time-budget=8000", "--window-size=1400,1000", "--dump-dom"]
        printed = chromium(folder, *flags, (folder / "measure.html").as_uri())
    found = re.search(r'<pre id="found">(.+?)</pre>', printed, re.DOTALL)
    assert found, printed[:400]
    told: dict[str, Any] = json.loads(html.unescape(found[1]))
    return told


def screenshot(page: str, width: int, height: int, target: Path, *, dark: bool = False) -> None:
    """The whole page as a PNG. Chromium's window is 500 px wide at least: a narrower page stands in a frame."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        framed = html.escape(page, quote=True)
        size = f"width:{width}px;height:{height}px;border:0;display:block"
        (folder / "page.html").write_text(
            f'<!doctype html><meta charset="utf-8"><body style="margin:0"><iframe style="{size}" srcdoc="{framed}">',
            encoding="utf-8",
        )
        flags = [DARK] if dark else []
        window = f"--window-size={max(width, 500)},{height}"
        chromium(folder, *flags, window, f"--screenshot={target.absolute()}", (folder / "page.html").as_uri())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder, or a page")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="folder for the screenshots")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    bad = 0
    for run in args.runs:
        page = report(run, "html") if run.is_dir() else run.read_text(encoding="utf-8")
        for width in WIDTHS:
            for dark in (False, True):
                found = measure(page, width, dark=dark)
                target = args.out / f"{run.stem}-{width}-{'dark' if dark else 'light'}.png"
                screenshot(page, width, found["height"], target, dark=dark)
                print(f"{target}: {len(found['wrong'])} wrong, {found['height']} px high")
                for text in found["wrong"]:
                    print(f"  {text}")
                bad += len(found["wrong"])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
