"""Promises of index.py, with publishers on real sockets: the table has what live engines publish."""

import contextlib
from collections.abc import Iterator

import pytest

from kvstore.engines.publisher.index import EngineBlockIndex
from kvstore.engines.publisher.prefix_table import Context, Service
from kvstore.protocol.errors import InvalidArgument
from tests.engines.kv_events.publisher import Publisher
from tests.system.running import until

CONTEXT = Context("default", "m", "", "", 2)
TOKENS = list(range(10))


@pytest.fixture
def index() -> Iterator[EngineBlockIndex]:
    with contextlib.closing(EngineBlockIndex(None, verify_s=0.05, replay_timeout_s=60.0)) as found:
        yield found


def service(publisher: Publisher, *, replays: bool = True) -> Service:
    return Service(CONTEXT, "a", 0, publisher.endpoint, publisher.replay_endpoint if replays else "")


def store(publisher: Publisher, start: int, stop: int) -> None:
    hashes = [100 + index for index in range(start, stop)]
    publisher.publish(["BlockStored", hashes, 99 + start if start else None, TOKENS[2 * start : 2 * stop], 2, None, "GPU"])


def blocks(index: EngineBlockIndex) -> int:
    return index.match(CONTEXT, TOKENS)["a"].longest // 2


def test_registered_engine_is_followed_from_its_first_event_on(publisher: Publisher, index: EngineBlockIndex) -> None:
    store(publisher, 0, 2)
    index.add(service(publisher))
    index.add(service(publisher))
    publisher.await_subscriber()
    until(lambda: blocks(index) == 2, "what was stored before")
    store(publisher, 2, 5)
    until(lambda: blocks(index) == 5, "what was stored since")
    removed = index.remove("a|default|0")
    assert removed is not None
    assert removed.instance == "a"
    assert index.remove("a|default|0") is None


def test_engine_without_replay_is_followed_from_its_next_event(publisher: Publisher, index: EngineBlockIndex) -> None:
    index.add(service(publisher, replays=False))
    publisher.await_subscriber()
    store(publisher, 0, 2)
    until(lambda: blocks(index) == 2, "what was stored")


def test_restarted_engine_has_nothing_before_it_publishes(publisher: Publisher, index: EngineBlockIndex) -> None:
    index.add(service(publisher))
    publisher.await_subscriber()
    store(publisher, 0, 2)
    until(lambda: blocks(index) == 2, "what was stored")
    publisher.begin_again()
    until(lambda: blocks(index) == 0, "nothing of the engine that was before")


def test_dead_engine_has_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(EngineBlockIndex(None, verify_s=0.05, replay_timeout_s=0.5)) as index:
        with Publisher() as publisher:
            index.add(service(publisher))
            publisher.await_subscriber()
            until(lambda: bool(publisher.asked), "its question for what was before")
            store(publisher, 0, 2)
            until(lambda: blocks(index) == 2, "what was stored")
        until(lambda: blocks(index) == 0, "nothing of an engine that does not answer")
        until(lambda: "did not end its replay" in caplog.text, "why")


def test_what_cannot_be_registered_leaves_no_subscription(publisher: Publisher, index: EngineBlockIndex) -> None:
    index.add(service(publisher))
    with pytest.raises(InvalidArgument, match="with other members"):
        index.add(service(publisher, replays=False))
    with pytest.raises(InvalidArgument, match="no ZeroMQ address"):
        index.add(Service(CONTEXT, "b", 0, "10.0.0.1:5557", ""))
    assert index.services == 1
