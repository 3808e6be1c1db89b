"""Access to the HTTP API: scopes of API keys, roles of people, and their sessions."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, JsonValue, StringConstraints

from breakwater.kernel.http.contract import Moment, OperatorRequest
from breakwater.kernel.types import NO_CONTROLS, Event, Identifier, Message, ModelId, Region, Timestamp

KeyScope = Literal["submit", "read", "operate", "approve", "audit", "limits"]
"""Uses of an API key: `submit` jobs and read their results; `read` the state of everything, redacted; `operate`: act as
an operator, such as reset a breaker or replay a job; `approve`: decide on incidents, stopped tasks and limits, which
`operate` includes; `audit`: see the audit log, in the console; `limits`: say who may spend what, by limits and by keys
that carry them."""

KEY_SCOPES: tuple[KeyScope, ...] = get_args(KeyScope)

Priority = Literal["high", "normal", "low"]
"""The priority of jobs, by which those that wait are served: sixteen of high and four of normal for one of low."""

PRIORITIES: tuple[Priority, ...] = get_args(Priority)

Weight = Annotated[int, Field(ge=1, le=100)]
"""The weight of a key: its share of what callers wait for, beside those of other keys."""

_RESIDENCY = "Region that its calls must not leave, such as `eu`; null for none."
_PRIORITY = "Priority of its jobs, and the highest that they may ask for; null: as their agent says, or normal."
_WEIGHT = "Its share of what several keys wait for."

CallerKind = Literal["key", "person", "token"]
"""The sender of a request: the holder of an API key, a person who signed in with OpenID Connect, or the holder of a
JSON Web Token."""

PersonRole = Literal["viewer", "operator", "approver", "admin"]
"""Roles of people who sign in with OpenID Connect."""

CostTag = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=NO_CONTROLS)]
"""The name of a tag by which costs can be grouped."""

DAY_S = 86_400

MAX_GRACE_S = 30 * DAY_S
"""The longest time for which two secrets of a key may be valid."""

MAX_TAGS = 10
"""The most cost tags of a call, and of a key. Every attempt carries its tags on the bus and in ClickHouse."""

KeyTags = Annotated[dict[CostTag, Identifier], Field(max_length=MAX_TAGS)]
"""Cost tags that a key gives to its jobs."""


class KeyDetails(Event):
    """The API key that a request was sent with, without its secret; or the person whose session it belongs to."""

    id: str = Field(
        description="Public: names the key in `breakwater keys list` and in logs. Of a person: the provider's `sub`."
    )
    name: Identifier = Field(description="The user of the key; actions are recorded under this name.")
    kind: CallerKind = "key"
    roles: tuple[PersonRole, ...] = Field(default=(), description="Of a person. They have the scopes of all of them.")
    scopes: tuple[KeyScope, ...] = Field(description="What the key may be used for; at least one scope.")
    tenants: tuple[Identifier, ...] = Field(default=(), description="The tenants it may submit jobs for; empty: any.")
    agents: tuple[Identifier, ...] = Field(default=(), description="The agents it may submit jobs for; empty: all.")
    models: tuple[ModelId, ...] = Field(default=(), description="The models its jobs may ask for; empty: any.")
    user: Identifier | None = Field(default=None, description="The user of all its jobs; null: it is not bound to one.")
    team: Identifier | None = Field(default=None, description="The team of all its jobs; null: it is not bound to one.")
    tags: KeyTags = Field(default_factory=dict, description="Cost tags of all its jobs.")
    priority: Priority | None = Field(default=None, description=_PRIORITY)
    weight: Weight = Field(default=1, description=_WEIGHT)
    residency: Region | None = Field(default=None, description=_RESIDENCY)
    created_at: Timestamp = Field(
        description="When the key was created, the person signed in, or the token was verified."
    )
    expires_at: Timestamp | None = Field(default=None, description="When it loses its access; null for no such time.")


ApiKeyState = Literal["active", "expired", "revoked"]

KeyChange = Literal["created", "rotated", "expiry_changed", "revoked"]

KEYS_PER_PAGE = 1_000


class ListedKey(Event):
    """An API key, without its secret."""

    id: str = Field(description="Public: names the key in lists and logs.")
    name: Identifier = Field(description="Its user's; costs, limits and jobs go by this name.")
    source: Literal["plane", "file"] = Field(
        description="`file` for a key of `BREAKWATER_API_KEYS_FILE`, which is changed there and not here."
    )
    state: ApiKeyState
    scopes: tuple[KeyScope, ...]
    tenants: tuple[Identifier, ...] = Field(description="The tenants it may submit jobs for; empty: any.")
    agents: tuple[Identifier, ...] = Field(description="The agents it may submit jobs for; empty: all.")
    models: tuple[ModelId, ...] = Field(description="The models its jobs may ask for; empty: any.")
    user: Identifier | None = Field(description="The user of all its jobs; null: it is not bound to one.")
    team: Identifier | None = Field(description="The team of all its jobs; null: it is not bound to one.")
    tags: KeyTags = Field(description="Cost tags of all its jobs.")
    priority: Priority | None = Field(default=None, description=_PRIORITY)
    weight: Weight = Field(default=1, description=_WEIGHT)
    residency: Region | None = Field(default=None, description=_RESIDENCY)
    created_at: Timestamp
    expires_at: Timestamp | None = Field(default=None, description="Null: it does not expire.")
    revoked_at: Timestamp | None = None
    old_secret_until: Timestamp | None = Field(
        default=None, description="After a rotation, how long the secret before it is valid, too."
    )
    change: KeyChange | None = Field(default=None, description="The last change; null for a key of a file, as below.")
    changed_by: str | None = Field(default=None, description="Who made it.")
    changed_at: Timestamp | None = Field(default=None, description="When.")
    reason: str | None = Field(default=None, description="Why, redacted.")


class NewKey(ListedKey):
    """A key with a new secret."""

    key: str = Field(description="The key as its holder sends it: `bw_…`. Shown only once.")


class KeyQuery(Message):
    """A page of API keys."""

    ended: bool = Field(default=False, description="True to list those revoked or expired within 30 days, too.")
    after: Identifier | None = Field(default=None, description="Continue after the key with this id.")
    limit: Annotated[int, Field(ge=1, le=KEYS_PER_PAGE, description="The most to list.")] = 100


class CreateKeyRequest(OperatorRequest):
    """A new API key. Its maker can give it only rights that he has himself."""

    name: Identifier = Field(description="Its user's. No other key of the plane may have it.")
    scopes: tuple[KeyScope, ...] = Field(
        default=("submit",), min_length=1, description="With tenants, agents or models: `submit` alone."
    )
    tenants: tuple[Identifier, ...] = Field(default=(), description="The tenants it may submit jobs for; empty: any.")
    agents: tuple[Identifier, ...] = Field(default=(), description="The agents it may submit jobs for; empty: all.")
    models: tuple[ModelId, ...] = Field(default=(), description="The models its jobs may ask for; empty: any.")
    user: Identifier | None = Field(default=None, description="The user of all its jobs.")
    team: Identifier | None = Field(default=None, description="The team of all its jobs.")
    tags: KeyTags = Field(default_factory=dict, description="Cost tags of all its jobs.")
    priority: Priority | None = Field(default=None, description=_PRIORITY)
    weight: Weight = Field(default=1, description=_WEIGHT)
    residency: Region | None = Field(default=None, description=_RESIDENCY)
    expires_at: Moment | None = Field(default=None, description="When it stops being valid; null for never.")


class RotateKeyRequest(OperatorRequest):
    """A rotation of an API key's secret."""

    grace_s: Annotated[int, Field(ge=0, le=MAX_GRACE_S)] = Field(
        default=DAY_S, description="Seconds for which the old secret stays valid, too. 0 ends it immediately."
    )


class RevokeKeyRequest(OperatorRequest):
    """The end of an API key, now."""


class ExpireKeyRequest(OperatorRequest):
    """The end of an API key at a time."""

    at: Moment | Literal["never"] = Field(description="When it stops being valid. A time that is over revokes it.")


class NewSession(Event):
    """A session, in which the holder of an API key, or a person, is signed in."""

    token: str = Field(description="Replaces an API key. Shown only once.")
    ends_at: Timestamp = Field(description="The session ends earlier on sign-out, or with the secret that began it.")


class EndedSession(Event):
    """A session that was ended."""

    ended: Literal[True] = True
    continue_at: str | None = Field(
        default=None,
        description="For a person, if the OpenID provider offers it: the URL that ends the provider's session too.",
    )


OPENID_CALLBACK = "/sign-in/openid/callback"
"""The path below the console's URL to which an OpenID provider sends browsers back."""


class OpenIdRedirect(Event):
    """The beginning of a sign-in with OpenID Connect."""

    url: str = Field(description="The OpenID provider's page, to open in the browser.")
    flow: str = Field(
        description="A secret for the browser that signs in. It sends the secret back with the provider's answer."
    )


_OfProvider = Annotated[str, StringConstraints(max_length=4_096)]


class OpenIdCallback(Message):
    """The parameters with which an OpenID provider sends the browser back."""

    flow: Annotated[str, StringConstraints(min_length=1, max_length=200)] = Field(
        description="The browser's secret from the start of the sign-in."
    )
    state: _OfProvider = ""
    code: _OfProvider | None = None
    error: _OfProvider | None = None
    error_description: _OfProvider | None = None
    iss: _OfProvider | None = None


class BackChannelLogout(Message):
    """The notice of an OpenID provider that a person has signed out of it."""

    logout_token: Annotated[str, StringConstraints(min_length=1, max_length=8_192)] = Field(
        description="Logout token as defined by OpenID Connect Back-Channel Logout 1.0, signed by the provider."
    )


class EndedSessions(Event):
    """Sessions that were ended because their person has signed out elsewhere."""

    ended: int = Field(ge=0, description="Number of sessions that ended.")


ActorKind = Literal["key", "person", "token", "link", "command"]
"""An actor: the sender of a request, the holder of a signed link in an alert, or the user of the machine on which a
command was run."""


AuditOutcome = Literal["begun", "done", "refused", "failed"]
"""`begun` stays if the process crashed, so that the outcome of the action is unknown."""


class AuditEvent(Event):
    """A person's action.

    Published as `begun` before anything is done, and again with the outcome and the same `audit_id`.
    """

    audit_id: str = Field(description="Unique per action.")
    action: Identifier = Field(description="The operation's id in the HTTP API, such as `raise_cap`.")
    outcome: AuditOutcome
    by: str = Field(description="Name of the person, or of the API key.")
    actor: ActorKind
    actor_id: str | None = Field(
        default=None, description="Id of the API key, or a person's `sub` at the provider; null for a signed link."
    )
    details: dict[str, JsonValue] = Field(default_factory=dict, description="Parameters of the action, redacted.")
    reason: str | None = Field(default=None, description="Reason as it was given, redacted.")
    error: str | None = Field(default=None, description="Error code of the HTTP API if the action failed.")
    at: Timestamp = Field(description="When the action began.")
