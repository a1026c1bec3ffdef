"""The doctor's checks of clusters, from the responses of their masters and etcd."""

import email.utils
import json
import os
import socket
import ssl
import urllib.error
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.cli.tools import cluster_checks
from kvstore.cli.tools.cluster_report import MasterReport
from kvstore.cli.tools.transport_checks import Check, CheckVerdict
from kvstore.client.config import ClientSettings
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.version import VERSION
from tests.client.embedded import embedded
from tests.etcd_server import EtcdServer
from tests.ports import free_ports

NOW_S = 1_800_000_000.0


def judged(check: Check) -> tuple[CheckVerdict, str]:
    """Return verdict and finding, after checking that all but OK have advice."""
    assert bool(check.advice) == (check.verdict is not CheckVerdict.OK)
    return check.verdict, check.found


class Answers:
    """Fake of `fetch`: URL -> body; other URLs are unreachable."""

    def __init__(self, bodies: dict[str, str] | None = None, date_s: float = NOW_S) -> None:
        self._bodies = bodies or {}
        self._date = email.utils.formatdate(date_s, usegmt=True)

    def __call__(self, url: str) -> tuple[str, str]:
        if url not in self._bodies:
            raise OSError("nobody there")
        return self._bodies[url], self._date


def of_etcd(version: str, health: str = "true") -> Answers:
    return Answers(
        {"http://e:1/version": json.dumps({"etcdserver": version}), "http://e:1/health": json.dumps({"health": health, "reason": "x"})}
    )


IN_ETCD = pb.StatusReply(catalog="etcd://e:1/prefix", catalog_health="ok")


@pytest.mark.parametrize(
    ("answers", "verdict", "said"),
    [
        (of_etcd("3.6.9"), CheckVerdict.OK, "version 3.6.9, healthy"),
        (of_etcd("3.7.0"), CheckVerdict.OK, "version 3.7.0, healthy"),
        (of_etcd("3.5.4"), CheckVerdict.WARNING, "version 3.5.4 has known bugs"),
        (of_etcd("3.3.27"), CheckVerdict.WARNING, "version 3.3.27 has known bugs"),
        (of_etcd("3.6.9", "false"), CheckVerdict.WRONG, "unhealthy"),
        (Answers(), CheckVerdict.WARNING, "unreachable from here: nobody there"),
        (Answers({"http://e:1/version": "<html>"}), CheckVerdict.WARNING, "the response is not etcd's"),
    ],
)
def test_each_member_of_etcd_tells_its_version_and_health(answers: Answers, verdict: CheckVerdict, said: str) -> None:
    (found,) = cluster_checks.etcd(IN_ETCD, answers)
    assert found.name == "etcd e:1"
    assert judged(found)[0] is verdict
    assert said in found.found


def test_a_real_etcd_that_wants_a_certificate_is_not_looked_at(etcd_server_factory: Callable[..., EtcdServer]) -> None:
    member = etcd_server_factory(tls=True).host_port
    for scheme in ("etcds", "etcd"):  # of etcd://…?ca=FILE the status hides what tells that it is asked by TLS
        (found,) = cluster_checks.etcd(pb.StatusReply(catalog=f"{scheme}://{member}"), cluster_checks.fetch)
        assert (judged(found)[0], "it requires a client certificate" in found.found) == (CheckVerdict.OK, True), found


def test_etcd_check_by_tls_unless_certificate_required() -> None:
    status = pb.StatusReply(catalog="etcds://e:1/prefix", catalog_health="ok")
    well = {"https://e:1/version": json.dumps({"etcdserver": "3.6.9"}), "https://e:1/health": json.dumps({"health": "true"})}
    (found,) = cluster_checks.etcd(status, Answers(well))
    assert judged(found) == (CheckVerdict.OK, "version 3.6.9, healthy")

    def refused(error: OSError) -> Callable[[str], tuple[str, str]]:
        def ask(url: str) -> tuple[str, str]:
            raise error

        return ask

    for error in (ssl.SSLError("certificate required"), urllib.error.URLError(ssl.SSLError("certificate required"))):
        (found,) = cluster_checks.etcd(status, refused(error))
        assert judged(found)[0] is CheckVerdict.OK
        assert "it requires a client certificate" in found.found
        assert judged(*cluster_checks.etcd(IN_ETCD, refused(error)))[0] is CheckVerdict.WARNING, "plainly there is none to be wanted"
    (found,) = cluster_checks.etcd(status, refused(urllib.error.URLError("nobody there")))
    assert (judged(found)[0], found.advice) == (CheckVerdict.WARNING, "curl https://e:1/health, on a master's host too")


def test_dead_nodes_are_named() -> None:
    two = [pb.NodeStatus(name="a", state="alive"), pb.NodeStatus(name="b", state="dead")]
    assert judged(cluster_checks.nodes(pb.StatusReply(nodes=two))) == (CheckVerdict.WARNING, "1 alive, 1 dead: b")
    assert judged(cluster_checks.nodes(pb.StatusReply(nodes=two[:1]))) == (CheckVerdict.OK, "1 alive")
    assert judged(cluster_checks.nodes(pb.StatusReply())) == (CheckVerdict.WARNING, "none")


def test_node_with_an_unhealthy_tier_is_named() -> None:
    full = pb.NodeStatus(name="a", state="alive", tiers=[pb.TierStatus(name="nvme", health="suspended: no space left")])
    found = "1 alive; nvme of a: suspended: no space left"
    assert judged(cluster_checks.nodes(pb.StatusReply(nodes=[full]))) == (CheckVerdict.WARNING, found)


def with_connections(**counters: int) -> pb.StatusReply:
    return pb.StatusReply(nodes=[pb.NodeStatus(name="n0", state="alive", counters=counters), pb.NodeStatus(name="n1", state="dead")])


@pytest.mark.parametrize(
    ("counters", "verdict", "found"),
    [
        ({"connections": 90, "max_connections": 100}, CheckVerdict.OK, "90 at 2 nodes, none refused"),
        (
            {"connections": 91, "max_connections": 100, "max_open_files": 1200},
            CheckVerdict.WARNING,
            "n0 has 91 of 100 and refused 0; it may have 1,200",
        ),
        (
            {"connections": 3, "max_connections": 100, "max_open_files": 200, "refused_connections": 7},
            CheckVerdict.WARNING,
            "and refused 7; it may have 200",
        ),
        ({}, CheckVerdict.OK, "0 at 2 nodes"),
    ],
)
def test_node_that_has_few_connections_left_is_named(counters: dict[str, int], verdict: CheckVerdict, found: str) -> None:
    judgement = judged(cluster_checks.connections(with_connections(**counters)))
    assert judgement[0] is verdict
    assert found in judgement[1]


def test_releases_that_differ_are_counted() -> None:
    same = pb.StatusReply(version=VERSION, nodes=[pb.NodeStatus(version=VERSION)])
    assert judged(cluster_checks.releases(same)) == (CheckVerdict.OK, f"{VERSION} everywhere")
    old = pb.StatusReply(version=VERSION, nodes=[pb.NodeStatus(version="0.0.9"), pb.NodeStatus()])
    assert judged(cluster_checks.releases(old))[0] is CheckVerdict.WARNING
    assert "0.0.9 (1)" in cluster_checks.releases(old).found


def test_releases_counts_followers_and_masters_reports_silent() -> None:
    owner = pb.StatusReply(name="a", version=VERSION)
    told = [MasterReport("a:1", "owner", "a", version=VERSION), MasterReport("b:1", "following", "b", version="0.0.9")]
    assert judged(cluster_checks.masters(told)) == (CheckVerdict.OK, "2 of 2 in --master respond")
    assert f"0.0.9 (1), {VERSION} (2)" in cluster_checks.releases(owner, told).found
    gone = MasterReport("c:1", error="nobody listens")
    assert judged(cluster_checks.masters([*told, gone])) == (CheckVerdict.WARNING, "2 of 3 in --master respond; c:1: nobody listens")
    assert judged(cluster_checks.releases(owner, [told[0], gone])) == (CheckVerdict.OK, f"{VERSION} everywhere")


@pytest.mark.parametrize(
    ("off_s", "verdict"),
    [(0.0, CheckVerdict.OK), (0.9, CheckVerdict.OK), (2.5, CheckVerdict.OK), (-30.0, CheckVerdict.WARNING), (3600.0, CheckVerdict.WARNING)],
)
def test_a_clock_that_is_off_is_told_of(off_s: float, verdict: CheckVerdict) -> None:
    status = pb.StatusReply(name="m", http="m:1")
    check = cluster_checks.clock(status, Answers({"http://m:1/healthz": "ok"}), (), lambda: NOW_S + off_s)
    assert judged(check)[0] is verdict


@pytest.mark.parametrize(
    ("mode", "verdict", "whom"),
    [(0o600, CheckVerdict.OK, "their owner only"), (0o660, CheckVerdict.OK, "group "), (0o666, CheckVerdict.WARNING, "every user")],
)
def test_who_may_use_a_nodes_socket_is_told(tmp_path: Path, mode: int, verdict: CheckVerdict, whom: str) -> None:
    path = tmp_path / "node.sock"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        os.chmod(path, mode)
        status = pb.StatusReply(nodes=[pb.NodeStatus(name="n1", state="alive", unix=str(path)), pb.NodeStatus(name="far", unix="/none")])
        found = judged(cluster_checks.sockets(status))
    assert found[0] is verdict
    assert found[1].startswith(f"n1: {mode:04o}, {whom}")
    assert judged(cluster_checks.sockets(pb.StatusReply())) == (CheckVerdict.OK, "no node on this host")


@pytest.mark.promise("observable")
def test_of_a_real_cluster_all_is_well() -> None:
    with embedded() as cluster:
        found = cluster_checks.checks(ClientSettings(master=cluster.address))
    assert [check.name for check in found] == ["catalog", "masters", "nodes", "connections", "releases", "clock", "Unix sockets"]
    assert all(judged(check)[0] is CheckVerdict.OK for check in found), found
    assert cluster_checks.are_well(found)


def test_without_a_master_one_line_says_why() -> None:
    (found,) = cluster_checks.checks(ClientSettings(master=f"127.0.0.1:{free_ports(1)[0]}"))
    assert judged(found)[0] is CheckVerdict.WARNING
    assert "no master can be reached" in found.found
    assert not cluster_checks.are_well([Check("x", CheckVerdict.WRONG, "y", "z")])
