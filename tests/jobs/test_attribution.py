"""Whose call a job is: the names in it, and which of them count."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from breakwater.identity.rules.callers import NOBODY, Attribution, Caller
from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.attribution import attribution_of, claim_of_another
from tests.tables import each_row

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "claude-code.json").read_text())
DEVICE = "0" * 64
ACCOUNT = "3f2b0c1e-0000-4000-8000-000000000001"
LEGACY = f"user_{DEVICE}_account_{ACCOUNT}_session_00000000-0000-4000-8000-000000000001"
METADATA = {"user": "ada", "team": "search"}


def job(metadata: dict[str, Any] | None = None, **fields: Any) -> Job:
    request = {} if "api_request" in fields else {"prompt": "x"}
    return Job.model_validate({"agent": "writer", **request, "metadata": metadata or {}, **fields})


def native(api: str, metadata: dict[str, Any] | None = None, /, **body: Any) -> Job:
    return job(metadata, api_request={"api": api, "body": body})


def caller(user: str | None, team: str | None) -> Caller:
    return Caller("key", "id", "laptop", ("submit",), datetime.now(UTC), user=user, team=team)


@each_row(
    ("sent", "bound", "forwarded", "expected"),
    [
        (job(), NOBODY, NOBODY, (None, None)),
        (job(METADATA), NOBODY, NOBODY, ("ada", "search")),
        (job({"user": 42}), NOBODY, NOBODY, ("42", None)),
        (job({"user": "", "team": {"name": "search"}}), NOBODY, NOBODY, (None, None)),
        (job({"user": True, "team": 1.5}), NOBODY, NOBODY, (None, None)),
        (job(METADATA, params={"user": "bob"}), NOBODY, NOBODY, ("bob", "search")),
        (job(params={"user": "bob", "safety_identifier": "hash"}), NOBODY, NOBODY, ("hash", None)),
        (job(params={"user": 42}), NOBODY, NOBODY, (None, None)),
        (native("responses", METADATA, input="x", user="bob"), NOBODY, NOBODY, ("bob", "search")),
        (native("embeddings", input="x", safety_identifier="hash"), NOBODY, NOBODY, ("hash", None)),
        (native("messages", METADATA, metadata={"user_id": "bob"}), NOBODY, NOBODY, ("bob", "search")),
        (native("messages", METADATA, user="bob"), NOBODY, NOBODY, ("ada", "search")),
        (native("messages", metadata={"user_id": LEGACY}), NOBODY, NOBODY, (ACCOUNT, None)),
        (native("messages", metadata={"user_id": LEGACY.replace(ACCOUNT, "")}), NOBODY, NOBODY, (DEVICE, None)),
        (native("messages", metadata=RECORDED["body"]["metadata"]), NOBODY, NOBODY, (DEVICE, None)),
        (native("messages", metadata={"user_id": "{"}), NOBODY, NOBODY, ("{", None)),
        (native("messages", metadata={"user_id": '{"id": "x"}'}), NOBODY, NOBODY, ('{"id": "x"}', None)),
        (job(METADATA, params={"user": "bob"}), NOBODY, Attribution(user="eve"), ("eve", "search")),
        (job(METADATA), NOBODY, Attribution("eve", "ads"), ("eve", "ads")),
        (job(METADATA), Attribution(user="ada"), Attribution("eve", "ads"), ("ada", "ads")),
        (job(), Attribution("ada", "search"), NOBODY, ("ada", "search")),
    ],
)
def test_a_keys_names_come_first_then_a_proxys_then_those_of_the_request_then_the_metadata(
    sent: Job, bound: Attribution, forwarded: Attribution, expected: tuple[str | None, str | None]
) -> None:
    assert attribution_of(sent, bound, forwarded) == Attribution(*expected)


@each_row(
    ("sent", "sender", "path"),
    [
        (job({"user": "eve"}), caller("ada", None), "metadata.user"),
        (job({"user": "ada", "team": "ads"}), caller("ada", "search"), "metadata.team"),
        (job({"user": "ada"}, params={"user": "eve"}), caller("ada", None), "params.user"),
        (job(params={"user": "ada", "safety_identifier": "x"}), caller("ada", None), "params.safety_identifier"),
        (native("responses", input="x", user="eve"), caller("ada", None), "api_request.body.user"),
        (native("messages", metadata={"user_id": "eve"}), caller("ada", None), "api_request.body.metadata.user_id"),
        (job(METADATA), caller("ada", "search"), None),
        (job({"user": "eve"}), caller(None, "search"), None),
        (job({"user": "eve", "team": "ads"}), caller(None, None), None),
        (native("messages", metadata={"user_id": LEGACY}), caller("ada", None), None),
        (native("messages", metadata=RECORDED["body"]["metadata"]), caller("ada", "search"), None),
    ],
)
def test_a_bound_key_names_no_other_user_or_team_but_what_claude_code_makes_up_names_nobody(
    sent: Job, sender: Caller, path: str | None
) -> None:
    claim = claim_of_another(sender, sent)
    assert (claim and claim.path) == path
