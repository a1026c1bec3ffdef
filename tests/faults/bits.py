"""Bits that change by themselves: in the memory of a process, in a file, on a connection."""

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

_LINE: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+\s*(.*)")
PIECE_BYTES: Final = 64 << 10


class Memory:
    """Of a running process, its mappings of one kind of memfd. Needs leave to trace it (root)."""

    def __init__(self, pid: int, memfd: str) -> None:
        self._pid = pid
        self._memfd = f"/memfd:{memfd}"

    def find(self, content: bytes) -> list[int]:
        """Addresses where the content lies."""
        found = []
        with open(f"/proc/{self._pid}/mem", "rb", buffering=0) as memory:
            for begin, end in self._mappings():
                memory.seek(begin)
                try:
                    text = memory.read(end - begin)
                except OSError:  # unmapped since it was listed
                    continue
                found += [begin + place for place in _places(text, content)]
        return found

    def flip(self, address: int, bit: int = 0) -> None:
        """Change one bit, as failing memory does, without a notification."""
        with open(f"/proc/{self._pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(address)
            [byte] = memory.read(1)
            memory.seek(address)
            memory.write(bytes([byte ^ 1 << bit]))

    def _mappings(self) -> Iterator[tuple[int, int]]:
        for line in Path(f"/proc/{self._pid}/maps").read_text().splitlines():
            match = _LINE.match(line)
            if match is not None and match[4].startswith(self._memfd) and "w" in match[3]:
                yield int(match[1], 16), int(match[2], 16)


def flip_in_file(file: Path, content: bytes, offset: int, bit: int = 0) -> int:
    """Change one bit in each place of the file where the content lies, so many bytes behind its beginning: how many there are."""
    text = file.read_bytes()
    places = [place + offset for place in _places(text, content)]
    with file.open("r+b", buffering=0) as opened:
        for place in places:
            opened.seek(place)
            opened.write(bytes([text[place] ^ 1 << bit]))
    return len(places)


def _places(text: bytes, content: bytes) -> Iterator[int]:
    """Yield the offsets at which the content begins. `re` takes ten times as long."""
    place = text.find(content)
    while place >= 0:
        yield place
        place = text.find(content, place + len(content))


class Wire:
    """A listener that passes connections on to another address, and what is said on them. A context manager; `port` is where it listens."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.damage: Callable[[bytearray], None] = lambda piece: None
        """Changes a piece of what is said, either way, in a thread of its own each."""
        self._socks: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._socks += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := bytearray(source.recv(PIECE_BYTES)):
                self.damage(content)
                sink.sendall(content)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
