"""Which signals the alerter's subscriber makes of events, without a bus."""

from __future__ import annotations

import json
from typing import Any

import pytest
from faststream.nats import TestNatsBroker
from pydantic import BaseModel, JsonValue

from breakwater.alerts.rules.signals import Signal
from breakwater.alerts.store.incidents import IncidentLog
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.publisher import PublishAck, Publisher
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.process.settings import Settings
from breakwater.services.alerter.app import build
from tests.helpers import deliver
from tests.services.alerter.kit import config_of, crossed, opened, stopped


async def test_each_event_becomes_its_signal_and_one_that_can_not_be_read_a_dead_letter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signals, published = list[tuple[str, str]](), list[tuple[str, JsonValue]]()

    async def apply(_: IncidentLog, signal: Signal, _rules: Any) -> tuple[()]:
        signals.append((signal.event, signal.source_id))
        return ()

    async def publish(_: Publisher, subject: str, payload: bytes, _headers: Any) -> PublishAck:
        published.append((subject, json.loads(payload)["sequence"]))
        return PublishAck("DLQ", 1, duplicate=False)

    monkeypatch.setattr(IncidentLog, "apply", apply)
    monkeypatch.setattr(Publisher, "raw", publish)
    events: list[tuple[str, BaseModel]] = [
        (subjects.breaker("writer", "gpt-4.1"), opened()),
        (subjects.guard("writer"), stopped()),
        (subjects.budget("global", "daily"), crossed()),
    ]
    async with TestNatsBroker(build(Settings(), config_of()).broker) as broker:
        for number, (subject, event) in enumerate(events):
            await deliver(broker, Stream.EVENTS, subject, event.model_dump_json().encode(), sequence=number + 1)
        await deliver(broker, Stream.EVENTS, subjects.guard("writer"), b'{"kind": "tripped"}', sequence=4)
    assert signals == [
        ("breaker_open", "writer/gpt-4.1#7.1"),
        ("guard_tripped", "/t1@7"),
        ("budget_soft_cap", "global/daily/2026-11-21/80"),
    ]
    assert published == [(subjects.dead_letter("unreadable", "unknown"), 4)]
