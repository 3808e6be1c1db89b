"""The real servers of the local stack: their config files, and how each is run.

Every server listens on loopback alone, and its secrets are in files of mode 0600, never in an argv, which anyone on the
machine can read.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from breakwater.bus.permissions import GRANTS, Grant, render
from breakwater.embedded.binaries import find_nats, find_valkey, require_clickhouse
from breakwater.embedded.ports import LOOPBACK
from breakwater.embedded.probes import http_ready, nats_ready, redis_ready
from breakwater.embedded.process import ProcessSpec
from breakwater.files import write_private

_MAX_PAYLOAD = 8 * 1024 * 1024
_CORES_PER_NATS_THREAD = 4
"""Small messages wake NATS one by one, and then each of its threads looks for work, also when there is hardly any. One
thread is enough for what the services on four cores send it."""


def nats_spec(
    data: Path,
    port: int,
    passwords: Mapping[str, str],
    programs: Sequence[Grant] = (),
) -> ProcessSpec:
    """Write the config of a nats-server with JetStream into the data directory and say how the server is run.

    Args:
        data: The stack's data directory; the streams are kept in its `nats` directory.
        port: Client port, on loopback.
        passwords: That of each of the plane's users, in plain text or as its bcrypt hash (`$2a$…`). With none given,
            anyone may connect and do everything, as in a test.
        programs: The users of the config's programs, besides the plane's.
    """
    lines = [
        'server_name: "breakwater"',
        f'host: "{LOOPBACK}"',
        f"port: {port}",
        f"pid_file: {_quoted(str(data / 'nats' / 'nats-server.pid'))}",
        f"max_payload: {_MAX_PAYLOAD}",
        "jetstream {",
        f"  store_dir: {_quoted(str(data / 'nats'))}",
        "  sync_interval: 1s",  # what a power cut may lose; a crash of the process loses nothing
        "}",
    ]
    if passwords:
        lines.append(render((*GRANTS, *programs), lambda user: _quoted(passwords[user])))
    (data / "nats").mkdir(mode=0o700, parents=True, exist_ok=True)
    config = data / "nats.conf"
    write_private(config, "\n".join(lines) + "\n")
    return ProcessSpec(
        name="nats",
        argv=(str(find_nats()), "--config", str(config)),
        log_file=data / "logs" / "nats.log",
        env={"GOMAXPROCS": str(max(1, (os.cpu_count() or 1) // _CORES_PER_NATS_THREAD))},
        ready=nats_ready(LOOPBACK, port),
    )


def redis_spec(data: Path, port: int, password: str | None) -> ProcessSpec:
    """Write the config of a Valkey, which keeps its data and never evicts a key, and say how the server is run.

    Args:
        data: The stack's data directory; the append-only file is kept in its `redis` directory.
        port: Client port, on loopback.
        password: Of the default user; None for no password, as in a test.
    """
    lines = [
        f"bind {LOOPBACK}",
        "protected-mode yes",
        f"port {port}",
        f"dir {_quoted(str(data / 'redis'))}",
        "daemonize no",
        'logfile ""',
        "appendonly yes",
        "appendfsync everysec",
        'save ""',
        "hz 2",  # how often it looks what has expired; idle, each look is all that it does
        "maxmemory-policy noeviction",
    ]
    if password is not None:
        lines.append(f"requirepass {_quoted(password)}")
    (data / "redis").mkdir(mode=0o700, parents=True, exist_ok=True)
    config = data / "redis.conf"
    write_private(config, "\n".join(lines) + "\n")
    return ProcessSpec(
        name="redis",
        argv=(str(find_valkey()), str(config)),
        log_file=data / "logs" / "redis.log",
        ready=redis_ready(LOOPBACK, port, password),
    )


def clickhouse_spec(
    data: Path, port: int, user: str, password_file: Path, reader_password_file: Path | None = None
) -> ProcessSpec:
    """Say how the ClickHouse engine behind its HTTP protocol is run; its tables are in the `clickhouse` directory.

    Args:
        data: The stack's data directory.
        port: Of the HTTP protocol, on loopback.
        user: Who may create tables and write.
        password_file: With the password of that user.
        reader_password_file: With the password of `reader`, who only reads; None for no such user.

    Raises:
        ServerNotFoundError: The engine (package `chdb`) is not installed.
    """
    require_clickhouse()
    tables = data / "clickhouse"
    # The engine makes a directory for temporary files, and has no time to remove it when it is killed.
    scratch = tables / "tmp"
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    tables.chmod(0o700)
    arguments = ("--data", str(tables), "--host", LOOPBACK, "--port", str(port))
    credentials: tuple[str, ...] = ("--user", user, "--password-file", str(password_file))
    if reader_password_file is not None:
        credentials += ("--reader-password-file", str(reader_password_file))
    return ProcessSpec(
        name="clickhouse",
        argv=(sys.executable, "-m", "breakwater.embedded.clickhouse", *arguments, *credentials),
        log_file=data / "logs" / "clickhouse.log",
        env={"TMPDIR": str(scratch)},
        ready=http_ready(LOOPBACK, port, "/ping", body_prefix=b"Ok"),
        ready_timeout_s=60.0,
    )


def _quoted(text: str) -> str:
    # Both config languages know \\, \" and \xHH in a quoted string; neither knows the \uHHHH that JSON would write.
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\x{ord(found[0]):02x}", escaped) + '"'
