"""One transfer agent and those who are notified through it: listeners and connections of agent_connection.py.

Agents have no wake-up, so somebody has to look for notifications. Whoever waits for one looks, for everybody (the leader), at first
without a pause; the others sleep until it tells them. A thread looks when nobody waits, so that greetings and farewells are answered.
"""

import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Final, Protocol

from kvstore.protocol.errors import Closed, KVStoreError, ProtocolError
from kvstore.transfer.agent import Remote, TransferAgent
from kvstore.transfer.agent_messages import recipient_of
from kvstore.transfer.deadline import Deadline
from kvstore.transfer.memory import Region

LOOKS_AT_ONCE: Final = 8
"""So often a leader looks before it sleeps: an answer on the same host takes less than the shortest sleep, about 70 us."""
FIRST_PAUSE_S: Final = 20e-6
LONGEST_PAUSE_S: Final = 1e-3
IDLE_PAUSE_S: Final = 10e-3
"""Between two looks when nobody waits."""
SEND_TIMEOUT_S: Final = 1.0
"""For a notification that nobody waits for."""
LINGER_S: Final = 1.0
"""So long the last connection of an agent waits for farewells. A peer that lives looks for ours every 10 ms."""

FollowUp = Callable[[], None]
Receiver = Callable[[bytes], FollowUp | None]
"""Takes a message, with the lock held; what it returns is called without the lock."""


class AgentHub:
    """See the module. `changed` is the lock of everything that its receivers change, and is notified when they did. Thread-safe."""

    def __init__(self, agent: TransferAgent) -> None:
        """Owns the agent."""
        self.agent = agent
        self.changed = threading.Condition(threading.Lock())
        self._receivers: dict[int, Receiver] = {}
        self._is_led = False
        self._is_closed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"hub-{agent.name}", daemon=True)
        self._thread.start()

    def attach(self, receiver: Receiver, *, recipient: int | None = None) -> int:
        """Have messages to this recipient brought to `receiver`; its number, which nobody can guess unless one was given."""
        number = secrets.randbits(63) | 1 if recipient is None else recipient
        with self.changed:
            self._receivers[number] = receiver
        return number

    def detach(self, recipient: int) -> None:
        with self.changed:
            self._receivers.pop(recipient, None)

    def wait(self, is_ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `is_ready`, called with the lock held; False when the time is over first. Raises Closed."""
        end_s = time.monotonic() + timeout_s
        while True:
            with self.changed:
                while self._is_led and not self._is_closed and not is_ready():
                    if not self.changed.wait(max(0.0, min(end_s - time.monotonic(), threading.TIMEOUT_MAX))):
                        return is_ready()
                if is_ready():
                    return True
                if self._is_closed:
                    raise Closed(f"the agent {self.agent.name} is closed")
                self._is_led = True
            try:
                return self._lead(is_ready, end_s)
            finally:
                self._let_another_lead()

    def tell(self, remote: Remote, message: bytes) -> bool:
        """Notify a peer that may be gone; False if it is."""
        try:
            self.agent.notify(remote, message, Deadline(SEND_TIMEOUT_S))
        except KVStoreError:
            return False
        return True

    def close(self) -> None:
        """Close the agent; who waits gets Closed. A second close is a no-op."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
        self._stop.set()
        self.agent.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _lead(self, is_ready: Callable[[], bool], end_s: float) -> bool:
        looks, pause_s = 0, FIRST_PAUSE_S
        while True:
            if self._look():
                looks, pause_s = 0, FIRST_PAUSE_S
            with self.changed:
                if is_ready():
                    return True
                if self._is_closed:
                    raise Closed(f"the agent {self.agent.name} is closed")
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            looks += 1
            if looks > LOOKS_AT_ONCE:
                time.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _let_another_lead(self) -> None:
        with self.changed:
            self._is_led = False
            self.changed.notify()

    def _look(self) -> bool:
        """Bring what has come to its receivers; whether there was anything."""
        with suppress(Closed):
            follow_ups: list[FollowUp | None] = []
            messages = self.agent.notifications()
            if messages:
                with self.changed:
                    follow_ups = [self._bring(message) for _, message in messages]
                    self.changed.notify_all()
            for follow_up in follow_ups:
                if follow_up is not None:
                    follow_up()
            return bool(messages)
        return False

    def _bring(self, message: bytes) -> FollowUp | None:
        try:
            receiver = self._receivers.get(recipient_of(message))
        except ProtocolError:
            return None  # nobody to tell: it has no sender that could be answered
        return None if receiver is None else receiver(message)

    def _watch(self) -> None:
        while not self._stop.wait(IDLE_PAUSE_S):
            with self.changed:
                if self._is_led:
                    continue
                self._is_led = True
            try:
                self._look()
            finally:
                self._let_another_lead()


class Guest(Protocol):
    """A connection, to its hub."""

    def free(self) -> None: ...


class SharedHub:
    """A hub and those who use it; the last one closes it."""

    def __init__(self, make_agent: Callable[[str], TransferAgent], *, key: Hashable = None) -> None:
        """With one use."""
        self.hub = AgentHub(make_agent(f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"))
        self._key = key
        self._uses = 1
        self._guests: set[Guest] = set()

    @classmethod
    def of_outgoing(cls, key: Hashable, make_agent: Callable[[str], TransferAgent]) -> "SharedHub":
        """The one of all connections made under this key, with one more use."""
        with _outgoing_lock:
            shared = _outgoing.get(key)
            if shared is None:
                shared = _outgoing[key] = cls(make_agent, key=key)
            else:
                shared._uses += 1
            return shared

    def enter(self, guest: Guest) -> None:
        """One more use, by a connection. Raises Closed."""
        with _outgoing_lock:
            if not self._uses:
                raise Closed(f"the agent {self.hub.agent.name} is closed")
            self._uses += 1
        with self.hub.changed:
            self._guests.add(guest)

    def forget(self, guest: Guest) -> None:
        """The memory of this connection is not in use any more."""
        with self.hub.changed:
            self._guests.discard(guest)
            self.hub.changed.notify_all()

    def release(self) -> None:
        """One use less. After the last one: peers have `LINGER_S` to say that they write into no ring any more, then the agent closes."""
        with _outgoing_lock:
            self._uses -= 1
            if self._uses:
                return
            if self._key is not None:
                del _outgoing[self._key]
        self.hub.wait(lambda: not self._guests, LINGER_S)
        self.hub.close()
        for guest in list(self._guests):
            guest.free()


class RingMemory:
    """Memory for a ring, as a region that every agent can register. Its owner closes it."""

    def __init__(self, size_bytes: int) -> None:
        fd = os.memfd_create("kvstore-ring", os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
        self.region = Region(memoryview(mmap.mmap(fd, size_bytes)), fd=fd)

    def close(self) -> None:
        """Once no transfer uses it any more."""
        self.region.close()
        os.close(self.region.fd)


_outgoing: dict[Hashable, SharedHub] = {}
_outgoing_lock = threading.Lock()
