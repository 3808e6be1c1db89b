"""Who may do what on the bus, as data: one NATS user for each service, with its own subjects and no others.

| user | for |
|---|---|
| `request` … `sink` | the service of that name |
| `setup` | the administrator: creates and updates streams and consumers, reads all streams, puts dead letters back |
| `client` | programs: publish jobs; subscribe to answers, alerts and events |

Three decisions that the lists below follow:

- **Replies are private.** Every user of ours has its own inbox prefix (`_INBOX_worker`), and connects with it, so that
  no service receives replies to another one. Programs keep their library's default
  (`_INBOX`), which no service can subscribe to.
- **A job's `reply_to` is an inbox of the programs or lies under `bw.replies`.** The worker may publish nowhere else, so
  a job can't make it forge an event or answer in the server's name.
- **Programs get no right to create consumers.** Who may create one on a stream may also change or drain those of our
  services. Programs subscribe to what happens, and read what is stored by direct get. One that wants a durable consumer
  of its own gets it from the administrator, and a user with `consumes(stream, name)`.

What NATS does not check is the reply subject of a request: who may ask may have the answer, an acknowledgement or a
stored message, sent to any subject. So these users keep apart programs that are not careful from services; a program
that is not trusted belongs on the HTTP interface, with an API key.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from breakwater.bus.topology import (
    ALERTER_DEAD_LETTERS,
    ALERTER_EVENTS,
    ALERTER_EXECUTIONS,
    ALERTER_REPLAYS,
    PARKED_CONSUMER,
)
from breakwater.contracts.subjects import ALERTER_LEADER, CHANNEL_TESTS, Stream

CLIENT_INBOX = "_INBOX"
REPLIES = "bw.replies"


@dataclass(frozen=True, slots=True)
class Grant:
    """A NATS user and the only subjects it may use."""

    user: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False
    """Whether it may reply to a request, once, on any reply subject."""


def inbox_prefix(user: str) -> str:
    """Where replies to a user go: the `inbox_prefix` to connect with."""
    return CLIENT_INBOX if user == "client" else f"_INBOX_{user}"


def consumes(stream: Stream, *durables: str) -> tuple[str, ...]:
    """What to publish to for pulling from durable consumers and acknowledging; `*` stands for all of the stream's."""
    return tuple(
        subject
        for durable in durables
        for subject in (
            f"$JS.API.CONSUMER.INFO.{stream}.{durable}",
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}",
            f"$JS.ACK.{stream}.{durable}.>",
            # With domain and account in front, as newer servers write it.
            f"$JS.ACK.*.*.{stream}.{durable}.>",
        )
    )


def reads(*streams: Stream) -> tuple[str, ...]:
    """What to publish to for direct gets: by sequence, by subject, and in batches."""
    return tuple(
        subject for stream in streams for subject in (f"$JS.API.DIRECT.GET.{stream}", f"$JS.API.DIRECT.GET.{stream}.>")
    )


def _below(*kinds: str) -> tuple[str, ...]:
    """All of our subjects of some kinds: `bw.<kind>.>`."""
    return tuple(f"bw.{kind}.>" for kind in kinds)


def _api(*calls: str) -> tuple[str, ...]:
    return tuple(f"$JS.API.{call}" for call in calls)


def _grant(user: str, *, publish: Iterable[str], subscribe: Iterable[str] = (), answers: bool = False) -> Grant:
    return Grant(user, tuple(publish), (f"{inbox_prefix(user)}.>", *subscribe), answers)


RECORD = (
    f"$JS.API.STREAM.INFO.{Stream.EVENTS}",
    *(f"$JS.API.CONSUMER.INFO.{Stream.EVENTS}.{consumer}" for consumer in ("sink-events", "budget")),
)
"""What the record of attempts is, and up to where it is stored and counted."""

BACKLOGS = tuple(
    f"$JS.API.CONSUMER.INFO.{consumer}"
    for consumer in (
        # Agents and channels have a consumer each, of their names.
        f"{Stream.JOBS}.*",
        f"{Stream.ALERTS}.*",
        f"{Stream.PARKED}.{PARKED_CONSUMER}",
        f"{Stream.EVENTS}.breaker",
        f"{Stream.EVENTS}.{ALERTER_EVENTS}",
        f"{Stream.EVENTS}.{ALERTER_EXECUTIONS}",
        f"{Stream.DLQ}.{ALERTER_DEAD_LETTERS}",
        f"{Stream.ALERTER}.{ALERTER_REPLAYS}",
    )
)
"""How much waits for workers and services; those of RECORD go with them."""

GRANTS = (
    _grant(
        "request",
        publish=(
            # A job, and that it is queued; what an operator resets, or forces open; caps that an operator raises.
            *_below("jobs", "progress", "breakers", "guards", "budgets"),
            *reads(Stream.EVENTS, Stream.RESULTS, Stream.DLQ),
            # Dead letters: how many there are, and which of them were run again.
            f"$JS.API.STREAM.INFO.{Stream.DLQ}",
            "bw.replayed.*",
            # Incidents that an operator acknowledges or resolves; what a channel is to send again; channel tests.
            *_below("alerts", "alerter.replays"),
            CHANNEL_TESTS,
            f"$JS.API.STREAM.INFO.{Stream.ALERTS}",
            *reads(Stream.ALERTS, Stream.ALERTER),
            # It compares the budgets with the record on request.
            *RECORD,
            *BACKLOGS,
        ),
        subscribe=_below("results", "progress"),
    ),
    _grant(
        "worker",
        publish=(
            # Breakers: from open to half-open, when it takes the probe.
            *_below("attempts", "executions", "breakers", "guards", "progress", "results", "dlq"),
            f"{CLIENT_INBOX}.>",
            f"{REPLIES}.>",
            # All consumers of JOBS are the worker's, one for each agent: a new agent needs no new grant.
            *consumes(Stream.JOBS, "*"),
            # A job that has to wait for long is parked, and put back into its queue when it is due.
            "bw.parked.>",
            *consumes(Stream.PARKED, PARKED_CONSUMER),
            "bw.jobs.>",
            *reads(Stream.EVENTS, Stream.RESULTS),
        ),
    ),
    _grant(
        "breaker",
        publish=(
            *_below("breakers", "dlq"),
            *consumes(Stream.EVENTS, "breaker"),
            # When Redis was emptied, it rebuilds its state from what is stored.
            f"$JS.API.STREAM.INFO.{Stream.EVENTS}",
            *reads(Stream.EVENTS),
        ),
    ),
    _grant(
        "budget",
        publish=(
            *_below("budgets", "dlq"),
            *consumes(Stream.EVENTS, "budget"),
            # When Redis was emptied, it rebuilds its state from what is stored; otherwise it compares the two.
            *RECORD,
            *reads(Stream.EVENTS),
        ),
    ),
    _grant(
        "alerter",
        publish=(
            *_below("alerts", "dlq"),
            *consumes(Stream.EVENTS, ALERTER_EVENTS, ALERTER_EXECUTIONS),
            *consumes(Stream.DLQ, ALERTER_DEAD_LETTERS),
            # Each channel has a consumer of its name: a new channel needs no new grant.
            *consumes(Stream.ALERTS, "*"),
            # What it has to remember: who leads, which messages it may update, baselines.
            ALERTER_LEADER,
            *_below("alerter.sent", "alerter.disabled", "alerter.baselines"),
            *consumes(Stream.ALERTER, ALERTER_REPLAYS),
            f"$JS.API.STREAM.INFO.{Stream.ALERTS}",
            *reads(Stream.ALERTS, Stream.ALERTER),
        ),
        subscribe=(CHANNEL_TESTS,),
        answers=True,
    ),
    _grant(
        "sink",
        publish=("bw.dlq.>", *consumes(Stream.EVENTS, "sink-events"), *consumes(Stream.ALERTS, "sink-alerts")),
    ),
    _grant(
        "setup",
        # Neither deletes nor purges: no mistake of an administrator's script empties a stream.
        publish=(
            *_api("INFO", "STREAM.INFO.>", "STREAM.LIST", "STREAM.NAMES", "STREAM.CREATE.>", "STREAM.UPDATE.>"),
            *_api("CONSUMER.INFO.>", "CONSUMER.LIST.>", "CONSUMER.NAMES.>"),
            *_api("CONSUMER.CREATE.>", "CONSUMER.DURABLE.CREATE.>"),
            *reads(*Stream),
            "bw.jobs.>",
        ),
    ),
    _grant(
        "client",
        publish=(
            "bw.jobs.>",
            "$JS.API.INFO",
            *(f"$JS.API.STREAM.INFO.{stream}" for stream in (Stream.EVENTS, Stream.ALERTS, Stream.RESULTS)),
            *reads(Stream.EVENTS, Stream.ALERTS, Stream.RESULTS),
        ),
        subscribe=(
            *_below("attempts", "executions", "breakers", "budgets", "guards", "alerts", "progress", "results"),
            f"{REPLIES}.>",
        ),
    ),
)
"""Every user of the plane."""


def password_variable(user: str) -> str:
    """The environment variable of a user's password in `compose.yaml`."""
    return f"BW_NATS_{user.upper()}_PASSWORD"


def render(grants: Iterable[Grant], password: Callable[[str], str]) -> str:
    """Renders the `authorization` block of a nats-server's config file.

    Args:
        grants: the users.
        password: gives the password of a user as it shall stand in the file: a quoted string, or `$VARIABLE`.
    """
    return "\n".join(["authorization {", "  users: [", *(_user(grant, password) for grant in grants), "  ]", "}", ""])


def _user(grant: Grant, password: Callable[[str], str]) -> str:
    def allowed(subjects: Iterable[str]) -> str:
        # The server takes an empty list for "no restriction".
        listed = "".join(f'          "{subject}"\n' for subject in subjects)
        return f"{{ allow: [\n{listed}        ] }}" if listed else '{ deny: ">" }'

    return (
        f"    {{\n      user: {grant.user}\n      password: {password(grant.user)}\n      permissions: {{\n"
        f"        publish: {allowed(grant.publish)}\n        subscribe: {allowed(grant.subscribe)}\n"
        + ('        allow_responses: { max: 1, expires: "1m" }\n' if grant.answers else "")
        + "      }\n    }"
    )


def main() -> None:
    """Writes the users of `compose.yaml` to stdout; `make contract` keeps them in `deploy/nats/users.conf`."""
    sys.stdout.write("# GENERATED from libs/breakwater/bus/permissions.py by `make contract`.\n")
    sys.stdout.write(render(GRANTS, lambda user: f"${password_variable(user)}"))


if __name__ == "__main__":
    main()
