"""How much a call sends, told apart by what tokenizers tell apart. Which tokens that makes is `policy.estimate`'s."""

from __future__ import annotations

import binascii
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import orjson
from pydantic import JsonValue

_LOWERCASE = b"abcdefghijklmnopqrstuvwxyz "
_ASCII = bytes(range(128))
_IMAGES = frozenset({"image_url", "input_image", "image"})
_SOUND_AND_FILM = frozenset({"input_audio", "audio_url", "audio", "input_video", "video_url", "video"})
_DOCUMENTS = frozenset({"input_file", "file", "document"})
_FILES = _IMAGES | _SOUND_AND_FILM | _DOCUMENTS
_PAYLOADS = ("source", "image_url", "file", *_SOUND_AND_FILM)
_DATA = ("data", "file_data", "url", "file_url")
_MEDIA_TYPE = ("media_type", "mime_type", "mimeType")
_WITH_INSTRUCTIONS = ("tools", "functions", "response_format", "output_config")
_IN_PLAIN_TEXT = ("text/", "application/json", "application/xml")


@dataclass(frozen=True, slots=True)
class InputSize:
    """What a call sends, to be added up.

    Attributes:
        lowercase: bytes of small Latin letters and spaces, of which a token holds several.
        signs: bytes of the rest of ASCII: capitals, digits, punctuation, line ends.
        foreign: bytes of every other script.
        images: inline and by URL.
        media_bytes: of sound and film, decoded.
        documents: PDFs and the like that are sent along.
        document_bytes: of those, decoded.
        linked_files: files that are only named, by URL or id, so that their size can't be told.
        messages: of the conversation.
        tools: whether there are tools or a schema, for which providers add instructions of their own.
    """

    lowercase: int = 0
    signs: int = 0
    foreign: int = 0
    images: int = 0
    media_bytes: int = 0
    documents: int = 0
    document_bytes: int = 0
    linked_files: int = 0
    messages: int = 0
    tools: bool = False

    def __add__(self, other: InputSize) -> InputSize:
        return InputSize(
            lowercase=self.lowercase + other.lowercase,
            signs=self.signs + other.signs,
            foreign=self.foreign + other.foreign,
            images=self.images + other.images,
            media_bytes=self.media_bytes + other.media_bytes,
            documents=self.documents + other.documents,
            document_bytes=self.document_bytes + other.document_bytes,
            linked_files=self.linked_files + other.linked_files,
            messages=self.messages + other.messages,
            tools=self.tools or other.tools,
        )


def size_of_call(
    messages: Iterable[Mapping[str, JsonValue]],
    params: Mapping[str, JsonValue],
    *,
    schema: Mapping[str, Any] | None = None,
    input: JsonValue = None,  # noqa: A002  the job's word for it
) -> InputSize:
    """What a call sends in all: its conversation, its tools and other params, and the schema of its answer.

    Args:
        messages: the system prompt included.
        params: what goes to the provider beside them.
        schema: what the provider is to hold the answer to.
        input: of a job that has no messages.
    """
    texts = b"".join(_json(given) for given in (params, schema, input) if given is not None and given != {})
    tools = schema is not None or any(params.get(name) for name in _WITH_INSTRUCTIONS)
    return size_of_messages(messages) + _size_of_bytes(texts) + InputSize(tools=tools)


def size_of_messages(messages: Iterable[Mapping[str, JsonValue]]) -> InputSize:
    """What a conversation sends. Only what is known to be an image or a file is not counted as text.

    OpenAI's parts are understood and Anthropic's blocks, also within a tool's result.
    """
    tally, count = _Tally(), 0
    for count, message in enumerate(messages, 1):  # noqa: B007  the last count is how many there are
        tally.take(message)
    return tally.files + _size_of_bytes(b"".join(tally.texts)) + InputSize(messages=count)


def _size_of_bytes(text: bytes) -> InputSize:
    # Deleting in C is some thirty times as fast as looking at each character.
    foreign = 0 if text.isascii() else len(text.translate(None, _ASCII))
    others = len(text.translate(None, _LOWERCASE))
    return InputSize(lowercase=len(text) - others, signs=others - foreign, foreign=foreign)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return _encoded(json.dumps(value, ensure_ascii=False))  # numbers beyond 64 bits are JSON, too


@dataclass(slots=True)
class _Tally:
    texts: list[bytes] = field(default_factory=list[bytes])
    files: InputSize = field(default_factory=InputSize)

    def take(self, holder: Mapping[str, Any]) -> None:
        """Counts a message, or a part that is no file."""
        rest = {name: value for name, value in holder.items() if name not in ("role", "content") and value is not None}
        if rest:
            self.texts.append(_json(rest))
        self._take_content(holder.get("content"))

    def _take_content(self, content: Any) -> None:
        match content:
            case None:
                pass
            case str():
                self.texts.append(_encoded(content))
            case {"type": str() as kind} if kind in _FILES:
                self._take_file(kind, cast(dict[str, Any], content))
            case dict():
                self.take(cast(dict[str, Any], content))
            case list():
                for part in cast(list[Any], content):
                    self._take_content(part)
            case _:
                self.texts.append(_json(content))

    def _take_file(self, kind: str, holder: Mapping[str, Any]) -> None:
        name = next((name for name in _PAYLOADS if holder.get(name) is not None), None)
        payload = holder if name is None else holder[name]
        if name is not None and len(holder) > 2:  # more than its type and its payload, such as a title
            self.texts.append(_json({key: value for key, value in holder.items() if key != name}))
        source = cast(Mapping[str, Any], payload) if isinstance(payload, dict) else {"url": payload}
        if source.get("type") in ("text", "content"):
            # Anthropic's documents may hold their text, or blocks, as they are.
            self._take_content(source.get("data"))
            self._take_content(source.get("content"))
        else:
            self.files += _size_of_file(kind, source)


def _size_of_file(kind: str, source: Mapping[str, Any]) -> InputSize:
    data = next((found for name in _DATA if isinstance(found := source.get(name), str)), None)
    media_type = next((found for name in _MEDIA_TYPE if isinstance(found := source.get(name), str)), "")
    if data is None or data.startswith(("http:", "https:", "gs:", "s3:", "file:")):
        return InputSize(images=1) if kind in _IMAGES else InputSize(linked_files=1)
    begin = 0
    if data.startswith("data:"):
        media_type = data[5:200].partition(",")[0]
        begin = 5 + len(media_type) + 1
    if media_type.startswith(_IN_PLAIN_TEXT):
        return _size_of_bytes(_decoded(data[begin:]))
    size = (len(data) - begin) * 3 // 4
    if media_type.startswith("image/") or (kind in _IMAGES and not media_type):
        return InputSize(images=1)
    if media_type.startswith(("audio/", "video/")) or (kind in _SOUND_AND_FILM and not media_type):
        return InputSize(media_bytes=size)
    return InputSize(documents=1, document_bytes=size)


def _decoded(data: str) -> bytes:
    try:
        return binascii.a2b_base64(_encoded(data), strict_mode=True)
    except binascii.Error:
        return _encoded(data)  # not base64 then, but the text itself
