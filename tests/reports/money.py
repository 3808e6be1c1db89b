"""What an answer reports of its use, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator

from tests.reports.case import COST, PRICE, SOME, Case, among, bad, each, good, least, ways
from tests.reports.wire import (
    READ,
    TEXT,
    USED,
    Body,
    Reply,
    block,
    call,
    chat,
    chunk,
    events,
    message,
    said,
    started,
    stream,
    used,
)


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _totals()
    yield from _zeros()
    yield from _cached()
    yield from _highest()
    yield from _written()
    yield from _own()
    yield from _tiers()
    yield from _read()
    yield from _lies()
    yield from _begun()


def _begun() -> Iterator[Case]:
    row = "only an answer that had begun, or a connection that broke, may have been billed"
    beside = {**chat().body, "choices": [], "error": {"message": "upstream failed"}}
    yield Case(row, "begun-not", [Reply(beside)], bad(2, "server", cost=among(0, COST)))
    begun = {"calls": 1, "fallback": 0, "status": "dead_lettered", "kind": "server", "cost": SOME, "basis": "estimated"}
    begun |= {"text": "The ferry ", "foreign": None}
    late = stream(chunk(content="The ferry "), {"error": {"message": "upstream failed"}}, done=False)
    yield Case(row, "begun-error", [late], begun, stream=True)
    late = Reply((started(), *block("The ferry "), {"type": "error", "error": {"type": "api_error", "message": "No"}}))
    yield Case(row, "begun-error-anthropic", [late], begun, "anthropic", stream=True)
    cut = stream(chunk(content="The ferry "), cut=True, done=False)
    yield Case(row, "begun-cut", [cut], {**begun, "kind": "network"}, stream=True)
    cut = Reply(chat().data()[:100], headers={"Content-Length": "500"}, cut=True)
    yield Case(row, "cut", [cut], bad(2, among("server", "network"), True, cost=SOME, basis="estimated"))


def _totals() -> Iterator[Case]:
    row = "what total_tokens has beyond the sum is output"
    thought = {"completion_tokens_details": {"reasoning_tokens": 1000}}
    for name, usage, cost in (
        ("reasoning-beside", {**USED, "total_tokens": 1150, **thought}, 2_200_000),
        ("reasoning-unnamed", {**USED, "total_tokens": 1150}, 2_200_000),
        (
            "reasoning-within",
            {"prompt_tokens": 100, "completion_tokens": 1050, "total_tokens": 1150, **thought},
            2_200_000,
        ),
        ("reasoning-none", {**USED, "total_tokens": 150}, COST),
        ("reasoning-no-total", USED, COST),
        ("reasoning-total-null", {**USED, "total_tokens": None}, COST),
        (
            "reasoning-and-cached",
            {**USED, "total_tokens": 1150, "prompt_tokens_details": {"cached_tokens": 80}},
            2_160_000,
        ),
    ):
        yield from each(row, name, good(cost=cost), plain=chat(usage=usage), streamed=said(usage=usage))


def _zeros() -> Iterator[Case]:
    row = "usage of zeros is unknown, and unknown is never zero"
    text = "The ferry leaves at nine, and again at noon, at three and at six; it takes an hour. " * 20
    unknown = good(text, SOME, basis="estimated")
    zeros, read = dict.fromkeys((*USED, "total_tokens"), 0), dict.fromkeys(READ, 0)
    for name, usage in (
        ("zeros", zeros),
        ("output-zero", {**USED, "completion_tokens": 0}),
        ("null", None),
        ("empty", {}),
    ):
        last = [used({})] if usage == {} else [] if usage is None else [used(usage)]
        streamed = stream(chunk(content=text), chunk(finish="stop"), *last)
        yield from each(row, f"usage-{name}", unknown, plain=chat(text, usage), streamed=streamed)
    yield from each(
        row,
        "usage-zeros",
        unknown,
        anthropic=message(text, usage=read),
        anthropic_streamed=events(*block(text), start=read, delta={"output_tokens": 0}),
    )
    yield Case(
        row,
        "usage-zeros-tool",
        [chat(None, zeros, "tool_calls", tool_calls=[call('{"text": "' + "word " * 400 + '"}')])],
        {"status": "succeeded", "calls": 1, "cost": SOME, "basis": "estimated"},
    )


def _cached() -> Iterator[Case]:
    row = "what was read from a cache, whatever it is called"
    prompt = {"prompt_tokens": 1000, "completion_tokens": 50, "total_tokens": 1050}
    for name, more in (
        ("deepseek", {"prompt_cache_hit_tokens": 900, "prompt_cache_miss_tokens": 100}),
        ("openai", {"prompt_tokens_details": {"cached_tokens": 900}}),
        ("moonshot", {"cached_tokens": 900}),
        ("both", {"prompt_cache_hit_tokens": 900, "prompt_tokens_details": {"cached_tokens": 900}}),
        ("null-details", {"prompt_cache_hit_tokens": 900, "prompt_tokens_details": None}),
    ):
        usage = prompt | more
        expected = good(cost=650_000, tokens=(1000, 50, 900))
        yield from each(row, f"cached-{name}", expected, plain=chat(usage=usage), streamed=said(usage=usage))
    read = {"input_tokens": 100, "cache_read_input_tokens": 900, "output_tokens": 50}
    yield from each(
        row,
        "cached",
        good(cost=650_000, tokens=(1000, 50, 900)),
        anthropic=message(usage=read),
        anthropic_streamed=events(*block(), start={**read, "output_tokens": 1}),
    )


def _highest() -> Iterator[Case]:
    row = "the highest seen of each field of usage"
    start = {"input_tokens": 1500, "output_tokens": 1}
    for name, first, last, cost in (
        ("input-zero", start, {"input_tokens": 0, "output_tokens": 12}, 1_524_000),
        ("input-again", start, {"input_tokens": 1500, "output_tokens": 12}, 1_524_000),
        ("input-late", {"input_tokens": 0, "output_tokens": 0}, {"input_tokens": 1500, "output_tokens": 12}, 1_524_000),
        ("input-null", start, {"input_tokens": None, "output_tokens": 12}, 1_524_000),
        (
            "cached-zero",
            {**start, "cache_read_input_tokens": 1000},
            {"input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 12},
            2_024_000,
        ),
    ):
        yield Case(
            row, f"highest-{name}", [events(*block(), start=first, delta=last)], good(cost=cost), "anthropic", True
        )
    twice = Reply(
        (
            started(start),
            *block(),
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 30}},
            {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 12}},
            {"type": "message_stop"},
        )
    )
    yield Case(row, "highest-output", [twice], good(cost=1_560_000), "anthropic", stream=True)
    grows = [chunk({"prompt_tokens": 100, "completion_tokens": n}, content=TEXT[n - 1]) for n in range(1, 10)]
    yield Case(row, "highest-chunk-each", [stream(*grows, chunk(USED, "stop"))], good(TEXT[:9]), stream=True)
    for name, last in (
        (
            "choice",
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "usage": USED}]},
        ),
        ("groq", {**chunk(finish="stop"), "x_groq": {"id": "req_1", "usage": USED}}),
    ):
        yield Case(row, f"usage-in-{name}", [stream(chunk(content=TEXT), last)], good(), stream=True)
    for name, last in (("zero", {"prompt_tokens": 0, "completion_tokens": 12}), ("null", None), ("empty", {})):
        reply = stream(
            chunk({"prompt_tokens": 1500, "completion_tokens": 12}, content=TEXT),
            chunk(last, "stop"),
            *([used(last)] if last else []),
        )
        yield Case(row, f"highest-chunk-{name}", [reply], good(cost=1_524_000), stream=True)


LISTED = "claude-sonnet-4-5"
"""In the price list: $3 and $15; for writing to the cache $3.75, and $6 for an hour."""


def _written() -> Iterator[Case]:
    row = "cache writes at the price of how long they live"
    hour = {"ephemeral_5m_input_tokens": 10_000, "ephemeral_1h_input_tokens": 40_000}
    usage = {"input_tokens": 100, "output_tokens": 50, "cache_creation_input_tokens": 50_000, "cache_creation": hour}
    exact = 100 * 3_000 + 50 * 15_000 + 10_000 * 3_750 + 40_000 * 6_000
    short = {**usage, "cache_creation": {"ephemeral_5m_input_tokens": 50_000, "ephemeral_1h_input_tokens": 0}}
    for name, given, cost in (("hour", usage, exact), ("minutes", short, 100 * 3_000 + 50 * 15_000 + 50_000 * 3_750)):
        for way, reply, how in ways(
            {"anthropic": message(usage=given), "anthropic-streamed": events(*block(), start=given, delta=READ)}
        ):
            listed = {"name": f"{LISTED}-written-{name}-{way}", "provider": "anthropic"}
            yield Case(row, f"written-{name}-{way}", [reply], good(cost=cost), model=listed, **how)


def _own() -> Iterator[Case]:
    row = "prices of one's own: of long inputs, of audio, of an hour in the cache, of a tier of service"
    usage = {"prompt_tokens": 1000, "completion_tokens": 50}
    cached = {**usage, "prompt_tokens_details": {"cached_tokens": 900}}
    dear = {"input_usd_per_mtok": "2", "output_usd_per_mtok": "4", "cached_input_usd_per_mtok": "1"}
    long: Body = {"price": {**PRICE, "tiers": [{"above_tokens": 500, **dear}]}}
    for name, given, cost in (
        ("above", usage, 2_200_000),
        ("above-cached", cached, 1_300_000),
        ("below", {**usage, "prompt_tokens": 500}, 600_000),
    ):
        yield Case(row, f"own-{name}", [chat(usage=given)], good(cost=cost), model=long)
        yield Case(row, f"own-{name}-streamed", [said(usage=given)], good(cost=cost), stream=True, model=long)
    read = {"input_tokens": 100, "cache_read_input_tokens": 900, "output_tokens": 50}
    yield Case(row, "own-above-anthropic", [message(usage=read)], good(cost=1_300_000), "anthropic", model=long)
    heard: Body = {"price": {**PRICE, "audio_input_usd_per_mtok": "10", "audio_output_usd_per_mtok": "20"}}
    usage = {**usage, "prompt_tokens_details": {"audio_tokens": 900}}
    yield Case(row, "own-audio-heard", [chat(usage=usage)], good(cost=9_200_000), model=heard)
    usage = {**USED, "completion_tokens_details": {"audio_tokens": 40}}
    yield Case(row, "own-audio-spoken", [chat(usage=usage)], good(cost=920_000), model=heard)
    kept: Body = {"price": {**PRICE, "cache_write_usd_per_mtok": "1.25", "cache_write_1h_usd_per_mtok": "2"}}
    hour = {"ephemeral_5m_input_tokens": 10_000, "ephemeral_1h_input_tokens": 40_000}
    usage = {**READ, "cache_creation_input_tokens": 50_000, "cache_creation": hour}
    yield Case(row, "own-hour", [message(usage=usage)], good(cost=92_700_000), "anthropic", model=kept)
    tiers: Body = {"price": {**PRICE, "service_tiers": {"priority": dear}}}
    for tier, cost, basis in (
        ("priority", 400_000, "billed"),
        ("default", COST, "billed"),
        ("flex", SOME, "estimated"),
    ):
        reply = chat(more={"service_tier": tier})
        yield Case(row, f"own-tier-{tier}", [reply], good(cost=cost, basis=basis), model=tiers)


def _tiers() -> Iterator[Case]:
    row = "another tier of service has another price, or the cost is estimated"
    for tier in ("priority", "flex"):
        known, beside = good(cost=SOME, basis="estimated", problem=SOME), {"service_tier": tier}
        last = stream(chunk(content=TEXT), chunk(finish="stop"), used(USED, **beside))
        yield from each(row, f"tier-{tier}", known, plain=chat(more=beside), streamed=last)
        first = stream(chunk(content=TEXT) | beside, chunk(finish="stop"), used())
        yield Case(row, f"tier-{tier}-first-chunk", [first], known, stream=True)
    read = {**READ, "service_tier": "priority"}
    yield from each(
        row,
        "tier-priority",
        good(cost=SOME, basis="estimated", problem=SOME),
        anthropic=message(usage=read),
        anthropic_streamed=events(*block(), start=read),
    )
    for tier in ("default", "standard", None):
        yield Case(row, f"tier-{tier}", [chat(more={"service_tier": tier})], good(problem=None))
    yield Case(
        row, "tier-standard-anthropic", [message(usage={**READ, "service_tier": "standard"})], good(), "anthropic"
    )
    row = "audio tokens at a price of their own, or estimated"
    heard = {"prompt_tokens": 1000, "completion_tokens": 50, "prompt_tokens_details": {"audio_tokens": 900}}
    spoken = {**USED, "completion_tokens_details": {"audio_tokens": 40}}
    for name, usage, cost in (("heard", heard, 1_100_000), ("spoken", spoken, COST)):
        expected = good(cost=least(cost), basis="estimated")
        yield from each(row, f"audio-{name}", expected, plain=chat(usage=usage), streamed=said(usage=usage))
    silent = {**USED, "prompt_tokens_details": {"audio_tokens": 0, "cached_tokens": 0}}
    yield from each(row, "audio-none", good(problem=None), plain=chat(usage=silent), streamed=said(usage=silent))


def _read() -> Iterator[Case]:
    row = "usage as strings of digits is read"
    digits, read = (
        {name: str(count) for name, count in USED.items()},
        {name: str(count) for name, count in READ.items()},
    )
    yield from each(
        row,
        "digits",
        good(tokens=(100, 50, None)),
        plain=chat(usage=digits),
        streamed=said(usage=digits),
    )
    yield from each(
        row,
        "digits",
        good(),
        anthropic=message(usage=read),
        anthropic_streamed=events(*block(), start={**read, "output_tokens": "1"}, delta={"output_tokens": "50"}),
    )
    whole = {name: float(count) for name, count in USED.items()}
    yield from each(row, "digits-float", good(), plain=chat(usage=whole), streamed=said(usage=whole))
    nested = {**digits, "total_tokens": "150", "prompt_tokens_details": {"cached_tokens": "80"}}
    yield Case(row, "digits-nested", [chat(usage=nested)], good(cost=160_000))


def _lies() -> Iterator[Case]:
    row = "figures that contradict are read at their highest, estimated and counted"
    for name, usage, cost in (
        ("negative", {**USED, "completion_tokens": -5}, 100_001),
        ("negative-prompt", {**USED, "prompt_tokens": -1}, 100_001),
        ("cached-above", {**USED, "prompt_tokens_details": {"cached_tokens": 2000}}, COST),
        ("sum-above", {**USED, "total_tokens": 120}, COST),
        (
            "thought-above",
            {**USED, "total_tokens": 150, "completion_tokens_details": {"reasoning_tokens": 1000}},
            2_100_000,
        ),
    ):
        expected = good(cost=least(cost), basis="estimated", problem=SOME)
        yield from each(row, f"lies-{name}", expected, plain=chat(usage=usage), streamed=said(usage=usage))
    for name, usage in (
        ("negative", {**READ, "output_tokens": -5}),
        ("negative-cached", {**READ, "cache_read_input_tokens": -5}),
    ):
        expected = good(cost=least(100_001), basis="estimated", problem=SOME)
        yield Case(row, f"lies-{name}-anthropic", [message(usage=usage)], expected, "anthropic")
