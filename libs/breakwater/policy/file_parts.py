"""Parts of messages that are files: images, sound, film and documents, in OpenAI's form and in Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

IMAGES = frozenset({"image_url", "input_image", "image"})
SOUND_AND_FILM = frozenset({"input_audio", "audio_url", "audio", "input_video", "video_url", "video"})
DOCUMENTS = frozenset({"input_file", "file", "document"})
FILES = IMAGES | SOUND_AND_FILM | DOCUMENTS
"""Their types."""

_PAYLOADS = ("source", "image_url", "file", *SOUND_AND_FILM)
_DATA = ("data", "file_data", "url", "file_url")
_MEDIA_TYPE = ("media_type", "mime_type", "mimeType")
_LINKS = ("http:", "https:", "gs:", "s3:", "file:")


@dataclass(frozen=True, slots=True)
class FileContent:
    """What is in such a part, or where it is.

    Attributes:
        media_type: such as `image/png`; empty if it is not said.
        data: the file, mostly base64; None for one that is only named.
        url: where it is; None if it is sent along, or is named by an id.
    """

    media_type: str
    data: str | None
    url: str | None

    @property
    def size(self) -> int:
        """Bytes of what is sent along, if it is base64."""
        data = self.data or ""
        return (len(data) - data[-2:].count("=")) * 3 // 4


def payload_of(part: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """The field of a part that holds its file, and what that says; None and the part itself without such a field."""
    name = next((name for name in _PAYLOADS if part.get(name) is not None), None)
    payload = part if name is None else part[name]
    return name, cast(Mapping[str, Any], payload) if isinstance(payload, Mapping) else {"url": payload}


def content_of(payload: Mapping[str, Any]) -> FileContent:
    """What a part's payload holds."""
    data = next((found for name in _DATA if isinstance(found := payload.get(name), str)), None)
    media_type = next((found for name in _MEDIA_TYPE if isinstance(found := payload.get(name), str)), "")
    if data is None or data.startswith(_LINKS):
        return FileContent(media_type, None, data)
    if data.startswith("data:"):
        media_type = data[5:200].partition(",")[0]
        data = data[5 + len(media_type) + 1 :]
    return FileContent(media_type, data, None)
