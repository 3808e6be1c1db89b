"""State machines whose state is in a Redis: what they share, and how long they are run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator
from contextlib import contextmanager
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

from breakwater.kernel.redis.connection import Redis

Answer = TypeVar("Answer")


class RedisMachine(RuleBasedStateMachine):
    """A state machine that begins with an empty Redis, and counts its steps over all examples."""

    redis: Redis
    loop: asyncio.AbstractEventLoop
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.run(self.redis.client.flushall())

    def run(self, work: Awaitable[Answer]) -> Answer:
        return self.loop.run_until_complete(work)

    @invariant()
    def it_is_counted(self) -> None:
        type(self).steps += 1


STEPS = 15
"""For each example that the profile of Hypothesis wants of a test."""


@contextmanager
def connected(machine: type[RedisMachine], url: str) -> Generator[None]:
    """Gives a class of machines its Redis, which each of them empties."""
    machine.steps, machine.redis, machine.loop = 0, Redis(url), asyncio.new_event_loop()
    try:
        yield
    finally:
        machine.loop.run_until_complete(machine.redis.close())
        machine.loop.close()


def run_for_steps(machine: type[RedisMachine], url: str, *, length: int) -> None:
    """Runs a machine until it has made its steps: Hypothesis ends an example whenever it likes.

    What must be seen for certain is taken by each example at its end: chance may leave it out of all of them.

    Args:
        machine: what to run.
        url: of its Redis, which is emptied.
        length: steps of an example, at most.
    """
    steps = STEPS * settings.default.max_examples
    one_run = settings(
        stateful_step_count=length,
        deadline=None,
        derandomize=False,
        suppress_health_check=[HealthCheck.too_slow],
    )
    examples, more = -(-steps // length), 1
    with connected(machine, url):
        while machine.steps < steps:
            run_state_machine_as_test(machine, settings=settings(one_run, max_examples=examples))
            more += 1  # under a fixed seed, the same ones come first
            examples = more
