"""The streamed answer of a job: each part is published in a numbered message, at most once, as soon as it arrives.

An attempt publishes nothing before its first content, so one that fails earlier leaves no trace. If an answer breaks
off, the next attempt may continue it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

import orjson
from pydantic import JsonValue

from breakwater.calls.assignment import Assignment, InFlight
from breakwater.calls.providers.base import Answer, Streaming
from breakwater.calls.providers.openai import ChatCompletions
from breakwater.dialects.rules.chat_chunks import CONTINUE, OBJECT, Assembly, Chunk, Join
from breakwater.dialects.rules.provider_state import AUTHOR
from breakwater.dialects.store.response_log import DELETED, ChunksDroppedError, ResponseLog
from breakwater.dialects.store.response_room import COUNTED_BYTES, MESSAGE_BYTES
from breakwater.jobs.contract.execution import Attempt
from breakwater.jobs.rules.chat_messages import THOUGHT, encoded
from breakwater.jobs.rules.ownership import shown, store_share
from breakwater.jobs.store.executions import ClaimLostError
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.errors import AlreadyDecidedError, BusUnavailableError
from breakwater.prices.rules.usage import Usage, of_completion
from services.worker.context import WorkerContext

_CONTINUED = frozenset({"role", THOUGHT, "reasoning", "thinking_blocks"})
"""Fields of a message, other than its text, that an interruption leaves as they are."""


def continuing(said: str) -> list[dict[str, JsonValue]]:
    """Returns the messages that ask a model to continue an answer that broke off."""
    return [{"role": "assistant", "content": said}, {"role": "user", "content": CONTINUE}] if said else []


class AnswerStream:
    """The stream of one job, over all its attempts.

    Attributes:
        answer: the published chunks, and perhaps later ones.
        execution_id: the id of the job's execution.
        continues: an attempt may continue the answer of an earlier one.
    """

    def __init__(self, worker: WorkerContext, job: Assignment) -> None:
        reply_to = job.job.reply_to
        self.answer = Assembly(job.execution_id)
        self.execution_id = job.execution_id
        self._worker = worker
        self._job = job
        own, called = subjects.chunks(job.agent_name, job.execution_id), job.execution_id
        self._subjects = {own: called, **({} if reply_to is None else {reply_to: shown(called)})}
        self._number = 0
        # Without a key, the log would have no texts of an agent that keeps none.
        keeps = job.job.keep_chunks and (job.agent.keeps_error_texts or worker.publisher.has_key)
        self._log = ResponseLog(worker.publisher, worker.lookup, worker.cipher) if keeps else None
        self._last = 0
        """Sequence of the last message in the log."""
        self._share = store_share(job.owner, job.job.tenant)
        self._uncounted = 0
        """Bytes in the log that the owner's share of it does not have yet."""
        self.is_lost = False
        """A part of the answer was published, and the log has it no more."""
        self.continues = keeps or job.agent.on_stream_break == "continue"

    def partial_output(self) -> JsonValue:
        """Returns the published part as an output; None if there is none."""
        message = self.answer.messages().get(0)
        if message is None or not self.answer.length:
            return None
        return message if message.get("tool_calls") else message["content"]

    @property
    def text(self) -> str | None:
        """The published part if it can be continued: the text of one choice, empty while the model only thinks."""
        messages = self.answer.messages()
        message = dict(messages.get(0, {}))
        text = message.pop("content", None) or ""
        only_text = len(messages) == 1 and not any(value for name, value in message.items() if name not in _CONTINUED)
        can_go_on = isinstance(text, str) and only_text and self.answer.finish_reason(0) is None
        return text if can_go_on and self.answer.length else None

    @property
    def saved_part(self) -> tuple[str, int]:
        """The published part as Redis has it, and the messages it was sent in; nothing for an answer in the log."""
        if self._log is not None or not self.continues:
            return "", 0
        texts = [message.get("content") or "" for message in self.answer.messages().values()]
        return "".join(text for text in texts if isinstance(text, str)), self._number

    def is_published(self, attempt: Attempt) -> bool:
        """True if a part of the answer is published after an attempt. What the log says is the truth."""
        return attempt.first_token_ms is not None if self._log is None else self.answer.length > 0

    @property
    def whole_answer(self) -> Answer | None:
        """The answer, if the log has all of it."""
        if self._log is None or not self.answer.finished:
            return None
        body = self.answer.completion()
        choices = tuple(ChatCompletions("").choices(body))
        chosen = next((one for one in choices if one.output is not None), None)
        if chosen is None:
            return None
        several = choices if len(choices) > 1 else ()
        usage = of_completion(body) or Usage(None, None)
        return Answer(chosen.output, usage, None, body, chosen.finish_reason, several)

    async def resume(self, said: str, attempt: int, model: str, *, published: bool) -> None:
        """Restores the part that another worker, or an earlier handling, has published.

        Args:
            said: that part, as the checkpoint has it.
            attempt: the number of the next one.
            model: its model.
            published: the checkpoint proves that there is such a part.

        Raises:
            ClaimLostError: another worker adds to the log.
        """
        if self._log is not None:
            await self._resume_from_log(attempt, model, published=published)
            return
        stored, number = await self._worker.outages.retry_while_unavailable(
            partial(self._worker.executions.partial_output, self._job.claim)
        )
        self._number = number
        if text := stored or said:
            self.answer.add({"choices": [{"index": 0, "delta": {"content": text}}]})

    async def _resume_from_log(self, attempt: int, model: str, *, published: bool) -> None:
        assert self._log is not None
        while True:
            messages, self._last = await self._worker.outages.retry_while_unavailable(
                partial(self._log.messages, self.execution_id, whole=True)
            )
            self.answer = Assembly(self.execution_id)
            was_dropped = messages[-1]["type"] == DELETED or messages[0]["number"] != 1 if messages else published
            if was_dropped:
                # Deleted, or dropped: what the log had is gone, and nothing is added to it.
                self._log = None
                self.is_lost = published or messages[-1]["type"] != DELETED
                return
            for message in messages:
                for chunk in message["chunks"]:
                    self.answer.add(chunk)
            self._number = messages[-1]["number"] if messages else 0
            try:
                # From here on, the worker that wrote them can add nothing.
                await self.publish(attempt, model, ())
            except ClaimLostError:
                # Not by one that has taken the job over: by its former worker, until now.
                confirm = partial(self._worker.leases.confirm, self._job.claim)
                await self._worker.outages.retry_while_unavailable(confirm)
            else:
                return

    async def publish(
        self,
        attempt: int,
        model: str,
        chunks: Sequence[Chunk],
        begin: Callable[[], Awaitable[None]] | None = None,
        dropped_params: Sequence[str] = (),
    ) -> None:
        """Publishes a part of the answer in one message. A message that NATS refuses is lost, which leaves a gap.

        With `keep_chunks`, it is in the log before it is anywhere else.

        Args:
            attempt: the number of the attempt that the part is of.
            model: its model.
            chunks: the part.
            begin: saves that a part is published. What is saved so is in the log, if there is one.
            dropped_params: of the attempt.

        Raises:
            ClaimLostError: another worker has taken the job over.
        """
        if self._log is None and begin is not None:
            await begin()
        # With no wait before its chunks are added: Redis is restored from both (`saved_part`).
        self._number += 1
        if self._log is not None:
            logged = self._message(self.execution_id, attempt, model, chunks, dropped_params)
            await self._append(self._log, logged)
            for chunk in chunks:
                self.answer.add(chunk)
            if begin is not None:
                await begin()
        elif self.continues:
            for chunk in chunks:
                self.answer.add(chunk)
            await self._worker.outages.retry_while_unavailable(partial(self._save, "".join(map(_text_of, chunks))))
        payload, written = b"", ""
        for subject, called in self._subjects.items():
            if called != written:
                payload, written = self._message(called, attempt, model, chunks, dropped_params), called
            with suppress(BusUnavailableError):
                await self._worker.publisher.send(subject, payload)

    async def _save(self, text: str) -> None:
        claim = self._job.claim
        kept = await self._worker.executions.append_partial(claim, text, self._number)
        if kept is None:
            raise ClaimLostError(self.execution_id)
        if kept.incomplete:
            # With this part, which the answer has already.
            await self._worker.leases.restore(claim)

    async def _append(self, log: ResponseLog, message: bytes) -> None:
        stored = log.sealed(message, private=not self._job.agent.keeps_error_texts)
        outages = self._worker.outages
        if not self._last:
            self._worker.room.begin_soon(self.execution_id)
        try:
            try:
                append = partial(log.append, self.execution_id, stored, self._last)
                self._last = await outages.retry_while_unavailable(append)
            except ChunksDroppedError:
                # The call goes on, as its result is whole; readers of the log see that its beginning is gone. Without
                # the last message the log fences no other worker off; the claim does.
                [renewed] = await outages.retry_while_unavailable(
                    partial(self._worker.executions.renew, [self._job.claim])
                )
                if renewed is None:
                    raise ClaimLostError(self.execution_id) from None
                append = partial(log.append, self.execution_id, stored, 0)
                self._last = await outages.retry_while_unavailable(append)
        except AlreadyDecidedError:
            raise ClaimLostError(self.execution_id) from None
        self._uncounted += len(stored) + MESSAGE_BYTES
        if self._uncounted >= COUNTED_BYTES:
            self.count()

    def count(self) -> None:
        """Counts what is in the log in its owner's share."""
        if self._uncounted:
            self._worker.room.count_soon(self._share, self._uncounted)
            self._uncounted = 0

    def _message(
        self, execution_id: str, attempt: int, model: str, chunks: Sequence[Chunk], dropped_params: Sequence[str]
    ) -> bytes:
        return encoded(
            {
                "type": "chunks",
                "execution_id": execution_id,
                "agent": self._job.agent_name,
                "number": self._number,
                "attempt": attempt,
                "model": model,
                **({"dropped_params": dropped_params} if dropped_params else {}),
                "chunks": chunks,
            }
        )


class AttemptStream:
    """The answer of one attempt.

    Attributes:
        streaming: the receiver that the provider gets.
        flight: the attempt, with the timing and the size of its answer.
        author: what the answer is signed with (`dialects.rules.provider_state`); None in an answer of its client's API.
    """

    def __init__(
        self,
        stream: AnswerStream,
        flight: InFlight,
        begin: Callable[[InFlight], Awaitable[None]],
        *,
        idle_timeout_s: float,
        total_timeout_s: float,
    ) -> None:
        self.streaming = Streaming(self._take, idle_timeout_s, total_timeout_s, Assembly(stream.execution_id))
        self.flight = flight
        self._stream = stream
        self._begin = begin
        self.author: str | None = None
        self._began_at = monotonic()
        self._held: list[Chunk] = []
        said = stream.text if stream.continues else None
        self._join = None if said is None else Join(said)
        if not stream.continues:
            # Without continuation, the published part is this attempt's, and is assembled only once.
            stream.answer = self.streaming.answer

    def called(self) -> None:
        """Starts the clock for the latency of the first token."""
        self._began_at = monotonic()

    @property
    def begun(self) -> bool:
        """True if a part of the answer is published."""
        return self.flight.first_token_ms is not None

    async def whole(self, answer: Answer) -> Answer:
        """Returns the whole answer, including the earlier attempts that this one continues. Raises ClaimLostError."""
        if self._join is None:
            return answer
        if not self.streaming.answer.length:
            # The provider did not stream it.
            output = answer.output if isinstance(answer.output, str) else orjson.dumps(answer.output).decode()
            await self.streaming.put([_chunk(0, {"content": output}, answer.finish_reason or "stop")])
        if rest := self._join.end():
            await self._publish([_chunk(0, {"content": rest})])
        self._join = None
        await self._publish(self._held)
        response = {**(answer.response or {}), **self._stream.answer.completion()}
        return replace(answer, output=self._stream.partial_output(), response=response)

    def ended(self) -> InFlight:
        """Returns the attempt with the number of received chunks."""
        if self.begun:
            self.flight = self.flight.model_copy(update={"chunks": self.streaming.answer.chunks})
        return self.flight

    async def _take(self, chunks: Sequence[Chunk]) -> None:
        if self._join is not None:
            chunks = [new for chunk in chunks if (new := self._continued(self._join, chunk)) is not None]
            if not chunks:
                return
        elif not self.begun:
            self._held += chunks
            if not self.streaming.answer.length:
                return
            chunks, self._held = self._held, []
        await self._publish(chunks)

    async def _publish(self, chunks: Sequence[Chunk]) -> None:
        if not chunks:
            return
        if self.author is not None:
            chunks = [{**chunks[0], AUTHOR: self.author}, *chunks[1:]]
        if not self.begun:
            first_token_ms = round((monotonic() - self._began_at) * 1000)
            self.flight = self.flight.model_copy(update={"first_token_ms": first_token_ms})
            # Saved before it is published: after a crash, the next worker must know that a part may be out.
            begin = partial(self._begin, self.flight)
            await self._stream.publish(
                self.flight.number, self.flight.model, chunks, begin, dropped_params=self.flight.dropped_params
            )
        else:
            flight = self.flight
            await self._stream.publish(flight.number, flight.model, chunks, dropped_params=flight.dropped_params)

    def _continued(self, join: Join, chunk: Chunk) -> Chunk | None:
        """Returns the part of a chunk that continues the answer. Its end is held until the overlap is known."""
        choices: list[dict[str, Any]] = []
        for choice in chunk["choices"]:
            delta = {name: value for name, value in choice.get("delta", {}).items() if value and name != "role"}
            text = join.feed(delta.pop("content", ""))
            if text or delta:
                choices.append(
                    {**choice, "delta": {**delta, **({"content": text} if text else {})}, "finish_reason": None}
                )
            if choice.get("finish_reason") is not None:
                self._held.append({**_without_event(chunk), "choices": [{**choice, "delta": {}}]})
        if not chunk["choices"] and (more := _without_event(chunk)).keys() > {"choices"}:
            self._held.append(more)
        # Its provider's events are those of another answer than the one that is continued.
        return {**_without_event(chunk), "choices": choices} if choices else None


def _without_event(chunk: Chunk) -> Chunk:
    return {name: value for name, value in chunk.items() if name != "event"}


def _text_of(chunk: Chunk) -> str:
    deltas: list[dict[str, Any]] = [choice.get("delta") or {} for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def _chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> Chunk:
    return {"object": OBJECT, "choices": [{"index": index, "delta": delta, "finish_reason": finish_reason}]}
