"""A rank whose main thread is struck by signals whose handler raises: `python -m tests.handover.struck_rank ROLE TRANSPORTS STRIKES`.

It transfers cache with a rank in another process until a handler has raised STRIKES times within the transceiver's calls. It prints its
findings as a line of JSON. Every tenth request is not struck and must succeed.
"""

import contextlib
import json
import random
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from kvstore.handover.config import HandoverSettings
from kvstore.handover.handles import Handover
from kvstore.handover.transceiver import CacheTransceiver
from kvstore.protocol.errors import Cancelled
from kvstore.testing.transfer.awaited import eventually
from tests.handover.scene import Rank, layout_of
from tests.handover.test_processes import FILL, LARGE, SETTINGS, Child
from tests.signals import MAX_OF_ONE

BLOCKS, TOKENS = list(range(4)), 4 * 64
"""2 MiB."""
OURS, MARK = 3, 9
LONGEST_S = 0.006
"""Of the time to a storm's first signal: a hand-over takes about as long."""


class Struck(BaseException):
    """Raised by the handler: no Exception, like KeyboardInterrupt."""


class Storm:
    """Signals whose handler raises only while one of the `watched` functions runs, not after its return."""

    def __init__(self, watched: list[Callable[..., Any]], seed: int) -> None:
        self._codes = {function.__code__ for function in watched}
        self._random = random.Random(seed)
        self._again_s = 0.0
        self._left = 0
        self.raised = 0
        signal.signal(signal.SIGALRM, self._strike)

    def _strike(self, number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code not in self._codes:
            frame = frame.f_back
        self.raised += frame is not None
        self._left -= 1
        # The number of signals is limited: under constant signals neither a handler nor a slow machine makes progress.
        signal.setitimer(signal.ITIMER_REAL, self._again_s if self._left > 0 else 0.0)
        if frame is not None:
            raise Struck

    def over(self, act: Callable[[], None]) -> bool:
        """Run `act` in the storm. Return True if a signal struck it."""
        self._again_s, self._left = self._random.choice((2e-5, 2e-4, 1e-3, 0.0)), MAX_OF_ONE
        signal.setitimer(signal.ITIMER_REAL, self._random.uniform(1e-5, LONGEST_S))
        try:
            act()
        except Struck:
            return True
        finally:
            self._again_s = 0.0
            signal.setitimer(signal.ITIMER_REAL, 0)
        return False


WATCHED: list[Callable[..., Any]] = [CacheTransceiver.send, CacheTransceiver.receive, Handover.wait]


class Requests:
    """One after another between this rank and the child's."""

    def __init__(self, role: str, child: Child, rank: Rank) -> None:
        self._is_receiver, self._child, self._rank = role == "receiver", child, rank
        self._peers = [rank.transceiver.describe()]
        self._source = rank.transceiver.connect([child.description])
        self._handle: Handover | None = None
        self.count = 0
        self.begun: set[bytes] = set()
        self.touched = 0
        """Times that the pool was written, or given to the peer as the request's, after a call had raised."""
        self.unfinished = 0
        """Times that a `wait` was struck before its first instruction, which is as before the call: it is called again."""

    def begin_child(self) -> str:
        self.count += 1
        name = f"r{self.count}"
        if self._is_receiver:
            self._child.ask("send", name, BLOCKS, TOKENS)
            self._child.ask("ready", name)
        else:
            self._child.ask("receive", name, BLOCKS, TOKENS, self._peers)
        return name

    def hand_over(self, name: str) -> None:
        """Send or receive the request and wait for it: the calls that signals strike."""
        self._handle = None
        transceiver = self._rank.transceiver
        if self._is_receiver:
            self._handle = transceiver.receive(name.encode(), BLOCKS, tokens=TOKENS, source=self._source)
        else:
            self._handle = sending = transceiver.send(name.encode(), BLOCKS, tokens=TOKENS)
            sending.all_ready()
        self._handle.wait()

    def check_struck(self, name: str) -> None:
        handle = self._handle
        if handle is not None and not handle.is_over:
            self.unfinished += 1
            handle.cancel()
            with contextlib.suppress(Cancelled):
                handle.wait()
        if handle is not None:
            assert handle.is_fenced
            self.begun.add(name.encode())
        [memory] = self._rank.memory
        memory[:] = MARK
        self._child.ask("cancel", name)
        told = self._child.ask("wait", name)
        if self._is_receiver:
            self.touched += not (memory == MARK).all()
        else:
            self.touched += told is None and not self._child.ask("is blocks", name, BLOCKS, OURS)

    def check_well(self, name: str) -> None:
        self.begun.add(name.encode())
        [memory] = self._rank.memory
        assert self._child.ask("wait", name) is None
        if self._is_receiver:
            assert (memory[: len(BLOCKS) * LARGE.block_bytes] == FILL).all()
        else:
            assert self._child.ask("is blocks", name, BLOCKS, OURS)


def hand_over(role: str, transports: str, strikes: int) -> dict[str, Any]:
    layout, storm = layout_of(LARGE, pool_blocks=4), Storm(WATCHED, strikes)
    with Child(layout, 0, transports) as child:
        rank = Rank(layout, 0, HandoverSettings(**SETTINGS), transports=transports)
        requests = Requests(role, child, rank)
        struck = 0
        while storm.raised < strikes or struck <= strikes // 20:
            for memory in rank.memory:
                memory[:] = OURS
            name = requests.begin_child()
            is_calm = requests.count % 10 == 0
            if is_calm:
                requests.hand_over(name)
            if not is_calm and storm.over(partial(requests.hand_over, name)):
                struck += 1
                requests.check_struck(name)
            else:
                requests.check_well(name)
        finished: set[bytes] = set()

        def all_finished() -> bool:
            finished.update(outcome.request_id for outcome in rank.transceiver.finished())
            return finished >= requests.begun

        eventually(all_finished, "the outcome of every request that was begun")
        eventually(lambda: rank.transceiver.early_request_count == 0, "the peer to give up what never began")  # its word is on its way
        left = [rank.transceiver.staging_bytes, sum(region.users for region in rank.regions)]
        rank.close()
    return {"touched": requests.touched, "struck": struck, "unfinished": requests.unfinished, "left": left}


def close(transports: str, strikes: int) -> dict[str, Any]:
    """A transceiver is closed in the middle of a request, in the storm."""
    layout, storm = layout_of(LARGE, pool_blocks=4), Storm([CacheTransceiver.close], strikes)
    touched = struck = closed = 0
    with Child(layout, 0, transports) as child:
        threads = threading.active_count()
        while storm.raised < strikes:
            rank = Rank(layout, 0, HandoverSettings(**SETTINGS), transports=transports)
            requests = Requests("receiver", child, rank)
            requests.count = closed = closed + 1
            name = requests.begin_child()
            receiving = rank.transceiver.receive(name.encode(), BLOCKS, tokens=TOKENS, source=rank.transceiver.connect([child.description]))
            is_struck = storm.over(rank.transceiver.close)
            if is_struck and not receiving.is_over:  # before its first instruction
                rank.transceiver.close()
            struck += is_struck
            assert receiving.is_fenced
            requests._handle = receiving
            requests.check_struck(name)
            touched += requests.touched
            rank.close()
            eventually(lambda: threading.active_count() <= threads, "the threads of the transceiver to end")
    return {"touched": touched, "struck": struck}


def main() -> None:
    role, transports, strikes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    print(json.dumps(close(transports, strikes) if role == "close" else hand_over(role, transports, strikes)), flush=True)


if __name__ == "__main__":
    main()
