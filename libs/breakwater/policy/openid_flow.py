"""One sign-in with OpenID Connect, from the redirect to the provider until the browser comes back.

Nothing is stored for it: what the provider is sent follows from a secret that only the browser keeps, so any replica
can complete what another one has begun, and nobody else can.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64encode
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SignInFlow:
    """What one sign-in is known by."""

    secret: str
    """Random, and kept by the browser in a cookie."""

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


def _text(digest: bytes) -> str:
    return urlsafe_b64encode(digest).rstrip(b"=").decode()
