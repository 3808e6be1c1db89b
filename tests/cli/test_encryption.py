"""`breakwater encryption`: keys, and the texts in lines of JSON."""

import io
import json
from pathlib import Path

import pytest

from breakwater.cli.errors import ExitCode
from breakwater.encryption import Cipher
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
    assert json.loads(run("encryption", "keys", "--json").out)["keys"][1] == {"id": old, "encrypts": False}
    given(monkeypatch, first + job)
    assert run("encryption", "decrypt").out == job * 2
    assert "encryption: on, with the first of 2 keys; all decrypt" in run("config", "check").out

    config.write_text(CONFIG + f"encryption: {{keys: [{references[1]}, {references[1]}]}}\n")
    given(monkeypatch, job + first)
    lost = run("encryption", "decrypt")
    assert (lost.code, lost.out) == (ExitCode.FAILED, job)
    assert f"line 2: it is encrypted with key {old}, and encryption.keys has {new}: put that key back" in lost.err
    assert "the same key stands there twice" in run("config", "check").err
    (tmp_path / "new").write_text("swordfish")
    assert "encryption.keys.0: is not a key" in run("encryption", "keys").err
    assert "encryption.keys.0: is not a key" in run("doctor").out
