"""Tests of the TensorRT backend over the real bindings. What they need (an index, gcc) is skipped loudly where it lacks.

A test that asks for `world` runs in the process of a release (worker.py): its body is executed there, with the scripted
TensorRT as `world`. It is run once for each release of `WHOLE`, or of its marker `releases`. Quick are the newest release,
and for a test whose marker names it the newest of TensorRT 10: where the majors differ, and each path once from end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bindings.harness import Bindings, Unavailable, prepare
from bindings.worker import Failure, Worker

NOT_HERE = "the bindings of TensorRT cannot be had"
"""How the reasons of those skips begin; tests/conftest.py counts them in a line of their own."""
WHOLE = ("10.16.1", "11.4.0")
"""Where the backend runs end to end; the other two releases are looked at by name and run through once."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("releases")
        releases = marker.args if marker else WHOLE
        beside = set(releases) - {*WHOLE, "rtx-1.7.1"}
        if not marker:
            beside = {WHOLE[0]}
        cases = [pytest.param(item, marks=pytest.mark.slow) if item in beside else item for item in releases]
        metafunc.parametrize("world", cases, indirect=True)


@pytest.fixture(scope="session")
def bindings() -> Callable[[str], Bindings]:
    """`bindings("11.4.0")`: that release, or a skip that says why it cannot be had."""

    missing: dict[str, str] = {}  # asked once: an index that does not answer takes its time

    def get(version: str) -> Bindings:
        if version not in missing:
            try:
                return prepare(version)
            except Unavailable as error:
                missing[version] = str(error)
        pytest.skip(f"{NOT_HERE}: {missing[version]}")

    return get


@pytest.fixture(scope="session")
def workers(bindings: Callable[[str], Bindings]) -> Iterator[Callable[[str], Worker]]:
    started: dict[str, Worker] = {}

    def get(version: str) -> Worker:
        if version not in started:
            started[version] = Worker(bindings(version))
        return started[version]

    yield get
    for worker in started.values():
        worker.close()


@dataclass(frozen=True, slots=True)
class Inside:
    """Where the body of a test is executed."""

    worker: Worker
    folder: Path


@pytest.fixture
def world(request: pytest.FixtureRequest, workers: Callable[[str], Worker], tmp_path: Path) -> Inside:
    return Inside(workers(request.param), tmp_path)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """The body of a test that asks for `world` is executed in that release's process."""
    inside = pyfuncitem.funcargs.get("world")
    if not isinstance(inside, Inside):
        return None
    arguments = {name: value for name, value in pyfuncitem.callspec.params.items() if name != "world"}
    said = None
    try:
        inside.worker.run(pyfuncitem.path, pyfuncitem.originalname, arguments, inside.folder)
    except Failure as failure:
        said = str(failure)
    if said is not None:
        pytest.fail(said, pytrace=False)
    return True
