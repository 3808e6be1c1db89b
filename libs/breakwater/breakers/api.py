"""Breakers and the health of agents: showing both, isolating and resetting breakers, and refusing jobs by them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property

from breakwater.breakers.contract import (
    AgentHealth,
    BreakerList,
    BreakerRequest,
    BreakerStatus,
    BreakerTransition,
    ModelHealth,
    ShadowBreakerStatus,
    UnchangedBreaker,
)
from breakwater.breakers.rules.breaker import (
    ALL,
    Breaker,
    BreakerChange,
    BreakerKey,
    caller_of,
    concerns_caller,
    consecutive_failures,
    isolate,
    reset,
    rules_of_unconfigured,
    state_at,
)
from breakwater.breakers.rules.health import CallHealth, Verdict, health_of_model, open_for
from breakwater.breakers.rules.shadow import Shadow
from breakwater.breakers.rules.transitions import breaker_after, transition
from breakwater.breakers.settings import BreakerRules
from breakwater.breakers.store import UNSAVED, Breakers, LoadedBreaker, Saving
from breakwater.breakers.transitions import dump_transitions, publish_saved
from breakwater.config import Config, breaker_of, breakers_of, shadows_of, units_of
from breakwater.config.deployments import Deployment
from breakwater.config.pricing import unaffordable
from breakwater.health.rules import combine, health_of_agent
from breakwater.health.store import Healths
from breakwater.identity.operations import PERHAPS_DONE, REDIS_UNAVAILABLE, ApiRequest, operation
from breakwater.jobs.api.submission import Submission
from breakwater.kernel.http.parsing import suggestion
from breakwater.kernel.http.problems import RequestError, unavailable, unknown
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.redis.connection import StateUnavailableError
from breakwater.kernel.redis.documents import Documents
from breakwater.kernel.types import Message, format_time, time_from_ms
from breakwater.kernel.validation import FieldError
from breakwater.limits.store.deployments import Deployments

PROBE_WAIT_S = 2.0
"""Time for which a submission waits for the end of a probe, as a worker's call does: the probe may be succeeding."""

PROBE_POLL_S = 0.2

BreakerDecision = Callable[[LoadedBreaker, BreakerRules], tuple[Breaker, BreakerChange | None]]

_CHANGED = "The transition; or, if there was nothing to do, the breaker with `unchanged`."
_CHANGE_ERRORS = {
    404: "Neither the config nor Redis knows the breaker (`unknown_breaker`).",
    503: f"Redis or NATS is unavailable (`unavailable`). {PERHAPS_DONE} Or it was done and its event waits for NATS "
    "(`not_published`): a breaker service publishes it.",
}


@dataclass(frozen=True)
class AgentRoutes:
    """The health of agents."""

    config: Config
    breakers: Breakers
    healths: Healths
    deployments: Deployments

    @operation(
        "GET",
        "/api/v1/agents",
        tag="agents",
        summary="The health of every agent",
        description="`circuit_open_until` is always in the future. It is absent while a call may be made, even if only "
        "a probe, as with an open breaker whose cool-down has ended; and if the breaker is isolated.",
        result="All agents of the config, in its order.",
        errors={503: REDIS_UNAVAILABLE},
    )
    async def list_agents(self, _: ApiRequest[Message]) -> list[AgentHealth]:
        """Lists all agents."""
        return await self.read()

    async def read(self) -> list[AgentHealth]:
        """Reads the health of all agents as of now. Raises StateUnavailableError."""
        return await agents_health(self.config, self.breakers, self.healths, self.deployments, self._unaffordable)

    @cached_property
    def _unaffordable(self) -> frozenset[str]:
        return frozenset(name for name in self.config.agents if unaffordable(self.config, name))


@dataclass(frozen=True, slots=True)
class AgentAvailability:
    """Refuses jobs of agents that have `refuse_when_open` and may call no model now."""

    config: Config
    breakers: Breakers

    async def refusal(self, sent: Submission, *, of_plan: bool = False) -> RequestError | None:
        """Returns the problem for which a job is refused; None if it may be accepted.

        This takes no probe and changes nothing: once a cool-down is over, the worker lets one of the jobs probe. While
        a probe is under way, this waits up to `PROBE_WAIT_S` for its end.

        Args:
            sent: the job.
            of_plan: the job is part of a plan, which is refused even without `refuse_when_open`.
        """
        job = sent.job
        agent = self.config.agents[job.agent]
        if not (agent.refuse_when_open or of_plan) or agent.breaker is None or job.dry_run:
            return None
        places = [place for model in agent.chain_for(job) for place in self.config.deployments(agent, model)]
        units = {place.unit: key for place in places if (key := breaker_of(self.config, job.agent, place)) is not None}
        caller = caller_of(sent.owner or (sent.submitted_by if job.tenant else None), job.tenant)
        ends = time.monotonic() + PROBE_WAIT_S
        while True:
            try:
                loaded = await self.breakers.load(list(units.values()))
            except StateUnavailableError:
                return None  # the worker decides when Redis is back; other users of Redis log the outage
            untils = [
                until for loaded_breaker in loaded if (until := refused_until(loaded_breaker, caller)) is not None
            ]
            if not loaded or len(untils) < len({place.unit for place in places}):
                return None
            if time.monotonic() >= ends or not any(loaded_breaker.breaker.probe for loaded_breaker in loaded):
                return _agent_unavailable(job.agent, dict(zip(units, untils, strict=True)), loaded[0].now_ms)
            await asyncio.sleep(PROBE_POLL_S)


def _agent_unavailable(agent: str, untils: dict[str, int], now_ms: int) -> RequestError:
    """Returns 503 with the time when a model may be called again. In `untils`, 0 means an isolated breaker."""
    first_ms = min((until for until in untils.values() if until), default=None)
    wait_s = None if first_ms is None else (first_ms - now_ms) / 1000
    details = list[FieldError]()
    for model, until in untils.items():
        when = format_time(time_from_ms(until)) if until else "an operator resets its breaker"
        details.append(FieldError(path="agent", message=f"no call to {model!r} before {when}"))
    message = f"agent {agent!r} is temporarily unavailable due to recent failures"
    return RequestError(503, "agent_unavailable", message, details, retry_after_s=wait_s)


class BreakerRoutes:
    """The breakers of the fleet, for people."""

    def __init__(
        self,
        config: Config,
        breakers: Breakers,
        shadows: Documents[Shadow],
        healths: Healths,
        deployments: Deployments,
        publisher: Publisher,
        events: Lookup,
    ) -> None:
        self._config = config
        self._shadows = shadows
        self._configured = breakers_of(config, of_allowed=True)
        self._breakers = breakers
        self._healths = healths
        self._deployments = deployments
        self._publisher = publisher
        self._events = events

    @operation(
        "GET",
        "/api/v1/breakers",
        tag="breakers",
        summary="The state of every breaker",
        description="Breakers of the agents' models, and all others used within the last week.",
        result="By agent and model, and the shadows of the agents' models.",
        errors={503: REDIS_UNAVAILABLE},
    )
    async def list_breakers(self, _: ApiRequest[Message]) -> BreakerList:
        """Lists all breakers."""
        statuses = await breaker_statuses(self._config, self._breakers, self._healths, self._deployments)
        shadows = await shadow_statuses(self._config, self._shadows)
        return BreakerList(breakers=tuple(statuses), shadows=tuple(shadows), alive=await self._breakers.alive())

    @operation(
        "POST",
        "/api/v1/breakers/isolate",
        tag="breakers",
        summary="Isolate a breaker",
        description="It admits no call, not even a probe, until it is reset. It need not have counted anything yet. If "
        "it is isolated already, the response is an `UnchangedBreaker`.",
        result=_CHANGED,
        errors=_CHANGE_ERRORS,
    )
    async def isolate_breaker(self, request: ApiRequest[BreakerRequest]) -> BreakerTransition | UnchangedBreaker:
        """Forces a breaker open and publishes the transition."""

        def decide(loaded: LoadedBreaker, rules: BreakerRules) -> tuple[Breaker, BreakerChange | None]:
            return isolate(loaded.breaker, by=request.by, why=request.why, rules=rules, now_ms=loaded.now_ms)

        return await self._change(request, "breaker_isolated", decide)

    @operation(
        "POST",
        "/api/v1/breakers/reset",
        tag="breakers",
        summary="Close a breaker and clear its counts",
        description="From any state, even closed; a hold of the model ends, too. If it has never counted anything, or "
        "the model is held and the agent has no breaker of its own on it, the response is an `UnchangedBreaker`.",
        result=_CHANGED,
        errors=_CHANGE_ERRORS,
    )
    async def reset_breaker(self, request: ApiRequest[BreakerRequest]) -> BreakerTransition | UnchangedBreaker:
        """Closes a breaker, clears its counts and publishes the transition. The hold of its model ends, too."""

        def decide(loaded: LoadedBreaker, rules: BreakerRules) -> tuple[Breaker, BreakerChange | None]:
            if _is_unused(loaded):
                return loaded.breaker, None
            return reset(loaded.breaker, by=request.by, why=request.why, rules=rules, now_ms=loaded.now_ms)

        key = BreakerKey(request.input.agent, request.input.model)
        deployment = _deployment_of(self._config, key.agent, key.model).id
        try:
            changed = await self._change(request, "breaker_reset", decide)
        except RequestError as problem:
            if problem.code != "unknown_breaker" or not await self._deployments.release(deployment):
                raise
            request.log("hold_ended", agent=key.agent, model=key.model)
            [loaded] = await self._breakers.load([key])
            [health] = await healths_on(self._config, self._healths, {key: loaded})
            status = breaker_status(key, loaded, health).model_dump() | {"reason": "its hold has ended"}
            return UnchangedBreaker.model_validate(status)
        await self._deployments.release(deployment)
        return changed

    async def _change(
        self, request: ApiRequest[BreakerRequest], log_event: str, decide: BreakerDecision
    ) -> BreakerTransition | UnchangedBreaker:
        key = BreakerKey(request.input.agent, request.input.model)
        self._events.connection()  # not begun if it can't be published
        loaded, event = await self._save(key, decide)
        request.log(log_event, agent=key.agent, model=key.model, changed=event is not None)
        if event is None:
            [health] = await healths_on(self._config, self._healths, {key: loaded})
            return UnchangedBreaker.model_validate(breaker_status(key, loaded, health).model_dump())
        try:
            await self._publish(key, dump_transitions([event]))
        except BusError as error:
            message = f"the breaker is {event.to_state} from now on, but its event is not published yet: {error}"
            raise unavailable("not_published", f"{message}; a breaker service will publish it") from error
        return event

    async def _save(self, key: BreakerKey, decide: BreakerDecision) -> tuple[LoadedBreaker, BreakerTransition | None]:
        """Decides on a breaker and saves the decision. The caller publishes the event.

        Returns:
            The breaker before the decision, and its transition, if any.
        """
        rules = self._configured.get(key)
        while True:
            log, [stored] = await self._breakers.load_with_log([key])
            if stored.unpublished is not None:
                # The process that saved this transition crashed or waits for NATS. It must be published first, as the
                # next one overwrites it.
                await self._publish(key, stored.unpublished)
            before = stored if log is not None else await self._recalled(key, stored)
            if _is_unused(before) and rules is None:
                raise self._unknown(key)
            known_rules = rules or rules_of_unconfigured(key)
            after, change = decide(before, known_rules)
            event = None if change is None else transition(key, change, known_rules, before.now_ms)
            if event is None and before is stored:
                return before, None
            if all(await self._breakers.save([Saving(key, before, after, event and dump_transitions([event]))])):
                return before, event
            # Another writer was quicker: decide again, on what it has saved.

    async def _recalled(self, key: BreakerKey, loaded: LoadedBreaker) -> LoadedBreaker:
        """Returns a breaker as its latest transition left it. For a Redis that is not filled yet."""
        stored = await self._events.newest_on(Stream.EVENTS, subjects.breaker(key.agent, key.model))
        latest = None if stored is None else stored.read(BreakerTransition)
        if stored is None or latest is None or latest.version <= loaded.breaker.version:
            return loaded
        return replace(loaded, breaker=breaker_after(latest, stored.sequence))

    async def _publish(self, key: BreakerKey, saved: str | None) -> None:
        # If its mark can't be removed, the transition is published a second time, which is harmless.
        with suppress(StateUnavailableError):
            await publish_saved(self._publisher, self._breakers, key, saved or "[]")

    def _unknown(self, key: BreakerKey) -> RequestError:
        message = f"no breaker is known for agent {key.agent!r} and model {key.model!r}"
        return unknown("breaker", message, *self._hint(key))

    def _hint(self, key: BreakerKey) -> tuple[str, str]:
        """Returns the name of the wrong field, and a hint at what would be right."""
        agent = self._config.agents.get(key.agent)
        if agent is not None and agent.breaker is None:
            return "agent", f"agent {key.agent!r} has `breaker: off`"
        place = _deployment_of(self._config, key.agent, key.model)
        used_key = None if agent is None else breaker_of(self._config, key.agent, place)
        if used_key is not None and used_key in self._configured:
            return "agent", f"its calls use the shared breaker of agent {used_key.agent!r} and model {used_key.model!r}"
        models = {known_key.model for known_key in self._configured if known_key.agent in (key.agent, ALL)}
        if models and (agent is not None or key.agent == ALL):
            return "model", suggestion(key.model, models).removeprefix("; ")
        agents = {known_key.agent for known_key in self._configured} or set(self._config.agents)
        return "agent", suggestion(key.agent, agents).removeprefix("; ")


def _deployment_of(config: Config, agent: str, unit: str) -> Deployment:
    """Returns the deployment that a breaker of an agent (or of `*`) is on."""
    return config.deployment_of(config.agents.get(agent, config.defaults), unit)


def _is_unused(loaded: LoadedBreaker) -> bool:
    return loaded.revision == UNSAVED and not loaded.breaker.version


async def agents_health(
    config: Config,
    breakers: Breakers,
    healths: Healths,
    deployments: Deployments,
    unaffordable_agents: Collection[str] = (),
) -> list[AgentHealth]:
    """Reads the health of every configured agent, in the config's order. Takes two round trips to Redis.

    `circuit_open_until` is always in the future: once a cool-down or the lease of a probe is over, a call may probe, so
    there is nothing to wait for although the breaker is not closed yet.

    Args:
        config: the current config.
        breakers: the breakers in Redis.
        healths: the recent calls in Redis.
        deployments: the holds in Redis.
        unaffordable_agents: agents whose hard limits have no room for a call: unhealthy before a job has failed.

    Raises:
        StateUnavailableError: Redis does not answer.
    """
    keys = {
        name: {unit: breaker_of(config, name, place) for unit, place in units_of(config, name).items()}
        for name in config.agents
    }
    keys_in_use = list(dict.fromkeys(key for models in keys.values() for key in models.values() if key is not None))
    # Both requests share one round trip.
    loaded_breakers, hold_ends = await asyncio.gather(
        breakers.load(keys_in_use),
        held_until(config, deployments, ((name, model) for name, models in keys.items() for model in models)),
    )
    loaded = dict(zip(keys_in_use, loaded_breakers, strict=True))
    recent_calls = await healths.of(list(keys))
    return [
        _agent_health(
            config,
            name,
            {model: key and loaded[key] for model, key in models.items()},
            calls,
            {model: hold_ends.get((name, model)) for model in models},
            affordable=name not in unaffordable_agents,
        )
        for (name, models), calls in zip(keys.items(), recent_calls, strict=True)
    ]


async def held_until(
    config: Config, deployments: Deployments, models: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], datetime]:
    """Returns the ends of holds by agent (or `*`) and model, of held models only. Raises StateUnavailableError."""
    names = {(agent, model): _deployment_of(config, agent, model).id for agent, model in models}
    hold_ends = await deployments.held_until(names.values())
    return {
        agent_and_model: time_from_ms(hold_ends[name]) for agent_and_model, name in names.items() if name in hold_ends
    }


async def breaker_statuses(
    config: Config, breakers: Breakers, healths: Healths, deployments: Deployments
) -> list[BreakerStatus]:
    """Reads every breaker in Redis, and the unused ones of the agents' own models, sorted by agent and model.

    Raises:
        StateUnavailableError: Redis does not answer.
    """
    loaded_by_key = dict(await breakers.all())
    unused_keys = [key for key in breakers_of(config) if key not in loaded_by_key]
    if unused_keys:
        loaded_by_key |= zip(unused_keys, await breakers.load(unused_keys), strict=True)
    loaded_by_key = {key: loaded_by_key[key] for key in sorted(loaded_by_key, key=lambda key: (key.agent, key.model))}
    hold_ends, verdicts = await asyncio.gather(
        held_until(config, deployments, ((key.agent, key.model) for key in loaded_by_key)),
        healths_on(config, healths, loaded_by_key),
    )
    return [
        breaker_status(key, loaded, health, hold_ends.get((key.agent, key.model)))
        for (key, loaded), health in zip(loaded_by_key.items(), verdicts, strict=True)
    ]


async def shadow_statuses(config: Config, shadows: Documents[Shadow]) -> list[ShadowBreakerStatus]:
    """Reads the shadows of the agents' own models, sorted by agent and model. Raises StateUnavailableError."""
    keys = sorted(shadows_of(config), key=lambda key: (key.agent, key.model))
    return [
        ShadowBreakerStatus(
            agent=key.agent,
            model=key.model,
            state=shadow.breaker.state,
            reason=shadow.breaker.reason or None,
            since=_time(shadow.breaker.changed_ms),
            refused=shadow.refused,
            version=shadow.breaker.version,
        )
        for key, shadow in zip(keys, await shadows.read([key.name for key in keys]), strict=True)
    ]


async def healths_on(config: Config, healths: Healths, loaded: Mapping[BreakerKey, LoadedBreaker]) -> list[Verdict]:
    """Returns the health of each breaker's agent on its model, or of all agents that share the breaker.

    Takes one round trip to Redis.

    Raises:
        StateUnavailableError: Redis does not answer.
    """
    users: dict[BreakerKey, set[tuple[str, str]]] = {
        key: set() if key.agent == ALL else {(key.agent, key.model)} for key in loaded
    }
    for name in config.agents:
        for unit, place in units_of(config, name).items():
            key = breaker_of(config, name, place)
            if key is not None and key in users:
                users[key].add((name, unit))
    names = sorted({name for its_users in users.values() for name, _ in its_users})
    calls = dict(zip(names, await healths.of(names), strict=True))
    verdicts = list[Verdict]()
    for key, its_users in users.items():
        state = state_at(loaded[key].breaker, loaded[key].now_ms)
        until_ms = refused_until(loaded[key])
        only_for = open_for(loaded[key].breaker)
        parts = {
            f"{name} on {model}": health_of_model(state, calls[name].get(model, CallHealth()), until_ms, only_for)
            for name, model in sorted(its_users)
        }
        verdicts.append(combine(parts) if parts else health_of_model(state, CallHealth(), until_ms, only_for))
    return verdicts


def breaker_status(
    key: BreakerKey, loaded: LoadedBreaker, health: Verdict, hold_ends_at: datetime | None = None
) -> BreakerStatus:
    """Returns a breaker as the contract has it, as of when it was read."""
    breaker = loaded.breaker
    state = state_at(breaker, loaded.now_ms)
    is_probed = state == "half_open" and breaker.probe and breaker.probe_until_ms > loaded.now_ms
    return BreakerStatus(
        agent=key.agent,
        model=key.model,
        state=state,
        health=health.health,
        health_reason=health.health_reason,
        reason=breaker.reason or None,
        open_for=open_for(breaker),
        since=_time(breaker.changed_ms),
        open_until=_time(breaker.open_until_ms) if state == "open" else None,
        probe_until=_time(breaker.probe_until_ms) if is_probed else None,
        held_until=hold_ends_at,
        count=breaker.count,
        consecutive_failures=consecutive_failures(breaker),
        total_failures=breaker.total_failures,
        unique_errors=len(breaker.errors_seen),
        last_failure_at=_time(breaker.last_failure_ms),
        last_success_at=_time(breaker.last_success_ms),
        version=breaker.version,
    )


def refused_until(loaded: LoadedBreaker, caller: str = "") -> int | None:
    """Returns the time until which a breaker admits no call, in ms since the epoch, as of when it was read.

    Args:
        loaded: the breaker.
        caller: the caller, as `caller_of` names it; empty for a caller that the breaker concerns.

    Returns:
        None if it admits a call or at least a probe; 0 if it is isolated, until an operator resets it.
    """
    breaker = loaded.breaker
    until_ms = 0
    match breaker.state:
        case "closed":
            return None
        case "isolated":
            return 0
        case _ if not concerns_caller(breaker, caller):
            return None
        case "open" if caller and breaker.probed_by not in {"", caller}:
            return None
        case "open":
            until_ms = breaker.open_until_ms
        case "half_open":
            until_ms = breaker.probe_until_ms if breaker.probe else 0
    return until_ms if until_ms > loaded.now_ms else None


def _agent_health(
    config: Config,
    name: str,
    models: Mapping[str, LoadedBreaker | None],
    calls: Mapping[str, CallHealth],
    hold_ends: Mapping[str, datetime | None],
    *,
    affordable: bool,
) -> AgentHealth:
    models_health = list[ModelHealth]()
    verdicts: dict[str, Verdict] = {}
    waits = list[int | None]()
    for model, loaded in models.items():
        model_calls = calls.get(model, CallHealth())
        state = None if loaded is None else state_at(loaded.breaker, loaded.now_ms)
        only_for = None if loaded is None else open_for(loaded.breaker)
        waits.append(None if loaded is None or only_for is not None else refused_until(loaded))
        verdicts[model] = health_of_model(state, model_calls, waits[-1], only_for)
        models_health.append(
            ModelHealth(
                model=model,
                provider=_deployment_of(config, name, model).provider or None,
                health=verdicts[model].health,
                health_reason=verdicts[model].health_reason,
                breaker=state,
                consecutive_failures=model_calls.consecutive_failures,
                last_failure_at=_time(model_calls.last_failure_ms),
                last_success_at=_time(model_calls.last_success_ms),
                circuit_open_until=_time(waits[-1]),
                held_until=hold_ends[model],
            )
        )
    agent_calls = calls.get("", CallHealth())
    # Isolated breakers have no known end; and if a model may be called now, there is nothing to wait for.
    first = None if None in waits else min((until for until in waits if until), default=None)
    verdict = health_of_agent(verdicts, agent_calls, affordable=affordable)
    return AgentHealth(
        agent_id=name,
        health=verdict.health,
        health_reason=verdict.health_reason,
        consecutive_failures=agent_calls.consecutive_failures,
        last_failure_at=_time(agent_calls.last_failure_ms),
        last_success_at=_time(agent_calls.last_success_ms),
        circuit_open_until=_time(first),
        models=tuple(models_health),
    )


def _time(epoch_ms: int | None) -> datetime | None:
    return time_from_ms(epoch_ms) if epoch_ms else None
