"""One sign-in with OpenID Connect, from the redirect to the provider until the browser comes back.

Nothing is stored for it: what the provider is sent follows from a secret that only the browser keeps, so any replica
can complete what another one has begun, and nobody else can. The secret is signed with a key of the plane's own, so
that what was not begun here, or too long ago, is refused before anybody is asked.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass
from typing import Self

LASTS_S = 600
"""How long somebody may take at the provider."""
ENTROPY_BYTES = 20
_TIME_BYTES = 4
_SIGNATURE_BYTES = 24


@dataclass(frozen=True, slots=True)
class SignInFlow:
    """What one sign-in is known by."""

    secret: str
    """Random, and kept by the browser in a cookie."""

    @classmethod
    def begin(cls, key: bytes, entropy: bytes, now_s: int) -> Self:
        """A new one, from `ENTROPY_BYTES` random bytes."""
        begun = now_s.to_bytes(_TIME_BYTES) + entropy
        return cls(_text(begun + _signature(key, begun)))

    def is_begun(self, key: bytes, now_s: int) -> bool:
        """Whether it was begun on this plane, in the last ten minutes."""
        try:
            given = urlsafe_b64decode(self.secret)
        except ValueError:
            return False
        begun, signature = given[:-_SIGNATURE_BYTES], given[-_SIGNATURE_BYTES:]
        # Written in another way, it would be another one to those who remember what was used.
        ours = hmac.compare_digest(signature, _signature(key, begun)) and _text(given) == self.secret
        return ours and abs(now_s - int.from_bytes(begun[:_TIME_BYTES])) <= LASTS_S

    @property
    def state(self) -> str:
        """Comes back with the answer, and shows that this browser has asked for it."""
        return self._derived("state")

    @property
    def nonce(self) -> str:
        """Stands in the ID token, and shows that it was issued for this sign-in."""
        return self._derived("nonce")

    @property
    def verifier(self) -> str:
        """Of PKCE (RFC 7636): shows the provider that who redeems the code has asked for it."""
        return self._derived("verifier")

    @property
    def challenge(self) -> str:
        """Of PKCE, by the method S256."""
        return _text(hashlib.sha256(self.verifier.encode()).digest())

    def is_state(self, state: str) -> bool:
        """Whether an answer belongs to this sign-in, compared in constant time."""
        return hmac.compare_digest(self.state.encode(), state.encode("utf-8", "surrogateescape"))

    def _derived(self, what: str) -> str:
        secret = self.secret.encode("utf-8", "surrogateescape")
        return _text(hmac.digest(secret, f"breakwater.openid\n{what}".encode(), "sha256"))


def _signature(key: bytes, begun: bytes) -> bytes:
    return hmac.digest(key, b"breakwater.openid\nflow" + begun, "sha256")[:_SIGNATURE_BYTES]


def _text(digest: bytes) -> str:
    return urlsafe_b64encode(digest).rstrip(b"=").decode()
