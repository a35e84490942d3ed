"""Settings of `run`."""

from __future__ import annotations

from dataclasses import dataclass

from trt_engine.config.settings import Config, opt
from trt_engine.errors import UsageError


def parse_name(value: str) -> str:
    """A label or mode; `UsageError` for anything but a string."""
    if not isinstance(value, str):
        raise UsageError(f"{value!r} is not a label or mode", hint='`cells=["digits-*-b8"]`, `modes=["bench"]`')
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(Config):
    """Settings of `run`: which cells and modes to run, and how."""

    cells: tuple[str, ...] = opt(
        (), "only cells with a matching label, e.g. 'digits-*-b8' (repeatable)", parse=parse_name, metavar="LABEL",
        multiple=True,
    )  # fmt: skip
    modes: tuple[str, ...] = opt(
        (), "build, bench (or benchmark), evaluate, profile, nsys, ncu, all [default: the plan's]", flags="--modes --mode",
        parse=parse_name, metavar="A,B", multiple=True,
    )  # fmt: skip
    fail_fast: bool = opt(
        False, "stop at the first cell that fails [default: `--keep-going`]", flags="--fail-fast/--keep-going"
    )
    rerun: bool = opt(False, "repeat finished work too")
    in_container: str | None = opt(
        None, "run in this image with docker or podman; `none` for no container [default: the plan's]",
        flags="--container", metavar="IMAGE",
    )  # fmt: skip
    trust_plan: bool = opt(False, "allow plugins, and network and arguments of the container")

    def mode_names(self) -> tuple[str, ...]:
        """The modes, split at commas; empty for those of the plan."""
        names = tuple(name.strip() for text in self.modes for name in text.split(",") if name.strip())
        if self.modes and not names:
            raise UsageError("`--modes` names no mode", hint="`--modes bench,evaluate`")
        return names
