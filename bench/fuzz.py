"""Answers of any shape through a worker: none may crash it, lose an attempt, or tell a client what it can't read.

    python -m bench.fuzz [--examples 300]

Starts NATS, Redis, a provider that answers anything and a worker in this process. An example is ten answers: good ones
of either dialect, streamed or whole, with arbitrary JSON in up to three of their places, and events left out, said
twice or cut off. Prints what the attempts have come to; the first answer that breaks a rule is shown at its smallest.
The test of the same name as the rule (`tests/services/worker/test_any_answer.py`) runs thirty examples.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

from tests.any_answers import agents, any_provider_server, check_examples
from tests.flow.kit import model
from tests.server_sources import embedded_servers
from tests.services.worker.harness import running_worker


async def run(directory: Path, nats_url: str, redis_url: str, examples: int) -> Mapping[str, int]:
    """How many attempts have come to what."""
    async with (
        any_provider_server() as (bodies, providers),
        running_worker(
            directory,
            nats_url=nats_url,
            redis_url=redis_url,
            script={"models": {"sim/m": model()}},
            agents=agents(),
            more_providers=providers,
            retry_budget="off",
        ) as plane,
    ):
        return await check_examples(plane, bodies, max_examples=examples, database=None)


def main() -> None:
    """Prints the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=300)
    options = parser.parse_args()
    with embedded_servers() as (servers, directory):
        began = time.monotonic()
        outcomes = asyncio.run(run(directory, servers.nats().url, servers.redis().url, options.examples))
    print(f"{sum(outcomes.values())} attempts in {time.monotonic() - began:.0f} s, each recorded:")
    for outcome, count in sorted(outcomes.items(), key=lambda item: -item[1]):
        print(f"  {count:6} {outcome}")


if __name__ == "__main__":
    main()
