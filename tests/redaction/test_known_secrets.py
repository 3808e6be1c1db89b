"""Secrets whose values are known."""

import json

from breakwater.redaction.rules.redact import KnownSecrets
from tests.tables import each_row

TWO_LINES = "first-half-123\nsecond-half-456"


@each_row(
    ("secrets", "text", "hidden"),
    [
        ([TWO_LINES], f"token={TWO_LINES}, twice {TWO_LINES}", "token=*, twice *"),
        ([TWO_LINES], "first-half-123\r\nsecond-half-456", "*"),
        ([TWO_LINES], r"first-half-123\nsecond-half-456", "*"),
        ([TWO_LINES], "only second-half-456 of it", "only * of it"),
        (["a\nb\nc\nd\ne"], "a\nb\nc\nd\ne, but not a, b", "*, but not a, b"),
        (["longer-and-longer", "longer-and"], "longer-and-longer longer-and", "* *"),
        (["a.c+d(e[f"], "a.c+d(e[f abc+d(e[f", "* abc+d(e[f"),
        (["0", "x", "ab1"], "30 done, x times ab1", "30 done, x times ab1"),
        (["none", "EMPTY", "8000"], "none is EMPTY at 8000", "none is EMPTY at 8000"),
        (["hunter2"], "hunter2, not hunter23 or bighunter2", "*, not hunter23 or bighunter2"),
        ([" \n "], "a \n b", "a \n b"),
        ([], "as it is", "as it is"),
    ],
)
def test_whole_secrets_and_their_lines_are_hidden_and_words_are_not(secrets: list[str], text: str, hidden: str) -> None:
    assert KnownSecrets(secrets, "*").hide(text) == hidden


@each_row(
    ("text", "hidden"),
    [
        ("alf-123\nsecond-half-456 is left", " is left"),
        ("456 is left", " is left"),
        ("irst-half-123\nsecond", ""),
        (f"of it {TWO_LINES}", "of it *"),
    ],
)
def test_a_secret_that_begins_before_the_text_is_hidden(text: str, hidden: str) -> None:
    assert KnownSecrets([TWO_LINES], "*").hide_in_tail(text) == hidden


@each_row("secret", ["sk-planted-0123456789", 'with "quotes" and \\', "schlüssel-0123", TWO_LINES, "tab\there-0123"])
def test_a_secret_is_found_anywhere_in_json(secret: str) -> None:
    value = {"a": [{"b": f"x {secret} y", secret: 1}, 2, None], "c": 10**400}
    hidden = {"a": [{"b": "x * y", "*": 1}, 2, None], "c": 10**400}
    known = KnownSecrets([secret], "*")
    assert known.hide_in(value) == hidden
    assert known.hide_in(value["a"]) == hidden["a"]
    clean = {"a": ["x", {"b": "sk-other"}]}
    assert known.hide_in(clean) == clean


@each_row("secret", ["sk-planted/0123456789", 'with "quotes" and \\', "schlüssel-0123", TWO_LINES, "tab\there-0123"])
def test_a_secret_is_found_in_json_however_it_was_written(secret: str) -> None:
    known = KnownSecrets([secret], "*")
    value, hidden = {"a": [f"x {secret} y"]}, {"a": ["x * y"]}
    escaped = "".join(f"\\u{ord(sign):04x}" for sign in secret)
    for raw in (
        json.dumps(value).encode(),
        json.dumps(value, ensure_ascii=False).encode(),
        json.dumps(value).replace("/", "\\/").encode(),
        f'{{"a": ["x {escaped} y"]}}'.encode(),
        json.dumps(value).encode("utf-16"),
    ):
        assert known.hide_in_parsed(raw, value) == hidden, raw
    clean = {"a": 'x "y"'}
    assert known.hide_in_parsed(json.dumps(clean).encode(), clean) == clean
