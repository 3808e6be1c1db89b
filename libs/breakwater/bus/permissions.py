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
  `bw.jobs.<agent>.<user>`. Only services publish where the headers that say whose a job is are believed (ADR 0040).
- **A job's `reply_to` is an inbox of the programs or lies under `bw.replies`.** The worker may publish nowhere else, so
  a job can't make it forge an event or answer in the server's name.
- **Programs get no right to create consumers.** Who may create one on a stream may also change or drain those of our
  services. Programs subscribe to what happens, and read what is stored by direct get. One that wants a durable consumer
  of its own gets it from the administrator, and a user with `consumes(stream, name)`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from breakwater.bus import topology
from breakwater.contracts import subjects
from breakwater.contracts.subjects import (
    CANCELS,
    CANCELS_BY_USER,
    CHANNEL_TESTS,
    PROGRAM,
    REPLIES,
    WORKERS,
    Stream,
    covers,
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

_INFO = "$JS.API.INFO"
"""Imported by all, as the server gives an account that does not import it a JetStream of its own, which is off."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A NATS user and the only subjects it may use."""

    user: str
    publish: tuple[str, ...] = ()
    """What goes to the streams, or asks JetStream or the servers for something."""
    sends: tuple[str, ...] = ()
    """What is not stored: it goes to whoever listens, and a request to the user that serves it."""
    subscribe: tuple[str, ...] = ()
    """What it hears; its inbox is not among them."""
    serves: tuple[str, ...] = ()
    """Requests that it answers, each once."""
    publish_as: tuple[tuple[str, str], ...] = ()
    """What reaches a stream, or who serves it, under a subject that names the user: what it publishes to, and that."""
    with_streams: bool = False
    """Whether it is in the streams' own account, where its requests cost less and a reply subject reaches JetStream."""


def account(grant: Grant) -> str:
    """The name of the account that a user is in."""
    return STREAMS_ACCOUNT if grant.with_streams else grant.user


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
    tokens = [subjects.encode_token(agent) for agent in agents]
    events = _below(*(f"{kind}.{token}" for kind in ("executions", "breakers") for token in tokens))
    progress = _below(*(f"progress.{token}" for token in tokens))
    # Jobs have no agent in their ids: who asks to cancel one is added, and whose job it is, the worker looks at.
    cancels = (CANCELS, subjects.cancels_by(user))
    return Grant(
        user,
        publish=tuple(f"$JS.API.DIRECT.GET.{Stream.EVENTS}.{of}" for of in events),
        publish_as=(cancels, *((subjects.job(agent), subjects.job_by(agent, user)) for agent in agents)),
        subscribe=(*events, *progress, f"{CLIENT_INBOX}.{user}.>", f"{REPLIES}{user}.>"),
    )


def consumes(stream: Stream, *durables: str) -> tuple[str, ...]:
    """What to publish to for pulling from durable consumers and acknowledging; `*` stands for all of the stream's."""
    return tuple(
        subject
        for one in (f"{stream}.{durable}" for durable in durables)
        # Newer servers write the domain and the account in front of what they acknowledge.
        for subject in (*_progress(one), f"$JS.API.CONSUMER.MSG.NEXT.{one}", f"$JS.ACK.{one}.>", f"$JS.ACK.*.*.{one}.>")
    )


def reads(*streams: Stream) -> tuple[str, ...]:
    """What to publish to for direct gets: by sequence, by subject, and in batches."""
    return tuple(f"$JS.API.DIRECT.GET.{stream}{by}" for stream in streams for by in ("", ".>"))


def _facts(*streams: Stream) -> tuple[str, ...]:
    return tuple(f"$JS.API.STREAM.INFO.{stream}" for stream in streams)


def _progress(*consumers: str) -> tuple[str, ...]:
    return tuple(f"$JS.API.CONSUMER.INFO.{consumer}" for consumer in consumers)


def _below(*kinds: str) -> tuple[str, ...]:
    """All of our subjects of some kinds: `bw.<kind>.>`."""
    return tuple(f"bw.{kind}.>" for kind in kinds)


_PARKED = f"$JS.API.DIRECT.GET.{Stream.PARKED}.>"
"""A job that sleeps, by its id."""

_EVENTS_END = f"$JS.API.STREAM.MSG.GET.{Stream.EVENTS}"
"""What the last event of a kind is, as the leader knows: a direct get is answered by a replica that may be behind."""

_RECORD = (*_facts(Stream.EVENTS), _EVENTS_END, *_progress("EVENTS.sink-events", "EVENTS.budget"))
"""What the record of attempts is, and up to where it is stored and counted."""

GRANTS = (
    Grant(
        "request",
        publish=(
            # A job; what an operator resets, or forces open; caps that an operator raises.
            "bw.jobs.*",
            *_below("breakers", "guards", "budgets"),
            *reads(Stream.EVENTS, Stream.RESULTS, Stream.DLQ),
            # How full they are; how many bytes of JOBS each agent's jobs take.
            *_facts(Stream.JOBS, Stream.RESULTS),
            *reads(Stream.JOBS),
            # A job that sleeps is put back into its queue when it is cancelled.
            _PARKED,
            # Dead letters: how many there are, and which of them were run again.
            *_facts(Stream.DLQ),
            "bw.replayed.*",
            # Incidents that an operator acknowledges or resolves; what a channel is to send again; what people do.
            *_below("alerts", "alerter.replays", "audit"),
            *_facts(Stream.ALERTS),
            *reads(Stream.ALERTS, Stream.ALERTER),
            # It compares the budgets with the record on request.
            *_RECORD,
            # How much waits for workers and services. Agents and channels have a consumer each, of their names.
            *_progress("JOBS.*", "ALERTS.*", f"PARKED.{topology.PARKED_CONSUMER}", "EVENTS.breaker"),
            *_progress(f"EVENTS.{topology.ALERTER_EVENTS}", f"EVENTS.{topology.ALERTER_EXECUTIONS}"),
            *_progress(f"DLQ.{topology.ALERTER_DEAD_LETTERS}", f"ALERTER.{topology.ALERTER_REPLAYS}"),
            *_progress("AUDIT.sink-audit"),
            HEALTH,
        ),
        sends=(*_below("progress", "cancel-requests"), CHANNEL_TESTS),
        subscribe=_below("results", "progress", "chunks"),
        serves=(CANCELS, CANCELS_BY_USER),
    ),
    Grant(
        "worker",
        with_streams=True,
        publish=(
            # Breakers: from open to half-open, when it takes the probe.
            *_below("attempts", "executions", "breakers", "guards", "results", "dlq"),
            # All consumers of JOBS are the worker's, one for each agent: a new agent needs no new grant.
            *consumes(Stream.JOBS, "*"),
            # A job that has to wait for long is parked, and put back into its queue when it is due,
            "bw.parked.>",
            *consumes(Stream.PARKED, topology.PARKED_CONSUMER),
            "bw.jobs.*",
            # or when the job that it waits for has ended.
            _PARKED,
            # JOBS: what a worker had that has died.
            *reads(Stream.EVENTS, Stream.RESULTS, Stream.JOBS),
            HEALTH,
        ),
        # The last, to see whether another worker is connected.
        sends=(*_below("progress", "chunks"), f"{CLIENT_INBOX}.>", f"{REPLIES}>", WORKERS),
        subscribe=(subjects.CANCEL_REQUESTS, WORKERS),
    ),
    Grant(
        "breaker",
        publish=(
            *_below("breakers", "dlq"),
            *consumes(Stream.EVENTS, "breaker"),
            # When Redis was emptied, it rebuilds its state from what is stored.
            *_facts(Stream.EVENTS),
            _EVENTS_END,
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
            *_RECORD,
            *reads(Stream.EVENTS),
            HEALTH,
        ),
    ),
    Grant(
        "alerter",
        publish=(
            *_below("alerts", "dlq"),
            *consumes(Stream.EVENTS, topology.ALERTER_EVENTS, topology.ALERTER_EXECUTIONS),
            *consumes(Stream.DLQ, topology.ALERTER_DEAD_LETTERS),
            # Each channel has a consumer of its name: a new channel needs no new grant.
            *consumes(Stream.ALERTS, "*"),
            # What it has to remember: who leads, which messages it may update, baselines.
            subjects.ALERTER_LEADER,
            *_below("alerter.sent", "alerter.disabled", "alerter.baselines"),
            *consumes(Stream.ALERTER, topology.ALERTER_REPLAYS),
            *_facts(Stream.ALERTS),
            *reads(Stream.ALERTS, Stream.ALERTER),
            HEALTH,
        ),
        serves=(CHANNEL_TESTS,),
    ),
    Grant(
        "sink",
        publish=(
            *_below("dlq"),
            *consumes(Stream.EVENTS, "sink-events"),
            *consumes(Stream.ALERTS, "sink-alerts"),
            *consumes(Stream.AUDIT, "sink-audit"),
            # It compares ClickHouse with it.
            *_facts(Stream.EVENTS),
            *reads(Stream.EVENTS),
            HEALTH,
        ),
    ),
    Grant(
        "setup",
        # Neither deletes nor purges: neither an administrator's script nor a stolen password empties a stream.
        publish=(
            _INFO,
            *(f"$JS.API.STREAM.{call}" for call in ("INFO.>", "LIST", "NAMES", "CREATE.>", "UPDATE.>")),
            *(f"$JS.API.CONSUMER.{call}.>" for call in ("INFO", "LIST", "NAMES", "CREATE", "DURABLE.CREATE")),
            # Jobs that were dead letters; that another config is in force.
            *reads(*Stream),
            "bw.jobs.*",
            *_below("alerts"),
            HEALTH,
        ),
    ),
    Grant(
        "client",
        publish=(
            _INFO,
            *_facts(Stream.EVENTS, Stream.ALERTS, Stream.RESULTS),
            *reads(Stream.EVENTS, Stream.ALERTS, Stream.RESULTS),
        ),
        sends=(CANCELS,),
        subscribe=(
            *_below("attempts", "executions", "breakers", "budgets", "guards", "alerts", "audit"),
            *_below("progress", "results", "chunks"),
            f"{CLIENT_INBOX}.>",
            f"{REPLIES}>",
        ),
        publish_as=(("bw.jobs.*", subjects.jobs_by("client")),),
    ),
)
"""Every user of the plane."""

USERS = frozenset(grant.user for grant in GRANTS)


def render(grants: Sequence[Grant], password: Callable[[str], str]) -> str:
    """Renders the `accounts` block of a nats-server's config file.

    Args:
        grants: the users.
        password: gives the password of a user as it shall stand in the file: a quoted string, or `$VARIABLE`.
    """
    crossings = tuple(_crossings(grants))
    rendered: list[str] = []
    for name in dict.fromkeys((STREAMS_ACCOUNT, *map(account, grants))):
        own = CONNECTIONS_OF_A_PROGRAM if name.startswith(PROGRAM) else CONNECTIONS.get(name)
        imports = dict.fromkeys(imported for _, _, taker, imported in crossings if taker == name)
        rendered += [
            f"  {name} {{\n",
            "    jetstream: enabled\n" if name == STREAMS_ACCOUNT else "",
            f"    limits {{ max_connections: {own}, max_subscriptions: {SUBSCRIPTIONS} }}\n" if own else "",
            _list("users", (_user(one, password(one.user)) for one in grants if account(one) == name)),
            # Streams first, then services; each in the order of the grants.
            _list("imports", sorted(imports, key=lambda imported: imported.startswith("{ service:"))),
            _exports(name, crossings),
            "  }\n",
        ]
    return f"accounts {{\n{''.join(rendered)}  {SYSTEM_ACCOUNT} {{\n{_exports(SYSTEM_ACCOUNT, crossings)}  }}\n}}\n"


_Crossing = tuple[str, str, str, str]
"""What one account takes from another: who gives, what it exports, who takes, and what that imports."""


def _crossings(grants: Sequence[Grant]) -> Iterator[_Crossing]:
    served = [subject for grant in grants for subject in grant.serves]
    for user in grants:
        taker = account(user)
        asks = (*((subject, subject) for subject in user.sends), *user.publish_as)
        for other in grants:
            if (giver := account(other)) == taker:
                continue
            for own, asked in asks:
                if any(covers(one, asked) for one in other.serves):
                    yield giver, _service(asked), taker, _import("service", giver, asked, own)
            for heard in user.subscribe:
                for given in (*other.publish, *other.sends):
                    if covers(given, heard):
                        yield giver, f'stream: "{given}"', taker, _import("stream", giver, heard, heard)
        if taker != STREAMS_ACCOUNT:
            to_streams = [(one, one) for one in (_INFO, *user.publish) if one != HEALTH]
            to_streams += [(own, one) for own, one in user.publish_as if not any(covers(of, one) for of in served)]
            for own, asked in to_streams:
                yield STREAMS_ACCOUNT, _service(asked), taker, _import("service", STREAMS_ACCOUNT, asked, own)
        if HEALTH in user.publish:
            yield SYSTEM_ACCOUNT, _service(HEALTH), taker, _import("service", SYSTEM_ACCOUNT, HEALTH, HEALTH)


def _service(subject: str) -> str:
    # The servers answer each for itself; batches, and the messages of a pull, are many answers to one request; a get by
    # subject has one. For how long the server remembers where they go: longer than any pull waits.
    many = subject == HEALTH or re.match(r"\$JS\.API\.(DIRECT\.GET\.\w+$|CONSUMER\.MSG\.NEXT\.)", subject)
    return f'service: "{subject}"' + (', response: stream, threshold: "1m"' if many else "")


def _import(kind: str, giver: str, subject: str, own: str) -> str:
    """`own`: what it is called in the account that imports it."""
    to = "" if own == subject else f', to: "{own}"'
    return f'{{ {kind}: {{ account: {giver}, subject: "{subject}" }}{to} }}'


def _exports(name: str, crossings: Iterable[_Crossing]) -> str:
    takers: dict[str, dict[str, None]] = {}
    for giver, exported, taker, _ in crossings:
        if giver == name:
            takers.setdefault(exported, {})[taker] = None
    return _list("exports", (f"{{ {what}, accounts: [{', '.join(to)}] }}" for what, to in takers.items()))


def _user(grant: Grant, password: str) -> str:
    hears = (f"{inbox_prefix(grant.user)}.>", *grant.subscribe, *grant.serves)
    publishes = (*grant.publish, *grant.sends, *(own for own, _ in grant.publish_as))
    answers = '\n        allow_responses: { max: 1, expires: "1m" }' if grant.serves else ""
    return f"""{{ user: {grant.user}, password: {password}, permissions: {{
        publish: {_allowed(publishes)}
        subscribe: {_allowed(hears)}{answers}
      }} }}"""


def _allowed(allowed: Iterable[str]) -> str:
    # The server takes an empty list for "no restriction".
    listed = "".join(f'          "{subject}"\n' for subject in dict.fromkeys(allowed))
    return f"{{ allow: [\n{listed}        ] }}" if listed else '{ deny: ">" }'


def _list(name: str, items: Iterable[str]) -> str:
    return "\n".join((f"    {name}: [", *(f"      {item}" for item in items), "    ]\n"))


def with_variables(programs: Iterable[Grant] = ()) -> str:
    """The users of `compose.yaml`, whose passwords are in environment variables, and those of programs."""
    return render((*GRANTS, *programs), lambda user: f"$BW_NATS_{user.upper().replace('-', '_')}_PASSWORD")


def main() -> None:
    """Writes the users of `compose.yaml` to stdout; `make contract` keeps them in `deploy/nats/users.conf`."""
    sys.stdout.write(f"# GENERATED from libs/breakwater/bus/permissions.py by `make contract`.\n{with_variables()}")


if __name__ == "__main__":
    main()
