"""Promises of master/frames: what clients and nodes say, over real sockets."""

import select
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.master.directory.placement import home_copies
from kvstore.master.server import client_frames as clients
from kvstore.master.server.client_frames import SLICE_ROWS
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import (
    DRAIN_OFF,
    DRAIN_SAVE,
    EVENT_MOVED,
    PHASE_SYNC_BEGIN,
    PHASE_SYNC_END,
    CommitBlocks,
    CopyBlocks,
    CopyResult,
    DeleteBlocks,
    MarkSecondary,
    PrefetchBlocks,
    RequestCopy,
    SetDraining,
    SetPinned,
)
from kvstore.protocol.errors import Denied, InvalidArgument, ProtocolError, QuotaExceeded, StaleEpoch, TierFailed, Unauthorized, from_code
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.master_messages import (
    CancelReservations,
    Exists,
    Locations,
    Lookup,
    MatchPrefix,
    Nodes,
    NodeTable,
    Pin,
    PinFor,
    Remove,
    RemoveMatching,
    Replicate,
    Reserve,
    ReserveReply,
)
from kvstore.protocol.message import BUSY, GRANTED, PRESENT, REPLICAS_NO_BLOCK, REPLICAS_PENDING, TIER_BITS, Message
from kvstore.protocol.node_messages import ReadBlocks
from kvstore.protocol.session_messages import ROLE_CLIENT, ROLE_NODE, SERVER_MASTER, Count, Failure, Flags, Hello, Ok, Welcome
from kvstore.rpc.address import parse_address, socket_id
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.server.session import Session
from kvstore.security.actor import THIS_MASTER
from kvstore.testing.transfer.awaited import eventually
from tests.master.blocks import TENANT, Event, publish
from tests.master.running import TIMEOUT_S, NodeSide, Places, ask, master_in_thread, unix_client
from tests.rpc.wires import frame


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with master_in_thread(tmp_path, node_ttl_s=60.0, reserve_ttl_s=600.0) as found:
        yield found


@pytest.fixture
def client(places: Places) -> Iterator[Channel]:
    channel = places.client()
    yield channel
    channel.close()


@pytest.fixture
def node(places: Places) -> Iterator[NodeSide]:
    side = NodeSide(places)
    yield side
    side.close()


class Asking(threading.Thread):
    """A request under way in a thread; `result` waits for its answer."""

    def __init__(self, channel: Channel, message: Message) -> None:
        super().__init__()
        self._channel, self._message = channel, message
        self._flags = b""
        self.start()

    def run(self) -> None:
        self._flags = ask(self._channel, self._message, Flags).flags

    def result(self) -> bytes:
        self.join()
        return self._flags


def failure(node: NodeSide, message: Message) -> int:
    header, body = node.ask(message)
    assert header.type == Failure.TYPE
    return Failure.unpack(body).code


def test_hello_is_answered_with_where_the_master_is(places: Places, client: Channel) -> None:
    welcome = client.welcome
    assert (welcome.server, welcome.node_id, welcome.host_id) == (SERVER_MASTER, 0, socket_id(places.unix))
    assert (welcome.unix, welcome.control) == (places.unix, places.control)
    local = unix_client(places)
    assert ask(local, Exists([b"k"]), Flags).flags == b"\0"
    local.close()


def test_a_block_from_reserve_to_lookup(client: Channel, node: NodeSide) -> None:
    grants = ask(client, Reserve([b"a", b"b"], [10, 10]), ReserveReply)
    assert (grants.statuses, list(grants.nodes)) == (bytes([GRANTED, GRANTED]), [1, 1])
    node.publish(Event(b"a", grants.generations[0], size=10))
    assert ask(client, Exists([b"a", b"b"]), Flags).flags == b"\1\0"
    assert ask(client, MatchPrefix([b"a", b"b"]), Count).value == 1
    found = ask(client, Lookup([b"a", b"b"]), Locations)
    assert (found.replicas, list(found.nodes), list(found.sizes)) == (b"\1\0", [1], [10, 0])
    assert ask(client, Lookup([b"a"], avoid=1), Locations).replicas == b"\0"
    assert ask(client, Reserve([b"b"], [10]), ReserveReply).statuses == bytes([BUSY])
    ask(client, CancelReservations([b"b"], [grants.generations[1]]), Ok)
    assert ask(client, Reserve([b"b"], [10]), ReserveReply).statuses == bytes([GRANTED])


@pytest.mark.promise("interrupts-safe")
@pytest.mark.parametrize("hellos", [1, 2])
def test_last_reservation_is_cancelled_on_disconnect(places: Places, client: Channel, node: NodeSide, hellos: int) -> None:
    other = places.client()
    generations = ask(other, Reserve([b"used", b"unused"], [1, 1]), ReserveReply).generations
    for _ in range(1, hellos):
        ask(other, Hello(ROLE_CLIENT, "red"), Welcome)
    node.publish(Event(b"used", generations[0], size=1))
    other.close()
    free = bytes([PRESENT, GRANTED])
    eventually(lambda: ask(client, Reserve([b"used", b"unused"], [1, 1]), ReserveReply).statuses == free, "what it reserved was free")


def test_a_pin_is_told_to_the_node_and_answered(client: Channel, node: NodeSide) -> None:
    node.publish(Event(b"a"))
    for pinned in (1, 0):
        asking = Asking(client, Pin([b"a", b"none"], pinned=pinned))
        header, body = node.read()
        assert (SetPinned.unpack(body).keys, SetPinned.unpack(body).pinned) == ([b"a"], pinned)
        node.answer(header, Flags(b"\1"))
        assert asking.result() == b"\1\0"


def test_pin_of_an_evicted_block_reports_it_absent(places: Places, client: Channel, node: NodeSide) -> None:
    node.publish(Event(b"a"), Event(b"b"))
    master = places.master
    assert master is not None
    for message in (PinFor([b"a", b"b"], 60_000), Pin([b"a", b"b"])):
        asking = Asking(client, message)
        header, _body = node.read()
        node.answer(header, Flags(b"\0\1"))
        assert asking.result() == b"\0\1"
    leader = master.partitions[0].role_manager.leader()
    pinned = master.reactor.call(lambda: leader.pin_all(TENANT, "ns", THIS_MASTER, pinned=True), deadline_s=TIMEOUT_S)
    header, _body = node.read()
    node.answer(header, Flags(b"\0\1"))
    assert pinned.result(TIMEOUT_S) == 1


def test_new_drain_is_sent_despite_a_pending_cancel(tmp_path: Path) -> None:
    heard: list[FrameHeader] = []
    with master_in_thread(tmp_path, command_timeout_s=600.0, node_ttl_s=60.0) as places, places.stub() as stub:
        node = NodeSide(places)
        node.sync()
        for is_cancelled in (False, True, False):
            stub.Drain(pb.DrainRequest(node="one", to="nvme", cancel=is_cancelled), timeout=TIMEOUT_S)
            header, body = node.read()
            heard.append(header)
            assert SetDraining.unpack(body).mode == (DRAIN_OFF if is_cancelled else DRAIN_SAVE), "the last word is what holds"
        for header, answer in zip(heard, (Ok(), Ok(), Flags(b"")), strict=True):
            node.answer(header, answer)
        _header, body = node.read()
        assert SetDraining.unpack(body).mode == DRAIN_SAVE, "the answer to the first is none to the last"
        node.close()


def test_node_table_has_transfer_descriptions(places: Places, client: Channel) -> None:
    node = NodeSide(places, transfer=b"\0engine")
    before = ask(client, Nodes(), NodeTable)
    assert before.transfers == [b"\0engine"]
    node.beat(transfer=b"other")
    after = ask(client, Nodes(), NodeTable)
    assert (after.transfers, after.revisions[0] > before.revisions[0]) == ([b"other"], True)
    node.close()


def test_node_table_is_limited_to_a_message(places: Places, client: Channel) -> None:
    count = (32 << 20) // (256 << 10) + 2
    with places.stub() as stub:
        for index in range(count):
            request = pb.RegisterRequest(name=f"n{index}", instance=1, tcp="t:1", transfer=bytes(256 << 10))
            stub.Register(request, timeout=TIMEOUT_S)
    table = ask(client, Nodes(), NodeTable)
    assert [len(blob) for blob in table.transfers] == [256 << 10] * (count - 2) + [0, 0]


def test_request_without_hello_or_of_another_role_is_refused(places: Places, client: Channel, node: NodeSide) -> None:
    with pytest.raises(Unauthorized, match="registered node"):
        ask(client, publish(1, []), Ok)
    with pytest.raises(ProtocolError, match="type 45"):
        ask(client, ReadBlocks([b"k"], [0], 0, 0), Flags)
    with pytest.raises(InvalidArgument, match="unknown role 9"):
        ask(client, Hello(9, TENANT), Welcome)
    assert failure(node, Exists([b"k"])) == Unauthorized.code
    for message in (Exists([b"k"]), Nodes()):
        with pytest.raises(Unauthorized, match="Hello"):
            Channel.open(parse_address(places.listen), message, Deadline(TIMEOUT_S))  # type: ignore[arg-type]
    assert ask(client, Exists([b"k"]), Flags).flags == b"\0"


@pytest.mark.promise("authentication")
def test_a_connection_is_one_clients_or_a_nodes_for_good(places: Places, client: Channel, node: NodeSide) -> None:
    epoch = node.registration.registration_epoch
    as_node, as_other = Hello(ROLE_NODE, name="one", epoch=epoch), Hello(ROLE_CLIENT, "another")
    ask(client, Hello(ROLE_CLIENT, TENANT), Welcome)
    for other in (as_node, as_other):
        with pytest.raises(Denied, match="open another one for another identity"):
            ask(client, other, Welcome)
    assert failure(node, as_other) == Denied.code
    header, _ = node.ask(as_node)
    assert header.type == Welcome.TYPE


def test_values_are_refused_and_the_connection_stays(client: Channel) -> None:
    with pytest.raises(ProtocolError, match="values go to nodes"):
        client.call(Exists([b"k"]), Flags, Deadline(TIMEOUT_S), [b"value"])
    assert ask(client, Exists([b"k"]), Flags).flags == b"\0"


def test_a_nodes_hello_needs_its_newest_registration(places: Places, node: NodeSide) -> None:
    address = parse_address(places.listen)
    for name, epoch in (("one", 5), ("unknown", node.registration.registration_epoch)):
        with pytest.raises(StaleEpoch):
            Channel.open(address, Hello(ROLE_NODE, name=name, epoch=epoch), Deadline(TIMEOUT_S))
    assert node.ask(node.hello)[0].type == Welcome.TYPE


def test_disconnected_nodes_blocks_return_with_it(places: Places, client: Channel, node: NodeSide) -> None:
    node.publish(Event(b"a"))
    node.close()
    while ask(client, Exists([b"a"]), Flags).flags == b"\1":
        pass
    retry = NodeSide(places)
    assert ask(client, Exists([b"a"]), Flags).flags == b"\1"
    retry.close()


def test_a_second_connection_of_a_node_replaces_the_first(places: Places, client: Channel, node: NodeSide) -> None:
    node.publish(Event(b"a"))
    retry = NodeSide(places)
    assert node.sock.recv(1) == b""
    assert ask(client, Exists([b"a"]), Flags).flags == b"\1"
    retry.close()


def test_a_remove_is_answered_when_all_holders_have_dropped_it(places: Places, client: Channel) -> None:
    one, two = NodeSide(places, "one"), NodeSide(places, "two")
    for side in (one, two):
        side.publish(Event(b"k"))
    one.publish(Event(b"leased"))
    asking = Asking(client, Remove([b"k", b"leased", b"none"]))
    header, body = one.read()
    assert DeleteBlocks.unpack(body) == DeleteBlocks(
        DeleteBlocks.unpack(body).epoch, TENANT, [b"k", b"leased"], DeleteBlocks.unpack(body).generations
    )
    one.answer(header, Flags(b"\1\0"))
    header, _body = two.read()
    two.answer(header, Flags(b"\1"))
    assert asking.result() == b"\1\0\0"
    assert ask(client, Exists([b"k", b"leased"]), Flags).flags == b"\0\1"
    one.close()
    two.close()


def test_faulty_node_does_not_block_a_remove(places: Places, client: Channel) -> None:
    node = NodeSide(places)
    node.publish(Event(b"a"), Event(b"b"), Event(b"c"))
    asking = Asking(client, Remove([b"a"]))
    node.answer(node.read()[0], Failure(TierFailed.code, "out of order"))
    assert asking.result() == b"\0"
    asking = Asking(client, Remove([b"b"]))
    node.answer(node.read()[0], Flags(b"\1\1\1"))
    assert asking.result() == b"\0"
    asking = Asking(client, Remove([b"c"]))
    node.answer(node.read()[0], Ok())
    assert asking.result() == b"\0"
    asking = Asking(client, Remove([b"c"]))
    node.read()
    node.close()
    assert asking.result() == b"\0", "it may come back with the block"
    assert ask(client, Exists([b"c"]), Flags).flags == b"\0"


def test_silent_node_delays_a_remove_to_its_deadline(tmp_path: Path) -> None:
    with master_in_thread(tmp_path / "run", command_timeout_s=0.1, node_ttl_s=60.0) as places:
        client, node = places.client(), NodeSide(places)
        node.publish(Event(b"a"))
        assert ask(client, Remove([b"a", b"a"]), Flags).flags == b"\0\0"
        assert ask(client, Exists([b"a"]), Flags).flags == b"\1"
        client.close()
        node.close()


# Copies


@dataclass(slots=True)
class Two:
    """Two nodes: the first holds a and b, at generations 1 and 2."""

    places: Places
    one: NodeSide
    two: NodeSide

    def replicate(self, *keys: bytes) -> int:
        return self.places.replicate(TENANT, keys, node_id=2, source_node_id=1)

    def report(self, arrived: bytes = b"\1\1", epoch: int = 0) -> tuple[FrameHeader, bytes]:
        return self.two.ask(CopyResult(epoch or self.two.registration.registration_epoch, TENANT, [b"a", b"b"], [1, 2], arrived))


@pytest.fixture
def two(places: Places) -> Iterator[Two]:
    nodes = Two(places, NodeSide(places, "one"), NodeSide(places, "two"))
    nodes.one.sync(Event(b"a", 1), Event(b"b", 2))
    nodes.two.sync()
    yield nodes
    nodes.one.close()
    nodes.two.close()


def test_copies_from_the_order_to_the_lookup(two: Two, client: Channel) -> None:
    two.replicate(b"b", b"none", b"a")
    header, body = two.two.read()
    assert header.type == CopyBlocks.TYPE
    order = CopyBlocks.unpack(body)
    assert (order.source, order.unix, order.tcp, order.keys) == (1, "/u", "t:1", [b"b", b"a"])
    two.two.answer(header, Flags(b"\1\1"))
    header, body = two.report(b"\1\0")
    assert (header.type, Flags.unpack(body).flags) == (Flags.TYPE, b"\1\0")
    assert list(ask(client, Lookup([b"a", b"b"]), Locations).nodes) == [1, 2, 1]
    with two.places.stub() as stub:
        counters = stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).counters
    assert (counters["copies_ordered"], counters["copies_entered"]) == (2, 1)


def test_home_copies_are_ordered_and_marked_secondary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_copies, "REFRESH_NS", 0)
    with master_in_thread(tmp_path, node_ttl_s=60.0) as places:
        one, two = NodeSide(places, "one"), NodeSide(places, "two")
        one.sync()
        two.sync()
        one.beat(tiers=[pb.TierStatus(name="dram", capacity_bytes=1 << 20, used_bytes=1 << 20, health="ok")])
        granted: dict[bytes, int] = {}
        for number in range(500):  # until the master has seen the full node, and a prompt's home is the empty one
            key = b"%d" % number
            claim = CommitBlocks(one.registration.registration_epoch, TENANT, "", [key], [100], [7], [b""], acknowledged=1)
            granted[key] = ReserveReply.unpack(one.ask(claim)[1]).generations[0]
            if select.select([two.sock], [], [], 0.05)[0]:
                break
        header, body = two.read()
        order = CopyBlocks.unpack(body)
        assert order.source == 1
        flags = Flags(b"\1" * len(order.keys))
        two.answer(header, flags)
        generations = [granted[key] for key in order.keys]
        arrived = CopyResult(two.registration.registration_epoch, TENANT, order.keys, generations, flags.flags)
        assert two.ask(arrived)[1] == flags.pack()
        header, body = one.read()
        assert (header.type, MarkSecondary.unpack(body).keys) == (MarkSecondary.TYPE, order.keys)
        one.answer(header, Ok())
        with places.stub() as stub:
            assert stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).counters["home_copies"] == len(order.keys)
        one.close()
        two.close()


def test_copy_of_a_pinned_block_is_pinned_after_the_flags(two: Two, client: Channel) -> None:
    asking = Asking(client, Pin([b"a"]))
    two.one.answer(two.one.read()[0], Flags(b"\1"))
    assert asking.result() == b"\1"
    two.replicate(b"a", b"b")
    two.two.answer(two.two.read()[0], Flags(b"\1\1"))
    assert two.report()[0].type == Flags.TYPE
    header, body = two.two.read()
    assert (header.type, SetPinned.unpack(body).keys, SetPinned.unpack(body).pinned) == (SetPinned.TYPE, [b"a"], 1)


@pytest.mark.parametrize(
    "answer", [Flags(b"\0\0"), Failure(TierFailed.code, "out of order"), Flags(b"\1")], ids=["no", "failed", "nonsense"]
)
def test_refused_copy_can_be_ordered_again(two: Two, answer: Message) -> None:
    two.replicate(b"a", b"b")
    two.two.answer(two.two.read()[0], answer)
    assert two.report()[1] == Flags(b"\0\0").pack()
    two.replicate(b"a", b"b")
    assert CopyBlocks.unpack(two.two.read()[1]).keys == [b"a", b"b"]


def test_copies_that_cannot_be_made_are_one_line_in_the_log(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    assert two.places.replicate(TENANT, [b"a", b"b"], node_id=9, source_node_id=1) == 0
    [record] = caplog.records
    assert record.getMessage().startswith("nothing is copied from node 1 to node 9: node 9 has no connection to this master")


def test_a_node_requests_copies_from_whoever_holds_them(two: Two) -> None:
    orders: list[CopyBlocks] = []

    def request(*keys: bytes, source: int = 0, node: NodeSide = two.two) -> bytes:
        """The answer's flags. CopyBlocks that come before go to `orders`."""
        header, body = node.ask(RequestCopy(node.registration.registration_epoch, TENANT, source, list(keys)))
        while header.type == CopyBlocks.TYPE:
            orders.append(CopyBlocks.unpack(body))
            header, body = node.read()
        assert header.type == Flags.TYPE
        return Flags.unpack(body).flags

    assert request(b"a", b"none") == b"\1\0"
    assert request(b"b", b"a") == b"\1\1", "one is under way"
    assert request(b"none", source=1) == b"\0"
    assert request(b"a", node=two.one) == b"\0", "it holds it"
    assert [(order.source, order.keys) for order in orders] == [(1, [b"a"]), (1, [b"b"])]


def test_promotions_go_to_the_node_for_its_cold_blocks(two: Two) -> None:
    master = two.places.master
    assert master is not None
    frames = master.partitions[0].role_manager.leader().frames
    two.one.publish(Event(b"b", 2, kind=EVENT_MOVED, tiers=TIER_BITS["nvme"]))
    eventually(lambda: master.reactor.call(lambda: frames.promote(TENANT, [b"a", b"b"], node_id=1), deadline_s=TIMEOUT_S) == 1, "moved")
    header, body = two.one.read()
    told = PrefetchBlocks.unpack(body)
    assert (header.type, told.source, told.keys) == (PrefetchBlocks.TYPE, 0, [b"b"])
    two.one.answer(header, Ok())


def test_seek_sends_and_counts_all_keys(two: Two) -> None:
    master = two.places.master
    assert master is not None
    frames = master.partitions[0].role_manager.leader().frames
    for _ in range(2):
        sought = master.reactor.call(lambda: frames.prefetch(TENANT, [b"a", b"b"], node_id=2, source_node_id=1), deadline_s=TIMEOUT_S)
        header, body = two.two.read()
        assert (sought, header.type, PrefetchBlocks.unpack(body).keys) == (2, PrefetchBlocks.TYPE, [b"a", b"b"])
        two.two.answer(header, Ok())


def test_copy_report_of_a_stale_node_or_client_is_refused(two: Two, client: Channel) -> None:
    header, body = two.report(epoch=1)
    assert (header.type, Failure.unpack(body).code) == (Failure.TYPE, StaleEpoch.code)
    with pytest.raises(Unauthorized, match="only a registered node may report copies"):
        ask(client, CopyResult(1, TENANT, [b"a"], [1], b"\1"), Flags)


def test_remove_matching_runs_in_slices(places: Places, client: Channel) -> None:
    node = NodeSide(places)
    keys = [b"%05d" % i for i in range(SLICE_ROWS + 100)]
    node.publish(Event(b"other"), *(Event(key) for key in keys))
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask, client, RemoveMatching("ns", 0, "0*"), Count)
        asked: list[bytes] = []
        while len(asked) < len(keys):
            header, body = node.read()
            drop = DeleteBlocks.unpack(body)
            assert len(drop.keys) <= SLICE_ROWS
            asked += drop.keys
            node.answer(header, Flags(bytes(key != keys[-1] for key in drop.keys)))
        assert asking.result().value == len(keys) - 1
    assert sorted(asked) == keys
    assert ask(client, Exists([b"other", keys[0], keys[-1]]), Flags).flags == b"\1\0\1"
    assert ask(client, RemoveMatching("elsewhere", 0, "*"), Count).value == 0
    with pytest.raises(InvalidArgument, match="1024 bytes"):
        ask(client, RemoveMatching("", 1, "x" * 1025), Count)
    node.close()


def test_long_remove_runs_in_independent_slices(places: Places, client: Channel) -> None:
    node = NodeSide(places)
    keys = [b"%05d" % i for i in range(SLICE_ROWS + 100)]
    node.publish(*map(Event, keys))
    asking = Asking(client, Remove([keys[-1], *keys, b"none", keys[0]]))
    headers, drops = zip(*((header, DeleteBlocks.unpack(body)) for header, body in (node.read(), node.read())), strict=True)
    assert [len(drop.keys) for drop in drops] == [SLICE_ROWS, 100]
    for header, drop in zip(headers, drops, strict=True):
        node.answer(header, Flags(bytes(key != keys[0] for key in drop.keys)))
    assert asking.result() == b"\1\0" + b"\1" * (len(keys) - 1) + b"\0\0"
    assert ask(client, Remove([]), Flags).flags == b""
    node.close()


def test_a_long_list_is_replicated_a_slice_at_a_time(places: Places, client: Channel, node: NodeSide) -> None:
    other, keys = NodeSide(places, "two"), [b"%05d" % i for i in range(SLICE_ROWS + 100)]
    other.sync()
    node.sync(*map(Event, keys))
    for _ in range(2):
        flags = ask(client, Replicate([*keys, b"none"], 2), Flags).flags
        assert flags == bytes([REPLICAS_PENDING] * len(keys) + [REPLICAS_NO_BLOCK])
    with pytest.raises(InvalidArgument):
        ask(client, Replicate(keys, 0), Flags)
    other.close()


def test_nothing_more_is_removed_once_the_asker_has_hung_up(places: Places) -> None:
    node = NodeSide(places)
    node.publish(*(Event(b"%05d" % i) for i in range(2 * SLICE_ROWS)))
    asker = places.client().detach()
    asker.sendall(frame(RemoveMatching("", 1, "*", force=1)))
    header, body = node.read()
    assert DeleteBlocks.unpack(body).force == 1
    asker.close()
    master = places.master
    assert master is not None
    eventually(
        lambda: master.reactor.call(lambda: len(master._server.sessions) == 1, deadline_s=TIMEOUT_S), "the node's session to be left"
    )
    node.answer(header, Flags(bytes(len(DeleteBlocks.unpack(body).keys))))
    client = places.client()
    asking = Asking(client, Remove([b"00000"]))
    header, body = node.read()
    assert DeleteBlocks.unpack(body).keys == [b"00000"], "nothing came between"
    node.answer(header, Flags(b"\1"))
    assert asking.result() == b"\1"
    client.close()
    node.close()


def test_a_pin_with_a_time_is_told_to_the_node_and_its_end_too(client: Channel, node: NodeSide) -> None:
    node.publish(Event(b"a"))
    asking = Asking(client, PinFor([b"a", b"none"], 1))
    for pinned in (1, 0):
        header, body = node.read()
        assert (SetPinned.unpack(body).keys, SetPinned.unpack(body).pinned) == ([b"a"], pinned)
        node.answer(header, Flags(b"\1"))
    assert asking.result() == b"\1\0"


def test_a_registered_node_without_a_connection_keeps_its_blocks(places: Places, client: Channel, node: NodeSide) -> None:
    node.publish(Event(b"a"))
    with places.stub() as stub:
        stub.Register(pb.RegisterRequest(name="one", instance=1), timeout=TIMEOUT_S)
    node.close()
    assert ask(client, Remove([b"a"]), Flags).flags == b"\0"
    assert ask(client, Exists([b"a"]), Flags).flags == b"\1"


def test_a_node_that_has_not_registered_learns_only_where_to(places: Places) -> None:
    channel = Channel.open(parse_address(places.listen), Hello(ROLE_NODE, name="new"), Deadline(TIMEOUT_S))
    assert (channel.welcome.node_id, channel.welcome.control) == (0, places.control)
    with pytest.raises(Unauthorized, match="registered node"):
        ask(channel, publish(0, []), Ok)
    channel.close()


def claim(node: NodeSide, *keys: bytes, size: int = 100, checksum: int = 7, held: int = 0) -> ReserveReply:
    count = len(keys)
    message = CommitBlocks(
        node.registration.registration_epoch, TENANT, "ns", list(keys), [size] * count, [checksum] * count, [b""] * count, held
    )
    header, body = node.ask(message)
    if header.type == Failure.TYPE:
        failure = Failure.unpack(body)
        raise from_code(failure.code, failure.text)
    return ReserveReply.unpack(body)


def test_claim_with_a_failed_response_is_entered(places: Places, client: Channel, node: NodeSide, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the key would be blocked until its reservation expires, and the node would wait for a response."""
    with monkeypatch.context() as patch:
        patch.setattr(Session, "reply", lambda session, request_id, message: 1 // 0)
        message = CommitBlocks(node.registration.registration_epoch, TENANT, "ns", [b"a"], [100], [7], [b""])
        node.sock.sendall(frame(message, 1))
        assert node.sock.recv(1) == b""
    retry = NodeSide(places)
    retry.publish(phase=PHASE_SYNC_BEGIN)
    retry.publish(phase=PHASE_SYNC_END)
    assert ask(client, Reserve([b"a"], [100]), ReserveReply).statuses == bytes([GRANTED]), "the node has named no such block"
    retry.close()


def test_claim_for_a_full_node_is_busy(places: Places, client: Channel, node: NodeSide) -> None:
    """The claiming node says it has a value that its DRAM could never hold; the master does not believe it."""
    with pytest.raises(InvalidArgument):
        claim(node, b"huge", size=(1 << 30) + 1)
    small = NodeSide(places, "small", instance=2, dram_bytes=10)
    assert list(claim(small, b"large").statuses) == [BUSY]
    assert ask(client, Exists([b"large"]), Flags).flags == b"\0"
    small.close()


def test_only_a_node_of_the_newest_registration_may_claim(client: Channel, node: NodeSide) -> None:
    node.registration.registration_epoch -= 1
    with pytest.raises(StaleEpoch):
        claim(node, b"a")
    with pytest.raises(Unauthorized):
        ask(client, CommitBlocks(1, TENANT, "", [b"a"], [1], [1], [b""]), ReserveReply)


@pytest.mark.promise("partitions-hidden")
def test_pins_of_a_namespace_beyond_the_quota_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator gets the error of a later slice, too; slices before it stay pinned."""
    monkeypatch.setattr(clients, "SLICE_ROWS", 3)
    quotas = tmp_path / "quotas.toml"
    quotas.write_text("[tenants.red]\npins = 4\n")
    with master_in_thread(tmp_path, quotas=str(quotas), command_timeout_s=0.1) as places:
        node, master = NodeSide(places), places.master
        assert master is not None
        node.sync(*(Event(bytes((key,))) for key in b"abcdefg"))
        leader = master.partitions[0].role_manager.leader()

        def pin_all(*, pinned: bool) -> "Future[int]":
            return master.reactor.call(lambda: leader.pin_all("red", "ns", THIS_MASTER, pinned=pinned), deadline_s=TIMEOUT_S)

        with pytest.raises(QuotaExceeded, match=r"exceed its quota of 4 \(pins\)"):
            pin_all(pinned=True).result(TIMEOUT_S)
        assert pin_all(pinned=False).result(TIMEOUT_S) == 2, "rows 0 to 2 were pinned, and row 0 is none"
        node.close()
