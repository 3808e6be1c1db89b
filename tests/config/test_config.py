from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from breakwater.alerts.contract import AlertEvent
from breakwater.alerts.settings import Alerts
from breakwater.config import load_config, named_secrets, parse_config, variables_of
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.security.secret_refs import ENV_FILE, SecretRef
from tests.tables import each_row

GOOD = """
providers:
  sim: {base_url: "http://127.0.0.1:1/v1", api_key: {env: SIM_KEY}}
defaults:
  retry: {max_attempts: 2}
  breaker: off
agents:
  a: {model: m/1, retry: {base_s: 0.1}, budget: {daily_usd: 0.15, enforcement: hard}}
  b: {model: m/1, fallback_models: [m/2, m/1], breaker: {errors: 3}}
"""


def test_defaults_apply_to_every_agent_and_its_own_settings_win() -> None:
    config = parse_config(GOOD)
    a, b = config.agents["a"], config.agents["b"]
    assert (a.retry.max_attempts, a.retry.base_s, a.retry.max_delay_s) == (2, 0.1, 5.0)
    assert a.breaker is None
    assert b.breaker is not None
    assert (b.breaker.errors, b.breaker.consecutive_failures) == (3, 3)
    assert b.chain == ("m/1", "m/2")
    assert a.budget.daily_usd == 150_000_000
    assert config.provider_name(a, "m/1") == "sim"


def test_the_built_in_defaults_protect() -> None:
    config = parse_config("providers: {p: {base_url: 'http://x'}}\nagents: {a: {model: m}}")
    agent = config.agents["a"]
    assert (agent.retry.max_attempts, agent.retry.base_s, agent.retry.max_delay_s) == (3, 0.5, 5.0)
    assert agent.timeout_s == 30
    assert agent.breaker is not None
    assert (agent.breaker.consecutive_failures, agent.breaker.cooldown_s) == (3, 60)
    assert config.redaction.built_in


@each_row(
    ("old", "new", "words"),
    [
        (
            "max_attempts: 2",
            "max_atempts: 2",
            "defaults.retry.max_atempts: is not a known setting; did you mean 'max_attempts'",
        ),
        ("max_attempts: 2", "max_attempts: none", "defaults.retry.max_attempts: should be a valid int"),
        (
            "daily_usd: 0.15",
            "dayly_usd: 0.15",
            "agents.a.budget.dayly_usd: is not a known setting; did you mean 'daily_usd'",
        ),
        ("daily_usd: 0.15", "daily_usd: lots", "agents.a.budget.daily_usd: 'lots' is not an amount in USD"),
        ("defaults:", "cost_tags: [team, project, team]\ndefaults:", "cost_tags: names a key twice"),
        ("defaults:", "cost_tags: [a, b, c, d, e, f, g, h, i, j, k]\ndefaults:", "cost_tags: has 11 keys"),
        ("defaults:", 'cost_tags: ["two\\nlines"]\ndefaults:', "cost_tags.0: "),
        ("a: {model: m/1,", "a: {", "agents.a.model: is missing"),
        ("{env: SIM_KEY}", "sk-1234567890", "providers.sim.api_key: a secret"),
        ("{env: SIM_KEY}", "{}", "providers.sim.api_key: give exactly one"),
        ('"http://127.0.0.1:1/v1"', "ftp://x", "providers.sim.base_url: "),
        ("errors: 3", "errors: 3, consecutive_failures: 0", "agents.b.breaker.consecutive_failures: should be"),
        ("agents:", "agent:", "agent: is not a known setting; did you mean 'agents'?"),
        (
            "  b: {model",
            "  b: {provider: smi, model",
            "agents.b.provider: 'smi' is not configured",
        ),
        ("defaults:", "budgets: {timezone: Berlin}\ndefaults:", "budgets.timezone: 'Berlin'"),
        *(
            ("defaults:", f"tracing: {{url_template: '{template}'}}\ndefaults:", f"tracing.url_template: must {why}")
            for template, why in (
                ("https://traces.example.com", "contain the placeholder {trace_id}"),
                ("javascript:alert({trace_id})", "be a URL"),
                ("//traces.example.com/{trace_id}", "be a URL"),
                ("https://{trace_id}.example.com/", "be a URL"),
                ("https:///{trace_id}", "be a URL"),
                ("https://[traces/{trace_id}", "be a URL"),
                ("https://traces.example.com/a b/{trace_id}", "be a URL"),
            )
        ),
        ("defaults:", "redaction: {patterns: ['(']}\ndefaults:", "redaction.patterns: '('"),
        ("providers:", "providers: [", "line 4, column"),
        ("max_attempts: 2", "max_attempts: 2, max_attempts: 3", "'max_attempts' is set twice, first in line "),
        (
            "defaults:",
            "limits: {results_max_age_h: 0.1}\ndefaults:",
            "limits.results_max_age_h: should be",
        ),
    ],
)
def test_a_mistake_is_named_by_its_path_and_what_would_be_right(old: str, new: str, words: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        parse_config(GOOD.replace(old, new, 1), source="x.yaml")
    assert words in str(caught.value)
    assert "x.yaml" in str(caught.value)
    assert "sk-1234567890" not in str(caught.value)


def test_all_mistakes_are_reported_at_once_and_one_in_the_defaults_only_once() -> None:
    wrong = GOOD.replace("max_attempts", "max_atempts").replace("daily_usd", "dayly_usd")
    with pytest.raises(ConfigError) as caught:
        parse_config(wrong)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("2 mistakes")
    assert len(lines) == 3
    for line, name in zip(lines[1:], ("max_atempts", "dayly_usd"), strict=True):
        [number] = [number for number, text in enumerate(wrong.splitlines(), 1) if name in text]
        assert line.endswith(f"(line {number})")


def test_what_is_wrong_between_sections_is_reported_with_wrong_values() -> None:
    wrong = """
providers: {openai: {api_key: {env: A_KEY}, bas_url: x}}
models:
  gpt-4o: {provider: opnai}
  small: {provider: openai, tiemout_s: 3}
agents:
  writer: {model: gpt-4o, timeout_s: -1, retry: {max_attempts: many}}
  lost: {provider: nope, model: m}
programs: {desk: {agents: [writr]}}
"""
    with pytest.raises(ConfigError) as caught:
        parse_config(wrong)
    mistakes = [line.strip().partition(": ")[0] for line in str(caught.value).splitlines()[1:]]
    assert sorted(mistakes) == [
        "agents.lost.provider",
        "agents.writer.retry.max_attempts",
        "agents.writer.timeout_s",
        "models.gpt-4o.provider",
        "models.small.tiemout_s",
        "programs.desk.agents",
        "providers.openai.bas_url",
        "providers.openai.base_url",
    ]


@pytest.mark.parametrize("broken", ["writer: 7", "writer: {model: m, fallback_models: [m]}", "writer: [m]"])
def test_an_agent_that_is_wrong_as_a_whole_does_not_seem_to_be_missing(broken: str) -> None:
    wrong = f"providers: {{openai: {{}}}}\nagents: {{{broken}}}\nprograms: {{desk: {{agents: [writer]}}}}\n"
    with pytest.raises(ConfigError) as caught:
        parse_config(wrong)
    assert "programs.desk" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "just words", "- a\n- list"])
def test_a_file_that_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a mapping"):
        parse_config(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"agents: \xff")
    with pytest.raises(ConfigError, match="can't be read"):
        load_config(tmp_path / "latin.yaml")
    with pytest.raises(ConfigError, match="can't be read"):
        load_config(tmp_path)


def test_a_secret_is_read_from_its_place_and_its_absence_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "value")
    assert SecretRef(env="A_KEY").read() == "value"
    (tmp_path / "key").write_text("from file\n")
    assert SecretRef(file=tmp_path / "key").read() == "from file"
    monkeypatch.delenv("A_KEY")
    with pytest.raises(ConfigError, match="A_KEY is not set"):
        SecretRef(env="A_KEY").read()
    with pytest.raises(ConfigError, match="can't be read"):
        SecretRef(file=tmp_path / "none").read()


def test_the_example_is_right() -> None:
    config = load_config(Path(__file__).parents[2] / "examples" / "breakwater.yaml")
    assert len(config.agents) == 3


def alerts(text: str) -> Alerts:
    return parse_config(f"{GOOD}\nalerts: {text}\n").alerts


OPS = "slack: {webhook_url: {env: SLACK}}"
HOOK = 'webhook: {url: "https://hooks.example.com", secret: {env: HOOK}}'


def test_the_channels_that_the_example_shows_are_right_without_their_hash() -> None:
    text = (Path(__file__).parents[2] / "examples" / "breakwater.yaml").read_text()
    begin, end = text.index("\nalerts:\n"), text.index("\n# Common secret formats")
    config = parse_config(text[:begin] + text[begin:end].replace("\n  # ", "\n  ") + text[end:])
    assert list(config.alerts.channels) == ["ops", "on-call"]
    assert config.alerts.links is not None
    assert [place for place, _ in named_secrets(config) if place.startswith("alerts.")] == [
        "alerts.links.secret",
        "alerts.channels.ops.slack.webhook_url",
        "alerts.channels.on-call.webhook.secret",
    ]


def test_the_default_protects_too() -> None:
    found = alerts("{}")
    assert set(found.on_events) == set(get_args(AlertEvent))
    assert found.escalate == ("guard_tripped",)
    assert found.channels == {}
    channel = alerts(f"{{channels: {{ops: {{{OPS}}}}}}}").channels["ops"]
    assert channel.rate_limit is not None
    assert alerts(f"{{channels: {{ops: {{{OPS}, rate_limit: off}}}}}}").channels["ops"].rate_limit is None


@each_row(
    ("text", "words"),
    [
        (f"{{{OPS}}}", "alerts: slack: "),
        (f"{{channels: {{ops: {{{OPS}, {HOOK}}}}}}}", "alerts.channels.ops: give exactly one"),
        ("{channels: {ops: {severity: warning}}}", "alerts.channels.ops: give exactly one"),
        ("{channels: {ops: {slack: {}}}}", "alerts.channels.ops.slack: give either webhook_url, or bot_token"),
        ("{channels: {ops: {slack: {bot_token: {env: T}}}}}", "bot_token and channel belong together"),
        ("{channels: {ops: {python: {callable: tell}}}}", "alerts.channels.ops.python.callable: "),
        ("{channels: {ops: {webhook: {url: ftp://x, secret: {env: S}}}}}", "alerts.channels.ops.webhook.url: "),
        (f"{{channels: {{ops: {{{OPS}, events: [breaker_opened]}}}}}}", "alerts.channels.ops.events.0: "),
        (f"{{channels: {{ops: {{{OPS}, quiet_hours: {{start: 22:00, end: '07:00'}}}}}}}}", "write the time in quotes"),
        (f"{{channels: {{ops: {{{OPS}, quiet_hours: {{start: '22:00', end: '22:00'}}}}}}}}", "are the same time"),
        ("{templates: {breaker_open: {title: '${agnet} fails'}}}", "${agnet} is not known"),
        ("{templates: {breaker_open: {text: 'costs $5'}}}", "write `$$`"),
        (
            "{allow_networks: [10.1.2.3/8]}",
            "alerts.allow_networks.0: 10.1.2.3/8 has host bits",
        ),
        ("{escalate: [breaker_open]}", "alerts.escalate.0: "),
    ],
)
def test_a_mistake_about_alerts_is_named_by_its_path(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        alerts(text)
    assert words in str(caught.value)


def test_secrets_are_found_wherever_they_are_and_go_to_the_service_that_reads_them() -> None:
    program = "  tool: {kind: process, command: [x], env: {PLAIN: text, TOKEN: {env: TOKEN}}}\n"
    links = (
        "{links: {base_url: 'https://x.example', secret: {env: LINKS}}, channels: {ops: {python: {callable: 'a:b'}}}}"
    )
    text = (
        GOOD.replace("defaults:", f"{program}defaults:\n  provider: sim")
        + f"alerts: {links}\nencryption: {{keys: [{{env: KEY}}]}}\n"
    )
    config = parse_config(text)
    assert [place for place, _ in named_secrets(config)] == [
        "providers.sim.api_key",
        "providers.tool.env.TOKEN",
        "alerts.links.secret",
        "encryption.keys.0",
    ]
    assert variables_of(config, "worker") == {"SIM_KEY", "TOKEN", "KEY", ENV_FILE}
    assert variables_of(config, "alerter") == {"LINKS", ENV_FILE}
    assert variables_of(config, "request") == {"LINKS", "KEY", ENV_FILE}
    assert variables_of(config, "sink") == set()


def test_a_worker_gets_the_variables_that_a_makers_library_reads() -> None:
    config = parse_config(
        GOOD.replace("defaults:", "  aws: {kind: bedrock, region: eu-central-1}\ndefaults:\n  provider: sim")
    )
    assert {"AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"} <= variables_of(config, "worker")
    text = (
        "providers: {a: {kind: azure, base_url: 'http://x'}, v: {kind: vertex, project: p}}\nagents: {a: {model: v/m}}"
    )
    names = {"AZURE_CLIENT_SECRET", "IDENTITY_HEADER", "GOOGLE_APPLICATION_CREDENTIALS"}
    assert names <= variables_of(parse_config(text), "worker")
    assert not names & variables_of(parse_config(text), "sink")
    assert not any(name.startswith("AWS_") for name in variables_of(config, "request"))


OPENID = "issuer: 'https://sso.example', client_id: b, client_secret: {env: OPENID_SECRET}, roles: {admin: [a]}"
CONSOLE = f"console: {{url: 'https://console.example', openid: {{{OPENID}}}}}\n"


def test_the_openid_clients_secret_is_for_request_alone() -> None:
    config = parse_config(CONSOLE + GOOD)
    assert config.console.openid is not None
    assert (config.console.openid.shown_as, config.console.openid.default_role) == ("sso.example", None)
    assert ("console.openid.client_secret", SecretRef(env="OPENID_SECRET")) in named_secrets(config)
    services = ("request", "worker", "breaker", "budget", "alerter", "sink", "console")
    assert [name for name in services if "OPENID_SECRET" in variables_of(config, name)] == ["request"]


@each_row(
    ("old", "new", "words"),
    [
        ("url: 'https://console.example', ", "", "console: openid needs url"),
        ("https://console.example", "https://x.example/console", "console.url: must end"),
        ("https://console.example", "http://console.example", "console.url: must be a URL"),
        ("https://sso.example", "http://10.1.2.3", "console.openid.issuer: must be a URL"),
        ("https://sso.example", "https://u:p@sso.example", "console.openid.issuer: must be a URL"),
        ("https://sso.example", "https://[sso", "console.openid.issuer: must be a URL"),
        ("https://sso.example", "https://sso.example?x=1", "console.openid.issuer: must have neither"),
        ("{env: OPENID_SECRET}", "s3cret", "console.openid.client_secret: a secret"),
        ("{admin: [a]}", "{}", "console.openid: set `roles`"),
        ("{admin: [a]}", "{root: [a]}", "console.openid.roles.root"),
        ("client_id: b", "client_id: b, scopes: ['a b']", "console.openid.scopes.0: "),
        ("client_id: b", "client_id: b, default_role: owner", "console.openid.default_role: should be 'viewer'"),
    ],
)
def test_a_mistake_about_signing_in_is_named_by_its_path(old: str, new: str, words: str) -> None:
    assert old in CONSOLE
    with pytest.raises(ConfigError) as caught:
        parse_config(CONSOLE.replace(old, new, 1) + GOOD)
    assert words in str(caught.value)
    assert "u:p" not in str(caught.value)
