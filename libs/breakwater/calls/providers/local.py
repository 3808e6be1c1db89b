"""The common parts of programs and callables: their requests, and their reports of usage."""

from __future__ import annotations

import asyncio
import copy
import re
import time
from collections.abc import Iterable
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError

from breakwater.calls.providers.base import Answer, AnswerTimeout, Call, Streaming
from breakwater.calls.rules.classify import ProgramFailure
from breakwater.dialects.rules.chat_chunks import OBJECT
from breakwater.kernel.surrogates import TextJoiner, whole_text
from breakwater.kernel.types import MAX_COUNTED, nano_from_usd
from breakwater.prices.rules.usage import Usage
from breakwater.redaction.rules.redact import KnownSecrets, Redactor, cut
from breakwater.redaction.settings import RedactionRules

MAX_SHOWN = 500
"""The most characters of a program's own text in an error."""
MAX_REDACTED = 8 * 1024
"""The characters of a text that are redacted for it, enough for redaction to see whole values."""
_NANO_USD = Decimal("1e-9")


def request_of(call: Call) -> dict[str, JsonValue]:
    """Returns a new copy of the request that a program reads on its stdin, and a callable takes.

    Every key is always there, except that a job has either `input` or `messages`. A job with `input` also has
    `messages` if its answer is to be corrected: they contain the answer, and what is wrong with it.
    """
    input_fields: dict[str, JsonValue] = {} if call.input is None else {"input": call.input}
    if call.messages or call.input is None:
        input_fields["messages"] = [dict(message) for message in call.messages]
    return copy.deepcopy(
        {
            "execution_id": call.execution_id,
            "job_id": call.job_id,
            "attempt_id": call.attempt_id,
            "agent": call.agent,
            "model": call.model,
            "tenant": call.tenant,
            "task_id": call.task_id,
            "timeout_s": call.timeout_s,
            "traceparent": call.traceparent,
            "stream": call.streaming is not None,
            **input_fields,
            "params": dict(call.params),
        }
    )


class Pieces:
    """The pieces of an answer, which are passed on while the program or the callable still runs.

    Attributes:
        texts: all pieces so far.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._joiner = TextJoiner()
        self._passed_on = 0
        self._changed = asyncio.Event()

    def put(self, text: str) -> None:
        """Adds the next piece."""
        self.texts.append(self._joiner.put(text))
        self._changed.set()

    def end(self) -> None:
        """Ends the answer."""
        if half := self._joiner.end():
            self.texts.append(half)

    async def pass_on(self, call: Call, streaming: Streaming, ended: asyncio.Future[Any]) -> bool:
        """Passes on pieces until the end. Returns False if no piece arrived in time.

        Args:
            call: the call, with the time limit for the first piece.
            streaming: where the pieces go, and the other time limits.
            ended: done when the program or the callable has ended.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + streaming.total_timeout_s
        limit = call.timeout_s
        ended.add_done_callback(lambda _: self._changed.set())
        while True:
            try:
                async with AnswerTimeout(min(ends_at - loop.time(), limit)):
                    await self._changed.wait()
            except TimeoutError:
                return False
            self._changed.clear()
            is_over = ended.done()
            if is_over:
                self.end()
            if new := "".join(self.texts[self._passed_on :]):
                self._passed_on = len(self.texts)
                choice = {"index": 0, "delta": {"content": new}, "finish_reason": None}
                await streaming.put([{**self._head(call), "choices": [choice]}])
                limit = streaming.idle_timeout_s
            if is_over:
                return True

    def _head(self, call: Call) -> dict[str, Any]:
        name = f"chatcmpl-{call.job_id}"
        return {"id": name, "object": OBJECT, "created": int(time.time()), "model": call.model}


def _nano(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise ValueError("must be an amount in USD, such as '0.0123'")  # noqa: TRY004  pydantic reports ValueError
    try:
        # Programs multiply floats, and 0.1 * 3 is 0.30000000000000004, so amounts are rounded.
        amount = Decimal(str(value)).quantize(_NANO_USD, ROUND_HALF_UP)
    except InvalidOperation as error:
        raise ValueError("must be an amount in USD, such as '0.0123'") from error
    return nano_from_usd(amount)


ReportedCost = Annotated[int, BeforeValidator(_nano), Field(ge=0, le=MAX_COUNTED)]
"""Nano-dollars, rounded half up from the USD that a program reports."""
TokenCount = Annotated[int, Field(strict=True, ge=0)]


class ProgramReport(BaseModel):
    """The base of reports of programs and callables. Further fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)


class ReportedUsage(ProgramReport):
    """Reported tokens. Absent figures are unknown."""

    input_tokens: TokenCount | None = None
    output_tokens: TokenCount | None = None
    cached_tokens: TokenCount | None = None
    reasoning_tokens: TokenCount | None = None


class ReportedSpend(ProgramReport):
    """The reported usage and cost of a call."""

    usage: ReportedUsage | None = None
    cost_usd: ReportedCost | None = None

    def tokens(self) -> Usage:
        """Returns the tokens as a `Usage`."""
        usage = self.usage or ReportedUsage()
        return Usage(
            usage.input_tokens,
            usage.output_tokens,
            cached_tokens=usage.cached_tokens,
            reasoning_tokens=usage.reasoning_tokens,
        )

    def answer(self, output: JsonValue, cost_per_call: int | None) -> Answer:
        """Returns the answer of the call. `cost_per_call` (nano-dollars) applies if the call reported no cost."""
        return Answer(output, self.tokens(), cost_per_call if self.cost_usd is None else self.cost_usd)


def failure_of_code(code: int, message: str) -> ProgramFailure:
    """Returns the failure of a program's code, which means the same as an HTTP status."""
    status = code if 400 <= code < 600 else None
    if 400 <= code < 500:
        return ProgramFailure("InvalidRequestError", message, status, "client")
    if code == 501:
        return ProgramFailure("ActionNotSupportedError", message, status, "client")
    if code == 504:
        return ProgramFailure("TimeoutError", message, status, "timeout")
    return ProgramFailure("BackendFailureError", message, status, "server")


class ErrorTexts:
    """Prepares texts of a program or a callable for errors: redacts the whole text, and then cuts it.

    Args:
        redaction: the rules of what to hide.
        secrets: secrets to hide as well, wherever they occur.
    """

    def __init__(self, redaction: RedactionRules, secrets: Iterable[str] = ()) -> None:
        self._secrets = KnownSecrets(secrets, redaction.placeholder)
        self._redactor = Redactor.compile(redaction.model_copy(update={"max_value_length": MAX_REDACTED}))

    def text(self, text: str) -> str:
        """Returns the redacted beginning of a text. A text that is too long is cut between two words."""
        return _beginning(self._redactor.text(self._secrets.hide(whole_text(text))))

    def last_line(self, text: str, *, is_rest: bool) -> str:
        """Returns the redacted beginning of a text's last line. `is_rest`: the beginning of the text is missing."""
        secrets = self._secrets
        if is_rest:
            # The text may begin within a word, and redaction would not recognize a part of a key.
            text = "".join(re.split(r"\s", secrets.hide_in_tail(text), maxsplit=1)[1:])
        return _beginning(self._redactor.text(secrets.hide(text)).strip().rpartition("\n")[2])


def _beginning(text: str) -> str:
    text = text.strip()
    return text if len(text) <= MAX_SHOWN else f"{cut(text, MAX_SHOWN)}…"


def first_problem(error: ValidationError) -> str:
    """Describes the first problem of a report, without its values."""
    problem = error.errors(include_input=False, include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    return f"{place}: {problem['msg']}" if place else problem["msg"]
