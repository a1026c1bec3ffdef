"""A master of which there is only what it says: who owns the catalog, and answers to questions.

Real sockets; a thread a connection.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise

from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import SERVER_MASTER, Failure, Hello, Welcome
from tests.rpc.wires import frame, read_frame


class StubMaster:
    """Master that listens until it is closed. A test may change its responses at any time."""

    def __init__(self, *, owner: str = "", refusal: KVStoreError | None = None, control: str = "", server: int = SERVER_MASTER) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self.owner = owner
        """Owner that it names; "": it is the owner."""
        self.says_owner: Callable[[], str] = lambda: self.owner
        self.refusal = refusal
        """Response to Hello, in place of a Welcome."""
        self.control = control
        self.server = server
        self.is_silent = False
        """True: it does not respond any more, like a stopped process."""
        self.answer: Callable[[Message], Message | None] = lambda message: None
        """Response to a request; None: no response."""
        self.hellos = 0
        self.asked: list[Message] = []
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._connections.append(sock)
                self._threads.append(threading.Thread(target=self._serve, args=(sock,)))
                self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, EOFError):
            while True:
                header, message, _ = read_frame(sock)
                if isinstance(message, Hello):
                    self.hellos += 1
                    answer: Message | None = Welcome(self.server, self.address, epoch=1, control=self.control, owner=self.says_owner())
                    if self.refusal is not None:
                        answer = Failure(self.refusal.code, str(self.refusal))
                else:
                    self.asked.append(message)
                    answer = self.answer(message)
                if answer is not None and not self.is_silent:
                    sock.sendall(frame(answer, header.request_id))

    def hang_up(self) -> None:
        """On everyone who is connected."""
        for sock in self._connections:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """It is gone: connections are refused. A second close is a no-op."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        self.hang_up()
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def stub_masters(count: int) -> Iterator[list[StubMaster]]:
    """Run `count` masters: each follows the next one, and the last one owns the catalog."""
    masters: list[StubMaster] = []
    try:
        masters += [StubMaster() for _ in range(count)]
        for follower, owner in pairwise(masters):
            follower.owner = owner.address
        yield masters
    finally:
        for master in masters:
            master.close()
