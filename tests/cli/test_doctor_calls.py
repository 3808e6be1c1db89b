"""The doctor's findings about the calls of the last hour."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from breakwater.cli.doctor_checks import call_findings
from breakwater.config import parse_config
from breakwater.jobs.contract.error_kinds import ErrorKind
from breakwater.jobs.contract.execution import ErrorInfo
from breakwater.local.plane import PlaneLocation
from breakwater.records import rows, schema
from tests.records import samples
from tests.servers import RunningServer

CONFIG = parse_config("""
providers: {a: {base_url: "http://127.0.0.1:9/v1", api_key: {env: KEY_OF_A}}, b: {base_url: "http://127.0.0.1:9/v1"}}
agents: {writer: {model: a/large}}
""")
NOW = datetime.now(UTC)


def failed(kind: ErrorKind, name: str, status: int | None) -> dict[str, Any]:
    return {"outcome": "error", "error": ErrorInfo(kind=kind, class_=name, message="x", status_code=status)}


REFUSED, BROKEN, LATE = (
    failed("client", "UnauthorizedError", 401),
    failed("server", "ServerError", 500),
    failed("timeout", "TimeoutError", None),
)
GOOD: dict[str, Any] = {"outcome": "success", "error": None}
KEY = "The provider refuses the key: correct providers.a.api_key (KEY_OF_A). The next refused call reads it again if"


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ({}, []),
        (
            {"a": [*[REFUSED] * 23, BROKEN]},
            [("fail", "a: 24 of 24 calls of the last hour failed, most with UnauthorizedError (401)", KEY)],
        ),
        (
            {"a": [REFUSED], "b": [*[LATE] * 4, GOOD]},
            [
                ("warn", "a: 1 of 1 call of the last hour failed, most with UnauthorizedError (401)", KEY),
                (
                    "warn",
                    "b: 4 of 5 calls of the last hour failed, most with TimeoutError",
                    "See the provider's status",
                ),
            ],
        ),
        ({"b": [BROKEN] * 3 + [GOOD] * 2}, [("ok", "b: 2 of 5 calls of the last hour succeeded", "")]),
    ],
)
async def test_it_judges_providers_by_the_outcomes_of_their_calls(
    clickhouse_server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    calls: dict[str, list[dict[str, Any]]],
    expected: list[tuple[str, str, str]],
) -> None:
    async with samples.new_database(clickhouse_server.url) as analytics:
        monkeypatch.setenv("BREAKWATER_CLICKHOUSE_URL", f"{clickhouse_server.url}/{analytics.database}")
        made = [
            samples.attempt(
                f"{provider}-{age_min}", number, provider=provider, started_at=at, completed_at=at, **outcome
            )
            for provider, outcomes in calls.items()
            # What is over an hour old says nothing of now.
            for age_min, all_outcomes in ((5, outcomes), (90, [GOOD] * 100))
            for number, outcome in enumerate(all_outcomes, 1)
            for at in [NOW - timedelta(minutes=age_min)]
        ]
        if made:
            await analytics.insert(schema.ATTEMPTS, [rows.attempt_row(one, 1, NOW) for one in made])
        found = [one async for one in call_findings(PlaneLocation(None), CONFIG)]
    assert [(one.verdict, one.text) for one in found] == [(verdict, text) for verdict, text, _ in expected]
    for one, (_, _, remedy) in zip(found, expected, strict=True):
        assert one.remedy.startswith(remedy)


async def test_a_model_whose_latest_calls_failed_is_named_although_its_provider_works(
    clickhouse_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with samples.new_database(clickhouse_server.url) as analytics:
        monkeypatch.setenv("BREAKWATER_CLICKHOUSE_URL", f"{clickhouse_server.url}/{analytics.database}")
        # The newest first.
        outcomes = {"large": [*[REFUSED] * 10, *[GOOD] * 20], "small": [*[BROKEN] * 9, GOOD], "tiny": [BROKEN] * 2}
        made = [
            samples.attempt(model, number, provider="a", model=model, started_at=at, completed_at=at, **outcome)
            for model, all_outcomes in outcomes.items()
            for number, outcome in enumerate(all_outcomes, 1)
            for at in [NOW - timedelta(minutes=number)]
        ]
        await analytics.insert(schema.ATTEMPTS, [rows.attempt_row(one, 1, NOW) for one in made])
        found = [one async for one in call_findings(PlaneLocation(None), CONFIG)]
    assert [(one.verdict, one.text) for one in found] == [
        ("ok", "a: 21 of 42 calls of the last hour succeeded"),
        ("fail", "a: the last 10 calls of large failed, the latest with UnauthorizedError (401)"),
    ]
    assert found[1].remedy.startswith(KEY)
