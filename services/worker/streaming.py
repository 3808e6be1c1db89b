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
from breakwater.jobs.contract.execution import Attempt, CallerLimits
from breakwater.jobs.rules.chat_messages import THOUGHT, encode_json
from breakwater.jobs.rules.ownership import store_share
from breakwater.jobs.store.executions import ClaimLostError
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.errors import AlreadyDecidedError, BusUnavailableError
from breakwater.prices.rules.usage import Usage, of_completion
from breakwater.services.worker.context import WorkerContext

_CONTINUED = frozenset({"role", THOUGHT, "reasoning", "thinking_blocks"})
"""Fields of a message, other than its text, that an interruption leaves as they are."""


def continuing(partial_text: str) -> list[dict[str, JsonValue]]:
    """Returns the messages that ask a model to continue an answer that broke off."""
    if not partial_text:
        return []
    return [{"role": "assistant", "content": partial_text}, {"role": "user", "content": CONTINUE}]


class AnswerStream:
    """The stream of one job, over all its attempts.

    Attributes:
        answer: the published chunks, and perhaps later ones.
        execution_id: the id of the job's execution.
        job_id: the job's own id, which names its answer.
        continues: an attempt may continue the answer of an earlier one.
        limits: the rate limits of the job's caller, for the first message.
    """

    def __init__(self, worker: WorkerContext, job: Assignment) -> None:
        reply_to = job.job.reply_to
        self.execution_id = job.execution_id
        self.job_id = job.ids.job_id
        self.answer = Assembly(self.job_id)
        self.limits: CallerLimits | None = None
        self._worker = worker
        self._job = job
        self._subjects = [subjects.chunks(job.agent_name, job.execution_id)]
        """The subjects that each part is published to."""
        if reply_to is not None:
            self._subjects.append(reply_to)
        self._number = 0
        # Without a key, the log would have no texts of an agent that keeps none.
        keeps = job.job.keep_chunks and (job.agent.keeps_error_texts or worker.publisher.has_key)
        self._log = ResponseLog(worker.publisher, worker.lookup, worker.cipher) if keeps else None
        self._last = 0
        """The sequence of the last message in the log."""
        self._share = store_share(job.owner, job.job.tenant)
        self._uncounted = 0
        """Bytes in the log that are not counted in its owner's share yet."""
        self.is_lost = False
        """True if a part of the answer was published, or may be, and neither the log nor Redis has it."""
        self.continues = keeps or job.agent.on_stream_break == "continue"

    def partial_output(self) -> JsonValue:
        """Returns the published part as an output; None if there is none."""
        message = self.answer.messages().get(0)
        if message is None or not self.answer.length:
            return None
        return message if message.get("tool_calls") else message["content"]

    @property
    def text(self) -> str | None:
        """The published text if it can be continued: that of one choice, empty while the model only thinks."""
        messages = self.answer.messages()
        message = dict(messages.get(0, {}))
        text = message.pop("content", None) or ""
        only_text = len(messages) == 1 and not any(value for name, value in message.items() if name not in _CONTINUED)
        can_go_on = isinstance(text, str) and only_text and self.answer.finish_reason(0) is None
        return text if can_go_on and self.answer.length else None

    @property
    def saved_part(self) -> tuple[str, int]:
        """The published text for Redis, and the number of its messages; empty for an answer in the log."""
        if self._log is not None or not self.continues:
            return "", 0
        texts = [message.get("content") or "" for message in self.answer.messages().values()]
        return "".join(text for text in texts if isinstance(text, str)), self._number

    def lose_part(self) -> None:
        """Notes that a part of the answer may be published that only Redis had, which has lost it."""
        self.is_lost = self.is_lost or self._log is None

    def is_published(self, attempt: Attempt) -> bool:
        """Returns True if a part of the answer is published after an attempt. The log decides if there is one."""
        return attempt.first_token_ms is not None if self._log is None else self.answer.length > 0

    @property
    def whole_answer(self) -> Answer | None:
        """The answer, if the log has all of it."""
        if self._log is None or not self.answer.finished:
            return None
        body = self.answer.completion()
        choices = tuple(ChatCompletions("").choices(body))
        chosen = next((choice for choice in choices if choice.output is not None), None)
        if chosen is None:
            return None
        usage = of_completion(body) or Usage(None, None)
        return Answer(chosen.output, usage, None, body, chosen.finish_reason, choices if len(choices) > 1 else ())

    async def resume(self, saved_text: str, attempt: int, model: str, *, published: bool) -> None:
        """Restores the part of the answer that another worker or an earlier handling has published.

        Args:
            saved_text: the text of that part in the checkpoint.
            attempt: the number of the next attempt.
            model: the model of the next attempt.
            published: True if the checkpoint proves that there is such a part.

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
        if text := stored or saved_text:
            self.answer.add({"choices": [{"index": 0, "delta": {"content": text}}]})

    async def _resume_from_log(self, attempt: int, model: str, *, published: bool) -> None:
        assert self._log is not None
        while True:
            messages, self._last = await self._worker.outages.retry_while_unavailable(
                partial(self._log.messages, self.execution_id, whole=True)
            )
            self.answer = Assembly(self.job_id)
            was_deleted = bool(messages) and messages[-1]["type"] == DELETED
            lacks_beginning = (was_deleted or messages[0]["number"] != 1) if messages else published
            if lacks_beginning:
                # Readers could not make sense of what follows, so nothing more is added to the log.
                self._log = None
                self.is_lost = published or not was_deleted
                return
            for message in messages:
                for chunk in message["chunks"]:
                    self.answer.add(chunk)
            self._number = messages[-1]["number"] if messages else 0
            try:
                # From here on, the worker that wrote these messages can't add any.
                await self.publish(attempt, model, ())
            except ClaimLostError:
                # The former worker may just have added a message. `confirm` fails if another has taken over the job.
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

        With `keep_chunks`, the log has the message before any reader.

        Args:
            attempt: the number of the attempt.
            model: the model of the attempt.
            chunks: the part.
            begin: saves that a part is published. With a log, the log has the part before that.
            dropped_params: the parameters that the attempt omits.

        Raises:
            ClaimLostError: another worker has taken the job over.
        """
        if self._log is None and begin is not None:
            await begin()
        # No await between this and the addition of the chunks: `saved_part` restores Redis from both.
        self._number += 1
        message = b""
        if self._log is not None:
            message = self._message(attempt, model, chunks, dropped_params)
            await self._append(self._log, message)
            for chunk in chunks:
                self.answer.add(chunk)
            if begin is not None:
                await begin()
        elif self.continues:
            for chunk in chunks:
                self.answer.add(chunk)
            await self._worker.outages.retry_while_unavailable(partial(self._save, "".join(map(_text_of, chunks))))
        message = message or self._message(attempt, model, chunks, dropped_params)
        for subject in self._subjects:
            with suppress(BusUnavailableError):
                await self._worker.publisher.send(subject, message)

    async def _save(self, text: str) -> None:
        claim = self._job.claim
        claim_state = await self._worker.executions.append_partial(claim, text, self._number)
        if claim_state is None:
            raise ClaimLostError(self.execution_id)
        if claim_state.incomplete:
            # The restored progress includes this part, which `answer` already has.
            await self._worker.leases.restore(claim)

    async def _append(self, log: ResponseLog, message: bytes) -> None:
        stored = log.seal(message, private=not self._job.agent.keeps_error_texts)
        outages = self._worker.outages
        if not self._last:
            self._worker.room.begin_soon(self.execution_id)
        try:
            try:
                append = partial(log.append, self.execution_id, stored, self._last)
                self._last = await outages.retry_while_unavailable(append)
            except ChunksDroppedError:
                # The call goes on, as its result will be complete; readers of the log see that its beginning is gone.
                # Without its last message, the log can't fence off other workers; the claim does that.
                [claim_state] = await outages.retry_while_unavailable(
                    partial(self._worker.executions.renew, [self._job.claim])
                )
                if claim_state is None:
                    raise ClaimLostError(self.execution_id) from None
                append = partial(log.append, self.execution_id, stored, 0)
                self._last = await outages.retry_while_unavailable(append)
        except AlreadyDecidedError:
            raise ClaimLostError(self.execution_id) from None
        self._uncounted += len(stored) + MESSAGE_BYTES
        if self._uncounted >= COUNTED_BYTES:
            self.count()

    def count(self) -> None:
        """Adds the bytes that the log has gained to its owner's share."""
        if self._uncounted:
            self._worker.room.count_soon(self._share, self._uncounted)
            self._uncounted = 0

    def _message(self, attempt: int, model: str, chunks: Sequence[Chunk], dropped_params: Sequence[str]) -> bytes:
        limits = self.limits if self._number == 1 else None
        return encode_json(
            {
                "type": "chunks",
                "execution_id": self.execution_id,
                "job_id": self.job_id,
                "agent": self._job.agent_name,
                "number": self._number,
                "attempt": attempt,
                "model": model,
                **({"dropped_params": dropped_params} if dropped_params else {}),
                **({} if limits is None else {"limits": limits.model_dump(mode="json")}),
                "chunks": chunks,
            }
        )


class AttemptStream:
    """The answer of one attempt.

    Attributes:
        answer: the answer so far.
        flight: the attempt, with the timing and the size of its answer.
        author: the signature of the answer (`dialects.rules.provider_state`); None if the client's API made it.
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
        self.answer = Assembly(stream.job_id)
        self._timeouts_s = (idle_timeout_s, total_timeout_s)
        self.flight = flight
        self._stream = stream
        self._begin = begin
        self.author: str | None = None
        self._began_at = monotonic()
        self._held: list[Chunk] = []
        continued_text = stream.text if stream.continues else None
        self._join = None if continued_text is None else Join(continued_text)
        if not stream.continues:
            # Without continuation, the published part is this attempt's, and is assembled only once.
            stream.answer = self.answer

    def receiver(self) -> Streaming:
        """Returns what the provider gets. It is not kept: both would refer to each other, and stay after the call."""
        return Streaming(self._take, *self._timeouts_s, self.answer)

    def called(self) -> None:
        """Starts the clock for the latency of the first token."""
        self._began_at = monotonic()

    @property
    def begun(self) -> bool:
        """Returns True if a part of the answer is published."""
        return self.flight.first_token_ms is not None

    async def whole(self, answer: Answer) -> Answer:
        """Returns the complete answer, with the parts that earlier attempts have published. Raises ClaimLostError."""
        if self._join is None:
            return answer
        if not self.answer.length:
            # The provider did not stream it.
            output = answer.output if isinstance(answer.output, str) else orjson.dumps(answer.output).decode()
            await self.receiver().put([_chunk(0, {"content": output}, answer.finish_reason or "stop")])
        if remaining_text := self._join.end():
            await self._publish([_chunk(0, {"content": remaining_text})])
        self._join = None
        await self._publish(self._held)
        response = {**(answer.response or {}), **self._stream.answer.completion()}
        return replace(answer, output=self._stream.partial_output(), response=response)

    def ended(self) -> InFlight:
        """Returns the attempt with the number of received chunks."""
        if self.begun:
            self.flight = self.flight.model_copy(update={"chunks": self.answer.chunks})
        return self.flight

    async def _take(self, chunks: Sequence[Chunk]) -> None:
        if self._join is not None:
            chunks = [new for chunk in chunks if (new := self._continued(self._join, chunk)) is not None]
            if not chunks:
                return
        elif not self.begun:
            self._held += chunks
            if not self.answer.length:
                return
            chunks = self._held
            self._held = []
        await self._publish(chunks)

    async def _publish(self, chunks: Sequence[Chunk]) -> None:
        if not chunks:
            return
        if self.author is not None:
            chunks = [{**chunks[0], AUTHOR: self.author}, *chunks[1:]]
        if not self.begun:
            first_token_ms = round((monotonic() - self._began_at) * 1000)
            self.flight = self.flight.model_copy(update={"first_token_ms": first_token_ms})
            # Saved before it is published: after a crash, the next worker must know that readers may have a part.
            begin = partial(self._begin, self.flight)
            await self._stream.publish(
                self.flight.number, self.flight.model, chunks, begin, dropped_params=self.flight.dropped_params
            )
        else:
            flight = self.flight
            await self._stream.publish(flight.number, flight.model, chunks, dropped_params=flight.dropped_params)

    def _continued(self, join: Join, chunk: Chunk) -> Chunk | None:
        """Returns the part of a chunk that continues the answer. Holds back its end until the overlap is known."""
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
        # Events of this attempt's provider belong to its own answer, and not to the one that it continues.
        return {**_without_event(chunk), "choices": choices} if choices else None


def _without_event(chunk: Chunk) -> Chunk:
    return {name: value for name, value in chunk.items() if name != "event"}


def _text_of(chunk: Chunk) -> str:
    deltas: list[dict[str, Any]] = [choice.get("delta") or {} for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def _chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> Chunk:
    return {"object": OBJECT, "choices": [{"index": index, "delta": delta, "finish_reason": finish_reason}]}
