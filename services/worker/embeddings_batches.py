"""Jobs for embeddings with more inputs than their model accepts in one call: several calls, and one answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from pydantic import JsonValue

from breakwater.calls.assignment import Assignment, Checkpoint, Deferred, JobEnd
from breakwater.calls.providers.base import Answer
from breakwater.calls.store.cache import CachedAnswer
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
from breakwater.services.worker.admission import Gates
from breakwater.services.worker.attempts import Attempts
from breakwater.services.worker.context import WorkerContext
from breakwater.services.worker.embeddings_cache import keys_of
from breakwater.services.worker.progress import ProgressReporter
from breakwater.services.worker.recovery import recover
from breakwater.services.worker.response_cache import best_effort

RETENTION_S = 3_600
"""The time for which vectors are kept beyond a job's deadline, as an outage may extend it."""


@dataclass(frozen=True, slots=True)
class _Vector:
    """A vector, and the attempt that made it."""

    item: dict[str, Any]
    attempt_id: str


class EmbeddingsBatches:
    """Runs one job in several calls. Redis keeps their vectors until the job ends, so that no crash repeats a call."""

    def __init__(
        self, worker: WorkerContext, job: Assignment, size: int, progress: ProgressReporter, gates: Gates
    ) -> None:
        """Takes the maximum number of inputs of one call as `size`."""
        assert job.job.api_request is not None
        self._worker = worker
        self._job = job
        self._size = size
        self._progress = progress
        self._gates = gates
        self._body = job.job.api_request.body
        self._inputs = inputs_of(self._body)
        occurrences = Counter[str]()
        self._keys: list[str] = []
        for key in keys_of(worker, job):
            # Each of several equal inputs has its own key: the vector of one call does not answer a later input.
            occurrences[key] += 1
            self._keys.append(f"{job.execution_id}/{key}/{occurrences[key]}")
        self._vectors: dict[int, _Vector] = {}
        self._envelope: Mapping[str, Any] = {"object": "list"}
        self._usages: list[Any] = []

    async def run(self, checkpoint: Checkpoint, *, resumed: bool) -> JobEnd | Deferred:
        """Runs until the job is finished, or must wait for so long that it is parked. Raises ClaimLostError."""
        if resumed:
            checkpoint = await self._resume(checkpoint)
        while missing := [index for index in range(len(self._inputs)) if index not in self._vectors]:
            batch = missing[: self._size]
            batch_job = self._job_for(batch)
            end = await Attempts(self._worker, batch_job, checkpoint, self._progress, self._gates).run(resumed=resumed)
            if isinstance(end, Deferred) or end.reason is not None or end.response is None:
                return end
            checkpoint = end.checkpoint
            resumed = False
            try:
                self._take(batch, end.response, checkpoint.attempts[-1].attempt_id)
            except EmbeddingsTooLargeError as large:
                error = ErrorInfo(kind="client", class_="AnswerTooLargeError", message=str(large))
                return JobEnd(checkpoint, None, "error", error)
            except BrokenEmbeddingsError as broken:
                error = ErrorInfo(kind="server", class_="BrokenAnswerError", message=str(broken))
                return JobEnd(checkpoint, None, "error", error)
            if len(self._vectors) == len(self._inputs):
                response = self._response()
                return replace(end, answer=Answer(summary(response), response=response))
            await self._keep(batch, checkpoint)
            checkpoint = checkpoint.model_copy(update={"cause": "batch"})
        return self._answered(checkpoint)

    def _job_for(self, batch: Sequence[int]) -> Assignment:
        inputs = cast(JsonValue, [self._inputs[index] for index in batch])
        request = NativeRequest(api="embeddings", body={**self._body, "input": inputs})
        return replace(self._job, job=self._job.job.model_copy(update={"api_request": request}))

    def _take(self, batch: Sequence[int], response: Mapping[str, Any], attempt_id: str) -> None:
        """Adds the vectors of a batch. Raises BrokenEmbeddingsError if they do not fit the others, or a result."""
        for index, item in zip(batch, response["data"], strict=True):
            self._vectors[index] = _Vector(item, attempt_id)
        self._envelope = {name: value for name, value in response.items() if name not in {"data", "usage"}}
        self._usages.append(response.get("usage"))
        check_together(vector.item for vector in self._vectors.values())

    def _response(self) -> dict[str, Any]:
        usage = usage_of_all(self._usages)
        data = [{**self._vectors[index].item, "index": index} for index in range(len(self._inputs))]
        return {**self._envelope, "data": data, **({} if usage is None else {"usage": usage})}

    # A crash

    async def _keep(self, batch: Sequence[int], checkpoint: Checkpoint) -> None:
        ttl_s = max(0, int((checkpoint.deadline - self._job.now()).total_seconds())) + RETENTION_S
        now = self._job.now()
        model = checkpoint.attempts[-1].model
        vectors = {
            self._keys[index]: CachedAnswer(
                self._vectors[index].attempt_id, model, None, now, {"item": self._vectors[index].item}
            )
            for index in batch
        }
        await best_effort(self._worker.cache.put_all(vectors, ttl_s))

    async def _resume(self, checkpoint: Checkpoint) -> Checkpoint:
        """Loads the cached vectors, and returns the checkpoint to continue from."""
        cached_vectors = await self._worker.outages.retry_while_unavailable(
            partial(self._worker.cache.get_all, self._keys)
        )
        for index, cached in enumerate(cached_vectors):
            if cached is not None and cached.response is not None:
                self._vectors[index] = _Vector(cast(dict[str, Any], cached.response["item"]), cached.execution_id)
        if not self._vectors:
            return checkpoint
        recovered = await recover(self._worker, self._job, checkpoint)
        by_id = {attempt.attempt_id: attempt for attempt in recovered.checkpoint.attempts}
        cached_ids = dict.fromkeys(vector.attempt_id for vector in self._vectors.values())
        for attempt in filter(None, map(by_id.get, cached_ids)):
            tokens = attempt.input_tokens
            self._usages.append({"prompt_tokens": tokens, "total_tokens": tokens})
        last = recovered.checkpoint.attempts[-1:]
        if recovered.lost is None and last and last[0].attempt_id in cached_ids:
            # The answer of the last call is cached, and the next call has not begun.
            return recovered.checkpoint.model_copy(update={"cause": "batch"})
        return checkpoint

    def _answered(self, checkpoint: Checkpoint) -> JobEnd:
        """Returns the outcome of a job whose vectors were all cached."""
        response = self._response()
        answer = Answer(summary(response), response=response)
        return JobEnd(checkpoint, answer, chosen_model=checkpoint.attempts[-1].model)
