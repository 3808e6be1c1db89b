"""Slack, by a bot: one message for each incident, kept up to date; what happens again is told in its thread."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient

from breakwater.config import ConfigError, SlackChannel
from breakwater.contracts.alerts import Alert, AlertDigest
from breakwater.policy.addresses import Network
from services.alerter.blocks import slack_message
from services.alerter.channel import SendError, fingerprint, no_answer, secret_of
from services.alerter.guarded import guarded_session, usable_url
from services.alerter.slack import INTERVAL_S, TIMEOUT_S, check_open, silent_logger
from services.alerter.slack_refusals import CannotBeUpdatedError, api_refusal
from services.alerter.wording import Wording

_CHANNEL_ID = re.compile(r"[CDG][A-Z0-9]+")
_TOLD_AGAIN = frozenset({"repeated", "reopened"})
_FIRST_REPLIES = 10


class Posts(Protocol):
    """Remembers which message of a channel is an incident's."""

    async def get(self, incident_id: str, /) -> str | None:
        """The message's `ts`; None where it is not known."""
        ...

    async def put(self, incident_id: str, ts: str, /) -> None:
        """Remembers it, instead of what was remembered before."""
        ...


class SlackBot:
    """Posts and updates messages in one channel of Slack."""

    interval_s = INTERVAL_S
    updates = True

    def __init__(
        self,
        name: str,
        token: str,
        channel: str,
        api_url: str,
        wording: Wording,
        posts: Posts,
        allowed: Sequence[Network],
        now: Callable[[], datetime],
    ) -> None:
        """Makes the channel.

        Args:
            name: as in the config.
            token: of the bot; the secret.
            channel: its id. Slack updates no message of a channel that is only named.
            api_url: of Slack's Web API.
            wording: what people read.
            posts: of this channel.
            allowed: networks that are not refused.
            now: the clock.
        """
        self.name = name
        self.fingerprint = fingerprint("slack.bot_token", api_url, token, channel)
        self._token = token
        self._channel = channel
        self._api_url = api_url
        self._wording = wording
        self._posts = posts
        self._allowed = allowed
        self._now = now
        self._unsaved: dict[str, str] = {}
        """Messages that were posted but could not be remembered: a retry updates them."""
        self._replied: dict[str, int] = {}
        """How often an incident had happened when its thread was last told so."""
        self._session: aiohttp.ClientSession | None = None
        self._client: AsyncWebClient | None = None

    @classmethod
    def from_config(
        cls,
        name: str,
        slack: SlackChannel,
        wording: Wording,
        posts: Posts,
        allowed: Sequence[Network],
        now: Callable[[], datetime],
    ) -> SlackBot:
        """Reads the token.

        Raises:
            ConfigError: it is missing, or the channel is not given by its id, or the API's URL is none.
        """
        assert slack.bot_token is not None, "a channel with a webhook is none with a bot"
        place = f"alerts.channels.{name}.slack"
        channel = slack.channel or ""
        if not _CHANNEL_ID.fullmatch(channel):
            raise ConfigError(
                f"{place}.channel: give the channel's id, such as C0123456 (at the end of its `About`), not its name: "
                "Slack updates no message of a channel that is only named"
            )
        token = secret_of(slack.bot_token, f"{place}.bot_token")
        if not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError(f"{place}.bot_token: is no token; one begins with xoxb-")
        api_url = usable_url(slack.api_url, f"{place}.api_url")
        if urlsplit(api_url).username is not None:
            raise ConfigError(f"{place}.api_url: must hold no user and no password; the bot token is sent to it")
        return cls(name, token, channel, api_url, wording, posts, allowed, now)

    async def open(self) -> None:
        """Opens the session and the client on it."""
        self._session = guarded_session(self._allowed, TIMEOUT_S)
        self._client = AsyncWebClient(
            self._token, self._api_url, session=self._session, retry_handlers=[], logger=silent_logger()
        )
        # It reads HTTPS_PROXY and the like; a proxy would connect to addresses that we can't check.
        self._client.proxy = None

    async def close(self) -> None:
        """Closes the session."""
        if self._session is not None:
            await self._session.close()

    async def send(self, message: Alert | AlertDigest) -> None:
        """Posts the message, or updates that of its incident. It may be sent again: then a reply may be there twice.

        What `posts` raises goes through: the message may have arrived, and is updated at the next try.

        Raises:
            SendError: it did not arrive.
        """
        if isinstance(message, AlertDigest):
            await self._post(slack_message(self._wording.digest(message)))
            return
        incident_id, shown = message.incident_id, slack_message(self._wording.alert(message))
        ts = self._unsaved.get(incident_id) or await self._posts.get(incident_id)
        known = ts is not None and await self._updated(ts, shown)
        if ts is None or not known:
            ts = self._unsaved[incident_id] = await self._post(shown)
        if incident_id in self._unsaved:
            await self._posts.put(incident_id, ts)
            del self._unsaved[incident_id]
        if known and self._worth_a_reply(message):
            await self._post(slack_message(self._wording.again(message)), thread_ts=ts)
            self._replied[incident_id] = message.count
        if message.status == "resolved":
            self._replied.pop(incident_id, None)

    def _worth_a_reply(self, alert: Alert) -> bool:
        """That it happened again is worth a word when it has happened twice as often as when there was one last."""
        if alert.change == "reminded":
            return True
        # Another process may have replied before; who does not know begins with what is said now.
        told = self._replied.setdefault(alert.incident_id, 1 if alert.count <= _FIRST_REPLIES else alert.count)
        return alert.change in _TOLD_AGAIN and alert.count >= 2 * told

    async def _post(self, shown: Mapping[str, Any], thread_ts: str | None = None) -> str:
        thread = {} if thread_ts is None else {"thread_ts": thread_ts}
        answer = await self._call("chat.postMessage", {**shown, **thread})
        ts = answer.get("ts")
        if not isinstance(ts, str):
            raise SendError("Slack did not say which message it posted")
        return ts

    async def _updated(self, ts: str, shown: Mapping[str, Any]) -> bool:
        """Updates a message; False where it can't be updated any more."""
        # Unlike for a new message, Slack would by default look for mentions in the text.
        fields = {"text": shown["text"], "blocks": shown["blocks"], "parse": "none", "link_names": False}
        try:
            await self._call("chat.update", {**fields, "ts": ts})
        except CannotBeUpdatedError:
            return False
        return True

    async def _call(self, method: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._client is not None, "open() comes first"
        check_open(self._session)
        try:
            answer = await self._client.api_call(method, json={"channel": self._channel, **fields})
        except SlackApiError as error:
            raise api_refusal(error, self._now()) from None
        except AttributeError:
            # What slack-sdk raises for an answer that is no JSON object.
            raise SendError("the answer is not one of Slack's") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise no_answer(error) from None
        return answer.data if isinstance(answer.data, dict) else {}
