"""The cache of embeddings: it has an entry for each input, so that a job only calls for inputs that it lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, cast

from pydantic import JsonValue

from breakwater.calls.assignment import Assignment, JobEnd
from breakwater.calls.providers.base import Answer
from breakwater.calls.settings import CacheRules
from breakwater.calls.store.cache import CachedAnswer
from breakwater.dialects.rules.embeddings import inputs_of, summary
from breakwater.jobs.contract.job import NativeRequest
from breakwater.jobs.rules.ownership import cache_key
from breakwater.services.worker.context import WorkerContext
from breakwater.services.worker.response_cache import best_effort


def keys_of(worker: WorkerContext, job: Assignment) -> list[str]:
    """Returns the cache key of each input of a job. Inputs with the same key have the same embedding."""
    assert job.job.api_request is not None
    params = {"api": "embeddings", "declared": worker.config.dimensions(job.chain[0]), **job.parameters.values}
    return [
        cache_key(
            agent=job.agent_name,
            tenant=job.job.tenant,
            owner=job.owner,
            requested_model=job.chain[0],
            messages=(),
            input=cast(JsonValue, embedding_input),
            params=params,
            schema=None,
        )
        for embedding_input in inputs_of(job.job.api_request.body)
    ]


class EmbeddingsCache:
    """The fleet's cache of embeddings, for one job. Concurrent jobs share no calls."""

    def __init__(self, worker: WorkerContext, job: Assignment, rules: CacheRules) -> None:
        assert job.job.api_request is not None
        self._worker = worker
        self._job = job
        self._rules = rules
        self._body = job.job.api_request.body
        self._inputs = inputs_of(self._body)
        self._keys = keys_of(worker, job)
        self._cached: dict[int, CachedAnswer] = {}

    async def find(self, until: datetime) -> CachedAnswer | None:
        """Returns the answer if all inputs are cached; otherwise keeps the cached ones for `whole`."""
        del until
        cached_entries = await self._worker.outages.retry_while_unavailable(
            lambda: self._worker.cache.get_all(self._keys)
        )
        self._cached = {
            index: cached
            for index, cached in enumerate(cached_entries)
            if cached is not None and cached.response is not None
        }
        if len(self._cached) < len(self._keys):
            return None
        first = self._cached[0]
        model = cast(dict[str, JsonValue], first.response)["model"]
        usage: dict[str, JsonValue] = {"prompt_tokens": 0, "total_tokens": 0}
        response = self._response({"object": "list", "model": model, "usage": usage}, ())
        return replace(first, output=summary(response), response=response)

    def rest(self) -> Assignment:
        """Returns the job with only the inputs that are not cached."""
        if not self._cached:
            return self._job
        missing_inputs = [
            embedding_input for index, embedding_input in enumerate(self._inputs) if index not in self._cached
        ]
        request = NativeRequest(api="embeddings", body={**self._body, "input": cast(JsonValue, missing_inputs)})
        return replace(self._job, job=self._job.job.model_copy(update={"api_request": request}))

    def whole(self, end: JobEnd) -> JobEnd:
        """Adds the cached embeddings to the outcome of the job that `rest` returned."""
        if not self._cached or end.reason is not None or end.response is None:
            return end
        response = self._response(end.response, cast(Sequence[dict[str, Any]], end.response["data"]))
        return replace(end, answer=Answer(summary(response), response=response))

    def _response(self, envelope: Mapping[str, Any], new_items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Merges cached and new embeddings into one answer, in the order of the inputs."""
        remaining_items = iter(new_items)
        data = list[dict[str, Any]]()
        for index in range(len(self._keys)):
            cached = self._cached.get(index)
            item = next(remaining_items) if cached is None else cast(dict[str, Any], cast(Any, cached.response)["item"])
            data.append({**item, "index": index})
        return {**envelope, "data": data}

    async def renew(self) -> None:
        """Does nothing: this cache holds no lead for a job."""

    async def keep(self, end: JobEnd, execution_id: str) -> None:
        """Caches embeddings of the requested model, and none of a fallback."""
        response = end.response
        if end.reason is not None or response is None or end.chosen_model != self._job.chain[0]:
            return
        now = self._job.now()
        model = response.get("model")
        new_entries = {
            self._keys[index]: CachedAnswer(execution_id, end.chosen_model, None, now, {"item": item, "model": model})
            for index, item in enumerate(cast(list[JsonValue], response["data"]))
            if index not in self._cached
        }
        await best_effort(self._worker.cache.put_all(new_entries, self._rules.ttl_s))

    async def leave(self) -> None:
        """Does nothing: this cache holds no lead for a job."""
