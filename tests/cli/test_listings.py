"""Each list of a view on the command line: its columns, its row, as JSON, on a narrow terminal, and without a row."""

from __future__ import annotations

from breakwater.kernel.commands.errors import ExitCode
from tests.cli.api_stub import Stub, problem
from tests.cli.conftest import Run, Terminal, in_thread
from tests.columns import texts
from tests.listings import LISTINGS, Listing
from tests.tables import each_row

each_listing = each_row("listing", LISTINGS, ids=str)


def answer(stub: Stub, listing: Listing, *, empty: bool = False) -> None:
    stub.asked.clear()
    stub.queries.clear()
    stub.answers[f"GET {listing.path}"] = (200, listing.nothing if empty else listing.document)


@each_listing
async def test_a_list_has_the_columns_and_the_row_of_its_view(run: Run, stub: Stub, listing: Listing) -> None:
    answer(stub, listing)
    ran = await in_thread(run, *listing.command)
    assert (ran.code, ran.err) == (ExitCode.OK, "")
    heading, row, *_ = ran.out.splitlines()
    shown = [column for column in listing.columns if column.terminal]
    assert (
        heading.split() == " ".join(column.title for column in sorted(shown, key=lambda column: column.below)).split()
    )
    for text in texts(shown, listing.row).values():
        assert text.strip() in row
    assert (stub.queries, [asked for asked, _ in stub.asked]) == ([listing.query], [f"GET {listing.path}"])


@each_listing
async def test_json_is_what_the_api_returned(run: Run, stub: Stub, listing: Listing) -> None:
    answer(stub, listing)
    ran = await in_thread(run, *listing.command, "--json")
    assert (ran.code, ran.json, ran.err) == (ExitCode.OK, listing.document, "")


@each_row("listing", [listing for listing in LISTINGS if listing.command[-1] == "list"], ids=str)
async def test_a_group_alone_lists(run: Run, stub: Stub, listing: Listing) -> None:
    answer(stub, listing)
    alone, listed = await in_thread(run, *listing.command[:-1]), await in_thread(run, *listing.command)
    assert (alone.code, alone.out) == (ExitCode.OK, listed.out)


@each_listing
async def test_that_there_is_nothing_is_a_remark_and_no_output(run: Run, stub: Stub, listing: Listing) -> None:
    answer(stub, listing, empty=True)
    ran = await in_thread(run, *listing.command)
    assert (ran.code, ran.out, ran.err) == (ExitCode.OK, "", f"{listing.none[0]}\n")


@each_listing
async def test_a_list_fits_the_terminal_and_keeps_its_long_text(
    run: Run, stub: Stub, terminal: Terminal, listing: Listing
) -> None:
    answer(stub, listing)
    long = [column.title for column in listing.columns if column.below and column.terminal]
    for width in (60, 80, 140):
        terminal(width)
        ran = await in_thread(run, *listing.command)
        assert max(len(line.rstrip()) for line in ran.out.splitlines()) <= width
        for title in long:
            assert texts(listing.columns, listing.row)[title] in ran.out
        assert bool(ran.err) == ("omitted" in ran.err), "nothing else is said"


@each_listing
async def test_what_the_api_refuses_or_cannot_say_is_an_error(run: Run, stub: Stub, listing: Listing) -> None:
    ran = await in_thread(run, *listing.command, "--api-key", "bw_no_no", "--json")
    assert (ran.code, ran.error["code"]) == (ExitCode.FAILED, "unauthorized")
    stub.answers[f"GET {listing.path}"] = (503, problem("unavailable", "Redis is away"))
    ran = await in_thread(run, *listing.command)
    assert (ran.code, ran.out) == (ExitCode.UNREACHABLE, "")
    assert "Redis is away" in ran.err
    for status, something_else in ((200, "<html>"), (200, {"else": 1}), (200, [{"agent_id": "x"}]), (502, "bad")):
        stub.answers[f"GET {listing.path}"] = (status, something_else)
        ran = await in_thread(run, *listing.command)
        assert (ran.code, ran.out, "check the URL" in ran.err) == (ExitCode.FAILED, "", True)
    stub.answers[f"GET {listing.path}"] = (200, None)
    ran = await in_thread(run, *listing.command)
    assert (ran.code, ran.out, "no response from" in ran.err) == (ExitCode.UNREACHABLE, "", True)


NOWHERE = ("--url", "http://127.0.0.1:9")


@each_row(
    ("arguments", "said"),
    [
        (("breakers", "rest"), "Did you mean 'reset'"),
        (("breakers", "reset", "writer"), "Missing argument 'MODEL'"),
        (("breakers", "isolate", "writer", "\udcff", *NOWHERE), "model is not UTF-8 text"),
        (("breakers", "--nope"), "No such option"),
        (("budgets", "rais"), "Did you mean 'raise'"),
        (("budgets", "raise", "global/daily"), "Missing argument 'LIMIT'"),
        (("budgets", "raise", "global/daily", "50"), "Missing option '--reason'"),
        (("budgets", "raise", "\udcff", "50", "--reason", "x", *NOWHERE), "budget is not UTF-8 text"),
        (("budgets", "--agent", "\udcff", *NOWHERE), "--agent is not UTF-8 text"),
        (("alerts", "acknowledge"), "No such command 'acknowledge'"),
        (("alerts", "ack"), "Missing argument 'INCIDENT'"),
        (("alerts", "test"), "Missing argument 'CHANNEL'"),
        (("alerts", "ack", "\udcff", *NOWHERE), "incident_id is not UTF-8 text"),
        (("alerts", "--limit", "0"), "--limit"),
        (("alerts", "replay", "--dead-letter", "0"), "--dead-letter"),
        (("dlq", "replay"), "no dead letters were selected"),
        (("dlq", "replay", "17", "--all"), "name dead letters, or select them by --reason, --agent, --all and --since"),
        (("dlq", "replay", "17", "--since", "2h"), "name dead letters, or select them"),
        (("dlq", "replay", "--since", "2h"), "no dead letters were selected"),
        (("dlq", "replay", "0"), "should be greater than or equal to 1"),
        (("dlq", "replay", "--all", "--since", "soon"), "--since 'soon' is neither a duration nor a time"),
        (("dlq", "list", "--since", "soon"), "--since 'soon' is neither a duration nor a time"),
        (("dlq", "list", "--limit", "1001"), "should be less than or equal to 1000"),
        (("dlq", "show", "x"), "should be a valid integer"),
        (("costs", "--by", "colour"), "'colour'"),
        (("costs", "--by", "tag:"), "tag:NAME"),
        (("costs", "--csv", "--json"), "exclude each other"),
        (("executions", "--tree"), "--tree needs the id of an execution"),
    ],
)
async def test_a_wrong_call_is_reported_before_anything_is_asked(
    run: Run, stub: Stub, arguments: tuple[str, ...], said: str
) -> None:
    ran = await in_thread(run, *arguments)
    assert (ran.code, ran.out) == (ExitCode.USAGE, "")
    assert said in ran.err
    assert stub.asked == []
