"""`python -m breakwater.local.provider`: the simulated provider as a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

import structlog
import uvloop

from breakwater.local.provider.app import SimulatedProvider
from breakwater.local.provider.script import ScriptError


async def _serve(provider: SimulatedProvider) -> None:
    log = structlog.get_logger()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with provider:
        log.info("provider_started", url=provider.url, port=provider.port)
        await stop.wait()
    log.info("provider_stopped")


def main() -> int:
    """Serves until SIGINT or SIGTERM. Returns the exit status: 2 for a mistake in the script or the port."""
    parser = argparse.ArgumentParser(prog="python -m breakwater.local.provider", description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="0 picks a free port; the first log line names it")
    parser.add_argument("--script", type=Path, required=True, metavar="FILE", help="the behaviour, in JSON")
    parser.add_argument("--name", help="of this host for others: listens on all addresses, not the loopback alone")
    arguments = parser.parse_args()
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        script = arguments.script.read_bytes()
        uvloop.run(_serve(SimulatedProvider(script, port=arguments.port, name=arguments.name)))
    except (ScriptError, OSError) as error:
        structlog.get_logger().error("provider_can_not_start", script=str(arguments.script), error=str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
