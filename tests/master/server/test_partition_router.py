"""Tests of partition_router.py, on real sockets: a session is served by its partition's handler while that is
current."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.protocol.errors import InvalidArgument, ProtocolError, Unavailable
from kvstore.protocol.master_messages import Exists
from kvstore.protocol.session_messages import ROLE_CLIENT, Flags, Hello, Welcome
from kvstore.rpc.address import parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from tests.master.running import TIMEOUT_S, Places, ask, master_in_thread


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with master_in_thread(tmp_path, partitions=3) as places:
        yield places


def met(places: Places, partition: int = 0) -> Channel:
    address = parse_address(places.listen)._replace(partition=partition)
    return Channel.open(address, Hello(ROLE_CLIENT, "red"), Deadline(TIMEOUT_S))


def test_partitions_have_own_owners_over_any_connection(places: Places) -> None:
    assert places.master is not None
    epochs = [partition.role_manager.leader().epoch for partition in places.master.partitions]
    for partition, epoch in enumerate(epochs):
        channel = met(places, partition)
        assert (channel.welcome.epoch, channel.welcome.partitions, channel.welcome.owner) == (epoch, 3, "")
        requests = places.master.partitions[partition].role_manager.leader().frames.counters["requests"]
        ask(channel, Exists([b"k"]), Flags)
        assert places.master.partitions[partition].role_manager.leader().frames.counters["requests"] == requests + 1
        channel.close()


def test_a_partition_that_there_is_not_is_refused(places: Places) -> None:
    with pytest.raises(InvalidArgument, match="there is no partition 3: this cluster's key space has 3"):
        met(places, 3)


def test_values_go_to_no_partition(places: Places) -> None:
    channel = met(places, 1)
    with pytest.raises(ProtocolError, match="values go to nodes"):
        channel.call(Hello(ROLE_CLIENT, "red", partition=1), Welcome, Deadline(TIMEOUT_S), payload=[memoryview(b"v")])
    channel.close()


def test_deposed_owners_sessions_are_closed(places: Places) -> None:
    master = places.master
    assert master is not None
    channels = [met(places, partition) for partition in range(3)]
    master.reactor.call(lambda: master._router.deposed(1), deadline_s=TIMEOUT_S)
    for partition in (0, 2):
        ask(channels[partition], Exists([b"k"]), Flags)
    with pytest.raises(Unavailable):
        ask(channels[1], Exists([b"k"]), Flags)
    for channel in channels:
        channel.close()


def test_who_is_known_and_says_hello_again_stays_where_he_is(places: Places) -> None:
    master = places.master
    assert master is not None
    channel = met(places, 1)
    welcome = channel.call(Hello(ROLE_CLIENT, "red", partition=2), Welcome, Deadline(TIMEOUT_S))
    assert welcome.epoch == channel.welcome.epoch
    master.reactor.call(lambda: master._router.deposed(1), deadline_s=TIMEOUT_S)
    with pytest.raises(Unavailable):
        ask(channel, Exists([b"k"]), Flags)
    channel.close()
