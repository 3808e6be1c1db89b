from __future__ import annotations

import re
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.kernel.nats import subjects
from tests.tables import each_row

TOKEN = re.compile(r"[A-Za-z0-9_%-]+")


@given(st.text(min_size=1).filter(lambda text: text.isprintable()))
def test_any_text_makes_one_token_and_comes_back(text: str) -> None:
    token = subjects.encode_token(text)
    assert TOKEN.fullmatch(token)
    assert subjects.decode_token(token) == text
    assert unquote(token) == text  # any language's own URL decoding does it


@given(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=20))
def test_different_texts_make_different_tokens(one: str, other: str) -> None:
    assert (subjects.encode_token(one) == subjects.encode_token(other)) == (one == other)


def test_an_empty_text_is_no_token() -> None:
    with pytest.raises(ValueError, match="empty"):
        subjects.encode_token("")


def test_subjects_stand_as_published_in_the_contract() -> None:
    assert subjects.job("content-writer") == "bw.jobs.content-writer"
    assert subjects.parked("a", "j.1") == "bw.parked.a.j%2E1"
    assert subjects.attempt("a", "j.1", 2) == "bw.attempts.a.j%2E1.2"
    assert subjects.execution("a", "j") == "bw.executions.a.j"
    assert subjects.breaker("a", "gpt-4.1:mini") == "bw.breakers.a.gpt-4%2E1%3Amini"
    assert subjects.budget("agent", "daily") == "bw.budgets.agent.daily"
    assert subjects.alert("breaker_open") == "bw.alerts.breaker_open"
    assert subjects.result("j") == "bw.results.j"
    assert subjects.dead_letter("error", "") == "bw.dlq.error.unknown"
    assert subjects.progress("a", "j") == "bw.progress.a.j"


@each_row("subject", ["bw.jobs", "bw.jobs.", "other.jobs.a", "bw.jobs.a.b.c"])
def test_a_subject_that_is_no_jobs_is_refused(subject: str) -> None:
    with pytest.raises(ValueError, match="not a job's subject"):
        subjects.agent_of_job(subject)


def test_the_agent_is_read_back_from_a_jobs_subject() -> None:
    assert subjects.agent_of_job(subjects.job("an agent/with.dots")) == "an agent/with.dots"


@each_row("subject", ["bw.parked", "bw.parked.a", "bw.parked..e", "other.parked.a.e", "bw.parked.a.e.1"])
def test_a_subject_that_is_no_parked_jobs_is_refused(subject: str) -> None:
    with pytest.raises(ValueError, match="not a parked job's subject"):
        subjects.parts_of_parked(subject)


def test_agent_and_execution_are_read_back_from_a_parked_jobs_subject() -> None:
    names = ("an agent/with.dots", "an id.with*odd>signs")
    assert subjects.parts_of_parked(subjects.parked(*names)) == names
