"""Which records count: on their own subject, and the first there."""

from typing import Any

from breakwater.jobs.store.records import is_result_of, problem_of
from breakwater.kernel.nats import subjects
from tests.helpers import FIRST
from tests.records import samples
from tests.tables import each_row

ATTEMPT, EXECUTION = samples.attempt("a.b", 2), samples.execution("a.b")
OWN = subjects.attempt("writer", "a.b", 2)


@each_row(
    ("changes", "subject", "headers", "problem"),
    [
        ({}, OWN, FIRST, None),
        ({}, OWN, {}, "without requiring"),
        ({}, OWN, {next(iter(FIRST)): "7"}, "without requiring"),
        ({}, subjects.attempt("writer", "a.b", 3), FIRST, "belongs on"),
        ({}, subjects.attempt("critic", "a.b", 2), FIRST, "belongs on"),
        ({}, subjects.execution("writer", "a.b"), FIRST, "belongs on"),
        ({"attempt_id": "other:2"}, OWN, FIRST, "attempt_id"),
        ({"execution_id": "other"}, OWN, FIRST, "attempt_id"),
    ],
)
def test_an_attempt_counts_on_its_own_subject_alone(
    changes: dict[str, Any], subject: str, headers: dict[str, str], problem: str | None
) -> None:
    found = problem_of(ATTEMPT.model_copy(update=changes), subject, headers)
    assert found is None if problem is None else problem in (found or "")


def test_an_execution_counts_on_its_own_subject_alone() -> None:
    assert problem_of(EXECUTION, subjects.execution("writer", "a.b"), FIRST) is None
    assert problem_of(EXECUTION, subjects.execution("writer", "a.b"), {}) is not None
    assert problem_of(EXECUTION, subjects.execution("writer", "c"), FIRST) is not None


@each_row("data", [b"", b"[]", b"{}", b'{"execution_id":"j2"}', b'{"job_id":"j1"}'])
def test_what_is_not_the_result_of_a_job_is_not_taken_for_it(data: bytes) -> None:
    assert is_result_of(b'{"execution_id":"j1"}', "j1")
    assert not is_result_of(data, "j1")
