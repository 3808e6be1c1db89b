"""DeepSeek, Gemini and Kimi, which refuse a conversation whose tool calls lost what they wrote with them.

A proxy in front of the simulated provider adds to the tool calls of chat completions what the real ones add.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.sdks.programs import THOUGHT
from tests.strict_chat import THINKERS, addition, refusal, with_additions

MODELS = {"deepseek": "deepseek-reasoner", "gemini": "gemini-3-pro", "kimi": "kimi-k2-thinking"}


@dataclass(slots=True)
class StrictProxy:
    """All three, on one server: `<url>/<provider>/v1`.

    Attributes:
        simulated: the origin of the simulated provider.
        url: of the server.
        requests: by model.
        calls: of tools, in the conversations that were answered, by model.
        returned: those of them that came back with all that was written with them.
        refusals: their messages, by model.
    """

    simulated: str
    url: str = ""
    requests: Counter[str] = field(default_factory=Counter[str])
    calls: Counter[str] = field(default_factory=Counter[str])
    returned: Counter[str] = field(default_factory=Counter[str])
    refusals: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def problem(self, model: str) -> str | None:
        """Returns what went wrong with one of these models."""
        if refusals := self.refusals.get(model):
            return f"{model} refused {len(refusals)} requests: {refusals}"
        if model in MODELS.values() and not 0 < self.calls[model] == self.returned[model]:
            return f"{self.returned[model]} of {self.calls[model]} tool calls came back to {model} as it wrote them"
        return None

    def refusal(self, provider: str, body: dict[str, Any]) -> str | None:
        """Returns why the provider refuses a request, and counts the tool calls that it takes."""
        ids = list[str]()
        returned = 0
        for number, message in enumerate(body["messages"]):
            if (reason := refusal(provider, message, number, thinks=provider in THINKERS)) is not None:
                return reason
            for call in message.get("tool_calls") or ():
                written = call | addition(provider, call["function"]["name"], len(ids))
                if call["id"] != written["id"]:
                    return f"tool_call_id {call['id']} is not found"
                thought = THOUGHT["text"] if provider in THINKERS else None
                returned += call == written and message.get("reasoning_content") == thought
                ids.append(call["id"])
            if message["role"] == "tool" and message["tool_call_id"] not in ids:
                return f"tool_call_id {message['tool_call_id']} is not found"
        self.calls[body["model"]] += len(ids)
        self.returned[body["model"]] += returned
        return None


@contextmanager
def strict_proxy(simulated: str) -> Generator[StrictProxy]:
    """Starts them in front of the simulated provider at that origin."""
    proxy = StrictProxy(simulated)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            _, provider, path = self.path.split("/", 2)
            content = self.rfile.read(int(self.headers["Content-Length"]))
            body = json.loads(content)
            proxy.requests[body["model"]] += 1
            if (refusal := proxy.refusal(provider, body)) is not None:
                proxy.refusals.setdefault(body["model"], []).append(refusal)
                self._begin(400, "application/json")
                self.wfile.write(json.dumps({"error": {"message": refusal}}).encode())
                return
            earlier = sum(len(message.get("tool_calls") or ()) for message in body["messages"])
            asked = urllib.request.Request(f"{simulated}/{path}", content, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=60) as answer:
                self._begin(answer.status, answer.headers["Content-Type"])
                # A line is an event of a stream, or the whole of an answer.
                for line in answer:
                    self.wfile.write(with_additions(provider, line, earlier))

        def _begin(self, status: int, content_type: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name of the overridden one
            """Logs nothing: the requests are counted."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        proxy.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield proxy
        finally:
            server.shutdown()
