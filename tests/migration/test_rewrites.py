"""A construct is found in whatever form it is written."""

from __future__ import annotations

from migration.rewrites import finds, rewrites, sample
from trt_engine.verbs.migrate import cpp_source
from trt_engine.verbs.migrate.rules import rules_between

RULES = rules_between((8, 6), (11, 4))


def missed(count: int) -> list[tuple[str, str, str]]:
    cases = [case for case in rewrites(RULES) if cpp_source.is_available() or not case.file.endswith(".cpp")]
    chosen = sample(cases, count, seed=32) if count else cases
    return [(case.file, case.form, case.name) for case in chosen if not finds(case, RULES)]


def test_a_construct_is_found_in_every_form_of_a_sample() -> None:
    assert missed(350) == []
