"""Chooses among the deployments of a model: the order in which a call asks them, by what is known of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import inf, log
from typing import Literal

from breakwater.calls.rules.quota import LOW_HEADROOM

_CLOSE = 1.2
"""Latencies within this factor of the least count as equal."""

_MASK = 2**64 - 1
_ODD = 0x9E3779B97F4A7C15
"""The golden ratio in 64 bits: a product with it spreads the bits of a number over all higher ones."""


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
    is_drawn = policy.choose != "ordered"
    # A session is placed by weight alone: what is left of limits differs from worker to worker.
    weighs_headroom = by_headroom and not policy.sticky
    may_stay = policy.sticky and last is not None
    fast_ms = inf
    if policy.choose == "latency":
        callable_ms = (candidate.latency_ms for candidate in listed if not candidate.blocked_s)
        fast_ms = min((latency_ms for latency_ms in callable_ms if latency_ms is not None), default=inf) * _CLOSE
    seed = _seed(name) if is_drawn else 0
    places: list[tuple[float, int, bool, bool, bool, bool, float, float, int, Candidate]] = []
    for number, candidate in enumerate(listed):
        weight = candidate.weight
        if weighs_headroom and candidate.headroom < 1:
            weight *= max(candidate.headroom, 0.01)
        latency_ms = candidate.latency_ms
        places.append(
            (
                candidate.blocked_s,
                candidate.failures,
                not candidate.fits,
                candidate.overflow,
                by_headroom and candidate.headroom < LOW_HEADROOM,
                may_stay and candidate.id != last,
                latency_ms if latency_ms is not None and latency_ms > fast_ms else 0.0,
                _lot(seed, _cached_seed(candidate.id)) / weight if is_drawn else 0.0,
                number,  # no two have the same, so candidates are never compared
                candidate,
            )
        )
    places.sort()
    return [place[-1] for place in places]


def _seed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())


_cached_seed = lru_cache(4096)(_seed)


def _lot(seed: int, candidate_seed: int) -> float:
    """Draws a number for a name and a candidate, by their seeds; exponentially distributed.

    Divided by weights, the least one wins in proportion to the weights. A further candidate takes over its own share
    and moves no other name.
    """
    # Each call draws one for each deployment: two multiplications take a fifth of the time of a hash of both texts.
    mixed = (seed ^ candidate_seed) * _ODD & _MASK
    mixed = (mixed ^ mixed >> 32) * _ODD & _MASK
    return -log(((mixed ^ mixed >> 32) + 1) / 2**64)
