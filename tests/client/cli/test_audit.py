"""Promises of audit.py; of several masters: tests/system/test_audit.py."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvstore.client.cli.main import kvstore
from tests.credentials import OPERATOR, tokens_file
from tests.master.running import Places, master_in_thread


def run(places: Places, *arguments: str, token: str = OPERATOR) -> Result:
    return CliRunner().invoke(kvstore, [*arguments, "--master", places.listen, "--token", token])


def test_entries_are_printed_and_filtered(tmp_path: Path) -> None:
    with master_in_thread(tmp_path / "run", tokens=tokens_file(tmp_path)) as places:
        assert run(places, "quota", "set", "red", "--pins", "7").exit_code == 0
        assert run(places, "forget", "n9").exit_code == 2
        shown = [json.loads(line) for line in run(places, "audit", "--json").stdout.splitlines()]
        assert [(entry["action"], entry["result"]) for entry in shown] == [("quota_set", "done"), ("forget", "failed")]
        assert shown[1]["detail"] == "there is no node 'n9'; there are: none"
        table = run(places, "audit", "--action", "quota_set", "--since", "1h", "--by", "operator").stdout
        assert "pins no limit" in table
        assert "forget" not in table
        assert "no such entry" in run(places, "audit", "--since", "2100-01-01").stdout
        assert len(run(places, "audit", "--json", "-n", "1").stdout.splitlines()) == 1


def test_audit_trail_is_for_operators(tmp_path: Path) -> None:
    """The refusal is an entry itself."""
    with master_in_thread(tmp_path / "run", tokens=tokens_file(tmp_path)) as places:
        refused = CliRunner().invoke(kvstore, ["audit", "--master", places.listen, "--tenant", "red", "--token", "secret"])
        assert refused.exit_code == 2
        (entry,) = [json.loads(line) for line in run(places, "audit", "--json", "--refused").stdout.splitlines()]
    assert (entry["kind"], entry["actor"], entry["action"], entry["count"]) == ("tenant", "red", "audit", 1)


@pytest.mark.parametrize("since", ["yesterday", "5 m", "-1h"])
def test_bad_time_says_how_to_write_one(since: str) -> None:
    refused = CliRunner().invoke(kvstore, ["audit", "--since", since])
    assert refused.exit_code == 2
    assert "is not a time: write 90s, 15m, 2h, 7d" in refused.stderr
