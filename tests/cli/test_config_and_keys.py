"""`config check`, `keys`, and `setup` where there is nothing to set up."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from breakwater.identity.contract import KEY_SCOPES
from breakwater.kernel.commands.errors import ExitCode
from tests.cli.api_stub import Stub
from tests.cli.conftest import Run, in_thread
from tests.nats_node import nats_program
from tests.server_sources import RunningServer

GOOD = """
providers: {local: {base_url: "http://127.0.0.1:9/v1"}}
defaults: {model: small}
agents:
  writer:
    fallback_models: [large]
    budget: {daily_usd: 5, enforcement: hard}
    breaker: {preset: refactor, scope: provider, errors: 20, failure_rate: 0.5, cooldown_growth: 2}
    guard: {max_tokens: off, confidence: {floor: 0.4}}
    rate_limit: {requests_per_minute: 60, concurrent_calls: 1}
  reader: {breaker: off, guard: off, retry: {max_attempts: 1}}
  plain: {}
models: {large: {rate_limit: {tokens_per_minute: 9000, requests: 50, per: hour, on_exceeded: fail}}}
"""
BAD = """
providers: {local: {base_url: "ftp://x"}}
agents: {writer: {modle: m, concurrency: 0}, reader: {model: m, provider: locl}}
"""


def test_a_right_config_shows_the_agents_as_they_will_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "breakwater.yaml").write_text(GOOD)
    ran = run("config", "check")
    assert ran.code == ExitCode.OK
    lines = ran.out.splitlines()
    assert lines[0] == "breakwater.yaml: ok, 3 agents"
    assert max(map(len, lines)) <= 100
    # Each agent is a row, with its longer settings below it, folded.
    agents = {agent.split()[0]: " ".join(agent.split()) for agent in re.split(r"\n(?=\w)", ran.out)[2:]}
    assert agents["writer"] == (
        "writer small > large 3x, 0.5-5 s $5.00/day hard calls 16 in parallel, 30 s each, 300 s for a job "
        "breaker preset: refactor, scope: provider, errors: 20, within_s: 60, consecutive_failures: 2, same_error: 3, "
        "failure_rate: 0.5, cooldown_s: 60, cooldown_growth: 2 "
        "guard max_iterations: 10, max_cost_usd: $10.00, consecutive_failures: 3, same_error: 5, "
        "confidence: {field: confidence, answers: 3, floor: 0.4, falling: true} "
        "rate limit requests_per_minute: 60, concurrent_calls: 1, count_cached: true, on_exceeded: wait; "
        "large: tokens_per_minute: 9,000, requests: 50, per: hour, count_cached: true, on_exceeded: fail"
    )
    limit = "rate limit large: tokens_per_minute: 9,000"
    assert agents["reader"].startswith(
        "reader small once no limit calls 16 in parallel, 30 s each, 300 s for a job breaker off"
    )
    assert "guard max_iterations: 10, max_tokens: 200,000, " in agents["plain"]
    assert limit not in agents["plain"]


def test_config_check_warns_of_variables_that_are_not_set_and_reads_secrets_only_on_request(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_KEY", raising=False)
    (tmp_path / "breakwater.yaml").write_text(GOOD.replace('/v1"', '/v1", api_key: {env: LOCAL_KEY}'))
    ran = run("config", "check")
    assert ran.code == ExitCode.OK
    assert max(map(len, ran.out.splitlines())) <= 100
    assert "providers.local.api_key: the environment variable LOCAL_KEY is not set here" in ran.err
    ran = run("config", "check", "--secrets")
    assert ran.code == ExitCode.FAILED
    assert "providers.local.api_key: the environment variable LOCAL_KEY is not set" in ran.err
    monkeypatch.setenv("LOCAL_KEY", "sk-test")
    ran = run("config", "check", "--secrets")
    assert ran.code == ExitCode.OK
    assert "LOCAL_KEY" not in ran.err


def test_config_check_finds_a_region_that_is_not_there_on_request(run: Run, tmp_path: Path) -> None:
    (tmp_path / "breakwater.yaml").write_text(
        "providers: {aws: {kind: bedrock, region: eu-centrl-1}}\nagents: {writer: {model: aws/amazon.nova-pro-v1:0}}\n"
    )
    ran = run("config", "check", "--secrets")
    assert ran.code == ExitCode.FAILED
    assert "providers.aws: AWS has no region 'eu-centrl-1'; did you mean 'eu-central-1'?" in ran.err


def test_the_nats_users_of_programs_are_printed_as_nats_takes_them(run: Run, tmp_path: Path) -> None:
    (tmp_path / "breakwater.yaml").write_text(GOOD + "programs: {help-desk: {agents: [reader]}}\n")
    printed = run("config", "nats-users").out
    assert '"password": $BW_NATS_PROGRAM_HELP_DESK_PASSWORD' in printed
    (tmp_path / "nats.conf").write_text(f"jetstream {{}}\n{printed}")
    variables = set(re.findall(r"\$(BW_NATS_\w+)", printed))
    checked = subprocess.run(
        [nats_program(), "-t", "-c", tmp_path / "nats.conf"],
        env=os.environ | dict.fromkeys(variables, "'p'"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


def test_the_effective_config_is_there_for_programs(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(GOOD)
    agents = run("config", "check", "x.yaml", "--json").json["agents"]
    assert agents["writer"]["models"][0] == {"model": "small", "provider": "local", "rate_limit": None}
    assert agents["writer"]["models"][1]["rate_limit"]["tokens_per_minute"] == 9000
    assert agents["writer"]["rate_limit"]["requests_per_minute"] == 60
    assert agents["writer"]["timeout_s"] == 30


def test_every_mistake_is_listed_at_once(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.yaml").write_text(BAD)
    monkeypatch.setenv("BREAKWATER_CONFIG", "bad.yaml")
    ran = run("config", "check")
    assert ran.code == ExitCode.FAILED
    mistakes = (
        "providers.local.base_url",
        "did you mean 'model'",
        "agents.writer.concurrency",
        "did you mean 'local'?",
    )
    for part in ("bad.yaml", *mistakes):
        assert part in ran.err
    assert run("config", "check", "--json").error["code"] == "config"
    assert "no such file" in run("config", "check", "nope.yaml").err


@pytest.fixture(autouse=True)
def file_of_keys(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys are in a file, as no plane is running."""
    del run
    monkeypatch.setenv("BREAKWATER_API_KEYS_FILE", str(tmp_path / "api_keys.json"))


def test_a_key_is_made_listed_and_revoked(run: Run, tmp_path: Path) -> None:
    made = run("keys", "create", "billing")
    assert made.code == ExitCode.OK
    key = made.out.strip()
    assert key.startswith("bw_")
    assert "only time" in made.err
    assert key.split("_", 2)[2] not in (tmp_path / "api_keys.json").read_text()
    assert "another key" not in made.err
    [listed] = run("keys", "list", "--json").json
    assert listed["name"] == "billing"
    assert listed["id"] in key
    assert listed["id"] in run("keys", "list").out
    assert run("keys", "revoke", listed["id"]).out == f"revoked {listed['id']} (billing)\n"
    assert run("keys", "list", "--json").json == []
    gone = run("keys", "revoke", listed["id"])
    assert gone.code == ExitCode.FAILED
    assert "there is no API key" in gone.err


def test_a_key_is_revoked_by_its_name_where_only_one_has_it(run: Run) -> None:
    ids = [run("keys", "create", name, "--json").json["key"].split("_")[1] for name in ("laptop", "ci", "ci")]
    assert run("keys", "revoke", "laptop").out == f"revoked {ids[0]} (laptop)\n"
    for name in ("ci", "laptop"):
        refused = run("keys", "revoke", name)
        assert refused.code == ExitCode.FAILED
        assert f"{ids[1]} (ci), {ids[2]} (ci)" in refused.err
    assert len(run("keys", "list", "--json").json) == 2


def test_a_key_that_is_for_nothing_else_is_for_a_program_that_submits_jobs_and_reads_their_results(run: Run) -> None:
    made = run("keys", "create", "billing")
    assert "Its scopes: submit." in made.err
    assert run("keys", "create", "boss", "--scope", "read", "--scope", "all", "--json").json["scopes"] == list(
        KEY_SCOPES
    )


def test_a_key_may_be_for_some_things_only(run: Run) -> None:
    made = run("keys", "create", "on-call", "--scope", "operate", "--scope", "read", "--scope", "read")
    assert made.code == ExitCode.OK
    assert "Its scopes: read, operate." in made.err
    assert run("keys", "create", "worker", "--scope", "submit", "--json").json["scopes"] == ["submit"]
    run("keys", "create", "laptop", "--scope", "all")
    scopes = {key["name"]: key["scopes"] for key in run("keys", "list", "--json").json}
    assert scopes == {"on-call": ["read", "operate"], "worker": ["submit"], "laptop": list(KEY_SCOPES)}
    listed = run("keys", "list").out.splitlines()
    assert [re.split(r"  +", line)[1:3] for line in listed] == [
        ["name", "scopes"],
        ["on-call", "read, operate"],
        ["worker", "submit"],
        ["laptop", "submit, read, operate, approve, audit, limits"],
    ]


def test_a_key_may_be_of_a_user_and_a_team_and_give_its_jobs_tags(run: Run) -> None:
    tags = ("--tag", "project=ranking", "--tag", "site=a=b")
    made = run("keys", "create", "ada", "--user", "ada@example.com", "--team", "Data Science", *tags, "--json").json
    [listed] = run("keys", "list", "--json").json
    for key in (made, listed):
        assert (key["user"], key["team"]) == ("ada@example.com", "Data Science")
        assert key["tags"] == {"project": "ranking", "site": "a=b"}
    assert "sha256" not in listed
    assert "project=ranking, site=a=b" in run("keys", "list").out
    for mistake, answer in ((("project",), "has no value"), (("a=1", "a=2"), "a is given twice")):
        refused = run("keys", "create", "bob", *(text for tag in mistake for text in ("--tag", tag)))
        assert refused.code == ExitCode.USAGE
        assert answer in refused.err
    assert len(run("keys", "list", "--json").json) == 1


def test_a_scope_that_is_not_known_makes_no_key_and_the_known_ones_are_named(run: Run) -> None:
    ran = run("keys", "create", "ci", "--scope", "write")
    assert ran.code == ExitCode.USAGE
    for scope in ("'write'", *KEY_SCOPES):
        assert scope in ran.err
    assert run("keys", "list", "--json").json == []


def test_the_help_says_what_each_scope_is_for(run: Run) -> None:
    said = run("keys", "create", "--help").out
    for scope in KEY_SCOPES:
        assert f"{scope}: " in said


def test_a_name_that_is_taken_is_reported(run: Run) -> None:
    first = run("keys", "create", "billing", "--json").json["key"].split("_")[1]
    again = run("keys", "create", "billing")
    assert again.code == ExitCode.OK
    assert f"'billing' has another key already ({first})" in again.err


def test_keys_are_where_they_are_said_to_be(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BREAKWATER_API_KEYS_FILE", str(tmp_path / "named.json"))
    run("keys", "create", "b")
    assert (tmp_path / "named.json").exists()
    run("keys", "create", "c", "--file", "own.json")
    assert (tmp_path / "own.json").exists()
    for named in (("--data", "plane"), ("--url", "http://127.0.0.1:9", "--api-key", "k")):
        assert run("keys", "create", "a", *named).code == ExitCode.UNREACHABLE
    monkeypatch.delenv("BREAKWATER_API_KEYS_FILE")
    nowhere = run("keys", "create", "d")
    assert (nowhere.code, "no plane is running" in nowhere.err) == (ExitCode.UNREACHABLE, True)


async def test_keys_of_a_running_plane_are_made_listed_and_changed_over_its_api(
    run: Run, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BREAKWATER_API_KEYS_FILE")
    rights = {"scopes": ["submit"], "tenants": [], "agents": ["writer"], "models": ["m"], "user": "ada", "team": None}
    times = {"created_at": "2026-11-29T10:00:00.000Z", "expires_at": "2026-12-29T10:00:00.000Z"}
    listed = {"id": "3f9c01d2a77b", "name": "a/b", "source": "plane", "state": "active", "tags": {}, **rights, **times}
    other = listed | {"id": "000000000000", "name": "first", "source": "file", "expires_at": None}
    revoked = listed | {"state": "revoked"}
    stub.answers = {
        "POST keys": (200, listed | {"key": "bw_3f9c01d2a77b_x"}),
        "POST keys/a/b/rotate": (200, listed | {"key": "bw_3f9c01d2a77b_y", "old_secret_until": times["expires_at"]}),
        "POST keys/a/b/expire": (200, listed),
        "POST keys/a/b/revoke": (200, revoked),
        "GET keys": (200, {"keys": [other, listed], "continue_after": None}),
    }
    options = (
        "--scope",
        "submit",
        "--agent",
        "writer",
        "--model",
        "m",
        "--user",
        "ada",
        "--expires",
        "2026-12-29T10:00Z",
    )
    made = await in_thread(
        run, "keys", "create", "a/b", *options, "--expires", "2026-12-29T10:00Z", "--reason", "pilot"
    )
    assert (made.out, "Its scopes: submit. It expires at" in made.err) == ("bw_3f9c01d2a77b_x\n", True)
    rotated = await in_thread(run, "keys", "rotate", "a/b", "--grace", "90s")
    assert (rotated.out, "The old secret is valid until" in rotated.err) == ("bw_3f9c01d2a77b_y\n", True)
    assert "expires at" in (await in_thread(run, "keys", "expire", "a/b", "--at", "never")).out
    assert (await in_thread(run, "keys", "revoke", "a/b", "--reason", "leaked")).out == "revoked 3f9c01d2a77b (a/b)\n"
    assert [key["source"] for key in (await in_thread(run, "keys", "list", "--json")).json] == ["file", "plane"]
    sent = [body for _, body in stub.asked]
    assert sent[0] == {"name": "a/b", "tags": {}, "weight": 1, "expires_at": times["expires_at"], "reason": "pilot"} | {
        name: value for name, value in rights.items() if value is not None
    }
    assert sent[1:4] == [{"grace_s": 90}, {"at": "never"}, {"reason": "leaked"}]
    assert (await in_thread(run, "keys", "rotate", "a/b", "--grace", "soon")).code == ExitCode.USAGE
    assert (await in_thread(run, "keys", "create", "x", "--file", "f.json", "--expires", "1d")).code == ExitCode.USAGE


def test_setup_without_servers_says_which_one_is_missing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_server: RunningServer
) -> None:
    (tmp_path / "breakwater.yaml").write_text(GOOD)
    monkeypatch.setenv("BREAKWATER_NATS_URL", "nats://setup:secret@127.0.0.1:9")
    monkeypatch.setenv("BREAKWATER_CLICKHOUSE_URL", "http://127.0.0.1:9/breakwater")
    monkeypatch.setenv("BREAKWATER_REDIS_URL", "redis://127.0.0.1:9")
    ran = run("setup")
    assert ran.code == ExitCode.UNREACHABLE
    assert "Redis did not answer: Error 111 connecting to 127.0.0.1:9" in ran.err
    monkeypatch.setenv("BREAKWATER_REDIS_URL", redis_server.url)
    ran = run("setup")
    assert ran.code == ExitCode.UNREACHABLE
    assert "NATS does not answer at nats://setup:***@127.0.0.1:9" in ran.err
    assert "secret" not in ran.err


def test_config_check_shows_shared_caps_and_warns_of_what_is_hardly_meant(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "providers: {p: {base_url: 'http://127.0.0.1:1'}}\n"
        "agents: {a: {model: m, budget: {enforcement: hard}, max_cost_usd: 0.5}}\n"
        "budgets: {timezone: Europe/Berlin, tenants: {'*': {daily_usd: 5, monthly_usd: 4}}}\n"
    )
    ran = run("config", "check", str(file))
    assert ran.code == ExitCode.OK
    assert "$0.50 a job" in ran.out
    assert "budgets.tenants.*: $5.00/day, $4.00/month soft, days in Europe/Berlin" in ran.out
    assert run("config", "check", str(file), "--json").json["warnings"] == [
        "agents.a.budget: is hard but has no limit, so it refuses nothing; set daily_usd or monthly_usd",
        "budgets.tenants.*: the daily limit exceeds the monthly one",
        "agents.a: no call is ever made under the hard limit: m has no price (set models.m.price)",
    ]


def test_config_check_warns_of_embeddings_that_models_can_not_make_for_one_another(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "providers: {openai: {base_url: 'http://127.0.0.1:1'}}\n"
        "models: {openai/a: {dimensions: 8}, openai/b: {dimensions: 9}, openai/c: {dimensions: 8}}\n"
        "agents:\n"
        "  alone: {model: openai/a}\n"
        "  alike: {model: openai/a, fallback_models: [openai/c]}\n"
        "  longer: {model: openai/a, fallback_models: [openai/b]}\n"
        "  unknown: {model: openai/text-embedding-3-small, fallback_models: [openai/d]}\n"
        "  chat: {model: openai/gpt-4o, fallback_models: [openai/gpt-4.1]}\n"
    )
    assert run("config", "check", str(file), "--json").json["warnings"] == [
        "agents.longer: its embeddings jobs are refused: a fallback needs the same dimensions, and "
        "models.openai/a.dimensions is 8, models.openai/b.dimensions is 9",
        "agents.unknown: its embeddings jobs are refused: a fallback needs the same dimensions; "
        "set models.openai/text-embedding-3-small.dimensions",
    ]


def test_config_check_warns_of_models_that_go_elsewhere_and_calls_that_no_cap_has_room_for(
    run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "providers: {p: {base_url: 'http://127.0.0.1:1'}, job: {kind: process, command: [cat]}}\n"
        "models: {p/dear: {price: {input_usd_per_mtok: 1, output_usd_per_mtok: 100}}}\n"
        "defaults: {provider: p}\n"
        "agents:\n"
        "  elsewhere: {model: openai/m}\n"
        "  mixed: {provider: job, model: job, fallback_models: [p/dear]}\n"
        "  dear: {model: p/dear, budget: {daily_usd: 0.25, enforcement: hard}}\n"
        "  short: {model: p/dear, max_tokens: 2000, budget: {daily_usd: 0.25, enforcement: hard}}\n"
    )
    assert run("config", "check", str(file), "--json").json["warnings"] == [
        "agents.elsewhere: no provider is named 'openai', so 'p' is called with the model name 'openai/m'; if that is "
        "intended, set models.openai/m.provider to 'p'",
        "agents.mixed: has process or callable models and chat models in its chain; its jobs can't have `input`, "
        "which chat models don't support",
        "agents.dear: no call is ever made under the hard limit: the output of a call to p/dear alone may cost $0.410, "
        "and agents.dear.budget.daily_usd is $0.25 (raise it, or lower max_tokens)",
    ]


def test_config_check_warns_of_a_limit_that_has_no_room_for_any_call_of_an_agent(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "providers: {p: {base_url: 'http://127.0.0.1:1'}}\n"
        "models: {p/dear: {price: {input_usd_per_mtok: 1, output_usd_per_mtok: 100}}}\n"
        "agents: {dear: {model: p/dear}, short: {model: p/dear, max_tokens: 2000}}\n"
        "budgets: {limits: [{scope: 'agent:*', usd: 0.25, per: week}, {scope: 'user:*', usd: 0.01, per: week}]}\n"
    )
    [warning] = run("config", "check", str(file), "--json").json["warnings"]
    assert warning.startswith("agents.dear: no call is ever made under the hard limit: the output of a call to p/dear")
    assert "budgets.limits.0.usd is $0.25" in warning


def test_config_check_warns_of_a_price_that_leaves_out_what_long_inputs_cost(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"

    def warned(tiers: str) -> list[str]:
        file.write_text(
            "providers: {google: {base_url: 'http://127.0.0.1:1'}}\nagents: {a: {model: google/gemini-2.5-pro}}\n"
            "models:\n  google/gemini-2.5-flash: {price: {input_usd_per_mtok: 1, output_usd_per_mtok: 2}}\n"
            f"  google/gemini-2.5-pro: {{price: {{input_usd_per_mtok: 1, output_usd_per_mtok: 2{tiers}}}}}\n"
        )
        return run("config", "check", str(file), "--json").json["warnings"]

    assert warned("") == [
        "models.google/gemini-2.5-pro.price: has a single price, but the price list has others above 200,000 input "
        "tokens; set price.tiers with above_tokens: 200000"
    ]
    assert warned(", tiers: [{above_tokens: 200000, input_usd_per_mtok: 2, output_usd_per_mtok: 3}]") == []


def test_config_check_warns_of_tags_that_are_not_recorded_and_headers_that_anyone_may_set(
    run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    plane = "providers: {p: {base_url: 'http://127.0.0.1:1'}}\nagents: {a: {model: m}}\ncost_tags: [project]\n"
    file.write_text(
        f"{plane}"
        "identity:\n  jwt: {issuer: us, audience: plane, jwks_url: 'https://x/', tags: {project: a, site: b}}\n"
        "  headers: {user: X-User, networks: [0.0.0.0/0]}\n"
    )
    assert run("config", "check", str(file), "--json").json["warnings"] == [
        "identity.jwt.tags.site: is not recorded, because cost_tags does not list it",
        "identity.headers.networks: 0.0.0.0/0 is any address, so that any client may name any user",
    ]
    for wrong, said in (
        ("headers: {networks: [10.0.0.0/8]}", "set user, team or both"),
        ("headers: {user: X-User}", "networks"),
        ("headers: {user: 'X User', networks: [10.0.0.0/8]}", "identity.headers.user"),
        ("headers: {user: X-Breakwater-User, networks: [10.0.0.0/8]}", "begins with x-breakwater-"),
        ("jwt: {issuer: us, audience: plane, jwks_url: 'http://id.example/'}", "must be a URL with https://"),
        ("jwt: {issuer: us, audience: plane, jwks_url: 'https://x/', agents: [b]}", "'b' is not configured"),
        ("jwt: {issuer: us, audience: plane, jwks_url: 'https://x/', tenants: ['*']}", "no wildcards"),
    ):
        file.write_text(f"{plane}identity: {{{wrong}}}\n")
        refused = run("config", "check", str(file))
        assert (refused.code, said in refused.err) == (ExitCode.FAILED, True), refused.err


def test_config_check_warns_of_alerts_that_nobody_would_get(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("S", "secret")
    file = tmp_path / "c.yaml"

    def warned(hook: str, on_events: str) -> list[str]:
        file.write_text(
            "providers: {p: {base_url: 'http://127.0.0.1:1'}}\nagents: {a: {model: m}}\n"
            f"alerts: {{on_events: {on_events}, allow_networks: [10.1.0.0/16], channels: {{ops: {{\n"
            f"  events: [breaker_open, breaker_closed], webhook: {{url: '{hook}', secret: {{env: S}}}}}}}}}}\n"
        )
        return run("config", "check", str(file), "--json").json["warnings"]

    refused = "alerts.channels.ops.webhook.url: is refused (loopback); alerts.allow_networks may allow it"
    never = "alerts.channels.ops.events: breaker_open is never sent, because alerts.on_events does not list it"
    assert warned("http://127.0.0.1:9/", "[guard_tripped]") == [never, refused]
    assert warned("http://10.1.2.3/", "[breaker_open]") == []
    assert warned("https://hooks.example.com/", "[breaker_open]") == []
