"""`breakwater console`: prints a link that signs in once to the console of a local stack."""

from __future__ import annotations

from urllib.parse import quote

from breakwater.identity.rules.callers import digest_of, split
from breakwater.identity.store import Sessions
from breakwater.kernel.commands import connect, output
from breakwater.kernel.commands.errors import CliError
from breakwater.local.datadir import Endpoints
from breakwater.local.plane import DataOption, PlaneLocation


def console(data: DataOption = None) -> None:
    """Print a link that signs in to the console of a local stack.

    It works once, within ten minutes, and gives the rights of the stack's first API key.

    For example:

        breakwater console

        breakwater console --data /var/lib/breakwater
    """
    output.write(connect.run(sign_in_link(PlaneLocation(data).endpoints)))


async def sign_in_link(endpoints: Endpoints, page: str = "/") -> str:
    """Creates a link to a page of the console, which works once. Raises CliError, StateUnavailableError."""
    key = split(endpoints.api_key_file.read_text(encoding="utf-8").strip())
    if key is None:
        raise CliError(
            "api_key",
            f"{endpoints.api_key_file} contains no API key",
            "`breakwater keys create NAME --scope all` creates one.",
        )
    async with connect.state(endpoints.redis_url) as redis:
        token = await Sessions(redis).offer(key[0], digest_of(key[1]))
    # Escapes only characters that would end the parameter, so that the link stays short on a terminal.
    next_page = "" if page == "/" else f"&next={quote(page, safe='/?=:')}"
    return f"{endpoints.console_url}/sign-in/link?token={token}{next_page}"
