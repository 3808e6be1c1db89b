"""Tables of cases that are one test: `each_row` is `pytest.mark.parametrize` without a test for each row.

Each of xdist's workers collects every test, and every test is set up, torn down and reported: 1.5 ms of CPU a row, and
nothing here. A row that fails is reported as a subtest, by its name or its values, and the rows after it still run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import product
from typing import Any

import pytest

_Parameters: Any = type(pytest.param())


@dataclass(frozen=True, slots=True)
class _Row:
    values: dict[str, Any]
    """By parameter."""
    names: tuple[str, ...] = ()
    """Of the rows that it joins, where they have one."""
    nameless: tuple[str, ...] = ()
    """The parameters of the others, whose values are reported."""

    def __add__(self, other: _Row) -> _Row:
        return _Row(self.values | other.values, self.names + other.names, self.nameless + other.nameless)

    def report(self, subtests: pytest.Subtests) -> None:
        """Reports the exception that is handled as the end of this row."""
        __tracebackhide__ = True
        shown = {parameter: self.values[parameter] for parameter in self.nameless}
        with subtests.test("-".join(self.names) or None, **shown):
            raise


def each_row(
    names: str | Sequence[str],
    rows: Iterable[Any],
    *,
    ids: Iterable[str] | Callable[[Any], object] | None = None,
) -> Callable[[Any], Any]:
    """Runs a test for every row, as one test. Above another table, it runs for every pair of their rows.

    All rows share the test's fixtures: parametrize a test that needs new ones for each row, or seconds for each.

    Args:
        names: of the parameters, as `pytest.mark.parametrize` takes them.
        rows: their values, or `pytest.param(*values, id=...)`.
        ids: the rows' names, or a function that makes one of a row's only value.
    """
    parameters = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows_here = list(_rows(parameters, list(rows), ids))
    assert rows_here, "a table without rows tests nothing"

    def decorate(test: Any) -> Any:
        test, rows_below = getattr(test, "rows", (test, [_Row({})]))
        joined = [above + below for above, below in product(rows_here, rows_below)]
        run = _over_rows(test, joined)
        run.rows = test, joined
        return run

    return decorate


def _rows(
    parameters: list[str], rows: list[Any], ids: Iterable[str] | Callable[[Any], object] | None
) -> Iterator[_Row]:
    for row, name in zip(rows, map(ids, rows) if callable(ids) else ids or [None] * len(rows), strict=True):
        values = (row,) if len(parameters) == 1 else row
        if isinstance(row, _Parameters):
            assert not row.marks, "a row that is marked must be a test of its own"
            values, name = row.values, row.id
        of_row = dict(zip(parameters, values, strict=True))
        yield _Row(of_row, nameless=tuple(parameters)) if name is None else _Row(of_row, names=(str(name),))


def _over_rows(test: Any, rows: list[_Row]) -> Any:
    signature = inspect.signature(test)
    parameters = [parameter for name, parameter in signature.parameters.items() if name not in rows[0].values]
    parameters.append(inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY))

    if inspect.iscoroutinefunction(test):

        @wraps(test)
        async def run(*args: Any, subtests: pytest.Subtests, **fixtures: Any) -> None:
            __tracebackhide__ = True
            for row in rows:
                try:
                    await test(*args, **fixtures, **row.values)
                except BaseException:  # noqa: BLE001  pytest decides which of them end the test
                    row.report(subtests)
    else:

        @wraps(test)
        def run(*args: Any, subtests: pytest.Subtests, **fixtures: Any) -> None:
            __tracebackhide__ = True
            for row in rows:
                try:
                    test(*args, **fixtures, **row.values)
                except BaseException:  # noqa: BLE001  pytest decides which of them end the test
                    row.report(subtests)

    vars(run)["__signature__"] = signature.replace(parameters=parameters)
    return run
