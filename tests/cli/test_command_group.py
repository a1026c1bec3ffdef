"""Promises of command_group.py: sections and examples of the help, and the error for an unknown command."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvstore.cli.command_group import EXAMPLES
from kvstore.cli.main import SECTIONS, kvstore

COLUMNS = 80
PAGE = Path(__file__).parents[2] / "docs/reference/cli.md"


def paths() -> Iterator[str]:
    """Every command, and every command below one."""
    context = click.Context(kvstore)
    for name in kvstore.list_commands(context):
        yield name
        command = kvstore.get_command(context, name)
        if isinstance(command, click.Group):
            yield from (f"{name} {below}" for below in command.commands)


def help_of(*arguments: str) -> str:
    return CliRunner().invoke(kvstore, [*arguments, "--help"], terminal_width=COLUMNS).output


def test_the_help_has_a_section_a_group_with_whole_summaries() -> None:
    shown = help_of().partition("Inspect:")[2]
    assert [line for line in help_of().splitlines() if line.rstrip(":") in SECTIONS] == [f"{title}:" for title in SECTIONS]
    lines = [line for line in shown.splitlines() if line and line.rstrip(":") not in SECTIONS]
    assert [line.split()[0] for line in lines] == [name for section in SECTIONS.values() for name in section], "one line a command"
    assert all(line.endswith(".") and not line.endswith("...") and len(line) <= COLUMNS for line in lines), lines


def test_reference_page_lists_the_groups_of_the_help() -> None:
    groups = PAGE.read_text(encoding="utf-8").partition("## Exit statuses")[0]
    rows = re.findall(r"^\| (\w[\w ]*) \|.*\| (`.*`) \|$", groups, re.MULTILINE)
    assert {title: re.findall("`(.*?)`", commands) for title, commands in rows} == {title: list(names) for title, names in SECTIONS.items()}


@pytest.mark.parametrize("path", list(paths()))
def test_each_command_has_an_example_that_it_takes(path: str) -> None:
    assert path in EXAMPLES
    for line in EXAMPLES[path]:
        assert f"  {line}\n" in help_of(*path.split())
        words = shlex.split(line.removeprefix("source <(").removesuffix(")"), comments=True)
        operators = [at for at, word in enumerate(words) if word in ("<", ">", "||", "|")]
        program, *words = words[: operators[0]] if operators else words
        assert program == "kvstore"
        context, command = click.Context(kvstore), kvstore.get_command(click.Context(kvstore), words[0])
        while isinstance(command, click.Group) and len(words) > 1 and words[1] in command.commands:
            command, words = command.commands[words[1]], words[1:]
        assert command is not None
        command.make_context(command.name, words[1:], context)  # raises UsageError


def test_no_example_is_of_a_command_that_there_is_not() -> None:
    assert set(EXAMPLES) == set(paths())


@pytest.mark.parametrize(
    ("arguments", "meant"), [(["statsu"], "status"), (["quota", "sett"], "set"), (["namespace"], "namespaces"), (["qwxz"], "")]
)
def test_a_command_that_there_is_not_is_told_the_nearest(arguments: list[str], meant: str) -> None:
    result = CliRunner().invoke(kvstore, arguments)
    assert result.exit_code == 2
    assert f"No such command '{arguments[-1]}'." in result.stderr
    assert ("Did you mean" in result.stderr) == bool(meant)
    assert f"'{meant}'" in result.stderr or not meant


def test_options_of_a_command_stand_behind_it() -> None:
    result = CliRunner().invoke(kvstore, ["--master", "127.0.0.1:7440", "status"])
    assert result.exit_code == 2
    assert "No such option '--master'. Options follow the command: kvstore COMMAND [OPTIONS]." in result.stderr
