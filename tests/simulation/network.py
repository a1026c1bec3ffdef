"""The simulated network: streams between processes, as TCP and Unix sockets provide them.

- Data of one connection arrives in order, in pieces of any size, after any delay. Connections overtake one another.
- A lost packet is a delay.
- Each direction between two hosts can be cut: data then waits, and an end breaks the connection when its timeout passes without data.
- The death of a process closes its connections; a host that vanishes leaves them open.
"""

import itertools
import socket
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Protocol

from kvstore.protocol.errors import KVStoreError, ProtocolError
from kvstore.protocol.frames import HEADER_BYTES, unpack_header
from kvstore.protocol.messages import MESSAGES
from kvstore.rpc.address import Address
from kvstore.rpc.reactor import READABLE, WRITABLE
from tests.simulation.memory import Descriptors
from tests.simulation.world import MS, Host, Process, S, Thread, World

FIRST_FD: Final = 1_000_000
_TIMEVAL: Final = struct.Struct("@ll")
_PEEK: Final = int(socket.MSG_PEEK)
_DONTWAIT: Final = int(socket.MSG_DONTWAIT)
NEVER_NS: Final = 3600 * S


def _words(item: "tuple[bytes, tuple[int, ...]] | None") -> str:
    """Format a sent item for a trace."""
    if item is None:
        return "hangs up"
    try:
        header = unpack_header(memoryview(item[0]), 0)
    except (ProtocolError, struct.error):
        return f"{len(item[0])} bytes"
    body = memoryview(item[0])[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
    try:
        return f"#{header.request_id} {MESSAGES[header.type].unpack(body)}"[:300]
    except (KVStoreError, KeyError):
        return f"#{header.request_id} of type {header.type}"


class File(Protocol):
    """File object that a reactor watches."""

    watcher: Callable[[int], None] | None

    def ready(self) -> int: ...


class Listener:
    """A listening socket."""

    def __init__(self, network: "Network", process: Process, name: tuple[str, int] | str) -> None:
        self.network, self.process, self.name = network, process, name
        self.watcher: Callable[[int], None] | None = None
        self._backlog: deque[SimSocket] = deque()
        self._fd = network.open(self)
        process.on_death.append(self.close)

    def fileno(self) -> int:
        return self._fd

    def setblocking(self, flag: bool) -> None:
        pass

    def getsockname(self) -> tuple[str, int]:
        assert isinstance(self.name, tuple)
        return self.name

    def ready(self) -> int:
        return READABLE if self._backlog else 0

    def connected(self, sock: "SimSocket") -> None:
        self._backlog.append(sock)
        if self.watcher is not None:
            self.watcher(self._fd)

    def accept(self) -> "tuple[SimSocket, object]":
        if not self._backlog:
            raise BlockingIOError
        return self._backlog.popleft(), None

    def close(self) -> None:
        self.network.listeners.pop(self.name, None)
        for sock in self._backlog:
            sock.close()
        self._backlog.clear()


class SimSocket:
    """One end of a connection, with what the product uses of `socket.socket`, blocking or not."""

    def __init__(self, network: "Network", process: Process, family: int, label: str) -> None:
        self.network, self.process, self.family, self.label = network, process, family, label
        self.world = network.world
        self.watcher: Callable[[int], None] | None = None
        self.peer: SimSocket
        self.is_open = True
        self.error: OSError | None = None
        self.timeout_ns = NEVER_NS
        """After which it gives up a peer whose host is silent."""
        self._fd = network.open(self)
        self._inbox: deque[memoryview] = deque()
        self._descriptors: deque[int] = deque()
        self._is_eof = False
        self._receive_timeout_ns: int | None = None
        self._waiting: tuple[Thread, int] | None = None
        self._is_blocking = True
        self.last_arrival_ns = 0
        self.stalled: deque[tuple[bytes, tuple[int, ...]] | None] = deque()
        """Items that this end has sent and the network has not carried; None is the end of the stream."""
        process.on_death.append(self.close)

    # --- as the product uses it ---

    def fileno(self) -> int:
        return self._fd if self.is_open else -1

    def setblocking(self, flag: bool) -> None:
        self._is_blocking = flag

    def settimeout(self, seconds: float | None) -> None:
        self._is_blocking = seconds != 0.0

    def getpeername(self) -> tuple[str, int]:
        return self.peer.process.host.name, 0

    def getsockname(self) -> tuple[str, int]:
        return self.process.host.name, 0

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("iII", self.peer.process.pid, 0, 0)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        if option == socket.SO_RCVTIMEO and isinstance(value, bytes):
            seconds, micros = _TIMEVAL.unpack(value)
            self._receive_timeout_ns = seconds * S + micros * 1000
        elif level == socket.IPPROTO_TCP and option == socket.TCP_KEEPIDLE and isinstance(value, int):
            self.timeout_ns = 2 * value * S  # kvstore.rpc.keepalive has it at half

    def detach(self) -> int:
        return self._fd

    def shutdown(self, how: int) -> None:
        self.close()

    def send(self, data: Any, flags: int = 0) -> int:
        return self.sendmsg([data])

    def sendall(self, data: Any) -> None:
        self.sendmsg([data])

    def sendmsg(self, buffers: Iterable[Any], ancillary: Sequence[tuple[int, int, Any]] = ()) -> int:
        self._check()
        data = b"".join(buffers)
        fds = tuple([self.network.descriptors.dup(fd) for _, _, passed in ancillary for fd in passed]) if ancillary else ()
        self.network.carry(self, (data, fds))
        return len(data)

    def recv(self, size: int, flags: int = 0) -> bytes:
        room = bytearray(size)
        got = self.recv_into(memoryview(room), 0, flags)
        return bytes(room[:got])

    def recv_into(self, room: Any, size: int = 0, flags: int = 0) -> int:
        return self._take([room], flags) if self._inbox or self._awaits(flags) else 0

    def recvmsg_into(self, rooms: Sequence[Any], space: int = 0, flags: int = 0) -> tuple[int, list[tuple[int, int, bytes]], int, None]:
        got = self._take(rooms, flags) if self._inbox or self._awaits(flags) else 0
        if not (got and space and self._descriptors):
            return got, [], 0, None
        passed = array("i", self._descriptors)
        self._descriptors.clear()
        return got, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed.tobytes())], 0, None

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.network.hang_up(self)
            for fd in self._descriptors:
                self.network.descriptors.close(fd)
            self._descriptors.clear()

    def _awaits(self, flags: int) -> bool:
        """Something to read, or the end. Raises BlockingIOError where it is neither, and may not be waited for or has not come in time."""
        while not self._inbox:
            self._check()
            if self._is_eof:
                return False
            if not self._is_blocking or flags & _DONTWAIT:
                raise BlockingIOError
            if not self.world.block(self._receive_timeout_ns, self._wait):
                raise BlockingIOError  # SO_RCVTIMEO is over
        return True

    def _wait(self, thread: Thread, token: int) -> None:
        self._waiting = thread, token

    def _check(self) -> None:
        if not self.is_open:
            raise OSError(9, "Bad file descriptor")
        if self.error is not None:
            raise self.error

    def _take(self, rooms: Sequence[Any], flags: int) -> int:
        got, inbox = 0, self._inbox
        if flags & _PEEK:
            rooms[0][:1] = inbox[0][:1]
            return 1
        for room in rooms:
            view, filled, room_bytes = memoryview(room), 0, len(room)
            while filled < room_bytes and inbox:
                piece = inbox[0]
                size, left = len(piece), room_bytes - filled
                if size <= left:
                    view[filled : filled + size] = piece
                    inbox.popleft()
                else:
                    size = left
                    view[filled:] = piece[:size]
                    inbox[0] = piece[size:]
                filled += size
            got += filled
        return got

    # --- as the network uses it ---

    def ready(self) -> int:
        if not self.is_open:
            return 0
        return WRITABLE | (READABLE if self._inbox or self._is_eof or self.error is not None else 0)

    def arrived(self, item: tuple[bytes, tuple[int, ...]] | None) -> None:
        """Receive a piece, or None if the other end has closed the connection."""
        if not self.is_open:
            if item is not None:
                for fd in item[1]:
                    self.network.descriptors.close(fd)
                self.network.refuse(self)
            return
        if item is None:
            self._is_eof = True
        else:
            if item[0]:
                self._inbox.append(memoryview(item[0]))
            self._descriptors.extend(item[1])
        self._notify()

    def broken(self, error: OSError) -> None:
        if self.is_open and self.error is None:
            self.error = error
            self._notify()

    def _notify(self) -> None:
        if self._waiting is not None:
            (thread, token), self._waiting = self._waiting, None
            thread.wake(token, True)
        if self.watcher is not None:
            self.watcher(self._fd)


class Network:
    """Listeners and connections of a world, and what is cut between its hosts."""

    def __init__(self, world: World, descriptors: Descriptors) -> None:
        self.world = world
        self.descriptors = descriptors
        self.files: dict[int, Any] = {}
        self.listeners: dict[tuple[str, int] | str, Listener] = {}
        self.cuts: dict[tuple[str, str], int] = {}
        """(from, to): how many faults cut this direction now; only those that are cut."""
        self.connections: list[SimSocket] = []
        """The connecting end of each."""
        self.max_delay_ns = MS
        self.loss = 0.0
        """Share of pieces that are sent again after a while."""
        self._fds = itertools.count(FIRST_FD)
        self._pruned_at = 64

    def open(self, file: File) -> int:
        fd = next(self._fds)
        self.files[fd] = file
        return fd

    def listen(self, name: tuple[str, int] | str) -> Listener:
        if name in self.listeners:
            raise OSError(98, f"{name} is in use")
        listener = self.listeners[name] = Listener(self, self.world.here, name)
        return listener

    def connect(self, address: Address, *, timeout_s: float, source: str = "") -> SimSocket:
        """kvstore.rpc.address.connect."""
        process, timeout_ns = self.world.here, int(timeout_s * S)
        name: tuple[str, int] | str = f"{process.host.name}:{address.unix}" if address.unix else (address.host, address.port)
        host = process.host.name if address.unix else address.host
        trip_ns = 2 * self._delay_ns(process.host.name, host)
        began_ns = self.world.now_ns
        while self._is_cut(process.host.name, host) or self._is_cut(host, process.host.name):
            left_ns = timeout_ns - (self.world.now_ns - began_ns)
            if left_ns <= 0:
                raise TimeoutError
            self.world.block(min(left_ns, S // 5))  # SYNs are sent again
        if trip_ns > timeout_ns:
            self.world.block(timeout_ns)
            raise TimeoutError
        self.world.block(trip_ns)
        listener = self.listeners.get(name)
        if listener is None or not listener.process.is_alive:
            raise ConnectionRefusedError(111, "Connection refused")
        family = socket.AF_UNIX if address.unix else socket.AF_INET
        label = f"{process.name}>{listener.process.name}"
        ours, theirs = SimSocket(self, process, family, label), SimSocket(self, listener.process, family, label)
        ours.peer, theirs.peer = theirs, ours
        self._remember(ours)
        listener.connected(theirs)
        return ours

    def _remember(self, sock: SimSocket) -> None:
        if len(self.connections) >= self._pruned_at:
            self.connections = [each for each in self.connections if each.is_open or each.peer.is_open]
            self._pruned_at = 2 * len(self.connections) + 64
        self.connections.append(sock)

    # --- streams ---

    def carry(self, sock: SimSocket, item: tuple[bytes, tuple[int, ...]] | None) -> None:
        source, target, world = sock.process.host.name, sock.peer.process.host.name, self.world
        if world.lines is not None:
            world.note(f"{sock.process.name} -> {sock.peer.process.name}: {_words(item)}")
        if sock.stalled or self._is_cut(source, target):
            sock.stalled.append(item)
            return
        delay_ns = self._delay_ns(source, target)
        if self.loss and source != target and world.random() < self.loss:
            delay_ns += world.rng.randrange(200 * MS, 600 * MS)
        at_ns = max(world.now_ns + delay_ns, sock.last_arrival_ns)
        if item is not None and len(item[0]) > 1 and world.random() < 0.02:  # in two pieces, cut anywhere
            cut = world.rng.randrange(1, len(item[0]))
            self._arrive(sock, at_ns, (item[0][:cut], item[1]))
            at_ns += delay_ns
            item = item[0][cut:], ()
        self._arrive(sock, at_ns, item)

    def _arrive(self, sock: SimSocket, at_ns: int, item: tuple[bytes, tuple[int, ...]] | None) -> None:
        sock.last_arrival_ns = at_ns
        self.world.push(at_ns, None, partial(sock.peer.arrived, item))

    def hang_up(self, sock: SimSocket) -> None:
        if not getattr(sock.process.host, "is_gone", False):
            self.carry(sock, None)

    def refuse(self, sock: SimSocket) -> None:
        """Bytes came to an end that is closed: the sender's end breaks."""
        peer = sock.peer
        if not self._is_cut(sock.process.host.name, peer.process.host.name):
            delay_ns = self._delay_ns(sock.process.host.name, peer.process.host.name)
            self.world.after(delay_ns, lambda: peer.broken(ConnectionResetError(104, "Connection reset by peer")))

    def _delay_ns(self, source: str, target: str) -> int:
        most_ns = MS // 10 if source == target else self.max_delay_ns
        least_ns = most_ns // 10
        return least_ns + int(self.world.random() * (most_ns - least_ns))

    # --- faults ---

    def _is_cut(self, source: str, target: str) -> bool:
        return source != target and (source, target) in self.cuts

    def cut(self, source: Host, target: Host) -> None:
        """Nothing gets from one to the other."""
        way = source.name, target.name
        self.cuts[way] = self.cuts.get(way, 0) + 1
        for sock in self._between(source.name, target.name):
            for end in (sock, sock.peer):
                self.world.after(end.timeout_ns, lambda end=end: self._expire(end))  # type: ignore[misc]

    def heal(self, source: Host, target: Host) -> None:
        way = source.name, target.name
        self.cuts[way] -= 1
        if self.cuts[way]:
            return
        del self.cuts[way]
        for sock in self._between(source.name, target.name):
            for end in (sock, sock.peer):
                if end.process.host.name == source.name and end.stalled:
                    stalled, end.stalled = list(end.stalled), deque()
                    end.last_arrival_ns = max(end.last_arrival_ns, self.world.now_ns + self.world.rng.randrange(10 * MS, 300 * MS))
                    for item in stalled:
                        self.carry(end, item)

    def reset(self, sock: SimSocket) -> None:
        """A connection breaks at both ends, and what was on its way is lost."""
        error = ConnectionResetError(104, "Connection reset by peer")
        sock.broken(error)
        sock.peer.broken(error)

    def _expire(self, end: SimSocket) -> None:
        here, there = end.process.host.name, end.peer.process.host.name
        if self._is_cut(here, there) or self._is_cut(there, here):
            end.broken(TimeoutError(110, "Connection timed out"))

    def _between(self, source: str, target: str) -> list[SimSocket]:
        pair = {source, target}
        return [sock for sock in self.connections if {sock.process.host.name, sock.peer.process.host.name} == pair]
