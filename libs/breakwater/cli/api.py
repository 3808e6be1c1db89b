"""Options, requests and groups of the commands on the HTTP API; its errors say what to do."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import typer.core

from breakwater.cli import output
from breakwater.cli.connect import run
from breakwater.cli.errors import CliError, ExitCode, unreachable
from breakwater.cli.given import sendable
from breakwater.cli.output import Column
from breakwater.cli.plane import ApiKeyOption, DataOption, JsonOption, PlaneLocation, UrlOption
from breakwater.client import ApiClient, ApiError, ApiRefusedError, ApiUnavailableError, Form, parse

ReasonOption = Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Reason; it is recorded.")]

_EXAMPLE = re.compile(r"^    breakwater .+$", re.MULTILINE)

T = TypeVar("T")
Row = TypeVar("Row")

TIMEOUT_S = 15.0
"""For any response, beyond a wait that the API is asked for."""

SEE_DOCTOR = "`breakwater doctor` shows which servers and services respond."


@dataclass(frozen=True, slots=True)
class Api:
    """The HTTP API as the options of one command name it, and whether its output is for programs."""

    url: str | None
    api_key: str | None
    data: Path | None
    as_json: bool

    def get(self, form: Form[T], path: str, **query: str | int | None) -> tuple[Any, T]:
        """A resource: the JSON document, and the same as a message of `contracts`. Raises CliError.

        Args:
            form: the message.
            path: below `api/v1`.
            query: its parameters, named as the command's options are; None is not sent.
        """
        _check_options(query)
        return self._request(form, lambda client: client.get(path, query, timeout_s=TIMEOUT_S), unanswered=SEE_DOCTOR)

    def text(self, path: str, **query: str | int | None) -> str:
        """A resource that is no JSON, such as CSV; asked for as by `get`. Raises CliError."""
        _check_options(query)
        return self._sent(lambda client: client.text(path, query, timeout_s=TIMEOUT_S), unanswered=SEE_DOCTOR)

    def act(
        self,
        form: Form[T],
        path: str,
        body: Mapping[str, Any],
        *,
        see: str,
        unknown: str = "",
        unanswered: str = "`{}` shows whether it was done; repeating it is safe.",
        timeout_s: float = TIMEOUT_S,
    ) -> tuple[Any, T]:
        """Has an action carried out. Returns its result as `get` does. Raises CliError.

        Args:
            form: the message that holds the result; more than one where it may have changed nothing.
            path: below `api/v1`.
            body: its fields; None is not sent.
            see: the command that shows whether it is done, for `unanswered`.
            unknown: what to do where the body names something that is not there, if not to look at `see`.
            unanswered: what to do where no response came, and perhaps all is done.
            timeout_s: for the response.
        """
        for name, value in body.items():
            sendable(name, value)
        return self._request(
            form,
            lambda client: client.post(path, body, timeout_s=timeout_s),
            unanswered=unanswered.format(see),
            unknown=unknown or f"`{see}` lists them.",
        )

    def act_in_parts(self, form: Form[T], path: str, body: Mapping[str, Any], *, see: str) -> Iterator[T]:
        """Has a long action carried out in parts: each response says where the next request continues."""
        place: dict[str, Any] = {}
        while True:
            part: Any = self.act(form, path, {**body, **place}, see=see)[1]
            yield part
            if part.continue_after is None:
                return
            place = {"after": part.continue_after, "up_to": getattr(part, "up_to", None)}

    def answer(self, answer: tuple[Any, T], show: Callable[[T], None]) -> T:
        """Prints the result of `get` or `act`: as JSON, or for people by `show`. Returns its message."""
        document, message = answer
        if self.as_json:
            output.json_document(document)
        else:
            show(message)
        return message

    def table(
        self,
        form: Form[T],
        path: str,
        columns: Sequence[Column[Row]],
        rows: Callable[[T], Iterable[Row]],
        *,
        empty: str,
        **query: str | int | None,
    ) -> T:
        """Prints a list that `get` returns as a table, with a note if there is more than its `limit`."""

        def show(found: T) -> None:
            output.table(columns, rows(found), empty=empty)
            self.note_more(found, query.get("limit"))

        return self.answer(self.get(form, path, **query), show)

    def note_more(self, found: object, limit: object) -> None:
        """Notes that a list was cut at its limit, if it was."""
        if getattr(found, "more", False):
            output.note(f"(more than these {limit:,}; see --limit)")

    def client(self) -> ApiClient:
        """A client of it, to be closed. Raises CliError: no plane is running."""
        return PlaneLocation(self.data).api_client(self.url, self.api_key)

    def _request(
        self, form: Form[T], send: Callable[[ApiClient], Coroutine[Any, Any, Any]], **remedies: str
    ) -> tuple[Any, T]:
        document = self._sent(send, **remedies)
        with api_errors(**remedies):
            return document, parse(form, document)

    def _sent(self, send: Callable[[ApiClient], Coroutine[Any, Any, T]], **remedies: str) -> T:
        async def sent() -> T:
            async with self.client() as client:
                return await send(client)

        with api_errors(**remedies):
            return run(sent())


def _check_options(query: Mapping[str, Any]) -> None:
    for name, value in query.items():
        sendable(f"--{name}", value)


def api_command(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of every command on the HTTP API; the function gets them as its first argument, an `Api`."""

    def options(
        url: UrlOption = None, api_key: ApiKeyOption = None, data: DataOption = None, as_json: JsonOption = False
    ) -> None: ...

    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    shared = inspect.signature(options, eval_str=True).parameters

    @functools.wraps(function)
    def command(**given: Any) -> None:
        api = Api(**{name: given.pop(name) for name in shared})
        function(api, **given)

    parameters = [*own, *shared.values()]
    vars(command).update(__signature__=inspect.Signature(parameters))
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


@contextmanager
def api_errors(*, unanswered: str, unknown: str = "", again: str = "Try again.") -> Generator[None]:
    """Errors of the client become CliError, with what to do.

    Args:
        unanswered: where a request was sent, and no response came.
        unknown: where the request names something that is not there.
        again: where the API can't do it now.
    """
    try:
        yield
    except ApiError as error:
        raise _cli_error(error, unanswered, unknown, again) from error


def _cli_error(error: ApiError, unanswered: str, unknown: str, again: str) -> CliError:
    if isinstance(error, ApiUnavailableError):
        remedy = unanswered if error.connected else f"Is the request service running? {SEE_DOCTOR}"
        return unreachable(error.message, remedy)
    if not isinstance(error, ApiRefusedError):
        return CliError(error.code, error.message)
    # Where no name was close, the message lists all agents, as the detail does.
    details = "; ".join(
        f"{path}: {text}"
        for path, text in error.details
        if path and text.removeprefix("configured are ") not in error.message
    )
    match error.status:
        case 401:
            return CliError(error.code, error.message, "Pass one with --api-key or BREAKWATER_API_KEY.")
        case 403:
            return CliError(error.code, error.message, "Pass another one with --api-key or BREAKWATER_API_KEY.")
        case 404:
            return CliError(error.code, error.message, details or unknown)
        case 503:
            # An agent whose breakers are all open is no outage of the plane.
            exit_code = ExitCode.FAILED if error.code == "agent_unavailable" else ExitCode.UNREACHABLE
            return CliError(error.code, error.message, details or again, exit_code)
        case 400 | 413 | 422:
            # What is no job is a wrong call, as it is where the job goes straight to NATS.
            return CliError(error.code, error.message, details, ExitCode.USAGE)
        case _:
            return CliError(error.code, error.message, details)


class ListsByItself(typer.core.TyperGroup):
    """Does `list` where no command is named: `breakwater breakers --json` is `breakwater breakers list --json`.

    Its help has the options of `list`, and the first example of each of its commands.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        found = [_EXAMPLE.search(command.help or "") for command in self.commands.values()]
        self.help = "\n\n".join([(self.help or "").strip(), "For example:", *(one[0] for one in found if one)])

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # private to typer
        """Writes the help."""
        shown = copy(self)
        shown.params = [*self.commands["list"].params, *self.params]
        super(ListsByItself, shown).format_help(ctx, formatter)  # pyright: ignore[reportArgumentType]

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]  # the context's class is private to typer
        """Takes the arguments of the group."""
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)
