"""The process that has TensorFlow, with its messages and its crashes as errors."""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from trt_engine.errors import MemoryExhausted, ModelError, SetupError, TrtEngineError
from trt_engine.format import shorten_middle
from trt_engine.workers.crash import exit_name, mentions_out_of_memory, restore_error
from trt_engine.workers.process import ChildProcess

log = logging.getLogger(__name__)

PYTHON = "TRT_ENGINE_TF_PYTHON"
"""Environment variable naming an interpreter with TensorFlow and tf2onnx."""
_INSTALL_HINT = f"`pip install 'trt-engine[tf]'`, or name an interpreter that has both with `{PYTHON}`"
_START_S = 300.0
_GRACE_S = 30.0
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE)


class WorkerProcess:
    """The TensorFlow worker process: one JSON line per request and reply. `close` ends and reaps it."""

    def __init__(self, python: str, source: Path, timeout_s: float) -> None:
        self._source, self._timeout_s = source, timeout_s
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (`close` closes it)
        self._shown = 0
        self._closed = False
        try:
            self._child = ChildProcess([python, str(Path(__file__).with_name("tensorflow_worker.py"))], self._output)
        except OSError as error:
            self._output.close()
            raise SetupError(f"`{python}` does not start: {error.strerror}", hint=_INSTALL_HINT) from error
        try:
            hello = self._read_reply(_START_S, "starting TensorFlow")
            if "missing" in hello:
                absent = hello["missing"] in ("numpy", "onnx", "tensorflow", "tf2onnx")
                what = f"has no `{hello['missing']}`" if absent else f"cannot import TensorFlow: {hello['text']}"
                raise SetupError(f"`{python}` (Python {hello['python']}) {what}", hint=_INSTALL_HINT)
            self.versions: dict[str, str] = hello["versions"]
        except BaseException:
            self.close()
            raise

    def request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Reply to one request; rejections, crashes and timeouts raise our errors."""
        if self._closed:
            raise ModelError(f"the source `{self._source}` was closed", hint="convert it again")
        doing = {"open": "reading", "convert": "converting", "run": "running"}[request["do"]]
        try:
            self._child.send(json.dumps(request).encode())
            reply = self._read_reply(self._timeout_s, f"{doing} `{self._source}`")
        except BaseException:  # Ctrl-C too: its reply will not be read
            self.close()
            raise
        if "error" in reply:
            raise restore_error(*reply["error"])
        answer: dict[str, Any] = reply["answer"]
        return answer

    def _read_reply(self, timeout_s: float, doing: str) -> dict[str, Any]:
        try:
            line = self._child.read_line(timeout_s)
        except TimeoutError:
            raise ModelError(
                f"{doing} did not end within {timeout_s:g} s and was stopped{self._last_lines()}",
                hint="a longer time: `-O timeout_s=7200`",
            ) from None
        if line is None:
            raise self._crash_error(doing)
        self._log_output()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _log_output(self) -> str:
        """Log what TensorFlow printed since the last call at debug level."""
        text = os.pread(self._output.fileno(), 1 << 26, 0).decode(errors="replace")
        for line in text[self._shown :].splitlines():
            log.debug("tensorflow: %s", line)
        self._shown = len(text)
        return text

    def _last_lines(self) -> str:
        lines = [line.strip() for line in self._log_output().splitlines() if line.strip()]
        return f"; last lines: {' / '.join(shorten_middle(line, 300) for line in lines[-3:])}" if lines else ""

    def _crash_error(self, doing: str) -> TrtEngineError:
        """Error for a worker that ended without a reply."""
        ended = self._child.wait(_GRACE_S)
        lines, code = self._last_lines(), ended.code
        text = f"the TensorFlow process ended by {exit_name(code)} while {doing}{lines}"
        if mentions_out_of_memory(lines):
            return MemoryExhausted(text, hint="a smaller example `--input`, or a machine with more memory")
        if code == -signal.SIGKILL:
            text += f" (it had {ended.peak_bytes >> 20} MiB)"
            return SetupError(text, hint="probably out of memory: see `dmesg`")
        if -code in _CRASHES:
            return ModelError(
                text,
                hint="it may not run at these sizes: `--input` gives others; else the source or TensorFlow is at "
                "fault (`-v` shows all output)",
            )
        return SetupError(text, hint=f"`-v` shows its output; {_INSTALL_HINT}")

    def close(self) -> None:
        """End the process and reap it."""
        self._closed = True
        try:
            self._child.close()
        finally:
            self._output.close()
