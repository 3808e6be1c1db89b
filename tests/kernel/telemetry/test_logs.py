"""Logs: JSON lines for programs, and lines for people at a terminal."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Generator

import pytest
import structlog

from breakwater.kernel.telemetry.logs import configure_logging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    monkeypatch.delenv("NO_COLOR", raising=False)
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def said(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, *, as_json: bool | None) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging("worker", as_json=as_json)
    structlog.get_logger().warning("unavailable", what="NATS of others", tries=2, text="a=b\n\x1b[2J")
    return stream.getvalue()


@pytest.mark.usefixtures("logged")
@pytest.mark.parametrize(("terminal", "as_json"), [(False, None), (False, True), (True, True)])
def test_logs_are_json_but_on_a_terminal(terminal: bool, as_json: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    event = json.loads(said(Terminal() if terminal else io.StringIO(), monkeypatch, as_json=as_json))
    assert (event["service"], event["event"], event["level"], event["tries"]) == ("worker", "unavailable", "warning", 2)


@pytest.mark.usefixtures("logged")
def test_a_person_gets_time_level_service_event_and_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = said(io.StringIO(), monkeypatch, as_json=False)
    assert plain[18:].split(maxsplit=3)[:3] == ["warning", "worker", "unavailable"]
    assert plain.rstrip().endswith(r'what="NATS of others"  tries=2  text="a=b\n\u001b[2J"')
    assert "\x1b" not in plain


@pytest.mark.usefixtures("logged")
def test_a_terminal_has_colours_unless_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[33mwarning" in said(Terminal(), monkeypatch, as_json=None)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in said(Terminal(), monkeypatch, as_json=None)
