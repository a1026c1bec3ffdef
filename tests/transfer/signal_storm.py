"""Transfers of a main thread under a storm of signals whose handler raises: `-m tests.transfer.signal_storm TRANSPORTS DIRECTION COUNT`.

Interrupts transfers with another process until COUNT exceptions were raised. Prints a line of JSON: how often memory
was touched after a call had raised, how often a handler raised, and whether transfers still work without signals.
"""

import json
import random
import signal
import sys
from collections.abc import Callable
from types import FrameType

from kvstore.protocol.settings import Size
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from tests.line_child import LineChild

SIZE = 256 << 10
LONGEST_S = 0.003
"""Of the time to the next signal: a transfer takes about as long."""
STRIKES = 4
"""Signals of one storm: without an end to them nothing else would run."""


class Struck(Exception):
    """Raised by the handler."""


class Storm:
    """The handler raises wherever it finds `watched` under way, and only there: so code after a call is not interrupted."""

    def __init__(self, watched: Callable[..., object], seed: int, *, longest_s: float = LONGEST_S) -> None:
        self._code = watched.__code__
        self._random = random.Random(seed)
        self._longest_s = longest_s
        self._left = 0
        self._is_on = False
        """A signal may arrive after its timer was stopped."""
        self.raised = 0
        signal.signal(signal.SIGALRM, self._strike)

    def _strike(self, number: int, frame: FrameType | None) -> None:
        while frame is not None and self._is_on:
            if frame.f_code is self._code:
                self.raised += 1
                self._arm()
                raise Struck
            frame = frame.f_back

    def _arm(self) -> None:
        if self._left:
            self._left -= 1
            signal.setitimer(signal.ITIMER_REAL, self._random.choice((1e-5, self._random.uniform(1e-5, self._longest_s))))

    def over(self, act: Callable[[], None]) -> bool:
        """Run `act` in the storm. Return True if it raised Struck."""
        self._left, self._is_on = STRIKES, True
        self._arm()
        try:
            act()
        except Struck:
            return True
        finally:
            self._is_on = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        return False


def main() -> None:
    transports, direction, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    storm = Storm(TransferEngine.transfer, count)
    settings = TransferSettings(transports=transports, rails="lo", slice_bytes=Size(64 << 10), shm_slice_bytes=Size(64 << 10))
    came_out = touched = 0
    with LineChild("tests.transfer.engine_child", transports) as child, TransferEngine("struck", settings) as engine:
        description, shared, *_ = (bytes.fromhex(text) for text in child.answer())
        peer = engine.connect(description)
        remote = engine.import_region(peer, shared)
        ours = engine.allocate(SIZE)
        theirs, marks, blank, found = bytes([1]) * SIZE, bytes([2]) * SIZE, bytes(SIZE), bytearray(SIZE)

        def read() -> None:
            engine.transfer([(remote, ours, SIZE)])

        def write() -> None:
            engine.transfer([(ours, remote, SIZE)])

        engine.transfer([(theirs, remote, SIZE)])
        while came_out < count:
            ours.memory[:] = blank
            if not storm.over(read if direction == "read" else write):
                continue
            came_out += 1
            if direction == "read":
                seen = bytes(ours.memory)
                engine.transfer([(remote, found, SIZE)])  # gives a late writer time
                touched += bytes(ours.memory) != seen
            else:
                ours.memory[:] = marks
                engine.transfer([(remote, found, SIZE)])
                touched += marks[0] in found
        users = ours.users
        peer.chooser.check_integrity()
        engine.transfer([(theirs, remote, SIZE)])
        engine.transfer([(remote, found, SIZE)])
        in_flight = sum(state.in_flight_slices for state in peer.chooser.states.values())
    print(json.dumps([touched, storm.raised, users, in_flight, found == theirs]), flush=True)


if __name__ == "__main__":
    main()
