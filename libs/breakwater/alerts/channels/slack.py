"""Slack: by incoming webhook, which posts only; and by a bot, which keeps one message for each incident up to date."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

import aiohttp
from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient
from slack_sdk.webhook.async_client import AsyncWebhookClient

from breakwater.alerts.channels.channel import HttpChannel, SendError, check_answer, fingerprint, no_answer
from breakwater.alerts.channels.wording import Line, MessageText, Url, Wording, plain
from breakwater.alerts.contract import Alert, AlertDigest
from breakwater.alerts.rules.alert_rules import budget_period_of, threshold_of
from breakwater.alerts.rules.outbox import RISE
from breakwater.alerts.store.channels import SentMessages
from breakwater.calls.rules.classify import retry_after_s
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.security.addresses import IpNetwork

TIMEOUT_S = 10.0
INTERVAL_S = 1.0
"""Slack's own limit is one message a second for each webhook, and for each channel."""

SECTION_LENGTH = 3000
"""Characters that a section's text takes, after escaping."""
MAX_BLOCKS = 50
NOTICE_LENGTH = 3000
"""Characters of the text for notifications and screen readers. Slack takes 40,000 and advises 4,000."""
_TITLE_LENGTH = 1000

_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
_PART_OF_ESCAPE = re.compile("&[a-z]*$")

_HAPPENED_AGAIN = frozenset({"repeated", "reopened"})
_FIRST_REPLIES = 10
_CODE = re.compile(r"[a-z_]{1,64}")
"""The name of a refusal by Slack (`no_service`, `invalid_blocks`); anything else may be a page of another server."""
_CANNOT_BE_UPDATED = frozenset({"message_not_found", "cant_update_message", "edit_window_closed"})
_PASSING = frozenset(
    {"ratelimited", "rate_limited", "internal_error", "fatal_error", "service_unavailable", "request_timeout"}
)
_DISABLING = frozenset({"token_revoked", "account_inactive", "is_archived"})
_NEW_TOKEN = "set the bot token from the app's page `OAuth & Permissions`"  # noqa: S105  advice
_ADVICE: Mapping[str, str] = {
    "invalid_auth": _NEW_TOKEN,
    "not_authed": _NEW_TOKEN,
    "token_expired": _NEW_TOKEN,
    "token_revoked": f"the token was revoked; install the app again, and {_NEW_TOKEN}",
    "account_inactive": f"the bot was removed from the workspace; install the app again, and {_NEW_TOKEN}",
    "missing_scope": "give the app the scope `chat:write`, and install it again",
    "channel_not_found": "set the channel's id, such as C0123456; invite the bot to a private channel",
    "not_in_channel": "invite the bot: write `/invite @its-name` in the channel",
    "is_archived": "the channel is archived; choose another one",
    "restricted_action": "the workspace does not allow the bot to post in this channel; ask its administrator",
}
_NOT_SLACK = "the response is not from Slack"
_NO_HOOK = frozenset({"no_service", "no_active_hooks", "channel_is_archived"})


_SILENT = logging.Logger("slack", level=logging.WARNING)
"""For slack-sdk, which logs URLs and messages at debug level."""


@dataclass(frozen=True, slots=True)
class SlackApp:
    """The app whose bot posts, and the channel that it posts in."""

    token: str
    channel: str
    """An id: Slack updates no message of a channel that is only named."""
    api_url: str


class LinkAdvice:
    """The advice in a channel's first message, how its messages get links to the console."""

    WORDS = "For links to the console in these messages, set `console.url` in the config."
    _RECORD = "advised-links"

    def __init__(self, sent_messages: SentMessages, *, has_links: bool) -> None:
        self._sent_messages = sent_messages
        self._is_given: bool | None = True if has_links else None  # unknown until it is looked up

    async def add_to(self, worded: MessageText) -> MessageText:
        """Returns a message with the advice, unless an earlier message had it, or that can't be looked up."""
        try:
            if self._is_given is None:
                self._is_given = await self._sent_messages.get(self._RECORD) is not None
            if self._is_given:
                return worded
            # Before it is sent: better never advised than each time that a message fails.
            await self._sent_messages.put(self._RECORD, self._RECORD)
        except BusError:
            return worded  # that NATS can't store is news, which must not wait for it
        return MessageText(worded.title, (*worded.paragraphs, ((self.WORDS,),)))

    def note_sent(self) -> None:
        """Notes that a message with the advice has arrived."""
        self._is_given = True


class SlackWebhook(HttpChannel):
    """Posts to one incoming webhook, whose URL is the secret."""

    interval_s = INTERVAL_S
    is_chat = True

    def __init__(
        self,
        name: str,
        url: str,
        wording: Wording,
        sent_messages: SentMessages,
        allowed: Sequence[IpNetwork],
        now: Callable[[], datetime],
    ) -> None:
        super().__init__(name, fingerprint("slack.webhook_url", url), allowed, TIMEOUT_S, now)
        self._url = url
        self._wording = wording
        self._advice = LinkAdvice(sent_messages, has_links=wording.link is not None)

    async def send(self, message: Alert | AlertDigest) -> None:
        """Posts the message once.

        Raises:
            SendError: it did not arrive.
        """
        fields = slack_message(await self._advice.add_to(self._wording.message(message)))
        client = AsyncWebhookClient(self._url, session=self._session, retry_handlers=[], logger=_SILENT)
        client.proxy = None  # it reads HTTPS_PROXY; a proxy would connect to addresses that can't be checked
        try:
            answer = await client.send_dict(fields)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise no_answer(error) from None
        code = answer.body if _CODE.fullmatch(answer.body) else ""
        if answer.status_code in {404, 410} and code in _NO_HOOK:
            raise SendError(
                f"Slack refuses: {code}; the webhook no longer accepts messages: create a new one, and set its URL",
                permanent=True,
                disables=True,
            )
        check_answer(answer.status_code, answer.headers, self._now(), code)
        self._advice.note_sent()


class SlackBot(HttpChannel):
    """Posts and updates messages in one channel of Slack."""

    interval_s = INTERVAL_S
    is_chat = True
    updates = True

    def __init__(
        self,
        name: str,
        app: SlackApp,
        wording: Wording,
        sent_messages: SentMessages,
        allowed: Sequence[IpNetwork],
        now: Callable[[], datetime],
    ) -> None:
        identity = fingerprint("slack.bot_token", app.api_url, app.token, app.channel)
        super().__init__(name, identity, allowed, TIMEOUT_S, now)
        self._app = app
        self._wording = wording
        self._sent_messages = sent_messages
        self._advice = LinkAdvice(sent_messages, has_links=wording.link is not None)
        self._unsaved: dict[str, str] = {}
        """Messages that were posted but could not be recorded: a retry updates them."""
        self._replied: dict[str, int] = {}
        """The incident's count at the last reply in its thread."""

    async def send(self, message: Alert | AlertDigest) -> None:
        """Posts the message, or updates that of its incident. If it is sent again, a reply may be there twice.

        Raises:
            SendError: it did not arrive.
            BusError: it may have arrived, and is updated at the next try.
        """
        worded = self._wording.message(message)
        if isinstance(message, AlertDigest):
            await self._post_first(worded)
            return
        incident_id = message.incident_id
        budget = budget_period_of(message)
        ts = self._unsaved.get(incident_id) or await self._sent_messages.get(incident_id)
        risen = None if budget is None else await self._risen(budget)
        if risen is not None:
            if ts is None and self._now().timestamp() - float(risen.ts) < RISE.total_seconds():
                ts = self._unsaved[incident_id] = risen.ts
            if risen.ts == ts and risen.threshold > threshold_of(message):
                return  # the message is about a higher threshold of the same budget
        is_updated = ts is not None and await self._update(ts, slack_message(worded))
        if ts is None or not is_updated:
            ts = self._unsaved[incident_id] = await self._post_first(worded)
        if incident_id in self._unsaved:
            await self._sent_messages.put(incident_id, ts)
            if budget is not None:
                await self._sent_messages.put(_record_of(budget), f"{ts} {threshold_of(message)}")
            del self._unsaved[incident_id]
        if is_updated and self._worth_a_reply(message):
            # All readers of the channel see a rise, and not only those who follow the thread.
            thread = {"thread_ts": ts, "reply_broadcast": message.change == "worsened"}
            await self._post(slack_message(self._wording.again(message)) | thread)
            self._replied[incident_id] = message.count
        if message.status == "resolved":
            self._replied.pop(incident_id, None)

    async def _risen(self, budget: str) -> RisenMessage | None:
        record = await self._sent_messages.get(_record_of(budget))
        if record is None:
            return None
        ts, threshold = record.split()
        return RisenMessage(ts, int(threshold))

    async def _post_first(self, worded: MessageText) -> str:
        ts = await self._post(slack_message(await self._advice.add_to(worded)))
        self._advice.note_sent()
        return ts

    def _worth_a_reply(self, alert: Alert) -> bool:
        """Returns True for a reminder, a rise, and for a recurrence if the count has doubled since the last reply."""
        if alert.change in {"reminded", "worsened"}:
            return True
        # Another process may have replied before: an unknown count begins with the one of now.
        last = self._replied.setdefault(alert.incident_id, 1 if alert.count <= _FIRST_REPLIES else alert.count)
        return alert.change in _HAPPENED_AGAIN and alert.count >= 2 * last

    async def _post(self, fields: Mapping[str, Any]) -> str:
        answer = await self._call("chat.postMessage", fields)
        ts = answer.get("ts")
        if not isinstance(ts, str):
            raise SendError("Slack did not return the id of the posted message")
        return ts

    async def _update(self, ts: str, fields: Mapping[str, Any]) -> bool:
        """Updates a message; False if it can't be updated any more."""
        # Unlike for a new message, Slack would by default look for mentions in the text.
        content = {"text": fields["text"], "blocks": fields["blocks"], "parse": "none", "link_names": False}
        try:
            await self._call("chat.update", {**content, "ts": ts})
        except CannotBeUpdatedError:
            return False
        return True

    async def _call(self, method: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        app = self._app
        client = AsyncWebClient(app.token, app.api_url, session=self._session, retry_handlers=[], logger=_SILENT)
        client.proxy = None  # as for the webhook
        try:
            answer = await client.api_call(method, json={"channel": app.channel, **fields})
        except SlackApiError as error:
            raise _api_refusal(error, self._now()) from None
        except AttributeError:
            # Raised by slack-sdk for an answer that is no JSON object.
            raise SendError(_NOT_SLACK) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise no_answer(error) from None
        return answer.data if isinstance(answer.data, dict) else {}


@dataclass(frozen=True, slots=True)
class RisenMessage:
    """The latest message about a budget, and the highest threshold that it is about."""

    ts: str
    threshold: int


def _record_of(budget: str) -> str:
    return f"budget_{hashlib.sha256(budget.encode()).hexdigest()[:24]}"


def slack_message(worded: MessageText) -> dict[str, Any]:
    """Returns the fields of a message that do not depend on how it is posted."""
    title = f"*{_render(worded.title, _TITLE_LENGTH)}*"
    texts = [title, *(text for lines in worded.paragraphs for text in _pack(lines))]
    return {
        "text": escape(plain(worded), NOTICE_LENGTH),
        "blocks": [
            {"type": "section", "text": {"type": "mrkdwn", "text": text, "verbatim": True}}
            for text in texts[:MAX_BLOCKS]
        ],
        "unfurl_links": False,
        "unfurl_media": False,
    }


def escape(text: str, limit: int) -> str:
    """Returns a text in which Slack finds no mention, link or entity, of at most `limit` characters."""
    if limit <= 0:
        return ""
    # No text becomes shorter: one character more than fits is enough to know that it does not.
    escaped_text = text[: limit + 1].translate(_ESCAPES)
    if len(escaped_text) <= limit:
        return escaped_text
    return f"{_PART_OF_ESCAPE.sub('', escaped_text[: limit - 1])}…"


def _pack(lines: tuple[Line, ...]) -> Iterator[str]:
    """Yields sections, as few as can hold the lines."""
    section = ""
    for line in lines:
        text = _render(line, SECTION_LENGTH)
        if section and len(section) + 1 + len(text) > SECTION_LENGTH:
            yield section
            section = text
        else:
            section = f"{section}\n{text}" if section else text
    if section.strip():
        yield section


def _render(line: Line, limit: int) -> str:
    text = ""
    for part in line:
        room = limit - len(text)
        text += escape(part, room) if isinstance(part, str) else _link(part, room)
    return text


def _link(part: Url, room: int) -> str:
    # A bar would end the address, and half an address leads nowhere.
    url = escape(part.url.replace("|", "%7C"), SECTION_LENGTH)
    if part.text == part.url:
        return f"<{url}>" if len(url) + 2 <= room else ""
    for_text = room - len(url) - 3
    return f"<{url}|{escape(part.text, for_text)}>" if for_text > 0 else escape(part.text, room)


class CannotBeUpdatedError(SendError):
    """The message was deleted, or is too old."""


def _api_refusal(error: SlackApiError, now: datetime) -> SendError:
    """Returns the error that a refusal by the Web API means."""
    answered: Any = cast("Any", error).response
    if hasattr(answered, "status_code"):
        status = int(answered.status_code)
        data = answered.data
    else:
        status = int(answered.status)
        data = None  # aiohttp's own, whose body is no JSON
    headers: Mapping[str, str] = answered.headers
    named: object = data.get("error") if isinstance(data, dict) else None
    code = named if isinstance(named, str) and _CODE.fullmatch(named) else ""
    if code in _CANNOT_BE_UPDATED:
        return CannotBeUpdatedError(f"Slack refuses: {code}", permanent=True)
    if code and status == 200:
        advice = f"; {_ADVICE[code]}" if code in _ADVICE else ""
        return SendError(
            f"Slack refuses: {code}{advice}",
            permanent=code not in _PASSING,
            retry_after_s=retry_after_s({name.lower(): value for name, value in headers.items()}, now),
            disables=code in _DISABLING,
        )
    try:
        check_answer(status, headers, now, code)
    except SendError as refusal:
        return refusal
    return SendError(_NOT_SLACK)
