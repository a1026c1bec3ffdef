"""Tests of cluster_report.py."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from kvstore.cli.main import kvstore
from kvstore.cli.tools.cluster_checks import shared_memory_checks
from kvstore.cli.tools.cluster_report import (
    NEEDS_TENANT,
    MasterReport,
    ask_masters,
    find_problems,
    health_line,
    healths,
    master_line,
    probe_shared_memory,
    problem_lines,
)
from kvstore.cli.tools.transport_checks import Check, CheckVerdict
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.protocol import control_pb2 as pb
from kvstore.testing.transfer.awaited import eventually
from tests.client.processes import cluster
from tests.master.blocks import Event
from tests.master.running import MasterProcess, NodeSide, Places, master_in_thread
from tests.ports import free_ports
from tests.rpc.stub_masters import stub_masters

WELL = pb.StatusReply(role="owner", catalog_health="ok", nodes=[pb.NodeStatus(name="n1", state="alive")])


@pytest.fixture
def pair(tmp_path: Path, etcd_url: str) -> Iterator[tuple[Places, Places]]:
    settings = {"catalog": f"{etcd_url}/told", "lease_ttl_s": 20.0}
    with master_in_thread(tmp_path / "a", **settings) as owner, master_in_thread(tmp_path / "b", **settings) as follower:
        yield owner, follower


def asked(masters: str) -> tuple[ClientSettings, pb.StatusReply]:
    settings = ClientSettings(master=masters)
    with Control.find(settings) as control:
        return settings, control.status()


def test_ask_masters_reports_roles_and_silent_masters(pair: tuple[Places, Places]) -> None:
    owner, follower = pair
    node = NodeSide(owner)
    node.sync(Event(b"a"), Event(b"b"))
    gone = f"127.0.0.1:{free_ports(1)[0]}"
    settings, status = asked(f"{follower.listen}, {gone}")
    eventually(lambda: all(not told.behind for told in ask_masters(settings, status)), "it has followed")
    first, second, third = ask_masters(settings, status)
    assert (first.address, first.role, first.records, first.error) == (owner.listen, "owner", 2, "")
    assert (second.address, second.role, second.records, second.behind) == (follower.listen, "following", 2, 0)
    assert (third.address, third.role) == (gone, "")
    assert gone in master_line(third)
    late = pb.StatusReply(records=1002, owner=status.owner)
    assert master_line(ask_masters(settings, late)[1]) == f"{follower.listen}: following, 1,000 blocks behind"
    node.close()


def test_status_shows_the_masters_where_several_are_named(pair: tuple[Places, Places]) -> None:
    owner, follower = pair
    for named, count in ((owner.listen, 1), (f"{owner.listen},{follower.listen}", 2)):
        shown = CliRunner().invoke(kvstore, ["status", "--master", named], catch_exceptions=False).output
        assert ("following" in shown) == (count == 2)
        found = json.loads(CliRunner().invoke(kvstore, ["status", "--json", "--master", named], catch_exceptions=False).output)
        assert [told["role"] for told in found["masters"]] == ["owner", "following"][:count]
        assert (found["role"], found["owner"]["address"]) == ("owner", owner.listen)


def asked_in_time(masters: str, *more: str) -> Result:
    """Of `kvstore status`, once the follower has answered within the second that it is given: a machine with much to do may take longer."""
    asked: list[Result] = []

    def is_told() -> bool:
        asked.append(CliRunner().invoke(kvstore, ["status", "--deadline-s", "1", "--master", masters, *more]))
        return "following" in asked[-1].stdout

    eventually(is_told, "a follower answers within a second")
    return asked[-1]


@pytest.mark.promise("observable")
def test_status_without_owner_shows_each_master(etcd_url: str, tmp_path: Path) -> None:
    url = f"{etcd_url}/unowned"
    first = MasterProcess(tmp_path / "a", ("--catalog", url, "--lease-ttl-s", "300"))
    owner = first.start()
    try:
        with master_in_thread(tmp_path / "b", catalog=url, lease_ttl_s=300.0) as follower:
            node = NodeSide(owner)
            node.sync(Event(b"a"))
            settings, status = asked(owner.listen)
            eventually(lambda: ask_masters(replace(settings, master=follower.listen), status)[0].records == 1, "it has followed")
            node.close()
            first.kill()
            masters = f"{follower.listen},{owner.listen}"
            shown, found = asked_in_time(masters), asked_in_time(masters, "--json")
    finally:
        first.kill()
    assert shown.exit_code == found.exit_code == 2
    located = "clients can read only blocks that they have located"
    assert shown.stdout.splitlines()[:2] == [f"no master owns the catalog now: {located}", f"  {follower.listen}: following, 1 records"]
    assert owner.listen in shown.stdout.splitlines()[2]
    told = json.loads(found.stdout)
    assert [master["role"] for master in told["masters"]] == ["following", ""]
    assert told["error"] in found.stderr


def test_status_names_an_owner_without_control_plane() -> None:
    """Its `advertise` is wrong, or a firewall lets frames through only: to say that there is no owner would mislead."""
    with stub_masters(1) as (master,):
        master.control = f"127.0.0.1:{free_ports(1)[0]}"
        shown = CliRunner().invoke(kvstore, ["status", "--master", master.address])
    assert shown.exit_code == 2
    assert shown.stdout.splitlines() == [
        f"{master.address} owns the catalog, and its control plane cannot be asked from here",
        f"  {master.address}: cannot connect to {master.control}: Connection refused",
    ]


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        (MasterReport("m:1", "owner", catalog_health="ok", took_s=0.0123), "master m:1 is healthy: owner, took 12 ms"),
        (MasterReport("m:1", "owner", catalog_health="ok", owned=2, partitions=4), "master m:1 is healthy: owner of 2 of 4 partitions"),
        (MasterReport("m:1", "following", catalog_health="etcd is full"), "master m:1 is unhealthy: catalog: etcd is full"),
        (MasterReport("m:1", "cut off", catalog_health="gone"), "master m:1 is unhealthy: cut off; catalog: gone"),
        (MasterReport("m:1", error="refused"), "master m:1 is unhealthy: refused"),
    ],
)
def test_a_master_is_told_of_in_a_line(told: MasterReport, shown: str) -> None:
    (one,) = healths([told], None)
    assert health_line(one) == shown


def test_nodes_are_by_name_and_a_failed_tier_is_unhealthy() -> None:
    nodes = [
        pb.NodeStatus(name="b", state="dead"),
        pb.NodeStatus(name="a", state="alive", tiers=[pb.TierStatus(name="nvme", health="no space left"), pb.TierStatus(name="dram")]),
        pb.NodeStatus(name="c", state="syncing"),
        pb.NodeStatus(name="d", state="stopped"),
    ]
    found = healths([], pb.StatusReply(nodes=nodes))
    shown = ["node a is unhealthy: nvme: no space left", "node b is unhealthy: dead", "node c is healthy: syncing", "node d is stopped"]
    assert list(map(health_line, found)) == shown
    assert [one.is_healthy for one in found] == [False, False, True, True], "a stop that was asked for is no fault"


@pytest.mark.promise("observable")
def test_a_cluster_is_looked_at_as_a_client_would(tmp_path: Path) -> None:
    with cluster(tmp_path) as running:
        settings = ClientSettings(master=running.address)
        assert shared_memory_checks(settings) == [Check("shared memory", CheckVerdict.OK, "no node on this host")]
        running.start_node("--dram", "4MiB", "--name", "n0")
        assert probe_shared_memory(settings) == ({"n0": ""}, "")
        assert shared_memory_checks(settings) == [Check("shared memory, n0", CheckVerdict.OK, "yes")]
        [path] = tmp_path.rglob("node-*.sock")
        path.rename(path.with_suffix(".elsewhere"))
        reason = f"there is no {path} in this mount namespace: mount its folder at that path"
        assert probe_shared_memory(settings) == ({"n0": reason}, "")
        [check] = shared_memory_checks(settings)
        assert (check.name, check.verdict, check.found) == ("shared memory, n0", CheckVerdict.WARNING, f"no: {reason}")
        assert "docs/sharing.md" in check.advice


def test_operator_token_asks_no_master() -> None:
    """Nothing listens at the address: to connect would be another text."""
    settings = ClientSettings(master=f"127.0.0.1:{free_ports(1)[0]}", token="an operator's")
    assert probe_shared_memory(settings) == ({}, NEEDS_TENANT)
    assert shared_memory_checks(settings) == [Check("shared memory", CheckVerdict.OK, NEEDS_TENANT)]


def test_the_worst_comes_first_and_silent_masters_are_named() -> None:
    status = pb.StatusReply()
    status.CopyFrom(WELL)
    status.nodes.add(name="n2", state="dead")
    status.catalog_health = "etcd has no quorum"
    found = find_problems(status, [MasterReport("m:1", error="refused")])
    assert [one.level for one in found] == sorted(one.level for one in found)
    assert "etcd has no quorum" in found[0].text
    assert "n2" in found[1].text
    assert found[2].text == "Master m:1 does not respond: refused"
    console = Console(width=120, no_color=True)
    with console.capture() as capture:
        console.print(problem_lines(found))
    assert capture.get().splitlines()[0] == f"error: {found[0].text}"
