"""Whatever the document and wherever a secret is planted in it, nothing of the secret is left."""

from __future__ import annotations

import json
from urllib.parse import quote

from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import JsonValue

from breakwater.redaction.rules.redact import Redactor
from breakwater.redaction.settings import RedactionRules
from tests.redaction.sample_secrets import SECRETS

DEFAULT = Redactor.compile(RedactionRules())
SHORT = Redactor.compile(RedactionRules(max_value_length=40))
ODD = Redactor.compile(
    RedactionRules(placeholder="<hidden, by policy>", fields=("name",), patterns=(r"\d{4,}", "polic."))
)
REDACTORS = (DEFAULT, SHORT, ODD)

MARK = "hunter2-Zx9"
FIELDS = (
    "password",
    "API_KEY",
    "apiKey",
    "x-api-key",
    "Authorization",
    "client secret",
    "token",
    "ssn",
    "dbPasswd",
    "key",
)
TEXT = st.text(max_size=30)
CALM = st.text(alphabet="abcdefghijklm nopqrstuvwxyz.,!?\n\tÄé日🙂", max_size=60)
NUMBER = st.integers(-(10**11), 10**11) | st.floats(-1e11, 1e11) | st.sampled_from((1e300, float("inf"), 10**30))
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)
PIECES = (
    *SECRETS, MARK, "password", "token", "key", "=", ": ", '"', "'", "\\", "\\n", "{", "}", "[", "]", ",", " ", "\n",
    "[REDACTED]", "<hidden, by policy>", "…", "%40", "%25", "\\u0040", "://", "@", "4111 ", "-----BEGIN ", "é", "_",
    "--",
)  # fmt: skip
SEEDED = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def around(value: st.SearchStrategy[JsonValue]) -> st.SearchStrategy[JsonValue]:
    """Documents that hold the value: deep inside, next to others, in JSON in a text."""
    return st.recursive(
        value,
        lambda inner: st.one_of(
            st.builds(lambda one, other: [other, one], inner, CALM),
            st.builds(lambda one, name: {name: one, "tokens": 3}, inner, CALM),
            st.builds(lambda one, indent: json.dumps({"a": one}, indent=indent), inner, st.sampled_from((None, 2))),
            st.builds(lambda one: json.dumps([one], ensure_ascii=False), inner),
        ),
        max_leaves=1,
    )


def assert_gone(document: JsonValue, *secrets: str) -> None:
    for redactor in REDACTORS:
        redacted = redactor.json(document)
        shown = json.dumps(redacted, ensure_ascii=False)
        for secret in secrets:
            assert secret not in shown
            assert json.dumps(secret)[1:-1] not in shown
        assert redactor.json(redacted) == redacted


@given(secret=st.sampled_from(SECRETS), before=CALM, after=CALM, data=st.data())
def test_no_known_form_survives_in_any_text(secret: str, before: str, after: str, data: st.DataObject) -> None:
    document = data.draw(around(st.just(f"{before} {secret} {after}")))
    assert_gone(document, secret)


@given(field=st.sampled_from(FIELDS), data=st.data())
def test_no_value_survives_under_a_secret_name(field: str, data: st.DataObject) -> None:
    value = data.draw(st.sampled_from((MARK, [MARK], {"a": {"b": [MARK]}}, json.dumps({"a": MARK}))))
    assert_gone(data.draw(around(st.just({"n": 1, field: value}))), MARK)


@given(secret=st.sampled_from(SECRETS), before=CALM, data=st.data())
def test_no_secret_survives_in_a_key(secret: str, before: str, data: st.DataObject) -> None:
    assert_gone(data.draw(around(st.just({f"{before} {secret}": 1, secret: [2], "other": secret}))), secret)


@given(
    field=st.sampled_from(FIELDS[:9]), separator=st.sampled_from(("=", ": ", " = ", ":")), before=CALM, data=st.data()
)
def test_no_value_survives_behind_a_name_in_a_text(
    field: str, separator: str, before: str, data: st.DataObject
) -> None:
    text = data.draw(
        st.sampled_from(
            (
                f"{before} {field}{separator}{MARK} ",
                f"{before} {field}{separator}'x {MARK}'",
                f'{before} "{field}": "x \\" {MARK}", ',
                f'{before} "{field}": ["{MARK}", {{',
                f"{before} {json.dumps(json.dumps({field: 'x ' + MARK}))[1:]} ",
                f"{before} {json.dumps(json.dumps(json.dumps({field: 'x ' + MARK})))[1:]} ",
            )
        )
    )
    assert_gone(data.draw(around(st.just(text))), MARK)


@given(secret=st.sampled_from([s for s in SECRETS if "@" in s or "/" in s or "=" in s or " " in s]), data=st.data())
def test_no_secret_survives_escaped_as_in_a_url(secret: str, data: st.DataObject) -> None:
    escaped = quote(secret, safe="")
    document = data.draw(around(st.sampled_from((f"q={escaped}", f"q={quote(escaped, safe='')}"))))
    assert_gone(document, escaped, secret)


@given(secret=st.sampled_from(SECRETS), data=st.data())
def test_no_secret_survives_in_part_where_the_text_is_cut(secret: str, data: st.DataObject) -> None:
    before = data.draw(st.integers(0, 80))
    text = "." * before + " " + secret + " " + data.draw(st.sampled_from(("x " * 20_000, "x" * 50, "")))
    shown = SHORT.text(text)
    assert len(shown) <= 40 + len("[REDACTED]") + 1
    assert secret[: max(10, len(secret) // 2)] not in shown
    assert secret[-8:] not in shown
    assert SHORT.text(shown) == shown


@given(ANY)
@example({"a": "4111-1111-1111-1111" + "1" * 30})
def test_redaction_twice_is_once(value: JsonValue) -> None:
    for redactor in REDACTORS:
        once = redactor.json(value)
        assert json.dumps(redactor.json(once)) == json.dumps(once)


@given(SEEDED)
def test_redaction_twice_is_once_in_texts_full_of_what_it_looks_for(text: str) -> None:
    for redactor in REDACTORS:
        once = redactor.text(text)
        assert redactor.text(once) == once
        in_json = redactor.json({"a": text})
        assert redactor.json(in_json) == in_json


CALM_DOCUMENT = st.recursive(
    st.none() | st.booleans() | NUMBER | CALM | CALM.map(json.dumps) | CALM.map(lambda text: json.dumps({"a": [text]})),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(CALM.map(lambda name: f"n_{name}_n"), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(CALM_DOCUMENT)
def test_what_holds_no_secret_stays_as_it_is(value: JsonValue) -> None:
    assert json.dumps(DEFAULT.json(value)) == json.dumps(value)


@given(st.dictionaries(CALM.map(lambda name: f"n_{name}_n"), NUMBER | st.booleans()))
def test_numbers_keep_their_value_and_type(value: dict[str, JsonValue]) -> None:
    kept = DEFAULT.json(value)
    assert isinstance(kept, dict)
    assert [(type(number), repr(number)) for number in kept.values()] == [
        (type(number), repr(number)) for number in value.values()
    ]
