"""The state of a provider in a conversation, for which clients of another API have no field.

Thinking models write reasoning, signatures and ids that only they can read, and refuse the next turn without them. A
client of another API gets them as an opaque token in a field that its API has for one: the signature of a thinking
block, or the `encrypted_content` of a reasoning item. The token names its author, and only the author gets its content
back. Nothing is stored.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import orjson
from pydantic import JsonValue

from breakwater.dialects.rules.chat_chunks import Assembly
from breakwater.dialects.rules.conversation import JsonMessage
from breakwater.jobs.rules.chat_messages import OTHERS, THOUGHT, encode_json, fields, objects
from breakwater.kernel.formats import words
from breakwater.kernel.json_values import is_too_deep

StateRepair = str
"""A change to the state in a request that a provider has refused.

- `foreign`: leave out everything that only its author can read;
- `-` and the name of a field: leave out that field, which the provider does not know;
- `reasoning`, `signature`: add a substitute where the provider demands its own;
- `thinking`: leave out the parameter, as Anthropic then demands thinking in each turn;
- `ids`: use ids of tool calls that every provider accepts.
"""

AUTHOR = "breakwater_author"
"""The field of an answer that names its author, on its way to a client of another API."""
STATE = "provider_state"
"""The field of an assistant's message in a chat form with the decoded tokens of its turn. No provider gets it."""
UNSIGNED = "breakwater:unsigned"
"""The signature of thinking whose author is unknown, as SDKs need a signature."""

_PREFIX = "breakwater:"
_TOKEN = "breakwater:1:"  # noqa: S105  no secret
_SPOKEN = frozenset({THOUGHT, "reasoning"})
"""Thinking in plain text."""
_OF_CHAT = words("role content refusal tool_calls function_call annotations audio images name") | {OTHERS, STATE}
_OF_CALL = words("id index type function custom")
_PIECE = words("index function")
_STANDARD = _OF_CHAT | _SPOKEN
_PRIVATE = _SPOKEN | words(
    "reasoning_details thinking thinking_blocks extra_content provider_specific_fields signature thought_signature"
)
"""Fields of messages and parts that only providers write."""
_SUBSTITUTES = frozenset({"reasoning", "signature", "ids"})
"""Repairs that add a substitute."""
_THOUGHT_PARTS = words("thinking redacted_thinking reasoning")
_SUBSTITUTE = " "
"""The substitute for reasoning. It is not empty, as some providers take an empty text for none."""
_SKIP = {"google": {"thought_signature": "skip_thought_signature_validator"}}
"""The signature that Google documents for calls of other models."""


def author_of(deployment: str) -> str:
    """Returns a short name of a deployment that reveals nothing about it."""
    return hashlib.blake2b(deployment.encode(errors="surrogatepass"), digest_size=6).hexdigest()


# Tokens


def token_of(
    author: str,
    message: Mapping[str, Any] | None = None,
    calls: Mapping[str, Mapping[str, Any]] | None = None,
    thought_in: str | None = None,
) -> str:
    """Returns a token for a client.

    Args:
        author: the author, see `author_of`.
        message: fields of the assistant's message.
        calls: further fields of its tool calls, by the ids that the client has.
        thought_in: the field of the message that has the text of the thinking block with this token.
    """
    state = {"author": author, "message": message, "calls": calls, "thought_in": thought_in}
    content = encode_json({name: value for name, value in state.items() if value})
    return _TOKEN + base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def is_token(value: Any) -> bool:
    """Returns True for a value that the plane has made, and that no provider can read."""
    return isinstance(value, str) and value.startswith(_PREFIX)


def open_token(token: Any, thinking: Any = None) -> dict[str, Any] | None:
    """Decodes the state in a token; None if it is not a token, or was cut or changed.

    Args:
        token: the value that the client sent.
        thinking: the text of the token's block.
    """
    if not isinstance(token, str) or not token.startswith(_TOKEN):
        return None
    content = token[len(_TOKEN) :]
    try:
        state = orjson.loads(base64.b64decode(content + "=" * (-len(content) % 4), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError):
        return None
    author = fields(state).get("author")
    message = fields(state).get("message")
    calls = fields(state).get("calls")
    if not isinstance(author, str) or is_too_deep(state):
        return None
    message_fields = {
        name: value
        for name, value in fields(message).items()
        if name not in _OF_CHAT and (name not in _SPOKEN or isinstance(value, str))
    }
    thought_in = state.get("thought_in")
    if isinstance(thought_in, str) and thought_in in _SPOKEN and isinstance(thinking, str):
        message_fields[thought_in] = thinking
    return {
        "author": author,
        "message": message_fields,
        "calls": {name: dict(fields(extra)) for name, extra in fields(calls).items()},
    }


def state_of_calls(author: Any, message: Mapping[str, Any], client_id: Callable[[str], str] = str) -> str | None:
    """Returns a token with the fields of a message that a chat does not have; None if there are none.

    Args:
        author: the author, see `author_of`; None if it is unknown.
        message: the message of the assistant, in a chat's format.
        client_id: returns the id by which the client knows a tool call.
    """
    written = objects(message.get("tool_calls") or ())
    if not isinstance(author, str) or not written:
        return None
    message_fields = {name: value for name, value in message.items() if value and name not in _STANDARD}
    calls: dict[str, dict[str, Any]] = {}
    for call in written:
        extra = {name: value for name, value in call.items() if value and name not in _OF_CALL}
        provider_id = str(call.get("id"))
        if original_id(client_id(provider_id)) != provider_id:
            extra["id"] = provider_id
        if extra:
            calls[client_id(provider_id)] = extra
    return token_of(author, message_fields, calls) if message_fields or calls else None


class CarriedState:
    """Collects the fields for `state_of_calls` while a message is streamed."""

    def __init__(self) -> None:
        self._assembly = Assembly()
        self._begun = False

    def add(self, delta: Mapping[str, Any]) -> None:
        """Takes a delta. Most deltas have no such fields."""
        message_fields = {name: delta[name] for name in delta.keys() - _STANDARD if delta[name]}
        pieces = objects(delta["tool_calls"] or ()) if "tool_calls" in delta else ()
        calls = [call for call in pieces if call.keys() - _PIECE]
        if calls or message_fields:
            self._begun = True
            self._assembly.add(
                {"choices": [{"index": 0, "delta": {**message_fields, **({"tool_calls": calls} if calls else {})}}]}
            )

    def token(self, author: Any, client_id: Callable[[str], str] = str) -> str | None:
        """Returns the token of the fields that have arrived, see `state_of_calls`."""
        return state_of_calls(author, self._assembly.messages()[0], client_id) if self._begun else None


# Ids of tool calls

_PLAIN_ID = re.compile(r"[A-Za-z0-9_-]+")
_CODED = "call_bw_"
_MAX_ID = 64
"""The most characters of an id at OpenAI."""
_SHORT_ID = 9
"""The characters of an id at Mistral."""


def plain_id(tool_call_id: str) -> str:
    """Returns an id that Anthropic accepts: the same, else one that `original_id` can decode, else a hash."""
    if _PLAIN_ID.fullmatch(tool_call_id):
        return tool_call_id
    coded = _CODED + base64.urlsafe_b64encode(tool_call_id.encode(errors="surrogatepass")).rstrip(b"=").decode()
    return coded if len(coded) <= _MAX_ID else f"call_{_digest(tool_call_id)[:24]}"


def original_id(client_id: str) -> str:
    """Returns the id that `plain_id` has encoded; any other id is returned as it is."""
    if not client_id.startswith(_CODED):
        return client_id
    content = client_id[len(_CODED) :]
    try:
        decoded_id = base64.b64decode(content + "=" * (-len(content) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return client_id
    return decoded_id if plain_id(decoded_id) == client_id else client_id


def short_id(tool_call_id: str) -> str:
    """Returns an id of at most 64 characters: the same, or a hash of a longer one."""
    return tool_call_id if len(tool_call_id) <= _MAX_ID else f"call_{_digest(tool_call_id)[:24]}"


def _digest(text: str) -> str:
    return hashlib.md5(text.encode(errors="surrogatepass"), usedforsecurity=False).hexdigest()


# Conversations on their way to a provider


def for_author(
    messages: Sequence[JsonMessage], author: str, repairs: Collection[StateRepair] = ()
) -> Sequence[JsonMessage]:
    """Returns the messages for one provider, with its own state and without that of others.

    The same object is returned if there is no state and nothing to repair.

    Args:
        messages: the messages in a chat's format, perhaps with `STATE`.
        author: the deployment that is called, see `author_of`.
        repairs: the repairs after its refusals.
    """
    if not repairs and not any(STATE in message for message in messages):
        return messages
    restored = list[dict[str, JsonValue]]()
    demands = set[str](repairs)
    unknown = {repair[1:] for repair in repairs if repair.startswith("-")}
    ids: dict[str, str] = {}
    for carrying in messages:
        message = {name: value for name, value in carrying.items() if name != STATE}
        if message.get("role") == "assistant":
            for state in objects(carrying.get(STATE) or ()):
                if state.get("author") == author and "foreign" not in repairs:
                    message = _restore(message, state, ids, demands)
            if dropped := _PRIVATE if "foreign" in repairs else unknown:
                message = _without(message, dropped)
        elif (provider_id := ids.get(str(message.get("tool_call_id")))) is not None:
            message["tool_call_id"] = provider_id
        restored.append(message)
    if THOUGHT in unknown:
        demands.discard("reasoning")
    return [_substitute(message, demands) for message in restored] if _SUBSTITUTES & demands else restored


def _restore(
    message: dict[str, JsonValue], state: Mapping[str, Any], ids: dict[str, str], demands: set[str]
) -> dict[str, JsonValue]:
    """Returns a message with the fields of a state.

    A provider that has written reasoning or signatures demands them in all turns, which is added to `demands`.
    """
    for name, value in fields(state.get("message")).items():
        before = message.get(name)
        message[name] = before + value if name in _SPOKEN and isinstance(before, str) else value
    if message.get(THOUGHT) and message.get("tool_calls"):
        demands.add("reasoning")
    calls = fields(state.get("calls"))
    known_calls = list[dict[str, JsonValue]]()
    for call in objects(message.get("tool_calls") or ()):
        extra = fields(calls.get(str(call.get("id"))))
        extra_fields = {name: value for name, value in extra.items() if name not in _OF_CALL}
        if isinstance(provider_id := extra.get("id"), str):
            ids[str(call.get("id"))] = provider_id
            extra_fields["id"] = provider_id
        if _is_signed(extra_fields):
            demands.add("signature")
        known_calls.append({**call, **extra_fields})
    return {**message, **({"tool_calls": cast(JsonValue, known_calls)} if known_calls else {})}


def _substitute(message: dict[str, JsonValue], demands: Collection[str]) -> dict[str, JsonValue]:
    """Returns a message with substitutes for what a provider demands in each turn and another model left out."""
    calls = objects(message.get("tool_calls") or ())
    if message.get("role") == "assistant":
        if "reasoning" in demands and not message.get(THOUGHT):
            message = {**message, THOUGHT: _SUBSTITUTE}
        if "signature" in demands and calls and not any(map(_is_signed, calls)):
            first = {**calls[0], "extra_content": {**fields(calls[0].get("extra_content")), **_SKIP}}
            message = {**message, "tool_calls": cast(JsonValue, [first, *calls[1:]])}
    if "ids" not in demands:
        return message
    if calls := objects(message.get("tool_calls") or ()):
        shorter = [{**call, "id": _digest(str(call.get("id")))[:_SHORT_ID]} for call in calls]
        message = {**message, "tool_calls": cast(JsonValue, shorter)}
    if message.get("role") == "tool":
        message = {**message, "tool_call_id": _digest(str(message.get("tool_call_id")))[:_SHORT_ID]}
    return message


def substitutes_in(messages: Iterable[JsonMessage], repairs: Collection[StateRepair]) -> list[JsonMessage]:
    """Returns at least the substitutes that `for_author` adds to messages, for estimates."""
    turns = [message for message in messages if message.get("role") == "assistant"]
    if not _SUBSTITUTES.intersection(repairs) and not any(STATE in turn for turn in turns):
        return []
    return [{THOUGHT: _SUBSTITUTE, "extra_content": cast(JsonValue, _SKIP)}] * len(turns)


def _is_signed(call: Mapping[str, Any]) -> bool:
    return any(fields(extra).get("thought_signature") for extra in fields(call.get("extra_content")).values())


def _without(message: Mapping[str, JsonValue], names: Collection[str]) -> dict[str, JsonValue]:
    """Returns a message without fields of some names, also in its parts and calls."""
    plain = {name: value for name, value in message.items() if name not in names}
    if isinstance(content := plain.get("content"), list):
        parts = [part for part in content if names is not _PRIVATE or fields(part).get("type") not in _THOUGHT_PARTS]
        plain["content"] = [
            {name: value for name, value in part.items() if name not in names} if isinstance(part, dict) else part
            for part in parts
        ] or None
    if calls := objects(plain.get("tool_calls") or ()):
        plain["tool_calls"] = [{name: value for name, value in call.items() if name not in names} for call in calls]
    return plain


def lacks_thinking(turns: Sequence[Mapping[str, Any]]) -> bool:
    """Returns True if Anthropic would refuse `thinking`: a turn of tools since the user's last text has begun without.

    Args:
        turns: the messages in Anthropic's format.
    """
    for turn in reversed(turns):
        blocks = objects(turn.get("content")) if isinstance(turn.get("content"), list) else []
        kinds = [block.get("type") for block in blocks]
        if turn.get("role") == "assistant":
            if "tool_use" in kinds and kinds[0] not in ("thinking", "redacted_thinking"):
                return True
        elif "tool_result" not in kinds:
            return False
    return False


# Words of providers

UNREADABLE = "UnreadableReasoningError"
UNKNOWN_FIELD = "UnknownMessageFieldError"

_STATE_WORDS: Sequence[tuple[str, re.Pattern[str]]] = tuple(
    (name, re.compile(pattern, re.I | re.S))
    for name, pattern in (
        (
            "MissingThinkingError",
            r"expected `?thinking`? or `?redacted_thinking`?, but found|must start with a thinking block",
        ),
        (
            "MissingSignatureError",
            r"missing (an? )?[`'\"]?thought_?signature|[`'\"]?thought_?signature[`'\"]? is (missing|required)",
        ),
        (
            "MissingReasoningError",
            r"missing (the )?(required )?((field|parameter|property) )?[`'\"]?reasoning_content"
            r"|reasoning_content[`'\"]?( field)? (is missing|is required|[^.]{0,60}must be (passed|provided|included))",
        ),
        (
            "ToolCallIdError",
            r"tool[_ ](call|use)s?(\[\d+\])?[ ._]?id\b.{0,90}(must be|too long|match pattern|length)"
            r"|call_id'?: string too long|tool_use\.id: string should match",
        ),
        (
            UNREADABLE,
            r"encrypted[ _]content.{0,4000}(could not be (verified|decrypted|parsed)|(is )?invalid|not (be )?valid)"
            r"|invalid[ _`'\"]*encrypted[ _]content"
            r"|invalid [`'\"]?(signature|data)[`'\"]? in [`'\"]?(redacted_)?thinking"
            r"|thinking[`'\"]? blocks?[^.]{0,80}cannot be modified"
            r"|thought[ _]?signature[`'\"]?( is| was)? (not valid|invalid)|(corrupted|invalid) thought[ _]?signature"
            r"|item (with id )?[`'\"]?rs_[\w-]+[`'\"]?[^.]{0,60}(not found|without its required)"
            r"|without its required [`'\"]?reasoning[`'\"]? item",
        ),
        (
            UNKNOWN_FIELD,
            r"(property|parameter|field|name|argument|input)s?\W+messages[\w.\[\]]*\.reasoning\b"
            r"|(property|parameter|field|name|argument|input)s?\W+[\w.\[\]]*"
            r"(reasoning_content|reasoning_details|extra_content|thinking_blocks|provider_specific_fields)"
            r"|(messages|input|assistant)[\w.\[\]'\": ,]*[.\[ '\",]"
            r"(reasoning|reasoning_content|reasoning_details|extra_content|thinking_blocks|provider_specific_fields)\b"
            r".{0,80}(unsupported|not permitted|not allowed|unknown|unrecogni[sz]ed|unexpected|extra_forbidden)"
            r"|[`'\"]?reasoning_content[`'\"]?[^.]{0,40}(not supported|not allowed|unsupported|not permitted)",
        ),
    )
)
_REPAIR_OF: Mapping[str, StateRepair] = {
    "MissingThinkingError": "thinking",
    "MissingSignatureError": "signature",
    "MissingReasoningError": "reasoning",
    "ToolCallIdError": "ids",
    UNREADABLE: "foreign",
    UNKNOWN_FIELD: "foreign",
}
STATE_ERRORS = frozenset(_REPAIR_OF)
"""The classes of errors with which providers refuse the state in a conversation."""
_OF_CONVERSATION = frozenset({UNREADABLE, "MissingThinkingError"})
_PRIVATE_NAME = re.compile(
    r"\b(reasoning(_content|_details)?|extra_content|thinking_blocks|provider_specific_fields)\b", re.I
)
_MAX_READ = 8_000
"""The characters of a provider's text that are searched."""


def state_error(code: str | None, param: str | None, text: str) -> tuple[str, str | None] | None:
    """Returns the class of a refusal of the state in a conversation, and the field at fault; None for other errors."""
    words_of_error = f"{code}\n{param}\n{text[:_MAX_READ]}"
    class_name = next((name for name, pattern in _STATE_WORDS if pattern.search(words_of_error)), None)
    if class_name is None:
        return None
    named = _PRIVATE_NAME.search(words_of_error) if class_name == UNKNOWN_FIELD else None
    return class_name, param if named is None else named[0].lower()


def state_repair(class_name: str, param: str | None) -> StateRepair | None:
    """Returns the repair for a refusal of state; `param` is the field at fault. None for other classes."""
    return f"-{param}" if class_name == UNKNOWN_FIELD and param in _PRIVATE else _REPAIR_OF.get(class_name)


def is_of_model(class_name: str) -> bool:
    """Returns True if the model would refuse any conversation in this way, and not just the current one."""
    return class_name in STATE_ERRORS - _OF_CONVERSATION
