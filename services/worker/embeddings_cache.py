"""The cache of embeddings: an entry for each input, so that a job calls for those alone that are not known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, cast

from pydantic import JsonValue

from breakwater.calls.assignment import Assignment, Finished
from breakwater.calls.store.cache import Cached
from breakwater.config import CacheRules
from breakwater.dialects.rules.embeddings import inputs_of, summary
from breakwater.jobs.contract.job import NativeRequest
from breakwater.jobs.rules.ownership import cache_key
from services.worker.context import WorkerContext
from services.worker.response_cache import best_effort


def keys_of(worker: WorkerContext, job: Assignment) -> list[str]:
    """Returns a digest for each input of a job: of all that makes two embeddings the same."""
    assert job.job.api_request is not None
    params = {"api": "embeddings", "declared": worker.config.dimensions(job.chain[0]), **job.parameters.values}
    return [
        cache_key(
            agent=job.agent_name,
            tenant=job.job.tenant,
            owner=job.owner,
            requested_model=job.chain[0],
            messages=(),
            input=cast(JsonValue, one),
            params=params,
            schema=None,
        )
        for one in inputs_of(job.job.api_request.body)
    ]


class EmbeddingsCache:
    """The fleet's cache of embeddings, for one job. Concurrent jobs share no calls."""

    def __init__(self, worker: WorkerContext, job: Assignment, rules: CacheRules) -> None:
        assert job.job.api_request is not None
        self._worker, self._job, self._rules = worker, job, rules
        self._body = job.job.api_request.body
        self._inputs = inputs_of(self._body)
        self._keys = keys_of(worker, job)
        self._known: dict[int, Cached] = {}

    async def find(self, until: datetime) -> Cached | None:
        """Returns the answer if all inputs are known; else notes those that are."""
        del until
        found = await self._worker.outages.retry_while_unavailable(lambda: self._worker.cache.get_all(self._keys))
        self._known = {index: one for index, one in enumerate(found) if one is not None and one.response is not None}
        if len(self._known) < len(self._keys):
            return None
        first = self._known[0]
        model = cast(dict[str, JsonValue], first.response)["model"]
        usage: dict[str, JsonValue] = {"prompt_tokens": 0, "total_tokens": 0}
        response = self._response({"object": "list", "model": model, "usage": usage}, ())
        return replace(first, output=summary(response), response=response)

    def rest(self) -> Assignment:
        """Returns the job, with the unknown inputs alone."""
        if not self._known:
            return self._job
        unknown = [one for index, one in enumerate(self._inputs) if index not in self._known]
        request = NativeRequest(api="embeddings", body={**self._body, "input": cast(JsonValue, unknown)})
        return replace(self._job, job=self._job.job.model_copy(update={"api_request": request}))

    def whole(self, finished: Finished) -> Finished:
        """Returns the outcome of a job with the rest of the inputs as that of all."""
        if not self._known or finished.reason is not None or finished.response is None:
            return finished
        response = self._response(finished.response, cast(Sequence[dict[str, Any]], finished.response["data"]))
        return replace(finished, output=summary(response), response=response)

    def _response(self, around: Mapping[str, Any], found: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns an answer with the known embeddings, and between them those that were found."""
        rest, data = iter(found), list[dict[str, Any]]()
        for index in range(len(self._keys)):
            known = self._known.get(index)
            item = next(rest) if known is None else cast(dict[str, Any], cast(Any, known.response)["item"])
            data.append({**item, "index": index})
        return {**around, "data": data}

    async def renew(self) -> None:
        """Holds nothing while the job runs."""

    async def keep(self, finished: Finished, execution_id: str) -> None:
        """Caches the embeddings that the requested model has made; those of a fallback are not its own."""
        response = finished.response
        if finished.reason is not None or response is None or finished.chosen_model != self._job.chain[0]:
            return
        now, model = self._job.now(), response.get("model")
        made = {
            self._keys[index]: Cached(execution_id, finished.chosen_model, None, now, {"item": item, "model": model})
            for index, item in enumerate(cast(list[JsonValue], response["data"]))
            if index not in self._known
        }
        await best_effort(self._worker.cache.put_all(made, self._rules.ttl_s))

    async def leave(self) -> None:
        """Holds nothing."""
