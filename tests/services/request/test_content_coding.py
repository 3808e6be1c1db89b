"""Compressed bodies: what they hold, or an error that says what is wrong with them."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncGenerator, Callable, Mapping

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from breakwater.kernel.http import bodies
from breakwater.kernel.http.bodies import A_REQUEST, read_body, zstd
from breakwater.kernel.http.problems import RequestError
from breakwater.replay.contract import MAX_CONFIG
from tests.services.request.conftest import ALERTING, LINK_SECRET, HttpApi, StartApi
from tests.services.request.test_scopes import operations

BODY = b'{"agent": "writer", "prompt": "harbours"}' * 5_000
LIMIT = 1_000_000


def _raw_deflate(body: bytes) -> bytes:
    return zlib.compress(body)[2:-4]


def _window(log: int) -> Mapping[int, int]:
    return {zstd.CompressionParameter.window_log: log, zstd.CompressionParameter.content_size_flag: 0}


ENCODERS: Mapping[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "its old name": ("x-gzip", gzip.compress),
    "zstd": ("zstd", zstd.compress),
    "zstd with a window of 8 MB": ("zstd", lambda body: _streamed_zstd(body, 23)),
    "deflate": ("deflate", zlib.compress),
    "deflate without zlib's header": ("deflate", _raw_deflate),
    "none": ("identity", bytes),
    "in capitals, with spaces": (" GZIP ,, identity", gzip.compress),
    "two": ("gzip, zstd", lambda body: zstd.compress(gzip.compress(body))),
    "members of gzip": ("gzip", lambda body: gzip.compress(body[:70_000]) + gzip.compress(body[70_000:])),
    "frames of zstd": (
        "zstd",
        lambda body: zstd.compress(body[:9]) + b"\x50\x2a\x4d\x18\x03\0\0\0abc" + zstd.compress(body[9:]),
    ),
}


def _streamed_zstd(body: bytes, window_log: int) -> bytes:
    compressor = zstd.ZstdCompressor(options=_window(window_log))
    return compressor.compress(body) + compressor.flush()


async def read(body: bytes, coding: str, limit: int = LIMIT) -> bytes:
    parts = [body[at : at + 50_000] for at in range(0, len(body), 50_000)] or [b""]
    messages = [
        {"type": "http.request", "body": part, "more_body": number < len(parts)} for number, part in enumerate(parts, 1)
    ]

    async def receive() -> dict[str, object]:
        return messages.pop(0)

    headers = [(b"content-encoding", coding.encode())]
    return await read_body(Request({"type": "http", "headers": headers}, receive), limit, A_REQUEST)  # type: ignore[arg-type]


async def problem_of(body: bytes, coding: str, limit: int = LIMIT) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await read(body, coding, limit)
    return caught.value


async def test_a_compressed_body_is_read_as_what_it_holds(subtests: pytest.Subtests) -> None:
    for name, (coding, encode) in ENCODERS.items():
        for body in (BODY, b"{}"):
            with subtests.test(name, bytes=len(body)):
                assert await read(encode(body), coding) == body
    assert await read(b"", "gzip") == b""


async def test_a_body_that_cannot_be_decompressed_is_an_error_that_says_why(subtests: pytest.Subtests) -> None:
    packed, framed = gzip.compress(BODY), zstd.compress(BODY)
    cases = [
        ("brotli", BODY, "br", 415, "'br' is not supported"),
        ("hostile name", BODY, "x" * 5_000, 415, "not supported"),
        ("three codings", BODY, "gzip, gzip, gzip", 415, "at most 2"),
        ("not gzip", BODY, "gzip", 400, "is not gzip"),
        ("not zstd", BODY, "zstd", 400, "is not zstd"),
        ("not deflate", b"\xff" * 99, "deflate", 400, "is not deflate"),
        ("one in the other's place", packed, "zstd", 400, "is not zstd"),
        ("undone in the wrong order", zstd.compress(packed), "zstd, gzip", 400, "is not gzip"),
        ("half of gzip", packed[: len(packed) // 2], "gzip", 400, "in the middle"),
        ("gzip without its checksum", packed[:-1], "gzip", 400, "in the middle"),
        ("a wrong checksum", packed[:-8] + b"\0" * 8, "gzip", 400, "is not gzip"),
        ("half of zstd", framed[: len(framed) // 2], "zstd", 400, "in the middle"),
        ("half of deflate", zlib.compress(BODY)[:-3], "deflate", 400, "in the middle"),
        ("bytes after gzip", packed + b"more", "gzip", 400, "goes on after its end"),
        ("bytes after zstd", framed + b"more", "zstd", 400, "goes on after its end"),
        ("a window of 16 MB", _streamed_zstd(BODY, 24), "zstd", 400, "is not zstd"),
        ("empty members", gzip.compress(b"") * 1_001, "gzip", 400, "more than 1,000 frames"),
        ("empty frames", zstd.compress(b"") * 1_001, "zstd", 400, "more than 1,000 frames"),
    ]
    for name, body, coding, status, words in cases:
        with subtests.test(name):
            problem = await problem_of(body, coding)
            assert problem.status == status
            assert words in problem.message
            assert (status == 415) == (problem.headers.get("Accept-Encoding") == "gzip, zstd, deflate")


async def test_the_size_limit_is_on_what_comes_out(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    for coding, encode in [entry for entry in ENCODERS.values() if entry[0] != "identity"]:
        with subtests.test(coding):
            assert len(await read(encode(b" " * LIMIT), coding)) == LIMIT
            problem = await problem_of(encode(b" " * (LIMIT + 1)), coding)
            assert (problem.status, problem.code) == (413, "body_too_large")
    out = 0
    undone = bodies._Zlib.decompress

    def counted(decoder: bodies._Zlib, data: bytes, max_length: int) -> bytes:
        nonlocal out
        piece = undone(decoder, data, max_length)
        out += len(piece)
        return piece

    monkeypatch.setattr(bodies._Zlib, "decompress", counted)
    assert (await problem_of(gzip.compress(b" " * 20_000_000, 1), "gzip")).status == 413
    assert out <= LIMIT + bodies._PIECE
    bomb_in_a_bomb = gzip.compress(gzip.compress(b" " * 5_000_000, 1) * 50, 9)
    out = 0
    assert (await problem_of(bomb_in_a_bomb, "gzip, gzip")).status == 413
    assert out <= 2 * (LIMIT + bodies._PIECE)


async def test_the_event_loop_runs_while_a_large_body_is_decompressed() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await asyncio.sleep(0)
    before = turns
    await read(gzip.compress(b" " * LIMIT), "gzip")
    counting.cancel()
    assert turns - before >= LIMIT // bodies._PIECE


@given(body=st.binary(max_size=300), coding=st.sampled_from(["gzip", "zstd", "deflate"]), data=st.data())
def test_whatever_comes_is_the_body_or_an_error_of_ours(body: bytes, coding: str, data: st.DataObject) -> None:
    encoded = dict(ENCODERS.values())[coding](body)
    mutated = bytearray(encoded)
    for _ in range(data.draw(st.integers(0, 3))):
        if mutated:
            mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(mutated[: data.draw(st.integers(0, len(mutated)))])
    found: bytes | RequestError
    try:
        found = asyncio.run(read(cut, coding))
    except RequestError as problem:
        found = problem
    if isinstance(found, RequestError):
        assert found.status == 400
    else:
        assert cut != encoded or found == body


@pytest_asyncio.fixture(loop_scope="package")
async def limited(start_api: StartApi, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[HttpApi]:
    """A plane that takes small bodies only."""
    monkeypatch.setenv("LINK_SECRET", LINK_SECRET)
    async with start_api(ALERTING + f"limits: {{max_body_bytes: {LIMIT}}}") as api:
        yield api


async def test_each_operation_reads_compressed_bodies(limited: HttpApi, subtests: pytest.Subtests) -> None:
    job = b'{"agent": "writer", "prompt": "harbours"}'
    for coding, encode in (("gzip", gzip.compress), ("zstd", zstd.compress), ("deflate", zlib.compress)):
        accepted = await limited.ask(
            "POST", "/api/v1/jobs", data=encode(job), headers={"Content-Encoding": coding}, compress=None
        )
        assert accepted.status == 202, accepted.body
        assert json.loads((await limited.last_job()).data)["prompt"] == "harbours"
    taking_bodies = [
        (method, path, one["responses"])
        for method, path, one in operations()
        if "requestBody" in one and one["tags"] != ["openid"]
    ]
    assert len(taking_bodies) >= 17
    bomb = gzip.compress(b" " * (4 * MAX_CONFIG + 100_000), 1)
    for method, path, responses in taking_bodies:
        asked = path.format(
            job_id="j",
            incident_id="i",
            dead_letter_id=1,
            model="m",
            plan_id="p",
            response_id="resp_x",
            key="k",
            limit_id="l",
        )
        for body, coding, status in ((b"{}", "br", 415), (b"{}", "gzip", 400), (bomb, "gzip", 413)):
            with subtests.test(path, coding=coding, status=status):
                answer = await limited.ask(method.upper(), asked, data=body, headers={"Content-Encoding": coding})
                assert answer.status == status, answer.body
                assert str(status) in responses
