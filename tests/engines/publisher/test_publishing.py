"""Promises of sockets.py and daemon.py, with a real cluster: what is published is counted, and who is not heard is named."""

import contextlib
import signal
from collections.abc import Iterator

import pytest

from kvstore.client import Client
from kvstore.client.config import ClientSettings
from kvstore.client.recorder import Recorder
from kvstore.engines.publisher import daemon as signals
from kvstore.engines.publisher.config import VLLM
from kvstore.engines.publisher.daemon import add_publisher_signals, readings
from kvstore.engines.publisher.form import EventForm
from kvstore.engines.publisher.index import EngineBlockIndex
from kvstore.engines.publisher.sockets import EventPublisher, PublishingSockets
from kvstore.telemetry.http.server import HttpServer
from kvstore.telemetry.metrics.metric import PUBLISHER
from tests.client.processes import Cluster
from tests.system.running import until
from tests.telemetry.http.asking import ask

DEADLINE_S = 120.0


@pytest.fixture
def publishing(store: Cluster) -> Iterator[EventPublisher]:
    sockets = PublishingSockets("tcp://127.0.0.1:*", "", topic="", kept_batches=10)
    try:
        with Recorder(ClientSettings(master=store.address), lambda _: None) as recorder:
            yield EventPublisher(recorder, sockets, EventForm(VLLM), interval_s=0.001)
    finally:
        sockets.close()


@pytest.fixture
def index() -> Iterator[EngineBlockIndex]:
    with contextlib.closing(EngineBlockIndex(None)) as found:
        yield found


def test_what_is_published_is_counted_and_told_as_listed(store: Cluster, publishing: EventPublisher, index: EngineBlockIndex) -> None:
    with Client(store.address) as client:
        client.put_batch([b"one", b"two"], [b"1", b"2"])
        client.flush()
        client.remove([b"two"])

        def published() -> bool:
            publishing.round()
            return publishing.recorder.counts.removed == 1

        until(published, "the removal", DEADLINE_S)
    found = readings(publishing, index)
    assert found.keys() == {metric.name for metric in PUBLISHER}
    assert found["kvstore_publisher_stored_blocks"] == 2
    assert 1 <= publishing.batches <= 3
    publishing.round()
    assert publishing.batches == found["kvstore_publisher_batches"], "nothing happened: nothing is published"


def test_readiness_and_liveness_follow_nodes_and_rounds(
    store: Cluster, publishing: EventPublisher, index: EngineBlockIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = HttpServer("127.0.0.1:0")
    add_publisher_signals(server, publishing, index)
    server.start()
    try:
        assert [ask(server.address, path).status for path in ("/healthz", "/readyz", "/metrics")] == [200, 200, 200]
        store.nodes[0].stop(signal.SIGKILL)

        def missed() -> bool:
            publishing.round()
            return bool(publishing.recorder.unreachable)

        until(missed, "the node is missed", DEADLINE_S)
        told = ask(server.address, "/readyz")
        assert (told.status, told.text) == (503, "node n0 does not respond with its events\n")
        monkeypatch.setattr(signals, "HANGS_S", -1.0)
        assert ask(server.address, "/healthz").status == 503
    finally:
        server.close()
