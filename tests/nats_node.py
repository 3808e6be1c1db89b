"""A nats-server with a config of the test's own."""

from collections.abc import Mapping
from pathlib import Path

from breakwater.local.ports import Probe, nats_ready
from breakwater.local.process import ProcessSpec
from breakwater.local.servers import ServerNotFoundError, find_nats
from tests.server_sources import ProcessRunner, RunningServer, missing_backend


def nats_program() -> str:
    try:
        return str(find_nats())
    except ServerNotFoundError as error:
        missing_backend(str(error))
        raise


def start_nats(
    folder: Path,
    config: str,
    port: int,
    *,
    environment: Mapping[str, str] | None = None,
    ready: Probe | None = None,
) -> RunningServer:
    """Starts a server, which listens on `port` of loopback as its config says. Returns without waiting for it."""
    file = folder / "nats.conf"
    file.write_text(config)
    ready = ready or nats_ready("127.0.0.1", port)
    argv = (nats_program(), "--config", str(file))
    runner = ProcessRunner(ProcessSpec("nats", argv, folder / "nats.log", ready, env=environment or {}, cwd=folder))
    runner.start()
    return RunningServer(f"nats://127.0.0.1:{port}", runner, ready)
