"""Sign-in with OpenID Connect: a flow from the redirect until the browser returns, and limits on attempts.

Nothing is stored for a flow: its values are derived from a secret that only the browser keeps, so any replica can
complete a flow that another one began. The secret is signed with the plane's key, so that a flow that did not begin
here, or began too long ago, is refused before the provider is asked.
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
"""The seconds that a person may take at the provider."""
ENTROPY_BYTES = 20
_TIME_BYTES = 4
_SIGNATURE_BYTES = 24


@dataclass(frozen=True, slots=True)
class SignInFlow:
    """One sign-in, identified by a random secret that the browser keeps in a cookie."""

    secret: str

    @classmethod
    def begin(cls, key: bytes, entropy: bytes, now_s: int) -> Self:
        """Begins a sign-in with `ENTROPY_BYTES` random bytes."""
        begun = now_s.to_bytes(_TIME_BYTES) + entropy
        return cls(_text(begun + _signature(key, begun)))

    def is_begun(self, key: bytes, now_s: int) -> bool:
        """Returns True if the sign-in was begun on this plane in the last ten minutes."""
        try:
            signed = urlsafe_b64decode(self.secret)
        except ValueError:
            return False
        begun = signed[:-_SIGNATURE_BYTES]
        signature = signed[-_SIGNATURE_BYTES:]
        # Another spelling of the same bytes would pass for an unused secret where used ones are remembered.
        ours = hmac.compare_digest(signature, _signature(key, begun)) and _text(signed) == self.secret
        return ours and abs(now_s - int.from_bytes(begun[:_TIME_BYTES])) <= LASTS_S

    @property
    def state(self) -> str:
        """The `state`, which returns with the answer and proves that this browser has asked for it."""
        return self._derive("state")

    @property
    def nonce(self) -> str:
        """The `nonce` in the ID token, which proves that the token was issued for this sign-in."""
        return self._derive("nonce")

    @property
    def verifier(self) -> str:
        """The verifier of PKCE (RFC 7636), which proves to the provider who has asked for a code."""
        return self._derive("verifier")

    @property
    def challenge(self) -> str:
        """The challenge of PKCE, by the method S256."""
        return _text(hashlib.sha256(self.verifier.encode()).digest())

    def is_state(self, state: str) -> bool:
        """Returns True if an answer belongs to this sign-in, compared in constant time."""
        return hmac.compare_digest(self.state.encode(), state.encode("utf-8", "surrogateescape"))

    def _derive(self, purpose: str) -> str:
        secret = self.secret.encode("utf-8", "surrogateescape")
        return _text(hmac.digest(secret, f"breakwater.openid\n{purpose}".encode(), "sha256"))


def _signature(key: bytes, begun: bytes) -> bytes:
    return hmac.digest(key, b"breakwater.openid\nflow" + begun, "sha256")[:_SIGNATURE_BYTES]


def _text(digest: bytes) -> str:
    return urlsafe_b64encode(digest).rstrip(b"=").decode()


MAX_ADDRESSES = 10_000
"""The number of addresses that are remembered; the one that came first is forgotten first."""


class TooManySignInsError(BreakwaterError):
    """An address has failed too often, or has too many attempts in progress."""


@dataclass(slots=True)
class SignInTry:
    """One attempt, which counts as failed unless `failed` is set to False."""

    failed: bool = True


@dataclass(slots=True)
class _Address:
    at: float
    under_way: int = 0
    failures: float = 0.0


class SignInLimits:
    """Limits on the sign-ins of each address.

    Args:
        at_once: the number of attempts of an address that may be in progress.
        failures_a_minute: the number of its attempts that may fail in a minute.
        clock: a clock in seconds.
    """

    def __init__(self, at_once: int, failures_a_minute: int, clock: Callable[[], float]) -> None:
        self._at_once = at_once
        self._max_failures = failures_a_minute
        self._clock = clock
        self._addresses: dict[str, _Address] = {}

    @contextmanager
    def of(self, address: str) -> Generator[SignInTry]:
        """Counts an attempt of an address while the block runs. Raises TooManySignInsError."""
        record = self._address(_network(address))
        now = self._clock()
        record.failures = max(0.0, record.failures - (now - record.at) * self._max_failures / 60)
        record.at = now
        # Attempts in progress may still fail.
        if record.under_way >= self._at_once or record.failures + record.under_way > self._max_failures - 1:
            raise TooManySignInsError
        attempt = SignInTry()
        record.under_way += 1
        try:
            yield attempt
        finally:
            record.under_way -= 1
            record.failures += attempt.failed

    def _address(self, address: str) -> _Address:
        record = self._addresses.get(address)
        if record is None:
            if len(self._addresses) >= MAX_ADDRESSES:
                del self._addresses[next(iter(self._addresses))]
            record = self._addresses[address] = _Address(self._clock())
        return record


def _network(address: str) -> str:
    """The identity of a client: an address, or the network of 64 bits that it may choose addresses from."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address[:64]
    if isinstance(parsed, IPv6Address):
        parsed = parsed.ipv4_mapped or IPv6Address(int(parsed) >> 64 << 64)
    return str(parsed)
