"""No text and no pattern makes redaction hang. How fast it is, bench/redaction.py measures."""

from __future__ import annotations

import pytest

from bench import redaction
from bench.redaction import ADVERSARIAL, seconds
from breakwater.redaction.rules.redact import Redactor
from breakwater.redaction.settings import RedactionRules
from tests.tables import each_row

SIZE = 200_000
DEFAULT = Redactor.compile(RedactionRules())
ROOMY = Redactor.compile(RedactionRules(max_value_length=2 * SIZE))


LIMIT_S = 5.0
"""Of CPU time. On a quiet machine each takes a fiftieth of a second; what is quadratic takes minutes."""


@pytest.mark.parametrize("what", ADVERSARIAL)
def test_long_texts_made_to_be_slow_do_not_hang(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "SIZE", SIZE)
    document = ADVERSARIAL[what]()
    assert seconds(lambda: ROOMY.json(document), runs=1) < LIMIT_S
    assert seconds(lambda: DEFAULT.json(document), runs=1) < LIMIT_S


@each_row("pattern", ["(x+x+)+y", "(x*)*y|q", "(x|x)*x(x|x){12}y", "x(?:[^z]*z)?", "(?:x?){30}x{30}y"])
def test_no_pattern_hangs_on_any_text(pattern: str) -> None:
    redactor = Redactor.compile(RedactionRules(patterns=(pattern,)))
    assert seconds(lambda: redactor.json(["x" * 40_000, "x" * 1_000]), runs=1) < LIMIT_S
