"""Calls to programs: each attempt starts one, with a JSON request on its stdin and a JSON response on its stdout."""

from __future__ import annotations

import asyncio
import codecs
import shutil
import signal
import tempfile
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import JsonValue, StrictInt, ValidationError
from pydantic_core import from_json, to_json

from breakwater.calls.providers.base import Answer, AnswerTimeout, Call, CallError, Streaming, silence
from breakwater.calls.providers.child import STDERR_KEPT, Child
from breakwater.calls.providers.local import (
    ErrorTexts,
    Pieces,
    ReportedSpend,
    failure_of_code,
    first_problem,
    request_of,
)
from breakwater.calls.providers.orphans import OrphanGuard
from breakwater.calls.rules.classify import ProgramFailure, TransportFailure
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.surrogates import read_halves, read_whole


def find_program(name: str, cwd: Path, path: str | None) -> Path:
    """Returns the file that a command names, or raises ConfigError."""
    # exec would search the worker's PATH instead, and only when the first job needs the program.
    is_path = "/" in name
    target = str(cwd / name) if is_path else name
    place = f"at {cwd / name}" if is_path else "in its PATH"
    file = shutil.which(target, path=path)
    if file is None:
        raise ConfigError(f"the program {name!r} can't be run: there is no such executable file {place}")
    return Path(file).absolute()


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run.

    Attributes:
        command: its arguments, with its own name first.
        file: the file to run.
        env: its whole environment.
        error_texts: redacts and cuts its texts for errors.
        cwd: its working directory; None for a temporary one.
        max_output_bytes: the size limit of its stdout.
        limits: the kernel's limits, by `resource.RLIMIT_…`.
        cost_per_call: the cost in nano-dollars of a call that does not report its own; None if unknown.
    """

    command: tuple[str, ...]
    file: Path
    env: Mapping[str, str] = field(repr=False)
    error_texts: ErrorTexts
    cwd: Path | None
    max_output_bytes: int
    limits: Mapping[int, int]
    cost_per_call: int | None


class Response(ReportedSpend):
    """The response of a program. It has succeeded only with the `status` "success" and the `code` 0."""

    status: str
    code: StrictInt
    result: JsonValue = None
    error: str | None = None


class _DeltaLines:
    """The lines of `{"delta": "text"}` that a program prints before its response.

    Attributes:
        pieces: the texts of the lines.
        length: the bytes of the lines.
    """

    def __init__(self) -> None:
        self.pieces = Pieces()
        self.length = 0
        self._rest = bytearray()
        self._are_over = False

    def take(self, data: bytes) -> None:
        """Takes the next output of the program."""
        if self._are_over:
            return
        if b"\n" not in data:
            self._rest += data
            return
        *lines, rest = (bytes(self._rest) + data).split(b"\n")
        self._rest[:] = rest
        for line in lines:
            text = _delta_of(line)
            if text is None:
                self._are_over = True
                return
            self.length += len(line) + 1
            self.pieces.put(text)


def _delta_of(line: bytes) -> str | None:
    try:
        match read_halves(line):
            case {"delta": str(text), **more} if not more:
                return text
            case _:
                return None
    except ValueError:
        return None


class ProcessProvider:
    """Runs a program for each attempt.

    A program that is out of time, or whose call is cancelled, is killed with everything that it has started in its
    session. So is everything that it leaves behind when it ends, or that still runs when the worker itself is killed.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._children: set[Child] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._guard = OrphanGuard()
        self._own_cwd: tempfile.TemporaryDirectory[str] | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"ProcessProvider({self._program.file})"

    async def perform(self, call: Call) -> Answer:
        """Runs the program once. Raises CallError."""
        request = to_json(request_of(call))
        child = self._start()
        lines = _DeltaLines()
        child.on_stdout = lines.take
        try:
            self._guard.watch(child.pid)
            if call.streaming is None:
                async with AnswerTimeout(call.timeout_s):
                    await child.talk(request)
            else:
                await self._stream(child.talk(request), lines.pieces, call, call.streaming)
        except TimeoutError as error:
            text = f"{silence(call)}; the program was killed"
            raise CallError(TransportFailure("timeout", "TimeoutError", text), maybe_billed=True) from error
        except OSError as error:
            text = f"could not be watched: {error.strerror}"
            raise CallError(TransportFailure("network", "IoError", text), maybe_billed=True) from error
        finally:
            # A task of its own ends the child, as the call may be cancelled again meanwhile.
            ending = asyncio.create_task(self._end(child))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            await asyncio.shield(ending)
        return self._answer(child, lines)

    async def _stream(self, talk: Coroutine[Any, Any, None], pieces: Pieces, call: Call, streaming: Streaming) -> None:
        talking = asyncio.ensure_future(talk)
        try:
            if not await pieces.pass_on(call, streaming, talking):
                raise TimeoutError
            talking.result()
        finally:
            talking.cancel()
            await asyncio.wait({talking})

    async def refresh_credential(self, used: int | None) -> bool:  # noqa: ARG002
        """Returns False, as the secrets of a program are read only once."""
        return False

    async def close(self) -> None:
        """Kills all running programs, and starts no more."""
        self._closed = True
        await asyncio.gather(*(child.end() for child in self._children))
        await asyncio.gather(*self._ending)
        self._guard.close()
        if self._own_cwd is not None:
            await asyncio.to_thread(self._own_cwd.cleanup)
            self._own_cwd = None

    def _start(self) -> Child:
        program = self._program
        if self._closed:
            text = "could not be started: the worker is stopping"
            raise CallError(TransportFailure("network", "IoError", text), maybe_billed=False)
        try:
            if (cwd := program.cwd) is None:
                self._own_cwd = self._own_cwd or tempfile.TemporaryDirectory(
                    prefix="breakwater-process-", ignore_cleanup_errors=True
                )
                cwd = Path(self._own_cwd.name)
            self._guard.start()
            child = Child(
                program.command,
                program=program.file,
                env=program.env,
                cwd=cwd,
                max_output_bytes=program.max_output_bytes,
                limits=program.limits,
            )
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            text = f"could not be started: {why}"
            raise CallError(TransportFailure("network", "IoError", text), maybe_billed=False) from error
        self._children.add(child)
        return child

    async def _end(self, child: Child) -> None:
        await child.end()
        self._guard.forget(child.pid)
        self._children.discard(child)

    def _answer(self, child: Child, lines: _DeltaLines) -> Answer:
        error_texts = self._program.error_texts
        if child.flooded:
            raise _failure(f"printed more than {self._program.max_output_bytes} bytes, and was killed")
        if child.returncode != 0:
            stderr = child.stderr.decode(errors="replace")
            is_rest = len(child.stderr) >= STDERR_KEPT
            last = error_texts.last_line(stderr.lstrip("\ufffd"), is_rest=is_rest)
            raise _failure(_ending(child.returncode) + (f": {last}" if last else ""))
        lines.pieces.end()
        stdout = bytes(child.stdout[lines.length :])
        if not stdout.strip():
            raise _failure("printed nothing" if not lines.pieces.texts else "printed no response after its answer")
        try:
            read = partial(from_json, allow_inf_nan=False)
            printed = read_whole(read, stdout.removeprefix(codecs.BOM_UTF8))
        except ValueError as error:
            text = error_texts.text(stdout.decode(errors="replace"))
            raise _failure(f"printed no JSON ({error}): {text}") from error
        try:
            response = Response.model_validate(printed)
        except ValidationError as error:
            raise _failure(f"printed JSON that is not a valid response: {first_problem(error)}") from error
        if response.status == "success" and response.code == 0:
            streamed_text = "".join(lines.pieces.texts) or None
            return response.answer(
                streamed_text if response.result is None else response.result, self._program.cost_per_call
            )
        message = (
            error_texts.text(response.error or "")
            or f"answered {error_texts.text(response.status)!r} with {response.code}"
        )
        raise CallError(
            failure_of_code(response.code, message),
            maybe_billed=True,
            usage=response.tokens(),
            cost=response.cost_usd,
            response=printed,
        )


def _failure(message: str) -> CallError:
    return CallError(ProgramFailure("BackendFailureError", message, None, "server"), maybe_billed=True)


def _ending(returncode: int | None) -> str:
    if returncode is None:
        return "could not be killed"
    if returncode >= 0:
        return f"exited with {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-returncode}"
