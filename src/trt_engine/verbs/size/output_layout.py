"""Paths of the output files of `size`: fixed names, beside the model or in a separate run folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trt_engine.atomic_io import decode_json, read_bounded, unused_folder
from trt_engine.errors import SetupError, UsageError
from trt_engine.run_folder import RECORDS, SIZE

_MAX_NAME_BYTES = 255
"""Maximum bytes of a file name on common file systems."""
_STAGING_SUFFIX_BYTES = 48
"""Bytes added to a name while its file is written (`atomic_io.write_atomic`)."""
_MAX_BATCH = 1 << 20
_SCAN, _BENCHMARK_DATA = "scan.jsonl", "benchmark_data.json"
RESULTS = (SIZE, RECORDS, _SCAN, "report.md", "report.html", _BENCHMARK_DATA)


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """Paths of one run; creates nothing."""

    folder: Path
    stem: str
    """The model file's name without `.onnx`."""
    model_name: str
    """NAME of `models/NAME/model/X.onnx`, else the stem."""
    suffix: str
    """Suffix of the engine file of the backend."""
    timestamp: str
    """Start of the run, as `YYYYMMDD_HHMMSS`."""

    def engine(self, batch: int, *, dynamic: bool = True) -> Path:
        """`engines/X_dynamic_bN.engine`; `static` for a model with a fixed batch."""
        return self.folder / "engines" / f"{self.stem}_{'dynamic' if dynamic else 'static'}_b{batch}{self.suffix}"

    def build_log(self, batch: int | None = None) -> Path:
        """Build log of the first engine, or of the engine for `batch`."""
        which = "" if batch is None else f"_b{batch}"
        return self.folder / "engines" / f"{self.stem}_dynamic_build{which}_{self.timestamp}.log"

    @property
    def timing_cache(self) -> Path:
        """`engines/timing.cache`, for backends with a timing cache."""
        return self.folder / "engines" / "timing.cache"

    def bench_log(self, batch: int) -> Path:
        """`bN/trtexec_bN.log`: a fixed name for scripts."""
        return self.folder / f"b{batch}" / f"trtexec_b{batch}.log"

    @property
    def size_json(self) -> Path:
        return self.folder / SIZE

    @property
    def records(self) -> Path:
        return self.folder / RECORDS

    @property
    def scan_records(self) -> Path:
        """Short measurements of the scan, which do not affect the count."""
        return self.folder / _SCAN

    @property
    def curve(self) -> Path:
        """Latency curves, which later runs in the folder reuse."""
        return self.folder / "curve.jsonl"

    @property
    def benchmark_data(self) -> Path:
        return self.folder / _BENCHMARK_DATA

    def existing_results(self) -> Iterator[Path]:
        """Existing result files of an earlier run."""
        return (path for name in RESULTS if (path := self.folder / name).exists())

    def previous_document(self) -> dict[str, object] | None:
        """The `size.json` of an earlier run in this folder; None if missing or foreign."""
        try:
            document = decode_json(read_bounded(self.size_json), dict[str, object])
        except (OSError, msgspec.DecodeError):
            return None
        return document if document.get("schema") == "trt-engine/size" else None

    def check(self, *, overwrite: bool) -> None:
        """Refuse to overwrite foreign files, and file names that are too long."""
        self._check_names()
        for place in (self.folder, *self.folder.parents):
            if place.exists() and not place.is_dir():
                raise SetupError(
                    f"`{place}` is a file, expected a folder", hint="name a folder with `-o`, or leave `-o` out"
                )
        if overwrite or self.previous_document() is not None:
            return
        if foreign := [path.name for path in self.existing_results()]:
            raise UsageError(
                f"`{self.folder}` has {', '.join(f'`{name}`' for name in foreign)} not written by `size`",
                hint="name another folder with `-o`, or add `--overwrite` to overwrite",
            )

    def _check_names(self) -> None:
        for part in self.folder.parts:
            if len(os.fsencode(part)) > _MAX_NAME_BYTES:
                raise UsageError(f"the name `{part[:40]}...` is too long for this disk", hint="name a folder with `-o`")
        longest = len(os.fsencode(self.build_log(_MAX_BATCH).name)) + _STAGING_SUFFIX_BYTES
        if longest > _MAX_NAME_BYTES:
            raise UsageError(
                f"the model's name `{self.stem}` is too long: its engines and logs are named after it and would have "
                f"{longest} bytes, the limit is {_MAX_NAME_BYTES}",
                hint="rename the model, or link to it under a shorter name: `ln -s`",
            )

    def clear(self) -> None:
        """Remove the result files of an earlier run; engines, logs and foreign files stay."""
        for path in self.existing_results():
            path.unlink(missing_ok=True)


def output_layout(model: Path, out: Path | None, suffix: str, now: time.struct_time | None = None) -> OutputLayout:
    """The layout for `-o`, or for the path of the model.

    `models/NAME/model/X.onnx` goes to `models/NAME/benchmarks/`, any other model to `runs/YYYYMMDD_HHMMSS_X/` in the working
    directory.
    """
    timestamp = time.strftime("%Y%m%d_%H%M%S", now or time.localtime())
    whole = model.parent.resolve() / model.name if ".." in model.parts else model.absolute()
    named = len(whole.parts) > 4 and whole.parts[-2] == "model" and whole.parts[-4] == "models"
    if out is not None:
        folder = out
    elif named:
        folder = (model if len(model.parts) > 2 and ".." not in model.parts else whole).parent.parent / "benchmarks"
    else:
        folder = unused_folder(Path("runs") / f"{timestamp}_{model.stem}")
    return OutputLayout(folder, model.stem, whole.parts[-3] if named else model.stem, suffix, timestamp)
