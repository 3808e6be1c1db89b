"""`openai` and `anthropic` for Python with llama.cpp's own server behind the plane: no double of one.

Each answer is compared with what the server says when it is called directly, and with the plane's records. The server
is started, and killed, from here.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import openai
from anthropic import Anthropic
from checks import PNG, QUESTION, check, raises, run
from llama_server import ALIAS, BATCH, CALL, CONTEXT, END
from openai import OpenAI
from pydantic import BaseModel

PORT = int(os.environ["LLAMA_CPP_PORT"])
RECORDS = urlsplit(os.environ["RECORDS_URL"])
"""The plane's ClickHouse, with a name and password that may read."""
SERVER = f"http://127.0.0.1:{PORT}"
ASKED = [{"role": "user", "content": QUESTION}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find_ship",
        "parameters": {"type": "object", "properties": {"name": {"enum": ["ferry"]}}, "required": ["name"]},
    },
}
CALLS_ONCE: dict[str, Any] = {
    "tools": [TOOL],
    "tool_choice": "required",
    "logit_bias": {CALL: 50, END: 100},
    "max_tokens": 300,
}
"""The server's grammar permits no end before a call, and this model would end, or else call."""
ENDLESS: dict[str, Any] = {"max_tokens": 3900, "logit_bias": {END: -100}}
"""An answer that takes seconds, as the model may not end it."""
LONG_TASK = "Count the ships."
"""The model has over 2,000 tokens to say on it."""
LIMIT_S = 60

BY_RESPONSES, BY_MESSAGES = f"{ALIAS}-responses", f"{ALIAS}-messages"
"""The same model for the plane, behind providers of these APIs, which the server speaks, too."""
beside = ThreadPoolExecutor(1)
plane = OpenAI(max_retries=0)
direct = OpenAI(base_url=f"{SERVER}/v1", api_key="none", max_retries=0)


class Ship(BaseModel):
    knots: int


class Server:
    """llama.cpp's server, in a process of its own."""

    def __init__(self, directory: str) -> None:
        self._command = [sys.executable, Path(__file__).with_name("llama_server.py"), directory, str(PORT)]
        self._log = Path(directory) / "server.log"
        self._start()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        wait_until(self._answers, "the server has not started")

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            raise AssertionError(f"the server has ended: {self._log.read_text()[-2000:]}")
        try:
            return get("health")["status"] == "ok"
        except (OSError, urllib.error.URLError):
            return False

    def kill(self) -> None:
        """As an operating system does that runs out of memory."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def restart(self) -> None:
        """Kills the server, and starts it again at the same port."""
        self.kill()
        self._start()


def get(path: str) -> Any:
    """Asks the server for something that is no part of OpenAI's API."""
    with urllib.request.urlopen(f"{SERVER}/{path}", timeout=10) as answer:
        return json.load(answer)


def generates() -> bool:
    """Returns True while the server works on an answer."""
    return any(slot["is_processing"] for slot in get("slots"))


def begun(call: Callable[..., Any], *args: Any, **more: Any) -> Future[Any]:
    """Makes a call in another thread, and returns when the server works on its answer."""
    wait_until(lambda: not generates(), "the server still works on another one")
    future = beside.submit(call, *args, **more)
    wait_until(generates, "the server has not begun")
    return future


def wait_until(is_so: Callable[[], Any], otherwise: str) -> Any:
    """Returns what is true at last."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if answer := is_so():
            return answer
        time.sleep(0.02)
    raise AssertionError(otherwise)


def rows(sql: str) -> list[dict[str, Any]]:
    """What a query finds in the plane's records."""
    host = f"{RECORDS.hostname}:{RECORDS.port}"
    url = urlunsplit((RECORDS.scheme, host, "/", f"database={RECORDS.path.strip('/')}", ""))
    user = {"X-ClickHouse-User": RECORDS.username or "", "X-ClickHouse-Key": RECORDS.password or ""}
    request = urllib.request.Request(url, f"{sql} FORMAT JSONEachRow".encode(), user)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return [json.loads(line) for line in answer.read().splitlines()]


def record(job: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A job's execution, with its output read, and its attempts."""
    find = partial(rows, f"SELECT * FROM executions FINAL WHERE execution_id = '{job}'")
    [execution] = wait_until(find, f"{job} has no record")
    attempts = rows(f"SELECT * FROM attempts FINAL WHERE execution_id = '{job}' ORDER BY number")
    assert len(attempts) == execution["attempts_count"]
    execution["output"] = None if execution["output"] is None else json.loads(execution["output"])
    return execution, attempts


def recorded_once(job: str, output: Any, finish_reason: str, usage: Any) -> None:
    """Fails unless a job's record is of one call, with this answer."""
    execution, [attempt] = record(job)
    assert (execution["status"], attempt["outcome"]) == ("succeeded", "success")
    assert (execution["output"], attempt["finish_reason"]) == (output, finish_reason)
    assert (attempt["input_tokens"], attempt["output_tokens"]) == (usage.prompt_tokens, usage.completion_tokens)


def request(**more: Any) -> dict[str, Any]:
    """A request that is answered with the same words each time."""
    return {"model": ALIAS, "messages": ASKED, "temperature": 0, "max_tokens": 60, **more}


def ask(client: OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**request(**more))


def ask_plane(**more: Any) -> tuple[str, Any]:
    """Returns the id of the job, and the answer."""
    raw = plane.chat.completions.with_raw_response.create(**request(**more))
    return raw.headers["x-breakwater-execution-id"], raw.parse()


def text_of(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def streamed(client: OpenAI, **more: Any) -> tuple[str | None, list[Any]]:
    """Returns the id of the job, if there is one, and all chunks."""
    with ask(client, stream=True, stream_options={"include_usage": True}, **more) as chunks:
        return chunks.response.headers.get("x-breakwater-execution-id"), list(chunks)


def streamed_end(chunks: list[Any]) -> tuple[str, Any]:
    """Returns the reason of a stream's end, and its usage."""
    [reason] = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    return reason, chunks[-1].usage


def calls_in(message: Any) -> list[tuple[str, str]]:
    assert all(call.id for call in message.tool_calls)
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]


def says_the_same(**more: Any) -> None:
    """Fails unless the plane passes the server's text on, and records it."""
    from_server = ask(direct, **more)
    job, answer = ask_plane(**more)
    assert answer.usage == from_server.usage
    [choice] = answer.choices
    [expected] = from_server.choices
    assert (choice.message.content, choice.finish_reason) == (expected.message.content, expected.finish_reason)
    recorded_once(job, choice.message.content, choice.finish_reason, answer.usage)


@check("chat")
def chat() -> None:
    says_the_same()


@check("stream")
def stream() -> None:
    _, expected = streamed(direct)
    job, chunks = streamed(plane)
    assert text_of(chunks) == text_of(expected)
    assert streamed_end(chunks) == streamed_end(expected)
    assert len(chunks) > 3
    recorded_once(str(job), text_of(chunks), *streamed_end(chunks))


@check("forced tool, and its result")
def tools() -> None:
    expected = ask(direct, **CALLS_ONCE).choices[0]
    job, answer = ask_plane(**CALLS_ONCE)
    [choice] = answer.choices
    assert choice.finish_reason == expected.finish_reason == "tool_calls"
    assert calls_in(choice.message) == calls_in(expected.message)
    [(name, arguments)] = calls_in(choice.message)
    assert (name, json.loads(arguments)) == ("find_ship", {"name": "ferry"})
    execution, _ = record(job)
    [recorded] = execution["output"]["tool_calls"]
    assert recorded["function"] == {"name": name, "arguments": arguments}
    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "at sea"}
    conversation: list[Any] = [*ASKED, choice.message, result]
    says_the_same(messages=conversation, tools=[TOOL])


@check("streamed tool calls")
def streamed_tools() -> None:
    with plane.chat.completions.stream(**request(**CALLS_ONCE)) as events:
        [choice] = events.get_final_completion().choices
    assert calls_in(choice.message) == calls_in(ask(direct, **CALLS_ONCE).choices[0].message)
    assert choice.finish_reason == "tool_calls"


@check("parsed outputs")
def parsed() -> None:
    answer = plane.chat.completions.parse(**request(max_tokens=300, response_format=Ship))
    assert isinstance(answer.choices[0].message.parsed, Ship)


def thoughts_in(message: Any) -> str:
    """The thinking in a message or a delta, which the SDK's types do not know."""
    return getattr(message, "reasoning_content", None) or ""


@check("thinking, and the conversation after it")
def thinking() -> None:
    thinks = {"reasoning_effort": "low"}
    expected = ask(direct, **thinks).choices[0].message
    assert expected.content
    assert thoughts_in(expected)
    _, answer = ask_plane(**thinks)
    message = answer.choices[0].message
    assert (thoughts_in(message), message.content) == (thoughts_in(expected), expected.content)
    _, chunks = streamed(plane, **thinks)
    assert text_of(chunks) == expected.content
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(map(thoughts_in, deltas)) == thoughts_in(expected)
    says_the_same(messages=[*ASKED, message, {"role": "user", "content": "And now?"}])


@check("embeddings: the same numbers, whole and in base64", door="embeddings")
def embeddings() -> None:
    texts = [QUESTION, "At sea."]
    for more in ({}, {"encoding_format": "float"}):
        expected = direct.embeddings.create(model=ALIAS, input=texts, **more)
        raw = plane.embeddings.with_raw_response.create(model=ALIAS, input=texts, **more)
        answer = raw.parse()
        for ours, theirs in zip(answer.data, expected.data, strict=True):
            assert max(abs(a - b) for a, b in zip(ours.embedding, theirs.embedding, strict=True)) < 1e-5
        assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
        _, [attempt] = record(raw.headers["x-breakwater-execution-id"])
        assert attempt["input_tokens"] == answer.usage.prompt_tokens


def refused(call: Callable[..., Any], code: str | None = None, **more: Any) -> str:
    """Fails unless a request is refused as the client's mistake, after one call, which counts against nobody."""
    error = raises(openai.BadRequestError, call, model=ALIAS, **more)
    assert code is None or error.code == code, error
    _, [attempt] = record(error.response.headers["x-breakwater-execution-id"])
    assert not attempt["counts_for_breaker"]
    return error.message


@check("what the server refuses, under status 400 and 500, is called once")
def refusals() -> None:
    create = plane.chat.completions.create
    long = {"role": "user", "content": QUESTION * 500}
    assert str(CONTEXT) in refused(create, "context_length_exceeded", messages=[long])
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    refused(create, messages=[{"role": "user", "content": [image]}])
    refused(create, messages=ASKED, tools=[{"type": "custom", "custom": {"name": "x"}}])


@check("a text that is too long", door="embeddings")
def long_text() -> None:
    assert str(BATCH) in refused(plane.embeddings.create, "context_length_exceeded", input=QUESTION * 100)


@check("a client that goes away ends the generation")
def disconnect() -> None:
    chunks = ask(plane, stream=True, **ENDLESS)
    read = [next(chunks) for _ in range(20)]
    assert generates()
    chunks.close()
    wait_until(lambda: not generates(), "the server still generates")
    ends_cancelled(chunks.response.headers["x-breakwater-execution-id"], text_of(read))


@check("a call that is cancelled ends the generation")
def cancel() -> None:
    job = uuid.uuid4().hex
    headers = {"idempotency-key": job}
    call = begun(raises, openai.ConflictError, ask, plane, extra_headers=headers, **ENDLESS)
    url = f"{os.environ['OPENAI_BASE_URL'].removesuffix('/v1')}/api/v1/jobs/{job}/cancel?wait_s=10"
    key = {"Authorization": f"Bearer {plane.api_key}", "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, b"{}", key), timeout=30)
    wait_until(lambda: not generates(), "the server still generates")
    error = call.result(LIMIT_S)
    assert error.code == "cancelled"
    ends_cancelled(error.response.headers["x-breakwater-execution-id"])


def ends_cancelled(job: str, read: str = "") -> None:
    """Fails unless a job is recorded as cancelled, with what its client has read, at a cost."""
    execution, [attempt] = record(job)
    assert (execution["status"], attempt["outcome"]) == ("cancelled", "cancelled")
    assert (execution["output"] or "").startswith(read)
    assert attempt["cost_basis"] == "estimated"
    assert float(attempt["cost"]) > 0


@check("a server that is killed within a call, and comes back: another attempt")
def killed() -> None:
    more = {**ENDLESS, "max_tokens": 1000}
    expected = ask(direct, **more).choices[0].message.content
    call = begun(ask_plane, **more)
    server.restart()
    job, answer = call.result(LIMIT_S)
    assert answer.choices[0].message.content == expected
    execution, attempts = record(job)
    assert (execution["status"], execution["output"]) == ("succeeded", expected)
    assert [attempt["cause"] for attempt in attempts] == ["first", *["retry"] * (len(attempts) - 1)]
    assert {attempt["error_kind"] for attempt in attempts[:-1]} == {"network"}, attempts
    assert attempts[0]["cost_basis"] == "estimated", attempts
    last = attempts[-1]
    assert (last["outcome"], last["output_tokens"]) == ("success", answer.usage.completion_tokens)


@check("a server that is killed within a stream: an error after the part that came, which is kept")
def killed_in_stream() -> None:
    chunks = ask(plane, stream=True, **ENDLESS)
    read = [next(chunks) for _ in range(20)]
    server.restart()
    error = raises(openai.APIError, read.extend, chunks)
    assert "connection was lost" in error.message
    execution, [attempt] = record(chunks.response.headers["x-breakwater-execution-id"])
    assert execution["output"] == text_of(read)
    assert (attempt["error_kind"], attempt["cost_basis"]) == ("network", "estimated")
    says_the_same()


@check("a server that is killed within a background response: its text goes on", door="Responses")
def killed_in_background() -> None:
    more = {"max_output_tokens": 1000, "temperature": 0}
    events = plane.responses.create(model=ALIAS, input=LONG_TASK, background=True, stream=True, **more)
    deltas: list[str] = []
    for event in events:
        if event.type == "response.output_text.delta":
            deltas.append(event.delta)
            if len(deltas) == 10:
                server.restart()
        elif event.type in ("response.completed", "response.incomplete"):
            assert event.response.output_text == "".join(deltas)
            execution, attempts = record(event.response.id.removeprefix("resp_"))
    assert execution["status"] == "succeeded"
    assert execution["output"] == "".join(deltas)
    assert attempts[0]["error_kind"] == "network"
    assert attempts[-1]["outcome"] == "success"


@check("whole and streamed, translated and in the server's own Responses", door="Responses")
def responses() -> None:
    expected = ask(direct, reasoning_effort="low").choices[0].message
    asked: dict[str, Any] = {"input": QUESTION, "temperature": 0, "max_output_tokens": 60}
    asked |= {"reasoning": {"effort": "low"}}
    for model in (ALIAS, BY_RESPONSES):
        whole = plane.responses.create(model=model, **asked)
        *_, last = plane.responses.create(model=model, **asked, stream=True)
        for answer in (whole, last.response):
            assert answer.output_text == expected.content, model
            assert answer.output[0].content[0].text == thoughts_in(expected), model
        execution, [attempt] = record(whole.id.removeprefix("resp_"))
        assert execution["output"] == expected.content, model
        assert attempt["output_tokens"] == whole.usage.output_tokens == 60, model


@check("whole and streamed, translated and in the server's own Messages", door="Messages")
def messages() -> None:
    expected = ask(direct).choices[0].message.content
    client = Anthropic(max_retries=0)
    for model in (ALIAS, BY_MESSAGES):
        asked: dict[str, Any] = {"model": model, "messages": ASKED, "max_tokens": 60}
        with client.messages.stream(**asked, extra_body={"temperature": 0}) as events:
            streamed_message = events.get_final_message()
        for answer in (client.messages.create(**asked, extra_body={"temperature": 0}), streamed_message):
            assert answer.content[-1].text == expected, model
            assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 60), model


with tempfile.TemporaryDirectory(prefix="breakwater-llama-cpp-") as directory:
    server = Server(directory)
    try:
        run()
    finally:
        server.kill()
