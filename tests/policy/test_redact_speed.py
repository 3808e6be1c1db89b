"""How long redaction takes, in CPU time: the clock on the wall also counts what others do."""

from __future__ import annotations

import pytest

from breakwater.policy.redact import RedactionRules, Redactor
from tests.bench.redaction import ADVERSARIAL, SIZE, TYPICAL, seconds

DEFAULT = Redactor.compile(RedactionRules())
ROOMY = Redactor.compile(RedactionRules(max_value_length=2 * SIZE))


LIMIT_S = 2.5
"""On a machine with nothing else to do each takes less than one, as tests/bench/redaction.py shows."""


@pytest.mark.parametrize("what", ADVERSARIAL)
def test_ten_megabytes_made_to_be_slow_take_about_a_second_at_most(what: str) -> None:
    document = ADVERSARIAL[what]()
    assert any(seconds(lambda: ROOMY.json(document), runs=1) < LIMIT_S for _ in range(3))
    assert any(seconds(lambda: DEFAULT.json(document), runs=1) < LIMIT_S for _ in range(3))


def test_a_typical_record_takes_a_fraction_of_a_millisecond() -> None:
    assert seconds(lambda: [DEFAULT.json(TYPICAL) for _ in range(100)]) / 100 < 0.0005


@pytest.mark.parametrize("pattern", ["(x+x+)+y", "(x*)*y|q", "(x|x)*x(x|x){12}y", "x(?:[^z]*z)?", "(?:x?){30}x{30}y"])
def test_no_pattern_hangs_on_any_text(pattern: str) -> None:
    redactor = Redactor.compile(RedactionRules(patterns=(pattern,)))
    assert seconds(lambda: redactor.json(["x" * 40_000, "x" * 1_000]), runs=1) < 5
