"""A plane that is restored from a backup that was made while it worked has the same ledgers."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest

from breakwater.backup.archive import MANIFEST, read_manifest
from breakwater.backup.encryption import BackupKey
from breakwater.backup.errors import BackupError
from breakwater.backup.storage import Folder
from breakwater.config import parse_config
from breakwater.config.servers import bus_plan
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.security.encryption import new_key
from tests.backup.conftest import EmptyServers
from tests.backup.kit import (
    KEY,
    WatchedFolder,
    acknowledge_all,
    bring_back,
    ledgers,
    make,
    messages_of,
    recorded,
    records,
)
from tests.services.sink.plane import CONFIG, Plane


async def work(plane: Plane, first: int, last: int) -> None:
    """Jobs end, and ClickHouse and the budget service have them."""
    await plane.publish(records(first, last))
    await plane.until_done()
    await acknowledge_all(plane, "budget")


async def test_a_plane_that_works_on_meanwhile_is_restored_with_equal_ledgers(
    plane: Plane, servers_without_plane: EmptyServers, tmp_path: Path
) -> None:
    async def before(name: str) -> None:
        """Ends jobs once the tables are copied, and has one return from PARKED between the two copies."""
        if name == "streams/JOBS":
            await work(plane, 13, 16)
        if name == "streams/PARKED":
            await plane.jetstream.publish(subjects.job("writer"), b"woken", headers={"Breakwater-X": "1"})

    await plane.jetstream.publish(subjects.job("writer"), b"waiting")
    await plane.jetstream.publish("bw.keys.k1", b"a key")
    async with plane.sink():
        await work(plane, 1, 12)
        manifest = await make(plane, WatchedFolder(tmp_path / "backup", before))
    assert await ledgers(plane.analytics) == [
        (16, 16 * Decimal("0.001000001"), 16),
        (16, 16 * Decimal("0.001000001"), 16),
    ]
    assert {table.name: table.rows for table in manifest.tables}["attempts"] == 12
    assert manifest.key == KEY.id

    empty = servers_without_plane
    assert not await bring_back(empty.client, empty.analytics, Folder(tmp_path / "backup"))
    assert (await ledgers(empty.analytics))[0][0] == 12
    # The log is the same one to all that compare it with ClickHouse.
    before_and_after = [
        await Lookup(lambda client=client: client).facts(Stream.EVENTS) for client in (plane.client, empty.client)
    ]
    assert before_and_after[0].identity == before_and_after[1].identity
    assert await recorded(empty.client, empty.analytics) == await recorded(plane.client, plane.analytics)
    for stream in ("EVENTS", "KEYS", "ALERTS"):
        assert await messages_of(empty.client, stream) == await messages_of(plane.client, stream)
    jobs = [data for _, data in (await messages_of(empty.client, "JOBS")).values()]
    assert jobs == [b"waiting", b"woken"]

    # What `breakwater up` and `setup` do; they lack nothing but what a restore does not know.
    assert await provision(empty.nats_server.url, bus_plan(parse_config(CONFIG))) == ()
    restored = empty.plane()
    async with restored.sink():
        await restored.until_done()
        assert await ledgers(empty.analytics) == await ledgers(plane.analytics)
        await work(restored, 17, 18)
    assert (await ledgers(empty.analytics))[0][0] == 18
    assert set((await recorded(empty.client, empty.analytics)).values()) == {18 * 1_000_001}
    with pytest.raises(BackupError, match="this backup is restored here already"):
        await bring_back(empty.client, empty.analytics, Folder(tmp_path / "backup"))


class Killed(Exception):  # noqa: N818  it is no error
    """The end of the process."""


@pytest.mark.parametrize("at", ["tables/attempts/00001.native.zst", "streams/EVENTS"])
async def test_an_interrupted_run_leaves_no_backup_and_an_interrupted_restore_continues(
    plane: Plane, servers_without_plane: EmptyServers, tmp_path: Path, at: str
) -> None:
    killed = False

    async def kill(name: str) -> None:
        nonlocal killed
        if name == at and not killed:
            killed = True
            raise Killed

    async with plane.sink():
        await work(plane, 1, 4)
    place = tmp_path / "backup"
    with pytest.raises(Killed):
        await make(plane, WatchedFolder(place, kill))
    with pytest.raises(BackupError, match="is incomplete: run `breakwater backup create` again"):
        await read_manifest(Folder(place), KEY)
    await make(plane, Folder(place))

    empty, reads = servers_without_plane, 0

    async def kill_restore(name: str) -> None:
        nonlocal reads
        reads += name == at  # the first time, it is checked
        if name == at and reads == 2:
            raise Killed

    with pytest.raises(Killed):
        await bring_back(empty.client, empty.analytics, WatchedFolder(place, kill_restore))
    with pytest.raises(BusError, match="was interrupted: run `breakwater backup restore` again"):
        await provision(empty.nats_server.url, bus_plan(parse_config(CONFIG)))
    assert await bring_back(empty.client, empty.analytics, Folder(place))
    assert await ledgers(empty.analytics) == await ledgers(plane.analytics)
    assert await recorded(empty.client, empty.analytics) == await recorded(plane.client, plane.analytics)
    assert await provision(empty.nats_server.url, bus_plan(parse_config(CONFIG))) == ()


async def test_a_stream_that_nats_has_in_part_is_not_taken_for_whole(
    plane: Plane, servers_without_plane: EmptyServers, tmp_path: Path
) -> None:
    reads = 0

    async def kill_restore(name: str) -> None:
        nonlocal reads
        reads += name == "streams/RESULTS"
        if reads == 2:
            raise Killed

    await plane.publish(records(1, 4))
    await make(plane, Folder(tmp_path))
    empty = servers_without_plane
    with pytest.raises(Killed):
        await bring_back(empty.client, empty.analytics, WatchedFolder(tmp_path, kill_restore))
    await empty.client.jetstream().delete_msg("EVENTS", 3)
    with pytest.raises(BackupError, match="stream EVENTS is restored in part, as NATS ended meanwhile"):
        await bring_back(empty.client, empty.analytics, Folder(tmp_path))


async def test_what_cannot_be_restored_is_refused_before_anything_is_changed(
    plane: Plane, servers_without_plane: EmptyServers, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    async with plane.sink():
        await work(plane, 1, 4)
    place, empty = tmp_path / "backup", servers_without_plane
    await make(plane, Folder(place))
    manifest, events = (place / MANIFEST).read_bytes(), (place / "streams/EVENTS").read_bytes()
    changed = bytearray(events)
    changed[len(events) // 2] ^= 1
    newer = json.dumps(json.loads(manifest) | {"format": 2, "plane_version": "9.0.0"}).encode()
    other_id = manifest.replace(b'"id": "', b'"id": "x', 1)
    other_key = BackupKey(new_key())
    cases: dict[str, tuple[str, bytes, BackupKey | None, str]] = {
        "a changed byte": ("streams/EVENTS", bytes(changed), KEY, "streams/EVENTS was changed"),
        "a cut file": ("streams/EVENTS", events[:-20], KEY, "streams/EVENTS has .* bytes instead of"),
        "a newer version": (MANIFEST, newer, KEY, "was made by version 9.0.0, whose format 2 .* install that version"),
        "a changed manifest": (MANIFEST, other_id, KEY, "manifest.json was changed"),
        "no key": (MANIFEST, manifest, None, f"encrypted with key {KEY.id}, and BREAKWATER_BACKUP_KEY is not set"),
        "another key": (MANIFEST, manifest, other_key, f"and BREAKWATER_BACKUP_KEY is {other_key.id}"),
    }
    for name, (file, content, key, problem) in cases.items():
        with subtests.test(name):
            whole = (place / file).read_bytes()
            (place / file).write_bytes(content)
            with pytest.raises(BackupError, match=problem):
                await bring_back(empty.client, empty.analytics, Folder(place), key)
            (place / file).write_bytes(whole)
    with subtests.test("a missing file"):
        (place / "streams/EVENTS").rename(tmp_path / "EVENTS")
        with pytest.raises(BackupError, match="streams/EVENTS is missing"):
            await bring_back(empty.client, empty.analytics, Folder(place))
        (tmp_path / "EVENTS").rename(place / "streams/EVENTS")
    with subtests.test("a backup that is there"), pytest.raises(BackupError, match="has a backup already"):
        await make(plane, Folder(place))
    with subtests.test("tables with rows"), pytest.raises(BackupError, match="table executions of ClickHouse has rows"):
        await bring_back(empty.client, plane.analytics, Folder(place))
    assert await empty.client.jetstream().streams_info() == []
    with subtests.test("streams"), pytest.raises(BackupError, match="NATS has the stream ADVISORIES already"):
        await bring_back(plane.client, empty.analytics, Folder(place))


async def test_without_a_key_secrets_are_left_out(
    plane: Plane, servers_without_plane: EmptyServers, tmp_path: Path
) -> None:
    config, secret = tmp_path / "breakwater.yaml", tmp_path / "api-key"
    config.write_text(CONFIG)
    secret.write_text("bw_secret_of_the_plane")
    files = {"files": {"config": config}, "secret_files": {"data/secrets/api-key": secret}}
    plain = await make(plane, Folder(tmp_path / "plain"), None, **files)
    assert plain.left_out == ("data/secrets/api-key",)
    assert [file.name for file in plain.local_files] == ["config"]
    sealed = await make(plane, Folder(tmp_path / "sealed"), **files)
    assert (sealed.left_out, [file.name for file in sealed.local_files]) == ((), ["config", "data/secrets/api-key"])
    stored = b"".join(file.read_bytes() for file in (tmp_path / "sealed").rglob("*") if file.is_file())
    assert b"bw_secret" not in stored
    assert b"base_url" not in stored
    assert {oct(file.stat().st_mode & 0o777) for file in (tmp_path / "sealed").rglob("*") if file.is_file()} == {
        "0o600"
    }
    # A changed byte is found without encryption, too.
    part = tmp_path / "plain" / "streams" / "KEYS"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    with pytest.raises(BackupError, match="streams/KEYS was changed"):
        await bring_back(
            servers_without_plane.client, servers_without_plane.analytics, Folder(tmp_path / "plain"), None
        )
