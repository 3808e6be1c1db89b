"""Shared parts of the commands on the HTTP API: options, requests, errors with remedies, and groups."""

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

from breakwater.client import ApiClient, ApiError, ApiRefusedError, ApiUnavailableError, Form, parse
from breakwater.kernel.commands import output
from breakwater.kernel.commands.connect import run
from breakwater.kernel.commands.errors import CliError, ExitCode, unreachable
from breakwater.kernel.commands.output import Column
from breakwater.kernel.commands.text_input import check_sendable
from breakwater.local.plane import ApiKeyOption, DataOption, JsonOption, PlaneLocation, UrlOption

ReasonOption = Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Reason; it is recorded.")]

_EXAMPLE = re.compile(r"^    breakwater .+$", re.MULTILINE)

T = TypeVar("T")
Row = TypeVar("Row")

TIMEOUT_S = 15.0
"""Seconds to wait for any response, on top of a wait that the API is asked for."""

SEE_DOCTOR = "`breakwater doctor` shows which servers and services respond."


@dataclass(frozen=True, slots=True)
class Api:
    """The HTTP API that a command's options select, and the form of the command's output."""

    url: str | None
    api_key: str | None
    data: Path | None
    as_json: bool

    def get(self, form: Form[T], path: str, **query: str | int | None) -> tuple[Any, T]:
        """Reads a resource. Returns its JSON document, and the same as a message of `contracts`. Raises CliError.

        Args:
            form: class of the message.
            path: path below `api/v1`.
            query: parameters, named like the command's options; those that are None are not sent.
        """
        _check_options(query)
        return self._request(form, lambda client: client.get(path, query, timeout_s=TIMEOUT_S), unanswered=SEE_DOCTOR)

    def text(self, path: str, **query: str | int | None) -> str:
        """Reads a resource that is not JSON, such as CSV. Takes the arguments of `get`. Raises CliError."""
        _check_options(query)
        return self._send(lambda client: client.text(path, query, timeout_s=TIMEOUT_S), unanswered=SEE_DOCTOR)

    def act(
        self,
        form: Form[T],
        path: str,
        body: Mapping[str, Any],
        *,
        see: str,
        method: str = "POST",
        unknown: str = "",
        unanswered: str = "`{}` shows whether it was done; repeating it is safe.",
        timeout_s: float = TIMEOUT_S,
    ) -> tuple[Any, T]:
        """Requests an action. Returns its result as `get` does. Raises CliError.

        Args:
            form: class of the result; several if the action may have changed nothing.
            path: path below `api/v1`.
            body: fields of the request; those that are None are not sent.
            see: command that shows whether the action was done; it replaces `{}` in `unanswered`.
            method: the HTTP method.
            unknown: remedy if the body names something that does not exist; by default to look at `see`.
            unanswered: remedy if no response came, although the action may have been done.
            timeout_s: seconds to wait for the response.
        """
        for name, value in body.items():
            check_sendable(name, value)
        return self._request(
            form,
            lambda client: client.post(path, body, method=method, timeout_s=timeout_s),
            unanswered=unanswered.format(see),
            unknown=unknown or f"`{see}` lists them.",
        )

    def act_in_parts(self, form: Form[T], path: str, body: Mapping[str, Any], *, see: str) -> Iterator[T]:
        """Requests a long action in parts: each response says where the next request continues."""
        position: dict[str, Any] = {}
        while True:
            part: Any = self.act(form, path, {**body, **position}, see=see)[1]
            yield part
            if part.continue_after is None:
                return
            position = {"after": part.continue_after, "up_to": getattr(part, "up_to", None)}

    def show_result(self, result: tuple[Any, T], show: Callable[[T], None]) -> T:
        """Prints a result of `get` or `act`, as JSON or for people by `show`. Returns the result's message."""
        document, message = result
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
        """Reads a list and prints it as a table, with a note if the list is longer than its `limit`."""

        def show(document: T) -> None:
            output.table(columns, rows(document), empty=empty)
            self.note_more(document, query.get("limit"))

        return self.show_result(self.get(form, path, **query), show)

    def note_more(self, document: object, limit: object) -> None:
        """Prints a note if a list was cut at its limit."""
        if getattr(document, "more", False):
            output.note(f"(more than these {limit:,}; see --limit)")

    @property
    def plane(self) -> PlaneLocation:
        """The plane that the options select."""
        return PlaneLocation(self.data)

    def uses_http(self, server_variable: str) -> bool:
        """Returns whether the command uses the HTTP API, and not the server that the variable names."""
        return self.plane.uses_http(server_variable, self.url, self.api_key)

    def ask(self, question: Callable[[ApiClient], Coroutine[Any, Any, T]]) -> T:
        """Sends the reading requests of a question over one client. Raises CliError."""
        return self._send(question, unanswered=SEE_DOCTOR)

    def client(self) -> ApiClient:
        """Returns a client of the API, which the caller closes. Raises CliError if no plane is running."""
        return self.plane.api_client(self.url, self.api_key)

    def _request(
        self, form: Form[T], send: Callable[[ApiClient], Coroutine[Any, Any, Any]], **remedies: str
    ) -> tuple[Any, T]:
        document = self._send(send, **remedies)
        with api_errors(**remedies):
            return document, parse(form, document)

    def _send(self, send: Callable[[ApiClient], Coroutine[Any, Any, T]], **remedies: str) -> T:
        async def send_and_close() -> T:
            async with self.client() as client:
                return await send(client)

        with api_errors(**remedies):
            return run(send_and_close())


def _check_options(query: Mapping[str, Any]) -> None:
    for name, value in query.items():
        check_sendable(f"--{name}", value)


def api_command(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that all commands on the HTTP API share; the function gets them as its first argument."""

    def options(
        url: UrlOption = None, api_key: ApiKeyOption = None, data: DataOption = None, as_json: JsonOption = False
    ) -> None: ...

    own_parameters = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    shared_parameters = inspect.signature(options, eval_str=True).parameters

    @functools.wraps(function)
    def command(**arguments: Any) -> None:
        api = Api(**{name: arguments.pop(name) for name in shared_parameters})
        function(api, **arguments)

    parameters = [*own_parameters, *shared_parameters.values()]
    vars(command).update(__signature__=inspect.Signature(parameters))
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


@contextmanager
def api_errors(*, unanswered: str, unknown: str = "", again: str = "Try again.") -> Generator[None]:
    """Turns errors of the client into CliError, with a remedy.

    Args:
        unanswered: remedy if a request was sent and no response came.
        unknown: remedy if the request names something that does not exist.
        again: remedy if the API can't do it now.
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
    # A message that lists all agents already contains the detail that lists them.
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
            # The plane is up if only all breakers of an agent are open.
            exit_code = ExitCode.FAILED if error.code == "agent_unavailable" else ExitCode.UNREACHABLE
            return CliError(error.code, error.message, details or again, exit_code)
        case 400 | 413 | 422:
            # An invalid job is wrong usage, as it is when `submit` publishes straight to NATS.
            return CliError(error.code, error.message, details, ExitCode.USAGE)
        case _:
            return CliError(error.code, error.message, details)


class DefaultListGroup(typer.core.TyperGroup):
    """A group whose default command is `list`: `breakwater breakers --json` is `breakwater breakers list --json`.

    Its help shows the options of `list`, and the first example of each of its commands.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        examples = [_EXAMPLE.search(command.help or "") for command in self.commands.values()]
        self.help = "\n\n".join(
            [(self.help or "").strip(), "For example:", *(example[0] for example in examples if example)]
        )

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # private to typer
        """Writes the group's help, with the options of `list`."""
        group = copy(self)
        group.params = [*self.commands["list"].params, *self.params]
        super(DefaultListGroup, group).format_help(ctx, formatter)  # pyright: ignore[reportArgumentType]

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]  # the context's class is private to typer
        """Inserts `list` if the arguments name no command."""
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)
