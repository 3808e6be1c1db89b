"""Events become incidents: once, whatever the number of processes and of deliveries."""

import asyncio
import base64
import gc
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from breakwater.alerts.rules import grouping
from breakwater.alerts.rules.incidents import IncidentRules, decide
from breakwater.alerts.rules.signals import of_execution
from breakwater.breakers.contract import BreakerTransition
from breakwater.jobs.contract.execution import Execution
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.publisher import Publisher
from breakwater.services.alerter import handlers
from tests.helpers import until
from tests.records.samples import attempt
from tests.server_sources import RunningServer
from tests.services.alerter.kit import Bus, alerter, bus_of, config_of, crossed, opened, stopped


async def test_three_alerters_make_one_incident_of_each_breaker(own_nats_server: RunningServer) -> None:
    config = config_of()
    async with bus_of(own_nats_server.url, config) as bus:
        events = [opened(1, model=f"m{n}", transition_id=f"writer/m{n}#1") for n in range(40)]
        async with alerter(bus, config, processes=3):
            await asyncio.gather(*(bus.publish(event) for event in events))
            # The same events stored twice, as a breaker service that lost its PubAck after the window would.
            await asyncio.gather(*(bus.publish(event, suffix="-again") for event in events))
            await bus.finished("EVENTS", "alerter", 80)
        alerts = await bus.alerts()
    assert sorted(alert.source_id for alert in alerts) == sorted(event.transition_id for event in events)
    assert {alert.change for alert in alerts} == {"opened"}


async def test_a_breaker_that_flaps_before_three_alerters_is_one_incident_and_is_heard_in_order(
    own_nats_server: RunningServer,
) -> None:
    config = config_of()
    flaps: list[BreakerTransition] = []
    for version in range(1, 101, 2):
        flaps.append(opened(version))
        flaps.append(opened(version + 1, from_state="half_open", to_state="closed", reason="the probe succeeded"))
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config, processes=3):
        await bus.publish(*flaps)
        await bus.finished("EVENTS", "alerter", len(flaps))
        alerts = await bus.alerts()
    assert [alert.version for alert in alerts] == list(range(1, 101))
    assert [alert.change for alert in alerts] == ["opened", "resolved"] + ["reopened", "resolved"] * 49
    assert len({alert.incident_id for alert in alerts}) == 1
    assert (alerts[-1].count, alerts[-1].status) == (50, "resolved")


async def test_an_event_that_is_delivered_again_makes_no_second_alert(own_nats_server: RunningServer) -> None:
    config = config_of()
    async with bus_of(own_nats_server.url, config) as bus:
        await bus.publish(opened())
        jetstream = bus.client.jetstream()
        # A process that took the event, and died before it acknowledged.
        lost = await jetstream.pull_subscribe_bind("alerter", "EVENTS")
        [taken] = await lost.fetch(1, timeout=5)
        await taken.nak()
        async with alerter(bus, config):
            await bus.finished("EVENTS", "alerter", 1)
        # And one that died after it published, before it acknowledged: the consumer starts over.
        await jetstream.delete_consumer("EVENTS", "alerter")
        async with bus_of(own_nats_server.url, config), alerter(bus, config):
            await bus.finished("EVENTS", "alerter", 1)
        assert len(await bus.alerts()) == 1


async def test_a_flapping_breaker_is_one_incident_until_it_closes(own_nats_server: RunningServer) -> None:
    config = config_of()
    flaps: list[BreakerTransition] = [opened(1)]
    for version in range(2, 12, 2):
        flaps.append(opened(version, from_state="open", to_state="half_open", reason="the cool-down is over"))
        flaps.append(opened(version + 1, from_state="half_open", reason="the half-open probe failed"))
    flaps.append(opened(12, from_state="open", to_state="half_open", reason="the cool-down is over"))
    flaps.append(opened(13, from_state="half_open", to_state="closed", reason="the half-open probe succeeded"))
    flaps.append(opened(14))
    async with bus_of(own_nats_server.url, config) as bus:
        await bus.publish(*flaps)
        async with alerter(bus, config):
            await bus.finished("EVENTS", "alerter", len(flaps))
        alerts = await bus.alerts()
    assert [(alert.event, alert.change, alert.source_id) for alert in alerts] == [
        ("breaker_open", "opened", "writer/gpt-4.1#7.1"),
        ("breaker_closed", "resolved", "writer/gpt-4.1#7.13"),
        ("breaker_open", "reopened", "writer/gpt-4.1#7.14"),
    ]


async def test_a_breaker_forced_open_is_an_incident_until_somebody_resets_it(own_nats_server: RunningServer) -> None:
    config = config_of()
    shared = {"scope": "provider", "agent": "*", "model": "openai/*", "by": "ann"}
    steps = [
        opened(1, to_state="isolated", reason="isolated by ann: outage", **shared),
        opened(2, from_state="isolated", to_state="closed", reason="reset by ann", **shared),
        opened(3, from_state="closed", to_state="closed", reason="reset by ann", **shared),
        # It was reported when it opened; an operator only keeps it open.
        opened(4),
        opened(5, from_state="open", to_state="isolated", reason="isolated by ann"),
        opened(6, from_state="isolated", to_state="closed", reason="reset by ann"),
    ]
    async with bus_of(own_nats_server.url, config) as bus:
        await bus.publish(*steps)
        async with alerter(bus, config):
            await bus.finished("EVENTS", "alerter", len(steps))
        alerts = await bus.alerts()
    assert [(alert.event, alert.source_id) for alert in alerts] == [
        ("breaker_open", "writer/gpt-4.1#7.1"),
        ("breaker_closed", "writer/gpt-4.1#7.2"),
        ("breaker_open", "writer/gpt-4.1#7.4"),
        ("breaker_closed", "writer/gpt-4.1#7.6"),
    ]
    assert alerts[0].title == "Breaker open: all agents on provider openai"
    assert "Isolated by ann: outage. " in alerts[0].text


async def test_a_stopped_task_waits_for_a_person_and_its_reset_ends_that(own_nats_server: RunningServer) -> None:
    config, now = config_of(reminders={"first_s": 604_800, "max_s": 604_800}), datetime.now(UTC)
    async with bus_of(own_nats_server.url, config) as bus:
        await bus.publish(stopped("t1", at=now), stopped("t2", at=now, tenant="acme"))
        await bus.publish(stopped("t1", at=now), suffix="-again")
        await bus.publish(stopped("t1", at=now, event_id="/t1@8", kind="reset", reason="reset by ann", by="ann"))
        async with alerter(bus, config, processes=2):
            await bus.finished("EVENTS", "alerter", 4)
        first, second, reset = await bus.alerts()
        stored = await bus.client.jetstream().get_msg("ALERTS", 1)
    assert (first.event, first.severity, first.title) == ("guard_tripped", "warning", "Task stopped: t1 of writer")
    assert (first.status, first.tenant) == ("pending", None)
    assert first.remind_at is not None
    assert (reset.incident_id, reset.status, reset.resolved_by) == (first.incident_id, "resolved", "ann")
    assert (second.title, second.tenant) == ("Task stopped: t2 of writer", "acme")
    assert stored.subject == "bw.alerts.guard_tripped"


async def test_a_consumer_from_before_the_guards_hears_of_them(own_nats_server: RunningServer) -> None:
    config = config_of()
    async with bus_of(own_nats_server.url, config) as bus:
        jetstream = bus.client.jetstream()
        now = (await jetstream.consumer_info("EVENTS", "alerter")).config
        await jetstream.add_consumer("EVENTS", now.evolve(filter_subjects=["bw.breakers.>", "bw.budgets.>"]))
        await bus.publish(opened())
        async with bus_of(own_nats_server.url, config), alerter(bus, config):
            await bus.publish(stopped(at=datetime.now(UTC)))  # an older one is due for a reminder
            await bus.finished("EVENTS", "alerter", 2)
        assert [alert.event for alert in await bus.alerts()] == ["breaker_open", "guard_tripped"]


async def test_budget_crossings_become_alerts_with_their_spend(own_nats_server: RunningServer) -> None:
    config = config_of()
    async with bus_of(own_nats_server.url, config) as bus:
        await bus.publish(crossed(80), crossed(100, total="5.25"))
        async with alerter(bus, config):
            await bus.finished("EVENTS", "alerter", 2)
        soft, hard = await bus.alerts()
        stored = await bus.client.jetstream().get_msg("ALERTS", 1)
    assert (soft.event, soft.severity, soft.agent) == ("budget_soft_cap", "warning", None)
    assert "$4.00 of $5.00 (80 %)" in soft.text
    assert (hard.event, hard.severity) == ("budget_hard_cap", "critical")
    assert "$5.25 of $5.00 (105 %)" in hard.text
    assert stored.subject == "bw.alerts.budget_soft_cap"
    assert stored.headers is not None
    assert stored.headers["ce-id"] == soft.alert_id


async def test_events_that_nobody_asked_for_are_done_with_quietly(own_nats_server: RunningServer) -> None:
    config = config_of(on_events=["budget_hard_cap"])
    async with bus_of(own_nats_server.url, config) as bus:
        await bus.publish(opened(), crossed(80), crossed(100))
        async with alerter(bus, config):
            await bus.finished("EVENTS", "alerter", 3)
        assert [alert.event for alert in await bus.alerts()] == ["budget_hard_cap"]


async def test_an_unreadable_event_is_kept_and_holds_nothing_up(own_nats_server: RunningServer) -> None:
    config = config_of()
    async with bus_of(own_nats_server.url, config) as bus:
        await bus.client.jetstream().publish("bw.breakers.writer.gpt", b"{no json: sk-secret")
        await bus.client.jetstream().publish("bw.budgets.global.daily", b'{"kind": "sk-secret"}')
        await bus.client.jetstream().publish("bw.guards.writer", b'{"kind": "sk-secret"}')
        await bus.publish(opened())
        async with alerter(bus, config):
            await bus.finished("EVENTS", "alerter", 4)
            # That there are dead letters is an incident of its own, however many there are.
            await bus.finished("DLQ", "alerter-dead-letters", 3)
        first, second, third = await bus.dead_letters()
        alerts = await bus.alerts()
        assert {alert.event for alert in alerts} == {"breaker_open", "job_dead_lettered"}
        assert len({alert.incident_id for alert in alerts}) == 2
        assert "sk-secret" not in str(alerts)
    assert (first.reason, first.stream, first.sequence) == ("unreadable", "EVENTS", 1)
    assert base64.b64decode(first.payload_base64) == b"{no json: sk-secret"
    assert second.subject == "bw.budgets.global.daily"
    assert "event_id: Field required" in second.error
    assert third.subject == "bw.guards.writer"
    assert "task_id: Field required" in third.error
    assert "sk-secret" not in first.error + second.error + third.error


async def test_an_alert_waits_for_a_server_that_is_away(own_nats_server: RunningServer) -> None:
    config = config_of()
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config):
        own_nats_server.kill()
        await own_nats_server.restart_async()
        async with bus_of(own_nats_server.url, config) as again:
            await again.publish(opened())
            await again.finished("EVENTS", "alerter", 1)
            assert len(await again.alerts()) == 1


def ended(number: int, at: datetime | None = None, **fields: Any) -> Execution:
    given: dict[str, Any] = {
        "execution_id": f"e{number}",
        "job_id": f"e{number}",
        "agent": "writer",
        "status": "dead_lettered",
        "reason": "error",
        "attempts_count": 3,
        "error": {"kind": "server", "class": "ServerError", "message": "overloaded: sk-secret", "status_code": 503},
        "duration_ms": 100,
    }
    moment = at or datetime.now(UTC)
    times = dict.fromkeys(("queued_at", "dispatched_at", "completed_at"), moment)
    return Execution.model_validate(given | times | fields)


async def publish_executions(bus: Bus, *executions: Execution) -> None:
    publisher = Publisher(lambda: bus.client, "test")
    for one in executions:
        subject = subjects.execution(one.agent, one.execution_id)
        await publisher.event(subject, one, id=one.execution_id, at=one.completed_at, once=True)


async def test_a_thousand_failing_jobs_are_one_incident_that_counts_them(
    own_nats_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouping, "GROUP_INTERVAL_S", 0.5)
    config = config_of()
    failed = [ended(number) for number in range(1000)]
    failed += [ended(2000 + number, reason="breaker_open") for number in range(5)]
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config, processes=2):
        await publish_executions(bus, *failed)
        await bus.finished("EVENTS", "alerter-executions", len(failed))
        alerts = await bus.alerts()
    assert len({alert.incident_id for alert in alerts}) == 1
    assert alerts[0].event == "retries_exhausted"
    assert alerts[-1].count == 1000
    assert len(alerts) < 100
    assert "sk-secret" not in str(alerts)


async def test_a_failure_that_stays_away_is_over_by_itself(own_nats_server: RunningServer) -> None:
    config = config_of(quiet_s=2)
    [failure] = of_execution(ended(1, datetime.now(UTC) - timedelta(minutes=1)), None, None)
    incident = decide(failure, None, IncidentRules.of(config.alerts))
    assert incident is not None
    async with bus_of(own_nats_server.url, config) as bus:
        # While no alerter ran, its time has passed, but it has happened again.
        await bus.publish_alert(incident)
        await publish_executions(bus, ended(2))
        async with alerter(bus, config, processes=2):
            await bus.reported("resolved")
            *changes, last = await bus.alerts()
    assert [alert.change for alert in changes] == ["opened", "repeated"]
    assert (last.change, last.resolved_by) == ("resolved", None)
    assert last.reason is not None
    assert last.reason.startswith("it has not happened again since")


async def test_who_does_not_answer_is_reminded(own_nats_server: RunningServer) -> None:
    config = config_of(reminders={"first_s": 1, "max_s": 1})
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config, processes=2):
        await bus.publish(stopped(at=datetime.now(UTC)))
        await bus.reported("reminded", times=2)
        alerts = await bus.alerts()
    assert [alert.reminders for alert in alerts][:3] == [0, 1, 2]


async def test_an_execution_that_costs_too_much_is_reported_though_it_succeeds(own_nats_server: RunningServer) -> None:
    config = config_of(anomalies={"execution_cost_usd": "0.10", "execution_duration_s": 5})
    good = {"status": "succeeded", "reason": None, "error": None}
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config):
        await publish_executions(
            bus, ended(1, total_cost="0.10", **good), ended(2, total_cost="0.11", duration_ms=5001, **good)
        )
        await bus.finished("EVENTS", "alerter-executions", 2)
        alerts = await bus.alerts()
    assert sorted(alert.key for alert in alerts) == [
        "agent_anomaly/writer/execution_cost",
        "agent_anomaly/writer/execution_duration",
    ]
    assert {alert.payload["execution_id"] for alert in alerts} == {"e2"}


async def test_an_agent_whose_answers_are_cut_off_or_whose_usage_is_absurd_is_reported(
    own_nats_server: RunningServer,
) -> None:
    good: dict[str, Any] = {"status": "succeeded", "reason": None, "error": None}
    short = [ended(number, finish_reason="length", **good) for number in range(10)]
    problem = "1.00e+15 output tokens were reported"
    absurd = ended(10, attempts=(attempt("e10", usage_problem=problem),), finish_reason="stop", **good)
    config = config_of()
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config):
        await publish_executions(bus, *short, absurd)
        await bus.finished("EVENTS", "alerter-executions", 11)
        alerts = {alert.key: alert for alert in await bus.alerts()}
    assert sorted(alerts) == ["agent_anomaly/writer/finish_reason", "agent_anomaly/writer/reported_usage"]
    assert {alert.severity for alert in alerts.values()} == {"warning"}
    assert problem in alerts["agent_anomaly/writer/reported_usage"].text
    assert "10 of the agent's last 10 answers" in alerts["agent_anomaly/writer/finish_reason"].text


async def test_jobs_that_fail_by_what_has_opened_a_breaker_are_no_second_incident(
    own_nats_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouping, "GROUP_INTERVAL_S", 2.5)
    config = config_of()
    failed = [ended(number, requested_model="gpt-4.1") for number in range(3)]
    async with bus_of(own_nats_server.url, config) as bus:
        async with alerter(bus, config):
            # The jobs are heard of first: their breaker opens by them, a moment later.
            await publish_executions(bus, *failed)
            await bus.publish(opened(at=datetime.now(UTC)))
            await bus.finished("EVENTS", "alerter-executions", 3)
            await publish_executions(bus, ended(9, requested_model="another"))
            await bus.finished("EVENTS", "alerter-executions", 5)
            alerts = await bus.alerts()
        assert [(alert.event, alert.model) for alert in alerts] == [
            ("breaker_open", "gpt-4.1"),
            ("retries_exhausted", "another"),
        ]

        # Of two agents that fail while no alerter runs, the breaker of one explains it, and that of the other does not.
        monkeypatch.setattr(grouping, "GROUP_WAIT_S", 0)
        at = datetime.now(UTC) - timedelta(minutes=30)
        explained = ended(10, at, agent="explained", requested_model="gpt-4.1")
        early = ended(11, at - timedelta(minutes=5), agent="early", requested_model="gpt-4.1")
        await publish_executions(bus, explained, early)
        await bus.publish(
            *(stopped(f"t{number}", event_id=f"/t{number}@7", at=at) for number in range(30)),
            *(
                opened(transition_id=f"{agent}/gpt-4.1#7.1", agent=agent, at=at + timedelta(seconds=1))
                for agent in ("explained", "early")
            ),
            opened(
                transition_id="explained/gpt-4.1#7.2",
                agent="explained",
                from_state="half_open",
                to_state="closed",
                rule=None,
                at=at + timedelta(minutes=1),
            ),
        )
        async with alerter(bus, config):
            await bus.finished("EVENTS", "alerter-executions", 7)
            alerts = await bus.alerts()
    assert [alert.agent for alert in alerts if alert.event == "retries_exhausted"] == ["writer", "early"]


async def test_failures_that_wait_for_events_hold_up_no_other_alert_and_little_memory(
    own_nats_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouping, "GROUP_WAIT_S", 0)
    monkeypatch.setattr(handlers, "MAX_GROUPED", 5)
    config = config_of(anomalies={"execution_cost_usd": "0.10"})
    costly = ended(99, total_cost="0.11", status="succeeded", reason=None, error=None)
    gc.collect()
    of_other_tests = deliveries_in_memory()
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config):
        await bus.client.jetstream().delete_consumer("EVENTS", "alerter")
        await publish_executions(bus, *(ended(number, requested_model="gpt-4.1") for number in range(50)), costly)
        await bus.reported("opened")
        assert [alert.event for alert in await bus.alerts()] == ["agent_anomaly"]

        async def are_few() -> bool:
            return deliveries_in_memory() - of_other_tests <= 5

        await until(are_few, "events that are acknowledged to be gone")


def deliveries_in_memory() -> int:
    return sum(type(thing) is Delivery for thing in gc.get_objects())


async def test_a_spent_account_is_one_incident_until_a_call_there_succeeds(
    own_nats_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouping, "GROUP_INTERVAL_S", 600)  # an end does not wait for it
    config, now = config_of(), datetime.now(UTC)
    spent = {"kind": "quota", "class": "QuotaExceededError", "message": "no", "status_code": 402}
    jobs = [
        ended(number, error=spent, attempts=(attempt(f"e{number}", outcome="error", error=spent, completed_at=now),))
        for number in range(3)
    ]
    served = attempt("e9", started_at=now + timedelta(seconds=1), completed_at=now + timedelta(seconds=2))
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config):
        await publish_executions(bus, *jobs)
        await bus.finished("EVENTS", "alerter-executions", 3)
        [opened_alert] = await bus.alerts()
        assert (opened_alert.key, opened_alert.count) == (f"quota_exhausted/{served.provider}", 3)
        await publish_executions(bus, ended(9, status="succeeded", reason=None, error=None, attempts=(served,)))
        await bus.finished("EVENTS", "alerter-executions", 4)
        assert [alert.change for alert in await bus.alerts()] == ["opened", "resolved"]
