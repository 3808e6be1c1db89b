"""The sources of a job's answer: the cache, one chain of models, or several calls for embeddings."""

from __future__ import annotations

from breakwater.calls.assignment import Assignment, Checkpoint, Deferred, JobEnd
from breakwater.calls.providers.base import Answer
from breakwater.dialects.rules.embeddings import inputs_of
from breakwater.jobs.held_claims import JobCancelledError
from breakwater.services.worker.admission import Gates
from breakwater.services.worker.attempts import Attempts
from breakwater.services.worker.context import WorkerContext
from breakwater.services.worker.embeddings_batches import EmbeddingsBatches
from breakwater.services.worker.embeddings_cache import EmbeddingsCache
from breakwater.services.worker.progress import ProgressReporter
from breakwater.services.worker.response_cache import ResponseCache
from breakwater.services.worker.results import cancelled

AnyCache = ResponseCache | EmbeddingsCache


def cache_for(worker: WorkerContext, job: Assignment) -> AnyCache | None:
    """Returns the cache of a job's answer; None if its agent or the job itself wants none."""
    rules = job.agent.cache
    if rules is None or job.job.skip_cache:
        return None
    kind = EmbeddingsCache if job.job.api == "embeddings" else ResponseCache
    return kind(worker, job, rules)


async def find_answer(
    worker: WorkerContext,
    job: Assignment,
    checkpoint: Checkpoint,
    cache: AnyCache | None,
    progress: ProgressReporter,
    gates: Gates,
    *,
    resumed: bool,
) -> JobEnd | Deferred:
    """Finds a cached answer or calls models. `resumed` is true for a job that may have made calls before."""
    cancel = job.lease.cancel
    if cancel.cancellation is not None and not resumed:
        return cancelled(checkpoint, cancel.cancellation)
    await progress.report("dispatched")
    # A job that has made calls must report them, so it takes no cached answer.
    if cache is not None and not resumed and not checkpoint.may_have_called:
        try:
            with cancel.interruptible():
                cached = await cache.find(checkpoint.deadline)
        except JobCancelledError as stop:
            return cancelled(checkpoint, stop.cancellation)
        if cached is not None:
            answer = Answer(
                cached.output, response=cached.response, finish_reason=cached.finish_reason, choices=cached.choices
            )
            return JobEnd(checkpoint, answer, chosen_model=cached.chosen_model, cached_from=cached.execution_id)
    model_job = cache.rest() if isinstance(cache, EmbeddingsCache) else job
    if model_job.job.api == "embeddings" and (size := _batch_size(worker, model_job)) is not None:
        batches = EmbeddingsBatches(worker, model_job, size, progress, gates)
        outcome = await batches.run(checkpoint, resumed=resumed)
    else:
        outcome = await Attempts(worker, model_job, checkpoint, progress, gates).run(resumed=resumed)
    if isinstance(cache, EmbeddingsCache) and isinstance(outcome, JobEnd):
        outcome = cache.whole(outcome)
    return outcome


def _batch_size(worker: WorkerContext, job: Assignment) -> int | None:
    """Returns how many inputs one call of a job for embeddings may have; None if one call takes all of them."""
    assert job.job.api_request is not None
    size = worker.config.max_inputs(job.agent, job.chain)
    return None if size is None or len(inputs_of(job.job.api_request.body)) <= size else size
