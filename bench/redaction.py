"""How long redaction takes: for the record of a typical job, and for 10 MB of text that was made to be slow.

    python -m bench.redaction

Each figure is CPU time, the best of three runs. Nothing is asserted here; tests/redaction/test_redact_speed.py does.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable

from pydantic import JsonValue

from breakwater.redaction.rules.redact import Redactor
from breakwater.redaction.settings import RedactionRules

SIZE = 10_000_000
TYPICAL: JsonValue = {
    "messages": [
        {"role": "system", "content": "You are a helpful assistant of a shop.\nAnswer shortly. " * 8},
        {"role": "user", "content": "Where is my order no. 4711-0815? It was sent on 2026-11-02.\n" * 8},
    ],
    "output": {"role": "assistant", "content": "It left the warehouse on Monday, and comes by Friday. " * 9},
    "metadata": {"source": "web", "attempt": 3, "input_tokens": 812, "sent_at": 1_795_000_000_123},
}
TOKENS = (
    "sk-", "AIza", "gsk_", "hf_", "xoxb-", "ghp_", "eyJ", "SG.", "pypi-", "glpat-", "AKIA", "whsec_", "bearer ", "a",
    "1", "-", "_", ".", "@", " ", "password", '"', "key", "4111 ", "token", "\\n", "%4", "://", "a:", "-----BEGIN ",
    "=",
)  # fmt: skip


def _filled(piece: str) -> str:
    return piece * (SIZE // len(piece))


def _nested(depth: int) -> JsonValue:
    value: JsonValue = "x"
    for _ in range(depth):
        value = [value]
    return value


def _pieces(text: str, length: int) -> JsonValue:
    return [text[start : start + length] for start in range(0, len(text), length)]


def _in_json(text: str, times: int) -> str:
    for _ in range(times):
        text = json.dumps([text])
    return text


def _mixed() -> str:
    pieces = "".join(random.Random(1).choices(TOKENS, k=200_000))
    return (pieces * (SIZE // len(pieces) + 1))[:SIZE]


def _random() -> str:
    printable = bytes(32 + byte % 95 for byte in range(256))
    return random.Random(1).randbytes(SIZE).translate(printable).decode()


ADVERSARIAL: dict[str, Callable[[], JsonValue]] = {
    "prose": lambda: _filled("The quick brown fox jumps over the lazy dog. "),
    "a…a@": lambda: "a" * SIZE + "@",
    "1111 1111 …": lambda: _filled("1111 "),
    "4111 4111 …": lambda: _filled("4111 "),
    "4…4": lambda: "4" * SIZE,
    "sk-sk-…": lambda: _filled("sk-"),
    "sk- sk- …": lambda: _filled("sk- "),
    "eyJ.eyJ.…": lambda: _filled("eyJ."),
    "a@b.co …": lambda: _filled("a@b.co "),
    "password= …": lambda: _filled("password= "),
    'password="\\"\\"…': lambda: 'password="' + _filled('\\"'),
    "password=[[[…": lambda: _filled("password=" + "[" * 900 + " "),
    "password={ …": lambda: _filled("password={a "),
    '"key":[…': lambda: _filled('"key":['),
    "BEGIN …": lambda: _filled("-----BEGIN PRIVATE KEY-----"),
    "%41%41…": lambda: _filled("%41"),
    "%2541…": lambda: _filled("%2541"),
    "\\u0041…": lambda: _filled("\\u0041"),
    "backslashes": lambda: "\\" * SIZE,
    "mixed starts of secrets": _mixed,
    "the same, many texts": lambda: _pieces(_mixed(), 100),
    "random bytes": _random,
    "clean texts": lambda: [f"{number:<100}" for number in range(SIZE // 100)],
    "texts with an address": lambda: [f"mail number{number:>7}@example.com" for number in range(SIZE // 28)],
    "objects": lambda: [{"name": f"{number:<60}", "value": number, "other": None} for number in range(SIZE // 100)],
    "JSON in a text": lambda: json.dumps([{"id": number, "note": "x" * 60} for number in range(SIZE // 90)]),
    "many JSON texts": lambda: [json.dumps({"a": "\n" + "x" * 80}) for _ in range(SIZE // 100)],
    "JSON texts in JSON texts": lambda: _in_json("x" * (SIZE // 8), 8),
    "[[[… as text": lambda: _filled("["),
    "deep nesting": lambda: [_nested(500) for _ in range(SIZE // 1000)],
    "small numbers": lambda: [number % 1000 for number in range(SIZE // 4)],
    "milliseconds": lambda: [1_732_233_600_000 + number for number in range(SIZE // 15)],
    "secret keys": lambda: {f"sk-{number:020}": number for number in range(SIZE // 28)},
}
"""Documents of about `SIZE` characters, by what is hard about them."""


def seconds(work: Callable[[], object], runs: int = 3) -> float:
    """The best of some runs."""
    best = float("inf")
    for _ in range(runs):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best


def main() -> None:
    """Prints the figures."""
    default = Redactor.compile(RedactionRules())
    roomy = Redactor.compile(RedactionRules(max_value_length=2 * SIZE))
    typical = seconds(lambda: [default.json(TYPICAL) for _ in range(1000)]) / 1000
    error = seconds(lambda: [default.text("connection to model refused after 3 s") for _ in range(1000)]) / 1000
    print(f"{'typical record':32} {typical * 1e6:8.1f} us")
    print(f"{'error message':32} {error * 1e6:8.1f} us")
    print(f"{'10 MB of':32} {'in full':>11} {'cut, the default':>18}")
    for name, make in ADVERSARIAL.items():
        document = make()
        full = seconds(lambda document=document: roomy.json(document))
        cut = seconds(lambda document=document: default.json(document))
        print(f"{name:32} {full * 1e3:8.1f} ms {cut * 1e3:15.1f} ms")


if __name__ == "__main__":
    main()
