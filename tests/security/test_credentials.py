"""Promises of credentials.py."""

import math
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvstore.protocol.errors import ConfigError, Denied, Unauthorized
from kvstore.security.credentials import MAX_FILE_BYTES, NO_TENANT, NO_TOKEN, NODES_LINE, Credentials, digest_of, read_credentials
from kvstore.security.identity import ANONYMOUS, Identity, IdentityKind, Role

NODES = '[nodes]\n"*" = "join"\n'
FULL = f"""
[tenants]
red = "secret"
[[tenants.blue]]
sha256 = "{digest_of("reads").hex()}"
role = "read"
expires = 2027-01-31T12:00:00Z
[[tenants.blue]]
token = "rules"
role = "admin"
expires = 2027-02-01
[nodes]
"*" = "join"
n1 = ["one", {{ token = "two" }}]
[instances]
p0 = "engine"
[admins]
ops = {{ token = "root", expires = 2027-02-01 }}
"""
IN_TIME_S = datetime(2027, 1, 1, tzinfo=UTC).timestamp()


def written(folder: Path, text: str) -> str:
    path = folder / "tokens.toml"
    path.write_text(text)
    return str(path)


@pytest.fixture
def full(tmp_path: Path) -> Credentials:
    return read_credentials(written(tmp_path, FULL))


@pytest.mark.parametrize(
    ("tenant", "token", "kind", "role", "name"),
    [
        ("red", "secret", IdentityKind.TENANT, Role.WRITE, "red"),
        ("blue", "reads", IdentityKind.TENANT, Role.READ, "blue"),
        ("blue", "rules", IdentityKind.TENANT, Role.ADMIN, "blue"),
        ("", "join", IdentityKind.NODE, Role.NONE, ""),
        ("", "one", IdentityKind.NODE, Role.NONE, "n1"),
        ("", "two", IdentityKind.NODE, Role.NONE, "n1"),
        ("", "engine", IdentityKind.INSTANCE, Role.NONE, "p0"),
        ("", "root", IdentityKind.OPERATOR, Role.ADMIN, "ops"),
        ("blue", "root", IdentityKind.OPERATOR, Role.ADMIN, "ops"),
    ],
)
def test_each_token_is_of_one_kind_and_role(full: Credentials, tenant: str, token: str, kind: IdentityKind, role: Role, name: str) -> None:
    found = full.identify(tenant, token, now_s=IN_TIME_S)
    assert (found.kind, found.role, found.name) == (kind, role, name)
    assert full.holds(found, now_s=IN_TIME_S)
    assert full.has(kind)


@pytest.mark.parametrize(
    ("tenant", "token"),
    [("red", "wrong"), ("red", ""), ("green", "secret"), ("green", ""), ("blue", "secret"), ("", "secret"), ("red", "\udcff")],
)
def test_an_unknown_tenant_and_a_wrong_token_are_refused_alike(full: Credentials, tenant: str, token: str) -> None:
    text = NO_TOKEN if not token else f"unknown tenant '{tenant}' or wrong token" if tenant else NO_TENANT
    with pytest.raises(Unauthorized, match=f"^{re.escape(text)}$"):
        full.identify(tenant, token, now_s=IN_TIME_S)


def test_a_token_ends_at_its_time(full: Credentials) -> None:
    end_s = datetime(2027, 1, 31, 12, tzinfo=UTC).timestamp()
    reader = full.identify("blue", "reads", now_s=end_s - 1)
    assert reader.expires_s == end_s
    assert full.holds(reader, now_s=end_s - 1)
    assert not full.holds(reader, now_s=end_s)
    with pytest.raises(Unauthorized, match=r"^the token of tenant 'blue' with role read has expired"):
        full.identify("blue", "reads", now_s=end_s)
    assert full.identify("blue", "rules", now_s=end_s).expires_s == datetime(2027, 2, 1, tzinfo=UTC).timestamp()


def test_without_credentials_everybody_is_let_in() -> None:
    nobody = read_credentials("")
    assert nobody.allows_anonymous
    assert nobody.identify("any", "thing", now_s=0) == ANONYMOUS
    assert nobody.holds(ANONYMOUS, now_s=0)
    assert len(nobody) == 0
    assert not nobody.holds(Identity(IdentityKind.TENANT, Role.READ, "red", "1f"), now_s=0)


def test_certificate_suffices_and_must_match_the_token(full: Credentials) -> None:
    node, red, blue = (
        Identity(IdentityKind.NODE, name="n1"),
        Identity(IdentityKind.TENANT, Role.WRITE, "red"),
        Identity(IdentityKind.TENANT, Role.WRITE, "blue"),
    )
    assert full.identify("", "", now_s=IN_TIME_S, certificate=node) == node
    assert full.holds(node, now_s=IN_TIME_S)
    assert full.identify("red", "secret", now_s=IN_TIME_S, certificate=red).credential
    shown = full.identify("red", "secret", now_s=IN_TIME_S, certificate=replace(red, certificate=b"f" * 32))
    assert shown.certificate == b"f" * 32
    assert full.holds(shown, now_s=IN_TIME_S)
    assert full.identify("red", "secret", now_s=IN_TIME_S, certificate=node).kind is IdentityKind.TENANT
    why = r"^the certificate is of tenant 'blue' with role write, the token of tenant 'red' with role write: use two of the same tenant$"
    with pytest.raises(Denied, match=why):
        full.identify("red", "secret", now_s=IN_TIME_S, certificate=blue)


def test_operator_token_beside_a_certificate(full: Credentials) -> None:
    """An operator's certificate stands for each tenant that is named; a tenant's own certificate does not go with an
    operator's token.
    """
    any_tenant = Identity(IdentityKind.TENANT, Role.ADMIN, "red", certificate=b"f" * 32)
    found = full.identify("red", "root", now_s=IN_TIME_S, certificate=any_tenant)
    assert (found.kind, found.certificate) == (IdentityKind.OPERATOR, b"f" * 32)
    with pytest.raises(Denied, match=r"^the certificate is of tenant 'red' with role write, the token of operator "):
        full.identify("red", "root", now_s=IN_TIME_S, certificate=Identity(IdentityKind.TENANT, Role.WRITE, "red"))


def test_what_another_file_lacks_or_has_for_another_role_is_gone(tmp_path: Path, full: Credentials) -> None:
    changed = read_credentials(written(tmp_path, FULL.replace('"read"', '"write"').replace('p0 = "engine"', 'p0 = "other"')))
    gone = {(identity.kind, identity.name) for identity in changed.revoked_since(full)}
    assert gone == {(IdentityKind.TENANT, "blue"), (IdentityKind.INSTANCE, "p0")}
    assert not changed.holds(full.identify("blue", "reads", now_s=IN_TIME_S), now_s=IN_TIME_S)
    assert changed.holds(full.identify("red", "secret", now_s=IN_TIME_S), now_s=IN_TIME_S)
    assert changed.revoked_since(changed) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"needs a section \[tenants\]"),
        ("tenants = 3\n", r"tenants is a section; write \[tenants\]"),
        ("[tenants\n", r"is not TOML: .*line 1"),
        ("x = 1" + "1" * 5000, r"is not TOML"),
        ("[users]\na = 'x'\n", r"has users: its sections are \[tenants\], \[nodes\], \[instances\], \[admins\]"),
        ("[tenants]\nred = 5\n", r"\[tenants\] red: write \"TOKEN\", or a table with token or sha256, and where wanted expires and role"),
        ("[tenants]\nred = ['']\n", r"\[tenants\] red, number 1: a token is a text that is not empty"),
        ("[tenants]\nred = { token = 5 }\n", r"\[tenants\] red: a token is a text"),
        ("[tenants]\nred = { token = 'a', sha256 = 'b' }\n", r"\[tenants\] red: write"),
        ("[tenants]\nred = { sha256 = 'b' }\n", r"\[tenants\] red: sha256 is the token's SHA-256, 64 hexadecimal digits"),
        (
            "[tenants]\nred = ['a', { token = 'b', role = 'all' }]\n",
            r"\[tenants\] red, number 2: role is 'all': it is read, write or admin",
        ),
        ("[tenants]\nred = { token = 'b', expires = 'soon' }\n", r"\[tenants\] red: expires is soon: write a day"),
        ("[tenants]\nred = { token = 'b', expires = 2027-01-01T00:00:00 }\n", r"\[tenants\] red: expires is 2027-01-01 00:00:00: write"),
        ("[nodes]\nn1 = { token = 'b', role = 'read' }\n", r"\[nodes\] n1: write .* wanted expires$"),
        ("[tenants]\nred = ['a', 'a']\n", r"\[tenants\] red, number 2: this token is in the file twice"),
        ("[nodes]\nn1 = 'a'\n[admins]\nops = 'a'\n", r"\[admins\] ops: this token is in the file twice"),
        ("# " + "x" * MAX_FILE_BYTES, "has more than 4 MiB"),
    ],
)
def test_a_bad_file_is_one_error_that_names_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"the tokens file .*tokens\.toml.*{said}"):
        read_credentials(written(tmp_path, text))


def test_file_without_join_tokens_is_refused_with_remedy(tmp_path: Path) -> None:
    path = written(tmp_path, '[tenants]\nred = "secret"\n')
    with pytest.raises(ConfigError, match="no node can join") as refused:
        read_credentials(path)
    assert str(refused.value).endswith(NODES_LINE)
    read_credentials(written(tmp_path, f'[tenants]\nred = "secret"\n{NODES_LINE}\n'))
    assert len(read_credentials(path.replace("tokens", "tokens"), nodes_have_certificates=True))
    assert not read_credentials(written(tmp_path, '[tenants]\nred = "secret"\n'), nodes_have_certificates=True).has(IdentityKind.NODE)


def test_owner_of_a_token_is_known_without_tenant_and_expired(full: Credentials) -> None:
    owners = {token: found.name if (found := full.owner(token)) else None for token in ("secret", "rules", "one", "root", "guess")}
    assert owners == {"secret": "red", "rules": "blue", "one": "n1", "root": "ops", "guess": None}


def test_tokens_that_end_are_known_in_that_order(full: Credentials) -> None:
    ends = [one.expires_s for one in full.next_to_expire]
    assert ends
    assert ends == sorted(one.expires_s for one in full.identities() if one.expires_s != math.inf)
