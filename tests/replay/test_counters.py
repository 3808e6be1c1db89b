"""The counters of a replay, against those that the scripts keep in the real Redis."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import strategies as st

from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.types import ms_from_time
from breakwater.limits.contract import BudgetEvent
from breakwater.limits.rules.budget import OverBudget
from breakwater.limits.rules.scopes import CallNames
from breakwater.limits.settings import Caps
from breakwater.limits.store.budgets import Budgets, Settlement
from breakwater.replay.rules.counters import ReplayedCounters
from tests.limits.limit_tables import limit_table
from tests.limits.test_budgets_store import LOG, ZONE, ask, caps, filled
from tests.records.test_messages import attempt
from tests.replay.properties import Steps, check_beside_redis
from tests.servers import RunningServer

TABLE = limit_table(caps(daily=250), {"a": caps(daily=120, monthly=200), "b": caps(enforcement="soft", daily=40)}, {})
AGENTS = st.sampled_from(["a", "a", "b"])
AMOUNTS = st.integers(0, 130)
CALLS = st.sampled_from(range(6))
STEPS = st.one_of(
    st.tuples(st.just("reserve"), CALLS, AGENTS, AMOUNTS),
    st.tuples(st.just("settle"), CALLS, AMOUNTS),
    st.tuples(st.just("release"), CALLS),
)


def test_counters_are_what_the_scripts_make_of_them(redis_server: RunningServer) -> None:
    check_beside_redis(redis_server.url, STEPS, _agree, times=3)


def call_of(name: str, agent: str, reserved: int, cost: int = 0) -> Attempt:
    return attempt(
        attempt_id=name, agent=agent, tenant=None, submitted_by=None, user=None, team=None, cost_tags={},
        reserved=reserved, cost=cost, cost_basis="billed", short_circuited=False,
    )  # fmt: skip


async def _agree(redis: Redis, steps: Steps) -> None:
    await filled(redis)
    budgets = Budgets(redis, ZONE)
    counters = ReplayedCounters(TABLE, ZONE, lambda _: None)
    under_way: dict[int, tuple[Attempt, datetime]] = {}
    for number, step in enumerate(steps):
        now_ms = ms_from_time(datetime.now(UTC))
        match step:
            case "reserve", call, agent, amount if call not in under_way:
                made = call_of(f"j{number}:{call}", agent, amount)
                answer = await ask(
                    *(redis, made.attempt_id, amount, TABLE.counters(CallNames(agent))),
                    agent=agent, tenant=None, budgets=budgets,
                )  # fmt: skip
                over = counters.reserve(made, now_ms)
                if isinstance(answer, OverBudget):
                    assert over == answer
                else:
                    assert over is None
                    under_way[call] = made, answer.at
            case "settle", call, cost if call in under_way:
                made, at = under_way.pop(call)
                ended = made.model_copy(update={"cost": cost, "reserved_at": at})
                await budgets.settle([Settlement.of(number + 1, ended)], LOG)
                counters.settle(ended, now_ms)
            case "release", call if call in under_way:
                made, at = under_way.pop(call)
                await redis.run([budgets.release_command(made.attempt_id, at)])
                counters.release(made.attempt_id)
            case _:
                pass


def test_what_was_used_before_counts_and_its_thresholds_are_not_announced_again() -> None:
    events: list[BudgetEvent] = []
    now_ms = ms_from_time(datetime(2026, 11, 21, 10, tzinfo=UTC))
    used = {("2026-11-21", "agent:a", "usd"): 100, ("2026-11", "agent:a", "usd"): 120}
    table = limit_table(None, {"a": Caps.model_construct(daily_usd=120, monthly_usd=150, enforcement="hard",
                                                         soft_at_percent=(50, 90))}, {})  # fmt: skip
    counters = ReplayedCounters(table, ZONE, events.append, used)
    assert isinstance(counters.reserve(call_of("j1:1", "a", 21), now_ms), OverBudget)
    assert counters.reserve(call_of("j2:1", "a", 20), now_ms) is None
    counters.settle(call_of("j2:1", "a", 20, cost=15), now_ms)
    # Half of both was used before: only what the call has reached is announced.
    assert [(event.window, event.threshold_percent) for event in events] == [("daily", 90), ("monthly", 90)]
