"""Tests of partition.py: real threads and a real loop."""

import threading
from collections.abc import Iterator, Sequence

import pytest

from kvstore.master.catalogs.interface import CatalogOwner, Change, Op
from kvstore.master.leadership.partition import EventLoopBridge
from kvstore.protocol.errors import Corrupt, KVStoreError, StaleEpoch
from kvstore.rpc.reactor import Reactor
from kvstore.testing.transfer.awaited import PATIENCE_S, in_background, is_quiet

OWNER = CatalogOwner("m", "m:1", 7)
WHY = StaleEpoch("over")


class Heard:
    """A Follower that records its calls and their threads."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.threads: set[int] = set()
        self.refusal: Exception = Corrupt("a damaged record")

    def _keep(self, what: object) -> None:
        self.told.append(what)
        self.threads.add(threading.get_ident())

    def begin(self) -> None:
        self._keep("begin")

    def take(self, changes: Sequence[Change]) -> None:
        if not changes:
            raise self.refusal
        self._keep(changes)

    def owned_by(self, owner: CatalogOwner | None) -> None:
        self._keep(owner)

    def elected(self, epoch: int) -> None:
        self._keep(epoch)

    def deposed(self, why: KVStoreError) -> None:
        self._keep(why)


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    made = Reactor()
    yield made
    made.close()


def test_what_a_catalog_tells_is_heard_in_the_loop_in_its_order(reactor: Reactor) -> None:
    heard, changes = Heard(), [Op(b"k", b"v")]
    relay = EventLoopBridge(reactor, heard, on_failure=heard.told.append)

    def tell() -> None:
        relay.begin()
        relay.take(changes)
        relay.owned_by(OWNER)
        relay.owned_by(None)
        relay.elected(8)
        relay.deposed(WHY)

    telling = in_background(tell)
    while not telling.done():
        reactor.run_once(0.01)
    assert heard.told == ["begin", changes, OWNER, None, 8, WHY]
    assert heard.threads == {threading.get_ident()}


def test_call_waits_for_the_loop_or_close(reactor: Reactor) -> None:
    heard = Heard()
    relay = EventLoopBridge(reactor, heard, on_failure=heard.told.append)
    telling = in_background(relay.begin)
    assert is_quiet(telling)
    relay.close()
    telling.result(PATIENCE_S)
    relay.begin()
    reactor.run_once(0.0)
    assert heard.told == [], "a closed relay carries nothing, not even what waited"


@pytest.mark.parametrize(
    ("refusal", "told"), [(Corrupt("a damaged record"), "a damaged record"), (MemoryError("full"), "internal error: MemoryError: full")]
)
def test_follower_failure_is_reported_once(reactor: Reactor, refusal: Exception, told: str) -> None:
    heard, failures = Heard(), list[KVStoreError]()
    heard.refusal = refusal
    relay = EventLoopBridge(reactor, heard, on_failure=failures.append)

    def tell() -> None:
        relay.take([])
        relay.take([])
        relay.begin()

    telling = in_background(tell)
    while not telling.done():
        reactor.run_once(0.01)
    assert ([str(failure) for failure in failures], heard.told) == ([told], [])
