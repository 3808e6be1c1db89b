"""A fleet of workers, two breaker services and the people who look after it, against one breaker in the real Redis.

Whatever happens in whatever order, the breaker must be what a simple model in Python says. Time passes by moving the
moments that are stored into the past, as if they had been stored earlier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from breakwater.breakers.contract import BreakerState
from breakwater.breakers.rules.breaker import (
    Breaker,
    BreakerKey,
    Observation,
    caller_of,
    concerns_caller,
    isolate,
    observe,
    reset,
    wait_for_call,
)
from breakwater.breakers.settings import BreakerRules
from breakwater.breakers.store import BreakerAdmitted, BreakerRefused, Breakers, LoadedBreaker, Saving
from tests.limits.machine import RedisMachine, run_for_steps
from tests.servers import RunningServer

Step = tuple[BreakerState, BreakerState]

KEY = BreakerKey("support/triage {1}", "openai/gpt-4.1:mini")
HASH = f"bw:breaker:{KEY.name}"
IN_A_ROW, COOLDOWN_MS, LEASE_MS, SKEW_MS = 2, 60_000, 100_000, 300_000
RULES = BreakerRules(consecutive_failures=IN_A_ROW, same_error=None, cooldown_s=COOLDOWN_MS / 1000)
LENGTH = 200
"""Steps of an example, at most."""

OF_ADMISSIONS: set[Step] = {("open", "half_open")}
OF_OUTCOMES: set[Step] = {("closed", "open"), ("half_open", "open"), ("half_open", "closed")}
OF_ISOLATING: set[Step] = {("closed", "isolated"), ("open", "isolated"), ("half_open", "isolated")}
OF_RESETTING: set[Step] = {
    ("closed", "closed"), ("open", "closed"), ("half_open", "closed"), ("isolated", "closed")
}  # fmt: skip


def counts_as(outcome: Observation) -> str | None:
    if not outcome.failed:
        return None
    return "" if outcome.tried_again else outcome.job or f"#{outcome.sequence}"


@dataclass(frozen=True, slots=True)
class Model:
    """What the breaker must be."""

    state: BreakerState = "closed"
    version: int = 0
    open_until_ms: int = 0
    probe: str | None = None
    probe_until_ms: int = 0
    waits: bool = False
    over: int = 0
    """Events up to here count no more."""
    outcomes: dict[int, str | None] = field(default_factory=dict[int, "str | None"])
    """What was taken into account since, by its sequence: None for a success, else what its failure counts as: its job,
    or nothing ("") if that tries again."""

    def after(self, outcomes: Sequence[Observation], now_ms: int) -> Model:
        model = self
        for outcome in outcomes:
            model = model._after(outcome, now_ms)
        return model

    def _after(self, outcome: Observation, now_ms: int) -> Model:
        if outcome.version not in {None, self.version}:
            return self
        if self.state == "half_open" and outcome.attempt_id == self.probe:
            if outcome.failed is None:
                return replace(self, probe=None, probe_until_ms=0)
            if outcome.failed:
                return self._opened({**self.outcomes, outcome.sequence: counts_as(outcome)}, now_ms)
            return Model(version=self.version + 1, over=outcome.sequence)
        if (
            self.state != "closed"
            or outcome.failed is None
            or outcome.sequence in {*self.outcomes, *range(self.over + 1)}
        ):
            return self
        outcomes = {**self.outcomes, outcome.sequence: counts_as(outcome)}
        success = max((sequence for sequence, unit in outcomes.items() if unit is None), default=0)
        in_a_row = {unit for sequence, unit in outcomes.items() if sequence > success and unit}
        if outcome.failed and len(in_a_row) >= IN_A_ROW:
            return self._opened(outcomes, now_ms)
        return replace(self, outcomes=outcomes)

    def _opened(self, outcomes: dict[int, str | None], now_ms: int) -> Model:
        return Model("open", self.version + 1, now_ms + COOLDOWN_MS, over=self.over, outcomes=outcomes)

    def isolated(self) -> Model:
        if self.state == "isolated":
            return self
        return Model("isolated", self.version + 1, over=self.over, outcomes=self.outcomes)

    def closed_by_hand(self) -> Model:
        return Model(version=self.version + 1, over=max([self.over, *self.outcomes]))

    def earlier(self, by_ms: int) -> Model:
        """The same, some time later."""
        return replace(
            self,
            open_until_ms=max(0, self.open_until_ms - by_ms),
            probe_until_ms=max(0, self.probe_until_ms - by_ms),
        )

    def same_as(self, breaker: Breaker) -> bool:
        seen = (breaker.state, breaker.version, breaker.probe, breaker.probe_until_ms)
        until_ms = breaker.open_until_ms if breaker.state == "open" else self.open_until_ms
        return (self.state, self.version, self.probe, self.probe_until_ms, self.open_until_ms) == (*seen, until_ms)


@dataclass(slots=True)
class Call:
    """An attempt. `version` is None until it was let pass, as far as its worker knows."""

    version: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What somebody has read and decided, and not saved yet."""

    before: LoadedBreaker
    changes: int
    """How often the breaker had been changed when it was read."""
    outcomes: Sequence[Observation] = ()
    by_hand: Literal["isolate", "reset"] | None = None
    """What a person wants; None for a breaker service, which takes outcomes into account."""


ANY = st.sampled_from([0, 0, 0, 0, 1, 1, 2, 3, 5, 8, 13, 21])
"""Which one, counted from the newest."""
SERVICES = st.sampled_from(["breaker-1", "breaker-2"])
JOBS = st.sampled_from(["", "7a1c03f2", "0badc0de"])
"""The job of a call; empty if it has one of its own."""
OUTCOMES = st.sampled_from([True, True, True, False, False, None])


class Fleet(RedisMachine):
    """One breaker and all that happens to it."""

    taken: Counter[Step]

    def __init__(self) -> None:
        super().__init__()
        self.model = self.before = Model()
        self.last = self.load()
        """The breaker as it stood after the last step: nobody else is here."""
        self.may: set[Step] = set()
        self.calls: dict[str, Call] = {}
        self.probing: dict[str, int] = {}
        """Who was let probe, and until when; less those that are over."""
        self.log: list[Observation] = []
        self.decided: dict[str, Decision] = {}
        self.number = self.changes = 0

    def load(self) -> LoadedBreaker:
        [loaded] = self.run(Breakers(self.redis).load([KEY]))
        return loaded

    def save(self, before: LoadedBreaker, after: Breaker) -> bool:
        [saved] = self.run(Breakers(self.redis).save([Saving(KEY, before, after, None)]))
        return saved

    # Workers

    def pick(self, which: int, *, passed: bool) -> str:
        found = [attempt for attempt, call in self.calls.items() if (call.version is not None) == passed]
        return found[-1 - which % len(found)]

    def any_passed(self) -> bool:
        return any(call.version is not None for call in self.calls.values())

    def any_waiting(self) -> bool:
        return any(call.version is None for call in self.calls.values())

    def ask(self, attempt: str, *, answer_is_lost: bool = False) -> BreakerAdmitted | BreakerRefused:
        # The breaker may have been read some time ago, and Redis' clock goes on.
        [answer] = self.run(self.redis.run([Breakers.admit_command(KEY, attempt, LEASE_MS)]))
        verdict, asked, after = Breakers.read_admission(answer), self.last.now_ms, self.load()
        self.may = OF_ADMISSIONS
        self.calls[attempt] = Call()
        match self.model.state:
            case "closed":
                assert verdict == BreakerAdmitted(probe=False, version=self.model.version, became_half_open=False)
            case "isolated":
                assert isinstance(verdict, BreakerRefused)
                assert (verdict.until_ms, verdict.wait_ms, verdict.probing) == (0, 0, False)
            case "open":
                self.judge(verdict, self.model.open_until_ms, asked, after.now_ms)
            case "half_open":
                is_held = self.model.probe not in {None, attempt}
                self.judge(verdict, self.model.probe_until_ms if is_held else 0, asked, after.now_ms)
        if isinstance(verdict, BreakerAdmitted):
            if verdict.probe:
                self.probe_begins(attempt, verdict, asked, after)
            if not answer_is_lost:
                self.calls[attempt].version = verdict.version
        return verdict

    def judge(self, verdict: BreakerAdmitted | BreakerRefused, until_ms: int, asked: int, answered: int) -> None:
        """Nobody passes before the cool-down or the other's lease is over, and whoever asks from then on does.

        Args:
            verdict: of an admission between the other two moments of Redis' clock.
            until_ms: when it is over.
            asked: the moment before.
            answered: the moment after.
        """
        if isinstance(verdict, BreakerRefused):
            assert (verdict.until_ms, asked < until_ms) == (until_ms, True)
            assert verdict.probing == (self.model.state == "half_open")
            assert until_ms - answered <= verdict.wait_ms <= until_ms - asked
        else:
            assert verdict.probe
            assert until_ms <= answered

    def probe_begins(self, attempt: str, verdict: BreakerAdmitted, asked: int, after: LoadedBreaker) -> None:
        opens = self.model.state == "open"
        assert verdict.version == self.model.version + opens
        assert verdict.became_half_open == (opens or self.model.probe == attempt)
        live = [holder for holder, until_ms in self.probing.items() if until_ms > asked and holder != attempt]
        assert not live, f"{attempt} may probe, and so may {live}"
        until_ms = after.breaker.probe_until_ms
        assert asked <= until_ms - LEASE_MS <= after.now_ms
        self.probing[attempt] = until_ms
        self.changes += 1
        self.model = replace(
            self.model, state="half_open", version=verdict.version, probe=attempt, probe_until_ms=until_ms
        )

    @rule(answer_is_lost=st.sampled_from([False, False, True]))
    def a_call_asks(self, answer_is_lost: bool) -> None:
        self.number += 1
        self.ask(f"job-{self.number}:1", answer_is_lost=answer_is_lost)

    @precondition(any_waiting)
    @rule(which=ANY)
    def one_that_was_refused_or_heard_nothing_asks_again(self, which: int) -> None:
        self.ask(self.pick(which, passed=False))

    @precondition(lambda self: self.calls)
    @rule(which=ANY)
    def a_call_is_not_made_after_all(self, which: int) -> None:
        self.release(list(self.calls)[-1 - which % len(self.calls)])

    def release(self, attempt: str) -> None:
        self.run(self.redis.run([Breakers.return_probe_command(KEY, attempt)]))
        self.calls[attempt] = Call()
        if self.model.probe == attempt:
            self.model = replace(self.model, probe=None, probe_until_ms=0)
            self.probing.pop(attempt)
            self.changes += 1

    @precondition(any_passed)
    @rule(
        which=ANY,
        failed=OUTCOMES,
        skew_ms=st.integers(-SKEW_MS, SKEW_MS),
        of_old_release=st.sampled_from([0, 0, 1]),
        job=JOBS,
        tried_again=st.sampled_from([False, False, True]),
    )
    def a_call_ends(
        self, which: int, failed: bool | None, skew_ms: int, of_old_release: int, job: str, tried_again: bool
    ) -> None:
        attempt = self.pick(which, passed=True)
        if of_old_release:
            self.calls[attempt].version = None  # its worker reports no version
        self.end(attempt, failed, skew_ms, job, tried_again=tried_again)

    def end(
        self, attempt: str, failed: bool | None, skew_ms: int = 0, job: str = "", *, tried_again: bool = False
    ) -> Observation:
        at_ms, version = self.last.now_ms + skew_ms, self.calls.pop(attempt).version
        sequence = len(self.log) + 1
        outcome = Observation(sequence, attempt, at_ms, failed, "a3f1b2c4", version, job=job, tried_again=tried_again)
        self.log.append(outcome)
        return outcome

    @precondition(any_passed)
    @rule(which=ANY, is_reported=st.booleans())
    def a_worker_dies_with_its_call(self, which: int, is_reported: bool) -> None:
        attempt = self.pick(which, passed=True)
        self.calls[attempt].version = None  # its checkpoint is older than its admission
        if is_reported:
            self.end(attempt, None)
        else:
            self.calls.pop(attempt)

    # Breaker services and people: results come late, again, in any order, or never, and one is quicker than the other

    @precondition(lambda self: self.log)
    @rule(who=SERVICES, which=st.lists(ANY | st.integers(0, 60), min_size=1, max_size=4))
    def a_service_reads_and_decides(self, who: str, which: list[int]) -> None:
        self.decided[who] = self.decision(*(self.log[-1 - place % len(self.log)] for place in which))

    @rule(by_hand=st.sampled_from(["isolate", "reset", "reset"]))
    def somebody_reads_and_decides(self, by_hand: Literal["isolate", "reset"]) -> None:
        self.decided["ops"] = replace(self.decision(), by_hand=by_hand)

    @precondition(lambda self: self.model.probe in self.calls)
    @rule(by_hand=st.sampled_from(["isolate", "reset"]))
    def the_probe_is_given_back_while_somebody_decides(self, by_hand: Literal["isolate", "reset"]) -> None:
        self.somebody_reads_and_decides(by_hand)
        self.release(str(self.model.probe))

    @precondition(lambda self: self.decided)
    @rule(which=ANY)
    def what_was_decided_is_saved_or_decided_anew(self, which: int) -> None:
        decision = self.decided.pop(sorted(self.decided)[which % len(self.decided)])
        if not self.carry_out(decision):
            assert self.carry_out(replace(decision, before=self.last, changes=self.changes))

    def decision(self, *outcomes: Observation) -> Decision:
        return Decision(self.last, self.changes, outcomes)

    def carry_out(self, decision: Decision) -> bool:
        """Saves a decision, if it is one; False if somebody was quicker."""
        before, after = decision.before, decision.before.breaker
        if decision.by_hand == "isolate":
            after, _ = isolate(after, by="ops", why="", rules=RULES, now_ms=before.now_ms)
        elif decision.by_hand == "reset":
            after, _ = reset(after, by="ops", why="", rules=RULES, now_ms=before.now_ms)
        for outcome in decision.outcomes:
            after, _ = observe(after, outcome, RULES, before.now_ms)
        if after == before.breaker:
            return True
        is_unchanged = decision.changes == self.changes
        assert self.save(before, after) == is_unchanged
        if is_unchanged:
            self.changes += 1
            self.take_in(decision)
        return is_unchanged

    def take_in(self, decision: Decision) -> None:
        if decision.by_hand == "isolate":
            self.model, self.may = self.model.isolated(), OF_ISOLATING
        elif decision.by_hand == "reset":
            self.model, self.may = self.model.closed_by_hand(), OF_RESETTING
        else:
            if self.model.state == "half_open":
                assert self.model.probe in {outcome.attempt_id for outcome in decision.outcomes}
            self.model, self.may = self.model.after(decision.outcomes, decision.before.now_ms), OF_OUTCOMES
        if self.model.probe is None:
            self.probing.clear()

    @precondition(any_passed)
    @rule(which=ANY, failed=OUTCOMES, times=st.integers(1, 2))
    def a_call_ends_late_and_is_reported_at_once(self, which: int, failed: bool | None, times: int) -> None:
        outcome = self.end(self.pick(which, passed=True), failed)
        for _ in range(times):
            assert self.carry_out(self.decision(outcome))
            self.check()

    @rule(outcomes=st.lists(OUTCOMES, min_size=1, max_size=4))
    def calls_end_and_are_reported_at_once(self, outcomes: list[bool | None]) -> None:
        for failed in outcomes[:1] if self.model.state != "closed" else outcomes:
            self.number += 1
            attempt = f"job-{self.number}:1"
            if isinstance(self.ask(attempt), BreakerAdmitted):
                self.check()
                assert self.carry_out(self.decision(self.end(attempt, failed)))
                self.check()

    @precondition(lambda self: self.model.state == "isolated")
    @rule()
    def somebody_resets_it_again(self) -> None:
        assert self.carry_out(replace(self.decision(), by_hand="reset"))

    @precondition(lambda self: self.model.state in {"open", "half_open"})
    @rule(seconds=st.sampled_from([20, 40, 60, 100]))
    def time_passes(self, seconds: int) -> None:
        self.later(seconds * 1000)

    @precondition(lambda self: self.model.state == "open")
    @rule(answer_is_lost=st.booleans())
    def the_cooldown_is_over_and_a_call_asks(self, answer_is_lost: bool) -> None:
        self.later(COOLDOWN_MS)
        self.check()
        self.a_call_asks(answer_is_lost)

    def later(self, by_ms: int) -> None:
        self.model = self.model.earlier(by_ms)
        self.probing = {holder: until_ms - by_ms for holder, until_ms in self.probing.items()}
        for name in ("open_until_ms", "probe_until_ms"):
            stored: int = getattr(self.last.breaker, name)
            if stored:
                self.run(self.redis.client.hset(HASH, name, str(max(0, stored - by_ms))))

    @rule()
    def no_call_comes_and_a_service_looks(self) -> None:
        before, model = self.last, self.model
        now = before.now_ms
        after, change = wait_for_call(before.breaker, RULES, now)
        cooled = model.state == "open" and model.open_until_ms <= now
        has_no_probe = model.state == "half_open" and (model.probe is None or model.probe_until_ms <= now)
        assert (change is not None) == ((cooled or has_no_probe) and not model.waits)
        if change is None:
            return
        assert self.save(before, after)
        self.changes += 1
        self.probing.clear()
        self.may = {(model.state, "half_open")}
        self.model = replace(
            model, state="half_open", version=model.version + 1, probe=None, probe_until_ms=0, waits=True
        )

    # What always holds

    @invariant()
    def the_breaker_is_what_it_must_be(self) -> None:
        self.check()

    def check(self) -> None:
        self.last = self.load()
        now = self.last.breaker
        assert self.model.same_as(now), f"{now} is not {self.model}"
        step = self.before.state, now.state
        assert now.version - self.before.version in {0, 1}
        if now.version != self.before.version:
            assert step in self.may
            self.taken[step] += 1
        else:
            assert now.state == self.before.state
        self.before, self.may = self.model, set()

    def teardown(self) -> None:
        """Once everybody is gone, the next call passes, and if it goes well, so do all. Then it takes every step."""
        self.later(COOLDOWN_MS + LEASE_MS)
        self.check()
        verdict = self.ask("last:1")
        self.check()
        for decision in self.decided.values():
            self.carry_out(decision)
            self.check()
        if self.model.state == "isolated":
            assert isinstance(verdict, BreakerRefused) or "ops" in self.decided
        elif self.model.version == self.calls["last:1"].version:
            assert self.carry_out(self.decision(self.end("last:1", failed=False)))
            self.check()
            assert self.model.state == "closed"
        self.by_hand("isolate")
        self.by_hand("reset")
        self.calls_end_and_are_reported_at_once([True] * IN_A_ROW)
        for failed, state in ((True, "open"), (False, "closed")):
            assert self.model.state == "open"
            self.later(COOLDOWN_MS)
            self.check()
            self.calls_end_and_are_reported_at_once([failed])
            assert self.model.state == state

    def by_hand(self, wanted: Literal["isolate", "reset"]) -> None:
        assert self.carry_out(replace(self.decision(), by_hand=wanted))
        self.check()


@pytest.mark.timeout(600)  # where it fails, Hypothesis looks for the shortest way there for up to five minutes
@pytest.mark.long
def test_a_breaker_stays_right_whatever_happens_in_whatever_order(own_redis_server: RunningServer) -> None:
    Fleet.taken = Counter()
    run_for_steps(Fleet, own_redis_server.url, length=LENGTH)
    taken = set(Fleet.taken)
    assert {*OF_ADMISSIONS, *OF_OUTCOMES} <= taken
    assert OF_ISOLATING & taken
    assert OF_RESETTING & taken


CALLERS = {name: caller_of(*name.split("/")) for name in ("a/t", "a/u", "b/v")}
"""Two tenants of one key, and another key."""


class Callers(RedisMachine):
    """Calls of several callers, one after the other, to a model that works for some of them."""

    seen: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.works = dict.fromkeys(CALLERS, True)
        self.in_a_row: Counter[str] = Counter()
        self.sequence = 0

    @rule(name=st.sampled_from(sorted(CALLERS)), works=st.booleans())
    def the_model_breaks_or_works_for_one(self, name: str, works: bool) -> None:
        self.works[name] = works

    @rule()
    def the_cooldown_is_over(self) -> None:
        self.run(self.redis.client.hset(HASH, "open_until_ms", "0"))
        self.in_a_row = Counter({name: min(number, IN_A_ROW - 1) for name, number in self.in_a_row.items()})

    @rule(name=st.sampled_from(sorted(CALLERS)), times=st.integers(1, 4))
    def one_calls(self, name: str, times: int) -> None:
        for _ in range(times):
            self.call(name)

    def call(self, name: str) -> None:
        self.sequence += 1
        attempt, breakers = f"j{self.sequence}:1", Breakers(self.redis)
        [answer] = self.run(self.redis.run([Breakers.admit_command(KEY, attempt, LEASE_MS, CALLERS[name])]))
        verdict = Breakers.read_admission(answer)
        if isinstance(verdict, BreakerRefused):
            # It is stopped by failures of its own, or by those of two; never by those of one other.
            failing = [one for one, number in self.in_a_row.items() if number > 0]
            assert name in failing or len(failing) > 1
            self.seen["stopped while it works for another"] += name in failing and len(failing) == 1
            self.seen["stopped by what two see"] += len(failing) > 1
            return
        works = self.works[name]
        # No caller fails more often than the rule allows, whatever others do.
        assert works or self.in_a_row[name] < IN_A_ROW
        self.in_a_row[name] = 0 if works else self.in_a_row[name] + 1
        self.seen["passes while another is stopped"] += works and max(self.in_a_row.values()) >= IN_A_ROW
        [before] = self.run(breakers.load([KEY]))
        self.seen["probe of one caller"] += verdict.probe and before.breaker.alone != ""
        if verdict.probe and works:
            # It closes for all, or for all callers of a key or a tenant, whose failures are forgotten.
            for name_of_any, caller_of_any in CALLERS.items():
                if concerns_caller(before.breaker, caller_of_any):
                    self.in_a_row[name_of_any] = 0
        now, caller = before.now_ms, CALLERS[name]
        outcome = Observation(self.sequence, attempt, now, not works, "e", verdict.version, False, attempt, caller)
        if works and not verdict.probe:
            self.run(self.redis.run([Breakers.succeeded_command(KEY, verdict.version, self.sequence, caller)]))
            [before] = self.run(breakers.load([KEY]))
        after, _ = observe(before.breaker, outcome, RULES, before.now_ms)
        assert self.run(breakers.save([Saving(KEY, before, after, None)])) == [True]

    def teardown(self) -> None:
        """However it stands: once the model works for all, it breaks for one caller, and then for another one, too."""
        one, another = "a/t", "b/v"
        self.works = dict.fromkeys(CALLERS, True)
        for name in CALLERS:
            self.the_cooldown_is_over()
            self.call(name)
        self.works[one] = False
        for _ in range(IN_A_ROW + 1):
            self.call(one)
        self.call(another)
        self.the_cooldown_is_over()
        self.call(one)
        self.works[another] = False
        for _ in range(IN_A_ROW + 1):
            self.call(another)


@pytest.mark.timeout(600)
@pytest.mark.long
def test_each_caller_is_stopped_by_its_own_failures_and_by_what_two_see(own_redis_server: RunningServer) -> None:
    Callers.seen = Counter()
    run_for_steps(Callers, own_redis_server.url, length=50)
    assert (+Callers.seen).keys() == {
        "stopped while it works for another", "stopped by what two see", "passes while another is stopped",
        "probe of one caller",
    }  # fmt: skip
