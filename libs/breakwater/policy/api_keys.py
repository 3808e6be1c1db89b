"""API keys: `bw_<id>_<secret>`. Who holds the secret may call; only its digest is ever stored.

The digest is plain SHA-256. Slow hashes protect what people choose and others can guess; a secret of 256 random bits
can't be guessed at any speed, and a slow hash on every request would only make the door easy to jam.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64encode
from datetime import datetime

from pydantic import Field

from breakwater.contracts.types import Identifier, Message, Timestamp

PREFIX = "bw"
ID_BYTES = 6
SECRET_BYTES = 32
ENTROPY_BYTES = ID_BYTES + SECRET_BYTES


class ApiKey(Message):
    """What is kept of a key."""

    id: str = Field(pattern=r"^[0-9a-f]{12}$", description="Public: names the key in lists and logs.")
    name: Identifier = Field(description="Who or what uses the key.")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="Digest of the secret.")
    created_at: Timestamp


def mint(name: str, *, entropy: bytes, at: datetime) -> tuple[str, ApiKey]:
    """Makes a key from `ENTROPY_BYTES` random bytes.

    Returns:
        The key as its holder sends it, which is shown once and stored nowhere, and what is kept of it.

    Raises:
        ValueError: too little entropy, or a name that is empty, over 128 characters or has control characters in it.
    """
    if len(entropy) != ENTROPY_BYTES:
        raise ValueError(f"a key takes {ENTROPY_BYTES} random bytes, not {len(entropy)}")
    key_id = entropy[:ID_BYTES].hex()
    secret = urlsafe_b64encode(entropy[ID_BYTES:]).rstrip(b"=").decode()
    return f"{PREFIX}_{key_id}_{secret}", ApiKey(id=key_id, name=name, sha256=_digest(secret), created_at=at)


def split(text: str) -> tuple[str, str] | None:
    """The id and the secret of a key as it was sent, or None where it has another form."""
    prefix, _, rest = text.partition("_")
    key_id, _, secret = rest.partition("_")
    return (key_id, secret) if prefix == PREFIX and key_id and secret else None


def opens(key: ApiKey, secret: str) -> bool:
    """Whether the secret is the key's, in a time that tells nothing of how much of it was right."""
    return hmac.compare_digest(key.sha256, _digest(secret))


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
