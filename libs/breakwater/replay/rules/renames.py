"""Agents with another name in the changed config than in the record, which is replayed as if it had the new one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from breakwater.alerts.contract import Alert
from breakwater.breakers.contract import BreakerTransition
from breakwater.kernel.nats.subjects import encode_token
from breakwater.limits.contract import BudgetEvent, GuardEvent
from breakwater.limits.rules.budget import LimitTable
from breakwater.limits.rules.scopes import ScopePart
from breakwater.replay.rules.history import Changes, Policy, RecordedJob

Renames = Mapping[str, str]
"""The names of agents in the changed config, by those in the record."""

EventT = TypeVar("EventT", BreakerTransition, BudgetEvent, GuardEvent, Alert)


def renames_of(texts: Iterable[str]) -> dict[str, str]:
    """Reads names of agents, written like `old=new`.

    Raises:
        ValueError: a text is no such pair, or an agent has two new names; says so in words.
    """
    names: dict[str, str] = {}
    for text in texts:
        old, separator, new = (part.strip() for part in text.partition("="))
        if not (old and separator and new):
            raise ValueError(f"{text!r} names no two agents")
        if names.setdefault(old, new) != new:
            raise ValueError(f"{old!r} has two new names, {names[old]!r} and {new!r}")
    return names


def policy_with(renames: Renames, policy: Policy) -> Policy:
    """Returns the policy that jobs ran under, with the new names of agents."""
    breakers = {key._replace(agent=renames.get(key.agent, key.agent)): rules for key, rules in policy.breakers.items()}
    agents = {renames.get(name, name): agent for name, agent in policy.agents.items()}
    return replace(policy, agents=agents, breakers=breakers, limits=_limits_with(renames, policy.limits))


def _limits_with(renames: Renames, limits: LimitTable) -> LimitTable:
    def part_with(part: ScopePart) -> ScopePart:
        return part._replace(name=renames.get(part.name, part.name)) if part.kind == "agent" else part

    changed = tuple(replace(limit, parts=tuple(map(part_with, limit.parts))) for limit in limits.limits)
    return replace(limits, limits=changed, agents=tuple(renames.get(name, name) for name in limits.agents))


def job_with(renames: Renames, job: RecordedJob) -> RecordedJob:
    """Returns a job, with the new name of its agent."""
    name = renames.get(job.record.agent)
    if name is None:
        return job
    attempts = tuple(
        logged._replace(attempt=logged.attempt.model_copy(update={"agent": name})) for logged in job.attempts
    )
    of_record = tuple(logged.attempt for logged in attempts)
    return RecordedJob(job.record.model_copy(update={"agent": name, "attempts": of_record}), attempts)


def changes_with(renames: Renames, changes: Changes) -> Changes:
    """Returns what the services decided, with the new names of agents, also in the ids that contain them."""
    return replace(
        changes,
        transitions=_events_with(renames, changes.transitions),
        budgets=_events_with(renames, changes.budgets),
        guards=_events_with(renames, changes.guards),
        alerts=_events_with(renames, changes.alerts),
        earlier_transitions=_events_with(renames, changes.earlier_transitions),
    )


def _events_with(renames: Renames, events: Iterable[EventT]) -> list[EventT]:
    return [_event_with(renames, event) for event in events]


def _event_with(renames: Renames, event: EventT) -> EventT:
    name = renames.get(event.agent or "")
    if name is None or event.agent is None:
        return event
    fields: dict[str, str] = {"agent": name}
    if isinstance(event, BudgetEvent):
        fields["event_id"] = event.event_id.replace(f"agent:{event.agent}/", f"agent:{name}/", 1)
    elif isinstance(event, Alert):
        tokens = (encode_token(event.agent), encode_token(name))
        fields["key"] = "/".join(tokens[1] if token == tokens[0] else token for token in event.key.split("/"))
    return event.model_copy(update=fields)
