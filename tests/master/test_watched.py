"""Promises of watched.py: which masters a master's own console knows of."""

from pathlib import Path

from kvstore.console.source import MasterSeen
from kvstore.master.watched import Watched
from kvstore.protocol import control_pb2 as pb
from tests.master.running import TIMEOUT_S, master_in_thread

ELSEWHERE = pb.CatalogOwner(name="b", address="b:1", epoch=2)


def test_an_owner_tells_of_itself_and_one_that_follows_of_its_owner_too(tmp_path: Path) -> None:
    with master_in_thread(tmp_path) as places:
        assert places.master is not None

        def masters(status: pb.StatusReply) -> list[MasterSeen]:
            assert places.master is not None
            reactor, standing = places.master.reactor, places.master.partitions[0].standing
            return list(Watched(reactor, standing, lambda: status, timeout_s=TIMEOUT_S, action_timeout_s=TIMEOUT_S).masters())

        own = pb.CatalogOwner(name="a", address="a:1", epoch=1)
        assert masters(pb.StatusReply(name="a", role="owner", owner=own)) == [MasterSeen("a:1", "a", "owner")]
        follows = [MasterSeen("", "a", "following"), MasterSeen("b:1", "b", "owner")]
        assert masters(pb.StatusReply(name="a", role="following", owner=ELSEWHERE)) == follows
        assert masters(pb.StatusReply(name="a", role="following")) == [MasterSeen("", "a", "following")]
