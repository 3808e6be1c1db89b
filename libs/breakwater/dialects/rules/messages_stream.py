"""A streamed answer as Anthropic's events: those of its provider, or events made from OpenAI's chunks.

Texts, thinking and the inputs of tools are sent as they arrive. The end of the message, and anything that was missed,
comes from the result of the job. So the message that an SDK assembles from the events is the stored one.
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
    unparsed_message_of,
    usage_of,
    with_fields,
)
from breakwater.dialects.rules.provider_state import AUTHOR, CarriedState, is_token, plain_id
from breakwater.jobs.rules.chat_messages import THOUGHT, arguments_text, fields, objects, thoughts_in
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
"""The fields of blocks that arrive in pieces, by the type of block. Inputs of tools arrive in pieces, too."""
_WHOLE_DELTAS = ("signature_delta", "citations_delta")
_OF_BLOCKS = ("content_block_start", "content_block_delta", "content_block_stop")
_PART = 0.03
"""The fraction by which a tool's input must have grown to be worth another event."""


def event_bytes(events: Iterable[MessageEvent]) -> bytes:
    """Writes events as server-sent events."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)


@dataclass(slots=True)
class _SentBlock:
    """The part of a block that was sent.

    Attributes:
        start: the block as it was begun, without the field that arrives in pieces.
        grows: the field that arrives in pieces; None for a block that arrives whole.
        text: the pieces that were sent, joined.
        signature: the signature of thinking.
        citations: the citations of a text.
        closed: the block has ended.
        unsigned: it is the thinking of a chat, which has no signature.
        received: the pieces of a tool's input that were received.
    """

    start: Block
    grows: str | None
    text: str = ""
    signature: str = ""
    citations: list[Any] = field(default_factory=list[Any])
    closed: bool = False
    unsigned: bool = False
    received: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class _Turn:
    """A part of a chat's answer that is arriving. Its kind is the field that grows."""

    kind: str
    call: int | None = None
    pieces: list[str] = field(default_factory=list[str])
    """The received pieces: all of them for a tool's input, and otherwise those that are not sent yet."""
    id: str | None = None
    name: str | None = None

    @property
    def may_begin(self) -> bool:
        return self.kind != ARGUMENTS or (self.id is not None and self.name is not None)

    @property
    def is_whole(self) -> bool:
        return self.kind != ARGUMENTS or is_whole(_join(self.pieces))


class MessageStream:
    """The events of one message, which depend only on the job, its chunks and its result."""

    def __init__(self, job_id: str, estimated_input: Callable[[], int] | None = None) -> None:
        """Begins the stream of a job.

        Args:
            job_id: the id of the job, as its caller chose it.
            estimated_input: estimates the input tokens, for a provider that reports them only at the end: until then,
                clients show those of the first event.
        """
        self.started = False
        self._estimated_input = estimated_input
        self._seed = job_id
        self._ids = set[str]()
        self._sent: list[_SentBlock] = []
        self._events: list[MessageEvent] = []
        self._pending: list[str] = []
        """Text of the last block that is still to be sent, so that pieces that arrive together are sent together."""
        self._index: Any = None
        """The index of the provider's block that is being sent, or was sent last."""
        self._waiting: list[Mapping[str, Any]] = []
        """Events of blocks that have begun before that block has ended."""
        self._turns: list[_Turn] = []
        self._author: Any = None
        self._state = CarriedState()
        self._thought: str | None = None
        """The field that has the thinking of this answer. Some servers write it into two fields."""
        self._thinks_aloud = False
        """The thinking of this answer has come as text, and need not be taken from Anthropic's blocks."""
        self._begun = 0
        """The number of turns that are sent or being sent. The next turn begins when the one before is complete."""

    def feed(self, chunks: Iterable[Chunk]) -> list[MessageEvent]:
        """Takes chunks that have arrived together. Returns their events."""
        for chunk in chunks:
            if event := fields(chunk.get("event")):
                self._pass_on(event, chunk)
            else:
                self._take(chunk)
        self._send_turns()
        if (last := self._last) is not None and last.received:
            self._send_input(_join(last.received))
        return self._flush()

    def end(self, result: Mapping[str, Any]) -> list[MessageEvent] | None:
        """Returns the events of the rest of the message; None if the stream has begun another answer.

        Args:
            result: a `Result`, as JSON.
        """
        message = unparsed_message_of(result)
        self._author = self._author or fields(result.get("response")).get(AUTHOR)
        self._start({**message, "usage": {**message["usage"], "output_tokens": 0}})
        if not self._complete(message["content"]):
            return None
        final_fields = {name: message[name] for name in ("container", "stop_details", "stop_reason", "stop_sequence")}
        optional_fields = {name: message[name] for name in ("context_management",) if name in message}
        self._emit({"type": "message_delta", "delta": final_fields, "usage": message["usage"], **optional_fields})
        self._emit({"type": "message_stop"})
        return self._flush()

    # Chunks of OpenAI's

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
                        self._take_call(piece)
                elif name == "thinking_blocks" and self._author is not None and not self._thinks_aloud:
                    self._take_text(THOUGHT, thoughts_in(value))
                elif isinstance(value, str) and value and name in SPOKEN:
                    self._thinks_aloud = self._thinks_aloud or SPOKEN[name] == "thinking"
                    self._take_text(name, value)

    def _take_text(self, name: str, text: str) -> None:
        if not text:
            return
        kind = SPOKEN[name]
        if kind == "thinking":
            self._thought = self._thought or name
            if name != self._thought:
                return
        if not self._turns or self._turns[-1].kind != kind:
            self._turns.append(_Turn(kind))
        self._turns[-1].pieces.append(text)

    def _take_call(self, piece: Block) -> None:
        number = piece.get("index")
        function = fields(piece.get("function"))
        call = next((turn for turn in self._turns if turn.kind == ARGUMENTS and turn.call == number), None)
        if call is None:
            call = _Turn(ARGUMENTS, number)
            self._turns.append(call)
        call.id = call.id or (piece_id if isinstance(piece_id := piece.get("id"), str) else None)
        call.name = call.name or (name if isinstance(name := function.get("name"), str) else None)
        call.pieces.append(arguments_text(function.get("arguments")))

    def _send_turns(self) -> None:
        """Sends the received parts of the turns, one turn after the other."""
        while self._turns:
            if self._begun:
                current = self._turns[self._begun - 1]
                if not self._send_turn(current) or self._begun == len(self._turns) or not current.is_whole:
                    return
            next_turn = self._turns[self._begun]
            if not next_turn.may_begin:
                return
            self._begun += 1
            if next_turn.kind == ARGUMENTS:
                if not any(block.grows == ARGUMENTS for block in self._sent):
                    self._send_state()
                tool_use = {"type": "tool_use", "id": plain_id(next_turn.id or ""), "name": next_turn.name}
                self._begin_block({**tool_use, ARGUMENTS: ""})
                self._sent[-1].received = next_turn.pieces
            elif self._last is None or self._last.closed or self._last.grows != next_turn.kind:
                self._begin_block({"type": next_turn.kind, next_turn.kind: "", **_empty_signature(next_turn.kind)})
            self._sent[-1].unsigned = next_turn.kind == "thinking"

    def _send_state(self) -> None:
        """Sends the state that the author of the tool uses needs back with them, as far as it has arrived."""
        if (token := self._state.token(self._author, plain_id)) is not None:
            self._begin_block(state_block(token))

    def _send_turn(self, turn: _Turn) -> bool:
        """Sends the new part of a turn. Returns False for a tool's input that is not the beginning of an object."""
        if turn.kind == ARGUMENTS:
            return self._send_input(_join(turn.pieces))
        self._pending += turn.pieces
        turn.pieces.clear()
        self._send_pending()
        return True

    def _send_input(self, received: str) -> bool:
        """Sends the new part of a tool's input. Returns False if it is not the beginning of an object."""
        # The whole input is parsed each time, so the new part of a long input waits until it has grown enough.
        received = whole_escapes(received, is_last=False)
        if (block := self._last) is None or len(received) - len(block.text) <= len(block.text) * _PART:
            return True
        if not is_readable(received):
            return False
        self._pending.append(received[len(block.text) :])
        self._send_pending()
        return True

    # Events of the provider

    def _pass_on(self, event: Mapping[str, Any], chunk: Chunk) -> None:
        kind = event.get("type")
        if kind == "message_start":
            self._start(fields(event.get("message")) or chunk)
        elif kind in _OF_BLOCKS:
            self._start(chunk)
            self._place(event)

    def _place(self, event: Mapping[str, Any]) -> None:
        """Takes an event of a block. If another block is open, the event waits for its end."""
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
            for waiting_event in waiting:
                self._place(waiting_event)

    def _begin(self, reported: Mapping[str, Any]) -> None:
        block = block_of(dict(reported), self._ids, self._seed)
        if block is None:
            self._close()  # the rest of the unreadable block then belongs to no open block, and is skipped
        else:
            self._begin_block(block)

    def _begin_block(self, block: Block) -> None:
        """Begins a block. If its growing field has content already, that is its first piece."""
        match block["type"]:
            case kind if kind in _TEXTS:
                begun: Block = {name: [] if name == "citations" else value for name, value in block.items()}
                empty: Block = {_TEXTS[kind]: ""} | _empty_signature(kind)
                self._send_missing(self._open(begun | empty, _TEXTS[kind]), block)
            case _ if ARGUMENTS in block:
                begun = {name: value for name, value in block.items() if name != ARGUMENTS}
                self._send_missing(self._open({**begun, "input": {}}, ARGUMENTS), block)
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
        elif kind not in _WHOLE_DELTAS:
            self._send_pending()
            self._delta(dict(delta))

    # The rest, from the result

    def _complete(self, content: Sequence[Block]) -> bool:
        """Sends what is missing of a message. Returns False if something else was sent before."""
        self._send_pending()
        return self._complete_blocks(content) or self._complete_kinds(content)

    def _complete_blocks(self, content: Sequence[Block]) -> bool:
        if len(self._sent) > len(content) or not all(map(_is_begun, self._sent, content)):
            return False
        if self._sent:
            self._send_missing(self._sent[-1], content[len(self._sent) - 1])
        for block in content[len(self._sent) :]:
            self._begin_block(block)
        self._close()
        return True

    def _complete_kinds(self, content: Sequence[Block]) -> bool:
        """Completes texts and thinking that alternated: a stored chat has one piece of each."""
        kinds = ("text", "thinking", ARGUMENTS)
        sent_states = [block.start for block in self._sent if is_token(block.start.get("data"))]
        states = [block for block in content if is_token(block.get("data")) and block not in sent_states]
        tools = [block for block in content if ARGUMENTS in block]
        sent_tools = [block for block in self._sent if block.grows == ARGUMENTS]
        if any(block.grows not in kinds and block.start not in sent_states for block in self._sent) or len(
            sent_tools
        ) > len(tools):
            return False
        thinking, text = (self._unsent(kind, content) for kind in ("thinking", "text"))
        if text is None or not all(map(_is_begun, sent_tools, tools)):
            return False
        if self._last is not None and self._last.grows == ARGUMENTS:
            self._send_missing(self._last, tools[len(sent_tools) - 1])
        if thinking:
            self._continue({"type": "thinking", "thinking": thinking, "signature": ""})
            self._sent[-1].unsigned = True
        if text:
            self._continue({"type": "text", "text": text})
        for block in (*tools[len(sent_tools) :], *states):
            self._begin_block(block)
        self._close()
        return True

    def _unsent(self, kind: str, content: Sequence[Block]) -> str | None:
        """Returns the part of all texts, or of all thinking, that was not sent; None if another text was sent."""
        full_text = "".join(block[kind] for block in content if block["type"] == kind)
        sent_text = "".join(block.text for block in self._sent if block.grows == kind)
        return full_text[len(sent_text) :] if full_text.startswith(sent_text) else None

    def _continue(self, block: Block) -> None:
        """Sends the rest of one kind of text, in the last block if that is open and of this kind."""
        kind = block["type"]
        if self._last is None or self._last.closed or self._last.grows != kind:
            self._begin_block(block)
        else:
            self._pending.append(block[kind])

    def _send_missing(self, sent: _SentBlock, block: Block) -> None:
        """Sends the part of a block that was not sent yet."""
        if sent.grows is None or sent.closed:
            return
        if missing_text := (block.get(sent.grows) or "")[len(sent.text) :]:
            self._pending.append(missing_text)
            self._send_pending()
        self._cite(sent, _citations_of(block)[len(sent.citations) :])
        if (signature := block.get("signature", "")) and signature != sent.signature and sent.grows == "thinking":
            self._sign(sent, signature)

    # What is sent

    @property
    def _last(self) -> _SentBlock | None:
        return self._sent[-1] if self._sent else None

    def _start(self, source: Mapping[str, Any]) -> None:
        """Begins the message, with the id and model of a chunk or a message, unless it has begun."""
        if self.started:
            return
        self.started = True
        message = start_of(self._seed, source.get("model"), None if "choices" in source else source.get("id"))
        if usage := usage_of(source.get("usage") if "choices" not in source else None):
            message["usage"] = full_usage(usage)
        elif self._estimated_input is not None:
            message["usage"] = full_usage({"input_tokens": self._estimated_input()})
        self._emit({"type": "message_start", "message": message})

    def _open(self, start: Block, grows: str | None) -> _SentBlock:
        self._close()
        block = _SentBlock(start, grows)
        self._sent.append(block)
        self._emit({"type": "content_block_start", "index": len(self._sent) - 1, "content_block": with_fields(start)})
        return block

    def _close(self) -> None:
        self._send_pending()
        block = self._last
        if block is None or block.closed:
            return
        if block.grows == ARGUMENTS and block.received:
            # The input may have become readable with its last piece, or be readable in part.
            missing_text = readable(_join(block.received))[len(block.text) :]
            self._pending += [missing_text] if missing_text else []
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

    def _flush(self) -> list[MessageEvent]:
        self._send_pending()
        events = self._events
        self._events = []
        return events


def _is_begun(sent: _SentBlock, block: Block) -> bool:
    """Returns True if a block that was sent, perhaps in part, can be a block of the result."""
    if sent.start["type"] != block["type"]:
        return False
    match sent.grows:
        case None:
            return sent.start == block
        case "text" | "thinking" | "content":
            full_text = block.get(sent.grows) or ""
            signature = block.get("signature", "")
            if sent.closed and (full_text != sent.text or (sent.signature and sent.signature != signature)):
                return False
            cited = _citations_of(block)[: len(sent.citations)]
            return full_text.startswith(sent.text) and cited == sent.citations
        case _:
            final_input = block[ARGUMENTS]
            if sent.start.get("name") != block["name"]:
                return False
            return input_of(final_input) == input_of(sent.text) if sent.closed else final_input.startswith(sent.text)


def _join(pieces: list[str]) -> str:
    """Joins pieces in place, and returns their text."""
    pieces[:] = ["".join(pieces)]
    return pieces[0]


def _empty_signature(kind: str) -> Block:
    return {"signature": ""} if kind == "thinking" else {}


def _citations_of(block: Block) -> list[Any]:
    return block.get("citations") or []
