"""With which nodes of this host memory is shared, as commands say it."""

from pathlib import Path

from kvstore.client.config import ClientSettings
from kvstore.client.tools import sharing
from kvstore.client.tools.doctor import Check, Verdict
from tests.client.processes import cluster
from tests.ports import free_ports


def test_each_node_is_said_to_share_or_why_not() -> None:
    assert sharing.line({}, "") == "no node on this host"
    assert sharing.line({}, "not looked at: late") == "not looked at: late"
    assert sharing.line({"b": "permission denied on /run/x", "a": ""}, "") == "a: yes; b: no, permission denied on /run/x"


def test_a_cluster_is_looked_at_as_a_client_would(tmp_path: Path) -> None:
    with cluster(tmp_path) as running:
        settings = ClientSettings(master=running.address)
        assert sharing.checks(settings) == [Check("shared memory", Verdict.OK, "no node on this host")]
        running.start_node("--dram", "4MiB", "--name", "n0")
        assert sharing.look(settings) == ({"n0": ""}, "")
        assert sharing.checks(settings) == [Check("shared memory, n0", Verdict.OK, "yes")]
        [path] = tmp_path.rglob("node-*.sock")
        path.rename(path.with_suffix(".elsewhere"))
        reason = f"there is no {path} in this mount namespace: mount its folder at that path"
        assert sharing.look(settings) == ({"n0": reason}, "")
        [check] = sharing.checks(settings)
        assert (check.name, check.verdict, check.found) == ("shared memory, n0", Verdict.WARNING, f"no: {reason}")
        assert "docs/sharing.md" in check.advice


def test_without_a_master_doctor_says_that_it_has_not_looked() -> None:
    settings = ClientSettings(master=f"127.0.0.1:{free_ports(1)[0]}")
    [check] = sharing.checks(settings)
    assert check.verdict is Verdict.OK
    assert check.found.startswith("not looked at: no master can be reached")
    assert sharing.look(settings) == ({}, check.found)


def test_operator_token_asks_no_master() -> None:
    """Nothing listens at the address: to connect would be another text."""
    settings = ClientSettings(master=f"127.0.0.1:{free_ports(1)[0]}", token="an operator's")
    assert sharing.look(settings) == ({}, sharing.NEEDS_TENANT)
    assert sharing.checks(settings) == [Check("shared memory", Verdict.OK, sharing.NEEDS_TENANT)]
