"""What an answer means, and what of an error is reported."""

import errno
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from breakwater.alerts.channels.channel import SendError, check_answer, fingerprint, no_answer
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.security.guarded_http import AddressRefusedError, RedirectError, usable_url
from tests.tables import each_row

NOW = datetime(2026, 11, 21, 10, 0, 0, tzinfo=UTC)


def connecting(error: OSError) -> aiohttp.ClientConnectorError:
    key = cast("Any", SimpleNamespace(host="hooks.example", port=443, ssl=True))
    return aiohttp.ClientConnectorError(key, error)


@each_row(
    ("status", "permanent"),
    [
        (301, True),
        (307, True),
        (400, True),
        (401, True),
        (403, True),
        (404, True),
        (408, False),
        (410, True),
        (425, False),
        (429, False),
        (500, False),
        (503, False),
    ],
)
def test_a_refusal_that_would_be_repeated_is_permanent(status: int, permanent: bool) -> None:
    with pytest.raises(SendError, match=str(status)) as caught:
        check_answer(status, {}, NOW)
    assert caught.value.permanent is permanent
    assert caught.value.disables is (status == 410)


@each_row("status", [200, 201, 202, 204])
def test_any_2xx_is_a_delivery(status: int) -> None:
    check_answer(status, {}, NOW)


@each_row(("value", "expected"), [("7", 7.0), ("Sat, 21 Nov 2026 10:00:30 GMT", 30.0), ("soon", None), ("", None)])
def test_retry_after_is_read_whatever_its_case(value: str, expected: float | None) -> None:
    with pytest.raises(SendError) as caught:
        check_answer(429, {"Retry-After": value}, NOW)
    assert caught.value.retry_after_s == expected


@each_row(
    ("error", "words", "permanent"),
    [
        (aiohttp.InvalidURL("https://hooks.example/s3cret"), "its URL is invalid", True),
        (TimeoutError(), "no answer in time", False),
        (aiohttp.ServerTimeoutError("s3cret"), "no answer in time", False),
        (RedirectError(302), "the receiver answered 302; redirects are not followed", True),
        (connecting(OSError(errno.ECONNREFUSED, "refused")), "Cannot connect to host hooks.example:443", False),
        (connecting(AddressRefusedError("10.0.0.1", "private")), "its address 10.0.0.1 is refused (private)", True),
        (aiohttp.ServerDisconnectedError("s3cret"), "no usable answer (ServerDisconnectedError)", False),
        (UnicodeError("s3cret"), "no usable answer (UnicodeError)", False),
    ],
)
def test_an_error_says_what_happened_and_holds_no_url(error: Exception, words: str, permanent: bool) -> None:
    failure = no_answer(error)
    assert words in str(failure)
    assert failure.permanent is permanent
    assert "s3cret" not in str(failure)


def test_a_refused_address_says_which_setting_allows_it() -> None:
    assert str(no_answer(connecting(AddressRefusedError("10.0.0.1", "private")))) == (
        "nothing is sent to hooks.example:443: its address 10.0.0.1 is refused (private); if it is meant, put its "
        "network into `alerts.allow_networks`"
    )


@each_row(
    "url",
    [
        "https://host/secret\n",
        "https://host/se cret",
        "ftp://host/secret",
        "secret",
        "https://",
        "https:///secret",
        "http://[::1/secret",
        "https://a:0/secret",
    ],
)
def test_a_url_that_is_none_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(ConfigError, match=r"alerts\.channels\.a\.slack\.webhook_url: must be a URL") as caught:
        usable_url(url, "alerts.channels.a.slack.webhook_url")
    assert str(caught.value).endswith(": must be a URL that begins with https:// or http://")


def test_a_fingerprint_depends_on_every_part() -> None:
    assert len({fingerprint("a", "b"), fingerprint("a", "c"), fingerprint("b", "b"), fingerprint("ab")}) == 4
    assert fingerprint("a", "b") == fingerprint("a", "b")
