"""`/api/v1/breakers`: how they stand, and forcing them open or resetting them by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from breakwater.bus.errors import BusError
from breakwater.bus.publisher import Publisher
from breakwater.config import Config
from breakwater.contracts import subjects
from breakwater.contracts.api import BreakerList, BreakerRequest, UnchangedBreaker
from breakwater.contracts.events import BreakerTransition
from breakwater.contracts.validation import FieldError
from breakwater.health import breaker_of, breaker_status, breaker_statuses, breakers_of
from breakwater.policy.breaker import Breaker, Change, isolate, reset
from breakwater.policy.breaker_rules import ALL, BreakerKey, BreakerRules
from breakwater.policy.redact import Redactor
from breakwater.policy.transitions import transition
from breakwater.state.breakers import UNSAVED, Breakers, Loaded, Saving
from breakwater.state.connection import StateUnavailable
from services.request.by_hand import Asked, asked, not_done, not_read
from services.request.parsing import suggestion
from services.request.problems import Problem, unavailable

_TRANSITIONS = TypeAdapter(list[BreakerTransition])
_JSON = "application/json"

Decision = Callable[[Loaded, BreakerRules], tuple[Breaker, Change | None]]


class BreakerRoutes:
    """The breakers of the fleet, for people."""

    def __init__(
        self,
        config: Config,
        breakers: Breakers,
        publisher: Publisher,
        redactor: Redactor,
        connected: Callable[[], object],
    ) -> None:
        self._config = config
        self._configured = breakers_of(config, of_allowed=True)
        self._breakers = breakers
        self._publisher = publisher
        self._redactor = redactor
        self._connected = connected

    async def show(self, _: Request) -> Response:
        """GET: 200 with all of them."""
        try:
            statuses = await breaker_statuses(self._config, self._breakers)
            alive = await self._breakers.alive()
        except StateUnavailable as error:
            raise not_read(error) from error
        return Response(BreakerList(breakers=tuple(statuses), alive=alive).json_bytes(), media_type=_JSON)

    async def isolate(self, request: Request) -> Response:
        """POST: 200 once it is forced open and that is published, or where it was so already."""
        who = await asked(request, BreakerRequest, self._redactor)
        return await self._by_hand(
            who,
            "breaker_isolated_by_hand",
            lambda loaded, rules: isolate(loaded.breaker, by=who.by, why=who.why, rules=rules, now_ms=loaded.now_ms),
        )

    async def reset(self, request: Request) -> Response:
        """POST: 200 once it is closed and empty and that is published, or where nothing was ever counted."""
        who = await asked(request, BreakerRequest, self._redactor)

        def decide(loaded: Loaded, rules: BreakerRules) -> tuple[Breaker, Change | None]:
            if loaded.revision == UNSAVED:
                return loaded.breaker, None
            return reset(loaded.breaker, by=who.by, why=who.why, rules=rules, now_ms=loaded.now_ms)

        return await self._by_hand(who, "breaker_reset_by_hand", decide)

    async def _by_hand(self, who: Asked[BreakerRequest], what: str, decide: Decision) -> Response:
        key = BreakerKey(who.form.agent, who.form.model)
        try:
            self._connected()  # not begun where it can't be told of
            loaded, event = await self._change(key, decide)
        except (BusError, StateUnavailable) as error:
            raise not_done(error) from error
        who.log(what, agent=key.agent, model=key.model, changed=event is not None)
        if event is None:
            status = breaker_status(key, loaded.breaker)
            return Response(UnchangedBreaker.model_validate(status.model_dump()).json_bytes(), media_type=_JSON)
        try:
            await self._publish(key, _TRANSITIONS.dump_json([event]).decode())
        except BusError as error:
            message = f"the breaker is {event.to_state} from now on, but its event is not published yet: {error}"
            raise unavailable("not_published", f"{message}; a breaker service does that once it can") from error
        return Response(event.json_bytes(), media_type=_JSON)

    async def _change(self, key: BreakerKey, decide: Decision) -> tuple[Loaded, BreakerTransition | None]:
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
                # Whoever saved it died or waits for NATS: it comes first, and what is saved now must not replace it.
                await self._publish(key, before.unpublished)
            after, change = decide(before, rules)
            if change is None:
                return before, None
            event = transition(key, change, rules, before.now_ms)
            saving = Saving(key, before, after, _TRANSITIONS.dump_json([event]).decode())
            if all(await self._breakers.save([saving])):
                return before, event
            # Somebody was quicker: it is decided anew, upon what they saved.

    async def _publish(self, key: BreakerKey, text: str) -> None:
        """Publishes transitions that are saved. Twice is once: each has its id."""
        subject = subjects.breaker(key.agent, key.model)
        for told in _TRANSITIONS.validate_json(text):
            await self._publisher.event(subject, told, id=told.transition_id, at=told.at)
        # What stays marked as not published is published once more, and that changes nothing.
        with suppress(StateUnavailable):
            await self._breakers.mark_published(key, text)

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
