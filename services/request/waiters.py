"""Who waits for which answer. One subscription of the process hears all results; no job has one of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

Answer = asyncio.Future[bytes | None]
"""The result as it was published, or None when the process stops and nobody is to wait any longer."""


class Waiters:
    """Gives results to those who wait for them, by subject."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[Answer]] = {}
        self._released = False

    def __len__(self) -> int:
        return sum(len(answers) for answers in self._waiting.values())

    @contextmanager
    def listening(self, subject: str) -> Generator[Answer]:
        """Listens to a subject while the block runs. Begin before publishing: an answer may be faster than the ack."""
        answer: Answer = asyncio.get_running_loop().create_future()
        if self._released:
            answer.set_result(None)
        self._waiting.setdefault(subject, set()).add(answer)
        try:
            yield answer
        finally:
            answers = self._waiting[subject]
            answers.discard(answer)
            if not answers:
                del self._waiting[subject]

    def deliver(self, subject: str, data: bytes) -> None:
        """Hands a result to everyone who listens to its subject."""
        for answer in self._waiting.get(subject, ()):
            if not answer.done():
                answer.set_result(data)

    def release(self) -> None:
        """Ends all waiting, now and from now on: the process stops."""
        self._released = True
        for answers in self._waiting.values():
            for answer in answers:
                if not answer.done():
                    answer.set_result(None)
