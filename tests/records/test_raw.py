"""Answers that are files: what goes wrong in the middle of one is reported, what only looks like one is not."""

from collections.abc import AsyncIterator

import pytest

from breakwater.kernel.clickhouse.client import Analytics, BrokenOffError, whole
from breakwater.kernel.clickhouse.errors import QueryError


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


async def gathered(data: bytes, size: int = 1 << 16) -> bytes:
    return b"".join([chunk async for chunk in whole(pieces(data, size))])


async def test_what_clickhouse_writes_is_handed_out_whole(analytics: Analytics) -> None:
    sql = "SELECT number + {first:UInt64} FROM numbers(100000) FORMAT TSVRaw"
    data = b"".join([chunk async for chunk in analytics.raw_stream(sql, {"first": 7})])
    assert data == b"".join(b"%d\n" % number for number in range(7, 100_007))


async def test_an_error_before_the_first_row_is_reported(analytics: Analytics) -> None:
    with pytest.raises(QueryError) as refused:
        [chunk async for chunk in analytics.raw_stream("SELECT 1 FROM nowhere FORMAT Parquet")]
    assert refused.value.code == 60


@pytest.mark.parametrize("form", ["TSVRaw", "Parquet"])
async def test_an_error_after_many_rows_is_reported_with_its_code(analytics: Analytics, form: str) -> None:
    sql = f"SELECT toString(number), throwIf(number = 1000000, 'no more') FROM numbers(1500000) FORMAT {form}"
    got = 0

    async def read() -> None:
        nonlocal got
        async for chunk in analytics.raw_stream(sql, settings={"output_format_parquet_row_group_size": 10_000}):
            got += len(chunk)

    with pytest.raises(QueryError, match="no more") as refused:
        await read()
    assert refused.value.code == 395
    assert got > 100_000, "it failed too early to show anything"


@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
async def test_an_error_as_old_servers_write_it_is_reported(size: int) -> None:
    rows = b'{"a":1}\n' * 5_000
    error = b"Code: 241. DB::Exception: Memory limit exceeded. (MEMORY_LIMIT_EXCEEDED) (version 24.3.1.1)\n"
    with pytest.raises(BrokenOffError, match="Memory limit"):
        await gathered(rows + error, size)
    assert await gathered(rows, size) == rows


async def test_a_row_that_holds_the_text_of_an_error_is_none() -> None:
    row = b'{"error_message":"Code: 241. DB::Exception: x (version 24.3.1.1)"}\n'
    assert await gathered(row * 3) == row * 3
