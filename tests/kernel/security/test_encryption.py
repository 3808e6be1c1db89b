"""Encrypting the texts of documents: what is encrypted can be read again, with the right key alone."""

import json
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.config import cipher_of, parse_config, require_reloadable, unreadable_secrets, variables_of
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.security.encryption import (
    COMPRESS_FROM,
    LEFT_OUT,
    OFF,
    TEXTS,
    Cipher,
    DecryptionError,
    key_of_document,
    new_key,
)
from tests.tables import each_row

OLD, NEW = new_key(), new_key()
OWN = "the plane's own key, any text of thirty-two"
CIPHER = Cipher([NEW, OLD])

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from([*TEXTS, "agent", "metadata", "tenant"])


@given(st.dictionaries(names, json_values))
def test_a_document_is_what_it_was_and_its_texts_are_a_token_meanwhile(document: dict[str, Any]) -> None:
    stored = CIPHER.encrypt_document(json.dumps(document).encode())
    assert json.loads(CIPHER.decrypt_document(stored)) == document
    kept = json.loads(stored)
    assert {name for name in TEXTS if kept.get(name)} == set()
    assert {name: kept[name] for name in kept if name not in (*TEXTS, "encrypted")} == {
        name: value for name, value in document.items() if name not in TEXTS
    }
    assert CIPHER.encrypt_document(stored) == stored, "nothing is encrypted twice"


@given(st.lists(st.text()))
def test_texts_that_are_appended_are_read_as_one(texts: list[str]) -> None:
    assert CIPHER.decrypt_lines("".join(map(CIPHER.encrypt_line, texts))) == "".join(texts)


@given(st.binary(max_size=100))
def test_what_is_no_object_with_texts_stays_as_it_is(document: bytes) -> None:
    assert OFF.encrypt_document(document) == document
    assert CIPHER.decrypt_document(document) == document


@each_row("document", [b"", b"[]", b'{"prompt": "x', b'{"input":' + b"[" * 1_000 + b"]" * 1_000 + b"}"])
def test_what_can_not_be_encrypted_is_not_passed_on(document: bytes) -> None:
    with pytest.raises(ValueError, match=r"JSON object|EOF|recursion"):
        CIPHER.encrypt_document(document)


def test_a_text_with_half_of_a_surrogate_pair_is_encrypted() -> None:
    stored = CIPHER.encrypt_document(rb'{"prompt": "ok \ud83d"}')
    assert json.loads(CIPHER.decrypt_document(stored)) == {"prompt": "ok \ufffd"}


def test_a_long_text_takes_no_more_than_it_did() -> None:
    answer = os.urandom(3 * COMPRESS_FROM).hex()
    stored = CIPHER.encrypt_document(json.dumps({"output": answer}).encode())
    assert len(stored) < len(answer)
    assert json.loads(CIPHER.decrypt_document(stored)) == {"output": answer}


def test_the_first_key_encrypts_and_all_decrypt() -> None:
    before = Cipher([OLD]).encrypt_document(b'{"prompt":"hello"}')
    assert CIPHER.decrypt_document(before) == b'{"prompt":"hello"}'
    after = CIPHER.encrypt_document(b'{"prompt":"hello"}')
    assert [key_of_document(one) for one in (after, before, b"{}")] == [*CIPHER.key_ids, None]
    with pytest.raises(DecryptionError, match=rf"key {CIPHER.key_ids[0]}, and encryption.keys has {CIPHER.key_ids[1]}"):
        Cipher([OLD]).decrypt_document(after)
    with pytest.raises(DecryptionError, match=r"encryption.keys has none: put that key back"):
        OFF.decrypt_document(after)


def test_the_planes_own_key_encrypts_what_is_private_where_there_is_no_other_and_always_decrypts() -> None:
    document = b'{"execution_id":"e1","output":"hello"}'
    own, both, other = Cipher(plane_key=OWN), Cipher([NEW], OWN), Cipher(plane_key=OWN[::-1])
    assert not own.on
    assert own.encrypt_document(document) == document
    stored = own.encrypt_document(document, private=True)
    assert key_of_document(stored) == own.own_id == both.key_ids[-1]
    assert own.decrypt_document(stored) == both.decrypt_document(stored) == document
    assert key_of_document(both.encrypt_document(document, private=True)) == both.key_ids[0]
    with pytest.raises(DecryptionError, match=rf"encryption.keys has none, and the plane's own key is {other.own_id}"):
        other.decrypt_document(stored)
    left_out = OFF.encrypt_document(document, private=True)
    assert json.loads(left_out) == {"execution_id": "e1", "encrypted": LEFT_OUT}
    assert own.decrypt_document(left_out) == left_out
    assert OFF.encrypt_document(b'{"execution_id":"e1"}', private=True) == b'{"execution_id":"e1"}'


def test_what_was_changed_is_not_read() -> None:
    token = json.loads(CIPHER.encrypt_document(b'{"prompt":"hello"}'))["encrypted"]
    changed = token[:-10] + ("A" if token[-10] != "A" else "B") + token[-9:]
    with pytest.raises(DecryptionError, match="it was changed"):
        CIPHER.decrypt_document(json.dumps({"encrypted": changed}).encode())
    with pytest.raises(DecryptionError, match="not in a format that this version knows"):
        CIPHER.decrypt_document(b'{"encrypted": "bwe1.what"}')


def test_the_texts_of_a_record_are_read_in_no_other_document_and_in_no_job() -> None:
    cipher = Cipher([new_key()])
    record = {"execution_id": "e1", "agent": "a", "messages": [{"role": "user", "content": "secret"}]}
    stored = json.loads(cipher.encrypt_document(json.dumps(record).encode()))
    assert json.loads(cipher.decrypt_document(json.dumps(stored).encode())) == record
    for other in ({"execution_id": "e2"}, {"job_id": "e1"}, {"agent": "a"}):
        with pytest.raises(DecryptionError, match="copied here"):
            cipher.decrypt_document(json.dumps({**other, "encrypted": stored["encrypted"]}).encode())


def test_a_field_of_that_name_elsewhere_is_no_token() -> None:
    document = json.dumps({"metadata": {"encrypted": CIPHER.encrypt(b"{}")}, "prompt": '"encrypted":"bwe1.'}).encode()
    assert CIPHER.decrypt_document(document) == document
    assert json.loads(CIPHER.decrypt_document(CIPHER.encrypt_document(document))) == json.loads(document)


CONFIG = "providers: {sim: {base_url: http://127.0.0.1:9}}\nagents: {a: {model: m}}\n"


def test_keys_are_named_by_the_config_and_reach_the_services_that_read_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config(CONFIG + "encryption: {keys: [{env: BW_NEW_KEY}, {env: BW_OLD_KEY}]}")
    assert len(unreadable_secrets(config)) == 2
    with pytest.raises(ConfigError, match=r"encryption.keys.0: the environment variable BW_NEW_KEY is not set"):
        cipher_of(config)
    monkeypatch.setenv("BW_NEW_KEY", NEW)
    monkeypatch.setenv("BW_OLD_KEY", "correct horse battery staple")
    with pytest.raises(
        ConfigError, match=r"encryption.keys.1: is not a key; `breakwater encryption new-key` makes one"
    ):
        cipher_of(config)
    monkeypatch.setenv("BW_OLD_KEY", OLD)
    assert cipher_of(config).key_ids == CIPHER.key_ids
    services = ("worker", "request", "console", "sink", "breaker", "budget", "alerter")
    assert [name for name in services if "BW_NEW_KEY" in variables_of(config, name)] == ["worker", "request", "console"]
    with pytest.raises(ConfigError, match="restart the services one by one"):
        require_reloadable(parse_config(CONFIG), config)
    with pytest.raises(ConfigError, match="a secret does not belong in the config"):
        parse_config(CONFIG + f"encryption: {{keys: [{NEW}]}}")
    assert not cipher_of(parse_config(CONFIG)).on
