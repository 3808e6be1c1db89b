"""Responses to requests that wait for their jobs: an answer or an error, with headers that describe the job."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast
from urllib.parse import quote

from starlette.responses import Response

from breakwater.calls.rules.parameters import own_params
from breakwater.config import Config
from breakwater.dialects.api import is_messages
from breakwater.dialects.api.errors import error_response
from breakwater.dialects.api.pending_request import PendingRequest
from breakwater.dialects.api.request_options import OPTION_PREFIX
from breakwater.dialects.rules.chat_completions import error_of, with_error_as_answer
from breakwater.dialects.rules.native_requests import chat_form, dropped_fields, params_of
from breakwater.dialects.rules.rate_limit_headers import anthropic_headers, openai_headers
from breakwater.jobs.api.submission import Submission
from breakwater.kernel.http.problems import RequestError, unavailable
from breakwater.kernel.validation import FieldError


@dataclass(frozen=True, slots=True)
class ResponseWriter:
    """Writes responses to requests by a config."""

    config: Config

    def response(self, pending: PendingRequest, result: dict[str, Any]) -> Response:
        """Returns the answer of a decided job, or its error."""
        headers = self.result_headers(pending, result)
        result = with_error_as_answer(result)
        if result["status"] == "succeeded" and (why := result.get("encrypted")) is not None:
            message = f"the text of the answer was {why}"
            problem = RequestError(503, "undecryptable", message, headers=headers)
            return error_response(problem, pending.path)
        if result["status"] == "succeeded":
            return Response(pending.answer.body(pending.sent, result), 200, headers, "application/json")
        error = error_of(result)
        sent = pending.sent
        # The same idempotency key gets the same refusal again, however long the client waits.
        may_retry = error.may_retry and sent.id_generated
        wait_s = error.retry_after_s
        if wait_s is not None and not sent.id_generated:
            wait_s = max(0.0, wait_s - _age_s(result))
        param = error.param
        request = sent.job.api_request
        if param is not None and request is not None:
            param = chat_form(request).in_body(param)
        details = [] if param is None else [FieldError(path=param, message=error.message)]
        problem = RequestError(
            error.status, error.code, error.message, details, headers, retry_after_s=wait_s, may_retry=may_retry
        )
        return error_response(problem, pending.path)

    def result_headers(self, pending: PendingRequest, result: dict[str, Any]) -> dict[str, str]:
        """Returns the headers with the known figures of the execution, and with what rate limits leave."""
        sent = pending.sent
        model = cast(str | None, result.get("chosen_model"))
        error = cast(dict[str, Any] | None, result.get("error"))
        refused_params = next((attempt.get("dropped_params") or () for attempt in reversed(result["attempts"])), ())
        dropped = () if model is None else self._dropped_fields(sent, model, refused_params)
        values = {
            "execution-id": sent.execution_id,
            "model": model,
            "attempts": str(result["attempts_count"]),
            "cost-usd": result.get("total_cost"),
            "cache": "hit" if result["cache_hit"] else "miss",
            "error": None if error is None else error["class"],
        }
        return option_headers(values, dropped) | _limit_headers(pending, result.get("limits"))

    def _dropped_fields(self, sent: Submission, model: str, refused_params: Collection[str]) -> tuple[str, ...]:
        """Returns the fields of a request that a model was not sent: it refuses them, or has no counterpart."""
        agent = self.config.agents[sent.job.agent]
        provider = self.config.provider_name(agent, model)
        settings = None if provider is None else self.config.providers.get(provider)
        request = sent.job.api_request
        form = None if request is None else chat_form(request)
        if refused_params:
            own = own_params(params_of(sent.job), () if request is None else request.body)
            refused_names = own.intersection(refused_params)
        else:
            refused_names = frozenset[str]()
        left_out = refused_names if form is None else {form.names.get(name, name) for name in refused_names}
        if settings is None or (request is not None and self.config.speaks(provider, request.api, model)):
            return tuple(sorted(left_out))
        left_out = left_out.union(settings.params_left_out(params_of(sent.job)))
        if request is not None:
            left_out = left_out | dropped_fields(request) - ({"thinking"} if settings.takes_thinking else set())
        return tuple(sorted(left_out))

    def begun_headers(self, pending: PendingRequest, first_message: Mapping[str, Any] | None) -> dict[str, str]:
        """Returns the headers of a stream that begins before its job is decided.

        Args:
            pending: the request.
            first_message: the first message of the answer's chunks; None if there is none yet.
        """
        sent = pending.sent
        if first_message is None:
            return option_headers({"execution-id": sent.execution_id}, ())
        model = str(first_message["model"])
        values = {
            "execution-id": sent.execution_id,
            "model": model,
            "attempts": str(first_message["attempt"]),
            "cache": "miss",
        }
        dropped = self._dropped_fields(sent, model, first_message.get("dropped_params") or ())
        return option_headers(values, dropped) | _limit_headers(pending, first_message.get("limits"))


def _limit_headers(pending: PendingRequest, limits: Mapping[str, Any] | None) -> dict[str, str]:
    if limits is None:
        return {}
    headers_of = anthropic_headers if is_messages(pending.path) else openai_headers
    return headers_of(limits, datetime.now(UTC))


def _age_s(result: Mapping[str, Any]) -> float:
    """Returns the seconds since the end of a job, which a request with the same id may ask for much later."""
    return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(result["completed_at"])).total_seconds())


def option_headers(values: Mapping[str, str | None], dropped: Iterable[str]) -> dict[str, str]:
    """Returns values as `x-breakwater-…` headers, without those that are None."""
    values = {**values, "dropped-params": ", ".join(dropped) or None}
    if (model := values.get("model")) is not None:
        values["model"] = quote(model, safe="/:@+ ")
    return {f"{OPTION_PREFIX}{name}": value for name, value in values.items() if value is not None}


def stopping_error(execution_id: str) -> RequestError:
    """Returns 503 for a client whose process stops. If its SDK repeats the request, it attaches to the job."""
    problem = unavailable("unavailable", "this process stops, and the job goes on; send the same request again")
    problem.headers["x-breakwater-execution-id"] = execution_id
    return problem
