"""Jobs for embeddings with more inputs than their model takes in a call: several calls, and one answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from pydantic import JsonValue

from breakwater.calls.assignment import Assignment, Checkpoint, Deferred, Finished
from breakwater.calls.store.cache import Cached
from breakwater.dialects.rules.embeddings import (
    BrokenEmbeddingsError,
    EmbeddingsTooLargeError,
    check_together,
    inputs_of,
    summary,
    usage_of_all,
)
from breakwater.jobs.contract.execution import ErrorInfo
from breakwater.jobs.contract.job import NativeRequest
from services.worker.admission import Gates
from services.worker.attempts import Attempts
from services.worker.context import WorkerContext
from services.worker.embeddings_cache import keys_of
from services.worker.progress import ProgressReporter
from services.worker.recovery import recover
from services.worker.response_cache import best_effort

KEPT_S = 3_600
"""Time for which vectors are kept beyond a job's deadline, which outages extend."""


@dataclass(frozen=True, slots=True)
class _Vector:
    """A vector, and the attempt that made it."""

    item: dict[str, Any]
    attempt_id: str


class EmbeddingsBatches:
    """Runs one job in several calls. What they gave is kept in Redis until the end, so that no crash repeats them."""

    def __init__(
        self, worker: WorkerContext, job: Assignment, size: int, progress: ProgressReporter, gates: Gates
    ) -> None:
        """Takes the most inputs of one call as `size`."""
        assert job.job.api_request is not None
        self._worker, self._job, self._size = worker, job, size
        self._progress, self._gates = progress, gates
        self._body = job.job.api_request.body
        self._inputs = inputs_of(self._body)
        occurrences = Counter[str]()
        self._keys: list[str] = []
        for key in keys_of(worker, job):
            # Equal inputs have keys of their own: what one call gave is no answer of a later one.
            occurrences[key] += 1
            self._keys.append(f"{job.execution_id}/{key}/{occurrences[key]}")
        self._made: dict[int, _Vector] = {}
        self._around: Mapping[str, Any] = {"object": "list"}
        self._usages: list[Any] = []

    async def run(self, checkpoint: Checkpoint, *, resumed: bool) -> Finished | Deferred:
        """Runs until the job is finished, or must wait for so long that it is parked. Raises ClaimLostError."""
        if resumed:
            checkpoint = await self._resume(checkpoint)
        while missing := [index for index in range(len(self._inputs)) if index not in self._made]:
            batch = missing[: self._size]
            asked = self._asking_for(batch)
            end = await Attempts(self._worker, asked, checkpoint, self._progress, self._gates).run(resumed=resumed)
            if isinstance(end, Deferred) or end.reason is not None or end.response is None:
                return end
            checkpoint, resumed = end.checkpoint, False
            try:
                self._take(batch, end.response, checkpoint.attempts[-1].attempt_id)
            except EmbeddingsTooLargeError as large:
                error = ErrorInfo(kind="client", class_="AnswerTooLargeError", message=str(large))
                return Finished(checkpoint, None, None, "error", error)
            except BrokenEmbeddingsError as broken:
                error = ErrorInfo(kind="server", class_="BrokenAnswerError", message=str(broken))
                return Finished(checkpoint, None, None, "error", error)
            if len(self._made) == len(self._inputs):
                response = self._response()
                return replace(end, output=summary(response), response=response)
            await self._keep(batch, checkpoint)
            checkpoint = checkpoint.model_copy(update={"cause": "batch"})
        return self._answered(checkpoint)

    def _asking_for(self, batch: Sequence[int]) -> Assignment:
        inputs = cast(JsonValue, [self._inputs[index] for index in batch])
        request = NativeRequest(api="embeddings", body={**self._body, "input": inputs})
        return replace(self._job, job=self._job.job.model_copy(update={"api_request": request}))

    def _take(self, batch: Sequence[int], response: Mapping[str, Any], attempt_id: str) -> None:
        """Raises BrokenEmbeddingsError where the vectors of all batches do not fit together, or into a result."""
        for index, item in zip(batch, response["data"], strict=True):
            self._made[index] = _Vector(item, attempt_id)
        self._around = {name: value for name, value in response.items() if name not in {"data", "usage"}}
        self._usages.append(response.get("usage"))
        check_together(vector.item for vector in self._made.values())

    def _response(self) -> dict[str, Any]:
        usage = usage_of_all(self._usages)
        data = [{**self._made[index].item, "index": index} for index in range(len(self._inputs))]
        return {**self._around, "data": data, **({} if usage is None else {"usage": usage})}

    # A crash

    async def _keep(self, batch: Sequence[int], checkpoint: Checkpoint) -> None:
        ttl_s = max(0, int((checkpoint.deadline - self._job.now()).total_seconds())) + KEPT_S
        now, model = self._job.now(), checkpoint.attempts[-1].model
        vectors = {
            self._keys[index]: Cached(self._made[index].attempt_id, model, None, now, {"item": self._made[index].item})
            for index in batch
        }
        await best_effort(self._worker.cache.put_all(vectors, ttl_s))

    async def _resume(self, checkpoint: Checkpoint) -> Checkpoint:
        """Takes what was kept, and returns the checkpoint to go on from."""
        kept = await self._worker.outages.retry_while_unavailable(partial(self._worker.cache.get_all, self._keys))
        for index, one in enumerate(kept):
            if one is not None and one.response is not None:
                self._made[index] = _Vector(cast(dict[str, Any], one.response["item"]), one.execution_id)
        if not self._made:
            return checkpoint
        found = await recover(self._worker, self._job, checkpoint)
        by_id = {attempt.attempt_id: attempt for attempt in found.checkpoint.attempts}
        of_kept = dict.fromkeys(vector.attempt_id for vector in self._made.values())
        for attempt in filter(None, map(by_id.get, of_kept)):
            tokens = attempt.input_tokens
            self._usages.append({"prompt_tokens": tokens, "total_tokens": tokens})
        last = found.checkpoint.attempts[-1:]
        if found.lost is None and last and last[0].attempt_id in of_kept:
            # The answer of the last call is kept, and the next call has not begun.
            return found.checkpoint.model_copy(update={"cause": "batch"})
        return checkpoint

    def _answered(self, checkpoint: Checkpoint) -> Finished:
        """Returns the outcome of a job all of whose vectors were kept."""
        response = self._response()
        return Finished(checkpoint, summary(response), checkpoint.attempts[-1].model, None, None, response)
