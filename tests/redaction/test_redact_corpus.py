"""How many of the secrets of a labelled file are found, and how much is hidden that is none."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from pydantic import JsonValue

from breakwater.redaction.rules.redact import Redactor
from breakwater.redaction.settings import RedactionRules

BUILT_IN = Redactor.compile(RedactionRules())
ALPHABETS = {
    "a": "ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz0123456789",
    "u": "ABCDEFGHJKLMNPQRSTUVWXYZ234567",
    "h": "0123456789abcdef",
    "d": "123456789",
    "b": "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789",
}


def _made(alphabet: str, length: int, seed: str) -> str:
    return "".join(random.Random(seed + str(length)).choices(ALPHABETS[alphabet], k=length))


def _filled(line: str) -> str:
    return re.sub(r"<([auhdb]):(\d+)>", lambda made: _made(made[1], int(made[2]), line), line)


LINES = [
    (line[0], _filled(line[2:]))
    for line in (Path(__file__).parent / "redaction_corpus.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def redacted(text: str) -> str:
    """As a text of a record, where a backslash and an n stand for a line break, and as what it says if it is JSON."""
    text = text.replace("\\n", "\n")
    hidden: JsonValue = BUILT_IN.json(json.loads(text)) if text.startswith("{") else BUILT_IN.json(text)
    return hidden if isinstance(hidden, str) else json.dumps(hidden, ensure_ascii=False)


def secrets_of(line: str) -> list[str]:
    return re.findall("«(.*?)»", line)


def survivors(line: str) -> list[str]:
    shown = redacted(re.sub("[«»]", "", line))
    return [secret for secret in secrets_of(line) if secret in shown]


def test_every_labelled_secret_is_found_but_for_those_that_are_known_to_be_missed() -> None:
    assert {line: missed for label, line in LINES if label == "+" and (missed := survivors(line))} == {}
    assert [line for label, line in LINES if label == "?" and not survivors(line)] == []


def test_what_stands_around_a_secret_stays() -> None:
    """What a person still has to read is there: the first word of each line, if it is none of the secret's."""
    for label, line in LINES:
        first = re.match(r"[\w{<\[*\"-]+", line)
        if label == "+" and first is not None:
            assert redacted(re.sub("[«»]", "", line)).startswith(first[0])


def test_no_line_without_a_secret_is_changed_but_for_those_that_are_known_to_be() -> None:
    changed = {line: label for label, line in LINES if label in "-!" and redacted(line) != line.replace("\\n", "\n")}
    assert [line for line, label in changed.items() if label == "-"] == []
    assert changed == {line: label for label, line in LINES if label == "!"}


def test_nine_of_ten_secrets_are_found_and_one_line_in_forty_is_changed_without_need() -> None:
    secrets = [secret for label, line in LINES if label in "+?" for secret in secrets_of(line)]
    missed = [secret for label, line in LINES if label in "+?" for secret in survivors(line)]
    assert 1 - len(missed) / len(secrets) > 0.89  # 0.31 before this file was there
    harmless = [label for label, _ in LINES if label in "-!"]
    assert harmless.count("!") / len(harmless) < 0.025
