"""Questions to the master, routes and slabs of the core, against a scripted cluster."""

from collections.abc import Iterator

import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.core import Core, maps_memory
from kvstore.client.locations import Location
from kvstore.protocol.errors import Broken, InvalidArgument, StaleHandle, Unauthorized, Unavailable, Unreachable
from kvstore.protocol.frames import MAX_BATCH
from kvstore.protocol.master_messages import Exists, Lookup, MatchPrefix, Nodes
from kvstore.protocol.session_messages import Count, Flags
from kvstore.transfer.config import TransferSettings
from tests.client.oracle import MASTER, Oracle, OracleChannel, OracleNode, is_here


@pytest.fixture
def node() -> Iterator[OracleNode]:
    node = OracleNode(1, local=True)
    yield node
    node.close()


@pytest.fixture
def oracle(node: OracleNode) -> Oracle:
    return Oracle(node)


def test_exists_tells_each_key(oracle: Oracle) -> None:
    oracle.store(b"a", b"1", 1)
    assert oracle.run(oracle.core.exists([b"a", b"b"], oracle.deadline())) == [True, False]


def test_match_prefix_counts_up_to_the_first_gap(oracle: Oracle) -> None:
    for key in (b"a", b"b", b"d"):
        oracle.store(key, b"1", 1)
    assert oracle.run(oracle.core.match_prefix([b"a", b"b", b"c", b"d"], oracle.deadline())) == 2
    assert oracle.run(oracle.core.match_prefix([], oracle.deadline())) == 0


def test_a_prefix_longer_than_a_message_is_matched_in_parts(oracle: Oracle) -> None:
    oracle.script[MatchPrefix].extend([Count(MAX_BATCH), Count(3)])
    keys = [b"%d" % i for i in range(MAX_BATCH + 10)]
    assert oracle.run(oracle.core.match_prefix(keys, oracle.deadline())) == MAX_BATCH + 3
    oracle.script[MatchPrefix].append(Count(5))
    assert oracle.run(oracle.core.match_prefix(keys, oracle.deadline())) == 5


def test_a_batch_longer_than_a_message_is_asked_in_parts(oracle: Oracle) -> None:
    keys = [b"%d" % i for i in range(MAX_BATCH + 1)]
    assert oracle.run(oracle.core.exists(keys, oracle.deadline())) == [False] * (MAX_BATCH + 1)
    assert [len(message.keys) for message in oracle.sent(Exists)] == [MAX_BATCH, 1]


def test_locate_names_the_nodes_and_tiers(oracle: Oracle) -> None:
    oracle.store(b"a", b"value", 1)
    [[location], none] = oracle.run(oracle.core.locate([b"a", b"b"], oracle.deadline()))
    assert none == []
    assert (location.node, location.node_id, location.tiers, location.size_bytes, location.generation) == ("n1", 1, ("dram",), 5, 1)
    assert isinstance(location, Location)
    asked = len(oracle.sent(Nodes))
    oracle.run(oracle.core.locate([b"a"], oracle.deadline()))
    assert len(oracle.sent(Nodes)) == asked


def test_locate_leaves_the_name_of_a_node_nobody_knows_empty(oracle: Oracle) -> None:
    oracle.store(b"a", b"value", 1)
    oracle.replicas[b"a"] = [77]
    [[location]] = oracle.run(oracle.core.locate([b"a"], oracle.deadline()))
    assert (location.node, location.node_id) == ("", 77)


def test_remove_counts_what_is_gone_and_forgets_it(oracle: Oracle) -> None:
    oracle.store(b"a", b"value", 1)
    assert oracle.run(oracle.core.remove([b"a", b"b"], oracle.deadline(), force=True)) == 1


def test_pin_tells_which_blocks_are_there(oracle: Oracle) -> None:
    oracle.store(b"a", b"value", 1)
    assert oracle.run(oracle.core.pin([b"a", b"b"], oracle.deadline(), pinned=True)) == [True, False]


def test_one_key_is_not_a_batch(oracle: Oracle) -> None:
    with pytest.raises(InvalidArgument, match="not one key"):
        oracle.run(oracle.core.exists(b"key", oracle.deadline()))  # type: ignore[arg-type]


def test_the_next_master_is_asked_when_one_does_not_answer_and_kept(oracle: Oracle, node: OracleNode) -> None:
    oracle.core = Core("a:1, b:1,c:1", ClientSettings(), TransferSettings(), is_here=is_here, spread=0)
    oracle.unreachable |= {"a:1", "b:1"}
    for _ in range(2):
        oracle.run(oracle.core.exists([b"k"], oracle.deadline()))
    assert [str(loan.channel.address) for loan in oracle.loans] == ["c:1", "c:1"]
    oracle.unreachable = {"c:1"}
    oracle.run(oracle.core.exists([b"k"], oracle.deadline()))
    assert str(oracle.loans[-1].channel.address) == "a:1"


def test_masters_of_which_none_answers_are_unavailable_with_the_first_reason(oracle: Oracle) -> None:
    oracle.core = Core(["a:1", "b:1"], ClientSettings(), TransferSettings(), is_here=is_here, spread=0)
    oracle.unreachable |= {"a:1", "b:1"}
    with pytest.raises(Unavailable, match="no master can be reached: cannot connect to a:1"):
        oracle.run(oracle.core.exists([b"k"], oracle.deadline()))


def test_a_typed_answer_of_the_master_is_passed_on_and_the_channel_kept(oracle: Oracle) -> None:
    oracle.script[Exists].append(Unauthorized("no"))
    with pytest.raises(Unauthorized):
        oracle.run(oracle.core.exists([b"k"], oracle.deadline()))
    assert oracle.all_given_back()
    assert oracle.loans[-1].channel.is_open


def test_a_master_that_answers_unavailable_is_not_passed_over(oracle: Oracle) -> None:
    oracle.core = Core("a:1,b:1", ClientSettings(), TransferSettings(), is_here=is_here, spread=0)

    def no_nodes(channel: OracleChannel, message: Exists) -> Flags:
        raise Unavailable("no node is registered")

    oracle.script[Exists].append(no_nodes)
    with pytest.raises(Unavailable, match=r"^no node is registered"):
        oracle.run(oracle.core.exists([b"k"], oracle.deadline()))
    assert len(oracle.loans) == 1


def test_a_master_that_breaks_a_fresh_channel_is_unavailable(oracle: Oracle) -> None:
    oracle.script[Exists].append(Unavailable("gone"))
    with pytest.raises(Unavailable):
        oracle.run(oracle.core.exists([b"k"], oracle.deadline()))


def channel_to(oracle: Oracle, node: OracleNode) -> OracleChannel:
    from kvstore.rpc.address import Address

    return OracleChannel(Address(unix=node.unix), oracle._welcome(Address(unix=node.unix)))


def test_slabs_are_mapped_once_for_reading_and_once_for_writing(oracle: Oracle, node: OracleNode) -> None:
    channel = channel_to(oracle, node)
    for writable in (False, True, True):
        [one, two, again] = oracle.run(oracle.core.map_slabs(channel, 1, [1, 2, 1], oracle.deadline(), writable=writable))
        assert one is again
        assert one is not two
        assert one.memory.readonly is not writable
    assert len(oracle.log) == 2


def test_a_slab_that_is_gone_is_a_stale_handle_and_the_others_stay_mapped(oracle: Oracle, node: OracleNode) -> None:
    with pytest.raises(StaleHandle):
        oracle.run(oracle.core.map_slabs(channel_to(oracle, node), 1, [9, 1], oracle.deadline(), writable=False))
    assert len(oracle.core.slabs) == 1


def test_a_slab_on_its_way_is_waited_for_and_not_asked_for_again(oracle: Oracle, node: OracleNode) -> None:
    channel = channel_to(oracle, node)
    oracle.run(oracle.core.map_ahead(channel, 1, [1], oracle.deadline()))
    [map_announced] = oracle.later
    mapping = oracle.core.map_slabs(channel, 1, [1], oracle.deadline(), writable=True)
    next(mapping)  # the wait
    map_announced()
    with pytest.raises(StopIteration) as end:
        mapping.send(None)
    assert len(end.value.value) == 1
    assert len(oracle.log) == 1


def test_places_outside_of_a_slab_are_refused(oracle: Oracle, node: OracleNode) -> None:
    [slab] = oracle.run(oracle.core.map_slabs(channel_to(oracle, node), 1, [1], oracle.deadline(), writable=False))
    with pytest.raises(Broken):
        slab.part((1 << 20) - 1, 2)


def test_flags_come_as_bools(oracle: Oracle) -> None:
    oracle.script[Exists].append(Flags(b"\1\0"))
    assert oracle.run(oracle.core.exists([b"a", b"b"], oracle.deadline())) == [True, False]
    assert oracle.sent(Lookup) == []


@pytest.mark.parametrize(
    ("transports", "maps"), [("auto", True), ("tcp, shm", True), ("shm", True), ("tcp", False), ("ucx,nixl", False), ("my:shm", False)]
)
def test_a_client_maps_memory_unless_its_transports_leave_it_out(node: OracleNode, transports: str, maps: bool) -> None:
    transfer = TransferSettings(transports=transports)
    assert maps_memory(transfer) is maps
    oracle = Oracle(node)
    oracle.core = Core(MASTER, ClientSettings(), transfer, is_here=is_here, spread=0)
    oracle.run(oracle.core.refresh_nodes(oracle.deadline()))
    assert oracle.core.nodes.is_local(1) is maps


def test_a_node_is_not_asked_at_an_address_where_another_answers(oracle: Oracle, node: OracleNode) -> None:
    oracle.store(b"a", b"value", 1)
    oracle.run(oracle.core.refresh_nodes(oracle.deadline()))
    oracle.strangers[node.unix] = "next door"
    known = oracle.core.nodes.get(1)
    assert known is not None
    for _ in range(2):  # it names its socket file itself, and gets one more chance there
        loan, _ = oracle.run(oracle.core.begin(known.route, Exists([b"a"]), Flags, oracle.deadline()))
        assert [str(other.channel.address) for other in oracle.loans[-2:]] == [f"unix:{node.unix}", node.tcp]
        assert not oracle.loans[-2].channel.is_open
        assert loan.channel.is_open
    assert not known.route.is_local


def test_a_node_with_another_at_each_of_its_addresses_is_unreachable(oracle: Oracle, node: OracleNode) -> None:
    oracle.run(oracle.core.refresh_nodes(oracle.deadline()))
    oracle.strangers |= {node.unix: "next door", node.tcp: "next door"}
    known = oracle.core.nodes.get(1)
    assert known is not None
    with pytest.raises(Unreachable, match=r"at node1:1 there is another daemon by now, 'next door'"):
        oracle.run(oracle.core.begin(known.route, Exists([b"a"]), Flags, oracle.deadline()))
    assert not any(loan.channel.is_open for loan in oracle.loans[-2:])
