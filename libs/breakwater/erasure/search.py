"""A search through all that the stores hold, for texts and names that were erased."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

from breakwater.erasure.contract import SearchReport, Trace
from breakwater.erasure.rules import SHORTEST_NAME, SHORTEST_TEXT, DataSubject, name_forms, stored_forms, texts_of
from breakwater.erasure.tables import NEEDLES, ErasableRows, SubjectRows, json_or_text
from breakwater.erasure.waiting import comes_true
from breakwater.kernel.clickhouse.client import Analytics, quote_name
from breakwater.kernel.nats.core import ClientGetter
from breakwater.kernel.nats.deletion import REWRITTEN_AFTER_S
from breakwater.kernel.nats.lookup import Lookup, everything_in
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.redis.connection import Redis

NATS = "NATS"
"""The name of NATS' folder."""
PART_BYTES = 4 * 1024 * 1024
NEWEST_JOBS = 100
MOST_TEXTS = 400
MOST_TRACES = 100

_READS = {
    "string": ("GET",),
    "hash": ("HGETALL",),
    "list": ("LRANGE", 0, -1),
    "set": ("SMEMBERS",),
    "zset": ("ZRANGE", 0, -1),
    "stream": ("XRANGE", "-", "+"),
}
"""The command that reads a whole value of Redis, by its type."""

_TEXT_TYPES = "type LIKE '%String%'"


class Samples:
    """The texts, the callers' ids and the name to search for."""

    def __init__(
        self,
        texts: Iterable[str] = (),
        jobs: int = 0,
        name: str | None = None,
        *,
        ids: Iterable[str] = (),
        tenant: str | None = None,
    ) -> None:
        """Takes the tenant beside which the name is searched for: the user's data with others stays.

        The name is not searched for if it, or the tenant, is so short that it is in many other texts.
        """
        self.jobs = jobs
        self.texts = tuple(sorted(texts))[:MOST_TEXTS]
        self.ids = tuple(sorted(ids))[:MOST_TEXTS]
        names = [name or "", *([] if tenant is None else [tenant])]
        self.name = None if min(map(len, names)) < SHORTEST_NAME else name
        self.tenant = tenant
        self._forms = [("text", form) for text in self.texts for form in stored_forms(text)]
        self._forms += [("id", form) for chosen in self.ids for form in stored_forms(chosen)]
        self._names = [] if self.name is None else [("name", form) for form in name_forms(self.name)]
        self._tenants = name_forms(tenant or "")
        self._longest = max((len(form) for _, form in (*self._forms, *self._names)), default=1)

    @property
    def wanted(self) -> Iterator[tuple[str, str]]:
        """The kinds and texts that are searched for."""
        yield from (("text", text) for text in self.texts)
        yield from (("id", chosen) for chosen in self.ids)
        if self.name is not None:
            yield "name", self.name

    def count_in(self, data: bytes) -> Counter[str]:
        """The number of texts, ids and names in a message or a value, by kind."""
        names = self._names if any(form in data for form in self._tenants) else []
        return Counter(kind for kind, form in (*self._forms, *names) if form in data)

    def count_in_file(self, file: Path) -> tuple[Counter[str], int]:
        """The same of a file, without names beside a tenant, and its size in bytes; 0 for one that has just gone.

        Raises PermissionError.
        """
        wanted = self._forms if self.tenant else [*self._forms, *self._names]
        forms = set[tuple[str, bytes]]()
        window = b""
        size = 0
        try:
            with file.open("rb") as opened:
                while part := opened.read(PART_BYTES):
                    size += len(part)
                    window = window[-self._longest :] + part
                    forms.update((kind, form) for kind, form in wanted if form in window)
        except FileNotFoundError:
            return Counter(), 0
        return Counter(kind for kind, _ in forms), size

    def report(
        self, searched: Mapping[str, int], unread: Mapping[str, int], traces: Iterable[Trace] = (), *, actions: int = 0
    ) -> SearchReport:
        """Returns the report of a search for them."""
        return SearchReport(
            texts=len(self.texts),
            jobs=self.jobs,
            ids=len(self.ids),
            name=self.name is not None,
            searched=dict(searched),
            unread=dict(unread),
            actions=actions,
            traces=tuple(traces),
        )


async def samples_of(rows: SubjectRows, erasable: ErasableRows, subject: DataSubject) -> Samples:
    """Takes texts of the newest jobs, and ids, that no job of others has. Raises as `Analytics.query` does."""
    stored = await rows.texts(NEWEST_JOBS)
    texts: set[str] = set()
    for parts in stored.values():
        texts |= texts_of(*map(json_or_text, parts))
    some_texts = sorted(texts)[:MOST_TEXTS]
    long_ids = sorted(chosen for chosen in erasable.chosen if len(chosen) >= SHORTEST_TEXT)[:MOST_TEXTS]
    used = await rows.used_by_others([*some_texts, *long_ids])
    tenant = subject.user and subject.tenant
    return Samples({*some_texts} - used, len(stored), subject.user, ids={*long_ids} - used, tenant=tenant)


class StoreSearch:
    """Searches NATS, Redis, ClickHouse, and files where they are on this machine."""

    def __init__(
        self,
        connection: ClientGetter,
        redis: Redis,
        analytics: Analytics,
        folders: Mapping[str, Path | None],
        *,
        files_wait_s: float = REWRITTEN_AFTER_S,
    ) -> None:
        """Takes the folders of the servers' files, by their names; those that are not here are left out.

        `files_wait_s` is how long it waits for NATS to rewrite its own.
        """
        self._files_wait_s = files_wait_s
        self._lookup = Lookup(connection)
        self._client: Any = redis.client
        self._analytics = analytics
        self._folders = {name: folder for name, folder in folders.items() if folder is not None and _is_here(folder)}
        self._searched: Counter[str] = Counter()
        self._unread: Counter[str] = Counter()
        self._traces: Counter[tuple[str, str, str]] = Counter()
        self._actions = 0

    async def run(self, samples: Samples) -> SearchReport:
        """Searches everything once.

        Raises BusUnavailableError, StateUnavailableError, AnalyticsUnavailableError, QueryError.
        """
        for stream in Stream:
            if stream is not Stream.KEYS:
                await self._search_stream(stream, samples)
        await self._search_redis(samples)
        await self._search_tables(samples)
        # Of ClickHouse, not those that mutations have replaced, and that go after some minutes.
        active = "SELECT path FROM system.parts WHERE active AND database = {database:String}"
        paths = (await self._analytics.query(active, {"database": self._analytics.database})).rows
        folders = [*self._folders.items(), *(("ClickHouse", Path(path)) for (path,) in paths)]
        for name, folder in folders:
            await self._search_files(name, folder, samples)
        traces = [
            Trace(store=store, place=place, kind=kind, count=count)
            for (store, place, kind), count in sorted(self._traces.items())[:MOST_TRACES]
        ]
        return samples.report(self._searched, self._unread, traces, actions=self._actions)

    async def _search_stream(self, stream: Stream, samples: Samples) -> None:
        async with aclosing(self._lookup.scan(stream, everything_in(stream), complete=True)) as stored:
            async for message in stored:
                self._searched[stream.value] += 1
                headers = "".join(f"{name}:{value}\n" for name, value in message.headers.items())
                data = b"\n".join((message.subject.encode(), headers.encode(), message.data))
                counts = samples.count_in(data)
                if stream is Stream.AUDIT and counts and "text" not in counts:
                    self._actions += 1
                else:
                    self._note(stream.value, f"message {message.sequence}", counts)

    async def _search_redis(self, samples: Samples) -> None:
        async for key in cast(AsyncIterator[str], self._client.scan_iter(count=1_000)):
            data = b"%s\n%s" % (key.encode(), await self._value(key))
            self._searched["Redis"] += 1
            self._note("Redis", key, samples.count_in(data))

    async def _value(self, key: str) -> bytes:
        """The bytes of a value of any type, with those of its fields."""
        read = _READS.get(await self._client.type(key))
        if read is None:
            return b""
        name, *bounds = read
        return b"\n".join(_flat(await self._client.execute_command(name, key, *bounds, NEVER_DECODE=True)))

    async def _search_tables(self, samples: Samples) -> None:
        columns = (
            "SELECT table, name FROM system.columns WHERE database = {database:String} AND table IN (SELECT name FROM "  # noqa: S608
            f"system.tables WHERE database = {{database:String}} AND engine LIKE '%MergeTree') AND {_TEXT_TYPES}"
        )
        wanted = [(kind, form.decode()) for kind, text in samples.wanted for form in name_forms(text)]
        tenants = [form.decode() for form in name_forms(samples.tenant or "")]
        by_table: dict[str, list[str]] = {}
        for table, column in (await self._analytics.query(columns, {"database": self._analytics.database})).rows:
            by_table.setdefault(table, []).append(column)
        for table, names in sorted(by_table.items()):
            self._searched[table] = int(
                (await self._analytics.query(f"SELECT count() FROM {quote_name(table)}")).rows[0][0]  # noqa: S608
            )
            # Each row as text, so that arrays and maps are searched, too; as a text may be escaped in it.
            parts = ", ".join(f"ifNull(toString({quote_name(name)}), '')" for name in names)
            row = f"concat_ws('\\n', {parts})"
            beside = f"multiSearchAny({row}, {{tenants:Array(String)}})" if samples.tenant else "true"
            sql = (
                f"SELECT sumForEach(arrayMap((place, kind) -> place > 0 AND (kind != 'name' OR {beside}), "  # noqa: S608
                f"multiSearchAllPositions({row}, {{forms:Array(String)}}), {{kinds:Array(String)}})) "
                f"FROM {quote_name(table)}"
            )
            for start in range(0, len(wanted), NEEDLES):
                kinds, forms = zip(*wanted[start : start + NEEDLES], strict=True)
                parameters = {"kinds": list(kinds), "forms": list(forms), "tenants": tenants}
                [(counts,)] = (await self._analytics.query(sql, parameters)).rows
                for kind, count in zip(kinds, counts or [0] * len(kinds), strict=True):
                    if count:
                        self._traces[table, "rows", kind] += count
        mutations = "SELECT command FROM system.mutations WHERE database = {database:String}"
        for (command,) in (await self._analytics.query(mutations, {"database": self._analytics.database})).rows:
            self._searched["mutations"] += 1
            self._note("mutations", "command", samples.count_in(str(command).encode()))

    async def _search_files(self, name: str, folder: Path, samples: Samples) -> None:
        files, closed_folders = _files_in(folder)
        size, traces, closed_files = await asyncio.to_thread(_count_in_files, files, samples)
        self._searched[f"{name} (bytes)"] += size
        if closed := closed_folders + closed_files:
            self._unread[name] += closed

        async def are_clean() -> bool:
            nonlocal traces
            _, traces, _ = await asyncio.to_thread(_count_in_files, traces, samples)
            return not traces

        # NATS rewrites its files some time after it was made to; the others have been.
        if traces and name == NATS:
            await comes_true(are_clean, self._files_wait_s)
        for file, counts in traces.items():
            self._note(f"files of {name}", str(file.relative_to(folder)), counts)

    def _note(self, store: str, place: str, counts: Counter[str]) -> None:
        for kind, count in counts.items():
            self._traces[store, place, kind] += count


def _is_here(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except PermissionError:  # of a folder around it
        return True


def _files_in(folder: Path) -> tuple[list[Path], int]:
    """All files, of folders that are removed meanwhile those that were there, and the number of closed folders."""
    closed: list[OSError] = []
    paths = [Path(path, name) for path, _, names in os.walk(folder, onerror=closed.append) for name in names]
    return sorted(filter(_may_be_file, paths)), sum(isinstance(error, PermissionError) for error in closed)


def _may_be_file(path: Path) -> bool:
    try:
        return path.is_file()
    except PermissionError:  # opening it tells
        return True


def _count_in_files(files: Iterable[Path], samples: Samples) -> tuple[int, dict[Path, Counter[str]], int]:
    """The size of files in bytes, what is in those that have anything, and the number of those that may not be read."""
    traces = dict[Path, Counter[str]]()
    total = 0
    closed = 0
    for file in files:
        try:
            counts, size = samples.count_in_file(file)
        except PermissionError:
            closed += 1
            continue
        total += size
        if counts:
            traces[file] = counts
    return total, traces, closed


def _flat(value: object) -> Iterator[bytes]:
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, Mapping):
        yield from _flat([*cast(Mapping[object, object], value).items()])
    elif isinstance(value, list | tuple | set):
        for part in cast(list[object], value):
            yield from _flat(part)
