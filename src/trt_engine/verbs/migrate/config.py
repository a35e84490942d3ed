"""Settings of `migrate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trt_engine.config.settings import Config, opt


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrateConfig(Config):
    """Settings of a migration: between which releases, what is changed and written."""

    from_release: str = opt("8.6", "the release the files were written for", flags="--from", metavar="RELEASE")
    to_release: str = opt("11.4", "the release to migrate to, as 10.x or 11.4", flags="--to", metavar="RELEASE")
    rules: tuple[str, ...] = opt((), "only this rule", flags="--rule", parse=str, multiple=True, metavar="RULE")
    exclude: tuple[str, ...] = opt(
        (), "skip files and folders of this name or pattern", parse=str, multiple=True, metavar="PATTERN", group="Input"
    )
    diff: bool = opt(False, "show the changes of `--fix` as a diff, and write nothing", flags="--diff")
    fix: bool = opt(False, "make the mechanical changes, and show them as a diff", flags="--fix")
    sarif: Path | None = opt(
        None, "also write the findings to this file as SARIF 2.1.0", parse=Path, metavar="FILE", group="Output"
    )
