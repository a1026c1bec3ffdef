"""How a request ends on a rank, on either side: its movements end, and its peers' leave to reach memory does; then it is over.

The order is the fence: what peers may still write or read goes first, and the caller is told last.
"""

from collections.abc import Callable, Sequence
from typing import Final

from kvstore.handover.movements.operations import Movement
from kvstore.handover.movements.windows import Window
from kvstore.protocol.errors import KVStoreError
from kvstore.rpc.reactor import Reactor, Timer

FIRST_LOOK_S: Final = 0.001
LONGEST_LOOK_S: Final = 0.02
"""Nobody tells when the last peer has left a region: looks at it are this far apart at most."""


class Ending:
    """See the module. Not thread-safe: the reactor's thread is the only caller. `on_over(is_fenced)` is called once: False if something
    still moved after `fence_timeout_s`."""

    def __init__(self, reactor: Reactor, fence_timeout_s: float, on_over: Callable[[bool], None]) -> None:
        self._reactor = reactor
        self._fence_timeout_s = fence_timeout_s
        self._on_over = on_over
        self._windows: Sequence[Window] = ()
        self._movements: set[Movement] = set()
        self._give_up_ns = 0
        self._pause_s = FIRST_LOOK_S
        self._is_ending = self._is_over = False
        self._timer: Timer | None = None

    def expire_at(self, deadline_ns: int, callback: Callable[[], None]) -> None:
        """Call `callback` at the request's deadline, unless it ends before."""
        self._timer = self._reactor.call_at(deadline_ns, callback)

    def track(self, movement: Movement, on_end: Callable[[KVStoreError | None], None]) -> None:
        """Begin a movement, without whose end the request is not over."""

        def ended(error: KVStoreError | None) -> None:
            self._movements.discard(movement)
            on_end(error)
            if self._is_ending:
                self._look()

        self._movements.add(movement)
        movement.begin(ended)

    def begin(self, windows: Sequence[Window], *, is_failed: bool, moves_until_ns: int = 0) -> None:
        """The request is over but for what still moves: cancel that if it failed. A second time is a no-op.

        `fence_timeout_s` counts from now, or from `moves_until_ns` where something moves that no cancelling ends before.
        """
        if self._is_ending:
            return
        self._is_ending = True
        self._windows = windows
        self._give_up_ns = max(self._reactor.now_ns(), moves_until_ns) + int(self._fence_timeout_s * 1e9)
        if self._timer is not None:
            self._timer.cancel()
        try:
            if is_failed:
                for movement in list(self._movements):
                    movement.cancel()
        finally:  # a movement at fault must not keep the request from ever being over
            self._look_again()

    def _look(self) -> bool:
        """Whether it is over by now."""
        if not self._is_over:
            are_closed = [window.close() for window in self._windows]
            is_fenced = all(are_closed) and not self._movements
            if is_fenced or self._reactor.now_ns() >= self._give_up_ns:
                self._is_over = True
                self._on_over(is_fenced)
        return self._is_over

    def _look_again(self) -> None:
        if not self._look():
            self._reactor.call_later(self._pause_s, self._look_again)
            self._pause_s = min(2 * self._pause_s, LONGEST_LOOK_S)
