"""`breakwater backup`: makes, checks and restores backups of a whole plane."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from breakwater import __version__
from breakwater.backup.archive import ArchiveReader, read_manifest
from breakwater.backup.contract import Manifest
from breakwater.backup.create import Source, create
from breakwater.backup.encryption import BackupKey
from breakwater.backup.errors import BackupError
from breakwater.backup.local_files import API_KEYS, LocalFiles, write_new
from breakwater.backup.local_servers import local_servers
from breakwater.backup.progress import BackupProgress
from breakwater.backup.restore import EMPTY_IT, Destination, restore
from breakwater.backup.storage import storage_of
from breakwater.config.servers import layout
from breakwater.kernel.commands import connect, formats, output
from breakwater.kernel.commands.errors import usage_error
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.redis.inspect import has_plane_data
from breakwater.kernel.types import format_time
from breakwater.local.plane import DEFAULT_DATA, ConfigOption, DataOption, JsonOption, PlaneLocation

PROGRESS_EVERY_S = 10.0
ANSWER_TIMEOUT_S = 3_600.0
"""Longest silence of ClickHouse while it reads or stores a part."""

TargetArgument = Annotated[str, typer.Argument(metavar="TARGET", help="A folder, or s3://bucket/prefix.")]

app = typer.Typer(help="Make, check and restore backups of the whole plane.", no_args_is_help=True)


@app.command("create")
def create_command(
    target: TargetArgument,
    config: ConfigOption = None,
    data: DataOption = None,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--file", metavar="FILE", exists=True, dir_okay=False, help="Another file with secrets, such as .env."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Copy streams, records, config and keys of a running plane, which goes on working.

    Every job that was accepted before the moment that is printed is in the backup. Redis is not: the plane rebuilds it.
    With BREAKWATER_BACKUP_KEY, everything is encrypted; without it, secrets are left out. An interrupted run leaves no
    backup, and the next one to the same target starts from the beginning.

    S3 needs `pip install 'breakwater-plane[backup]'`, and reads AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID and
    AWS_SECRET_ACCESS_KEY.

    For example:

        export BREAKWATER_BACKUP_KEY=$(breakwater encryption new-key)

        breakwater backup create backups/monday

        breakwater backup create s3://backups/breakwater/monday --file .env
    """
    plane = PlaneLocation(data)
    key = _key()
    config_file = config or plane.running_config or plane.config_file(None)
    if not config_file.is_file():
        raise usage_error(f"there is no config file {config_file}", "Name it with --config FILE.")
    if files and key is None:
        raise usage_error("--file needs a key, to encrypt the file with", "Set BREAKWATER_BACKUP_KEY.")
    is_local = _is_local("BREAKWATER_NATS_URL", data)
    local_files = LocalFiles(
        config_file,
        plane.data if is_local else None,
        plane.data / API_KEYS if is_local else Settings().api_keys_file,
        files or (),
    )

    async def run() -> tuple[Manifest, BackupProgress]:
        progress = BackupProgress("copied")
        async with (
            connect.bus(plane.admin_nats_url) as client,
            connect.analytics(plane.admin_clickhouse_url, answer_timeout_s=ANSWER_TIMEOUT_S) as analytics,
            connect.progress(progress.describe, lines_every_s=PROGRESS_EVERY_S),
        ):
            source = Source(
                connection=lambda: client,
                analytics=analytics,
                files=local_files.plain(),
                secret_files=local_files.secret(),
            )
            storage = storage_of(target)
            return await create(source, storage, key=key, version=__version__, now=_now, progress=progress), progress

    manifest, _ = connect.run(run())
    if as_json:
        output.json_document({"ok": True, **_summary(target, manifest), "left_out": manifest.left_out})
        return
    output.write(f"{target} has the plane as of {format_time(manifest.moment)}: {_contents(manifest)}")
    if manifest.key is None:
        output.note(f"not encrypted, as BREAKWATER_BACKUP_KEY is not set; left out: {_names(manifest.left_out)}")
    else:
        output.note(f"encrypted with key {manifest.key}, without which it can't be restored")


@app.command("verify")
def verify(target: TargetArgument, as_json: JsonOption = False) -> None:
    """Read a whole backup, and compare it with its checksums. Needs no plane.

    With BREAKWATER_BACKUP_KEY, it is decrypted too. The first file that is missing, cut or changed is named.

    For example:

        breakwater backup verify s3://backups/breakwater/monday
    """

    async def run() -> Manifest:
        key = _key()
        storage = storage_of(target)
        manifest = await read_manifest(storage, key, checks_only=True)
        await _check(target, manifest, key)
        return manifest

    manifest = connect.run(run())
    decrypted = manifest.key is None or _key() is not None
    if as_json:
        output.json_document({"ok": True, **_summary(target, manifest), "decrypted": decrypted})
        return
    output.write(f"{target} is whole, as of {format_time(manifest.moment)}: {_contents(manifest)}")
    if not decrypted:
        output.note("only checksums were compared, as BREAKWATER_BACKUP_KEY is not set")


@app.command("restore")
def restore_command(
    target: TargetArgument,
    config: ConfigOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Restore a backup into servers without a plane's data, while no service runs.

    Without BREAKWATER_NATS_URL and BREAKWATER_CLICKHOUSE_URL, it fills the data directory of a `breakwater up` that is
    yet to be started. The backup is read twice: nothing is changed before it is known to be whole. An interrupted
    restore continues with the same command. Files that exist, such as the config, are not replaced.

    For example:

        breakwater backup restore backups/monday --data .breakwater

        breakwater up
    """
    key = _key()
    is_local = _is_local("BREAKWATER_NATS_URL", data)
    directory = (data or DEFAULT_DATA).absolute()
    local_files = LocalFiles(
        config or Path(os.environ.get("BREAKWATER_CONFIG") or "breakwater.yaml"),
        directory if is_local else None,
        directory / API_KEYS if is_local else Settings().api_keys_file,
    )

    async def run() -> tuple[Manifest, bool, list[str]]:
        manifest = await read_manifest(storage_of(target), key)
        await _check(target, manifest, key)
        progress = BackupProgress("restored")
        progress.expect(manifest.bytes)
        archive = ArchiveReader(storage_of(target), manifest, key, progress.read)

        async def fill(settings: Settings) -> bool:
            url = settings.clickhouse_url.get_secret_value()
            async with connect.state(settings.redis_url.get_secret_value()) as redis:
                if await has_plane_data(redis):
                    raise BackupError(f"Redis has a plane's data: {EMPTY_IT}")
            async with (
                connect.bus(settings.nats_url.get_secret_value()) as client,
                connect.analytics(url, answer_timeout_s=ANSWER_TIMEOUT_S) as analytics,
                connect.progress(progress.describe, lines_every_s=PROGRESS_EVERY_S),
            ):
                destination = Destination(
                    connection=lambda: client,
                    analytics=analytics,
                    layout=layout(PlaneLocation(data).config(local_files.config)),
                    replicas=settings.nats_replicas,
                )
                return await restore(destination, archive, manifest, progress)

        if is_local:
            async with local_servers(local_files, partial(_restore_files, archive, manifest)) as (
                settings,
                existing_files,
            ):
                continued = await fill(settings)
        else:
            existing_files = await _restore_files(archive, manifest, local_files)
            continued = await fill(Settings())
        return manifest, continued, existing_files

    manifest, continued, existing_files = connect.run(run())
    if as_json:
        document = {"ok": True, **_summary(target, manifest), "continued": continued, "kept_files": existing_files}
        output.json_document(document)
        return
    output.write(f"the plane is as it was at {format_time(manifest.moment)}: {_contents(manifest)}")
    if existing_files:
        output.note(f"these files were there, and stay: {_names(existing_files)}")
    if manifest.left_out:
        output.note(f"the backup has no secrets, as it is not encrypted: {_names(manifest.left_out)}")
    output.note("start it with `breakwater up`" if is_local else "start the services; `breakwater doctor` checks them")


def _is_local(variable: str, data: Path | None) -> bool:
    return data is not None or not os.environ.get(variable)


def _key() -> BackupKey | None:
    text = Settings().backup_key
    return None if text is None else BackupKey(text.get_secret_value().strip())


def _now() -> datetime:
    return datetime.now(UTC)


async def _check(target: str, manifest: Manifest, key: BackupKey | None) -> None:
    progress = BackupProgress("checked")
    progress.expect(manifest.bytes)
    async with connect.progress(progress.describe, lines_every_s=PROGRESS_EVERY_S):
        await ArchiveReader(storage_of(target), manifest, key, progress.read).check_all()


async def _restore_files(archive: ArchiveReader, manifest: Manifest, local_files: LocalFiles) -> list[str]:
    """Writes the files that are missing here. Returns the others."""
    existing_files: list[str] = []
    for local in manifest.local_files:
        content = b"".join([chunk async for chunk in archive.read(local.file)])
        if (place := local_files.place(local.name)) is not None and not write_new(place, content):
            existing_files.append(str(place))
    return existing_files


def _summary(target: str, manifest: Manifest) -> dict[str, Any]:
    return {
        "target": target,
        "id": manifest.id,
        "moment": format_time(manifest.moment),
        "plane_version": manifest.plane_version,
        "key": manifest.key,
        "bytes": manifest.bytes,
        "files": len(manifest.files),
        "streams": {stream.name: stream.messages for stream in manifest.streams},
        "tables": {table.name: table.rows for table in manifest.tables},
    }


def _contents(manifest: Manifest) -> str:
    messages = sum(stream.messages for stream in manifest.streams)
    rows = sum(table.rows for table in manifest.tables)
    streams = formats.quantity(len(manifest.streams), "stream")
    return f"{streams} with {messages:,} messages, {rows:,} rows, {manifest.bytes / 1e6:,.1f} MB"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
