"""Tests of node_service.py: admission of sessions, isolation of tenants, and commands of masters."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.protocol.catalog_messages import (
    DRAIN_CLOSED,
    DRAIN_OFF,
    CopyBlocks,
    DeleteBlocks,
    MarkSecondary,
    RevokeCredentials,
    SetDraining,
    SetPinned,
)
from kvstore.protocol.errors import (
    Denied,
    Draining,
    InvalidArgument,
    InvalidTicket,
    ProtocolError,
    StaleEpoch,
    TierFailed,
    Unauthorized,
    Unavailable,
)
from kvstore.protocol.event_messages import EventBatch, FetchEvents
from kvstore.protocol.frames import MAGIC, MAX_BODY_BYTES, VERSION, pack_header
from kvstore.protocol.message import Message
from kvstore.protocol.node_messages import (
    SEVERAL_SESSIONS,
    HoldBlocks,
    MapSlabs,
    OpenSlots,
    ReadBlocks,
    ReadBlocksReply,
    ReleaseHolds,
    ReleaseSession,
    Retain,
    WaitCommitted,
)
from kvstore.protocol.retention import unpack_hints
from kvstore.protocol.session_messages import ROLE_CLIENT, ROLE_NODE, Count, Failure, Flags, Hello, Ok, Welcome
from kvstore.rpc.address import connect, parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.security.identity import Role
from kvstore.store.block_table import table
from kvstore.store.block_table.block import Block
from kvstore.store.node_service import MAX_TENANT_BYTES
from kvstore.store.session_authenticator import MAX_SLABS
from kvstore.testing.transfer.awaited import eventually
from tests.rpc.wires import frame, read_frame
from tests.store.failing_tier import FailingNvme
from tests.store.served import TIMEOUT_S, Client, Master, Served, served, until

KIB = 1024


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, dram_bytes=64 * KIB, nvme_bytes=1 << 20) as node:
        yield node


@pytest.fixture
def master(node: Served) -> Iterator[Master]:
    master = Master(node.link())
    yield master
    master.close()


def copy_of(key: bytes, *, epoch: int) -> CopyBlocks:
    """From a node that is not there."""
    return CopyBlocks(epoch, "red", "ns", 8, "another host", "", "127.0.0.1:1", [key], [10], [7], [1], [b""], [])


def link_again(node: Served) -> None:
    def up() -> None:
        link = node.service.links[0]
        assert link is not None
        node.service.link_up(link, 1)

    node.call(up)


def find(node: Served, name: str) -> Block | None:
    return node.call(lambda: node.store.table.find("red", name.encode()))


# --- holds ---


def test_held_blocks_are_deleted_by_force_only(node: Served, client: Client, master: Master) -> None:
    client.put({"a": b"a"})
    client.ask(HoldBlocks(4, 60_000, [b"a"], [0]), Flags)
    assert master.ask(DeleteBlocks(1, "red", [b"a"], [9])) == Flags(bytes((0,)))
    assert master.ask(DeleteBlocks(1, "red", [b"a"], [9], 1)) == Flags(bytes((1,)))
    client.channel.post(ReleaseHolds([4]))
    until(node, lambda: not node.store.holds.blocks)


# --- retention hints ---


def test_hints_out_of_range_are_refused(node: Served, client: Client) -> None:
    client.put({"a": b"a"})
    for message in (
        Retain([b"a"], 101),
        Retain([b"a"], 50, cause=3),
        Retain([b"a"], 50, ttl_ms=8 * 86_400_000),
        Retain([b"a"], 50, reuse_ms=8 * 86_400_000),
        Retain([b"a"], 50, session=SEVERAL_SESSIONS),
    ):
        with pytest.raises(InvalidArgument, match="Retain has"):
            client.ask(message, Flags)


def test_hints_are_applied_to_blocks_that_are_here(node: Served, client: Client) -> None:
    client.put({"a": b"a", "b": b"b"})
    assert client.ask(Retain([b"a", b"x", b"b"], 90, session=7), Flags) == Flags(bytes((1, 0, 1)))
    reads = [ReadBlocks(keys, [0] * len(keys), 1 << 20, 0) for keys in ([b"x", b"b"], [b"b"], [b"x"])]
    hello = Hello(ROLE_NODE, "red")
    with contextlib.closing(Channel.open(parse_address(f"unix:{node.unix}"), hello, Deadline(TIMEOUT_S))) as peer:
        copied = []
        for message in reads:
            reply = peer.call(message, ReadBlocksReply, Deadline(TIMEOUT_S))
            peer.read_into([memoryview(bytearray(size)) for size in reply.sizes if size], Deadline(TIMEOUT_S))
            copied.append(list(unpack_hints(reply.hints)))
    assert copied == [[(1, 90, 0, 7)], [(0, 90, 0, 7)], []]
    assert client.read("b", inline_bytes=1 << 20)[0].hints == b"", "a client needs none"
    with contextlib.closing(node.connect(tenant="blue")) as other:
        assert other.ask(ReleaseSession(7), Count) == Count(0)
    assert client.ask(ReleaseSession(7), Count) == Count(2)


# --- who is let in ---


def test_a_ticket_is_valid_for_one_tenant_and_node(tmp_path: Path) -> None:
    with served(tmp_path, needs_tickets=True) as node:
        node.connect(ticket=node.ticket()).close()
        for tenant, ticket in (("red", b""), ("blue", node.ticket()), ("red", node.ticket()[:-1] + b"x"), ("red", b"guess" * 20)):
            with pytest.raises(InvalidTicket):
                node.connect(tenant=tenant, ticket=ticket)


def test_a_read_ticket_permits_no_writes(tmp_path: Path) -> None:
    with served(tmp_path, dram_bytes=64 * KIB, needs_tickets=True) as node:
        with contextlib.closing(node.connect(ticket=node.ticket())) as writer:
            writer.put({"a": b"a" * 3000})
        with contextlib.closing(node.connect(ticket=node.ticket(role=Role.READ))) as reader:
            assert reader.read("a")[1] == [b"a" * 3000]
            slab = reader.ask_blocks("a").slabs[0]
            sizes, fds = reader.slabs([slab])
            assert sizes[0]
            os.close(fds[0])
            for refused in (lambda: reader.put({"b": b"b"}), lambda: reader.open({"b": 1}), lambda: reader.slabs([slab], writable=True)):
                with pytest.raises(Denied, match="tenant 'red' with role read may not put blocks"):
                    refused()
            with pytest.raises(Denied, match="may not put blocks"):
                reader.ask(WaitCommitted(), Ok)
        assert find(node, "b") is None


@pytest.mark.promise("authentication")
def test_a_pass_permits_reads_of_its_blocks_only(tmp_path: Path) -> None:
    with served(tmp_path, dram_bytes=64 * KIB, needs_tickets=True) as node:
        node.authenticator.master_epochs[0] = 3
        with contextlib.closing(node.connect(ticket=node.ticket())) as writer:
            writer.put({"a": b"a" * 3000, "b": b"b" * 3000}, generation=4)
        shown = node.call(lambda: node.issuer.issue_pass(5, "red", [b"a"], [4], node.reactor.now_ns()))

        def meet(*, role: int = ROLE_NODE, epoch: int = 3, tenant: str = "red", ticket: bytes = shown) -> Client:
            hello = Hello(role, tenant, "", "other", epoch, ticket)
            return Client(Channel.open(parse_address(f"unix:{node.unix}"), hello, Deadline(TIMEOUT_S)))

        for wrong in ({"tenant": "blue"}, {"role": ROLE_CLIENT}, {"ticket": node.ticket()}, {"ticket": b""}):
            with pytest.raises(InvalidTicket):
                meet(**wrong)
        with pytest.raises(StaleEpoch, match="node 'other' is registered under master epoch 2, this node under epoch 3"):
            meet(epoch=2)
        with contextlib.closing(meet()) as reader:
            assert reader.read("a", generations=[4], inline_bytes=4000)[1] == [b"a" * 3000]
            for key, generation in (("b", 4), ("a", 0), ("a", 5), ("x", 4)):
                with pytest.raises(Denied, match="the pass of this node does not cover the requested blocks"):
                    reader.read(key, generations=[generation], inline_bytes=4000)
            for refused in (
                lambda: reader.put({"c": b"c"}),
                lambda: reader.open({"c": 1}),
                lambda: reader.slabs([0]),
                lambda: reader.ask(FetchEvents(0), EventBatch),
            ):
                with pytest.raises(Denied, match=r"node 'other' may not (put|read|record)"):
                    refused()
        assert find(node, "c") is None


def test_revocation_closes_connections_and_refuses_the_ticket(tmp_path: Path) -> None:
    with served(tmp_path, needs_tickets=True) as node:
        link = node.link()
        shown, other = node.ticket(credential="one"), node.ticket(credential="two")
        revoked, stays = node.connect(ticket=shown), node.connect(ticket=other)
        number = node.call(lambda: node.issuer.revoke(node.issuer.bearers()[0], node.reactor.now_ns()))
        link.sendall(frame(RevokeCredentials(0, "red", [number])))
        assert read_frame(link)[1] == Count(1)
        eventually(revoked.channel.is_closed_by_peer, "the node hangs up")
        assert not stays.channel.is_closed_by_peer()
        with pytest.raises(InvalidTicket, match="revoked"):
            node.connect(ticket=shown)
        for client in (revoked, stays):
            client.close()
        link.close()


@pytest.mark.promise("authentication")
def test_a_connection_cannot_change_its_caller(tmp_path: Path) -> None:
    """Otherwise a revoked token would not end the session that it opened."""
    with served(tmp_path, needs_tickets=True) as node:
        node.authenticator.master_epochs[0] = 3
        read = node.call(lambda: node.issuer.issue_pass(5, "red", [b"a"], [4], node.reactor.now_ns()))
        as_red, as_blue = Hello(ROLE_CLIENT, "red", ticket=node.ticket()), Hello(ROLE_CLIENT, "blue", ticket=node.ticket("blue"))
        as_node = Hello(ROLE_NODE, "red", name="other", epoch=3, ticket=read)
        with contextlib.closing(node.connect(ticket=node.ticket())) as red:
            red.ask(as_red, Welcome)
            for other in (as_blue, as_node):
                with pytest.raises(
                    Denied, match="this connection is authenticated as tenant 'red' with role write, tenant 'red': open another one"
                ):
                    red.ask(other, Welcome)
        with contextlib.closing(Client(Channel.open(parse_address(f"unix:{node.unix}"), as_node, Deadline(TIMEOUT_S)))) as peer:
            peer.ask(as_node, Welcome)
            with pytest.raises(Denied, match="this connection is authenticated as node 'other'"):
                peer.ask(as_red, Welcome)


def test_an_unregistered_node_admits_no_sessions(node: Served) -> None:
    node.authenticator.needs_tickets = None
    with pytest.raises(Unavailable, match="try again"):
        node.connect()


def test_a_tenant_name_that_is_too_long_is_refused(node: Served) -> None:
    node.connect(tenant="t" * MAX_TENANT_BYTES).close()
    for tenant in ("t" * (MAX_TENANT_BYTES + 1), "é" * MAX_TENANT_BYTES):
        with pytest.raises(InvalidArgument, match="tenant"):
            node.connect(tenant=tenant)


@pytest.mark.parametrize("message", [ReadBlocks([b"a"], [0], 0, 0), MapSlabs([0]), OpenSlots("ns", [b"a"], [1], [1], [b""])])
def test_requests_before_hello_are_refused(node: Served, message: Message) -> None:
    with connect(parse_address(node.tcp), timeout_s=TIMEOUT_S) as sock:
        sock.sendall(frame(message))
        answer = read_frame(sock)[1]
        assert isinstance(answer, Failure)
        assert answer.code == Unauthorized.code


# --- tenants ---


def test_a_tenant_sees_neither_keys_nor_slabs_of_another(node: Served, client: Client) -> None:
    client.put({"a": b"a" * 3000})
    slab = client.ask_blocks("a").slabs[0]
    other = node.connect(tenant="blue")
    blocks, values = other.read("a")
    assert values == [None]
    assert list(blocks.sizes) == list(blocks.checksums) == list(blocks.tiers) == [0]
    for writable in (False, True):
        assert other.slabs([slab], writable=writable) == other.slabs([slab + 1000], writable=writable) == ([0], [])
    other.put({"a": b"mine" * 100})
    assert client.read("a")[1] == [b"a" * 3000]
    assert other.read("a")[1] == [b"mine" * 100]
    assert other.ask_blocks("a").slabs[0] != slab
    other.close()


def test_slabs_are_passed_read_only_or_writable(node: Served, client: Client) -> None:
    client.put({"a": b"a" * 3000})
    slab = client.ask_blocks("a").slabs[0]
    sizes, fds = client.slabs([slab, 1000, slab])
    assert [bool(size) for size in sizes] == [True, False, True]
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
        os.close(fd)
    _, (fd,) = client.slabs([slab], writable=True)
    os.pwrite(fd, b"b", client.ask_blocks("a").offsets[0])
    os.close(fd)


def test_map_slabs_needs_a_unix_socket_and_few_slabs(node: Served, client: Client) -> None:
    remote = node.connect(tcp=True)
    with pytest.raises(InvalidArgument, match="Unix"):
        remote.slabs([0])
    remote.close()
    with pytest.raises(InvalidArgument, match=str(MAX_SLABS)):
        client.slabs(list(range(MAX_SLABS + 1)))
    assert client.slabs([]) == ([], [])


def test_map_slabs_without_descriptors_fails_cleanly(node: Served, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.put({"a": b"a" * 3000})
    slab = client.ask_blocks("a").slabs[0]
    slab_fd = node.store.dram.slab_fd
    passed: list[int] = []

    def second_fails(slab_id: int, *, writable: bool, tenant: str) -> int:
        if passed:
            raise OSError(24, "Too many open files")
        passed.append(slab_fd(slab_id, writable=writable, tenant=tenant))
        return passed[0]

    monkeypatch.setattr(node.store.dram, "slab_fd", second_fails)
    with pytest.raises(Unavailable, match="descriptor"):
        client.slabs([slab, slab])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(passed[0])


# --- the master ---


@pytest.mark.parametrize(
    "message", [DeleteBlocks(9, "red", [b"a"], [9], 1), SetPinned(9, "red", [b"a"]), copy_of(b"b", epoch=9), SetDraining(9, DRAIN_CLOSED)]
)
def test_only_the_master_link_may_command(node: Served, client: Client, message: Message) -> None:
    client.put({"a": b"a"})
    with pytest.raises(Denied, match="needs the master that this node is registered with"):
        client.ask(message, Flags)
    block = find(node, "a")
    assert block is not None
    assert not block.pinned


def test_delete_blocks_keeps_newer_generations(node: Served, client: Client, master: Master) -> None:
    client.put({"a": b"a", "b": b"b"}, generation=5)
    assert master.ask(DeleteBlocks(1, "red", [b"a", b"b", b"x"], [5, 4, 9])) == Flags(bytes((1, 1, 1)))
    assert client.read("a", "b")[1] == [None, b"b"]
    assert master.ask(DeleteBlocks(1, "blue", [b"b"], [9])) == Flags(bytes((1,)))
    assert client.read("b")[1] == [b"b"]


def test_a_draining_node_serves_reads_and_refuses_puts(node: Served, client: Client, master: Master) -> None:
    client.put({"a": b"a"})
    assert master.ask(SetDraining(1, DRAIN_CLOSED)) == Ok()
    with pytest.raises(Draining):
        client.put({"b": b"b"})
    with pytest.raises(Draining):
        client.open({"b": 100})
    assert client.read("a", "b")[1] == [b"a", None]
    assert master.ask(SetDraining(1, DRAIN_OFF)) == Ok()
    assert client.put({"b": b"b"}) == [1]


def test_leased_and_pinned_blocks_are_deleted_by_force_only(node: Served, client: Client, master: Master) -> None:
    client.put({"a": b"a" * 100, "b": b"b"})
    client.ask_blocks("a")
    assert master.ask(SetPinned(1, "red", [b"b", b"x"])) == Flags(bytes((1, 0)))
    assert master.ask(DeleteBlocks(1, "red", [b"a", b"b"], [9, 9])) == Flags(bytes((0, 0)))
    assert master.ask(SetPinned(1, "red", [b"b"], 0)) == Flags(bytes((1,)))
    assert master.ask(DeleteBlocks(1, "red", [b"a", b"b"], [9, 9], 1)) == Flags(bytes((1, 1)))
    assert client.read("a", "b")[1] == [None, None]


def test_pins_not_confirmed_by_a_new_link_end(node: Served, client: Client, master: Master) -> None:
    client.put({"a": b"a", "b": b"b", "c": b"c"})
    master.ask(SetPinned(1, "red", [b"a", b"b", b"c"]))
    master.ask(DeleteBlocks(1, "red", [b"c"], [9], 1))
    node.call(lambda: node.service.synced())
    assert master.ask(DeleteBlocks(1, "red", [b"a", b"b"], [9, 9])) == Flags(bytes((0, 0)))

    link_again(node)
    master.ask(SetPinned(2, "red", [b"b"]))
    node.call(lambda: node.service.synced())
    assert master.ask(DeleteBlocks(2, "red", [b"a", b"b"], [9, 9])) == Flags(bytes((1, 0)))


@pytest.mark.promise("last-replica-last")
def test_a_new_link_makes_all_secondary_copies_primary(
    node: Served, client: Client, master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages about their homes may be lost with the former link. Some at a time, also those of other tenants."""
    monkeypatch.setattr(table, "FORGOTTEN_AT_ONCE", 2)
    client.put(dict.fromkeys("abc", b"x"))
    with contextlib.closing(node.connect(tenant="blue")) as other:
        other.put({"d": b"x"})
    assert master.ask(MarkSecondary(1, "red", [b"a", b"b", b"c"])) == Ok()
    assert master.ask(MarkSecondary(1, "blue", [b"d"])) == Ok()
    assert node.call(lambda: (node.store.table.secondary_blocks, node.store.table.primary_again)) == (4, 0)
    link_again(node)
    steps = [node.call(lambda: (node.store.table.expire(now_ns=0), node.store.table.primary_again)[1]) for _ in range(2)]
    assert steps == [2, 4]


def test_commands_of_an_older_master_are_refused(node: Served, client: Client, master: Master) -> None:
    client.put({"a": b"a"})
    assert isinstance(master.ask(SetPinned(7, "red", [b"a"])), Flags)
    for message in (SetPinned(6, "red", [b"a"], 0), DeleteBlocks(6, "red", [b"a"], [9]), copy_of(b"b", epoch=6)):
        answer = master.ask(message)
        assert isinstance(answer, Failure)
        assert answer.code == StaleEpoch.code
    assert find(node, "a") is not None


def test_a_block_deleted_during_its_demotion_stays_deleted(node: Served, client: Client, master: Master, tmp_path: Path) -> None:
    client.put({"a": b"a" * 3000})

    def evict() -> None:
        block = node.store.table.find("red", b"a")
        assert block is not None
        node.store.table.evictor.evict(block, node.store.table._ingest_tier)

    node.call(evict)
    assert master.ask(DeleteBlocks(1, "red", [b"a"], [9])) == Flags(bytes((1,)))
    assert list(node.store.tiers[2].recover()) == []


@pytest.mark.promise("remove-stays-removed")
def test_delete_blocks_fails_if_it_cannot_become_durable(node: Served, client: Client, master: Master) -> None:
    client.put({"a": b"a", "b": b"b"})
    nvme = node.store.tiers[2]
    assert isinstance(nvme, FailingNvme)
    nvme.flush_failure = TierFailed("EIO")
    answer = master.ask(DeleteBlocks(1, "red", [b"a"], [9]))
    assert isinstance(answer, Failure)
    assert answer.code == Unavailable.code
    assert "deletions in nvme are not durable yet: EIO" in answer.text
    nvme.flush_failure = None
    assert master.ask(DeleteBlocks(1, "red", [b"a", b"b"], [9, 9])) == Flags(bytes((1, 1)))


# --- nonsense ---


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n",
        pack_header(Hello.TYPE, 1, MAX_BODY_BYTES + 1),
        MAGIC + bytes((VERSION + 1,)) + bytes(21),
        os.urandom(4096),
    ],
    ids=["HTTP", "a body too large", "another version", "noise"],
)
def test_a_malformed_frame_closes_its_connection_only(node: Served, client: Client, data: bytes) -> None:
    with connect(parse_address(node.tcp), timeout_s=TIMEOUT_S) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        answer = read_frame(sock)[1]
        assert isinstance(answer, Failure)
    assert client.put({"a": b"x"}) == [1]


def test_a_malformed_body_fails_its_request_only(node: Served) -> None:
    with connect(parse_address(node.tcp), timeout_s=TIMEOUT_S) as sock:
        body = Hello(ROLE_CLIENT, "red").pack()
        for bad in (body + b"x", body[:-1], b""):
            sock.sendall(pack_header(Hello.TYPE, 1, len(bad)) + bad)
            answer = read_frame(sock)[1]
            assert isinstance(answer, Failure)
            assert answer.code == ProtocolError.code
        sock.sendall(frame(Hello(ROLE_CLIENT, "red")))
        assert not isinstance(read_frame(sock)[1], Failure)
