"""`/api/v1/agents`: the health of agents; and refusing jobs that no model would be called for."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from functools import cached_property

from breakwater.config import Config, breaker_of, breakers_of
from breakwater.contracts.breakers import AgentHealth, BreakerStatus, ModelHealth
from breakwater.contracts.types import Message, format_time, time_from_ms
from breakwater.contracts.validation import FieldError
from breakwater.policy.breaker import Breaker, BreakerKey, caller_of, consecutive_failures
from breakwater.policy.health import health_of_agent, health_of_model
from breakwater.pricing import unaffordable
from breakwater.state.breakers import Breakers, Loaded
from breakwater.state.connection import StateUnavailable
from breakwater.state.deployments import Deployments
from breakwater.state.health import CallHealth, Healths
from services.request.parsing import Submission
from services.request.problems import Problem
from services.request.routing import ApiRequest

PROBE_WAIT_S = 2.0
"""How long a submission waits for a probe that is under way, as a worker's call does: it may have succeeded already."""

PROBE_POLL_S = 0.2


class Agents:
    """The agents, as far as they can be called."""

    def __init__(self, config: Config, breakers: Breakers, healths: Healths, deployments: Deployments) -> None:
        self._config = config
        self._breakers = breakers
        self._healths = healths
        self._deployments = deployments

    async def show(self, _: ApiRequest[Message]) -> list[AgentHealth]:
        """All of them."""
        return await self.read()

    async def read(self) -> list[AgentHealth]:
        """All of them, as of now. Raises StateUnavailable."""
        return await agents_health(self._config, self._breakers, self._healths, self._deployments, self._unaffordable)

    @cached_property
    def _unaffordable(self) -> frozenset[str]:
        return frozenset(name for name in self._config.agents if unaffordable(self._config, name))

    async def refusal(self, sent: Submission, *, of_plan: bool = False) -> Problem | None:
        """Why a job is refused at once, as its agent wants it (`refuse_when_open`); None where it may be accepted.

        A whole plan (`of_plan`) is refused whatever its agents want.

        Takes no probe and changes nothing: of the jobs that come once a cool-down is over, the worker lets one probe.
        While that is under way, it waits a moment for its end.
        """
        job = sent.job
        agent = self._config.agents[job.agent]
        if not (agent.refuse_when_open or of_plan) or agent.breaker is None or job.dry_run:
            return None
        chain = agent.chain_for(job)
        keys = [key for model in chain if (key := breaker_of(self._config, job.agent, model)) is not None]
        caller = caller_of(sent.owner or (sent.submitted_by if job.tenant else None), job.tenant)
        ends = time.monotonic() + PROBE_WAIT_S
        while True:
            try:
                loaded = await self._breakers.load(keys)
            except StateUnavailable:
                return None  # the worker decides, when Redis is back; other users of Redis log the outage
            untils = [until for one in loaded if (until := refused_until(one, caller)) is not None]
            if not loaded or len(untils) < len(chain):
                return None
            if time.monotonic() >= ends or not any(one.breaker.probe for one in loaded):
                return _agent_unavailable(job.agent, dict(zip(chain, untils, strict=True)), loaded[0].now_ms)
            await asyncio.sleep(PROBE_POLL_S)


def _agent_unavailable(agent: str, untils: dict[str, int], now_ms: int) -> Problem:
    """503 with the time until one of the models may be called again; 0 stands for one that was isolated."""
    first_ms = min((until for until in untils.values() if until), default=None)
    headers = {} if first_ms is None else {"Retry-After": str(max(1, math.ceil((first_ms - now_ms) / 1000)))}
    details = [
        FieldError(path="agent", message=f"no call to {model!r} before {_when(until)}")
        for model, until in untils.items()
    ]
    message = f"agent {agent!r} is temporarily unavailable due to recent failures"
    return Problem(503, "agent_unavailable", message, details, headers)


def _when(until_ms: int) -> str:
    return format_time(time_from_ms(until_ms)) if until_ms else "an operator resets its breaker"


async def agents_health(
    config: Config,
    breakers: Breakers,
    healths: Healths,
    deployments: Deployments,
    never_called: Collection[str] = (),
) -> list[AgentHealth]:
    """How every configured agent fares, in the config's order; in two round trips to Redis.

    Those in `never_called` are unhealthy before any of their jobs has failed: their hard caps have no room for a call.

    A time in `circuit_open_until` is always still to come: once a cool-down is over, or the lease of a probe, a call
    may probe, and there is nothing to wait for although the breaker is not closed yet.

    Raises:
        StateUnavailable: Redis does not answer.
    """
    keys = {name: _keys(config, name, agent.chain) for name, agent in config.agents.items()}
    guarding = list(dict.fromkeys(key for models in keys.values() for key in models.values() if key is not None))
    # In one round trip.
    found, held = await asyncio.gather(
        breakers.load(guarding),
        held_until(config, deployments, ((name, model) for name, models in keys.items() for model in models)),
    )
    loaded = dict(zip(guarding, found, strict=True))
    lately = await healths.of(list(keys))
    return [
        _agent(
            name,
            {model: key and loaded[key] for model, key in models.items()},
            calls,
            {model: held.get((name, model)) for model in models},
            never=name in never_called,
        )
        for (name, models), calls in zip(keys.items(), lately, strict=True)
    ]


async def held_until(
    config: Config, deployments: Deployments, models: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], datetime]:
    """Until when models are held that are, each by the agent that calls it, or `*`. Raises StateUnavailable."""
    names = {
        (agent, model): config.deployment(config.agents.get(agent, config.defaults), model) for agent, model in models
    }
    held = await deployments.held_until(names.values())
    return {one: time_from_ms(held[name]) for one, name in names.items() if name in held}


async def breaker_statuses(config: Config, breakers: Breakers, deployments: Deployments) -> list[BreakerStatus]:
    """Every breaker in Redis, and those of the agents' own models that were not, by agent and model.

    Raises:
        StateUnavailable: Redis does not answer.
    """
    known = dict(await breakers.all())
    quiet = [key for key in breakers_of(config) if key not in known]
    if quiet:
        known |= zip(quiet, await breakers.load(quiet), strict=True)
    by_name = sorted(known.items(), key=lambda one: (one[0].agent, one[0].model))
    held = await held_until(config, deployments, ((key.agent, key.model) for key in known))
    return [breaker_status(key, loaded.breaker, held.get((key.agent, key.model))) for key, loaded in by_name]


def breaker_status(key: BreakerKey, breaker: Breaker, held: datetime | None = None) -> BreakerStatus:
    """A breaker in the contract's words."""
    in_a_row = consecutive_failures(breaker)
    return BreakerStatus(
        agent=key.agent,
        model=key.model,
        state=breaker.state,
        health=health_of_model(breaker.state, in_a_row),
        reason=breaker.reason or None,
        since=_time(breaker.changed_ms),
        open_until=_time(breaker.open_until_ms) if breaker.state == "open" else None,
        probe_until=_time(breaker.probe_until_ms) if breaker.state == "half_open" and breaker.probe else None,
        held_until=held,
        consecutive_failures=in_a_row,
        total_failures=breaker.total_failures,
        unique_errors=len(breaker.errors_seen),
        last_failure_at=_time(breaker.last_failure_ms),
        last_success_at=_time(breaker.last_success_ms),
        version=breaker.version,
    )


def refused_until(loaded: Loaded, caller: str = "") -> int | None:
    """Until when a breaker lets no call pass, in ms since the epoch, as of when it was read.

    Args:
        loaded: the breaker.
        caller: whose call, as `caller_of` names it; empty: of one that it refuses.

    Returns:
        None where it lets one pass, a probe at least; 0 where it was isolated: until an operator resets it.
    """
    breaker, until_ms = loaded.breaker, 0
    match breaker.state:
        case "closed":
            return None
        case "isolated":
            return 0
        case _ if caller and breaker.alone not in {"", caller}:
            return None
        case "open" if caller and breaker.probed_by not in {"", caller}:
            return None
        case "open":
            until_ms = breaker.open_until_ms
        case "half_open":
            until_ms = breaker.probe_until_ms if breaker.probe else 0
    return until_ms if until_ms > loaded.now_ms else None


def _keys(config: Config, name: str, models: Iterable[str]) -> dict[str, BreakerKey | None]:
    return {model: breaker_of(config, name, model) for model in models}


def _agent(
    name: str,
    models: Mapping[str, Loaded | None],
    calls: Mapping[str, CallHealth],
    held: Mapping[str, datetime | None],
    *,
    never: bool,
) -> AgentHealth:
    of_models = tuple(
        _model(model, loaded, calls.get(model, CallHealth()), held[model]) for model, loaded in models.items()
    )
    together = calls.get("", CallHealth())
    waits = [None if loaded is None else refused_until(loaded) for loaded in models.values()]
    # For those isolated the time is unknown; and where one may be called now, there is nothing to wait for.
    first = None if None in waits else min((until for until in waits if until), default=None)
    health = health_of_agent([model.health for model in of_models], together.consecutive_failures)
    return AgentHealth(
        agent_id=name,
        health="unhealthy" if never else health,
        known=never or together.called or health != "healthy",
        consecutive_failures=together.consecutive_failures,
        last_failure_at=_time(together.last_failure_ms),
        last_success_at=_time(together.last_success_ms),
        circuit_open_until=_time(first),
        models=of_models,
    )


def _model(model: str, loaded: Loaded | None, calls: CallHealth, held: datetime | None) -> ModelHealth:
    state = None if loaded is None else loaded.breaker.state
    health = health_of_model(state, calls.consecutive_failures)
    return ModelHealth(
        model=model,
        health=health,
        known=calls.called or health != "healthy",
        breaker=state,
        consecutive_failures=calls.consecutive_failures,
        last_failure_at=_time(calls.last_failure_ms),
        last_success_at=_time(calls.last_success_ms),
        circuit_open_until=None if loaded is None else _time(refused_until(loaded)),
        held_until=held,
    )


def _time(epoch_ms: int | None) -> datetime | None:
    return time_from_ms(epoch_ms) if epoch_ms else None
