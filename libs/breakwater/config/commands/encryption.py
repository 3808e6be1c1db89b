"""`breakwater encryption`: creates and lists keys for stored texts, encrypts and decrypts texts."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from breakwater.kernel.commands import output
from breakwater.kernel.commands.errors import CliError
from breakwater.kernel.security import encryption
from breakwater.kernel.security.encryption import DecryptionError
from breakwater.local.plane import ConfigOption, DataOption, JsonOption, PlaneLocation

app = typer.Typer(help="Keys that encrypt stored texts, and decryption of such texts.", no_args_is_help=True)


@app.command("new-key")
def new_key() -> None:
    """Print a new key. Store it where the config's `encryption.keys` points to; it is shown only once.

    For example:

        export BREAKWATER_ENCRYPTION_KEY=$(breakwater encryption new-key)
    """
    output.write(encryption.new_key())


@app.command("keys")
def keys(config: ConfigOption = None, data: DataOption = None, as_json: JsonOption = False) -> None:
    """List the ids of the config's keys: the first one encrypts, all decrypt.

    Each encrypted text begins with such an id.

    The plane's own key comes last: without others, it encrypts the texts of agents that keep none.

    For example:

        breakwater encryption keys
    """
    cipher = PlaneLocation(data).cipher(config)
    keys = [
        {"id": key, "encrypts": cipher.on and index == 0, "own": key == cipher.own_id}
        for index, key in enumerate(cipher.key_ids)
    ]
    if as_json:
        output.json_document({"keys": keys})
        return
    for key in keys:
        remark = ""
        if key["own"]:
            remark = ", the plane's own" if cipher.on else ", the plane's own for agents that keep no texts"
        output.write(f"{key['id']}  {'encrypts and decrypts' if key['encrypts'] else 'decrypts'}{remark}")
    if not cipher.on:
        output.note("encryption is off: encryption.keys is empty")


@app.command("encrypt")
def encrypt(config: ConfigOption = None, data: DataOption = None) -> None:
    """Encrypt the texts in JSON lines from stdin, for jobs that a program publishes on NATS itself.

    For example:

        breakwater encryption encrypt < job.json | nats pub bw.jobs.writer
    """
    cipher = PlaneLocation(data).cipher(config)
    if not cipher.on:
        raise CliError("encryption_off", "encryption.keys has no key", "`breakwater encryption new-key` creates one.")
    _convert_lines(cipher.encrypt_document, ValueError, "not_json")


@app.command("decrypt")
def decrypt(config: ConfigOption = None, data: DataOption = None) -> None:
    """Decrypt the texts in JSON lines from stdin, such as an export, a query or a NATS subscription.

    For example:

        breakwater executions export --format jsonl --output week.jsonl --since 7d

        breakwater encryption decrypt < week.jsonl | jq .output
    """
    _convert_lines(PlaneLocation(data).cipher(config).decrypt_document, DecryptionError, "undecryptable")


def _convert_lines(convert: Callable[[bytes], bytes], error_class: type[Exception], code: str) -> None:
    """Converts each line of stdin to stdout. Raises CliError with the line's number if `convert` raises the error."""
    out = output.binary()
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            out.write(convert(line.rstrip(b"\n")) + b"\n")
        except error_class as error:
            out.flush()
            raise CliError(code, f"line {number}: {error}") from None
