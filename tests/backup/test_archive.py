"""Files are stored whole, encrypted and as they were, in a folder and in S3-compatible storage."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.backup.archive import ArchiveReader, ArchiveWriter, read_manifest
from breakwater.backup.contract import FORMAT, Manifest
from breakwater.backup.encryption import CHUNK_BYTES, SALT_BYTES, BackupKey, Decryptor, Encryptor
from breakwater.backup.errors import BackupError
from breakwater.backup.storage import PART_BYTES, Bucket, Folder, Storage, storage_of
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.security.encryption import new_key
from tests.backup.s3 import S3Double, s3_double

KEY = BackupKey(new_key())
SALT = bytes(SALT_BYTES)


def encrypted(plain: bytes, name: str = "a") -> bytes:
    encryptor = Encryptor(KEY, name, SALT)
    return encryptor.update(plain) + encryptor.end()


def decrypted(sealed: bytes, name: str = "a", key: BackupKey = KEY, piece: int = 100_000) -> bytes:
    decryptor = Decryptor(key, name)
    pieces = [sealed[place : place + piece] for place in range(0, len(sealed), piece)]
    return b"".join([*map(decryptor.update, pieces), decryptor.end()])


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES])
def test_any_size_is_decrypted_as_it_was(size: int) -> None:
    plain = os.urandom(size)
    sealed = encrypted(plain)
    assert decrypted(sealed) == plain
    assert plain[:64] not in sealed or size < 16


@given(place=st.integers(0, 3_000_000), cut=st.booleans())
def test_a_change_anywhere_is_noticed(place: int, cut: bool) -> None:
    sealed = bytearray(SEALED)
    place %= len(sealed)
    if cut:
        del sealed[place:]
    else:
        sealed[place] ^= 0x40
    with pytest.raises(BackupError, match="a was cut or changed after it was encrypted with key"):
        decrypted(bytes(sealed))


SEALED = encrypted(b"text" * (CHUNK_BYTES // 4) * 2 + b"end")


def test_chunks_cannot_be_moved_and_files_cannot_be_swapped() -> None:
    head, size = 4 + SALT_BYTES, CHUNK_BYTES + 16
    swapped = (
        SEALED[:head] + SEALED[head + size : head + 2 * size] + SEALED[head : head + size] + SEALED[head + 2 * size :]
    )
    shortened = SEALED[: head + size]
    for sealed, name, key in (
        (swapped, "a", KEY),
        (shortened, "a", KEY),
        (SEALED, "b", KEY),
        (SEALED, "a", BackupKey(new_key())),
    ):
        with pytest.raises(BackupError):
            decrypted(sealed, name, key)


@pytest.mark.parametrize("text", ["", "short", "ü" * 32, new_key()[:-4]])
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="`breakwater encryption new-key` makes one"):
        BackupKey(text)


@pytest.fixture
async def bucket(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[S3Double]:
    async with s3_double() as (double, url):
        environment = {"ENDPOINT_URL": url, "REGION": "us-east-1", "ACCESS_KEY_ID": "an-id", "SECRET_ACCESS_KEY": "s"}
        for name, value in environment.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield double


async def pieces(content: bytes) -> AsyncIterator[bytes]:
    for place in range(0, len(content), 700_000):
        yield content[place : place + 700_000]


async def store(storage: Storage, files: dict[str, bytes], key: BackupKey | None = KEY) -> Manifest:
    written: list[int] = []
    archive = ArchiveWriter(storage, key, written.append)
    await archive.begin()
    for name, content in files.items():
        await archive.write(name, pieces(content))
    now = datetime.now(UTC)
    manifest = Manifest(
        format=FORMAT,
        id="x",
        plane_version="0.1.0",
        begun_at=now,
        moment=now,
        completed_at=now,
        key=None if key is None else key.id,
        files=tuple(archive.files),
        streams=(),
        consumers="c",
        late_jobs="l",
        tables=(),
        local_files=(),
        left_out=(),
    )
    await archive.write_manifest(manifest)
    assert sum(written) == manifest.bytes
    return manifest


async def read(storage: Storage, key: BackupKey | None, name: str) -> bytes:
    manifest = await read_manifest(storage, key)
    reader = ArchiveReader(storage, manifest, key, lambda _: None)
    await reader.check_all()
    return b"".join([chunk async for chunk in reader.read(name)])


FILES = {"streams/EVENTS": os.urandom(PART_BYTES * 2 + 5), "tables/t/1.zst": b"row " * 500_000, "jobs/none.zst": b""}


@pytest.mark.parametrize("key", [KEY, None])
async def test_files_in_a_bucket_are_read_as_they_were_written(bucket: S3Double, key: BackupKey | None) -> None:
    storage = storage_of("s3://backups/plane/monday")
    await store(storage, FILES, key)
    assert sorted(bucket.objects)[0].startswith("backups/plane/monday/")
    assert bucket.largest_request <= PART_BYTES
    for name, content in FILES.items():
        assert await read(storage, key, name) == content
    with pytest.raises(BackupError, match="has a backup already"):
        await store(storage, {}, key)
    # What an interrupted run has left is removed by the next one.
    await storage.remove("manifest.json")
    async with storage.write("incomplete"):
        pass
    with pytest.raises(BackupError, match="is incomplete: run `breakwater backup create` again"):
        await read_manifest(storage, key)
    await store(storage, {"streams/KEYS": b"k"}, key)
    assert await storage.names() == ["manifest.json", "streams/KEYS"]
    with pytest.raises(BackupError, match="s3://backups/plane/monday/streams/EVENTS is missing"):
        _ = [chunk async for chunk in storage.read("streams/EVENTS")]


async def test_a_bucket_that_refuses_says_which_variables_count(
    bucket: S3Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    with pytest.raises(BackupError, match=r"s3://backups can't be listed: .*are AWS_ENDPOINT_URL, AWS_REGION"):
        await Bucket("s3://backups").names()
    with pytest.raises(BackupError, match="names no bucket"):
        Bucket("s3://")


def test_without_its_package_s3_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(BackupError, match=r"pip install 'breakwater-plane\[backup\]'"):
        storage_of("s3://backups/x")


async def test_files_of_others_in_a_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "streams").mkdir()
    (tmp_path / "streams" / "thesis.txt").write_text("mine")
    with pytest.raises(BackupError, match=r"has files of something else, such as streams/thesis.txt: name an empty"):
        await store(Folder(tmp_path), {})
    assert (tmp_path / "streams" / "thesis.txt").exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b", "", ".hidden", "a//b"])
def test_a_manifest_names_no_file_outside_of_the_backup(name: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        Manifest.model_validate({"files": [{"name": name, "bytes": 0, "sha256": ""}]})


async def test_a_plain_backup_is_not_taken_for_an_encrypted_one(tmp_path: Path) -> None:
    await store(Folder(tmp_path), FILES, None)
    for checks_only in (False, True):
        with pytest.raises(BackupError, match="is not encrypted, and BREAKWATER_BACKUP_KEY is set: unset it"):
            await read_manifest(Folder(tmp_path), KEY, checks_only=checks_only)


async def test_checksums_can_be_compared_without_the_key(tmp_path: Path) -> None:
    await store(Folder(tmp_path), FILES)
    manifest = await read_manifest(Folder(tmp_path), None, checks_only=True)
    await ArchiveReader(Folder(tmp_path), manifest, None, lambda _: None).check_all()
    (tmp_path / "streams/EVENTS").write_bytes((tmp_path / "streams/EVENTS").read_bytes()[:-1])
    with pytest.raises(BackupError, match=r"streams/EVENTS has .* bytes instead of"):
        await ArchiveReader(Folder(tmp_path), manifest, None, lambda _: None).check_all()
