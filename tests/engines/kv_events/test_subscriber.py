"""Promises of subscriber.py, over real sockets: every batch once and in order, or word that some are lost."""

import contextlib
from collections.abc import Iterator

import pytest
import zmq

from kvstore.engines.kv_events.events import BlocksRemoved, Event
from kvstore.engines.kv_events.subscriber import Subscriber
from kvstore.protocol.errors import DeadlineExceeded, InvalidArgument, ProtocolError
from tests.engines.kv_events.publisher import Publisher


class Heard:
    """A subscriber, and what it has handed on: numbers of batches, and "lost"."""

    def __init__(self, publisher: Publisher, *, replay_endpoint: str, replay_timeout_s: float = 60.0) -> None:
        self.subscriber = Subscriber(publisher.endpoint, replay_endpoint, replay_timeout_s=replay_timeout_s)
        self.story: list[int | str] = []

    def apply(self, events: list[Event]) -> None:
        [event] = events
        assert isinstance(event, BlocksRemoved)
        [name] = event.hashes
        assert isinstance(name, int)
        self.story.append(name)

    def lost(self) -> None:
        self.story.append("lost")

    def until(self, last: int) -> list[int | str]:
        while not self.story or self.story[-1] != last:
            self.subscriber.take(60.0, self.apply, self.lost)
        return self.story


@pytest.fixture
def heard(publisher: Publisher) -> Iterator[Heard]:
    with listening(publisher) as found:
        yield found


@contextlib.contextmanager
def listening(publisher: Publisher, replay_endpoint: str | None = None, replay_timeout_s: float = 60.0) -> Iterator[Heard]:
    endpoint = publisher.replay_endpoint if replay_endpoint is None else replay_endpoint
    found = Heard(publisher, replay_endpoint=endpoint, replay_timeout_s=replay_timeout_s)
    publisher.await_subscriber()
    with contextlib.closing(found.subscriber):
        yield found


def batch(number: int) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": [number], "medium": "GPU"}


def publish(publisher: Publisher, *numbers: int, is_lost: bool = False, is_kept: bool = True) -> None:
    for number in numbers:
        publisher.publish(batch(number), is_lost=is_lost, is_kept=is_kept)


def played(publisher: Publisher, heard: Heard, script: str) -> str:
    """The story of a subscriber to which this happens, verbs and numbers of batches: "publish" (each arrives), "lose" (can be replayed),
    "drop" (cannot), "take" (up to this one), "forget" (cannot be replayed any more), "restart", "catch-up"."""
    for line in script.split(", "):
        verb, *words = line.split()
        numbers = [int(word) for word in words]
        match verb:
            case "publish" | "lose" | "drop":
                publish(publisher, *numbers, is_lost=verb != "publish", is_kept=verb != "drop")
            case "take":
                heard.until(*numbers)
            case "forget":
                del publisher.kept[numbers[0]]
            case "restart":
                publisher.begin_again()
            case "catch-up":
                heard.subscriber.catch_up(heard.apply, heard.lost)
    return " ".join(map(str, heard.story))


@pytest.mark.parametrize(
    ("script", "story"),
    [
        pytest.param("publish 0 1 2, take 2", "lost 0 1 2", id="in order; before the first nothing is known"),
        pytest.param("publish 0, drop 1, lose 2, publish 3, take 3", "lost 0 lost 2 3", id="gap that cannot be replayed"),
        pytest.param("publish 0, lose 1, drop 2, publish 3, take 3", "lost 0 1 lost 3", id="gap behind what is replayed"),
        pytest.param("publish 0 1 2, take 2, restart, lose 10, publish 11, take 11", "lost 0 1 2 lost 10 11", id="restarted engine"),
        pytest.param(
            "publish 0 1, take 1, restart, lose 10 11 12, publish 13, take 13",
            "lost 0 1 lost 10 11 12 13",
            id="restart whose first number looks like a gap",
        ),
        pytest.param("publish 0, take 0, lose 1 2, catch-up, publish 3, take 3", "lost 0 1 2 3", id="catch_up applies what was lost"),
        pytest.param("publish 0 1 2, catch-up, publish 3, take 3", "lost 0 1 2 3", id="catch_up takes no batch twice"),
        pytest.param("publish 0 1, take 1, restart, catch-up", "lost 0 1 lost", id="catch_up voids what a restarted engine had"),
    ],
)
def test_subscriber_hands_on_each_batch_once_or_says_lost(publisher: Publisher, heard: Heard, script: str, story: str) -> None:
    assert played(publisher, heard, script) == story
    heard.subscriber.take(0.01, heard.apply, heard.lost)
    assert " ".join(map(str, heard.story)) == story, "nothing comes twice"


def test_publisher_that_forgot_the_last_batch_is_asked_for_all(publisher: Publisher, heard: Heard) -> None:
    assert played(publisher, heard, "publish 0, take 0, forget 0, lose 1, publish 2, take 2") == "lost 0 lost 1 2"
    assert publisher.asked == [0, 0]


@pytest.mark.parametrize(
    ("script", "story"), [("publish 0, lose 1, publish 2, take 2", "lost 0 lost 2"), ("publish 0, take 0, catch-up", "lost 0 lost")]
)
def test_subscriber_without_replays_voids_at_a_gap(publisher: Publisher, script: str, story: str) -> None:
    with listening(publisher, replay_endpoint="") as heard:
        assert played(publisher, heard, script) == story
    assert publisher.asked == []


def test_subscriber_replays_what_came_before_it(publisher: Publisher) -> None:
    publish(publisher, 0, 1, 2, is_lost=True)
    with listening(publisher) as heard:
        publish(publisher, 3)
        assert heard.until(3) == ["lost", 0, 1, 2, 3]
    assert publisher.asked == [0]


@pytest.mark.parametrize("topics", [True, False])
def test_gap_is_replayed_in_both_forms(topics: bool) -> None:
    """With a topic frame in each message of the replay, and without one."""
    with Publisher(topics=topics) as publisher, listening(publisher) as heard:
        assert played(publisher, heard, "publish 0, lose 1 2, publish 3 4, take 4") == "lost 0 1 2 3 4"
        assert publisher.asked == [0], "from the last batch taken on, which the publisher still has"


def test_malformed_replay_keeps_the_batch_that_showed_the_gap(publisher: Publisher, heard: Heard) -> None:
    publish(publisher, 0)
    heard.until(0)
    publish(publisher, 1, is_lost=True)
    publisher.kept[1] = b"\xc1"
    publish(publisher, 2)
    with pytest.raises(ProtocolError, match="no batch of KV events"):
        heard.until(2)
    assert heard.story == ["lost", 0, "lost", 2]
    publish(publisher, 3, 4, is_lost=True)
    publisher.kept[3] = b"\xc1"
    with pytest.raises(ProtocolError, match="no batch of KV events"):
        heard.subscriber.catch_up(heard.apply, heard.lost)
    assert heard.story == ["lost", 0, "lost", 2, "lost", 4]


def test_malformed_batch_is_rejected_and_voids_known_blocks(publisher: Publisher, heard: Heard) -> None:
    publish(publisher, 0)
    heard.until(0)
    publisher.send((1).to_bytes(8, "big"), b"\xc1")
    with pytest.raises(ProtocolError, match="no batch of KV events"):
        heard.until(1)
    publisher.send(b"short", b"")
    with pytest.raises(ProtocolError, match="has 3 parts"):
        heard.until(1)
    publisher.number = 2
    publish(publisher, 2)
    assert heard.until(2) == ["lost", 0, "lost", 2]


def test_what_cannot_be_applied_makes_all_void_and_ends_nothing(publisher: Publisher, heard: Heard) -> None:
    publish(publisher, 0)
    heard.until(0)

    def refuse(events: list[Event]) -> None:
        raise InvalidArgument("token ids do not fit int32")

    publish(publisher, 1)
    with pytest.raises(InvalidArgument):
        heard.subscriber.take(60.0, refuse, heard.lost)
    publish(publisher, 2)
    assert heard.until(2) == ["lost", 0, "lost", 2]


def test_a_replay_that_is_not_answered_ends_with_its_time(publisher: Publisher) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        silent.bind("tcp://127.0.0.1:0")
        with listening(publisher, silent.getsockopt_string(zmq.LAST_ENDPOINT), replay_timeout_s=0.05) as heard:
            with pytest.raises(DeadlineExceeded, match="did not end its replay"):
                played(publisher, heard, "lose 0, publish 1, take 1")
            assert heard.story == ["lost", "lost", 1]
            for script in ("catch-up", "publish 2, take 2"):
                with pytest.raises(DeadlineExceeded):
                    played(publisher, heard, script)
            assert heard.story[-1] == 2, "all is asked for again, since all was void"


def test_malformed_endpoint_is_refused(publisher: Publisher) -> None:
    with pytest.raises(InvalidArgument, match="is no ZeroMQ address"):
        Subscriber("127.0.0.1", "", replay_timeout_s=1.0)
    with listening(publisher, "tcp://:") as malformed, pytest.raises(InvalidArgument, match="is no ZeroMQ address"):
        malformed.subscriber.catch_up(malformed.apply, malformed.lost)
