"""Promises of weights.py, through the command line, against a real master."""

import json
from pathlib import Path

from click.testing import CliRunner, Result
from rich.console import Console

from kvstore.cli.main import kvstore
from kvstore.cli.weights import state, weights_table
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.protocol import control_pb2 as pb
from tests.master.running import Places, master_in_thread


def run(places: Places, *arguments: str) -> Result:
    return CliRunner().invoke(kvstore, ["weights", *arguments, "--master", places.listen])


def report(places: Places, tenant: str, version: str, token: str = "") -> None:
    with Control.find(ClientSettings(master=places.listen, tenant=tenant, token=token)) as control:
        control.report_weights(pb.WeightsReport(tenant=tenant, engine=f"engine of {tenant}", base="base", version=version))


def test_versions_are_listed_and_retired(tmp_path: Path) -> None:
    with master_in_thread(tmp_path) as places:
        assert run(places).exit_code == 0
        report(places, "", "")
        report(places, "", "v1")
        [newest, base] = json.loads(run(places, "--json").stdout)
        assert (newest["version"], newest["users"], newest["is_used"], base["is_retired"]) == ("v1", ["engine of "], True, True)
        assert run(places, "retire", "base@v1").output == "base@v1: retired, 1 row of the table\n"
        assert "in use, retired" in run(places).stdout
        wrong = run(places, "retire", "other")
        assert (wrong.exit_code, "ever reported the weights other" in wrong.stderr) == (2, True)


def printed(*versions: pb.WeightsVersion, tenants: bool = False) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(weights_table(pb.WeightsTable(versions=versions), tenants=tenants))
    return captured.get()


def test_a_state_says_all_that_is_so() -> None:
    assert state(pb.WeightsVersion(is_durable=True)) == "unused"
    assert state(pb.WeightsVersion(is_used=True, is_retired=True)) == "in use, retired, private"
