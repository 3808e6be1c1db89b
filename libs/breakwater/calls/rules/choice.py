"""Chooses among the deployments of a model: the order in which a call asks them, by what is known of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from math import inf, log
from typing import Literal

from breakwater.calls.rules.quota import LOW_HEADROOM

_CLOSE = 1.2
"""Latencies within this factor of the least count as equal."""


@dataclass(frozen=True, slots=True)
class ChoicePolicy:
    """The choice among a model's deployments.

    Attributes:
        choose: `headroom`, `weighted`, `latency` or `ordered`, as in the config.
        sticky: True if the calls of a session stay on one deployment.
    """

    choose: Literal["headroom", "weighted", "latency", "ordered"] = "headroom"
    sticky: bool = True


@dataclass(slots=True)  # a frozen one takes four times as long to make, and each call makes one for each deployment
class Candidate:
    """A deployment, as far as this worker knows it.

    Attributes:
        id: its id.
        weight: its share of the calls, relative to the others.
        overflow: True if it is called only while no other may be.
        blocked_s: the seconds until a gate may admit a call again; 0 if it may now.
        headroom: the share of the tightest of its limits that is left, from 0 to 1; 1 where none is known.
        fits: False if the call is larger than what is left.
        latency_ms: the recent duration of its calls; None where it was not called lately.
        failures: the job's failed calls on it.
    """

    id: str
    weight: float = 1.0
    overflow: bool = False
    blocked_s: float = 0.0
    headroom: float = 1.0
    fits: bool = True
    latency_ms: float | None = None
    failures: int = 0


def order(
    candidates: Iterable[Candidate], policy: ChoicePolicy, *, name: str, last: str | None = None
) -> list[Candidate]:
    """Returns the candidates in the order in which a call asks them.

    First those that may be called, then those on which the job has not failed, those whose limits have room for the
    call, those that are no overflow, those with headroom, then the one that has the session, and finally by the policy.

    Args:
        candidates: the deployments, in the order of the config.
        policy: how they are chosen.
        name: the name of the call's session, which all workers place on the same deployment; where sessions don't
            matter, that of the call.
        last: the deployment of the session's last call, while its prompt cache is warm.
    """
    listed = list(candidates)
    by_headroom = policy.choose == "headroom"
    fast_ms = inf
    if policy.choose == "latency":
        callable_ms = (candidate.latency_ms for candidate in listed if not candidate.blocked_s)
        fast_ms = min((latency_ms for latency_ms in callable_ms if latency_ms is not None), default=inf) * _CLOSE

    def place(numbered: tuple[int, Candidate]) -> tuple[object, ...]:
        number, candidate = numbered
        rank: float = number
        if policy.choose != "ordered":
            # A session is placed by weight alone: what is left of limits differs from worker to worker.
            weight = (
                candidate.weight * max(candidate.headroom, 0.01)
                if by_headroom and not policy.sticky
                else candidate.weight
            )
            rank = _lot(name, candidate.id) / weight
        is_slow = candidate.latency_ms is not None and candidate.latency_ms > fast_ms
        return (
            candidate.blocked_s,
            candidate.failures,
            not candidate.fits,
            candidate.overflow,
            by_headroom and candidate.headroom < LOW_HEADROOM,
            policy.sticky and last is not None and candidate.id != last,
            candidate.latency_ms if is_slow else 0.0,
            rank,
        )

    return [candidate for _, candidate in sorted(enumerate(listed), key=place)]


def _lot(name: str, candidate_id: str) -> float:
    """Draws a number for a name and a candidate, exponentially distributed.

    Divided by weights, the least one wins in proportion to the weights. A further candidate takes over its own share
    and moves no other name.
    """
    digest = blake2b(f"{name}\n{candidate_id}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return -log((int.from_bytes(digest) + 1) / 2**64)
