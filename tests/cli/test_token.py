"""Promises of token.py, through the command: what it prints is what a master reads."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.cli.main import kvstore
from kvstore.security.credentials import read_credentials
from kvstore.security.identity import IdentityKind, Role
from tests.credentials import tokens_file


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(kvstore, ["token", "new", *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("arguments", "tenant", "kind", "role", "name"),
    [
        (["--tenant", "blue"], "blue", IdentityKind.TENANT, Role.WRITE, "blue"),
        (
            ["--tenant", 'a "name" with = signs', "--role", "read"],
            'a "name" with = signs',
            IdentityKind.TENANT,
            Role.READ,
            'a "name" with = signs',
        ),
        (["--node"], "", IdentityKind.NODE, Role.NONE, ""),
        (["--node", "n1"], "", IdentityKind.NODE, Role.NONE, "n1"),
        (["--instance"], "", IdentityKind.INSTANCE, Role.NONE, ""),
        (["--admin", "ops"], "", IdentityKind.OPERATOR, Role.ADMIN, "ops"),
    ],
)
def test_token_authenticates_once_its_entry_is_in_the_file(
    tmp_path: Path, arguments: list[str], tenant: str, kind: IdentityKind, role: Role, name: str
) -> None:
    status, said = run(*arguments, "--expires", "2100-01-01")
    assert status == 0
    (made,) = re.findall(r"^token: (\S+)$", said, re.MULTILINE)
    lines = said.partition("without a restart:\n\n")[2]
    assert made not in lines, "only its digest is kept"
    (tmp_path / "tokens.toml").write_text('[tenants]\nred = "secret"\n[[nodes.n0]]\ntoken = "n0"\n' + lines)
    found = read_credentials(str(tmp_path / "tokens.toml")).identify(tenant, made, now_s=0)
    assert (found.kind, found.role, found.name) == (kind, role, name)
    assert found.expires_s == datetime(2100, 1, 1, tzinfo=UTC).timestamp()


def test_each_is_another_and_scripts_read_it_as_json(tmp_path: Path) -> None:
    made = [json.loads(run("--tenant", "blue", "--json")[1]) for _ in range(2)]
    assert made[0]["token"] != made[1]["token"]
    assert len(made[0]["token"]) >= 43, "256 bits"
    both = read_credentials(tokens_file(tmp_path, more=made[0]["toml"] + made[1]["toml"]))
    assert [both.identify("blue", one["token"], now_s=0).name for one in made] == ["blue", "blue"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give exactly one of"),
        (["--tenant", "a", "--admin", "b"], "give exactly one of"),
        (["--admin", "b", "--role", "read"], "--role applies to --tenant only"),
        (["--admin", "b", "--expires", "2020-01-01"], "--expires 2020-01-01 is in the past"),
    ],
)
def test_token_new_refuses_none_several_and_past_expiry(arguments: list[str], message: str) -> None:
    status, said = run(*arguments)
    assert status == 2
    assert said.startswith(f"kvstore: error: {message}")


def test_out_writes_the_token_to_a_private_file_only(tmp_path: Path) -> None:
    file = tmp_path / "blue.token"
    status, said = run("--tenant", "blue", "--out", str(file))
    assert (status, file.stat().st_mode & 0o777) == (0, 0o600)
    made = file.read_text().strip()
    assert made not in said
    lines = said.partition("without a restart:\n\n")[2]
    assert read_credentials(tokens_file(tmp_path, more=lines)).identify("blue", made, now_s=0).name == "blue"
    assert run("--tenant", "blue", "--out", str(file)) == (2, f"kvstore: error: {file} exists: name another file, or remove it first\n")
    assert file.read_text().strip() == made
    assert run("--tenant", "blue", "--out", f"{tmp_path}/none/token")[1].startswith(
        f"kvstore: error: cannot write {tmp_path}/none/token: No"
    )
    told = json.loads(run("--node", "--json", "--out", str(tmp_path / "join"))[1])
    assert (told["token_file"], "token" in told) == (str(tmp_path / "join"), False)
