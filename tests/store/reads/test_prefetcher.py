"""Tests of prefetcher.py and of the Prefetch message: a node's own blocks are read into DRAM, within the limit."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.protocol.catalog_messages import DRAIN_CLOSED, CopyBlocks, PrefetchBlocks, RequestCopy, SetDraining
from kvstore.protocol.errors import ChecksumMismatch, InvalidArgument, TierFailed
from kvstore.protocol.node_messages import MAX_PREFETCH_KEYS, TO_DRAM, TO_LOCAL, Prefetch, ReadBlocks
from kvstore.protocol.session_messages import Count, Flags, Ok
from kvstore.rpc.deadline import Deadline
from kvstore.store.block_table.block import DRAM, NVME, Block
from kvstore.store.block_table.prefetched_blocks import SHARE
from kvstore.store.reads.prefetcher import ROOM_WAIT_NS
from tests.rpc.wires import frame, read_frame
from tests.store.failing_tier import FailingNvme
from tests.store.served import TIMEOUT_S, Client, Master, Served, in_background, served, until

KIB = 1024
DRAM_BYTES = 256 * KIB
VALUES = {f"block-{number}": bytes([number + 1]) * (2 * KIB) for number in range(12)}
LIMIT_BLOCKS = DRAM_BYTES // SHARE // (2 * KIB)
"""Blocks of VALUES that may be prefetched and unread at once."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, dram_bytes=DRAM_BYTES, nvme_bytes=1 << 20) as node:
        yield node


@pytest.fixture
def client(node: Served) -> Iterator[Client]:
    client = node.connect()
    yield client
    client.close()


def cold(node: Served, client: Client, *names: str) -> list[str]:
    """Put these blocks of VALUES, all by default, and have them on NVMe only."""
    chosen = names or tuple(VALUES)
    client.put({name: VALUES[name] for name in chosen})
    node.demote(*chosen)
    return list(chosen)


def prefetch(client: Client, *names: str, to: int = TO_DRAM) -> int:
    return client.ask(Prefetch([name.encode() for name in names], to), Count).value


def counters(node: Served) -> dict[str, int]:
    """Counters after a check of what was read."""

    def checked() -> dict[str, int]:
        node.prefetcher.step()
        node.table.prefetched.check(node.reactor.now_ns())
        return node.prefetcher.counters()

    return node.call(checked)


def in_dram(node: Served, *names: str) -> list[str]:
    def those() -> list[str]:
        found = {name: node.table.find("red", name.encode()) for name in names}
        return [name for name, block in found.items() if block is not None and block.is_in(DRAM)]

    return node.call(those)


@pytest.mark.promise("prefetch-bounded")
def test_cold_blocks_are_brought_and_count_once_read(node: Served, client: Client) -> None:
    names = cold(node, client)[:4]
    assert prefetch(client, *names) == 4
    until(node, lambda: node.table.prefetched.brought_blocks == 4)
    assert in_dram(node, *VALUES) == names
    assert counters(node)["prefetched_unread_bytes"] == 4 * 2 * KIB
    assert client.read(*names[:3])[1] == [VALUES[name] for name in names[:3]]
    node.demote(*names)
    found = counters(node)
    assert (found["prefetched_blocks"], found["prefetched_bytes"]) == (4, 8 * KIB)
    assert (found["prefetches_useful"], found["prefetches_wasted"], found["prefetches_refused"]) == (3, 1, 0)
    assert (found["prefetches_waiting"], found["prefetched_unread_bytes"]) == (0, 0)


def test_blocks_in_dram_unknown_or_repeated_are_ignored(node: Served, client: Client) -> None:
    client.put({"hot": b"h" * 3000})
    (name,) = cold(node, client, "block-0")
    assert prefetch(client, "hot", "absent", name, name, to=TO_LOCAL) == 0
    assert prefetch(client, "hot", "absent", name, name) == 1
    until(node, lambda: node.table.prefetched.brought_blocks == 1)
    assert prefetch(client, name) == 0
    assert prefetch(client) == 0


@pytest.mark.promise("prefetch-bounded")
def test_unread_prefetches_take_a_sixteenth_of_dram(node: Served, client: Client) -> None:
    names = cold(node, client)
    assert prefetch(client, *names) == LIMIT_BLOCKS
    until(node, lambda: node.table.prefetched.brought_blocks == LIMIT_BLOCKS)
    assert in_dram(node, *names) == names[:LIMIT_BLOCKS]
    assert counters(node)["prefetches_refused"] == len(names) - LIMIT_BLOCKS
    assert prefetch(client, names[-1]) == 0
    client.read(*names[:2])
    assert prefetch(client, *names[-3:]) == 2, "two were read"
    assert counters(node)["prefetches_refused"] == len(names) - LIMIT_BLOCKS + 2


@pytest.mark.promise("tenant-isolation")
def test_other_tenants_blocks_are_not_prefetched(node: Served, client: Client) -> None:
    (name,) = cold(node, client, "block-0")
    other = node.connect(tenant="blue")
    assert prefetch(other, name) == 0
    other.close()
    assert in_dram(node, name) == []


def test_a_block_read_before_its_turn_is_not_brought(node: Served, client: Client) -> None:
    (name,) = cold(node, client, "block-0")

    def queue() -> None:
        node.prefetcher._batches = 2  # as if others were under way
        assert node.prefetcher.queue("red", [name.encode()]) == 1

    node.call(queue)
    assert client.read(name)[1] == [VALUES[name]]

    def go_on() -> None:
        node.prefetcher._batches = 0
        node.prefetcher.step()

    node.call(go_on)
    found = counters(node)
    assert (found["prefetched_blocks"], found["prefetched_unread_bytes"], found["prefetches_waiting"]) == (0, 0, 0)
    assert found["prefetches_late"] == 1


def test_a_block_read_while_it_is_brought_is_late(node: Served, client: Client) -> None:
    (name,) = cold(node, client, "block-0")

    def read_meanwhile() -> None:
        assert node.prefetcher.queue("red", [name.encode()]) == 1
        node.prefetcher.step()
        block = node.table.find("red", name.encode())
        assert block is not None
        node.table.hit(block)

    node.call(read_meanwhile)
    until(node, lambda: node.table.prefetched.late == 1)
    assert in_dram(node, name) == [name]
    assert counters(node)["prefetched_unread_bytes"] == 0


def test_a_read_joins_a_prefetch_under_way(node: Served, client: Client) -> None:
    names = cold(node, client, "block-0", "block-1")
    blocked = threading.Event()

    def block_the_only_reader() -> None:
        blocked.wait(TIMEOUT_S)

    node.mover.run_in_reader(block_the_only_reader)
    assert prefetch(client, names[0]) == 1
    until(node, lambda: bool(node.prefetcher.under_way))
    reading, found = in_background(lambda: client.read(*names, "absent", inline_bytes=4 * KIB)[1])
    gone = node.connect()
    gone.channel.ask(ReadBlocks([names[0].encode()], [0], 0, 1000), Deadline(TIMEOUT_S))
    until(node, lambda: len(next(iter(node.prefetcher.under_way.values()))) == 2)
    gone.close()
    blocked.set()
    reading.join()
    assert found == [[*map(VALUES.__getitem__, names), None]]
    assert in_dram(node, *names) == names[:1]
    found_counters = counters(node)
    assert (found_counters["prefetches_useful"], found_counters["prefetches_late"]) == (1, 0)


def test_a_removed_block_is_not_brought_back(node: Served, client: Client) -> None:
    (name,) = cold(node, client, "block-0")

    def remove_while_read() -> None:
        node.prefetcher.queue("red", [name.encode()])
        node.prefetcher.step()
        block = node.table.find("red", name.encode())
        assert block is not None
        node.table.copies.drop(block)

    node.call(remove_while_read)
    node.settled()
    until(node, lambda: not node.table.prefetched.unread_bytes)
    assert in_dram(node, name) == []
    assert node.call(lambda: node.table.evictor.under_way) == 0


def test_a_failed_read_ends_the_prefetch(node: Served, client: Client) -> None:
    (name,) = cold(node, client, "block-0")
    tier = node.store.tiers[NVME]
    assert isinstance(tier, FailingNvme)
    for failure, is_kept in ((TierFailed("out of order"), True), (ChecksumMismatch("flipped"), False)):
        tier.read_failure = failure
        assert prefetch(client, name) == 1
        until(node, lambda: not node.table.prefetched.unread_bytes)
        assert (node.call(lambda: node.table.find("red", name.encode())) is not None) == is_kept
    assert (counters(node)["prefetched_blocks"], node.call(lambda: node.table.corrupt_reads)) == (0, 1)


def test_prefetches_without_free_slots_are_dropped(node: Served, client: Client) -> None:
    (name,) = cold(node, client, "block-0")
    now_ns = node.reactor.now_ns()

    def no_slot(block: Block, *, may_wait: bool) -> None:
        assert may_wait

    def fill() -> None:
        node.table.begin_promotion = no_slot  # type: ignore[assignment]
        assert node.prefetcher.queue("red", [name.encode()]) == 1
        node.prefetcher.step()
        node.reactor.now_ns = lambda: now_ns + 2 * ROOM_WAIT_NS  # type: ignore[method-assign]
        node.prefetcher.step()
        del node.reactor.now_ns, node.table.begin_promotion

    node.call(fill)
    found = counters(node)
    assert (found["prefetches_refused"], found["prefetches_waiting"], found["prefetched_unread_bytes"]) == (1, 0, 0)


def test_bad_prefetches_are_refused(node: Served, client: Client) -> None:
    with pytest.raises(InvalidArgument, match="the target of a prefetch is 0"):
        prefetch(client, "a", to=7)
    with pytest.raises(InvalidArgument, match="at most 16384 keys per Prefetch; got 16385"):
        prefetch(client, *map(str, range(MAX_PREFETCH_KEYS + 1)))


def test_a_draining_node_prefetches_nothing(node: Served, client: Client) -> None:
    (name,) = cold(node, client, "block-0")
    master = Master(node.link())
    assert master.ask(SetDraining(1, DRAIN_CLOSED)) == Ok()
    assert prefetch(client, name, "absent") == 0
    assert counters(node)["prefetches_refused"] == 2
    assert master.ask(PrefetchBlocks(1, "red", 0, [name.encode()])) == Ok()
    assert in_dram(node, name) == []
    master.close()


def test_a_node_without_nvme_asks_for_copies_only(tmp_path: Path) -> None:
    with served(tmp_path, dram_bytes=DRAM_BYTES) as node:
        client = node.connect()
        client.put({"here": b"h" * 3000})
        assert prefetch(client, "here", "absent") == 0, "no master"
        client.close()


# --- by masters ---


def test_a_master_has_own_blocks_brought(node: Served, client: Client) -> None:
    (name,) = cold(node, client, "block-0")
    master = Master(node.link())
    assert master.ask(PrefetchBlocks(1, "red", 0, [name.encode(), b"absent"])) == Ok()
    until(node, lambda: node.table.prefetched.brought_blocks == 1)
    assert in_dram(node, name) == [name]
    master.close()


def requested(node: Served, client: Client, master: Master, *names: str, answer: bytes) -> list[bytes]:
    """Prefetch blocks that are not here; return the keys that the master is asked for. It answers these flags."""
    assert prefetch(client, *names, to=TO_LOCAL) == len(names)
    header, asked, _payload = read_frame(master._sock)
    assert isinstance(asked, RequestCopy)
    assert (asked.tenant, asked.source) == ("red", 0)
    master._sock.sendall(frame(Flags(answer), header.request_id))
    return asked.keys


def test_blocks_elsewhere_are_requested_once(node: Served, client: Client) -> None:
    master = Master(node.link())
    node.call(lambda: node.service._epochs.update({0: 1}))
    assert requested(node, client, master, "a", "b", answer=b"\1\0") == [b"a", b"b"]
    until(node, lambda: node.table.prefetched.awaited == 1)
    assert prefetch(client, "a") == 0
    assert requested(node, client, master, "b", answer=b"\0") == [b"b"]
    until(node, lambda: node.table.prefetched.awaited == 1)
    master.close()


@pytest.mark.promise("prefetch-bounded")
def test_a_requested_copy_over_the_limit_is_refused(node: Served, client: Client) -> None:
    master = Master(node.link())
    node.call(lambda: node.service._epochs.update({0: 1}))
    requested(node, client, master, "a", "b", answer=b"\1\1")
    sizes = [DRAM_BYTES // SHARE - 1, 2 * KIB]
    copies = CopyBlocks(1, "red", "ns", 8, "another host", "", "127.0.0.1:1", [b"a", b"b"], sizes, [7, 7], [1, 1], [b"", b""], [])
    assert master.ask(copies) == Flags(b"\1\0")
    assert counters(node)["prefetches_refused"] == 1
    until(node, lambda: not len(node.replica_queue))
    found = counters(node)  # there is no such source
    assert (found["prefetches_waiting"], found["prefetched_unread_bytes"]) == (0, 0)
    master.close()
