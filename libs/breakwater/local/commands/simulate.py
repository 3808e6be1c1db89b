"""`breakwater simulate`: injects faults into the simulated provider of `breakwater up --simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from aiohttp import ClientError, ClientSession, ClientTimeout

from breakwater.calls.providers.failures import transport_failure, unreachable_at
from breakwater.kernel.commands import connect, output
from breakwater.kernel.commands.errors import CliError, ExitCode, unreachable, usage_error
from breakwater.local.plane import DataOption, JsonOption, PlaneLocation

_HELP = """Break the simulated provider of a running `breakwater up --simulate`, and watch how the plane reacts.

A fault lasts until `breakwater simulate reset`, or until the models of the config change.

For example:

    breakwater simulate fault gpt-4o --status 500

    breakwater simulate reset
"""

app = typer.Typer(help=_HELP, no_args_is_help=True)


@app.command()
def fault(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model id from the config.")],
    status: Annotated[int | None, typer.Option(metavar="CODE", help="HTTP status of the responses.")] = None,
    hang_s: Annotated[float | None, typer.Option(metavar="SECONDS", help="Seconds until calls are answered.")] = None,
    rate: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Share of the calls that fail, from 0 to 1.")
    ] = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make calls of a model fail, with --status or --hang-s; all of them, or the share --rate.

    For example:

        breakwater simulate fault gpt-4o --status 500

        breakwater simulate fault gpt-4o-mini --hang-s 90 --rate 0.3
    """
    if (status is None) == (hang_s is None):
        given = "neither is" if status is None else "both are"
        raise usage_error(f"a fault has either --status or --hang-s; {given} given")
    fault_fields = {"status": status, "hang_s": hang_s, "rate": rate}
    _inject(
        {model: [{name: value for name, value in fault_fields.items() if value is not None}]}, data, as_json=as_json
    )


@app.command()
def reset(data: DataOption = None, as_json: JsonOption = False) -> None:
    """Remove all added faults. Open breakers close after their cool-down, or with `breakwater breakers reset`.

    For example:

        breakwater simulate reset
    """
    _inject({}, data, as_json=as_json)


def _inject(faults: dict[str, Any], data: Path | None, *, as_json: bool) -> None:
    url = PlaneLocation(data).simulated_provider_url
    status, document = connect.run(_post(f"{url}/_sim/faults", faults))
    if status != 200:
        raise CliError("refused", document["error"]["message"], exit_code=ExitCode.USAGE)
    if as_json:
        output.json_document(document)
        return
    for model, added in document.items():
        descriptions = [", ".join(f"{name} {value}" for name, value in fault.items()) for fault in added]
        output.print_styled(f"{model}: ", ("; ".join(descriptions), "red") if descriptions else ("answers", "green"))


async def _post(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    try:
        async with ClientSession(timeout=ClientTimeout(10)) as session, session.post(url, json=body) as response:
            return response.status, await response.json()
    except (ClientError, TimeoutError) as error:
        reason = unreachable_at(transport_failure(error), url)
        raise unreachable(f"the simulated provider does not answer: {reason}") from error
