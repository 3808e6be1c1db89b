"""OpenAI's embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import Response

from breakwater.config import Config
from breakwater.dialects.api.pending_request import ParsedRequest
from breakwater.dialects.api.request_handler import ModelRequestHandler
from breakwater.dialects.api.request_options import OPENAI_ERRORS, options_of
from breakwater.dialects.api.streams import Encoder
from breakwater.dialects.contract.openai import EmbeddingsList, EmbeddingsRequest
from breakwater.dialects.rules.embeddings import answer_of
from breakwater.identity.operations import operation
from breakwater.jobs.api.submission import Submission
from breakwater.jobs.contract.job import Job, NativeRequest
from breakwater.kernel.http.parsing import read_command

_PLANE_FIELDS = {"model", "breakwater", "stream", "stream_options"}


class EmbeddingsRoutes:
    """The API of embeddings."""

    def __init__(self, handler: ModelRequestHandler, config: Config) -> None:
        self._handler = handler
        self._config = config

    @operation(
        "POST",
        "/v1/embeddings",
        tag="openai",
        summary="Create embeddings, as at OpenAI",
        description="Each call is a job of an agent whose models are of providers with embeddings (`openai`, `azure`). "
        "The body goes to the provider as it is, and the response is the provider's own object: base64 texts byte for "
        "byte, floats number for number. The job falls back only to models with the same declared `dimensions`: if "
        "`model` is not the agent's own, to those of the agent's fallback models that have them. "
        "Headers as with chat completions.",
        headers={
            "Idempotency-Key": "The job's id: 1 to 128 characters of printable ASCII.",
            "x-breakwater-tenant": "As `breakwater.tenant` in the body, which comes first; so for the other options.",
            "traceparent": "W3C trace context that the job becomes a part of.",
        },
        body=EmbeddingsRequest,
        results={200: ("An embedding of each input, in their order.", EmbeddingsList)},
        errors={
            **OPENAI_ERRORS,
            400: "The request is invalid, or refused by the provider; `param` is the field at fault. Or the answer "
            "would be too large (`input`), or the agent's models have no embeddings or not the same dimensions "
            "(`model`).",
            404: "There is no such agent or model for this key (`model_not_found`).",
            502: "No model gave usable embeddings: `provider_error`, `provider_unreachable`, `worker_lost`.",
        },
    )
    async def create_embeddings(self, request: Request) -> Response:
        """Responds with the embeddings once the job has ended, however long that takes."""
        return await self._handler.respond(request, self._parse)

    async def _parse(self, request: Request, body: bytes) -> ParsedRequest:
        parsed = read_command(body, EmbeddingsRequest)
        agent, model = self._handler.agent_of(request, parsed.model)
        options = options_of(request.headers, parsed.breakwater).model_dump(exclude_unset=True)
        native = parsed.model_dump(mode="json", exclude_unset=True, exclude=_PLANE_FIELDS)
        if model is not None:
            options["model"] = model
            settings = self._config.agents[agent]
            if model != settings.model:
                # The agent's own fallback models may be chat models.
                options.setdefault("fallback_models", self._config.embeds_like(settings, model))
        job = Job(agent=agent, api_request=NativeRequest(api="embeddings", body=native), **options)
        return ParsedRequest(job, _EmbeddingsAnswer(parsed.encoding_format))


@dataclass(frozen=True, slots=True)
class _EmbeddingsAnswer:
    encoding_format: JsonValue

    def body(self, sent: Submission, result: dict[str, Any]) -> bytes:
        """Writes the provider's own list; for a dry run an empty list with the plan."""
        if result["dry_run"]:
            plan = {"object": "list", "data": [], "model": sent.job.agent, "breakwater": result["output"]}
            return orjson.dumps(plan)
        return orjson.dumps(answer_of(result["response"], self.encoding_format))

    def encoder(self, sent: Submission) -> Encoder:
        """Raises NotImplementedError: embeddings are never streamed."""
        raise NotImplementedError

    def fails_in_stream(self, result: dict[str, Any]) -> bool:  # noqa: ARG002
        """Returns False: an error is a response with the error's status."""
        return False
