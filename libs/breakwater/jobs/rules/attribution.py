"""The user and the team whose call a job is: what its key says, else a trusted proxy, else the job itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import orjson
from pydantic import JsonValue

from breakwater.identity.rules.callers import NOBODY, Attribution, Caller
from breakwater.jobs.contract.job import Job

_CLAUDE_CODE_ID = re.compile(r"user_(?P<device>[0-9a-f]{64})_account_(?P<account>[0-9a-f-]*)_session_[0-9a-f-]+")
"""The `user_id` of Claude Code before 2.1.78; later versions write JSON."""


class NameClaim(NamedTuple):
    """A name of a user or a team in a job."""

    kind: Literal["user", "team"]
    path: str
    """The field of the job."""
    name: str
    by_program: bool = False
    """True if the client program has made the name up for its installation, so that it names nobody else."""


def name_claims(job: Job) -> Iterator[NameClaim]:
    """Yields the names of users and teams in a job; of each kind, the first one counts."""
    request = job.api_request
    if request is not None and request.api == "messages":
        metadata = request.body.get("metadata")
        user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
        if isinstance(user_id, str) and user_id:
            installation = _claude_code_installation(user_id)
            path = "api_request.body.metadata.user_id"
            yield NameClaim("user", path, installation or user_id, by_program=installation is not None)
    else:
        fields, path = (job.params, "params") if request is None else (request.body, "api_request.body")
        for field in ("safety_identifier", "user"):
            if (name := _text(fields.get(field), numbers=False)) is not None:
                yield NameClaim("user", f"{path}.{field}", name)
    if job.metadata:
        for kind in ("user", "team"):
            if (name := _text(job.metadata.get(kind))) is not None:
                yield NameClaim(kind, f"metadata.{kind}", name)


def attribution_of(job: Job, bound: Attribution, forwarded: Attribution = NOBODY) -> Attribution:
    """Returns the user and the team of a job.

    Args:
        job: the job, whose own names come last.
        bound: the names that its key or token is bound to; in the worker, those that `request` has resolved.
        forwarded: the names that a trusted proxy has set.
    """
    own_names = dict[str, str]()
    for claim in name_claims(job):
        own_names.setdefault(claim.kind, claim.name)
    return Attribution(
        bound.user or forwarded.user or own_names.get("user"), bound.team or forwarded.team or own_names.get("team")
    )


def claim_of_another(sender: Caller, job: Job) -> NameClaim | None:
    """Returns the first name in a job that is not the one that its key or token is bound to; None if there is none."""
    bound = {"user": sender.user, "team": sender.team}
    if bound == {"user": None, "team": None}:
        return None
    return next(
        (claim for claim in name_claims(job) if not claim.by_program and bound[claim.kind] not in (None, claim.name)),
        None,
    )


def _claude_code_installation(user_id: str) -> str | None:
    """Returns the account or else the device in a `user_id` of Claude Code, which also names the session."""
    fields: Mapping[str, object] = {}
    if (match := _CLAUDE_CODE_ID.fullmatch(user_id)) is not None:
        fields = {"account_uuid": match["account"], "device_id": match["device"]}
    elif user_id.startswith("{"):
        try:
            document = orjson.loads(user_id)
        except orjson.JSONDecodeError:
            return None
        fields = document if isinstance(document, dict) and "session_id" in document else {}
    names = (fields.get("account_uuid"), fields.get("device_id"))
    return next((name for name in names if isinstance(name, str) and name), None)


def _text(value: JsonValue, *, numbers: bool = True) -> str | None:
    """Returns a name as text; None for what names nobody: no text, or no whole number where those are names."""
    if isinstance(value, str):
        return value or None
    return str(value) if numbers and isinstance(value, int) and not isinstance(value, bool) else None
