"""What coding agents send as chats: what a translated call is refused for, and what may cost more than tokens."""

from __future__ import annotations

from breakwater.dialects.rules.native_requests import chat_form
from breakwater.jobs.contract.job import NativeRequest
from tests.recorded import Recorded, recorded
from tests.tables import each_row

NOTHING: tuple[list[str], list[str]] = ([], [])
EXPECTED: dict[str, tuple[list[str], list[str]]] = {
    "claude-code": NOTHING,
    "claude-code-sonnet": NOTHING,
    "claude-code-without-betas": NOTHING,
    "codex": NOTHING,
    "codex-additional-tools": (["reasoning.context", "input[0].type"], []),
    "codex-custom-tool": (["tools[3].type", "tools[4].type"], ["tools[4].type"]),
    "codex-default-tools": (["tools[2].type", "tools[3].type"], ["tools[3].type"]),
    "opencode-messages": NOTHING,
    "opencode-responses": NOTHING,
    "opencode-responses-reasoning": NOTHING,
}
"""By the recording: the losses, and the unpriced fields."""


@each_row("one", [one for one in recorded() if one.name in EXPECTED], ids=lambda one: one.name)
def test_a_recorded_request_is_translated_but_for_what_is_named(one: Recorded) -> None:
    body = {name: value for name, value in one.body.items() if name not in ("model", "stream", "store")}
    api = "messages" if one.path.startswith("/v1/messages") else "responses"
    form = chat_form(NativeRequest(api=api, body=body))
    found = [loss.path for loss in form.losses], [field.path for field in form.unpriced]
    assert found == EXPECTED[one.name]
    assert str(form.messages).count("harbour") > 0


def test_a_hosted_tool_is_found_among_the_clients_own() -> None:
    tools = [{"type": "namespace", "name": "all", "tools": [{"type": "function", "name": "f"}, {"type": "mcp"}]}]
    item = {"type": "additional_tools", "role": "developer", "tools": tools}
    body = {"tools": [*tools, {"type": "tool_search"}], "input": [item, {"role": "user", "content": "Hi"}]}
    form = chat_form(NativeRequest.model_validate({"api": "responses", "body": body}))
    paths = ["tools[0].tools[1].type", "tools[1].type", "input[0].tools[0].tools[1].type"]
    assert [field.path for field in form.unpriced] == paths
