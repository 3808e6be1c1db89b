"""Two executions side by side."""

import random
import time
from typing import Any

from breakwater.jobs.contract.execution import Execution
from breakwater.records.pages.comparison import LONGEST_LINE, MAX_LINES, DiffLine, compare, text_diff
from tests.records.samples import attempt, bare_execution, execution, full_execution


def different(one: Execution, other: Execution) -> "dict[str, tuple[str, str]]":
    return {fact.name: (fact.a, fact.b) for fact in compare(one, other).facts if fact.differs}


def test_what_is_equal_does_not_differ() -> None:
    found = compare(full_execution(), full_execution())
    assert not [fact.name for fact in (*found.facts, *found.params) if fact.differs]
    assert [(text.lines, text.missing) for text in found.texts] == [((), ()), ((), ())]


def test_every_fact_can_differ_and_be_unknown() -> None:
    answered = execution(attempts=(attempt(first_token_ms=300, chunks=9, output_tokens=51),), finish_reason="stop")
    found = different(answered, bare_execution())
    assert found["First token"] == ("300 ms", "–")
    assert found["Tokens/s"] == ("100", "–")
    assert found["Finish reason"] == ("stop", "–")
    assert found["Cost"] == ("$0.001000001", "unknown")
    assert found["Model"] == ("gpt-4.1", "–")


def test_params_of_either_are_compared_by_name() -> None:
    left, right = execution(params={"temperature": 0.2, "stop": ["x"]}), execution(params={"temperature": 0.7, "n": 2})
    assert [(fact.name, fact.a, fact.b, fact.differs) for fact in compare(left, right).params] == [
        ("temperature", "0.2", "0.7", True),
        ("stop", '[\n  "x"\n]', "not set", True),
        ("n", "not set", "2", True),
    ]


def test_attempts_stand_beside_each_other_by_their_place() -> None:
    two = execution(attempts=(attempt(number=1), attempt(number=2)))
    pairs = compare(two, execution(attempts=(attempt(number=1),))).attempts
    assert [(left is not None, right is not None) for left, right in pairs] == [(True, True), (True, False)]


def said(*lines: str) -> Execution:
    return execution(messages=[{"role": "system", "content": "same"}, {"role": "user", "content": "\n".join(lines)}])


def test_messages_are_compared_line_by_line_and_equal_ones_left_out() -> None:
    many = [f"line {number}" for number in range(30)]
    [messages, response] = compare(said(*many), said(*many[:20], "another", *many[21:])).texts
    assert response.lines == ()
    assert messages.lines == (
        DiffLine("…", "20 equal lines"),
        DiffLine(" ", "line 17"),
        DiffLine(" ", "line 18"),
        DiffLine(" ", "line 19"),
        DiffLine("-", "line 20"),
        DiffLine("+", "another"),
        DiffLine(" ", "line 21"),
        DiffLine(" ", "line 22"),
        DiffLine(" ", "line 23"),
        DiffLine("…", "6 equal lines"),
    )


def test_two_images_of_one_size_differ_and_their_bytes_are_not_shown() -> None:
    def shown(data: str) -> "dict[str, Any]":
        url = {"url": f"data:image/png;base64,{data}"}
        return {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": url}]}

    left, right = (execution(messages=[shown(letter * 4_000)]) for letter in "AB")
    lines = [line for line in compare(left, right).texts[0].lines if line.sign in "-+"]
    assert [line.sign for line in lines] == ["-", "+"]
    assert all(line.text.startswith("[image, image/png, 3 KB; ") for line in lines)


def test_what_is_not_stored_is_neither_equal_nor_different() -> None:
    [messages, response] = compare(execution(output=None), said("x")).texts
    assert (messages.missing, messages.lines) == (("A",), ())
    assert response.missing == ("A",)


def test_long_texts_are_compared_as_far_as_it_is_quick() -> None:
    chance = random.Random(1)
    left, right = ([str(chance.randrange(101)) for _ in range(MAX_LINES + 5)] for _ in range(2))
    began = time.process_time()
    found = text_diff("x", left, [*right, "y" * (LONGEST_LINE + 1)])
    assert time.process_time() - began < 5
    assert found.cut
    assert text_diff("x", ["\u2028" * (LONGEST_LINE + 1)], ["a"]).cut
    assert not text_diff("x", ["a"], ["b"]).cut
