"""Incidents on a real ALERTS: decided once, however many decide, and whatever is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import pytest
from nats.aio.client import Client

from breakwater.alerts.contract import Alert, AlertEvent
from breakwater.alerts.rules import incidents as incident_rules
from breakwater.alerts.rules.incidents import IncidentRules, Incidents, acknowledge, resolve
from breakwater.alerts.rules.signals import Firing, Resolved
from breakwater.alerts.settings import Reminders
from breakwater.alerts.store import incidents as incidents_module
from breakwater.alerts.store.incidents import IncidentLog
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.errors import BusUnavailableError
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.topology import Plan
from breakwater.redaction.rules.redact import Redactor
from breakwater.redaction.settings import RedactionRules
from tests.helpers import nats_client
from tests.servers import RunningServer

AT = datetime(2026, 11, 21, 10, 0, 0, tzinfo=UTC)
RULES = IncidentRules(get_args(AlertEvent), 600, ("guard_tripped",), Reminders())
REDACTOR = Redactor.compile(RedactionRules())


def raised(number: int = 1, source: str = "e", event: AlertEvent = "breaker_open", **more: Any) -> Firing:
    given: dict[str, Any] = {"title": f"Breaker open: {number}", "text": "It is.", "at": AT, "agent": "writer"}
    return Firing(key=f"{event}/writer/{number}", event=event, source_id=f"{source}{number}", **(given | more))


def over(number: int = 1, source: str = "o", **more: Any) -> Resolved:
    given: dict[str, Any] = {"title": "Breaker closed", "text": "It is.", "at": AT + timedelta(seconds=1)}
    key = f"breaker_open/writer/{number}"
    return Resolved(key=key, event="breaker_closed", source_id=f"{source}{number}", **(given | more))


@pytest.fixture
async def client(own_nats_server: RunningServer) -> AsyncGenerator[Client]:
    await provision(own_nats_server.url, Plan(agents={"writer": 1}))
    async with nats_client(own_nats_server.url) as connected:
        yield connected


@pytest.fixture
def log_of(client: Client) -> Callable[[], IncidentLog]:
    return lambda: IncidentLog(lambda: client, Publisher(lambda: client, "test"), REDACTOR)


async def stored(client: Client) -> list[Alert]:
    state = (await client.jetstream().stream_info("ALERTS")).state
    messages = [
        await client.jetstream().get_msg("ALERTS", sequence)
        for sequence in range(state.first_seq, state.last_seq + 1)
        if state.messages
    ]
    return [Alert.model_validate_json(message.data or b"") for message in messages]


async def test_what_one_reports_the_others_know(client: Client, log_of: Callable[[], IncidentLog]) -> None:
    one, other = log_of(), log_of()
    [opened] = await one.apply(raised(), RULES)
    known = (await other.catch_up()).of("breaker_open/writer/1")
    assert known == opened
    assert await stored(client) == [opened]
    # Who has not caught up decides on what is there all the same: it is looked at where there seems nothing to do.
    [resolved] = await other.apply(over(), RULES)
    assert await one.apply(over(source="again"), RULES) == ()
    assert (await one.catch_up()).get(opened.incident_id) == resolved
    assert (resolved.event, resolved.version) == ("breaker_closed", 2)


async def test_many_who_hear_of_the_same_things_at_once_tell_them_once(
    client: Client, log_of: Callable[[], IncidentLog]
) -> None:
    logs = [log_of() for _ in range(5)]
    await asyncio.gather(*(log.apply(raised(number), RULES) for number in range(40) for log in logs))
    reported = await stored(client)
    assert [alert.change for alert in reported] == ["opened"] * 40
    assert len({alert.incident_id for alert in reported}) == 40


async def test_of_two_who_acknowledge_at_once_one_does(client: Client, log_of: Callable[[], IncidentLog]) -> None:
    first = log_of()
    [opened] = await first.apply(raised(), RULES)

    async def acts(log: IncidentLog, who: str) -> Alert | None:
        def decision(known: Incidents) -> Alert | None:
            current = known.get(opened.incident_id)
            return None if current is None else acknowledge(current, who, None, AT)

        return await log.decide(decision)

    outcomes = await asyncio.gather(*(acts(log_of(), f"person {number}") for number in range(8)))
    [done] = [alert for alert in outcomes if alert is not None]
    assert [(alert.change, alert.acknowledged_by) for alert in await stored(client)] == [
        ("opened", None),
        ("acknowledged", done.acknowledged_by),
    ]


async def test_an_answer_that_was_lost_does_not_make_a_second_incident(
    client: Client, log_of: Callable[[], IncidentLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, publish = log_of(), Publisher.event

    async def stored_but_unheard(*given: Any, **more: Any) -> Any:
        await publish(*given, **more)
        raise BusUnavailableError("no acknowledgement came")

    monkeypatch.setattr(Publisher, "event", stored_but_unheard)
    with pytest.raises(BusUnavailableError):
        await log.apply(raised(), RULES)
    monkeypatch.setattr(Publisher, "event", publish)
    assert await log.apply(raised(), RULES) == ()
    assert len(await stored(client)) == 1


async def test_a_raised_cap_ends_what_it_puts_right(client: Client, log_of: Callable[[], IncidentLog]) -> None:
    log, place = log_of(), "budget_soft_cap/agent/writer/daily/2026-11-21"
    for percent in (50, 80, 100):
        signal = Firing(f"{place}/{percent}", "budget_soft_cap", "Budget", "It is.", f"e{percent}", AT)
        await log.apply(signal, RULES)
    ended = await log_of().apply(Resolved(place, "budget_soft_cap", "Limit raised", "It is.", "r", AT, above=62), RULES)
    assert sorted(alert.key for alert in ended) == [f"{place}/100", f"{place}/80"]
    left = (await log.catch_up()).unresolved()
    assert [alert.key for alert in left] == [f"{place}/50"]


async def test_no_secret_gets_into_an_alert(client: Client, log_of: Callable[[], IncidentLog]) -> None:
    key = "sk-proj-" + "a1B2c3D4" * 6
    log = log_of()
    [opened] = await log.apply(raised(text=f"Bad key {key}", title=f"T {key}", payload={"reason": f"see {key}"}), RULES)
    await log.decide(lambda known: resolve(known.all()[0], "ann", f"replaced {key}", AT))
    assert opened.text.startswith("Bad key")
    for alert in await stored(client):
        assert key not in alert.model_dump_json()


async def test_the_log_goes_on_where_alerts_were_deleted_or_the_stream_was_made_again(
    client: Client, own_nats_server: RunningServer, log_of: Callable[[], IncidentLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incidents_module, "REPLICA_LAG_S", 0.1)
    log = log_of()
    for number in range(3):
        await log.apply(raised(number), RULES)
    await client.jetstream().delete_msg("ALERTS", 3)
    await log_of().apply(raised(4), RULES)
    assert len((await log.catch_up()).all()) == 3, "what was deleted, or erased, is forgotten"
    await client.jetstream().purge_stream("ALERTS")
    assert (await log.catch_up()).all() == ()
    late = log_of()
    await late.apply(raised(5), RULES)
    assert [alert.key for alert in (await late.catch_up()).all()] == ["breaker_open/writer/5"]
    await client.jetstream().delete_stream("ALERTS")
    await provision(own_nats_server.url, Plan(agents={"writer": 1}))
    [first] = await log.apply(raised(6), RULES)
    assert (await log.catch_up()).all() == (first,)
    assert len(await stored(client)) == 1


async def test_memory_holds_few_of_those_that_are_over(
    client: Client, log_of: Callable[[], IncidentLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incident_rules, "RESOLVED_KEPT", 5)
    log = log_of()
    for number in range(12):
        await log.apply(raised(number), RULES)
        if number >= 2:
            await log.apply(over(number), RULES)
    known = log.incidents
    assert [alert.key[-2:] for alert in known.all()] == ["/0", "/1", "/7", "/8", "/9", "10", "11"]
    assert known.of("breaker_open/writer/3") is None
    assert subjects.alert("breaker_open") == "bw.alerts.breaker_open"


async def test_without_nats_nothing_is_decided(
    client: Client, own_nats_server: RunningServer, log_of: Callable[[], IncidentLog]
) -> None:
    log = log_of()
    await log.apply(raised(), RULES)
    own_nats_server.kill()
    with pytest.raises(BusUnavailableError):
        await log.apply(raised(2), RULES)
    await own_nats_server.restart_async()

    async def reported() -> bool:
        try:
            return bool(await log.apply(raised(2), RULES))
        except BusUnavailableError:
            return False

    deadline = asyncio.get_running_loop().time() + 60
    while not await reported():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.1)
    assert len(await stored(client)) == 2
