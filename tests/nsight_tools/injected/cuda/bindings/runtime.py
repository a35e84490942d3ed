"""What the stand-ins put into the program they watch, as the real ones inject a library: it tells when the range begins."""

import json
import os
import signal
import time
from pathlib import Path


def _tell(event, **more):
    with Path(os.environ["STAND_IN_EVENTS"]).open("a") as file:
        file.write(json.dumps({"event": event, "at": time.time_ns(), "pid": os.getpid(), **more}) + "\n")


def cudaSetDevice(number):  # noqa: N802
    return (0,)


def cudaProfilerStart():  # noqa: N802
    code = int(os.environ.get("STAND_IN_START", "0"))
    if code == 0:
        _tell("start")
    if number := int(os.environ.get("STAND_IN_SIGNAL", "0")):
        os.kill(os.getpid(), number)
        signal.pause()
    return (code,)


def cudaProfilerStop():  # noqa: N802
    _tell("stop")
    return (0,)
