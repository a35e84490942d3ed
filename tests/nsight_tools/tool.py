"""Programs that behave as Nsight Systems and Nsight Compute are documented to, without a GPU: the tests' other side.

Options, messages, files and layouts are those of the samples in tests/profiling/samples and of ncu 2025.3.1 on an H200. The
program to be watched runs for real, with a module injected that tells when it opens CUDA's profiler range; the kernels of
each inference are made up by arithmetic, so that tests know every figure. `behaviour` says what goes wrong.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).parent
SCHEMA = HERE.parent / "profiling" / "samples" / "nsys-sqlite-schema-2024.6.2.sql"
TID = 0x1000000

KERNELS = (
    ("void (anonymous namespace)::gemm<float, 4>(float const*, float*)", (8, 4, 1), (128, 1, 1), 300),
    ("void relu<(int)4>(float *)", (16, 1, 1), (256, 1, 1), 50),
    ("void (anonymous namespace)::gemm<float, 4>(float const*, float*)", (2, 4, 1), (128, 1, 1), 100),
    ("softmax_forward", (4, 1, 1), (32, 1, 1), 20),
)
"""Of each inference: name, grid, block, and how many ns it takes, times 1000 in `ncu`."""


class Tool:
    name = ""

    def __init__(self, behaviour: dict[str, Any], arguments: list[str]) -> None:
        self.on, self.arguments = behaviour, arguments
        self.version = ".".join(map(str, behaviour["version"]))
        with Path(behaviour["calls"]).open("a") as file:
            environment = {name: os.environ.get(name) for name in ("LC_ALL", "LANGUAGE", "LANG")}
            file.write(json.dumps({"arguments": arguments, "environment": environment, "pid": os.getpid()}) + "\n")

    def has(self, option: str) -> bool:
        return option not in self.on.get("lacks", ())

    def watch(self, program: list[str], *, ranges: bool) -> tuple[int, list[dict[str, Any]]]:
        """Run the program with our module in it; its exit code (negative for a signal), and what the module told."""
        events = Path(self.on["calls"]).with_name(f"events-{os.getpid()}.jsonl")
        places = [HERE / "injected", *([HERE / "ranges"] if ranges else [])]
        paths = [*map(str, places), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"STAND_IN_EVENTS": str(events), "PYTHONPATH": ":".join(paths)}
        environment["STAND_IN_START"] = str(self.on.get("start_answers", 0))
        environment["STAND_IN_SIGNAL"] = str(self.on.get("dies_by", 0))
        environment["STAND_IN_CTRL_C"] = f"{self.on.get('ctrl_c_after', 0)} {os.getppid()}"
        if self.on.get("hangs"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("it hangs", flush=True)
            while True:
                time.sleep(60)
        process = subprocess.Popen(program, env=environment)
        code = process.wait()
        told = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
        return code, [] if self.on.get("hears_nothing") else told

    def answer_of(self, program: list[str]) -> dict[str, Any]:
        """What the watched program told of itself."""
        request = json.loads(Path(program[-1]).read_text())
        found: dict[str, Any] = json.loads(Path(request["outcome_path"]).read_text())
        return found

    def place(self, name: str) -> str:
        """A file name whose `%` mean something: `%%` is one."""
        if "%" in name.replace("%%", ""):
            self.exit(f"Failed to resolve the output file name '{name}'", code=1)
        return name.replace("%%", "%")

    def exit(self, *lines: str, code: int = 0) -> NoReturn:
        for line in lines:
            print(line, flush=True)
        raise SystemExit(code)


def spans(told: list[dict[str, Any]], answer: dict[str, Any]) -> list[tuple[int, int]]:
    """Start and end of each inference in the range, by NVTX where it was there."""
    pushes = [item["at"] for item in told if item["event"] == "push"]
    pops = [item["at"] for item in told if item["event"] == "pop"]
    if pushes:
        return list(zip(pushes, pops, strict=False))
    return [(start, end) for start, end in answer.get("windows", ())]


# ------------------------------------------------------------------------------------------------ nsys


class Nsys(Tool):
    """`fails`: `no_report`, `only_raw`, `export`, `another`, `disk`, `at_start`; `as_whole_graphs`, `no_ranges`, `dropped`,
    `layer_ranges`, `no_kernels`, `lacks` (options), `hangs`, `hears_nothing`, `start_answers`, `dies_by`,
    `ctrl_c_after` (inferences, where NVTX is), `no_session_start`, `is_launcher`, `silent_help`.
    """

    name = "nsys"
    PROFILE = (
        "--trace --sample --cpuctxsw --capture-range --capture-range-end --kill --cuda-graph-trace --output "
        "--force-overwrite --nvtx-capture --delay --duration --stats --export --wait --show-output"
    ).split()
    SHORT = "-t -s -c -o -f -p -y -d -w".split()

    def run(self) -> NoReturn:
        if self.on.get("is_launcher"):
            self.exit("/usr/local/cuda/bin/nsys: line 40: no Nsight Systems installation was found", code=127)
        if self.arguments[:1] == ["--version"]:
            self.exit(f"NVIDIA Nsight Systems version {self.version}-{'1' * 12}v0")
        verb = self.arguments[0] if self.arguments else ""
        if verb == "profile" and "--help" in self.arguments:
            if self.on.get("silent_help"):
                self.exit()
            self.exit(
                "usage: nsys profile [<args>] [application]", *(f"\t{name}=" for name in self.PROFILE if self.has(name))
            )
        {"profile": self.profile, "export": self.export}[verb]()
        raise SystemExit(0)

    def parse(self) -> tuple[dict[str, str], list[str]]:
        given: dict[str, str] = {}
        words = self.arguments[1:]
        while words and words[0].startswith("-"):
            word = words.pop(0)
            name, equals, value = word.partition("=")
            if word in self.SHORT:
                given[word] = words.pop(0)
            elif equals and name in self.PROFILE and (self.has(name) or name in self.on.get("hides", ())):
                given[name] = value
            else:
                self.exit(f"unrecognised option '{name}'", "", "usage: nsys profile [<args>] [application]", code=1)
        return given, words

    def profile(self) -> None:
        given, program = self.parse()
        fails = self.on.get("fails")
        if fails == "at_start":
            self.exit("Error: the target application could not be launched: Operation not permitted", code=1)
        if fails == "another":
            self.exit("Another profiler is active in this session", code=1)
        origin = time.time_ns()
        code, told = self.watch(program, ranges=not self.on.get("no_ranges"))
        if code < 0:
            print(f"The target application terminated with signal {-code} ({signal.Signals(-code).name})", flush=True)
        started = any(item["event"] == "start" for item in told) or given.get("-c") != "cudaProfilerApi"
        target = Path(self.place(given["-o"]))
        if fails == "disk":
            self.exit("Importer error status: An unknown error occurred. No space left on device", code=1)
        if fails == "only_raw":
            target.with_suffix(".qdstrm").write_bytes(b"raw")
            self.exit("Generating '/tmp/nsys-report.qdstrm'", "Processing events...", code=1)
        if not started or fails == "no_report" or code < 0:
            self.exit("Generated:", "\tNo reports were generated", code=max(code, 0) if code >= 0 else 128 - code)
        windows = spans(told, self.answer_of(program))
        content = {"origin": origin, "windows": windows, "told": told, "ranges": not self.on.get("no_ranges")}
        target.with_suffix(".nsys-rep").write_text(json.dumps(content))
        self.exit("Generating '/tmp/nsys-report.qdstrm'", "Generated:", f"\t{target}.nsys-rep", code=max(code, 0))

    def export(self) -> None:
        words = self.arguments[1:]
        given = {words[at]: words[at + 1] for at in range(0, len(words) - 1, 2)}
        if self.on.get("fails") == "export":
            self.exit(f"Failed to export {words[-1]}: the report was made by a newer version", code=1)
        assert given["-t"] == "sqlite", words
        target = Path(given["-o"])
        if target.exists() and given.get("-f") != "true":
            self.exit(f"Failed to create '{target}': File exists.", code=1)
        fill(target, json.loads(Path(words[-1]).read_text()), self.on)


def fill(path: Path, report: dict[str, Any], on: dict[str, Any]) -> None:
    """An export in the schema of 2024.6.2: tables without rows are not there."""
    database = sqlite3.connect(path)
    database.executescript(SCHEMA.read_text())
    strings: dict[str, int] = {}

    def key(text: str) -> int:
        return strings.setdefault(text, len(strings) + 1)

    def put(table: str, **values: Any) -> None:
        names = ", ".join(f'"{name}"' for name in values)
        database.execute(
            f"INSERT INTO {table} ({names}) VALUES ({', '.join('?' * len(values))})", list(values.values())
        )

    pid, number = 77, 100
    whole = {"globalTid": pid * TID + 5}
    for index, (start, end) in enumerate(report["windows"]):
        begin, stop = start - report["origin"], end - report["origin"]
        if report["ranges"]:
            text = f"trt_engine inference {index}"
            put("NVTX_EVENTS", start=begin, end=stop, eventType=59, text=None, textId=key(text), domainId=0, **whole)
        step = max((stop - begin) // 20, 2)
        number += 1
        common = {"deviceId": 0, "contextId": 1, "streamId": 7, "globalPid": pid * TID}
        call = {"eventClass": 0, "returnValue": 0, **whole}
        at = begin + step
        put("CUPTI_ACTIVITY_KIND_RUNTIME", start=at, end=at + step // 2, nameId=key("cudaMemcpyAsync_v3020"),
            correlationId=number, **call)  # fmt: skip
        put("CUPTI_ACTIVITY_KIND_MEMCPY", start=at + 1, end=at + 1 + min(40, step), correlationId=number, bytes=4096,
            copyKind=1, srcKind=1, dstKind=2, **common)  # fmt: skip
        for place, (name, grid, block, length) in enumerate(() if on.get("no_kernels") else KERNELS):
            at += step
            number += 1
            if on.get("as_whole_graphs"):
                put(
                    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
                    start=at,
                    end=at + step,
                    correlationId=number,
                    graphId=1,
                    **common,
                )
                continue
            if on.get("layer_ranges"):
                put(
                    "NVTX_EVENTS",
                    start=at - 1,
                    end=at + step - 1,
                    eventType=59,
                    text=on["layer_ranges"][place] if isinstance(on["layer_ranges"], list) else f"layer{place}",
                    domainId=1,
                    **whole,
                )
            put("CUPTI_ACTIVITY_KIND_RUNTIME", start=at, end=at + 9, nameId=key("cudaLaunchKernel_v7000"),
                correlationId=number, **call)  # fmt: skip
            put("CUPTI_ACTIVITY_KIND_KERNEL", start=at + 10, end=at + 10 + length, correlationId=number,
                demangledName=key(name), shortName=key("short"), registersPerThread=40, gridX=grid[0], gridY=grid[1],
                gridZ=grid[2], blockX=block[0], blockY=block[1], blockZ=block[2], staticSharedMemory=1024,
                dynamicSharedMemory=24, localMemoryPerThread=0, localMemoryTotal=0, gridId=number, **common)  # fmt: skip
    for text, identity in strings.items():
        put("StringIds", id=identity, value=text)
    if not on.get("no_session_start"):
        put("TARGET_INFO_SESSION_START_TIME", utcEpochNs=report["origin"], utcTime="", localTime="")
    if on.get("dropped"):
        database.execute("CREATE TABLE DIAGNOSTIC_EVENT (timestamp INT, severity INT, text TEXT)")
        database.execute("CREATE TABLE ENUM_DIAGNOSTIC_SEVERITY_LEVEL (id INT, name TEXT, label TEXT)")
        database.executemany(
            "INSERT INTO ENUM_DIAGNOSTIC_SEVERITY_LEVEL VALUES (?, ?, ?)",
            [(1, "INFO", "Information"), (2, "WARNING", "Warning")],
        )
        for severity, text in (
            (1, "Profiling has started."),
            (2, "12 events were dropped."),
            (2, "12 events were dropped."),
        ):
            put("DIAGNOSTIC_EVENT", timestamp=1, severity=severity, text=text)
    tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in tables:
        if not next(database.execute(f"SELECT COUNT(*) FROM {table}"))[0]:
            database.execute(f"DROP TABLE {table}")
    database.commit()
    database.close()


# ------------------------------------------------------------------------------------------------ ncu

PERMISSION = (
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target "
    "device 0. For instructions on enabling permissions and to get more information see "
    "https://developer.nvidia.com/ERR_NVGPUCTRPERM"
)
BUSY = (
    "==ERROR== Profiling failed because a driver resource was unavailable. Ensure that no other tool (like DCGM) is "
    "concurrently collecting profiling data."
)
NOT_LOADED = "==ERROR== Failed to initialize the profiler: LibraryNotLoaded"
HEADER = ("ID,Process ID,Process Name,Host Name,Kernel Name,Context,Stream,Block Size,Grid Size,Device,CC").split(",")


class Ncu(Tool):
    """`fails`: `permission`, `busy`, `not_loaded`, `metric`, `empty`, `garbage`, `cut`; `lacks` (options), `hangs`,
    `dies_by`, `start_answers`, `hears_nothing`."""

    name = "ncu"
    VALUES = (
        "--page --print-units --metrics --section --kernel-name --kernel-name-base --filter-mode --launch-skip "
        "--launch-count --clock-control --cache-control --target-processes --profile-from-start --log-file --export --import"
    ).split()
    SWITCHES = "--csv --force-overwrite --version --help".split()

    def run(self) -> NoReturn:
        if self.arguments == ["--version"]:
            self.exit("NVIDIA (R) Nsight Compute Command Line Profiler", f"Version {self.version} (build 36398880)")
        if self.arguments == ["--help"]:
            self.exit(
                "usage: ncu [options] [program]",
                *(f"  {name} arg" for name in (*self.VALUES, *self.SWITCHES) if self.has(name)),
            )
        given: dict[str, str] = {}
        words = list(self.arguments)
        while words and words[0].startswith("-"):
            word = words.pop(0)
            if not self.has(word) or word not in (*self.VALUES, *self.SWITCHES):
                self.exit(f"==ERROR== unrecognised option '{word}'. Use --help for further details.", code=1)
            given[word] = words.pop(0) if word in self.VALUES else ""
        if "--import" in given:
            self.rules(given)
        else:
            self.measure(given, words)
        raise SystemExit(0)

    def measure(self, given: dict[str, str], program: list[str]) -> None:
        lines: list[str] = []
        code, told = self.watch(program, ranges=False)
        lines += [
            "==WARNING== Note: Running with unmodified GPU clocks. If not controlled otherwise, profiling results may be "
            "inconsistent.",
            "==PROF== Connected to process 4242 (/usr/bin/python3.12)",
        ]
        started = any(item["event"] == "start" for item in told) or given["--profile-from-start"] != "off"
        fails = self.on.get("fails")
        rows: list[dict[str, str]] = []
        if fails in ("permission", "busy", "not_loaded"):
            lines += [{"permission": PERMISSION, "busy": BUSY, "not_loaded": NOT_LOADED}[fails]]
        elif fails == "metric":
            lines += [f"==ERROR== Failed to find metric {given['--metrics'].split(',')[-1]}"]
        elif started:
            rows = self.rows(given)
        if code >= 0:
            lines += ["==PROF== Disconnected from process 4242"]
        if code:  # a signal's number for a code: so does 2025.3.1
            lines += [f"==ERROR== The application returned an error code ({abs(code)})."]
        if rows:
            lines += [f"==PROF== Report: {given['--export']}.ncu-rep", *self.table(given, rows)]
        else:
            lines += ["==WARNING== No kernels were profiled."]
            if started and not fails:
                names = dict.fromkeys(name for name, *_ in KERNELS)
                lines += ["Available Kernels:", *(f"{place}. {base(name)}" for place, name in enumerate(names, 1))]
        text = "\n".join(lines) + "\n"
        if fails == "empty":
            text = ""
        elif fails == "garbage":
            text = "\x00\x01 not what was asked for\n"
        elif fails == "cut":
            text = text[: text.rindex(',"') + 3]
        Path(self.place(given["--log-file"])).write_text(text)
        if rows:
            content = {"rows": rows, "sections": "--section" in given}
            Path(self.place(given["--export"]) + ".ncu-rep").write_text(json.dumps(content))
        raise SystemExit(abs(code))

    def rows(self, given: dict[str, str]) -> list[dict[str, str]]:
        """The launches of one inference that pass the filters."""
        wanted = given.get("--kernel-name", "regex:.*").removeprefix("regex:")
        skip, count = int(given["--launch-skip"]), int(given["--launch-count"])
        seen: dict[Any, int] = {}
        found: list[dict[str, str]] = []
        for name, grid, block, length in KERNELS:
            if re.search(wanted, base(name)) is None:
                continue
            config = (name, grid, block) if given.get("--filter-mode") == "per-launch-config" else None
            seen[config] = seen.get(config, 0) + 1
            if not skip < seen[config] <= skip + count:
                continue
            about = dict(zip(HEADER, (str(len(found)), "4242", "python3.12", "127.0.0.1", name, "1", "7", str(block),
                                      str(grid), "0", "9.0"), strict=True))  # fmt: skip
            found.append(about | {"length": str(length), "grid": str(grid[0])})
        return found

    def table(self, given: dict[str, str], rows: list[dict[str, str]]) -> list[str]:
        metrics = given["--metrics"].split(",")
        english = os.environ.get("LC_ALL") == "C"

        def number(value: float, *, whole: bool) -> str:
            text = f"{value:,.0f}" if whole else f"{value:,.2f}"
            return text.replace(",", "") if english else text.translate(str.maketrans(".,", ",."))

        def value(metric: str, row: dict[str, str]) -> str:
            length = int(row["length"])
            if metric == "gpu__time_duration.sum":
                return number(length * 1000, whole=True)
            if metric.startswith("dram__bytes"):
                return number(length * 4321, whole=True)
            if metric == "sm__warps_active.avg.pct_of_peak_sustained_active":
                return (
                    "n/a" if row["Kernel Name"] == "softmax_forward" else number(12.5 + int(row["grid"]), whole=False)
                )
            if "pct" in metric:
                return number(length / 10, whole=False)
            return number(int(row["grid"]), whole=True)

        units = ["ns" if "time" in m else "byte" if "bytes" in m else "%" if "pct" in m else "" for m in metrics]
        lines = [[*HEADER, "launch__func_cache_config", *metrics], [""] * (len(HEADER) + 1) + units]
        lines += [
            [*(row[name] for name in HEADER), "CachePreferNone", *(value(m, row) for m in metrics)] for row in rows
        ]
        return [",".join(f'"{text}"' for text in line) for line in lines]

    def rules(self, given: dict[str, str]) -> None:
        report = json.loads(Path(given["--import"]).read_text())
        more = ["Section Name", "Metric Name", "Metric Unit", "Metric Value", "Rule Name", "Rule Type", "Rule Description",
                "Estimated Speedup Type", "Estimated Speedup"]  # fmt: skip
        print(",".join(f'"{name}"' for name in (*HEADER, *more)))
        for row in report["rows"]:
            about = [row[name] for name in HEADER]
            print(",".join(f'"{text}"' for text in (*about, "Speed Of Light", "Duration", "ns", row["length"])) + ",")
            if report["sections"]:
                rule = [
                    "Occupancy",
                    "",
                    "",
                    "",
                    "Occupancy",
                    "OPT",
                    f"The grid of {row['grid']} is small.",
                    "global",
                    "5",
                ]
                print(",".join(f'"{text}"' for text in (*about, *rule)))


def base(name: str) -> str:
    found = re.search(r"(\w+)(?:<|\(float|$)", name.replace("(anonymous namespace)::", ""))
    assert found is not None
    return found[1]


if __name__ == "__main__":
    sys.exit("this is written into a program by `write_tool`")
