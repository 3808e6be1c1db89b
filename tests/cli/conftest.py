"""The command line as a person calls it, in this process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from breakwater.cli import main as cli
from breakwater.jobs.contract.execution import Execution
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.commands import output
from breakwater.records import rows, schema
from tests.cli.api_stub import KEY, Stub, serving
from tests.commands import commands
from tests.records.samples import attempt_row, new_database
from tests.server_sources import RunningServer

VARIABLES = ("URL", "API_KEY", "CONFIG", "NATS_URL", "REDIS_URL", "CLICKHOUSE_URL", "API_KEYS_FILE", "NATS_REPLICAS")


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        return json.loads(self.err)["error"]


Run = Callable[..., Ran]
Terminal = Callable[[int], None]


@pytest.fixture(autouse=True)
def local_noon() -> Generator[None]:
    """Makes it noon on the person's clock, whatever the hour: what is shown without a date has happened today."""
    with pytest.MonkeyPatch.context() as patch:
        # These count westwards.
        patch.setenv("TZ", f"Etc/GMT{datetime.now(UTC).hour - 12:+d}")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a command in an empty directory, with none of the variables that name a plane."""
    for name in VARIABLES:
        monkeypatch.delenv(f"BREAKWATER_{name}", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "app", commands())

    def call(*arguments: str) -> Ran:
        capsys.readouterr()
        code = cli.main(arguments)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@pytest.fixture
async def stub(run: Run, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Stub]:
    """The HTTP API of a plane that the commands find; it has what a test puts into its `answers`."""
    async with serving() as stub:
        monkeypatch.setenv("BREAKWATER_URL", stub.url)
        monkeypatch.setenv("BREAKWATER_API_KEY", KEY)
        yield stub


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Lets tables be drawn as on a terminal of so many columns, without colours."""

    def of_width(width: int) -> None:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(output, "terminal_width", lambda: width)

    return of_width


@pytest.fixture
async def analytics(
    run: Run, clickhouse_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Analytics]:
    """A database that the commands read."""
    async with new_database(clickhouse_server.url) as found:
        monkeypatch.setenv("BREAKWATER_CLICKHOUSE_URL", f"{clickhouse_server.url.rstrip('/')}/{found.database}")
        yield found


async def store(analytics: Analytics, records: Sequence[Execution]) -> None:
    """Stores executions, and their attempts."""
    await analytics.insert(schema.EXECUTIONS, [rows.execution_row(record, 1) for record in records])
    await analytics.insert(schema.ATTEMPTS, [attempt_row(one, 1) for record in records for one in record.attempts])


async def in_thread(run: Run, *arguments: str) -> Ran:
    """Runs a command beside the event loop of the test: commands have a loop of their own."""
    return await asyncio.to_thread(run, *arguments)
