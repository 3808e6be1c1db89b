"""How the plane stands now, as the HTTP interface tells it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pydantic import SecretStr

from breakwater.contracts.alerts import Alert
from breakwater.contracts.api import AgentHealth, AgentQueue, BreakerStatus, BudgetStatus, Queues
from breakwater.contracts.types import Event
from services.console.door import Door
from services.console.pages import Fetched, fetched

MOST_INCIDENTS = 1_000


class Breakers(Event):
    """What `breakers` answers."""

    breakers: tuple[BreakerStatus, ...]
    alive: bool


class Budgets(Event):
    """What `budgets` answers."""

    filled: bool
    budgets: tuple[BudgetStatus, ...]


class Incidents(Event):
    """What `alerts` answers."""

    alerts: tuple[Alert, ...]
    more: bool = False


@dataclass(frozen=True, slots=True)
class Live:
    """The whole plane. What can't be had says why."""

    agents: Fetched[list[AgentHealth]]
    breakers: Fetched[Breakers]
    budgets: Fetched[Budgets]
    incidents: Fetched[Incidents]
    """Those that are not over."""
    queues: Fetched[Queues]

    @property
    def problems(self) -> tuple[str, ...]:
        """Why parts of it can't be had, each reason once."""
        parts = (self.agents, self.breakers, self.budgets, self.incidents, self.queues)
        return tuple(dict.fromkeys(part.problem for part in parts if part.problem is not None))


async def live(door: Door, key: SecretStr) -> Live:
    """Asks for all of it at once. Raises SignedOut: the key is not known any more."""
    return Live(
        *await asyncio.gather(
            fetched(door.read(list[AgentHealth], key, "agents")),
            fetched(door.read(Breakers, key, "breakers")),
            fetched(door.read(Budgets, key, "budgets")),
            fetched(door.read(Incidents, key, "alerts", {"limit": MOST_INCIDENTS})),
            fetched(door.read(Queues, key, "queues")),
        )
    )


def queue_of(queues: Queues | None, agent: str) -> AgentQueue | None:
    """The queue of one agent; None where it has none, or nothing is known."""
    return None if queues is None else next((one for one in queues.agents if one.agent == agent), None)
