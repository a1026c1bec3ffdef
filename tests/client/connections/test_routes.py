"""Choice of addresses of masters and nodes."""

import pytest

from kvstore.client.connections.routes import DaemonId, DaemonRoute, KnownNodes, ShmDiagnostics
from kvstore.protocol.master_messages import NodeTable
from kvstore.protocol.session_messages import ROLE_CLIENT, SERVER_MASTER, SERVER_NODE, Hello, Welcome
from kvstore.rpc.address import NOT_LOCAL, Address, parse_address

TCP = parse_address("there:1")
UNIX = Address(unix="/run/x")
NODE = DaemonId(SERVER_NODE, "n", "here")


def is_here(unix: str, host_id: str) -> bool:
    return host_id == "here"


UNSHARED = ShmDiagnostics(lambda unix, host_id: NOT_LOCAL)
"""A client that has nothing to tell."""


def welcome(epoch: int, host: str = "here", unix: str = "/run/x", *, name: str = "n", server: int = SERVER_NODE) -> Welcome:
    return Welcome(server, name, 1, epoch, host, unix)


def table(*rows: tuple[int, str, str, str, str], revision: int = 0, transfer: bytes = b"") -> NodeTable:
    ids, names, hosts, unix, tcp = ([row[i] for row in rows] for i in range(5))
    return NodeTable(ids, names, hosts, unix, tcp, [revision] * len(rows), [transfer] * len(rows))  # type: ignore[arg-type]


def test_local_daemon_is_reached_by_unix_socket() -> None:
    route = DaemonRoute(TCP, is_here, NODE)
    assert (route.address(), route.is_local) == (TCP, False)
    route.welcomed(welcome(1))
    assert (route.address(), route.is_local) == (UNIX, True)


@pytest.mark.parametrize(("host", "unix"), [("elsewhere", "/run/x"), ("here", "")])
def test_a_socket_file_of_another_host_or_none_is_not_used(host: str, unix: str) -> None:
    route = DaemonRoute(TCP, is_here, NODE)
    route.welcomed(welcome(1, host, unix))
    assert route.address() == TCP


@pytest.mark.promise("right-daemon")
def test_is_meant_accepts_only_the_named_node() -> None:
    route = DaemonRoute(TCP, is_here, NODE)
    for address in (TCP, UNIX):
        assert route.is_meant(address, welcome(1))
        assert not route.is_meant(address, welcome(1, name="another"))
        assert not route.is_meant(address, welcome(1, host="next door"))
        assert not route.is_meant(address, welcome(1, server=SERVER_MASTER))


def test_master_route_requires_one_daemon_behind_both_addresses() -> None:
    route = DaemonRoute(TCP, is_here)
    assert not route.is_meant(TCP, welcome(1))
    for name in ("first", "its successor"):
        told = welcome(1, name=name, server=SERVER_MASTER)
        assert route.is_meant(TCP, told)
        route.welcomed(told)
        assert route.is_meant(UNIX, told)
        assert not route.is_meant(UNIX, welcome(1, name="another", server=SERVER_MASTER))


def test_a_node_that_has_not_moved_keeps_what_was_learned() -> None:
    nodes = KnownNodes(is_here, 0, UNSHARED)
    nodes.replace(table((1, "n1", "here", "/run/1", "a:1"), (2, "n2", "here", "/run/2", "a:2")))
    first = nodes.get(1)
    nodes.replace(table((1, "n1", "here", "/run/1", "a:1"), (2, "n2", "here", "/run/2", "a:9")))
    assert nodes.get(1) is first
    moved = nodes.get(2)
    assert moved is not None
    assert moved.route.primary.port == 9
    nodes.replace(table())
    assert (nodes.get(1), nodes.local_id) == (None, 0)


def test_restarted_node_is_another_node() -> None:
    nodes = KnownNodes(is_here, 0, UNSHARED)
    nodes.replace(table((1, "n1", "here", "/run/1", "a:1")))
    first = nodes.get(1)
    nodes.replace(table((1, "n1", "elsewhere", "/run/1", "a:1")))
    second = nodes.get(1)
    assert second is not None
    assert second is not first
    assert not second.route.is_local


def test_node_with_changed_links_keeps_its_route() -> None:
    nodes = KnownNodes(is_here, 0, UNSHARED)
    nodes.replace(table((1, "n1", "here", "/run/1", "a:1"), revision=3, transfer=b"two rails"))
    first = nodes.get(1)
    assert first is not None
    first.route.failed(Address(unix="/run/1"), "refused")
    nodes.replace(table((1, "n1", "here", "/run/1", "a:1"), revision=4, transfer=b"one rail"))
    second = nodes.get(1)
    assert second is not None
    assert (second.transfer, second.revision, second is first) == (b"one rail", 4, False)
    assert second.route is first.route
    assert not second.route.is_local


def test_hello_has_the_newest_ticket() -> None:
    nodes = KnownNodes(is_here, 0, UNSHARED, Hello(ROLE_CLIENT, "red", name="me"))
    first = table((1, "n", "there", "", "there:1"))
    first.tickets, first.ticket_ms = [b"one"], 1000
    nodes.replace(first)
    known = nodes.get(1)
    assert known is not None
    said = known.route.hello
    assert said == Hello(ROLE_CLIENT, "red", name="me", ticket=b"one")
    nodes.replace(first)
    assert known.route.hello is said, "nothing is made anew for a ticket that is the same"
    first.tickets = [b"two"]
    nodes.replace(first)
    assert nodes.get(1) is known
    assert known.route.hello == Hello(ROLE_CLIENT, "red", name="me", ticket=b"two")
    assert nodes.has_route(known.route)
    nodes.replace(table((1, "n", "there", "", "there:2")))
    assert not nodes.has_route(known.route)
