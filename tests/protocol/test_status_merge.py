"""Tests of status_merge.py: replies of the partitions' owners add up to the cluster's status."""

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.status_merge import merged_status


def node(blocks: int, state: str = "alive", drain: pb.DrainStatus | None = None, name: str = "n") -> pb.NodeStatus:
    return pb.NodeStatus(name=name, blocks=blocks, state=state, drain=drain, counters={"misses": 3, "home_copies_skipped": 4})


def test_merge_sums_partitions_and_counts_a_process_once() -> None:
    first = pb.StatusReply(
        name="a", blocks=1, reserved=2, pinned=3, records=4, rss_bytes=10, catalog_health="ok", nodes=[node(5), node(1, name="m")]
    )
    first.counters.update({"keys": 1, "request_lookup_count": 7, "request_lookup_slowest_us": 50, "credentials_refused": 1})
    second, third = pb.StatusReply(), pb.StatusReply()
    second.CopyFrom(first)
    third.CopyFrom(first)
    third.name, third.catalog_health = "b", "it is away"
    third.counters["request_lookup_slowest_us"] = 20
    del third.nodes[1]
    found = merged_status([first, second, third])
    assert (found.blocks, found.reserved, found.pinned, found.records, found.rss_bytes) == (3, 6, 9, 12, 20)
    assert found.catalog_health == "it is away"
    assert dict(found.counters) == {
        "keys": 3,
        "request_lookup_count": 14,
        "request_lookup_slowest_us": 50,
        "credentials_refused": 2,
    }
    assert [(one.name, one.blocks, one.counters["misses"]) for one in found.nodes] == [("n", 15, 3), ("m", 2, 3)]
    assert [one.counters["home_copies_skipped"] for one in found.nodes] == [12, 8], "masters count it, each for its partition"
    assert (first.blocks, first.nodes[0].blocks) == (1, 5), "what was told stays as it was"


def test_a_node_is_what_it_is_where_it_is_worst() -> None:
    for states, worst in ((("alive", "alive"), "alive"), (("alive", "syncing"), "syncing"), (("dead", "syncing"), "dead")):
        replies = [pb.StatusReply(name="a", nodes=[node(1, state)]) for state in states]
        assert merged_status(replies).nodes[0].state == worst


def test_a_drain_is_done_once_it_is_in_every_partition() -> None:
    half = pb.DrainStatus(to="peers", remaining_blocks=2, nvme_only_blocks=1, copying_blocks=3, lacks_space=True)
    done = pb.DrainStatus(to="peers", is_done=True, nvme_only_blocks=1)

    def drained(*drains: pb.DrainStatus | None) -> pb.NodeStatus:
        return merged_status([pb.StatusReply(name="a", nodes=[node(1, drain=drain)]) for drain in drains]).nodes[0]

    whole = pb.DrainStatus(to="peers", remaining_blocks=2, nvme_only_blocks=2, copying_blocks=3, lacks_space=True)
    assert drained(done, half).drain == whole
    assert drained(done, done).drain.is_done
    assert not drained(done, None).drain.is_done
    assert not drained(None, None).HasField("drain")


def test_merge_drain_is_not_done_if_a_follower_replied() -> None:
    done = pb.DrainStatus(to="peers", is_done=True)
    replies = [pb.StatusReply(name="a", role="owner", nodes=[node(1, drain=done)]), pb.StatusReply(name="b", role="following")]
    assert not merged_status(replies).nodes[0].drain.is_done
    replies[1].role = "cut off"
    assert merged_status(replies).nodes[0].drain.is_done, "of which the node is not known"


def test_pins_are_of_partitions_and_connections_of_processes() -> None:
    grant = pb.TenantGrants(tenant="red", pins=1, reservations=2, requests_in_flight=3, connections=4)
    replies = [pb.StatusReply(name=name, grants=[grant]) for name in ("a", "a", "b")]
    [found] = merged_status(replies).grants
    assert found == pb.TenantGrants(tenant="red", pins=3, reservations=6, requests_in_flight=6, connections=8)
