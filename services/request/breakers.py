"""`/api/v1/breakers`: the state of breakers, and forcing them open or resetting them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from breakwater.breaker_events import dumped, publish_saved
from breakwater.bus.errors import BusError
from breakwater.bus.publisher import Publisher
from breakwater.config import Config, breaker_of, breakers_of
from breakwater.contracts.breakers import BreakerList, BreakerRequest, UnchangedBreaker
from breakwater.contracts.events import BreakerTransition
from breakwater.contracts.types import Message
from breakwater.contracts.validation import FieldError
from breakwater.policy.breaker import ALL, Breaker, BreakerChange, BreakerKey, BreakerRules, isolate, reset
from breakwater.policy.health import transition
from breakwater.state.breakers import UNSAVED, Breakers, Loaded, Saving
from breakwater.state.connection import StateUnavailable
from breakwater.state.deployments import Deployments
from services.request.agents import breaker_status, breaker_statuses
from services.request.parsing import suggestion
from services.request.problems import Problem, unavailable
from services.request.routing import ApiRequest

Decision = Callable[[Loaded, BreakerRules], tuple[Breaker, BreakerChange | None]]


class BreakerRoutes:
    """The breakers of the fleet, for people."""

    def __init__(
        self,
        config: Config,
        breakers: Breakers,
        deployments: Deployments,
        publisher: Publisher,
        connected: Callable[[], object],
    ) -> None:
        self._config = config
        self._configured = breakers_of(config, of_allowed=True)
        self._breakers = breakers
        self._deployments = deployments
        self._publisher = publisher
        self._connected = connected

    async def show(self, _: ApiRequest[Message]) -> BreakerList:
        """All of them."""
        statuses = await breaker_statuses(self._config, self._breakers, self._deployments)
        return BreakerList(breakers=tuple(statuses), alive=await self._breakers.alive())

    async def isolate(self, asked: ApiRequest[BreakerRequest]) -> BreakerTransition | UnchangedBreaker:
        """Forces a breaker open, and publishes that."""
        return await self._change(
            asked,
            "breaker_isolated",
            lambda loaded, rules: isolate(
                loaded.breaker, by=asked.by, why=asked.why, rules=rules, now_ms=loaded.now_ms
            ),
        )

    async def reset(self, asked: ApiRequest[BreakerRequest]) -> BreakerTransition | UnchangedBreaker:
        """Closes a breaker and clears its counts, and publishes that; the hold of its model ends, too."""

        def decide(loaded: Loaded, rules: BreakerRules) -> tuple[Breaker, BreakerChange | None]:
            if loaded.revision == UNSAVED:
                return loaded.breaker, None
            return reset(loaded.breaker, by=asked.by, why=asked.why, rules=rules, now_ms=loaded.now_ms)

        changed = await self._change(asked, "breaker_reset", decide)
        agent = self._config.agents.get(asked.form.agent, self._config.defaults)
        await self._deployments.release(self._config.deployment(agent, asked.form.model))
        return changed

    async def _change(
        self, asked: ApiRequest[BreakerRequest], what: str, decide: Decision
    ) -> BreakerTransition | UnchangedBreaker:
        key = BreakerKey(asked.form.agent, asked.form.model)
        self._connected()  # not begun where it can't be published
        loaded, event = await self._save(key, decide)
        asked.log(what, agent=key.agent, model=key.model, changed=event is not None)
        if event is None:
            return UnchangedBreaker.model_validate(breaker_status(key, loaded.breaker).model_dump())
        try:
            await self._publish(key, dumped([event]))
        except BusError as error:
            message = f"the breaker is {event.to_state} from now on, but its event is not published yet: {error}"
            raise unavailable("not_published", f"{message}; a breaker service does that once it can") from error
        return event

    async def _save(self, key: BreakerKey, decide: Decision) -> tuple[Loaded, BreakerTransition | None]:
        """Saves what is decided of a breaker as it is; the event remains to be published.

        Returns:
            The breaker as it was, and its transition; None where there is none.
        """
        rules = self._configured.get(key) or _unconfigured(key)
        while True:
            [before] = await self._breakers.load([key])
            if before.revision == UNSAVED and key not in self._configured:
                raise self._unknown(key)
            if before.unpublished is not None:
                # The process that saved it crashed or waits for NATS: it comes first, and must not be overwritten.
                await self._publish(key, before.unpublished)
            after, change = decide(before, rules)
            if change is None:
                return before, None
            event = transition(key, change, rules, before.now_ms)
            saving = Saving(key, before, after, dumped([event]))
            if all(await self._breakers.save([saving])):
                return before, event
            # Another writer was quicker: decided again, on what it saved.

    async def _publish(self, key: BreakerKey, saved: str | None) -> None:
        # What stays marked as not published is published once more, and that changes nothing.
        with suppress(StateUnavailable):
            await publish_saved(self._publisher, self._breakers, key, saved or "[]")

    def _unknown(self, key: BreakerKey) -> Problem:
        path, message = self._hint(key)
        what = f"no breaker is known for agent {key.agent!r} and model {key.model!r}"
        return Problem(404, "unknown_breaker", f"{what}; {message}", [FieldError(path=path, message=message)])

    def _hint(self, key: BreakerKey) -> tuple[str, str]:
        """Which field is wrong, and what would be right."""
        agent = self._config.agents.get(key.agent)
        if agent is not None and agent.breaker is None:
            return "agent", f"agent {key.agent!r} has `breaker: off`"
        meant = None if agent is None else breaker_of(self._config, key.agent, key.model)
        if meant is not None and meant in self._configured:
            return "agent", f"its calls meet the shared one of agent {meant.agent!r} and model {meant.model!r}"
        models = {one.model for one in self._configured if one.agent in (key.agent, ALL)}
        if models and (agent is not None or key.agent == ALL):
            return "model", suggestion(key.model, models).removeprefix("; ")
        agents = {one.agent for one in self._configured} or set(self._config.agents)
        return "agent", suggestion(key.agent, agents).removeprefix("; ")


def _unconfigured(key: BreakerKey) -> BreakerRules:
    """For one that only Redis knows: an agent's that is not in this config, or a model's that none has any more."""
    if key.agent != ALL:
        return BreakerRules()
    return BreakerRules(scope="provider" if key.model.endswith(f"/{ALL}") else "model")
