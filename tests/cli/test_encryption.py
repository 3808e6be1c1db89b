"""`breakwater encryption`: keys, and the texts in lines of JSON."""

import io
import json
from pathlib import Path

import pytest

from breakwater.kernel.commands.errors import ExitCode
from breakwater.kernel.security.encryption import Cipher
from breakwater.local.datadir import DataDir
from breakwater.local.stack import PLANE_KEY
from tests.cli.conftest import Run

CONFIG = """
providers: {local: {base_url: "http://127.0.0.1:9/v1"}}
agents: {writer: {model: small}}
"""


def given(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_keys_are_made_listed_and_replaced_and_texts_are_encrypted_and_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "breakwater.yaml"
    config.write_text(CONFIG)
    assert "encryption is off" in run("encryption", "keys").err
    given(monkeypatch, "{}\n")
    off = run("encryption", "encrypt")
    assert (off.code, "encryption.keys has no key" in off.err) == (ExitCode.FAILED, True)
    keys = [run("encryption", "new-key").out.strip() for _ in range(2)]
    old, new = [Cipher([key]).key_ids[0] for key in keys]
    for name, key in zip(("old", "new"), keys, strict=True):
        (tmp_path / name).write_text(key)
    references = [f"{{file: {tmp_path / name}}}" for name in ("old", "new")]
    job = '{"agent":"writer","prompt":"hello"}\n'

    config.write_text(CONFIG + f"encryption: {{keys: [{references[0]}]}}\n")
    given(monkeypatch, job)
    first = run("encryption", "encrypt").out
    assert json.loads(first)["encrypted"].startswith(f"bwe1.{old}.")
    assert "hello" not in first

    given(monkeypatch, job + "hello\n")
    wrong = run("encryption", "encrypt")
    assert (wrong.code, "line 2: " in wrong.err, "hello" in wrong.out) == (ExitCode.FAILED, True, False)

    config.write_text(CONFIG + f"encryption: {{keys: [{', '.join(reversed(references))}]}}\n")
    assert run("encryption", "keys").out.split() == [new, "encrypts", "and", "decrypts", old, "decrypts"]
    assert json.loads(run("encryption", "keys", "--json").out)["keys"][1] == {
        "id": old,
        "encrypts": False,
        "own": False,
    }
    given(monkeypatch, first + job)
    assert run("encryption", "decrypt").out == job * 2
    assert "encryption: on; the first of 2 keys encrypts, all decrypt" in run("config", "check").out

    config.write_text(CONFIG + f"encryption: {{keys: [{references[1]}, {references[1]}]}}\n")
    given(monkeypatch, job + first)
    lost = run("encryption", "decrypt")
    assert (lost.code, lost.out) == (ExitCode.FAILED, job)
    assert f"line 2: it is encrypted with key {old}, and encryption.keys has {new}: put that key back" in lost.err
    assert "the same key is listed twice" in run("config", "check").err
    (tmp_path / "new").write_text("swordfish")
    assert "encryption.keys.0: is not a key" in run("encryption", "keys").err
    assert "encryption.keys.0: is not a key" in run("doctor").out


def test_the_planes_own_key_is_read_from_the_data_directory_and_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataDir(tmp_path / ".breakwater")
    data.create()
    own = Cipher(plane_key=data.secret(PLANE_KEY))
    assert data.secret_file(PLANE_KEY).stat().st_mode & 0o777 == 0o600
    config = tmp_path / "breakwater.yaml"
    config.write_text(CONFIG.replace("model: small", "model: small, persist_responses: false"))
    monkeypatch.setenv("BREAKWATER_CONFIG", str(config))
    monkeypatch.chdir(tmp_path)
    assert run("encryption", "keys").out == f"{own.own_id}  decrypts, the plane's own for agents that keep no texts\n"
    assert (
        "encrypted with the plane's own key, or not at all if BREAKWATER_PLANE_KEY is not set"
        in run("config", "check").out
    )
    stored = own.encrypt_document(b'{"output":"hello"}', private=True)
    given(monkeypatch, stored.decode())
    assert run("encryption", "decrypt").out == '{"output":"hello"}\n'
    monkeypatch.setenv("BREAKWATER_PLANE_KEY", "another one, of thirty-two letters")
    assert own.own_id not in run("encryption", "keys").out
