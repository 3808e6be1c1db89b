"""Logging: structured lines on stderr, with the service's name bound; JSON, or for a person at a terminal."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import structlog

_LEVELS = {"debug": "dim", "info": "green", "warning": "yellow", "error": "red", "critical": "red"}
_ANSI = {"": "", "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_SERVICE_WIDTH = len("simulated-provider")


def configure_logging(service: str, *, level: str = "info", as_json: bool | None = None) -> None:
    """Sets up logging for a process. Called once, by the entry point.

    Args:
        service: the service's name, which is in every line.
        level: the lowest level that is logged.
        as_json: True for JSON lines, False for lines for people; None for the latter if stderr is a terminal.
    """
    numeric = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if as_json is False or (as_json is None and sys.stderr.isatty()):
        renderer = _for_people
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(numeric),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(level=max(numeric, logging.WARNING), stream=sys.stderr, format="%(name)s: %(message)s")


def line_for_people(event: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Formats a log line as styled texts: local time, level, service, event, fields; a traceback has its own lines.

    Args:
        event: the fields of the JSON line: `timestamp`, `level`, `service`, `event`, and others.
    """
    fields = dict(event)
    level = str(fields.pop("level", ""))
    stamp = str(fields.pop("timestamp", ""))
    if stamp:
        stamp = datetime.fromisoformat(stamp).astimezone().strftime("%m-%d %H:%M:%S.%f")[:-3]
    service = str(fields.pop("service", ""))
    name = str(fields.pop("event", ""))
    traceback = fields.pop("exception", None)
    parts = [
        (f"{stamp:<18} ", "dim"),
        (f"{level:<7} ", _LEVELS.get(level, "")),
        (f"{service:<{_SERVICE_WIDTH}} ", "cyan"),
        (name, "bold" if level in ("warning", "error", "critical") else ""),
    ]
    for field, value in fields.items():
        parts += [(f"  {field}=", "dim"), (_format(value), "")]
    return parts if traceback is None else [*parts, (f"\n{traceback}", "dim")]


def _format(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    plain = text and text.isprintable() and not any(character in text for character in ' "=')
    return text if plain or not isinstance(value, str) else json.dumps(text, ensure_ascii=False)


def _for_people(_logger: Any, _method: str, event: structlog.typing.EventDict) -> str:
    parts = line_for_people(event)
    if os.environ.get("NO_COLOR") or not sys.stderr.isatty():
        return "".join(text for text, _ in parts)
    return "".join(f"\x1b[{_ANSI[style]}m{text}\x1b[0m" if style else text for text, style in parts)
