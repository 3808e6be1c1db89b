from __future__ import annotations

import asyncio
import errno
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from breakwater.local.provider import SimulatedProvider
from tests.helpers import until

from .provider_kit import COST_NANO, MODEL, chat, post, script

PRICE = {"input_usd_per_mtok": "1", "output_usd_per_mtok": "1"}


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def test_an_answer_ends_before_the_first_stop_and_costs_what_it_says(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider({"models": {MODEL: {"price": PRICE, "answer": "one two three four five six"}}}) as sim:
        whole, until_two, until_four = [
            (await post(session, sim.url, {**chat(), **more}))[1]
            for more in ({}, {"stop": "two"}, {"stop": ["six", "four", "unsaid"]})
        ]
        refused = [(await post(session, sim.url, {**chat(), "stop": wrong}))[0] for wrong in ([], [""], 5, ["a"] * 5)]
    said = [answer["choices"][0]["message"]["content"] for answer in (whole, until_two, until_four)]
    assert said == ["one two three four five six", "one ", "one two three "]
    assert until_two["choices"][0]["finish_reason"] == "stop"
    assert until_two["usage"]["completion_tokens"] < until_four["usage"]["completion_tokens"]
    assert whole["system_fingerprint"] == "fp_simulated"
    assert refused == [400] * 4


async def test_log_probabilities_are_those_of_all_the_text_streamed_or_not(session: aiohttp.ClientSession) -> None:
    asked = {"logprobs": True, "top_logprobs": 2}
    async with SimulatedProvider({"models": {MODEL: {"price": PRICE, "answer": "one two three"}}}) as sim:
        _, whole, _ = await post(session, sim.url, {**chat(), **asked})
        _, plain, _ = await post(session, sim.url, {**chat(), "logprobs": True})
        sent = {**chat(), **asked, "stream": True}
        async with session.post(f"{sim.url}/chat/completions", json=sent) as answer:
            lines = (await answer.text()).split("\n\n")
        refused = [
            (await post(session, sim.url, {**chat(), **asked, "top_logprobs": wrong}))[0] for wrong in (21, True)
        ]
        refused.append((await post(session, sim.url, {**chat(), "top_logprobs": 2}))[0])
    listed = whole["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in listed) == "one two three"
    assert all(one["logprob"] < 0 and bytes(one["bytes"]).decode() == one["token"] for one in listed)
    assert all(len({top["token"] for top in one["top_logprobs"]}) == 2 for one in listed)
    assert [one["top_logprobs"] for one in plain["choices"][0]["logprobs"]["content"]] == [[]] * len(listed)
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["delta"].get("content")]
    assert [one for part in streamed for one in part["content"]] == listed
    assert refused == [400] * 3


async def test_an_answer_has_openais_shape_and_is_in_the_ledger(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script()) as sim:
        status, body, headers = await post(session, sim.url, headers={"X-Client-Request-Id": "e1:1"})
        call = sim.ledger.calls[0]
    assert status == 200
    assert headers["content-type"].startswith("application/json")
    assert headers["x-request-id"].startswith("req_")
    assert (body["object"], body["model"]) == ("chat.completion", MODEL)
    assert body["id"].startswith("chatcmpl-")
    assert abs(body["created"] - time.time()) < 60
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": f"Simulated answer 1 of {MODEL} to: hello",
                "refusal": None,
                "annotations": [],
            },
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 120,
        "completion_tokens": 40,
        "total_tokens": 160,
        "prompt_tokens_details": {"cached_tokens": 20},
    }
    assert (call.number, call.model, call.status, call.client_request_id) == (1, MODEL, 200, "e1:1")
    assert (call.billed, call.delivered, call.cost_nano) == (True, True, COST_NANO)


async def test_usage_can_be_left_out_of_the_answer_and_is_billed_all_the_same(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script(usage={"input_tokens": 10, "output_tokens": 1, "report": False})) as sim:
        _, body, _ = await post(session, sim.url)
        assert "usage" not in body
        assert sim.ledger.totals.cost_nano == 10 * 150 + 600


async def test_tool_calls_are_sent_as_json_text(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script(tool_calls=[{"name": "search", "arguments": {"q": "x"}}])) as sim:
        _, body, _ = await post(session, sim.url, chat(tools=[{"type": "function", "function": {"name": "search"}}]))
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"q":"x"}'}


@pytest.mark.parametrize(
    ("fault", "status", "code", "headers"),
    [
        (
            {"status": 429, "retry_after_s": 2},
            429,
            "rate_limit_exceeded",
            {"retry-after": "2", "x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "2s"},
        ),
        ({"status": 503, "retry_after_s": 0.5}, 503, "service_unavailable", {"retry-after": "0.5"}),
        ({"status": 401}, 401, "invalid_api_key", {}),
        ({"status": 418}, 418, None, {}),
        (
            {"status": 400, "error": {"code": "context_length_exceeded", "message": "Too long."}},
            400,
            "context_length_exceeded",
            {},
        ),
    ],
)
async def test_an_error_status_has_its_body_and_headers_and_is_not_billed(
    session: aiohttp.ClientSession, fault: dict[str, Any], status: int, code: str | None, headers: dict[str, str]
) -> None:
    async with SimulatedProvider(script(fault)) as sim:
        answered, body, received = await post(session, sim.url)
        totals = sim.ledger.totals
    assert (answered, body["error"]["code"]) == (status, code)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert received.items() >= headers.items()
    assert received["x-request-id"]
    assert (totals.calls, totals.by_status, totals.billed_calls, totals.cost_nano) == (1, {str(status): 1}, 0, 0)


async def test_an_error_is_billed_where_the_script_says_so(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script({"status": 500, "billed": True})) as sim:
        await post(session, sim.url)
        assert (sim.ledger.totals.billed_calls, sim.ledger.totals.cost_nano) == (1, COST_NANO)


async def test_a_malformed_answer_is_a_200_that_is_no_json(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script({"kind": "malformed_json"})) as sim:
        async with session.post(f"{sim.url}/chat/completions", json=chat()) as response:
            assert response.status == 200
            with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
                await response.json()
        assert sim.ledger.calls[0].fault == "malformed_json"


async def test_an_empty_body_is_a_200_without_a_byte(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script({"kind": "empty_body"})) as sim:
        async with session.post(f"{sim.url}/chat/completions", json=chat()) as response:
            assert (response.status, await response.read()) == (200, b"")
        assert sim.ledger.totals.billed_calls == 0


async def test_a_truncated_answer_ends_before_its_length(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script({"kind": "truncated"})) as sim:
        async with session.post(f"{sim.url}/chat/completions", json=chat()) as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        call = sim.ledger.calls[0]
        assert (call.status, call.delivered, call.billed) == (200, False, False)


async def test_no_choices_reports_its_usage_and_is_billed(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script({"kind": "no_choices"})) as sim:
        _, body, _ = await post(session, sim.url)
        assert (body["choices"], body["usage"]["total_tokens"]) == ([], 160)
        assert sim.ledger.totals.cost_nano == COST_NANO


async def test_an_error_can_come_with_status_200(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script({"kind": "error_in_200", "error": {"message": "Sorry."}})) as sim:
        status, body, _ = await post(session, sim.url)
        assert (status, body["error"]["message"]) == (200, "Sorry.")
        assert sim.ledger.totals.billed_calls == 0


async def test_a_reset_closes_the_socket_without_an_answer(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script({"kind": "reset", "requests": [1, 1]})) as sim:
        with pytest.raises(aiohttp.ClientOSError) as raised:
            await post(session, sim.url)
        assert raised.value.errno == errno.ECONNRESET
        call = sim.ledger.calls[0]
        assert (call.status, call.fault, call.delivered, call.answered_at) == (None, "reset", False, None)
        assert (await post(session, sim.url))[0] == 200
        assert sim.ledger.totals.by_status == {"none": 1, "200": 1}


@pytest.mark.parametrize(("when_abandoned", "cost"), [(False, 0), (True, COST_NANO)])
async def test_a_hang_that_the_client_gave_up_on_is_billed_only_if_the_script_says_so(
    session: aiohttp.ClientSession, when_abandoned: bool, cost: int
) -> None:
    async with SimulatedProvider(script({"hang_s": 600, "billed_when_abandoned": when_abandoned})) as sim:
        client = asyncio.create_task(post(session, sim.url))
        await until(lambda: sim.ledger.totals.in_progress == 1)
        client.cancel()
        await until(lambda: sim.ledger.totals.calls == 1)
        call = sim.ledger.calls[0]
        assert (call.status, call.fault, call.delivered, call.answered_at) == (None, "hang", False, None)
        assert (call.billed, call.cost_nano) == (bool(cost), cost)


async def test_a_hang_that_the_client_waits_out_is_answered_and_billed(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script({"hang_s": 0.05})) as sim:
        started = time.monotonic()
        status, _, _ = await post(session, sim.url)
        assert (status, sim.ledger.totals.cost_nano) == (200, COST_NANO)
        assert time.monotonic() - started >= 0.049


async def test_an_answer_that_nobody_waits_for_is_still_produced_and_billed(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script(latency_ms=1000)) as sim:
        client = asyncio.create_task(post(session, sim.url))
        await until(lambda: sim.ledger.totals.in_progress == 1)
        client.cancel()
        assert sim.ledger.calls[0].delivered is None
        await until(lambda: sim.ledger.totals.in_progress == 0)
        call = sim.ledger.calls[0]
        assert (call.status, call.billed, call.delivered, call.cost_nano) == (200, True, False, COST_NANO)
        assert call.answered_at is not None


async def test_calls_in_progress_when_it_stops_are_not_billed(session: aiohttp.ClientSession) -> None:
    sim = SimulatedProvider(
        script({"hang_s": 600, "billed_when_abandoned": True, "requests": [1, 1]}, latency_ms=60000)
    )
    await sim.start()
    calls = [asyncio.create_task(post(session, sim.url)) for _ in range(2)]
    await until(lambda: sim.ledger.totals.in_progress == 2)
    async with asyncio.timeout(30):  # less than either call takes
        await sim.stop()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, aiohttp.ClientError) for result in results)
    assert (sim.ledger.totals.calls, sim.ledger.totals.cost_nano) == (0, 0)


async def test_latency_is_waited_and_errors_take_it_too(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script({"requests": [2, 2], "status": 500}, latency_ms=60)) as sim:
        for expected in (200, 500):
            started = time.monotonic()
            assert (await post(session, sim.url))[0] == expected
            assert time.monotonic() - started >= 0.059


async def test_only_the_scripts_keys_are_accepted(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider({**script(), "api_keys": ["sk-a", "sk-b"]}) as sim:
        statuses = [
            (await post(session, sim.url, headers={"Authorization": f"Bearer {key}"}))[0]
            for key in ("sk-a", "sk-b", "sk-c")
        ]
        status, body, _ = await post(session, sim.url)
        async with session.get(f"{sim.url}/models") as response:
            assert response.status == 401
        assert statuses == [200, 200, 401]
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert sim.ledger.totals.by_status == {"200": 2, "401": 2}


async def test_an_unknown_model_is_a_404_and_an_unreadable_request_a_400(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script()) as sim:
        status, body, _ = await post(session, sim.url, chat() | {"model": "no/such"})
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        async with session.post(f"{sim.url}/chat/completions", data=b"{") as response:
            assert (response.status, (await response.json())["error"]["type"]) == (400, "invalid_request_error")
        assert {model: totals.by_status for model, totals in sim.ledger.by_model.items()} == {
            "no/such": {"404": 1},
            "-": {"400": 1},
        }


async def test_a_large_request_is_taken(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script()) as sim:
        assert (await post(session, sim.url, chat("x" * 5_000_000)))[0] == 200


async def test_models_lists_the_scripts_models(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script()) as sim, session.get(f"{sim.url}/models") as response:
        body = await response.json()
    assert (body["object"], [model["id"] for model in body["data"]]) == ("list", [MODEL])


async def test_a_path_that_is_not_served_is_a_404(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script()) as sim:
        for method, url in (("GET", f"{sim.url}/chat/completions"), ("GET", f"{sim.control_url}/nothing")):
            async with session.request(method, url) as response:
                assert (response.status, "There is no GET" in (await response.json())["error"]["message"]) == (
                    404,
                    True,
                )


async def test_the_same_seed_gives_the_same_answers_over_http_in_any_concurrency(
    session: aiohttp.ClientSession,
) -> None:
    content = script({"rate": 0.3, "status": 429}, usage={"output_tokens": [1, 500]})

    async def run(at_once: int) -> list[tuple[int, int, int]]:
        async with SimulatedProvider(content) as sim:
            for _ in range(60 // at_once):
                await asyncio.gather(*[post(session, sim.url) for _ in range(at_once)])
            return sorted((call.number, call.status or 0, call.output_tokens) for call in sim.ledger.calls)

    assert await run(1) == await run(20)


async def test_the_ledger_is_read_over_http(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script({"requests": [2, 2], "status": 503})) as sim:
        for _ in range(3):
            await post(session, sim.url, headers={"X-Client-Request-Id": "e:1"})
        async with session.get(f"{sim.control_url}/ledger") as response:
            report = await response.json()
    assert report["models"][MODEL] == report["totals"]
    assert report["totals"] == {
        "calls": 3,
        "in_progress": 0,
        "by_status": {"200": 2, "503": 1},
        "billed_calls": 2,
        "cost_nano": 2 * COST_NANO,
    }
    assert [(call["number"], call["status"], call["client_request_id"]) for call in report["calls"]] == [
        (1, 200, "e:1"),
        (2, 503, "e:1"),
        (3, 200, "e:1"),
    ]


async def test_a_new_script_starts_numbers_and_clock_again_and_keeps_the_ledger(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script()) as sim:
        await post(session, sim.url)
        new = script({"requests": [1, 1], "status": 503})
        async with session.post(f"{sim.control_url}/script", json=new) as response:
            assert (response.status, await response.json()) == (200, {"models": [MODEL]})
        assert [(await post(session, sim.url))[0] for _ in range(2)] == [503, 200]
        assert [(call.seq, call.number) for call in sim.ledger.calls] == [(1, 1), (2, 1), (3, 2)]


async def test_a_script_with_a_mistake_is_refused_and_the_old_one_stays(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script()) as sim:
        async with session.post(f"{sim.control_url}/script", json=script({"status": 1})) as response:
            assert response.status == 400
            assert f"models.{MODEL}.faults.0.status" in (await response.json())["error"]["message"]
        async with session.post(f"{sim.control_url}/script", data="models: {") as response:
            assert "JSON" in (await response.json())["error"]["message"]
        assert (await post(session, sim.url))[0] == 200


async def test_an_outage_follows_the_clock_which_can_be_restarted(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script({"to_s": 1, "status": 503})) as sim:
        assert (await post(session, sim.url))[0] == 503
        await asyncio.sleep(1)
        assert (await post(session, sim.url))[0] == 200
        async with session.post(f"{sim.control_url}/start") as response:
            assert response.status == 200
        assert (await post(session, sim.url))[0] == 503


async def test_faults_come_before_those_of_the_script_until_they_are_taken_back(session: aiohttp.ClientSession) -> None:
    content = script({"requests": [4, 4], "status": 503})
    content["models"]["openai/other"] = content["models"][MODEL]

    async def inject(faults: Any) -> tuple[int, Any]:
        async with session.post(f"{sim.control_url}/faults", json=faults) as response:
            return response.status, await response.json()

    async with SimulatedProvider(content) as sim:
        assert (await post(session, sim.url))[0] == 200
        own = [{"requests": [4, 4], "status": 503}]
        assert await inject({MODEL: [{"status": 500}]}) == (200, {MODEL: [{"status": 500}, *own], "openai/other": own})
        both = {MODEL: [{"status": 500}, *own], "openai/other": [{"kind": "reset"}, *own]}
        assert await inject({"other": [{"kind": "reset"}]}) == (200, both)
        assert (await post(session, sim.url))[0] == 500
        status, body = await inject({"none": [{"status": 500}], MODEL: []})
        assert (status, f"it has {MODEL}, openai/other" in body["error"]["message"]) == (404, True)
        status, body = await inject({MODEL: [{"status": 5}]})
        assert (status, f"{MODEL}.0.status" in body["error"]["message"]) == (400, True)
        assert await inject({}) == (200, {MODEL: own, "openai/other": own})
        # The numbers go on, unlike with another script.
        assert [(await post(session, sim.url))[0] for _ in range(2)] == [200, 503]


@pytest.mark.parametrize(
    ("host", "taken"),
    [
        ("localhost:1", True),
        ("127.0.0.1", True),
        ("[::1]:80", True),
        ("example.com", False),
        ("127.0.0.1.nip.io", False),
    ],
)
async def test_it_answers_to_names_of_the_loopback_only(session: aiohttp.ClientSession, host: str, taken: bool) -> None:
    async with (
        SimulatedProvider(script()) as sim,
        session.get(f"{sim.control_url}/health", headers={"Host": host}) as controls,
        session.get(f"{sim.url}/models", headers={"Host": host}) as models,
    ):
        assert (controls.status, models.status) == ((200, 200) if taken else (421, 421))
