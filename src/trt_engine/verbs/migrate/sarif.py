"""Findings as SARIF 2.1.0, which code hosts show beside the lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trt_engine.environment import distribution_version
from trt_engine.records.migrate import MigrationFinding
from trt_engine.verbs.migrate.rules import all_rules


def sarif_log(findings: Sequence[MigrationFinding]) -> dict[str, Any]:
    """A SARIF log of one run: the rules that found something, and a result for each finding."""
    used = {item.rule for item in findings}
    rules = [rule for rule in all_rules() if rule.id in used]
    index = {rule.id: at for at, rule in enumerate(rules)}
    driver = {
        "name": "trt-engine migrate",
        "version": distribution_version("trt-engine") or "unknown",
        "rules": [
            {
                "id": rule.id,
                "shortDescription": {"text": f"{rule.kind} since TensorRT {rule.since}"},
                "fullDescription": {"text": rule.why},
                "help": {"text": f"{rule.replacement}\nSource: {rule.source}"},
                "defaultConfiguration": {"level": rule.severity},
            }
            for rule in rules
        ],
    }
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": [_result(item, index[item.rule]) for item in findings]}],
    }


def _result(finding: MigrationFinding, index: int) -> dict[str, Any]:
    path = Path(finding.file)
    uri = path.as_uri() if path.is_absolute() else quote(path.as_posix())
    region = {"startLine": finding.line, "startColumn": finding.column}
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": finding.severity,
        "message": {
            "text": f"`{finding.text}`: {finding.why} (TensorRT {finding.since}); instead: {finding.replacement}"
        },
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}],
    }
