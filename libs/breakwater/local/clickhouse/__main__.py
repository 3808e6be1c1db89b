"""`python -m breakwater.local.clickhouse`: the engine as a process of its own."""

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

import uvloop
from aiohttp import web

from breakwater.kernel.process.files import raise_file_limit
from breakwater.local.clickhouse.access import EngineRole
from breakwater.local.clickhouse.engine import DataDirectoryError, Engine
from breakwater.local.clickhouse.http import Users, application
from breakwater.local.ports import LOOPBACK

_STOP_SECONDS = 3.0  # for answers to be finished
_ENGINE_STOP_SECONDS = 0.5  # for statements whose client is gone
_LONGEST_URL = 1 << 20  # a server's http_max_uri_size
_LONGEST_HEADER = 1 << 17
_OPEN_FILES = 8192  # the engine holds three for each of its threads, and those of the parts it reads


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m breakwater.local.clickhouse", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="data directory; created if missing")
    parser.add_argument("--port", type=int, required=True, help="port on loopback; 0 picks a free one")
    parser.add_argument("--user", required=True, help="name of the user that may write")
    parser.add_argument("--password-file", type=Path, required=True, help="file with the user's password")
    parser.add_argument(
        "--reader-password-file", type=Path, help="file with the password of `reader` and `analyst`, who only read"
    )
    return parser.parse_args(argv)


def _password(file: Path) -> str:
    try:
        password = file.read_text().strip("\r\n")
    except OSError as error:
        raise ValueError(f"cannot read the password file {file}: {error.strerror}") from error
    if not password:
        raise ValueError(f"the password file {file} is empty: authentication is always on")
    return password


async def _serve(engine: Engine, users: Users, port: int) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(
        application(engine, users),
        access_log=None,
        handler_cancellation=True,  # a client that leaves cancels its query
        auto_decompress=False,  # aiohttp does not notice where a body was cut off
        max_line_size=_LONGEST_URL,
        max_field_size=_LONGEST_HEADER,
        keepalive_timeout=60.0,
        shutdown_timeout=_STOP_SECONDS / 2,  # aiohttp waits it twice, before and after it stops reading bodies
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, LOOPBACK, port, reuse_address=True).start()
        sys.stdout.write(f"ready http://{LOOPBACK}:{runner.addresses[0][1]}\n")
        sys.stdout.flush()
        await stop.wait()
    finally:
        await runner.cleanup()


def main(argv: list[str] | None = None) -> int:
    """Runs until SIGTERM or SIGINT.

    Returns:
        0 after a signal; 1 with a line on stderr when the data directory, the password or the port cannot be used.
    """
    arguments = _arguments(argv)
    try:
        users = {arguments.user: (_password(arguments.password_file), EngineRole.PLANE)}
        if arguments.reader_password_file is not None:
            password = _password(arguments.reader_password_file)
            users |= {str(role): (password, role) for role in (EngineRole.READER, EngineRole.ANALYST)}
        engine = Engine(arguments.data)
    except (ValueError, DataDirectoryError) as error:
        sys.stderr.write(f"clickhouse: {error}\n")
        return 1
    raise_file_limit(_OPEN_FILES)
    code = 0
    try:
        uvloop.run(_serve(engine, users, arguments.port))
    except OSError as error:
        sys.stderr.write(f"clickhouse: cannot listen on {LOOPBACK}:{arguments.port}: {error.strerror or error}\n")
        code = 1
    if not engine.close(_ENGINE_STOP_SECONDS):
        # A statement outlived its grace and its thread cannot be stopped; what it had not acknowledged may be lost.
        sys.stderr.write("clickhouse: stopped with statements still running\n")
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
