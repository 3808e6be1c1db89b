"""The audit log of the HTTP API: what is in it of every action, and what is not done without it."""

from __future__ import annotations

import pytest

from breakwater.identity.api_keys import create_key
from breakwater.kernel.redis.connection import Redis
from tests.operator_cases import OPERATOR_CASES
from tests.services.request.conftest import HttpApi, StartApi, publish_alert
from tests.services.request.test_alerts_links import link
from tests.services.request.test_budgets import fill
from tests.services.request.test_operator_actions import WITHOUT_TARGETS

NAMES = {
    "breakers/isolate": "isolate_breaker",
    "breakers/reset": "reset_breaker",
    "guards/reset": "reset_task",
    "budgets/raise": "raise_cap",
    "alerts/ack": "acknowledge_incident",
    "alerts/resolve": "resolve_incident",
    "alerts/replay": "replay_alerts",
    "dlq/replay": "replay_dead_letters",
    "dlq/dismiss": "dismiss_dead_letters",
}
WHAT = ("action", "outcome", "by", "actor", "reason", "error")


async def test_every_action_is_recorded_before_it_is_done_and_with_its_outcome(
    start_api: StartApi, redis: Redis
) -> None:
    await fill(redis)
    async with start_api(WITHOUT_TARGETS) as api:
        key = create_key(api.settings.api_keys_file, "Zoë, on call", ("operate",))
        for case in OPERATOR_CASES:
            await api.ask("POST", f"/api/v1/{case.action}", json=case.body, headers={"Authorization": f"Bearer {key}"})
        recorded = await api.audit()
    assert len(recorded) == 2 * len(OPERATOR_CASES)
    for case, begun, ended in zip(OPERATOR_CASES, recorded[::2], recorded[1::2], strict=True):
        of_case = {"action": NAMES[case.action], "by": "Zoë, on call", "actor": "key", "actor_id": key.split("_")[1]}
        reason = case.body.get("reason") or case.body.get("why")
        assert begun == begun | of_case | {"outcome": "begun", "reason": reason, "error": None}
        # Of dead letters there are none, which is no mistake.
        refused = not case.action.startswith("dlq/")
        outcome = {"outcome": "refused", "error": case.unknown} if refused else {"outcome": "done"}
        assert ended == begun | outcome
        assert set(begun["details"]) == set(case.body) - {"reason", "why"}


async def test_what_is_done_is_recorded_as_done_redacted_and_once_for_each_request(governed: HttpApi) -> None:
    secret = "sk-proj-" + "aB3dE6gH9jK2" * 4
    for _ in range(2):
        await governed.act("breakers/isolate", agent="writer", model="m", reason=f"leaked {secret}")
    recorded = await governed.audit()
    assert [one["outcome"] for one in recorded] == ["begun", "done"] * 2
    assert len({one["audit_id"] for one in recorded}) == 2
    assert recorded[0]["details"] == {"agent": "writer", "model": "m"}
    assert secret not in str(recorded)
    assert recorded[0]["reason"].startswith("leaked ")


async def test_looking_and_jobs_are_no_actions_and_a_cancel_is_one_of_operators_alone(api: HttpApi) -> None:
    await api.ask("GET", "/api/v1/agents")
    programs = create_key(api.settings.api_keys_file, "program", ("submit",))
    for job_id, headers in (("mine", {"Authorization": f"Bearer {programs}"}), ("theirs", {})):
        await api.post({"agent": "writer", "prompt": "x", "job_id": job_id}, **headers)
        cancelled = await api.ask("POST", f"/api/v1/jobs/{job_id}/cancel", json={"reason": "stuck"}, headers=headers)
        assert cancelled.status == 202
    recorded = await api.audit()
    assert [tuple(one[name] for name in WHAT) for one in recorded] == [
        ("cancel_job", outcome, "tests", "key", "stuck", None) for outcome in ("begun", "done")
    ]
    assert recorded[0]["details"] == {"job_id": "theirs"}


async def test_who_acts_by_a_link_is_recorded_under_the_name_that_they_give(alerting: HttpApi) -> None:
    alert = await publish_alert(alerting, incident_id="inc_3f9a1c07d2e84b56a1c0d375")
    form = {"name": "Zoë", "reason": "on it", "action": "acknowledge"}
    answer = await alerting.ask("POST", link(alert.incident_id), data=form, allow_redirects=False)
    assert answer.status == 303, answer.body
    recorded = await alerting.audit()
    assert [tuple(one[name] for name in WHAT) for one in recorded] == [
        ("acknowledge_incident", outcome, "Zoë", "link", "on it", None) for outcome in ("begun", "done")
    ]
    assert recorded[0]["details"] == {"incident_id": alert.incident_id}


@pytest.mark.usefixtures("own_nats_server")
async def test_what_can_not_be_recorded_is_not_done(governed: HttpApi) -> None:
    await governed.bus.jetstream().delete_stream("AUDIT")
    answer = await governed.act("breakers/isolate", agent="writer", model="m")
    assert (answer.status, answer.code) == (503, "unavailable")
    assert await governed.events("bw.breakers.>") == []


async def test_nothing_is_recorded_of_who_may_not(governed: HttpApi) -> None:
    looks = create_key(governed.settings.api_keys_file, "looks", ("read",))
    sent = {"Authorization": f"Bearer {looks}"}
    assert (await governed.ask("POST", "/api/v1/breakers/reset", json={}, headers=sent)).status == 403
    assert await governed.audit() == []
