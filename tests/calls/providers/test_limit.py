"""How long an answer is waited for, and what a standstill of the worker does to it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import pytest

from breakwater.calls.providers import base
from breakwater.calls.providers.base import AnswerTimeout, Streaming
from breakwater.calls.providers.local import Pieces
from breakwater.calls.rules.classify import TransportFailure
from breakwater.dialects.rules.chat_chunks import Chunk
from tests.calls.providers.kit import call, failure, perform, settings

TIMEOUT_S, STALL_S = 0.3, 0.6
TEXT = "hi" * 500_000
"""More than is read in one turn of the event loop."""
ANSWER = json.dumps({"choices": [{"message": {"content": TEXT}, "finish_reason": "stop"}]}).encode()


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "STALL_S", 0.1)


@contextmanager
def answering_meanwhile(*, answers: bool) -> Generator[str]:
    """A provider that answers one request, though the event loop of the test stands still."""
    asked, ends = threading.Event(), threading.Event()

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            asked.set()
            if answers:
                head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(ANSWER)}\r\n\r\n"
                connection.sendall(head.encode() + ANSWER)
            ends.wait(60)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            asyncio.get_running_loop().create_task(stand_still_once(asked))
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            ends.set()
            thread.join()


async def stand_still_once(asked: threading.Event) -> None:
    await asyncio.to_thread(asked.wait, 60)
    time.sleep(STALL_S)  # noqa: ASYNC251  the whole process stands still, as after SIGSTOP


async def test_an_answer_that_came_while_the_worker_stalled_is_an_answer() -> None:
    with answering_meanwhile(answers=True) as origin:
        answered = await perform(settings("openai", origin), call(timeout_s=TIMEOUT_S))
    assert answered.output == TEXT


async def test_after_a_standstill_without_an_answer_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "READ_S", 0.1)
    with answering_meanwhile(answers=False) as origin:
        failed = await failure(settings("openai", origin), call(timeout_s=TIMEOUT_S))
    assert failed.failure == TransportFailure("timeout", "TimeoutError", "no answer within 0.3 s")


async def test_a_limit_that_is_noticed_in_time_is_final_and_may_be_set_again() -> None:
    async def wait() -> None:
        async with AnswerTimeout(60) as limited:
            limited.reschedule(asyncio.get_running_loop().time() + 0.05)
            await asyncio.sleep(60)

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await wait()
    assert time.monotonic() - began < 30


async def test_a_piece_that_a_program_wrote_during_a_standstill_is_passed_on() -> None:
    pieces, loop, taken = Pieces(), asyncio.get_running_loop(), list[Sequence[Chunk]]()
    ended: asyncio.Future[None] = loop.create_future()
    ours, its = socket.socketpair()

    def written() -> None:
        pieces.put(ours.recv(64).decode())
        ended.set_result(None)
        loop.remove_reader(ours)

    def stand_still() -> None:
        its.send(b"hello")
        time.sleep(STALL_S)

    async def take(chunks: Sequence[Chunk]) -> None:
        taken.append(chunks)

    with ours, its:
        loop.add_reader(ours, written)
        loop.call_soon(stand_still)
        asked = call(timeout_s=TIMEOUT_S, streaming=Streaming(take, 5.0, 5.0))
        assert asked.streaming is not None
        assert await pieces.pass_on(asked, asked.streaming, ended)
    assert [chunk["choices"][0]["delta"]["content"] for [chunk] in taken] == ["hello"]
