"""The subjects of the public contract as data, each with its message and who writes it."""

from __future__ import annotations

from breakwater.alerts.contract import Alert
from breakwater.breakers.contract import BreakerTransition
from breakwater.identity.contract import AuditEvent
from breakwater.identity.rules.keys import KeyRecord
from breakwater.jobs.contract.dead_letters import DismissalNote, ReplayNote
from breakwater.jobs.contract.execution import AnswerChunks, Attempt, Execution, Progress, Result
from breakwater.jobs.contract.job import Job
from breakwater.jobs.contract.plans import PlanChange
from breakwater.jobs.contract.submission import CallableAgents, CancelRequest
from breakwater.kernel.nats.channel import Channel
from breakwater.kernel.nats.contract import DeadLetter
from breakwater.kernel.nats.subjects import Stream
from breakwater.limits.contract import BudgetEvent, GuardEvent, LimitEvent, LimitRecord

AGENT = "The agent's name."
EXECUTION = "The execution's id. For jobs of the NATS user `client`, it is the job's."


JOBS = Channel(
    "jobs",
    "bw.jobs.{agent}",
    {"agent": AGENT},
    Job,
    Stream.JOBS,
    "Publish jobs here. A job is accepted once JetStream acknowledges it; an agent that is not in the config has "
    "no subject, and the publish fails immediately. An invalid job is dead-lettered; its reply_to gets the result.",
)
AGENTS = Channel(
    "agents",
    "bw.agents",
    {},
    CallableAgents,
    None,
    "The response to a request here, whose body is not read: the agents that you may call, with the subjects of "
    "their jobs. A program of the config gets its own agents.",
)
CANCEL = Channel(
    "cancel",
    "bw.cancel.{job}",
    {"job": "The job's id, or that of its execution."},
    CancelRequest,
    None,
    "Ask here for a job to be cancelled. The body may be empty. If the message has a reply subject, the response "
    "is a `CancelledJob`, or an `ErrorBody`. A program of the config cancels its own jobs only.",
)
RESULTS = Channel(
    "results",
    "bw.results.{execution}",
    {"execution": EXECUTION},
    Result,
    Stream.RESULTS,
    "The result of a job, with the output as the model returned it. Also sent to the job's reply_to.",
)
ATTEMPTS = Channel(
    "attempts",
    "bw.attempts.{agent}.{execution}.{number}",
    {"agent": AGENT, "execution": EXECUTION, "number": "The attempt's number, from 1. Never encoded."},
    Attempt,
    Stream.EVENTS,
    "An attempt: one call of one model, or its refusal. Recorded once.",
)
EXECUTIONS = Channel(
    "executions",
    "bw.executions.{agent}.{execution}",
    {"agent": AGENT, "execution": EXECUTION},
    Execution,
    Stream.EVENTS,
    "The final record of a job, redacted. One per job.",
)
BREAKERS = Channel(
    "breakers",
    "bw.breakers.{agent}.{model}",
    {"agent": f"{AGENT} `*` for all.", "model": "The model's id, or `<provider>/*`."},
    BreakerTransition,
    Stream.EVENTS,
    "A breaker opened, half-opened or closed, or an operator isolated or reset it.",
)
SHADOW_BREAKERS = Channel(
    "shadow_breakers",
    "bw.shadow-breakers.{agent}.{model}",
    {"agent": f"{AGENT} `*` for all.", "model": "The model's id, or `<provider>/*`."},
    BreakerTransition,
    Stream.EVENTS,
    "The shadow of a breaker opened, half-opened or closed. It refuses nothing.",
)
BUDGETS = Channel(
    "budgets",
    "bw.budgets.{scope}.{window}",
    {"scope": "`global`, `agent`, `key` and so on.", "window": "`daily`, `weekly`, `monthly`, `quarterly` or `total`."},
    BudgetEvent,
    Stream.EVENTS,
    "A budget reached a threshold (published once per period), its limit was raised, or its counter was repaired.",
)
SHADOW_BUDGETS = Channel(
    "shadow_budgets",
    "bw.shadow-budgets.{scope}.{window}",
    BUDGETS.parameters,
    BudgetEvent,
    Stream.EVENTS,
    "The shadow of a limit reached a threshold, or would have refused calls (once a minute at most).",
)
GUARDS = Channel(
    "guards",
    "bw.guards.{agent}",
    {"agent": AGENT},
    GuardEvent,
    Stream.EVENTS,
    "A guard stopped a task, or an operator reset it.",
)
PLANS = Channel(
    "plans",
    "bw.plans.{plan}",
    {"plan": "The plan's id."},
    PlanChange,
    Stream.EVENTS,
    "A plan changed its state.",
)
LIMIT_EVENTS = Channel(
    "limits",
    "bw.limits.{kind}",
    {"kind": "`created`, `changed`, `deleted`, `raised` or `raise_ended`."},
    LimitEvent,
    Stream.EVENTS,
    "A person changed a limit.",
)
ALERTS = Channel(
    "alerts",
    "bw.alerts.{event}",
    {"event": "What happened, such as `breaker_open`."},
    Alert,
    Stream.ALERTS,
    "A change of an incident. Notifications to Slack and webhooks are made from these.",
)
AUDIT = Channel(
    "audit",
    "bw.audit.{action}",
    {"action": "The operation's id in the HTTP API, such as `raise_cap`."},
    AuditEvent,
    Stream.AUDIT,
    "An operator's action: published before it is done, and again with its outcome.",
)
PROGRESS = Channel(
    "progress",
    "bw.progress.{agent}.{execution}",
    {"agent": AGENT, "execution": EXECUTION},
    Progress,
    None,
    "Steps of a running execution.",
)
CHUNKS = Channel(
    "chunks",
    "bw.chunks.{agent}.{execution}",
    {"agent": AGENT, "execution": EXECUTION},
    AnswerChunks,
    None,
    "Parts of an answer while it is produced, for a job with `stream`. Not redacted.",
)
DEAD_LETTERS = Channel(
    "dead_letters",
    "bw.dlq.{reason}.{agent}",
    {"reason": "Reason why the message was given up.", "agent": f"{AGENT} Otherwise `unknown`."},
    DeadLetter,
    Stream.DLQ,
    "A message that could not be handled, with its original bytes.",
)

PARKED = Channel(
    "parked",
    "bw.parked.{agent}.{execution}",
    {"agent": AGENT, "execution": EXECUTION},
    Job,
    Stream.PARKED,
    "A job that waits for long. Internal.",
    public=False,
)
REPLAYS = Channel(
    "replays",
    "bw.replayed.{dead_letter}",
    {"dead_letter": "The dead letter's sequence in the stream DLQ."},
    ReplayNote,
    Stream.DLQ,
    "The job of a dead letter was queued again. Internal.",
    public=False,
)
DISMISSALS = Channel(
    "dismissals",
    "bw.dismissed.{reason}.{agent}.{dead_letter}",
    {
        "reason": "The dead letter's reason.",
        "agent": f"{AGENT} Otherwise `unknown`.",
        "dead_letter": "The dead letter's sequence in the stream DLQ.",
    },
    DismissalNote,
    Stream.DLQ,
    "An operator dismissed a dead letter. Internal.",
    public=False,
)
KEYS = Channel(
    "keys",
    "bw.keys.{key}",
    {"key": "The key's id."},
    KeyRecord,
    Stream.KEYS,
    "The state of an API key since its last change. Internal.",
    public=False,
)

LIMITS = Channel(
    "limit_settings",
    "bw.limit-settings.{limit}",
    {"limit": "The limit's id."},
    LimitRecord,
    Stream.LIMITS,
    "The state of a limit that is set by the API since its last change. Internal.",
    public=False,
)

CHANNELS = (
    JOBS,
    AGENTS,
    CANCEL,
    RESULTS,
    ATTEMPTS,
    EXECUTIONS,
    BREAKERS,
    SHADOW_BREAKERS,
    BUDGETS,
    SHADOW_BUDGETS,
    GUARDS,
    PLANS,
    LIMIT_EVENTS,
    ALERTS,
    AUDIT,
    PROGRESS,
    CHUNKS,
    DEAD_LETTERS,
)
"""Those of the public contract."""

FROM_PROGRAMS = (JOBS, CANCEL)
"""The channels that programs write. The plane writes all others."""
