"""The same error has one identity, whatever varies in its text; another error has another."""

from __future__ import annotations

import string
from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from breakwater.calls.rules.classify import MAX_END, MAX_LENGTH, error_identity, normalise
from tests.tables import each_row

SEED = "TypeError: Cannot read property 'id' of undefined at UserController (/src/controllers/user.ts:{})"


def python(error: str, depth: int, line: int) -> str:
    source = "    return call(\n        order,\n    )\n    ^^^^\n"
    frames = "".join(f'  File "/srv/worker.py", line {line + i}, in step_{i}\n{source}' for i in range(depth))
    repeated = f"  [Previous line repeated {depth * 3} more times]\n" if depth > 4 else ""
    return f"Traceback (most recent call last):\n{frames}{repeated}{error}"


def python_chain(error: str, depth: int, line: int) -> str:
    cause = python("KeyError: 'id'", depth + 1, line + 7)
    between = "\n\nThe above exception was the direct cause of the following exception:\n\n"
    return f"{cause}{between}{python(error, depth, line)}"


def python_group(error: str, depth: int, line: int) -> str:
    frames = "".join(f'  |   File "/srv/app.py", line {line + i}, in f\n  |     await g()\n' for i in range(depth))
    inner = "".join(f'    |   File "/srv/app.py", line {line + i}, in g\n    |     h()\n' for i in range(depth))
    return (
        f"  + Exception Group Traceback (most recent call last):\n{frames}"
        f"  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)\n"
        f"  +-+---------------- 1 ----------------\n"
        f"    | Traceback (most recent call last):\n{inner}    | {error}\n    +------------------------------------\n"
    )


def node(error: str, depth: int, line: int) -> str:
    frames = "".join(f"    at Orders.step{i} (/srv/app/(pay)/orders.js:{line + i}:{i + 3})\n" for i in range(depth))
    return (
        f"{error}\n{frames}"
        "    at Array.map (<anonymous>)\n"
        "    at new Orders (C:\\srv\\my app\\new.js:7:1)\n"
        f"    at async Object.run [as call] (file:///srv/app/index.mjs:{line}:11)\n"
        "    at async Promise.all (index 3)\n"
        f"    at node:internal/process/task_queues:{line}:5 {{\n  code: 'E_ORDER'\n}}"
    )


def node_in_a_line(error: str, depth: int, line: int) -> str:
    return error + "".join(f" at Orders.step{i} (/srv/orders.js:{line + i}:9)" for i in range(depth))


def java(error: str, depth: int, line: int) -> str:
    frames = "".join(f"\tat com.shop.Orders.lambda$step${i}(Orders.java:{line + i})\n" for i in range(depth))
    return (
        f'Exception in thread "main" com.shop.OrderException: failed\n{frames}'
        "\tat java.base/jdk.internal.reflect.NativeMethodAccessorImpl.invoke0(Native Method)\n"
        f"\tat org.spring.Filter.doFilter(Filter.java:{line}) ~[spring-web-6.1.{depth}.jar:6.1]\n"
        f"Caused by: {error}\n{frames}\t... {depth + 20} more\n"
    )


def dotnet(error: str, depth: int, line: int) -> str:
    frames = "".join(
        f"   at Shop.Orders.Step(String id) in C:\\src\\Orders.cs:line {line + i}\r\n" for i in range(depth)
    )
    return f"{error}\r\n{frames}   at Shop.Program.Main(String[] args)\r\n"


def go(error: str, depth: int, line: int) -> str:
    frames = "".join(
        f"main.(*Orders).step(0xc00001{i:x}4000, {{0x4a{i:x}, 0x{line:x}}})\n\t/srv/orders.go:{line + i} +0x{line:x}d\n"
        for i in range(depth)
    )
    return (
        f"panic: {error}\n\ngoroutine {line} [running]:\n{frames}main.main()\n\t/srv/main.go:9 +0x1d\n"
        f"created by main.serve in goroutine {depth}\n\t/srv/main.go:{line} +0x5f\nexit status 2\n"
    )


def go_errors(error: str, depth: int, line: int) -> str:
    return error + "".join(f"\nmain.(*Orders).step\n\t/srv/orders.go:{line + i}" for i in range(depth))


def ruby(error: str, depth: int, line: int) -> str:
    frames = "".join(f"\n\tfrom /srv/orders.rb:{line + i}:in `block in step'" for i in range(depth))
    return f"/srv/orders.rb:{line}:in 'Orders#pay': {error}{frames}\n\tfrom /srv/main.rb:3:in `<main>'"


def ruby_upside_down(error: str, depth: int, line: int) -> str:
    frames = "".join(f"\t{depth - i}: from /srv/orders.rb:{line + i}:in `step'\n" for i in range(depth))
    return f"Traceback (most recent call last):\n{frames}/srv/orders.rb:{line}:in `pay': {error}"


def php(error: str, depth: int, line: int) -> str:
    frames = "".join(f"#{i} /srv/Orders.php({line + i}): Orders->step(Array)\n" for i in range(depth))
    return f"{error}\nStack trace:\n{frames}#{depth} {{main}}"


def within_json(error: str, depth: int, line: int) -> str:
    lines = python(error, depth, line).replace('"', '\\"').replace("\n", "\\n")
    return f'{{"detail": "{lines}"}}'


Trace = Callable[[str, int, int], str]
TRACES: list[Trace] = [
    python, python_chain, python_group, node, node_in_a_line, java, dotnet, go, go_errors, ruby, ruby_upside_down, php,
    within_json,
]  # fmt: skip


@pytest.mark.parametrize("place", ["42:15", "87:22"])
def test_the_seeds_examples_have_the_seeds_normal_form(place: str) -> None:
    assert normalise(SEED.format(place)) == "typeerror: cannot read property 'id' of undefined STACK"


@each_row("trace", TRACES)
def test_lines_addresses_and_depth_of_a_trace_say_nothing(trace: Trace) -> None:
    texts = [trace("OrderError: no stock", depth, line) for depth, line in ((1, 42), (3, 9), (7, 1024), (60, 3))]
    assert len({normalise(text) for text in texts}) == 1


@each_row("trace", TRACES)
@each_row("other", ["OrderError: no such customer", "StockError: no stock"])
def test_a_trace_of_another_error_is_another(trace: Trace, other: str) -> None:
    assert error_identity(trace("OrderError: no stock", 3, 42)) != error_identity(trace(other, 3, 42))


@each_row("trace", TRACES)
def test_nothing_of_a_frame_is_left(trace: Trace) -> None:
    assert "srv" not in normalise(trace("OrderError: no stock", 3, 42))
    assert "STACK" in normalise(trace("OrderError: no stock", 3, 42))


def test_a_traceback_keeps_the_error_and_what_led_to_it() -> None:
    assert normalise(python("ValueError: bad order 42", 3, 7)) == "STACK valueerror: bad order N"
    assert normalise(python_chain("ValueError: bad order 42", 3, 7)) == (
        "STACK keyerror: 'id' the above exception was the direct cause of the following exception: "
        "STACK valueerror: bad order N"
    )


@each_row("depth", [1300, 1301, 2500])
@each_row("trace", [python, node, dotnet, go, go_errors, ruby, ruby_upside_down, php, within_json])
def test_the_error_of_a_trace_too_long_to_be_read_whole_counts(trace: Trace, depth: int) -> None:
    same, other = "OrderError: no stock", "StockError: no stock"
    assert len(trace(same, depth, 9)) > 2 * MAX_END
    assert error_identity(trace(same, depth, 9)) == error_identity(trace(same, 5, 12345))
    assert error_identity(trace(same, depth, 9)) != error_identity(trace(other, depth, 9))


def test_a_long_line_after_a_short_one_counts() -> None:
    pages = [f"HTTP 502\n<html>{words}{'x' * 50_000}" for words in ("bad gateway", "origin is unreachable")]
    assert error_identity(pages[0]) != error_identity(pages[1])


SAME = {
    "address": (
        "segfault at 0x7f3a in <Pool object at 0x7F00AB>",
        "segfault at 0xBEEF in <Pool object at 0x1>",
    ),
    "case and blanks": ("  Connection\treset \n by peer", "connection reset by PEER"),
    "uuid": (
        "request 550e8400-e29b-41d4-a716-446655440000 failed",
        "request F47AC10B-58CC-4372-A567-0E02B2C3D479 failed",
    ),
    "hash": (
        "no blob 9e107d9d372bb6826bd81d3542a419d6",
        "no blob e4d909c290d0fb1ca068ffaddf22cbd0",
    ),
    "java object": ("bad state: com.shop.Cart@1b6d3586", "bad state: com.shop.Cart@4554617"),
    "ray id": ("blocked, ray 8a1b2c3d4e5f6789-FRA", "blocked, ray 91ff0c3d4aaf6700-FRA"),
    "request id of Anthropic": (
        "Overloaded (request_id: req_011CSHoEeqs5C35K2UUqR7Fy)",
        "Overloaded (request_id: req_011CT9bXw2mNp4LQ8vZsKd3h)",
    ),
    "id of a completion": (
        "chatcmpl-AbC123dEf456GhI789jKl012MnO has no choices",
        "chatcmpl-9zYxW8vU7tS6rQ5pO4nM3lK2jI1 has no choices",
    ),
    "id of a tool call": (
        "no result for call_Zx9TqLm2NbVc4RtYuIoP8aSd",
        "no result for call_uFv1KjHgFd7SaQwErTy5UiOp",
    ),
    "ulid": ("job 01ARZ3NDEKTSV4RRFFQ69G5FAV is gone", "job 01BX5ZZKBKACTAV9WEVGEMMVRZ is gone"),
    "time": (
        "[2026-11-21T10:00:00.000Z] upstream timed out",
        "[2026-12-01T23:59:59.123Z] upstream timed out",
    ),
    "time with and without a fraction": ("2026-11-21 10:00:00 timed out", "2026-11-21 10:00:01.25 timed out"),
    "wait": (
        "Rate limit reached: limit 30000, used 29,000. Please try again in 1.998s.",
        "Rate limit reached: limit 30000, used 30000. Please try again in 6m0s.",
    ),
    "wait in ms": ("try again in 860ms", "try again in 2s"),
    "query": (
        "GET https://api.example.com/v1/models?key=abc&page=2 failed",
        "GET https://api.example.com/v1/models?key=xyz failed",
    ),
    "query or none": (
        "Client error for url 'https://api.example.com/v1/models?x=a.b'. Try later",
        "Client error for url 'https://api.example.com/v1/models'. Try later",
    ),
    "query of a path": ("no answer of /v1/chat?key=a (refused)", "no answer of /v1/chat?key=b (refused)"),
    "number of a path": ("no https://api.example.com/v1/orders/42", "no https://api.example.com/v1/orders/1077"),
    "port": ("connect ECONNREFUSED 127.0.0.1:8080", "connect ECONNREFUSED 10.0.0.12:443"),
}  # fmt: skip


@each_row("texts", SAME.values(), ids=SAME)
def test_what_varies_says_nothing(texts: tuple[str, str]) -> None:
    assert normalise(texts[0]) == normalise(texts[1])
    assert error_identity(texts[0]) == error_identity(texts[1])


DIFFERENT = (
    "connection refused",
    "connection reset",
    "TimeoutError",
    "TimeoutException",
    "ValueError: no id",
    "KeyError: no id",
    "no id",
    "model not found: gpt-4o",
    "model not found: gpt-4o-mini",
    "model not found: claude-sonnet",
    "model not found: claude-opus-4-20250514",
    "model not found: open-mixtral-8x7b",
    "model not found: meta-llama/Llama-3.3-70B-Instruct",
    "Http2ConnectionError",
    "Ec2S3BucketNotFoundError",
    "Base64Sha256EncodingError",
    "DefacedFacadeError",
    "fault at 0x7f3a while reading",
    "fault at 0x7f3a while writing",
    "Bad gateway at noon (in UTC)",
    "Bad gateway at midnight (in UTC)",
    "at noon: disk full",
    "cannot reach https://api.example.com/v1/chat?x=1",
    "cannot reach https://api.example.com/v1/models?x=1",
    "cannot reach https://api.example.org/v1/chat?x=1",
    "is this a question? yes",
    "is this a question? no",
    "missing req_011CSHoEeqs5C35K2UUqR7Fy",
    "missing msg_011CSHoEeqs5C35K2UUqR7Fy",
    "failed:\nat 10:42:15 the host refused",
    "failed:\nat 10:42:15 the host was down",
    "",
)


def test_different_errors_stay_apart() -> None:
    assert [pair for pair in combinations(DIFFERENT, 2) if error_identity(pair[0]) == error_identity(pair[1])] == []


@each_row(
    ("text", "form"),
    [
        ("Line 42", "line N"),
        ("At 0x7F3A", "at HEX"),
        ("req_011CSHoEeqs5C35K2UUqR7Fy", "req_HEX"),
        ("gpt-4o-mini-2024-07-18", "gpt-No-mini-N-N-N"),
        ("limit 10485760B", "limit Nb"),
        ("db00000012 and db3", "dbN and dbN"),
        ("see https://h.example/a?b=c#d.", "see https://h.example/a."),
        ("STACK and HEX and N", "stack and hex and n"),
        ("", ""),
        (" \n ", ""),
    ],
)
def test_normal_forms(text: str, form: str) -> None:
    assert normalise(text) == form


def test_the_identity_is_the_start_of_the_md5_of_the_normal_form() -> None:
    assert error_identity("") == "d41d8cd9"
    assert error_identity(" A ") == "0cc175b9"


def test_half_of_a_surrogate_pair_is_a_text_too() -> None:
    assert len(error_identity("broken \ud83d text")) == 8


HOSTILE = (
    "a", "0", " ", "\n", "\t", "0x", "at ", "\nat ", "\n at a(", "\n at ) [", "\n at :1) ~[", "at a (", "at a:1:1",
    "(:1", "at a/:1", "://", "://a?", "://a?.", "?a=.", "?a", 'file "', '\n  file "a", line 1', "\n  |", "\n a",
    "from ", "1: from ", "a:1:in `", "a:1", "a.a", "N", "1s", "1.1", "a1", "f1", "f1-", "_a1", "created by ",
    "\na(\n\t", "\na\n ", "#1 ", "\n#1 ", "... 1 more", "goroutine 1 :", "STACK ", "\\n  ", "\\",
    "[previous line repeated ", "traceback ",
)  # fmt: skip


@each_row("piece", HOSTILE)
@pytest.mark.timeout(60)
def test_a_hostile_text_does_not_hang(piece: str) -> None:
    # Quadratic work would take minutes here; the limit is no measurement.
    for end in ("", "!", "\n"):
        assert len(normalise(piece * (2 * MAX_END // len(piece)) + end)) <= MAX_LENGTH


CHARACTERS = st.characters(exclude_categories=())
PIECES = (
    *HOSTILE, "STACK", "HEX", "TypeError: ", "req_011CSHoEeqs5C35K2UUqR7Fy", "0x7f", "deadbeef01", "https://h/p?q=1#f",
    "at f (/a.js:1:2)", "\n    at f (/a.js:1:2)", '\n  File "a.py", line 3, in f\n    x()\n', "\n\t/a.go:8 +0x1d", ")",
    ":", "İ", "ς", "Σ", "٣", "²", "\u2028", "\x1f", "\r", "\r\n",
)  # fmt: skip
TEXTS = st.text(CHARACTERS) | st.lists(st.sampled_from(PIECES) | st.text(CHARACTERS, max_size=3), max_size=30).map(
    "".join
)
WORDS = st.lists(st.text(string.ascii_letters + ".:,;!-_'()[]", min_size=1, max_size=12), max_size=6)


@given(TEXTS)
def test_every_text_has_an_identity(text: str) -> None:
    form, identity = normalise(text), error_identity(text)
    assert len(form) <= MAX_LENGTH
    assert form == form.strip()
    assert "  " not in form
    assert len(identity) == 8
    assert set(identity) <= set("0123456789abcdef")


@given(TEXTS)
def test_no_digit_is_left(text: str) -> None:
    assert not any(character.isdecimal() for character in normalise(text))


@given(TEXTS.filter(lambda text: "\\" not in text))
@example("0 ?0= 0")
def test_a_normal_form_has_nothing_left_to_take_out(text: str) -> None:
    # But for the tokens' case, which are words to a second pass; and escapes, of which one level is read.
    form = normalise(text)
    assert normalise(form) == form.lower()


@given(TEXTS.filter(lambda text: "0x" not in text.lower()), st.permutations(string.digits))
def test_other_digits_are_the_same_error(text: str, digits: list[str]) -> None:
    assert normalise(text) == normalise(text.translate(str.maketrans(string.digits, "".join(digits))))


@given(WORDS, st.lists(st.tuples(st.integers(0), st.integers(0)), min_size=6, max_size=6))
def test_other_numbers_are_the_same_error_however_long(words: list[str], numbers: list[tuple[int, int]]) -> None:
    one, other = (
        " ".join(f"{word} {pair[side]}" for word, pair in zip(words, numbers, strict=False)) for side in (0, 1)
    )
    assert error_identity(one) == error_identity(other)


@given(st.uuids(), st.uuids(), st.integers(0), st.integers(0))
def test_other_uuids_and_addresses_are_the_same_error(a: object, b: object, m: int, n: int) -> None:
    assert error_identity(f"object {a} at {m:#x} is gone") == error_identity(f"object {b} at {n:#x} is gone")


@given(st.text(string.ascii_lowercase + " ", max_size=100), st.text(string.ascii_lowercase + " ", max_size=100))
def test_texts_of_other_words_are_other_errors(one: str, other: str) -> None:
    assert (normalise(one) == normalise(other)) == (one.split() == other.split())
