"""Promises of troubles.py."""

from rich.console import Console

from kvstore.client.tools.masters import MasterTold
from kvstore.client.tools.troubles import Trouble, lines, of
from kvstore.protocol import control_pb2 as pb

WELL = pb.StatusReply(role="owner", catalog_health="ok", nodes=[pb.NodeStatus(name="n1", state="alive")])


def test_a_cluster_that_is_well_has_none() -> None:
    assert of(WELL, [MasterTold("m:1", "owner")]) == []


def test_the_worst_comes_first_and_silent_masters_are_named() -> None:
    status = pb.StatusReply()
    status.CopyFrom(WELL)
    status.nodes.add(name="n2", state="dead")
    status.catalog_health = "etcd has no quorum"
    found = of(status, [MasterTold("m:1", trouble="refused")])
    assert [one.level for one in found] == sorted(one.level for one in found)
    assert "etcd has no quorum" in found[0].text
    assert "n2" in found[1].text
    assert found[2].text == "Master m:1 does not answer: refused"
    console = Console(width=120, no_color=True)
    with console.capture() as capture:
        console.print(lines(found))
    assert capture.get().splitlines()[0] == f"error: {found[0].text}"


def test_what_to_do_is_below_each() -> None:
    console = Console(width=120, no_color=True)
    with console.capture() as capture:
        console.print(lines([Trouble("error", "n2 is dead", "Start it again."), Trouble("warning", "n3 is slow")]))
    assert capture.get() == "error: n2 is dead\n    Start it again.\nwarning: n3 is slow\n"
