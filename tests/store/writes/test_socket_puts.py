"""Promises of socket_puts.py for one small value that comes along with its message and is kept at once, on real sockets. Of those for
which the master is asked: test_claims.py."""

import pytest

from kvstore.protocol.errors import ChecksumMismatch, InvalidArgument, KVStoreError, ProtocolError
from kvstore.protocol.node_messages import ACK_CLUSTER, ACK_NODE, ALREADY_THERE, STORED, Put
from kvstore.protocol.session_messages import Flags
from tests.rpc.wires import frame, read_frame
from tests.store.integrity import check
from tests.store.served import TIMEOUT_S, Client, Served, digest, until

KIB = 1024


def message(
    name: str, value: bytes, *, size: int | None = None, checksum: int | None = None, namespace: str = "ns", ack: int = ACK_NODE
) -> Put:
    told = digest(value) if checksum is None else checksum
    return Put(namespace, [name.encode()], [len(value) if size is None else size], [0], [told], [b"above"], ack)


def put(client: Client, name: str, value: bytes) -> int:
    return client.ask(message(name, value), Flags, payload=[value]).flags[0]


def is_empty(node: Served) -> bool:
    node.call(lambda: check(node.store.table))
    return node.call(lambda: (node.store.dram.used_bytes, node.store.table.open_puts, len(list(node.store.table.blocks())))) == (0, 0, 0)


@pytest.mark.parametrize("is_whole", [False, True])
def test_it_is_the_same_put_however_it_arrives(node: Served, is_whole: bool) -> None:
    sock = node.connect().channel.detach()
    sock.settimeout(TIMEOUT_S)
    sent = frame(message("a", b"value"), payload=b"value")
    sock.sendall(sent[: None if is_whole else -2])
    if not is_whole:
        until(node, lambda: node.store.table.open_puts == 1)
        sock.sendall(sent[-2:])
    assert read_frame(sock)[1] == Flags(bytes([STORED]))
    assert node.call(lambda: node.sent.in_bytes) == 5
    sock.close()


def test_several_behind_one_another_in_one_segment_are_all_answered(node: Served) -> None:
    sock = node.connect().channel.detach()
    sock.settimeout(TIMEOUT_S)
    sock.sendall(b"".join(frame(message(name, b"value"), number, b"value") for number, name in enumerate("abca", 1)))
    answers = [read_frame(sock) for _ in range(4)]
    assert [header.request_id for header, _, _ in answers] == [1, 2, 3, 4]
    assert [answer for _, answer, _ in answers] == [Flags(bytes([flag])) for flag in (STORED, STORED, STORED, ALREADY_THERE)]
    sock.close()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (message("a", b"value", checksum=7), ChecksumMismatch),
        (message("a", b"value", size=6), ProtocolError),
        (message("a", b"value", namespace="n" * 256), InvalidArgument),
        (message("a", b"value", size=17 * KIB), KVStoreError),
        (message("a", b"value", checksum=7, ack=ACK_CLUSTER), ChecksumMismatch),
        (message("a", b"value", size=6, ack=ACK_CLUSTER), ProtocolError),
    ],
)
def test_what_is_wrong_is_refused_and_leaves_nothing(node: Served, client: Client, wrong: Put, error: type[Exception]) -> None:
    with pytest.raises(error):
        client.ask(wrong, Flags, payload=[b"value"])
    assert is_empty(node)
    assert put(client, "a", b"value") == STORED, "the connection lives on"
