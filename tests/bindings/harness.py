"""The real Python bindings of TensorRT and TensorRT-RTX on a machine that has neither library nor a GPU.

`prepare("11.4.0")` gives a folder for PYTHONPATH where `import tensorrt` works, `prepare("rtx-1.7.1")` one for
`import tensorrt_rtx`: the published bindings, with stand-in libraries compiled beside them. Code that imports them runs in
a process of its own (`Bindings.run`): what crashes there is a failed test with a return code.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from filelock import FileLock

RELEASES = {
    "10.0.1": "tensorrt-cu12-bindings==10.0.1",
    "10.16.1": "tensorrt-cu13-bindings==10.16.1.11",
    "11.0.0": "tensorrt-cu13-bindings==11.0.0.114",
    "11.4.0": "tensorrt-cu13-bindings==11.4.0.106",
    "rtx-1.7.1": "tensorrt-rtx-cu13-bindings==1.7.1.116",
}
"""Both ends of both majors of TensorRT, whose bindings of CUDA 13 begin with 10.13.2; and TensorRT-RTX."""

ENTRY_POINTS = {
    "createInferBuilder_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "getBuilderPluginRegistry",
    "getPluginRegistry",
    "getNvOnnxParserVersion",
    "initLibNvInferPlugins",
}
"""All the bindings link against, 10.0 to 11.4 (TensorRT-RTX all but the last); the rest goes through virtual tables."""

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"
_ALIAS = "from {module}_bindings import *\nfrom {module}_bindings import __version__\n"
_LIBRARIES = ("libnvinfer.so", "libtensorrt_rtx.so")
"""The libraries whose place the puppet takes."""


class Unavailable(Exception):
    """The bindings cannot be had here, and why: no index, no compiler."""


@dataclass(frozen=True, slots=True)
class Bindings:
    """One release of the bindings, importable from `site`."""

    version: str
    site: Path

    @property
    def module(self) -> str:
        """What is imported: `tensorrt` or `tensorrt_rtx`."""
        return "tensorrt_rtx" if self.version.startswith("rtx-") else "tensorrt"

    @property
    def folder(self) -> Path:
        """The package itself; the stand-in libraries lie in it."""
        return self.site / f"{self.module}_bindings"

    @property
    def library(self) -> Path:
        """The stand-in for libnvinfer, or for libtensorrt_rtx."""
        return next(path for name in _LIBRARIES for path in self.folder.glob(f"{name}.*"))

    def environment(self, source: Path = SOURCE) -> dict[str, str]:
        """What a process that imports these bindings is started with; `source` holds the `trt_engine` it imports."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("LD_", "PYTHON"))}
        path = os.pathsep.join(str(folder) for folder in (self.site, source, HERE.parent))
        mine = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
        return kept | mine | {"TRT_ENGINE_TEST_MODULE": self.module}

    def command(self, *words: str) -> list[str]:
        """The command line of such a process: it says where it was when it crashes."""
        return [sys.executable, "-X", "faulthandler", *words]

    def run(
        self, code: str, *words: str, source: Path = SOURCE, timeout_s: float = 240.0
    ) -> subprocess.CompletedProcess[str]:
        """`code` in a process of its own, with these bindings, `trt_engine` and the tests' modules importable."""
        return subprocess.run(
            self.command("-c", code, *words),
            env=self.environment(source), capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip


@functools.cache
def prepare(version: str) -> Bindings:
    """The bindings of a release in `RELEASES`, installed and compiled now if they are not there; `Unavailable`."""
    for tool in ("gcc", "readelf", "nm"):
        if shutil.which(tool) is None:
            raise Unavailable(f"`{tool}` is not installed")
    root = _root()
    bindings = Bindings(version, root / f"{version}-cp{sys.version_info.major}{sys.version_info.minor}")
    root.mkdir(parents=True, exist_ok=True)
    native = hashlib.sha256((HERE / "puppet.c").read_bytes()).hexdigest()
    ready = bindings.site / ".ready"
    with FileLock(root / f"{bindings.site.name}.lock"):
        if not (bindings.site / bindings.module / "__init__.py").exists():
            _install(RELEASES[version], bindings)
        if not ready.exists() or ready.read_text() != native:
            _compile(bindings)
            ready.write_text(native)
    return bindings


def _root() -> Path:
    given = os.environ.get("TRT_ENGINE_TEST_BINDINGS")
    return Path(given) if given else platformdirs.user_cache_path("trt-engine-tests") / "bindings"


def _install(requirement: str, bindings: Bindings) -> None:
    site, module = bindings.site, bindings.module
    shutil.rmtree(site, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:", "--no-compile",
               "--disable-pip-version-check", "--retries", "1", "--target", str(site), requirement]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"installing `{requirement}` took more than 240 s") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise Unavailable(f"`{requirement}` cannot be installed: {said[-1] if said else 'pip said nothing'}")
    libraries = site / f"{module}_libs"  # the bindings import it, and the real one would load the real library
    libraries.mkdir()
    (libraries / "__init__.py").touch()
    (site / module).mkdir()  # the real package is these two lines as well
    (site / module / "__init__.py").write_text(_ALIAS.format(module=module))


def _compile(bindings: Bindings) -> None:
    """The puppet in place of the library, empty ones in place of those beside it, in the folder of the bindings."""
    module = bindings.folder / f"{bindings.module}.so"
    if news := _undefined(module) - ENTRY_POINTS:
        raise AssertionError(f"the bindings of {bindings.version} link against new entry points: {sorted(news)}")
    major, minor, patch = (int(part) for part in bindings.version.removeprefix("rtx-").split("."))
    for library in _needed(module):
        puppet = library.startswith(_LIBRARIES)
        source = [str(HERE / "puppet.c")] if puppet else ["-x", "c", "/dev/null"]
        aside = bindings.folder / f"{library}.{os.getpid()}"
        done = subprocess.run(
            ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror",
             f"-DPUPPET_VERSION={major * 10_000 + minor * 100 + patch}", f"-Wl,-soname,{library}",
             "-o", str(aside), *source],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise AssertionError(f"`{library}` does not compile:\n{done.stderr}")
        aside.replace(bindings.folder / library)


def _needed(module: Path) -> list[str]:
    """The libraries of NVIDIA the bindings are linked to, by soname."""
    said = subprocess.run(["readelf", "-d", str(module)], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(lib(?:nv|tensorrt)[^\]]+)\]", said)


def _undefined(module: Path) -> set[str]:
    """The unversioned symbols the bindings expect of those libraries."""
    said = subprocess.run(["nm", "-D", "--undefined-only", str(module)], capture_output=True, text=True, check=True)
    names = re.findall(r" U (\S+)$", said.stdout, re.MULTILINE)
    return {name for name in names if "@" not in name and not name.startswith(("Py", "_Py", "dl"))}
