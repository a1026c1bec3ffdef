"""Routes to masters and nodes of a scripted cluster."""

import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.resources import ClientResources
from kvstore.protocol.errors import Unauthorized, Unavailable, Unreachable
from kvstore.protocol.master_messages import Exists
from kvstore.protocol.session_messages import Flags
from kvstore.transfer.config import TransferSettings
from tests.client.oracle import HERE, Oracle, OracleChannel, OracleNode, is_here


def ask(oracle: Oracle) -> None:
    oracle.run(oracle.resources.daemons.ask_master(Exists([b"k"]), Flags, oracle.deadline()))


def test_the_next_master_is_asked_when_one_does_not_answer_and_kept(oracle: Oracle, node: OracleNode) -> None:
    oracle.resources = ClientResources("a:1, b:1,c:1", ClientSettings(), TransferSettings(), is_here=is_here, spread=0)
    oracle.unreachable |= {"a:1", "b:1"}
    for _ in range(2):
        ask(oracle)
    assert [str(loan.channel.address) for loan in oracle.loans] == ["c:1", "c:1"]
    oracle.unreachable = {"c:1"}
    ask(oracle)
    assert str(oracle.loans[-1].channel.address) == "a:1"


def test_masters_of_which_none_answers_are_unavailable_with_the_first_reason(oracle: Oracle) -> None:
    oracle.resources = ClientResources(["a:1", "b:1"], ClientSettings(), TransferSettings(), is_here=is_here, spread=0)
    oracle.unreachable |= {"a:1", "b:1"}
    with pytest.raises(Unavailable, match="no master can be reached: cannot connect to a:1"):
        ask(oracle)


def test_a_typed_answer_of_the_master_is_passed_on_and_the_channel_kept(oracle: Oracle) -> None:
    oracle.script[Exists].append(Unauthorized("no"))
    with pytest.raises(Unauthorized):
        ask(oracle)
    assert oracle.all_given_back()
    assert oracle.loans[-1].channel.is_open


def test_a_master_that_answers_unavailable_is_not_passed_over(oracle: Oracle) -> None:
    oracle.resources = ClientResources("a:1,b:1", ClientSettings(), TransferSettings(), is_here=is_here, spread=0)

    def no_nodes(channel: OracleChannel, message: Exists) -> Flags:
        raise Unavailable("no node is registered")

    oracle.script[Exists].append(no_nodes)
    with pytest.raises(Unavailable, match=r"^no node is registered"):
        ask(oracle)
    assert len(oracle.loans) == 1


def test_a_master_that_breaks_a_fresh_channel_is_unavailable(oracle: Oracle) -> None:
    oracle.script[Exists].append(Unavailable("gone"))
    with pytest.raises(Unavailable):
        ask(oracle)


def test_a_node_is_not_asked_at_an_address_where_another_answers(oracle: Oracle, node: OracleNode) -> None:
    oracle.store(b"a", b"value", 1)
    oracle.run(oracle.resources.daemons.refresh_nodes(oracle.deadline()))
    oracle.strangers[node.unix] = "next door"
    known = oracle.resources.daemons.nodes.get(1)
    assert known is not None
    for _ in range(2):  # it names its socket file itself, and gets one more chance there
        loan, _ = oracle.run(oracle.resources.daemons.begin(known.route, Exists([b"a"]), Flags, oracle.deadline()))
        assert [str(other.channel.address) for other in oracle.loans[-2:]] == [f"unix:{node.unix}", node.tcp]
        assert not oracle.loans[-2].channel.is_open
        assert loan.channel.is_open
    assert not known.route.is_local


def test_a_node_that_answers_though_its_socket_did_not_is_told_of(
    oracle: Oracle, node: OracleNode, caplog: pytest.LogCaptureFixture
) -> None:
    oracle.run(oracle.resources.daemons.refresh_nodes(oracle.deadline()))
    known = oracle.resources.daemons.nodes.get(1)
    assert known is not None
    oracle.unreachable |= {f"unix:{node.unix}", node.tcp}
    with pytest.raises(Unreachable):
        oracle.run(oracle.resources.daemons.begin(known.route, Exists([b"a"]), Flags, oracle.deadline()))
    assert oracle.resources.daemons.unshared.reasons() == {}, "it does not answer at all"
    oracle.unreachable.remove(node.tcp)
    for _ in range(3):  # it names its socket file itself, and gets one more chance there
        oracle.run(oracle.resources.daemons.begin(known.route, Exists([b"a"]), Flags, oracle.deadline()))
    assert oracle.resources.daemons.unshared.reasons() == {"n1": f"cannot connect to unix:{node.unix}"}
    assert len(caplog.records) == 1
    assert f"node 'n1' of this host is not reached through shared memory: cannot connect to unix:{node.unix}" in caplog.text


def test_a_master_that_answers_though_its_socket_did_not_is_nothing_to_tell(oracle: Oracle) -> None:
    [route] = oracle.resources.daemons.masters.in_order()
    ask(oracle)
    route.offer("/run/master", HERE)
    oracle.unreachable.add("unix:/run/master")
    ask(oracle)
    assert (route.is_local, route.trouble) == (False, "cannot connect to unix:/run/master")
    assert oracle.resources.daemons.unshared.reasons() == {}


def test_a_node_with_another_at_each_of_its_addresses_is_unreachable(oracle: Oracle, node: OracleNode) -> None:
    oracle.run(oracle.resources.daemons.refresh_nodes(oracle.deadline()))
    oracle.strangers |= {node.unix: "next door", node.tcp: "next door"}
    known = oracle.resources.daemons.nodes.get(1)
    assert known is not None
    with pytest.raises(Unreachable, match=r"at node1:1 there is another daemon by now, 'next door'"):
        oracle.run(oracle.resources.daemons.begin(known.route, Exists([b"a"]), Flags, oracle.deadline()))
    assert not any(loan.channel.is_open for loan in oracle.loans[-2:])
