"""TCP forwarder between a publisher and its subscribers, which a test can cut: what is published meanwhile is lost."""

import contextlib
import select
import socket
import threading
from typing import Self


class Wire:
    """A context manager; it listens on a free port of the loopback."""

    def __init__(self, target: str) -> None:
        """`target`: tcp://HOST:PORT."""
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._is_cut = threading.Event()
        self._has_hung_up = threading.Event()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def cut(self) -> None:
        """Close both sides of each connection, and each new connection, until `mend`."""
        self._is_cut.set()
        assert self._has_hung_up.wait(60)

    def mend(self) -> None:
        self._has_hung_up.clear()
        self._is_cut.clear()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending.set()
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while not self._is_ending.is_set():
            if self._is_cut.is_set():
                self._hang_up()
                self._has_hung_up.set()
            for ready in select.select([self._listener, *self._pairs], [], [], 0.05)[0]:
                if ready is self._listener:
                    self._accept()
                elif ready in self._pairs:
                    self._forward(ready)
        self._hang_up()

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        if self._is_cut.is_set():
            near.close()
            return
        far = socket.create_connection(self._target)
        self._pairs |= {near: far, far: near}

    def _forward(self, ready: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if data := ready.recv(1 << 16):
                self._pairs[ready].sendall(data)
                return
        self._hang_up()

    def _hang_up(self) -> None:
        for each in self._pairs:
            each.close()
        self._pairs.clear()
