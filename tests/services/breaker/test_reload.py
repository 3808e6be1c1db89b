"""The breaker service goes over to other rules while it runs."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from pydantic import SecretStr

from breakwater.breakers.rules.breaker import BreakerKey
from breakwater.breakers.store import Breakers
from breakwater.config import Config, parse_config
from breakwater.config.servers import bus_plan
from breakwater.jobs.store.task_keys import TaskKey
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.redis.connection import Redis
from breakwater.limits.store.tasks import Tasks
from breakwater.services.breaker.app import build
from tests.flow.kit import config_for
from tests.helpers import FIRST, nats_client, until
from tests.records.samples import execution
from tests.servers import RunningServer
from tests.services.breaker.test_handlers import attempt_of

WRITER, READER, TASK = BreakerKey("writer", "sim/m"), BreakerKey("reader", "sim/m"), TaskKey("acme", "t")


def agents(**by_name: Any) -> Config:
    models = {name: {"model": "sim/m", **settings} for name, settings in by_name.items()}
    return parse_config(json.dumps(config_for("http://127.0.0.1:9", models)))


async def test_outcomes_are_judged_by_the_rules_that_hold_when_they_are_counted(
    own_nats_server: RunningServer, redis: Redis, redis_server: RunningServer
) -> None:
    breakers, tasks = Breakers(redis), Tasks(redis)
    before = agents(writer={"breaker": {"consecutive_failures": 9}})
    after = agents(
        writer={"breaker": {"consecutive_failures": 3}},
        reader={"breaker": {"consecutive_failures": 1}, "guard": {"max_iterations": 5}},
    )
    await provision(own_nats_server.url, bus_plan(before))
    app = build(Settings(nats_url=SecretStr(own_nats_server.url), redis_url=SecretStr(redis_server.url)), before)
    await app.start()
    try:
        async with nats_client(own_nats_server.url) as client:

            async def fails(agent: str, name: str) -> None:
                attempt = {**attempt_of(name, "error"), "agent": agent}
                subject = subjects.attempt(agent, name, 1)
                await client.jetstream().publish(subject, json.dumps(attempt).encode(), headers=FIRST)

            await until(breakers.filled_from, what="the service to have looked at the log")
            for number in range(4):
                await fails("writer", f"before-{number}")
            await until(partial(is_at, breakers, WRITER, "closed", 4), what="four failures to be counted")

            await provision(own_nats_server.url, bus_plan(after))
            await app.reload(after)
            await fails("reader", "after-1")
            await fails("writer", "after-2")
            for key, most in ((READER, 1), (WRITER, 5)):
                await until(partial(is_at, breakers, key, "open", most), what=f"{key.agent} to be opened")

            # Lost with Redis, it is counted again where the config of now has a guard.
            record = execution(
                task_id=TASK.task_key, task_key=TASK.task_key, tenant=TASK.tenant, agent="reader"
            ).model_dump_json(by_alias=True)
            await client.jetstream().publish(subjects.execution("reader", "e1"), record.encode(), headers=FIRST)
            await redis.client.flushall()
            await until(partial(counted, tasks), what="the job of a task to be counted again")
    finally:
        await app.stop()


async def is_at(breakers: Breakers, key: BreakerKey, state: str, failures: int) -> bool:
    [loaded] = await breakers.load([key])
    return (loaded.breaker.state, len(loaded.breaker.failures)) == (state, failures)


async def counted(tasks: Tasks) -> bool:
    return (await tasks.load(TASK))[0].iterations == 1
