"""Streams and consumers as data: what exists on the bus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
    StreamSource,
)

from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.subjects import DUPLICATE_WINDOW_S, Stream

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
ACK_WAIT_S = 20.0
"""The longest silence of a worker before its job is delivered to another worker."""

MIB = 1024**2

PARKED_MAX_BYTES = 1024 * MIB
"""Small, as the server reserves disk for the whole limit and few jobs are parked. Beyond it, a job waits in JOBS."""

ADVISORIES_MAX_BYTES = 64 * MIB

LONGEST_JOB_S = 25 * HOUR_S
"""Longer than any job may take, so that its request and its chunks are kept until its result expires."""

DEAD_LETTERS_S = 30 * DAY_S
"""The time for which DLQ keeps dead letters."""

AUDIT_MAX_BYTES = 64 * MIB
"""Room for some 40,000 actions until ClickHouse has stored them."""

PARKED_CONSUMER = "worker-parked"
ALERTER_EVENTS = "alerter"
ALERTER_EXECUTIONS = "alerter-executions"
ALERTER_DEAD_LETTERS = "alerter-dead-letters"
ALERTER_REPLAYS = "alerter-replays"

ALERTS_HELD = 1_000
"""The most alerts that a channel may hold back to send as one message; the others wait in the stream."""


WITH_TEXTS = (
    Stream.JOBS,
    Stream.PARKED,
    Stream.EVENTS,
    Stream.ALERTS,
    Stream.RESULTS,
    Stream.RESPONSES,
    Stream.DLQ,
    Stream.BODIES,
)
"""The streams with texts of users."""

NEARLY_FULL = 0.8
"""The share of a stream's limit from which on people are warned."""

WHEN_FULL = {
    Stream.JOBS: "new jobs are refused",
    Stream.PARKED: "parked jobs keep their agents' slots",
    Stream.EVENTS: "workers make no calls until the oldest events have expired",
    Stream.RESULTS: "workers keep their results until the oldest results have expired",
    Stream.RESPONSES: "the oldest stored responses are dropped",
    Stream.DLQ: "jobs to be dead-lettered wait and keep their agents' slots",
    Stream.ALERTS: "the oldest alerts are dropped",
    Stream.ADVISORIES: "the oldest advisories are dropped",
    Stream.AUDIT: "the oldest actions are dropped",
    Stream.BODIES: "new jobs with large bodies are refused",
}
"""The effect of a full stream, for streams with a limit in bytes."""

DROPS_OLDEST = frozenset({Stream.RESPONSES, Stream.ALERTS, Stream.ADVISORIES, Stream.AUDIT})
"""Streams that drop their oldest messages when they are full."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts of the config that shape the bus."""

    agents: Mapping[str, int]
    """Each agent's concurrency across the whole fleet."""
    alert_channels: tuple[str, ...] = ()
    events_max_age_h: float = 72
    results_max_age_h: float = 24
    max_bytes: Mapping[Stream, int] = field(default_factory=dict[Stream, int])
    """The limits of the streams that the config limits."""
    jobs_max_per_agent: int | None = None
    """The most messages of one agent and one sender in JOBS; None for no limit."""


def streams(plan: Plan, *, replicas: int = 1) -> tuple[StreamConfig, ...]:
    """Every stream of the plane. An agent that is not configured has no subject in JOBS."""
    # A full stream whose messages must not make way for later ones refuses those. The publisher of an event then waits
    # (`EventStreamFullError`), so that calls stop and jobs stay in JOBS.
    keeps = {"discard": DiscardPolicy.NEW}

    def stream(name: Stream, subject_names: Iterable[str], max_age_s: float, **more: object) -> StreamConfig:
        return StreamConfig(
            name=name.value,
            subjects=[*subject_names, *((subjects.filler(name),) if name in WITH_TEXTS else ())],
            max_age=max_age_s,
            storage=StorageType.FILE,
            num_replicas=replicas,
            allow_direct=True,
            **{"max_bytes": plan.max_bytes.get(name), **more},  # pyright: ignore[reportArgumentType]  # keyword arguments of a vendor dataclass
        )

    return (
        stream(
            Stream.JOBS,
            [subject for agent in plan.agents for subject in subjects.jobs_of(agent)],
            0,
            retention=RetentionPolicy.WORK_QUEUE,
            # Callers choose their ids, and JetStream compares the ids of all callers: it would drop one caller's job as
            # a duplicate of another's. Only a stream with sources may turn that off; this source is empty (ADR 0040).
            duplicate_window=0,
            sources=[StreamSource(name=Stream.ADVISORIES.value, filter_subject=subjects.NOTHING)],
            max_msgs_per_subject=plan.jobs_max_per_agent or -1,
            discard_new_per_subject=plan.jobs_max_per_agent is not None,
            **keeps,
        ),
        stream(
            Stream.PARKED,
            ["bw.parked.*.*"],
            0,
            retention=RetentionPolicy.WORK_QUEUE,
            max_bytes=PARKED_MAX_BYTES,
            duplicate_window=DUPLICATE_WINDOW_S,
            **keeps,
        ),
        stream(
            Stream.EVENTS,
            [
                "bw.attempts.>",
                "bw.executions.>",
                "bw.breakers.>",
                "bw.budgets.>",
                "bw.guards.>",
                "bw.plans.>",
                "bw.limits.>",
                "bw.shadow-breakers.>",
                "bw.shadow-budgets.>",
            ],
            plan.events_max_age_h * HOUR_S,
            # Only rare events carry a message id; the subjects of attempts and records take one message each.
            duplicate_window=min(DAY_S, plan.events_max_age_h * HOUR_S),
            **keeps,
        ),
        # The oldest alerts are dropped: they are delivered and in ClickHouse. A flood must not silence later alerts.
        stream(Stream.ALERTS, ["bw.alerts.>"], 30 * DAY_S, discard=DiscardPolicy.OLD, duplicate_window=DAY_S),
        stream(
            Stream.ALERTER,
            # Not bw.alerter.test: a test expects an answer, not an acknowledgement.
            [
                subjects.ALERTER_LEADER,
                *(f"bw.alerter.{kind}.>" for kind in ("sent", "disabled", "replays")),
            ],
            60 * DAY_S,
            max_msgs_per_subject=1,
            duplicate_window=120.0,
        ),
        stream(
            Stream.RESULTS,
            ["bw.results.>"],
            plan.results_max_age_h * HOUR_S,
            duplicate_window=DUPLICATE_WINDOW_S,
            **keeps,
        ),
        # The oldest are dropped, which readers notice: a new answer must not wait for old ones to expire.
        stream(
            Stream.RESPONSES,
            ["bw.responses.>"],
            plan.results_max_age_h * HOUR_S + LONGEST_JOB_S,
            discard=DiscardPolicy.OLD,
            duplicate_window=DUPLICATE_WINDOW_S,
            # A deleted response is replaced by the note that it was deleted.
            allow_rollup_hdrs=True,
        ),
        # Replays are recorded in the stream of the dead letters, to be kept for as long as those.
        stream(
            Stream.DLQ, ["bw.dlq.>", "bw.replayed.*", "bw.dismissed.>"], DEAD_LETTERS_S, duplicate_window=DAY_S, **keeps
        ),
        # A separate stream, so that operators can act while EVENTS is full. The oldest actions are dropped: they are in
        # ClickHouse, and an operator who acts a lot must not prevent others from acting.
        stream(
            Stream.AUDIT,
            ["bw.audit.>"],
            30 * DAY_S,
            discard=DiscardPolicy.OLD,
            max_bytes=AUDIT_MAX_BYTES,
            duplicate_window=DUPLICATE_WINDOW_S,
        ),
        # No age limit: a key is valid until it is revoked or expires, and a month later its message removes itself.
        stream(
            Stream.KEYS,
            [subjects.API_KEYS],
            0,
            max_msgs_per_subject=1,
            duplicate_window=DUPLICATE_WINDOW_S,
            allow_msg_ttl=True,
        ),
        # No age limit, either: a limit holds until it is deleted or ends.
        stream(
            Stream.LIMITS,
            [subjects.LIMIT_SETTINGS],
            0,
            max_msgs_per_subject=1,
            duplicate_window=DUPLICATE_WINDOW_S,
            allow_msg_ttl=True,
        ),
        # No age limit: a job may wait for long. `Leftovers` removes what no job and no dead letter has.
        stream(
            Stream.BODIES,
            [f"{subjects.BODIES}.C.>", subjects.STORED_BODIES],
            0,
            duplicate_window=DUPLICATE_WINDOW_S,
            allow_rollup_hdrs=True,
            allow_msg_ttl=True,
            **keeps,
        ),
        stream(
            Stream.ADVISORIES,
            ["$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.>", "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.>"],
            30 * DAY_S,
            discard=DiscardPolicy.OLD,
            max_bytes=ADVISORIES_MAX_BYTES,
            duplicate_window=120.0,
        ),
    )


def worker_consumer(agent: str) -> str:
    """The durable name of an agent's job consumer."""
    return f"worker-{subjects.encode_token(agent)}"


def alert_consumer(channel: str) -> str:
    """The durable name of a channel's consumer of ALERTS."""
    return f"alerter-channel-{subjects.encode_token(channel)}"


def consumers(plan: Plan) -> tuple[tuple[Stream, ConsumerConfig], ...]:
    """Every durable consumer, with the stream it reads."""
    jobs = [
        (Stream.JOBS, _durable(worker_consumer(name), subjects.jobs_of(name), max_ack_pending=concurrency))
        for name, concurrency in plan.agents.items()
    ]
    return (
        *jobs,
        # Without a limit: waiting jobs must not hide one that is due sooner.
        (Stream.PARKED, _durable(PARKED_CONSUMER, ["bw.parked.*.*"], max_ack_pending=-1)),
        (Stream.EVENTS, _durable("breaker", ["bw.attempts.>"], max_ack_pending=10_000)),
        (Stream.EVENTS, _durable("budget", ["bw.attempts.>"], max_ack_pending=10_000)),
        # One at a time across the whole fleet: a breaker's closing is never handled before its opening.
        (Stream.EVENTS, _durable(ALERTER_EVENTS, ["bw.breakers.>", "bw.guards.>", "bw.budgets.>"], max_ack_pending=1)),
        (Stream.EVENTS, _durable(ALERTER_EXECUTIONS, ["bw.executions.>"], max_ack_pending=5_000)),
        (Stream.DLQ, _durable(ALERTER_DEAD_LETTERS, ["bw.dlq.>"], max_ack_pending=1_000)),
        (Stream.ALERTER, _durable(ALERTER_REPLAYS, ["bw.alerter.replays.>"], max_ack_pending=1_000)),
        (Stream.EVENTS, _durable("sink-events", ["bw.>"], max_ack_pending=50_000)),
        (Stream.ALERTS, _durable("sink-alerts", ["bw.alerts.>"], max_ack_pending=10_000)),
        (Stream.AUDIT, _durable("sink-audit", ["bw.audit.>"], max_ack_pending=10_000)),
        *(
            # A new channel does not get the alerts of the last month.
            (
                Stream.ALERTS,
                _durable(alert_consumer(name), ["bw.alerts.>"], max_ack_pending=ALERTS_HELD, begin=DeliverPolicy.NEW),
            )
            for name in plan.alert_channels
        ),
    )


CONSUMED = (Stream.JOBS, Stream.PARKED, Stream.EVENTS, Stream.DLQ, Stream.ALERTER, Stream.ALERTS, Stream.AUDIT)
"""The streams with durable consumers."""


def _durable(
    name: str, filters: list[str], *, max_ack_pending: int, begin: DeliverPolicy = DeliverPolicy.ALL
) -> ConsumerConfig:
    only_filter = filters[0] if len(filters) == 1 else None
    return ConsumerConfig(
        durable_name=name,
        filter_subject=only_filter,
        filter_subjects=None if only_filter else filters,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ACK_WAIT_S,
        # The server never gives up: it would keep the message but not deliver it any more. We dead-letter it instead.
        max_deliver=-1,
        max_ack_pending=max_ack_pending,
        deliver_policy=begin,
    )
