"""Stored responses: read, followed, cancelled, continued and deleted, with the unmodified `openai` package."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from pydantic import SecretStr

from breakwater.config import load_config
from breakwater.identity.api_keys import create_key
from breakwater.kernel.nats import subjects
from tests.flow.kit import PLANE_KEY, model
from tests.helpers import until
from tests.openai_client import openai_client
from tests.server_sources import RunningServer
from tests.services.request.conftest import HttpApi, running, settings_for
from tests.services.worker.harness import WorkerPlane, running_worker

ANSWER = "".join(f"{number:03d} " for number in range(40))
STALLED: dict[str, Any] = {"stream": "stall", "after_chunks": 10, "stall_s": 60}
MODELS = {
    "sim/m": model(answer=ANSWER),
    "sim/slow": model(answer=ANSWER, stream={"tokens_per_s": 40}),
    "sim/stalled": model(STALLED, answer=ANSWER),
    "sim/down": model({"status": 400, "error": {"message": "no"}}),
}
AGENTS: dict[str, Any] = {
    "writer": {"model": "sim/m"},
    "slow": {"model": "sim/slow"},
    "stalled": {"model": "sim/stalled", "stream_idle_timeout_s": 60},
    "failing": {"model": "sim/down", "retry": {"max_attempts": 1}, "breaker": "off"},
    "private": {"model": "sim/m", "persist_prompts": False},
    "silent": {"model": "sim/m", "persist_responses": False},
}
_numbers = count()


@dataclass(frozen=True, slots=True)
class Replicas:
    """A plane with two replicas of the HTTP API.

    Attributes:
        apis: the replicas.
        worker: the plane's.
        restarted: starts a third replica, which has none of the others' memory.
    """

    apis: tuple[HttpApi, HttpApi]
    worker: WorkerPlane
    restarted: Callable[[], Any]

    def sdk(self, replica: int = 0, key: str | None = None) -> Any:
        return openai_client(f"{self.apis[replica].url}/v1", key or self.key("app"), max_retries=0)

    def key(self, name: str) -> str:
        return create_key(self.apis[0].settings.api_keys_file, name, ("submit",))


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def plane(
    module_nats_server: RunningServer, redis_server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Replicas]:
    directory = tmp_path_factory.mktemp("responses")
    started = running_worker(
        directory,
        nats_url=module_nats_server.url,
        redis_url=redis_server.url,
        script={"models": MODELS},
        agents=AGENTS,
        limits={"max_body_bytes": 4_000_000},
    )
    async with started as worker, AsyncExitStack() as stack:
        config = load_config(directory / "breakwater.yaml")
        key = create_key(settings_for(module_nats_server.url, redis_server.url, directory).api_keys_file, "tests")

        async def replica(at: Path = directory) -> HttpApi:
            settings = settings_for(module_nats_server.url, redis_server.url, at).model_copy(
                update={"plane_key": SecretStr(PLANE_KEY)}
            )
            return await stack.enter_async_context(running(settings, config, key))

        yield Replicas((await replica(), await replica()), worker, replica)


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


async def read(stream: Any, until_event: int | None = None) -> list[Any]:
    """The events of a stream, up to the one with a number."""
    events: list[Any] = []
    async for event in stream:
        events.append(event)
        if event.sequence_number == until_event:
            await stream.close()
            break
    return events


async def ended(sdk: Any, response_id: str) -> Any:
    async def get() -> Any:
        found = await sdk.responses.retrieve(response_id)
        return None if found.status in ("queued", "in_progress") else found

    return await until(get, "the response to end")


async def test_a_background_response_is_queued_then_in_progress_then_completed_at_any_replica(plane: Replicas) -> None:
    first, second = plane.sdk(0), plane.sdk(1)
    created = await first.responses.create(model="slow", input="Count.", background=True, metadata={"a": "b"})
    assert (created.status, created.background, created.output) == ("queued", True, [])
    assert created.id.startswith("resp_")

    async def status() -> str:
        return (await second.responses.retrieve(created.id)).status

    await until(lambda: _is(status, "in_progress"), "the worker to take it", brief=True)
    done = await ended(second, created.id)
    assert (done.status, done.output_text, done.metadata) == ("completed", ANSWER, {"a": "b"})
    assert (done.created_at, done.usage.output_tokens) == (created.created_at, 40)


async def _is(status: Callable[[], Any], wanted: str) -> bool:
    return await status() == wanted


async def test_a_stream_is_resumed_at_another_replica_and_read_again_later(plane: Replicas) -> None:
    first, second = plane.sdk(0), plane.sdk(1)
    stream = await first.responses.create(model="slow", input="Count.", background=True, stream=True)
    begun = await read(stream, until_event=12)
    assert [event.type for event in begun[:3]] == ["response.created", "response.queued", "response.in_progress"]
    response_id = begun[0].response.id
    rest = await read(await second.responses.retrieve(response_id, stream=True, starting_after=12))
    events = begun + rest
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (text_of(events), events[-1].type, events[-1].response.output_text) == (ANSWER, "response.completed", ANSWER)
    again = await read(await first.responses.retrieve(response_id, stream=True))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in events]
    assert (await first.responses.retrieve(response_id)).output_text == ANSWER


async def test_starting_after_the_end_is_an_empty_stream_that_ends(plane: Replicas) -> None:
    sdk = plane.sdk()
    created = await sdk.responses.create(model="writer", input="Count.", background=True)
    await ended(sdk, created.id)
    assert await read(await sdk.responses.retrieve(created.id, stream=True, starting_after=10_000)) == []


async def test_a_client_that_leaves_cancels_nothing(plane: Replicas) -> None:
    sdk = plane.sdk()
    stream = await sdk.responses.create(model="slow", input="Count.", background=True, stream=True)
    [created] = await read(stream, until_event=0)
    assert (await ended(sdk, created.response.id)).output_text == ANSWER


async def test_a_failed_response_names_its_error_and_its_stream_ends_with_it(plane: Replicas) -> None:
    sdk = plane.sdk()
    created = await sdk.responses.create(model="failing", input="Count.", background=True)
    failed = await ended(sdk, created.id)
    assert failed.status == "failed"
    assert "no" in failed.error.message
    events = await read(await sdk.responses.retrieve(created.id, stream=True))
    assert (events[-1].type, events[-1].response.error) == ("response.failed", failed.error)


async def test_a_cut_off_answer_is_incomplete(plane: Replicas) -> None:
    sdk = plane.sdk()
    created = await sdk.responses.create(model="writer", input="Count.", background=True, max_output_tokens=5)
    done = await ended(sdk, created.id)
    assert (done.status, done.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_a_cancelled_response_is_cancelled_once_and_for_all(plane: Replicas) -> None:
    first, second = plane.sdk(0), plane.sdk(1)
    stream = await first.responses.create(model="stalled", input="Count.", background=True, stream=True)
    [created] = await read(stream, until_event=0)
    response_id = created.response.id
    cancelled = await second.responses.cancel(response_id)
    assert cancelled.status == "cancelled"
    assert (await first.responses.cancel(response_id)).status == "cancelled"
    assert (await first.responses.retrieve(response_id)).status == "cancelled"
    events = await read(await first.responses.retrieve(response_id, stream=True))
    assert events[-1].response.status == "cancelled"
    done = await first.responses.create(model="writer", input="Count.", background=True)
    await ended(first, done.id)
    operator = plane.sdk(0, create_key(plane.apis[0].settings.api_keys_file, "operator"))
    assert (await operator.responses.cancel(done.id)).status == "completed"
    actions = [action for action in await plane.apis[0].audit() if action["by"] == "operator"]
    assert [(action["outcome"], action["details"].keys()) for action in actions] == [
        (outcome, {"execution_id"}) for outcome in ("begun", "done")
    ]
    whole = await first.responses.create(model="writer", input="Count.")
    with pytest.raises(openai.BadRequestError, match="background"):
        await first.responses.cancel(whole.id)


async def test_a_deleted_response_stays_deleted_after_a_restart(plane: Replicas) -> None:
    sdk = plane.sdk()
    for background in (True, False):
        created = await sdk.responses.create(model="writer", input="Count.", background=background)
        await ended(sdk, created.id)
        await sdk.responses.delete(created.id)
        restarted = await plane.restarted()
        anew = openai_client(f"{restarted.url}/v1", plane.key("app"), max_retries=0)
        for asked in (
            anew.responses.retrieve(created.id),
            anew.responses.retrieve(created.id, stream=True),
            anew.responses.cancel(created.id),
            anew.responses.delete(created.id),
            anew.responses.create(model="writer", input="And?", previous_response_id=created.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await asked
        with pytest.raises(openai.NotFoundError):
            await anew.responses.input_items.list(created.id)
        kept = await plane.worker.messages("RESPONSES", f"bw.responses.{created.id.removeprefix('resp_')}.>")
        assert ANSWER[:20] not in json.dumps(kept)
        assert "Count." not in json.dumps(kept)


async def test_a_response_that_is_deleted_while_it_streams_is_cancelled(plane: Replicas) -> None:
    sdk = plane.sdk()
    stream = await sdk.responses.create(model="stalled", input="Count.", background=True, stream=True)
    [created] = await read(stream, until_event=0)
    await until(lambda: _has_chunks(plane, created.response.id), "the first chunks")
    await sdk.responses.delete(created.response.id)
    result = await plane.worker.result(created.response.id.removeprefix("resp_"))
    assert result["status"] == "cancelled"
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.retrieve(created.response.id)


async def _has_chunks(plane: Replicas, response_id: str) -> bool:
    subject = subjects.kept_chunks(response_id.removeprefix("resp_"))
    return await plane.worker.last("RESPONSES", subject) is not None


async def test_a_conversation_is_continued_from_stored_responses(plane: Replicas) -> None:
    first, second = plane.sdk(0), plane.sdk(1)
    one = await first.responses.create(model="writer", input="One?", instructions="Count.")
    two = await second.responses.create(model="writer", input="Two?", previous_response_id=one.id, background=True)
    await ended(first, two.id)
    parts = [{"role": "user", "content": "Three?"}, {"role": "user", "content": "Now."}]
    three = await first.responses.create(model="writer", input=parts, previous_response_id=two.id)
    assert (two.previous_response_id, three.previous_response_id) == (one.id, two.id)
    [record] = await plane.worker.messages("EVENTS", f"bw.executions.*.{three.id.removeprefix('resp_')}", at_least=1)
    said = [(message["role"], message["content"]) for message in record["messages"]]
    assert said == [
        ("user", "One?"),
        ("assistant", ANSWER),
        ("user", "Two?"),
        ("assistant", ANSWER),
        ("user", "Three?"),
        ("user", "Now."),
    ]
    page = await first.responses.input_items.list(three.id, order="asc")
    listed = [(item.role, item.content[0].text) for item in page.data]
    assert listed == said
    assert len({item.id for item in page.data}) == 6


async def test_input_items_come_in_pages(plane: Replicas) -> None:
    sdk = plane.sdk()
    asked = [{"role": "user", "content": f"{number}"} for number in range(5)]
    created = await sdk.responses.create(model="writer", input=asked)
    listed = [item.content[0].text async for item in sdk.responses.input_items.list(created.id, limit=2)]
    assert listed == ["4", "3", "2", "1", "0"]
    first = await sdk.responses.input_items.list(created.id, limit=2, order="asc")
    assert ([item.content[0].text for item in first.data], first.has_more) == (["0", "1"], True)
    rest = await sdk.responses.input_items.list(created.id, limit=3, order="asc", after=first.data[-1].id)
    assert ([item.content[0].text for item in rest.data], rest.has_more) == (["2", "3", "4"], False)
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_none"}):
        with pytest.raises(openai.BadRequestError):
            await sdk.responses.input_items.list(created.id, **wrong)


async def test_what_is_not_stored_and_what_is_another_keys_is_not_found(plane: Replicas) -> None:
    sdk, other = plane.sdk(), plane.sdk(1, plane.key("other"))
    mine = await sdk.responses.create(model="writer", input="Count.", background=True)
    unstored = await sdk.responses.create(model="writer", input="Count.", store=False)
    assert await plane.worker.messages("RESPONSES", f"bw.responses.{unstored.id.removeprefix('resp_')}.>") == []
    for client, response_id in (
        (other, mine.id),
        (sdk, unstored.id),
        (sdk, "resp_none"),
        (sdk, "none"),
        (sdk, "resp_"),
        (sdk, "resp_a b/c"),
    ):
        for asked in (
            client.responses.retrieve(response_id),
            client.responses.cancel(response_id),
            client.responses.delete(response_id),
            client.responses.create(model="writer", input="And?", previous_response_id=response_id),
        ):
            with pytest.raises(openai.NotFoundError) as unknown:
                await asked
            assert unknown.value.code in ("response_not_found", "previous_response_not_found", "unknown_url")
    reader = openai_client(
        f"{plane.apis[0].url}/v1", create_key(plane.apis[0].settings.api_keys_file, "reader", ("read",)), max_retries=0
    )
    with pytest.raises(openai.PermissionDeniedError):
        await reader.responses.retrieve(mine.id)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True, "store": False}, "background"),
        ({"background": "yes"}, "background"),
        ({"store": 1}, "store"),
        ({"previous_response_id": 7}, "previous_response_id"),
    ],
)
async def test_a_wrong_field_is_refused_by_its_name(plane: Replicas, given: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await plane.sdk().responses.create(model="writer", input="Count.", **given)
    assert refused.value.param == param


async def test_a_wrong_way_to_read_is_refused(plane: Replicas) -> None:
    sdk, api = plane.sdk(), plane.apis[0]
    whole = await sdk.responses.create(model="writer", input="Count.")
    with pytest.raises(openai.BadRequestError, match="background"):
        await sdk.responses.retrieve(whole.id, stream=True)
    for query in ("starting_after=1", "stream=true&starting_after=-1", "stream=true&starting_after=x", "streams=true"):
        answered = await api.ask("GET", f"/v1/responses/{whole.id}?{query}")
        assert answered.status == 400, query
    await sdk.responses.retrieve(whole.id, include=["reasoning.encrypted_content"])


@pytest.mark.parametrize(("agent", "setting"), [("private", "persist_prompts"), ("silent", "persist_responses")])
async def test_what_may_not_be_kept_is_not_continued_and_the_setting_is_named(
    plane: Replicas, agent: str, setting: str
) -> None:
    sdk = plane.sdk()
    created = await sdk.responses.create(model=agent, input="A secret.", instructions="Another.", background=True)
    done = await ended(sdk, created.id)
    assert (done.status, done.output_text) == ("completed", ANSWER)
    kept = json.dumps(await plane.worker.messages("RESPONSES", f"bw.responses.{created.id.removeprefix('resp_')}.>"))
    assert [text for text in ("secret", "Another", ANSWER[:20]) if text in kept] == []
    with pytest.raises(openai.BadRequestError, match=setting) as refused:
        await sdk.responses.create(model="writer", input="And?", previous_response_id=created.id)
    assert refused.value.param == "previous_response_id"


async def test_a_response_without_an_answer_is_not_continued(plane: Replicas) -> None:
    sdk = plane.sdk()
    failed = await sdk.responses.create(model="failing", input="Count.", background=True)
    await ended(sdk, failed.id)
    running_ = await sdk.responses.create(model="stalled", input="Count.", background=True)
    for response, why in ((failed, "dead_lettered"), (running_, "no answer yet")):
        with pytest.raises(openai.BadRequestError, match=why):
            await sdk.responses.create(model="writer", input="And?", previous_response_id=response.id)
    await sdk.responses.cancel(running_.id)


async def test_the_same_request_with_the_same_key_is_the_same_response(plane: Replicas) -> None:
    key = {"Idempotency-Key": f"same-{next(_numbers)}"}
    ask: dict[str, Any] = {"model": "writer", "input": "Count.", "background": True, "extra_headers": key}
    first = await plane.sdk(0).responses.create(**ask)
    second = await plane.sdk(1).responses.create(**ask)
    assert first.id == second.id
    assert first.created_at == second.created_at
    with pytest.raises(openai.ConflictError):
        await plane.sdk(0).responses.create(**{**ask, "input": "Another."})


async def test_a_conversation_that_is_too_large_with_the_request_is_refused(plane: Replicas) -> None:
    sdk = plane.sdk()
    first = await sdk.responses.create(model="writer", input="x" * 2_500_000)
    for background in (False, True):
        with pytest.raises(openai.APIStatusError) as refused:
            await sdk.responses.create(
                model="writer", input="y" * 2_500_000, previous_response_id=first.id, background=background
            )
        assert (refused.value.status_code, refused.value.param) == (413, "previous_response_id")
