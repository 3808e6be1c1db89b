"""What a key opens: the API, the document, and what is said to a key that may not."""

from __future__ import annotations

import json
import re
from typing import Any

from yarl import URL

from breakwater.identity.api_keys import create_key, revoke_key
from breakwater.identity.contract import KEY_SCOPES, KeyScope
from breakwater.services.request.openapi import document as openapi
from tests.server_sources import RunningServer
from tests.services.request.conftest import HttpApi, answer_jobs, lose_nats, new_id
from tests.tables import each_row

JOB = {"agent": "writer", "prompt": "x"}
METHODS = ("get", "post", "put", "patch", "delete")


def header(api: HttpApi, *scopes: KeyScope, name: str = "scoped") -> dict[str, str]:
    return {"Authorization": f"Bearer {create_key(api.settings.api_keys_file, name, scopes or KEY_SCOPES)}"}


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    paths = openapi()["paths"].items()
    return [(method, path, path_item[method]) for path, path_item in paths for method in METHODS if method in path_item]


async def status(api: HttpApi, method: str, path: str, headers: dict[str, str]) -> int:
    """How the API answers; what it answers may have no end."""
    url = URL(api.url + path, encoded=True)
    async with api.http.request(method, url, headers=headers, data=b"") as response:
        return response.status


async def test_the_api_lets_each_key_do_what_the_document_says_and_nothing_else(alerting: HttpApi) -> None:
    keys = {scope: header(alerting, scope) for scope in KEY_SCOPES}
    guarded = 0
    for method, path, operation in operations():
        asked = path.format(
            job_id=new_id(),
            incident_id="inc_3f9a1c07",
            dead_letter_id=1,
            model="writer",
            execution_id="x",
            plan_id="p",
            limit_id="l",
            response_id="resp_x",
            run_id="r",
            key="k",
        )
        alternatives: list[dict[str, list[KeyScope]]] = operation["security"]
        guarded += bool(alternatives)
        for scope, sent in keys.items():
            let_in = not alternatives or any(set(one["api_key"]) <= {scope} for one in alternatives)
            answered = await status(alerting, method.upper(), asked, sent)
            assert (answered == 403) is not let_in, (method, path, scope, answered)
            assert answered != 401
        refused = {scope for scope in KEY_SCOPES if not any(set(one["api_key"]) <= {scope} for one in alternatives)}
        if operation["tags"] != ["openid"]:
            assert ("403" in operation["responses"]) is bool(alternatives and refused), (method, path)
        assert ("401" in operation["responses"]) is bool(alternatives), (method, path)
    assert guarded >= 19


def test_the_document_says_in_words_what_is_needed() -> None:
    document = openapi()
    paths = document["paths"]
    assert paths["/api/v1/jobs"]["post"]["security"] == [{"api_key": ["submit"]}]
    assert paths["/api/v1/budgets"]["get"]["security"] == [{"api_key": ["read"]}]
    assert paths["/metrics"]["get"]["security"] == [{"api_key": ["read"]}]
    assert paths["/api/v1/breakers/reset"]["post"]["security"] == [{"api_key": ["operate"]}]
    assert paths["/api/v1/alerts/ack"]["post"]["security"] == [{"api_key": ["approve"]}, {"api_key": ["operate"]}]
    assert paths["/api/v1/key"]["get"]["security"] == [{"api_key": []}]
    for _, path, operation in operations():
        for alternative in operation["security"]:
            for scope in alternative["api_key"]:
                assert f"`{scope}`" in operation["description"].rpartition("Needs a key with the scope ")[2], path


FORBIDDEN = [
    ("read", "POST", "/api/v1/jobs", "submit"),
    ("operate", "GET", "/api/v1/jobs/j", "submit"),
    ("submit", "GET", "/api/v1/agents", "read"),
    ("operate", "GET", "/metrics", "read"),
    ("read", "POST", "/api/v1/breakers/reset", "operate"),
    ("submit", "POST", "/api/v1/guards/reset", "approve"),
    ("approve", "POST", "/api/v1/breakers/reset", "operate"),
    ("operate", "POST", "/api/v1/keys", "limits"),
]


@each_row(("has", "method", "path", "needed"), FORBIDDEN)
async def test_a_key_that_may_not_receives_what_it_has_what_it_takes_and_what_to_do(
    api: HttpApi, has: KeyScope, method: str, path: str, needed: str
) -> None:
    sent = header(api, has, name="on call")
    answer = await api.ask(method, path, headers=sent, json=JOB)
    assert (answer.status, answer.code) == (403, "forbidden")
    assert f"with the scope {needed}" in answer.message
    assert f"the key 'on call' has the scope {has};" in answer.message
    file_option = " --file FILE" if needed == "limits" else ""
    assert f"`breakwater keys create NAME --scope {needed}{file_option}`" in answer.message
    challenge = answer.headers["WWW-Authenticate"]
    assert challenge == f'Bearer realm="breakwater", error="insufficient_scope", scope="{needed}"'
    assert sent["Authorization"].split("_", 2)[2] not in answer.body.decode()


async def test_a_key_that_only_looks_changes_nothing(governed: HttpApi) -> None:
    sent = header(governed, "read", "submit")
    body = {"agent": "writer", "model": "m"}
    for path in ("/api/v1/breakers/isolate", "/%61pi/v1/breakers/isolate", "/api/v1/breakers%2Fisolate"):
        assert (await governed.ask("POST", path, json=body, headers=sent)).status == 403
    assert await governed.events("bw.breakers.>") == []
    assert (await governed.ask("POST", "/api/v1/jobs", json=JOB, headers=header(governed, "operate"))).status == 403
    assert await governed.queued() == 0


async def test_only_who_submits_reads_the_answer_whatever_the_job_is_called(api: HttpApi) -> None:
    await answer_jobs(api.bus)
    for job_id in (new_id(), f"{new_id()}/x", "progress", f"{new_id()}%2Fx", f"{new_id()}%2Fprogress"):
        decided = await api.post(JOB | {"job_id": job_id.replace("%2F", "/")}, query="?wait_s=60")
        assert (decided.status, decided.json["output"]) == (200, "answer to x")
        path = f"/api/v1/jobs/{job_id}"
        assert (await api.ask("GET", path)).json["output"] == "answer to x"
        assert (await api.ask("GET", path, headers=header(api, "submit", name="another"))).status == 404
        for method in ("GET", "HEAD"):
            answer = await api.ask(method, path, headers=header(api, "read", "operate"))
            assert answer.status == 403, (method, path)
            assert b"answer to x" not in answer.body


async def test_no_spelling_of_a_path_opens_an_answer(api: HttpApi) -> None:
    await answer_jobs(api.bus)
    job_id = new_id()
    await api.post(JOB | {"job_id": f"{job_id}/progress"}, query="?wait_s=60")
    sent = header(api, "read", "operate")
    for path in (
        f"/api/v1/jobs/{job_id}%2fprogress",
        f"/api/v1/jobs/{job_id}%2Fpro%67ress",
        f"/api/v1/jobs%2F{job_id}%2Fprogress",
        f"/api%2Fv1%2Fjobs%2F{job_id}%2Fprogress",
        f"/%61pi/v1/jobs/{job_id}%2Fprogress",
        f"/api/v1/jobs//{job_id}%2Fprogress",
    ):
        answer = await api.ask("GET", path, headers=sent)
        assert (answer.status, answer.code) == (403, "forbidden"), path


async def test_a_key_may_have_several_scopes(governed: HttpApi) -> None:
    sent = header(governed, "read", "operate")
    assert (await governed.ask("GET", "/api/v1/agents", headers=sent)).status == 200
    body = {"agent": "writer", "model": "m"}
    assert (await governed.ask("POST", "/api/v1/breakers/isolate", headers=sent, json=body)).status == 200
    assert (await governed.ask("POST", "/api/v1/jobs", headers=sent, json=JOB)).status == 403


async def test_each_key_is_shown_itself_and_no_other(api: HttpApi) -> None:
    header(api, name="another")
    for scopes in (("submit",), ("read",), ("operate",), ("read", "operate")):
        sent = header(api, *scopes, name="me")
        answer = await api.ask("GET", "/api/v1/key", headers=sent)
        assert answer.status == 200
        shown = answer.json
        assert shown.pop("created_at").endswith("Z")
        key_id = sent["Authorization"].split("_")[1]
        assert shown == {
            "id": key_id,
            "name": "me",
            "scopes": list(scopes),
            "tenants": [],
            "agents": [],
            "residency": None,
            "user": None,
            "team": None,
            "tags": {},
            "priority": None,
            "weight": 1,
            "models": [],
            "expires_at": None,
            "kind": "key",
            "roles": [],
        }


async def test_nobody_is_shown_without_a_key_that_is_known(api: HttpApi) -> None:
    sent = header(api, "read")
    revoke_key(api.settings.api_keys_file, sent["Authorization"].split("_")[1])
    for one in (sent, {"Authorization": ""}):
        answer = await api.ask("GET", "/api/v1/key", headers=one)
        assert (answer.status, answer.code) == (401, "unauthorized")


async def test_a_key_is_shown_while_nats_is_away(api: HttpApi, own_nats_server: RunningServer) -> None:
    await lose_nats(api, own_nats_server)
    assert (await api.ask("GET", "/api/v1/key")).status == 200


async def test_what_is_not_there_is_not_found_by_any_key(api: HttpApi) -> None:
    for scope in KEY_SCOPES:
        for path in ("/api", "/api/nothing", "/api/v2/jobs"):
            assert (await api.ask("GET", path, headers=header(api, scope))).status == 404
    assert (await api.ask("GET", "/api/v1/nothing", headers=header(api, "read"))).status == 404


async def test_a_scope_that_is_taken_away_is_missed_by_the_next_request(api: HttpApi) -> None:
    sent, file = header(api, "read", name="me"), api.settings.api_keys_file
    assert (await api.ask("GET", "/api/v1/agents", headers=sent)).status == 200
    # The fixture's own key, which has all scopes, comes first in the file.
    before, _, after = file.read_text().rpartition('"read"')
    file.write_text(f'{before}"submit"{after}')
    assert (await api.ask("GET", "/api/v1/agents", headers=sent)).status == 403


async def test_the_bounds_of_an_agent_are_named_only_to_keys_that_operate(api: HttpApi, subtests: Any) -> None:
    ask = {"model": "writer", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
    apis: dict[str, Any] = {
        "/v1/chat/completions": ask,
        "/v1/messages": ask,
        "/v1/responses": {"model": "writer", "input": "x"},
        "/v1/embeddings": {"model": "writer", "input": "x"},
    }
    rules = [
        ("guard", {"max_cost_usd": "20"}, "$10.00"),
        ("guard", {"max_tokens": 300_001}, "200000"),
        ("guard", {"max_iterations": 99}, "10"),
        ("guard", {"same_error": 99}, "5"),
        ("breaker", {"consecutive_failures": 99}, "3"),
        ("retry", {"max_attempts": 99}, "3"),
        ("retry", {"base_s": 7.25}, None),  # above the agent's max_delay_s of 5
        ("total_timeout_s", 999, "300"),
    ]
    submitter, operator = header(api, "submit"), header(api, "submit", "operate", name="operator")
    for name, value, bound in rules:
        sent = {f"x-breakwater-{name.replace('_', '-')}": json.dumps(value)}
        job = JOB | {name: value}
        requests = [("/api/v1/jobs", job, {}), ("/api/v1/plans", {"jobs": [job]}, {})]
        requests += [(path, body, sent) for path, body in apis.items()]
        requests += [(path, body | {"stream": True}, sent) for path, body in apis.items() if "embeddings" not in path]
        for path, body, headers in requests:
            with subtests.test(f"{path} {name} {value}"):
                refused = await api.ask("POST", path, json=body, headers=submitter | headers)
                told = await api.ask("POST", path, json=body, headers=operator | headers)
                assert (refused.status, told.status) in {(422, 422), (400, 400)}
                texts = [
                    re.sub(r'99\d*|jobs\.0|"request_id".*', "", answer.body.decode()) for answer in (refused, told)
                ]
                assert not re.search(r"\d", texts[0]), texts[0]
                assert bound is None or bound in texts[1]
