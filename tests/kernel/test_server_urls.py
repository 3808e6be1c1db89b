"""URLs that name several servers."""

from __future__ import annotations

import pytest

from breakwater.kernel.commands import connect
from breakwater.kernel.commands.errors import CliError
from breakwater.kernel.server_urls import server_urls
from tests.tables import each_row


@each_row(
    "url, urls",
    [
        ("nats://n1:4222", ["nats://n1:4222"]),
        ("nats://u:p@n1:1,n2:2,[::1]:3", ["nats://u:p@n1:1", "nats://u:p@n2:2", "nats://u:p@[::1]:3"]),
        ("http://u:p@c1,c2/db", ["http://u:p@c1/db", "http://u:p@c2/db"]),
    ],
)
def test_each_server_has_all_of_the_url_but_the_address(url: str, urls: list[str]) -> None:
    assert server_urls(url) == urls


@each_row("url", ["nats://u:sesame@n1,,n2", "nats://u:sesame@n1:x", "nats://u:sesame@n1:99999", "n1:4222"])
def test_an_address_that_is_none_is_refused_without_repeating_the_url(url: str) -> None:
    with pytest.raises(ValueError, match="has no host") as refusal:
        server_urls(url)
    assert "sesame" not in str(refusal.value)


async def test_a_command_refuses_an_address_that_is_none() -> None:
    with pytest.raises(CliError, match="the NATS URL is invalid: an address"):
        async with connect.bus("nats://u:sesame@[::1:4222"):
            pass
