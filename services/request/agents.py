"""`/api/v1/agents`: the health of agents; and refusing jobs that no model would be called for."""

from __future__ import annotations

import math

from breakwater.config import Config
from breakwater.contracts.api import AgentHealth
from breakwater.contracts.job import Job
from breakwater.contracts.types import Message, format_time, time_from_ms
from breakwater.contracts.validation import FieldError
from breakwater.health import agents_health, breaker_of, refused_until
from breakwater.state.breakers import Breakers
from breakwater.state.connection import StateUnavailable
from breakwater.state.health import Healths
from services.request.problems import Problem
from services.request.routing import ApiRequest


class Agents:
    """The agents, as far as they can be called."""

    def __init__(self, config: Config, breakers: Breakers, healths: Healths) -> None:
        self._config = config
        self._breakers = breakers
        self._healths = healths

    async def show(self, _: ApiRequest[Message]) -> list[AgentHealth]:
        """All of them."""
        return await agents_health(self._config, self._breakers, self._healths)

    async def refusal(self, job: Job) -> Problem | None:
        """Why a job is refused at once, as its agent wants it (`refuse_when_open`); None where it may be accepted.

        Takes no probe and changes nothing: of the jobs that come once a cool-down is over, the worker lets one probe.
        """
        agent = self._config.agents[job.agent]
        if not agent.refuse_when_open or agent.breaker is None or job.dry_run:
            return None
        chain = agent.chain_for(job)
        keys = [key for model in chain if (key := breaker_of(self._config, job.agent, model)) is not None]
        try:
            loaded = await self._breakers.load(keys)
        except StateUnavailable:
            return None  # the worker decides, when Redis is back; who else uses it here tells of the outage
        untils = [until for one in loaded if (until := refused_until(one)) is not None]
        if not loaded or len(untils) < len(chain):
            return None
        return _agent_unavailable(job.agent, dict(zip(chain, untils, strict=True)), loaded[0].now_ms)


def _agent_unavailable(agent: str, untils: dict[str, int], now_ms: int) -> Problem:
    """503 with the time until one of the models may be called again; 0 stands for one that was forced open."""
    first_ms = min((until for until in untils.values() if until), default=None)
    headers = {} if first_ms is None else {"Retry-After": str(max(1, math.ceil((first_ms - now_ms) / 1000)))}
    details = [
        FieldError(path="agent", message=f"no call to {model!r} before {_when(until)}")
        for model, until in untils.items()
    ]
    message = f"agent {agent!r} is temporarily unavailable due to recent failures"
    return Problem(503, "agent_unavailable", message, details, headers)


def _when(until_ms: int) -> str:
    return format_time(time_from_ms(until_ms)) if until_ms else "somebody resets its breaker"
