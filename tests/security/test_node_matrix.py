"""Every frame of a node by every kind of ticket, over real sockets: permitted or denied.

The table of permissions is written here a second time, independently: a changed rule or a new frame fails here first.
"""

from collections.abc import Iterator
from contextlib import closing
from typing import Final

import pytest

from kvstore.protocol.catalog_messages import (
    DRAIN_CLOSED,
    CopyBlocks,
    DeleteBlocks,
    MarkSecondary,
    PrefetchBlocks,
    RevokeCredentials,
    SetDraining,
    SetPinned,
    TicketKey,
)
from kvstore.protocol.errors import Denied, KVStoreError, Unauthorized, from_code
from kvstore.protocol.event_messages import FetchEvents
from kvstore.protocol.master_messages import Lookup
from kvstore.protocol.message import Message
from kvstore.protocol.messages import MESSAGES
from kvstore.protocol.node_messages import (
    RETAIN_READ,
    AbortPuts,
    CommitPuts,
    ExportSlabs,
    HoldBlocks,
    MapSlabs,
    OpenIndex,
    OpenSlotAhead,
    OpenSlots,
    Prefetch,
    Put,
    PutFromSlot,
    ReadBlocks,
    ReleaseHolds,
    ReleaseLeases,
    ReleaseSession,
    Retain,
    WaitCommitted,
)
from kvstore.protocol.session_messages import ROLE_CLIENT, ROLE_NODE, Failure, Hello
from kvstore.rpc.address import connect, parse_address
from kvstore.security.identity import Role
from kvstore.security.permissions import NODE_FRAMES
from kvstore.security.tickets.ticket import Ticket, key_id_of, seal
from tests.rpc.wires import frame, read_frame
from tests.store.served import TIMEOUT_S, Served, served

BLOCK: Final = b"block"
FRAMES: Final[dict[type[Message], Message]] = {
    kind: message
    for message in (
        ReadBlocks([BLOCK], [4], 100, 0),
        ReleaseLeases([1]),
        ExportSlabs([]),
        MapSlabs([]),
        OpenIndex(),
        FetchEvents(0),
        Put("", [b"new"], [1], [1], [0], [b""]),
        OpenSlots("", [b"new"], [1], [1], [b""]),
        CommitPuts([], []),
        OpenSlotAhead(1),
        PutFromSlot(1, 0, "", [b"new"], [1], [0], [1], [b""]),
        AbortPuts([]),
        WaitCommitted(),
        HoldBlocks(1, 100, [BLOCK], [4]),
        ReleaseHolds([1]),
        Prefetch([b"absent"]),
        Retain([BLOCK], 90, cause=RETAIN_READ),
        ReleaseSession(1),
        DeleteBlocks(1, "red", [BLOCK], [4]),
        SetPinned(1, "red", [BLOCK]),
        CopyBlocks(1, "red", "", 6, "", "", "127.0.0.1:1", [b"new"], [1], [1], [1], [b""], []),
        SetDraining(1, DRAIN_CLOSED),
        TicketKey(1, 1, 0, bytes(32)),
        RevokeCredentials(1, "red", [1]),
        PrefetchBlocks(1, "red", 1, [b"k"]),
        MarkSecondary(1, "red", [b"k"]),
    )
    if (kind := type(message))
}
READS: Final = {"red reads", "red writes", "red rules", "blue reads"}
WRITES: Final = {"red writes", "red rules"}
ALLOWED: Final[dict[type[Message], set[str]]] = {
    **dict.fromkeys((ReadBlocks, ReleaseLeases, ExportSlabs), READS | {"a pass"}),
    **dict.fromkeys((MapSlabs, OpenIndex, FetchEvents, HoldBlocks, ReleaseHolds, Prefetch, Retain), READS),
    **dict.fromkeys((Put, OpenSlots, CommitPuts, AbortPuts, OpenSlotAhead, PutFromSlot, WaitCommitted, ReleaseSession), WRITES),
    **{
        kind: set()
        for kind in (DeleteBlocks, SetPinned, CopyBlocks, SetDraining, TicketKey, RevokeCredentials, PrefetchBlocks, MarkSecondary)
    },
}
KNOWN: Final = READS | {"a pass"}
"""Whose Hello is answered with Welcome."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("node"), dram_bytes=1 << 16, needs_tickets=True) as made:
        with closing(made.connect(ticket=made.ticket())) as client:
            client.put({BLOCK.decode(): b"value"}, generation=4)
        yield made


def hellos(node: Served) -> dict[str, Hello | None]:
    """Return the Hello of each kind of caller."""

    def client(tenant: str, ticket: bytes) -> Hello:
        return Hello(ROLE_CLIENT, tenant, ticket=ticket)

    def sealed(*, node_id: int = 5, ends_ms: int = 10**9, secret: bytes | None = None) -> bytes:
        key = node.call(lambda: node.issuer._nodes[5].current)
        return seal(Ticket(key.key_id, node_id, ends_ms, Role.ADMIN, 1, bytes(16), "red"), secret or key.secret)

    node_pass = node.call(lambda: node.issuer.issue_pass(5, "red", [BLOCK], [4], node.reactor.now_ns()))
    good = node.ticket()
    assert key_id_of(good) == key_id_of(sealed())
    return {
        "nobody": None,
        "red without a ticket": client("red", b""),
        "red with his token": Hello(ROLE_CLIENT, "red", "red's token"),
        "red with a changed ticket": client("red", good[:-1] + bytes([good[-1] ^ 1])),
        "red with an expired ticket": client("red", sealed(ends_ms=0)),
        "red with a ticket of another key": client("red", sealed(secret=bytes(32))),
        "red with another node's ticket": client("red", sealed(node_id=6)),
        "red with blue's ticket": client("red", node.ticket("blue")),
        "a client with a pass": client("red", node_pass),
        "a node with red's ticket": Hello(ROLE_NODE, "red", ticket=good),
        "a node without a pass": Hello(ROLE_NODE, "red"),
        "blue with the pass": Hello(ROLE_NODE, "blue", ticket=node_pass),
        "red reads": client("red", node.ticket(role=Role.READ)),
        "red writes": client("red", good),
        "red rules": client("red", node.ticket(role=Role.ADMIN)),
        "blue reads": client("blue", node.ticket("blue", Role.READ)),
        "a pass": Hello(ROLE_NODE, "red", ticket=node_pass),
    }


@pytest.mark.promise("authentication")
def test_there_is_a_row_for_every_frame() -> None:
    assert {MESSAGES[number] for number in NODE_FRAMES} == {*FRAMES, Hello}
    assert set(ALLOWED) == set(FRAMES)


def refusal(node: Served, hello: Hello | None, message: Message | None) -> KVStoreError | None:
    """The error with which the last message is refused; None if it is permitted, even if it fails later."""
    with connect(parse_address(f"unix:{node.unix}"), timeout_s=TIMEOUT_S) as sock:
        answer: object = None
        if hello is not None:
            sock.sendall(frame(hello))
            answer = read_frame(sock)[1]
        if message is not None:
            sock.sendall(frame(message, payload=b"x" if isinstance(message, Put) else b""))
            if isinstance(
                message, ReleaseLeases | ReleaseHolds
            ):  # it has no answer where it is taken: then that to what no node takes is the first
                sock.sendall(frame(Lookup([BLOCK]), request_id=2))
            header, answer, _values = read_frame(sock)
            answer = answer if header.request_id == 1 else None
    if not isinstance(answer, Failure):
        return None
    error = from_code(answer.code, answer.text)
    return error if isinstance(error, Denied) else None


@pytest.mark.promise("authentication")
@pytest.mark.parametrize("kind", FRAMES, ids=lambda kind: kind.__name__)
def test_frame_reaches_node_service_only_with_permission(node: Served, kind: type[Message]) -> None:
    taken = set()
    for name, hello in hellos(node).items():
        error = refusal(node, hello, FRAMES[kind])
        if error is None:
            taken.add(name)
        else:
            assert isinstance(error, Unauthorized) is (name not in KNOWN), f"{name}: {error}"
    assert taken == ALLOWED[kind]


@pytest.mark.promise("authentication")
def test_hello_needs_the_senders_own_ticket_for_this_node(node: Served) -> None:
    assert {name for name, hello in hellos(node).items() if hello is not None and refusal(node, hello, None) is None} == KNOWN


@pytest.mark.promise("authentication")
def test_pass_reads_only_its_blocks_read_ticket_maps_read_only(node: Served) -> None:
    told = hellos(node)
    assert isinstance(refusal(node, told["a pass"], ReadBlocks([b"other"], [4], 100, 0)), Denied)
    assert isinstance(refusal(node, told["a pass"], ExportSlabs([0])), Denied)
    assert isinstance(refusal(node, told["red reads"], MapSlabs([], 1)), Denied)
    assert refusal(node, told["red writes"], MapSlabs([], 1)) is None
