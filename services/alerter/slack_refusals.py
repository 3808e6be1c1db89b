"""What Slack's refusals mean, and what a person does about them. Of an answer only Slack's own name for it is shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, cast

import aiohttp
from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_slack_response import AsyncSlackResponse

from breakwater.policy.classify import retry_after_s
from services.alerter.channel import GONE, SendError, check_answer

_CODE = re.compile(r"[a-z_]{1,64}")
"""How Slack names a refusal (`no_service`, `invalid_blocks`); anything else may be a stranger's page."""
_CANNOT_BE_UPDATED = frozenset({"message_not_found", "cant_update_message", "edit_window_closed"})
_PASSING = frozenset(
    {"ratelimited", "rate_limited", "internal_error", "fatal_error", "service_unavailable", "request_timeout"}
)
_GONE = frozenset({"token_revoked", "account_inactive", "is_archived"})
_NEW_TOKEN = "set the bot token that stands on the app's page `OAuth & Permissions`"  # noqa: S105  advice
_ADVICE: Mapping[str, str] = {
    "invalid_auth": _NEW_TOKEN,
    "not_authed": _NEW_TOKEN,
    "token_expired": _NEW_TOKEN,
    "token_revoked": f"the token was revoked; install the app again, and {_NEW_TOKEN}",
    "account_inactive": f"the bot was removed from the workspace; install the app again, and {_NEW_TOKEN}",
    "missing_scope": "give the app the scope `chat:write`, and install it again",
    "channel_not_found": "set the channel's id, such as C0123456; into a private channel the bot must be invited",
    "not_in_channel": "invite the bot: write `/invite @its-name` in the channel",
    "is_archived": "the channel is archived; set another one",
    "restricted_action": "the workspace does not let the bot post in this channel; ask its administrator",
}
_NO_HOOK = frozenset({"no_service", "no_active_hooks", "channel_is_archived"})


class CannotBeUpdatedError(SendError):
    """The message is gone, or too old."""


def api_refusal(error: SlackApiError, now: datetime) -> SendError:
    """What a refusal by the Web API means."""
    answered: Any = cast("Any", error).response
    if isinstance(answered, AsyncSlackResponse):
        found = cast("Any", answered)
        return _meaning(int(found.status_code), found.headers, _code_in(found.data), now)
    assert isinstance(answered, aiohttp.ClientResponse)  # its body is no JSON
    return _meaning(answered.status, answered.headers, "", now)


def check_hook_answer(status: int, headers: Mapping[str, str], body: str, now: datetime) -> None:
    """Takes any 2xx of an incoming webhook for a delivery.

    Raises:
        SendError: for everything else.
    """
    code = body if _CODE.fullmatch(body) else ""
    if status in {404, GONE} and code in _NO_HOOK:
        raise SendError(
            f"Slack refuses: {code}; the webhook takes no messages any more: make a new one, and set its URL",
            permanent=True,
            gone=True,
        )
    check_answer(status, headers, now, code)


def _meaning(status: int, headers: Mapping[str, str], code: str, now: datetime) -> SendError:
    if code in _CANNOT_BE_UPDATED:
        return CannotBeUpdatedError(f"Slack refuses: {code}", permanent=True)
    if code and status == 200:
        advice = f"; {_ADVICE[code]}" if code in _ADVICE else ""
        return SendError(
            f"Slack refuses: {code}{advice}",
            permanent=code not in _PASSING,
            retry_after_s=retry_after_s({name.lower(): value for name, value in headers.items()}, now),
            gone=code in _GONE,
        )
    try:
        check_answer(status, headers, now, code)
    except SendError as refusal:
        return refusal
    return SendError("the answer is not one of Slack's")


def _code_in(data: object) -> str:
    named = cast("dict[str, object]", data).get("error") if isinstance(data, dict) else None
    return named if isinstance(named, str) and _CODE.fullmatch(named) else ""
