"""The subjects of the public contract as data, each with its message and who writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from breakwater.contracts.alerts import Alert
from breakwater.contracts.events import AuditEvent, BreakerTransition, BudgetEvent, DeadLetter, GuardEvent
from breakwater.contracts.execution import AnswerChunks, Attempt, Execution, Progress, Result
from breakwater.contracts.job import Job
from breakwater.contracts.subjects import Stream
from breakwater.contracts.submission import CallableAgents, CancelRequest

AGENT = "The agent's name."
EXECUTION = "The execution's id, which is the job's."


@dataclass(frozen=True, slots=True)
class Channel:
    """Subjects of one form. A subject has its parameters encoded as tokens."""

    name: str
    address: str
    parameters: Mapping[str, str]
    message: type[BaseModel]
    stream: Stream | None
    """None for core NATS: received by current subscribers only, and not stored."""
    action: Literal["receive", "send"]
    """Breakwater's side of it."""
    summary: str


CHANNELS = (
    Channel(
        "jobs",
        "bw.jobs.{agent}",
        {"agent": AGENT},
        Job,
        Stream.JOBS,
        "receive",
        "Publish jobs here. A job is accepted once JetStream acknowledges it; an agent that is not in the config has "
        "no subject, and the publish fails immediately. An invalid job is dead-lettered; its reply_to gets the result.",
    ),
    Channel(
        "agents",
        "bw.agents",
        {},
        CallableAgents,
        None,
        "send",
        "The response to a request here, whose body is not read: the agents that you may call, with the subjects of "
        "their jobs. A program of the config gets its own agents.",
    ),
    Channel(
        "cancel",
        "bw.cancel.{job}",
        {"job": "The job's id."},
        CancelRequest,
        None,
        "receive",
        "Ask here for a job to be cancelled. The body may be empty. If the message has a reply subject, the response "
        "is a `CancelledJob`, or an `ErrorBody`. A program of the config cancels its own jobs only.",
    ),
    Channel(
        "results",
        "bw.results.{job}",
        {"job": "The job's id."},
        Result,
        Stream.RESULTS,
        "send",
        "The result of a job, with the output as the model returned it. Also sent to the job's reply_to.",
    ),
    Channel(
        "attempts",
        "bw.attempts.{agent}.{execution}.{number}",
        {"agent": AGENT, "execution": EXECUTION, "number": "The attempt's number, from 1. Never encoded."},
        Attempt,
        Stream.EVENTS,
        "send",
        "An attempt: one call of one model, or its refusal. Recorded once.",
    ),
    Channel(
        "executions",
        "bw.executions.{agent}.{execution}",
        {"agent": AGENT, "execution": EXECUTION},
        Execution,
        Stream.EVENTS,
        "send",
        "The final record of a job, redacted. One per job.",
    ),
    Channel(
        "breakers",
        "bw.breakers.{agent}.{model}",
        {"agent": f"{AGENT} `*` for all.", "model": "The model's id, or `<provider>/*`."},
        BreakerTransition,
        Stream.EVENTS,
        "send",
        "A breaker opened, half-opened or closed, or an operator isolated or reset it.",
    ),
    Channel(
        "budgets",
        "bw.budgets.{scope}.{window}",
        {"scope": "`global`, `agent` or `tenant`.", "window": "`daily` or `monthly`."},
        BudgetEvent,
        Stream.EVENTS,
        "send",
        "A budget reached a threshold (published once per period), its cap was raised, or its counter was repaired.",
    ),
    Channel(
        "guards",
        "bw.guards.{agent}",
        {"agent": AGENT},
        GuardEvent,
        Stream.EVENTS,
        "send",
        "A guard stopped a task, or an operator reset it.",
    ),
    Channel(
        "alerts",
        "bw.alerts.{event}",
        {"event": "What happened, such as `breaker_open`."},
        Alert,
        Stream.ALERTS,
        "send",
        "A change of an incident. Notifications to Slack and webhooks are made from these.",
    ),
    Channel(
        "audit",
        "bw.audit.{action}",
        {"action": "The operation's id in the HTTP API, such as `raise_cap`."},
        AuditEvent,
        Stream.AUDIT,
        "send",
        "An operator's action: published before it is done, and again with its outcome.",
    ),
    Channel(
        "progress",
        "bw.progress.{agent}.{execution}",
        {"agent": AGENT, "execution": EXECUTION},
        Progress,
        None,
        "send",
        "Steps of a running execution.",
    ),
    Channel(
        "chunks",
        "bw.chunks.{agent}.{execution}",
        {"agent": AGENT, "execution": EXECUTION},
        AnswerChunks,
        None,
        "send",
        "Parts of an answer while it is produced, for a job with `stream`. Not redacted.",
    ),
    Channel(
        "dead_letters",
        "bw.dlq.{reason}.{agent}",
        {"reason": "Reason why the message was given up.", "agent": f"{AGENT} Otherwise `unknown`."},
        DeadLetter,
        Stream.DLQ,
        "send",
        "A message that could not be handled, with its original bytes.",
    ),
)
