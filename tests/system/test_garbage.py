"""Garbage on every port of every daemon: it responds or closes the connection, survives, serves others, and leaks no descriptor."""

import random
import re
import socket
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from kvstore.client.sync import Client
from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.frames import HEADER, HEADER_BYTES, MAGIC, MAX_BODY_BYTES, MAX_PAYLOAD_BYTES, VERSION
from kvstore.protocol.master_messages import Exists
from kvstore.protocol.node_messages import Put, ReadBlocks
from kvstore.protocol.session_messages import ROLE_CLIENT, Failure, Hello
from kvstore.rpc.address import Address, connect, parse_address
from tests.rpc.wires import frame, read_frame
from tests.system.history import value_of
from tests.system.running import DEADLINE_S, System, descriptors, running_system, until

TIMEOUT_S = 60.0
PORTS = ["master frames", "master control", "master unix", "node frames", "node unix"]
FRAME_PORTS = [port for port in PORTS if port != "master control"]
HELLO = frame(Hello(ROLE_CLIENT))


def header(version: int = VERSION, kind: int = 1, body: int = 0, payload: int = 0) -> bytes:
    return HEADER.pack(MAGIC, version, kind, 1, 1000, body, payload)


GARBAGE = {
    "nothing": b"",
    "random bytes": random.Random(1).randbytes(5000),
    "zeros": bytes(HEADER_BYTES),
    "HTTP": b"GET / HTTP/1.1\r\nHost: kvstore\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + random.Random(2).randbytes(190),
    "a byte": b"k",
    "half a header": HELLO[: HEADER_BYTES - 1],
    "half a body": HELLO[:-1],
    "a body too large": header(body=MAX_BODY_BYTES + 1),
    "a payload too large": header(payload=MAX_PAYLOAD_BYTES + 1),
    "a large body that never comes": header(body=MAX_BODY_BYTES) + bytes(100),
    "a body that is no message": header(body=100) + random.Random(3).randbytes(100),
    "an unknown type": HELLO + header(kind=250),
    "an answer to nothing": HELLO + header(kind=4),
    "no Hello first": frame(Exists([b"k"])),
    "a Put without its values": HELLO + header(kind=Put.TYPE, body=len(Put("", [b"k"], [9], [0], [0], [b""]).pack()), payload=9),
    "a Read, and gone": HELLO + frame(ReadBlocks([b"kept"] * 1000, [0] * 1000, 0, 60_000)) * 5,
}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One for all of these tests: the garbage of each must do nothing to the next."""
    with running_system(tmp_path_factory.mktemp("garbage"), "--dram 16MiB") as started:
        with started.client() as client:
            client.put(b"kept", value_of(b"kept", 0, 100_000))
        yield started


def address(system: System, port: str) -> Address:
    daemon, place = port.split()
    facts = (
        system.masters[0].facts("ready", deadline_s=DEADLINE_S)
        if daemon == "master"
        else system.nodes["n0"].facts("serving", deadline_s=DEADLINE_S)
    )
    return Address(unix=facts["unix"]) if place == "unix" else parse_address(facts["control" if place == "control" else "listen"])


def pid(system: System, port: str) -> int:
    return system.masters[0].pid if port.startswith("master") else system.nodes["n0"].pid


def is_serving(client: Client) -> bool:
    return client.get(b"kept") == value_of(b"kept", 0, 100_000) and client.exists_batch([b"kept", b"other"]) == [True, False]


@pytest.mark.promise("no-leaks")
@pytest.mark.parametrize("port", PORTS)
def test_a_daemon_lives_serves_others_and_keeps_no_descriptor(system: System, port: str) -> None:
    with system.client() as client:
        assert is_serving(client)
        before = descriptors(pid(system, port))
        silent: list[socket.socket] = []
        for garbage in GARBAGE.values():
            for ending in ("silence", "half close", "reset"):
                sock = connect(address(system, port), timeout_s=TIMEOUT_S)
                with suppress(OSError):  # the daemon may close the connection before all is sent (ENOTCONN)
                    sock.sendall(garbage)
                    if ending == "half close":
                        sock.shutdown(socket.SHUT_WR)
                silent.append(sock) if ending == "silence" else sock.close()
        assert is_serving(client), "while many are silent in the middle of a frame"
        for sock in silent:
            sock.close()
        until(lambda: descriptors(pid(system, port)) <= before, f"the descriptors of {port} are closed")
        assert is_serving(client)
    with system.client() as newcomer:
        assert is_serving(newcomer)


@pytest.mark.promise("input-untrusted")
@pytest.mark.parametrize("port", FRAME_PORTS)
def test_another_protocol_version_is_answered_with_both_versions(system: System, port: str) -> None:
    with closing(connect(address(system, port), timeout_s=TIMEOUT_S)) as sock:
        sock.sendall(header(version=VERSION + 1))
        _, answer, _ = read_frame(sock)
        assert isinstance(answer, Failure)
        assert answer.code == ProtocolError.code
        assert re.search(rf"version {VERSION + 1}.*{VERSION}", answer.text)
        assert sock.recv(1) == b"", "it cannot be understood any further"


@pytest.mark.promise("no-leaks")
def test_a_storm_of_mutated_frames_brings_no_daemon_down(system: System) -> None:
    """Valid frames with a few bytes changed get further in than noise does."""
    choose = random.Random(4)
    frames = [frame(message) for message in (Hello(ROLE_CLIENT), Exists([b"kept"]), ReadBlocks([b"kept"], [0], 0, 100))]
    for port in FRAME_PORTS:
        for _ in range(100):
            data = bytearray(HELLO + b"".join(choose.choices(frames, k=3)))
            for _ in range(choose.randrange(1, 4)):
                data[choose.randrange(len(data))] = choose.randrange(256)
            with closing(connect(address(system, port), timeout_s=TIMEOUT_S)) as sock, suppress(ConnectionError):
                sock.sendall(data)
    with system.client() as client:
        assert is_serving(client)
    until(lambda: system.node_status().counters["leases"] == 0, "no leases are left")
