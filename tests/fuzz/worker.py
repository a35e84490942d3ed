"""The process that inputs run in: one call after another with its output caught, its memory bounded and its writes watched.

It reads jobs from stdin, one JSON object on each line, and answers on the file descriptor named by its first argument.
`campaign.py` watches it, and ends it when an input takes too long.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

MEMORY = 2 << 30
"""Address space an input may take beyond what the process has at the start."""
RESIDENT = 1 << 30
"""Memory an input may have in use beyond that."""
CPU_S = 20.0
"""Processor time one input may take, on a slow processor too."""

_CLOSED = frozenset(("onnx", "onnx-verbs", "passports", "sources", "packs", "records"))
"""Targets whose files may not lead to others outside their folder; a run plan may."""


class Watch:
    """What an input writes, and what it runs, seen by Python's audit events."""

    _WRITES = frozenset(
        "os.mkdir os.rename os.remove os.rmdir os.link os.symlink os.truncate os.chmod shutil.rmtree".split()
    )
    _RUNS = frozenset("os.system os.exec os.posix_spawn os.spawn".split())

    def __init__(self, inside: Path) -> None:
        self.inside = (f"{inside}/", "/dev/null", "/dev/tty", "/proc/self/", "/sys/")
        self.seen: list[tuple[str, str]] = []
        self.on = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            path, _, flags = args
            if (
                isinstance(flags, int)
                and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
                and isinstance(path, str | bytes)
            ):
                self._judge(path, "written outside")
            elif isinstance(path, str | bytes) and b"secret.bin" in os.fsencode(path):
                self.seen.append(("read outside", os.fsdecode(path)))
        elif event in self._WRITES:
            for path in args[:2]:
                if isinstance(path, str | bytes):
                    self._judge(path, "written outside")
        elif event in self._RUNS:
            self.seen.append(("code was run", f"{event} {args[0]!r}"[:200]))

    def _judge(self, path: str | bytes, kind: str) -> None:
        whole = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
        if not whole.startswith(self.inside) and "/__pycache__" not in whole:
            self.seen.append((kind, whole))


class Output:
    """stdout and stderr of the process, down to the file descriptors, in two files in memory."""

    def __init__(self) -> None:
        self._files = [os.memfd_create(name) for name in ("stdout", "stderr")]
        for number, file in enumerate(self._files, 1):
            os.dup2(file, number)
        sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), "utf-8", "backslashreplace", line_buffering=True)  # noqa: SIM115
        sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), "utf-8", "backslashreplace", line_buffering=True)  # noqa: SIM115

    def taken(self) -> tuple[str, str]:
        """What was written since the last time."""
        texts = []
        for stream, file in zip((sys.stdout, sys.stderr), self._files, strict=True):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
            size = os.fstat(file).st_size
            texts.append(os.pread(file, min(size, 8 << 20), 0).decode("utf-8", "replace"))
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
        return texts[0], texts[1]


class Worker:
    """Runs inputs, one after another."""

    def __init__(self, root: Path) -> None:
        from fuzz.seeds import Seeds

        self.root = root
        self.case, self.temp, self.home = root / "case", root / "tmp", root / "home"
        for folder in (self.temp, self.home, root / "outside"):
            folder.mkdir(parents=True)
        (root / "outside" / "secret.bin").write_bytes(b"\x01\x02\x03\x04" * 64)
        os.environ |= {"HOME": str(self.home), "TRT_ENGINE_STORE": str(self.home / "store"), "TMPDIR": str(self.temp),
                       "XDG_CACHE_HOME": str(self.home / "cache"), "COLUMNS": "100", "LC_ALL": "C.UTF-8"}  # fmt: skip
        tempfile.tempdir = None
        self.output = Output()
        self.watch = Watch(root)
        self.seeds = Seeds(root / "seeds")
        self.base_pages = 0

    def prepare(self) -> None:
        """Import what verbs import, and bound the memory from there."""
        # the threads of a library for each of many CPUs would count as memory and time of an input
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:4])
        import onnxruntime  # noqa: F401

        import trt_engine.cli.click_app  # noqa: F401
        from fuzz.targets import TARGETS  # noqa: F401

        self.output.taken()
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
        gc.freeze()

    # -------------------------------------------------------------------------------------------- one input

    def make(self, target: str, seed: int, index: int) -> Any:
        from fuzz.targets import TARGETS

        return TARGETS[target].make(random.Random(f"{seed}/{target}/{index}"), self.seeds)

    def run(self, item: Any) -> dict[str, Any]:
        """Run the calls of an input; how they ended, and every fault."""
        from fuzz.checks import Fault
        from fuzz.targets import TARGETS

        target = TARGETS.get(item.target)
        codes = target.codes if target else (2, 3, 4, 10)
        faults: list[Fault] = []
        ended: list[int | str] = []
        if not self._placed(item):
            return {"codes": [], "faults": [], "cpu_s": 0.0}
        before = dict(os.environ)
        os.environ.update(item.env)
        _forget_peak()
        resident, start = _resident("VmRSS"), time.process_time()
        try:
            for words in item.calls:
                code, found = self._call(item, list(words), codes)
                ended.append(code)
                faults += found
        finally:
            os.environ.clear()
            os.environ.update(before)
            os.chdir(self.root)
        cpu_s = time.process_time() - start
        if cpu_s > CPU_S:
            faults.append(Fault("hang", f"{item.calls[0][0]} took {cpu_s:.0f} s"))
        if (more := _resident("VmHWM") - resident) > RESIDENT:
            faults.append(Fault("memory", item.calls[0][0], f"{more >> 20} MiB in use"))
        faults += self._left(item)
        return {"codes": ended, "faults": [vars(fault) | {"key": fault.key} for fault in faults], "cpu_s": cpu_s}

    def _placed(self, item: Any) -> bool:
        """Put the files into an empty folder, and go there; False for names that no file can have."""
        shutil.rmtree(self.case, ignore_errors=True)
        self.case.mkdir()
        os.chdir(self.case)
        try:
            item.write(self.case)
        except (OSError, ValueError):
            return False
        return True

    def _call(self, item: Any, words: list[str], codes: Container[int]) -> tuple[int | str, list[Any]]:
        from fuzz.checks import Call, Fault, faults_of, last_line, place_of

        self.output.taken()
        self.watch.seen.clear()
        self.watch.on = True
        code, error = self._ended(words)
        self.watch.on = False
        out, err = self.output.taken()
        found = faults_of(Call(words, code, out, err, error), codes)
        for kind, what in self.watch.seen[:1]:
            if kind != "read outside" or item.target in _CLOSED:
                found.append(Fault(kind, words[0], what))
        if code == 1 and error is None and self._placed(item):  # once more, for the place
            self._ended([*words, "-vv"])
            _, trace = self.output.taken()
            place, text = place_of(trace), last_line(trace[trace.rfind("Traceback") :].partition("\nerror: ")[0])
            found = [Fault("exit 1", place, text) if item.kind == "exit 1" else item for item in found]
        return code, found

    def _ended(self, words: list[str]) -> tuple[int | str, str | None]:
        """The exit code of a verb or a reader, and the traceback of what came out of it."""
        from fuzz.readers import READERS
        from trt_engine.cli.main import run

        sys.argv = ["trt-engine", *words]
        try:
            if words[0] in READERS:
                READERS[words[0]](Path(words[1]))
                return 0, None
            return run(words), None
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1, None
        except BaseException as error:
            code = getattr(error, "exit_code", None)
            if words[0] in READERS and isinstance(code, int):
                return code, None if code != 1 else traceback.format_exc()
            return 1, traceback.format_exc()

    def _left(self, item: Any) -> Iterator[Any]:
        """Hidden files left behind, inputs that were changed."""
        from fuzz.checks import Fault

        for path in [*self.case.rglob("*.tmp"), *self.temp.iterdir()]:
            name = str(path.relative_to(self.root))
            if (
                name.removeprefix("case/") not in item.files
                and "/.x.tmp" not in name
                and not path.name.startswith((".ses", "torchinductor_", "aotinductor_"))
            ):  # ONNX Runtime's own, PyTorch's
                yield Fault("leftover", f"{item.calls[0][0]}: {path.suffix or path.name}", name)
        shutil.rmtree(self.temp)
        self.temp.mkdir()
        for name, raw in item.files.items():
            path = self.case / name
            if (
                item.target != "store"
                and not name.startswith("out/")
                and (not path.is_file() or path.read_bytes() != raw)
            ):
                yield Fault("input changed", f"{item.calls[0][0]}: {name}", name)


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _resident(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) << 10


def main() -> None:
    """Answer jobs until stdin ends; what goes wrong here itself is in the log."""
    log = Path(sys.argv[3])
    try:
        _answer_jobs()
    except Exception:
        log.write_text(traceback.format_exc())
        raise


def _answer_jobs() -> None:
    answers = open(int(sys.argv[1]), "w", buffering=1)  # noqa: PTH123, SIM115
    jobs = os.fdopen(os.dup(0), "r")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = open(sys.argv[3], "w")  # noqa: PTH123, SIM115
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log, all_threads=True)
    root = Path(sys.argv[2])
    worker = Worker(root)
    worker.prepare()

    def answer(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")

    answer(ready=True)
    from fuzz.inputs import Input

    for text in jobs:
        job = json.loads(text)
        if "input" in job:
            answer(begin=-1)
            answer(end=-1, **worker.run(Input.from_json(job["input"])))
        elif job.get("make"):
            answer(input=worker.make(job["target"], job["seed"], job["start"]).to_json())
        else:
            for index in range(job["start"], job["stop"]):
                item = worker.make(job["target"], job["seed"], index)
                answer(begin=index)
                done = worker.run(item)
                answer(end=index, **done, **({"input": item.to_json()} if done["faults"] else {}))
        answer(done=True)
    shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
