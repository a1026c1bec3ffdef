"""What is removed is gone; what is held stays, unless it is taken by force."""

from kvstore.client import Client
from kvstore.engines.mooncake.config import ReplicateConfig
from kvstore.engines.mooncake.store import MooncakeDistributedStore
from tests.client.processes import Cluster


def test_removal_tells_what_was_there(store: MooncakeDistributedStore) -> None:
    pinned = ReplicateConfig()
    pinned.with_hard_pin = True
    store.put_batch(["a", "b"], [b"1", b"2"])
    store.put("held", b"3", pinned)
    assert store.remove("a") == 0
    assert store.batch_remove(["a", "b", "held"]) == [-704, 0, -706]
    assert store.batch_remove(["held"], force=True) == [0]


def test_a_pattern_is_looked_for_anywhere_in_a_key(store: MooncakeDistributedStore) -> None:
    store.put_batch(["model@rank:0@x", "model@rank:1@x", "other"], [b"1", b"2", b"3"])
    assert store.remove_by_regex(r"@rank:\d@") == 2
    assert store.batch_is_exist(["model@rank:0@x", "other"]) == [0, 1]
    assert store.remove_by_regex("^ther") == 0
    assert store.remove_by_regex("(") == -600
    assert store.remove_by_regex("^[[:alpha:]]ther$", force=True) == 1


def test_all_are_all_of_this_api_and_no_others(store: MooncakeDistributedStore, running: Cluster) -> None:
    with Client(running.address) as client:
        client.put(b"native", b"value", ack="cluster")
        store.put_batch(["a", "b"], [b"1", b"2"])
        assert store.remove_all() == 2
        assert (store.remove_all(), client.exists(b"native")) == (0, True)
        client.remove([b"native"])
