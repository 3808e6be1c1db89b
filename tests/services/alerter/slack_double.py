"""A double of Slack: its Web API, as far as bots that post use it, and incoming webhooks. As strict as Slack is.

It keeps what was posted, so that a test reads the channel as a person would. Run by itself it prints its port:
`python -m tests.services.alerter.slack_double`.
"""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

TOKEN = "xoxb-2052-7103-onlyForTheTestsOfTheAlerter"
CHANNEL = "C0123456"
HOOK = "/services/T0001/B0002/onlyForTheTestsOfTheAlerter"

_TS = re.compile(r"\d{10}\.\d{6}")
_FIELDS = {
    "chat.postMessage": {
        "channel",
        "text",
        "blocks",
        "thread_ts",
        "reply_broadcast",
        "unfurl_links",
        "unfurl_media",
        "parse",
        "link_names",
    },
    "chat.update": {"channel", "ts", "text", "blocks", "parse", "link_names"},
    "hook": {"text", "blocks", "unfurl_links", "unfurl_media"},
}
_BARE = re.compile(r"&(?!amp;|lt;|gt;)|<(?!https?://)")
"""What is not escaped: in text of ours only links may begin with `<`."""


class SlackRefusalError(Exception):
    """What Slack answers instead of `ok`, by its own name for it."""


@dataclass
class Post:
    """A message as it stands in a channel."""

    ts: str
    channel: str
    text: str
    blocks: list[dict[str, Any]]
    by: str
    at: float
    thread_ts: str | None = None
    edited: list[float] = field(default_factory=list)

    @property
    def shown(self) -> str:
        """As a person sees it: the text of its blocks, or its text where it has none."""
        return unescaped("\n".join(block["text"]["text"] for block in self.blocks) or self.text)


@dataclass(frozen=True)
class Call:
    """A request that came: `chat.postMessage`, `chat.update` or `hook`; when, and what it was answered."""

    method: str
    at: float
    answer: str
    body: dict[str, Any]


class SlackDouble:
    """A workspace with one bot and one incoming webhook."""

    def __init__(
        self,
        *,
        token: str = TOKEN,
        channels: tuple[str, ...] = (CHANNEL,),
        interval_s: float = 1.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes it.

        Args:
            token: of the bot, that is in every channel.
            channels: that there are; the webhook posts into the first one.
            interval_s: the least time between two posts into a channel, or by a webhook; 0 for no limit.
            monotonic: the clock that posts are timed by.
        """
        self.token, self.channels, self.interval_s = token, list(channels), interval_s
        self._monotonic = monotonic
        self.posts: list[Post] = []
        self.calls: list[Call] = []
        self.violations: list[str] = []
        """What no client may do at all, whatever Slack would answer."""
        self.refuse: dict[str, list[str]] = {}
        """By method: answers to be given in turn instead of the real ones. `ratelimited:7` says after how many seconds,
        `http:503` is a status with a page, and `lost` does what is asked and breaks the connection."""
        self.revoked: str | None = None
        """Where the token or the webhook is not valid any more: how Slack calls that."""
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._last: dict[str, float] = {}
        self._number = 0

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api/"

    @property
    def hook_url(self) -> str:
        return f"http://127.0.0.1:{self.port}{HOOK}"

    async def start(self, port: int = 0) -> Self:
        app = web.Application(client_max_size=1024 * 1024)
        app.router.add_route("*", "/api/{method}", self._api)
        app.router.add_route("*", "/services/{path:.*}", self._hook)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port or self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def channel_view(self, channel: str = CHANNEL) -> list[str]:
        """The channel from top to bottom; `(edited)` behind what was changed, and replies below, behind `> `."""
        lines: list[str] = []
        for post in self.posts:
            if post.channel == channel and post.thread_ts is None:
                lines.append(post.shown + (" (edited)" if post.edited else ""))
                lines += [f"> {reply.shown}" for reply in self.replies(post.ts)]
        return lines

    def messages(self, channel: str = CHANNEL) -> list[Post]:
        return [post for post in self.posts if post.channel == channel and post.thread_ts is None]

    def replies(self, ts: str) -> list[Post]:
        return [post for post in self.posts if post.thread_ts == ts]

    def delete(self, ts: str) -> None:
        """As a person who clears the channel."""
        self.posts = [post for post in self.posts if ts not in {post.ts, post.thread_ts}]

    def counted(self) -> dict[str, int]:
        """How many posts, updates, replies and refusals there were."""
        done = Counter(
            {"chat.update": "updates"}.get(call.method, "replies" if "thread_ts" in call.body else "posts")
            for call in self.calls
            if call.answer == "ok"
        )
        refused = sum(call.answer != "ok" for call in self.calls)
        return {**{name: done[name] for name in ("posts", "updates", "replies")}, "refused": refused}

    async def _api(self, request: web.Request) -> web.StreamResponse:
        method = request.match_info["method"]

        def ask(body: dict[str, Any]) -> dict[str, Any]:
            if request.headers.get("authorization") != f"Bearer {self.token}":
                raise SlackRefusalError("invalid_auth" if "authorization" in request.headers else "not_authed")
            if method not in {"chat.postMessage", "chat.update"}:
                raise SlackRefusalError("unknown_method")
            post = self._post(body) if method == "chat.postMessage" else self._update(body)
            return {"channel": post.channel, "ts": post.ts, "message": {"text": post.text, "type": "message"}}

        return await self._answer(request, method, ask)

    async def _hook(self, request: web.Request) -> web.StreamResponse:
        def ask(body: dict[str, Any]) -> dict[str, Any]:
            if request.path != HOOK:
                raise SlackRefusalError("no_service")
            self._check_content(body)
            self._check_pace("hook")
            self._keep(self.channels[0], body, "hook")
            return {}

        return await self._answer(request, "hook", ask)

    async def _answer(
        self, request: web.Request, method: str, ask: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> web.StreamResponse:
        now = self._monotonic()
        planned = self.refuse[method].pop(0) if self.refuse.get(method) else ""
        body: dict[str, Any] = {}
        answer, fields = "ok", dict[str, Any]()
        try:
            body = await self._read(request, method)
            self._check_validity(planned)
            fields = ask(body)
        except SlackRefusalError as refusal:
            answer = str(refusal)
        self.calls.append(Call(method, now, "lost" if planned == "lost" else answer, body))
        if planned == "lost":
            assert request.transport is not None
            request.transport.abort()
        code, _, detail = answer.partition(":")
        if code == "http":
            return web.Response(status=int(detail), text="<html>upstream</html>", content_type="text/html")
        if code in {"ratelimited", "rate_limited"}:
            headers = {"Retry-After": detail or str(max(1, round(self.interval_s)))}
            if method == "hook":
                return web.Response(status=429, text="rate_limited", headers=headers)
            return web.json_response({"ok": False, "error": "ratelimited"}, status=429, headers=headers)
        if method == "hook":
            return web.Response(status=_HOOK_STATUS.get(code, 400) if code != "ok" else 200, text=code)
        return web.json_response({"ok": True, **fields} if code == "ok" else {"ok": False, "error": code})

    def _check_validity(self, planned: str) -> None:
        if planned and planned != "lost":
            raise SlackRefusalError(planned)
        if self.revoked is not None:
            raise SlackRefusalError(self.revoked)

    async def _read(self, request: web.Request, method: str) -> dict[str, Any]:
        if request.method != "POST":
            self.violations.append(f"{request.method} {method}")
            raise SlackRefusalError("invalid_form_data")
        if request.content_type != "application/json":
            self.violations.append(f"content type {request.content_type}")
            raise SlackRefusalError("invalid_payload" if method == "hook" else "invalid_form_data")
        try:
            body = json.loads(await request.text())
        except ValueError:
            raise SlackRefusalError("invalid_payload" if method == "hook" else "invalid_json") from None
        if not isinstance(body, dict):
            raise SlackRefusalError("invalid_payload" if method == "hook" else "json_not_object")
        self.violations += [
            f"unknown field {name} of {method}" for name in body.keys() - _FIELDS.get(method, body.keys())
        ]
        if self.token in json.dumps(body) or HOOK in json.dumps(body):
            self.violations.append("a secret in the body")
        return body

    def _post(self, body: dict[str, Any]) -> Post:
        channel = self._channel(body)
        self._check_content(body)
        thread_ts = body.get("thread_ts")
        if thread_ts is not None and not any(
            post.ts == thread_ts and post.channel == channel and post.thread_ts is None for post in self.posts
        ):
            raise SlackRefusalError("thread_not_found" if _TS.fullmatch(str(thread_ts)) else "invalid_ts_format")
        self._check_pace(channel)
        return self._keep(channel, body, "bot", thread_ts)

    def _update(self, body: dict[str, Any]) -> Post:
        channel = self._channel(body)
        if not _TS.fullmatch(str(body.get("ts", ""))):
            raise SlackRefusalError("message_not_found")
        self._check_content(body)
        found = [post for post in self.posts if post.ts == body["ts"] and post.channel == channel]
        if not found:
            raise SlackRefusalError("message_not_found")
        [post] = found
        if post.by != "bot":
            raise SlackRefusalError("cant_update_message")
        post.text = body.get("text", post.text)
        post.blocks = body.get("blocks", post.blocks)
        post.edited.append(self._monotonic())
        return post

    def _channel(self, body: dict[str, Any]) -> str:
        channel = body.get("channel")
        if not isinstance(channel, str) or channel not in self.channels:
            raise SlackRefusalError("channel_not_found")
        return channel

    def _check_content(self, body: dict[str, Any]) -> None:
        text, blocks = body.get("text", ""), body.get("blocks", [])
        if not isinstance(text, str) or not isinstance(blocks, list):
            raise SlackRefusalError("invalid_arguments")
        if not text and not blocks:
            raise SlackRefusalError("no_text")
        if len(text) > 40_000:
            raise SlackRefusalError("msg_too_long")
        if len(blocks) > 50 or not all(map(_is_section, blocks)):
            raise SlackRefusalError("invalid_blocks")
        for shown in (text, *(block["text"]["text"] for block in blocks)):
            if (bare := _BARE.search(shown)) is not None:
                self.violations.append(f"not escaped: {shown[bare.start() : bare.start() + 20]!r}")

    def _check_pace(self, of: str) -> None:
        now = self._monotonic()
        # Slack tolerates small bursts; clocks of two processes differ by a little.
        if now - self._last.get(of, -1e9) < self.interval_s * 0.95:
            raise SlackRefusalError("ratelimited")
        self._last[of] = now

    def _keep(self, channel: str, body: dict[str, Any], by: str, thread_ts: str | None = None) -> Post:
        self._number += 1
        post = Post(
            ts=f"1763719200.{self._number:06d}",
            channel=channel,
            text=body.get("text", ""),
            blocks=body.get("blocks", []),
            by=by,
            at=self._monotonic(),
            thread_ts=thread_ts,
        )
        self.posts.append(post)
        return post


_HOOK_STATUS = {
    "no_service": 404,
    "no_active_hooks": 404,
    "channel_not_found": 404,
    "channel_is_archived": 410,
    "action_prohibited": 403,
}


def unescaped(text: str) -> str:
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


def _is_section(block: Any) -> bool:
    text = block.get("text") if isinstance(block, dict) else None
    return (
        isinstance(text, dict)
        and block.get("type") == "section"
        and text.get("type") == "mrkdwn"
        and isinstance(text.get("text"), str)
        and 1 <= len(text["text"]) <= 3000
        and bool(text["text"].strip())
    )


async def main() -> None:
    double = await SlackDouble().start()
    print(double.port, flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await double.stop()


if __name__ == "__main__":
    asyncio.run(main())
