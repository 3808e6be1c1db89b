"""API keys: `bw_<id>_<secret>`. Who holds the secret may call what the key is for; only its digest is ever stored.

The digest is plain SHA-256. Slow hashes protect what people choose and others can guess; a secret of 256 random bits
can't be guessed at any speed, and a slow hash on every request would only make the API easy to overload.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64encode
from datetime import datetime
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from breakwater.contracts.access import KEY_SCOPES, KeyScope
from breakwater.contracts.types import Identifier, Message, Timestamp

PREFIX = "bw"
SESSION_PREFIX = "bws"
"""What the tokens of sessions begin with, which stand for a key or a person."""
ID_BYTES = 6
SECRET_BYTES = 32
ENTROPY_BYTES = ID_BYTES + SECRET_BYTES

_API = "/api/v1/"
_OPENAI = "/v1/"
_JOBS = "/api/v1/jobs"
_JOB = f"{_JOBS}/"
_PLANS = "/api/v1/plans"
_PROGRESS = "/progress"
_CANCEL = "/cancel"
_SESSIONS = "/api/v1/sessions"
_OPENID = "/api/v1/openid"
_APPROVALS = frozenset(
    {"/api/v1/alerts/ack", "/api/v1/alerts/resolve", "/api/v1/guards/reset", "/api/v1/budgets/raise"}
)
"""What decides on something that a limit has stopped, or a person was called to."""
OPEN_TO_ALL = frozenset({f"{_OPENID}/begin", f"{_OPENID}/complete", f"{_OPENID}/backchannel-logout"})
"""What takes no key, as neither who signs in nor the OpenID provider has one."""


def _in_order(scopes: tuple[KeyScope, ...]) -> tuple[KeyScope, ...]:
    return tuple(scope for scope in KEY_SCOPES if scope in scopes)


class ApiKey(Message):
    """What is kept of a key."""

    id: str = Field(pattern=r"^[0-9a-f]{12}$", description="Public: names the key in lists and logs.")
    name: Identifier = Field(description="Who or what uses the key.")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="Digest of the secret.")
    created_at: Timestamp
    # Keys that were made before there were scopes open everything, as they did.
    scopes: Annotated[tuple[KeyScope, ...], AfterValidator(_in_order)] = Field(
        default=KEY_SCOPES, min_length=1, description="What the key is for; each once, in one order."
    )
    tenants: tuple[Identifier, ...] = Field(default=(), description="In whose name it submits; empty: in anyone's.")
    agents: tuple[Identifier, ...] = Field(default=(), description="For which agents it submits; empty: for all.")

    @model_validator(mode="after")
    def _bound_to_submitting(self) -> Self:
        if (self.tenants or self.agents) and self.scopes != ("submit",):
            raise ValueError("a key that is bound to tenants or agents has the scope submit alone")
        return self


def mint(
    name: str,
    *,
    entropy: bytes,
    at: datetime,
    scopes: tuple[KeyScope, ...] = KEY_SCOPES,
    tenants: tuple[str, ...] = (),
    agents: tuple[str, ...] = (),
) -> tuple[str, ApiKey]:
    """Makes a key from `ENTROPY_BYTES` random bytes.

    Returns:
        The key as its holder sends it, which is shown once and stored nowhere, and what is kept of it.

    Raises:
        ValueError: too little entropy, a name that is empty, over 128 characters or has control characters in it, or
            no scope, or tenants or agents with another scope than `submit`.
    """
    if len(entropy) != ENTROPY_BYTES:
        raise ValueError(f"a key takes {ENTROPY_BYTES} random bytes, not {len(entropy)}")
    key_id = entropy[:ID_BYTES].hex()
    secret = urlsafe_b64encode(entropy[ID_BYTES:]).rstrip(b"=").decode()
    kept = ApiKey(
        id=key_id, name=name, sha256=_digest(secret), created_at=at, scopes=scopes, tenants=tenants, agents=agents
    )
    return f"{PREFIX}_{key_id}_{secret}", kept


def split(text: str) -> tuple[str, str] | None:
    """The id and the secret of a key as it was sent, or None where it has another form."""
    prefix, _, rest = text.partition("_")
    key_id, _, secret = rest.partition("_")
    return (key_id, secret) if prefix == PREFIX and key_id and secret else None


def is_session(text: str) -> bool:
    """Whether a text has the form of a session's token."""
    return text.startswith(f"{SESSION_PREFIX}_") and text.isascii() and text.isprintable()


def opens(key: ApiKey, secret: str) -> bool:
    """Whether the secret is the key's, compared in constant time."""
    return hmac.compare_digest(key.sha256, _digest(secret))


def scopes_for(method: str, path: str, sent: str | None = None) -> tuple[KeyScope, ...]:
    """The scopes that let a request pass: a key needs one of them. Where any valid key will do, these are all.

    What is not named here is decided by its method, so that a new path is never open to more than it should be.

    Args:
        method: HTTP's, in capitals.
        path: of something that takes a key, decoded, as it is routed.
        sent: the path as it came, encoded still; the same where it is left out. It distinguishes the progress of
            the job `a`, `a/progress`, from the job `a/progress`, which is sent as `a%2Fprogress`.

    Returns:
        At least one; the one that opens the least comes first.
    """
    looks = method in ("GET", "HEAD")
    if path == "/metrics" or path.startswith("/metrics/"):
        return ("read",)
    if path.startswith(_OPENAI):
        return ("read", "submit") if looks else ("submit",)
    if not path.startswith(_API) or (looks and path == "/api/v1/key"):
        return KEY_SCOPES
    if method == "POST" and path in (_JOBS, _PLANS):
        return ("submit",)
    if method == "POST" and path in (_SESSIONS, f"{_SESSIONS}/end"):
        return ("read",) if path == _SESSIONS else KEY_SCOPES
    if path in _APPROVALS and not looks:
        return ("approve", "operate")
    if not looks:
        return ("submit", "operate") if path.startswith(_JOB) and path.endswith(_CANCEL) else ("operate",)
    if path.startswith(f"{_PLANS}/"):
        return ("read", "submit")
    if not path.startswith(_JOB):
        return ("read",)
    # A job's answer is not redacted, so only who submits reads it; its progress is. A job may be called `progress`.
    progress = path.removeprefix(_JOB).endswith(_PROGRESS) and (path if sent is None else sent).endswith(_PROGRESS)
    return ("read", "submit") if progress else ("submit",)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
