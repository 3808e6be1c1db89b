"""A search through all that the stores hold, for texts and names that were erased."""

from __future__ import annotations

import asyncio
import mmap
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

from breakwater.erasure.contract import SearchReport, Trace
from breakwater.erasure.rules import SHORTEST_NAME, DataSubject, stored_forms, texts_of
from breakwater.erasure.tables import SubjectRows, json_or_text
from breakwater.kernel.clickhouse.client import Analytics, quote_name
from breakwater.kernel.nats.lookup import ClientGetter, Lookup, everything_in
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.redis.connection import Redis

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
    """The texts to search for, and the name."""

    def __init__(self, texts: Iterable[str] = (), jobs: int = 0, name: str | None = None) -> None:
        self.jobs = jobs
        self.texts = tuple(sorted(texts))[:MOST_TEXTS]
        self.name = name if name is not None and len(name) >= SHORTEST_NAME else None
        self._forms = [("text", form) for text in self.texts for form in stored_forms(text)]
        if self.name is not None:
            self._forms += [("name", form) for form in stored_forms(self.name)[:2]]

    @property
    def wanted(self) -> Iterator[tuple[str, str]]:
        """The kinds and texts that are searched for."""
        yield from (("text", text) for text in self.texts)
        if self.name is not None:
            yield "name", self.name

    def count_in(self, data: bytes | mmap.mmap) -> Counter[str]:
        """The number of texts and names in some bytes, by kind."""
        return Counter(kind for kind, form in self._forms if data.find(form) >= 0)


async def samples_of(rows: SubjectRows, ids: Iterable[str], subject: DataSubject) -> Samples:
    """Takes texts of the newest jobs that no job of others has. Raises as `Analytics.query` does."""
    stored = await rows.texts(list(ids), NEWEST_JOBS)
    texts: set[str] = set()
    for parts in stored.values():
        texts |= texts_of(*map(json_or_text, parts))
    erasable = [text for text in sorted(texts)[:MOST_TEXTS] if not await rows.used_by_others(text)]
    return Samples(erasable, len(stored), subject.user)


class StoreSearch:
    """Searches NATS, Redis, ClickHouse, and files where they are on this machine."""

    def __init__(
        self, connection: ClientGetter, redis: Redis, analytics: Analytics, folders: Mapping[str, Path | None]
    ) -> None:
        """Takes the folders of the servers' files, by their names; those that are not here are left out."""
        self._lookup = Lookup(connection)
        self._client: Any = redis.client
        self._analytics = analytics
        self._folders = {name: folder for name, folder in folders.items() if folder is not None and folder.is_dir()}
        self._searched: Counter[str] = Counter()
        self._traces: Counter[tuple[str, str, str]] = Counter()

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
            await asyncio.to_thread(self._search_files, name, folder, samples)
        traces = [
            Trace(store=store, place=place, kind=kind, count=count)
            for (store, place, kind), count in sorted(self._traces.items())[:MOST_TRACES]
        ]
        return SearchReport(
            texts=len(samples.texts), jobs=samples.jobs, searched=dict(self._searched), traces=tuple(traces)
        )

    async def _search_stream(self, stream: Stream, samples: Samples) -> None:
        async with aclosing(self._lookup.scan(stream, everything_in(stream), complete=True)) as stored:
            async for message in stored:
                self._searched[stream.value] += 1
                headers = "".join(f"{name}:{value}\n" for name, value in message.headers.items())
                data = b"\n".join((message.subject.encode(), headers.encode(), message.data))
                self._note(stream.value, f"message {message.sequence}", samples.count_in(data))

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
        by_table: dict[str, list[str]] = {}
        for table, column in (await self._analytics.query(columns, {"database": self._analytics.database})).rows:
            by_table.setdefault(table, []).append(column)
        for table, names in sorted(by_table.items()):
            self._searched[table] = int(
                (await self._analytics.query(f"SELECT count() FROM {quote_name(table)}")).rows[0][0]  # noqa: S608
            )
            for kind, text in samples.wanted:
                # Each row as JSON, so that arrays and maps are searched, too; as a text may be escaped in it.
                parts = ", ".join(f"ifNull(toString({quote_name(name)}), '')" for name in names)
                sql = f"SELECT count() FROM {quote_name(table)} WHERE multiSearchAny(concat_ws('\\n', {parts}), {{forms:Array(String)}})"  # noqa: E501, S608
                forms = list(dict.fromkeys((text, stored_forms(text)[1].decode())))
                count = int((await self._analytics.query(sql, {"forms": forms})).rows[0][0])
                if count:
                    self._traces[table, "rows", kind] += count
        mutations = "SELECT command FROM system.mutations WHERE database = {database:String}"
        for (command,) in (await self._analytics.query(mutations, {"database": self._analytics.database})).rows:
            self._searched["mutations"] += 1
            self._note("mutations", "command", samples.count_in(str(command).encode()))

    def _search_files(self, name: str, folder: Path, samples: Samples) -> None:
        for file in sorted(folder.rglob("*")):
            if not file.is_file() or not file.stat().st_size:
                continue
            with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._searched[f"{name} (bytes)"] += len(data)
                self._note(f"files of {name}", str(file.relative_to(folder)), samples.count_in(data))

    def _note(self, store: str, place: str, counts: Counter[str]) -> None:
        for kind, count in counts.items():
            self._traces[store, place, kind] += count


def _flat(value: object) -> Iterator[bytes]:
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, Mapping):
        yield from _flat([*cast(Mapping[object, object], value).items()])
    elif isinstance(value, list | tuple | set):
        for part in cast(list[object], value):
            yield from _flat(part)
