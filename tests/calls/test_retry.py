from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from breakwater.calls.rules.classify import (
    WORKER_LOST,
    CallFailure,
    Classification,
    HttpFailure,
    TransportFailure,
    classify,
)
from breakwater.calls.rules.retry import (
    AfterFailure,
    NextModel,
    Redeploy,
    Retry,
    Stop,
    after_failure,
    backoff_s,
    failures_on,
    hold_s,
    is_retryable,
)
from breakwater.calls.settings import BY_NATURE, RetryPolicy
from breakwater.jobs.contract.error_kinds import ErrorKind
from breakwater.jobs.contract.execution import Attempt, Cause, ErrorInfo, Outcome
from tests.tables import each_row

NOW = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)
JITTER = st.floats(0, 1, exclude_max=True)
SERVER = Classification("server", "ServerError", "no", 500, True, True)
TIMEOUT = Classification("timeout", "TimeoutError", "no", None, True, True)
CLIENT = Classification("client", "BadRequestError", "no", 400, False, False)
NOT_FOUND = Classification("client", "NotFoundError", "no", 404, False, False)
LIMITED = Classification("rate_limit", "RateLimitError", "no", 429, True, True, retry_after_s=7.0)
OVERFLOW = Classification("context_overflow", "ContextOverflowError", "no", 400, False, False)
ORPHANS = Classification("orphan_tool_calls", "OrphanToolCallsError", "no", 400, False, False)
INVALID = Classification("logic", "InvalidOutputError", "no", None, True, False)
RATE_LIMITS_APART = RetryPolicy.model_validate({"per_kind": {"rate_limit": {"max": 5, "base_s": 60}}})


# Back-off


@each_row(("retry", "seconds"), [(0, 0.5), (1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (500, 5.0)])
def test_exponential_delays_double_up_to_their_ceiling(retry: int, seconds: float) -> None:
    assert backoff_s(RetryPolicy(), retry, 0.0) == seconds


def test_constant_delays_stay() -> None:
    policy = RetryPolicy(backoff="constant", base_s=0.3)
    assert [backoff_s(policy, retry, 0.0) for retry in range(3)] == [0.3, 0.3, 0.3]


@settings(deadline=None)
@given(st.floats(0, 1800), st.floats(0, 1800), st.integers(0, 10**30), JITTER)
def test_a_delay_is_within_its_bounds(base: float, above: float, retry: int, jitter: float) -> None:
    policy = RetryPolicy(base_s=base, max_delay_s=base + above)
    delay = backoff_s(policy, retry, jitter)
    assert base <= delay - jitter * base / 2 + 1e-9
    assert delay <= policy.max_delay_s + base / 2
    constant = backoff_s(RetryPolicy(backoff="constant", base_s=base), retry, jitter)
    assert base <= constant <= base * 1.5


@settings(deadline=None)
@given(st.floats(0, 1800), st.floats(0, 1800), st.integers(0, 10**6), st.integers(0, 10**6), JITTER)
def test_delays_never_shrink(base: float, above: float, retry: int, more: int, jitter: float) -> None:
    policy = RetryPolicy(base_s=base, max_delay_s=base + above)
    assert backoff_s(policy, retry + more, jitter) >= backoff_s(policy, retry, jitter)


@settings(deadline=None)
@given(st.floats(0.001, 10), st.integers(0, 10), JITTER)
def test_below_the_ceiling_a_delay_is_exactly_the_doubled_base_and_its_jitter(
    base: float, retry: int, jitter: float
) -> None:
    policy = RetryPolicy(base_s=base, max_delay_s=3600)
    assume(base * 2**retry <= 3600)
    assert backoff_s(policy, retry, jitter) == base * 2**retry + jitter * base / 2


# Which failures are counted


def attempt(
    number: int,
    kind: ErrorKind | None = "server",
    *,
    model: str = "sim/m",
    outcome: Outcome = "error",
    cause: Cause = "retry",
) -> Attempt:
    return Attempt(
        attempt_id=f"e:{number}",
        execution_id="e",
        job_id="e",
        agent="a",
        number=number,
        model=model,
        provider="sim",
        started_at=NOW,
        completed_at=NOW,
        duration_ms=0,
        outcome=outcome,
        error=None if kind is None else ErrorInfo(kind=kind, class_="SomeError", message="no"),
        short_circuited=outcome == "short_circuited",
        cause=cause,
    )


def test_failures_are_counted_by_their_kind_on_their_model() -> None:
    attempts = [
        attempt(1, "server"),
        attempt(2, "rate_limit"),
        attempt(3, "server"),
        attempt(4, "client"),
        attempt(5, "timeout", model="sim/n"),
    ]
    assert failures_on("sim/m", attempts) == {"server": 2, "rate_limit": 1, "client": 1}
    assert failures_on("sim/n", iter(attempts)) == {"timeout": 1}
    assert failures_on("sim/o", attempts) == {}


def test_what_was_never_called_is_no_failure() -> None:
    attempts = [
        attempt(1, "breaker_open", outcome="short_circuited"),
        attempt(2, "budget_exceeded", outcome="short_circuited"),
        attempt(3, "retry_budget", outcome="short_circuited"),
    ]
    assert failures_on("sim/m", attempts) == {}


def test_what_is_recovered_from_is_no_failure() -> None:
    attempts = [
        attempt(1, "orphan_tool_calls"),
        attempt(2, "context_overflow", cause="orphan_recovery"),
        attempt(3, "logic", cause="context_trim"),
        attempt(4, "server", cause="self_correction"),
    ]
    assert failures_on("sim/m", attempts) == {"server": 1}


def test_a_refused_credential_that_was_read_again_is_no_failure() -> None:
    refreshed = [attempt(1, "client"), attempt(2, "server", cause="credential_refresh")]
    assert failures_on("sim/m", refreshed) == {"server": 1}
    assert failures_on("sim/m", [*refreshed, attempt(3, "client")]) == {"server": 1, "client": 1}
    elsewhere = [attempt(1, "client"), attempt(2, "server", model="sim/n", cause="credential_refresh")]
    assert failures_on("sim/m", elsewhere) == {"client": 1}


def test_an_answer_that_died_with_its_worker_is_a_failure() -> None:
    lost = [attempt(1, "worker_lost", outcome="worker_lost"), attempt(2, None, outcome="success"), attempt(3)]
    assert failures_on("sim/m", lost) == {"worker_lost": 2, "server": 1}
    # Found when the job is taken up again: nothing has followed it yet.
    assert failures_on("sim/m", lost[:2]) == {"worker_lost": 2}


# What follows


def step(verdict: Classification, failures: dict[ErrorKind, int] | None = None, **more: Any) -> AfterFailure:
    defaults: dict[str, Any] = {
        "policy": RetryPolicy(),
        "failures": {verdict.kind: 1} if failures is None else failures,
        "is_last_model": False,
        "remaining_s": 60.0,
        "jitter": 0.0,
    }
    return after_failure(verdict, **(defaults | more))


@each_row(
    ("got", "expected"),
    [
        (step(SERVER), Retry(0.5)),
        (step(SERVER, {"server": 2}), Retry(1.0)),
        (step(SERVER, {"server": 1, "timeout": 1}), Retry(1.0)),
        (step(SERVER, {"server": 3}), NextModel(exhausted=True)),
        (step(SERVER, {"server": 1, "network": 2}), NextModel(exhausted=True)),
        (step(SERVER, {"server": 3}, is_last_model=True), Stop("error", exhausted=True)),
        (step(SERVER, jitter=0.5), Retry(0.625)),
        (step(CLIENT), NextModel()),
        (step(CLIENT, is_last_model=True), Stop("error")),
        (step(LIMITED), Retry(7.0)),
        (step(LIMITED, remaining_s=7.0), NextModel()),
        (step(LIMITED, remaining_s=7.001), Retry(7.0)),
        (step(LIMITED, remaining_s=5.0, is_last_model=True), Stop("timeout")),
        (step(SERVER, remaining_s=0.5), NextModel()),
        (step(SERVER, remaining_s=0.0), Stop("timeout")),
        (step(SERVER, {"server": 3}, remaining_s=0.0), Stop("timeout")),
        (step(CLIENT, remaining_s=-1.0), Stop("timeout")),
        (step(OVERFLOW), NextModel()),
        (step(ORPHANS, is_last_model=True), Stop("error")),
        (step(INVALID), NextModel()),
        (step(SERVER, {}), Retry(0.5)),
    ],
)
def test_what_follows_a_failure(got: AfterFailure, expected: AfterFailure) -> None:
    assert got == expected


@settings(deadline=None)
@given(st.integers(1, 10), st.booleans(), JITTER, st.lists(st.sampled_from([SERVER, TIMEOUT, LIMITED]), min_size=10))
def test_a_model_is_tried_exactly_as_often_as_configured(
    attempts: int, last: bool, jitter: float, verdicts: list[Classification]
) -> None:
    policy = RetryPolicy(max_attempts=attempts)
    failures: dict[ErrorKind, int] = {}
    for tries, verdict in enumerate(verdicts, 1):
        failures[verdict.kind] = failures.get(verdict.kind, 0) + 1
        after = step(verdict, failures, policy=policy, is_last_model=last, jitter=jitter, remaining_s=1e9)
        if not isinstance(after, Retry):
            assert tries == attempts
            assert after == (Stop("error", True) if last else NextModel(True))
            return
        assert tries < attempts


def test_a_busy_model_uses_up_no_tries_of_a_job_that_may_retry_and_has_no_other() -> None:
    spent: dict[ErrorKind, int] = {"rate_limit": 3}
    once, counted = RetryPolicy(max_attempts=1), RetryPolicy.model_validate({"per_kind": {"rate_limit": {"max": 2}}})
    assert step(LIMITED, spent, is_last_model=True, busy=True) == Retry(7.0)
    assert step(LIMITED, spent, is_last_model=True, busy=True, remaining_s=7.0) == Stop("timeout")
    assert step(LIMITED, spent, is_last_model=True) == Stop("error", exhausted=True)
    assert step(LIMITED, spent, busy=True) == NextModel(exhausted=True)
    for policy in (once, counted):
        assert step(LIMITED, spent, is_last_model=True, busy=True, policy=policy) == Stop("error", exhausted=True)


def test_a_wait_that_a_provider_asks_for_is_waited_for_unless_another_model_answers_sooner() -> None:
    long = replace(LIMITED, retry_after_s=10.5)
    assert step(LIMITED, jitter=0.5) == Retry(7.0 * 1.05)
    assert step(long) == NextModel()
    assert step(long, is_last_model=True) == Retry(10.5)


@each_row(
    ("named_s", "policy", "failures", "held_s"),
    [
        (7.0, RetryPolicy(), {"rate_limit": 1}, 7.0),
        (0.0, RetryPolicy(), {"rate_limit": 1}, 0.0),
        (3600.0, RetryPolicy(), {"rate_limit": 1}, 3600.0),
        (None, RetryPolicy(), {"rate_limit": 1}, 0.5),
        (None, RetryPolicy(), {"rate_limit": 2, "server": 1}, 2.0),
        (None, RATE_LIMITS_APART, {"rate_limit": 1, "server": 2}, 10.0),
    ],
)
def test_a_model_is_held_for_as_long_as_its_provider_asks_for_or_for_a_back_off(
    named_s: float | None, policy: RetryPolicy, failures: dict[ErrorKind, int], held_s: float
) -> None:
    assert hold_s(named_s, policy, failures) == held_s


def test_a_kind_with_its_own_limit_is_counted_apart() -> None:
    limited = Classification("rate_limit", "RateLimitError", "no", 429, True, True)

    def after(verdict: Classification, rate_limits: int, others: int) -> AfterFailure:
        failures: dict[ErrorKind, int] = {"rate_limit": rate_limits, "server": others}
        return step(verdict, failures, policy=RATE_LIMITS_APART, remaining_s=1e6)

    assert [after(limited, count, 3) for count in range(1, 6)] == [Retry(60.0)] * 5
    assert after(limited, 6, 0) == NextModel(exhausted=True)
    assert after(SERVER, 5, 1) == Retry(0.5)
    assert after(SERVER, 5, 2) == Retry(1.0)
    assert after(SERVER, 0, 3) == NextModel(exhausted=True)


def test_a_kind_may_have_its_own_delays_and_share_the_tries() -> None:
    policy = RetryPolicy.model_validate(
        {"per_kind": {"server": {"base_s": 2, "max_delay_s": 3}, "timeout": {"backoff": "constant"}}}
    )
    assert step(SERVER, {"server": 1}, policy=policy) == Retry(2.0)
    assert step(SERVER, {"server": 1, "timeout": 1}, policy=policy) == Retry(3.0)
    assert step(TIMEOUT, {"server": 1, "timeout": 1}, policy=policy) == Retry(0.5)
    assert step(TIMEOUT, {"server": 1, "timeout": 2}, policy=policy) == NextModel(exhausted=True)


def test_a_kind_may_have_no_retries() -> None:
    policy = RetryPolicy.model_validate({"per_kind": {"timeout": {"max": 0}}})
    assert step(TIMEOUT, policy=policy) == NextModel(exhausted=True)
    assert step(SERVER, policy=policy) == Retry(0.5)


def test_a_base_of_its_own_lifts_the_ceiling_and_one_below_it_does_not() -> None:
    assert RATE_LIMITS_APART.for_kind("rate_limit").max_delay_s == 60
    assert RetryPolicy.model_validate({"per_kind": {"server": {"base_s": 2}}}).for_kind("server").max_delay_s == 5
    assert RATE_LIMITS_APART.for_kind("server") == RATE_LIMITS_APART


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(["server", "timeout", "rate_limit", "client", "worker_lost"]), st.integers(0, 200)),
    st.floats(-10, 1e6),
    JITTER,
    st.booleans(),
    st.sampled_from([SERVER, LIMITED, CLIENT, OVERFLOW]),
    st.sampled_from([RetryPolicy(), RATE_LIMITS_APART, RetryPolicy.model_validate({"on": [400]})]),
)
def test_a_retry_always_fits_into_what_is_left(
    failures: dict[ErrorKind, int],
    remaining_s: float,
    jitter: float,
    last: bool,
    verdict: Classification,
    policy: RetryPolicy,
) -> None:
    after = step(verdict, failures, policy=policy, remaining_s=remaining_s, jitter=jitter, is_last_model=last)
    if isinstance(after, Retry):
        assert (verdict.retry_after_s or 0) <= after.delay_s < remaining_s
    elif remaining_s > 0:
        assert isinstance(after, Stop) == last


# What is retried


@each_row("on", [404, "client", "NotFoundError", "NotFound"])
def test_agents_may_name_more_that_is_retried(on: int | str) -> None:
    assert step(NOT_FOUND) == NextModel()
    policy = RetryPolicy(on=(418, on))
    assert is_retryable(NOT_FOUND, policy)
    assert step(NOT_FOUND, policy=policy) == Retry(0.5)
    assert step(NOT_FOUND, {"client": 3}, policy=policy) == NextModel(exhausted=True)
    assert is_retryable(CLIENT, policy) == (on == "client")


def test_a_status_that_is_retried_is_not_where_that_is_in_vain() -> None:
    policy = RetryPolicy(on=(402, 429, 500))
    for failure in (
        HttpFailure(402, "no"),
        HttpFailure(429, "no", "1113"),
        HttpFailure(500, "no", headers={"x-should-retry": "false"}),
    ):
        assert not is_retryable(classify(failure, NOW), policy)
    assert is_retryable(classify(HttpFailure(402, "no"), NOW), RetryPolicy(on=("quota",)))


def test_what_has_a_recovery_of_its_own_is_not_retried_even_where_its_status_is_named() -> None:
    policy = RetryPolicy(on=(400, "client", "BadRequest"))
    assert is_retryable(CLIENT, policy)
    for verdict in (OVERFLOW, ORPHANS, INVALID):
        assert not is_retryable(verdict, policy)


@each_row(
    ("on", "words"),
    [
        (200, "not the status code of an error"),
        (600, "not the status code of an error"),
        (-1, "not the status code of an error"),
        ("404", "write a status code without quotes"),
        ("not_found", "no error class"),
        ("", "no error class"),
        ("sometimes!", "no error class"),
        ("logic", "a recovery of its own"),
        ("context_overflow", "a recovery of its own"),
        ("orphan_tool_calls", "a recovery of its own"),
        ("ContextOverflowError", "a recovery of its own"),
        ("OrphanToolCalls", "a recovery of its own"),
        ("breaker_open", "no call was made"),
        ("budget_exceeded", "no call was made"),
    ],
)
def test_what_can_not_be_retried_is_refused_in_words(on: int | str, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RetryPolicy(on=(on,))


@each_row(
    ("policy", "words"),
    [
        ({"base_s": 10, "max_delay_s": 5}, r"^[^:]*\n.*max_delay_s must not be below base_s"),
        ({"per_kind": {"server": {"base_s": 10, "max_delay_s": 5}}}, "per_kind.server: max_delay_s"),
        ({"per_kind": {"server": {"max_delay_s": 0.1}}}, "per_kind.server: max_delay_s"),
        (
            {"backoff": "constant", "base_s": 15, "per_kind": {"server": {"backoff": "exponential"}}},
            "per_kind.server: max_delay_s",
        ),
        ({"per_kind": {"logic": {"max": 3}}}, "per_kind.logic"),
    ],
)
def test_a_ceiling_below_the_base_is_refused(policy: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RetryPolicy.model_validate(policy)


def test_a_constant_delay_needs_no_ceiling() -> None:
    RetryPolicy(backoff="constant", base_s=15)
    RetryPolicy.model_validate({"per_kind": {"rate_limit": {"backoff": "constant", "base_s": 60, "max_delay_s": 1}}})


def test_what_on_does_not_name_is_not_retried(subtests: pytest.Subtests) -> None:
    failures: dict[str, CallFailure] = {
        "timeout": TransportFailure("timeout", "TimeoutError", "late"),
        "network": TransportFailure("network", "IoError", "reset"),
        "rate_limit": HttpFailure(429, "slow down"),
        "server": HttpFailure(500, "no"),
        "transient": HttpFailure(408, "no"),
        "client": HttpFailure(404, "no"),
        "quota": HttpFailure(402, "pay"),
    }
    verdicts = {name: classify(failure, NOW) for name, failure in failures.items()} | {"worker_lost": WORKER_LOST}
    by_default = {"timeout", "network", "rate_limit", "server", "transient", "worker_lost"}
    rows: list[tuple[tuple[int | str, ...] | None, set[str]]] = [
        (None, by_default),
        (("timeout",), {"timeout"}),
        ((503, "NotFoundError"), {"client"}),
        ((500, 404), {"server", "client"}),
        (("PaymentRequiredError",), {"quota"}),
        (("PaymentRequired",), {"quota"}),
        (("TimeoutError", "QuotaExceeded"), {"timeout", "quota"}),
        ((), set()),
        ((*BY_NATURE, 404), by_default | {"client"}),
    ]
    for on, retried in rows:
        with subtests.test(str(on)):
            policy = RetryPolicy() if on is None else RetryPolicy(on=on)
            assert {name for name, verdict in verdicts.items() if is_retryable(verdict, policy)} == retried


def test_a_spent_quota_of_another_status_is_no_required_payment() -> None:
    spent = classify(HttpFailure(429, "no", code="insufficient_quota"), NOW)
    assert spent.kind == "quota"
    assert not is_retryable(spent, RetryPolicy(on=("PaymentRequiredError",)))


# Other deployments

QUOTA = Classification("quota", "QuotaExceededError", "no", 429, False, False)
UNAUTHORIZED = Classification("client", "AuthenticationError", "no", 401, False, False)


@each_row(
    ("verdict", "failures", "step"),
    [
        (SERVER, {"server": 1}, Redeploy),
        (TIMEOUT, {"timeout": 2}, Redeploy),
        (SERVER, {"server": 3}, NextModel),  # the attempts are the model's, wherever they are made
        (LIMITED, {"rate_limit": 9}, Redeploy),  # no work was done
        (QUOTA, {"quota": 1}, Redeploy),
        (UNAUTHORIZED, {"client": 1}, Redeploy),
        (NOT_FOUND, {"client": 1}, Redeploy),
        (CLIENT, {"client": 1}, NextModel),  # the request is at fault everywhere
        (OVERFLOW, {"context_overflow": 1}, NextModel),
        (INVALID, {"logic": 1}, NextModel),
        (WORKER_LOST, {"worker_lost": 1}, Retry),
    ],
)
def test_another_deployment_is_called_where_it_may_do_better(
    verdict: Classification, failures: dict[ErrorKind, int], step: type[AfterFailure]
) -> None:
    decided = after_failure(
        verdict,
        policy=RetryPolicy(),
        failures=failures,
        is_last_model=False,
        remaining_s=60,
        jitter=0,
        elsewhere=True,
    )
    assert isinstance(decided, step)


def test_a_deployment_that_did_no_work_costs_no_try() -> None:
    limited = [
        attempt(1, "rate_limit"),
        attempt(2, "server", cause="redeployment"),
        attempt(3, "server", cause="redeployment"),
    ]
    assert failures_on("sim/m", limited) == {"server": 2}
    assert failures_on("sim/m", limited[:1]) == {"rate_limit": 1}
