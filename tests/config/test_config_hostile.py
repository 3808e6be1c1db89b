"""Configs that would end a process or be misused: each is refused with the place."""

from __future__ import annotations

import pytest

from breakwater.config.load import parse_config
from breakwater.kernel.errors import ConfigError
from tests.tables import each_row

WHOLE = """
providers:
  sim: {{kind: openai, base_url: "{url}", headers: {{X-One: "{header}"}}}}
agents:
  writer: {{model: sim/m}}
"""
LAUGHS = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
)
STAIRS = "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 5000))])


@pytest.mark.long(about_s=7)
@each_row(
    ("text", "says"),
    [
        ("a: " + "[" * 5000 + "]" * 5000, r"line 1, column \d+: is nested more than 100 deep"),
        ('{"a": ' * 5000 + "1" + "}" * 5000, "line 1, column .*nested more than 100 deep"),
        ("\n".join(" " * n + "a:" for n in range(5000)), r"line \d+, .*nested more than 100 deep"),
        (STAIRS, r"line \d+, .*nested more than 100 deep"),
        (LAUGHS, r"line 6, .*more than 1,000,000 values"),
        ("? [{" + LAUGHS.replace("\n", ", ") + "}]\n: x", r"line 1, .*more than 1,000,000 values"),
        ("? " + "[" * 300 + "]" * 300 + "\n: x", r"line 1, .*nested more than 100 deep"),
        ("a: &a [*a]", "line 1, .*inside its own anchor"),
    ],
    ids=["flow", "json", "block", "stairs of aliases", "billion laughs", "laughs in a key", "deep key", "itself"],
)
def test_a_config_that_is_nested_without_end_is_an_error_with_a_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_config(text)


@pytest.mark.parametrize("url", ["http://user:pass@host/v1", "http://user@host/v1", "https://:pa%20ss@host/v1"])
def test_a_url_with_a_password_is_refused_with_its_path_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match=r"providers\.sim\.base_url: must not contain user") as refused:
        parse_config(WHOLE.format(url=url, header="x"))
    assert "pass" not in str(refused.value).replace("password", "")
    alerts = f"alerts: {{channels: {{ops: {{webhook: {{url: '{url}', secret: {{env: S}}}}}}}}}}"
    with pytest.raises(ConfigError, match=r"alerts\.channels\.ops\.webhook\.url: must not contain user"):
        parse_config(WHOLE.format(url="http://h/v1", header="x") + alerts)


@pytest.mark.parametrize("value", [r"a\r\nX-Two: b", r"a\nb", r"a\0b"])
def test_a_header_that_would_be_two_is_refused_with_its_path(value: str) -> None:
    with pytest.raises(ConfigError, match=r"providers\.sim\.headers: 'X-One' is not a valid"):
        parse_config(WHOLE.format(url="http://h/v1", header=value))
    assert parse_config(WHOLE.format(url="http://h/v1?a=b@c", header="fine"))


def test_half_of_a_surrogate_pair_is_no_text_that_breaks_a_call() -> None:
    text = r"""
providers: {sim: {base_url: "http://h/v1"}}
agents: {writer: {model: sim/m, system_prompt: "ok \ud83d, \ud83d\ude00", params: {stop: ["\ude00"]}}}
"""
    agent = parse_config(text).agents["writer"]
    assert (agent.system_prompt, agent.params) == ("ok \ufffd, \U0001f600", {"stop": ["\ufffd"]})
