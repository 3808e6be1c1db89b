"""How often one address may try to sign in: what fails is counted, so that nobody takes the places of all others."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

MAX_ADDRESSES = 10_000
"""That are remembered; beyond, the one that was first seen is forgotten."""


class TooManySignIns(Exception):  # noqa: N818  named after what happened
    """An address has failed too often, or has too many attempts under way."""


@dataclass(slots=True)
class SignInTry:
    """One attempt, which has failed unless it is said otherwise."""

    failed: bool = True


@dataclass(slots=True)
class _Address:
    at: float
    under_way: int = 0
    failures: float = 0.0


class SignInLimits:
    """The attempts of every address.

    Args:
        at_once: how many of an address may be under way.
        failures_a_minute: how many may fail, at once or one by one.
        clock: in seconds.
    """

    def __init__(self, at_once: int, failures_a_minute: int, clock: Callable[[], float]) -> None:
        self._at_once = at_once
        self._most = failures_a_minute
        self._clock = clock
        self._known: dict[str, _Address] = {}

    @contextmanager
    def of(self, address: str) -> Generator[SignInTry]:
        """One attempt, for as long as the block runs. Raises TooManySignIns."""
        known, now = self._address(_network(address)), self._clock()
        known.failures = max(0.0, known.failures - (now - known.at) * self._most / 60)
        known.at = now
        # What is under way may fail yet.
        if known.under_way >= self._at_once or known.failures + known.under_way > self._most - 1:
            raise TooManySignIns
        attempt = SignInTry()
        known.under_way += 1
        try:
            yield attempt
        finally:
            known.under_way -= 1
            known.failures += attempt.failed

    def _address(self, address: str) -> _Address:
        found = self._known.get(address)
        if found is None:
            if len(self._known) >= MAX_ADDRESSES:
                del self._known[next(iter(self._known))]
            found = self._known[address] = _Address(self._clock())
        return found


def _network(address: str) -> str:
    """What one client is known by: an address, or the network of 64 bits that it may choose addresses from."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address[:64]
    if isinstance(parsed, IPv6Address):
        parsed = parsed.ipv4_mapped or IPv6Address(int(parsed) >> 64 << 64)
    return str(parsed)
