"""Ranks in processes of their own that die or stop in the middle of a hand-over, in either role."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvstore.handover.config import HandoverSettings
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.protocol.errors import DeadlineExceeded, KVStoreError, Unreachable
from kvstore.testing.transfer.awaited import within
from tests.handover.scene import Rank, layout_of
from tests.line_child import LineChild

SETTINGS: dict[str, Any] = {"deadline_s": 20.0, "direct_min_bytes": 0, "min_layer_batch_bytes": 0}
LARGE = CacheSpec(layers=8, kv_heads=4, head_dim=64, dtype="float16", block_tokens=64)
"""Blocks of 512 KiB; a pool of 64 has 32 MiB."""
FILL = 5


class Child(LineChild):
    """A rank in another process. A context manager that ends it."""

    def __init__(self, layout: CacheLayout, rank: int, transports: str) -> None:
        arguments = {"layout": layout.to_bytes().hex(), "rank": rank, "settings": SETTINGS, "transports": transports, "fill": FILL}
        super().__init__("tests.handover.rank_child", json.dumps(arguments))
        self.description = bytes.fromhex(self.answer())

    def ask(self, word: str, request_id: str = "", blocks: Sequence[int] = (), tokens: int = 0, peers: Sequence[bytes] = ()) -> Any:
        return self.tell(json.dumps([word, request_id, list(blocks), tokens, [peer.hex() for peer in peers]]))


@contextmanager
def own_rank(layout: CacheLayout, rank: int, transports: str, **more: Any) -> Iterator[Rank]:
    own = Rank(layout, rank, HandoverSettings(**{**SETTINGS, **more}), transports=transports)
    try:
        yield own
    finally:
        own.close()


TRANSPORTS = pytest.mark.parametrize("transports", ["tcp", "shm,tcp"])


@TRANSPORTS
def test_killed_sender_rank_ends_the_request_everywhere(transports: str) -> None:
    """Rank 0 of the sender is here, rank 1 in the child; the receiver is here."""
    pair = layout_of(tp=2)
    with Child(pair, 1, transports) as child, own_rank(pair, 0, transports) as first, own_rank(layout_of(), 0, transports) as receiver:
        descriptions = [first.transceiver.describe(), child.description]
        first.transceiver.join(descriptions)
        child.ask("join", peers=descriptions)
        source = receiver.transceiver.connect(descriptions)
        receiving = receiver.transceiver.receive(b"r", [0, 1], tokens=32, source=source)
        sending = first.transceiver.send(b"r", [0, 1], tokens=32)
        child.ask("send", "r", [0, 1], 32)
        sending.layer_ready(0)
        with within(1):
            child.kill()
            for handover in (sending, receiving):
                with pytest.raises(Unreachable):
                    handover.wait()
        assert isinstance(first.outcome_of(b"r"), Unreachable)
        with within(1), pytest.raises(Unreachable):
            receiver.transceiver.receive(b"next", [0, 1], tokens=32, source=source).wait()


@TRANSPORTS
def test_killed_receiver_rank_ends_the_request_everywhere(transports: str) -> None:
    """Rank 0 of the receiver is in the child, rank 1 here; the sender is here."""
    pair = layout_of(tp=2)
    with Child(pair, 0, transports) as child, own_rank(pair, 1, transports) as second, own_rank(layout_of(), 0, transports) as sender:
        descriptions = [child.description, second.transceiver.describe()]
        second.transceiver.join(descriptions)
        child.ask("join", peers=descriptions)
        source = [sender.transceiver.describe()]
        receiving = second.transceiver.receive(b"r", [0, 1], tokens=32, source=second.transceiver.connect(source))
        child.ask("receive", "r", [0, 1], 32, source)
        sending = sender.transceiver.send(b"r", [0, 1], tokens=32)
        sending.layer_ready(0)
        with within(1):
            child.kill()
            for handover in (sending, receiving):
                with pytest.raises(Unreachable):
                    handover.wait()
        assert isinstance(second.outcome_of(b"r"), Unreachable)
        check_next(sender, second.layout, transports)


def check_next(sender: Rank, layout: CacheLayout, transports: str) -> None:
    """The rank that is left gives its cache to others."""
    with own_rank(layout_of(), 0, transports) as other:
        source = other.transceiver.connect([sender.transceiver.describe()])
        receiving = other.transceiver.receive(b"next", [2, 3], tokens=32, source=source)
        sending = sender.transceiver.send(b"next", [0, 1], tokens=32)
        sending.all_ready()
        sending.wait()
        receiving.wait()


@pytest.mark.promise("handover-fenced")
@pytest.mark.parametrize("transports", ["tcp"])
def test_a_sender_that_stops_in_the_middle_writes_nothing_later(transports: str) -> None:
    """The receiver ends at its deadline and reuses its blocks for another request; then the sender resumes."""
    layout = layout_of(LARGE, pool_blocks=64)
    blocks, tokens = list(range(64)), 64 * 64
    with Child(layout, 0, transports) as child, own_rank(layout, 0, transports) as receiver:
        [memory] = receiver.memory
        memory[:] = 1
        source = receiver.transceiver.connect([child.description])
        for attempt in range(20):
            request_id = f"attempt {attempt}"
            child.ask("send", request_id, blocks, tokens)
            receiving = receiver.transceiver.receive(request_id.encode(), blocks, tokens=tokens, source=source, deadline_s=1.0)
            child.ask("ready", request_id)
            while not receiving.is_over and not (memory[::4096] != 1).any():
                pass
            child.stop()
            with within(1):
                error = _error_of(receiving)
            if error is None:  # it had been too quick
                child.go_on()
                memory[:] = 1
                continue
            assert isinstance(error, DeadlineExceeded)
            assert receiving.is_fenced
            memory[:] = 9
            child.go_on()
            assert child.ask("wait", request_id) == "DeadlineExceeded"
            assert (memory == 9).all()
            break
        else:
            pytest.fail("the sender was never stopped in the middle")
        child.ask("send", "next", blocks, tokens)
        receiving = receiver.transceiver.receive(b"next", blocks, tokens=tokens, source=source)
        child.ask("ready", "next")
        receiving.wait()
        assert (memory == FILL).all()


def _error_of(handover: Any) -> KVStoreError | None:
    try:
        handover.wait()
    except KVStoreError as error:
        return error
    return None


@TRANSPORTS
def test_suspended_receiver_does_not_take_another_requests_data(transports: str) -> None:
    """The sender ends at its deadline and reuses its blocks for another request; then the receiver resumes."""
    layout = layout_of(LARGE, pool_blocks=64)
    blocks, tokens = list(range(64)), 64 * 64
    with Child(layout, 0, transports) as child, own_rank(layout, 0, transports, way="auto") as sender:
        [memory] = sender.memory
        for attempt in range(4):
            memory[:] = 3
            request_id = f"attempt {attempt}"
            child.ask("receive", request_id, blocks, tokens, [sender.transceiver.describe()])
            sending = sender.transceiver.send(request_id.encode(), blocks, tokens=tokens, deadline_s=0.3)
            sending.all_ready()
            sending._over.wait(0.003 * attempt)
            child.stop()
            error = _error_of(sending)
            memory[:] = 9
            child.go_on()
            told = child.ask("wait", request_id)
            assert told in ((None,) if error is None else ("DeadlineExceeded", "Unreachable"))
            assert told is not None or child.ask("is filled with", tokens=3)


@TRANSPORTS
def test_a_receiver_that_stops_does_not_keep_the_senders_blocks(transports: str) -> None:
    with Child(layout_of(), 0, transports) as child, own_rank(layout_of(), 0, transports) as sender:
        child.ask("receive", "r", [0, 1], 32, [sender.transceiver.describe()])
        child.stop()
        sending = sender.transceiver.send(b"r", [0, 1], tokens=32, deadline_s=0.5)
        sending.all_ready()
        with within(0.5), pytest.raises((DeadlineExceeded, Unreachable)):
            sending.wait()
        assert sending.is_fenced
        child.go_on()
        assert child.ask("wait", "r") in ("DeadlineExceeded", "Unreachable")
        check_next(sender, layout_of(), transports)
