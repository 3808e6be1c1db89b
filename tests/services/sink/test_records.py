"""Which message becomes a row of which table, and what can't become one."""

import json
from datetime import timedelta

import pytest

from breakwater.kernel.clickhouse.errors import UnstorableError
from breakwater.kernel.nats import subjects
from breakwater.records import schema
from breakwater.services.sink import records
from tests.helpers import FIRST
from tests.records import samples
from tests.services.sink.plane import of_attempt, of_execution
from tests.tables import each_row

STORED_AT = samples.NOON + timedelta(milliseconds=3)


def test_every_kind_has_its_table() -> None:
    messages = [
        (schema.ATTEMPTS, *of_attempt(samples.full_attempt())),
        (schema.EXECUTIONS, *of_execution(samples.full_execution())),
        (schema.BREAKER_TRANSITIONS, subjects.breaker("writer", "gpt-4.1"), samples.transition().json_bytes()),
        (schema.GUARD_EVENTS, subjects.guard("writer"), samples.guard_event().json_bytes()),
        (schema.BUDGET_EVENTS, subjects.budget("agent", "daily"), samples.budget_event().json_bytes()),
        (schema.ALERTS, subjects.alert("breaker_open"), samples.alert().json_bytes()),
        (schema.AUDIT, subjects.audit("raise_cap"), samples.audit_event().json_bytes()),
    ]
    for expected, subject, data in messages:
        table, row = records.read(subject, data, FIRST, 77, STORED_AT)
        assert table is expected
        assert len(row) == len(table.columns)
        assert row[-1] == 77


def test_an_attempt_reports_when_it_was_stored() -> None:
    table, row = records.read(*of_attempt(samples.attempt()), FIRST, 77, STORED_AT)
    assert dict(zip(table.columns, row, strict=True))["stored_at"] == STORED_AT


def test_a_field_from_a_later_version_is_no_mistake() -> None:
    subject, data = of_attempt(samples.attempt())
    later = json.dumps({**json.loads(data), "added_later": {"x": 1}}).encode()
    assert records.read(subject, later, FIRST, 1, STORED_AT) == records.read(subject, data, FIRST, 1, STORED_AT)


@each_row(
    ("subject", "data", "why"),
    [
        ("bw.attempts.writer.e1.1", b"\x00not json", "is not a Attempt: Invalid JSON"),
        ("bw.attempts.writer.e1.1", b"{}", r"is not a Attempt at attempt_id: Field required \(and \d+ more\)"),
        ("bw.guards.writer", b"{}", r"is not a GuardEvent at event_id: Field required \(and \d+ more\)"),
        ("bw.later.writer", b"{}", "no table stores messages of bw.later.writer"),
        ("bw", b"{}", "no table stores"),
    ],
)
def test_what_is_not_a_message_of_its_kind_says_so(subject: str, data: bytes, why: str) -> None:
    with pytest.raises(UnstorableError, match=why):
        records.read(subject, data, FIRST, 1, STORED_AT)


def test_the_reason_does_not_repeat_what_the_message_held() -> None:
    with pytest.raises(UnstorableError) as refusal:
        records.read("bw.attempts.writer.e1.1", b'{"attempt_id": ["sk-secret"]}', FIRST, 1, STORED_AT)
    assert "sk-secret" not in str(refusal.value)


def test_a_dead_letter_names_agent_and_execution_as_the_subject_does() -> None:
    subject = subjects.attempt("support/tier 1", "job.7", 2)
    assert (records.agent_of(subject), records.execution_of(subject)) == ("support/tier 1", "job.7")
    assert records.agent_of(subjects.breaker("writer", "gpt-4.1")) == "writer"
    assert records.agent_of(subjects.guard("support/tier 1")) == "support/tier 1"
    assert records.agent_of(subjects.budget("global", "daily")) is None
    assert records.execution_of("bw.breakers.writer.gpt") is None
    assert records.agent_of("bw.attempts") is None
