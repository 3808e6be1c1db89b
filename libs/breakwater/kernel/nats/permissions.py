"""Permissions on the bus, as data: one NATS user for each service, and the account that it is in.

| user | for |
|---|---|
| `request` … `sink` | the service of that name |
| `setup` | the administrator: creates and updates streams and consumers, reads all streams, puts dead letters back |
| `client` | programs: publish jobs; subscribe to answers, alerts and events |
| `program-<name>` | a program of the config's `programs`: jobs, answers and events of its own agents, and no others |

NATS checks the subject of a request but not its reply subject: within an account, a user that may ask for anything can
have the server publish the answer wherever it likes, such as on `$JS.API.STREAM.DELETE.EVENTS`. So the streams are in
an account, `plane`, from which the account of each user imports the subjects that the user may publish to; and it
imports the subjects that the user may hear from the accounts of those that publish them. A reply subject means nothing
outside the account of the user that asks. Only `worker` is in the streams' account, which is trust in it (ADR 0040).

Four more decisions that the grants follow:

- **Replies are private.** Every user of ours has its own inbox prefix (`_INBOX_worker`), and connects with it, so that
  no service receives replies to another one. Programs keep their library's default (`_INBOX`).
- **A job's subject names its sender.** A job that a program publishes on `bw.jobs.<agent>` comes to JOBS on
  `bw.jobs.<agent>.<user>`. Only services publish where the headers that name a job's owner are believed (ADR 0040).
- **A job's `reply_to` is an inbox of the programs or lies under `bw.replies`.** The worker may publish nowhere else, so
  a job can't make it forge an event or answer in the server's name.
- **Programs get no right to create consumers.** A user that may create one on a stream may also change or drain those
  of our services. Programs subscribe to events, and read what is stored by direct get. One that wants a durable
  consumer of its own gets it from the administrator, and a user with `consumes(stream, name)`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from breakwater.kernel.nats import subjects, topology
from breakwater.kernel.nats.subjects import (
    AGENTS,
    AGENTS_BY_USER,
    API_KEYS,
    CANCELS,
    CANCELS_BY_USER,
    CHANNEL_TESTS,
    KEY_CHANGES,
    LIMIT_CHANGES,
    LIMIT_SETTINGS,
    NEW_CALLERS,
    PROGRAM,
    REPLIES,
    WAITING_CALLERS,
    WORKERS,
    Stream,
    covers,
)

CLIENT_INBOX = "_INBOX"

STREAMS_ACCOUNT = "plane"
"""The account of the streams, where a reply subject reaches JetStream."""

SYSTEM_ACCOUNT = "$SYS"
"""The account in which the servers themselves respond. It has no users. It keeps its default name, so that the nodes of
a cluster share it while they are being restarted."""

CONNECTIONS = {"client": 256}
"""The most connections that programs without a name of their own may have, by their NATS user."""

CONNECTIONS_OF_A_PROGRAM = 64
"""The most connections that a named program may have."""

SUBSCRIPTIONS = 500
"""The most subscriptions on each connection of a program. A subscription takes 2 kB of the server's memory."""

HEALTH = "$SYS.REQ.SERVER.PING.HEALTHZ"
"""The health of each server, and its error."""

_INFO = "$JS.API.INFO"
"""Imported by every account: without it, the server would give the account a JetStream of its own, which is off."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A NATS user, and the only subjects that it may use."""

    user: str
    publish: tuple[str, ...] = ()
    """Subjects of the streams, and requests to JetStream or the servers."""
    sends: tuple[str, ...] = ()
    """Subjects that are not stored: for all subscribers, or requests to the user that serves them."""
    subscribe: tuple[str, ...] = ()
    """Subjects that it subscribes to, apart from its inbox."""
    serves: tuple[str, ...] = ()
    """Subjects of requests that it answers, each once."""
    delivered: tuple[str, ...] = ()
    """Subjects in the streams' account on which the servers send what it has asked for."""
    delivers: tuple[str, ...] = ()
    """Subjects that reach the servers in the streams' account unchanged; a request gets a header on its way."""
    publish_as: tuple[tuple[str, str], ...] = ()
    """Pairs of subjects: the one that the user publishes to, and the one that the stream or the serving user sees,
    which names the sender."""
    with_streams: bool = False
    """True if the user is in the streams' account, where requests cost less and reply subjects reach JetStream."""

    @property
    def account(self) -> str:
        """The name of the account that the user is in."""
        return STREAMS_ACCOUNT if self.with_streams else self.user


def inbox_prefix(user: str) -> str:
    """The prefix of the subjects of replies to a user: the `inbox_prefix` to connect with."""
    if user == "client":
        return CLIENT_INBOX
    # An answer goes where the job's `reply_to` says, which the worker takes only below the programs' prefix.
    return f"{CLIENT_INBOX}.{user}" if user.startswith(PROGRAM) else f"_INBOX_{user}"


def program(name: str, agents: Iterable[str]) -> Grant:
    """The user of a program that may use some agents only.

    It may not subscribe to `bw.results.<job>`, which names no agent, nor to `bw.chunks.<agent>.<execution>`, which is
    not redacted: its answers arrive at its `reply_to`, which is its inbox or a subject below
    `bw.replies.program-<name>`. Nor may it subscribe to `bw.attempts` and `bw.guards`, which show limits and what is
    left of them. The job's record contains the attempts without these figures.
    """
    user = f"{PROGRAM}{name}"
    agents = tuple(agents)
    tokens = [subjects.encode_token(agent) for agent in agents]
    events = _below(*(f"{kind}.{token}" for kind in ("executions", "breakers") for token in tokens))
    progress = _below(*(f"progress.{token}" for token in tokens))
    # A job's id names no agent. The subject of a cancel names its sender, and the worker checks whose job it is.
    requests = ((CANCELS, subjects.cancels_by(user)), (AGENTS, subjects.agents_by(user)))
    return Grant(
        user,
        publish=tuple(f"$JS.API.DIRECT.GET.{Stream.EVENTS}.{event_subject}" for event_subject in events),
        publish_as=(
            *requests,
            *((subjects.job(agent), subjects.job_by(agent, user)) for agent in agents),
        ),
        subscribe=(*events, *progress, f"{CLIENT_INBOX}.{user}.>", f"{REPLIES}{user}.>"),
    )


def consumes(stream: Stream, *durables: str) -> tuple[str, ...]:
    """The subjects to publish to for pulling from durable consumers and acknowledging; `*` is all of the stream's."""
    return tuple(
        subject
        for consumer in (f"{stream}.{durable}" for durable in durables)
        # Newer servers put the domain and the account in front of the subject of an acknowledgement.
        for subject in (
            *_progress(consumer),
            f"$JS.API.CONSUMER.MSG.NEXT.{consumer}",
            f"$JS.ACK.{consumer}.>",
            f"$JS.ACK.*.*.{consumer}.>",
        )
    )


def reads(*streams: Stream) -> tuple[str, ...]:
    """The subjects to publish to for direct gets: by sequence, by subject, and in batches."""
    return tuple(f"$JS.API.DIRECT.GET.{stream}{by}" for stream in streams for by in ("", ".>"))


def _all(template: str) -> Callable[..., tuple[str, ...]]:
    return lambda *names: tuple(template.format(name) for name in names)


_facts = _all("$JS.API.STREAM.INFO.{}")
_progress = _all("$JS.API.CONSUMER.INFO.{}")
_below = _all("bw.{}.>")

_PARKED = f"$JS.API.DIRECT.GET.{Stream.PARKED}.>"
"""A job that sleeps, by its id."""

_BODIES = (f"{subjects.BODIES}.>", f"$JS.API.STREAM.MSG.DELETE.{Stream.BODIES}")
"""The chunks and descriptions of large bodies of jobs, also to remove them, even while the object store is full."""

_BODIES_END = f"$JS.API.STREAM.MSG.GET.{Stream.BODIES}"
"""The last chunk of a body, as the leader knows it: a body that a replica lacks is not lost."""

_EVENTS_END = f"$JS.API.STREAM.MSG.GET.{Stream.EVENTS}"
"""The last event of a kind, as the leader knows it: the replica that answers a direct get may lag."""

_RESPONSES_END = f"$JS.API.STREAM.MSG.GET.{Stream.RESPONSES}"
"""The same of a stored answer's chunks."""

_LIMITS = (*_facts(Stream.LIMITS), *reads(Stream.LIMITS), f"$JS.API.STREAM.MSG.GET.{Stream.LIMITS}")
"""Limits that are set by the API, with the last change as the leader knows it."""

_RECORD = (*_facts(Stream.EVENTS), _EVENTS_END, *_progress("EVENTS.sink-events", "EVENTS.budget"))
"""The record of attempts, and up to where it is stored and counted."""

GRANTS = (
    Grant(
        "request",
        publish=(
            # Jobs; breakers and tasks that an operator resets, or forces open; limits that an operator sets or raises.
            # Jobs of callers whose jobs wait for their turn go to where they wait.
            "bw.jobs.*",
            "bw.parked.>",
            *_below("breakers", "guards", "budgets", "plans", "limits"),
            *reads(Stream.EVENTS, Stream.RESULTS, Stream.DLQ),
            # Large bodies of jobs, and of dead letters that are shown or replayed.
            *_BODIES,
            *reads(Stream.BODIES),
            _BODIES_END,
            # Stored responses, and the notes that they were deleted.
            *_below("responses"),
            *reads(Stream.RESPONSES),
            _RESPONSES_END,
            # Their fill levels; the bytes of JOBS that each agent's jobs take.
            *_facts(Stream.JOBS, Stream.PARKED, Stream.RESULTS, Stream.RESPONSES, Stream.BODIES),
            *reads(Stream.JOBS),
            # Parked jobs are listed, and put back into their queues when they are cancelled.
            *reads(Stream.PARKED),
            # The number of dead letters, and those of them that were run again or dismissed.
            *_facts(Stream.DLQ),
            "bw.replayed.*",
            *_below("dismissed"),
            # Incidents that an operator acknowledges or resolves; alerts to be sent again; the audit log.
            *_below("alerts", "alerter.replays", "audit"),
            *_facts(Stream.ALERTS),
            *reads(Stream.ALERTS, Stream.ALERTER),
            # It compares the budgets with the record on request.
            *_RECORD,
            # Backlogs of workers and services. Agents and channels have a consumer each, of their names.
            *_progress("JOBS.*", "ALERTS.*", f"PARKED.{topology.PARKED_CONSUMER}", "EVENTS.breaker"),
            *_progress(f"EVENTS.{topology.ALERTER_EVENTS}", f"EVENTS.{topology.ALERTER_EXECUTIONS}"),
            *_progress(f"DLQ.{topology.ALERTER_DEAD_LETTERS}", f"ALERTER.{topology.ALERTER_REPLAYS}"),
            *_progress("AUDIT.sink-audit"),
            # API keys, with the last change as the leader knows it: the replica that answers a direct get may lag.
            API_KEYS,
            *_facts(Stream.KEYS),
            *reads(Stream.KEYS),
            f"$JS.API.STREAM.MSG.GET.{Stream.KEYS}",
            LIMIT_SETTINGS,
            *_LIMITS,
            HEALTH,
        ),
        # The last ones, to the other processes that follow keys and limits.
        sends=(*_below("cancel-requests"), CHANNEL_TESTS, NEW_CALLERS, KEY_CHANGES, LIMIT_CHANGES),
        subscribe=(*_below("results", "progress", "chunks"), WAITING_CALLERS, KEY_CHANGES, LIMIT_CHANGES),
        serves=(CANCELS, CANCELS_BY_USER, AGENTS, AGENTS_BY_USER),
    ),
    Grant(
        "worker",
        with_streams=True,
        publish=(
            # Breakers: from open to half-open, when it takes the probe.
            *_below("attempts", "executions", "breakers", "guards", "plans", "results", "dlq"),
            # Bodies of jobs, which it removes when the jobs have ended, and keeps for dead letters.
            *_BODIES,
            *reads(Stream.BODIES),
            _BODIES_END,
            *_facts(Stream.BODIES),
            # Chunks that are kept, and the last of them, as the leader knows.
            "bw.responses.*.chunks",
            *reads(Stream.RESPONSES),
            _RESPONSES_END,
            # All consumers of JOBS are the worker's, one for each agent: a new agent needs no new grant.
            *consumes(Stream.JOBS, "*"),
            # A job that has to wait for long is parked, and put back into its queue when it is due,
            "bw.parked.>",
            *consumes(Stream.PARKED, topology.PARKED_CONSUMER),
            "bw.jobs.*",
            # or when the job that it waits for has ended.
            _PARKED,
            # Consumers that are deleted are created again, and reported.
            *(f"$JS.API.CONSUMER.LIST.{stream}" for stream in topology.CONSUMED),
            *(f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.*" for stream in topology.CONSUMED),
            *_facts(*topology.CONSUMED),
            *_below("alerts"),
            *reads(Stream.ALERTS),
            # JOBS: the jobs of a worker that has died.
            *reads(Stream.EVENTS, Stream.RESULTS, Stream.JOBS),
            *_LIMITS,
            HEALTH,
        ),
        # The last, to see whether another worker is connected.
        sends=(*_below("progress", "chunks"), f"{CLIENT_INBOX}.>", f"{REPLIES}>", WAITING_CALLERS, WORKERS),
        subscribe=(subjects.CANCEL_REQUESTS, NEW_CALLERS, WORKERS, LIMIT_CHANGES),
    ),
    Grant(
        "breaker",
        publish=(
            *_below("breakers", "shadow-breakers"),
            # Jobs that probe breakers to which no call comes.
            "bw.jobs.*",
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
            *_below("budgets", "shadow-budgets"),
            *consumes(Stream.EVENTS, "budget"),
            # When Redis was emptied, it rebuilds its state from what is stored; otherwise it compares the two.
            *_RECORD,
            *reads(Stream.EVENTS),
            *_LIMITS,
            HEALTH,
        ),
        subscribe=(LIMIT_CHANGES,),
    ),
    Grant(
        "alerter",
        publish=(
            *_below("alerts", "dlq"),
            *consumes(Stream.EVENTS, topology.ALERTER_EVENTS, topology.ALERTER_EXECUTIONS),
            *consumes(Stream.DLQ, topology.ALERTER_DEAD_LETTERS),
            # Each channel has a consumer of its name: a new channel needs no new grant.
            *consumes(Stream.ALERTS, "*"),
            # Its memory: the leader, the messages that it may update.
            subjects.ALERTER_LEADER,
            *_below("alerter.sent", "alerter.disabled"),
            *consumes(Stream.ALERTER, topology.ALERTER_REPLAYS),
            *_facts(Stream.ALERTS),
            *reads(Stream.ALERTS, Stream.ALERTER),
            # Whether ClickHouse has got anything since it was last asked for anomalies.
            *_facts(Stream.EVENTS),
            *_progress("EVENTS.sink-events"),
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
            # The incident that ClickHouse stores nothing.
            *_below("alerts"),
            *_facts(Stream.ALERTS),
            *reads(Stream.ALERTS),
            HEALTH,
        ),
    ),
    Grant(
        "setup",
        # It neither deletes nor purges streams, but can empty them: NATS does not look into an update, whose limits
        # (`max_msgs: 1`) remove messages, and JOBS is updated for each new agent; nor into a request for a copy, which
        # it delivers wherever that says. So no program or service has it.
        publish=(
            _INFO,
            *(f"$JS.API.STREAM.{call}" for call in ("INFO.>", "LIST", "NAMES", "CREATE.>", "UPDATE.>")),
            *(f"$JS.API.CONSUMER.{call}.>" for call in ("INFO", "LIST", "NAMES", "CREATE", "DURABLE.CREATE")),
            # Backups: it may read all streams so. A restore creates streams, and refuses those that exist.
            *(f"$JS.API.STREAM.{call}.>" for call in ("SNAPSHOT", "RESTORE")),
            "$JS.SNAPSHOT.ACK.>",
            # Jobs that were dead letters; the alert that another config is effective.
            *reads(*(stream for stream in Stream if stream is not Stream.KEYS)),
            *_below("jobs", "parked", "alerts"),
            # `breakwater erase`: the last message of each stream, as the leader knows it, and single ones to delete.
            *(f"$JS.API.STREAM.MSG.GET.{stream}" for stream in Stream if stream is not Stream.KEYS),
            *(f"$JS.API.STREAM.MSG.DELETE.{stream}" for stream in topology.WITH_TEXTS),
            "bw-filler.*",
            *_below("audit"),
            HEALTH,
        ),
        delivered=(subjects.SNAPSHOTS,),
        delivers=(subjects.RESTORED,),
    ),
    Grant(
        "client",
        publish=(
            _INFO,
            *_facts(Stream.EVENTS, Stream.ALERTS, Stream.RESULTS),
            *reads(Stream.EVENTS, Stream.ALERTS, Stream.RESULTS),
        ),
        sends=(CANCELS, AGENTS),
        subscribe=(
            *_below("attempts", "executions", "breakers", "budgets", "guards", "plans", "limits", "alerts", "audit"),
            *_below("progress", "results", "chunks", "shadow-breakers", "shadow-budgets"),
            f"{CLIENT_INBOX}.>",
            f"{REPLIES}>",
        ),
        publish_as=(("bw.jobs.*", subjects.jobs_by("client")),),
    ),
)
"""Every user of the plane."""

USERS = frozenset(grant.user for grant in GRANTS)


def render(grants: Sequence[Grant], password: Callable[[str], str]) -> str:
    """Renders the accounts of a nats-server's config file, which takes JSON.

    Args:
        grants: the users.
        password: gives the password of a user in the file's format: a quoted string, or `$VARIABLE`.
    """
    accounts: dict[str, dict[str, Any]] = {STREAMS_ACCOUNT: {"jetstream": "enabled"}}
    for grant in grants:
        account = accounts.setdefault(grant.account, {})
        connections = CONNECTIONS_OF_A_PROGRAM if grant.user.startswith(PROGRAM) else CONNECTIONS.get(grant.user)
        if connections is not None:
            account["limits"] = {"max_connections": connections, "max_subscriptions": SUBSCRIPTIONS}
        account.setdefault("users", []).append(_user(grant))
    # These requests get several responses: each server reports its health, and a batch or a pull delivers many
    # messages. A get by subject gets one. The server remembers the requester for the threshold, longer than any pull.
    streamed = re.compile(rf"{re.escape(HEALTH)}|\$JS\.API\.(DIRECT\.GET\.\w+$|CONSUMER\.MSG\.NEXT\.)")
    exports: dict[tuple[str, str, str], dict[str, Any]] = {}
    for importer, local_subject, exporter, kind, exported, imported in _crossings(grants):
        answers = {"response": "stream", "threshold": "1m"} if streamed.match(exported) else {}
        export = exports.setdefault((exporter, kind, exported), {kind: exported, **answers, "accounts": []})
        export["accounts"] += [importer] if importer not in export["accounts"] else []
        import_ = {
            kind: {"account": exporter, "subject": imported},
            **({"to": local_subject} if local_subject != imported else {}),
        }
        imports = accounts[importer].setdefault("imports", [])
        imports += [import_] if import_ not in imports else []
    for (exporter, *_), export in exports.items():
        accounts.setdefault(exporter, {}).setdefault("exports", []).append(export)
    return re.sub(
        r'"password of (.+?)"', lambda placeholder: password(placeholder[1]), f"accounts: {_dump(accounts)}\n"
    )


def _crossings(grants: Sequence[Grant]) -> Iterator[tuple[str, str, str, str, str, str]]:
    """Yields the subjects that accounts import from others.

    Each is a tuple: the importing account, the subject's name there, the exporting account, the kind of export
    (`service` or `stream`), the exported subject, and the part of it that is imported.
    """
    served = [subject for grant in grants for subject in grant.serves]
    for grant in grants:
        importer = grant.account
        requested = (*((subject, subject) for subject in grant.sends), *grant.publish_as)
        for exporting in grants:
            if (exporter := exporting.account) == importer:
                continue
            for local_subject, subject in requested:
                if any(covers(served_subject, subject) for served_subject in exporting.serves):
                    yield importer, local_subject, exporter, "service", subject, subject
            for heard in grant.subscribe:
                for published in (*exporting.publish, *exporting.sends):
                    if covers(published, heard):
                        yield importer, heard, exporter, "stream", published, heard
        for subject in grant.delivered:
            yield importer, subject, STREAMS_ACCOUNT, "stream", subject, subject
        for subject in grant.delivers:
            yield STREAMS_ACCOUNT, subject, importer, "stream", subject, subject
        if not grant.with_streams:
            to_streams = [(subject, subject) for subject in (_INFO, *grant.publish) if subject != HEALTH]
            to_streams += [
                (local_subject, subject)
                for local_subject, subject in grant.publish_as
                if not any(covers(served_subject, subject) for served_subject in served)
            ]
            for local_subject, subject in to_streams:
                yield importer, local_subject, STREAMS_ACCOUNT, "service", subject, subject
        if HEALTH in grant.publish:
            yield importer, HEALTH, SYSTEM_ACCOUNT, "service", HEALTH, HEALTH


def _user(grant: Grant) -> dict[str, Any]:
    publishes = dict.fromkeys(
        (*grant.publish, *grant.sends, *grant.delivers, *(local_subject for local_subject, _ in grant.publish_as))
    )
    hears = dict.fromkeys((f"{inbox_prefix(grant.user)}.>", *grant.subscribe, *grant.serves, *grant.delivered))
    permissions = {
        # To the server, an empty list means "no restriction".
        "publish": {"allow": list(publishes)} if publishes else {"deny": ">"},
        "subscribe": {"allow": list(hears)},
        **({"allow_responses": {"max": 1, "expires": "1m"}} if grant.serves else {}),
    }
    return {"user": grant.user, "password": f"password of {grant.user}", "permissions": permissions}


def _dump(value: Any, indent: str = "") -> str:
    """JSON with a line for each item of a value that is too long for one line."""
    line = json.dumps(value)
    further = f"{indent}  "
    if len(indent + line) <= 120 or not isinstance(value, dict | list):
        return line
    if isinstance(value, dict):
        items = [f"{json.dumps(name)}: {_dump(item, further)}" for name, item in value.items()]
    else:
        items = [_dump(item, further) for item in value]
    return f",\n{further}".join([f"{line[0]}\n{further}{items[0]}", *items[1:]]) + f"\n{indent}{line[-1]}"


def with_variables(programs: Iterable[Grant] = ()) -> str:
    """The users of `compose.yaml`, whose passwords are in environment variables, and those of programs."""
    return render((*GRANTS, *programs), lambda user: f"$BW_NATS_{user.upper().replace('-', '_')}_PASSWORD")


def main() -> None:
    """Writes the users of `compose.yaml` to stdout; `make contract` keeps them in `deploy/nats/users.conf`."""
    source = "libs/breakwater/kernel/nats/permissions.py"
    sys.stdout.write(f"# GENERATED from {source} by `make contract`.\n{with_variables()}")


if __name__ == "__main__":
    main()
