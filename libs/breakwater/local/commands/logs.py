"""`breakwater logs`: prints the logs of a local stack's processes, ordered by time."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from breakwater.kernel.commands import formats, output
from breakwater.kernel.commands.errors import CliError, usage_error
from breakwater.kernel.telemetry.logs import line_for_people
from breakwater.local.plane import DEFAULT_DATA, DataOption, JsonOption

CHECK_EVERY_S = 0.3

_FOREIGN = (
    # nats-server: [4623] 2026/11/23 09:01:03.421494 [INF] Starting nats-server
    (re.compile(r"\[\d+\] (\d{4}/\d\d/\d\d [\d:.]+) \[(\w+)\] (.*)"), "%Y/%m/%d %H:%M:%S.%f"),
    # Valkey and Redis: 4624:M 23 Nov 2026 09:01:03.407 * Ready to accept connections
    (re.compile(r"\d+:\w (\d\d \w{3} \d{4} [\d:.]+) ([.*#-]) (.*)"), "%d %b %Y %H:%M:%S.%f"),
)
_FOREIGN_LEVELS = {"DBG": "debug", "WRN": "warning", "ERR": "error", "FTL": "critical", ".": "debug", "#": "warning"}


def logs(
    services: Annotated[
        list[str] | None, typer.Argument(metavar="[SERVICE]...", help="Such as worker, sink, nats. [default: all]")
    ] = None,
    since: Annotated[str, typer.Option("--since", metavar="AGO", help="Since: 10m, 2h, 1d, or a time.")] = "1h",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the logs until Ctrl-C.")] = False,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the logs of a local stack: of the services, and of the servers that `breakwater up` started for them.

    Reads the files in `.breakwater/logs`, whether the stack still runs or not. With --json each line is an object with
    `timestamp`, `service`, `level`, `event` and its fields; servers have other lines, which become the `event`.

    For example:

        breakwater logs

        breakwater logs worker nats --since 10m --follow

        breakwater logs --since 1d --json | jq -c 'select(.level == "error")'
    """
    begin = formats.since(since, datetime.now(UTC))
    folder = (data or DEFAULT_DATA) / "logs"
    if not folder.is_dir():
        raise CliError("no_logs", f"there are no logs in {folder}", "Name a data directory with --data DIR.")
    selected = services or []
    services_with_logs = sorted({_service(file) for file in folder.glob("*.log*")})
    valid_names = {name for service in services_with_logs for name in _names(service)}
    if unknown := [name for name in selected if name not in valid_names]:
        raise usage_error(f"there are no logs of {', '.join(unknown)}", f"There is {', '.join(services_with_logs)}.")
    readers: dict[Path, LogReader] = {}
    while True:
        for file in folder.glob("*.log*"):
            if file not in readers and (not selected or _names(_service(file)) & set(selected)):
                # A log that is rotated to `.1` while this runs was read before.
                if readers and file.suffix == ".1":
                    continue
                readers[file] = LogReader(file)
        events = [event for reader in readers.values() for event in reader.read(to_end=not follow)]
        for event in sorted(events, key=_time_of):  # stable: events of the same time stay in order
            if _time_of(event) >= begin:
                _show(event, as_json=as_json)
        if not follow:
            return
        time.sleep(CHECK_EVERY_S)


class LogReader:
    """A reader of a log file, which continues where it stopped."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._service = _service(file)
        self._offset = 0
        self._last_timestamp = ""

    def read(self, *, to_end: bool) -> Iterator[dict[str, Any]]:
        """Yields the events of the added lines; with `to_end` also of an unfinished last line.

        A line without a time gets that of the line before it.
        """
        try:
            with self._file.open("rb") as log:
                if log.seek(0, os.SEEK_END) < self._offset:  # the file was replaced
                    self._offset = 0
                log.seek(self._offset)
                added = log.read()
        except FileNotFoundError:
            return
        complete = added if to_end else added[: added.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.decode(errors="replace").splitlines():
            if line.strip():
                event = parse(line, self._service)
                self._last_timestamp = event.setdefault("timestamp", self._last_timestamp)
                yield event


def parse(line: str, service: str) -> dict[str, Any]:
    """Parses a log line; the event has no `timestamp` if the line has none."""
    if line.startswith("{"):
        try:
            return {"service": service, **json.loads(line)}
        except ValueError:
            return {"service": service, "event": line}
    for pattern, time_format in _FOREIGN:
        if match := pattern.fullmatch(line):
            at = datetime.strptime(match[1], time_format).astimezone(UTC)
            level = _FOREIGN_LEVELS.get(match[2], "info")
            return {"service": service, "level": level, "event": match[3].strip(), "timestamp": at.isoformat()}
    return {"service": service, "event": line}


def _time_of(event: dict[str, Any]) -> datetime:
    # Lines before a file's first timestamp sort before all others.
    return datetime.fromisoformat(event["timestamp"]) if event["timestamp"] else datetime.min.replace(tzinfo=UTC)


def _service(file: Path) -> str:
    return file.name.removesuffix(".1").removesuffix(".log")


def _names(service: str) -> set[str]:
    """The names that select a process: `worker-2` and `worker`."""
    return {service, re.sub(r"-\d+$", "", service)}


def _show(event: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        output.json_line(event)
        return
    cells = line_for_people(event)
    lines = "".join(text for text, _ in cells).count("\n")
    if not lines:
        output.print_styled(*cells)
        return
    output.print_styled(*cells[:-1])
    for line in cells[-1][0].strip("\n").splitlines():
        output.print_styled((f"    {line}", "dim"))
