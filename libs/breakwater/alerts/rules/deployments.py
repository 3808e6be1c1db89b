"""Judges deployments by how jobs ended on them: the rules of `deployment_failing`.

A deployment is a model of a provider, or one of those that a model lists. Its incident opens when it refuses a job for
reasons of its own, or when nothing has succeeded on it for some jobs or minutes while others answered the same jobs. It
ends with the first success.

A job counts once for each deployment, by its last call there. Failures that follow the request (a wrong parameter, a
prompt that is too long) count for nothing, and a spent quota has an incident of its own, `quota_exhausted`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal, TypeGuard

from pydantic import JsonValue

from breakwater.alerts.contract import Alert, AlertEvent
from breakwater.alerts.rules.alert_rules import CONTINUED, agents_of
from breakwater.alerts.rules.signals import Firing, Resolved, Signal, key_of
from breakwater.alerts.settings import DeploymentRules
from breakwater.calls.rules.refusals import command
from breakwater.jobs.contract.execution import Attempt, ErrorInfo, Execution
from breakwater.kernel.formats import moment, percent, quantity
from breakwater.kernel.types import format_time

LAPSE = timedelta(hours=2)
"""The time without a job after which an incident ends by itself; that of a deployment that is called hourly goes on."""
FEWEST_JOBS = 3
"""The fewest jobs without a success that `failed_s` judges a deployment by."""
MAX_OUTAGES = 500
MAX_AGENTS = 100
SHOWN = 3
"""The most names in a title."""

Refusal = Literal["key", "model", "access"]
"""A reason of the deployment's own: it refuses the key, does not know the model, or denies access to it."""

_BAD_KEY = re.compile(r"api[ _-]?key[^.]{0,40}(?:not valid|invalid|expired|revoked)|invalid[ _-]api[ _-]?key", re.I)
_NO_MODEL = re.compile(
    r"model_not_found|model_decommissioned|deploymentnotfound"
    r"|\bmodel\b[^.\n]{0,120}(?:does not exist|not found|decommissioned)",
    re.I,
)
_OF_THE_PROMPT = re.compile(r"moderat|flagged|content policy|safety", re.I)
_FAILURES = frozenset({"rate_limit", "transient", "server", "timeout", "network", "quota"})
_WORDS: Mapping[Refusal, str] = {
    "key": "{provider} refuses the key",
    "model": "{provider} does not know the model {model}",
    "access": "{provider} denies access to {model}",
}
_ADVICE: Mapping[Refusal | None, str] = {
    "key": "replace the key that `{key}` in the config refers to",
    "model": "name a model that the provider has, or correct the provider's `base_url`",
    "access": "give the key access to the model at the provider",
    None: "look at the errors, and at the provider's status page",
}


def refusal_of(error: ErrorInfo) -> Refusal | None:
    """Returns the reason of its own for which a deployment refused a call; None if it had none, or a spent quota."""
    if error.kind != "client":
        return None
    if error.status_code == 401 or _BAD_KEY.search(error.message):
        return "key"
    if error.class_ == "NotFoundError" or error.status_code == 410 or _NO_MODEL.search(error.message):
        return "model"
    return "access" if error.status_code == 403 and not _OF_THE_PROMPT.search(error.message) else None


def _is_of_deployment(error: ErrorInfo) -> bool:
    """Returns True if a failure may be the deployment's, and is not only the request's."""
    return error.kind in _FAILURES or error.class_ == "ClientError" or refusal_of(error) is not None


@dataclass(slots=True)
class _Traffic:
    """The jobs of an agent while a deployment failed."""

    failed: int = 0
    """Jobs that it failed."""
    answered: int = 0
    """Jobs that any model answered, with or without a try of the deployment."""
    fallbacks: Counter[str] = field(default_factory=Counter[str])
    """Those of them that a fallback for the deployment's model answered, by that fallback."""
    cost: int = 0
    """The known cost of the fallbacks' answers."""
    requested_cost: int = 0
    """The cost that the same answers would have had on the requested model."""

    def add(self, execution: Execution, model: str) -> None:
        """Counts a job that a model answered."""
        self.answered += 1
        if execution.fell_back and execution.requested_model == model and execution.chosen_model is not None:
            self.fallbacks[execution.chosen_model] += 1
            if (costs := execution.fallback_costs) is not None:
                self.cost += costs[0]
                self.requested_cost += costs[1]


@dataclass(slots=True)
class _Outage:
    """A deployment on which nothing has succeeded since a job failed."""

    provider: str
    model: str
    since: datetime
    last_at: datetime
    jobs: int = 0
    """Jobs that it failed or refused, without those that found its quota spent."""
    others_answered: bool = False
    """Another model or deployment has answered one of these jobs."""
    agents: dict[str, _Traffic] = field(default_factory=dict[str, _Traffic])

    def fails(self, refusal: Refusal | None, rules: DeploymentRules) -> bool:
        """Returns True if it is an incident."""
        # A wrong key is wrong for all requests. Other refusals may be the request's fault, unless a model answered it.
        if refusal is not None and (refusal == "key" or self.others_answered):
            return True
        if not self.others_answered:
            return False
        is_long = self.jobs >= FEWEST_JOBS and (self.last_at - self.since).total_seconds() >= (rules.failed_s or 0)
        return (rules.failed_jobs is not None and self.jobs >= rules.failed_jobs) or (
            rules.failed_s is not None and is_long
        )

    def share(self) -> float | None:
        """Returns the share of the agents' answers that came from fallbacks; None if there are no answers."""
        answered = sum(traffic.answered for traffic in self.agents.values())
        return self._fallbacks().total() / answered if answered else None

    def cost_factor(self) -> float | None:
        """Returns how many times as much the fallbacks' answers cost as those of the model; None if unknown."""
        requested = sum(traffic.requested_cost for traffic in self.agents.values())
        return sum(traffic.cost for traffic in self.agents.values()) / requested if requested else None

    def fallback_models(self) -> list[str]:
        """Returns the models that answer in its place, the most frequent first."""
        return [model for model, _ in self._fallbacks().most_common()]

    def _fallbacks(self) -> Counter[str]:
        return sum((traffic.fallbacks for traffic in self.agents.values()), Counter[str]())

    def agent_names(self) -> list[str]:
        """Returns the agents whose jobs it failed, the most affected first."""
        return sorted(self.agents, key=lambda agent: -self.agents[agent].failed)

    def traffic_in_words(self) -> str | None:
        """Says where the agents' traffic goes, and at what cost, as far as that is known; None if no model answers."""
        share = self.share()
        if not share:
            return None
        names = self.agent_names()
        traffic = f"{names[0]}'s traffic" if len(names) == 1 else f"the traffic of {_in_words(names, 'agent')}"
        part = "all" if share == 1 else percent(share)
        return f"{part} of {traffic} is on {_in_words(self.fallback_models(), 'model')}{_at_cost(self.cost_factor())}"


def _in_words(names: Sequence[str], noun: str) -> str:
    further = len(names) - SHOWN
    listed = [*names[:SHOWN], *([quantity(further, f"other {noun}")] if further > 0 else [])]
    return " and ".join(filter(None, (", ".join(listed[:-1]), listed[-1])))


def _at_cost(factor: float | None) -> str:
    if factor is None:
        return ""
    return ", at the same cost" if f"{factor:.1f}" == "1.0" else f", at {factor:.2g} times the cost"


class DeploymentWatch:
    """Follows how jobs end on each deployment. In memory, bounded; a new alerter learns again what is no incident yet.

    Args:
        rules: of the config.
        newest: a function that returns the newest alert of the latest incident with a key.
    """

    def __init__(self, rules: DeploymentRules, newest: Callable[[str], Alert | None]) -> None:
        self._rules = rules
        self._newest = newest
        self._outages: dict[tuple[str, str], _Outage] = {}
        """By provider and model; in the order of their latest failures."""

    def add(self, execution: Execution) -> tuple[Signal, ...]:
        """Counts an ended job. Returns the signals of the deployments that it tried."""
        if execution.dry_run or execution.cache_hit:
            return ()
        attempts = execution.attempts
        if len(attempts) == 1 and attempts[0].outcome == "success":
            answered = self._ends_by_answer(attempts[0])
            self._count_answer(execution)
            return answered
        last_calls = {
            (attempt.provider, attempt.unit): attempt
            for attempt in attempts
            if not attempt.short_circuited and attempt.outcome in {"success", "error"}
        }
        signals: list[Signal] = []
        for attempt in last_calls.values():
            if attempt.outcome == "success":
                signals += self._ends_by_answer(attempt)
            elif attempt.error is not None and _is_of_deployment(attempt.error):
                self._count_failure(attempt, attempt.error, execution)
        self._count_answer(execution)
        for place, attempt in last_calls.items():
            outage = self._outages.get(place)
            error = attempt.error
            if outage is not None and error is not None and error.kind != "quota" and _is_of_deployment(error):
                refusal = refusal_of(error)
                if outage.fails(refusal, self._rules) or self._is_open(place):
                    signals.append(_failing(outage, attempt, error, refusal))
        return tuple(signals)

    def traffic_in_words(self, provider: str, model: str) -> str | None:
        """Says where the traffic of a failing deployment goes; None if it does not fail, or no model answers."""
        outage = self._outages.get((provider, model))
        return None if outage is None else outage.traffic_in_words()

    def _is_open(self, place: tuple[str, str]) -> bool:
        incident = self._newest(key_of("deployment_failing", *place))
        return incident is not None and incident.status != "resolved"

    def _count_failure(self, attempt: Attempt, error: ErrorInfo, execution: Execution) -> None:
        place = (attempt.provider, attempt.unit)
        outage = self._outages.pop(place, None)
        if outage is None or attempt.completed_at - outage.last_at > LAPSE:
            outage = _Outage(*place, attempt.started_at, attempt.completed_at)
        self._outages[place] = outage
        if len(self._outages) > MAX_OUTAGES:
            del self._outages[next(iter(self._outages))]
        outage.last_at = max(outage.last_at, attempt.completed_at)
        if error.kind != "quota":
            outage.jobs += 1
            outage.others_answered |= execution.is_answered_by_model
        if execution.agent in outage.agents or len(outage.agents) < MAX_AGENTS:
            outage.agents.setdefault(execution.agent, _Traffic()).failed += 1

    def _count_answer(self, execution: Execution) -> None:
        """Counts an answered job in the outages that concern its agent."""
        if self._outages and execution.is_answered_by_model:
            for outage in self._outages.values():
                if (traffic := outage.agents.get(execution.agent)) is not None:
                    traffic.add(execution, outage.model)

    def _ends_by_answer(self, attempt: Attempt) -> tuple[Resolved, ...]:
        place = (attempt.provider, attempt.unit)
        key = key_of("deployment_failing", *place)
        outage = self._outages.get(place)
        incident = self._newest(key)
        is_open = incident is not None and incident.status != "resolved"
        last_at = outage.last_at if outage is not None else incident.last_at if is_open and incident else None
        # A call that began before the latest failure says nothing about the time after it.
        if last_at is None or attempt.started_at < last_at:
            return ()
        self._outages.pop(place, None)
        resolved = Resolved(
            key=key,
            event="deployment_failing",
            title=f"{attempt.unit} answers again",
            text=f"{attempt.provider} has answered a call of {attempt.agent} with {attempt.unit}. Nothing to do.",
            source_id=f"{attempt.attempt_id}/answered",
            at=attempt.completed_at,
            payload=incident.payload if incident is not None and is_open else {},
            reason="a call was answered",
        )
        return (resolved,)


def _failing(outage: _Outage, attempt: Attempt, error: ErrorInfo, refusal: Refusal | None) -> Firing:
    status = "" if error.status_code is None else f", HTTP {error.status_code}"
    if refusal is None:
        problem = f"{outage.model} answers nothing"
    else:
        problem = _WORDS[refusal].format(provider=outage.provider, model=outage.model)
    key = attempt.provider_key or f"providers.{outage.provider}.api_key"
    advice = _ADVICE[refusal].format(provider=outage.provider, key=key)
    agents = outage.agent_names()
    # A fallback that fails behind a primary carries no traffic that could be on others now.
    who_answers = "other models" if attempt.deployment is None else "others"
    answering = f"{who_answers} answer" if outage.others_answered else "no fallback answers"
    traffic = outage.traffic_in_words() or f"{answering} the jobs of {_in_words(agents, 'agent')}"
    payload: dict[str, JsonValue] = {
        "provider": outage.provider,
        "model_id": outage.model,
        "refusal": refusal,
        "error_kind": error.kind,
        "status_code": error.status_code,
        "agents": list(agents),
        "jobs": outage.jobs,
        "fallback_models": list(outage.fallback_models()),
        "fallback_share": outage.share(),
        "cost_factor": None if (factor := outage.cost_factor()) is None else round(factor, 3),
        "since": format_time(outage.since),
        "execution_id": attempt.execution_id,
        "timestamp": format_time(attempt.completed_at),
    }
    return Firing(
        key=key_of("deployment_failing", outage.provider, outage.model),
        event="deployment_failing",
        title=f"{problem}: {traffic}",
        text=f"Since {moment(outage.since)} nothing has succeeded on {outage.model} of {outage.provider}: "
        f"{quantity(outage.jobs, 'job')} of {_in_words(agents, 'agent')} failed there, the last one with {error.class_}"
        f"{status}. To do: {advice}. `{command('executions', None, attempt.execution_id)}` shows that job.",
        source_id=f"{attempt.attempt_id}/failing",
        at=attempt.completed_at,
        payload=payload,
        agent="*",  # any agent may call it next, and no route of its agents may miss it
        model=outage.model,
        ends_at=attempt.completed_at + LAPSE,
    )


FAILURES: frozenset[AlertEvent] = frozenset({"retries_exhausted", "job_dead_lettered", "deployment_failing"})
"""The events of jobs' ends that an incident may explain."""


def may_be_explained(signal: Signal) -> TypeGuard[Firing]:
    """Returns True if an incident may say why jobs fail: a breaker's, or of failed jobs also a deployment's."""
    return signal.event in FAILURES and isinstance(signal, Firing) and signal.model is not None


def is_explained(signal: Firing, explaining: Callable[[datetime], Collection[Alert]]) -> bool:
    """Returns True if incidents say why jobs failed: of breakers, or for ended jobs of deployments.

    It does not matter when this is asked: an alerter that was away reads of an incident's end before it decides.

    Args:
        signal: the signal that jobs fail, or that a deployment fails. Of several jobs, the first and the last count on
            each model or deployment, and all of these must be explained.
        explaining: a function that returns the incidents that were open at a time, as they were then.
    """
    unit_times = signal.unit_times().items()
    return all(_explains(unit, signal, explaining(at)) for unit, times in unit_times for at in {*times})


def _explains(unit: str, signal: Firing, open_incidents: Collection[Alert]) -> bool:
    """Returns True if an open incident of a model or one of its deployments says why jobs fail there."""
    of_deployment = signal.event == "deployment_failing"
    named = signal.payload.get("agents") if of_deployment else [signal.agent]
    agents = named if isinstance(named, list) else []
    shared = {key_of("breaker_open", "*", unit), key_of("breaker_open", "*", f"{unit.partition('/')[0]}/*")}
    # Of a deployment that several callers use, a breaker that is open for one says nothing about the others.
    explaining = {
        alert.key for alert in open_incidents if not (of_deployment and alert.payload.get("open_for") is not None)
    }
    # The same goes for a breaker of one of its agents.
    if all(explaining & {*shared, key_of("breaker_open", str(agent), unit)} for agent in agents):
        return True
    return not of_deployment and any(
        alert.event == "deployment_failing" and alert.model == unit and signal.agent in agents_of(alert)
        for alert in open_incidents
    )


def continued_by_breaker(opening: Signal, incidents: Iterable[Alert]) -> list[Resolved]:
    """Returns the ends of incidents of a deployment whose breaker has opened for all their agents and callers.

    The breaker's incident says more: no call goes there until it closes. Signals of other events end none.
    """
    if not isinstance(opening, Firing) or opening.event != "breaker_open":
        return []
    return [
        Resolved(
            key=alert.key,
            event="deployment_failing",
            title=f"Continued by the breaker: {opening.title}",
            text="The breaker of the model has opened. Its incident goes on with this one. Nothing to do here.",
            source_id=f"{opening.source_id}/continues",
            at=opening.at,
            payload=alert.payload,
            reason=CONTINUED,
        )
        for alert in incidents
        if alert.event == "deployment_failing"
        and alert.status != "resolved"
        and alert.model == opening.model
        and (opening.agent == "*" or agents_of(alert) == (opening.agent,))
        and opening.continues is None  # it opens now, and does not only wait for a call
        and opening.payload.get("open_for") is None
    ]
