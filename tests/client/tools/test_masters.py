"""Promises of masters.py, with two masters on a real etcd."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvstore.client.cli.main import kvstore
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.client.tools.masters import MasterTold, line, look
from kvstore.protocol import control_pb2 as pb
from kvstore.transfer.testing.waiting import eventually
from tests.master.blocks import Event
from tests.master.running import MasterProcess, NodeSide, Places, master_in_thread
from tests.ports import free_ports


@pytest.fixture
def pair(tmp_path: Path, etcd_url: str) -> Iterator[tuple[Places, Places]]:
    settings = {"catalog": f"{etcd_url}/told", "lease_ttl_s": 20.0}
    with master_in_thread(tmp_path / "a", **settings) as owner, master_in_thread(tmp_path / "b", **settings) as follower:
        yield owner, follower


def asked(masters: str) -> tuple[ClientSettings, pb.StatusReply]:
    settings = ClientSettings(master=masters)
    with Control.find(settings) as control:
        return settings, control.status()


def test_each_master_says_what_it_is_and_one_that_does_not_answer_is_told_of(pair: tuple[Places, Places]) -> None:
    owner, follower = pair
    node = NodeSide(owner)
    node.sync(Event(b"a"), Event(b"b"))
    gone = f"127.0.0.1:{free_ports(1)[0]}"
    settings, status = asked(f"{follower.listen}, {gone}")
    eventually(lambda: all(not told.behind for told in look(settings, status)), "it has followed")
    first, second, third = look(settings, status)
    assert (first.address, first.role, first.records, first.trouble) == (owner.listen, "owner", 2, "")
    assert (second.address, second.role, second.records, second.behind) == (follower.listen, "following", 2, 0)
    assert (third.address, third.role) == (gone, "")
    assert gone in line(third)
    late = pb.StatusReply(records=1002, owner=status.owner)
    assert line(look(settings, late)[1]) == f"{follower.listen}: following, 1,000 blocks behind"
    node.close()


def test_a_master_whose_catalog_is_in_trouble_says_so() -> None:
    told = MasterTold("m:1", "owner", catalog_health="etcd has no space left")
    assert line(told) == "m:1: owner, etcd has no space left"
    assert line(replace(told, catalog_health="ok")) == "m:1: owner"


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


def test_while_no_owner_answers_status_says_so_and_what_each_master_knows(etcd_url: str, tmp_path: Path) -> None:
    url = f"{etcd_url}/unowned"
    first = MasterProcess(tmp_path / "a", ("--catalog", url, "--lease-ttl-s", "300"))
    owner = first.start()
    try:
        with master_in_thread(tmp_path / "b", catalog=url, lease_ttl_s=300.0) as follower:
            node = NodeSide(owner)
            node.sync(Event(b"a"))
            settings, status = asked(owner.listen)
            eventually(lambda: look(replace(settings, master=follower.listen), status)[0].records == 1, "it has followed")
            node.close()
            first.kill()
            masters = f"{follower.listen},{owner.listen}"
            shown, found = asked_in_time(masters), asked_in_time(masters, "--json")
    finally:
        first.kill()
    assert shown.exit_code == found.exit_code == 2
    located = "only blocks that clients have located are read"
    assert shown.stdout.splitlines()[:2] == [f"no master owns the catalog now: {located}", f"  {follower.listen}: following, 1 records"]
    assert owner.listen in shown.stdout.splitlines()[2]
    told = json.loads(found.stdout)
    assert [master["role"] for master in told["masters"]] == ["following", ""]
    assert told["error"] in found.stderr
