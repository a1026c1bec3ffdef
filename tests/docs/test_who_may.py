"""The table "Who may do what" of docs/security.md, row by row: the rules of the code, and real commands against real daemons."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import click
import pytest
from click.testing import CliRunner

from kvstore.cli.main import kvstore
from kvstore.protocol.errors import Denied
from kvstore.protocol.messages import MESSAGES
from kvstore.security.identity import UNAUTHENTICATED, Identity, IdentityKind, Role
from kvstore.security.permissions import MASTER_FRAMES, NODE_FRAMES, RPCS, Permission
from tests.credentials import OPERATOR, tokens_file
from tests.system.running import PATIENT_S, System

PAGE: Final = Path(__file__).parents[2] / "docs" / "security.md"
HEAD: Final = ["may", "none", "read", "write", "admin", "operator", "node", "engine", "master", "how"]
CELLS: Final = {"", "yes", "own", "any", "part"}
TENANT: Final = "green"
WHO: Final = {
    "none": UNAUTHENTICATED,
    **{role.name.lower(): Identity(IdentityKind.TENANT, role, TENANT) for role in (Role.READ, Role.WRITE, Role.ADMIN)},
    "operator": Identity(IdentityKind.OPERATOR, Role.ADMIN),
    "node": Identity(IdentityKind.NODE),
    "engine": Identity(IdentityKind.INSTANCE),
    "master": Identity(IdentityKind.MASTER, Role.ADMIN),
}
TOKENS: Final = {"none": "", "read": "reads", "write": "writes", "admin": "rules", "operator": OPERATOR}
FILE: Final = "".join(
    f'[[tenants.{TENANT}]]\ntoken = "{token}"\nrole = "{role}"\n' for role, token in TOKENS.items() if role in ("read", "write", "admin")
)


class Row(NamedTuple):
    """One row of the permission table: the action, the identities that may do it, and the commands and messages for it."""

    what: str
    allowed: frozenset[str]
    commands: tuple[str, ...]
    messages: tuple[str, ...]


def rows() -> list[Row]:
    lines = iter(PAGE.read_text().splitlines())
    assert next(line for line in lines if cells(line) == HEAD)
    next(lines)
    found = []
    while (line := next(lines)).startswith("|"):
        what, *marks, how = cells(line)
        assert set(marks) <= CELLS, line
        hows = re.findall(r"`([^`]+)`", how)
        commands = tuple(each for each in hows if each.startswith("kvstore "))
        who = frozenset(name for name, mark in zip(HEAD[1:-1], marks, strict=True) if mark)
        found.append(Row(what, who, commands, tuple(each for each in hows if each not in commands)))
    return found


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


ROWS: Final = rows()


def rules() -> dict[str, Permission]:
    """By the names of the table: those of messages, and Service/Method. A name that masters and nodes share has one rule."""
    frames = [(MESSAGES[number].__name__, rule) for table in (MASTER_FRAMES, NODE_FRAMES) for number, rule in table.items()]
    return {**dict(frames), **{"/".join(path.rpartition(".")[2].split("/")[-2:]): rule for path, rule in RPCS.items()}}


def test_the_table_has_each_message_and_call_once() -> None:
    named = [name for row in ROWS for name in row.messages]
    assert sorted(named) == sorted(rules())


@pytest.mark.promise("least-privilege")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_a_row_says_what_the_rules_say(row: Row) -> None:
    for name in row.messages:
        rule = rules()[name]
        assert {who for who, identity in WHO.items() if rule.allows(identity)} == row.allowed, name


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A master with tokens of every role, and a node."""
    folder = tmp_path_factory.mktemp("who")
    with System(folder) as started:
        started.start_master(0, "--tokens", tokens_file(folder, {"red": "secret"}, FILE))
        started.start_node("n0", "--dram", "32MiB")
        yield started


def commands() -> list[tuple[str, frozenset[str]]]:
    return [(command, row.allowed) for row in ROWS for command in row.commands]


@pytest.mark.promise("least-privilege")
@pytest.mark.parametrize(("command", "allowed"), commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_command_is_for_whom_the_row_says(system: System, tmp_path: Path, command: str, allowed: frozenset[str]) -> None:
    """Return whether it finds what it looks for does not count."""
    file = tmp_path / "value"
    file.write_bytes(b"value")
    words = [{"KEY": "key", "FILE": str(file), "NODE": "nowhere", "TENANT": TENANT}.get(word, word) for word in command.split()[1:]]
    assert {who for who in TOKENS if may(system, words, TOKENS[who])} == allowed & set(TOKENS)


def may(system: System, words: list[str], token: str) -> bool:
    leaf: click.Command = kvstore
    context = click.Context(leaf)
    while isinstance(leaf, click.Group) and words and (found := leaf.get_command(context, words[0])) is not None:
        leaf, words = found, words[1:]
    who = ["--master", system.address, "--tenant", TENANT, "--token", token, "--deadline-s", str(PATIENT_S)]
    result = CliRunner().invoke(leaf, [*words, *who])
    assert not isinstance(result.exception, click.UsageError), result.output
    assert result.exit_code != 2, result.output
    return not isinstance(result.exception, Denied)
