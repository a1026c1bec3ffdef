"""Promises of options.py."""

import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.console import Group
from rich.table import Table

from kvstore.cli.options import PIPED_COLUMNS, client_options, console, echo_json, json_option, names_master
from kvstore.cli.tools.status_tables import NOT_SHOWN, nodes_table, status_lines
from kvstore.client.config import ClientSettings
from kvstore.protocol import control_pb2 as pb


@click.command()
@json_option
@client_options
def shown(as_json: bool, settings: ClientSettings) -> None:
    echo_json([as_json, settings.master, settings.tenant, settings.token, settings.deadline_s, settings.busy_poll_us])


@click.command()
@client_options
def named(settings: ClientSettings) -> None:
    echo_json([names_master(), settings.master])


def run(*arguments: str, **environment: str) -> str:
    return CliRunner().invoke(shown, arguments, env=environment, catch_exceptions=False).output.strip()


def test_without_flags_the_settings_are_the_defaults() -> None:
    assert run() == '[false, "127.0.0.1:7440", "", "", 10.0, 100]'


def test_flags_override_environment_overrides_file(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('[client]\nmaster = "file:1"\ntenant = "file"\ntoken = "file"\nbusy_poll_us = 5\n')
    flags = ["--config", str(file), "--master", "flag:1", "--deadline-s", "2", "--json"]
    assert run(*flags, KVSTORE_CLIENT_TENANT="environment", KVSTORE_CLIENT_MASTER="environment:1") == (
        '[true, "flag:1", "environment", "file", 2.0, 5]'
    )


def test_names_master_holds_for_the_default_address_too(tmp_path: Path) -> None:
    """The default address too: who names a cluster does not mean one of the command's own."""
    file = tmp_path / "kvstore.toml"
    file.write_text('[client]\nmaster = "127.0.0.1:7440"\n')
    for arguments, environment, is_named in (
        ([], {}, "false"),
        (["--tenant", "t"], {}, "false"),
        (["--master", "127.0.0.1:7440"], {}, "true"),
        ([], {"KVSTORE_CLIENT_MASTER": "127.0.0.1:7440"}, "true"),
        ([], {"KVSTORE_MASTER": "127.0.0.1:7440"}, "true"),
        (["--config", str(file)], {}, "true"),
    ):
        result = CliRunner().invoke(named, arguments, env=environment, catch_exceptions=False)
        assert result.output.strip() == f'[{is_named}, "127.0.0.1:7440"]'


def test_a_pipe_has_no_edge_unless_somebody_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console().width == PIPED_COLUMNS
    monkeypatch.setenv("COLUMNS", "72")
    assert console().width == 72


def test_lines_of_a_table_in_a_pipe_end_where_their_text_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table(box=None)
    for name in ("check", "found"):
        table.add_column(name)
    table.add_row("one", "a long text")
    table.add_row("another", "")
    shown = console()
    shown.print(table)
    assert capsys.readouterr().out == " check    found\n one      a long text\n another\n"
    assert (shown.encoding, shown.is_terminal) == (sys.stdout.encoding.lower(), False)


@pytest.mark.parametrize("columns", ["", "400"], ids=["in a pipe", "as wide as COLUMNS says"])
def test_brackets_and_colons_in_names_and_addresses_are_text(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """rich takes [x] for markup, an end of what was not begun for an error, and :bee: for an insect."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    node = pb.NodeStatus(node_id=1, name="rack[/1]", state="alive", tcp="[fd12:bee:3456::7]:7450")
    status = pb.StatusReply(nodes=[node], http="[fd12:bee::1]:7442")
    console().print(Group(status_lines(status), nodes_table(status)))
    shown = " ".join(capsys.readouterr().out.split())
    for told in (node.name, node.tcp, "http://[fd12:bee::1]:7442/", NOT_SHOWN):
        assert told in shown
