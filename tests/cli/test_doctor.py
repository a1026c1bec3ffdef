"""Promises of doctor.py, through the command line."""

import json
from pathlib import Path

from click.testing import CliRunner

from kvstore.cli.main import kvstore
from kvstore.cli.tools.transport_checks import CheckVerdict, examine
from tests.ports import free_ports

HOST = ["NUMA", "GIDs", "NVMe folder", "ports", "TLS certificate"]
CHECKS = [*(check.name for check in examine()), *HOST, "cluster", "shared memory"]


def output(*arguments: str) -> str:
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    result = CliRunner().invoke(kvstore, ["doctor", "--master", nobody, *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_the_table_has_a_line_for_each_check() -> None:
    shown = output()
    assert [name for name in CHECKS if name not in shown] == []


def test_json_has_each_check_with_its_verdict() -> None:
    found = json.loads(output("--json"))
    assert [check["name"] for check in found] == CHECKS
    assert all(set(check) == {"name", "verdict", "found", "advice"} for check in found)
    assert {check["verdict"] for check in found} <= {verdict.value for verdict in CheckVerdict}


def test_what_keeps_a_cluster_from_working_is_the_exit_status() -> None:
    result = CliRunner().invoke(kvstore, ["doctor", "--nvme", "/not/mounted/here:1GiB", "--json", "--master", "127.0.0.1:1"])
    assert result.exit_code == 1
    (disk,) = [check for check in json.loads(result.stdout) if check["name"] == "NVMe folder"]
    assert (disk["verdict"], disk["advice"]) == ("wrong", "mount its disk, or mkdir -p /not/mounted")


def test_doctor_checks_daemon_settings_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('[node]\nnvme = "/not/mounted/here:1GiB"\n[master]\nhttp_tls_cert = "/no/such.pem"\n')
    result = CliRunner().invoke(kvstore, ["doctor", "--json", "--master", "127.0.0.1:1", "--config", str(file)])
    assert result.exit_code == 1
    found = {check["name"]: check["verdict"] for check in json.loads(result.stdout)}
    assert (found["NVMe folder"], found["TLS certificate, [master] http_tls_cert"], found["TLS certificate"]) == ("wrong", "wrong", "ok")
