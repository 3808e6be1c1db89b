"""The way by which a command reaches a plane."""

from __future__ import annotations

from pathlib import Path

import pytest

from breakwater.kernel.commands.errors import CliError
from breakwater.local.plane import PlaneLocation
from tests.tables import each_row

URL, SERVER = "BREAKWATER_URL", "BREAKWATER_CLICKHOUSE_URL"


@each_row(
    ("variables", "url", "api_key", "data", "uses_http"),
    [
        ((), None, None, None, False),
        ((URL,), None, None, None, True),
        ((SERVER,), None, None, None, False),
        ((URL, SERVER), None, None, None, False),
        ((URL, SERVER), "http://plane", None, None, True),
        ((SERVER,), None, "bw_key", None, True),
        ((URL,), None, None, "elsewhere", False),
        ((), "http://plane", None, "elsewhere", True),
    ],
)
def test_an_option_for_the_api_or_its_variable_without_the_servers_selects_http(
    monkeypatch: pytest.MonkeyPatch,
    variables: tuple[str, ...],
    url: str | None,
    api_key: str | None,
    data: str | None,
    uses_http: bool,
) -> None:
    for name in (URL, SERVER):
        monkeypatch.delenv(name, raising=False)
    for name in variables:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    plane = PlaneLocation(None if data is None else Path(data))
    assert plane.uses_http(SERVER, url, api_key) is uses_http
    if uses_http:
        with pytest.raises(CliError, match="the HTTP API can't change data"):
            plane.require_server(SERVER, "change data", url, api_key)
    else:
        plane.require_server(SERVER, "change data", url, api_key)
