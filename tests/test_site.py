"""The documentation: pages have a place, questions lead to pages, commands exist, and the site needs no network."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import quote

import click
import pytest
import yaml

from programs import load_program, run_python
from trt_engine.backend import list_backends
from trt_engine.cli.click_app import cli
from trt_engine.cli.verbs_table import VERBS
from trt_engine.config.settings import Config, settings
from trt_engine.errors import TrtEngineError
from trt_engine.verbs.size import stream_capacity

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "browser"))

import layout  # noqa: E402

DOCS = ROOT / "docs"
HOME = "index.md"


def _load_site() -> ModuleType:
    return load_program(ROOT / "tools" / "site.py", "site_hooks")


SITE = _load_site()
NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]


def nav_links(nav: Any) -> Iterator[tuple[str, str]]:
    """Title and page of every entry."""
    for entry in nav:
        for title, below in entry.items():
            if isinstance(below, str):
                yield title, below
            else:
                yield from nav_links(below)


LINKS = list(nav_links(NAV))


def test_every_page_has_one_place_in_the_navigation() -> None:
    placed = [page for _, page in LINKS]
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | set(SITE.PAGES)
    assert sorted(placed) == sorted(pages), "add the page to `nav` in mkdocs.yml"


# question as its asker types it; the page that answers it; what the asker should type then
QUESTIONS = [
    ("my INT8 engine is as slow as FP32", "int8-slow.md", "trt-engine quantize"),
    ("TensorRT 11 rejects my --fp16", "fp16-flag.md", "trt-engine cast model.onnx --to fp16"),
    ("Unknown option: --fp16", "fp16-flag.md", "trt-engine migrate"),
    ("how many 30 fps cameras on an L4 GPU", "cameras.md", "trt-engine size"),
    ("my engine fails to load on the other machine", "deployment.md", "trt-engine inspect"),
    ("which layer is slow", "slow-layer.md", "trt-engine profile"),
    ("ship it in Triton", "ship.md", "trt-engine serve"),
    ("ship it in DeepStream", "ship.md", "trt-engine size"),
]
_COMMON = set("my is as the it in on an a how many which of not does to i do".split())


def words(text: str) -> set[str]:
    return set(re.findall(r"[\w-]+", text.lower())) - _COMMON


@pytest.mark.parametrize(("question", "page", "command"), QUESTIONS)
@pytest.mark.parametrize("start", ["home", "navigation"])
def test_a_question_leads_to_its_page_by_the_words_of_the_link(
    question: str, page: str, command: str, start: str
) -> None:
    """The link whose text shares most words with the question, from home (one click) or the navigation (at most two)."""
    if start == "navigation":
        links = LINKS
    else:
        text = (DOCS / HOME).read_text(encoding="utf-8")
        links = [(row, target) for row in text.splitlines() for target in re.findall(r"\]\(([\w/-]+\.md)\)", row)[:1]]
    shared = [(len(words(title) & words(question)), target) for title, target in links]
    best = max(count for count, _ in shared)
    assert best >= 1 and {target for count, target in shared if count == best} == {page}
    assert command in (DOCS / page).read_text(encoding="utf-8")


def commands(text: str) -> Iterator[str]:
    """Every command line of a page's blocks, continuation lines joined."""
    for block in re.findall(r"^(?:```(?:sh|console|text)?\n(.*?)^```|(?<=\n\n)((?:^    .*\n)+))", text, re.M | re.S):
        for line in "".join(block).replace("\\\n", " ").splitlines():
            line = re.sub(r"^\s*(?:\$ )?", "", line)
            if re.match(r"trt-engine [a-z]", line):
                yield re.split(r"\s+#|\s*(?:&&|\|\||\||>|2>)\s", line)[0].strip()


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    """The options of each verb, hidden ones too."""
    found = {}
    for verb in VERBS:
        command = cli.get_command(click.Context(cli), verb)
        assert command is not None
        below = command.commands.values() if isinstance(command, click.Group) else ()
        params = [item for one in (command, *below) for item in one.params]
        found[verb] = {name for item in params for name in (*item.opts, *item.secondary_opts)}
        found[verb] |= {"--help", "-h"}
    return found


def test_every_command_on_every_page_has_verbs_and_options_that_exist(options: dict[str, set[str]]) -> None:
    seen, unknown = 0, []
    for path in [ROOT / "README.md", *DOCS.glob("*.md")]:
        for line in commands(path.read_text(encoding="utf-8")):
            verb, *rest = line.removeprefix("trt-engine ").split()
            assert verb in VERBS, f"{path.name}: {line}"
            seen += 1
            flags = (found[0] for word in rest if (found := re.match(r"--?[a-zA-Z][\w-]*", word)))
            unknown += [f"{path.name}: {flag}" for flag in flags if flag not in options[verb]]
    assert seen > 120
    # what an unknown option prints, and a spelling of precisions that `bundle` rewrites
    assert sorted(unknown) == ["bundle.md: --fp16", "errors.md: --bacth"]


def test_the_reference_has_every_setting() -> None:
    page = SITE.settings_page()

    def below(kind: type) -> Iterator[type]:
        for item in kind.__subclasses__():
            yield item
            yield from below(item)

    for kind in below(Config):
        if "config" in kind.__module__.split(".") and not kind.__name__.startswith("_"):
            section = page.partition(f"## {kind.__name__}\n")[2].partition("\n## ")[0]
            for item in settings(kind):
                assert f"| `{item.name}` |" in section, f"{kind.__name__}.{item.name}"
    assert page.count("| `") > 250
    for spec in list_backends().values():
        if spec.options is not None and not spec.hidden:
            module, _, name = spec.options.partition(":")
            section = re.search(rf"^## -O of [\w, -]*\b{spec.name}(,|$).*?(?=^## |\Z)", page, re.M | re.S)
            assert section is not None, spec.name
            for item in settings(getattr(importlib.import_module(module), name)):
                assert f"| `{item.name}` | {'build' if item.in_key else 'load'} |" in section[0], (
                    f"{spec.name}: {item.name}"
                )


def test_the_reference_has_every_field_of_every_record() -> None:
    page = SITE.records_page()
    for path in (DOCS / "schemas").glob("*.json"):
        schema = json.loads(path.read_text(encoding="utf-8"))
        for kind in [schema, *schema.get("$defs", {}).values()]:
            for name in kind.get("properties", {}):
                assert f"| `{name}` |" in page, f"{path.name}: {name}"


def test_the_page_of_the_architecture_names_every_part_of_the_package_and_nothing_else() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8").replace("<verb>", "size").replace("/X/", "/fake/")
    source = ROOT / "src" / "trt_engine"
    files = [path for path in source.rglob("*.py") if not path.name.startswith("_")]
    parts = {path.relative_to(source).parts[0] for path in files}
    assert [name for name in parts if name not in page] == []
    known = {path.as_posix() for path in files} | {f"{folder.as_posix()}/" for path in files for folder in path.parents}
    for name in re.findall(r"(?<![\w/])[a-z][\w/]*(?:\.py|/)(?=[`\s,;:)])", page):
        assert (ROOT / name).exists() or any(path.endswith(f"/{name}") for path in known), name


@pytest.mark.parametrize("page", SITE.TABLES)
def test_a_page_of_measurements_gets_the_tables_of_its_committed_records(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert text.count(SITE.TABLES_HERE) == 1 and "--table" in text
    made = SITE.measured_tables(page)
    assert made.count("\n|") > 10 and "not measured |" not in made


def test_the_reference_has_every_error_with_its_codes() -> None:
    page = SITE.errors_page()
    waiting, seen = [TrtEngineError], 0
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__module__ == "trt_engine.errors":
            seen += 1
            assert re.search(rf"^\| `{kind.__name__}` .*\| {kind.exit_code} \| {kind.http_status} \|", page, re.M)
    assert seen > 15


def test_the_decoder_table_is_the_one_that_size_counts_with() -> None:
    page = (DOCS / "cameras.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([\w ]+?) \| (\d.*) \|$", page, re.M))
    assert rows.keys() == stream_capacity._GPUS.keys()
    for name, row in rows.items():
        family, count = stream_capacity._GPUS[name]
        per_decoder = stream_capacity._FRAMES_PER_S[family]
        limits = [
            str(per_decoder[codec] * count // 30) if codec in per_decoder else "–"
            for codec in ("h264", "hevc", "vp9", "av1")
        ]
        assert row.split(" | ") == [str(count), *limits]


def _sh_blocks(page: str) -> str:
    return "".join(re.findall(r"^```sh\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S))


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", ["first-engine.md", "int8-slow.md", "fp16-flag.md", "cameras.md", "slow-layer.md", "ship.md"]
)
def test_the_commands_of_a_tutorial_or_answer_run(page: str, tmp_path: Path) -> None:
    """As written, but for the largest batch and the seconds of each measurement, which would take minutes on a CPU."""
    pytest.importorskip("PIL", reason="needs the extra eval")
    pytest.importorskip("av", reason="needs the extra video")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "trt-engine"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m trt_engine "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
    }
    folder = tmp_path / "work"
    folder.mkdir()

    def shell(text: str) -> None:
        done = subprocess.run(
            ["sh", "-e", "-c", text],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"

    if page != "first-engine.md":
        shell("trt-engine example --video; trt-engine build example/detector.onnx --batch 1:8:64 -o model.engine.onnx")
        shutil.copy(folder / "example" / "detector.onnx", folder / "model.onnx")
        shutil.copy(folder / "model.onnx", folder / "fp32.onnx")
        shutil.copy(folder / "example" / "clip.mp4", folder)
        shutil.copy(folder / "model.onnx", folder / "detector.onnx")
        shutil.copy(ROOT / "examples" / "classifiers" / "resnet.onnx", folder / "classifier.onnx")
        (folder / "images").mkdir()
        shutil.copy(folder / "example" / "scene.png", folder / "images")
        (folder / "build.sh").write_text("trtexec --onnx=yolo.onnx --fp16\n", encoding="utf-8")
    quick = re.sub(r"--max-batch \d+", "--max-batch 4", _sh_blocks(page))
    shell(quick.replace("--duration 2s", "--duration 200ms"))
    for code in re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S):
        done = run_python("-c", code, cwd=folder, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]


class _Page(HTMLParser):
    """Links of an HTML page, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("href", "src", "srcset", "action", "data", "poster", "content"):
                (self.links if tag == "a" else self.loads).append(value)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs the dependency group docs")
    folder = tmp_path_factory.mktemp("site")
    done = run_python(
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "-f",
        str(ROOT / "mkdocs.yml"),
        "-d",
        str(folder),
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr  # strict: a dead link or anchor is an error
    return folder


def test_every_extra_has_its_row_and_every_package_its_licence() -> None:
    kept = json.loads(SITE.packages.RECORD.read_text(encoding="utf-8"))
    assert kept["extras"].keys() == SITE.packages.declared().keys(), "run tools/packages.py"
    assert {name for names in kept["extras"].values() for name in names or ()} == kept["packages"].keys()
    page = SITE.PAGES["reference/packages.md"]()
    for name, one in kept["packages"].items():
        assert f"| {name} | {one['version']} |" in page and one["licence"] and one["mib"] >= 0, name


@pytest.mark.slow
def test_the_site_loads_nothing_from_outside(built: Path) -> None:
    sources = {"https://docs.nvidia.com/", "https://github.com/marcoslucianops/DeepStream-Yolo"}
    for path in built.rglob("*.html"):
        page = _Page(path)
        assert [item for item in page.loads if re.match(r"(https?:)?//", item)] == [], path.name
        outside = [item for item in page.links if re.match(r"(https?:)?//", item)]
        assert all(any(item.startswith(source) for source in sources) for item in outside), (path.name, outside)
    texts = [path for path in built.rglob("*") if path.suffix in (".css", ".js") and path.parent.name != "search"]
    assert len(texts) > 5
    for path in texts:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/", "")
        assert not re.search(r"https?://|url\(\s*['\"]?//", text), path.name


@pytest.mark.slow
def test_no_paragraph_of_the_built_site_holds_a_block_of_code(built: Path) -> None:
    for path in built.rglob("*.html"):
        for paragraph in re.findall(r"<p>(.*?)</p>", path.read_text(encoding="utf-8"), re.DOTALL):
            assert "<div" not in paragraph and "<pre" not in paragraph, (path.name, paragraph[:200])


@pytest.mark.slow
def test_every_link_of_the_built_site_has_its_page_and_its_heading(built: Path) -> None:
    """Also those of generated pages and of links that the tool rewrites; 404.html is for a server's root."""
    pages = {
        path.resolve(): path.read_text(encoding="utf-8") for path in built.rglob("*.html") if path.name != "404.html"
    }
    headings = {path: set(re.findall(r'\bid="?([^" >]+)', text)) for path, text in pages.items()}
    dead = []
    for path in pages:
        for link in _Page(path).links:
            file, _, heading = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            if (
                target.suffix == ".html"
                and "://" not in link
                and (target not in pages or (heading and heading not in headings[target]))
            ):
                dead.append((path.name, link))
    assert len(pages) > 40 and dead == []


@pytest.mark.slow
@pytest.mark.parametrize(("question", "page"), [(question, page) for question, page, _ in QUESTIONS])
def test_in_the_built_site_the_page_is_within_two_clicks_of_home(built: Path, question: str, page: str) -> None:
    def neighbours(path: Path) -> set[Path]:
        links = (link.partition("#")[0] for link in _Page(path).links if "://" not in link)
        return {(path.parent / link).resolve() for link in links if link.endswith(".html")}

    home = built / "index.html"
    near = neighbours(home)
    assert (built / page).with_suffix(".html").resolve() in near.union(*map(neighbours, near)), question


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(layout.CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome")
@pytest.mark.parametrize(
    ("question", "page"),
    [
        *((question, page) for question, page, _ in QUESTIONS),
        *((verb, f"{verb}.md") for verb in ("build", "profile")),
        ("cascade two models", "cameras.md"),
        ("exit codes", "errors.md"),
        ("asyncio", "python.md"),
    ],
)
def test_the_search_of_the_built_site_lists_the_page_first(
    built: Path, question: str, page: str, tmp_path: Path
) -> None:
    address = f"{(built / HOME).with_suffix('.html').as_uri()}?q={quote(question)}"
    flags = ["--allow-file-access-from-files", "--virtual-time-budget=20000", "--dump-dom"]
    results = re.findall(
        r'<a href="([^"?#]+)[^"]*" class="md-search-result__link"', layout.chromium(tmp_path, *flags, address)
    )
    assert results and results[0].endswith(page.replace(".md", ".html")), results[:5]


def test_text_below_a_table_has_a_blank_line_before_it() -> None:
    """Python-Markdown would make it the table's last row."""
    for path in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        text = re.sub(r"^\s*(`{3,}).*?^\s*\1", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        assert re.findall(r"^\|.*\n(?!\||\n|<!--)(.+)", text, re.MULTILINE) == [], path.name


def test_lists_and_code_are_separated_for_python_markdown() -> None:
    page = """Text:
1. One
   more

   after a blank line
2. Two
```python gpu
- x
```
text"""
    made = """Text:

1. One
    more

    after a blank line

2. Two

```python
- x
```

text"""
    assert SITE.separate_blocks(page) == made


class _Files:
    """The files of a site with `size.md`."""

    def get_file_from_path(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(url_relative_to=lambda page: "size.html") if name == "size.md" else None


def content(html: str) -> str:
    made: str = SITE.on_page_content(html, page=SimpleNamespace(file=None), files=_Files())
    return made


def test_a_command_that_prints_a_page_is_a_link_to_it() -> None:
    assert content("<code>trt-engine docs size</code>").startswith('<a href="size.html"><code>')
    assert "href" not in content("<code>trt-engine docs NAME</code> <code>trt-engine docs nowhere</code>")


def test_a_flag_and_a_percentage_in_a_table_stay_on_one_line() -> None:
    made = content("<td>1 (5 %)</td><td><code>cast --to fp16 -o a-b</code> 5 %, 3 ms</td>")
    flags = re.findall(r'<span class="flag">(.*?)</span>', made)
    assert flags == ["--to", "-o"] and "5&nbsp;%)" in made and "a-b</code>" in made
    assert content("<td><code>5 %</code></td><pre>1 %</pre>") == "<td><code>5 %</code></td><pre>1 %</pre>"


_FRAMES = """<!doctype html><body><pre id="found"></pre><script>
async function look() {
  const found = {};
  for (const page of %s) {
    const frame = document.createElement("iframe");
    frame.style = "width:400px; height:900px; border:0";
    frame.src = page;
    document.body.append(frame);
    await new Promise(done => { frame.onload = done; });
    await new Promise(done => setTimeout(done, 300));
    const page_ = frame.contentDocument;
    const wide = [...page_.querySelectorAll(".md-typeset__scrollwrap")].filter(box => box.scrollWidth > box.clientWidth + 1);
    found[page.split("/").pop()] = [page_.documentElement.scrollWidth, wide.length];
    frame.remove();
  }
  document.getElementById("found").textContent = JSON.stringify(found);
}
look();
</script>"""


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(layout.CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome")
def test_no_page_scrolls_sideways_on_a_phone_and_the_reference_has_no_table_that_does(
    built: Path, tmp_path: Path
) -> None:
    pages = [path.as_uri() for path in sorted(built.rglob("*.html")) if path.name != "404.html"]
    (tmp_path / "frames.html").write_text(_FRAMES % json.dumps(pages), encoding="utf-8")
    flags = ["--allow-file-access-from-files", "--virtual-time-budget=120000", "--window-size=1400,1000", "--dump-dom"]
    printed = layout.chromium(tmp_path, *flags, (tmp_path / "frames.html").as_uri())
    found = json.loads(re.search(r'<pre id="found">(.+?)</pre>', printed, re.DOTALL)[1])  # type: ignore[index]
    assert len(found) > 40 and {name: width for name, (width, _) in found.items() if width > 400} == {}
    assert [found[name][1] for name in ("settings.html", "records.html")] == [0, 0]
