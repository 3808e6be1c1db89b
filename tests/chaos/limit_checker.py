"""Checks what a plane has admitted, refused and recorded against the limits and keys that it had at each moment.

A pure decision: `violations` reads an `Evidence`, and returns a sentence for each promise that was broken. A change is
in force from the moment at which its caller was told so; between the request and that answer, either state may be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

CLOCK_S = 0.002
"""The precision of recorded times."""
ASKED_S = 1.0
"""A refusal was decided at most so long before it was recorded as complete."""
EACH = "*"
UNLIMITED = 2**63

Place = tuple[tuple[str, ...], str]
"""The kinds of a scope and the window in which it counts: `(("user", "team"), "daily")`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A change of a limit.

    Attributes:
        amount: nano-dollars; `UNLIMITED` where it refuses nothing, which a limit on each name does not change; None
            where it is deleted.
        begun_s: when it was asked for, in seconds since the epoch, as all times here.
        ended_s: when the answer came that it is in force; infinite without one.
    """

    amount: int | None
    begun_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class AdmittedCall:
    """A call that was admitted, and cost what it had reserved.

    Attributes:
        attempt_id: of the call.
        from_s: when it was admitted at the earliest.
        by_s: when it was admitted at the latest; the same, unless its worker was killed before it could say when.
        cost: in nano-dollars.
        names: those under which it counts, by their kinds.
    """

    attempt_id: str
    from_s: float
    by_s: float
    cost: int
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """A call that a limit has refused for good."""

    attempt_id: str
    at_s: float
    place: Place
    scope: tuple[str, ...]
    """The names of the scope."""
    cost: int


@dataclass(slots=True)
class Secret:
    """A secret of a key: valid from `made_s` until `end_begun_s` for sure, and for sure not after `ended_s`."""

    key: str
    made_s: float
    end_begun_s: float = float("inf")
    ended_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request with a secret, and whether it was accepted."""

    secret: Secret
    begun_s: float
    ended_s: float
    is_accepted: bool


@dataclass(slots=True)
class Evidence:
    """All that was done and seen.

    Attributes:
        settings: the changes of each limit in their order, by its place and the names of its scope, which may be `*`.
        calls: those that were admitted.
        refusals: by limits.
        requests: of clients.
        done: the ids of changes whose callers were told that they are done.
        begun: the ids of all changes.
        logged: the ids of changes of limits in EVENTS.
        audited: the ids of changes that AUDIT has as done.
        limit_changes: the ids of those that are of limits.
        failures: of jobs, for other reasons than limits.
        books: the same sum of money by different books.
        differences: what the comparison of all counters with the record has found.
    """

    settings: dict[tuple[Place, tuple[str, ...]], list[Setting]] = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    calls: Sequence[AdmittedCall] = ()
    refusals: Sequence[RefusedCall] = ()
    requests: list[SentRequest] = field(default_factory=list[SentRequest])
    done: set[str] = field(default_factory=set[str])
    begun: set[str] = field(default_factory=set[str])
    limit_changes: set[str] = field(default_factory=set[str])
    logged: Sequence[str] = ()
    audited: Sequence[str] = ()
    failures: Sequence[str] = ()
    books: Mapping[str, int] = field(default_factory=dict[str, int])
    differences: Sequence[str] = ()


def violations(evidence: Evidence) -> list[str]:
    """Returns what is not as it must be."""
    return [
        *_admitted_over_a_limit(evidence),
        *_refused_by_no_limit(evidence),
        *_wrongly_authorized(evidence),
        *_not_recorded(evidence),
        *(f"a job failed: {failure}" for failure in evidence.failures),
        *(f"a counter differs from the record: {difference}" for difference in evidence.differences),
        *([f"books differ: {dict(evidence.books)}"] if len(set(evidence.books.values())) > 1 else []),
    ]


def amounts(settings: Iterable[Setting], begin_s: float, end_s: float) -> set[int | None]:
    """Returns the amounts that a limit may have had between two moments; None for no limit."""
    possible: set[int | None] = {None}
    for setting in settings:
        if setting.begun_s > end_s:
            break
        possible = {setting.amount} if setting.ended_s <= begin_s else possible | {setting.amount}
    return possible


def amounts_for(
    evidence: Evidence, place: Place, scope: Sequence[str], begin_s: float, end_s: float
) -> set[int | None]:
    """Returns the amounts that a scope may have been limited to: by the most particular limit that there was."""
    possible: set[int | None] = set()
    for pattern in product(*((name, EACH) for name in scope)):
        of_pattern = amounts(evidence.settings.get((place, pattern), ()), begin_s, end_s)
        possible |= of_pattern - {None}
        if None not in of_pattern:
            return possible
    return possible | {None}


def _places(evidence: Evidence) -> list[Place]:
    return sorted({place for place, _ in evidence.settings})


def _admitted_over_a_limit(evidence: Evidence) -> Iterator[str]:
    calls = sorted(evidence.calls, key=lambda call: call.by_s)
    for place in _places(evidence):
        admitted: dict[tuple[str, ...], int] = defaultdict(int)
        for call in calls:
            scope = _scope_of(call, place[0])
            if not all(scope):
                continue
            admitted[scope] += call.cost
            if call.from_s < call.by_s:
                continue
            possible = amounts_for(evidence, place, scope, call.by_s - CLOCK_S, call.by_s + CLOCK_S)
            limits = [amount for amount in possible if amount is not None]
            if None not in possible and admitted[scope] > max(limits):
                yield (
                    f"{call.attempt_id} was admitted: {_name(place, scope)} had {admitted[scope]} of {max(limits)} "
                    "nano-dollars with it"
                )


def _refused_by_no_limit(evidence: Evidence) -> Iterator[str]:
    by_scope: dict[tuple[tuple[str, ...], tuple[str, ...]], list[AdmittedCall]] = defaultdict(list)
    for call in evidence.calls:
        for kinds in {refusal.place[0] for refusal in evidence.refusals}:
            by_scope[kinds, _scope_of(call, kinds)].append(call)
    for refusal in evidence.refusals:
        calls = by_scope[refusal.place[0], refusal.scope]
        admitted = sum(call.cost for call in calls if call.from_s <= refusal.at_s + CLOCK_S)
        possible = amounts_for(evidence, refusal.place, refusal.scope, refusal.at_s - ASKED_S, refusal.at_s + CLOCK_S)
        limits = [amount for amount in possible if amount is not None]
        if not limits or admitted + refusal.cost <= min(limits):
            limited = f"the least limit was {min(limits)}" if limits else "there was no limit"
            name = _name(refusal.place, refusal.scope)
            yield f"{refusal.attempt_id} was refused: {name} had {admitted} nano-dollars admitted, and {limited}"


def _wrongly_authorized(evidence: Evidence) -> Iterator[str]:
    for request in evidence.requests:
        secret = request.secret
        if request.is_accepted and request.begun_s > secret.ended_s:
            yield f"a secret of {secret.key} was accepted {request.begun_s - secret.ended_s:.3f} s after its end"
        if not request.is_accepted and request.begun_s > secret.made_s and request.ended_s < secret.end_begun_s:
            yield f"a valid secret of {secret.key} was refused"


def _not_recorded(evidence: Evidence) -> Iterator[str]:
    logged, audited = set(evidence.logged), set(evidence.audited)
    yield from (f"{change} is not in EVENTS" for change in sorted(evidence.done & evidence.limit_changes - logged))
    yield from (f"{change} is not in AUDIT" for change in sorted(evidence.done - audited))
    yield from (f"{change} is in EVENTS, and nobody made it" for change in sorted(logged - evidence.begun))


def _scope_of(call: AdmittedCall, kinds: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of the scope of some kinds in which a call counts; empty for a name that it lacks."""
    return tuple(call.names.get(kind, "") for kind in kinds)


def _name(place: Place, scope: Sequence[str]) -> str:
    kinds, window = place
    return f"{' within '.join(f'{kind}:{name}' for kind, name in zip(kinds, scope, strict=True))}/{window}"
