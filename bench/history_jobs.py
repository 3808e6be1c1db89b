"""One job of the generated history: its attempts and its record, as rows, in the order of the tables' columns."""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal

from bench.history_fleet import (
    PROVIDERS,
    VOCABULARY,
    Agent,
    ErrorCells,
    Failure,
    Model,
    ordinary_failures,
    outage_failures,
)
from breakwater.jobs.rules.previews import preview
from breakwater.jobs.rules.runs import run_id
from breakwater.kernel.ids import ENTROPY_BYTES, id_at
from breakwater.kernel.types import format_time, time_from_ms
from breakwater.records.rows import StoredRow
from breakwater.records.schema import ATTEMPTS

NO_ERROR: ErrorCells = (None,) * 7
MAX_ATTEMPTS = 9
KEY = "app"
"""The API key of all jobs."""
TEAMS = ("search", "support", "growth", "platform")
_REPAIRS = {
    "logic": ("self_correction", 2),
    "context_overflow": ("context_trim", 1),
    "orphan_tool_calls": ("orphan_recovery", 1),
}
_AGAIN = frozenset({"rate_limit", "server", "timeout", "network", "worker_lost"})


@dataclass(frozen=True, slots=True)
class Job:
    """Who asked what, and when."""

    agent: Agent
    tenant: str | None
    task_id: str | None
    parent: str | None
    queued_ms: int

    @property
    def user(self) -> str | None:
        """One of forty users. A third of the jobs name none."""
        return f"user-{self.queued_ms % 40}" if self.queued_ms % 3 else None

    @property
    def team(self) -> str | None:
        """The team of the user."""
        return None if self.user is None else TEAMS[self.queued_ms % len(TEAMS)]


@dataclass(slots=True)
class Course:
    """What has happened to a job so far."""

    at_ms: int
    rows: list[StoredRow] = field(default_factory=list[StoredRow])
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    known: int = 0
    unknown: bool = False
    estimated: bool = False
    first_call: datetime | None = None
    failed: list[tuple[int, str, str]] = field(default_factory=list[tuple[int, str, str]])
    """Of each call: its cost, its model, and its kind of error, empty for a success."""
    calls_by_cause: dict[str, int] = field(default_factory=dict[str, int])
    cost_by_cause: dict[str, int] = field(default_factory=dict[str, int])
    unknown_waste: bool = False
    answer_tokens: tuple[int, int, int] = (0, 0, 0)
    """Of the last call that succeeded: sent, read from the cache, and given."""
    last_call_error: ErrorCells = NO_ERROR


@dataclass(frozen=True, slots=True)
class Done:
    """A job that ended: rows of both tables, and what events are made of."""

    execution: StoredRow
    attempts: list[StoredRow]
    execution_id: str
    reason: str | None
    cost: int
    completed_ms: int


class Jobs:
    """Makes jobs from random numbers; the same ones from the same seed."""

    def __init__(
        self, rng: random.Random, outages: dict[str, list[tuple[int, int]]], failing: float | None = None
    ) -> None:
        self._rng = rng
        self._failing = failing
        self._outages = outages
        self._ordinary = ordinary_failures(rng)
        self._down = outage_failures(rng)
        self._weights = {id(pool): _cumulative(pool) for pool in (*self._ordinary.values(), self._down)}
        self._sequence = 0

    def run(self, job: Job, cached_from: str | None) -> Done:
        """What becomes of a job. With `cached_from` it may be answered from the cache."""
        chance = self._rng.random()
        execution_id = id_at(job.queued_ms, self._rng.randbytes(ENTROPY_BYTES))
        course = Course(job.queued_ms + self._rng.randint(4, 400))
        dispatched_ms = course.at_ms
        if chance < 0.04 and cached_from is not None:
            course.at_ms += self._rng.randint(1, 9)
            return self._record(execution_id, job, course, dispatched_ms, None, job.agent.chain[0], cached_from)
        if chance < 0.05:
            return self._record(execution_id, job, course, dispatched_ms, None, job.agent.chain[0], dry_run=True)
        if chance < 0.058:
            course.at_ms += self._rng.randint(10, 9_000)
            return self._record(execution_id, job, course, dispatched_ms, "cancelled", None)
        if chance < 0.064 and job.task_id is not None:
            return self._record(execution_id, job, course, dispatched_ms, "guard_tripped", None)
        reason, answered_by = self._calls(execution_id, job, course)
        return self._record(execution_id, job, course, dispatched_ms, reason, answered_by)

    def next_sequence(self) -> int:
        """The place of the next event in the stream."""
        self._sequence += 1
        return self._sequence

    def _calls(self, execution_id: str, job: Job, course: Course) -> tuple[str | None, Model | None]:
        rng, agent, place, tries, repairs = self._rng, job.agent, 0, 0, 0
        cause, backoff = "first", 0
        while True:
            model = agent.chain[place]
            down = self._is_down(model.provider, course.at_ms)
            refusal = self._refusal(model, down, course.at_ms)
            if refusal is not None:
                reason, error, refused_by = refusal
                self._refused(execution_id, job, model, course, cause, backoff, error, refused_by)
                if place + 1 == len(agent.chain) or len(course.rows) == MAX_ATTEMPTS:
                    # Where some model was called and failed, that is why the job failed.
                    return ("error" if course.failed else reason), None
                place, tries, repairs, cause, backoff = place + 1, 0, 0, "fallback", 0
                continue
            failure = self._failure(agent, model, down)
            self._called(execution_id, job, model, course, cause, backoff, failure)
            if failure is None:
                return None, model
            backoff = 0
            repair, most = _REPAIRS.get(failure.kind, ("", 0))
            if len(course.rows) == MAX_ATTEMPTS:
                return _end(failure), None
            if repairs < most:
                cause, repairs = repair, repairs + 1
            elif failure.kind in _AGAIN and tries + 1 < agent.max_attempts:
                tries, cause, backoff = tries + 1, "retry", rng.randint(350, 700) << min(tries, 3)
                course.at_ms += backoff
            elif place + 1 < len(agent.chain):
                place, tries, repairs, cause = place + 1, 0, 0, "fallback"
            else:
                return _end(failure), None

    def _is_down(self, provider: str, at_ms: int) -> bool:
        outages = self._outages[provider]
        before = bisect_right(outages, (at_ms, 0))
        return before > 0 and at_ms < outages[before - 1][1]

    def _refusal(self, model: Model, down: bool, at_ms: int) -> tuple[str, ErrorCells, str | None] | None:
        chance = self._rng.random()
        if chance < (0.72 if down else 0.008):
            until = format_time(time_from_ms(at_ms + 60_000))
            reported = f"the breaker for {model.name} is open until {until}; no call was made"
            read = "This agent is paused for now. Please try again later."
            return "breaker_open", ("breaker_open", "CircuitBreakerOpenError", reported, None, False, None, read), None
        if chance > 0.994 and model.input_nano is not None:
            reported = "the limit of agent on spend per day has no room for this call until tomorrow"
            read = "This agent has reached its limit. Please try again tomorrow."
            cells: ErrorCells = ("budget_exceeded", "BudgetExceededError", reported, None, False, None, read)
            return "budget_exceeded", cells, "global/daily"
        return None

    def _failure(self, agent: Agent, model: Model, down: bool) -> Failure | None:
        failing = agent.failing if self._failing is None else self._failing
        if self._rng.random() >= (0.93 if down else failing):
            return None
        pool = self._down if down else self._ordinary[model.provider]
        return self._rng.choices(pool, cum_weights=self._weights[id(pool)])[0]

    def _refused(
        self,
        execution_id: str,
        job: Job,
        model: Model,
        course: Course,
        cause: str,
        backoff: int,
        error: ErrorCells,
        refused_by: str | None,
    ) -> None:
        at = time_from_ms(course.at_ms)
        tokens_and_cost = (*(None,) * 9, "unknown", None, None, None, None)
        tail = (True, refused_by, False, None, cause, backoff, 0, (), at, None, self.next_sequence())
        number = len(course.rows) + 1
        course.rows.append(
            (
                *(f"{execution_id}:{number}", execution_id, execution_id, job.agent.name, job.tenant),
                *(job.task_id, job.task_id),
                *(None, job.user, job.team, None, {}, number),
                *(model.name, model.provider, None, None, at, at, 0),
                *tokens_and_cost,
                "short_circuited",
                *error,
                *tail,
            )
        )

    def _called(
        self,
        execution_id: str,
        job: Job,
        model: Model,
        course: Course,
        cause: str,
        backoff: int,
        failure: Failure | None,
    ) -> None:
        rng, agent = self._rng, job.agent
        started_ms, number = course.at_ms, len(course.rows) + 1
        started = time_from_ms(started_ms)
        kind = "" if failure is None else failure.kind
        billed = kind in ("", "logic")
        sent = int(agent.input_tokens * rng.uniform(0.5, 1.7))
        given = int(agent.output_tokens * rng.uniform(0.3, 1.5)) + 1
        cached = sent // 2 if billed and rng.random() < 0.2 else 0
        begun: int | None = None
        if billed:
            slower = rng.lognormvariate(0, 0.35)
            took = int((model.first_token_ms + given * model.ms_per_token) * slower)
            begun = int(model.first_token_ms * slower) if agent.streams else None
        elif kind == "timeout":
            took = 30_000
        else:
            took = rng.randint(40, 1_600)
        price_in, price_out = model.input_nano, model.output_nano
        reserved = cost = None
        basis = "unknown"
        if price_in is not None and price_out is not None:
            reserved = sent * price_in + 2 * agent.output_tokens * price_out
            if billed:
                cost, basis = _cost(model, sent, cached, given), "billed"
            elif kind in ("timeout", "worker_lost"):
                cost, basis = sent * price_in, "estimated"
            else:
                cost, basis = 0, "billed"
        elif not billed and kind not in ("timeout", "worker_lost"):
            cost, basis = 0, "billed"
        course.at_ms = started_ms + took
        completed = time_from_ms(course.at_ms)
        error: ErrorCells = NO_ERROR if failure is None else rng.choice(failure.in_attempt)
        course.rows.append(
            (
                *(f"{execution_id}:{number}", execution_id, execution_id, agent.name, job.tenant),
                *(job.task_id, job.task_id),
                *(None, job.user, job.team, None, {}, number),
                *(model.name, model.provider, None, None, started, completed, took),
                *((sent, given, cached, None, None, "stop") if billed else (None,) * 6),
                *((None, None) if begun is None else (begun, given)),
                *(None if cost is None else Decimal(cost).scaleb(-9), basis),
                *(None if reserved is None else Decimal(reserved).scaleb(-9), None, started, None),
                "success" if failure is None else "worker_lost" if kind == "worker_lost" else "error",
                *error,
                *(False, None, kind in _AGAIN, number, cause, backoff),
                *(2 if cause in ("context_trim", "orphan_recovery") else 0, (), completed, None),
                self.next_sequence(),
            )
        )
        if course.first_call is None:
            course.first_call = started
        if billed:
            course.input_tokens += sent
            course.output_tokens += given
            course.cached_tokens += cached
        if failure is None:
            course.answer_tokens = (sent, cached, given)
        course.estimated = course.estimated or basis == "estimated"
        course.unknown = course.unknown or cost is None
        if failure is not None:
            course.unknown_waste = course.unknown_waste or cost is None
            course.last_call_error = failure.at_end[failure.in_attempt.index(error)]
        course.calls_by_cause[cause] = course.calls_by_cause.get(cause, 0) + 1
        if cost:
            course.known += cost
            course.cost_by_cause[cause] = course.cost_by_cause.get(cause, 0) + cost
        course.failed.append((cost or 0, model.name, kind))

    def _record(
        self,
        execution_id: str,
        job: Job,
        course: Course,
        dispatched_ms: int,
        reason: str | None,
        answered_by: Model | None,
        cached_from: str | None = None,
        *,
        dry_run: bool = False,
    ) -> Done:
        course.at_ms += self._rng.randint(1, 12)
        agent = job.agent
        wasted = _wasted(course.failed, answered=reason is None)
        waste = sum(wasted.values())
        basis = (
            "unknown" if course.unknown else "estimated" if course.estimated else "billed" if course.failed else "none"
        )
        known = course.known
        status = "succeeded" if reason is None else "cancelled" if reason == "cancelled" else "dead_lettered"
        error = NO_ERROR
        if status == "dead_lettered":
            error = _GUARDED if reason == "guard_tripped" else _last_error(course)
        completed_ms = course.at_ms
        output = self._output(agent) if status == "succeeded" and not dry_run else None
        prompt = self._prompt() if agent.keeps_prompts else None
        row: StoredRow = (
            *(execution_id, execution_id, agent.name, job.tenant, job.task_id, job.task_id),
            *(job.parent, job.parent, None, None),
            *(run_id(job.tenant, job.task_id or job.parent or execution_id), status),
            None if reason == "cancelled" else reason,
            *(agent.chain[0].name, None if answered_by is None else answered_by.name),
            tuple(model.name for model in agent.chain),
            (),  # rules of its own
            *(len(course.rows), course.input_tokens, course.output_tokens, course.cached_tokens),
            course.input_tokens + course.output_tokens,
            Decimal(known).scaleb(-9) if known or not course.unknown else None,
            Decimal(waste).scaleb(-9) if waste or not course.unknown_waste else None,
            {cause: Decimal(nano).scaleb(-9) for cause, nano in wasted.items()},
            course.calls_by_cause,
            {cause: Decimal(nano).scaleb(-9) for cause, nano in course.cost_by_cause.items()},
            basis,
            _cost_on_requested_model(agent, course, answered_by),
            *(output, None if output is None else "stop"),
            *error,
            None,  # statistics
            None if prompt is None else _messages(agent, prompt),
            *(None, None),
            f'{{"ticket":{self._rng.randint(1_000, 99_999)}}}' if self._rng.random() < 0.3 else "{}",
            *(time_from_ms(job.queued_ms), time_from_ms(dispatched_ms), course.first_call),
            *(time_from_ms(completed_ms), completed_ms - job.queued_ms, None),
            *(cached_from is not None, cached_from, dry_run, "8573401e0e10", None),
            *(
                KEY,
                job.user,
                job.team,
                preview(prompt),
                preview(output and output.strip('"')),
                *(None, None),
                self.next_sequence(),
            ),
        )
        return Done(row, course.rows, execution_id, reason, known, completed_ms)

    def _prompt(self) -> str:
        asked = self._words(20, 110)
        return f"{asked} (write to [REDACTED], api_key=[REDACTED])" if self._rng.random() < 0.12 else asked

    def _output(self, agent: Agent) -> str:
        words = self._words(15, 90)
        if agent.output_tokens < 300:
            return f'{{"answer":"{words}","confidence":{self._rng.randint(41, 99) / 100}}}'
        return f'"{words}"'

    def _words(self, least: int, most: int) -> str:
        return " ".join(self._rng.choices(VOCABULARY, k=self._rng.randint(least, most)))


_GUARDED: ErrorCells = (
    "guard_tripped",
    "TaskStoppedError",
    "the task was stopped by its guard; no call was made",
    None,
    False,
    None,
    "This task was stopped. Please ask the people who run it.",
)


def outages(rng: random.Random, start_ms: int, end_ms: int) -> dict[str, list[tuple[int, int]]]:
    """About an hour in which a provider is down, once in four days, for one of them."""
    found: dict[str, list[tuple[int, int]]] = {provider: [] for provider in PROVIDERS}
    at = start_ms + rng.randint(0, 2 * 86_400_000)
    while at < end_ms:
        found[rng.choice(PROVIDERS)].append((at, at + rng.randint(35, 80) * 60_000))
        at += rng.randint(2 * 86_400_000, 6 * 86_400_000)
    return found


def _messages(agent: Agent, prompt: str) -> str:
    system = f"You are {agent.name}. Be clear and friendly."
    return f'[{{"role":"system","content":"{system}"}},{{"role":"user","content":"{prompt}"}}]'


def _end(failure: Failure) -> str:
    return "worker_lost" if failure.kind == "worker_lost" else "error"


_ERROR_AT = list(ATTEMPTS.columns).index("error_kind")


def _last_error(course: Course) -> ErrorCells:
    return course.last_call_error if course.failed else course.rows[-1][_ERROR_AT : _ERROR_AT + 7]


def _cost(model: Model, sent: int, cached: int, given: int) -> int | None:
    """Prices a call; None for a model without a price."""
    if model.input_nano is None or model.output_nano is None:
        return None
    return sent * model.input_nano - cached * model.input_nano // 2 + given * model.output_nano


def _cost_on_requested_model(agent: Agent, course: Course, answered_by: Model | None) -> Decimal | None:
    if answered_by is None or answered_by is agent.chain[0]:
        return None
    cost = _cost(agent.chain[0], *course.answer_tokens)
    return None if cost is None else Decimal(cost).scaleb(-9)


def _wasted(calls: list[tuple[int, str, str]], *, answered: bool) -> dict[str, int]:
    wasted: dict[str, int] = {}
    for place, (cost, model, kind) in enumerate(calls):
        last = place + 1 == len(calls)
        if not cost or (last and answered):
            continue
        if kind == "worker_lost":
            cause = "worker_lost"
        elif kind == "logic":
            cause = "self_correction"
        elif last:
            cause = "failed"
        else:
            cause = "retry" if calls[place + 1][1] == model else "fallback"
        wasted[cause] = wasted.get(cause, 0) + cost
    return wasted


def _cumulative(pool: tuple[Failure, ...]) -> list[float]:
    total, weights = 0.0, list[float]()
    for failure in pool:
        total += failure.weight
        weights.append(total)
    return weights
