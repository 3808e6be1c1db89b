"""The encryption of files: AES-256-GCM in chunks, each authenticated with its place, the last one marked as such.

Each file has a key of its own, derived from the backup's key, a random salt and the file's name. A chunk that was
changed, left out or moved, within a file or from another one, is not decrypted.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Any

from breakwater.backup.errors import BackupError
from breakwater.kernel.errors import ConfigError

KEY_BYTES = 32
SALT_BYTES = 16
CHUNK_BYTES = 1024**2
"""Of plain text."""

_TAG_BYTES = 16
_SEALED_BYTES = CHUNK_BYTES + _TAG_BYTES
_MAGIC = b"BWB1"


class BackupKey:
    """The key of backups."""

    def __init__(self, text: str) -> None:
        """Takes a key of `breakwater encryption new-key`. Raises ConfigError if it is none."""
        try:
            raw = base64.urlsafe_b64decode(text)
        except (binascii.Error, ValueError):
            raw = b""
        if len(raw) != KEY_BYTES:
            raise ConfigError("BREAKWATER_BACKUP_KEY is not a key; `breakwater encryption new-key` makes one")
        self._raw = raw
        self.id = hashlib.sha256(b"breakwater backup key" + raw).hexdigest()[:8]
        """May be shown."""

    def seal_of(self, document: bytes) -> str:
        """Returns the proof that who wrote a document has the key."""
        return hmac.new(self._derive(b"", "the manifest"), document, hashlib.sha256).hexdigest()

    def cipher(self, salt: bytes, name: str) -> Any:
        """Returns the cipher of a file."""
        # Imported only when a file is encrypted: it takes 40 ms and 8 MB.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(self._derive(salt, f"the file {name}"))

    def _derive(self, salt: bytes, purpose: str) -> bytes:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        return HKDF(SHA256(), KEY_BYTES, salt, f"breakwater backup: {purpose}".encode()).derive(self._raw)


class Encryptor:
    """Encrypts one file."""

    def __init__(self, key: BackupKey, name: str, salt: bytes) -> None:
        self._cipher = key.cipher(salt, name)
        self._unsent = bytearray()
        self._chunks = 0
        self._head = _MAGIC + salt

    def update(self, plain: bytes) -> bytes:
        """Takes more of the file, and returns what can be stored by now."""
        self._unsent += plain
        sealed = [self._head]
        self._head = b""
        # The last chunk is kept back, to be marked.
        while len(self._unsent) > CHUNK_BYTES:
            sealed.append(self._seal(bytes(self._unsent[:CHUNK_BYTES]), is_last=False))
            del self._unsent[:CHUNK_BYTES]
        return b"".join(sealed)

    def end(self) -> bytes:
        """Returns the rest."""
        return self._head + self._seal(bytes(self._unsent), is_last=True)

    def _seal(self, chunk: bytes, *, is_last: bool) -> bytes:
        nonce = _nonce(self._chunks, is_last=is_last)
        self._chunks += 1
        return self._cipher.encrypt(nonce, chunk, None)


class Decryptor:
    """Decrypts one file. Only who gets to `end` without an error has all of it."""

    def __init__(self, key: BackupKey, name: str) -> None:
        self._key = key
        self._name = name
        self._unread = bytearray()
        self._chunks = 0
        self._cipher: Any = None

    def update(self, sealed: bytes) -> bytes:
        """Takes more of the file, and returns what is known to be right by now. Raises BackupError."""
        self._unread += sealed
        head = len(_MAGIC) + SALT_BYTES
        if self._cipher is None:
            if len(self._unread) < head:
                return b""
            if not self._unread.startswith(_MAGIC):
                raise self._change_error()
            self._cipher = self._key.cipher(bytes(self._unread[len(_MAGIC) : head]), self._name)
            del self._unread[:head]
        plain: list[bytes] = []
        while len(self._unread) > _SEALED_BYTES:
            plain.append(self._open(bytes(self._unread[:_SEALED_BYTES]), is_last=False))
            del self._unread[:_SEALED_BYTES]
        return b"".join(plain)

    def end(self) -> bytes:
        """Returns the rest. Raises BackupError, also if the file was cut."""
        if self._cipher is None:
            raise self._change_error()
        return self._open(bytes(self._unread), is_last=True)

    def _open(self, chunk: bytes, *, is_last: bool) -> bytes:
        from cryptography.exceptions import InvalidTag

        nonce = _nonce(self._chunks, is_last=is_last)
        self._chunks += 1
        try:
            return self._cipher.decrypt(nonce, chunk, None)
        except (InvalidTag, ValueError):
            raise self._change_error() from None

    def _change_error(self) -> BackupError:
        return BackupError(f"{self._name} was cut or changed after it was encrypted with key {self._key.id}")


def _nonce(chunk: int, *, is_last: bool) -> bytes:
    return chunk.to_bytes(11, "big") + bytes([is_last])
