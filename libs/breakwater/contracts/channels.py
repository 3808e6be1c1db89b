"""The subjects of the public contract as data, each with its message and who writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from breakwater.contracts.alerts import Alert
from breakwater.contracts.events import BreakerTransition, BudgetEvent, DeadLetter, GuardEvent
from breakwater.contracts.execution import Attempt, Execution, Progress, Result
from breakwater.contracts.job import Job
from breakwater.contracts.subjects import Stream

AGENT = "The agent's name."
EXECUTION = "The execution's id, which is the job's."


@dataclass(frozen=True, slots=True)
class Channel:
    """Subjects of one form. A parameter stands in the subject encoded as a token."""

    name: str
    address: str
    parameters: Mapping[str, str]
    message: type[BaseModel]
    stream: Stream | None
    """None for core NATS: whoever listens hears it, and it is not stored."""
    action: Literal["receive", "send"]
    """What Breakwater does there."""
    summary: str


CHANNELS = (
    Channel(
        "jobs",
        "bw.jobs.{agent}",
        {"agent": AGENT},
        Job,
        Stream.JOBS,
        "receive",
        "Publish here to have an agent run. Accepted when JetStream acknowledges it; an agent that is not configured "
        "has no subject, and the publish fails at once. An invalid job is dead-lettered and its reply_to told.",
    ),
    Channel(
        "results",
        "bw.results.{job}",
        {"job": "The job's id."},
        Result,
        Stream.RESULTS,
        "send",
        "The one answer to a job, with the output as the model gave it. Sent to the job's reply_to as well.",
    ),
    Channel(
        "attempts",
        "bw.attempts.{agent}.{execution}.{number}",
        {"agent": AGENT, "execution": EXECUTION, "number": "Of the attempt, from 1. Never encoded."},
        Attempt,
        Stream.EVENTS,
        "send",
        "One try on one model, recorded once; refused admissions are attempts too.",
    ),
    Channel(
        "executions",
        "bw.executions.{agent}.{execution}",
        {"agent": AGENT, "execution": EXECUTION},
        Execution,
        Stream.EVENTS,
        "send",
        "The one terminal record of a job, redacted.",
    ),
    Channel(
        "breakers",
        "bw.breakers.{agent}.{model}",
        {"agent": f"{AGENT} `*` for all.", "model": "The model's id, or `<provider>/*`."},
        BreakerTransition,
        Stream.EVENTS,
        "send",
        "A breaker opened, let a probe pass, closed, or was forced open or reset by a person.",
    ),
    Channel(
        "budgets",
        "bw.budgets.{scope}.{window}",
        {"scope": "`global` or `agent`.", "window": "`daily` or `monthly`."},
        BudgetEvent,
        Stream.EVENTS,
        "send",
        "Spend crossed a threshold of a budget, told once for each period.",
    ),
    Channel(
        "guards",
        "bw.guards.{agent}",
        {"agent": AGENT},
        GuardEvent,
        Stream.EVENTS,
        "send",
        "A task was stopped by its guard, or let go on by a person.",
    ),
    Channel(
        "alerts",
        "bw.alerts.{event}",
        {"event": "What happened, such as `breaker_open`."},
        Alert,
        Stream.ALERTS,
        "send",
        "Something people must know. What Slack and webhooks are told is what stands here.",
    ),
    Channel(
        "progress",
        "bw.progress.{agent}.{execution}",
        {"agent": AGENT, "execution": EXECUTION},
        Progress,
        None,
        "send",
        "Steps of an execution while it runs.",
    ),
    Channel(
        "dead_letters",
        "bw.dlq.{reason}.{agent}",
        {"reason": "Why it was given up.", "agent": f"{AGENT} `unknown` where it can't be told."},
        DeadLetter,
        Stream.DLQ,
        "send",
        "What could not be handled, with its original bytes.",
    ),
)
