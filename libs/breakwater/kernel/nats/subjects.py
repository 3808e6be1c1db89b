"""Names on the bus: streams, subjects, headers, and the reversible encoding of a subject token.

A token must not hold dots, spaces or wildcards, while agent names, model ids and job ids may. Every byte outside
`A-Z a-z 0-9 _ -` is percent-encoded, so that any language decodes a token with its ordinary URL-decoding function.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64encode
from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache, partial
from urllib.parse import unquote

_CONCRETE = re.compile(r"[^\s*>\x00-\x1f\x7f.]+(\.[^\s*>\x00-\x1f\x7f.]+)*")
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_ENCODED = tuple(chr(byte) if _PLAIN.match(chr(byte)) else f"%{byte:02X}" for byte in range(256))

DUPLICATE_WINDOW_S = 600.0
"""The time for which JetStream recognizes duplicates of jobs and results by their ids."""

REPLIES = "bw.replies."
"""Prefix of the subjects, apart from their inboxes, at which programs may have answers delivered."""

PROGRAM = "program-"
"""Prefix of the NATS users of programs that the config names."""


class Stream(StrEnum):
    """The JetStream streams."""

    JOBS = "JOBS"
    PARKED = "PARKED"
    EVENTS = "EVENTS"
    ALERTS = "ALERTS"
    RESULTS = "RESULTS"
    RESPONSES = "RESPONSES"
    DLQ = "DLQ"
    ADVISORIES = "ADVISORIES"
    ALERTER = "ALERTER"
    AUDIT = "AUDIT"
    KEYS = "KEYS"
    LIMITS = "LIMITS"
    BODIES = "OBJ_bodies"
    """The stream of the object store `bodies`."""


class Header(StrEnum):
    """The headers of messages that Breakwater writes and reads."""

    MSG_ID = "Nats-Msg-Id"
    EXPECTED_LAST_SUBJECT_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
    EXPECTED_LAST_SEQUENCE = "Nats-Expected-Last-Sequence"
    ROLLUP = "Nats-Rollup"
    """`sub`: the message replaces all that are on its subject."""
    TTL = "Nats-TTL"
    """The server removes the message after this time."""
    CE_ID = "ce-id"
    CE_TYPE = "ce-type"
    CE_SOURCE = "ce-source"
    CE_TIME = "ce-time"
    CE_SPECVERSION = "ce-specversion"
    TRACEPARENT = "traceparent"
    CHANNEL = "Breakwater-Channel"
    """On the dead letter of an alert, the channel that it did not reach; on its replay, the channel to try again."""
    INCIDENT = "Breakwater-Incident"
    """On the dead letter of an alert, the key of its incident."""
    UNIQUE_ID = "Breakwater-Unique-Id"
    """Set by `request` on a job whose id it generated: the worker need not look for an earlier job with that id."""
    OWNER = "Breakwater-Owner"
    """The name of the API key that a job belongs to, encoded as a token; set by `request`."""
    SUBMITTED_BY = "Breakwater-Submitted-By"
    """The name of the API key that a job was submitted with, encoded as a token; set by `request`."""
    USER = "Breakwater-User"
    """The user whose call a job is, encoded as a token; set by `request`. Programs name it in the job's metadata."""
    TEAM = "Breakwater-Team"
    """The team whose call a job is, as the user."""
    TAGS = "Breakwater-Tags"
    """The cost tags of the key that a job was submitted with, as JSON, encoded as a token; set by `request`."""
    OPERATOR = "Breakwater-Operator"
    """Set by `request` on a dry run whose API key may operate the plane, and so may see what is left of the budgets."""
    PROBE = "Breakwater-Probe"
    """Set by the breaker service on a job that only tries whether a model answers again.

    It names what the breaker is of, a model or a deployment, encoded as a token.
    """
    SCOPE = "Breakwater-Scope"
    """The scope of a job's ids (`jobs.rules.ids`); set by `request`. A named program's is its NATS user."""
    DUE = "Breakwater-Due"
    """When a parked job returns to its queue: RFC 3339, UTC, milliseconds."""
    TURN = "Breakwater-Turn"
    """The turn that a parked job waits for (`jobs.rules.turns`), when it returns to its queue."""
    PRIORITY = "Breakwater-Priority"
    """The priority of a job, if it is not the agent's, and the weight of its key; set by `request`."""
    RESIDENCY = "Breakwater-Residency"
    """The region that a job's calls must not leave, as its key is bound to one; set by `request`."""
    EXECUTION_ID = "Breakwater-Execution-Id"
    """The execution id of a job, encoded as a token; set by `request`, and where a job is parked."""
    JOB_ID = "Breakwater-Job-Id"
    """The job's own id if that is not in its body, encoded as a token; set where the execution id is."""
    BODY = "Breakwater-Body"
    """The reference to a job's body in the object store, in place of its message's own; set by `request`."""
    QUEUED_AT = "Breakwater-Queued-At"
    """When a parked job was first accepted: RFC 3339, UTC, milliseconds. No other job has it."""


OURS = "breakwater-"
"""Prefix of the headers that only the plane sets, in lower case."""


@lru_cache(maxsize=4096)
def encode_token(text: str) -> str:
    """Encodes any non-empty text as one subject token: `gpt-4.1:mini` → `gpt-4%2E1%3Amini`.

    Raises:
        ValueError: the text is empty; a token may not be.
    """
    if not text:
        raise ValueError("a subject token can't be empty")
    return text if _PLAIN.fullmatch(text) else "".join([_ENCODED[byte] for byte in text.encode()])


def decode_token(token: str) -> str:
    """The inverse of `encode_token`."""
    return unquote(token, errors="strict")


def covers(pattern: str, subject: str) -> bool:
    """Returns True if `pattern` covers every subject that matches `subject`, which may have wildcards too."""
    expected = pattern.split(".")
    tokens = subject.split(".")
    if expected[-1] == ">" and len(tokens) >= len(expected):
        expected.pop()
        tokens = tokens[: len(expected)]
    if len(expected) != len(tokens):
        return False
    return all(part in ("*", token) for part, token in zip(expected, tokens, strict=True))


def _subject(kind: str, *names: str) -> str:
    return ".".join(("bw", kind, *map(encode_token, names)))


job: Callable[[str], str] = partial(_subject, "jobs")
"""The subject of jobs for an agent (JOBS)."""

NOTHING = "bw.nothing"
"""A subject without publishers."""


def filler(stream: Stream) -> str:
    """The subject of messages that make a stream begin another file (`nats.deletion`). No filter of a reader has it."""
    return f"bw-filler.{stream}"


def jobs_of(agent: str) -> list[str]:
    """All subjects of an agent's jobs: the plane's own, and that of each user of a program."""
    return [job(agent), f"{job(agent)}.*"]


job_by: Callable[[str, str], str] = partial(_subject, "jobs")
"""The subject to which NATS maps a program's `job`: it names the user, and the program can't change it."""


def jobs_by(user: str) -> str:
    """The same for all agents."""
    return f"bw.jobs.*.{encode_token(user)}"


parked: Callable[[str, str], str] = partial(_subject, "parked")
"""The subject of a job that has to wait for long (PARKED). Internal: programs have no access."""


def parked_anywhere(execution_id: str) -> str:
    """The subject of a parked job, with a wildcard for its agent."""
    return f"bw.parked.*.{encode_token(execution_id)}"


def attempt(agent: str, execution_id: str, number: int | str) -> str:
    """The subject of attempt `number` (from 1; or `*`) of an execution (EVENTS)."""
    return f"{_subject('attempts', agent, execution_id)}.{number}"


execution: Callable[[str, str], str] = partial(_subject, "executions")
"""The subject of the one terminal record of an execution (EVENTS)."""

breaker: Callable[[str, str], str] = partial(_subject, "breakers")
"""The subject of transitions of a breaker (EVENTS)."""

shadow_breaker: Callable[[str, str], str] = partial(_subject, "shadow-breakers")
"""The subject of transitions of a breaker's shadow (EVENTS)."""

shadow_budget: Callable[[str, str], str] = partial(_subject, "shadow-budgets")
"""The subject of thresholds of a limit's shadow (EVENTS)."""

guard: Callable[[str], str] = partial(_subject, "guards")
"""The subject of trips and resets of task guards (EVENTS)."""

plan: Callable[[str], str] = partial(_subject, "plans")
"""The subject of a plan's changes of state (EVENTS)."""

budget: Callable[[str, str], str] = partial(_subject, "budgets")
"""The subject of threshold crossings of a budget (EVENTS)."""

alert: Callable[[str], str] = partial(_subject, "alerts")
"""The subject of alerts of a kind (ALERTS)."""

audit: Callable[[str], str] = partial(_subject, "audit")
"""The subject of actions of people (AUDIT)."""

API_KEYS = "bw.keys.*"
"""The subjects of API keys, by their ids; the newest message is the key's state (KEYS). Internal."""

KEY_CHANGES = "bw.key-changes"
"""The subject of the notice that a key was changed: the change's sequence in KEYS; core NATS, not stored. Internal."""

WAITING_CALLERS = "bw.waiting-callers"
"""The subject of notices of workers that jobs of some callers wait for a slot; core NATS, not stored. Internal."""

NEW_CALLERS = "bw.new-callers"
"""The subject of notices of `request` that a caller begins to call an agent; core NATS, not stored. Internal."""
limit: Callable[[str], str] = partial(_subject, "limits")
"""The subject of changes of limits, by the kind of change (EVENTS)."""

ALL_LIMITS = "bw.limits.>"
"""The subjects of all changes of limits."""

LIMIT_SETTINGS = "bw.limit-settings.*"
"""The subjects of limits that are set by the API, by their ids; the newest message is the limit's state (LIMITS).
Internal."""

LIMIT_CHANGES = "bw.limit-changes"
"""The subject of the notice that a limit was changed, as `KEY_CHANGES`. Internal."""

ALERTER_LEADER = "bw.alerter.leader"
"""The lease of the alerter that notifies people (ALERTER). Internal, as all of ALERTER."""

CHANNEL_TESTS = "bw.alerter.test.*"
"""Subjects of requests for test messages to channels; core NATS, not stored."""

sent_message: Callable[[str, str], str] = partial(_subject, "alerter.sent")
"""The subject of the record of the message that a channel has sent for an incident, to update it later (ALERTER)."""

disabled_channel: Callable[[str], str] = partial(_subject, "alerter.disabled")
"""The subject of the record that a channel's receiver wants no more alerts (ALERTER)."""


def alert_replay(channel: str, dead_letter_id: int) -> str:
    """The subject of an alert that a channel is to send again (ALERTER). `dead_letter_id` is its sequence in DLQ."""
    return f"{_subject('alerter.replays', channel)}.{dead_letter_id}"


channel_test: Callable[[str], str] = partial(_subject, "alerter.test")
"""The subject of a request for a test message to a channel; core NATS, not stored."""

result: Callable[[str], str] = partial(_subject, "results")
"""The subject of the answer to a job, unredacted (RESULTS)."""


def kept_request(execution_id: str) -> str:
    """The subject of the request that led to a stored response (RESPONSES). Internal."""
    return f"{_subject('responses', execution_id)}.request"


def kept_chunks(execution_id: str) -> str:
    """The subject of the stored chunks of an answer, in order (RESPONSES). Internal."""
    return f"{_subject('responses', execution_id)}.chunks"


SNAPSHOTS = "bw.snapshots.>"
"""The subjects on which the server sends copies of streams to a backup, each on one of its own. Internal."""

RESTORED = "$JS.SNAPSHOT.RESTORE.>"
"""The server's own subjects for the copy of a stream that is restored."""

BODIES = "$O.bodies"
"""The prefix of the object store for large bodies of jobs (OBJ_bodies), in the server's own format. Internal."""

STORED_BODIES = f"{BODIES}.M.>"
"""The descriptions of all stored bodies."""


def stored_body(name: str) -> str:
    """The subject of the description of a stored body (OBJ_bodies)."""
    return f"{BODIES}.M.{urlsafe_b64encode(name.encode()).decode()}"


def body_chunks(name: str) -> str:
    """The subject of the chunks of a stored body, in order (OBJ_bodies)."""
    return f"{BODIES}.C.{name}"


def dead_letter(reason: str, agent: str) -> str:
    """The subject of a message that could not be handled (DLQ). An unknown agent is `unknown`."""
    return _subject("dlq", reason, agent or "unknown")


def replay(dead_letter_id: int) -> str:
    """The subject of the replay of a dead letter's job (DLQ). Internal. `dead_letter_id` is its sequence in DLQ."""
    return f"bw.replayed.{dead_letter_id}"


ALL_DISMISSALS = "bw.dismissed.>"


def dismissal(dead_letter_subject: str, dead_letter_id: int) -> str:
    """The subject of the dismissal of a dead letter (DLQ), which names the dead letter's subject. Internal."""
    return f"bw.dismissed.{dead_letter_subject.removeprefix('bw.dlq.')}.{dead_letter_id}"


progress: Callable[[str, str], str] = partial(_subject, "progress")
"""Live progress of an execution; core NATS, not stored."""

chunks: Callable[[str, str], str] = partial(_subject, "chunks")
"""The subject of the chunks of an answer while it is produced, unredacted; core NATS, not stored."""

cancel: Callable[[str], str] = partial(_subject, "cancel")
"""The subject of programs' requests to cancel a job; core NATS, a request."""

cancel_request: Callable[[str], str] = partial(_subject, "cancel-requests")
"""The subject of notices to workers that a job is to be cancelled; core NATS, not stored. Internal."""

CANCEL_REQUESTS = "bw.cancel-requests.*"

CANCELS = "bw.cancel.*"
"""Subjects of programs' requests to cancel jobs."""

CANCELS_BY_USER = "bw.cancel-by.*.*"
"""The same with the user who requests it."""

AGENTS = "bw.agents"
"""The subject of programs' requests for the agents that they may call; core NATS, a request."""

AGENTS_BY_USER = "bw.agents-by.*"
"""The same with the user who requests it."""

agents_by: Callable[[str], str] = partial(_subject, "agents-by")
"""The subject to which NATS maps a program's `AGENTS`: it names the user."""

worker: Callable[[str], str] = partial(_subject, "workers")
"""Subject that a worker subscribes to while it is connected; core NATS, nothing is sent there. Internal."""

WORKERS = "bw.workers.*"


def cancels_by(user: str) -> str:
    """The subjects to which NATS maps a program's `CANCELS`: they name the user, and the program can't change that."""
    return f"bw.cancel-by.{encode_token(user)}.*"


def agent_of_job(subject: str) -> str:
    """The agent that a job's subject names.

    Raises:
        ValueError: the subject is not of the form `bw.jobs.<agent>` or `bw.jobs.<agent>.<user>`.
    """
    match subject.split("."):
        case ["bw", "jobs", agent, *user] if agent and len(user) <= 1:
            return decode_token(agent)
        case _:
            raise ValueError(f"{subject!r} is not a job's subject (bw.jobs.<agent>)")


def user_of_job(subject: str) -> str | None:
    """The user of a program that published a job; None for the plane's own subject."""
    match subject.split("."):
        case ["bw", "jobs", _, user]:
            return decode_token(user)
        case _:
            return None


def parts_of_parked(subject: str) -> tuple[str, str]:
    """The agent and the execution that a parked job's subject names.

    Raises:
        ValueError: the subject is not of the form `bw.parked.<agent>.<execution>`.
    """
    match subject.split("."):
        case ["bw", "parked", agent, execution_id] if agent and execution_id:
            return decode_token(agent), decode_token(execution_id)
        case _:
            raise ValueError(f"{subject!r} is not a parked job's subject (bw.parked.<agent>.<execution>)")


def is_reply_subject(subject: str) -> bool:
    """Returns True if an answer may be sent there: it is an inbox, or below `bw.replies`."""
    return subject.startswith(("_INBOX.", REPLIES)) and _CONCRETE.fullmatch(subject) is not None


def message_id(agent: str, execution_id: str) -> str:
    """The `Nats-Msg-Id` by which repeated submissions become one message. Encoded, as headers can't hold every id."""
    return f"{encode_token(agent)}/{encode_token(execution_id)}"
