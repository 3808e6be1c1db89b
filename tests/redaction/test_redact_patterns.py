from __future__ import annotations

import pytest
from pydantic import ValidationError

from breakwater.redaction.rules.redact import Redactor
from breakwater.redaction.settings import RedactionRules
from tests.tables import each_row


@each_row(
    ("pattern", "words"),
    [
        ("(", "is not a regular expression of RE2's syntax: missing )"),
        ("[[:foo:]]", "is not a regular expression"),
        ("\ud800", "is not a regular expression"),
        ("x(?=y)", "looks around, with (?=, which RE2 can't; match the surroundings"),
        ("(?<!y)x", "looks around, with (?<!"),
        (r"(a)\1", "refers back to a group, which RE2 can't; write out"),
        ("(?P<n>a)(?P=n)", "refers back to a group"),
        (r"a\Z", r"has \Z, which is \z in RE2"),
        ("a{2000}", "is too large"),
        (r"\p{L}{900}", "is too large"),
        (".{1,900}", "is too large; lower its {counts}"),
        ("x*", "also matches where there is nothing to hide"),
        ("a|", "also matches where there is nothing"),
        (r"\b", "also matches where there is nothing"),
        ("^|ab", "also matches where there is nothing"),
        (r"(?:foo)?\B", "also matches where there is nothing"),
        ("(?-m)^a", "switches the flag m off"),
    ],
)
def test_a_pattern_that_cannot_be_used_is_refused_in_words(pattern: str, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RedactionRules(patterns=("fine", pattern))
    assert words in str(caught.value)


@each_row("name", ["", " - ", "a\nb", "\ud800"])
def test_a_field_that_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="is no name of a field"):
        RedactionRules(fields=(name,))


def test_a_placeholder_must_be_seen() -> None:
    with pytest.raises(ValidationError):
        RedactionRules(placeholder="")


@each_row("placeholder", ["***", "<hidden>", "{}", "[", "é\\", "a b", "1234"])
@each_row("pattern", [r"\w+", r"[A-Z]", r"(?s).+", r"\W", "^.", "[^x]{3,}"])
def test_patterns_that_match_the_placeholder_do_not_nest_it(pattern: str, placeholder: str) -> None:
    redactor = Redactor.compile(RedactionRules(patterns=(pattern,), placeholder=placeholder))
    once = redactor.text("password=abc, Some more: bob@example.com")
    assert redactor.text(once) == once
    assert len(once) < 200


def test_a_long_text_is_seen_in_stretches_that_part_no_match() -> None:
    redactor = Redactor.compile(
        RedactionRules(patterns=("START[a-z ]+END", "^first", r"last$"), max_value_length=10**6)
    )
    for before in (65_000, 65_530, 65_536, 49_152, 49_150, 131_072):
        text = "first" + "." * before + "START" + "x " * 5_000 + "END" + "." * 1_000 + "last"
        assert redactor.text(text) == "[REDACTED]" + "." * before + "[REDACTED]" + "." * 1_000 + "[REDACTED]"
    assert redactor.text("." * 65_536 + "last" + "." * 65_536 + "first").count("[REDACTED]") == 0
