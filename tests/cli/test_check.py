"""Promises of check.py, through the command line."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvstore.cli.check import SETTINGS, check_file
from kvstore.cli.main import kvstore
from kvstore.protocol.variables import SECTIONS
from tests.credentials import tokens_file


def run(*arguments: str) -> Result:
    return CliRunner().invoke(kvstore, ["check", *arguments], catch_exceptions=False)


def test_what_daemons_take_is_said_to_be_what_it_is(tmp_path: Path) -> None:
    quotas, settings, bare = tmp_path / "quotas.toml", tmp_path / "kvstore.toml", tmp_path / "bare.toml"
    quotas.write_text('[tenants.red]\ndram_bytes = "8GiB"\n[tenants.blue]\npins = "none"\n')
    settings.write_text('[node]\ndram = "4GiB"\n[client]\ndeadline_s = 3.0\n[tracing]\n[transfer]\n')
    bare.write_text('[tenants]\nred = "token"\n')
    tokens = tokens_file(tmp_path, {"red": "token"})
    result = run(tokens, str(quotas), str(settings), str(bare))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{tokens}: tokens, ")
    assert lines[1:3] == [f"{quotas}: quotas, 2 tenants and no default", f"{settings}: settings, [client], [node], [tracing], [transfer]"]
    assert lines[3] == f"{bare}: tokens, 1 token; none lets a node join, so nodes need certificates"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[tenants]\nred = 7\n", 'write "TOKEN", or a table'),
        ('[default]\ndram_byte = "8GiB"\n', "unknown key dram_byte"),
        ('[node]\ndram = "4 parsecs"\n', "[node] dram: '4 parsecs' is not a size"),
        ("[node]\ndrams = 1\n", "unknown setting drams"),
        ("[master]\nlease_ttl_s = 1e9\n", "is above the maximum"),
        ("[nodee]\n[client]\n", "unknown section [nodee]: did you mean [node]?"),
        ("[colours]\n", "has no section of kvstore: tokens have [tenants] and [nodes]"),
    ],
)
def test_what_a_daemon_would_refuse_is_named_with_status_1(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "file.toml"
    file.write_text(text)
    result = run(str(file))
    assert result.exit_code == 1
    assert f"{file}: refused: " in result.stdout
    assert told in result.stdout


def test_scripts_read_json_and_say_what_a_file_is(tmp_path: Path) -> None:
    file = tmp_path / "empty.toml"
    file.write_text("")
    missing = str(tmp_path / "missing")
    result = run("--json", "--kind", "quotas", str(file), missing)
    assert result.exit_code == 1
    first, second = json.loads(result.stdout)
    assert first == {"file": str(file), "kind": "quotas", "is_valid": True, "found": "0 tenants and no default"}
    assert (second["is_valid"], "cannot read" in second["found"]) == (False, True)


def test_the_settings_of_every_program_are_known(tmp_path: Path) -> None:
    assert set(SETTINGS) == SECTIONS
    file = tmp_path / "all.toml"
    for section in SECTIONS:
        file.write_text(f"[{section}]\nno_such_setting = 1\n")
        assert "unknown setting no_such_setting" in check_file(str(file)).found, section
