"""Encrypting the texts of jobs, answers and dead letters where they are stored, under keys that can be replaced.

All of them, where the config has keys; else those of agents that keep no texts, under a key of the plane's own.

Of a JSON document its fields with texts become one field, `encrypted`: ids, agents, states and money stay readable.
A token is `bwe1.<key id>.<Fernet token>`. It names its key, so a key that is missing can be named, too.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from pydantic_core import from_json, to_json

from breakwater.kernel.errors import BreakwaterError, ConfigError
from breakwater.kernel.surrogates import read_whole
from breakwater.kernel.types import Event

RecordT = TypeVar("RecordT", bound=Event)

FIELD = "encrypted"
TEXTS = (
    # Of jobs, results and records.
    *("prompt", "messages", "input", "api_request", "params", "output", "choices", "response"),
    # Of dead letters, which hold a job.
    "payload_base64",
    # Of checkpoints: what was said to the model, and by it.
    *("repairs", "partial"),
)
"""The fields that hold texts, of all documents."""

_BOUND_TO = "execution_id"
"""The field that a token is bound to: decryption fails next to another id."""

may_be_encrypted = re.compile(rb'"encrypted"\s*:\s*"bwe\d+\.').search
"""Matches a document that may contain a token; in others there is nothing to decrypt."""

_TOKEN = re.compile(r"bwe1\.(?P<key>[0-9a-f]{8})\.(?P<token>[A-Za-z0-9_-]+={0,2})")
_LINE = re.compile(_TOKEN.pattern + r"\n")

COMPRESS_FROM = 32_768
"""The length from which texts are compressed: tokens are a third longer, and NATS limits the size of messages."""

LEFT_OUT = "omitted: the worker had no key to encrypt the texts with; set BREAKWATER_PLANE_KEY"
"""Replaces the token if texts must not be stored in plain and there is no key."""

_PLAIN = b"0"
_COMPRESSED = b"z"


class DecryptionError(BreakwaterError):
    """A stored text can't be decrypted with the keys at hand."""


class Cipher:
    """Encrypts with the first of its keys, and decrypts with all of them. Without keys it encrypts nothing.

    The plane's own key comes after these. Without other keys, it encrypts only what must not be stored in plain text.
    """

    def __init__(self, keys: Sequence[str] = (), plane_key: str | None = None) -> None:
        """Creates a cipher with keys from `new_key`, and any text as the plane's own key.

        Raises ConfigError if a key is invalid; the message begins with its place.
        """
        self._keys: dict[str, bytes] = {}
        for place, key in enumerate(keys):
            try:
                raw = base64.urlsafe_b64decode(key)
            except (binascii.Error, ValueError):
                raw = b""
            if len(raw) != 32:
                raise ConfigError(f"encryption.keys.{place}: is not a key; `breakwater encryption new-key` makes one")
            self._keys[_key_id(raw)] = raw
        self._first = next(iter(self._keys), None)
        self.on = self._first is not None
        """True if it encrypts all texts."""
        self.own_id: str | None = None
        """The id of the plane's own key, which may be shown."""
        if plane_key is not None:
            raw = hashlib.sha256(b"breakwater plane key" + plane_key.encode()).digest()
            self.own_id = _key_id(raw)
            self._keys.setdefault(self.own_id, raw)
        self._fernets: dict[str, Any] = {}

    @property
    def key_ids(self) -> tuple[str, ...]:
        """The ids of its keys, which may be shown, in order; the plane's own key is the last."""
        return tuple(self._keys)

    def pseudonym(self, name: str) -> str:
        """Returns a stable substitute for a name that must not be stored. With a key, the name can't be guessed."""
        key_id = self.own_id or self._first
        key = b"" if key_id is None else self._keys[key_id]
        return f"redacted-{hashlib.blake2b(name.encode(errors='surrogatepass'), key=key, digest_size=10).hexdigest()}"

    def encrypt(self, text: bytes) -> str:
        """Encrypts a text to a token. There must be a key."""
        key_id = self._first or self.own_id
        assert key_id is not None
        plain = _COMPRESSED + zlib.compress(text, 1) if len(text) >= COMPRESS_FROM else _PLAIN + text
        return f"bwe1.{key_id}.{self._fernet(key_id).encrypt(plain).decode()}"

    def decrypt(self, token: str) -> bytes:
        """Decrypts a token. Raises DecryptionError."""
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise DecryptionError("the text is marked as encrypted, but not in a format that this version knows")
        if match["key"] not in self._keys:
            key_ids = [key for key in self._keys if self.on or key != self.own_id]
            available = f"encryption.keys has {', '.join(key_ids) or 'none'}"
            available += "" if self.own_id is None else f", and the plane's own key is {self.own_id}"
            raise DecryptionError(f"it is encrypted with key {match['key']}, and {available}: put that key back")
        from cryptography.fernet import InvalidToken

        try:
            plain = self._fernet(match["key"]).decrypt(match["token"])
            return zlib.decompress(plain[1:]) if plain[:1] == _COMPRESSED else plain[1:]
        except (InvalidToken, zlib.error):
            raise DecryptionError(f"it was changed after it was encrypted with key {match['key']}") from None

    def _fernet(self, key_id: str) -> Any:
        if (fernet := self._fernets.get(key_id)) is None:
            # Imported only when a text is encrypted: it takes 40 ms and 8 MB.
            from cryptography.fernet import Fernet

            fernet = self._fernets[key_id] = Fernet(base64.urlsafe_b64encode(self._keys[key_id]))
        return fernet

    def encrypt_document(self, document: bytes, *, private: bool = False, names: Sequence[str] = TEXTS) -> bytes:
        """Replaces the texts of a JSON document by a token; a document without texts stays unchanged.

        Args:
            document: a JSON object.
            private: True if the texts must not be stored in plain text. Even if the cipher is off, they are encrypted
                then with the plane's own key, or left out if there is none.
            names: the fields that contain texts.

        Raises ValueError if it must encrypt and the document is no JSON object, which must not be stored with texts.
        """
        if not (self.on or private):
            return document
        value = read_whole(from_json, document)
        if not isinstance(value, dict):
            raise ValueError("only a JSON object can be encrypted field by field")  # noqa: TRY004  as for other texts
        fields = cast(dict[str, Any], value)
        texts = {name: fields.pop(name) for name in names if fields.get(name) not in (None, [], {}, "")}
        if not texts:
            return document
        if not self._keys:
            return to_json(fields | {FIELD: LEFT_OUT})
        # A program could send the token of a result or record as a job, to have it decrypted; this binds it.
        texts |= {_BOUND_TO: fields[_BOUND_TO]} if fields.get(_BOUND_TO) else {}
        return to_json(fields | {FIELD: self.encrypt(to_json(texts))})

    def decrypt_document(self, document: bytes) -> bytes:
        """Restores the texts of a JSON document; a document without a token stays unchanged. Raises DecryptionError."""
        if not may_be_encrypted(document):
            return document
        fields = _object(document)
        token = fields.pop(FIELD, None)
        if not isinstance(token, str):
            return document
        texts = _object(self.decrypt(token))
        if texts.get(_BOUND_TO) not in (None, fields.get(_BOUND_TO)):
            raise DecryptionError(f"it was encrypted for another {_BOUND_TO} and copied here")
        return to_json(fields | texts)

    def decrypt_record(self, record: RecordT) -> RecordT:
        """Returns a record with its texts. Raises DecryptionError."""
        if getattr(record, FIELD, None) is None:
            return record
        return type(record).model_validate_json(self.decrypt_document(record.json_bytes()))

    def encrypt_line(self, text: str) -> str:
        """Encrypts a text to a line, to which others can be appended; unchanged if the cipher is off."""
        return f"{self.encrypt(text.encode())}\n" if self.on and text else text

    def decrypt_lines(self, text: str) -> str:
        """Decrypts concatenated lines of `encrypt_line`. Raises DecryptionError."""
        return _LINE.sub(lambda match: self.decrypt(match[0][:-1]).decode(), text)


OFF = Cipher()
"""Encrypts nothing."""


def key_of_document(document: bytes) -> str | None:
    """Returns the id of the key that a document's texts are encrypted with; None if they are not encrypted."""
    token = _object(document).get(FIELD)
    match = _TOKEN.fullmatch(token) if isinstance(token, str) else None
    return None if match is None else match["key"]


def new_key() -> str:
    """Creates a key: 32 random bytes, in URL-safe base64."""
    from cryptography.fernet import Fernet

    return Fernet.generate_key().decode()


def _key_id(raw: bytes) -> str:
    return hashlib.sha256(b"breakwater encryption key" + raw).hexdigest()[:8]


def _object(document: bytes) -> dict[str, Any]:
    try:
        value = read_whole(from_json, document)
    except ValueError:
        return {}
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}
