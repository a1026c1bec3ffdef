"""client/local/fast_puts.py against a running cluster: one message per put, and the ordinary path for all other
cases."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client
from kvstore.client.connections.uncommitted_puts import UncommittedPuts
from kvstore.protocol.errors import DeadlineExceeded, Draining, Full, KVStoreError, TierFailed, Unavailable
from kvstore.protocol.node_messages import RETRY_LATER
from kvstore.rpc.client.channel import Channel
from kvstore.testing.transfer.awaited import eventually
from kvstore.transfer.config import TransferSettings
from tests.client.local.test_reads import Requests
from tests.client.processes import Cluster, cluster


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as started:
        started.start_node("--dram", "64MiB")
        yield started


@pytest.fixture
def client(running: Cluster) -> Iterator[Client]:
    with Client(running.address) as client:
        client.put(os.urandom(16), b"the first goes the usual way, and opens the connection")
        yield client


class Interrupt(BaseException):
    pass


def test_a_plain_put_needs_nothing_of_the_generators(client: Client) -> None:
    key, above = os.urandom(16), os.urandom(16)
    requests = Requests(client)
    assert client.put(key, b"value", namespace="ns", parent=above) is True
    assert client.put(key, b"other") is False
    assert requests.count == 0
    assert client.get(key) == b"value"
    client.flush()
    assert [location.size_bytes for location in client.locate([key])[0]] == [5]


def test_present_block_is_noted_as_uncommitted(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    are_locked: list[bool] = []

    def noted(uncommitted: UncommittedPuts, name: str, value: Any) -> None:
        if name == "has_unhinted":
            are_locked.append(uncommitted._lock.locked())
        object.__setattr__(uncommitted, name, value)

    key = os.urandom(16)
    client.put(key, b"value")
    client.flush()
    monkeypatch.setattr(UncommittedPuts, "__setattr__", noted)
    assert client.put(key, b"value", ack="cluster") is False
    assert are_locked == []
    assert client.put(key, b"value") is False
    assert are_locked == [True]


def test_threads_put_at_once_and_every_block_is_there(client: Client) -> None:
    keys = [[os.urandom(16) for _ in range(200)] for _ in range(4)]

    def put(mine: list[bytes]) -> None:
        for key in mine:
            client.put(key, key * 8)

    threads = [threading.Thread(target=put, args=(mine,)) for mine in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = [key for mine in keys for key in mine]
    assert client.get_batch(everything) == [key * 8 for key in everything]


@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket")
def test_what_a_handler_raises_comes_out_and_the_next_put_works(client: Client) -> None:
    """A signal during the wait for a reply closes that connection, because its reply would be taken for the next one's.
    A connection that was not handed out yet is dropped with the interrupted call."""
    seen = 0

    def strike(_number: int, _frame: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, strike)
    try:
        for number in range(200):
            key = os.urandom(16)
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 * (1 + number % 20))  # within the call, however fast the machine is
                client.put(key, key)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                seen += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert client.get(key) in (key, None)
            client.put(key, key)
            assert client.get(key) == key
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen, "no signal struck"


def test_a_node_that_hung_up_is_asked_anew(tmp_path: Path) -> None:
    with cluster(tmp_path) as started:
        node = started.start_node("--dram", "64MiB")
        with Client(started.address, deadline_s=20) as client:
            client.put(b"first", b"1")
            client.put(b"second", b"2")
            node.stop(signal.SIGKILL)
            with pytest.raises(KVStoreError) as told:
                client.put(b"third", b"3", deadline_s=2)
            assert isinstance(told.value, (Unavailable, DeadlineExceeded))
            started.start_node("--dram", "64MiB")

            def put() -> bool:
                try:
                    return client.put(b"fourth", b"4", deadline_s=2) or client.get(b"fourth") == b"4"
                except KVStoreError:
                    return False

            eventually(put, "a put to the node that took the other's place")


@pytest.fixture
def far(running: Cluster) -> Iterator[Client]:
    """A client that reaches the node as one of another host."""
    with Client(running.address, transfer=TransferSettings(transports="tcp")) as client:
        client.put(os.urandom(16), b"the first is reserved, and opens the connection")
        client.put(os.urandom(16), bytes(4096))
        yield client


def test_put_to_another_host_needs_nothing_of_the_generators(running: Cluster, far: Client) -> None:
    key, value = os.urandom(16), os.urandom(4096)
    far._operations.local.cached_fresh = 1 << 62, ()  # nodes of this host are not to be looked for meanwhile
    requests = Requests(far)
    assert far.put(key, value, namespace="ns", parent=os.urandom(16)) is True
    assert far.put(key, b"o" * 4096) is False
    assert far.get(key) == value
    assert requests.count == 0
    far.flush()
    with Client(running.address) as other:
        assert other.get(key) == value


@pytest.mark.parametrize("refusal", [RETRY_LATER, Draining("it ends"), Full("no room"), TierFailed("no memory")], ids=repr)
def test_what_another_host_refuses_is_reserved(far: Client, monkeypatch: pytest.MonkeyPatch, refusal: int | KVStoreError) -> None:
    asked: list[int] = []

    def refuse(_channel: Channel, *_arguments: Any) -> int:
        asked.append(1)
        if isinstance(refusal, KVStoreError):
            raise refusal
        return refusal

    key = os.urandom(16)
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "call_for_flag", refuse)
        assert far.put(key, b"v" * 4096)
        assert asked == [1]
    assert far.get(key) == b"v" * 4096
