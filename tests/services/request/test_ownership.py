"""Whose a job is: what a key may submit, and which jobs it sees."""

from __future__ import annotations

import json
from typing import Any

import pytest
from nats.aio.msg import Msg

from breakwater.identity.api_keys import create_key
from breakwater.kernel.nats.subjects import Header, decode_token
from tests.helpers import until
from tests.services.request.conftest import Answer, HttpApi, answer_jobs, new_id


def key(api: HttpApi, name: str, *, scopes: Any = ("submit",), **bound: Any) -> dict[str, str]:
    return {"Authorization": f"Bearer {create_key(api.settings.api_keys_file, name, scopes, **bound)}"}


async def seen(api: HttpApi, job_id: str, headers: dict[str, str]) -> tuple[int, int]:
    """The status of a job's answer, and of its progress."""
    job = await api.ask("GET", f"/api/v1/jobs/{job_id}", headers=headers)
    progress = await api.ask("HEAD", f"/api/v1/jobs/{job_id}/progress", headers=headers)
    return job.status, progress.status


async def submit(api: HttpApi, headers: dict[str, str], *, query: str = "", **job: Any) -> Answer:
    return await api.post({"agent": "writer", "prompt": "x", **job}, query=query, **headers)


async def test_a_job_is_seen_by_keys_of_the_name_that_sent_it_and_by_operators(api: HttpApi) -> None:
    one, again, other = key(api, "one"), key(api, "one"), key(api, "other")
    operator, reader = key(api, "op", scopes=("submit", "operate")), key(api, "reader", scopes=("read",))
    undecided = (await submit(api, one)).json["job_id"]
    await answer_jobs(api.bus)
    decided = (await submit(api, one, query="?wait_s=60")).json["job_id"]
    for job_id, status in ((undecided, 202), (decided, 200)):
        assert await seen(api, job_id, one) == (status, 200)
        assert await seen(api, job_id, again) == (status, 200)
        assert await seen(api, job_id, other) == (404, 404)
        assert await seen(api, job_id, operator) == (status, 200)
        assert (await seen(api, job_id, reader))[1] == 200
    hidden = await api.ask("GET", f"/api/v1/jobs/{decided}", headers=other)
    unknown = await api.ask("GET", "/api/v1/jobs/unknown", headers=other)
    assert hidden.message.replace(decided, "unknown") == unknown.message


async def test_an_id_is_a_name_of_the_key_that_uses_it(api: HttpApi) -> None:
    one, other = key(api, "one"), key(api, "other")
    await answer_jobs(api.bus)
    job_id = new_id()
    first = await submit(api, one, job_id=job_id, query="?wait_s=60")
    assert (first.status, (await submit(api, one, job_id=job_id, query="?wait_s=60")).body) == (200, first.body)
    for query, status in (("", 202), ("?wait_s=60", 200)):
        another = await submit(api, other, job_id=job_id, prompt="y", query=query)
        assert (another.status, another.json["job_id"]) == (status, job_id)
        refused = await submit(api, one, job_id=job_id, prompt="z", query=query)
        assert (refused.status, refused.code) == (409, "id_conflict")


async def test_a_bound_key_submits_for_its_tenants_and_agents_and_sees_their_jobs(api: HttpApi) -> None:
    acme, rival = key(api, "acme", tenants=("acme",)), key(api, "rival", tenants=("rival",))
    both, narrow = key(api, "both", tenants=("acme", "rival")), key(api, "narrow", agents=("reader",))
    await answer_jobs(api.bus)
    bound = await submit(api, acme, query="?wait_s=60")
    assert bound.json["tenant"] == "acme"
    assert (await submit(api, acme, tenant=None, query="?wait_s=60")).json["tenant"] == "acme"
    for headers, job, path in (
        (acme, {"tenant": "rival"}, "tenant"),
        (both, {}, "tenant"),
        (narrow, {}, "agent"),
    ):
        refused = await submit(api, headers, **job)
        assert (refused.status, refused.code) == (403, "forbidden")
        assert refused.json["error"]["details"][0]["path"] == path
    job_id = bound.json["job_id"]
    assert [(await seen(api, job_id, headers))[0] for headers in (acme, both, rival, narrow)] == [200, 200, 404, 404]


async def test_a_key_asks_only_for_its_models_in_every_dialect_and_is_shown_no_others(
    governed: HttpApi, subtests: pytest.Subtests
) -> None:
    bound = key(governed, "bound", models=("m", "allowed"))
    ask = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
    refusals: list[tuple[str, dict[str, Any], str]] = [
        ("/api/v1/jobs", {"agent": "writer", "prompt": "x", "model": "other/n"}, "not for 'other/n'"),
        ("/api/v1/jobs", {"agent": "writer", "prompt": "x", "fallback_models": ["other/n"]}, "other/n"),
        ("/api/v1/jobs", {"agent": "by-model", "prompt": "x"}, "begins with model 'shared'"),
        ("/api/v1/plans", {"jobs": [{"agent": "by-model", "prompt": "x"}]}, "'m' or 'allowed' alone"),
        ("/v1/chat/completions", {"model": "writer/other/n", **ask}, "not for 'other/n'"),
        ("/v1/messages", {"model": "by-model", **ask}, "begins with model 'shared'"),
        ("/v1/responses", {"model": "by-model", "input": "x"}, "begins with model 'shared'"),
        ("/v1/embeddings", {"model": "by-model", "input": "x"}, "begins with model 'shared'"),
    ]
    for path, body, words in refusals:
        with subtests.test(f"{path} {body}"):
            refused = await governed.ask("POST", path, json=body, headers=bound)
            assert refused.status == 403
            assert words in refused.message
    assert (await submit(governed, bound)).status == 202  # the fallback model of the agent is the config's choice
    assert (await submit(governed, bound, model="allowed")).status == 202
    listed = [model["id"] for model in (await governed.ask("GET", "/v1/models", headers=bound)).json["data"]]
    assert "writer" in listed
    assert "writer/allowed" in listed
    assert "by-model" not in listed
    assert not [name for name in listed if name.endswith("/n") or "shared" in name]
    assert (await governed.ask("GET", "/v1/models/by-model", headers=bound)).status == 404


async def test_a_key_names_an_inbox_or_a_subject_below_its_own_prefix_for_answers(api: HttpApi) -> None:
    own, operator = key(api, "a key"), key(api, "op", scopes=("submit", "operate"))
    for reply_to, allowed in (
        ("_INBOX.abc.1", (own, operator)),
        ("bw.replies.a%20key.1", (own, operator)),
        ("bw.replies.orders", (operator,)),
        ("bw.replies.a%20key2.1", (operator,)),
        ("bw.replies.program-support.orders", ()),
        ("bw.replies.program-support", ()),
        ("_INBOX.program-support.x", ()),
    ):
        for headers in (own, operator):
            answer = await submit(api, headers, reply_to=reply_to)
            if headers in allowed:
                assert answer.status == 202
            else:
                assert (answer.status, answer.code, answer.paths) == (422, "invalid_job", ["reply_to"])


async def test_a_job_names_the_key_that_submitted_it_also_where_it_belongs_to_others(api: HttpApi) -> None:
    sent: dict[str, Any] = {}

    async def hear(message: Msg) -> None:
        sent[message.subject] = message.headers or {}

    await api.bus.subscribe("bw.jobs.>", cb=hear)
    await api.bus.jetstream().account_info()
    for name, more in (("own", {}), ("acme's key", {"tenants": ("acme",)}), ("op", {"scopes": ("submit", "operate")})):
        assert (await submit(api, key(api, name, **more))).status == 202
        headers = await until(lambda: sent.pop("bw.jobs.writer", None), "the job")
        assert decode_token(headers[Header.SUBMITTED_BY.value]) == name
        assert (Header.OWNER.value in headers) == (name == "own")
        assert (await submit(api, key(api, name, **more), dry_run=True)).status == 202
        headers = await until(lambda: sent.pop("bw.jobs.writer", None), "the dry run")
        assert (Header.OPERATOR.value in headers) == (name == "op")


async def test_a_bound_key_is_told_of_its_own_agents_alone(api: HttpApi) -> None:
    narrow = key(api, "narrow", agents=("reader",))
    for wrong in ("writr", "readr", "x"):
        refused = await submit(api, narrow, agent=wrong)
        assert (refused.status, refused.code) == (404, "unknown_agent")
        assert b"writer" not in refused.body
        assert refused.json["error"]["details"][0]["message"] == "configured are reader"
    # Nor what the others allow.
    refused = await submit(api, narrow, agent="writer", model="other/unknown")
    assert (refused.status, refused.code) == (403, "forbidden")


async def test_a_key_bound_to_a_user_and_a_team_names_no_other_and_passes_its_own_on(api: HttpApi) -> None:
    tags = {"project": "ranking", "who's": "é"}
    bound = key(api, "ada's", user="ada@example.com", team="Data Science", tags=tags)
    sent: list[dict[str, str]] = []

    async def hear(message: Msg) -> None:
        sent.append(message.headers or {})

    await api.bus.subscribe("bw.jobs.>", cb=hear)
    await api.bus.jetstream().account_info()
    chat: dict[str, Any] = {"model": "writer", "messages": [{"role": "user", "content": "x"}]}
    refusals = [
        ("/api/v1/jobs", {"agent": "writer", "prompt": "x", "metadata": {"user": "eve"}}, 403, "metadata.user"),
        ("/api/v1/jobs", {"agent": "writer", "prompt": "x", "metadata": {"team": "ads"}}, 403, "metadata.team"),
        ("/v1/chat/completions", {**chat, "user": "eve"}, 403, "user"),
        ("/v1/chat/completions", {**chat, "safety_identifier": "eve"}, 403, "safety_identifier"),
        ("/v1/responses", {"model": "writer", "input": "x", "user": "eve"}, 403, "user"),
        ("/v1/messages", {**chat, "max_tokens": 9, "metadata": {"user_id": "eve"}}, 403, "metadata.user_id"),
    ]
    unusable = [
        ("/api/v1/jobs", {"agent": "writer", "prompt": "x", "metadata": {"user": "u" * 129}}, 422, "metadata.user"),
        ("/api/v1/jobs", {"agent": "writer", "prompt": "x", "metadata": {"team": "a\nb"}}, 422, "metadata.team"),
        ("/v1/chat/completions", {**chat, "user": "u" * 129}, 400, "user"),
        ("/v1/messages", {**chat, "max_tokens": 9, "metadata": {"user_id": "a\x00b"}}, 400, "metadata.user_id"),
    ]
    free = key(api, "free")
    for headers, rows in ((bound, refusals), (free, unusable)):
        for path, body, status, place in rows:
            answer = await api.ask("POST", path, json=body, headers=headers)
            assert (answer.status, place in answer.body.decode()) == (status, True), (path, answer.body)
    assert "is bound to 'ada@example.com'" in (await submit(api, bound, metadata={"user": "eve"})).message

    assert (await submit(api, bound, metadata={"user": "ada@example.com"})).status == 202
    headers = (await until(lambda: sent, "the job"))[0]
    names = [decode_token(headers[header.value]) for header in (Header.USER, Header.TEAM, Header.TAGS)]
    assert names[:2] == ["ada@example.com", "Data Science"]
    assert json.loads(names[2]) == tags
    assert (await submit(api, free, params={"user": "bob"}, metadata={"team": "ads"})).status == 202
    headers = (await until(lambda: sent[1:], "the other job"))[0]
    assert (headers[Header.USER.value], headers[Header.TEAM.value]) == ("bob", "ads")
    assert Header.TAGS.value not in headers
    assert len(sent) == 2
