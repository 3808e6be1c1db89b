"""The page behind a signed link: who may see it, what it shows, and what its form does."""

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import aiohttp
import pytest
import pytest_asyncio

from breakwater.alerts.rules.links import incident_link
from breakwater.config import parse_config
from breakwater.kernel.errors import ConfigError
from breakwater.services.request.app import build
from tests.server_sources import RunningServer
from tests.services.request.conftest import (
    ALERTING,
    LINK_SECRET,
    Answer,
    HttpApi,
    lose_nats,
    new_api,
    publish_alert,
    settings_for,
)

WEEK = timedelta(days=7)
SAFE = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def link(incident_id: str, *, valid: timedelta = WEEK, secret: str = LINK_SECRET) -> str:
    """The path and query of a link, as a proxy passes it on."""
    whole = urlsplit(incident_link("https://plane.example", secret, incident_id, valid, datetime.now(UTC)))
    return f"{whole.path}?{whole.query}"


class Person:
    """Whoever has the link, and no API key."""

    def __init__(self, api: HttpApi, http: aiohttp.ClientSession) -> None:
        self._api = replace(api, http=http)

    async def open(self, path: str, method: str = "GET") -> Answer:
        return await self._api.ask(method, path, allow_redirects=False)

    async def send(self, path: str, fields: dict[str, str] | bytes) -> Answer:
        data = fields if isinstance(fields, bytes) else urlencode(fields).encode()
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        return await self._api.ask("POST", path, data=data, headers=headers, allow_redirects=False)


@pytest_asyncio.fixture(loop_scope="package")
async def person(alerting: HttpApi) -> AsyncGenerator[Person]:
    async with aiohttp.ClientSession() as http:
        yield Person(alerting, http)


class Page(HTMLParser):
    """What a browser makes of a page."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(answer.body.decode())
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


async def test_a_link_shows_the_incident_and_what_may_be_done(alerting: HttpApi, person: Person) -> None:
    alert = await publish_alert(
        alerting,
        title="Task stopped: t1",
        text="Ten of ten. To do: `breakwater guards reset 't1'`",
        agent="writer",
        model="openai/m",
        tenant="acme",
        times=3,
    )
    answer = await person.open(link(alert.incident_id))
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    page = Page(answer)
    for words in (
        "Needs an operator · warning · guard tripped",
        "Task stopped: t1",
        "Ten of ten. To do: breakwater guards reset 't1'",
        "writer",
        "openai/m",
        "acme",
        "2026-11-21 10:00:00 UTC",
        "3 times",
        alert.incident_id,
    ):
        assert words in page.text, words
    assert "<code>breakwater guards reset" in answer.body.decode()
    assert [one["value"] for one in page.all("button")] == ["acknowledge", "resolve"]
    fields = {one["name"]: one for one in page.all("input")}
    assert {"required", "maxlength"} <= set(fields["name"])
    assert {one["for"] for one in page.all("label")} == {one["id"] for one in page.all("input")}
    assert page.all("form") == [{"method": "post"}]


async def test_a_page_runs_and_loads_nothing_and_leaks_its_address_to_nobody(alerting: HttpApi, person: Person) -> None:
    alert = await publish_alert(alerting)
    for path in (link(alert.incident_id), f"/alerts/{alert.incident_id}"):
        answer = await person.open(path)
        assert {name: answer.headers[name] for name in SAFE} == SAFE
        style = re.search(r"<style>(.*)</style>", answer.body.decode(), re.DOTALL)
        assert style is not None
        digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
        policy = dict(part.split(" ", 1) for part in answer.headers["Content-Security-Policy"].split("; "))
        assert policy == {
            "default-src": "'none'",
            "style-src": f"'sha256-{digest}'",
            "form-action": "'self'",
            "base-uri": "'none'",
            "frame-ancestors": "'none'",
        }
        page = Page(answer)
        assert {tag for tag, _ in page.tags} & {"script", "img", "link", "iframe", "base"} == set()
        assert not [name for _, attributes in page.tags for name in attributes if name in ("src", "href", "style")]
        assert [one for one in page.all("meta") if one.get("name") == "viewport"]
        assert "prefers-color-scheme: dark" in style[1]


async def test_looking_changes_nothing_however_it_is_done(alerting: HttpApi, person: Person) -> None:
    alert = await publish_alert(alerting)
    path = link(alert.incident_id)
    for method, status in (("GET", 200), ("HEAD", 200), ("OPTIONS", 405), ("PUT", 405), ("DELETE", 405)):
        answer = await person.open(f"{path}&action=resolve&name=x", method)
        assert answer.status == status, method
    assert [one["change"] for one in await alerting.alerts()] == ["opened"]


async def test_the_form_acknowledges_and_the_page_says_who_did_it(alerting: HttpApi, person: Person) -> None:
    alert = await publish_alert(alerting)
    path = link(alert.incident_id)
    answer = await person.send(path, {"name": " Ada L. ", "reason": "looking at it", "action": "acknowledge"})
    assert (answer.status, answer.body) == (303, b"")
    assert path.endswith(answer.headers["Location"])
    assert answer.headers["Location"].startswith("?")
    [_, reported] = await alerting.alerts()
    assert (reported["acknowledged_by"], reported["reason"]) == ("Ada L. (by link)", "looking at it")
    page = Page(await person.open(path))
    assert "Acknowledged by Ada L. (by link) at " in page.text
    assert " UTC: looking at it" in page.text
    assert [one["value"] for one in page.all("button")] == ["resolve"]
    assert (await person.send(path, {"name": "Bo", "reason": "", "action": "resolve"})).status == 303
    page = Page(await person.open(path))
    assert "Resolved by Bo (by link) at " in page.text
    assert "by Ada L. (by link)" in page.text
    assert page.all("form") == []
    assert (await alerting.alerts())[-1]["reason"] is None


async def test_of_two_at_once_one_sees_who_was_quicker(alerting: HttpApi, person: Person) -> None:
    alert = await publish_alert(alerting)
    path = link(alert.incident_id)
    answers = await asyncio.gather(
        *(person.send(path, {"name": name, "action": "acknowledge"}) for name in ("Ada", "Bo"))
    )
    assert sorted(answer.status for answer in answers) == [200, 303]
    [_, reported] = await alerting.alerts()
    [late] = [Page(answer) for answer in answers if answer.status == 200]
    assert "Nothing was changed" in late.text
    assert f"Acknowledged by {reported['acknowledged_by']}" in late.text


async def test_a_form_that_is_wrong_is_shown_again_with_what_was_written(alerting: HttpApi, person: Person) -> None:
    alert = await publish_alert(alerting)
    path = link(alert.incident_id)
    for fields, words in [
        ({"name": " ", "reason": "<why>", "action": "resolve"}, "Your name: "),
        ({"name": "x" * 81, "reason": "<why>", "action": "resolve"}, "Your name: "),
        ({"name": "a\nb", "reason": "<why>", "action": "resolve"}, "Your name: "),
        ({"reason": "<why>", "action": "resolve"}, "Your name: is missing"),
        ({"name": "Ada", "reason": "<why>" * 200, "action": "resolve"}, "Reason: "),
        ({"name": "Ada", "reason": "<why>", "action": "delete"}, "What to do: "),
        ({"name": "Ada", "reason": "<why>"}, "What to do: is missing"),
    ]:
        answer = await person.send(path, fields)
        page = Page(answer)
        assert answer.status == 422, fields
        assert words in page.text
        assert [one["role"] for one in page.all("p") if "role" in one] == ["alert"]
        values = {one["name"]: one["value"] for one in page.all("input")}
        assert values == {"name": fields.get("name", ""), "reason": fields["reason"]}
    for body, status in [(b"name=\xff", 400), (b"&".join([b"a=1"] * 50), 400), (b"name=" + b"x" * 20_000, 413)]:
        answer = await person.send(path, body)
        assert (answer.status, answer.headers["Content-Type"]) == (status, "text/html; charset=utf-8")
    assert len(await alerting.alerts()) == 1


async def test_a_link_is_good_for_its_incident_and_its_time_only(alerting: HttpApi, person: Person) -> None:
    alert, other = await publish_alert(alerting), await publish_alert(alerting, "guard_tripped/-/other")
    good = link(alert.incident_id)
    query = urlsplit(good).query
    expires, signature = (part.split("=")[1] for part in query.split("&"))
    page = f"/alerts/{alert.incident_id}"
    for path, words in {
        page: "not whole",
        f"{page}?expires={expires}": "not whole",
        f"{page}?signature={signature}": "not whole",
        f"{page}?expires={int(expires) + 3600}&signature={signature}": "not whole",
        f"{page}?expires=x&signature={signature}": "not whole",
        f"{page}?expires={expires}&signature={'0' * 64}": "not whole",
        f"{page}?expires={expires}&signature=%C3%A9": "not whole",
        f"/alerts/{other.incident_id}?{query}": "not whole",
        f"/alerts/{alert.incident_id[:12]}?{query}": "not whole",
        link(alert.incident_id, secret="another secret of 32 characters!"): "its key was changed",
        link(alert.incident_id, valid=timedelta(hours=-2)): "has expired",
    }.items():
        for answer in (
            await person.open(path),
            await person.send(path, {"name": "Eve", "action": "resolve"}),
        ):
            assert answer.status == 403, path
            assert words in Page(answer).text
            assert alert.title not in answer.body.decode()
    assert (await person.open(good)).status == 200
    assert len(await alerting.alerts()) == 2


async def test_an_incident_that_is_forgotten_has_a_page_that_says_so(person: Person) -> None:
    for answer in (
        await person.open(link("inc_0123456789")),
        await person.send(link("inc_0123456789"), {"name": "Ada", "action": "resolve"}),
    ):
        assert answer.status == 404
        assert "this incident is no longer known" in Page(answer).text.lower()


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>${style}&lt;"


async def test_nothing_that_others_wrote_becomes_part_of_the_page(alerting: HttpApi, person: Person) -> None:
    alert = await publish_alert(
        alerting, title=HOSTILE, text=f"`{HOSTILE}` {HOSTILE}", agent=HOSTILE, model=HOSTILE, tenant=HOSTILE
    )
    path = link(alert.incident_id)
    shown = [await person.open(path)]
    shown.append(await person.send(path, {"name": HOSTILE, "reason": HOSTILE, "action": HOSTILE}))
    await person.send(path, {"name": HOSTILE[:80], "reason": HOSTILE, "action": "acknowledge"})
    shown.append(await person.open(path))
    await person.send(path, {"name": HOSTILE[:80], "reason": HOSTILE, "action": "resolve"})
    shown.append(await person.open(path))
    assert len(await alerting.alerts()) == 3
    for answer in shown:
        page = Page(answer)
        assert {tag for tag, _ in page.tags} & {"script", "img"} == set()
        assert HOSTILE in page.text
    assert HOSTILE in {one.get("value") for one in Page(shown[1]).all("input")}


async def test_no_secret_that_somebody_types_is_kept(alerting: HttpApi, person: Person) -> None:
    alert = await publish_alert(alerting)
    await person.send(
        link(alert.incident_id),
        {"name": "password=hunter2", "reason": "token: hunter2", "action": "acknowledge"},
    )
    [_, reported] = await alerting.alerts()
    assert "hunter2" not in str(reported)
    assert "[REDACTED]" in reported["acknowledged_by"]


async def test_without_nats_the_page_says_so(alerting: HttpApi, person: Person, own_nats_server: RunningServer) -> None:
    alert = await publish_alert(alerting)
    await lose_nats(alerting, own_nats_server)
    for answer in (
        await person.open(link(alert.incident_id)),
        await person.send(link(alert.incident_id), {"name": "Ada", "action": "resolve"}),
    ):
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert "reload this page" in Page(answer).text
    assert (await person.open("/alerts/x?expires=1&signature=2")).status == 403  # which needs nobody


async def test_metrics_have_the_route_and_no_signature(alerting: HttpApi, person: Person) -> None:
    alert = await publish_alert(alerting)
    await person.open(link(alert.incident_id))
    shown = (await alerting.ask("GET", "/metrics")).body.decode()
    assert "/alerts/{incident_id}" in shown
    assert "signature" not in shown
    assert alert.incident_id not in shown


async def test_without_links_in_the_config_there_are_no_pages(
    own_nats_server: RunningServer, redis_server: RunningServer, tmp_path: Path
) -> None:
    config = "\n".join(line for line in ALERTING.splitlines() if "links:" not in line)
    async with new_api(own_nats_server.url, redis_server.url, tmp_path, config) as api:
        alert = await publish_alert(api)
        answer = await api.ask("GET", link(alert.incident_id))
        assert (answer.status, answer.code) == (404, "not_found")


@pytest.mark.parametrize(
    ("secret", "words"),
    [(None, "LINK_SECRET is not set"), ("x" * 31, "it has 31 characters, but needs at least 32")],
)
def test_a_secret_that_is_no_good_stops_it_at_the_start(
    secret: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LINK_SECRET", raising=False)
    if secret is not None:
        monkeypatch.setenv("LINK_SECRET", secret)
    settings = settings_for("nats://127.0.0.1:9", "redis://127.0.0.1:9/0", tmp_path)
    with pytest.raises(ConfigError, match=r"^alerts\.links\.secret: ") as failure:
        build(settings, parse_config(ALERTING))
    assert words in str(failure.value)
    assert "xxx" not in str(failure.value)
