"""Whatever a provider answers: the call ends in an attempt, and a client is told what it can read."""

from __future__ import annotations

from tests.any_answers import agents, any_provider_server, check_examples
from tests.flow.kit import model
from tests.services.worker.conftest import StartWorker


async def test_whatever_is_answered_ends_in_an_attempt(start_worker: StartWorker) -> None:
    async with (
        any_provider_server() as (bodies, providers),
        start_worker({"sim/m": model()}, agents(), more_providers=providers, retry_budget="off") as plane,
    ):
        outcomes = await check_examples(plane, bodies)
    assert {"success", "BrokenAnswerError"} <= outcomes.keys()
