"""Promises of form.py: what is published is what our own reader of engines' events reads, and vLLM's."""

import msgspec

from kvstore.engines.publisher.form import batch
from kvstore.kvcache.traces.event_file import READ, REMOVED, STORED, BlockEvent, Gap


def event(kind: str, keys: list[bytes], parents: list[bytes]) -> BlockEvent:
    return BlockEvent(kind, 1500.0, "n0", "t", keys, parents, [1] * len(keys))


def test_blocks_that_follow_one_another_are_one_event() -> None:
    stored = event(STORED, [b"a", b"b", b"c", b"d"], [b"", b"a", b"x", b"c"])
    payload = batch([stored, event(REMOVED, [b"a"], [b""])])
    assert payload is not None
    seconds, found, rank = msgspec.msgpack.decode(payload)
    assert (seconds, rank) == (1.5, 0)
    assert [(each["type"], each["block_hashes"], each.get("parent_block_hash")) for each in found] == [
        ("BlockStored", [b"a", b"b"], None),
        ("BlockStored", [b"c", b"d"], b"x"),
        ("BlockRemoved", [b"a"], None),
    ]
    assert {each["medium"] for each in found} == {"STORAGE"}
    assert {each["ownership"] for each in found} == {"n0"}


def test_a_gap_voids_what_was_before() -> None:
    payload = batch([Gap(2000.0, "n0", "t", None)])
    assert payload is not None
    assert msgspec.msgpack.decode(payload) == [2.0, [{"type": "AllBlocksCleared"}], 0]


def test_reads_are_not_told() -> None:
    assert batch([event(READ, [b"a"], [b""])]) is None
