"""The state of a job that has not ended, by its claim."""

from __future__ import annotations

import string
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.jobs.contract.current_jobs import JobWait
from breakwater.jobs.rules.checkpoints import EndedAttempt, InFlightCall, SavedCheckpoint
from breakwater.jobs.rules.current_jobs import PHASES, ClaimState, ListPlace, held_state, is_parked, waits_for_turn
from breakwater.jobs.rules.previews import preview, prompt_in
from tests.tables import each_row

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
SILENT_S = 3.0


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def claim(**changed: Any) -> ClaimState:
    return ClaimState(**{"exists": True, "claimed": True, "lease_until": at(10), "worker_silent_s": 0.5, **changed})


def called(started_s: float) -> SavedCheckpoint:
    return SavedCheckpoint(dispatched_at=at(-60), in_flight=InFlightCall(number=2, model="m", started_at=at(started_s)))


HOLD = JobWait(kind="hold", message="held", since=at(-4), until=at(4))


@each_row(
    ("state", "kind", "known"),
    [
        pytest.param("running", None, claim(), id="a worker has it"),
        pytest.param("running", None, claim(worker_silent_s=None), id="its worker has sent no heartbeat yet"),
        pytest.param("waiting", "hold", claim(wait=HOLD), id="it waits"),
        pytest.param("waiting", "hold", claim(wait=HOLD, checkpoint=called(-5)), id="it waits after a call"),
        pytest.param("running", None, claim(wait=HOLD, checkpoint=called(-3)), id="its wait ended early"),
        pytest.param("running", None, claim(wait=HOLD.model_copy(update={"until": at(-1)})), id="its wait is over"),
        pytest.param("waiting", "claim", claim(worker_silent_s=3.5), id="its worker is silent"),
        pytest.param("waiting", "claim", claim(wait=HOLD, worker_silent_s=9), id="its worker is silent while it waits"),
        pytest.param("waiting", "claim", claim(lease_until=at(0), worker_silent_s=None), id="its claim has ended"),
        pytest.param("waiting", "worker", ClaimState(exists=True), id="no worker has it"),
        pytest.param("waiting", "worker", ClaimState(), id="Redis has lost it"),
    ],
)
def test_a_job_of_a_worker_that_died_waits_and_does_not_run_for_ever(
    state: str, kind: str | None, known: ClaimState
) -> None:
    found, wait = held_state(known, NOW, SILENT_S)
    assert (found, wait and wait.kind) == (state, kind)


BACK_OFF = HOLD.model_copy(update={"kind": "back_off"})


@each_row(
    ("waits", "known"),
    [
        pytest.param(True, ClaimState(), id="no worker has taken it"),
        pytest.param(True, ClaimState(exists=True), id="its worker gave it back"),
        pytest.param(True, ClaimState(exists=True, wait=HOLD), id="it is parked until there is room"),
        pytest.param(False, ClaimState(exists=True, wait=BACK_OFF), id="it is parked before a retry"),
        pytest.param(False, ClaimState(exists=True, ended=True), id="it has ended"),
        pytest.param(True, claim(wait=HOLD), id="it waits for room"),
        pytest.param(True, claim(worker_silent_s=9), id="its worker is silent"),
        pytest.param(False, claim(wait=BACK_OFF), id="it pauses before a retry"),
        pytest.param(False, claim(), id="it calls"),
        pytest.param(False, claim(wait=HOLD, checkpoint=called(-3)), id="its turn has come"),
    ],
)
def test_a_job_waits_for_its_turn_while_it_makes_no_call_and_pauses_after_none(waits: bool, known: ClaimState) -> None:
    assert waits_for_turn(known, NOW, SILENT_S) == waits


def test_a_job_that_was_woken_or_taken_is_not_parked_any_more() -> None:
    assert is_parked(ClaimState(exists=True), 7)
    assert is_parked(ClaimState(exists=True, woken=6), 7)
    assert not is_parked(ClaimState(exists=True, woken=7), 7)
    assert not is_parked(claim(), 7)


def test_a_job_shows_the_last_attempt_that_began() -> None:
    ended = SavedCheckpoint(dispatched_at=NOW, attempts=(EndedAttempt(number=3, model="n"),))
    assert [(one.last_number, one.current_model) for one in (called(0), ended, SavedCheckpoint(dispatched_at=NOW))] == [
        (2, "m"),
        (3, "n"),
        (None, None),
    ]


@each_row(
    ("text", "document"),
    [
        ("hello", {"prompt": "hello"}),
        ("second", {"messages": [{"role": "user", "content": "first"}, {"role": "user", "content": "second"}]}),
        ("asked", {"messages": [{"role": "user", "content": "asked"}, {"role": "assistant", "content": "answered"}]}),
        (
            "seen",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "seen"}]}]},
        ),
        ("native", {"api_request": {"body": {"messages": [{"role": "user", "content": "native"}]}}}),
        ("written", {"api_request": {"body": {"input": "written"}}}),
        ("embedded", {"api_request": {"body": {"input": ["embedded", "too"]}}}),
        ("for a program", {"input": "for a program"}),
        (None, {"input": {"any": "JSON"}}),
        (None, {"messages": [{"role": "tool", "content": 3}, 7]}),
        (None, ["no job"]),
        (None, None),
    ],
)
def test_a_job_is_known_by_the_text_that_a_person_wrote(text: str | None, document: Any) -> None:
    assert prompt_in(document) == text


@given(st.sampled_from(PHASES), st.text(string.printable.strip(), max_size=20), st.integers(0, 2**60))
def test_a_cursor_is_read_as_it_was_written(phase: Any, agent: str, sequence: int) -> None:
    assert ListPlace.parse(ListPlace(phase, agent, sequence).text) == ListPlace(phase, agent, sequence)


@each_row("text", ["", "held", "held.a", "held.a.x", "ended.a.1", "held.%ff.1", "held.a.1.2", f"held.a.{'9' * 30}"])
def test_a_cursor_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not the `next` of a page of jobs"):
        ListPlace.parse(text)


@each_row(
    ("shown", "value"),
    [
        ("Write a haiku", "  Write\n\ta haiku "),
        ("word " * 23 + "word", "word " * 40),
        (None, None),
        (None, ""),
        (None, "x" * 500),
        ('{"answer":42}', {"answer": 42}),
        ("0", 0),
    ],
)
def test_a_preview_is_one_short_line_that_ends_with_a_whole_word(shown: str | None, value: Any) -> None:
    assert preview(value) == shown
