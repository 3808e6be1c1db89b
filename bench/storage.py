"""What an execution takes on disk: bytes by table and by column, on rows as a busy plane makes them.

    python -m bench.storage [executions] [--columns]

Starts the embedded ClickHouse in a temporary directory, stores a month of executions with their attempts in the order
in which they ended, merges, and prints what system.parts and system.parts_columns say. Texts are random words, so they
compress as prose does and not as one word repeated; ids are the UUIDs that Breakwater gives. Nothing is asserted.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Iterator
from datetime import timedelta
from itertools import accumulate
from typing import Any

from breakwater.jobs.contract.execution import Attempt, ErrorInfo, Execution
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.ids import ENTROPY_BYTES, id_at
from breakwater.records import rows, schema
from tests.records import samples
from tests.server_sources import embedded_servers

DAYS = 30
ROWS_AN_INSERT = 20_000
MODELS = {"gpt-4o": "openai", "gpt-4o-mini": "openai", "claude-sonnet": "anthropic", "claude-haiku": "anthropic"}
AGENTS = ("content-writer", "support", "tagger", "researcher", "summarizer", "translator", "planner", "reviewer")
ERRORS = (
    ("rate_limit", "RateLimitError", 429, "Rate limit reached for {model}: limit 90000, used {n}, requested 512."),
    ("server", "ServerError", 500, "The server had an error while processing your request (request {n:08x})."),
    ("timeout", "TimeoutError", None, "no answer within 30 s"),
)


class Month:
    """Makes executions, the same ones for the same seed."""

    def __init__(self, seed: int = 7) -> None:
        self._picked = random.Random(seed)
        letters = "etaoinshrdlucmfwypvbgk"
        lengths = self._picked.choices(range(2, 10), k=4_000)
        self._words = ["".join(self._picked.choices(letters, range(22, 0, -1), k=length)) for length in lengths]
        self._frequencies = list(accumulate(1 / rank for rank in range(1, len(self._words) + 1)))

    def executions(self, count: int) -> Iterator[Execution]:
        """In the order of their ends."""
        picked = self._picked
        ended_at = samples.NOON - timedelta(days=DAYS)
        for _ in range(count):
            ended_at += timedelta(milliseconds=int(picked.expovariate(count / (DAYS * 86_400_000))))
            tries = min(1 + int(picked.expovariate(0.58)), 8)
            spans = [200 + int(picked.expovariate(1 / 1_800)) for _ in range(tries)]
            queued_at = ended_at - timedelta(milliseconds=sum(spans) + 12)
            identity = id_at(int(queued_at.timestamp() * 1000), picked.randbytes(ENTROPY_BYTES))
            names: dict[str, Any] = {
                "agent": picked.choices(AGENTS, range(len(AGENTS), 0, -1))[0],
                "tenant": picked.choice((None, *(f"tenant-{n}" for n in range(20)))),
                "task_id": f"task-{picked.randrange(count)}" if picked.random() < 0.3 else None,
            }
            yield self._execution(identity, names, queued_at, ended_at, spans)

    def _execution(self, identity: str, names: dict[str, Any], queued_at: Any, ended_at: Any, spans: Any) -> Execution:
        picked = self._picked
        failed = picked.random() < 0.05
        requested = picked.choice(list(MODELS))
        attempts = list(self._attempts(identity, names, queued_at, spans, requested, failed=failed))
        last = attempts[-1]
        spent = sum(one.cost or 0 for one in attempts)
        wasted = spent - (0 if failed else last.cost or 0)
        return samples.execution(
            identity,
            **names,
            attempts=attempts,
            attempts_count=len(attempts),
            parent_execution_id=None if picked.random() < 0.9 else id_at(1, picked.randbytes(ENTROPY_BYTES)),
            status="dead_lettered" if failed else "succeeded",
            reason="error" if failed else None,
            error=last.error,
            requested_model=requested,
            chosen_model=None if failed else last.model,
            fallback_chain=(requested, "gpt-4o-mini"),
            input_tokens=sum(one.input_tokens or 0 for one in attempts),
            output_tokens=sum(one.output_tokens or 0 for one in attempts),
            total_tokens=sum((one.input_tokens or 0) + (one.output_tokens or 0) for one in attempts),
            total_cost=spent,
            wasted_cost=wasted,
            wasted_by_cause={"retry": wasted} if wasted else {},
            output=None if failed else self._text(100, 700),
            messages=[
                {"role": "system", "content": f"You are the {names['agent']} of the company. Answer in English."},
                {"role": "user", "content": self._text(150, 700)},
            ],
            metadata={"ticket": picked.randrange(10**6)},
            completed_at=ended_at,
            queued_at=queued_at,
            dispatched_at=queued_at + timedelta(milliseconds=3),
            started_at=attempts[0].started_at,
            duration_ms=sum(spans) + 12,
        )

    def _attempts(
        self, identity: str, names: dict[str, Any], began_at: Any, spans: list[int], model: str, *, failed: bool
    ) -> Iterator[Attempt]:
        picked = self._picked
        began_at += timedelta(milliseconds=12)
        for number, span in enumerate(spans, 1):
            succeeded = number == len(spans) and not failed
            cause = "first" if number == 1 else "retry" if number < 4 else "fallback"
            tried = "gpt-4o-mini" if cause == "fallback" else model
            kind, class_, code, text = picked.choice(ERRORS)
            message = text.format(model=tried, n=picked.randrange(2**32))
            error = ErrorInfo(
                kind=kind,  # pyright: ignore[reportArgumentType]
                class_=class_,
                message=message,
                status_code=code,
                retryable=True,
                hash=f"{picked.choice(range(200)):08x}",
            )
            asked, said = picked.randrange(50, 1_500), picked.randrange(20, 600)
            yield samples.attempt(
                identity,
                number,
                **names,
                model=tried,
                provider=MODELS[tried],
                started_at=began_at,
                duration_ms=span,
                input_tokens=asked if succeeded else None,
                output_tokens=said if succeeded else None,
                cached_tokens=0 if succeeded else None,
                finish_reason="stop" if succeeded else None,
                cost=asked * 150 + said * 600 if succeeded else picked.choice((0, asked * 150)),
                reserved=asked * 300 + 4_096 * 600,
                reserved_at=began_at - timedelta(milliseconds=1),
                outcome="success" if succeeded else "error",
                error=None if succeeded else error,
                counts_for_breaker=not succeeded,
                breaker_version=3 + picked.randrange(2),
                cause=cause,
                backoff_ms=0 if number == 1 else picked.randrange(500, 5_000),
            )
            began_at += timedelta(milliseconds=span)

    def _text(self, least: int, most: int) -> str:
        words = self._picked.choices(
            self._words, cum_weights=self._frequencies, k=self._picked.randint(least, most) // 5
        )
        return " ".join(words)


async def fill(analytics: Analytics, count: int) -> None:
    """Stores executions and their attempts, numbered as the stream would."""
    sequence = 0
    executions: list[rows.StoredRow] = []
    attempts: list[rows.StoredRow] = []
    for record in Month().executions(count):
        for attempt in record.attempts:
            sequence += 1
            attempts.append(samples.attempt_row(attempt, sequence))
        sequence += 1
        executions.append(rows.execution_row(record, sequence))
        if len(attempts) >= ROWS_AN_INSERT:
            await analytics.insert(schema.ATTEMPTS, attempts)
            await analytics.insert(schema.EXECUTIONS, executions)
            executions, attempts = [], []
    await analytics.insert(schema.ATTEMPTS, attempts)
    await analytics.insert(schema.EXECUTIONS, executions)
    for table in (schema.EXECUTIONS, schema.ATTEMPTS):
        await analytics.execute(f"OPTIMIZE TABLE {table.name} FINAL")


TABLES = """
SELECT table, sum(rows) AS rows, sum(bytes_on_disk) AS on_disk, sum(secondary_indices_compressed_bytes) AS indexes,
    sum(data_uncompressed_bytes) AS raw
FROM system.parts
WHERE active AND database = {database:String} AND table IN ('executions', 'attempts')
GROUP BY table
ORDER BY table DESC
"""

COLUMNS = """
SELECT p.column AS column, any(c.compression_codec) AS codec, sum(p.column_data_compressed_bytes) AS bytes
FROM system.parts_columns AS p
INNER JOIN system.columns AS c ON c.database = p.database AND c.table = p.table AND c.name = p.column
WHERE p.active AND p.database = {database:String} AND p.table = {table:String}
GROUP BY column
ORDER BY bytes DESC
"""


async def report(analytics: Analytics, count: int, *, columns: bool) -> None:
    database = {"database": analytics.database}
    total = 0
    for table in (await analytics.query(TABLES, database)).named_rows():
        total += table["on_disk"]
        print(
            f"{table['table']:>12}: {table['rows']:>9,} rows, {table['on_disk'] / table['rows']:6.1f} bytes a row, "
            f"{table['on_disk'] / count:6.1f} an execution, of it indexes {table['indexes'] / count:4.1f}; "
            f"{table['raw'] / table['on_disk']:.1f} times smaller than uncompressed"
        )
        if columns:
            for column in (await analytics.query(COLUMNS, {**database, "table": table["table"]})).named_rows():
                print(f"{column['column']:>26} {column['bytes'] / table['rows']:8.2f} bytes a row  {column['codec']}")
    print(f"{'together':>12}: {total / count:.0f} bytes an execution")


async def measure(clickhouse_url: str, count: int, *, columns: bool) -> None:
    async with samples.new_database(clickhouse_url) as analytics:
        await fill(analytics, count)
        await report(analytics, count, columns=columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("executions", type=int, nargs="?", default=100_000)
    parser.add_argument("--columns", action="store_true", help="each column, too")
    given = parser.parse_args()
    example = next(Month().executions(1))
    texts = len(json.dumps(example.messages)) + len(json.dumps(example.output))
    print(f"{given.executions:,} executions over {DAYS} days; the first has {texts} bytes of messages and output")
    with embedded_servers() as (servers, _):
        asyncio.run(measure(servers.clickhouse().url, given.executions, columns=given.columns))


if __name__ == "__main__":
    main()
