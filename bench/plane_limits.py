"""What limits cost that the API sets: three for each of many keys.

    python -m bench.plane_limits [keys]

Starts the embedded NATS and Redis, keeps the limits in LIMITS, and then measures, in one process: reading all of them,
as a worker does at its start, and the memory that they take there; a change by the editor, which is in force when it
returns, and what it costs a worker that follows; an admission under them, in turn with one under no limit; and a page
of the list. `CPU` is that of this process. Nothing is asserted.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import nats
import uvloop

from bench.counting import CountingRedis
from breakwater.config import LiveConfig, parse_config
from breakwater.identity.operations import ApiRequest
from breakwater.identity.rules.callers import Caller
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.topology import Plan
from breakwater.limits.api.limits import LimitRoutes
from breakwater.limits.contract import LimitQuery, LimitSettings
from breakwater.limits.limit_editor import LimitEditor
from breakwater.limits.limit_log import LimitLog
from breakwater.limits.rules.limit_changes import Author, set_limit
from breakwater.limits.rules.scopes import CallNames, Dimension, Dimensions
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import Budgets, Reserved
from tests.server_sources import embedded_servers

ZONE = ZoneInfo("UTC")
CONFIG = "{providers: {p: {base_url: 'http://127.0.0.1:1'}}, agents: {writer: {model: m}}}"
CALLER = Caller("key", "id", "bench", ("limits",), datetime.now(UTC))
COUNTED = Dimensions(frozenset({Dimension(("key",), "daily"), Dimension(("key",), "monthly")}))
CALLS = 2_000


def limits_of_key(number: int) -> dict[str, LimitSettings]:
    of_key = {"scope": f"key:bot-{number}"}
    return {
        f"bot-{number}.day": LimitSettings.model_validate({**of_key, "usd": "20", "per": "day"}),
        f"bot-{number}.month": LimitSettings.model_validate({**of_key, "usd": "200", "per": "month"}),
        f"bot-{number}.minute": LimitSettings.model_validate(
            {**of_key, "requests": 1_000_000, "per": "minute", "action": "wait"}
        ),
    }


async def keep(publisher: Publisher, keys: int) -> None:
    """Keeps the limits in the stream, without the checks that a change makes."""
    author = Author("bench", "ops", "three for each key", datetime.now(UTC))
    records = [
        set_limit(limit_id, settings, None, author)
        for number in range(keys)
        for limit_id, settings in limits_of_key(number).items()
    ]
    for begin in range(0, len(records), 500):
        await asyncio.gather(
            *(
                publisher.event(
                    f"{subjects.LIMIT_SETTINGS[:-1]}{subjects.encode_token(record.id)}",
                    record,
                    id=record.id,
                    at=record.at,
                )
                for record in records[begin : begin + 500]
            )
        )


async def timed(name: str, times: int, work: Callable[[int], Awaitable[object]]) -> None:
    began, cpu = time.perf_counter(), time.process_time()
    for number in range(times):
        await work(number)
    elapsed, cpu = time.perf_counter() - began, time.process_time() - cpu
    print(f"{name:44} {elapsed / times * 1e3:>9.3f} ms {cpu / times * 1e3:>9.3f} ms CPU")


async def measure(nats_url: str, redis_url: str, keys: int) -> None:
    await provision(nats_url, Plan(agents={"writer": 1}))
    client = await nats.connect(nats_url)
    publisher = Publisher(lambda: client, "bench")
    redis = CountingRedis(redis_url)
    counters, budgets = BudgetCounters(redis, ZONE), Budgets(redis, ZONE)
    budgets.dimensions = COUNTED
    await counters.fill(None, "log", 0, counters.periods(datetime.now(UTC), COUNTED), {}, {}, dimensions=COUNTED)
    await keep(publisher, keys)
    live, following = LiveConfig(parse_config(CONFIG)), LiveConfig(parse_config(CONFIG))
    log, worker_log = LimitLog(lambda: client, publisher), LimitLog(lambda: client)
    log.feed(live.change_limits)
    worker_log.feed(following.change_limits)
    await timed(f"read {3 * keys:,} limits", 1, lambda _: log.catch_up())
    tracemalloc.start()
    await worker_log.catch_up()
    print(f"{'memory of a process that follows them':44} {tracemalloc.get_traced_memory()[0] / 1e6:>9.1f} MB")
    tracemalloc.stop()

    # As services do: a collection would look at everything again.
    gc.freeze()
    gc.set_threshold(50_000)

    async def nothing(*_: object) -> dict[str, int]:
        return {}

    editor = LimitEditor((), {}, log, live.limits, counters, publisher, nothing)

    async def change(number: int) -> None:
        settings = LimitSettings.model_validate({"scope": f"key:bot-{number}", "usd": f"{number + 1}", "per": "day"})
        await editor.set_limit(f"bot-{number}.day", settings, CALLER, None, datetime.now(UTC))

    await timed("a change, in force as it returns", 100, change)
    await timed("the same for a worker, with its next limits", 1, lambda _: worker_log.catch_up())

    async def admit(live: LiveConfig, key: str, number: int) -> None:
        names, now, table = CallNames("writer", "acme", "m", "p", key), datetime.now(UTC), live.limits()
        found, rates = table.counters(names, budgets.dimensions), table.rate_limits(names)
        command = budgets.reserve_command(
            *(f"{key}-{number}-{id(live)}:1", names, 1_000, found), now=now, lease_ms=60_000, rates=rates,
            version=table.version,
        )  # fmt: skip
        [raw] = await redis.run([command])
        assert isinstance(budgets.read_reservation(raw, found, 1_000, now=now, rates=rates), Reserved)

    none, few = LiveConfig(parse_config(CONFIG)), LiveConfig(parse_config(CONFIG))
    few.change_limits([f"bot-1.{per}" for per in ("day", "month", "minute")], worker_log.states, worker_log.version)
    for _ in range(2):
        await timed("an admission, without limits", CALLS, lambda number: admit(none, "bot-1", number))
        await timed("an admission of one key, of 1 with 3 limits", CALLS, lambda number: admit(few, "bot-1", -number))
        await timed(f"the same, of {keys:,} keys", CALLS, lambda number: admit(following, "bot-1", number))
        each = f"an admission of another key each, of {keys:,}"
        await timed(each, CALLS, lambda number: admit(following, f"bot-{number % keys}", number))

    routes = LimitRoutes(editor)

    async def page(number: int, limit: int) -> None:
        query = LimitQuery(after=f"bot-{number}.day", limit=limit)
        listed = await routes.list_limits(ApiRequest(query, {}, CALLER, ""))
        assert listed.limits
        listed.model_dump_json()

    await timed("a page of 100", 20, lambda number: page(number, 100))
    await timed("a page of 1,000", 5, lambda number: page(number, 1_000))
    await redis.close()
    await client.close()


def main() -> None:
    """Prints the figures."""
    keys = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with embedded_servers() as (servers, _):
        uvloop.run(measure(servers.nats().url, servers.redis().url, keys))


if __name__ == "__main__":
    main()
