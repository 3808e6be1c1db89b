"""Sign-in with OpenID Connect: one flow from the redirect until the browser comes back, and limits on tries.

Nothing is stored for a flow: what the provider is sent follows from a secret that only the browser keeps, so any
replica can complete what another one has begun. The secret is signed with a key of the plane's own, so that what was
not begun here, or too long ago, is refused before the provider is asked.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Self

from breakwater.kernel.errors import BreakwaterError

LASTS_S = 600
"""Time that a person may take at the provider."""
ENTROPY_BYTES = 20
_TIME_BYTES = 4
_SIGNATURE_BYTES = 24


@dataclass(frozen=True, slots=True)
class SignInFlow:
    """The identity of one sign-in."""

    secret: str
    """Random, and kept by the browser in a cookie."""

    @classmethod
    def begin(cls, key: bytes, entropy: bytes, now_s: int) -> Self:
        """A new one, from `ENTROPY_BYTES` random bytes."""
        begun = now_s.to_bytes(_TIME_BYTES) + entropy
        return cls(_text(begun + _signature(key, begun)))

    def is_begun(self, key: bytes, now_s: int) -> bool:
        """True if it was begun on this plane, in the last ten minutes."""
        try:
            given = urlsafe_b64decode(self.secret)
        except ValueError:
            return False
        begun = given[:-_SIGNATURE_BYTES]
        signature = given[-_SIGNATURE_BYTES:]
        # Written in another way, it would be another one to those who remember what was used.
        ours = hmac.compare_digest(signature, _signature(key, begun)) and _text(given) == self.secret
        return ours and abs(now_s - int.from_bytes(begun[:_TIME_BYTES])) <= LASTS_S

    @property
    def state(self) -> str:
        """Comes back with the answer, and shows that this browser has asked for it."""
        return self._derived("state")

    @property
    def nonce(self) -> str:
        """Part of the ID token; shows that it was issued for this sign-in."""
        return self._derived("nonce")

    @property
    def verifier(self) -> str:
        """Verifier of PKCE (RFC 7636): shows the provider that the redeemer of the code has asked for it."""
        return self._derived("verifier")

    @property
    def challenge(self) -> str:
        """Challenge of PKCE, by the method S256."""
        return _text(hashlib.sha256(self.verifier.encode()).digest())

    def is_state(self, state: str) -> bool:
        """True if an answer belongs to this sign-in, compared in constant time."""
        return hmac.compare_digest(self.state.encode(), state.encode("utf-8", "surrogateescape"))

    def _derived(self, what: str) -> str:
        secret = self.secret.encode("utf-8", "surrogateescape")
        return _text(hmac.digest(secret, f"breakwater.openid\n{what}".encode(), "sha256"))


def _signature(key: bytes, begun: bytes) -> bytes:
    return hmac.digest(key, b"breakwater.openid\nflow" + begun, "sha256")[:_SIGNATURE_BYTES]


def _text(digest: bytes) -> str:
    return urlsafe_b64encode(digest).rstrip(b"=").decode()


MAX_ADDRESSES = 10_000
"""Number that is remembered; beyond, the one that was first seen is forgotten."""


class TooManySignInsError(BreakwaterError):
    """An address has failed too often, or has too many attempts under way."""


@dataclass(slots=True)
class SignInTry:
    """One attempt, which has failed unless it is said otherwise."""

    failed: bool = True


@dataclass(slots=True)
class _KnownAddress:
    at: float
    under_way: int = 0
    failures: float = 0.0


class SignInLimits:
    """The attempts of every address.

    Args:
        at_once: how many of an address may be under way.
        failures_a_minute: how many may fail, together or one by one.
        clock: in seconds.
    """

    def __init__(self, at_once: int, failures_a_minute: int, clock: Callable[[], float]) -> None:
        self._at_once = at_once
        self._most = failures_a_minute
        self._clock = clock
        self._known: dict[str, _KnownAddress] = {}

    @contextmanager
    def of(self, address: str) -> Generator[SignInTry]:
        """One attempt, for as long as the block runs. Raises TooManySignInsError."""
        known = self._address(_network(address))
        now = self._clock()
        known.failures = max(0.0, known.failures - (now - known.at) * self._most / 60)
        known.at = now
        # What is under way may fail yet.
        if known.under_way >= self._at_once or known.failures + known.under_way > self._most - 1:
            raise TooManySignInsError
        attempt = SignInTry()
        known.under_way += 1
        try:
            yield attempt
        finally:
            known.under_way -= 1
            known.failures += attempt.failed

    def _address(self, address: str) -> _KnownAddress:
        found = self._known.get(address)
        if found is None:
            if len(self._known) >= MAX_ADDRESSES:
                del self._known[next(iter(self._known))]
            found = self._known[address] = _KnownAddress(self._clock())
        return found


def _network(address: str) -> str:
    """The identity of a client: an address, or the network of 64 bits that it may choose addresses from."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address[:64]
    if isinstance(parsed, IPv6Address):
        parsed = parsed.ipv4_mapped or IPv6Address(int(parsed) >> 64 << 64)
    return str(parsed)
