"""`python -m breakwater.embedded.provider`: the simulated provider as a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

import structlog
import uvloop

from breakwater.embedded.provider.app import SimulatedProvider
from breakwater.embedded.provider.ledger import LedgerFileError
from breakwater.embedded.provider.script import ScriptError, load_script


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m breakwater.embedded.provider", description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="0 takes a free one; the first log line names it")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: %(default)s)")
    parser.add_argument("--script", type=Path, required=True, metavar="FILE", help="the behaviour, YAML or JSON")
    parser.add_argument("--seed", type=int, help="replaces the script's seed")
    parser.add_argument("--ledger", type=Path, metavar="FILE", help="keeps the ledger; continued from if it exists")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="accepted API keys, one a line")
    return parser.parse_args(argv)


def _read_keys(path: Path) -> list[str]:
    keys = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    if not keys:
        # No key would mean that every key is accepted.
        raise ScriptError(f"the API key file {path} has no key in it")
    return keys


async def _serve(provider: SimulatedProvider) -> None:
    log = structlog.get_logger()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with provider:
        log.info("provider_started", url=provider.url, port=provider.port)
        await stop.wait()
    log.info("provider_stopped")


def main(argv: list[str] | None = None) -> int:
    """Serves until SIGINT or SIGTERM. Returns the exit status: 2 for a mistake in what it was given."""
    arguments = _arguments(argv)
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        script = load_script(arguments.script)
        if arguments.seed is not None:
            script = script.model_copy(update={"seed": arguments.seed})
        provider = SimulatedProvider(
            script,
            host=arguments.host,
            port=arguments.port,
            ledger_file=arguments.ledger,
            api_keys=_read_keys(arguments.api_key_file) if arguments.api_key_file else (),
        )
        uvloop.run(_serve(provider))
    except (ScriptError, LedgerFileError, OSError) as error:
        structlog.get_logger().error("provider_can_not_start", error=str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
