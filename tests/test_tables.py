import asyncio
import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.tables import each_row


class Subtests:
    """Pytest's fixture, which notes the subtests that failed."""

    def __init__(self) -> None:
        self.failed: list[tuple[str | None, dict[str, Any]]] = []

    @contextmanager
    def test(self, name: str | None = None, **values: Any) -> Generator[None]:
        try:
            yield
        except AssertionError:
            self.failed.append((name, values))


def test_each_row_runs_and_one_that_fails_is_named_by_its_values() -> None:
    @pytest.mark.timeout(9)
    @each_row("number", [1, 2, 3])
    def is_not_two(number: int) -> None:
        tried.append(number)
        assert number != 2

    tried: list[int] = []
    subtests = Subtests()
    is_not_two(subtests=subtests)
    assert subtests.failed == [(None, {"number": 2})]
    assert tried == [1, 2, 3]
    assert list(inspect.signature(is_not_two).parameters) == ["subtests"]
    assert [mark.name for mark in is_not_two.pytestmark] == ["timeout"]


def test_two_tables_run_every_pair_and_name_it() -> None:
    @each_row(("number", "letter"), [pytest.param(1, "a", id="first"), (2, "b")])
    @each_row("sign", ["+", "-"], ids=["plus", "minus"])
    async def with_a_fixture(fixture: str, number: int, letter: str, sign: str) -> None:
        tried.append((number, letter, sign))
        assert fixture == "given"
        assert (sign, number) == ("+", 1)

    tried: list[tuple[int, str, str]] = []
    subtests = Subtests()
    asyncio.run(with_a_fixture(subtests=subtests, fixture="given"))
    last = {"number": 2, "letter": "b"}
    assert subtests.failed == [("first-minus", {}), ("plus", last), ("minus", last)]
    assert tried == [(1, "a", "+"), (1, "a", "-"), (2, "b", "+"), (2, "b", "-")]
    assert list(inspect.signature(with_a_fixture).parameters) == ["fixture", "subtests"]


def test_a_table_must_have_rows_of_the_right_length() -> None:
    with pytest.raises(AssertionError, match="tests nothing"):
        each_row("number", [])
    with pytest.raises(ValueError, match="zip"):
        each_row("number, letter", [(1, "a"), (2,)])
