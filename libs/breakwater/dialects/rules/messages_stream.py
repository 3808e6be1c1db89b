"""A streamed answer as Anthropic's events: those of its provider, or such as are made of OpenAI's chunks.

Texts, thinking and the inputs of tools are sent while they come. The end of the message is made of the result of the
job, and so is what was missed: what an SDK puts together of the events is the stored message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from breakwater.dialects.rules.chat_chunks import Chunk
from breakwater.dialects.rules.messages import (
    ARGUMENTS,
    SPOKEN,
    Block,
    block_of,
    full_usage,
    input_of,
    is_readable,
    is_whole,
    readable,
    signature_of,
    start_of,
    state_block,
    usage_of,
    with_fields,
    written,
)
from breakwater.dialects.rules.provider_state import AUTHOR, CarriedState, is_token, plain_id
from breakwater.jobs.rules.chat_messages import THOUGHT, arguments_text, fields, objects
from breakwater.kernel.surrogates import whole_escapes

MessageEvent = dict[str, Any]

PING: MessageEvent = {"type": "ping"}

_DELTAS = {
    "text": "text_delta",
    "thinking": "thinking_delta",
    ARGUMENTS: "input_json_delta",
    "content": "compaction_delta",
}
_GROWS = {delta: name for name, delta in _DELTAS.items()}
_TEXTS = {"text": "text", "thinking": "thinking", "compaction": "content"}
"""Fields of blocks that come in pieces, but for inputs of tools."""
_OTHERS = ("signature_delta", "citations_delta")
_OF_BLOCKS = ("content_block_start", "content_block_delta", "content_block_stop")
_PART = 0.03
"""Part of a tool's input that is worth an event of its own."""


def event_bytes(events: Iterable[MessageEvent]) -> bytes:
    """The events as a client is sent them."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)


@dataclass(slots=True)
class _SentBlock:
    """A block as far as it is sent.

    Attributes:
        given: the block as it was begun, without what comes in pieces.
        grows: its field that comes in pieces; None for a block that comes whole.
        text: the pieces that were sent.
        signature: of thinking.
        citations: of a text.
        closed: nothing more can be sent of it.
        unsigned: thinking of a chat, which has no signature.
        received: the pieces that were received of a tool's input.
    """

    given: Block
    grows: str | None
    text: str = ""
    signature: str = ""
    citations: list[Any] = field(default_factory=list[Any])
    closed: bool = False
    unsigned: bool = False
    received: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class _Turn:
    """A part of a chat's answer, as far as it has come. Its kind is the field that grows."""

    kind: str
    call: int | None = None
    pieces: list[str] = field(default_factory=list[str])
    """Pieces that have come: all of a tool's input, and otherwise those that are not sent."""
    id: str | None = None
    name: str | None = None

    @property
    def may_begin(self) -> bool:
        return self.kind != ARGUMENTS or (self.id is not None and self.name is not None)

    @property
    def is_whole(self) -> bool:
        return self.kind != ARGUMENTS or is_whole(_joined(self.pieces))


class MessageStream:
    """The events of one message: a function of the job, its chunks and its result."""

    def __init__(self, execution_id: str, estimated_input: Callable[[], int] | None = None) -> None:
        """Begins the stream of a job.

        Args:
            execution_id: of the job.
            estimated_input: estimates the input tokens, for a provider that reports them at the end only: clients show
                those of the first event until then.
        """
        self.started = False
        self._estimated_input = estimated_input
        self._seed = execution_id
        self._ids = set[str]()
        self._sent: list[_SentBlock] = []
        self._events: list[MessageEvent] = []
        self._pending: list[str] = []
        """Text of the last block that is still to be sent: pieces that came together are sent together."""
        self._index: Any = None
        """Of the provider's block that is sent, or was the last."""
        self._waiting: list[Mapping[str, Any]] = []
        """Events of blocks that began before the end of that one."""
        self._turns: list[_Turn] = []
        self._author: Any = None
        self._state = CarriedState()
        self._thought: str | None = None
        """The field that has the thinking of this answer: some write it into two."""
        self._begun = 0
        """Number of turns that were begun to be sent: the next one is when the one before it is whole."""

    def feed(self, chunks: Iterable[Chunk]) -> list[MessageEvent]:
        """Takes chunks that have come together. Returns their events."""
        for chunk in chunks:
            if event := fields(chunk.get("event")):
                self._pass_on(event, chunk)
            else:
                self._take(chunk)
        self._say_turns()
        if (last := self._last) is not None and last.received:
            self._say_input(_joined(last.received))
        return self._flushed()

    def end(self, result: Mapping[str, Any]) -> list[MessageEvent] | None:
        """The rest of the message of a job that succeeded; None where another answer was begun than it has.

        Args:
            result: a `Result`, as JSON.
        """
        message = written(result)
        self._author = self._author or fields(result.get("response")).get(AUTHOR)
        self._start({**message, "usage": {**message["usage"], "output_tokens": 0}})
        if not self._complete(message["content"]):
            return None
        ended = {name: message[name] for name in ("container", "stop_details", "stop_reason", "stop_sequence")}
        more = {name: message[name] for name in ("context_management",) if name in message}
        self._emit({"type": "message_delta", "delta": ended, "usage": message["usage"], **more})
        self._emit({"type": "message_stop"})
        return self._flushed()

    # A chunk of OpenAI's

    def _take(self, chunk: Chunk) -> None:
        self._start(chunk)
        self._author = chunk.get(AUTHOR) or self._author
        for choice in objects(chunk.get("choices") or ()):
            if choice.get("index"):
                continue
            delta = fields(choice.get("delta"))
            if self._author is not None:
                self._state.add(delta)
            for name, value in delta.items():
                if name == "tool_calls":
                    for piece in objects(value or ()):
                        self._note_call(piece)
                elif isinstance(value, str) and value and name in SPOKEN:
                    self._hear(name, value)

    def _hear(self, name: str, text: str) -> None:
        kind = SPOKEN[name]
        if kind == "thinking":
            self._thought = self._thought or name
            if name != self._thought:
                return
        if not self._turns or self._turns[-1].kind != kind:
            self._turns.append(_Turn(kind))
        self._turns[-1].pieces.append(text)

    def _note_call(self, piece: Block) -> None:
        number = piece.get("index")
        function = fields(piece.get("function"))
        call = next((turn for turn in self._turns if turn.kind == ARGUMENTS and turn.call == number), None)
        if call is None:
            call = _Turn(ARGUMENTS, number)
            self._turns.append(call)
        call.id = call.id or (own if isinstance(own := piece.get("id"), str) else None)
        call.name = call.name or (name if isinstance(name := function.get("name"), str) else None)
        call.pieces.append(arguments_text(function.get("arguments")))

    def _say_turns(self) -> None:
        """Sends what has come of the turns, one after the other."""
        while self._turns:
            if self._begun:
                current = self._turns[self._begun - 1]
                if not self._say(current) or self._begun == len(self._turns) or not current.is_whole:
                    return
            following = self._turns[self._begun]
            if not following.may_begin:
                return
            self._begun += 1
            if following.kind == ARGUMENTS:
                if not any(block.grows == ARGUMENTS for block in self._sent):
                    self._carry()
                used = {"type": "tool_use", "id": plain_id(following.id or ""), "name": following.name}
                self._begin_block({**used, ARGUMENTS: ""})
                self._sent[-1].received = following.pieces
            elif self._last is None or self._last.closed or self._last.grows != following.kind:
                self._begin_block({"type": following.kind, following.kind: "", **_unsigned(following.kind)})
            self._sent[-1].unsigned = following.kind == "thinking"

    def _carry(self) -> None:
        """Sends what the author of the tools wants back with them, as far as it has come."""
        if (token := self._state.token(self._author, plain_id)) is not None:
            self._begin_block(state_block(token))

    def _say(self, turn: _Turn) -> bool:
        """Sends what is new of a turn. False for a tool's input that is no beginning of an object."""
        if turn.kind == ARGUMENTS:
            return self._say_input(_joined(turn.pieces))
        self._pending += turn.pieces
        turn.pieces.clear()
        self._send_pending()
        return True

    def _say_input(self, received: str) -> bool:
        """Sends what is new of a tool's input. False where it is no beginning of an object."""
        # All of it is parsed each time: so what is new of a long one waits until there is more.
        received = whole_escapes(received, is_last=False)
        if (block := self._last) is None or len(received) - len(block.text) <= len(block.text) * _PART:
            return True
        if not is_readable(received):
            return False
        self._pending.append(received[len(block.text) :])
        self._send_pending()
        return True

    # An event of the provider's

    def _pass_on(self, event: Mapping[str, Any], chunk: Chunk) -> None:
        kind = event.get("type")
        if kind == "message_start":
            self._start(fields(event.get("message")) or chunk)
        elif kind in _OF_BLOCKS:
            self._start(chunk)
            self._place(event)

    def _place(self, event: Mapping[str, Any]) -> None:
        """Takes an event of a block. One of another block than the open one waits for the end of that."""
        kind = event["type"]
        is_free = self._last is None or self._last.closed
        if kind == "content_block_start" and is_free:
            self._index = event.get("index")
            self._begin(fields(event.get("content_block")))
        elif kind == "content_block_start" or event.get("index") != self._index:
            self._waiting.append(event)
        elif kind == "content_block_delta":
            self._pass_delta(fields(event.get("delta")))
        else:
            self._close()
            waiting = self._waiting
            self._waiting = []
            for one in waiting:
                self._place(one)

    def _begin(self, given: Mapping[str, Any]) -> None:
        block = block_of(dict(given), self._ids, self._seed)
        if block is None:
            self._close()  # and what comes of it is of no block
        else:
            self._begin_block(block)

    def _begin_block(self, block: Block) -> None:
        """Begins a block; what it has already of what comes in pieces is its first piece."""
        match block["type"]:
            case kind if kind in _TEXTS:
                begun: Block = {name: [] if name == "citations" else value for name, value in block.items()}
                empty: Block = {_TEXTS[kind]: ""} | _unsigned(kind)
                self._say_more(self._open(begun | empty, _TEXTS[kind]), block)
            case _ if ARGUMENTS in block:
                begun = {name: value for name, value in block.items() if name != ARGUMENTS}
                self._say_more(self._open({**begun, "input": {}}, ARGUMENTS), block)
            case _:
                self._open(block, None)

    def _pass_delta(self, delta: Mapping[str, Any]) -> None:
        kind = str(delta.get("type"))
        block = self._last
        grows = _GROWS.get(kind)
        if block is None or block.closed:
            return
        if grows is not None:
            text = delta.get(grows)
            if grows != block.grows or not isinstance(text, str):
                return
            (block.received if grows == ARGUMENTS else self._pending).append(text)
        elif kind == "signature_delta" and block.grows == "thinking":
            self._sign(block, str(delta.get("signature") or ""))
        elif kind == "citations_delta" and block.grows == "text":
            self._cite(block, [delta.get("citation")])
        elif kind not in _OTHERS:
            self._send_pending()
            self._delta(dict(delta))

    # The rest, of the result

    def _complete(self, content: Sequence[Block]) -> bool:
        """Sends what is missing of a message. False where something else was sent."""
        self._send_pending()
        return self._complete_blocks(content) or self._complete_kinds(content)

    def _complete_blocks(self, content: Sequence[Block]) -> bool:
        if len(self._sent) > len(content) or not all(map(_is_begun, self._sent, content)):
            return False
        if self._sent:
            self._say_more(self._sent[-1], content[len(self._sent) - 1])
        for block in content[len(self._sent) :]:
            self._begin_block(block)
        self._close()
        return True

    def _complete_kinds(self, content: Sequence[Block]) -> bool:
        """The same where texts and thinking took turns: a stored chat has all of each in one piece."""
        known = ("text", "thinking", ARGUMENTS)
        sent = [block.given for block in self._sent if is_token(block.given.get("data"))]
        states = [block for block in content if is_token(block.get("data")) and block not in sent]
        tools = [block for block in content if ARGUMENTS in block]
        called = [block for block in self._sent if block.grows == ARGUMENTS]
        if any(block.grows not in known and block.given not in sent for block in self._sent) or len(called) > len(
            tools
        ):
            return False
        thought, text = (self._rest_of(kind, content) for kind in ("thinking", "text"))
        if text is None or not all(map(_is_begun, called, tools)):
            return False
        if self._last is not None and self._last.grows == ARGUMENTS:
            self._say_more(self._last, tools[len(called) - 1])
        if thought:
            self._continue({"type": "thinking", "thinking": thought, "signature": ""})
            self._sent[-1].unsigned = True
        if text:
            self._continue({"type": "text", "text": text})
        for block in (*tools[len(called) :], *states):
            self._begin_block(block)
        self._close()
        return True

    def _rest_of(self, kind: str, content: Sequence[Block]) -> str | None:
        """The part of all texts, or of all thinking, that was not sent; None where it is another."""
        whole = "".join(block[kind] for block in content if block["type"] == kind)
        said = "".join(block.text for block in self._sent if block.grows == kind)
        return whole[len(said) :] if whole.startswith(said) else None

    def _continue(self, block: Block) -> None:
        """Sends the rest of one kind, in the last block where it is of that kind."""
        kind = block["type"]
        if self._last is None or self._last.closed or self._last.grows != kind:
            self._begin_block(block)
        else:
            self._pending.append(block[kind])

    def _say_more(self, sent: _SentBlock, block: Block) -> None:
        """Sends what a block has in addition to what was sent of it."""
        if sent.grows is None or sent.closed:
            return
        if rest := (block.get(sent.grows) or "")[len(sent.text) :]:
            self._pending.append(rest)
            self._send_pending()
        self._cite(sent, _cited(block)[len(sent.citations) :])
        if (signature := block.get("signature", "")) and signature != sent.signature and sent.grows == "thinking":
            self._sign(sent, signature)

    # What is sent

    @property
    def _last(self) -> _SentBlock | None:
        return self._sent[-1] if self._sent else None

    def _start(self, of: Mapping[str, Any]) -> None:
        """Begins the message, of a chunk or of a message."""
        if self.started:
            return
        self.started = True
        message = start_of(self._seed, of.get("model"), None if "choices" in of else of.get("id"))
        if usage := usage_of(of.get("usage") if "choices" not in of else None):
            message["usage"] = full_usage(usage)
        elif self._estimated_input is not None:
            message["usage"] = full_usage({"input_tokens": self._estimated_input()})
        self._emit({"type": "message_start", "message": message})

    def _open(self, given: Block, grows: str | None) -> _SentBlock:
        self._close()
        block = _SentBlock(given, grows)
        self._sent.append(block)
        self._emit({"type": "content_block_start", "index": len(self._sent) - 1, "content_block": with_fields(given)})
        return block

    def _close(self) -> None:
        self._send_pending()
        block = self._last
        if block is None or block.closed:
            return
        if block.grows == ARGUMENTS and block.received:
            # What could not be sent yet may have been the beginning of an object all the same.
            rest = readable(_joined(block.received))[len(block.text) :]
            self._pending += [rest] if rest else []
            self._send_pending()
        if block.unsigned and not block.signature:
            self._sign(block, signature_of(self._author, self._thought or THOUGHT))
        block.closed = True
        self._emit({"type": "content_block_stop", "index": len(self._sent) - 1})

    def _send_pending(self) -> None:
        if not self._pending or (block := self._last) is None or block.grows is None:
            return
        text = "".join(self._pending)
        self._pending = []
        block.text += text
        self._delta({"type": _DELTAS[block.grows], block.grows: text})

    def _sign(self, block: _SentBlock, signature: str) -> None:
        self._send_pending()
        block.signature = signature
        self._delta({"type": "signature_delta", "signature": signature})

    def _cite(self, block: _SentBlock, citations: Iterable[Any]) -> None:
        self._send_pending()
        for citation in citations:
            block.citations.append(citation)
            self._delta({"type": "citations_delta", "citation": citation})

    def _delta(self, delta: Block) -> None:
        self._events.append({"type": "content_block_delta", "index": len(self._sent) - 1, "delta": delta})

    def _emit(self, event: MessageEvent) -> None:
        self._send_pending()
        self._events.append(event)

    def _flushed(self) -> list[MessageEvent]:
        self._send_pending()
        events = self._events
        self._events = []
        return events


def _is_begun(sent: _SentBlock, block: Block) -> bool:
    """True if a block of the result can be what a block that was sent is, or is to be."""
    if sent.given["type"] != block["type"]:
        return False
    match sent.grows:
        case None:
            return sent.given == block
        case "text" | "thinking" | "content":
            whole = block.get(sent.grows) or ""
            signature = block.get("signature", "")
            if sent.closed and (whole != sent.text or (sent.signature and sent.signature != signature)):
                return False
            cited = _cited(block)[: len(sent.citations)]
            return whole.startswith(sent.text) and cited == sent.citations
        case _:
            whole = block[ARGUMENTS]
            same = sent.given.get("name") == block["name"]
            return same and (input_of(whole) == input_of(sent.text) if sent.closed else whole.startswith(sent.text))


def _joined(pieces: list[str]) -> str:
    """The text of pieces, which are one piece from then on."""
    pieces[:] = ["".join(pieces)]
    return pieces[0]


def _unsigned(kind: str) -> Block:
    return {"signature": ""} if kind == "thinking" else {}


def _cited(block: Block) -> list[Any]:
    return block.get("citations") or []
