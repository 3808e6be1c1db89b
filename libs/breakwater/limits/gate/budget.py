"""Limits: the worst case of a call is reserved before it is made, in the job's own limit, all hard ones and all rates.

When the call has ended, what it used replaces the reservation, so that the next admission sees the rest; the event of
the attempt settles it finally. Until then only Redis has the reservation. So each worker checks its reservations every
second and restores lost ones, before the budget service rebuilds the counters from the log a few seconds later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from breakwater.calls.gate import Admission, AskAgain, Gate, GateVerdict, Refused, WaitForCapacity
from breakwater.calls.rules.retry import LONG_WAIT_S, LONG_WAIT_SLACK_S
from breakwater.calls.rules.waits import POLL_S
from breakwater.jobs.contract.execution import Attempt
from breakwater.jobs.rules.record import spent_by
from breakwater.kernel.nats.subjects import encode_token
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage
from breakwater.kernel.redis.connection import Redis, ScriptCommand, StateUnavailableError
from breakwater.limits.rules import refusals
from breakwater.limits.rules.budget import (
    MAX_MADE_UP_SCOPES,
    OWN_CAP,
    Counter,
    LimitTable,
    OverBudget,
    fits,
)
from breakwater.limits.rules.caller_limits import WindowState, caller_limits
from breakwater.limits.rules.ledger import figures_of
from breakwater.limits.rules.limit import limits_of_task
from breakwater.limits.rules.rate_limit import NO_RATE_LIMITS, OverRate, RateLimits, rate_limits_of
from breakwater.limits.rules.scopes import CallNames, parts_of, scope_in_words, scope_text
from breakwater.limits.store.budgets import (
    Budgets,
    CountersLost,
    DimensionsChanged,
    HeldOtherwise,
    LimitsChanged,
    LiveReservation,
    PeriodChanged,
    Reserved,
    TooManyNames,
    UsedTokens,
)

CHECK_EVERY_S = 1.0
IDLE_CHECK_EVERY = 5

REBUILDING_POLL_S = 0.5
"""The interval of questions about budgets that are being rebuilt; random jitter at most doubles it."""

FIRST_POLL_S = 0.02
"""The first wait of a call for other reservations to end."""

REBUILDING = Refused("budget_exceeded", refusals.REBUILDING)


@dataclass(slots=True, kw_only=True)
class BudgetGate(Gate):
    """Reserves the worst case of the call in all its limits, or in none."""

    budgets: Budgets
    limits: Callable[[], LimitTable]
    """Returns the limits that apply now."""
    live: MutableMapping[str, LiveReservation]
    """The reservations of the worker's calls in progress, by attempt."""
    is_local: Callable[[str], bool]
    """Returns True if a provider is a program, whose calls have a price of their own."""
    now: Callable[[], datetime]
    jitter: Callable[[], float]
    read_limits: Callable[[str, str], Awaitable[None]]
    """Reads the limits that the plane keeps on from a version, as another one is in force; waits while that fails."""
    hear: Callable[[str, Iterable[WindowState]], None]
    """Takes what is left of limits that a call on one of several deployments counts in."""
    _counters: Sequence[Counter] = ()
    _rates: RateLimits = NO_RATE_LIMITS
    _asked_at: datetime | None = None
    _reserved_at: datetime | None = None
    _held_otherwise: HeldOtherwise | None = None
    _known_limits: str = ""
    _limits_in_force: str = ""
    _unreadable_limit: str | None = None

    def ask(self) -> ScriptCommand | Refused:
        """Refuses locally if the job's own limit has no room, or a hard limit applies to a model without a price."""
        own_cap = self.admission.job.agent.max_cost_usd
        if own_cap is not None and (refused := self._over_own_cap(own_cap)) is not None:
            return refused
        admission = self.admission
        worst_case = admission.flight.reserved
        names = _names_of(admission)
        limits = self.limits()
        self._known_limits = limits.version
        self._unreadable_limit = limits.unreadable_limit(names)
        dimensions = self.budgets.dimensions
        self._counters = limits.counters(names, dimensions)
        self._rates = limits.rate_limits(names) + self._task_rates()
        self._asked_at = self.now()
        if worst_case is None and any(
            counter.hard_limit is not None and counter.unit == "usd" for counter in self._counters
        ):
            return self._refuse_unpriced("a hard limit")
        if worst_case is None and any("usd" in window.limits for window in self._rates.windows):
            return self._refuse_unpriced("a limit on spend")
        return self.budgets.reserve_command(
            admission.attempt_id,
            names,
            worst_case or 0,
            self._counters,
            now=self._asked_at,
            lease_ms=admission.lease_ms,
            tokens=admission.flight.reserved_tokens,
            rates=self._rates,
            caller=admission.job.caller,
            turn=admission.job.turn,
            can_wait_ms=_can_wait_ms(admission),
            most_names=MAX_MADE_UP_SCOPES,
            is_incomplete=self._unreadable_limit is not None or limits.is_incomplete(names, dimensions),
            version=limits.version,
        )

    def read(self, answer: Any) -> Refused | WaitForCapacity | AskAgain | None:
        """Refuses if a hard limit is spent. Waits for room, for calls in flight that hold it, and for lost counters."""
        assert self._asked_at is not None
        amount = self.admission.flight.reserved or 0
        reservation = self.budgets.read_reservation(
            *(answer, self._counters, amount),
            now=self._asked_at,
            tokens=self.admission.flight.reserved_tokens,
            rates=self._rates,
        )
        match reservation:
            case Reserved(at, windows):
                self._reserved_at = at
                self._note(windows)
                # Redis' clock decides the day and the month of the call.
                self.flight_fields["reserved_at"] = at
                return None
            case OverBudget(by_reservations=True) as over:
                # A call that has just ended on another worker may be charged a moment later.
                waited_s = self.admission.waited.get("budget_exceeded", 0.0)
                delay_s = min(POLL_S, max(FIRST_POLL_S, waited_s))
                error = refusals.budget_held(over, self.admission.flight.model)
                elsewhere = _is_of_deployment(over.counter.key)
                refused = Refused("budget_exceeded", error, refused_by=over.counter.name, of_deployment=elsewhere)
                return WaitForCapacity(delay_s * (1 + self.jitter()), refused)
            case OverBudget() as over:
                return self._over_budget(over)
            case OverRate() as over:
                return self._over_rate(over)
            case TooManyNames():
                return Refused("budget_exceeded", refusals.TOO_MANY_NAMES, ends_chain=True)
            case CountersLost():
                refused = REBUILDING
                if self._unreadable_limit is not None:
                    refused = Refused("budget_exceeded", refusals.unreadable_limit(self._unreadable_limit))
                return WaitForCapacity(REBUILDING_POLL_S * (1 + self.jitter()), refused)
            case PeriodChanged() | DimensionsChanged():
                return AskAgain()  # they are known now
            case HeldOtherwise() as held:
                self._held_otherwise = held  # by a worker that lost the job, or before the limits changed
                return AskAgain()
            case LimitsChanged(in_force):
                self._limits_in_force = in_force
                self.announces = True
                return AskAgain()

    async def announce(self, verdict: GateVerdict | None) -> None:  # noqa: ARG002  whatever the other gates say
        """Reads the limits that are in force. A call that waits for that holds nothing."""
        await self.read_limits(self._known_limits, self._limits_in_force)

    def release(self) -> ScriptCommand | None:
        """Releases the reservation."""
        if self._held_otherwise is not None:
            return self.budgets.give_up_command(self.admission.attempt_id, self._held_otherwise)
        if self._reserved_at is None:
            return None
        return self.budgets.release_command(self.admission.attempt_id, self._reserved_at, rates=self._rates)

    def withdraw(self) -> ScriptCommand | None:
        """Leaves the queues of rates: whoever stands behind would wait for a call that nobody makes."""
        if not self._rates or self._reserved_at is not None:
            return None
        return self.budgets.withdraw_command(self.admission.attempt_id, self._rates)

    def settle(self, attempt: Attempt) -> ScriptCommand | None:
        """Replaces the reservation by what the call used, until the budget service settles its event.

        Does nothing without a hard limit and a limit on rates: then no call waits for the rest.
        """
        if (live := self.live.get(attempt.attempt_id)) is not None:
            self.live[attempt.attempt_id] = replace(live, has_ended=True)
        at = attempt.reserved_at
        limits = self.limits()
        names = CallNames.of(attempt)
        rates = self._rates or limits.rate_limits(names) + self._task_rates()
        counters = limits.counters(names, self.budgets.dimensions)
        if at is None or (not rates and all(counter.hard_limit is None for counter in counters)):
            return None
        return self.budgets.release_command(
            attempt.attempt_id, at, figures_of(attempt).spent, tokens=UsedTokens.of(attempt), rates=rates
        )

    def _task_rates(self) -> RateLimits:
        job = self.admission.job
        rule = None if job.agent.guard is None else job.agent.guard.rate_limit
        if rule is None:
            return NO_RATE_LIMITS
        tenant = "" if job.job.tenant is None else encode_token(job.job.tenant)
        return rate_limits_of(f"task:{tenant}/{job.ids.own_task_key}", limits_of_task(job.agent_name, rule))

    def begin_call(self) -> None:
        """Adds the reservation to those of the worker, which are restored if Redis loses them."""
        at = self._reserved_at
        assert at is not None
        admission = self.admission
        amount = admission.flight.reserved or 0
        until = self.now() + timedelta(milliseconds=admission.lease_ms or 0)
        self.live[admission.attempt_id] = LiveReservation(
            *(admission.attempt_id, _names_of(admission), amount, at, until, admission.job.caller),
            tokens=admission.flight.reserved_tokens,
            slots=self._rates.slots,
        )

    def end_call(self) -> None:
        """Removes it."""
        del self.live[self.admission.attempt_id]

    def _over_own_cap(self, cap: int) -> Refused | None:
        # Only one worker runs a job at a time, so its attempts are complete.
        flight = self.admission.flight
        worst_case = flight.reserved
        if worst_case is None:
            return self._refuse_unpriced("max_cost_usd", OWN_CAP)
        spent = spent_by(self.admission.checkpoint.attempts)
        if fits(worst_case, limit=cap, spent=spent):
            return None
        agent = self.admission.job.agent_name
        error = refusals.over_own_cap(agent, flight.model, worst_case, spent, cap)
        return Refused("budget_exceeded", error, refused_by=OWN_CAP)

    def _refuse_unpriced(self, cap: str, refused_by: str | None = None) -> Refused:
        """Refuses a model without a price under a limit, as it may not be free."""
        flight = self.admission.flight
        local = self.is_local(flight.provider)
        setting = f"providers.{flight.provider}.cost_per_call_usd" if local else f"models.{flight.model}.price"
        error = refusals.unpriced_model(flight.model, cap, setting)
        return Refused("budget_exceeded", error, refused_by=refused_by, of_deployment=True)

    def _over_budget(self, over: OverBudget) -> Refused | WaitForCapacity:
        wait_s = None if over.resets_at is None else max(0.0, (over.resets_at - self.now()).total_seconds())
        refused = Refused(
            "budget_exceeded",
            refusals.over_budget(over, self.admission.flight.model, wait_s),
            refused_by=over.counter.name,
            refused_cap=over.cap,
            ends_chain=over.does("refuse"),
            of_deployment=_is_of_deployment(over.counter.key),
        )
        if not over.does("wait") or over.amount > over.limit or wait_s is None:
            return refused
        # It is refused if its time does not last until the next period.
        return WaitForCapacity(max(wait_s, POLL_S) + FIRST_POLL_S * self.jitter(), refused)

    def _note(self, windows: Sequence[WindowState]) -> None:
        target = self.admission.target
        if windows:
            self.admission.limits = caller_limits(windows, self.now())
            if target.has_others:
                self.hear(target.deployment, windows)

    def _over_rate(self, over: OverRate) -> Refused | WaitForCapacity:
        self._note(over.windows)
        job = self.admission.job
        kind = parts_of(over.key)[0].kind
        owner = f"task {job.ids.own_task_id}" if kind == "task" else scope_in_words(over.key)
        refused = Refused(
            "rate_limited",
            refusals.over_rate_limit(over, owner),
            refused_by=scope_text(over.key),
            ends_chain=over.limit.action == "refuse",
            of_deployment=_is_of_deployment(over.key),
        )
        if over.limit.action != "wait" or over.wait_ms is None:
            return refused
        # Jitter: not all at the same moment.
        delay_s = over.ask_again_ms / 1000 + FIRST_POLL_S * self.jitter()
        return WaitForCapacity(delay_s, refused, over.ahead, refusals.frees_rate(over.limit))


def _is_of_deployment(key: str) -> bool:
    """Returns True if another deployment of the model may be outside of a scope."""
    return any(part.kind in {"deployment", "provider"} for part in parts_of(key))


def _can_wait_ms(admission: Admission) -> int:
    """Returns the longest wait that leaves time for the call. A cancelled job asks for the last time."""
    if admission.job.lease.cancel.cancellation is not None:
        return 0
    remaining_s = (admission.checkpoint.deadline - admission.job.now()).total_seconds()
    slack_s = FIRST_POLL_S + (LONG_WAIT_SLACK_S if remaining_s > LONG_WAIT_S else 0.0)
    return round((remaining_s - slack_s) * 1000)


def _names_of(admission: Admission) -> CallNames:
    job = admission.job
    return CallNames(
        agent=job.agent_name,
        tenant=job.job.tenant,
        model=admission.flight.model,
        provider=admission.flight.provider,
        key=job.submitted_by,
        user=job.attribution.user,
        team=job.attribution.team,
        tags=tuple(job.cost_tags.items()),
        deployment=admission.flight.deployment,
    )


class LiveReservations:
    """Restores the reservations of one worker's calls under way."""

    def __init__(
        self,
        live: Mapping[str, LiveReservation],
        redis: Redis,
        budgets: Budgets,
        limits: Callable[[], LimitTable],
        now: Callable[[], datetime],
    ) -> None:
        """Takes the reservations by attempt, to which calls add theirs and from which they remove them."""
        self._live = live
        self._redis = redis
        self._budgets = budgets
        self._limits = limits
        self._now = now
        self._missing: set[str] = set()
        self._lost = Outage("budget counters")

    async def run(self) -> None:
        """Checks until cancelled; rarely while there is nothing to restore."""
        checks = 0
        while True:
            try:
                if self._live or checks % IDLE_CHECK_EVERY == 0:
                    await self.check()
            except StateUnavailableError:
                self._lost.note_failure("Redis does not answer")
            checks += 1
            await asyncio.sleep(background.aligned_delay(CHECK_EVERY_S))

    async def check(self) -> None:
        """Restores the reservations that Redis has lost. Raises StateUnavailableError: check again.

        If only some are missing, Redis has restarted from an older snapshot, or their calls are just being settled. So
        a reservation is restored once two checks in a row miss it, unless its call has ended: the event is settled,
        perhaps before the worker has recorded the attempt, and nothing would release it before its lease ends.
        """
        if await self._budgets.has_counters():
            self._lost.note_success()
            ids = list(self._live)
            reservations = await self._budgets.reservations(ids)
            missing = {
                attempt_id
                for attempt_id, reservation in zip(ids, reservations, strict=True)
                if reservation is None and attempt_id in self._live and not self._live[attempt_id].has_ended
            }
            wanted = missing & self._missing
            self._missing = missing
        else:
            if self._limits().any_hard:
                self._lost.note_failure("they are lost, or not made yet; until then no call is made under a hard limit")
            wanted = set(self._live)
        if commands := [
            self._reserve_command(self._live[attempt_id]) for attempt_id in wanted if attempt_id in self._live
        ]:
            await self._redis.run(commands)

    def _reserve_command(self, live: LiveReservation) -> ScriptCommand:
        now = self._now()
        lease = max(timedelta(seconds=1), live.until - now)
        return self._budgets.reserve_command(
            live.attempt_id,
            live.names,
            live.amount,
            self._limits().counters(live.names, self._budgets.dimensions),
            now=now,
            lease_ms=round(lease.total_seconds() * 1000),
            tokens=live.tokens,
            rates=RateLimits(slots=live.slots),
            at=live.at,
            caller=live.caller,
        )
