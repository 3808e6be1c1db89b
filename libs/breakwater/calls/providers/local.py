"""Common parts of programs and callables: their requests, and their reports of usage."""

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
from breakwater.jobs.rules.ownership import shown
from breakwater.kernel.surrogates import TextJoiner, whole_text
from breakwater.kernel.types import MAX_COUNTED, nano_from_usd
from breakwater.prices.rules.usage import Usage
from breakwater.redaction.rules.redact import KnownSecrets, RedactionRules, Redactor, cut

MAX_SHOWN = 500
"""Characters of a program's own text in an error."""
MAX_REDACTED = 8 * 1024
"""Characters that are looked at for it, and as many as redaction needs beyond."""
_NANO_USD = Decimal("1e-9")


def request_of(call: Call) -> dict[str, JsonValue]:
    """The request that a program reads on its stdin, and a callable is given: its own copy.

    Every key is always there, save that a job has either `input` or `messages`. One with `input` has `messages` as well
    where its answer is to be corrected: they hold that answer, and what was wrong with it.
    """
    asked: dict[str, JsonValue] = {} if call.input is None else {"input": call.input}
    if call.messages or call.input is None:
        asked["messages"] = [dict(message) for message in call.messages]
    return copy.deepcopy(
        {
            "execution_id": call.execution_id,
            "attempt_id": call.attempt_id,
            "agent": call.agent,
            "model": call.model,
            "tenant": call.tenant,
            "task_id": call.task_id,
            "timeout_s": call.timeout_s,
            "traceparent": call.traceparent,
            "stream": call.streaming is not None,
            **asked,
            "params": dict(call.params),
        }
    )


class Pieces:
    """The texts of an answer, passed on while the program or the callable that gives them goes on.

    Attributes:
        texts: all of them.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._joiner = TextJoiner()
        self._passed_on = 0
        self._stirred = asyncio.Event()

    def put(self, text: str) -> None:
        """Takes the next one."""
        self.texts.append(self._joiner.put(text))
        self._stirred.set()

    def end(self) -> None:
        """Notes that no piece follows."""
        if half := self._joiner.end():
            self.texts.append(half)

    async def pass_on(self, call: Call, streaming: Streaming, ended: asyncio.Future[Any]) -> bool:
        """Passes on what comes until the end. False if nothing came in time, so that it did not wait for the end."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + streaming.total_timeout_s
        limit = call.timeout_s
        ended.add_done_callback(lambda _: self._stirred.set())
        while True:
            try:
                async with AnswerTimeout(min(ends_at - loop.time(), limit)):
                    await self._stirred.wait()
            except TimeoutError:
                return False
            self._stirred.clear()
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
        name = f"chatcmpl-{shown(call.execution_id)}"
        return {"id": name, "object": OBJECT, "created": int(time.time()), "model": call.model}


def _nano(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise ValueError("must be an amount in USD, such as '0.0123'")  # noqa: TRY004  pydantic reports ValueError
    try:
        # Programs multiply floats: 0.1 * 3 is 0.30000000000000004, and no worse an answer for it.
        amount = Decimal(str(value)).quantize(_NANO_USD, ROUND_HALF_UP)
    except InvalidOperation as error:
        raise ValueError("must be an amount in USD, such as '0.0123'") from error
    return nano_from_usd(amount)


ReportedCost = Annotated[int, BeforeValidator(_nano), Field(ge=0, le=MAX_COUNTED)]
"""Nano-dollars, from what a program reports in USD; rounded half up to whole ones."""
TokenCount = Annotated[int, Field(strict=True, ge=0)]


class Reported(BaseModel):
    """Base of what others report. Further fields are their own affair."""

    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)


class ReportedUsage(Reported):
    """Tokens; those that are absent are unknown."""

    input_tokens: TokenCount | None = None
    output_tokens: TokenCount | None = None
    cached_tokens: TokenCount | None = None
    reasoning_tokens: TokenCount | None = None


class Spent(Reported):
    """Usage of a call."""

    usage: ReportedUsage | None = None
    cost_usd: ReportedCost | None = None

    def tokens(self) -> Usage:
        """The tokens, as prices are applied to them."""
        used = self.usage or ReportedUsage()
        return Usage(
            used.input_tokens,
            used.output_tokens,
            cached_tokens=used.cached_tokens,
            reasoning_tokens=used.reasoning_tokens,
        )

    def answer(self, output: JsonValue, cost_per_call: int | None) -> Answer:
        """The answer that took this, or the configured cost (nano-dollars) where the call reported none."""
        return Answer(output, self.tokens(), cost_per_call if self.cost_usd is None else self.cost_usd)


def failure_of_code(code: int, message: str) -> ProgramFailure:
    """Meaning of a code that a program answers with: the same as in HTTP, so that no other list has to be learned."""
    status = code if 400 <= code < 600 else None
    if 400 <= code < 500:
        return ProgramFailure("InvalidRequestError", message, status, "client")
    if code == 501:
        return ProgramFailure("ActionNotSupportedError", message, status, "client")
    if code == 504:
        return ProgramFailure("TimeoutError", message, status, "timeout")
    return ProgramFailure("BackendFailureError", message, status, "server")


class Shown:
    """Texts of a program or a callable as errors may show them: redacted as a whole, and cut then.

    Args:
        redaction: what is hidden.
        secrets: what is hidden, too, anywhere.
    """

    def __init__(self, redaction: RedactionRules, secrets: Iterable[str] = ()) -> None:
        self._secrets = KnownSecrets(secrets, redaction.placeholder)
        self._redactor = Redactor.compile(redaction.model_copy(update={"max_value_length": MAX_REDACTED}))

    def text(self, text: str) -> str:
        """The redacted beginning of a text; one that is too long ends between two words."""
        return _beginning(self._redactor.text(self._secrets.hidden(whole_text(text))))

    def last_line(self, text: str, *, is_rest: bool) -> str:
        """The beginning of its last line. `is_rest`: its own beginning is missing."""
        known = self._secrets
        if is_rest:
            # It may begin within a word, and redaction would not know a part of a key for one.
            text = "".join(re.split(r"\s", known.hidden_in_rest(text), maxsplit=1)[1:])
        return _beginning(self._redactor.text(known.hidden(text)).strip().rpartition("\n")[2])


def _beginning(text: str) -> str:
    text = text.strip()
    return text if len(text) <= MAX_SHOWN else f"{cut(text, MAX_SHOWN)}…"


def first_problem(error: ValidationError) -> str:
    """The first problem of a report, without the values."""
    problem = error.errors(include_input=False, include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    return f"{place}: {problem['msg']}" if place else problem["msg"]
