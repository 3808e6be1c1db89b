"""Which handler a message comes to in the worker, without a bus."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from faststream.nats import TestNatsBroker

from breakwater.config import parse_config
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import DelayedQueue, Delivery
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.process.settings import Settings
from breakwater.services.worker.app import build
from breakwater.services.worker.config_versions import ConfigVersions
from tests.helpers import deliver

CONFIG = "{providers: {local: {base_url: 'http://127.0.0.1:1/v1'}}, agents: {a: {model: m}, gpt-4.1: {model: m}}}"


async def test_jobs_come_to_their_agents_handler_whoever_sent_them_and_parked_ones_to_the_delayed_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    came: list[tuple[str, bytes]] = []

    async def handle(_: ConfigVersions, agent: str, job: Delivery) -> None:
        came.append((agent, job.data))

    async def wake(_: DelayedQueue, jobs: Sequence[Delivery]) -> None:
        came.extend(("parked", job.data) for job in jobs)

    monkeypatch.setattr(ConfigVersions, "handle", handle)
    monkeypatch.setattr(DelayedQueue, "handle_all", wake)
    async with TestNatsBroker(build(Settings(), parse_config(CONFIG)).broker) as broker:
        await deliver(broker, Stream.JOBS, subjects.job("a"), b"1")
        await deliver(broker, Stream.JOBS, subjects.job_by("gpt-4.1", "client"), b"2")
        await deliver(broker, Stream.PARKED, subjects.parked("a", "e"), b"3")
        await deliver(broker, Stream.JOBS, subjects.job("unknown"), b"4")
    assert came == [("a", b"1"), ("gpt-4.1", b"2"), ("parked", b"3")]
