from __future__ import annotations

import json

import pytest
from pydantic import JsonValue

from breakwater.redaction.rules.redact import Redactor
from breakwater.redaction.settings import RedactionRules
from tests.redaction.sample_secrets import SECRETS
from tests.tables import each_row

BUILT_IN = Redactor.compile(RedactionRules())
HIDDEN = "[REDACTED]"


def test_the_built_in_patterns_are_compiled_once_for_all_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("re2.compile", None)
    redactor = Redactor.compile(RedactionRules(placeholder="[removed]", max_value_length=99))
    assert redactor.text("password=hunter22") == "password=[removed]"


@each_row("secret", SECRETS)
def test_known_forms_of_secrets_are_taken_out_wherever_they_stand(secret: str) -> None:
    hidden = BUILT_IN.json({"note": [f"use {secret} please", {"deep": secret}], secret: 1})
    assert secret not in json.dumps(hidden, ensure_ascii=False)
    assert HIDDEN in str(hidden)
    assert BUILT_IN.text(f"({secret})").startswith("(")
    assert secret not in BUILT_IN.text(f"as_{secret}\\n{secret}")


@each_row(
    "text",
    [
        "order 4111 1111 1111 1112 of 2026-11-21",  # not a card's number by Luhn's formula
        "0.4111111111111111",
        "1732233600000 and 1795000000123456789",  # a clock's milliseconds and nanoseconds
        "2019 2020 2021 2022 2023 2024 2025 2026",
        "id 5f4111111111111111aa, 12-4111111111111111",
        "call +49 30 123456, room 123-45-678",
        "ssh://git@host/path, http://a.com:80/x@y, user@host",
        "risk-assessment-of-the-whole-thing, sk-learn, a basic understanding, the bearer of bad news",
        "max_tokens=5, token_count: 3, pad_token: x, input_tokens=812, next_page_token=9",
        "The key: be patient. sort(xs, key=len). auth: none. Email: by Friday.",
        "def login(password: str, token: None) -> bool: ...",
        "std::secret::value, password:\n  the next line, or a heading behind it\n\npassword:\nUsername:\n",
        "pass: 12, fail: 3, pass: yes, bypass=1, compass: 12345, trespass=2, gpio_pin=13, pins: 4711, spin=1234",
        "- name: LOG_LEVEL\n  value: debug\n- name: password is required",
        "IBAN GB82 WEST 1234 5698 7654 32",
        "100%25 sure, a%20b, \\u0041 and \\x42",
        "日本語のテキスト、🙂 \ud800",
        '{"a":1,   "b": [true, null, 1.50], "note": "the key=", "c": "d"}',
        '{"a":"\\u0041\\n", "b":1e3}',
        '{"user-key": "x", "tokens": {"token_count": 3}}',
    ],
)
def test_what_is_no_secret_stays_byte_for_byte(text: str) -> None:
    assert BUILT_IN.json(text) == text
    assert BUILT_IN.json({"a": [text]}) == {"a": [text]}


@each_row(
    ("text", "hidden"),
    [
        ("password=hunter2 n=1", "password=[REDACTED] n=1"),
        ("api_key: abc def", "api_key: [REDACTED] def"),
        ('"token":"a\\"b c", "x": 1', '"token":"[REDACTED]", "x": 1'),
        ("{'password': 'a b', 'n': 1}", "{'password': '[REDACTED]', 'n': 1}"),
        (
            'arguments {\\"password\\": \\"a b\\", \\"n\\": 1}',
            'arguments {\\"password\\": \\"[REDACTED]\\", \\"n\\": 1}',
        ),
        ('bad: "auth": ["a", {"b": 1}], "n": 2', 'bad: "auth": [REDACTED], "n": 2'),
        ('cut: "auth": ["a", {"b"', 'cut: "auth": [REDACTED]'),
        ('cut: "password": "hunt', 'cut: "password": "[REDACTED]'),
        ("OPENAI_API_KEY=abc DB_PASSWORD='x y'", "OPENAI_API_KEY=[REDACTED] DB_PASSWORD='[REDACTED]'"),
        ('os.environ["API_KEY"] = "xyz"', 'os.environ["API_KEY"] = "[REDACTED]"'),
        ('login(password=b"x y", auth=("u", "p"))', 'login(password=b"[REDACTED]", auth=[REDACTED])'),
        ("password=['a b', 'c'], n=1", "password=[REDACTED], n=1"),
        ("run --token abc --n 5 --db-password=x", "run --token [REDACTED] --n 5 --db-password=[REDACTED]"),
        ("Authorization: Basic dXNlcjpwYXNz was refused", "Authorization: [REDACTED] was refused"),
        ('curl -H "Authorization: Bearer abc" https://x', 'curl -H "Authorization: [REDACTED]" https://x'),
        ('Authorization: Digest username="a", response="b"\nHost: x', "Authorization: [REDACTED]\nHost: x"),
        ("Set-Cookie: a=b; c=d\nHost: x", "Set-Cookie: [REDACTED]\nHost: x"),
        ("passphrase: correct horse battery", "passphrase: [REDACTED]"),
        ("postgres://user:p@ss@host/db", "postgres://[REDACTED]@host/db"),
        ("https://x/?api_key=a1&n=3&token=b2", "https://x/?api_key=[REDACTED]&n=3&token=[REDACTED]"),
        ("https://x/?key=a1&X-Amz-Signature=b2", "https://x/?key=[REDACTED]&X-Amz-Signature=[REDACTED]"),
        ("AccountName=a;AccountKey=abc+/==;Suffix=x", "AccountName=a;AccountKey=[REDACTED];Suffix=x"),
        ("**Password:** hunter2, **Token**: a1", "**Password:** [REDACTED], **Token**: [REDACTED]"),
        ("password: `two words` n", "password: `[REDACTED]` n"),
        ("Password:\nhunter2\nnext", "Password:\n[REDACTED]\nnext"),
        ("password: |\n  hunter2", "password: |\n  [REDACTED]"),
        ('password:\n  "two words"', 'password:\n  "[REDACTED]"'),
        (
            "pass=a1 pw: hunter2 DB_PASS=x dbPass=y pin: 4711",
            "pass=[REDACTED] pw: [REDACTED] DB_PASS=[REDACTED] dbPass=[REDACTED] pin: [REDACTED]",
        ),
        ("api_key_2=a1 PASSWORD2: b bearer: c", "api_key_2=[REDACTED] PASSWORD2: [REDACTED] bearer: [REDACTED]"),
        ("Ocp-Apim-Subscription-Key: a1", "Ocp-Apim-Subscription-Key: [REDACTED]"),
        ('see {"name": "password", "value": "a b", "n": 1}', 'see {"name": "password", "value": "[REDACTED]", "n": 1}'),
        ('see {"value": "a b", "name": "api_key"} n', 'see {"value": "[REDACTED]", "name": "api_key"} n'),
        ('<add key="DbPassword" value="a b"/>', '<add key="DbPassword" value="[REDACTED]"/>'),
        ("- name: DB_PASS\n  value: a1\n- name: x", "- name: DB_PASS\n  value: [REDACTED]\n- name: x"),
        ("phone=+1 (555) 123 4567 ok; ssn: 123 45 6789", "phone=[REDACTED] ok; ssn: [REDACTED]"),
        ("card 4111 1111 1111 1111 123 Main St", "card [REDACTED] 123 Main St"),
        ("card_secret: 4111 1111 1111 1111", "card_secret: [REDACTED]"),
        ("private_key: -----BEGIN PRIVATE KEY-----\nMIIE", "private_key: [REDACTED]"),
        ("mail bob%40example.com", "mail [REDACTED]"),
        ("mail bob%2540example.com", "mail [REDACTED]"),
        ("mail bob\\u0040example.com", "mail [REDACTED]"),
        ("a%20b bob@example.com", "a%20b [REDACTED]"),
    ],
)
def test_values_behind_secret_names_are_hidden_in_texts_and_the_names_stay(text: str, hidden: str) -> None:
    assert BUILT_IN.text(text) == hidden
    assert BUILT_IN.json([text]) == [hidden]
    assert BUILT_IN.text(hidden) == hidden


def test_values_of_secret_fields_are_replaced_whatever_they_are() -> None:
    value: JsonValue = {
        "API_KEY": "x",
        "apiKey": 1.5,
        "Api-Key": False,
        "x api.key": {"a": 1},
        "password": 5,
        "nested": [{"Authorization": ["a"]}, {"key": 1, "auth": 2, "email": 3, "phone": 4, "ssn": 5}],
        "dbPassword": "",
        "token": None,
        "tokens": 7,
        "max_tokens": 8,
        "pad_token": 9,
        "monkey": 10,
        "author": 11,
    }
    assert BUILT_IN.json(value) == {
        "API_KEY": HIDDEN,
        "apiKey": HIDDEN,
        "Api-Key": HIDDEN,
        "x api.key": HIDDEN,
        "password": HIDDEN,
        "nested": [{"Authorization": HIDDEN}, dict.fromkeys(("key", "auth", "email", "phone", "ssn"), HIDDEN)],
        "dbPassword": HIDDEN,
        "token": None,
        "tokens": 7,
        "max_tokens": 8,
        "pad_token": 9,
        "monkey": 10,
        "author": 11,
    }


def test_a_field_may_name_a_secret_that_stands_beside_it() -> None:
    headers: JsonValue = [
        {"name": "X-Api-Key", "value": "x"},
        {"Name": "Cookie", "Values": ["a=b"]},
        {"key": "db_pass", "value": 3},
        {"name": "Host", "value": "example.com"},
        ["Authorization", "x"],
        ["Host", "example.com"],
    ]
    assert BUILT_IN.json({"headers": headers, "required": ["password", "name"]}) == {
        "headers": [
            {"name": "X-Api-Key", "value": HIDDEN},
            {"Name": "Cookie", "Values": HIDDEN},
            {"key": HIDDEN, "value": HIDDEN},
            {"name": "Host", "value": "example.com"},
            ["Authorization", HIDDEN],
            ["Host", "example.com"],
        ],
        "required": ["password", "name"],
    }


def test_words_are_names_of_secrets_as_the_last_word_of_a_name_and_not_with_a_boolean() -> None:
    value: JsonValue = {"pass": True, "pw": "x", "PIN": 4711, "userPass": "y", "DB_PASS2": "z", "api_key_2": "k"}
    kept: JsonValue = {"bypass": "x", "gpio_pin": 4, "pass_count": 3, "key1": "a", "spw": 1}
    hidden = dict.fromkeys(value, HIDDEN) | {"pass": True}
    assert BUILT_IN.json({**value, **kept}) == {**hidden, **kept}


@each_row(
    ("text", "hidden"),
    [
        ("pay GB82 WEST 1234 5698 7654 32 today", "pay [REDACTED] today"),
        ("iban DE89370400440532013000.", "iban [REDACTED]."),
        ("call +49 30 123456, (555) 123-4567 or 0171 2345678", "call [REDACTED], [REDACTED] or [REDACTED]"),
        ("tel +1-555-123-4567x", "tel +1-555-123-4567x"),
        ("GB82 WEST 1234 5698 7654 33, XX82 WEST 1234", "GB82 WEST 1234 5698 7654 33, XX82 WEST 1234"),
        ("2026-11-22T10:00:00Z, 10.0.0.12, 1732233600000, +1", "2026-11-22T10:00:00Z, 10.0.0.12, 1732233600000, +1"),
    ],
)
def test_telephone_numbers_and_ibans_are_hidden_where_that_is_switched_on(text: str, hidden: str) -> None:
    alone = Redactor.compile(RedactionRules(built_in=False, forms=("iban", "phone")))
    for redactor in (alone, Redactor.compile(RedactionRules(forms=("phone", "iban")))):
        assert redactor.text(text) == hidden
        assert redactor.json({"a": [text]}) == {"a": [hidden]}
    assert BUILT_IN.text(text) == text


def test_own_rules_add_to_the_built_in_ones() -> None:
    rules = RedactionRules(
        fields=("Kunden-Nr", "NAME", "größe"), patterns=(r"\bP-\d+$", "(?i)geheim"), placeholder="***"
    )
    redactor = Redactor.compile(rules)
    assert redactor.json({"kundenNr": "7", "name": "Ann", "GRÖSSE": 1, "Größe": 2, "secret": "s", "names": ["a"]}) == {
        "kundenNr": "***",
        "name": "***",
        "GRÖSSE": 1,
        "Größe": "***",
        "secret": "***",
        "names": ["a"],
    }
    assert redactor.json(["see P-17", "P-17 is it", "streng GEHEIM!"]) == ["see ***", "P-17 is it", "streng ***!"]
    assert redactor.text('"kunden_nr": 7, kunden_nr=8, kunden_nr: 9') == '"kunden_nr": ***, kunden_nr=***, kunden_nr: 9'
    assert redactor.json('{"GRÖßE": 5}') == '{"GRÖßE": "***"}'


def test_own_patterns_see_the_edges_of_each_text_and_numbers_as_they_are_written() -> None:
    redactor = Redactor.compile(RedactionRules(patterns=(r"\Aann\z", r"^bob$", r"\b\d{9}\b", r"1\.5")))
    assert redactor.json(["ann", "anne", "x\nann", "bob", "x\nbob"]) == [HIDDEN, "anne", "x\nann", HIDDEN, "x\nbob"]
    assert redactor.json([123456789, 12345678, -123456789, 1.5, 2.5, True]) == [
        HIDDEN, 12345678, HIDDEN, HIDDEN, 2.5, True,
    ]  # fmt: skip


def test_numbers_stay_unless_they_are_those_of_cards() -> None:
    numbers: JsonValue = [1234567890123456789, 1732233600123, 0.5, -1, True, 10**40, 1e300, None]
    kept = BUILT_IN.json(numbers)
    assert isinstance(kept, list)
    assert [(type(number), number) for number in kept] == [(type(number), number) for number in numbers]
    assert BUILT_IN.json([4111111111111111, 4111111111111112, 4111111111111111.0]) == [HIDDEN, 4111111111111112, HIDDEN]
    series: JsonValue = [1732233600000 + number for number in range(10_000)]
    assert BUILT_IN.json([series, [*series, 4111111111111111]]) == [series, [*series, HIDDEN]]
    assert BUILT_IN.json([10**5000, [10**5000, 1]]) == [HIDDEN, [HIDDEN, 1]]
    assert str(BUILT_IN.json([float("nan"), 4111111111111111, float("-inf")])) == f"[nan, '{HIDDEN}', -inf]"


def test_numbers_are_not_cut() -> None:
    at_ns = 1732233600123456789
    numbers: JsonValue = {"at_ns": at_ns, "series": [at_ns], "mixed": [at_ns, True]}
    assert Redactor.compile(RedactionRules(max_value_length=16)).json(numbers) == numbers


def test_fields_are_hidden_in_json_that_stands_in_a_text_too() -> None:
    call = {"function": {"name": "login", "arguments": '{"user": "ann", "password": "hunter2"}'}}
    hidden = BUILT_IN.json({"tool_calls": [call], "sk-abcdefghijklmnopqrstuv": 1})
    assert "hunter2" not in str(hidden)
    assert "ann" in str(hidden)
    assert "sk-abc" not in str(hidden)
    assert BUILT_IN.text("{not json") == "{not json"
    assert BUILT_IN.json("[1, 2") == "[1, 2"


@each_row(
    "text",
    [
        '{"pass\\u0077ord": "hunter2"}',
        '{"note": "\\u0070assword=hunter2"}',
        '{"password": ["hunter2"], "password": null}',
        '[{"a": {"t-o-k-e-n": {"b": ["hunter2"]}}}]',
        ' \n{"a": "{\\"b\\": \\"{\\\\\\"token\\\\\\": [\\\\\\"hunter2\\\\\\"]}\\"}"}',
        'bad arguments: {"a": "{\\"b\\": \\"{\\\\\\"token\\\\\\": \\\\\\"hunter2\\\\\\"}\\"}"',
        '```json\n{"password": {"a": ["hunter2"]}}\n```',
        'data: {"password": "x\\"hunter2"}\n\n',
    ],
)
def test_no_way_to_write_json_lets_a_secret_pass(text: str) -> None:
    for value in (text, {"output": [text]}, json.dumps({"text": text}), json.dumps([json.dumps({"text": text})])):
        assert "hunter2" not in str(BUILT_IN.json(value))
    assert "hunter2" not in BUILT_IN.text(text)


def test_json_in_json_is_parsed_to_a_bound_and_redacted_as_text_beyond() -> None:
    text = json.dumps({"password": "hunter2", "note": "kept"})
    for _ in range(6):
        text = json.dumps([text])
    hidden = BUILT_IN.json(text)
    assert isinstance(hidden, str)
    assert "hunter2" not in hidden
    assert "kept" in hidden
    for _ in range(5):
        text = json.dumps([text])
    assert "hunter2" not in str(BUILT_IN.json(text))


def test_keys_that_hold_secrets_stay_apart_and_in_order() -> None:
    keys = {"sk-aaaaaaaaaaaaaaaaaaaa": 1, "a": 2, "mail bob@example.com": 3, "sk-bbbbbbbbbbbbbbbbbbbb": 4, HIDDEN: 5}
    assert list(BUILT_IN.json([keys])[0].items()) == [  # type: ignore[index, union-attr]
        (HIDDEN, 1), ("a", 2), (f"mail {HIDDEN}", 3), (f"{HIDDEN} (2)", 4), (f"{HIDDEN} (3)", 5),
    ]  # fmt: skip


def test_the_given_value_is_not_changed() -> None:
    value: JsonValue = {"password": "x", "list": ["bob@example.com", {"sk-aaaaaaaaaaaaaaaaaaaa": "bob@example.com"}]}
    before = json.dumps(value)
    BUILT_IN.json(value)
    assert json.dumps(value) == before


def test_long_texts_are_cut_after_redaction() -> None:
    redactor = Redactor.compile(RedactionRules(max_value_length=16))
    assert redactor.json("x" * 16) == "x" * 16
    assert redactor.json(["x" * 17, "é" * 17]) == ["x" * 16 + "…", "é" * 16 + "…"]
    assert redactor.text("mail bob@example.com soon") == "mail [REDACTED]…"
    assert redactor.text("0123456789ab bob@example.com") == "0123456789ab [REDACTED]"


@each_row("secret", SECRETS)
@each_row("before", range(4, 60, 5))
def test_a_secret_that_the_cut_would_part_does_not_show_in_part(secret: str, before: int) -> None:
    redactor = Redactor.compile(RedactionRules(max_value_length=60))
    shown = redactor.text("." * before + " " + secret + " " + "." * 100_000)
    assert shown == redactor.text(shown)
    assert secret[:12] not in shown
    assert secret[-6:] not in shown
    assert len(shown) <= 60 + len(HIDDEN) + 1


def test_a_secret_at_the_end_of_what_is_looked_at_does_not_show() -> None:
    redactor = Redactor.compile(RedactionRules(max_value_length=1000))
    key = f"-----BEGIN PRIVATE KEY-----\n{'A' * 9000}\n-----END PRIVATE KEY-----"
    # Redaction shortens what is looked at by far more than the limit; what comes behind it still belongs to the rest.
    shown = redactor.text(f"{key} {key} bob@exam" + "x" * 50_000 + "ple.com")
    assert "bob" not in shown
    assert "AAA" not in shown


def test_what_is_too_deep_is_hidden() -> None:
    value: JsonValue = "x"
    for _ in range(100_000):
        value = [value]
    hidden = BUILT_IN.json({"a": value})
    assert HIDDEN in str(hidden)
    assert BUILT_IN.json(hidden) == hidden


def test_what_would_take_too_long_is_hidden_and_keeps_its_shape() -> None:
    messages: JsonValue = [{"role": "user", "content": f"mail number{n}@example.com"} for n in range(30_000)]
    hidden = BUILT_IN.json(messages)
    assert isinstance(hidden, list)
    assert all(isinstance(message, dict) for message in hidden)
    assert "example" not in str(hidden)
    many: JsonValue = [{"role": "user", "content": "x"} for _ in range(200_000)]
    hidden = BUILT_IN.json(many)
    assert isinstance(hidden, list)
    assert hidden[:10] == many[:10]
    assert hidden[-1] == {HIDDEN: HIDDEN}
    assert BUILT_IN.json({str(n): n for n in range(200_000)})[HIDDEN] == HIDDEN  # type: ignore[index, call-overload]
    roomy = Redactor.compile(RedactionRules(max_value_length=10_000_000))
    assert roomy.text("bob@example.com " * 30_000) == HIDDEN


def test_switched_off_it_hides_nothing_but_ones_own() -> None:
    secrets: JsonValue = {"password": SECRETS[0], "text": "password=x%40 \\u0040"}
    assert Redactor.compile(RedactionRules(built_in=False)).json(secrets) == secrets
    own = Redactor.compile(RedactionRules(built_in=False, fields=("name",), patterns=("anne?",)))
    assert own.json({"name": 1, "text": "name=x ann %61nn"}) == {
        "name": HIDDEN,
        "text": f"name={HIDDEN} {HIDDEN} {HIDDEN}",
    }
    assert own.json(secrets) == secrets
