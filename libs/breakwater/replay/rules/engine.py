"""Replays recorded jobs under a policy, in the order of the log and on the clock of its events.

A job follows its record as long as the rules decide as they did: then its calls have their recorded times and
outcomes. Once they decide otherwise, it has left the record: its further calls are made when the rules say so, and
their outcomes are drawn from what the model answered to others at about that time.

What no rule here decides (rate limits, holds, the retry budget, repairs of requests, the choice among deployments) is
taken from the record, and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from typing import Any, Literal, NamedTuple

from breakwater.alerts.contract import Alert
from breakwater.breakers.contract import BreakerTransition
from breakwater.breakers.rules.admission import PROBE_WAIT_S
from breakwater.breakers.rules.breaker import BreakerKey, Observation, caller_of
from breakwater.breakers.rules.observations import observation_of
from breakwater.breakers.rules.refusals import breaker_open
from breakwater.calls.rules.classify import classification_of
from breakwater.calls.rules.retry import NextModel, Redeploy, Retry, Stop, after_failure, cause_after, failures_on
from breakwater.calls.rules.unanswered import why_unanswered
from breakwater.calls.rules.waits import LEASE_MARGIN_S, POLL_S
from breakwater.calls.settings import RetryPolicy
from breakwater.jobs.contract.execution import REPAIRS, Attempt, ErrorInfo, Execution, FailureStatistics, Reason
from breakwater.jobs.contract.job import RulesPart
from breakwater.jobs.rules.record import spent_by, status_of, totals
from breakwater.kernel.immutable import changed, immutable
from breakwater.kernel.types import ms_from_time, time_from_ms
from breakwater.limits.contract import BudgetEvent, GuardEvent
from breakwater.limits.rules.budget import OWN_CAP, fits
from breakwater.limits.rules.guard import task_statistics
from breakwater.limits.rules.refusals import budget_held, over_budget, over_own_cap, task_stopped
from breakwater.limits.settings import GuardRules
from breakwater.replay.rules.alerts import ReplayedAlerts, is_of_person
from breakwater.replay.rules.breakers import JITTER, LOOK_EVERY_MS, ORDER_MS, ReplayedBreakers, Success, statistics_of
from breakwater.replay.rules.counters import CountedPlace, ReplayedCounters
from breakwater.replay.rules.history import AgentPolicy, Changes, LoggedAttempt, Policy, RecordedJob, is_of_lost_worker
from breakwater.replay.rules.prices import ChangedPrices
from breakwater.replay.rules.tasks import ReplayedTasks, TaskName, TaskVerdict
from breakwater.replay.rules.world import World, as_call_of, cut_off_after

POLL_MS = round(POLL_S * 1000)
"""The interval at which a call that waits for capacity asks again."""

RACE_MS = 1000
"""The most time between a change and a call for which the order of the two is unknown: clocks differ, and a worker
learns the answer a moment after it was given."""

OWN_CALL_MS = 1_000
"""The most time between a recorded call and another moment at which it would have ended in the same way."""

WORKER_LOST = "worker lost"
"""The cause of what depends on how far a worker came that was lost."""

EDGE = "edge of a window"
"""The cause of a transition whose errors within a window are those of the record, as one may be within or not."""

TASK_ORDER = "order of a task's jobs"
"""The cause of what depends on the order in which Redis had jobs of a task that ran at once."""

OUTCOME_ORDER = "order of outcomes"
"""The cause of a transition that outcomes lead to in another order than that of the log."""

LATE_ALERTER = "late alerter"
"""The cause of a difference in an incident of jobs' ends. A busy or restarted alerter gets ends late:
whether an open breaker explains them by then, or not yet, is chance."""

_REPLAYED: frozenset[Reason] = frozenset({"breaker_open", "budget_exceeded", "guard_tripped"})
"""The reasons of refusals that the replay decides itself."""


@immutable()
class ReplayedRefusal:
    """The reason why a call is not made.

    Attributes:
        reason: the reason of the job's end, unless another model answers.
        error: the error, as its attempt has it.
        refused_by: the limit that has no room.
        refused_cap: that limit, in nano-dollars, unless it is too small for any such call.
        ends_chain: True if no other model is tried.
        statistics: those of the guard or the breaker that refused.
    """

    reason: Reason
    error: ErrorInfo
    refused_by: str | None = None
    refused_cap: int | None = None
    ends_chain: bool = False
    statistics: FailureStatistics | None = None

    def is_as_recorded(self, attempt: Attempt) -> bool:
        """Returns True if a recorded attempt was refused in the same way, as far as the record has it."""
        figures = None if attempt.error is None else attempt.error.figures
        if attempt.statistics is None and figures is None:  # as the tables have it
            return (attempt.refused_reason, attempt.refused_by) == (self.reason, self.refused_by)
        if self.statistics is None and figures != self.error.figures:
            return False
        recorded = attempt.refused_reason, attempt.refused_by, attempt.refused_cap, attempt.statistics
        return recorded == (self.reason, self.refused_by, self.refused_cap, self.statistics)


ReplayedEvent = BreakerTransition | BudgetEvent | GuardEvent | Alert
"""An event of a breaker, a limit, a task or an incident."""

Kind = Literal["refusal", "step", "end"]


class Difference(NamedTuple):
    """A decision of the replay that the record does not have.

    Attributes:
        execution_id: the job.
        kind: what was decided: whether a call is refused, what follows a failure, or how the job ends.
        recorded: what the record says, in words.
        replayed: what the replay decided, in words.
        at_ms: when, in milliseconds since the epoch.
    """

    execution_id: str
    kind: Kind
    recorded: str
    replayed: str
    at_ms: int


@dataclass(slots=True)
class ReplayedJob:
    """A job in the replay.

    Attributes:
        job: its record.
        agent: the settings of its agent.
        before: those that it ran under.
        chain: the models that it tries, in order.
        deadline_ms: the end of its time, in milliseconds since the epoch.
        task: its task; None if it is one of its own.
        index: the place in the chain of the model that it tries.
        attempts: its attempts so far.
        follows: True while the rules have decided as the record says.
        diverges: True if its rules, or the calls that they have met, are not those of the record.
        unknown: True if history can't tell how it went on.
        drawn: the number of its calls whose outcomes were drawn.
        is_drawn: True if the outcome of its next call is drawn.
        reason: the reason of its end without an answer; None if it has one, or has not ended.
        ended_ms: the time of its end, in milliseconds since the epoch.
    """

    job: RecordedJob
    agent: AgentPolicy
    before: AgentPolicy
    chain: tuple[str, ...]
    deadline_ms: int
    task: TaskName | None = None
    index: int = 0
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    follows: bool = True
    diverges: bool = False
    unknown: bool = False
    drawn: int = 0
    is_drawn: bool = False
    reason: Reason | None = None
    error: ErrorInfo | None = None
    ended_ms: int = 0
    backoff_ms: int = 0
    waited_ms: int = 0
    version: int | None = None

    @property
    def next_recorded(self) -> LoggedAttempt | None:
        """The attempt of the record that comes next; None if the job has left the record, or that has ended."""
        number = len(self.attempts)
        return self.job.attempts[number] if self.follows and number < len(self.job.attempts) else None

    @property
    def is_cut_shorter(self) -> bool:
        """True if its calls may be cut off earlier than they were."""
        timeout_is_shorter = self.agent.timeout_s < self.before.timeout_s
        return timeout_is_shorter or self.agent.total_timeout_s < self.before.total_timeout_s or not self.follows

    @property
    def model(self) -> str:
        """The model that it tries."""
        return self.chain[self.index]

    @property
    def is_at_last(self) -> bool:
        """True if its chain has no further model."""
        return self.index + 1 >= len(self.chain)

    @property
    def duration_ms(self) -> int:
        """The duration of the job, once it has ended, in milliseconds."""
        record = self.job.record
        return record.duration_ms if self.follows else max(0, self.ended_ms - ms_from_time(record.queued_at))

    @property
    def chosen_model(self) -> str | None:
        """The model that answered; None if none did."""
        return self.attempts[-1].model if self.attempts and self.attempts[-1].outcome == "success" else None


@dataclass(slots=True)
class ReplayFindings:
    """The findings of a replay.

    Attributes:
        transitions: those of the breakers.
        budgets: the thresholds that were reached.
        guards: the tasks that were stopped, or are near a limit.
        alerts: the changes of the incidents of these.
        differences: the decisions that the record does not have.
        races: the decisions that were taken from the record, as the order of two events is not known, by what decided.
        followed: the decisions that were taken from the record, as no rule here makes them, by their reason.
        refusals: how many refusals were decided as the record says, by their reason.
        ends: how many jobs ended as the record says.
    """

    transitions: list[BreakerTransition] = field(default_factory=list[BreakerTransition])
    budgets: list[BudgetEvent] = field(default_factory=list[BudgetEvent])
    guards: list[GuardEvent] = field(default_factory=list[GuardEvent])
    alerts: list[Alert] = field(default_factory=list[Alert])
    differences: list[Difference] = field(default_factory=list[Difference])
    races: Counter[str] = field(default_factory=Counter[str])
    followed: Counter[str] = field(default_factory=Counter[str])
    refusals: Counter[str] = field(default_factory=Counter[str])
    ends: int = 0

    def add(self, event: ReplayedEvent) -> None:
        """Keeps an event."""
        match event:
            case BreakerTransition():
                self.transitions.append(event)
            case BudgetEvent():
                self.budgets.append(event)
            case GuardEvent():
                self.guards.append(event)
            case Alert():
                self.alerts.append(event)


@immutable()
class _Verdict:
    """The verdict of the gates on a call that is not admitted: it is refused, or waits."""

    refusal: ReplayedRefusal
    waits: bool = False


_Step = Retry | Redeploy | NextModel | Stop | Literal["repair"]


class Replay:
    """A replay of jobs under a policy. It runs once."""

    def __init__(
        self,
        policy: Policy,
        before: Policy,
        changes: Changes,
        world: World,
        *,
        on_end: Callable[[ReplayedJob], None] = lambda _: None,
        on_event: Callable[[ReplayedEvent], None] | None = None,
        used_before: dict[CountedPlace, int] | None = None,
    ) -> None:
        """Makes a replay.

        Args:
            policy: the policy to try.
            before: the policy that the jobs ran under.
            changes: what the services decided meanwhile.
            world: what models answer to calls that were never made.
            on_end: is called with each job that has ended.
            on_event: is called with each event. None to keep them, and the differences, in the findings, which grow.
            used_before: what earlier calls have used in the periods in which the jobs begin.
        """
        self.findings = ReplayFindings()
        self._policy = policy
        self._before = before
        self._agents = {
            name: was if (was := before.agents.get(name)) == agent else agent for name, agent in policy.agents.items()
        }
        """The agents of the policy; those that are as they were are the same objects."""
        self._world = world
        self._on_end = on_end
        self._on_event = on_event or self.findings.add
        self._keeps_differences = on_event is None
        self._prices = ChangedPrices(before.prices, policy.prices)
        self._breakers = ReplayedBreakers(
            policy.breakers, changes.transitions, self._note_transition, changes.earlier_transitions
        )
        limits = policy.limits, policy.zone, self._note_budget, used_before, before.limits
        self._counters = ReplayedCounters(*limits, changes.limits, policy.amounts, changes.budgets)
        self._tasks = ReplayedTasks(self._note_guard, changes.guards)
        self._diverged: set[BreakerKey | TaskName] = set()
        """The breakers and tasks that calls have reached, or have not, otherwise than in the record."""
        self._lost: set[TaskName] = set()
        """The tasks of jobs whose worker was lost: nobody knows whether it had counted them."""
        self._answered_ms: dict[str, int] = {}
        """The time of each deployment's latest answer."""
        self._alerts = ReplayedAlerts(
            policy.alerts,
            changes.alerts,
            self._on_event,
            lambda at_ms, work: self._at(at_ms, _LOOKS, work),
        )
        self._events: list[tuple[int, int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        """The queue: the time of each event, its rank, its place in the log, the order of making, and the work."""
        self._ties = 0
        self._sequence = 0
        self._ahead: dict[str, int] = {}
        """The places of outcomes that their breakers may have had before others that the log has first, by attempt."""
        self._looks_ms: int | None = None
        """The time at which breakers are looked at next; None while all are closed, or wait for a call."""
        self._keys: dict[tuple[str, str, str, str], BreakerKey] = {}
        self._latest_race = "", 0
        """The latest call whose verdict is taken from the record: its job, and the number of attempts before it."""
        self._under_way = 0
        """The number of jobs that have begun and not ended."""
        self._ends_ms = max((ms_from_time(event.at) for event in (*changes.transitions, *changes.alerts)), default=0)
        """The time of the latest change: until then, breakers and incidents change without a job, too."""
        for at_ms, act in self._acts_of(changes):
            self._at(at_ms, _ENDS, act)

    def run(self, jobs: Iterable[RecordedJob]) -> None:
        """Replays jobs, which come in the order in which they began; later ones may come with another call."""
        begins_ms = 0
        for job in jobs:
            begins_ms = job.begins_ms
            self._run_until(begins_ms)
            self._begin(job, begins_ms)
        self._tasks.forget(begins_ms)

    def finish(self) -> ReplayFindings:
        """Replays what is left of the jobs that have begun. Returns all that the replay has found."""
        while self._under_way:
            self._run_next()
        self._run_until(self._ends_ms + 1)
        self._alerts.finish()
        self.findings.races.update({EDGE: self._breakers.edges, LATE_ALERTER: self._alerts.unexplained_then})
        return self.findings

    # The queue of events

    def _at(self, at_ms: int, rank: int, work: Callable[..., None], *args: Any, sequence: int = 0) -> None:
        """Has work done at a time, which is its last argument."""
        self._ties += 1
        heappush(self._events, (at_ms, rank, sequence, self._ties, work, args))

    def _run_next(self) -> None:
        at_ms, _, _, _, work, args = heappop(self._events)
        work(*args, at_ms)

    def _run_until(self, at_ms: int) -> None:
        events = self._events
        while events and events[0][0] < at_ms:
            event_ms, _, _, _, work, args = heappop(events)
            work(*args, event_ms)

    def _look(self, now_ms: int) -> None:
        """Looks at the breakers, as the service does every 10 s, if that may change one."""
        if now_ms == self._looks_ms:
            self._breakers.look(now_ms)
            self._looks_ms = None
            self._plan_look(now_ms)

    def _plan_look(self, now_ms: int) -> None:
        due_ms = self._breakers.due_ms(now_ms)
        if due_ms is not None:
            at_ms = now_ms + LOOK_EVERY_MS * max(1, -(-(due_ms - now_ms) // LOOK_EVERY_MS))
            if self._looks_ms is None or at_ms < self._looks_ms:
                self._looks_ms = at_ms
                self._at(at_ms, _LOOKS, self._look)

    def _acts_of(self, changes: Changes) -> Iterator[tuple[int, Callable[[int], None]]]:
        """Yields what operators did, and when breakers were looked at without a call, each with its time."""
        for transition in changes.transitions:
            at_ms = ms_from_time(transition.at)
            if transition.by is not None:
                yield at_ms, lambda _, event=transition: self._breakers.act(event)
            elif transition.waits:
                yield at_ms, self._breakers.look
        for budget in changes.budgets:
            if budget.kind in {"raised", "raise_ended"}:
                yield ms_from_time(budget.at), lambda _, event=budget: self._act_on_budget(event)
        for limit in changes.limits:
            yield ms_from_time(limit.at), lambda _, event=limit: self._counters.change(event)
        for guard in changes.guards:
            if guard.kind == "reset":
                yield ms_from_time(guard.at), lambda _, event=guard: self._tasks.reset(event)
        for alert in changes.alerts:
            if is_of_person(alert):
                yield ms_from_time(alert.at), lambda _, alert=alert: self._alerts.act(alert)

    # One job

    def _begin(self, job: RecordedJob, now_ms: int) -> None:
        record = job.record
        before = self._before.agents.get(record.agent)
        agent = self._agents.get(record.agent, before)
        if agent is None or before is None:
            self.findings.followed["agent of no config"] += 1
            return
        if record.own_rules:
            agent, before = _beside_own_rules(agent, before, record.own_rules)
        # A job that names other models than its agent does keeps them.
        chain = agent.chain if record.fallback_chain == before.chain else record.fallback_chain
        deadline_ms = ms_from_time(record.dispatched_at) + round(agent.total_timeout_s * 1000)
        task = None if record.task_key is None else TaskName(record.tenant, record.task_key)
        run = ReplayedJob(job, agent, before, chain or record.fallback_chain, deadline_ms, task)
        if record.agent not in self._policy.agents:
            run.follows = False
            run.unknown = True
            self._on_end(run)
        elif not job.attempts:
            # Answered from the cache, invalid, or cancelled in time: as recorded.
            run.reason = record.reason
            self.findings.followed[record.reason or ("cache" if record.cache_hit else "no attempt")] += 1
            self._under_way += 1
            self._at(self._tasks.counted_ms(record, now_ms), _ENDS, self._end_job, run, record, sequence=_AFTER_ALL)
        else:
            self._under_way += 1
            first = job.attempts[0]
            if first.asked_ms > now_ms:
                self._enter_task(run, first.attempt, now_ms)
            self._at(first.asked_ms, _ASKS, self._ask, run)

    def _enter_task(self, run: ReplayedJob, waiting: Attempt, now_ms: int) -> None:
        """Counts a job as an iteration of its task while it waits for room, as the gate of tasks does."""
        if run.agent.guard is not None and run.task is not None:
            record = run.job.record
            self._tasks.judge(run.task, record, run.agent.guard, (), waiting.reserved, now_ms)
            self._tasks.give_back(run.task, record.execution_id, ())

    def _ask(self, run: ReplayedJob, now_ms: int) -> None:
        recorded = run.next_recorded
        if recorded is not None and recorded.attempt.model != run.model:
            self._leave(run, "step", recorded.attempt.model, run.model, now_ms)
            recorded = None
        if recorded is None and now_ms >= run.deadline_ms:
            self._conclude(run, Stop("timeout"), now_ms)
            return
        if recorded is not None and recorded.attempt.refused_reason == "error":
            # Refused before any gate was asked: by the retry budget, or as no deployment is in its region.
            self._follow(recorded.attempt)
            self._end_at(run, recorded.attempt, recorded, now_ms)
            return
        call = self._next_call(run, now_ms) if recorded is None else recorded.attempt
        if call is None:
            run.unknown = True
            self._conclude(run, Stop("error"), now_ms)
            return
        call = self._prices.reprice(call)
        verdict = self._admit(run, call, now_ms)
        if recorded is not None:
            verdict = self._beside_record(run, recorded.attempt, verdict, now_ms)
        if verdict is not None and verdict.waits:
            run.waited_ms += POLL_MS
            run.backoff_ms += POLL_MS
            self._at(now_ms + POLL_MS, _ASKS, self._ask, run)
            return
        run.waited_ms = 0
        if not run.follows:
            recorded = None
        if verdict is not None:
            self._release(run, call)
            refusal = verdict.refusal
            refused = call if recorded is not None else self._refusal_of(run, call, refusal, now_ms)
            if refused.refused_cap is None and refusal.refused_cap is not None:  # the tables do not have it
                refused = refused.model_copy(update={"refused_cap": refusal.refused_cap})
            self._end_at(run, refused, recorded, now_ms)
            return
        if call.short_circuited:  # it was refused, and is not now
            answered = self._next_call(run, now_ms)
            if answered is None:
                self._release(run, call)
                run.unknown = True
                self._conclude(run, Stop("error"), now_ms)
                return
            # What the gates have granted is kept under the name of the call that they were asked about.
            call = self._prices.reprice(answered).model_copy(update={"attempt_id": call.attempt_id})
        run.drawn += recorded is None and run.is_drawn
        called = call
        if run.is_cut_shorter:
            called = cut_off_after(call, run.agent.timeout_s, (run.deadline_ms - now_ms) / 1000)
        self._end_at(run, called, recorded if recorded is not None and called is recorded.attempt else None, now_ms)

    def _end_at(self, run: ReplayedJob, attempt: Attempt, recorded: LoggedAttempt | None, now_ms: int) -> None:
        """Has an attempt end when the log says so, in the order of the log, or else when it ends."""
        if recorded is None:
            self._diverge(run, [attempt])
            if run.follows:
                self._stop_following(run)
        at_ms = ms_from_time(attempt.completed_at) if recorded is None else recorded.at_ms
        sequence = _AFTER_ALL if recorded is None else recorded.sequence
        self._at(max(now_ms, at_ms), _ENDS, self._end, run, attempt, sequence=sequence)

    def _next_call(self, run: ReplayedJob, now_ms: int) -> Attempt | None:
        """Returns the call that a job makes now which has left its record; None if history can't tell its outcome.

        The outcome is that of the job's own call of the model, if it has made one at about that time, or else drawn. An
        answer is always its own, if it has one.
        """
        number = len(run.attempts) + 1
        calls = sum(attempt.model == run.model and not attempt.short_circuited for attempt in run.attempts)
        own_calls = [
            logged.attempt
            for logged in run.job.attempts
            if logged.attempt.model == run.model and logged.attempt.outcome in {"success", "error"}
        ]
        own_call = own_calls[calls] if calls < len(own_calls) else None
        attempt_id = f"{run.job.record.execution_id}:{number}"
        answer = own_call
        has_other_delay = calls > 0 and _delays_of(run.agent) != _delays_of(run.before)
        waited_ms = run.backoff_ms if has_other_delay else None
        own_ms = min(OWN_CALL_MS, self._world.within_ms(waited_ms))
        if own_call is None or abs(now_ms - ms_from_time(own_call.started_at)) > own_ms:
            answer = self._world.draw(run.model, run.job.record.agent, now_ms, attempt_id, waited_ms)
        if answer is None:
            return None
        run.is_drawn = answer is not own_call
        if own_call is not None and answer.outcome == own_call.outcome == "success":
            answer = own_call
        cause = cause_after(run.attempts, run.model, answer.deployment)
        of_job = run.job.attempts[0].attempt
        ids = {"attempt_id": attempt_id, "number": number, "cause": cause, "backoff_ms": run.backoff_ms}
        return as_call_of(answer, of_job, now_ms, **ids)

    # The gates

    def _admit(self, run: ReplayedJob, call: Attempt, now_ms: int) -> _Verdict | None:
        """Asks all gates for the admission of a call, in the order in which their refusals take precedence."""
        record = run.job.record
        task = run.task
        of_guard: _Verdict | None = None
        if run.agent.guard is not None:
            is_timed = run.follows and call.task_asked_at is not None
            judged = self._tasks.judge(
                task, record, run.agent.guard, run.attempts, call.reserved, now_ms, is_timed=is_timed
            )
            if judged.trip is not None or judged.waits or "guard" in record.own_rules:
                of_guard = self._of_guard(run, task, judged, now_ms)
            if task is None and of_guard is not None:
                return of_guard  # judged by the worker alone, which then asks nobody
        own_cap = run.agent.max_cost
        if own_cap is not None and call.reserved is not None:
            spent = spent_by(run.attempts)
            if not fits(call.reserved, limit=own_cap, spent=spent):
                error = over_own_cap(record.agent, call.model, call.reserved, spent, own_cap)
                return _Verdict(ReplayedRefusal("budget_exceeded", error, refused_by=OWN_CAP))
        of_breaker = self._of_breaker(run, call, now_ms)
        of_limits = self._of_limits(call, now_ms)
        if of_guard is None and of_breaker is None and of_limits is None:
            return None
        verdicts = [verdict for verdict in (of_guard, of_breaker, of_limits) if verdict is not None]
        return next((verdict for verdict in verdicts if not verdict.waits), verdicts[0])

    def _of_guard(self, run: ReplayedJob, task: TaskName | None, judged: TaskVerdict, now_ms: int) -> _Verdict | None:
        record = run.job.record
        recorded = run.next_recorded
        if "guard" in record.own_rules:
            judged = self._judged_by_own_guard(run, task, judged)
        elif task is not None and recorded is not None:
            judged = self._judged_as_recorded(run, task, judged, recorded.attempt, now_ms)
        if judged.waits:
            error = ErrorInfo(
                kind="budget_exceeded", class_="BudgetHeldError", message="other jobs of the task hold it"
            )
            return _Verdict(ReplayedRefusal("budget_exceeded", error, refused_by="task"), waits=True)
        if judged.trip is None:
            return None
        tries_next = task is None and judged.trip.rule == "max_cost" and not run.is_at_last
        if not tries_next:
            is_timed = recorded is not None and recorded.attempt.task_asked_at is not None
            is_same = is_timed and task not in self._diverged and run.agent is run.before
            self._tasks.stop(task, record, judged, now_ms, as_recorded=is_same)
        error = task_stopped(
            judged.trip.rule,
            judged.trip.reason,
            agent=record.agent,
            task_id=record.task_id or record.job_id,
            task_key=record.task_key or record.execution_id,
            tenant=record.tenant,
            execution_id=record.execution_id,
        )
        statistics = task_statistics(judged.task, judged.trip)
        return _Verdict(ReplayedRefusal("guard_tripped", error, ends_chain=not tries_next, statistics=statistics))

    def _judged_as_recorded(
        self, run: ReplayedJob, task: TaskName, judged: TaskVerdict, recorded: Attempt, now_ms: int
    ) -> TaskVerdict:
        """Takes whether a call stops its task from the record, if the order of the task's jobs decides that."""
        if recorded.outcome == "worker_lost" and judged.trip is not None:
            self._note_race(run, WORKER_LOST)
            return replace(judged, trip=None)
        was_stopped = recorded.refused_reason == "guard_tripped"
        trip = self._tasks.recorded_trip(task, now_ms) if was_stopped else None
        is_equal = trip == judged.trip
        if recorded.task_asked_at is not None:  # then it is known which job stops it
            is_equal = was_stopped == (judged.trip is not None)
        if is_equal or self._tasks.is_stopped(task):
            return judged
        if (was_stopped and trip is None) or not self._is_race(run, recorded, "guard_tripped", now_ms):
            return judged
        self._note_race(run, "guard_tripped")
        return replace(judged, trip=trip, waits=False)

    def _judged_by_own_guard(self, run: ReplayedJob, task: TaskName | None, judged: TaskVerdict) -> TaskVerdict:
        """Takes whether a job's own guard stops its task from the record, which does not have its rules."""
        record = run.job.record
        recorded = run.next_recorded
        if judged.trip is not None or recorded is None or recorded.attempt.refused_reason != "guard_tripped":
            return judged
        name = task or TaskName(record.tenant, record.execution_id)
        return replace(judged, trip=self._tasks.trip_by(name, record.execution_id))

    def _of_breaker(self, run: ReplayedJob, call: Attempt, now_ms: int) -> _Verdict | None:
        rules = run.agent.breaker
        key = self._key_of(run, call)
        if rules is None or key is None:
            return None
        asked_ms = self._breakers.met_ms(key, call, now_ms) if run.follows else now_ms
        if asked_ms != now_ms and (rules != run.before.breaker or key in self._diverged):
            asked_ms = now_ms  # the record is of a breaker with other states
        run.version = self._breakers.closed_version(key, asked_ms)
        if run.version is not None:
            return None
        remaining_s = (run.deadline_ms - now_ms) / 1000
        lease_s = remaining_s if call.first_token_ms is not None else min(run.agent.timeout_s, remaining_s)
        caller = caller_of(call.caller, call.tenant)
        lease_ms = round((lease_s + LEASE_MARGIN_S) * 1000)
        admission, breaker = self._breakers.admit(key, call.attempt_id, asked_ms, lease_ms, rules, caller)
        run.version = admission.version
        if admission.admitted:
            return None
        state = "half-open, and its probe is in flight" if admission.is_probe else "open"
        wait_s = (admission.until_ms - now_ms) / 1000 if admission.until_ms else None
        refusal = ReplayedRefusal(
            "breaker_open",
            breaker_open(key, breaker.reason, state=state if admission.until_ms else None, retry_after_s=wait_s),
            statistics=statistics_of(breaker),
        )
        return _Verdict(refusal, waits=admission.is_probe and run.is_at_last and run.waited_ms < PROBE_WAIT_S * 1000)

    def _of_limits(self, call: Attempt, now_ms: int) -> _Verdict | None:
        over = self._counters.reserve(call, now_ms)
        if over is None:
            return None
        if over.by_reservations:
            return _Verdict(
                ReplayedRefusal("budget_exceeded", budget_held(over, call.model), over.counter.name), waits=True
            )
        wait_s = None if over.resets_at is None else max(0.0, (ms_from_time(over.resets_at) - now_ms) / 1000)
        refusal = ReplayedRefusal(
            "budget_exceeded",
            over_budget(over, call.model, wait_s),
            refused_by=over.counter.name,
            refused_cap=over.cap,
            ends_chain=over.does("refuse"),
        )
        return _Verdict(refusal)

    def _release(self, run: ReplayedJob, call: Attempt) -> None:
        """Gives back what the gates have granted to a call that is not made."""
        if (key := self._key_of(run, call)) is not None:
            self._breakers.give_back(key, call.attempt_id)
        self._counters.release(call.attempt_id)
        self._tasks.give_back(run.task, run.job.record.execution_id, run.attempts)

    def _beside_record(
        self, run: ReplayedJob, recorded: Attempt, verdict: _Verdict | None, now_ms: int
    ) -> _Verdict | None:
        """Compares the verdict on a call with its record. Returns the one that counts."""
        was = recorded.refused_reason
        replayed = None if verdict is None else verdict.refusal.reason
        if any(_DECIDED_BY.get(reason) in run.job.record.own_rules for reason in (was, replayed) if reason is not None):
            self.findings.followed["own rules"] += 1
            return self._as_recorded(recorded, now_ms)
        if verdict is not None and verdict.waits and was in {None, replayed} and self._is_as_it_was(run, recorded):
            # Chance decides which of several calls that wait is admitted first, and the time of a job when it gives up.
            self._note_race(run, "wait for room")
            return self._as_recorded(recorded, now_ms)
        if was == replayed:
            if verdict is not None and was is not None:
                if verdict.refusal.is_as_recorded(recorded):
                    self.findings.refusals[was] += 1
                elif self._is_race(run, recorded, was, now_ms):
                    self._note_race(run, was)
                elif run.task in self._lost and self._is_as_it_was(run, recorded):
                    self._note_race(run, WORKER_LOST)
                else:
                    words = (
                        _words_of(recorded.statistics, recorded.error),
                        _words_of(verdict.refusal.statistics, verdict.refusal.error),
                    )
                    self._note_difference(run, "refusal", *words, now_ms)
            return verdict
        if was is not None and was not in _REPLAYED and (verdict is None or verdict.waits):
            self._follow(recorded)
            return self._as_recorded(recorded, now_ms)
        if recorded.outcome == "worker_lost":
            # It is recorded by the worker that goes on, which does not know whether it was admitted.
            self._note_race(run, WORKER_LOST)
            return self._as_recorded(recorded, now_ms)
        if run.task in self._lost and "guard_tripped" in {was, replayed} and self._is_as_it_was(run, recorded):
            self._note_race(run, WORKER_LOST)
            return self._as_recorded(recorded, now_ms)
        for reason in (replayed, was):
            if reason is not None and self._is_race(run, recorded, reason, now_ms):
                self._note_race(run, reason)
                return self._as_recorded(recorded, now_ms)
        self._leave(run, "refusal", was or "admitted", replayed or "admitted", now_ms)
        return verdict

    def _follow(self, refused: Attempt) -> None:
        """Notes a refusal that no rule here decides."""
        self.findings.followed["refused" if refused.error is None else refused.error.class_] += 1

    def _as_recorded(self, recorded: Attempt, now_ms: int) -> _Verdict | None:
        """Returns the recorded verdict on a call, which is taken for the replay's."""
        if recorded.refused_reason is None or recorded.error is None:
            self._counters.reserve(recorded, now_ms, is_forced=True)
            return None
        return _Verdict(ReplayedRefusal(recorded.refused_reason, recorded.error, ends_chain=recorded.ends_chain))

    def _is_race(self, run: ReplayedJob, recorded: Attempt, reason: Reason, now_ms: int) -> bool:
        """Returns True if what refuses a call changed so shortly before or after it that either may be first.

        Args:
            run: the job.
            recorded: the call.
            reason: the reason of the refusal, in the record or in the replay.
            now_ms: the time of the call, in milliseconds since the epoch.
        """
        if not self._is_as_it_was(run, recorded):
            return False
        if reason == "budget_exceeded":
            return self._counters.changes_near(recorded, now_ms, RACE_MS)
        if reason == "guard_tripped" and run.task is not None:
            return self._tasks.changes_near(run.task, now_ms, RACE_MS)
        key = self._key_of(run, recorded)
        return reason == "breaker_open" and key is not None and self._breakers.changes_near(key, now_ms, RACE_MS)

    def _is_as_it_was(self, run: ReplayedJob, call: Attempt) -> bool:
        """Returns True if all that decides on a call has the rules that it had, and has met the calls that it met.

        Otherwise the record can't tell which of two events was first here.
        """
        return (
            run.agent is run.before
            and run.task not in self._diverged
            and self._key_of(run, call) not in self._diverged
            and not self._prices.has(call)
            and self._counters.is_as_it_was(call)
        )

    def _diverge(self, run: ReplayedJob, calls: Iterable[Attempt]) -> None:
        """Notes that calls are made, or are not, otherwise than in the record."""
        if run.task is not None:
            self._diverged.add(run.task)
        for call in calls:
            if (key := self._key_of(run, call)) is not None:
                self._diverged.add(key)
            self._counters.diverge(call)

    def _key_of(self, run: ReplayedJob, call: Attempt) -> BreakerKey | None:
        """Returns the breaker of a call; None if its agent has none."""
        rules = run.agent.breaker
        if rules is None:
            return None
        names = rules.scope, call.agent, call.unit, call.provider
        key = self._keys.get(names)
        if key is None:
            key = self._keys[names] = BreakerKey.of(*names)
        return key

    def _refusal_of(self, run: ReplayedJob, call: Attempt, refusal: ReplayedRefusal, now_ms: int) -> Attempt:
        """Returns the attempt of a refused call that the record does not have."""
        at = time_from_ms(now_ms)
        return call.model_copy(
            update={
                **dict.fromkeys(_OF_CALLS),
                "started_at": at,
                "completed_at": at,
                "duration_ms": 0,
                "outcome": "short_circuited",
                "short_circuited": True,
                "cost": 0,
                "cost_basis": "none",
                "counts_for_breaker": False,
                "tried_again": False,
                "error": refusal.error,
                "refused_reason": refusal.reason,
                "refused_by": refusal.refused_by,
                "refused_cap": refusal.refused_cap,
                "ends_chain": refusal.ends_chain,
                "statistics": refusal.statistics,
                "backoff_ms": run.backoff_ms,
            }
        )

    # The end of an attempt

    def _end(self, run: ReplayedJob, attempt: Attempt, now_ms: int) -> None:
        run.attempts.append(attempt)
        step = self._step(run, attempt, now_ms)
        tries_again = isinstance(step, (Retry, str))
        if attempt.tried_again != tries_again and not attempt.short_circuited:
            attempt = attempt.model_copy(update={"tried_again": tries_again})
        if attempt.outcome == "success":
            self._answered_ms[attempt.unit] = now_ms
        self._sequence = max(self._sequence + 1, self._ahead.pop(attempt.attempt_id, 0))
        self._observe(run, attempt, now_ms)
        if attempt.short_circuited:
            self._counters.announce_refusal(attempt, now_ms)
        else:
            self._counters.settle(attempt, now_ms)
        self._go_on(run, step, now_ms)

    def _observe(self, run: ReplayedJob, attempt: Attempt, now_ms: int) -> None:
        rules = run.agent.breaker
        key = self._key_of(run, attempt)
        if rules is None or key is None:
            return
        if attempt.outcome == "success" and self._breakers.succeed(
            key, Success(attempt, self._sequence, now_ms, run.version), rules
        ):
            return
        observation = observation_of(self._sequence, now_ms, attempt)
        if not attempt.short_circuited and observation.version != run.version:
            observation = changed(observation, version=run.version)
        soon: Callable[[], Iterable[Observation]] | None = None
        if (observation.failed or observation.gave_up) and run.follows and self._is_as_it_was(run, attempt):
            soon = partial(self._soon, key, now_ms)
        if self._breakers.observe(key, observation, rules, now_ms, soon):
            self.findings.races[OUTCOME_ORDER] += 1

    def _soon(self, key: BreakerKey, now_ms: int) -> Iterator[Observation]:
        """Yields the outcomes that a breaker's log has next, within `ORDER_MS`."""
        ends = (event for event in self._events if event[0] <= now_ms + ORDER_MS and event[4] == self._end)
        for at_ms, *_, (run, attempt) in sorted(ends):
            if run.follows and not attempt.short_circuited and self._key_of(run, attempt) == key:
                place = self._ahead.setdefault(attempt.attempt_id, self._sequence + (len(self._ahead) + 1) * _ROOM)
                yield changed(observation_of(place, at_ms, attempt), version=run.version)

    def _step(self, run: ReplayedJob, attempt: Attempt, now_ms: int) -> _Step | None:
        """Returns what follows an attempt; None if the job has its answer."""
        following = run.next_recorded
        if attempt.short_circuited:
            ends = attempt.ends_chain or run.is_at_last
            step = Stop(attempt.refused_reason or "error") if ends else NextModel()
            if run.follows and not ends and following is None:
                if attempt.model in run.job.record.fallback_chain[-1:]:  # there was no further model then
                    self._leave(run, "step", "end", "next model", now_ms)
                    return step
                self.findings.followed["time used up"] += 1  # it waited for room until its time was over
                return Stop(attempt.refused_reason or "error")
            return step
        if attempt.outcome == "cancelled":
            return Stop("cancelled")
        if following is not None and following.attempt.cause in REPAIRS:
            self.findings.followed[following.attempt.cause] += 1
            return "repair"
        if attempt.outcome == "success" and following is None:
            return None
        step = self._after_failure(run, attempt, following, run.agent.retry)
        if not run.follows:
            return step
        recorded = _kind_of_recorded(attempt, following)
        if _kind_of(step) == recorded:
            if isinstance(step, Retry) and run.agent is not run.before:
                was = self._after_failure(run, attempt, following, run.before.retry)
                if isinstance(was, Retry) and was != step:
                    words = f"again after {was.delay_s:g} s", f"again after {step.delay_s:g} s"
                    self._leave(run, "step", *words, now_ms)
            return step
        if "retry" in run.job.record.own_rules and (recorded == "again" or run.chain == run.job.record.fallback_chain):
            self.findings.followed["own rules"] += 1
            return _recorded_step(recorded, run.job.record.reason)
        if attempt.first_token_ms is not None and recorded == "end":
            self.findings.followed["answer interrupted"] += 1
            return Stop("error")
        if attempt.outcome in {"success", "worker_lost"}:
            self.findings.followed[WORKER_LOST] += 1
            return step
        self._leave(run, "step", recorded, _kind_of(step), now_ms)
        return step

    def _after_failure(
        self, run: ReplayedJob, attempt: Attempt, following: LoggedAttempt | None, policy: RetryPolicy
    ) -> Retry | Redeploy | NextModel | Stop:
        is_busy = False
        if attempt.error is not None and attempt.error.kind == "rate_limit":
            called_ms = min(ms_from_time(tried.started_at) for tried in run.attempts if tried.unit == attempt.unit)
            is_busy = self._answered_ms.get(attempt.unit, 0) > called_ms
        return after_failure(
            classification_of(attempt, attempt.completed_at),
            policy=policy,
            failures=failures_on(attempt.model, run.attempts),
            is_last_model=run.is_at_last,
            remaining_s=(run.deadline_ms - ms_from_time(attempt.completed_at)) / 1000,
            jitter=JITTER,
            busy=is_busy,
            elsewhere=following is not None and following.attempt.cause == "redeployment",
        )

    def _go_on(self, run: ReplayedJob, step: _Step | None, now_ms: int) -> None:
        run.backoff_ms = 0
        following = run.next_recorded
        match step:
            case None | Stop():
                record = run.job.record
                if run.task is not None and run.follows and len(run.attempts) == len(run.job.attempts):
                    # A busy worker ends a job a while after its last call, and its task counts it then.
                    at_ms = self._tasks.counted_ms(record, now_ms)
                    self._at(at_ms, _ENDS, self._conclude, run, step, sequence=_AFTER_ALL)
                else:
                    self._conclude(run, step, now_ms)
                return
            case NextModel():
                run.index += 1
                at_ms = now_ms
            case Retry(delay_s):
                run.backoff_ms = round(delay_s * 1000)
                at_ms = now_ms + run.backoff_ms
            case _:
                at_ms = now_ms
        if following is not None:
            at_ms = max(now_ms, following.asked_ms)
        self._at(at_ms, _ASKS, self._ask, run)

    def _conclude(self, run: ReplayedJob, step: Stop | None, now_ms: int) -> None:
        record = run.job.record
        run.diverges = not run.follows or not self._is_as_it_was(run, run.job.attempts[0].attempt)
        run.reason = None
        run.ended_ms = ms_from_time(record.completed_at) if run.follows else now_ms
        if step is not None and step.reason == "cancelled":
            run.reason = "cancelled"
        elif step is not None:
            run.reason, run.error = why_unanswered(run.attempts, step.reason)
        if run.follows and len(run.attempts) == len(run.job.attempts):
            if (run.reason, run.chosen_model if run.reason is None else None) == (record.reason, record.chosen_model):
                self.findings.ends += 1
            elif record.reason in {"cancelled", "worker_lost", "invalid"}:
                self.findings.followed[record.reason] += 1
                run.reason = record.reason
                if record.reason == "worker_lost" and run.task is not None:
                    self._lost.add(run.task)
            else:
                self._note_difference(run, "end", record.reason or "answered", run.reason or "answered", now_ms)
        elif run.follows:
            self._leave(run, "end", "more attempts", run.reason or "answered", now_ms)
        if run.task is not None and run.follows and is_of_lost_worker(run.job):
            self._lost.add(run.task)
        self._end_job(run, None if run.unknown else self._record_of(run), now_ms)

    def _end_job(self, run: ReplayedJob, record: Execution | None, now_ms: int) -> None:
        """Has its task count a job that has ended, and people told of it; None for a record that history can't tell."""
        if record is not None:
            if run.agent.guard is not None and run.task is not None:
                has_met_same = run.follows and run.task not in self._diverged
                is_same = has_met_same and run.agent.guard == run.before.guard
                if self._tasks.end(run.task, record, run.agent.guard, now_ms, as_recorded=is_same):
                    self.findings.races[TASK_ORDER] += 1
                if "guard" in record.own_rules and has_met_same:
                    self._tasks.repeat_trip(run.task, record, now_ms)
            self._alerts.add_end(record, now_ms)
        self._under_way -= 1
        self._on_end(run)

    def _record_of(self, run: ReplayedJob) -> Execution:
        """Returns the record that a job would have."""
        record = run.job.record
        if run.follows and run.reason == record.reason:
            return record
        sums = totals(run.attempts, answered=run.reason is None)
        return record.model_copy(
            update={
                "attempts": tuple(run.attempts),
                "status": status_of(run.reason),
                "reason": run.reason,
                "error": run.error,
                "total_tokens": sums.input_tokens + sums.output_tokens,
                "total_cost": sums.total_cost,
                "cost_basis": sums.cost_basis,
                "attempts_count": len(run.attempts),
                "chosen_model": run.chosen_model if run.reason is None else None,
                "finish_reason": run.attempts[-1].finish_reason if run.reason is None else None,
                "duration_ms": max(0, run.ended_ms - ms_from_time(record.queued_at)),
                "completed_at": time_from_ms(run.ended_ms),
            }
        )

    # What the replay finds

    def _stop_following(self, run: ReplayedJob) -> None:
        run.follows = False
        self._diverge(run, (logged.attempt for logged in run.job.attempts[len(run.attempts) :]))

    def _leave(self, run: ReplayedJob, kind: Kind, recorded: str, replayed: str, now_ms: int) -> None:
        self._stop_following(run)
        self._note_difference(run, kind, recorded, replayed, now_ms)

    def _note_difference(self, run: ReplayedJob, kind: Kind, recorded: str, replayed: str, now_ms: int) -> None:
        if self._keeps_differences:
            self.findings.differences.append(Difference(run.job.record.execution_id, kind, recorded, replayed, now_ms))

    def _note_race(self, run: ReplayedJob, cause: str) -> None:
        """Counts a call whose verdict is taken from the record, once."""
        call = run.job.record.execution_id, len(run.attempts)
        if call != self._latest_race:
            self._latest_race = call
            self.findings.races[cause] += 1

    def _note_transition(self, event: BreakerTransition) -> None:
        self._on_event(event)
        self._alerts.add_event(event)
        if event.to_state in {"open", "half_open"}:
            self._plan_look(ms_from_time(event.at))

    def _note_guard(self, event: GuardEvent) -> None:
        self._on_event(event)
        self._alerts.add_event(event)

    def _note_budget(self, event: BudgetEvent) -> None:
        self._on_event(event)
        self._alerts.add_event(event)

    def _act_on_budget(self, event: BudgetEvent) -> None:
        self._counters.act(event)
        self._alerts.add_event(event)


_ENDS, _ASKS, _LOOKS = range(3)
"""The order of what happens at one moment: attempts end, calls ask, breakers are looked at."""

_DECIDED_BY: Mapping[Reason, RulesPart] = {"breaker_open": "breaker", "guard_tripped": "guard"}
"""The rules that refuse calls, by the reason."""

_COUNTS_ONLY = GuardRules.model_validate(dict.fromkeys(set(GuardRules.model_fields) - {"preset"}))
"""A guard that stops nothing."""

_ROOM = 2**32
"""The places that are left between outcomes ahead of their turn, for those that the log has before them."""

_AFTER_ALL = 2**53
"""The place in the log of an attempt that it does not have."""

_OF_CALLS = (
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "reasoning_tokens",
    "usage_problem",
    "response_model",
    "finish_reason",
    "first_token_ms",
    "chunks",
    "reserved_at",
    "task_asked_at",
    "breaker_version",
)
"""The fields of an attempt that only a call has, and that may be null."""


def _delays_of(agent: AgentPolicy) -> tuple[str, float, float]:
    return agent.retry.backoff, agent.retry.base_s, agent.retry.max_delay_s


def _kind_of(step: _Step) -> str:
    match step:
        case Retry() | Redeploy() | "repair":
            return "again"
        case NextModel():
            return "next model"
        case Stop():
            return "end"


def _kind_of_recorded(attempt: Attempt, following: LoggedAttempt | None) -> str:
    if following is None:
        return "end"
    return "again" if following.attempt.model == attempt.model else "next model"


def _recorded_step(recorded: str, reason: Reason | None) -> _Step:
    """Returns what followed an attempt by rules that the record does not have."""
    if recorded == "again":
        return Retry(0.0)
    return NextModel() if recorded == "next model" else Stop(reason or "error")


def _beside_own_rules(
    agent: AgentPolicy, before: AgentPolicy, own_rules: Collection[RulesPart]
) -> tuple[AgentPolicy, AgentPolicy]:
    """Returns the settings of an agent, and those of before, for a job that brings rules of its own.

    Its own retries replace those of its agent, whatever these become. Its own guard does, too, but its task is counted.
    """
    if "retry" in own_rules:
        agent = replace(agent, retry=before.retry)
    if "guard" in own_rules:
        agent, before = replace(agent, guard=_COUNTS_ONLY), replace(before, guard=_COUNTS_ONLY)
    return (agent, agent) if agent == before else (agent, before)


def _words_of(statistics: FailureStatistics | None, error: ErrorInfo | None) -> str:
    """Returns the reason of a refusal, for people who compare two of them."""
    if statistics is not None:
        return statistics.in_words()
    return "" if error is None else f"{error.message}: {error.figures}"
