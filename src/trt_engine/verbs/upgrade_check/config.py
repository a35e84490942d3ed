"""Settings of `upgrade-check`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_engine.config.settings import Config, check_limits, opt
from trt_engine.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class UpgradeConfig(Config):
    """Settings of an upgrade check: its gates, and what to write."""

    def __post_init__(self) -> None:
        check_limits(self)
        if not 0 <= self.max_drop <= 1:
            raise UsageError(
                f"`max_drop` is {self.max_drop}, expected 0 to 1", hint="`--max-drop 0.01` is one point of AP"
            )

    fail_if: Any = opt(
        ("slower:3%",), "slower:3%, p99-slower:5%, maybe-slower:3% (exit code 8) [default: slower:3%]", multiple=True,
        metavar="RULE", accepts="Sequence[str]",
    )  # fmt: skip
    max_drop: float = opt(0.005, "exit code 7 when AP or top-1 drops by more than X")
    keep_plans: bool = opt(False, "exit code 10 when a plan of OLD does not load in NEW")
    strict: bool = opt(False, "exit code 9 when a gate cannot be judged")
    out: Path | None = opt(
        None, "folder for the report (report.html, report.md) and upgrade.json", flags="-o --out", parse=Path,
        group="Output",
    )  # fmt: skip
    overwrite: bool = opt(False, "overwrite existing files", group="Output")
