"""Who may do what on the bus, as data: one NATS user for each service, and the account that it is in.

| user | for |
|---|---|
| `request` … `sink` | the service of that name |
| `setup` | the administrator: creates and updates streams and consumers, reads all streams, puts dead letters back |
| `client` | programs: publish jobs; subscribe to answers, alerts and events |
| `program-<name>` | a program of the config's `programs`: jobs, answers and events of its own agents, and no others |

NATS checks the subject of a request but not its reply subject: within an account, whoever may ask for anything can have
the server publish the answer wherever they like, such as on `$JS.API.STREAM.DELETE.EVENTS`. So the streams are in an
account, `plane`, from which the account of each user imports what the user may publish to; and it imports what the user
may hear from the accounts of those that publish it. A reply subject means nothing outside the account of the user that
asks. Only `worker` is in the streams' account, and is trusted with them (ADR 0040).

Four more decisions that the lists below follow:

- **Replies are private.** Every user of ours has its own inbox prefix (`_INBOX_worker`), and connects with it, so that
  no service receives replies to another one. Programs keep their library's default (`_INBOX`).
- **Who sends a job stands in its subject.** What programs publish on `bw.jobs.<agent>` comes to JOBS on
  `bw.jobs.<agent>.<user>`. Only services publish where the headers that say whose a job is are believed (ADR 0088).
- **A job's `reply_to` is an inbox of the programs or lies under `bw.replies`.** The worker may publish nowhere else, so
  a job can't make it forge an event or answer in the server's name.
- **Programs get no right to create consumers.** Who may create one on a stream may also change or drain those of our
  services. Programs subscribe to what happens, and read what is stored by direct get. One that wants a durable consumer
  of its own gets it from the administrator, and a user with `consumes(stream, name)`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from breakwater.bus.topology import (
    ALERTER_DEAD_LETTERS,
    ALERTER_EVENTS,
    ALERTER_EXECUTIONS,
    ALERTER_REPLAYS,
    PARKED_CONSUMER,
)
from breakwater.contracts.subjects import (
    ALERTER_LEADER,
    CANCEL_ORDERS,
    CANCELS,
    CANCELS_BY_USER,
    CHANNEL_TESTS,
    PROGRAM,
    REPLIES,
    WORKERS,
    Stream,
    cancels_by,
    encode_token,
    job,
    job_by,
    jobs_by,
)

CLIENT_INBOX = "_INBOX"

STREAMS_ACCOUNT = "plane"
"""Where the streams are, and where a reply subject reaches JetStream."""

SYSTEM_ACCOUNT = '"$SYS"'
"""Where the servers themselves answer. It has no users, and its default name, so that nodes of a cluster that have not
been restarted yet are in the same one; quoted, as it is no variable."""

CONNECTIONS = {"client": 256}
"""How many connections a user of programs may have, beside those of named ones."""

CONNECTIONS_OF_A_PROGRAM, SUBSCRIPTIONS = 64, 500
"""Those of a named one, and how many subscriptions each connection of programs may have: one takes the server 2 kB."""

HEALTH = "$SYS.REQ.SERVER.PING.HEALTHZ"
"""Whether each server is well, and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A NATS user and the only subjects it may use."""

    user: str
    publish: tuple[str, ...] = ()
    """What goes to the streams, or asks JetStream or the servers for something."""
    sends: tuple[str, ...] = ()
    """What is not stored: it goes to whoever listens."""
    subscribe: tuple[str, ...] = ()
    """What it hears; its inbox is not among them."""
    serves: tuple[str, ...] = ()
    """Requests that it answers, each once."""
    asks: tuple[str, ...] = ()
    """Requests that another user answers."""
    asks_as: tuple[tuple[str, str], ...] = ()
    """The same, under a subject of its own account each: that, and what it becomes for who answers."""
    publish_as: tuple[tuple[str, str], ...] = ()
    """What goes to the streams under a subject that names the user: what it publishes to, and what that becomes."""
    with_streams: bool = False
    """Whether it is in the streams' own account, where its requests cost less and a reply subject reaches JetStream."""


def inbox_prefix(user: str) -> str:
    """Where replies to a user go: the `inbox_prefix` to connect with."""
    if user == "client":
        return CLIENT_INBOX
    # An answer goes where the job's `reply_to` says, which the worker takes only below the programs' prefix.
    return f"{CLIENT_INBOX}.{user}" if user.startswith(PROGRAM) else f"_INBOX_{user}"


def program(name: str, agents: Iterable[str]) -> Grant:
    """The user of a program that may use some agents only.

    It is not among those that hear `bw.results.<job>`, which names no agent, and `bw.chunks.<agent>.<execution>`, which
    is not redacted: its own answers come to its `reply_to`, which is its inbox or a subject below
    `bw.replies.program-<name>`. Nor among those that hear `bw.attempts` and `bw.guards`, which name caps and what is
    left of them: attempts stand in the record, without these figures.
    """
    user, agents = f"{PROGRAM}{name}", tuple(agents)
    events = [f"bw.{kind}.{encode_token(a)}.>" for kind in ("executions", "breakers") for a in agents]
    return Grant(
        user,
        publish=tuple(f"$JS.API.DIRECT.GET.{Stream.EVENTS}.{of}" for of in events),
        publish_as=tuple((job(agent), job_by(agent, user)) for agent in agents),
        subscribe=(
            *events,
            *(f"bw.progress.{encode_token(agent)}.>" for agent in agents),
            f"{CLIENT_INBOX}.{user}.>",
            f"{REPLIES}{user}.>",
        ),
        # Jobs have no agent in their ids: who asks is added, and whose job it is, the worker looks at.
        asks_as=((CANCELS, cancels_by(user)),),
    )


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


END = f"$JS.API.STREAM.MSG.GET.{Stream.EVENTS}"
"""What the last event of a kind is, as the leader knows: a direct get is answered by a replica that may be behind."""

RECORD = (
    f"$JS.API.STREAM.INFO.{Stream.EVENTS}",
    END,
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
        f"{Stream.AUDIT}.sink-audit",
    )
)
"""How much waits for workers and services; those of RECORD go with them."""

_INFO = "$JS.API.INFO"
"""Imported by all, as the server gives an account that does not import it a JetStream of its own, which is off."""

_ANSWERS_WITHIN = "1m"
"""How long the server remembers where further answers to one request go; longer than any pull waits for a message."""

GRANTS = (
    Grant(
        "request",
        publish=(
            # A job; what an operator resets, or forces open; caps that an operator raises.
            "bw.jobs.*",
            *_below("breakers", "guards", "budgets"),
            *reads(Stream.EVENTS, Stream.RESULTS, Stream.DLQ),
            # How full they are; and how many bytes of JOBS each agent's jobs take.
            *(f"$JS.API.STREAM.INFO.{stream}" for stream in (Stream.JOBS, Stream.RESULTS)),
            *reads(Stream.JOBS),
            # A job that sleeps is put back into its queue when it is cancelled.
            f"$JS.API.DIRECT.GET.{Stream.PARKED}.>",
            # Dead letters: how many there are, and which of them were run again.
            f"$JS.API.STREAM.INFO.{Stream.DLQ}",
            "bw.replayed.*",
            # Incidents that an operator acknowledges or resolves; what a channel is to send again; channel tests.
            *_below("alerts", "alerter.replays"),
            # What people do.
            *_below("audit"),
            f"$JS.API.STREAM.INFO.{Stream.ALERTS}",
            *reads(Stream.ALERTS, Stream.ALERTER),
            # It compares the budgets with the record on request.
            *RECORD,
            *BACKLOGS,
            HEALTH,
        ),
        sends=_below("progress", "cancel-orders"),
        subscribe=_below("results", "progress", "chunks"),
        serves=(CANCELS, CANCELS_BY_USER),
        asks=(CHANNEL_TESTS,),
    ),
    Grant(
        "worker",
        with_streams=True,
        publish=(
            # Breakers: from open to half-open, when it takes the probe.
            *_below("attempts", "executions", "breakers", "guards", "results", "dlq"),
            # All consumers of JOBS are the worker's, one for each agent: a new agent needs no new grant.
            *consumes(Stream.JOBS, "*"),
            # A job that has to wait for long is parked, and put back into its queue when it is due.
            "bw.parked.>",
            *consumes(Stream.PARKED, PARKED_CONSUMER),
            "bw.jobs.*",
            # Or when the job that it waits for has ended.
            f"$JS.API.DIRECT.GET.{Stream.PARKED}.>",
            *reads(Stream.EVENTS, Stream.RESULTS),
            # What a worker had that has died.
            *reads(Stream.JOBS),
            HEALTH,
        ),
        # The last, to see whether another worker is connected.
        sends=(*_below("progress", "chunks"), f"{CLIENT_INBOX}.>", f"{REPLIES}>", WORKERS),
        subscribe=(CANCEL_ORDERS, WORKERS),
    ),
    Grant(
        "breaker",
        publish=(
            *_below("breakers", "dlq"),
            *consumes(Stream.EVENTS, "breaker"),
            # When Redis was emptied, it rebuilds its state from what is stored.
            f"$JS.API.STREAM.INFO.{Stream.EVENTS}",
            END,
            *reads(Stream.EVENTS),
            HEALTH,
        ),
    ),
    Grant(
        "budget",
        publish=(
            *_below("budgets", "dlq"),
            *consumes(Stream.EVENTS, "budget"),
            # When Redis was emptied, it rebuilds its state from what is stored; otherwise it compares the two.
            *RECORD,
            *reads(Stream.EVENTS),
            HEALTH,
        ),
    ),
    Grant(
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
            HEALTH,
        ),
        serves=(CHANNEL_TESTS,),
    ),
    Grant(
        "sink",
        publish=(
            "bw.dlq.>",
            *consumes(Stream.EVENTS, "sink-events"),
            *consumes(Stream.ALERTS, "sink-alerts"),
            *consumes(Stream.AUDIT, "sink-audit"),
            # It compares ClickHouse with it.
            f"$JS.API.STREAM.INFO.{Stream.EVENTS}",
            *reads(Stream.EVENTS),
            HEALTH,
        ),
    ),
    Grant(
        "setup",
        # Neither deletes nor purges: neither an administrator's script nor a stolen password empties a stream.
        publish=(
            *_api("INFO", "STREAM.INFO.>", "STREAM.LIST", "STREAM.NAMES", "STREAM.CREATE.>", "STREAM.UPDATE.>"),
            *_api("CONSUMER.INFO.>", "CONSUMER.LIST.>", "CONSUMER.NAMES.>"),
            *_api("CONSUMER.CREATE.>", "CONSUMER.DURABLE.CREATE.>"),
            *reads(*Stream),
            "bw.jobs.*",
            # That another config is in force.
            *_below("alerts"),
            HEALTH,
        ),
    ),
    Grant(
        "client",
        publish=(
            _INFO,
            *(f"$JS.API.STREAM.INFO.{stream}" for stream in (Stream.EVENTS, Stream.ALERTS, Stream.RESULTS)),
            *reads(Stream.EVENTS, Stream.ALERTS, Stream.RESULTS),
        ),
        subscribe=(
            *_below(
                *("attempts", "executions", "breakers", "budgets", "guards", "alerts", "audit"),
                *("progress", "results", "chunks"),
            ),
            f"{CLIENT_INBOX}.>",
            f"{REPLIES}>",
        ),
        publish_as=(("bw.jobs.*", jobs_by("client")),),
        asks=(CANCELS,),
    ),
)
"""Every user of the plane."""

USERS = frozenset(grant.user for grant in GRANTS)


def password_variable(user: str) -> str:
    """The environment variable of a user's password in `compose.yaml`."""
    return f"BW_NATS_{user.upper().replace('-', '_')}_PASSWORD"


def render(grants: Sequence[Grant], password: Callable[[str], str]) -> str:
    """Renders the `accounts` block of a nats-server's config file.

    Args:
        grants: the users.
        password: gives the password of a user as it shall stand in the file: a quoted string, or `$VARIABLE`.
    """
    accounts: dict[str, list[Grant]] = {STREAMS_ACCOUNT: []}
    for grant in grants:
        accounts.setdefault(account(grant), []).append(grant)
    rendered = (_account(name, users, grants, password) for name, users in accounts.items())
    asking = ", ".join(dict.fromkeys(account(grant) for grant in grants if HEALTH in grant.publish))
    exports = _list("exports", [f"{{ {_service(HEALTH)}, accounts: [{asking}] }}"] if asking else [])
    return f"accounts {{\n{''.join(rendered)}  {SYSTEM_ACCOUNT} {{\n{exports}  }}\n}}\n"


def account(grant: Grant) -> str:
    """The name of the account that a user is in."""
    return STREAMS_ACCOUNT if grant.with_streams else grant.user


def _account(name: str, users: Sequence[Grant], grants: Iterable[Grant], password: Callable[[str], str]) -> str:
    """An account: its users, what they import, and what others may hear or ask of it."""
    others = [grant for grant in grants if grant not in users]
    imports = [
        _import("stream", account(other), subject)
        for other in others
        for user in users
        for subject in user.subscribe
        if any(_covers(own, subject) for own in (*other.publish, *other.sends))
    ]
    imports += [
        _import("service", account(other), subject)
        for other in others
        for user in users
        for subject in user.asks
        if subject in other.serves
    ]
    imports += [
        _import("service", account(other), becomes, own)
        for other in others
        for user in users
        for own, becomes in user.asks_as
        if any(_covers(served, becomes) for served in other.serves)
    ]
    exports: dict[str, list[str]] = {}
    for other in others:
        for subject in (subject for user in users for subject in user.serves if subject in other.asks):
            exports.setdefault(_service(subject), []).append(account(other))
        for _, becomes in other.asks_as:
            if any(_covers(served, becomes) for user in users for served in user.serves):
                exports.setdefault(_service(becomes), []).append(account(other))
        for subject in other.subscribe:
            for own in dict.fromkeys(own for user in users for own in (*user.publish, *user.sends)):
                if _covers(own, subject) and account(other) not in exports.setdefault(f'stream: "{own}"', []):
                    exports[f'stream: "{own}"'].append(account(other))
        if name == STREAMS_ACCOUNT:
            for subject in dict.fromkeys((_INFO, *_to_streams(other), *(becomes for _, becomes in other.publish_as))):
                exports.setdefault(_service(subject), []).append(account(other))
    if name != STREAMS_ACCOUNT:
        published = dict.fromkeys((_INFO, *(subject for user in users for subject in _to_streams(user))))
        imports += [_import("service", STREAMS_ACCOUNT, subject) for subject in published]
        imports += [
            _import("service", STREAMS_ACCOUNT, becomes, own) for user in users for own, becomes in user.publish_as
        ]
    if any(HEALTH in user.publish for user in users):
        imports.append(_import("service", SYSTEM_ACCOUNT, HEALTH))
    exported = [f"{{ {what}, accounts: [{', '.join(to)}] }}" for what, to in exports.items() if to]
    return (
        f"  {name} {{\n"
        + ("    jetstream: enabled\n" if name == STREAMS_ACCOUNT else "")
        + _limits(name)
        + _list("users", (_user(user, password(user.user)) for user in users))
        + _list("imports", imports)
        + _list("exports", exported)
        + "  }\n"
    )


def _limits(name: str) -> str:
    connections = CONNECTIONS_OF_A_PROGRAM if name.startswith(PROGRAM) else CONNECTIONS.get(name)
    if connections is None:
        return ""
    return f"    limits {{ max_connections: {connections}, max_subscriptions: {SUBSCRIPTIONS} }}\n"


def _to_streams(grant: Grant) -> tuple[str, ...]:
    return tuple(subject for subject in grant.publish if subject != HEALTH)


def _user(grant: Grant, password: str) -> str:
    hears = dict.fromkeys((f"{inbox_prefix(grant.user)}.>", *grant.subscribe, *grant.serves))
    own = (own for own, _ in (*grant.asks_as, *grant.publish_as))
    publishes = dict.fromkeys((*grant.publish, *grant.sends, *grant.asks, *own))
    answers = '\n        allow_responses: { max: 1, expires: "1m" }' if grant.serves else ""
    return f"""{{ user: {grant.user}, password: {password}, permissions: {{
        publish: {_allowed(publishes)}
        subscribe: {_allowed(hears)}{answers}
      }} }}"""


def _covers(pattern: str, subject: str) -> bool:
    """Whether all that matches `subject` matches `pattern`."""
    if pattern.endswith(".>"):
        return subject.startswith(pattern[:-1])
    patterns, tokens = pattern.split("."), subject.split(".")
    return len(patterns) == len(tokens) and all(
        one in ("*", token) for one, token in zip(patterns, tokens, strict=True)
    )


def _service(subject: str) -> str:
    # The servers answer each for itself; batches, and the messages of a pull, are many answers to one request; a get by
    # subject has one.
    many = subject == HEALTH or re.match(r"\$JS\.API\.(DIRECT\.GET\.\w+$|CONSUMER\.MSG\.NEXT\.)", subject)
    return f'service: "{subject}"' + (f', response: stream, threshold: "{_ANSWERS_WITHIN}"' if many else "")


def _import(kind: str, account: str, subject: str, own: str | None = None) -> str:
    to = "" if own is None else f', to: "{own}"'
    return f'{{ {kind}: {{ account: {account}, subject: "{subject}" }}{to} }}'


def _list(name: str, items: Iterable[str]) -> str:
    lines = [f"    {name}: [", *(f"      {item}" for item in items), "    ]"]
    return "\n".join(lines) + "\n"


def _allowed(subjects: Iterable[str]) -> str:
    # The server takes an empty list for "no restriction".
    listed = "".join(f'          "{subject}"\n' for subject in subjects)
    return f"{{ allow: [\n{listed}        ] }}" if listed else '{ deny: ">" }'


def with_variables(programs: Iterable[Grant] = ()) -> str:
    """The users of `compose.yaml`, whose passwords are in environment variables, and those of programs."""
    return render((*GRANTS, *programs), lambda user: f"${password_variable(user)}")


def main() -> None:
    """Writes the users of `compose.yaml` to stdout; `make contract` keeps them in `deploy/nats/users.conf`."""
    sys.stdout.write(f"# GENERATED from libs/breakwater/bus/permissions.py by `make contract`.\n{with_variables()}")


if __name__ == "__main__":
    main()
