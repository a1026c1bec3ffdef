"""Wrong arguments and unusable servers: each raises a typed error, before anything is sent where the client can detect it."""

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from kvstore.client.sync import Client
from kvstore.protocol.errors import DeadlineExceeded, InvalidArgument, ProtocolError, Unavailable
from kvstore.protocol.frames import HEADER, MAGIC, MAX_KEY_BYTES, MAX_VALUE_BYTES, VERSION
from kvstore.testing.transfer.awaited import within
from tests.ports import free_ports
from tests.system.running import DEADLINE_S, descriptors, running_system


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with running_system(tmp_path_factory.mktemp("bad"), "--dram 8MiB") as system:
        with system.client() as made:
            yield made
            assert made.put(b"k" * MAX_KEY_BYTES, b"v"), "it all left the system as it was"
            assert made.get(b"k" * MAX_KEY_BYTES) == b"v"


@pytest.mark.promise("failures-typed")
def test_a_key_that_is_none_is_refused(client: Client) -> None:
    """Of other types: test_wrong_types.py."""
    for key in (b"", b"k" * (MAX_KEY_BYTES + 1)):
        for method in ("get", "exists", "put", "get_batch", "match_prefix", "locate", "prefetch", "remove", "pin"):
            arguments: list[object] = [key] if method in ("get", "exists") else [key, b"v"] if method == "put" else [[b"good", key]]
            with pytest.raises(InvalidArgument, match="key"):
                getattr(client, method)(*arguments)


def test_value_empty_or_too_large_is_refused(client: Client) -> None:
    for size in (0, 9 << 20):
        with pytest.raises(InvalidArgument):
            client.put(b"k", bytes(size))


@pytest.mark.promise("failures-typed")
def test_a_value_of_more_than_a_gibibyte_is_refused(client: Client) -> None:
    with (
        mmap.mmap(-1, MAX_VALUE_BYTES + 1) as value,
        pytest.raises(InvalidArgument, match="1 byte to 1 GiB long"),
    ):  # no page of it is touched
        client.put(b"k", value)


@pytest.mark.promise("failures-typed")
def test_a_value_that_is_not_contiguous_is_refused(client: Client) -> None:
    for value in (np.zeros((8, 8))[:, ::2], torch.zeros(8, 8).t()[:, :3], memoryview(bytes(64))[::2]):
        with pytest.raises(InvalidArgument, match="contiguous"):
            client.put(b"k", value)
    assert client.exists(b"k") is False


@contextmanager
def listener(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server of one connection at a time, handled by `serve`: its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    serve(connection)

        thread = threading.Thread(target=run)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_absent_master_is_unavailable_within_the_deadline() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with within(1.0), Client(address, deadline_s=1.0) as client, pytest.raises(Unavailable, match="no master"):
        client.put(b"k", b"v")


@pytest.mark.promise("failures-typed")
def test_silent_master_fails_within_the_deadline() -> None:
    before_s = time.monotonic()
    with within(0.5), socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with Client(address, deadline_s=0.5) as client, pytest.raises((DeadlineExceeded, Unavailable)):
            client.get(b"k")
    assert time.monotonic() - before_s > 0.4


@pytest.mark.promise("input-untrusted")
def test_master_of_other_protocol_is_named_with_versions() -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(HEADER.pack(MAGIC, VERSION + 1, 2, 1, 0, 0, 0))

    said = rf"version {VERSION + 1}.*{VERSION}"
    with listener(answer) as address, Client(address, deadline_s=DEADLINE_S) as client, pytest.raises(ProtocolError, match=said):
        client.get(b"k")


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00" * 64, bytes(range(256))])
def test_non_master_is_typed_error_without_descriptor_leak(answer: bytes) -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(answer)

    with listener(serve) as address:
        before = descriptors(os.getpid())
        with Client(address, deadline_s=1.0) as client, pytest.raises((ProtocolError, Unavailable)):
            client.get(b"k")
        assert descriptors(os.getpid()) <= before + 1, "the listener's own end may still be open"
