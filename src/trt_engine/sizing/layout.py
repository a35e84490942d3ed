"""Where everything of a sizing run lies: one tree, fixed names, beside the model or in a run folder of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trt_engine.errors import SetupError, UsageError
from trt_engine.runfiles import RECORDS, SIZE

__all__ = ["Layout", "layout_for"]

_LONGEST_NAME = 255
"""Bytes of one file name on every usual file system."""
_ASIDE = 48
"""What a name grows by while its file is written (`files.write_whole`)."""
_LARGEST_BATCH = 1 << 20
_SCAN, _BENCHMARK_DATA = "scan.jsonl", "benchmark_data.json"
RESULTS = (SIZE, RECORDS, _SCAN, "report.md", "report.html", _BENCHMARK_DATA)


@dataclass(frozen=True, slots=True)
class Layout:
    """The tree of one run. A value: nothing is made before it is needed."""

    folder: Path
    stem: str
    """The model file's name without `.onnx`."""
    model_name: str
    """NAME of `models/NAME/model/X.onnx`, else the stem."""
    suffix: str
    """Of the engine's file, from the backend's card."""
    timestamp: str
    """When the run started, as `YYYYMMDD_HHMMSS`."""

    def engine(self, batch: int, *, dynamic: bool = True) -> Path:
        """`engines/X_dynamic_bN.engine`; a model whose batch is fixed says `static`."""
        return self.folder / "engines" / f"{self.stem}_{'dynamic' if dynamic else 'static'}_b{batch}{self.suffix}"

    def build_log(self, batch: int | None = None) -> Path:
        """The log of the first engine's build, or of the one rebuilt for `batch`."""
        which = "" if batch is None else f"_b{batch}"
        return self.folder / "engines" / f"{self.stem}_dynamic_build{which}_{self.timestamp}.log"

    @property
    def timing_cache(self) -> Path:
        """`engines/timing.cache`, of backends that time tactics."""
        return self.folder / "engines" / "timing.cache"

    def bench_log(self, batch: int) -> Path:
        """`bN/trtexec_bN.log`: always this name, so that scripts find it without a wildcard."""
        return self.folder / f"b{batch}" / f"trtexec_b{batch}.log"

    @property
    def size_json(self) -> Path:
        return self.folder / SIZE

    @property
    def records(self) -> Path:
        return self.folder / RECORDS

    @property
    def scan_records(self) -> Path:
        """The scan's short measurements: kept apart, because no count rests on them."""
        return self.folder / _SCAN

    @property
    def benchmark_data(self) -> Path:
        return self.folder / _BENCHMARK_DATA

    def results(self) -> Iterator[Path]:
        """The result files of an earlier run that are there."""
        return (path for name in RESULTS if (path := self.folder / name).exists())

    def earlier(self) -> dict[str, object] | None:
        """The document of an earlier run in this folder; None when there is none of ours."""
        try:
            document = msgspec.json.decode(self.size_json.read_bytes(), type=dict[str, object])
        except (OSError, msgspec.DecodeError):
            return None
        return document if document.get("schema") == "trt-engine/size" else None

    def check(self, *, yes: bool) -> None:
        """Refuse a place where this run would overwrite what no run of ours has written, and names no disk takes."""
        self._check_names()
        for place in (self.folder, *self.folder.parents):
            if place.exists() and not place.is_dir():
                raise SetupError(
                    f"`{place}` is a file, expected a folder", hint="name a folder with `-o`, or leave `-o` out"
                )
        if yes or self.earlier() is not None:
            return
        if foreign := [path.name for path in self.results()]:
            raise UsageError(
                f"`{self.folder}` has {', '.join(f'`{name}`' for name in foreign)} not written by `size`",
                hint="name another folder with `-o`, or add `--yes` to overwrite",
            )

    def _check_names(self) -> None:
        for part in self.folder.parts:
            if len(os.fsencode(part)) > _LONGEST_NAME:
                raise SetupError(
                    f"the folder's name `{part}` is too long: {len(os.fsencode(part))} bytes, a disk takes {_LONGEST_NAME}",
                    hint="name a folder with `-o`",
                )
        longest = len(os.fsencode(self.build_log(_LARGEST_BATCH).name)) + _ASIDE
        if longest > _LONGEST_NAME:
            raise SetupError(
                f"the model's name `{self.stem}` is too long: its engines and logs are named after it and would have "
                f"{longest} bytes, a disk takes {_LONGEST_NAME}",
                hint="rename the model, or link to it under a shorter name: `ln -s`",
            )

    def clear(self) -> None:
        """Remove the result files of an earlier run; engines, logs and everything foreign stay."""
        for path in self.results():
            path.unlink(missing_ok=True)


def layout_for(model: Path, out: Path | None, suffix: str, now: time.struct_time | None = None) -> Layout:
    """The layout that follows from the path of the model, or from `-o`.

    `models/NAME/model/X.onnx` goes to `models/NAME/benchmarks/`, any other model to `runs/YYYYMMDD_HHMMSS_X/` where the
    command runs.
    """
    timestamp = time.strftime("%Y%m%d_%H%M%S", now or time.localtime())
    whole = model.parent.resolve() / model.name if ".." in model.parts else model.absolute()
    named = len(whole.parts) > 4 and whole.parts[-2] == "model" and whole.parts[-4] == "models"
    if out is not None:
        folder = out
    elif named:
        folder = (model if len(model.parts) > 2 and ".." not in model.parts else whole).parent.parent / "benchmarks"
    else:
        folder = _unused(Path("runs") / f"{timestamp}_{model.stem}")
    return Layout(folder, model.stem, whole.parts[-3] if named else model.stem, suffix, timestamp)


def _unused(folder: Path) -> Path:
    """The folder, or `..._2`, `..._3` when another run took the name within the same second."""
    candidate, number = folder, 1
    while _there(candidate):
        number += 1
        candidate = folder.with_name(f"{folder.name}_{number}")
    return candidate


def _there(folder: Path) -> bool:
    try:
        return folder.exists()
    except OSError:  # a name too long, which `Layout.check` refuses
        return False
